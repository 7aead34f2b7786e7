"""Evaluating: a model and labelled data ─► mAP, likeness, precision and recall at k, PR curve, beside other models and methods.

Queries and database are those of the split that the model was trained with, so that no query was seen in training. Other models
must have been trained on the same split. The result names the convention of its average precision, the split and the versions.
"""

from __future__ import annotations

import logging
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..cluster.connect import connected
from ..codes.bits import unpack_codes
from ..codes.scores import score_tables
from ..data.base import Dataset, ImageDataset
from ..data.labels import Labels
from ..data.open import open_data
from ..data.protocols import Split, load_split, make_split
from ..encoder import Encoder, is_onnx, open_encoder
from ..errors import DataError, MismatchError, UsageError
from ..evaluation.likeness import Likeness, Neighbours
from ..evaluation.metrics import RECALL_LEVELS
from ..evaluation.ranking import RankingResult, rank_codes, usable_cores
from ..evaluation.ties import Denominator, Ties
from ..faissio.model import read_description
from ..files import check_output
from ..methods.coders import ProductCoder
from ..methods.measure import NO_LIKENESS, Coded, fit_and_encode, input_neighbours
from ..methods.registry import ARRAY_METHODS, find_method, make_method, method_names
from ..nn.device import gpu_memory
from ..progress import Progress, stage
from ..report import html
from ..report.gallery import Ranked
from ..report.plots import plot_pr_curves
from ..store import RowReader
from .search import class_text

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

DEFAULT_KS = (1, 10, 100, 1000)
_SHOWN, _RESULTS = 10, 8
"""Best queries on a page, and worst; and results of each of them."""


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found.

    Attributes:
        ranking: of the model.
        method: of the model, as tables name it (:func:`model_name`).
        bits: code length.
        protocol, split_hash: which queries and database.
        compared: name -> ranking of other models and methods on the same split. No name is that of the model.
        notes: for people.
        device: where the rankings of models were measured.
        likeness: of the model; None for images (:func:`gpq_faiss.methods.measure.needs_perceptron`).
        compared_likeness: name -> likeness of the others.
        compared_bits: name -> code length of the others; ``float`` and ``classifier`` have none.
        compared_fingerprints: name -> fingerprint, of the models among them.
        queries: int64 [Q], positions of the queries in the data; ``ranking.ap`` is in their order.
        results: of images: for the best and worst queries, by their place in ``queries``, the positions of their first results.
    """

    ranking: RankingResult
    method: str
    bits: int
    protocol: str
    split_hash: str
    data: str
    model_fingerprint: str
    compared: dict[str, RankingResult] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    device: str = "cpu"
    likeness: Likeness | None = None
    compared_likeness: dict[str, Likeness] = field(default_factory=dict)
    compared_bits: dict[str, int] = field(default_factory=dict)
    compared_fingerprints: dict[str, str] = field(default_factory=dict)
    queries: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    results: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; ``map`` is the model's."""
        return {
            **self.ranking.as_dict(),
            "method": self.method,
            "likeness": _as_dict(self.likeness),
            "bits": self.bits,
            "protocol": self.protocol,
            "split_hash": self.split_hash,
            "data": self.data,
            "model_fingerprint": self.model_fingerprint,
            "compared": {
                name: {
                    **result.as_dict(),
                    "likeness": _as_dict(self.compared_likeness.get(name)),
                    "bits": self.compared_bits.get(name),
                    "model_fingerprint": self.compared_fingerprints.get(name),
                }
                for name, result in self.compared.items()
            },
            "notes": list(self.notes),
            "device": self.device,
            "versions": {
                "gpq_faiss": __version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def rows(self, ks: Sequence[int] = ()) -> list[dict[str, Any]]:
        """One row per model or method, for a table."""
        kept = {self.method: self.likeness, **self.compared_likeness}
        bits = {self.method: self.bits, **self.compared_bits}
        return [
            {
                "method": name,
                "bits": bits.get(name, "-"),
                "mAP": result.map,
                **({"NN10@100": found.nn10_at_100} if (found := kept.get(name)) is not None else {}),
                **{f"P@{k}": result.precision[k] for k in ks if k in result.precision},
                **{f"R@{k}": result.recall[k] for k in ks if k in result.recall},
            }
            for name, result in {self.method: self.ranking, **self.compared}.items()
        ]

    def draw(self, out: str | Path, *, overwrite: bool = False) -> Path:
        """Mean precision-recall curves of the model and what it was compared with, as .png, .svg or .pdf.

        Raises:
            UsageError: another ending.
            DataError: it cannot be written.
        """
        results = {self.method: self.ranking, **self.compared}
        bits = {self.method: self.bits, **self.compared_bits}
        same = len(set(bits.values())) == 1
        length = {name: f", {n} bits" for name, n in bits.items()}
        curves = {
            f"{name}{'' if same else length.get(name, '')}  (mAP {r.map:.3f})": (r.pr_recall, r.pr_precision)
            for name, r in results.items()
        }
        title = f"{self.data}{length[self.method] if same else ''}, protocol {self.protocol}"
        return plot_pr_curves(curves, out, title=title, overwrite=overwrite)

    def save_page(
        self,
        data: Dataset,
        out: str | Path,
        *,
        ks: Sequence[int] = DEFAULT_KS,
        overwrite: bool = False,
    ) -> Path:
        """One HTML file to send around: the table, precision-recall curves, and the best and worst queries with their pictures.

        Args:
            data: the data set that was evaluated; without images, queries are shown by their names or ids.
            out: the page, .html.
            ks: of precision and recall.
            overwrite: replace an existing file.

        Raises:
            UsageError: another ending. OutputExistsError: ``out`` exists and ``overwrite`` is false.
        """
        if Path(out).suffix.lower() != ".html":
            raise UsageError(f"--out {out}: a page ends in .html")
        check_output(out, overwrite=overwrite)
        ranking = self.ranking
        about = [
            f"{ranking.n_queries:,} queries, {ranking.n_database:,} items in the database, protocol {self.protocol}, {self.data}. "
            f"{ranking.convention}",
            *self.notes,
        ]
        with tempfile.TemporaryDirectory() as folder:
            curves = html.plot(self.draw(Path(folder) / "curves.svg"))
        parts = [
            html.table(self.rows(ks)),
            *map(html.note, about),
            html.heading("Precision over recall"),
            curves,
        ]
        for title, chosen in zip(("Best queries", "Worst queries"), _extremes(ranking.ap), strict=True):
            parts += [html.heading(title), _query_pictures(self, data, chosen)]
        return html.save_page(f"{self.method} on {self.data}", parts, out, overwrite=overwrite)


def _as_dict(found: Likeness | None) -> dict[str, Any] | None:
    return None if found is None else found.as_dict()


def _extremes(ap: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of the best queries, and of the worst."""
    order = np.argsort(ap, kind="stable")
    return order[::-1][:_SHOWN], order[:_SHOWN]


def _first_results(coded: Coded, ap: NDArray[Any]) -> dict[int, NDArray[np.int64]]:
    """Positions in the data of what the best and worst queries find first."""
    found = {}
    for place in np.unique(np.concatenate(_extremes(ap))).tolist():
        scores = coded.score(np.array([place]), coded.codes)[0]
        found[place] = coded.base_rows[np.argsort(-scores, kind="stable")[:_RESULTS]]
    return found


def _query_pictures(evaluation: Evaluation, data: Dataset, chosen: NDArray[np.int64]) -> str:
    rows = evaluation.queries[chosen]
    names = data.texts.get("name")
    called = [str(names[row]) if names is not None else f"id {data.ids[row]}" for row in rows.tolist()]
    texts = [f"{name}: AP {ap:.4f}" for name, ap in zip(called, evaluation.ranking.ap[chosen], strict=True)]
    if not isinstance(data, ImageDataset):
        return html.table(
            [{"query": n, "AP": float(a)} for n, a in zip(called, evaluation.ranking.ap[chosen], strict=True)]
        )
    images = data.read(rows)
    if not evaluation.results:
        return html.pictures(
            [(image, text) for image, text in zip(images, texts, strict=True) if image is not None]
        )
    return html.gallery(
        [
            _ranked(data, row, image, text, evaluation.results[place])
            for place, row, image, text in zip(chosen.tolist(), rows.tolist(), images, texts, strict=True)
            if image is not None
        ]
    )


def _ranked(
    data: ImageDataset, row: int, image: NDArray[np.uint8], text: str, found: NDArray[np.int64]
) -> Ranked:
    """A query and what it finds, framed by whether they share a label."""
    packed = data.require_labels().packed
    shown = [(at, one) for at, one in zip(found.tolist(), data.read(found), strict=True) if one is not None]
    return Ranked(
        query=image,
        results=[one for _, one in shown],
        relevant=[bool((packed[row] & packed[at]).any()) for at, _ in shown],
        query_name=text,
        names=[class_text(data, at) for at, _ in shown],
    )


def code_bits(encoder: Encoder) -> int:
    """Length of a model's codes."""
    M, K, _ = encoder.model.codebooks.shape
    return int(M * (K.bit_length() - 1))


# Method -> the preset that its row does not name.
_NATURAL = {"gpq": "gpq", "posterior": "recommended"}


def model_name(description: Mapping[str, Any]) -> str:
    """What tables call a model, from its ``config.json``: its method, with its preset where that is not the method's own: ``posterior``,
    ``gpq``, ``gpq (paper)``."""
    method, used = str(description.get("method", "gpq")), str(description["config"].get("preset", "paper"))
    return method if _NATURAL.get(method) == used else f"{method} ({used})"


def _trained_on(folder: Path, description: Mapping[str, Any]) -> tuple[str, str, int]:
    """Fingerprint of the data, protocol and seed of a model's training. Raises DataError: ``config.json`` lacks them."""
    try:
        split = description["split"]
        return str(description["data"]["fingerprint"]), str(split["protocol"]), int(split["seed"])
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"{folder / 'config.json'} does not say what the model was trained on: it is damaged; copy or train the model again"
        ) from None


def _check_same_split(first: Path, other: Path) -> None:
    """Refuse a model that was trained on another split than the first: its rows would stand beside figures of other items.

    Raises:
        DataError: no whole model folder.
        MismatchError: other data, or another split of them.
    """
    one, two = (_trained_on(folder, read_description(folder)) for folder in (first, other))
    if one[0] != two[0]:
        raise MismatchError(
            f"--compare {other}: it was trained on other data than {first}: train both on the same data"
        )
    a, b = load_split(first / "split.json"), load_split(other / "split.json")
    if (a.name, a.hash) != (b.name, b.hash):
        splits = [f"protocol {s.name}, seed {s.seed}, {len(s.labelled):,} labelled" for s in (b, a)]
        raise MismatchError(
            f"--compare {other}: it was trained on another split ({splits[0]}) than {first} ({splits[1]}): train it with the same "
            "--protocol, --seed, --labelled and --queries"
        )


def _open_compared(
    first: Encoder, compare: Sequence[str], dataset: Dataset, device: str
) -> dict[str, Encoder | None]:
    """What is compared: the name of its row -> the model, or None for a method that is fitted here; the first model is the first entry.

    A folder is a model, unless its name is that of a method that is fitted here. Models that would have the same name are named
    with their folders.

    Raises:
        DataError, DeviceError, MismatchError, UsageError: as :func:`evaluate`.
    """
    folder, bits = first.model.folder, code_bits(first)
    models = {str(folder): first}
    for i, name in enumerate(compare):
        if name in compare[:i]:
            raise UsageError(f"--compare names {name} twice: leave one out")
        if name in method_names() and (not find_method(name).deep or not Path(name).is_dir()):
            make_method(name, bits)
            continue
        if not Path(name).is_dir():
            raise UsageError(
                f"--compare {name}: neither the folder of a model nor a method: train it, or choose from {', '.join(ARRAY_METHODS)}"
            )
        if any(Path(name).resolve() == Path(known).resolve() for known in models):
            raise UsageError(f"--compare {name}: this model has a row already: leave it out")
        _check_same_split(folder, Path(name))
        models[name] = Encoder.load(name, device)
        models[name].check(dataset)
    names = [model_name(one.model.description) for one in models.values()]
    rows = {
        path: f"{name}: {path}" if names.count(name) > 1 else name
        for path, name in zip(models, names, strict=True)
    }
    return {rows.get(name, name): models.get(name) for name in (str(folder), *compare)}


def resolve_split(
    encoder: Encoder, dataset: Dataset, protocol: str | None, seed: int | None, labelled: str | None
) -> tuple[Split, list[str]]:
    """The split to evaluate on: the model's own for the data that it was trained on, else a new one.

    Raises:
        MismatchError: another protocol or seed for the training data: its queries may have been trained on.
    """
    model = encoder.model
    data, trained, its_seed = _trained_on(model.folder, model.description)
    if data != dataset.fingerprint:
        split = make_split(dataset, protocol or "1", seed=seed or 0, labelled=labelled)
        return split, [
            f"{dataset.name} is not the data of the training: queries and database are drawn from it instead"
        ]
    if protocol is not None and protocol != trained:
        raise MismatchError(
            f"{model.folder} was trained under protocol {trained}: under protocol {protocol} it may have "
            f"seen the labels of queries. Train with --protocol {protocol}"
        )
    if seed is not None and seed != its_seed:
        raise MismatchError(
            f"{model.folder} was trained on the split of seed {its_seed}: with seed {seed} it may have seen the "
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


def _encode(
    encoder: Encoder, dataset: Dataset, queries: NDArray[np.int64], rows: NDArray[np.int64], advance: Progress
) -> Coded:
    """Queries and database as ``encoder`` codes them; ``advance`` is called with the items done and the items in all."""
    total = len(queries) + len(rows)
    query_rows, xq = encoder.embed_rows(
        dataset, queries, queries=True, progress=lambda done, _: advance(done, total)
    )
    readable: list[NDArray[np.int64]] = []
    codes: list[NDArray[np.uint8]] = []
    with stage("encoding", len(rows)) as encoding:
        for positions, packed in encoder.code_batches(dataset, rows):
            readable.append(positions)
            codes.append(packed)
            encoding.advance(len(positions))
            advance(len(queries) + encoding.done, total)
    coder = ProductCoder(encoder.model.codebooks)
    return Coded(coder, query_rows, np.concatenate(readable), xq, np.concatenate(codes))


def _rank_on_device(
    coded: Coded, labels: Labels, device: torch.device, options: Mapping[str, Any]
) -> RankingResult:
    from ..gpu.ranking import rank_on_device

    tables, columns = coded.scorer
    settings = {key: value for key, value in options.items() if key not in ("threads", "ray")}
    with gpu_memory("the ranking of one block does not fit: free the GPU, or take --device cpu"):
        return rank_on_device(
            np.asarray(tables),
            columns,
            labels.take(coded.query_rows),
            labels.take(coded.base_rows),
            device=device,
            **settings,
        )


def _rank_all(
    entries: Mapping[str, Encoder | None],
    dataset: Dataset,
    split: Split,
    rows: NDArray[np.int64],
    options: dict[str, Any],
    *,
    ks: Sequence[int],
    on_device: bool,
    progress: Progress | None,
) -> tuple[dict[str, RankingResult], dict[str, Likeness], NDArray[np.int64], dict[int, NDArray[np.int64]]]:
    """Rankings and likeness by row; no likeness for images. The first entry is a model. Then the positions of the queries that could be
    read, and of images the first results of some (:attr:`Evaluation.results`).

    Methods are compared on the queries and items that the first model could read.
    """
    first = next(iter(entries.values()))
    assert first is not None
    labels, image_size = dataset.require_labels(), first.model.image_size
    seed = int(first.model.description["config"]["training"]["seed"])
    rankings: dict[str, RankingResult] = {}
    found: dict[str, Likeness] = {}
    neighbours: Neighbours | None = None
    models = [name for name, encoder in entries.items() if encoder is not None]
    queries, base = split.query, rows
    results: dict[int, NDArray[np.int64]] = {}
    for name, encoder in entries.items():
        if rankings:
            log.info("comparing with %s", name)
        if encoder is None:
            with stage(name):
                coded = fit_and_encode(
                    name,
                    code_bits(first),
                    seed,
                    dataset,
                    split,
                    image_size=image_size,
                    queries=queries,
                    database=base,
                )
        else:

            def advance(done: int, total: int, before: int = models.index(name)) -> None:
                if progress is not None:
                    progress(before * total + done, len(models) * total)

            coded = _encode(encoder, dataset, split.query, rows, advance)
        if not rankings:
            queries, base = coded.query_rows, coded.base_rows
            options = options | {"ks": [at for at in ks if at <= len(base)]}
            neighbours = input_neighbours(dataset, image_size, queries, base, labels)
        if encoder is not None and (on_device or encoder.device.type != "cpu"):
            rankings[name] = _rank_on_device(coded, labels, encoder.device, options)
        else:
            rankings[name] = coded.rank(labels, **options)
        if len(rankings) == 1 and isinstance(dataset, ImageDataset):
            results = _first_results(coded, rankings[name].ap)
        if neighbours is not None:
            found[name] = coded.likeness(neighbours, dataset)
    return rankings, found, queries, results


def _evaluate_codes(
    model: str | Path,
    queries: Dataset,
    codes: str | Path,
    options: Mapping[str, Any],
    *,
    ks: Sequence[int],
    device: str,
    progress: Progress | None,
) -> Evaluation:
    """:func:`evaluate` of codes that are there already."""
    encoder = open_encoder(model, device)
    encoder.check(queries)
    own = queries.require_labels()
    with RowReader(codes, kind="codes", model_fingerprint=encoder.fingerprint) as reader:
        packed = reader.labels()
        if packed is None:
            raise DataError(f"{codes} has no labels: encode labelled data")
        labels = Labels(packed, reader.header.class_names)
        Z, base, ids = reader.header.codebooks, reader.block(), reader.ids()
    if not set(labels.class_names) & set(own.class_names):
        raise MismatchError(
            f"{queries.name} and {codes} have no class in common ({own.class_names[0]!r}, {labels.class_names[0]!r} ...)"
        )
    classes = tuple(dict.fromkeys((*labels.class_names, *own.class_names)))
    rows, there = np.flatnonzero(own.has()), np.flatnonzero(labels.has())
    if not len(there):
        raise DataError(f"{codes}: no item has a label, so nothing is relevant")
    rows, xq = encoder.embed_rows(queries, rows, queries=True, progress=progress)
    M, K, _ = encoder.shape
    result = rank_codes(
        score_tables(xq, Z),
        unpack_codes(base[there], M, K),
        own.over(classes).take(rows),
        labels.over(classes).take(there),
        ids=ids[there],
        ks=[at for at in ks if at <= len(there)],
        **options,
    )
    name = model_name(encoder.model.description) if isinstance(encoder, Encoder) else encoder.path.name
    return Evaluation(
        ranking=result,
        method=name,
        bits=M * (K.bit_length() - 1),
        protocol="none",
        split_hash="",
        data=queries.name,
        model_fingerprint=encoder.fingerprint,
        notes=(
            f"queries are all labelled items of {queries.name}, the database those of {codes}",
            "NN10@100 is not measured: codes alone do not say which items were alike before",
        ),
        device=str(encoder.device) if isinstance(encoder, Encoder) else "cpu",
        queries=rows,
    )


def evaluate(
    model: str | Path,
    data: object,
    *,
    protocol: str | None = None,
    seed: int | None = None,
    labelled: str | None = "all",
    compare: Sequence[str] = (),
    codes: str | Path | None = None,
    ks: Sequence[int] = DEFAULT_KS,
    k: int | None = None,
    ties: Ties = "expected",
    denominator: Denominator = "relevant",
    device: str = "cpu",
    on_device: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    ray: str | None = None,
) -> Evaluation:
    """Rank the database of a split for its queries, by code, and measure the rankings.

    Likeness (:mod:`gpq_faiss.evaluation.likeness`) is measured on at most 400 of the queries, always with expected ties.

    Args:
        model: model folder; with ``codes`` also an ONNX file of ``gpq export-encoder``, which needs no torch.
        data: labelled data; for the data of the training, the split of the training is used.
        protocol, seed, labelled: of the split, for other data. For the training's data they must agree with it.
        compare: what to show beside it: short names of methods, which are fitted on the same inputs and split, and folders of models,
            which must have been trained on the same split.
        codes: a codes file of labelled items, made by the model: they are the database, all labelled items of ``data`` the queries, and
            no split is drawn.
        ks: of precision and recall; those beyond the database are left out.
        k: mAP@k instead of the full ranking.
        ties, denominator: conventions, see :mod:`gpq_faiss.evaluation.metrics`.
        device: where networks run, and the ranking of models. Methods to compare with have scores of their own kind, so they
            are fitted and ranked on the CPU.
        on_device: rank in the form for devices, as a GPU always does; with the device ``cpu`` by torch on the CPU. The
            figures are the same.
        threads: of the ranking on the CPU (default: all cores); the figures do not depend on it.
        progress: called while encoding.
        ray: address of a Ray cluster whose cores rank the codes (:func:`..cluster.connect.connected`); the figures are the same.

    Raises:
        DataError: no labels, or nothing to rank.
        DeviceError: the device is not there, or has not the memory.
        MismatchError: a model takes other data, or was trained on another split of these.
        UsageError: something in ``compare`` is neither a method nor a model, or there twice.
    """
    # Wrong arguments are refused before the data are encoded, which may take hours.
    threads = usable_cores() if threads is None else threads
    if threads < 1:
        raise UsageError(f"{threads} threads: it must be at least 1")
    for at in (*ks, *([] if k is None else [k])):
        if at < 1:
            raise UsageError(f"k = {at}: it must be at least 1")
    dataset = open_data(data)
    options = {"ties": ties, "k": k, "denominator": denominator, "levels": RECALL_LEVELS, "threads": threads}
    if codes is not None:
        if (
            compare
            or on_device
            or ray is not None
            or (protocol, seed, labelled or "all") != (None, None, "all")
        ):
            raise UsageError(
                "codes are ranked as they are: leave out --compare, --protocol, --seed, --labelled and --ray"
            )
        return _evaluate_codes(model, dataset, codes, options, ks=ks, device=device, progress=progress)
    if is_onnx(model):
        raise UsageError(
            f"{model} makes vectors of queries only: give the model folder, or --codes FILE of the database"
        )
    encoder = Encoder.load(model, device)
    encoder.check(dataset)
    entries = _open_compared(encoder, compare, dataset, device)
    labels = dataset.require_labels()
    split, notes = resolve_split(encoder, dataset, protocol, seed, labelled)
    if not len(split.query):
        raise UsageError(
            f"{encoder.model.folder} was trained with --protocol none: there are no queries set apart to evaluate"
        )
    rows, more = _database(split, labels)
    notes += more
    if encoder.model.class_names != labels.class_names:
        notes.append("the classes are not those of the training")
    if (on_device or encoder.device.type != "cpu") and None in entries.values():
        notes.append("methods compared with were ranked on the CPU")
    with connected(ray):  # once for all rankings
        rankings, found, read, results = _rank_all(
            entries,
            dataset,
            split,
            rows,
            options | {"ray": ray},
            ks=ks,
            on_device=on_device,
            progress=progress,
        )
    if not found:
        notes.append(NO_LIKENESS)
    name, *others = entries
    lengths = {
        row: code_bits(one or encoder) for row, one in entries.items() if one or find_method(row).any_length
    }
    return Evaluation(
        ranking=rankings.pop(name),
        method=name,
        bits=lengths.pop(name),
        protocol=split.name,
        split_hash=split.hash,
        data=dataset.name,
        model_fingerprint=encoder.model.fingerprint,
        compared=rankings,
        notes=tuple(notes),
        device=str(encoder.device),
        likeness=found.pop(name, None),
        compared_likeness=found,
        compared_bits=lengths,
        compared_fingerprints={row: one.model.fingerprint for row in others if (one := entries[row])},
        queries=read,
        results=results,
    )
