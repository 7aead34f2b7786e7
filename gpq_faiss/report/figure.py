"""Figures without global state, saved atomically."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files import atomic_path, check_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's palette: distinguishable with any colour vision, and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#B8A800")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_DATES: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}


def check_picture(out: str | Path, *, overwrite: bool) -> Path:
    """Check an output path. Raises UsageError: not .png, .svg or .pdf; or it exists or cannot be written."""
    path = Path(out)
    if path.suffix.lower().lstrip(".") not in _DATES:
        raise UsageError(f"{path}: a picture must be .png, .svg or .pdf")
    return check_output(path, overwrite=overwrite)


@contextmanager
def picture(
    out: str | Path, width: float, height: float, *, overwrite: bool, dpi: int = 160
) -> Iterator[Figure]:
    """A figure of this size in inches, outside of matplotlib's global state. At the end it is written in the format of its extension,
    without dates or random ids, so that files are reproducible.

    Raises:
        UsageError: another extension than .png, .svg or .pdf.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    path = check_picture(out, overwrite=overwrite)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    yield figure
    form = path.suffix.lower().lstrip(".")
    # Without a salt, ids inside an SVG are random.
    with atomic_path(path) as temporary, rc_context({"svg.hashsalt": "gpq"}):
        figure.savefig(temporary, format=form, dpi=dpi, metadata=_DATES[form])


def new_axes(figure: Figure, title: str | None, x: str, y: str) -> Axes:
    """Plain axes that fill the figure: two spines and a light grid."""
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#888888")
    axes.grid(True, color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors="#444444", labelsize=9)
    axes.set_xlabel(x, fontsize=10, color="#222222")
    axes.set_ylabel(y, fontsize=10, color="#222222")
    if title:
        axes.set_title(title, fontsize=11, loc="left", color="#111111", pad=10)
    return axes
