"""Evaluating: a model and labelled data ─► mAP, likeness, precision and recall at k, PR curve; also of other models and methods.

Queries and database come from the training split, so no query was seen in training. Compared models must have been trained on the
same split. The result names the convention of its average precision, the split and the versions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import check_count
from ..data.base import Dataset
from ..data.labels import Labels
from ..data.open import open_data
from ..data.protocols import Split, load_split, make_split
from ..encoder import Encoder, is_onnx, open_encoder
from ..errors import DataError, MismatchError, UsageError
from ..evaluation.likeness import Likeness
from ..evaluation.ranking import RankingResult, usable_cores
from ..evaluation.tables import Shown
from ..evaluation.ties import RECALL_LEVELS, Convention, Denominator, Ties
from ..files import versions
from ..methods.coders import ProductCoder
from ..methods.measure import NO_LIKENESS, Coded, fit_and_encode, input_neighbours
from ..methods.registry import ARRAY_METHODS, find_method, is_array_method, make_method, split_names
from ..progress import stage
from ..report.plots import plot_curves
from ..store.rows import RowReader

log = logging.getLogger(__name__)


def evaluate(
    model: str | Path,
    data: object,
    *,
    protocol: str | None = None,
    compare: Sequence[str] = (),
    codes: str | Path | None = None,
    ks: Sequence[int] = (1, 10, 100, 1000),
    k: int | None = None,
    ties: Ties = "expected",
    denominator: Denominator = "relevant",
    device: str = "cpu",
    threads: int | None = None,
) -> Evaluation:
    """Rank the database of a split for each of its queries, by code, and measure the rankings.

    Likeness (:mod:`gpq_faiss.evaluation.likeness`) is measured on at most 400 of the queries, always with expected ties.

    Args:
        model: model folder; with ``codes`` also an ONNX file of ``gpq export-encoder``, which needs no torch.
        data: labelled data. If the model was trained on them, its training split is used.
        protocol: of the split that is drawn of other data; of the training data it must be the training's.
        compare: further rows: short names of methods, which are fitted on the same inputs and split, or folders of models
            trained on the same split.
        codes: a file of labelled codes from the model, used as the database; all labelled items of ``data`` are the queries.
        ks: k of precision and recall; those larger than the database are left out.
        k: mAP@k instead of the full ranking.
        ties, denominator: conventions, see :class:`gpq_faiss.evaluation.ties.Convention`.
        device: where networks run. Compared methods are fitted on the CPU.
        threads: of the ranking on the CPU (default: all cores); the figures do not depend on it.

    Raises:
        DataError: no labels, or an empty database.
        DeviceError: the device does not exist or has too little memory.
        MismatchError: a model does not fit the data, or was trained on another split of them.
        UsageError: an entry of ``compare`` is neither a method nor a model, or is given twice.
    """
    if isinstance(compare, str):
        compare = split_names(compare)
    options: dict[str, Any] = {"ties": ties, "k": k, "denominator": denominator, "ks": list(ks)}
    options["levels"] = RECALL_LEVELS
    Convention(**options)  # before the data are encoded, which may take hours
    options["threads"] = check_count(usable_cores() if threads is None else threads, "threads")
    dataset = open_data(data)
    if codes is not None:
        if compare or protocol is not None:
            raise UsageError(
                "--codes ranks the file against all labelled items: leave out --compare and --protocol"
            )
        return _evaluate_codes(model, dataset, codes, options, device)
    if is_onnx(model):
        raise UsageError(
            f"{model} encodes queries only: give the model folder, or --codes FILE of the database"
        )
    encoder = Encoder.load(model, device)
    encoder.check(dataset)
    entries = _open_compared(encoder, compare, dataset, device)
    split, notes = _resolve_split(encoder, dataset, protocol)
    if not len(split.query):
        raise UsageError(
            f"{encoder.source} was trained with --protocol none: there are no queries set apart to evaluate"
        )
    labels = dataset.require_labels()
    database = split.database[labels.has(split.database)]
    if not len(database):
        database = split.labelled
        notes.append(
            "every labelled item but the queries was trained on, so the database is the labelled training items "
            "(train with --labelled to hold some back)"
        )
    measured, queries = _rank_all(entries, dataset, split, database, options)
    if encoder.model.class_names != labels.class_names:
        notes.append("the classes are not those of the training")
    if next(iter(measured.values())).likeness is None:
        notes.append(NO_LIKENESS)
    return Evaluation(
        measured, queries, split.name, split.hash, dataset.name, tuple(notes), str(encoder.device)
    )


# Split and rows --------------------------------------------------------------------------------------------------------

def model_name(description: Mapping[str, Any]) -> str:
    """Table name of a model, from its ``config.json``: its method, and its preset unless these are the default: ``gpq (paper)``."""
    method, used = str(description.get("method", "gpq")), str(description["config"].get("preset", "paper"))
    return method if (method, used) == ("posterior", "recommended") else f"{method} ({used})"


def _trained_on(encoder: Encoder) -> tuple[str, str, str, int]:
    """Fingerprint of the data of a model's training; hash, protocol and seed of its split. Raises DataError: they are not known."""
    about = encoder.model.description
    try:
        split = about["split"]
        return str(about["data"]["fingerprint"]), split["hash"], str(split["protocol"]), int(split["seed"])
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"{encoder.source}: config.json does not say what the model was trained on: copy or train the model again"
        ) from None


def _open_compared(
    first: Encoder, compare: Sequence[str], dataset: Dataset, device: str
) -> dict[str, Encoder | None]:
    """Rows of the table, the first model first: name -> model, or None for a method that is fitted here.

    A name of an array method means the method, even if a folder has that name. Models of equal name are shown with their folders.

    Raises:
        DataError, DeviceError, MismatchError, UsageError: as :func:`evaluate`.
    """
    entries: dict[object, tuple[str, Encoder | None]] = {first.source.resolve(): (str(first.source), first)}
    for name in compare:
        folder = Path(name)
        of_method = is_array_method(name)
        own = name if of_method else folder.resolve()
        if own in entries:
            raise UsageError(f"--compare {name}: it has a row already: name it once")
        if of_method:
            make_method(name, first.bits)
            entries[own] = name, None
            continue
        if not folder.is_dir():
            raise UsageError(
                f"--compare {name}: neither the folder of a model nor a method: train it, or choose from {', '.join(ARRAY_METHODS)}"
            )
        other = Encoder.load(name, device)
        one, two = _trained_on(first), _trained_on(other)
        if one[:2] != two[:2]:
            raise MismatchError(
                f"--compare {name}: it was trained on other data or another split (protocol {two[2]}, seed {two[3]}) than "
                f"{first.source} (protocol {one[2]}, seed {one[3]}): train it on the same data with the same --protocol, --seed, "
                "--labelled and --queries"
            )
        other.check(dataset)
        entries[own] = name, other
    names = [path if one is None else model_name(one.model.description) for path, one in entries.values()]
    return {
        f"{name}: {path}" if one is not None and names.count(name) > 1 else name: one
        for name, (path, one) in zip(names, entries.values(), strict=True)
    }


def _resolve_split(encoder: Encoder, dataset: Dataset, protocol: str | None) -> tuple[Split, list[str]]:
    """The split to evaluate on: the training split for the training data, else a new one; and notes for the user.

    Raises:
        MismatchError: another protocol for the training data: its queries may have been trained on.
    """
    data, _, found, _ = _trained_on(encoder)
    if data != dataset.fingerprint:
        note = (
            f"{dataset.name} is not the data of the training: queries and database are drawn from it instead"
        )
        return make_split(dataset, protocol or "1", labelled="all"), [note]
    if protocol not in (None, found):
        raise MismatchError(
            f"{encoder.source} was trained with protocol {found}: with protocol {protocol} it may have seen the labels of queries. "
            "Leave out the protocol, or train with it"
        )
    return load_split(encoder.source / "split.json"), []


# Rankings ---------------------------------------------------------------------------------------------------------------


def _rank_all(
    entries: Mapping[str, Encoder | None],
    dataset: Dataset,
    split: Split,
    database: NDArray[np.int64],
    options: Mapping[str, Any],
) -> tuple[dict[str, Row], NDArray[np.int64]]:
    """Encode, rank and measure every entry, for these queries. The first is a model; all are compared on what it could read."""
    first = next(iter(entries.values()))
    assert first is not None
    labels, size = dataset.require_labels(), first.image_size
    seed = int(first.model.description["config"]["training"]["seed"])
    of_first = _encode(first, dataset, split.query, database)
    rows = {"queries": of_first.query_rows, "database": of_first.base_rows}
    neighbours = input_neighbours(dataset, size, rows["queries"], rows["database"])
    measured: dict[str, Row] = {}
    for name, encoder in entries.items():
        coded = of_first
        if encoder is not first:
            log.info("comparing with %s", name)
        if encoder is None:
            with stage(name):
                coded = fit_and_encode(name, first.bits, seed, dataset, split, image_size=size, **rows)
        elif encoder is not first:
            coded = _encode(encoder, dataset, split.query, database)
        measured[name] = Row(
            coded.rank(labels, **options),
            coded.likeness(neighbours),
            coded.coder.bits if encoder or find_method(name).any_length else None,
            encoder.fingerprint if encoder else None,
        )
    return measured, of_first.query_rows


def _encode(encoder: Encoder, dataset: Dataset, queries: NDArray[np.int64], rows: NDArray[np.int64]) -> Coded:
    """Encode queries and database with a model."""
    query_rows, xq = encoder.embed_rows(dataset, queries, queries=True)
    with stage("encoding", len(rows)) as encoding:
        parts = []
        for part in encoder.code_batches(dataset, rows):
            parts.append(part)
            encoding.advance(len(part[0]))
    readable, codes = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Coded(ProductCoder(encoder.model.codebooks), query_rows, readable, xq, codes)


def _evaluate_codes(
    model: str | Path, queries: Dataset, codes: str | Path, options: Mapping[str, Any], device: str
) -> Evaluation:
    """:func:`evaluate` with a codes file as the database."""
    encoder = open_encoder(model, device)
    encoder.check(queries)
    query_labels = queries.require_labels()
    with RowReader(codes, kind="codes", model_fingerprint=encoder.fingerprint) as reader:
        packed = reader.labels
        if packed is None:
            raise DataError(f"{codes} has no labels: encode labelled data")
        labels = Labels(np.asarray(packed), reader.header.class_names)
        Z, base, ids = reader.header.codebooks, np.asarray(reader.values), np.asarray(reader.ids)
    if not set(labels.class_names) & set(query_labels.class_names):
        raise MismatchError(
            f"{queries.name} and {codes} have no class in common "
            f"({query_labels.class_names[0]!r}, {labels.class_names[0]!r} ...)"
        )
    classes = tuple(dict.fromkeys((*labels.class_names, *query_labels.class_names)))
    rows, database = np.flatnonzero(query_labels.has()), np.flatnonzero(labels.has())
    if not len(database):
        raise DataError(f"{codes}: no item has a label, so nothing is relevant")
    rows, xq = encoder.embed_rows(queries, rows, queries=True)
    coded, names = Coded(ProductCoder(Z), rows, database, xq, base[database]), ids[database]
    result = coded.rank(query_labels.over(classes), labels.over(classes), ids=names, **options)
    name, place = encoder.source.name, "cpu"
    if isinstance(encoder, Encoder):
        name, place = model_name(encoder.model.description), str(encoder.device)
    notes = (
        f"queries are all labelled items of {queries.name}, the database those of {codes}",
        "NN10@100 is not measured: it needs the inputs, and only codes are given",
    )
    measured = {name: Row(result, bits=encoder.bits, model_fingerprint=encoder.fingerprint)}
    return Evaluation(measured, rows, "none", "", queries.name, notes, place)


# Results ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A model or method of an evaluation.

    Attributes:
        ranking: its ranking.
        likeness: None for images (:func:`gpq_faiss.methods.measure.needs_perceptron`).
        bits: code length; None for ``float`` and ``classifier``, which have no codes.
        model_fingerprint: None for methods.
    """

    ranking: RankingResult
    likeness: Likeness | None = None
    bits: int | None = None
    model_fingerprint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        likeness = None if self.likeness is None else asdict(self.likeness)
        about = {"likeness": likeness, "bits": self.bits, "model_fingerprint": self.model_fingerprint}
        return {**self.ranking.as_dict(), **about}


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """Measurements of one evaluation.

    Attributes:
        measured: the model by its table name (:func:`.evaluate.model_name`), then the others on the same split.
        queries: int64 [Q], data set rows of the queries, in the order of ``ranking.ap``.
        protocol, split_hash: identify queries and database.
        data: name of the data set.
        notes: remarks for the user.
        device: where models were ranked.
    """

    measured: dict[str, Row]
    queries: NDArray[np.int64]
    protocol: str
    split_hash: str
    data: str
    notes: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def method(self) -> str:
        """Table name of the model."""
        return next(iter(self.measured))

    @property
    def ranking(self) -> RankingResult:
        """Of the model."""
        return self.measured[self.method].ranking

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the figures at the top level are the model's."""
        (_, model), *others = self.measured.items()
        return {
            **model.to_dict(),
            **{name: getattr(self, name) for name in ("method", "protocol", "split_hash", "data", "device")},
            "compared": {name: row.to_dict() for name, row in others},
            "notes": list(self.notes),
            "versions": versions("numpy", "python"),
        }

    def rows(self, ks: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """One row per model or method, for a table; ``ks`` of precision and recall (default: all)."""
        return [
            {
                "method": name,
                "bits": row.bits or "-",
                "mAP": row.ranking.map,
                **({} if row.likeness is None else {"NN10@100": row.likeness.nn10_at_100}),
                **row.ranking.rows(ks)[0],
            }
            for name, row in self.measured.items()
        ]

    def about(self) -> list[str]:
        """Size, split, convention and notes."""
        likeness = self.measured[self.method].likeness
        size, convention, *rest = self.ranking.about()
        defined = [] if likeness is None else [likeness.definition]
        notes = [f"note: {note}" for note in self.notes]
        return [f"{size}, protocol {self.protocol}", convention, *defined, *rest, *notes]

    def draw(self, out: str | Path, *, overwrite: bool = False) -> Path:
        """Draw mean precision-recall curves of the model and all compared rows, as .png, .svg or .pdf.

        Raises:
            UsageError: another extension.
            DataError: the file cannot be written.
        """
        curves = {}
        for name, row in self.measured.items():
            length = f", {row.bits} bits" if row.bits else ""
            label = f"{name}{length}  (mAP {row.ranking.map:.3f})"
            curves[label] = row.ranking.pr_recall, row.ranking.pr_precision
        title = f"{self.data}, protocol {self.protocol}"
        return plot_curves(curves, out, x="recall", y="precision", title=title, overwrite=overwrite)
