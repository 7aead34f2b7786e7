"""Pictures of an experiment: curves, the heat map of figure 4, t-SNE of figure 5, codebooks of figure 1, ranked galleries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.base import Dataset, ImageDataset
from ..errors import DataError, MismatchError
from ..files import check_output
from ..methods.registry import METHODS
from ..report.gallery import Ranked, save_gallery
from ..report.plots import plot_curves, plot_heat_map, plot_points
from .results import Experiment, read_experiment
from .runs import Run, read_run

_GALLERY_QUERIES, _GALLERY_COLUMNS, _GALLERY_ROWS = 3, 10, 30
_EMPTY = np.zeros((32, 32, 3), np.uint8)  # instead of an image that cannot be read
_PANELS = 9

_Draw = Callable[..., Path]
"""``(plot, name, *arguments, **options)``: calls ``plot`` for the file of that name."""


def draw_experiment(
    folder: str | Path,
    out: str | Path,
    *,
    images: Dataset | None = None,
    ending: str = "png",
    overwrite: bool = False,
) -> dict[str, Path]:
    """Draw the pictures of an experiment's kind from its runs.

    Args:
        folder: folder of the experiment.
        out: folder for the pictures, created if missing.
        images: the images of the data, for galleries of ranked results.
        ending: png, svg or pdf.

    Returns:
        Caption -> file.

    Raises:
        DataError: not an experiment, no finished run, a damaged one, or nothing to draw.
        MismatchError: ``images`` are not those of the runs.
        OutputExistsError: a picture exists.
    """
    experiment = read_experiment(folder)
    check_output(Path(out) / f"map.{ending}", overwrite=True)

    def draw(plot: Callable[..., Path], name: str, *what: Any, **options: Any) -> Path:
        return plot(*what, Path(out) / f"{name}.{ending}", overwrite=overwrite, **options)

    of_kind = {"sensitivity": _heat_maps, "tsne": _tsne, "voronoi": _codebooks}
    made = of_kind.get(experiment.about["kind"], _curves)(experiment, draw)
    return made | (_galleries(experiment, images, draw) if images is not None else {})


def _title(experiment: Experiment, at: str = "") -> str:
    name, protocol = experiment.about["data"]["name"], experiment.about["protocol"]
    return f"{name}, {at}, protocol {protocol}" if at else f"{name}, protocol {protocol}"


def _runs_at(experiment: Experiment, names: Sequence[str]) -> list[Run]:
    """The runs at the longest code of the first seed, with these arrays."""
    runs = [experiment.runs[i] for i in experiment.longest]
    found = [read_run(run.path, names) for run in runs if run.seed == experiment.seeds[0]]
    found = [run for run in found if names[0] in run.arrays]
    if not found:
        raise DataError(
            f"{experiment.folder}: no run of {experiment.at}, seed {experiment.seeds[0]}, keeps {names[0]}: run it again, for vectors with "
            "vectors = 2000 in the grid"
        )
    return found


def _curves(experiment: Experiment, draw: _Draw) -> dict[str, Path]:
    """mAP over bits and over likeness; precision-recall, precision at k and recall at k at the longest code."""
    bits, title = max(experiment.bits), _title(experiment, experiment.at)
    made = {}
    if len(experiment.bits) > 1:
        lines = {}
        for row in experiment.by_length("mAP"):
            there = [(b, row[str(b)]) for b in experiment.bits if row[str(b)]]
            lines[row["method"]] = np.array([(b, of.mean, of.deviation or 0.0) for b, of in there]).T
        made["mAP over the length of the code"] = draw(
            plot_curves, "map", lines, x="bits per code", y="mAP", title=_title(experiment), from_zero=False
        )
    groups: dict[str, list[Run]] = {}
    for i in experiment.longest:
        groups.setdefault(experiment.table[i]["method"], []).append(experiment.runs[i])
    for name, x, y, across, up in (
        ("pr", "pr_recall", "pr_precision", "recall", "precision"),
        ("precision", "ks", "precision", "k", "precision at k"),
        ("recall", "ks", "recall", "k", "recall at k"),
    ):
        curves = {}
        for method, runs in groups.items():
            n = min(len(run.arrays[x]) for run in runs)
            curves[method] = (runs[0].arrays[x][:n], np.mean([run.arrays[y][:n] for run in runs], axis=0))
        made[f"{up[0].upper()}{up[1:]} over {across} at {bits} bits"] = draw(
            plot_curves, name, curves, x=across, y=up, title=title, log_x=across == "k"
        )
    rows = [row for row in experiment.means(("NN10@100", "mAP")) if row.get("NN10@100")]
    if rows:
        points = {row["method"]: ([row["NN10@100"].mean], [row["mAP"].mean]) for row in rows}
        made[f"mAP over NN10@100 at {bits} bits"] = draw(
            plot_curves, "likeness", points, x="NN10@100", y="mAP", title=title, from_zero=False
        )
    return made


def _heat_maps(experiment: Experiment, draw: _Draw) -> dict[str, Path]:
    """mAP over the weights λ1 and λ2, one picture per variant of GPQ and length."""
    groups: dict[tuple[str, int], dict[tuple[float, float], dict[int, float]]] = {}
    for run in experiment.runs:
        if run.method in METHODS and METHODS[run.method].module == ".gpq":
            loss = run.about["settings"]["loss"]
            panel = groups.setdefault((run.method, run.bits), {})
            of_seeds = panel.setdefault((float(loss["lambda1"]), float(loss["lambda2"])), {})
            if run.seed in of_seeds:
                raise DataError(
                    f"{run.path}: another run has the same weights λ1 and λ2: pictures of kind sensitivity show nothing else that "
                    'variations change: take kind = "ablation"'
                )
            of_seeds[run.seed] = run.map
    if not groups:
        raise DataError(f"{experiment.folder}: no run of GPQ, which alone has the weights λ1 and λ2")
    differ = [len(set(values)) > 1 for values in zip(*groups, strict=True)]
    made = {}
    for key, panel in groups.items():
        down, across = (sorted(set(weights)) for weights in zip(*panel, strict=True))
        values = [[np.mean(list(panel.get((a, b), {0: np.nan}).values())) for b in across] for a in down]
        parts = [str(part) for part, varies in zip(key, differ, strict=True) if varies]
        at = f"{key[0]} at {key[1]} bits"
        made[f"mAP of {at}, over the weights"] = draw(
            plot_heat_map,
            "-".join(["sensitivity", *(parts or [str(key[1])])]),
            values,
            rows=[f"{a:g}" for a in down],
            columns=[f"{b:g}" for b in across],
            y="λ1 (classification)",
            x="λ2 (entropy)",
            title=f"mAP of {at}: {_title(experiment)}",
        )
    return made


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


def _tsne(experiment: Experiment, draw: _Draw) -> dict[str, Path]:
    every = _runs_at(experiment, ("vectors", "vector_labels"))
    runs = every[:_PANELS]
    panels = {}
    for run in runs:
        points, classes = tsne(run.arrays["vectors"]), _classes(run.arrays["vector_labels"])
        panels[f"{experiment.row_name(run)}, mAP {run.map:.3f}"] = (points, classes, None)
    n, names = len(runs[0].arrays["vectors"]), runs[0].about["class_names"]
    title = f"t-SNE of {n:,} database items by (first) class: {_title(experiment, experiment.at)}"
    caption = (
        f"t-SNE of the directions of {n:,} items of the database, drawn at random by seed {runs[0].seed} and the same for every method; a "
        "colour is an item's (first) class"
    )
    if len(every) > len(runs):
        caption += f"; {len(every) - len(runs)} more rows have no panel"
    return {caption: draw(plot_points, "tsne", panels, names, title=title)}


def _codebooks(experiment: Experiment, draw: _Draw) -> dict[str, Path]:
    made = {}
    for i, run in enumerate(_runs_at(experiment, ("vectors", "vector_labels", "codebooks"))):
        Z, M = run.arrays["codebooks"], len(run.arrays["codebooks"])
        if Z.shape[2] != 2:
            raise DataError(
                f"{run.path}: codewords of {Z.shape[2]} dimensions cannot be drawn: set quantizer.subdim = 2 in the grid"
            )
        x, classes = run.arrays["vectors"].reshape(-1, M, 2), _classes(run.arrays["vector_labels"])
        nearest = np.einsum("nmd,mkd->nmk", x, Z).argmax(axis=2)
        panels = {}
        for m in range(min(M, _PANELS)):
            used = f"codebook {m + 1}: {len(np.unique(nearest[:, m]))} of {len(Z[m])} codewords in use"
            panels[used] = (x[:, m], classes, Z[m])
        name = experiment.row_name(run)
        title = f"{name}, mAP {run.map:.3f}: codewords (stars), their cells, and items, drawn near the circle that they are on"
        caption = f"Codebooks in two dimensions, {name}, with {len(x):,} items of the database drawn at random by seed {run.seed}"
        caption += f"; the first {_PANELS} of {M}" if M > _PANELS else ""
        file = f"voronoi-{i + 1}" if i else "voronoi"
        made[caption] = draw(plot_points, file, panels, run.about["class_names"], title=title)
    return made


# Galleries --------------------------------------------------------------------------------------------------------------


def _galleries(experiment: Experiment, images: Dataset, draw: _Draw) -> dict[str, Path]:
    """The best results of a few queries, one line per row of the tables."""
    if not isinstance(images, ImageDataset):
        raise MismatchError(f"{images.name} holds {images.kind}: galleries need the images")
    needed = ("query_ids", "query_labels", "database_ids", "database_labels", "top_ids")
    runs = _runs_at(experiment, needed)[:_GALLERY_ROWS]
    names = [experiment.row_name(run) for run in runs]
    queries = runs[0].arrays["query_ids"]
    title = _title(experiment, experiment.at)
    made = {}
    chosen = np.linspace(0, len(queries) - 1, min(_GALLERY_QUERIES, len(queries)), dtype=int)
    for i, query in enumerate(queries[chosen].tolist()):
        rows = [_gallery_row(run, name, query, images) for run, name in zip(runs, names, strict=True)]
        # The picture has room for short names only.
        made[f"Best results of query {query}, from the top: {', '.join(names)}"] = draw(
            save_gallery, f"gallery-{i + 1}", rows, title=f"Query {query}: {title}", columns=_GALLERY_COLUMNS
        )
    return made


def _gallery_row(run: Run, name: str, query: int, images: ImageDataset) -> Ranked:
    """The best results of a query. Ids alone do not tell the images of the runs from others in another order, so what is relevant by
    the images' labels must agree with the run's; classes may be numbered differently."""
    arrays, classes = run.arrays, run.about["class_names"]
    q = int(np.flatnonzero(arrays["query_ids"] == query)[0])
    top = arrays["top_ids"][q][:_GALLERY_COLUMNS]
    row_of = {item: row for row, item in enumerate(arrays["database_ids"].tolist())}
    labels = arrays["database_labels"][[row_of[item] for item in top.tolist()]]
    relevant = (labels & arrays["query_labels"][q]).any(axis=1)
    image_of = {item: row for row, item in enumerate(images.ids.tolist())}
    rows = np.array([image_of.get(item, -1) for item in (query, *top.tolist())], np.int64)
    wrong = "an item's id is missing" if (rows < 0).any() else ""
    if not wrong and images.labels is not None and images.labels.has(rows).all():
        own = images.labels.dense(rows) > 0
        if not np.array_equal((own[1:] & own[0]).any(axis=1), relevant):
            wrong = "its labels are not those of the runs"
    if wrong:
        raise MismatchError(f"{images.name}: {wrong} (query {query}): give the images of the runs")
    pictures = [_EMPTY if image is None else image for image in images.read(rows)]
    dense = np.unpackbits(labels, axis=1)[:, : len(classes)]
    return Ranked(
        pictures[0],
        pictures[1:],
        relevant=[bool(each) for each in relevant],
        query_name=name,
        names=[" + ".join(str(classes[c]) for c in np.flatnonzero(item)) for item in dense],
    )
