"""Picture of ranked results: each query with its top k, framed by relevance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .plots import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Image = NDArray[np.uint8]

_FRAMES = {True: "#1A9850", False: "#D73027", None: "#BBBBBB"}
_CELL, _BELOW = 0.84, 0.27  # inches
_SMALL = 64  # smaller images are drawn without smoothing, which would blur them


@dataclass(frozen=True)
class Ranked:
    """One row of the gallery."""

    query: Image
    """uint8 [H, W, 3] or [H, W] (grey); sizes may differ."""
    results: Sequence[Image]
    """In rank order."""
    scores: Sequence[float]
    """One per result, printed below it."""
    relevant: Sequence[bool | None]
    """One per result: green frame for True, red for False, grey for None (unknown)."""
    query_name: str
    names: Sequence[str]
    """One per result (such as its class), printed before the score."""


def save_gallery(
    rows: Sequence[Ranked], out: str | Path, *, columns: int = 10, overwrite: bool = False
) -> Path:
    """Draw the gallery, a row per query with at most so many results, and write it as .png, .svg or .pdf.

    Raises:
        UsageError: another extension. DataError: no rows. OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if not rows:
        raise DataError("no queries to draw: give one at least")
    shown = min(columns, max(len(row.results) for row in rows))
    width, height = 0.3 + (1 + shown) * (_CELL + 0.1), 0.5 + len(rows) * (_CELL + _BELOW)
    with picture(out, width, height, overwrite=overwrite, dpi=150, layout=None) as figure:
        grid = figure.subplots(len(rows), 1 + shown, squeeze=False)
        figure.subplots_adjust(
            *(0.1 / width, (0.26 + _BELOW) / height, 1 - 0.1 / width, 1 - 0.24 / height),
            *(0.1 / _CELL, _BELOW / _CELL),
        )

        def draw(axes: Axes, image: Image, name: str, colour: str, line: float) -> None:
            smooth = "nearest" if max(image.shape[:2]) < _SMALL else "antialiased"
            axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation=smooth)
            axes.set_axis_on()
            axes.spines[:].set(visible=True, color=colour, linewidth=line)
            short = name if len(name) <= 14 else name[:13].rstrip() + "…"
            axes.set_xlabel(short, fontsize=7.5, color="#333333", labelpad=3)

        for axes in grid.flat:
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
            axes.set_axis_off()
        for axes, head in zip(grid[0], ("query", *map(str, range(1, shown + 1))), strict=True):
            axes.set_title(head, fontsize=8.5, color="#333333", loc="center", pad=4)
        for row, (query, *others) in zip(rows, grid, strict=True):
            draw(query, row.query, row.query_name, "#222222", 0.9)
            for j, (axes, image) in enumerate(zip(others, row.results, strict=False)):
                name = " · ".join(filter(None, (row.names[j], f"{row.scores[j]:.2f}")))
                draw(axes, image, name, _FRAMES[row.relevant[j]], 2.2)
        if any(known is not None for row in rows for known in row.relevant):
            for known, word, x in ((True, "relevant", 1.1), (False, "not relevant", 2.0)):
                figure.text(x / width, 0.1 / height, f"□ {word}", fontsize=8, color=_FRAMES[known])
    return Path(out)
