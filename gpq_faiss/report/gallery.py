"""Picture of ranked results: each query with its top k, framed by relevance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .figure import check_picture, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Image = NDArray[np.uint8]

_RIGHT, _WRONG, _PLAIN = "#1A9850", "#D73027", "#BBBBBB"
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
        _check(row, i)
    path = check_picture(out, overwrite=overwrite)
    shown = min(columns, max(len(row.results) for row in rows))
    labelled = any(row.scores is not None or row.names is not None or row.query_name for row in rows)
    texts = _TEXT if labelled else 0.0
    head = 24.0 + (26.0 if title else 0.0)
    divide = 2.6 * _GAP  # between the query and its results
    width = 2 * _GAP + _CELL + divide + shown * (_CELL + _GAP)
    height = head + len(rows) * (_CELL + _GAP + texts) + 26.0
    figure = new_figure(width / _INCH, height / _INCH)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)  # y runs downwards, as in an image
    if title:
        axes.text(_GAP, 20, title, fontsize=11, color="#111111", va="center")
    first = 2 * _GAP + _CELL + divide - _GAP
    axes.text(_GAP + _CELL / 2, head - 10, "query", fontsize=8.5, color="#555555", ha="center", va="center")
    for j in range(shown):
        x = first + j * (_CELL + _GAP) + _CELL / 2
        axes.text(x, head - 10, str(j + 1), fontsize=8.5, color="#555555", ha="center", va="center")
    for i, row in enumerate(rows):
        y = head + i * (_CELL + _GAP + texts)
        _draw_image(axes, row.query, _GAP, y, "#222222", 1.2)
        _label(axes, row.query_name, _GAP, y)
        for j, image in enumerate(row.results[:shown]):
            x = first + j * (_CELL + _GAP)
            known = row.relevant[j] if row.relevant is not None else None
            _draw_image(axes, image, x, y, _PLAIN if known is None else _RIGHT if known else _WRONG, 3.0)
            parts = [row.names[j]] if row.names is not None else []
            parts += [f"{row.scores[j]:.2f}"] if row.scores is not None else []
            _label(axes, " · ".join(parts), x, y)
    axes.plot([first - divide / 2 + 0.5] * 2, [head, height - 30], color="#DDDDDD", linewidth=1)
    if any(row.relevant is not None for row in rows):
        _key(axes, first, height - 13)
    return save_figure(figure, path, dpi=150)


def _check(row: Ranked, i: int) -> None:
    for what, image in [
        ("the query", row.query),
        *((f"result {j}", image) for j, image in enumerate(row.results)),
    ]:
        fits = image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)
        if image.dtype != np.uint8 or not fits or not image.size:
            raise DataError(
                f"gallery row {i}, {what}: images must be uint8 [H, W, 3] or [H, W], not {image.dtype} {image.shape}"
            )
    for what, values in (("scores", row.scores), ("relevant", row.relevant), ("names", row.names)):
        if values is not None and len(values) != len(row.results):
            raise DataError(
                f"gallery row {i}: {len(values)} {what} for {len(row.results)} results: give one each"
            )


def _draw_image(axes: Axes, image: Image, x: float, y: float, colour: str, line: float) -> None:
    """Draw an image into a cell, keeping its aspect ratio, and the frame around the cell."""
    from matplotlib.patches import Rectangle

    high, wide = image.shape[:2]
    scale = _CELL / max(high, wide)
    left, top = x + (_CELL - wide * scale) / 2, y + (_CELL - high * scale) / 2
    axes.add_patch(Rectangle((x, y), _CELL, _CELL, facecolor="#F2F2F2", edgecolor="none", zorder=1))
    axes.imshow(
        image, extent=(left, left + wide * scale, top + high * scale, top), cmap="gray", vmin=0, vmax=255, zorder=2,
        aspect="auto", interpolation="nearest" if max(high, wide) < _SMALL else "antialiased",
    )  # fmt: skip
    edge = line / 2
    axes.add_patch(
        Rectangle(
            (x - edge, y - edge),
            _CELL + line,
            _CELL + line,
            facecolor="none",
            edgecolor=colour,
            linewidth=line * 0.72,
            zorder=3,
        )
    )


def _label(axes: Axes, text: str, x: float, y: float) -> None:
    if text:
        short = text if len(text) <= 14 else text[:13].rstrip() + "…"
        axes.text(
            x + _CELL / 2, y + _CELL + 11, short, fontsize=7.5, color="#333333", ha="center", va="center"
        )


def _key(axes: Axes, x: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    for colour, text, shift in ((_RIGHT, "relevant", 0.0), (_WRONG, "not relevant", 84.0)):
        axes.add_patch(
            Rectangle((x + shift, y - 5), 10, 10, facecolor="none", edgecolor=colour, linewidth=1.8)
        )
        axes.text(x + shift + 16, y, text, fontsize=8, color="#333333", va="center")
