"""Evaluating: a model and labelled data ─► mAP, precision and recall at k, neighbour recall.

Queries and database come from the split of the training, so that no query was seen in training. The
model is compared with methods, and with other models that were trained on the same split.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..data.base import Dataset
from ..data.labels import Labels
from ..data.open import open_data
from ..data.protocols import Split, load_split, make_split
from ..encoder import Encoder, is_onnx, open_encoder
from ..errors import DataError, MismatchError, UsageError
from ..evaluation.neighbour_recall import NeighbourRecall
from ..evaluation.ranking import DEFAULT, RankingResult
from ..evaluation.tables import Shown
from ..evaluation.ties import Convention, check_rank
from ..files import versions
from ..methods.coders import ProductCoder
from ..methods.measure import NO_NEIGHBOUR_RECALL, Coded, fit_and_encode, input_neighbours
from ..methods.registry import ARRAY_METHODS, find_method, is_array_method, make_method, split_names
from ..progress import stage
from ..report.plots import plot_curves
from ..store.rows import RowReader

log = logging.getLogger(__name__)

# The preset that each method usually has, which its name in a table does not mention.
_USUAL_PRESET = {"gpq": "gpq", "posterior": "recommended"}


def evaluate(
    model: str | Path,
    data: object,
    *,
    protocol: str | None = None,
    compare: Sequence[str] = (),
    codes: str | Path | None = None,
    ks: Sequence[int] = (1, 10, 100, 1000),
    convention: Convention = DEFAULT,
    device: str = "cpu",
) -> Evaluation:
    """Rank the database of a split for each of its queries, by code, and measure the rankings.

    Neighbour recall (:mod:`gpq_faiss.evaluation.neighbour_recall`) is measured on at most 400 of
    the queries, always with expected ties. Rankings use as many threads as Faiss
    (``faiss.omp_set_num_threads``, ``OMP_NUM_THREADS``); the figures do not depend on it.

    Args:
        model: model folder; with ``codes`` also an ONNX file of ``gpq export-encoder``, which needs
            no torch.
        data: labelled data. The training split is used for the data that the model was trained on.
        protocol: protocol of the split that is drawn of other data; for the training data it must
            be that of the training.
        compare: further rows: short names of methods, which are fitted on the same inputs and
            split, or folders of models trained on the same split.
        codes: a file of labelled codes from the model, used as the database; all labelled items of
            ``data`` are the queries.
        ks: number of ranks of precision and recall; those larger than the database are left out.
        convention: order of ties, k and denominator of average precision.
        device: device of networks. Compared methods are fitted on the CPU.

    Raises:
        DataError: no labels, or an empty database.
        DeviceError: the device does not exist or has too little memory.
        MismatchError: a model does not fit the data, or was trained on another split of them.
        UsageError: an entry of ``compare`` is neither a method nor a model, or is given twice.
    """
    if isinstance(compare, str):
        compare = split_names(compare)
    for k in ks:  # before the data are encoded, which may take hours
        check_rank(k)
    options = {"convention": convention, "ks": ks, "threads": faiss.omp_get_max_threads()}
    dataset = open_data(data)
    if codes is not None:
        if compare or protocol is not None:
            raise UsageError(
                "--codes ranks the file against all labelled items: leave out --compare and "
                "--protocol"
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
            f"{encoder.source} was trained with --protocol none: there are no queries set apart to "
            "evaluate"
        )
    labels = dataset.require_labels()
    database = split.database[labels.has(split.database)]
    if not len(database):
        database = split.labelled
        notes.append(
            "every labelled item but the queries was trained on, so the database is the labelled "
            "training items (train with --labelled to hold some back)"
        )
    measured, queries = _rank_all(entries, dataset, split, database, options)
    if encoder.model.class_names != labels.class_names:
        notes.append("the classes are not those of the training")
    if next(iter(measured.values())).neighbour_recall is None:
        notes.append(NO_NEIGHBOUR_RECALL)
    return Evaluation(
        measured, queries, split.name, split.hash, dataset.name, tuple(notes), str(encoder.device)
    )


# Split and rows -----------------------------------------------------------------------------------


def model_name(description: Mapping[str, Any]) -> str:
    """Return the name of a model in tables, from its ``config.json``.

    It is the method, and its preset unless these are the default: ``gpq (paper)``.
    """
    method = str(description.get("method", "gpq"))
    used = str(description["config"].get("preset", "paper"))
    return method if (method, used) == ("posterior", "recommended") else f"{method} ({used})"


def _training_of(encoder: Encoder) -> tuple[str, str, str, int]:
    """Return the fingerprint of the training data, and hash, protocol and seed of their split.

    Raises:
        DataError: they are unknown.
    """
    description = encoder.model.description
    try:
        split, data = description["split"], str(description["data"]["fingerprint"])
        return data, split["hash"], str(split["protocol"]), int(split["seed"])
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"{encoder.source}: config.json does not say what the model was trained on: copy or "
            "train the model again"
        ) from None


def _open_compared(
    first: Encoder, compare: Sequence[str], dataset: Dataset, device: str
) -> dict[str, Encoder | None]:
    """Return the rows of the table: name -> model, or None for a method that is fitted here.

    The first model comes first. A name of an array method means the method, even if a folder has
    that name. Models of equal name are shown with their folders.

    Raises:
        DataError, DeviceError, MismatchError, UsageError: as :func:`evaluate`.
    """
    entries: dict[object, tuple[str, Encoder | None]] = {
        first.source.resolve(): (str(first.source), first)
    }
    for name in compare:
        folder = Path(name)
        is_method = is_array_method(name)
        key = name if is_method else folder.resolve()
        if key in entries:
            raise UsageError(f"--compare {name}: it has a row already: name it once")
        if is_method:
            make_method(name, first.bits)
            entries[key] = name, None
            continue
        if not folder.is_dir():
            raise UsageError(
                f"--compare {name}: neither the folder of a model nor a method: train it, or "
                f"choose from {', '.join(ARRAY_METHODS)}"
            )
        encoder = Encoder.load(name, device)
        expected, actual = _training_of(first), _training_of(encoder)
        if expected[:2] != actual[:2]:
            raise MismatchError(
                f"--compare {name}: it was trained on other data or another split (protocol "
                f"{actual[2]}, seed {actual[3]}) than {first.source} (protocol {expected[2]}, seed "
                f"{expected[3]}): train it on the same data with the same --protocol, --seed, "
                "--labelled and --queries"
            )
        encoder.check(dataset)
        entries[key] = name, encoder
    names = [
        path if encoder is None else model_name(encoder.model.description)
        for path, encoder in entries.values()
    ]
    return {
        f"{name}: {path}" if encoder is not None and names.count(name) > 1 else name: encoder
        for name, (path, encoder) in zip(names, entries.values(), strict=True)
    }


def _resolve_split(
    encoder: Encoder, dataset: Dataset, protocol: str | None
) -> tuple[Split, list[str]]:
    """Return the training split for the training data, else a new one; and notes for the user.

    Raises:
        MismatchError: another protocol for the training data: its queries may have been trained on.
    """
    data, _, trained, _ = _training_of(encoder)
    if data != dataset.fingerprint:
        note = (
            f"{dataset.name} is not the data of the training: queries and database are drawn from "
            "it instead"
        )
        return make_split(dataset, protocol or "1", labelled="all"), [note]
    if protocol not in (None, trained):
        raise MismatchError(
            f"{encoder.source} was trained with protocol {trained}: with protocol {protocol} it "
            "may have seen the labels of queries. Leave out the protocol, or train with it"
        )
    return load_split(encoder.source / "split.json"), []


# Rankings -----------------------------------------------------------------------------------------


def _rank_all(
    entries: Mapping[str, Encoder | None],
    dataset: Dataset,
    split: Split,
    database: NDArray[np.int64],
    options: Mapping[str, Any],
) -> tuple[dict[str, Row], NDArray[np.int64]]:
    """Encode, rank and measure every entry, the first of which is a model.

    All are compared on what the first could read. Returns the rows, and the rows of the queries.
    """
    first = next(iter(entries.values()))
    assert first is not None
    labels, size = dataset.require_labels(), first.image_size
    seed = int(first.model.description["config"]["training"]["seed"])
    coded_by_first = _encode(first, dataset, split.query, database)
    rows = {"queries": coded_by_first.query_rows, "database": coded_by_first.base_rows}
    neighbours = input_neighbours(dataset, size, rows["queries"], rows["database"])
    measured: dict[str, Row] = {}
    for name, encoder in entries.items():
        if encoder is None:
            log.info("comparing with %s", name)
            with stage(name):
                coded = fit_and_encode(
                    name, first.bits, seed, dataset, split, image_size=size, **rows
                )
        elif encoder is first:
            coded = coded_by_first
        else:
            log.info("comparing with %s", name)
            coded = _encode(encoder, dataset, split.query, database)
        measured[name] = Row(
            coded.rank(labels, **options),
            coded.neighbour_recall(neighbours),
            coded.coder.bits if encoder or find_method(name).any_length else None,
            encoder.fingerprint if encoder else None,
        )
    return measured, coded_by_first.query_rows


def _encode(
    encoder: Encoder, dataset: Dataset, queries: NDArray[np.int64], rows: NDArray[np.int64]
) -> Coded:
    """Encode queries and database with a model."""
    query_rows, xq = encoder.embed_rows(dataset, queries, queries=True)
    with stage("encoding", len(rows)) as encoding:
        batches = []
        for batch in encoder.code_batches(dataset, rows):
            batches.append(batch)
            encoding.advance(len(batch[0]))
    readable, codes = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return Coded(ProductCoder(encoder.model.codebooks), query_rows, readable, xq, codes)


def _evaluate_codes(
    model: str | Path,
    queries: Dataset,
    codes: str | Path,
    options: Mapping[str, Any],
    device: str,
) -> Evaluation:
    """Evaluate with a codes file as the database, see :func:`evaluate`."""
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
    database = np.flatnonzero(labels.has())
    if not len(database):
        raise DataError(f"{codes}: no item has a label, so nothing is relevant")
    database = database[np.argsort(ids[database])]  # the order of ties by id
    rows, xq = encoder.embed_rows(queries, np.flatnonzero(query_labels.has()), queries=True)
    coded = Coded(ProductCoder(Z), rows, database, xq, base[database])
    result = coded.rank(query_labels.over(classes), labels.over(classes), **options)
    name, used_device = encoder.source.name, "cpu"
    if isinstance(encoder, Encoder):
        name, used_device = model_name(encoder.model.description), str(encoder.device)
    notes = (
        f"queries are all labelled items of {queries.name}, the database those of {codes}",
        "NN10@100 is not measured: it needs the inputs, and only codes are given",
    )
    measured = {name: Row(result, bits=encoder.bits, model_fingerprint=encoder.fingerprint)}
    return Evaluation(measured, rows, "none", "", queries.name, notes, used_device)


# Results ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A model or method of an evaluation.

    Attributes:
        ranking: measures of its ranking.
        neighbour_recall: None for images (:func:`gpq_faiss.methods.measure.needs_perceptron`).
        bits: code length; None for ``float`` and ``classifier``, which have no codes.
        model_fingerprint: None for methods.
    """

    ranking: RankingResult
    neighbour_recall: NeighbourRecall | None = None
    bits: int | None = None
    model_fingerprint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the values of single queries, for JSON."""
        recall = self.neighbour_recall
        return {
            **self.ranking.as_dict(),
            "neighbour_recall": None if recall is None else asdict(recall),
            "bits": self.bits,
            "model_fingerprint": self.model_fingerprint,
        }


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """Measurements of one evaluation.

    Attributes:
        measured: the model by its name in tables (:func:`model_name`), then the others.
        queries: int64 [Q], data set rows of the queries, in the order of ``ranking.ap``.
        protocol, split_hash: identify queries and database.
        data: name of the data set.
        notes: remarks for the user.
        device: device of the networks.
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
        """Name of the model in tables."""
        return next(iter(self.measured))

    @property
    def ranking(self) -> RankingResult:
        """Measures of the model's ranking."""
        return self.measured[self.method].ranking

    def to_dict(self) -> dict[str, Any]:
        """Return the evaluation for JSON; the figures at the top level are those of the model."""
        (_, model), *compared = self.measured.items()
        stated = ("method", "protocol", "split_hash", "data", "device")
        return {
            **model.to_dict(),
            **{name: getattr(self, name) for name in stated},
            "compared": {name: row.to_dict() for name, row in compared},
            "notes": list(self.notes),
            "versions": versions("numpy", "python"),
        }

    def rows(self, ks: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return a row for each model or method.

        Precision and recall are at the ranks ``ks`` (default: all).
        """
        table = []
        for name, row in self.measured.items():
            line = {"method": name, "bits": row.bits or "-", **row.ranking.rows(ks)[0]}
            if row.neighbour_recall is not None:
                line["NN10@100"] = row.neighbour_recall.nn10_at_100
            table.append(line)
        return table

    def about(self) -> list[str]:
        """Return lines with size, split, convention and notes."""
        recall = self.measured[self.method].neighbour_recall
        size, convention, *remarks = self.ranking.about()
        lines = [f"{size}, protocol {self.protocol}", convention]
        lines += [recall.definition] if recall else []
        return [*lines, *remarks, *(f"note: {note}" for note in self.notes)]

    def draw(self, out: str | Path, *, overwrite: bool = False) -> Path:
        """Draw the mean precision-recall curves of all rows, as .png, .svg or .pdf.

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
