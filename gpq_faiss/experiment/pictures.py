"""Pictures of an experiment: curves, the heat map of figure 4, t-SNE of figure 5, codebooks of figure 1, ranked galleries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.base import Dataset, ImageDataset
from ..errors import DataError, MismatchError
from ..evaluation.tables import Spread
from ..files import check_output
from ..report.gallery import Ranked, save_gallery
from ..report.maps import FlatCodebook, plot_codebooks, plot_curves, plot_heat_map, plot_scatters
from ..report.plots import plot_map_bits, plot_tradeoff
from .report import scale_rows, weight_panels, weights_of
from .results import (
    Experiment,
    likeness_rows,
    main_rows,
    mean_curves,
    read_experiment,
    row_name,
    row_names,
    run_labelled,
    runs_at,
)
from .runfile import FIGURES, Run, read_run

_GALLERY_QUERIES, _GALLERY_COLUMNS, _GALLERY_ROWS = 3, 10, 30
_EXTREMES = 5
"""Number of best (and worst) queries of the first table row in galleries."""
_EMPTY = np.zeros((32, 32, 3), np.uint8)  # instead of an image that cannot be read
_PANELS = 9


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
    experiment = read_experiment(folder, FIGURES)
    out = Path(out)
    check_output(out / f"map.{ending}", overwrite=True)
    kind = experiment.about["kind"]
    made: dict[str, Path] = {}

    def where(name: str) -> Path:
        return out / f"{name}.{ending}"

    if kind in ("table", "ablation"):
        made |= _curves(experiment, where, overwrite)
        made |= _likeness(experiment, where("likeness"), overwrite)
    if kind == "sensitivity":
        made |= _heat_maps(experiment, where, overwrite)
    if kind == "scale":
        made |= _scales(experiment, where, overwrite)
    if kind == "tsne":
        made |= _tsne(experiment, where("tsne"), overwrite)
    if kind == "voronoi":
        made |= _codebooks(experiment, where, overwrite)
    if images is not None:
        made |= _galleries(experiment, images, where, overwrite)
    return made


def _at(experiment: Experiment, bits: int) -> str:
    more = f", {experiment.labelled[-1]}" if len(experiment.labelled) > 1 else ""
    return f"{experiment.about['data']['name']}, {bits} bits{more}, protocol {experiment.about['protocol']}"


def _curves(experiment: Experiment, where: Any, overwrite: bool) -> dict[str, Path]:
    """mAP over bits; precision-recall, precision at k and recall at k at the longest code."""
    bits = max(experiment.bits)
    title = _at(experiment, bits)
    made = {}
    if len(experiment.bits) > 1 and len(experiment.labelled) == 1:
        series = {
            str(row["method"]): {
                b: row[str(b)] for b in experiment.bits if isinstance(row.get(str(b)), Spread)
            }
            for row in main_rows(experiment)
        }
        caption = "mAP over the length of the code"
        name = f"{experiment.about['data']['name']}, protocol {experiment.about['protocol']}"
        made[caption] = plot_map_bits(series, where("map"), title=name, overwrite=overwrite)
    for name, x, y, across, up, log in (
        ("pr", "pr_recall", "pr_precision", "recall", "precision", False),
        ("precision", "ks", "precision", "k", "precision at k", True),
        ("recall", "ks", "recall", "k", "recall at k", True),
    ):
        curves = mean_curves(experiment, bits, x, y)
        caption = f"{up[0].upper()}{up[1:]} over {across} at {bits} bits"
        made[caption] = plot_curves(
            curves, where(name), x=across, y=up, title=title, log_x=log, overwrite=overwrite
        )
    return made


def _likeness(experiment: Experiment, path: Path, overwrite: bool) -> dict[str, Path]:
    """mAP over NN10@100 at the longest code: one colour per method, one marker per row."""
    bits = max(experiment.bits)
    column = "NN10@100"
    rows = {str(row["method"]): row for row in main_rows(experiment)}
    groups: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for like in likeness_rows(experiment, bits):
        name = str(like["method"])
        quality = rows[name].get(str(bits)) if name in rows else None
        if isinstance(quality, Spread) and isinstance(like[column], Spread):
            points = groups.setdefault(name.split(" ", 1)[0], {})
            points[name] = ([like[column].mean], [quality.mean])
    if not groups:
        return {}
    caption = f"mAP over {column} at {bits} bits"
    title = _at(experiment, bits)
    plotted = plot_tradeoff(
        groups, path, x=column, y="mAP", title=title, logarithmic=False, overwrite=overwrite
    )
    return {caption: plotted}


def _heat_maps(experiment: Experiment, where: Any, overwrite: bool) -> dict[str, Path]:
    made = {}
    for panel in weight_panels(experiment):
        first = sorted({weights_of(run)[0] for run in panel.runs})
        second = sorted({weights_of(run)[1] for run in panel.runs})
        values = np.full((len(first), len(second)), np.nan)
        for i, a in enumerate(first):
            for j, b in enumerate(second):
                found = [run.map for run in panel.runs if weights_of(run) == (a, b)]
                values[i, j] = np.mean(found) if found else np.nan
        made[f"mAP of {panel.at}, over the weights"] = plot_heat_map(
            values,
            where(f"sensitivity-{panel.name or panel.bits}"),
            rows=[f"{a:g}" for a in first],
            columns=[f"{b:g}" for b in second],
            y="λ1 (classification)",
            x="λ2 (entropy)",
            title=f"mAP of {panel.at}: {experiment.about['data']['name']}, protocol {experiment.about['protocol']}",
            overwrite=overwrite,
        )
    return made


def _scales(experiment: Experiment, where: Any, overwrite: bool) -> dict[str, Path]:
    """mAP over unlabelled items (with the whole database), and mAP and ranking time over the database.

    One line per method, code length and number of labels.
    """
    lines_of: dict[str, list[dict[str, Any]]] = {}
    for row in scale_rows(experiment):
        parts = [str(row["method"])]
        parts += [f"{row['bits']} bits"] if len(experiment.bits) > 1 and row["bits"] != "any" else []
        parts += [str(row["labelled"])] if "labelled" in row else []
        lines_of.setdefault(", ".join(parts), []).append(row)
    made = {}
    for name, x, y, fixed in (
        ("unlabelled", "unlabelled", "mAP", "database"),
        ("database", "database", "mAP", "unlabelled"),
        ("rank", "database", "rank s", "unlabelled"),
    ):
        lines: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        for line, rows in lines_of.items():
            largest = max(row[fixed] for row in rows)
            points = sorted((row[x], row[y].mean) for row in rows if row[fixed] == largest)
            if len(points) > 1:
                across, up = np.array(points, np.float64).T
                lines[line] = (across, up)
        if lines:
            label = {"rank s": "seconds of ranking"}.get(y, y)
            items = {"unlabelled": "unlabelled items", "database": "items in the database"}[x]
            made[f"{label[0].upper() + label[1:] if y != 'mAP' else y} over {items}"] = plot_curves(
                lines,
                where(name),
                x=items,
                y=label,
                title=str(experiment.about["data"]["name"]),
                log_x=True,
                overwrite=overwrite,
            )
    if not made:
        raise DataError(f"{experiment.folder}: one size alone makes no line: run more of the grid")
    return made


def _classes(packed: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The first class of each row of packed labels, -1 without any: int64 [n]."""
    dense = np.unpackbits(packed, axis=1)
    return np.where(dense.any(axis=1), dense.argmax(axis=1), -1).astype(np.int64)


def _with_vectors(experiment: Experiment) -> list[Run]:
    """Runs of the first seed at the longest code, with their vectors."""
    bits, seed = max(experiment.bits), experiment.seeds[0]
    runs = [
        read_run(run.path, {"vectors", "vector_labels", "codebooks"})
        for run in runs_at(experiment, bits, experiment.labelled[-1])
        if run.seed == seed
    ]
    runs = [run for run in runs if "vectors" in run.arrays]
    if not runs:
        raise DataError(
            f"{experiment.folder}: no run keeps vectors: set vectors = 2000 in the grid and run it again"
        )
    return runs


def tsne(vectors: NDArray[np.float32], seed: int = 0) -> NDArray[np.float64]:
    """t-SNE of the directions of vectors [n, D]: float64 [n, 2]; deterministic by seed."""
    from sklearn.manifold import TSNE

    n = len(vectors)
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    perplexity = min(30.0, max(2.0, (n - 1) / 3))
    model = TSNE(perplexity=perplexity, init="pca", random_state=seed, n_jobs=1)
    return np.asarray(model.fit_transform(units), dtype=np.float64)


def _tsne(experiment: Experiment, path: Path, overwrite: bool) -> dict[str, Path]:
    every = _with_vectors(experiment)
    runs = every[:_PANELS]
    panels = {
        f"{row_name(experiment, run)}, mAP {run.map:.3f}": (
            tsne(run.arrays["vectors"]),
            _classes(run.arrays["vector_labels"]),
        )
        for run in runs
    }
    items, first = len(runs[0].arrays["vectors"]), runs[0].arrays["vector_labels"]
    several = bool((np.unpackbits(first, axis=1).sum(axis=1) > 1).any())
    colour = "first class" if several else "class"
    title = f"t-SNE of {items:,} database items by {colour}: {_at(experiment, max(experiment.bits))}"
    names = list(runs[0].about["class_names"])
    caption = (
        f"t-SNE of the directions of {items:,} items of the database, drawn at random by seed {runs[0].seed} and the same for every "
        f"method; a colour is an item's {colour}"
    )
    if len(every) > len(runs):
        caption += f"; {len(every) - len(runs)} more rows have no panel"
    return {caption: plot_scatters(panels, names, path, title=title, overwrite=overwrite)}


def _codebooks(experiment: Experiment, where: Any, overwrite: bool) -> dict[str, Path]:
    made = {}
    runs = [run for run in _with_vectors(experiment) if "codebooks" in run.arrays]
    for i, run in enumerate(runs):
        Z = run.arrays["codebooks"]
        M, _, d = Z.shape
        if d != 2:
            raise DataError(
                f"{run.path}: codewords of {d} dimensions cannot be drawn: set quantizer.subdim = 2 in the grid"
            )
        x = run.arrays["vectors"].reshape(-1, M, 2)
        classes = _classes(run.arrays["vector_labels"])
        nearest = np.einsum("nmd,mkd->nmk", x, Z).argmax(axis=2)
        books = [
            FlatCodebook(
                f"codebook {m + 1}: {len(np.unique(nearest[:, m]))} of {len(Z[m])} codewords in use",
                Z[m],
                x[:, m],
                classes,
            )
            for m in range(min(M, _PANELS))
        ]
        name = row_name(experiment, run)
        title = f"{name}, mAP {run.map:.3f}: codewords (stars), their cells, and items, drawn near the circle that they are on"
        caption = f"Codebooks in two dimensions, {name}, with {len(x):,} items of the database drawn at random by seed {run.seed}"
        if M > _PANELS:
            caption += f"; the first {_PANELS} of {M}"
        made[caption] = plot_codebooks(
            books,
            list(run.about["class_names"]),
            where("voronoi" if not i else f"voronoi-{i + 1}"),
            title=title,
            overwrite=overwrite,
        )
    return made


def _galleries(experiment: Experiment, images: Dataset, where: Any, overwrite: bool) -> dict[str, Path]:
    """The best results of a few queries, one line per row of the tables."""
    if not isinstance(images, ImageDataset):
        raise MismatchError(f"{images.name} holds {images.kind}: galleries need the images")
    bits, seed = max(experiment.bits), experiment.seeds[0]
    needed = {"ap", "query_ids", "query_labels", "database_ids", "database_labels", "top_ids"}
    runs = [
        read_run(run.path, needed)
        for run in runs_at(experiment, bits, experiment.labelled[-1])
        if run.seed == seed
    ]
    if not runs:
        raise DataError(f"{experiment.folder}: no run of {bits} bits, seed {seed}: nothing to show")
    names = row_names(experiment)
    runs = sorted(runs, key=lambda run: names.index(row_name(experiment, run)))
    shown = runs[:_GALLERY_ROWS]
    queries = shown[0].arrays["query_ids"]
    chosen = queries[np.linspace(0, len(queries) - 1, min(_GALLERY_QUERIES, len(queries)), dtype=int)]
    # The picture has room for short names only.
    order = ", ".join(row_name(experiment, run) for run in shown)
    order += f" ({len(runs) - len(shown)} more have no line)" if len(runs) > len(shown) else ""
    made = {}
    for i, query in enumerate(chosen):
        rows = [_gallery_row(run, row_name(experiment, run), int(query), images) for run in shown]
        title = f"Query {int(query)}: {_at(experiment, bits)}, {run_labelled(shown[0])}"
        made[f"Best results of query {int(query)}, from the top: {order}"] = save_gallery(
            rows, where(f"gallery-{i + 1}"), title=title, columns=_GALLERY_COLUMNS, overwrite=overwrite
        )
    first, ap = shown[0], shown[0].arrays["ap"]
    by_ap = np.argsort(ap, kind="stable")[: int(np.isfinite(ap).sum())]
    for which, places in (("best", by_ap[::-1][:_EXTREMES]), ("worst", by_ap[:_EXTREMES])):
        rows = [_gallery_row(first, f"AP {ap[p]:.3f}", int(queries[p]), images) for p in places]
        span = f"{ap[places[0]]:.3f} to {ap[places[-1]]:.3f}" if len(places) else "unknown"
        title = f"{which.capitalize()} queries of {row_name(experiment, first)}, AP {span}"
        made[title] = save_gallery(
            rows, where(f"gallery-{which}"), title=title, columns=_GALLERY_COLUMNS, overwrite=overwrite
        )
    return made


def _gallery_row(run: Run, name: str, query: int, images: ImageDataset) -> Ranked:
    of_run = run.arrays
    q = int(np.flatnonzero(of_run["query_ids"] == query)[0])
    top = of_run["top_ids"][q][:_GALLERY_COLUMNS]
    labels = {int(i): row for i, row in zip(of_run["database_ids"], of_run["database_labels"], strict=True)}
    relevant = [bool((labels[int(i)] & of_run["query_labels"][q]).any()) for i in top]
    rows = _rows_of(images, [query, *(int(i) for i in top)])
    _check_same_items(images, rows, relevant)
    pictures = [_EMPTY if image is None else image for image in images.read(rows)]
    classes = list(run.about["class_names"])
    return Ranked(
        pictures[0],
        pictures[1:],
        relevant=relevant,
        query_name=name,
        names=[_class_text(classes, labels[int(i)]) for i in top],
    )


def _class_text(classes: Sequence[str], packed: NDArray[np.uint8]) -> str:
    """The names of an item's classes."""
    return " + ".join(str(classes[int(c)]) for c in np.flatnonzero(np.unpackbits(packed)[: len(classes)]))


def _rows_of(images: ImageDataset, ids: Sequence[int]) -> NDArray[np.int64]:
    row_of = {int(item): row for row, item in enumerate(images.ids)}
    unknown = [item for item in ids if item not in row_of]
    if unknown:
        raise MismatchError(
            f"{images.name} has no image with the id {unknown[0]}: give the images of the runs"
        )
    return np.array([row_of[item] for item in ids], np.int64)


def _check_same_items(images: ImageDataset, rows: NDArray[np.int64], relevant: Sequence[bool]) -> None:
    """Check that relevance by the images' labels agrees with the run's.

    Ids alone do not suffice: images in another order have the same ids. Classes may be numbered differently.
    """
    if images.labels is None or not images.labels.has(rows).all():
        return
    own = images.labels.dense(rows) > 0
    if [bool((own[0] & item).any()) for item in own[1:]] != list(relevant):
        raise MismatchError(
            f"{images.name}: its labels are not those of the runs (query {int(images.ids[rows[0]])}): give the images of the runs"
        )
