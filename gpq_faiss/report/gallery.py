"""Picture of ranked results: each query with its top k, framed by relevance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .plots import picture

Image = NDArray[np.uint8]

_FRAMES = {True: "#1A9850", False: "#D73027", None: "#BBBBBB"}
_INCH = 100.0  # drawing units per inch
_CELL, _GAP, _TEXT, _HEAD = 84.0, 10.0, 17.0, 24.0
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
    line, first = _CELL + _GAP + _TEXT, _CELL + 3.6 * _GAP  # results begin at first, beside the query
    width, height = first + shown * (_CELL + _GAP) + _GAP, _HEAD + len(rows) * line + 26.0
    size = width / _INCH, height / _INCH
    with picture(out, *size, overwrite=overwrite, dpi=150, layout=None) as figure:
        from matplotlib.patches import Rectangle

        axes = figure.add_axes((0, 0, 1, 1))

        def text(value: str, x: float, y: float, fontsize: float) -> None:
            short = value if len(value) <= 14 else value[:13].rstrip() + "…"
            axes.text(x + _CELL / 2, y, short, fontsize=fontsize, color="#333333", ha="center", va="center")

        def cell(image: Image, name: str, x: float, y: float, colour: str, line: float) -> None:
            """An image with its aspect ratio in a framed square, and its name below."""
            side, pixels = _CELL + line, max(image.shape[:2])
            high, wide = (_CELL * n / pixels for n in image.shape[:2])
            left, top = x + (_CELL - wide) / 2, y + (_CELL - high) / 2
            style: dict[str, Any] = {"facecolor": "#F2F2F2", "edgecolor": colour, "linewidth": line * 0.72}
            axes.add_patch(Rectangle((x - line / 2, y - line / 2), side, side, **style))
            place, smooth = (
                (left, left + wide, top + high, top),
                "nearest" if pixels < _SMALL else "antialiased",
            )
            grey: dict[str, Any] = {"cmap": "gray", "vmin": 0, "vmax": 255}
            axes.imshow(image, extent=place, zorder=2, aspect="auto", interpolation=smooth, **grey)
            text(name, x, y + _CELL + 11, 7.5)

        starts = [first + j * (_CELL + _GAP) for j in range(shown)]
        for x, head in zip((_GAP, *starts), ("query", *map(str, range(1, shown + 1))), strict=True):
            text(head, x, _HEAD - 10, 8.5)
        for i, row in enumerate(rows):
            y = _HEAD + i * line
            cell(row.query, row.query_name, _GAP, y, "#222222", 1.2)
            for j, (x, image) in enumerate(zip(starts, row.results, strict=False)):
                text_below = " · ".join(filter(None, (row.names[j], f"{row.scores[j]:.2f}")))
                cell(image, text_below, x, y, _FRAMES[row.relevant[j]], 3.0)
        axes.plot([first - 1.3 * _GAP] * 2, [_HEAD, height - 30], color="#DDDDDD", linewidth=1)
        if any(known is not None for row in rows for known in row.relevant):
            for known, word, x in ((True, "relevant", first), (False, "not relevant", first + 84)):
                axes.text(x, height - 13, f"□ {word}", fontsize=8, color=_FRAMES[known], va="center")
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(height, 0))  # y runs downwards, as in an image
    return Path(out)
