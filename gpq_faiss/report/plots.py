"""Plots of results, written as PNG, SVG or PDF: curves of many methods, heat maps, points by class."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError
from .figure import COLOURS, MARKERS, new_axes, picture

_DASHES = ("-", "--", ":")
_PANEL = 3.2  # inches per side
_GREY = "#BBBBBB"  # of items without a class


def plot_curves(
    curves: Mapping[str, Sequence[ArrayLike]],
    out: str | Path,
    *,
    x: str,
    y: str,
    title: str | None = None,
    log_x: bool = False,
    from_zero: bool = True,
    overwrite: bool = False,
) -> Path:
    """Curves of many methods, distinguished by colour, dashes and markers.

    Args:
        curves: name -> (x [P], y [P]), or with error bars and ticks at the x (x, y, deviation [P]).
        x, y: axis labels; ``log_x`` makes the x axis logarithmic, and ``from_zero`` begins the y axis at 0.

    Raises:
        UsageError: another extension than .png, .svg or .pdf.
        DataError: nothing to draw.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    _some(curves)
    with picture(out, 8.0, max(4.2, 0.24 * len(curves)), overwrite=overwrite) as figure:
        axes = new_axes(figure, title, x, y)
        ticks: set[float] = set()
        for i, (name, values) in enumerate(curves.items()):
            across, up, *errors = (np.asarray(each, np.float64) for each in values)
            axes.errorbar(
                across,
                up,
                yerr=errors[0] if errors and errors[0].any() else None,
                color=COLOURS[i % len(COLOURS)],
                linestyle=_DASHES[i // len(COLOURS) % len(_DASHES)],
                linewidth=1.7,
                marker=MARKERS[i % len(MARKERS)] if len(across) <= 15 else None,
                markersize=6 if len(across) == 1 else 4,
                capsize=3,
                elinewidth=1,
                label=name,
            )
            ticks |= set(across.tolist()) if errors else set()
        if ticks:
            axes.set_xticks(sorted(ticks))
        if log_x:
            axes.set_xscale("log")
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Path(out)


def plot_heat_map(
    values: ArrayLike,
    out: str | Path,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    y: str,
    x: str,
    title: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Heat map of values [R, C] with the values written into the cells; NaN is an empty cell. Errors as :func:`plot_curves`."""
    table = np.asarray(values, np.float64)
    size = 1.6 + 0.85 * len(columns), 1.4 + 0.6 * len(rows)
    with picture(out, *size, overwrite=overwrite) as figure:
        figure.set_layout_engine("constrained")  # before the colour bar, which shrinks the axes
        axes = figure.add_subplot()
        image = axes.imshow(table, cmap="viridis", aspect="auto")
        dark = np.nanmin(table) + 0.6 * (np.nanmax(table) - np.nanmin(table))
        for (i, j), value in np.ndenumerate(table):
            if np.isfinite(value):
                colour = "white" if value < dark else "#111111"
                axes.text(j, i, f"{value:.3f}", ha="center", va="center", fontsize=8.5, color=colour)
        axes.set_xticks(range(len(columns)), list(columns), fontsize=9)
        axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
        axes.set_xlabel(x, fontsize=10)
        axes.set_ylabel(y, fontsize=10)
        if title:
            # Above a narrow map a long title would be cut off.
            axes.set_title(textwrap.fill(title, 22 + 9 * len(columns)), fontsize=11, loc="left")
        figure.colorbar(image, ax=axes)
    return Path(out)


def plot_points(
    panels: Mapping[str, tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]],
    class_names: Sequence[str],
    out: str | Path,
    *,
    title: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Panels of points in the plane, coloured by class; with codewords on the unit circle, these and their Voronoi cells.

    Points of a panel with codewords lie on the circle; they are drawn at random distances from it so that they do not overlap.

    Args:
        panels: name -> points [n, 2], classes int [n] (-1: none), and None or unit-norm codewords [K, 2].
        class_names: of the classes.

    Raises:
        UsageError, DataError, OutputExistsError: as :func:`plot_curves`.
    """
    _some(panels)
    from matplotlib.lines import Line2D

    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    size = _PANEL * across + 1.4, _PANEL * down + 0.4
    with picture(out, *size, overwrite=overwrite, dpi=120) as figure:  # many points make large files
        for i, (name, (points, classes, codewords)) in enumerate(panels.items()):
            axes = figure.add_subplot(down, across, i + 1)
            axes.set_title(name, fontsize=10, loc="left")
            colours = [_class_colour(c, len(class_names)) if c >= 0 else _GREY for c in classes.tolist()]
            if codewords is not None:
                for angle in cell_borders(codewords):
                    ends = [0, 1.45 * math.cos(angle)], [0, 1.45 * math.sin(angle)]
                    axes.plot(*ends, color="#AAAAAA", linewidth=0.7)
                x, y = codewords.T
                axes.scatter(x, y, marker="*", s=110, color="#111111", edgecolors="white", zorder=3)
                axes.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
                axes.set_axis_off()
            off = 0.0 if codewords is None else 0.12
            radius = 1 + off * np.random.default_rng(0).standard_normal(len(points)).clip(-2.5, 2.5)
            axes.scatter(
                points[:, 0] * radius, points[:, 1] * radius, c=colours, s=5, linewidths=0, alpha=0.75
            )
            axes.set(xticks=[], yticks=[])
            for side in axes.spines.values():
                side.set_color("#DDDDDD")
        handles = [
            Line2D([], [], linestyle="none", marker="o", color=_class_colour(c, len(class_names)), label=name)
            for c, name in enumerate(class_names[:20])
        ]
        figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside right upper")
        if title:
            figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        figure.set_layout_engine("constrained")
    return Path(out)


def cell_borders(codewords: NDArray[Any]) -> NDArray[np.float64]:
    """Angles of the borders between the Voronoi cells of unit-norm codewords [K, 2], ascending in [-π, π): float64 [K].

    The cells are sectors; the border of two neighbours on the circle is half-way between them.
    """
    angles = np.sort(np.arctan2(codewords[:, 1], codewords[:, 0]).astype(np.float64))
    middle = (angles + np.append(angles[1:], angles[0] + 2 * math.pi)) / 2
    return np.sort((middle + math.pi) % (2 * math.pi) - math.pi)


def _some(series: Mapping[str, Any]) -> None:
    if not series:
        raise DataError("nothing to plot: give one line or panel at least")


def _class_colour(c: int, n: int) -> str:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if n <= len(COLOURS):
        return COLOURS[c]
    return str(to_hex(colormaps["tab20" if n > 10 else "tab10"](c % 20)))
