"""Plots of results, written as PNG, SVG or PDF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError
from ..evaluation.tables import Spread
from .figure import COLOURS, MARKERS, check_picture, new_figure, save_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

T = TypeVar("T")

_WIDTH, _HEIGHT = 6.4, 4.2


def plot_pr_curves(
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]],
    out: str | Path,
    *,
    title: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Precision over recall, one line per method.

    Args:
        curves: name -> (recall [L], precision [L]).
        out: .png, .svg or .pdf.

    Raises:
        UsageError: another extension.
        DataError: nothing to draw, or arrays of different lengths.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    path = check_picture(out, overwrite=overwrite)
    figure = new_figure(_WIDTH, _HEIGHT)
    axes = figure.add_subplot()
    style_axes(axes, title, "recall", "precision")
    for i, (name, (recall, precision)) in enumerate(_some(curves).items()):
        x, y = _pair(name, recall, precision)
        axes.plot(x, y, color=_colour(i), linewidth=1.8, label=name)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    _legend(axes, len(curves))
    figure.set_layout_engine("constrained")
    return save_figure(figure, path)


def plot_map_bits(
    series: Mapping[str, Mapping[int, float | Spread | Sequence[float]]],
    out: str | Path,
    *,
    title: str | None = None,
    y: str = "mAP",
    overwrite: bool = False,
) -> Path:
    """mAP over code length, one line per method, with error bars of one standard deviation for several runs.

    Args:
        series: name -> {bits: one value, a :class:`Spread`, or the values of several runs}.
    """
    path = check_picture(out, overwrite=overwrite)
    figure = new_figure(_WIDTH, _HEIGHT)
    axes = figure.add_subplot()
    style_axes(axes, title, "bits per code", y)
    ticks: set[int] = set()
    for i, (name, points) in enumerate(_some(series).items()):
        bits = sorted(points)
        ticks.update(bits)
        cells = [_spread(points[b]) for b in bits]
        means, bars = [c.mean for c in cells], [c.deviation or 0.0 for c in cells]
        marker = MARKERS[i % len(MARKERS)]
        axes.errorbar(
            bits, means, yerr=bars if any(bars) else None, color=_colour(i), marker=marker, markersize=5.5,
            linewidth=1.8, capsize=3, elinewidth=1, label=name,
        )  # fmt: skip
    axes.set_xticks(sorted(ticks))
    _legend(axes, len(series))
    figure.set_layout_engine("constrained")
    return save_figure(figure, path)


def plot_validation(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    out: str | Path,
    *,
    title: str | None = None,
    y: str = "validation mAP",
    overwrite: bool = False,
) -> Path:
    """A measure over training time, one line per run, with the best point marked.

    Args:
        series: name -> (seconds since the start [P], value [P]). The axis is in seconds, minutes or hours, depending on the range.
    """
    path = check_picture(out, overwrite=overwrite)
    pairs = {name: _pair(name, *points) for name, points in _some(series).items()}
    longest = max((float(x.max()) for x, _ in pairs.values() if len(x)), default=0.0)
    unit, name_of = (
        (3600.0, "hours") if longest > 7200 else (60.0, "minutes") if longest > 180 else (1.0, "seconds")
    )
    figure = new_figure(_WIDTH, _HEIGHT)
    axes = figure.add_subplot()
    style_axes(axes, title, f"training time ({name_of})", y)
    for i, (name, (x, values)) in enumerate(pairs.items()):
        if not len(x):
            continue
        best = int(np.argmax(values))
        axes.plot(
            x / unit, values, color=_colour(i), linewidth=1.8, label=f"{name} (best {values[best]:.3f})"
        )
        axes.plot(x[best] / unit, values[best], "o", color=_colour(i), markersize=6, markeredgecolor="white")
    axes.set_xlim(left=0)
    _legend(axes, len(pairs))
    figure.set_layout_engine("constrained")
    return save_figure(figure, path)


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
        UsageError: another extension.
        DataError: nothing to draw, arrays of different lengths, or a speed not above 0 on a logarithmic axis.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    path = check_picture(out, overwrite=overwrite)
    figure = new_figure(1.6 * _WIDTH, 1.25 * _HEIGHT)
    axes = figure.add_subplot()
    style_axes(axes, title, x, y)
    if logarithmic:
        axes.set_xscale("log")
    # A legend entry without a line is the heading of a group, unless a tool has the group's name.
    entries: list[Line2D] = []
    for i, (group, ways) in enumerate(_some(groups).items()):
        if not all(name.startswith(group) for name in ways):
            entries += axes.plot([], [], linestyle="none", label=group)
        for j, (name, points) in enumerate(_some(ways).items()):
            speed, quality = _pair(name, *points)
            if logarithmic and not (speed > 0).all():
                raise DataError(f"line {name!r}: a speed of {speed.min():g} cannot be on a logarithmic axis")
            order = np.argsort(speed)
            entries += axes.plot(
                speed[order], quality[order], color=_colour(i), marker=MARKERS[j % len(MARKERS)], markersize=6,
                linewidth=1.2, label=name, markerfacecolor=_colour(i) if j < len(MARKERS) else "white",
            )  # fmt: skip
    legend = axes.legend(
        handles=entries, frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )
    for entry, text in zip(entries, legend.get_texts(), strict=True):
        if not len(entry.get_xdata(orig=True)):  # type: ignore[arg-type]
            text.set_fontweight("bold")
    figure.set_layout_engine("constrained")
    return save_figure(figure, path)


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _legend(axes: Axes, n: int) -> None:
    if n > 6:  # beside the plot, so as not to cover the lines
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axes.legend(frameon=False, fontsize=9, loc="best")


def _some(series: Mapping[str, T]) -> Mapping[str, T]:
    if not series:
        raise DataError("nothing to plot: give one line at least")
    return series


def _pair(name: str, x: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise DataError(f"line {name!r}: {a.shape} values across and {b.shape} up must be of one length")
    return a, b


def _spread(value: float | Spread | Sequence[float]) -> Spread:
    if isinstance(value, Spread):
        return value
    return Spread.of(value) if isinstance(value, Sequence) else Spread(float(value), None, 1)
