"""Figures of an experiment: curves, heat maps (figure 4), t-SNE (figure 5), codebooks (figure
1)."""

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

_MAX_PANELS, _PANEL_INCHES = 9, 3.2

Panel = tuple[NDArray[Any], NDArray[np.int64], NDArray[Any] | None]
"""Points [n, 2], classes [n] (-1: none), and None or unit-norm codewords [K, 2]."""
NewPicture = Callable[[str, str], Path]
"""``(name, caption) -> path`` of a picture to draw, which is checked."""


def draw_experiment(
    folder: str | Path, out: str | Path, *, overwrite: bool = False
) -> dict[str, Path]:
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
    check_output(Path(out) / "map.png", overwrite=True)
    pictures: dict[str, Path] = {}

    def new_picture(name: str, caption: str) -> Path:
        pictures[caption] = check_picture(Path(out) / f"{name}.png", overwrite=overwrite)
        return pictures[caption]

    kinds = {"sensitivity": _draw_heat_maps, "tsne": _draw_tsne, "voronoi": _draw_codebooks}
    draw = kinds.get(experiment.description.grid["kind"], _draw_curves)
    draw(experiment, new_picture)
    return pictures


def _title(experiment: Experiment, length: str = "") -> str:
    description = experiment.description
    protocol = f"protocol {description.grid['protocol']}"
    return ", ".join(filter(None, (description.data["name"], length, protocol)))


def _draw_curves(experiment: Experiment, new_picture: NewPicture) -> None:
    """Draw mAP over bits and over neighbour recall, and precision and recall."""
    length = f"{experiment.bits[-1]} bits"
    title = _title(experiment, length)
    if len(experiment.bits) > 1:
        lines: dict[str, Any] = {}
        for row in experiment.means(map(str, experiment.bits), longest=False):
            spreads = {bits: row[str(bits)] for bits in experiment.bits if row[str(bits)]}
            points = [[bits, s.mean, s.deviation or 0.0] for bits, s in spreads.items()]
            lines[row["method"]] = np.array(points).T
        path, whole = new_picture("map", "mAP over the length of the code"), _title(experiment)
        plot_curves(
            lines, path, x="bits per code", y="mAP", title=whole, from_zero=False, overwrite=True
        )
    axes = (
        ("pr", "recall", "precision"),
        ("precision", "k", "precision at k"),
        ("recall", "k", "recall at k"),
    )
    for (column, (values, _)), (name, x, y) in zip(CURVES.items(), axes, strict=True):
        columns = {column.format(v): v for run in experiment.runs for v in run.arrays[values]}
        lines = {}
        for row in experiment.means(list(columns)):
            pairs = [(value, row[key].mean) for key, value in columns.items() if row.get(key)]
            lines[row["method"]] = np.array(pairs).T
        path = new_picture(name, f"{y[0].upper()}{y[1:]} over {x} at {length}")
        plot_curves(lines, path, x=x, y=y, title=title, log_x=x == "k", overwrite=True)
    rows = [row for row in experiment.means(("NN10@100", "mAP")) if row.get("NN10@100")]
    if rows:
        lines = {row["method"]: ([row["NN10@100"].mean], [row["mAP"].mean]) for row in rows}
        path = new_picture("neighbours", f"mAP over NN10@100 at {length}")
        plot_curves(
            lines, path, x="NN10@100", y="mAP", title=title, from_zero=False, overwrite=True
        )


def _draw_heat_maps(experiment: Experiment, new_picture: NewPicture) -> None:
    """Draw mAP over the weights λ1 and λ2, one picture for each variant of GPQ and length."""
    lines = [
        {"method": run.method, "bits": run.bits, "mAP": run.map, **run.settings["loss"]}
        for run in experiment.runs
        if run.method in METHODS and METHODS[run.method].module == ".gpq"
    ]
    if not lines:
        raise DataError(
            f"{experiment.folder}: no run of GPQ, which alone has the weights λ1 and λ2"
        )
    cells = summarise(lines, ["method", "bits", "lambda1", "lambda2"], ["mAP"])
    if any(cell["mAP"].n > len(experiment.seeds) for cell in cells):
        raise DataError(
            f"{experiment.folder}: several runs have the same weights λ1 and λ2: pictures of kind "
            'sensitivity show nothing else that variations change: take kind = "ablation"'
        )
    for method, bits in dict.fromkeys((cell["method"], cell["bits"]) for cell in cells):
        panel = [cell for cell in cells if (cell["method"], cell["bits"]) == (method, bits)]
        rows, columns = (sorted({cell[key] for cell in panel}) for key in ("lambda1", "lambda2"))
        values = np.full((len(rows), len(columns)), np.nan)
        for cell in panel:
            row, column = rows.index(cell["lambda1"]), columns.index(cell["lambda2"])
            values[row, column] = cell["mAP"].mean
        caption = f"mAP of {method} at {bits} bits"
        path = new_picture(f"sensitivity-{method}-{bits}", f"{caption}, over the weights")
        _draw_heat_map(values, rows, columns, f"{caption}: {_title(experiment)}", path)


def _draw_heat_map(
    values: NDArray[Any], rows: list[float], columns: list[float], title: str, out: Path
) -> None:
    """Draw values [λ1, λ2] as colours and numbers; the cell of a missing run (NaN) is empty."""
    size = 1.6 + 0.85 * len(columns), 1.4 + 0.6 * len(rows)
    with picture(out, *size, overwrite=True) as figure:
        axes = figure.add_subplot(xlabel="λ2 (entropy)", ylabel="λ1 (classification)")
        axes.grid(visible=False)
        image = axes.imshow(values, cmap="viridis", aspect="auto")
        dark = np.nanmin(values) + 0.6 * (np.nanmax(values) - np.nanmin(values))
        for i, j in np.argwhere(np.isfinite(values)):
            colour, text = "white" if values[i, j] < dark else "#111111", f"{values[i, j]:.3f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=8.5, color=colour)
        axes.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
        axes.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
        # Above a narrow map a long title would be cut off.
        axes.set_title(textwrap.fill(title, 18 + 9 * len(columns)))
        figure.colorbar(image, ax=axes)


# Points -------------------------------------------------------------------------------------------


def _runs_with(experiment: Experiment, *names: str) -> list[Run]:
    """Return the runs at the longest code of the first seed that have these arrays."""
    seed, bits = experiment.seeds[0], max(experiment.bits)
    runs = [run for run in experiment.runs if run.seed == seed and run.bits in (0, bits)]
    complete = [
        run for run in (read_run(run.path, names) for run in runs) if names[0] in run.arrays
    ]
    if not complete:
        raise DataError(
            f"{experiment.folder}: no run of {bits} bits, seed {seed}, keeps {names[0]}: run it "
            "again, for vectors with vectors = 2000 in the grid"
        )
    return complete


def _first_classes(packed: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the first class of each row of packed labels, -1 without any: int64 [n]."""
    dense = np.unpackbits(packed, axis=1)
    return np.where(dense.any(axis=1), dense.argmax(axis=1), -1).astype(np.int64)


def tsne(vectors: NDArray[np.float32], seed: int = 0) -> NDArray[np.float64]:
    """Return t-SNE of the directions of vectors [n, D]: float64 [n, 2]; deterministic by seed."""
    from sklearn.manifold import TSNE

    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    perplexity = min(30.0, max(2.0, (len(vectors) - 1) / 3))
    model = TSNE(perplexity=perplexity, init="pca", random_state=seed, n_jobs=1)
    return np.asarray(model.fit_transform(units), dtype=np.float64)


def cell_borders(codewords: NDArray[Any]) -> NDArray[np.float64]:
    """Return the angles of the borders between the Voronoi cells of unit-norm codewords [K, 2].

    The cells are sectors; the border of two neighbours on the circle is half-way between them.

    Returns:
        float64 [K], ascending in [-π, π).
    """
    angles = np.sort(np.arctan2(codewords[:, 1], codewords[:, 0]).astype(np.float64))
    middle = (angles + np.append(angles[1:], angles[0] + 2 * math.pi)) / 2
    return np.sort((middle + math.pi) % (2 * math.pi) - math.pi)


def _draw_points(
    title: str, panels: Mapping[str, Panel], class_names: Sequence[str], out: Path
) -> None:
    """Draw panels of points, coloured by class; with codewords, also their Voronoi cells.

    Points of a panel with codewords lie on the unit circle. They are drawn at random distances from
    it, so that they do not overlap.
    """
    columns, rows = min(len(panels), 3), -(-len(panels) // 3)
    size = _PANEL_INCHES * columns + 1.4, _PANEL_INCHES * rows + 0.4
    with picture(out, *size, overwrite=True, dpi=120) as figure:  # many points make large files
        for i, (head, (points, classes, codewords)) in enumerate(panels.items()):
            axes = figure.add_subplot(rows, columns, i + 1, xticks=[], yticks=[])
            axes.set_title(head, fontsize=10)
            axes.spines[["left", "bottom"]].set_color("#DDDDDD")
            radii = np.ones((len(points), 1))
            if codewords is not None:
                angles = cell_borders(codewords)
                ends = 1.45 * np.stack([np.cos(angles), np.sin(angles)])
                axes.plot(
                    [0 * ends[0], ends[0]], [0 * ends[1], ends[1]], color="#AAAAAA", linewidth=0.7
                )
                x, y = codewords.T
                axes.scatter(x, y, marker="*", s=110, color="#111111", edgecolors="white", zorder=3)
                axes.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
                axes.set_axis_off()
                noise = np.random.default_rng(0).standard_normal((len(points), 1))
                radii = 1 + 0.12 * noise.clip(-2.5, 2.5)
            colours = [f"C{c % 10}" if c >= 0 else "#BBBBBB" for c in classes.tolist()]
            x, y = (points * radii).T
            axes.scatter(x, y, c=colours, s=5, linewidths=0, alpha=0.75)
        names = enumerate(class_names[:20])
        handles = [axes.scatter([], [], color=f"C{c % 10}", label=name) for c, name in names]
        figure.legend(handles=handles, loc="outside right upper")
        figure.suptitle(title, x=0.01, ha="left")


def _draw_tsne(experiment: Experiment, new_picture: NewPicture) -> None:
    runs = _runs_with(experiment, "vectors", "vector_labels")
    panels: dict[str, Panel] = {}
    for run in runs[:_MAX_PANELS]:
        head = f"{experiment.row_name(run)}, mAP {run.map:.3f}"
        classes = _first_classes(run.arrays["vector_labels"])
        panels[head] = tsne(run.arrays["vectors"]), classes, None
    n = len(runs[0].arrays["vectors"])
    caption = (
        f"t-SNE of the directions of {n:,} items of the database, drawn at random by seed "
        f"{runs[0].seed} and the same for every method; a colour is an item's (first) class"
    )
    if len(runs) > _MAX_PANELS:
        caption += f"; {len(runs) - _MAX_PANELS} more rows have no panel"
    length = f"{max(experiment.bits)} bits"
    title = f"t-SNE of {n:,} database items by (first) class: {_title(experiment, length)}"
    _draw_points(title, panels, runs[0].class_names, new_picture("tsne", caption))


def _draw_codebooks(experiment: Experiment, new_picture: NewPicture) -> None:
    for i, run in enumerate(_runs_with(experiment, "vectors", "vector_labels", "codebooks")):
        Z, M = run.arrays["codebooks"], len(run.arrays["codebooks"])
        if Z.shape[2] != 2:
            raise DataError(
                f"{run.path}: codewords of {Z.shape[2]} dimensions cannot be drawn: set "
                "quantizer.subdim = 2 in the grid"
            )
        x = run.arrays["vectors"].reshape(-1, M, 2)
        classes = _first_classes(run.arrays["vector_labels"])
        nearest = np.einsum("nmd,mkd->nmk", x, Z).argmax(axis=2)
        panels: dict[str, Panel] = {}
        for m in range(min(M, _MAX_PANELS)):
            used = len(np.unique(nearest[:, m]))
            head = f"codebook {m + 1}: {used} of {len(Z[m])} codewords in use"
            panels[head] = x[:, m], classes, Z[m]
        name = experiment.row_name(run)
        title = (
            f"{name}, mAP {run.map:.3f}: codewords (stars), their cells, and items, drawn near the "
            "circle that they are on"
        )
        caption = (
            f"Codebooks in two dimensions, {name}, with {len(x):,} items of the database drawn at "
            f"random by seed {run.seed}"
        )
        if M > _MAX_PANELS:
            caption += f"; the first {_MAX_PANELS} of {M}"
        path = new_picture(f"voronoi-{i + 1}" if i else "voronoi", caption)
        _draw_points(title, panels, run.class_names, path)
