"""Evaluating: a model and labelled data ─► mAP, precision and recall at k, PR curve, beside other methods if asked for.

Queries and database are those of the split that the model was trained with, so that no query was seen in training. The
result names the convention of its average precision, the split and the versions.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import __version__
from .data.base import Dataset, FeatureDataset
from .data.labels import Labels
from .data.open import open_data
from .data.protocols import Split, load_split, make_split
from .data.reader import Reader
from .encode import Encoder, Progress
from .errors import DataError, MismatchError, UsageError
from .evaluate.metrics import RECALL_LEVELS
from .evaluate.ranking import RankingResult, rank_codes, usable_cores
from .evaluate.ties import Denominator, Ties
from .index.codebooks import encode as encode_vectors
from .index.codebooks import score_tables, unpack_codes
from .methods.registry import make_method
from .report.plots import plot_pr_curves

log = logging.getLogger(__name__)

DEFAULT_KS = (1, 10, 100, 1000)
# Of what is compared with: training rows, their bytes, and rows of the database at a time.
_FIT_ROWS, _FIT_BYTES, _BLOCK = 100_000, 8 << 30, 16_384


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found.

    Attributes:
        ranking: of GPQ.
        bits: code length.
        protocol, split_hash: which queries and database.
        compared: name -> ranking of other methods on the same split, trained without labels unless they say otherwise.
        notes: for people.
    """

    ranking: RankingResult
    bits: int
    protocol: str
    split_hash: str
    data: str
    model_fingerprint: str
    compared: dict[str, RankingResult] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON; ``map`` is GPQ's."""
        return {
            **self.ranking.as_dict(),
            "bits": self.bits,
            "protocol": self.protocol,
            "split_hash": self.split_hash,
            "data": self.data,
            "model_fingerprint": self.model_fingerprint,
            "compared": {name: result.as_dict() for name, result in self.compared.items()},
            "notes": list(self.notes),
            "versions": {
                "gpq_faiss": __version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def rows(self, ks: Sequence[int] = ()) -> list[dict[str, Any]]:
        """A row a method, for a table."""
        return [
            {
                "method": name,
                "bits": self.bits if name not in {"float", "classifier"} else "-",
                "mAP": result.map,
                **{f"P@{k}": result.precision[k] for k in ks if k in result.precision},
                **{f"R@{k}": result.recall[k] for k in ks if k in result.recall},
            }
            for name, result in {"GPQ": self.ranking, **self.compared}.items()
        ]


def draw_evaluation(evaluation: Evaluation, out: str | Path, *, overwrite: bool = False) -> Path:
    """Mean precision-recall curves of GPQ and what it was compared with, as .png, .svg or .pdf.

    Raises:
        UsageError: another ending.
        DataError: it cannot be written.
    """
    results = {"GPQ": evaluation.ranking, **evaluation.compared}
    curves = {f"{name}  (mAP {r.map:.3f})": (r.pr_recall, r.pr_precision) for name, r in results.items()}
    title = f"{evaluation.data}, {evaluation.bits} bits, protocol {evaluation.protocol}"
    return plot_pr_curves(curves, out, title=title, overwrite=overwrite)


def resolve_split(
    encoder: Encoder, dataset: Dataset, protocol: str | None, seed: int | None, labelled: str | None
) -> tuple[Split, list[str]]:
    """The split to evaluate on: the model's own for the data that it was trained on, else a new one.

    Raises:
        MismatchError: another protocol or seed for the training data: its queries may have been trained on.
    """
    model = encoder.model
    trained = model.description["split"]
    if model.description["data"]["fingerprint"] != dataset.fingerprint:
        split = make_split(dataset, protocol or "1", seed=seed or 0, labelled=labelled)
        return split, [f"{dataset.name} is not the data of the training: queries and database are drawn anew"]
    if protocol is not None and protocol != trained["protocol"]:
        raise MismatchError(
            f"{model.folder} was trained under protocol {trained['protocol']}: under protocol {protocol} it may have "
            f"seen the labels of queries. Train with --protocol {protocol}"
        )
    if seed is not None and seed != trained["seed"]:
        raise MismatchError(
            f"{model.folder} was trained on the split of seed {trained['seed']}: with seed {seed} it may have seen the "
            "labels of queries. Leave out --seed, or train with it"
        )
    return load_split(model.folder / "split.json"), []


def _database(split: Split, labels: Labels) -> tuple[NDArray[np.int64], list[str]]:
    rows = split.database[labels.has(split.database)]
    if len(rows):
        return rows, []
    rows = split.labelled
    return rows, [
        "every labelled item but the queries was trained on, so the database is the labelled training items "
        "(train with --labelled to hold some back)"
    ]


def _inputs(encoder: Encoder, dataset: Dataset, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """What the other methods start from: the features, or the pixels of the images in [0, 1]."""
    parts: list[NDArray[np.float32]] = []
    with Reader(dataset, encoder.model.image_size) as reader:
        for start in range(0, len(rows), 4096):
            values, ok = reader.fetch(rows[start : start + 4096])
            if not ok.all():
                raise DataError(
                    f"{dataset.name}: broken images cannot be compared on: leave them out of the data"
                )
            scale = np.float32(1 / 255 if values.dtype == np.uint8 else 1)
            parts.append(values.reshape(len(values), -1).astype(np.float32) * scale)
    return np.concatenate(parts)


def _compare(
    name: str,
    encoder: Encoder,
    dataset: Dataset,
    split: Split,
    database: NDArray[np.int64],
    labels: Labels,
    bits: int,
    options: dict[str, Any],
) -> RankingResult:
    seed = int(encoder.model.description["config"]["training"]["seed"])
    pool = np.sort(np.concatenate([split.labelled, split.unlabelled]))
    pool = pool[:: -(-len(pool) // _FIT_ROWS)]
    # Methods that learn from labels see those of the training and no others.
    pool = np.union1d(pool, split.labelled)
    width = dataset.width if isinstance(dataset, FeatureDataset) else 3 * encoder.model.image_size**2
    needed = 4 * width * (len(pool) + len(split.query))
    if needed > _FIT_BYTES:
        raise UsageError(
            f"--compare {name}: {len(pool):,} training items of {width:,} numbers each need {needed / 2**30:.0f} GiB; "
            "compare on features of the images instead"
        )
    method = make_method(name, bits, seed=seed)
    method.fit(_inputs(encoder, dataset, pool), split.training_labels(labels).take(pool))
    queries = _inputs(encoder, dataset, split.query)
    blocks = [database[i : i + _BLOCK] for i in range(0, len(database), _BLOCK)]
    codes = [method.encode(_inputs(encoder, dataset, rows)) for rows in blocks]
    return rank_codes(
        lambda q, distinct: method.score(queries[q], distinct),
        np.concatenate(codes),
        labels.take(split.query),
        labels.take(database),
        **options,
    )


def evaluate(
    model: str | Path,
    data: Dataset | str,
    *,
    protocol: str | None = None,
    seed: int | None = None,
    labelled: str | None = "all",
    compare: Sequence[str] = (),
    ks: Sequence[int] = DEFAULT_KS,
    k: int | None = None,
    ties: Ties = "expected",
    denominator: Denominator = "relevant",
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Rank the database of a split for its queries, by code, and measure the rankings.

    Args:
        model: model folder.
        data: labelled data; for the data of the training, the split of the training is used.
        protocol, seed, labelled: of the split, for other data. For the training's data they must agree with it.
        compare: short names of methods to show beside GPQ, fitted on the same inputs and split.
        ks: of precision and recall; those beyond the database are left out.
        k: mAP@k instead of the full ranking.
        ties, denominator: conventions, see :mod:`gpq_faiss.evaluate.metrics`.
        device: where the network runs.
        threads: of the ranking (default: all cores); the figures do not depend on it.
        progress: called while encoding.

    Raises:
        DataError: no labels, or nothing to rank.
        MismatchError: the model takes other data, or was trained on another split of these.
    """
    # What cannot be is refused before the data are encoded, which may take hours.
    threads = usable_cores() if threads is None else threads
    if threads < 1:
        raise UsageError(f"{threads} threads: it must be at least 1")
    for at in (*ks, *([] if k is None else [k])):
        if at < 1:
            raise UsageError(f"k = {at}: a ranking has at least one place")
    encoder = Encoder.load(model, device)
    codebooks = encoder.model.codebooks
    M, K, _ = codebooks.shape
    bits = M * (K.bit_length() - 1)
    for name in compare:
        make_method(name, bits)
    dataset = open_data(data) if isinstance(data, str) else data
    encoder.check(dataset)
    labels = dataset.require_labels()
    split, notes = resolve_split(encoder, dataset, protocol, seed, labelled)
    if not len(split.query):
        raise UsageError(
            f"{encoder.model.folder} was trained with --protocol none: there are no queries set apart to evaluate"
        )
    rows, more = _database(split, labels)
    notes += more
    trained_names, names = encoder.model.class_names, labels.class_names
    if trained_names != names:
        notes.append("the classes are not those of the training")

    total = len(split.query) + len(rows)

    def step(offset: int) -> Progress:
        return lambda done, _: progress(offset + done, total) if progress else None

    query_rows, xq = encoder.embed_rows(dataset, split.query, queries=True, progress=step(0))
    there: list[NDArray[np.int64]] = []
    codes: list[NDArray[np.uint8]] = []
    done = 0
    for positions, vectors in encoder.batches(dataset, rows):
        there.append(positions)
        codes.append(encode_vectors(vectors, codebooks))
        done += len(positions)
        step(len(split.query))(done, total)
    base = np.concatenate(there)
    options: dict[str, Any] = {
        "ties": ties,
        "k": k,
        "denominator": denominator,
        "ks": [at for at in ks if at <= len(base)],
        "levels": RECALL_LEVELS,
        "ids": None,
        "threads": threads,
    }
    ranking = rank_codes(
        score_tables(xq, codebooks),
        unpack_codes(np.concatenate(codes), M, K),
        labels.take(query_rows),
        labels.take(base),
        **options,
    )
    compared: dict[str, RankingResult] = {}
    for name in compare:
        log.info("comparing with %s", name)
        compared[name] = _compare(name, encoder, dataset, split, base, labels, bits, options)
    return Evaluation(
        ranking=ranking,
        bits=bits,
        protocol=split.name,
        split_hash=split.hash,
        data=dataset.name,
        model_fingerprint=encoder.model.fingerprint,
        compared=compared,
        notes=tuple(notes),
    )
