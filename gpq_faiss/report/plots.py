"""Plots of results, written as PNG, SVG or PDF: curves of many methods, qualities against costs, heat maps."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError
from .figure import COLOURS, MARKERS, new_axes, picture

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

T = TypeVar("T")

_DASHES = ("-", "--", ":")


def plot_curves(
    curves: Mapping[str, tuple[ArrayLike, ...]],
    out: str | Path,
    *,
    x: str,
    y: str,
    title: str | None = None,
    log_x: bool = False,
    from_zero: bool = True,
    overwrite: bool = False,
) -> Path:
    """Curves of many methods, distinguished by colour and dashes.

    Args:
        curves: name -> (x [P], y [P]), or with error bars (x, y, deviation [P]).
        x, y: axis labels; ``log_x`` makes the x axis logarithmic, and ``from_zero`` begins the y axis at 0.

    Raises:
        UsageError: another extension than .png, .svg or .pdf.
        DataError: nothing to draw, or arrays of different lengths.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    with picture(out, 8.0, max(4.2, 0.24 * len(curves)), overwrite=overwrite) as figure:
        axes = new_axes(figure, title, x, y)
        for i, (name, values) in enumerate(_some(curves).items()):
            across, up, *errors = _arrays(name, *values)
            axes.errorbar(
                across,
                up,
                yerr=errors[0] if errors and errors[0].any() else None,
                color=_colour(i),
                linestyle=_DASHES[i // len(COLOURS) % len(_DASHES)],
                linewidth=1.7,
                marker=MARKERS[i % len(MARKERS)] if len(across) <= 15 else None,
                markersize=4,
                capsize=3,
                elinewidth=1,
                label=name,
            )
            if errors:
                axes.set_xticks(sorted({*axes.get_xticks(), *across} if i else across))
        if log_x:
            axes.set_xscale("log")
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Path(out)


def plot_tradeoff(
    groups: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]],
    out: str | Path,
    *,
    x: str,
    y: str,
    title: str | None = None,
    logarithmic: bool = True,
    overwrite: bool = False,
) -> Path:
    """Quality over speed (or any two measures): one point per tool, or a line through its settings.

    Args:
        groups: group -> tool -> (speed [P]; quality [P]). Groups have colours, tools within a group markers.
        x, y: axis labels.
        logarithmic: whether the speed axis is logarithmic; speeds must then be above 0.

    Raises:
        DataError: nothing to draw, arrays of different lengths, or a speed not above 0 on a logarithmic axis.
        UsageError, OutputExistsError: as :func:`plot_curves`.
    """
    with picture(out, 10.24, 5.25, overwrite=overwrite) as figure:
        axes = new_axes(figure, title, x, y)
        if logarithmic:
            axes.set_xscale("log")
        entries: list[Line2D] = []
        headings: list[int] = []
        for i, (group, ways) in enumerate(_some(groups).items()):
            # A legend entry without a line is the heading of a group, unless a tool has the group's name.
            if not all(name.startswith(group) for name in ways):
                headings.append(len(entries))
                entries += axes.plot([], [], linestyle="none", label=group)
            for j, (name, points) in enumerate(_some(ways).items()):
                speed, quality = _arrays(name, *points)
                if logarithmic and not (speed > 0).all():
                    raise DataError(
                        f"line {name!r}: a speed of {speed.min():g} cannot be on a logarithmic axis"
                    )
                order = np.argsort(speed)
                entries += axes.plot(
                    speed[order], quality[order], color=_colour(i), marker=MARKERS[j % len(MARKERS)], markersize=6,
                    linewidth=1.2, label=name, markerfacecolor=_colour(i) if j < len(MARKERS) else "white",
                )  # fmt: skip
        legend = axes.legend(
            handles=entries, frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5)
        )
        for i in headings:
            legend.get_texts()[i].set_fontweight("bold")
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
    """Heat map with the values written into the cells; NaN is an empty cell.

    Args:
        values: [R, C].
        rows, columns: names of the R rows and C columns.

    Raises:
        DataError: inconsistent shapes, or no values. UsageError, OutputExistsError: as :func:`plot_curves`.
    """
    table = np.asarray(values, np.float64)
    if table.shape != (len(rows), len(columns)) or not np.isfinite(table).any():
        raise DataError(f"heat map {table.shape}: figures for {len(rows)} x {len(columns)} cells are needed")
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


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _some(series: Mapping[str, T]) -> Mapping[str, T]:
    if not series:
        raise DataError("nothing to plot: give one line at least")
    return series


def _arrays(name: str, *values: ArrayLike) -> list[np.ndarray]:
    """Arrays of one length."""
    arrays = [np.asarray(each, np.float64) for each in values]
    if arrays[0].ndim != 1 or len({array.shape for array in arrays}) > 1:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise DataError(f"line {name!r}: arrays of one length are needed, not {shapes}")
    return arrays
