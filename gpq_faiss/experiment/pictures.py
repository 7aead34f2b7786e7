"""Pictures of an experiment: curves, the heat map of figure 4, t-SNE of figure 5, codebooks of figure 1, ranked galleries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.base import Dataset, ImageDataset
from ..errors import DataError, MismatchError
from ..files import check_output
from ..report.gallery import Ranked, save_gallery
from ..report.maps import FlatCodebook, plot_codebooks, plot_scatters
from ..report.plots import plot_curves, plot_heat_map, plot_tradeoff
from .results import Experiment, read_experiment, scale_rows, weight_panels
from .runfile import Run, read_run

_GALLERY_QUERIES, _GALLERY_COLUMNS, _GALLERY_ROWS = 3, 10, 30
_EXTREMES = 5
"""Number of best (and worst) queries of the first table row in galleries."""
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

    of_kind = {"sensitivity": _heat_maps, "scale": _scales, "tsne": _tsne, "voronoi": _codebooks}
    made = of_kind.get(experiment.about["kind"], _curves)(experiment, draw)
    return made | (_galleries(experiment, images, draw) if images is not None else {})


def _title(experiment: Experiment, at: str = "") -> str:
    name, protocol = experiment.about["data"]["name"], experiment.about["protocol"]
    return f"{name}, {at}, protocol {protocol}" if at else f"{name}, protocol {protocol}"


def _runs_at(experiment: Experiment, names: Sequence[str]) -> list[Run]:
    """The runs at the longest code and the most labels of the first seed, with these arrays."""
    runs = [experiment.runs[i] for i in experiment.longest]
    return [read_run(run.path, names) for run in runs if run.seed == experiment.seeds[0]]


def _curves(experiment: Experiment, draw: _Draw) -> dict[str, Path]:
    """mAP over bits and over likeness; precision-recall, precision at k and recall at k at the longest code."""
    bits, title = max(experiment.bits), _title(experiment, experiment.at)
    quality = {row["method"]: row for row in experiment.by_length("mAP")}
    made = {}
    if len(experiment.bits) > 1 and len(experiment.labelled) == 1:
        lines = {}
        for name, row in quality.items():
            points = [
                (b, row[str(b)].mean, row[str(b)].deviation or 0.0) for b in experiment.bits if row[str(b)]
            ]
            lines[name] = tuple(np.array(points, np.float64).T)
        made["mAP over the length of the code"] = draw(
            plot_curves, "map", lines, x="bits per code", y="mAP", title=_title(experiment), from_zero=False
        )
    for name, x, y, across, up in (
        ("pr", "pr_recall", "pr_precision", "recall", "precision"),
        ("precision", "ks", "precision", "k", "precision at k"),
        ("recall", "ks", "recall", "k", "recall at k"),
    ):
        groups: dict[str, list[Run]] = {}
        for i in experiment.longest:
            groups.setdefault(experiment.table[i]["method"], []).append(experiment.runs[i])
        curves = {}
        for method, runs in groups.items():
            n = min(len(run.arrays[x]) for run in runs)
            curves[method] = (runs[0].arrays[x][:n], np.mean([run.arrays[y][:n] for run in runs], axis=0))
        made[f"{up[0].upper()}{up[1:]} over {across} at {bits} bits"] = draw(
            plot_curves, name, curves, x=across, y=up, title=title, log_x=across == "k"
        )
    return made | _likeness(experiment, draw, title)


def _likeness(experiment: Experiment, draw: _Draw, title: str) -> dict[str, Path]:
    """mAP over NN10@100 at the longest code: one colour per method, one marker per row."""
    groups: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for row in experiment.means(("NN10@100", "mAP")):
        if row.get("NN10@100"):
            name = row["method"]
            groups.setdefault(name.split(" ", 1)[0], {})[name] = ([row["NN10@100"].mean], [row["mAP"].mean])
    if not groups:
        return {}
    path = draw(plot_tradeoff, "likeness", groups, x="NN10@100", y="mAP", title=title, logarithmic=False)
    return {f"mAP over NN10@100 at {max(experiment.bits)} bits": path}


def _heat_maps(experiment: Experiment, draw: _Draw) -> dict[str, Path]:
    made = {}
    for panel in weight_panels(experiment):
        down, across = (sorted(set(weights)) for weights in zip(*panel.values, strict=True))
        values = [[np.mean(panel.values.get((a, b), np.nan)) for b in across] for a in down]
        made[f"mAP of {panel.at}, over the weights"] = draw(
            plot_heat_map,
            f"sensitivity-{panel.name or max(experiment.bits)}",
            values,
            rows=[f"{a:g}" for a in down],
            columns=[f"{b:g}" for b in across],
            y="λ1 (classification)",
            x="λ2 (entropy)",
            title=f"mAP of {panel.at}: {_title(experiment)}",
        )
    return made


def _scales(experiment: Experiment, draw: _Draw) -> dict[str, Path]:
    """mAP over unlabelled items (with the whole database), and mAP and ranking time over the database.

    One line per method, code length and number of labels.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in scale_rows(experiment):
        parts = [str(row["method"])]
        parts += [f"{row['bits']} bits"] if len(experiment.bits) > 1 and row["bits"] != "any" else []
        parts += [str(row["labelled"])] if "labelled" in row else []
        groups.setdefault(", ".join(parts), []).append(row)
    made = {}
    for name, x, y, up, fixed in (
        ("unlabelled", "unlabelled", "mAP", "mAP", "database"),
        ("database", "database", "mAP", "mAP", "unlabelled"),
        ("rank", "database", "rank s", "seconds of ranking", "unlabelled"),
    ):
        lines = {}
        for line, rows in groups.items():
            largest = max(row[fixed] for row in rows)
            points = sorted((row[x], row[y].mean) for row in rows if row[fixed] == largest)
            if len(points) > 1:
                lines[line] = tuple(np.array(points, np.float64).T)
        if lines:
            items = {"unlabelled": "unlabelled items", "database": "items in the database"}[x]
            title = str(experiment.about["data"]["name"])
            path = draw(plot_curves, name, lines, x=items, y=up, title=title, log_x=True)
            made[f"{up[0] if up == 'mAP' else up[0].upper()}{up[1:]} over {items}"] = path
    if not made:
        raise DataError(f"{experiment.folder}: one size alone makes no line: run more of the grid")
    return made


# Vectors ----------------------------------------------------------------------------------------------------------------


def _classes(packed: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The first class of each row of packed labels, -1 without any: int64 [n]."""
    dense = np.unpackbits(packed, axis=1)
    return np.where(dense.any(axis=1), dense.argmax(axis=1), -1).astype(np.int64)


def _with_vectors(experiment: Experiment) -> list[Run]:
    """Runs of the first seed at the longest code, with their vectors."""
    runs = _runs_at(experiment, ("vectors", "vector_labels", "codebooks"))
    runs = [run for run in runs if "vectors" in run.arrays]
    if not runs:
        raise DataError(
            f"{experiment.folder}: no run keeps vectors: set vectors = 2000 in the grid and run it again"
        )
    return runs


def tsne(vectors: NDArray[np.float32], seed: int = 0) -> NDArray[np.float64]:
    """t-SNE of the directions of vectors [n, D]: float64 [n, 2]; deterministic by seed."""
    from sklearn.manifold import TSNE

    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    perplexity = min(30.0, max(2.0, (len(vectors) - 1) / 3))
    model = TSNE(perplexity=perplexity, init="pca", random_state=seed, n_jobs=1)
    return np.asarray(model.fit_transform(units), dtype=np.float64)


def _tsne(experiment: Experiment, draw: _Draw) -> dict[str, Path]:
    every = _with_vectors(experiment)
    runs, first = every[:_PANELS], every[0].arrays["vector_labels"]
    panels = {
        f"{experiment.row_name(run)}, mAP {run.map:.3f}": (
            tsne(run.arrays["vectors"]),
            _classes(run.arrays["vector_labels"]),
        )
        for run in runs
    }
    several = bool((np.unpackbits(first, axis=1).sum(axis=1) > 1).any())
    colour = "first class" if several else "class"
    title = f"t-SNE of {len(first):,} database items by {colour}: {_title(experiment, experiment.at)}"
    caption = (
        f"t-SNE of the directions of {len(first):,} items of the database, drawn at random by seed {runs[0].seed} and the same for every "
        f"method; a colour is an item's {colour}"
    )
    if len(every) > len(runs):
        caption += f"; {len(every) - len(runs)} more rows have no panel"
    return {caption: draw(partial(plot_scatters, panels), "tsne", runs[0].about["class_names"], title=title)}


def _codebooks(experiment: Experiment, draw: _Draw) -> dict[str, Path]:
    made = {}
    runs = [run for run in _with_vectors(experiment) if "codebooks" in run.arrays]
    for i, run in enumerate(runs):
        Z = run.arrays["codebooks"]
        M, _, d = Z.shape
        if d != 2:
            raise DataError(
                f"{run.path}: codewords of {d} dimensions cannot be drawn: set quantizer.subdim = 2 in the grid"
            )
        x, classes = run.arrays["vectors"].reshape(-1, M, 2), _classes(run.arrays["vector_labels"])
        nearest = np.einsum("nmd,mkd->nmk", x, Z).argmax(axis=2)
        books = []
        for m in range(min(M, _PANELS)):
            used = f"codebook {m + 1}: {len(np.unique(nearest[:, m]))} of {len(Z[m])} codewords in use"
            books.append(FlatCodebook(used, Z[m], x[:, m], classes))
        name = experiment.row_name(run)
        title = f"{name}, mAP {run.map:.3f}: codewords (stars), their cells, and items, drawn near the circle that they are on"
        caption = f"Codebooks in two dimensions, {name}, with {len(x):,} items of the database drawn at random by seed {run.seed}"
        caption += f"; the first {_PANELS} of {M}" if M > _PANELS else ""
        file = f"voronoi-{i + 1}" if i else "voronoi"
        made[caption] = draw(partial(plot_codebooks, books), file, run.about["class_names"], title=title)
    return made


# Galleries --------------------------------------------------------------------------------------------------------------


def _galleries(experiment: Experiment, images: Dataset, draw: _Draw) -> dict[str, Path]:
    """The best results of a few queries, one line per row of the tables; and the best and worst queries of the first row."""
    if not isinstance(images, ImageDataset):
        raise MismatchError(f"{images.name} holds {images.kind}: galleries need the images")
    needed = ("ap", "query_ids", "query_labels", "database_ids", "database_labels", "top_ids")
    runs = _runs_at(experiment, needed)
    if not runs:
        raise DataError(
            f"{experiment.folder}: no run of {experiment.at}, seed {experiment.seeds[0]}: nothing to show"
        )
    shown = runs[:_GALLERY_ROWS]
    names = [experiment.row_name(run) for run in shown]
    queries, ap = shown[0].arrays["query_ids"], shown[0].arrays["ap"]
    # The picture has room for short names only.
    order = ", ".join(names) + (
        f" ({len(runs) - len(shown)} more have no line)" if len(runs) > len(shown) else ""
    )
    title, columns = _title(experiment, experiment.at), _GALLERY_COLUMNS
    made = {}
    for i, place in enumerate(
        np.linspace(0, len(queries) - 1, min(_GALLERY_QUERIES, len(queries)), dtype=int)
    ):
        query = int(queries[place])
        rows = [_gallery_row(run, name, query, images) for run, name in zip(shown, names, strict=True)]
        made[f"Best results of query {query}, from the top: {order}"] = draw(
            save_gallery, f"gallery-{i + 1}", rows, title=f"Query {query}: {title}", columns=columns
        )
    by_ap = np.argsort(ap, kind="stable")[: int(np.isfinite(ap).sum())]
    for which, places in (("best", by_ap[::-1][:_EXTREMES]), ("worst", by_ap[:_EXTREMES])):
        rows = [_gallery_row(shown[0], f"AP {ap[p]:.3f}", int(queries[p]), images) for p in places]
        span = f"{ap[places[0]]:.3f} to {ap[places[-1]]:.3f}" if len(places) else "unknown"
        title = f"{which.capitalize()} queries of {names[0]}, AP {span}"
        made[title] = draw(save_gallery, f"gallery-{which}", rows, title=title, columns=columns)
    return made


def _gallery_row(run: Run, name: str, query: int, images: ImageDataset) -> Ranked:
    """The best results of a query. Ids alone do not tell the images of the runs from others in another order, so what is relevant by
    the images' labels must agree with the run's; classes may be numbered differently."""
    arrays, classes = run.arrays, run.about["class_names"]
    q = int(np.flatnonzero(arrays["query_ids"] == query)[0])
    top = arrays["top_ids"][q][:_GALLERY_COLUMNS]
    row_of = {int(item): row for row, item in enumerate(arrays["database_ids"])}
    labels = arrays["database_labels"][[row_of[int(item)] for item in top]]
    relevant = (labels & arrays["query_labels"][q]).any(axis=1)
    image_of = {int(item): row for row, item in enumerate(images.ids)}
    items = [query, *map(int, top)]
    for item in items:
        if item not in image_of:
            raise MismatchError(f"{images.name} has no image with the id {item}: give the images of the runs")
    rows = np.array([image_of[item] for item in items], np.int64)
    if images.labels is not None and images.labels.has(rows).all():
        own = images.labels.dense(rows) > 0
        if not np.array_equal((own[1:] & own[0]).any(axis=1), relevant):
            raise MismatchError(
                f"{images.name}: its labels are not those of the runs (query {query}): give the images of the runs"
            )
    pictures = [_EMPTY if image is None else image for image in images.read(rows)]
    dense = np.unpackbits(labels, axis=1)[:, : len(classes)]
    return Ranked(
        pictures[0],
        pictures[1:],
        relevant=[bool(each) for each in relevant],
        query_name=name,
        names=[" + ".join(str(classes[c]) for c in np.flatnonzero(item)) for item in dense],
    )
