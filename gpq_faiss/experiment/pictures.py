"""Figures of an experiment: curves, heat maps (figure 4), t-SNE (figure 5), codebooks (figure
1)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..errors import DataError
from ..methods.registry import METHODS
from ..report.plots import picture, plot_curves
from .report import Experiment, read_experiment
from .runs import Run, read_run

_PANEL_INCHES = 3.2
_MAX_PANELS = 9
_COLUMNS = 3

Pictures = dict[str, Path]
"""Caption -> file."""


def draw_experiment(folder: str | Path, out: str | Path, *, overwrite: bool = False) -> Pictures:
    """Draw the figures of an experiment's kind from its runs, as PNG.

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
    kinds = {"sensitivity": _draw_heat_maps, "tsne": _draw_points, "voronoi": _draw_points}
    draw = kinds.get(experiment.description.grid["kind"], _draw_curves)
    return draw(experiment, Path(out), overwrite=overwrite)


def _draw_curves(experiment: Experiment, out: Path, *, overwrite: bool) -> Pictures:
    """Draw mAP over bits and over neighbour recall, and precision and recall."""
    description = experiment.description
    longest = str(experiment.bits[-1])
    options: dict[str, Any] = {
        "title": f"{description.data['name']}, protocol {description.grid['protocol']}",
        "overwrite": overwrite,
    }
    pictures: Pictures = {}
    ks, levels = (experiment.runs[0].arrays[name] for name in ("ks", "pr_recall"))
    # Columns of the table with the values of the y axis, and their values on the x axis.
    for name, x, y, columns in (
        ("map", "bits per code", "mAP", {str(bits): bits for bits in experiment.bits}),
        ("pr", "recall", "precision", {f"{level:.2f}": level for level in levels}),
        ("precision", "k", "precision at k", {f"P@{k}": k for k in ks}),
        ("recall", "k", "recall at k", {f"R@{k}": k for k in ks}),
    ):
        lines: dict[str, Any] = {}
        for row in experiment.means(columns):
            spreads = [(value, row[column]) for column, value in columns.items() if row.get(column)]
            points = [(value, s.mean, s.deviation or 0.0) for value, s in spreads]
            if points:  # there are none where the runs of the longest code are missing
                lines[row["method"]] = np.array(points).T[: 3 if y == "mAP" else 2]
        caption = f"{y} over {x}" if y == "mAP" else f"{y} over {x} at {longest} bits"
        pictures[caption] = plot_curves(
            lines, out / f"{name}.png", x=x, y=y, log_x=x == "k", **options
        )
    rows = [row for row in experiment.means(("NN10@100", longest)) if row.get("NN10@100")]
    lines = {row["method"]: ([row["NN10@100"].mean], [row[longest].mean]) for row in rows}
    if lines:
        pictures[f"mAP over NN10@100 at {longest} bits"] = plot_curves(
            lines, out / "neighbours.png", x="NN10@100", y="mAP", **options
        )
    return pictures


def _draw_heat_maps(experiment: Experiment, out: Path, *, overwrite: bool) -> Pictures:
    """Draw mAP over the weights λ1 and λ2, one picture for each variant of GPQ and length."""
    lines = [
        {"method": run.method, "bits": run.bits, "seed": run.seed, "mAP": run.map}
        | run.settings["loss"]
        for run in experiment.runs
        if run.method in METHODS and METHODS[run.method].module == ".gpq"
    ]
    frame = pd.DataFrame(lines)
    if frame.empty or frame.duplicated(["method", "bits", "seed", "lambda1", "lambda2"]).any():
        raise DataError(
            f"{experiment.folder}: a heat map shows runs of GPQ that differ in their weights λ1 "
            'and λ2 alone: for others take kind = "ablation"'
        )
    pictures: Pictures = {}
    for (method, bits), cells in frame.groupby(["method", "bits"], sort=False):
        means = cells.pivot_table("mAP", "lambda1", "lambda2")  # a missing run leaves a gap
        values = means.to_numpy()
        height, width = means.shape
        path = out / f"sensitivity-{method}-{bits}.png"
        caption = f"mAP of {method} at {bits} bits"
        pictures[caption] = path
        with picture(path, 2.6 + 0.85 * width, 1.4 + 0.6 * height, overwrite=overwrite) as figure:
            axes = figure.add_subplot(
                xlabel="λ2 (entropy)", ylabel="λ1 (classification)", title=caption
            )
            axes.grid(visible=False)
            figure.colorbar(axes.imshow(values, cmap="Blues", aspect="auto"), ax=axes)
            for i, j in np.argwhere(np.isfinite(values)):
                axes.text(j, i, f"{values[i, j]:.3f}", ha="center", va="center", fontsize=8.5)
            axes.set_xticks(range(width), [f"{weight:g}" for weight in means.columns])
            axes.set_yticks(range(height), [f"{weight:g}" for weight in means.index])
    return pictures


# Points -------------------------------------------------------------------------------------------


def _panels(experiment: Experiment, run: Run) -> Iterator[tuple[str, Any, Any]]:
    """Yield t-SNE of the vectors of a run, or the parts of them that each codebook quantises.

    Each panel is a title, points [n, 2], and None or the unit-norm codewords [K, 2].
    """
    head = f"{experiment.row_name(run)}, mAP {run.map:.3f}"
    vectors = run.arrays["vectors"]
    if experiment.description.grid["kind"] == "tsne":
        from sklearn.manifold import TSNE

        units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        perplexity = min(30.0, max(2.0, (len(vectors) - 1) / 3))
        model = TSNE(perplexity=perplexity, init="pca", random_state=0, n_jobs=1)
        yield head, model.fit_transform(units), None
        return
    Z = run.arrays.get("codebooks", np.empty((0, 0, 0)))
    if Z.shape[2] != 2:
        raise DataError(
            f"{run.path}: codewords of {Z.shape[2]} dimensions cannot be drawn: set "
            "quantizer.subdim = 2 in the grid"
        )
    # Points on the circle would overlap, so they are drawn at random distances from it.
    noise = np.random.default_rng(0).standard_normal((len(vectors), 1)).clip(-2.5, 2.5)
    for m, codewords in enumerate(Z):
        points = vectors[:, 2 * m : 2 * m + 2] * (1 + 0.12 * noise)
        yield f"{head}\ncodebook {m + 1}", points, codewords


def _draw_points(experiment: Experiment, out: Path, *, overwrite: bool) -> Pictures:
    """Draw items by class in panels, and the codewords that quantise them as stars."""
    kind = experiment.description.grid["kind"]
    bits = experiment.bits[-1]
    seed = min(run.seed for run in experiment.runs)
    runs = [
        read_run(run.path, ("vectors", "vector_labels", "codebooks"))
        for run in experiment.runs
        if run.seed == seed and run.bits in (0, bits)
    ]
    runs = [run for run in runs if "vectors" in run.arrays]
    every_panel = ((run, panel) for run in runs for panel in _panels(experiment, run))
    panels = list(itertools.islice(every_panel, _MAX_PANELS))
    if not panels:
        raise DataError(
            f"{experiment.folder}: no run of {bits} bits, seed {seed}, keeps vectors: run it again "
            "with vectors = 2000 in the grid"
        )
    subjects = {
        "tsne": "t-SNE of the directions",
        "voronoi": "Codebooks in two dimensions: codewords (stars), and the parts",
    }
    count = len(runs[0].arrays["vectors"])
    caption = (
        f"{subjects[kind]} of {count:,} items of the database; a colour is an item's (first) class"
    )
    columns = min(len(panels), _COLUMNS)
    rows = math.ceil(len(panels) / _COLUMNS)
    size = _PANEL_INCHES * columns + 1.4, _PANEL_INCHES * rows + 0.4
    path = out / f"{kind}.png"
    with picture(path, *size, dpi=120, overwrite=overwrite) as figure:
        for i, (run, (title, points, codewords)) in enumerate(panels):
            axes = figure.add_subplot(rows, columns, i + 1, xticks=[], yticks=[], title=title)
            if codewords is not None:
                axes.scatter(
                    codewords[:, 0], codewords[:, 1], marker="*", s=110, color="#111111", zorder=3
                )
                axes.set_aspect("equal")
            dense = np.unpackbits(run.arrays["vector_labels"], axis=1)
            for c, name in enumerate(run.class_names):
                is_of_class = dense.any(axis=1) & (dense.argmax(axis=1) == c)
                label = name if c < 20 and i == 0 else None
                x, y = points[is_of_class].T
                axes.scatter(x, y, color=f"C{c % 10}", s=5, alpha=0.75, label=label)
        figure.legend(loc="outside right upper")
    return {caption: path}
