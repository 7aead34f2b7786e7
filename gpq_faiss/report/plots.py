"""Pictures in one style, written as PNG, SVG or PDF, and curves of many methods.

Files are written atomically and without global state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError, UsageError
from ..files import atomic_path, check_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe & Ito's palette: distinguishable with any colour vision, and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#B8A800")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_DASHES = ("-", "--", ":")
_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "figure.titlesize": 11,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "gpq",  # without one, ids inside an SVG are random
}
_FORMATS: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
    ".png": {},
}
"""Extension -> metadata that would differ each time."""


@contextmanager
def picture(
    out: str | Path,
    width: float,
    height: float,
    *,
    overwrite: bool = False,
    dpi: int = 160,
) -> Iterator[Figure]:
    """Yield a figure of this size in inches, and write it at the end.

    The format is that of the extension. The file contains no dates or random ids, so it is
    reproducible.

    Raises:
        UsageError: an extension other than .png, .svg or .pdf.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
        DataError: the file cannot be written.
    """
    suffix = Path(out).suffix.lower()
    if suffix not in _FORMATS:
        raise UsageError(f"{out}: a picture must be .png, .svg or .pdf")
    path = check_output(out, overwrite=overwrite)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
        yield figure
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=suffix[1:], dpi=dpi, metadata=_FORMATS[suffix])


def plot_curves(
    curves: Mapping[str, Sequence[ArrayLike]],
    out: str | Path,
    *,
    x: str,
    y: str,
    title: str = "",
    log_x: bool = False,
    overwrite: bool = False,
) -> Path:
    """Draw curves of many methods, distinguished by colour, dashes and markers.

    Args:
        curves: name -> (x [P], y [P]), or with error bars and ticks at the x (x, y, deviation [P]).
        x, y: axis labels; ``log_x`` makes the x axis logarithmic.

    Raises:
        UsageError, OutputExistsError: as :func:`picture`.
        DataError: there is nothing to draw.
    """
    if not curves:
        raise DataError("nothing to plot: give one line at least")
    with picture(out, 8.0, max(4.2, 0.24 * len(curves)), overwrite=overwrite) as figure:
        axes = figure.add_subplot(xlabel=x, ylabel=y, title=title)
        axes.set_xscale("log" if log_x else "linear")  # which also sets the ticks
        for i, (name, values) in enumerate(curves.items()):
            x_values, y_values, *errors = (np.asarray(column, np.float64) for column in values)
            axes.errorbar(
                x_values,
                y_values,
                yerr=errors[0] if errors and errors[0].any() else None,
                color=COLOURS[i % len(COLOURS)],
                linestyle=_DASHES[i // len(COLOURS) % len(_DASHES)],
                linewidth=1.7,
                marker=_MARKERS[(i + i // len(COLOURS)) % len(_MARKERS)]
                if len(x_values) <= 15
                else None,
                markersize=6 if len(x_values) == 1 else 4,
                capsize=3,
                elinewidth=1,
                label=name,
            )
            if errors:
                axes.set_xticks(x_values)
        axes.set_ylim(bottom=0)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Path(out)
