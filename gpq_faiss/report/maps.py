"""Panels of points coloured by class: scatter plots, and codebooks on the unit circle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .figure import COLOURS, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL = 3.2  # inches per side
_GREY = "#BBBBBB"


def plot_scatters(
    panels: Mapping[str, tuple[NDArray[np.floating], NDArray[np.integer]]],
    class_names: Sequence[str],
    out: str | Path,
    *,
    title: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Scatter plots of points, one panel per method, coloured by class.

    Args:
        panels: name -> (points [n, 2], classes int [n], -1 for none).
        class_names: of the classes.

    Raises:
        DataError: nothing to draw, or other shapes.
        UsageError, OutputExistsError: as :func:`.plots.plot_curves`.
    """
    with _panels(list(panels), class_names, out, title, overwrite) as all_axes:
        for axes, (name, (points, classes)) in zip(all_axes, panels.items(), strict=True):
            if points.ndim != 2 or points.shape[1] != 2 or classes.shape != (len(points),):
                raise DataError(
                    f"panel {name!r}: points {points.shape} and classes {classes.shape} do not fit"
                )
            _points(axes, points, classes, len(class_names), size=5)
            axes.set_xticks([])
            axes.set_yticks([])
            for side in axes.spines.values():
                side.set_color("#DDDDDD")
    return Path(out)


@dataclass(frozen=True)
class FlatCodebook:
    """A two-dimensional codebook and items to quantise.

    Attributes:
        name: title of its panel.
        codewords: float [K, 2], of length 1.
        points: float [n, 2], of length 1.
        classes: int [n], -1 for none.
    """

    name: str
    codewords: NDArray[np.floating]
    points: NDArray[np.floating]
    classes: NDArray[np.integer]


def cell_borders(codewords: NDArray[np.floating]) -> NDArray[np.float64]:
    """Angles of the borders between the Voronoi cells of unit-norm codewords [K, 2], ascending in [-π, π): float64 [K].

    The cells are sectors; the border of two neighbours on the circle is half-way between them.
    """
    angles = np.sort(np.arctan2(codewords[:, 1], codewords[:, 0]).astype(np.float64))
    middle = (angles + np.append(angles[1:], angles[0] + 2 * math.pi)) / 2
    return np.sort((middle + math.pi) % (2 * math.pi) - math.pi)


def plot_codebooks(
    codebooks: Sequence[FlatCodebook],
    class_names: Sequence[str],
    out: str | Path,
    *,
    title: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Voronoi cells of two-dimensional codebooks: sectors of the unit circle, with codewords and items.

    Items lie on the circle; they are drawn at random distances from it so that they do not overlap.

    Raises:
        DataError: nothing to draw, or codebooks not of 2 dimensions.
        UsageError, OutputExistsError: as :func:`.plots.plot_curves`.
    """
    with _panels([book.name for book in codebooks], class_names, out, title, overwrite) as all_axes:
        for axes, book in zip(all_axes, codebooks, strict=True):
            if book.codewords.ndim != 2 or book.codewords.shape[1] != 2 or book.points.shape[1:] != (2,):
                raise DataError(f"codebook {book.name!r} has {book.codewords.shape[-1]} dimensions, not 2")
            for angle in cell_borders(book.codewords):
                ends = [0, 1.45 * math.cos(angle)], [0, 1.45 * math.sin(angle)]
                axes.plot(*ends, color="#AAAAAA", linewidth=0.7)
            radius = 1 + 0.12 * np.random.default_rng(0).standard_normal(len(book.points)).clip(-2.5, 2.5)
            _points(axes, book.points * radius[:, None], book.classes, len(class_names), size=4)
            axes.plot(
                *book.codewords.T, linestyle="none", marker="*", markersize=10, color="#111111", markeredgecolor="white"
            )  # fmt: skip
            axes.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
            axes.set_axis_off()
    return Path(out)


@contextmanager
def _panels(
    names: Sequence[str], class_names: Sequence[str], out: str | Path, title: str | None, overwrite: bool
) -> Iterator[list[Axes]]:
    """Axes of a figure with a panel for each name, three in a line, and a legend of the classes."""
    if not names:
        raise DataError("nothing to plot: give one panel at least")
    from matplotlib.lines import Line2D

    across = min(len(names), 3)
    down = -(-len(names) // across)
    size = _PANEL * across + 1.4, _PANEL * down + 0.4
    with picture(out, *size, overwrite=overwrite, dpi=120) as figure:  # many points make large files
        all_axes = [figure.add_subplot(down, across, i + 1) for i in range(len(names))]
        yield all_axes
        for axes, name in zip(all_axes, names, strict=True):
            axes.set_title(name, fontsize=10, loc="left")
        handles = [
            Line2D([], [], linestyle="none", marker="o", color=_class_colour(c, len(class_names)), label=name)
            for c, name in enumerate(class_names[:20])
        ]
        figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside right upper")
        if title:
            figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        figure.set_layout_engine("constrained")


def _class_colour(c: int, n: int) -> str:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if n <= len(COLOURS):
        return COLOURS[c]
    return str(to_hex(colormaps["tab20" if n > 10 else "tab10"](c % 20)))


def _points(
    axes: Axes, points: NDArray[np.floating], classes: NDArray[np.integer], n_classes: int, *, size: float
) -> None:
    colours = [_class_colour(int(c), n_classes) if c >= 0 else _GREY for c in classes]
    axes.scatter(points[:, 0], points[:, 1], c=colours, s=size, linewidths=0, alpha=0.75)
