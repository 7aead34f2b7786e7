"""Run the missing runs of a grid.

    grid, data  ─►  FOLDER/  (experiment.json, one HDF5 per run)

A folder holds one experiment: one grid on one data set under one protocol. A second call makes only
runs that are missing or outdated, and continues interrupted trainings from their checkpoints in
``FOLDER/.partial``. A failed run is reported in one line and does not stop the others.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ..config import from_dict
from ..data.base import Dataset, Reader
from ..data.open import open_data
from ..data.protocols import Split, make_split
from ..errors import DataError, GpqError, UsageError, one_line
from ..evaluation.scorers import ScoreFunction, distinct_rows
from ..files import check_output, unfinished
from ..methods.coders import ProductCoder, Rows
from ..methods.measure import (
    Coded,
    encode_database,
    fit_and_encode,
    input_neighbours,
)
from ..methods.registry import find_method, make_method
from ..methods.trainable import embed_rows
from ..nn.device import resolve_device
from ..progress import stage
from ..training.loop import RunOptions, fit
from .grid import Grid, RunSpec, plan, read_grid
from .runs import DESCRIPTION, begin, is_done, read_run, write_run

log = logging.getLogger(__name__)

KS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
"""The k of precision and recall, up to the size of the database."""
TOP = 1000
"""Number of result ids stored per query."""
MAX_CODE_BYTES = 256
"""Maximum code size to store; longer codes (``float``) are in the data anyway."""

_PARTIAL = ".partial"
_BLOCK = 64  # queries whose results are sorted at a time
_VECTOR_STREAM = 102  # of random numbers


@dataclass
class Summary:
    """Result of a call.

    Attributes:
        total: number of runs of the grid.
        existing, completed: number of runs that earlier calls and this one completed.
        failed: name of a run -> why it failed.
    """

    folder: Path
    total: int
    existing: int
    completed: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def run_experiment(
    grid: Grid | str | Path,
    data: object,
    out: str | Path,
    *,
    device: str = "cpu",
    jobs: int = 1,
    overwrite: bool = False,
) -> Summary:
    """Run all runs of ``grid`` that are missing in the folder ``out``.

    Args:
        grid: a grid, the name of a built-in one, or a TOML file.
        data: anything that :func:`gpq_faiss.open_data` accepts.
        out: folder of the experiment.
        device: device of networks.
        jobs: number of concurrent runs, each in a process with one thread.
        overwrite: repeat finished runs; each is replaced once the new one is complete.

    Raises:
        UsageError: an invalid grid, setting or option.
        DataError: data that cannot be read or split; a folder that cannot be written, or in which
            another process works.
        MismatchError: the folder contains another experiment.
    """
    grid = grid if isinstance(grid, Grid) else read_grid(grid)
    options = RunOptions(str(resolve_device(device)), resume=not overwrite)
    folder = check_output(out, overwrite=True, folder=True)
    if folder.exists() and not (folder / DESCRIPTION).exists() and any(folder.glob("[!.]*")):
        raise DataError(f"{folder} holds something other than an experiment: choose another --out")
    dataset = open_data(data)
    specs = plan(grid, dataset)
    todo = [spec for spec in specs if overwrite or not is_done(folder, spec)]
    log.info("%s: %d of %d runs are to be made", grid.name, len(todo), len(specs))
    with unfinished(folder / _PARTIAL, folder, keep=[_work_folder(spec) for spec in todo]):
        begin(folder, grid, dataset, specs)
        summary = Summary(folder, len(specs), len(specs) - len(todo))
        results = Parallel(n_jobs=jobs, return_as="generator_unordered")(
            delayed(complete_run)(dataset, spec, folder, options) for spec in todo
        )
        try:
            with (
                contextlib.closing(results),
                stage(grid.name, len(specs), "run", done=summary.existing) as runs,
            ):
                for name, failure in results:
                    runs.update()
                    if failure:
                        summary.failed[name] = failure
                        log.warning("%s failed: %s", name, failure)
                    else:
                        summary.completed += 1
                        log.info("%s: mAP %.4f", name, read_run(folder / f"{name}.h5").map)
        except BrokenProcessPool:
            raise DataError(
                f"{folder}: a process was killed (out of memory?): run the same command again, "
                "with fewer --jobs"
            ) from None
    return summary


def _work_folder(spec: RunSpec) -> str:
    """Return the name of the folder for the checkpoints of a run."""
    return f"{spec.name}-{spec.identity}"


def complete_run(
    dataset: Dataset, spec: RunSpec, folder: Path, options: RunOptions
) -> tuple[str, str]:
    """Execute one run and write its file.

    Returns:
        The name of the run, and why it failed, empty if it did not; only signals are raised.
    """
    work = folder / _PARTIAL / _work_folder(spec)
    try:
        # On one thread concurrent runs do not compete, and sums have a fixed order.
        with threadpool_limits(1):
            arrays, measured = compute(spec, dataset, work, options)
            write_run(folder / f"{spec.name}.h5", spec, arrays, measured)
        shutil.rmtree(work, ignore_errors=True)
    except GpqError as error:
        return spec.name, one_line(error, 500)
    except Exception as error:  # a defect of one method must not stop the others
        log.debug("%s", spec.name, exc_info=True)
        return spec.name, f"{type(error).__name__}: {one_line(error, 500)}"
    return spec.name, ""


# One run ------------------------------------------------------------------------------------------


def compute(
    spec: RunSpec, dataset: Dataset, work: Path, options: RunOptions
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Train a method, encode the database, rank it for every query, and measure the ranking.

    Args:
        work: the folder for checkpoints of a training, which is resumed if there are any.

    Returns:
        The arrays of the file, enough to rank again under another convention, and its measured
        attributes.

    Raises:
        GpqError: the split is empty, or the method cannot be fitted or applied.
    """
    split = make_split(dataset, **spec.split_args)
    if not len(split.query) or not len(split.database):
        raise UsageError(
            f"{dataset.name}: labelled {spec.split_args['labelled']} leaves {len(split.query):,} "
            f"queries and {len(split.database):,} items to search: label fewer"
        )
    labels = dataset.require_labels()
    # Items whose vectors are stored, the same for all methods of a seed.
    random = np.random.default_rng([spec.seed, _VECTOR_STREAM])
    keep = random.permutation(split.database)[: spec.vectors]
    if find_method(spec.method).deep:
        coded = _train_and_encode(spec, dataset, split, work, options, keep)
    else:
        coded = fit_and_encode(
            make_method(spec.method, spec.bits or 32, spec.seed),
            dataset,
            split,
            queries=split.query,
            database=split.database,
            keep=keep,
        )
    start = time.perf_counter()
    ranking = coded.rank(labels, ks=KS)
    rank_seconds = time.perf_counter() - start
    recall = coded.neighbour_recall(input_neighbours(dataset, coded.query_rows, coded.base_rows))
    attributes = {
        "bits_kept": coded.coder.bits + coded.coder.extra_bits,
        "map": ranking.map,
        "convention": ranking.convention,
        "neighbour_recall": None if recall is None else vars(recall),
        "seconds": {
            "fit": round(coded.fit_seconds, 3),
            "encode": round(coded.encode_seconds, 3),
            "rank": round(rank_seconds, 3),
        },
        "counts": {
            "queries": len(coded.query_rows),
            "labelled": len(split.labelled),
            "unlabelled": len(split.unlabelled),
            "database": len(coded.base_rows),
        },
        **coded.extra,
        "class_names": list(labels.class_names),
    }
    top = top_rows(coded.score, coded.codes, len(coded.query_rows), TOP)
    arrays = {
        "ap": ranking.ap,
        "ks": np.array(list(ranking.precision), np.int64),
        "precision": np.array(list(ranking.precision.values())),
        "recall": np.array(list(ranking.recall.values())),
        "pr_recall": ranking.pr_recall,
        "pr_precision": ranking.pr_precision,
        "top_ids": dataset.ids[coded.base_rows[top]],
    }
    sides = {"query": coded.query_rows, "database": coded.base_rows, "vector": coded.vector_rows}
    for side, rows in sides.items():
        arrays |= {f"{side}_rows": rows, f"{side}_ids": dataset.ids[rows]}
        arrays[f"{side}_labels"] = labels.take(rows).packed
    # LOPQ has other tables in every inverted list; its runs are ranked again by the method alone.
    tables, _ = coded.scorer
    if isinstance(tables, np.ndarray):
        arrays["tables"] = tables
    if coded.codes.shape[1] <= MAX_CODE_BYTES:
        arrays["codes"] = coded.codes
    if spec.vectors:
        arrays["vectors"] = coded.vectors
    if isinstance(coded.coder, ProductCoder):
        arrays["codebooks"] = coded.coder.codebooks
    return arrays, attributes


def _train_and_encode(
    spec: RunSpec, dataset: Dataset, split: Split, work: Path, options: RunOptions, keep: Rows
) -> Coded:
    """Train a network, and encode queries and database by its vectors and its coder."""
    device = torch.device(options.device)
    fitted = fit(
        find_method(spec.method).load(),
        dataset,
        split,
        from_dict(dict(spec.settings)),
        folder=work,
        identity=spec.identity,
        options=options,
    )
    method = fitted.method
    with Reader(dataset, fitted.reader.image_size) as reader:
        reader.preload()
        coded = encode_database(
            method.coder(),
            *embed_rows(method, reader, split.query, device, queries=True),
            split.database,
            lambda rows: embed_rows(method, reader, rows, device),
            keep,
        )
    return replace(
        coded,
        fit_seconds=fitted.run.seconds,
        extra={"steps": fitted.run.step, "uses_unlabelled": bool(method.uses_unlabelled)},
    )


def top_rows(score: ScoreFunction, codes: NDArray[np.uint8], n_queries: int, k: int) -> Rows:
    """Return the database rows of the k best items of every query, int64 [Q, min(k, N)].

    ``score`` is a score function of distinct codes; ties go by row.
    """
    distinct, code_of = distinct_rows(np.ascontiguousarray(codes))
    blocks = np.split(np.arange(n_queries), range(_BLOCK, n_queries, _BLOCK))
    scores = (score(queries, distinct)[:, code_of] for queries in blocks)
    return np.concatenate([np.argsort(-s, axis=1, kind="stable")[:, :k] for s in scores])
