"""Gallery of ranked results: each query with its best results, framed by relevance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .plots import picture

_FRAMES = {True: "#1A9850", False: "#D73027", None: "#BBBBBB"}
_CELL, _CAPTION = 0.84, 0.27  # inches
_SMALL = 64  # smaller images are drawn without smoothing, which would blur them


class Cell(NamedTuple):
    """An image with its caption.

    Attributes:
        image: uint8 [H, W, 3] or [H, W] (grey), of any size.
        caption: text below it.
        relevant: whether a result is relevant (green frame) or not (red); None: unknown (grey).
    """

    image: NDArray[np.uint8]
    caption: str
    relevant: bool | None = None


def save_gallery(
    rows: Sequence[Sequence[Cell]], out: str | Path, *, overwrite: bool = False
) -> Path:
    """Draw rows of a query and its results in rank order, and write them as .png, .svg or .pdf.

    Raises:
        UsageError: another extension.
        DataError: no rows.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if not rows:
        raise DataError("no queries to draw: give one at least")
    columns = max(map(len, rows))
    width, height = 0.3 + columns * (_CELL + 0.1), 0.5 + len(rows) * (_CELL + _CAPTION)
    with picture(out, width, height, overwrite=overwrite, dpi=150, layout=None) as figure:
        grid = figure.subplots(len(rows), columns, squeeze=False)
        figure.subplots_adjust(
            left=0.1 / width,
            bottom=(0.26 + _CAPTION) / height,
            right=1 - 0.1 / width,
            top=1 - 0.24 / height,
            wspace=0.1 / _CELL,
            hspace=_CAPTION / _CELL,
        )
        for axes in grid.flat:
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
            axes.set_axis_off()
        for axes, head in zip(grid[0], ("query", *map(str, range(1, columns))), strict=True):
            axes.set_title(head, fontsize=8.5, color="#333333", loc="center", pad=4)
        for row, row_axes in zip(rows, grid, strict=True):
            for axes, (image, caption, relevant) in zip(row_axes, row, strict=False):
                smoothing = "nearest" if max(image.shape[:2]) < _SMALL else "antialiased"
                axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation=smoothing)
                axes.set_axis_on()
                is_query = axes is row_axes[0]
                colour, line = ("#222222", 0.9) if is_query else (_FRAMES[relevant], 2.2)
                axes.spines[:].set(visible=True, color=colour, linewidth=line)
                short = caption if len(caption) <= 14 else caption[:13].rstrip() + "…"
                axes.set_xlabel(short, fontsize=7.5, color="#333333", labelpad=3)
        if any(cell.relevant is not None for row in rows for cell in row):
            for relevant, text, x in ((True, "relevant", 1.1), (False, "not relevant", 2.0)):
                position = x / width, 0.1 / height
                figure.text(*position, f"□ {text}", fontsize=8, color=_FRAMES[relevant])
    return Path(out)
