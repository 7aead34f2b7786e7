"""Evaluating: a model and labelled data ─► mAP, precision and recall at k, neighbour recall.

Queries and database come from the split of the training, so that no query was seen in training. The
model is compared with methods, and with other models that were trained on the same split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Ids
from ..data.base import Dataset
from ..data.labels import Labels
from ..data.open import open_data
from ..data.protocols import Split, load_split, make_split
from ..encoder import Encoder, OnnxEncoder, open_encoder
from ..errors import DataError, MismatchError, UsageError
from ..evaluation.neighbour_recall import NeighbourRecall
from ..evaluation.ranking import DEFAULT, RankingResult
from ..evaluation.tables import Shown
from ..evaluation.ties import Convention
from ..files import atomic_path, check_output, qrels_path, versions
from ..methods.coders import ProductCoder
from ..methods.measure import NO_NEIGHBOUR_RECALL, Coded, fit_and_encode, input_neighbours
from ..methods.registry import ARRAY_METHODS, find_method, is_array_method, make_method, split_names
from ..report.plots import plot_curves
from ..store.rows import RowReader


def evaluate(
    model: str | Path,
    data: object,
    *,
    protocol: str | int | None = None,
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
        DataError: no labels, no classes that queries and ``codes`` share, or unreadable data.
        DeviceError: the device does not exist or has too little memory.
        MismatchError: a model does not fit the data, or was trained on another split of them.
        UsageError: an entry of ``compare`` is neither a method nor a model, options do not fit
            together, or the split has no queries.
    """
    compare = split_names(compare) if isinstance(compare, str) else compare
    options: dict[str, Any] = {
        "convention": convention,
        "ks": ks,
        "threads": faiss.omp_get_max_threads(),
    }
    dataset = open_data(data)
    encoder = open_encoder(model, device)
    encoder.check(dataset)
    labels = dataset.require_labels()
    if codes is not None:
        if compare or protocol is not None:
            raise UsageError(
                "--codes ranks the file against all labelled items: leave out --compare and "
                "--protocol"
            )
        return _evaluate_codes(encoder, dataset, codes, options)
    if isinstance(encoder, OnnxEncoder):
        raise UsageError(
            f"{model} encodes queries only: give the model folder, or --codes FILE of the database"
        )
    models = _open_compared(encoder, compare, dataset, device)
    split, notes = _resolve_split(encoder, dataset, protocol)
    if not len(split.query):
        raise UsageError(
            "protocol none sets no queries apart: evaluate a model that was trained with another "
            "protocol, or give labelled codes of a database (--codes)"
        )
    database = split.database[labels.has(split.database)]
    if not len(database):
        database = split.labelled
        if not notes:
            notes.append(
                "every labelled item but the queries was trained on, so the database is the "
                "labelled training items (train with --labelled to hold some back)"
            )
    first = _encode(encoder, dataset, split.query, database)
    neighbours = input_neighbours(dataset, first.query_rows, first.base_rows)
    if neighbours is None:
        notes.append(NO_NEIGHBOUR_RECALL)
    measured: dict[str, Row] = {}
    for name, compared in models.items():
        if compared is encoder:
            coded = first
        elif compared is not None:
            coded = _encode(compared, dataset, split.query, database)
        else:
            seed = encoder.model.description["config"]["training"]["seed"]
            coded = fit_and_encode(
                make_method(name, encoder.bits, seed),
                dataset,
                split,
                queries=first.query_rows,
                database=first.base_rows,
            )
        measured[name] = Row(
            coded.rank(labels, **options),
            coded.neighbour_recall(neighbours),
            None if compared is None and find_method(name).code == "none" else coded.coder.bits,
            None if compared is None else compared.fingerprint,
        )
    run = Run(first, labels, labels, dataset.ids, dataset.ids)
    return Evaluation(measured, run, split.name, split.hash, dataset.name, tuple(notes))


def model_name(description: Mapping[str, Any]) -> str:
    """Return the name of a model in tables, from its ``config.json``.

    It is the method, and its preset unless these are the default: ``gpq (paper)``.
    """
    method = description["method"]
    preset = description["config"]["preset"]
    is_default = (method, preset) == ("posterior", "recommended")
    return method if is_default else f"{method} ({preset})"


def _training_of(encoder: Encoder) -> dict[str, Any]:
    """Return what identifies the training: the fingerprint ``data`` of its data set, and ``hash``,
    ``protocol`` and ``seed`` of its split.
    """
    description = encoder.model.description
    split = {name: description["split"][name] for name in ("hash", "protocol", "seed")}
    return {"data": description["data"]["fingerprint"], **split}


def _open_compared(
    first: Encoder, compare: Sequence[str], dataset: Dataset, device: str
) -> dict[str, Encoder | None]:
    """Return the rows of the table: name -> model, or None for a method that is fitted here.

    The first model comes first. A name of an array method means the method, even if a folder has
    that name. Further models of the same name are shown with their folders.

    Raises:
        DataError, DeviceError, MismatchError, UsageError: as :func:`evaluate`.
    """
    entries: dict[str, Encoder | None] = {model_name(first.model.description): first}
    for entry in compare:
        if is_array_method(entry):
            make_method(entry, first.bits)
            entries[entry] = None
            continue
        if not Path(entry).is_dir():
            raise UsageError(
                f"--compare {entry}: neither the folder of a model nor a method fitted here: "
                f"choose from {', '.join(ARRAY_METHODS)} (gpq experiment run trains the others)"
            )
        encoder = Encoder.load(entry, device)
        encoder.check(dataset)
        expected, actual = _training_of(first), _training_of(encoder)
        if any(actual[key] != expected[key] for key in ("data", "hash")):
            raise MismatchError(
                f"--compare {entry}: it was trained on other data or another split (protocol "
                f"{actual['protocol']}, seed {actual['seed']}) than {first.source} (protocol "
                f"{expected['protocol']}, seed {expected['seed']}): train it on the same data with "
                "the same --protocol, seed, --labelled and --queries"
            )
        name = model_name(encoder.model.description)
        entries[f"{name}: {entry}" if name in entries else name] = encoder
    return entries


def _resolve_split(
    encoder: Encoder, dataset: Dataset, protocol: str | int | None
) -> tuple[Split, list[str]]:
    """Return the training split for the training data, else a new one; and notes for the user.

    Raises:
        MismatchError: another protocol for the training data: its queries may have been trained on.
    """
    training = _training_of(encoder)
    if training["data"] != dataset.fingerprint:
        note = (
            f"{dataset.name} is not the data of the training: queries and database are drawn from "
            "it instead; if some of them were trained on, the figures are too high"
        )
        return make_split(dataset, protocol or "1", labelled="all"), [note]
    if protocol is not None and str(protocol) != training["protocol"]:
        raise MismatchError(
            f"{encoder.source} was trained with protocol {training['protocol']}: with protocol "
            f"{protocol} it may have seen the labels of queries. Leave out the protocol, or train "
            "with it"
        )
    return load_split(encoder.source / "split.json"), []


def _encode(encoder: Encoder, dataset: Dataset, queries: Ids, rows: Ids) -> Coded:
    """Encode queries and database with a model."""
    query_rows, xq = encoder.embed_rows(dataset, queries, queries=True)
    readable, codes = zip(*encoder.code_batches(dataset, rows), strict=True)
    coder = ProductCoder(encoder.model.codebooks)
    return Coded(coder, query_rows, np.concatenate(readable), xq, np.concatenate(codes))


def _evaluate_codes(
    encoder: Encoder | OnnxEncoder, queries: Dataset, codes: str | Path, options: Mapping[str, Any]
) -> Evaluation:
    """Evaluate with a codes file as the database, see :func:`evaluate`."""
    query_labels = queries.require_labels()
    with RowReader(codes, kind="codes", model_fingerprint=encoder.fingerprint) as reader:
        if reader.labels is None or not np.any(reader.labels):
            raise DataError(f"{codes}: no item has a label: encode labelled data")
        labels = Labels(np.asarray(reader.labels), reader.header.class_names)
        Z = reader.header.codebooks
        packed = np.asarray(reader.values)
        ids = np.asarray(reader.ids)
    if not {*labels.class_names} & {*query_labels.class_names}:
        raise DataError(
            f"no class of {queries.name} ({query_labels.class_names[0]}, ...) is one of {codes} "
            f"({labels.class_names[0]}, ...): give both the same names of classes"
        )
    classes = tuple(dict.fromkeys((*labels.class_names, *query_labels.class_names)))
    query_labels = query_labels.over(classes)
    labels = labels.over(classes)
    database = np.flatnonzero(labels.has())
    database = database[np.argsort(ids[database])]  # the order of ties by id
    rows, xq = encoder.embed_rows(queries, np.flatnonzero(query_labels.has()), queries=True)
    coded = Coded(ProductCoder(Z), rows, database, xq, packed[database])
    name = (
        model_name(encoder.model.description)
        if isinstance(encoder, Encoder)
        else encoder.source.name
    )
    notes = (
        f"queries are all labelled items of {queries.name}, the database those of {codes}",
        "NN10@100 is not measured: it needs the inputs, and only codes are given",
        *["the queries are in the database, too, and find themselves first"]
        * (reader.header.data_fingerprint == queries.fingerprint),
    )
    ranking = coded.rank(query_labels, labels, **options)
    measured = {name: Row(ranking, bits=encoder.bits, model_fingerprint=encoder.fingerprint)}
    run = Run(coded, query_labels, labels, queries.ids, ids)
    return Evaluation(measured, run, "none", "", queries.name, notes)


# Results ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A model or method of an evaluation.

    Attributes:
        ranking: measures of its ranking.
        neighbour_recall: None for images (:func:`gpq_faiss.methods.measure.needs_perceptron`), and
            for a database of ``codes``.
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


@dataclass(frozen=True)
class Run:
    """What the model ranks, for tools that measure rankings themselves.

    Attributes:
        coded: queries and database as encoded by the model.
        query_labels, labels: labels of the rows of both data sets, over the same classes.
        query_ids, ids: int64, ids of the rows of both data sets.
    """

    coded: Coded
    query_labels: Labels
    labels: Labels
    query_ids: Ids
    ids: Ids

    def write(
        self, out: str | Path, *, k: int = 1000, overwrite: bool = False
    ) -> tuple[Path, Path]:
        """Write the first k results of each query as a TREC run, and the relevant items of each
        query as ``.qrels`` beside it.

        Returns:
            The two files.

        Raises:
            OutputExistsError: one of them exists and ``overwrite`` is false.
            UsageError: ``out`` ends in ``.qrels``.
        """
        run = check_output(out, overwrite=overwrite)
        qrels = check_output(qrels_path(run), overwrite=overwrite)
        coded = self.coded
        ids = self.ids[coded.base_rows]
        packed = self.labels.take(coded.base_rows).packed
        with (
            atomic_path(run) as new_run,
            atomic_path(qrels) as new_qrels,
            new_run.open("w") as run_file,
            new_qrels.open("w") as qrels_file,
        ):
            for row, number in enumerate(coded.query_rows.tolist()):
                query = self.query_ids[number]
                (scores,) = coded.score(np.array([row]), coded.codes)
                run_file.writelines(
                    f"{query} Q0 {ids[best]} {rank} {scores[best]:.9g} gpq-faiss\n"
                    for rank, best in enumerate(np.lexsort((ids, -scores))[:k], 1)
                )
                relevant = np.any(packed & self.query_labels.packed[number], axis=1)
                qrels_file.writelines(f"{query} 0 {item} 1\n" for item in ids[relevant].tolist())
        return run, qrels


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """Measurements of one evaluation.

    Attributes:
        measured: the model by its name in tables (:func:`model_name`), then the others.
        run: the rankings of the model.
        protocol, split_hash: identify queries and database.
        data: name of the data set.
        notes: remarks for the user.
    """

    measured: dict[str, Row]
    run: Run
    protocol: str
    split_hash: str
    data: str
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """Name of the model in tables."""
        return next(iter(self.measured))

    @property
    def ranking(self) -> RankingResult:
        """Measures of the model's ranking."""
        return self.measured[self.method].ranking

    @property
    def queries(self) -> NDArray[np.int64]:
        """Data set rows of the queries, int64 [Q], in the order of ``ranking.ap``."""
        return self.run.coded.query_rows

    def to_dict(self) -> dict[str, Any]:
        """Return the evaluation for JSON; the figures at the top level are those of the model."""
        (method, model), *compared = self.measured.items()
        return {
            **model.to_dict(),
            "method": method,
            "protocol": self.protocol,
            "split_hash": self.split_hash,
            "data": self.data,
            "compared": {name: row.to_dict() for name, row in compared},
            "notes": list(self.notes),
            "versions": versions("numpy", "python"),
        }

    def rows(self, ks: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return a row for each model or method.

        Precision and recall are at the ranks ``ks`` (default: all).
        """
        return [
            {"method": name, "bits": row.bits or "-", **row.ranking.rows(ks)[0]}
            | {"NN10@100": row.neighbour_recall and row.neighbour_recall.nn10_at_100}
            for name, row in self.measured.items()
        ]

    def about(self) -> list[str]:
        """Return lines with size, split, convention and notes."""
        recall = self.measured[self.method].neighbour_recall
        size, *lines = self.ranking.about()
        lines += [recall.definition] if recall else []
        return [f"{size}, protocol {self.protocol}", *lines, *map("note: {}".format, self.notes)]

    def draw(self, out: str | Path, *, overwrite: bool = False) -> Path:
        """Draw the mean precision-recall curves of all rows, as .png, .svg or .pdf.

        Raises:
            UsageError: another extension.
            DataError: the file cannot be written.
        """
        curves = {
            f"{name}, {row.bits or 'no'} bits  (mAP {row.ranking.map:.3f})": (
                row.ranking.pr_recall,
                row.ranking.pr_precision,
            )
            for name, row in self.measured.items()
        }
        return plot_curves(
            curves,
            out,
            x="recall",
            y="precision",
            title=f"{self.data}, protocol {self.protocol}",
            overwrite=overwrite,
        )
