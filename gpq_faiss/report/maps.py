"""Heat maps, scatter plots, codebooks on the unit circle, and line plots of many methods."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError
from .figure import COLOURS, MARKERS, check_picture, new_figure, save_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASHES = ("-", "--", ":")
_PANEL = 3.2  # inches per side
_GREY = "#BBBBBB"


def plot_curves(
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]],
    out: str | Path,
    *,
    x: str,
    y: str,
    title: str | None = None,
    log_x: bool = False,
    overwrite: bool = False,
) -> Path:
    """Line plot of many methods, distinguished by colour and dashes.

    Args:
        curves: name -> (x [P], y [P]).
        x, y: axis labels; ``log_x`` makes the x axis logarithmic.

    Raises:
        UsageError: another extension than .png, .svg or .pdf.
        DataError: nothing to draw, or arrays of different lengths.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    path = check_picture(out, overwrite=overwrite)
    if not curves:
        raise DataError("nothing to plot: give one line at least")
    figure = new_figure(8.0, max(4.2, 0.24 * len(curves)))
    axes = figure.add_subplot()
    style_axes(axes, title, x, y)
    for i, (name, (across, up)) in enumerate(curves.items()):
        a, b = np.asarray(across, np.float64), np.asarray(up, np.float64)
        if a.ndim != 1 or a.shape != b.shape:
            raise DataError(f"line {name!r}: {a.shape} values across and {b.shape} up must be of one length")
        axes.plot(
            a,
            b,
            color=COLOURS[i % len(COLOURS)],
            linestyle=_DASHES[i // len(COLOURS) % len(_DASHES)],
            linewidth=1.7,
            marker=MARKERS[i % len(MARKERS)] if len(a) <= 15 else None,
            markersize=4,
            label=name,
        )
    if log_x:
        axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.set_layout_engine("constrained")
    return save_figure(figure, path)


def plot_heat_map(  # noqa: PLR0913
    values: ArrayLike,
    out: str | Path,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    y: str,
    x: str,
    title: str | None = None,
    digits: int = 3,
    overwrite: bool = False,
) -> Path:
    """Heat map with the values written into the cells; NaN is an empty cell.

    Args:
        values: [R, C].
        rows, columns: names of the R rows and C columns.

    Raises:
        DataError: inconsistent shapes, or no values. UsageError, OutputExistsError: as :func:`plot_curves`.
    """
    path = check_picture(out, overwrite=overwrite)
    table = np.asarray(values, np.float64)
    if table.shape != (len(rows), len(columns)) or not np.isfinite(table).any():
        raise DataError(f"heat map {table.shape}: figures for {len(rows)} x {len(columns)} cells are needed")
    figure = new_figure(1.6 + 0.85 * len(columns), 1.4 + 0.6 * len(rows))
    figure.set_layout_engine("constrained")  # before the colour bar, which shrinks the axes
    axes = figure.add_subplot()
    image = axes.imshow(table, cmap="viridis", aspect="auto")
    low, high = float(np.nanmin(table)), float(np.nanmax(table))
    for i, line in enumerate(table):
        for j, value in enumerate(line):
            if np.isfinite(value):
                dark = value < low + 0.6 * (high - low)
                colour = "white" if dark else "#111111"
                axes.text(j, i, f"{value:.{digits}f}", ha="center", va="center", fontsize=8.5, color=colour)
    axes.set_xticks(range(len(columns)), list(columns), fontsize=9)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    if title:
        # Above a narrow map a long title would be cut off.
        axes.set_title(textwrap.fill(title, 22 + 9 * len(columns)), fontsize=11, loc="left")
    figure.colorbar(image, ax=axes)
    return save_figure(figure, path)


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
        DataError: nothing to draw, or other shapes. UsageError, OutputExistsError: as :func:`plot_curves`.
    """
    path = check_picture(out, overwrite=overwrite)
    if not panels:
        raise DataError("nothing to plot: give one panel at least")
    figure, all_axes = _panels(len(panels))
    for axes, (name, (points, classes)) in zip(all_axes, panels.items(), strict=True):
        if points.ndim != 2 or points.shape[1] != 2 or classes.shape != (len(points),):
            raise DataError(f"panel {name!r}: points {points.shape} and classes {classes.shape} do not fit")
        _points(axes, points, classes, len(class_names), size=5)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xticks([])
        axes.set_yticks([])
        for side in axes.spines.values():
            side.set_color("#DDDDDD")
    _class_legend(figure, class_names)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.set_layout_engine("constrained")
    return save_figure(figure, path, dpi=120)  # many points make large files


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
    following = np.append(angles[1:], angles[0] + 2 * math.pi)
    middle = (angles + following) / 2
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
        DataError: nothing to draw, or codebooks not of 2 dimensions. UsageError, OutputExistsError: as :func:`plot_curves`.
    """
    path = check_picture(out, overwrite=overwrite)
    if not codebooks:
        raise DataError("nothing to plot: give one codebook at least")
    figure, all_axes = _panels(len(codebooks))
    for axes, book in zip(all_axes, codebooks, strict=True):
        if book.codewords.ndim != 2 or book.codewords.shape[1] != 2 or book.points.shape[1:] != (2,):
            raise DataError(f"codebook {book.name!r} has {book.codewords.shape[-1]} dimensions, not 2")
        rng = np.random.default_rng(0)
        radius = 1 + 0.12 * rng.standard_normal(len(book.points)).clip(-2.5, 2.5)
        for angle in cell_borders(book.codewords):
            axes.plot(
                [0, 1.45 * math.cos(angle)], [0, 1.45 * math.sin(angle)], color="#AAAAAA", linewidth=0.7
            )
        _points(axes, book.points * radius[:, None], book.classes, len(class_names), size=4)
        axes.plot(
            *book.codewords.T,
            linestyle="none",
            marker="*",
            markersize=10,
            color="#111111",
            markeredgecolor="white",
        )
        axes.set_title(book.name, fontsize=10, loc="left")
        axes.set_xlim(-1.5, 1.5)
        axes.set_ylim(-1.5, 1.5)
        axes.set_aspect("equal")
        axes.set_axis_off()
    _class_legend(figure, class_names)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.set_layout_engine("constrained")
    return save_figure(figure, path, dpi=120)  # many points make large files


def _panels(n: int) -> tuple[Figure, list[Axes]]:
    columns = min(n, 3)
    lines = -(-n // columns)
    figure = new_figure(_PANEL * columns + 1.4, _PANEL * lines + 0.4)
    return figure, [figure.add_subplot(lines, columns, i + 1) for i in range(n)]


def _class_colour(c: int, n: int) -> str:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if n <= len(COLOURS):
        return COLOURS[c]
    return str(to_hex(colormaps["tab20" if n > 10 else "tab10"](c % 20)))


def _points(
    axes: Axes,
    points: NDArray[np.floating],
    classes: NDArray[np.integer],
    n_classes: int,
    *,
    size: float,
) -> None:
    colours = [_class_colour(int(c), n_classes) if c >= 0 else _GREY for c in classes]
    axes.scatter(points[:, 0], points[:, 1], c=colours, s=size, linewidths=0, alpha=0.75)


def _class_legend(figure: Figure, class_names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    shown = list(class_names)[:20]
    handles = [
        Line2D([], [], linestyle="none", marker="o", color=_class_colour(c, len(class_names)), label=name)
        for c, name in enumerate(shown)
    ]
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside right upper")
