"""Gallery of ranked results: each query with its best results, framed by relevance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .plots import picture

_FRAMES = {True: "#1A9850", False: "#D73027", None: "#BBBBBB"}
_CELL = 0.84  # side of an image in inches
_CAPTION = 0.27
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
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    columns = max(map(len, rows))
    size = 0.3 + columns * (_CELL + 0.1), 0.5 + len(rows) * (_CELL + _CAPTION)
    with picture(out, *size, overwrite=overwrite, dpi=150) as figure:
        for i, row in enumerate(rows):
            for j, (image, caption, relevant) in enumerate(row):
                axes = figure.add_subplot(len(rows), columns, i * columns + j + 1)
                smoothing = "nearest" if max(image.shape[:2]) < _SMALL else "antialiased"
                axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation=smoothing)
                axes.set(xticks=[], yticks=[])
                colour, line = (_FRAMES[relevant], 2.2) if j else ("#222222", 0.9)
                axes.spines[:].set(visible=True, color=colour, linewidth=line)
                axes.set_xlabel(caption[:14], fontsize=7.5, color="#333333", labelpad=3)
                if i == 0:
                    axes.set_title(str(j or "query"), fontsize=8.5, loc="center", pad=4)
        if any(cell.relevant is not None for row in rows for cell in row):
            figure.supxlabel("green: relevant, red: not relevant", fontsize=8)
    return Path(out)
