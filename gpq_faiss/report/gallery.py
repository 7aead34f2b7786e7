"""Picture of ranked results: each query with its top k, framed by relevance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .figure import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Image = NDArray[np.uint8]

_FRAMES = {True: "#1A9850", False: "#D73027", None: "#BBBBBB"}
_INCH = 100.0  # drawing units per inch: one unit is one pixel at 100 dpi
_CELL, _GAP, _TEXT = 84.0, 10.0, 17.0
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
    title: str | None = None,
    columns: int = 10,
    overwrite: bool = False,
) -> Path:
    """Draw the gallery and write it as .png, .svg or .pdf.

    Args:
        rows: one per query, drawn from top to bottom.
        columns: maximum number of results per query.

    Raises:
        UsageError: another extension, or ``columns`` below 1.
        DataError: no rows, invalid images, or lists of different lengths.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if columns < 1:
        raise UsageError(f"columns={columns}: show one result at least")
    if not rows:
        raise DataError("no queries to draw: give one at least")
    for i, row in enumerate(rows):
        _check(row, f"gallery row {i}")
    shown = min(columns, max(len(row.results) for row in rows))
    labelled = any(row.scores is not None or row.names is not None or row.query_name for row in rows)
    line = _CELL + _GAP + (_TEXT if labelled else 0.0)
    head = 24.0 + (26.0 if title else 0.0)
    first = _CELL + 3.6 * _GAP  # where results begin, beside the query
    width, height = first + shown * (_CELL + _GAP) + _GAP, head + len(rows) * line + 26.0
    with picture(out, width / _INCH, height / _INCH, overwrite=overwrite, dpi=150) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)  # y runs downwards, as in an image
        if title:
            axes.text(_GAP, 20, title, fontsize=11, color="#111111", va="center")
        starts = [first + j * (_CELL + _GAP) for j in range(shown)]
        for x, text in zip((_GAP, *starts), ("query", *map(str, range(1, shown + 1))), strict=True):
            _text(axes, text, x, head - 10, 8.5, "#555555")
        for i, row in enumerate(rows):
            y = head + i * line
            _draw_image(axes, row.query, _GAP, y, "#222222", 1.2)
            _text(axes, row.query_name, _GAP, y + _CELL + 11)
            for j, (x, image) in enumerate(zip(starts, row.results, strict=False)):
                _draw_image(axes, image, x, y, _FRAMES[row.known(j)], 3.0)
                _text(axes, row.text(j, 2), x, y + _CELL + 11)
        axes.plot([first - 1.3 * _GAP] * 2, [head, height - 30], color="#DDDDDD", linewidth=1)
        if any(row.relevant is not None for row in rows):
            for known, text, x in ((True, "relevant", first), (False, "not relevant", first + 84)):
                _frame(axes, x, height - 18, 10, edgecolor=_FRAMES[known], linewidth=1.8)
                axes.text(x + 16, height - 13, text, fontsize=8, color="#333333", va="center")
    return Path(out)


def _check(row: Ranked, where: str) -> None:
    for image in (row.query, *row.results):
        fits = image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)
        if image.dtype != np.uint8 or not fits or not image.size:
            raise DataError(
                f"{where}: images must be uint8 [H, W, 3] or [H, W], not {image.dtype} {image.shape}"
            )
    for what in ("scores", "relevant", "names"):
        values = getattr(row, what)
        if values is not None and len(values) != len(row.results):
            raise DataError(f"{where}: {len(values)} {what} for {len(row.results)} results: give one each")


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


def _text(axes: Axes, text: str, x: float, y: float, size: float = 7.5, colour: str = "#333333") -> None:
    """Write a text in the middle of a cell's width, shortened to it."""
    short = text if len(text) <= 14 else text[:13].rstrip() + "…"
    axes.text(x + _CELL / 2, y, short, fontsize=size, color=colour, ha="center", va="center")
