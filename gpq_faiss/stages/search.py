"""Searching: queries (images, embeddings, or vectors encoded before) ─► ids and scores of the k best items.

The stage joins the two halves of the package: the network makes vectors of the queries, the index room searches. A
program that has vectors already needs only :mod:`gpq_faiss.indexes`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..build.item_files import known_items
from ..cluster.search import ClusterIndex, Holders
from ..data.base import BadItems, Dataset, ImageDataset
from ..data.images import FileImages, is_image_name
from ..data.labels import Labels
from ..data.open import is_form, open_data
from ..data.paths import local_path, without_secrets
from ..encoder import is_onnx, open_encoder
from ..errors import DataError, MismatchError, UsageError
from ..exported import OnnxEncoder
from ..faissio.model import read_description
from ..files import fingerprint
from ..indexes.file import FileIndex
from ..indexes.filters import Filter
from ..indexes.manifest import is_manifest
from ..indexes.memory import MemoryIndex
from ..indexes.opening import open_index
from ..indexes.plan import Plan
from ..indexes.protocol import Index
from ..inputs import check_memory, parse_bytes
from ..nn.device import gpu_memory, on_cpu, resolve_device
from ..progress import Progress, stage
from ..report import html
from ..report.gallery import Ranked, save_gallery
from ..store import Item, RowReader, describe, write_arrays

log = logging.getLogger(__name__)

_FEATURE_SUFFIXES = {".npy", ".npz", ".parquet", ".h5", ".hdf5"}


@dataclass(frozen=True)
class SearchResult:
    """The k best items of each query, best first.

    Attributes:
        ids: int64 [Q, k], the user's ids; -1 where fewer than k items were found (:attr:`short`).
        scores: float32 [Q, k], inner products of the query vector with the items' codewords.
        query_ids: int64 [Q].
        query_names: Q names for people (a path where there is one, else the id).
        codebooks_fingerprint: of model and index.
        points: what each number of lists that was tried gave, where nprobe was chosen by recall.
        description: how it was searched, for example what ``auto`` chose.
        min_score: the requested score, where it was not ``k`` items.
        missing_shards: files of shards that could not be searched, where partial answers were requested.
        items: by id, names, labels and kept columns of the items found; None where nothing is known beside the index.
        missing_shards: files of shards that could not be searched, where partial answers were asked for.
    """

    ids: NDArray[np.int64]
    scores: NDArray[np.float32]
    query_ids: NDArray[np.int64]
    query_names: tuple[str, ...]
    codebooks_fingerprint: str
    points: tuple[dict[str, float], ...] = ()
    description: str = ""
    min_score: float | None = None
    items: Mapping[int, Item] | None = None
    missing_shards: tuple[str, ...] = ()

    @property
    def short(self) -> int:
        """Queries for which fewer than ``k`` items were found (0 where all from a minimum score were requested)."""
        return int((self.ids == -1).any(axis=1).sum()) if self.min_score is None else 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON: one entry per query, missing results left out; ``names``, ``labels`` and kept columns where they are known."""
        tuned = {"operating_points": list(self.points)} if self.points else {}
        return {
            **({"k": int(self.ids.shape[1])} if self.min_score is None else {"least": self.min_score}),
            "codebooks_fingerprint": self.codebooks_fingerprint,
            "way": self.description,
            **tuned,
            **({"missing_shards": list(self.missing_shards)} if self.missing_shards else {}),
            "queries": [
                {
                    "id": int(query),
                    "name": name,
                    "ids": [int(i) for i in ids if i != -1],
                    "scores": [float(s) for i, s in zip(ids, scores, strict=True) if i != -1],
                    **self._known([int(i) for i in ids if i != -1]),
                }
                for query, name, ids, scores in zip(
                    self.query_ids, self.query_names, self.ids, self.scores, strict=True
                )
            ],
        }

    def _known(self, ids: list[int]) -> dict[str, list[Any]]:
        """Names, labels and kept columns of results, a list each."""
        if self.items is None:
            return {}
        found = [self.items.get(i) for i in ids]
        columns = list(dict.fromkeys(name for item in self.items.values() for name in item.texts))
        plural = {name: "names" if name == "name" else name for name in columns}
        known: dict[str, list[Any]] = {
            plural[name]: [None if item is None else item.texts.get(name) for item in found]
            for name in columns
        }
        if any(item.labels is not None for item in self.items.values()):
            known["labels"] = [
                None if item is None or item.labels is None else list(item.labels) for item in found
            ]
        return known

    def rows(self) -> list[dict[str, Any]]:
        """A row per result, for a table."""
        return [
            {"query": name, "rank": rank, "id": str(i), "score": float(score), **self._texts(i)}
            for name, ids, scores in zip(self.query_names, self.ids, self.scores, strict=True)
            for rank, (i, score) in enumerate(zip(ids.tolist(), scores.tolist(), strict=True), 1)
            if i != -1
        ]

    def _texts(self, i: int) -> dict[str, str]:
        """Name, labels and kept columns of a result, for a table."""
        if self.items is None:
            return {}
        return {
            column.removesuffix("s") if column == "names" else column: ", ".join(value or ())
            if isinstance(value, list)
            else value or ""
            for column, (value,) in self._known([i]).items()
        }

    def save_hdf5(self, path: str | Path) -> Path:
        """Write datasets ``ids``, ``scores`` and ``query_ids``, as :class:`SearchResult` names and shapes them, and where names are
        known ``names``, UTF-8 bytes [Q, k].

        Raises:
            DataError: it cannot be written.
        """
        arrays: dict[str, NDArray[Any]] = {
            "ids": self.ids,
            "scores": self.scores,
            "query_ids": self.query_ids,
        }
        if self.items is not None and any(item.name is not None for item in self.items.values()):
            names = [
                [((item.name if item else None) or "").encode() for item in map(self.items.get, row)]
                for row in self.ids.tolist()
            ]
            arrays["names"] = np.array(names).reshape(self.ids.shape)
        return write_arrays(
            path, arrays, {"kind": "results", "codebooks_fingerprint": self.codebooks_fingerprint}
        )

    def draw(self, items: Dataset, queries: Dataset, out: str | Path, *, overwrite: bool = False) -> Path:
        """Picture of each query and its results, framed by relevance where both have labels.

        Args:
            items: the images of the index; their ids are those of the results.
            queries: the images of the queries.
            out: .png, .svg or .pdf; or .html, a page with the pictures and a table of the results inside.

        Raises:
            DataError: no images, or an id that ``items`` (or ``queries``) does not have.
        """
        for dataset, what in ((items, "items"), (queries, "queries")):
            if not isinstance(dataset, ImageDataset):
                raise DataError(
                    f"{dataset.name} holds {dataset.kind}, not images: a picture needs images of the {what}"
                )

        def image(dataset: Dataset, position: int) -> NDArray[np.uint8]:
            assert isinstance(dataset, ImageDataset)
            found = dataset.read(np.array([position]))[0]
            return np.full((32, 32, 3), 160, np.uint8) if found is None else found

        place = {int(i): p for p, i in enumerate(items.ids)}
        asked = {int(i): p for p, i in enumerate(queries.ids)}
        missing = [int(i) for i in np.unique(self.ids) if i != -1 and int(i) not in place]
        if missing:
            raise DataError(
                f"{items.name} has no item with id {missing[0]}: --images must name the data of the index"
            )
        unknown = [int(i) for i in self.query_ids if int(i) not in asked]
        if unknown:
            raise DataError(
                f"{queries.name} has no image with id {unknown[0]}, which is a query: give the queries as their images (DATA)"
            )
        ranked = []
        for query, ids, scores in zip(self.query_ids, self.ids, self.scores, strict=True):
            at = asked[int(query)]
            found = [place[int(i)] for i in ids if i != -1]
            relevant = _relevance(items.labels, found, queries.labels, at)
            names = [class_text(items, p) for p in found]
            ranked.append(
                Ranked(
                    query=image(queries, at),
                    results=[image(items, p) for p in found],
                    scores=[float(s) for s in scores[ids != -1]],
                    relevant=relevant,
                    query_name=class_text(queries, at),
                    names=names if any(names) else None,
                )
            )
        if Path(out).suffix.lower() == ".html":
            parts = [
                html.gallery(ranked),
                html.heading("Results"),
                html.table(self.rows()),
                html.note(self.description),
            ]
            return html.save_page(f"{items.name}: {len(ranked)} queries", parts, out, overwrite=overwrite)
        return save_gallery(ranked, out, columns=self.ids.shape[1], overwrite=overwrite)


def _relevance(items: Labels | None, found: list[int], queries: Labels | None, at: int) -> list[bool] | None:
    """Whether each found item shares a label with the query; None where that is not known."""
    if items is None or queries is None or items.class_names != queries.class_names or not queries.has()[at]:
        return None
    return [bool(row.any()) for row in items.packed[found] & queries.packed[at]]


def class_text(dataset: Dataset, position: int) -> str:
    """The class names of an item, with commas; empty where it has none."""
    if dataset.labels is None:
        return ""
    on = np.flatnonzero(dataset.labels.dense(np.array([position]), dtype=bool)[0])
    return ", ".join(dataset.labels.class_names[c] for c in on)


def parse_rows(text: str, n: int) -> NDArray[np.int64]:
    """Positions from ``"0:8"``, ``"3,5,9"`` or ``"100:200:10"`` (as Python slices), out of ``n`` items.

    Raises:
        UsageError: not of that form, or beyond the items.

    Examples:
        >>> parse_rows("0:3", 10).tolist(), parse_rows("5,-1", 10).tolist()
        ([0, 1, 2], [5, 9])
    """
    rows: list[int] = []
    try:
        for part in text.split(","):
            numbers = [int(p) if p.strip() else None for p in part.split(":")]
            if len(numbers) == 1 and numbers[0] is not None:
                if not -n <= numbers[0] < n:
                    raise UsageError(f"--rows {text}: there are only {n:,} items (0 to {n - 1})")
                rows.append(numbers[0] % n)
            elif 2 <= len(numbers) <= 3:
                rows += range(n)[slice(*numbers)]
            else:
                raise ValueError
    except ValueError:
        raise UsageError(f"--rows {text}: write positions (3,5,9) or a range (0:8)") from None
    if not rows:
        raise UsageError(f"--rows {text} selects none of the {n:,} items")
    return np.array(rows, dtype=np.int64)


def _own_features(queries: str) -> Path | None:
    """The path, if ``queries`` is a features.h5 of this package."""
    path = Path(queries)
    if path.suffix not in {".h5", ".hdf5"} or not path.is_file():
        return None
    try:
        return path if describe(path)["type"] == "features" else None
    except DataError:
        return None


def open_queries(queries: str, **data_args: Any) -> Dataset:
    """Queries as a data set: any DATA form, a bare features file, one image, or a folder of images.

    Raises:
        UsageError, DataError: as :func:`gpq_faiss.data.open.open_data`.
    """
    if is_form(queries):  # "features:x.npy" ends like a bare file
        return open_data(queries, **data_args)
    path = Path(without_secrets(queries))
    if path.suffix.lower() in _FEATURE_SUFFIXES:
        return open_data(f"features:{queries}", **data_args)
    if path.is_dir():
        return open_data(f"folder:{queries}", **data_args)
    if is_image_name(without_secrets(queries)):
        path = local_path(queries)
        if not path.is_file():
            raise DataError(f"{without_secrets(queries)} not found: no such image")
        return FileImages(
            name=without_secrets(queries),
            ids=np.zeros(1, dtype=np.int64),
            fingerprint=fingerprint(queries),
            bad=BadItems(1, 0.0),
            paths=[str(path)],
        )
    return open_data(queries, **data_args)


def query_vectors(
    model: str | Path | OnnxEncoder,
    queries: object,
    *,
    rows: str | None = None,
    device: str = "cpu",
    memory: int | None = None,
    progress: Progress | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64], tuple[str, ...]]:
    """Vectors float32 [Q, M·d] of the queries, their ids int64 [Q] and names.

    A ``features.h5`` of the same model folder is taken as it is, without running the network. ``memory`` is a budget in bytes for what a
    compressed file of queries is unpacked to; default what is free.

    Raises:
        MismatchError: features of another model, or data that the model does not take.
        DataError: unreadable queries, or none.
    """
    own = _own_features(queries) if isinstance(queries, str) else None
    if own is not None:
        if isinstance(model, OnnxEncoder):
            raise MismatchError(
                f"{own} holds vectors of items, and {model.path} makes those of queries: give the data of the queries instead"
            )
        with RowReader(own) as reader:
            description = read_description(model)
            if reader.header.model_fingerprint != description["model_fingerprint"]:
                raise MismatchError(
                    f"{own} holds features of another model (fingerprint {reader.header.model_fingerprint}, "
                    f"{model} has {description['model_fingerprint']}): encode the queries with this model"
                )
            if description.get("asymmetric", False):
                raise MismatchError(
                    f"{own} holds vectors of items, and {model} makes other ones of queries: give the data of the queries instead"
                )
            if rows is None:
                needed = reader.ntotal * (4 * reader.header.width + 8)
                check_memory(
                    needed, f"{own}: {reader.ntotal:,} queries", memory, "name some of them with --rows"
                )
            positions = np.arange(reader.ntotal) if rows is None else parse_rows(rows, reader.ntotal)
            if rows is None:
                vectors, ids = reader.block(), reader.ids()
            else:
                vectors = np.concatenate([reader.block(p, p + 1) for p in positions.tolist()])
                ids = np.concatenate([reader.ids(p, p + 1) for p in positions.tolist()])
            return vectors, ids, tuple(str(i) for i in ids)
    dataset = open_queries(queries, memory=memory) if isinstance(queries, str) else open_data(queries)
    if not len(dataset):
        raise DataError(f"{dataset.name} holds no query")
    encoder = model if isinstance(model, OnnxEncoder) else open_encoder(model, device)
    positions = np.arange(len(dataset)) if rows is None else parse_rows(rows, len(dataset))
    M, _, d = encoder.shape
    check_memory(
        2 * 4 * M * d * len(positions), f"{len(positions):,} queries", memory, "name some of them with --rows"
    )
    positions, vectors = encoder.embed_rows(dataset, positions, queries=True, progress=progress)
    ids = dataset.ids[positions]
    path_of = getattr(dataset, "image_path", lambda i: None)
    names = tuple(path_of(int(p)) or str(i) for p, i in zip(positions, ids, strict=True))
    return vectors, ids, names


_QUERIES = 1 << 14
"""Queries at a time, so that progress shows."""


def open_on_device(
    index: str | Path,
    device: str,
    kind: str = "auto",
    memory: str | int | None = None,
    nprobe: int | None = None,
) -> Index:
    """Open an index file on a GPU, or by the name ``cpu`` in the form that a GPU has, searched by torch alone.

    The file is read into memory as :func:`open_index` does it, and goes to the device from there: every exact kind as
    itself, distinct codes where they are grouped, an index with lists with its lists.

    Args:
        device: as :func:`.nn.device.resolve_device` takes it.
        kind, nprobe: as :func:`open_index`.
        memory: bytes that a search may use on the device beyond the index and the results (default: 1 GiB).

    Raises:
        UsageError: kind ``fastscan``, which has rounded scores on the CPU alone; ``memory`` that is too small.
        DeviceError: no such GPU, a Faiss without GPU code, or an index that does not fit on the GPU.
        DataError, MismatchError: as :func:`open_index`.
    """
    from ..gpu.forms import check_gpu
    from ..gpu.memory import MEMORY
    from ..gpu.placing import to_gpu, to_torch

    place = resolve_device(device)
    if Plan.of(kind).search == "approximate":
        raise UsageError(
            f"kind 'fastscan' gives rounded scores, which {place} does not: take 'exact' for the exact answer of the same "
            "file, or --device cpu"
        )
    budget = MEMORY if memory is None else parse_bytes(memory)
    if place.type == "cuda":
        check_gpu(place.index)
    held = open_index(index, kind, None, nprobe)
    if place.type == "cuda":
        return to_gpu(held, device=place.index, memory=budget)
    return to_torch(held, device="cpu", memory=budget)


def search(
    model: str | Path,
    index: str | Path,
    queries: object,
    *,
    k: int = 10,
    rows: str | None = None,
    kind: str = "auto",
    memory: str | int | None = None,
    nprobe: int | None = None,
    recall: float | None = None,
    where: Filter | None = None,
    min_score: float | None = None,
    device: str = "cpu",
    on_device: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    ray: str | None = None,
    workers: int | None = None,
    replicas: int = 1,
    allow_partial: bool = False,
) -> SearchResult:
    """Search an index with queries of any form that the model takes.

    Args:
        model: model folder, or an ONNX file of ``gpq export-encoder``, which needs no torch.
        index: file that :func:`gpq_faiss.stages.index.index` wrote, or any Faiss index with these codebooks; or the manifest of shards.
        queries: a DATA form, a features file, an image, a folder of images, or whatever :func:`gpq_faiss.open_data` takes.
        k: results per query, 1 to the number of items.
        rows: only these queries (``"0:8"``).
        kind, memory, nprobe: see :func:`open_index`, and :func:`open_on_device` for a GPU.
        recall: choose nprobe for this recall of the exact top ``k``, by these very queries.
        where: only items that pass this filter (:mod:`.index.filters`).
        min_score: instead of ``k`` items per query, all that score at least this, in all lists.
        device: where the network runs and the index is searched.
        on_device: search the index in the form for devices, as a GPU always does. With the device ``cpu`` that is the same
            code, by torch on the CPU: the same answers, slowly.
        threads: of the search on the CPU (default: all cores).
        progress: called while the queries are encoded.
        ray: address of a Ray cluster (:func:`..cluster.connect.connected`) whose nodes hold the shards of a manifest; ``memory`` is
            then that of each worker.
        workers, replicas, allow_partial: see :class:`..cluster.search.ClusterIndex`.

    Returns:
        Ids and scores; equal scores are in the order of their ids. Where some queries have fewer than ``k`` results, a
        warning is logged.

    Raises:
        MismatchError: index and model have different codebooks.
        DataError: a file that cannot be read, an empty index, k beyond it.
        DeviceError: the device is not there, or cannot hold or search the index; nothing is searched elsewhere instead.
        UsageError: options out of range or that exclude each other, or what the device cannot do.
    """
    queries = str(queries) if isinstance(queries, Path) else queries
    place = "cpu" if on_cpu(device) else str(resolve_device(device))
    if (
        device == "auto"
        and place != "cpu"
        and (recall is not None or Plan.of(kind).search == "approximate" or is_manifest(index))
    ):
        log.info("searching on the CPU, which alone can do this; the network runs on %s", place)
        place = "cpu"
    there = on_device or place != "cpu"
    _check_options(k, nprobe, recall, min_score, place if there else None)
    encoder = OnnxEncoder.load(model, device) if is_onnx(model) else None
    # Before an index is opened.
    z_print = (
        read_description(model)["codebooks_fingerprint"] if encoder is None else encoder.codebooks_fingerprint
    )
    opened: Index
    if is_manifest(index) and recall is not None:
        raise UsageError(f"recall is measured on an index file, not on the shards of {index}: give an nprobe")
    if is_manifest(index) and there:
        raise UsageError(f"the shards of {index} are searched on the CPU: take --device cpu")
    with contextlib.ExitStack() as stack:
        with stage("opening the index"):
            if ray is not None:
                spread = workers, replicas, allow_partial
                opened = _on_cluster(stack, index, ray, kind, memory, nprobe, spread)
            elif there:
                with gpu_memory(_FITS):
                    opened = open_on_device(index, place, kind, memory, nprobe)
            else:
                opened = open_index(index, kind, memory, nprobe)
        stack.callback(opened.close)
        # Half of the budget is for the search itself.
        half = None if memory is None or there else parse_bytes(memory) // 2
        _check_opened(opened, index, model, z_print, recall)
        asked = query_vectors(
            model if encoder is None else encoder,
            queries,
            rows=rows,
            device=device,
            memory=half,
            progress=progress,
        )
        log.info("%s: %s", index, opened.describe())
        return _search(
            opened, index, asked, k=k, recall=recall, where=where, min_score=min_score, threads=threads
        )


def _on_cluster(
    stack: contextlib.ExitStack,
    index: str | Path,
    address: str,
    kind: str,
    memory: str | int | None,
    nprobe: int | None,
    spread: tuple[int | None, int, bool],
) -> Index:
    """The shards of a manifest, held by a cluster until the stack is left. Raises UsageError: ``index`` is no manifest."""
    if not is_manifest(index):
        raise UsageError(
            f"{index} is no manifest of shards, which a cluster searches: gpq index --out NAME.json writes one"
        )
    workers, replicas, allow_partial = spread
    holders = Holders(address, workers)
    stack.callback(holders.close)
    budget = None if memory is None else parse_bytes(memory)
    return ClusterIndex(index, holders, kind, budget, nprobe, replicas=replicas, allow_partial=allow_partial)


def _check_opened(
    opened: Index, index: str | Path, model: str | Path, z_print: str, recall: float | None
) -> None:
    """Raises UsageError: recall without lists. MismatchError: index and model have different codebooks."""
    if recall is not None and not opened.lists:
        raise UsageError(
            f"recall belongs to lists, which this search of {index} does not use: take kind 'ivf'"
        )
    if opened.fingerprint != z_print:
        raise MismatchError(
            f"{index} has other codebooks ({opened.fingerprint}) than {model} ({z_print}): "
            "build the index with this model"
        )


def _search(
    opened: Index,
    index: str | Path,
    asked: tuple[NDArray[np.float32], NDArray[np.int64], tuple[str, ...]],
    *,
    k: int,
    recall: float | None,
    where: Filter | None,
    min_score: float | None,
    threads: int | None,
) -> SearchResult:
    """Search for queries of :func:`query_vectors`. Raises as :func:`search`."""
    vectors, ids, names = asked
    points: list[dict[str, float]] = []
    if recall is not None:
        assert isinstance(opened, MemoryIndex | FileIndex)
        with stage("tuning nprobe"):
            points = opened.tune(recall, k=k, queries=vectors, threads=threads)
    with gpu_memory(_FITS):
        if min_score is not None:
            with stage("searching"):
                scores, found = _padded(
                    *opened.range_search(vectors, min_score, where=where, threads=threads)
                )
        else:
            scores, found = _search_all(opened, vectors, k, where, threads)
    # in the end, for it may have switched to distinct codes
    result = SearchResult(
        found,
        scores,
        ids,
        names,
        opened.fingerprint,
        tuple(points),
        opened.describe(),
        min_score,
        _items(index, found),
        tuple(sorted(getattr(opened, "missing", ()))),
    )
    if result.short:
        why = ["too few items pass the filter"] if where is not None else []
        if result.missing_shards:
            why.append(f"shards {', '.join(result.missing_shards)} are missing")
        if opened.plan.search == "approximate":
            why.append("kind fastscan gives no item of the least score (take exact)")
        log.warning(
            "%d of %d queries have fewer than %d results: %s", result.short, len(ids), k, " or ".join(why)
        )
    return result


def _items(index: str | Path, found: NDArray[np.int64]) -> dict[int, Item] | None:
    """Names and labels of the items found, from the file beside the index; None where there is none."""
    items = known_items(index)
    if items is None:
        return None
    with items:
        ids = np.unique(found[found != -1])
        return {int(i): item for i, item in zip(ids, items.lookup(ids), strict=True) if item is not None}


def _check_options(
    k: int, nprobe: int | None, recall: float | None, min_score: float | None, device: str | None
) -> None:
    """Raises UsageError: options out of range or that exclude each other. ``device``: of the index; None: the CPU's index."""
    if k < 1:
        raise UsageError(f"-k {k}: at least 1 is needed")
    if recall is not None and nprobe is not None:
        raise UsageError("nprobe and recall both choose the lists to probe: give one")
    if device is not None and recall is not None:
        raise UsageError(
            f"recall is measured on the CPU, which {device} is not to use: search with --device cpu and that recall once, and "
            "give the nprobe that it finds"
        )
    if min_score is not None and (nprobe is not None or recall is not None):
        raise UsageError(
            "all items from a least score on are sought in all lists: leave out nprobe and recall"
        )


def _search_all(
    index: Index, vectors: NDArray[np.float32], k: int, where: Filter | None, threads: int | None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Scores and ids [Q, k] of all queries, a block at a time."""
    parts = []
    with stage("searching", len(vectors), "query") as searching:
        for start in range(0, len(vectors), _QUERIES):
            block = vectors[start : start + _QUERIES]
            parts.append(index.search(block, k, where=where, threads=threads))
            searching.advance(len(block))
    scores, found = zip(*parts, strict=True)
    return np.concatenate(scores), np.concatenate(found)


_FITS = "the index and a search of it do not fit: lower --memory, free the GPU, or take --device cpu"


def _padded(
    lims: NDArray[np.int64], scores: NDArray[np.float32], ids: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Results of a range search as rows of one length, short ones filled with -inf and -1."""
    counts = np.diff(lims)
    shape = (len(counts), int(counts.max(initial=0)))
    D, found = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int64)
    there = np.arange(shape[1]) < counts[:, None]
    D[there], found[there] = scores, ids
    return D, found
