"""Picture of ranked results: each query with its top k, framed by relevance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .figure import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Image = NDArray[np.uint8]

_FRAMES = {True: "#1A9850", False: "#D73027", None: "#BBBBBB"}
_INCH = 100.0  # drawing units per inch: one unit is one pixel at 100 dpi
_CELL, _GAP, _TEXT = 84.0, 10.0, 17.0
_HEAD = 50.0
_SMALL = 64  # smaller images are drawn without smoothing, which would blur them


@dataclass(frozen=True)
class Ranked:
    """One row of the gallery."""

    query: Image
    """uint8 [H, W, 3] or [H, W] (grey); sizes may differ."""
    results: Sequence[Image]
    """In rank order."""
    scores: Sequence[float] | None = None
    """One per result, printed below it."""
    relevant: Sequence[bool | None] | None = None
    """One per result: green frame for True, red for False, grey for None (unknown)."""
    query_name: str = ""
    names: Sequence[str] | None = None
    """One per result (such as its class), printed before the score."""

    def text(self, j: int, digits: int) -> str:
        """Name and score of result ``j``."""
        name = self.names[j] if self.names is not None else ""
        score = f"{self.scores[j]:.{digits}f}" if self.scores is not None else ""
        return " · ".join(part for part in (name, score) if part)

    def known(self, j: int) -> bool | None:
        """Whether result ``j`` is relevant, if known."""
        return None if self.relevant is None else self.relevant[j]


def save_gallery(
    rows: Sequence[Ranked],
    out: str | Path,
    *,
    title: str = "",
    columns: int = 10,
    overwrite: bool = False,
) -> Path:
    """Draw the gallery, a row per query with at most so many results, and write it as .png, .svg or .pdf.

    Raises:
        UsageError: another extension.
        DataError: no rows.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if not rows:
        raise DataError("no queries to draw: give one at least")
    shown = min(columns, max(len(row.results) for row in rows))
    line, first = _CELL + _GAP + _TEXT, _CELL + 3.6 * _GAP  # results begin at first, beside the query
    width, height = first + shown * (_CELL + _GAP) + _GAP, _HEAD + len(rows) * line + 26.0
    with picture(out, width / _INCH, height / _INCH, overwrite=overwrite, dpi=150) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)  # y runs downwards, as in an image
        axes.text(_GAP, 20, title, fontsize=11, color="#111111", va="center")
        starts = [first + j * (_CELL + _GAP) for j in range(shown)]
        for x, text in zip((_GAP, *starts), ("query", *map(str, range(1, shown + 1))), strict=True):
            _text(axes, text, x, _HEAD - 10, 8.5)
        for i, row in enumerate(rows):
            y = _HEAD + i * line
            _draw_image(axes, row.query, _GAP, y, "#222222", 1.2)
            _text(axes, row.query_name, _GAP, y + _CELL + 11)
            for j, (x, image) in enumerate(zip(starts, row.results, strict=False)):
                _draw_image(axes, image, x, y, _FRAMES[row.known(j)], 3.0)
                _text(axes, row.text(j, 2), x, y + _CELL + 11)
        axes.plot([first - 1.3 * _GAP] * 2, [_HEAD, height - 30], color="#DDDDDD", linewidth=1)
        if any(row.relevant is not None for row in rows):
            for known, text, x in ((True, "relevant", first), (False, "not relevant", first + 84)):
                _frame(axes, x, height - 18, 10, edgecolor=_FRAMES[known], linewidth=1.8)
                axes.text(x + 16, height - 13, text, fontsize=8, color="#333333", va="center")
    return Path(out)


def _draw_image(axes: Axes, image: Image, x: float, y: float, colour: str, line: float) -> None:
    """Draw an image into a cell, keeping its aspect ratio, and the frame around the cell."""
    high, wide = (side * _CELL / max(image.shape[:2]) for side in image.shape[:2])
    left, top = x + (_CELL - wide) / 2, y + (_CELL - high) / 2
    smooth = "nearest" if max(image.shape[:2]) < _SMALL else "antialiased"
    _frame(axes, x, y, _CELL, facecolor="#F2F2F2", edgecolor="none", zorder=1)
    place = (left, left + wide, top + high, top)
    axes.imshow(
        image, extent=place, cmap="gray", vmin=0, vmax=255, zorder=2, aspect="auto", interpolation=smooth
    )
    edge = line / 2
    _frame(axes, x - edge, y - edge, _CELL + line, edgecolor=colour, linewidth=line * 0.72, zorder=3)


def _frame(axes: Axes, x: float, y: float, side: float, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), side, side, **({"facecolor": "none"} | style)))


def _text(axes: Axes, text: str, x: float, y: float, size: float = 7.5) -> None:
    """Write a text in the middle of a cell's width, shortened to it."""
    short = text if len(text) <= 14 else text[:13].rstrip() + "…"
    axes.text(x + _CELL / 2, y, short, fontsize=size, color="#333333", ha="center", va="center")
