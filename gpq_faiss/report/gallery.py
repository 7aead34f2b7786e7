"""Picture of ranked results: each query with its top k, framed by relevance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .plots import picture

_FRAMES = {True: "#1A9850", False: "#D73027", None: "#BBBBBB"}
_CELL, _BELOW = 0.84, 0.27  # inches
_SMALL = 64  # smaller images are drawn without smoothing, which would blur them


class Cell(NamedTuple):
    """An image uint8 [H, W, 3] or [H, W] (grey), of any size, what is printed below it, and whether a result is relevant: a green frame for
    True, red for False, grey for None (unknown)."""

    image: NDArray[np.uint8]
    caption: str
    relevant: bool | None = None


def save_gallery(rows: Sequence[Sequence[Cell]], out: str | Path, *, overwrite: bool = False) -> Path:
    """Draw the gallery, and write it as .png, .svg or .pdf: rows of a query and its results in rank order.

    Raises:
        UsageError: another extension. DataError: no rows. OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if not rows:
        raise DataError("no queries to draw: give one at least")
    shown = max(map(len, rows)) - 1
    width, height = 0.3 + (1 + shown) * (_CELL + 0.1), 0.5 + len(rows) * (_CELL + _BELOW)
    with picture(out, width, height, overwrite=overwrite, dpi=150, layout=None) as figure:
        grid = figure.subplots(len(rows), 1 + shown, squeeze=False)
        figure.subplots_adjust(
            *(0.1 / width, (0.26 + _BELOW) / height, 1 - 0.1 / width, 1 - 0.24 / height),
            *(0.1 / _CELL, _BELOW / _CELL),
        )
        for axes in grid.flat:
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
            axes.set_axis_off()
        for axes, head in zip(grid[0], ("query", *map(str, range(1, shown + 1))), strict=True):
            axes.set_title(head, fontsize=8.5, color="#333333", loc="center", pad=4)
        for row, places in zip(rows, grid, strict=True):
            for axes, (image, name, relevant) in zip(places, row, strict=False):
                smooth = "nearest" if max(image.shape[:2]) < _SMALL else "antialiased"
                axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation=smooth)
                axes.set_axis_on()
                colour, line = ("#222222", 0.9) if axes is places[0] else (_FRAMES[relevant], 2.2)
                axes.spines[:].set(visible=True, color=colour, linewidth=line)
                short = name if len(name) <= 14 else name[:13].rstrip() + "…"
                axes.set_xlabel(short, fontsize=7.5, color="#333333", labelpad=3)
        if any(cell.relevant is not None for row in rows for cell in row):
            for known, word, x in ((True, "relevant", 1.1), (False, "not relevant", 2.0)):
                figure.text(x / width, 0.1 / height, f"□ {word}", fontsize=8, color=_FRAMES[known])
    return Path(out)
