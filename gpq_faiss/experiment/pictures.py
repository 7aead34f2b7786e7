"""Pictures of an experiment: curves, the heat map of figure 4, t-SNE of figure 5, codebooks of figure 1."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..evaluation.tables import summarise
from ..files import check_output
from ..methods.registry import METHODS
from ..report.plots import check_picture, picture, plot_curves
from .report import CURVES, Experiment, read_experiment
from .runs import Run, read_run

_PANELS, _PANEL = 9, 3.2  # at most so many, of so many inches

Panel = tuple[NDArray[Any], NDArray[np.int64], NDArray[Any] | None]
"""Points [n, 2], classes [n] (-1: none), and None or unit-norm codewords [K, 2]."""
Place = Callable[[str, str], Path]
"""``(name, caption) -> path`` of a picture to draw, over another one if that is there."""


def draw_experiment(folder: str | Path, out: str | Path, *, overwrite: bool = False) -> dict[str, Path]:
    """Draw the pictures of an experiment's kind from its runs, as PNG.

    Args:
        folder: folder of the experiment.
        out: folder for the pictures, created if missing.

    Returns:
        Caption -> file.

    Raises:
        DataError: not an experiment, no finished run, a damaged one, or nothing to draw.
        OutputExistsError: a picture exists.
    """
    experiment = read_experiment(folder)
    check_output(Path(out) / "map.png", overwrite=True)
    of_kind = {"sensitivity": _heat_maps, "tsne": _tsne, "voronoi": _codebooks}
    made: dict[str, Path] = {}

    def place(name: str, caption: str) -> Path:
        made[caption] = check_picture(Path(out) / f"{name}.png", overwrite=overwrite)
        return made[caption]

    of_kind.get(experiment.about.kind, _curves)(experiment, place)
    return made


def _title(experiment: Experiment, at: str = "") -> str:
    about = experiment.about
    return ", ".join(filter(None, (about.data.name, at, f"protocol {about.protocol}")))


def _runs_with(experiment: Experiment, *names: str) -> list[Run]:
    """The runs at the longest code of the first seed, with these arrays."""
    seed, lengths = experiment.seeds[0], (0, max(experiment.bits))
    runs = [run for run in experiment.runs if run.seed == seed and run.bits in lengths]
    found = [run for run in (read_run(run.path, names) for run in runs) if names[0] in run.arrays]
    if not found:
        raise DataError(
            f"{experiment.folder}: no run of {experiment.at}, seed {seed}, keeps {names[0]}: run it again, "
            "for vectors with vectors = 2000 in the grid"
        )
    return found


def _curves(experiment: Experiment, place: Place) -> None:
    """mAP over bits and over likeness; precision-recall, precision at k and recall at k at the longest code."""
    at, title = f"at {max(experiment.bits)} bits", _title(experiment, experiment.at)
    if len(experiment.bits) > 1:
        lines: dict[str, Any] = {}
        for row in experiment.means(map(str, experiment.bits), longest=False):
            there = [(b, row[str(b)]) for b in experiment.bits if row[str(b)]]
            lines[row["method"]] = np.array([(b, of.mean, of.deviation or 0.0) for b, of in there]).T
        path, whole = place("map", "mAP over the length of the code"), _title(experiment)
        plot_curves(lines, path, x="bits per code", y="mAP", title=whole, from_zero=False, overwrite=True)
    kinds = (
        ("pr", "recall", "precision"),
        ("precision", "k", "precision at k"),
        ("recall", "k", "recall at k"),
    )
    for (column, (x, _)), (name, across, up) in zip(CURVES.items(), kinds, strict=True):
        places = {column.format(at): at for run in experiment.runs for at in run.arrays[x]}
        lines = {}
        for row in experiment.means(list(places)):
            known = {at: row[place].mean for place, at in places.items() if row.get(place)}
            lines[row["method"]] = list(known), list(known.values())
        path = place(name, f"{up[0].upper()}{up[1:]} over {across} {at}")
        plot_curves(lines, path, x=across, y=up, title=title, log_x=across == "k", overwrite=True)
    rows = [row for row in experiment.means(("NN10@100", "mAP")) if row.get("NN10@100")]
    if rows:
        lines = {row["method"]: ([row["NN10@100"].mean], [row["mAP"].mean]) for row in rows}
        path = place("likeness", f"mAP over NN10@100 {at}")
        plot_curves(lines, path, x="NN10@100", y="mAP", title=title, from_zero=False, overwrite=True)


def _heat_maps(experiment: Experiment, place: Place) -> None:
    """mAP over the weights λ1 and λ2, one picture per variant of GPQ and length."""
    weights = ("lambda1", "lambda2")
    lines = [
        {"method": run.method, "bits": run.bits, "mAP": run.map, **run.settings["loss"]}
        for run in experiment.runs
        if run.method in METHODS and METHODS[run.method].module == ".gpq"
    ]
    if not lines:
        raise DataError(f"{experiment.folder}: no run of GPQ, which alone has the weights λ1 and λ2")
    cells = summarise(lines, ["method", "bits", *weights], ["mAP"])
    if any(cell["mAP"].n > len(experiment.seeds) for cell in cells):
        raise DataError(
            f"{experiment.folder}: several runs have the same weights λ1 and λ2: pictures of kind sensitivity show nothing else that "
            'variations change: take kind = "ablation"'
        )
    for method, bits in dict.fromkeys((cell["method"], cell["bits"]) for cell in cells):
        panel = [cell for cell in cells if (cell["method"], cell["bits"]) == (method, bits)]
        down, across = (sorted({cell[weight] for cell in panel}) for weight in weights)
        values = np.full((len(down), len(across)), np.nan)
        for cell in panel:
            values[down.index(cell["lambda1"]), across.index(cell["lambda2"])] = cell["mAP"].mean
        of = f"mAP of {method} at {bits} bits"
        path = place(f"sensitivity-{method}-{bits}", f"{of}, over the weights")
        _draw_heat_map(values, down, across, f"{of}: {_title(experiment)}", path)


def _draw_heat_map(
    values: NDArray[Any], down: list[float], across: list[float], title: str, out: Path
) -> None:
    """Values [down, across] as colours and numbers; NaN, of a run that is missing, is an empty cell."""
    with picture(out, 1.6 + 0.85 * len(across), 1.4 + 0.6 * len(down), overwrite=True) as figure:
        axes = figure.add_subplot(xlabel="λ2 (entropy)", ylabel="λ1 (classification)")
        axes.grid(visible=False)
        image = axes.imshow(values, cmap="viridis", aspect="auto")
        dark = np.nanmin(values) + 0.6 * (np.nanmax(values) - np.nanmin(values))
        for i, j in np.argwhere(np.isfinite(values)):
            colour, text = "white" if values[i, j] < dark else "#111111", f"{values[i, j]:.3f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=8.5, color=colour)
        axes.set_xticks(range(len(across)), [f"{b:g}" for b in across])
        axes.set_yticks(range(len(down)), [f"{a:g}" for a in down])
        # Above a narrow map a long title would be cut off.
        axes.set_title(textwrap.fill(title, 18 + 9 * len(across)))
        figure.colorbar(image, ax=axes)


# Points -----------------------------------------------------------------------------------------------------------------


def _classes(packed: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The first class of each row of packed labels, -1 without any: int64 [n]."""
    dense = np.unpackbits(packed, axis=1)
    return np.where(dense.any(axis=1), dense.argmax(axis=1), -1).astype(np.int64)


def tsne(vectors: NDArray[np.float32], seed: int = 0) -> NDArray[np.float64]:
    """t-SNE of the directions of vectors [n, D]: float64 [n, 2]; deterministic by seed."""
    from sklearn.manifold import TSNE

    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    perplexity = min(30.0, max(2.0, (len(vectors) - 1) / 3))
    model = TSNE(perplexity=perplexity, init="pca", random_state=seed, n_jobs=1)
    return np.asarray(model.fit_transform(units), dtype=np.float64)


def cell_borders(codewords: NDArray[Any]) -> NDArray[np.float64]:
    """Angles of the borders between the Voronoi cells of unit-norm codewords [K, 2], ascending in [-π, π): float64 [K].

    The cells are sectors; the border of two neighbours on the circle is half-way between them.
    """
    angles = np.sort(np.arctan2(codewords[:, 1], codewords[:, 0]).astype(np.float64))
    middle = (angles + np.append(angles[1:], angles[0] + 2 * math.pi)) / 2
    return np.sort((middle + math.pi) % (2 * math.pi) - math.pi)


def _draw_points(title: str, panels: Mapping[str, Panel], class_names: Sequence[str], out: Path) -> None:
    """Panels of points, coloured by class; with codewords on the unit circle, these and their Voronoi cells. Points of such a panel lie
    on the circle; they are drawn at random distances from it so that they do not overlap."""
    across, down = min(len(panels), 3), -(-len(panels) // 3)
    size = _PANEL * across + 1.4, _PANEL * down + 0.4
    with picture(out, *size, overwrite=True, dpi=120) as figure:  # many points make large files
        for i, (head, (points, classes, codewords)) in enumerate(panels.items()):
            axes = figure.add_subplot(down, across, i + 1, xticks=[], yticks=[])
            axes.set_title(head, fontsize=10)
            axes.spines[["left", "bottom"]].set_color("#DDDDDD")
            radius: Any = 1.0
            if codewords is not None:
                angles = cell_borders(codewords)
                ends = 1.45 * np.stack([np.cos(angles), np.sin(angles)])
                axes.plot([0 * ends[0], ends[0]], [0 * ends[1], ends[1]], color="#AAAAAA", linewidth=0.7)
                x, y = codewords.T
                axes.scatter(x, y, marker="*", s=110, color="#111111", edgecolors="white", zorder=3)
                axes.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
                axes.set_axis_off()
                off = np.random.default_rng(0).standard_normal((len(points), 1))
                radius = 1 + 0.12 * off.clip(-2.5, 2.5)
            colours = [f"C{c % 10}" if c >= 0 else "#BBBBBB" for c in classes.tolist()]
            x, y = (points * radius).T
            axes.scatter(x, y, c=colours, s=5, linewidths=0, alpha=0.75)
        named = enumerate(class_names[:20])
        handles = [axes.scatter([], [], color=f"C{c % 10}", label=label) for c, label in named]
        figure.legend(handles=handles, loc="outside right upper")
        figure.suptitle(title, x=0.01, ha="left")


def _tsne(experiment: Experiment, place: Place) -> None:
    every = _runs_with(experiment, "vectors", "vector_labels")
    runs = every[:_PANELS]
    panels: dict[str, Panel] = {
        f"{experiment.row_name(run)}, mAP {run.map:.3f}": (
            tsne(run.arrays["vectors"]),
            _classes(run.arrays["vector_labels"]),
            None,
        )
        for run in runs
    }
    n = len(runs[0].arrays["vectors"])
    caption = (
        f"t-SNE of the directions of {n:,} items of the database, drawn at random by seed {runs[0].seed} and the same for every method; a "
        "colour is an item's (first) class"
    )
    if len(every) > len(runs):
        caption += f"; {len(every) - len(runs)} more rows have no panel"
    title = f"t-SNE of {n:,} database items by (first) class: {_title(experiment, experiment.at)}"
    _draw_points(title, panels, runs[0].class_names, place("tsne", caption))


def _codebooks(experiment: Experiment, place: Place) -> None:
    for i, run in enumerate(_runs_with(experiment, "vectors", "vector_labels", "codebooks")):
        Z, M = run.arrays["codebooks"], len(run.arrays["codebooks"])
        if Z.shape[2] != 2:
            raise DataError(
                f"{run.path}: codewords of {Z.shape[2]} dimensions cannot be drawn: set quantizer.subdim = 2 in the grid"
            )
        x, classes = run.arrays["vectors"].reshape(-1, M, 2), _classes(run.arrays["vector_labels"])
        nearest = np.einsum("nmd,mkd->nmk", x, Z).argmax(axis=2)
        panels: dict[str, Panel] = {}
        for m in range(min(M, _PANELS)):
            used = f"codebook {m + 1}: {len(np.unique(nearest[:, m]))} of {len(Z[m])} codewords in use"
            panels[used] = (x[:, m], classes, Z[m])
        name = experiment.row_name(run)
        title = f"{name}, mAP {run.map:.3f}: codewords (stars), their cells, and items, drawn near the circle that they are on"
        caption = f"Codebooks in two dimensions, {name}, with {len(x):,} items of the database drawn at random by seed {run.seed}"
        caption += f"; the first {_PANELS} of {M}" if M > _PANELS else ""
        path = place(f"voronoi-{i + 1}" if i else "voronoi", caption)
        _draw_points(title, panels, run.class_names, path)
