"""Search engines with a common interface, for comparison: queries to ids, on one thread.

Each is trained once, and then filled with any number of items: ``tool(name).fill(items, folder)``.
Vectors are float32 [n, width], compared by inner product; except with GPQ's network they are unit-norm.
Other packages are imported on use.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from gpq_faiss.codes.codebooks import pad_vectors
from gpq_faiss.codes.encode import encode
from gpq_faiss.indexes.memory import MemoryIndex

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Search = Callable[[Floats, int], Ids]
"""Queries [Q, width] and k to ids int64 [Q, k], best first, -1 where nothing was found."""

LISTS = 256
PROBES = (1, 4, 16, 64)
PACKAGES = ("scann", "usearch", "lancedb", "nanopq")


@dataclass(frozen=True)
class Filled:
    """An engine filled with items.

    Attributes:
        searches: searches by speed setting (``nprobe 4``), or a single one under "".
        bytes: size on disk, without separately stored vectors.
        vector_bytes: size of the stored vectors.
    """

    searches: Mapping[str, Search]
    bytes: int
    vector_bytes: int = 0


@dataclass(frozen=True)
class Tool:
    """One way to search.

    Attributes:
        name: for the table.
        group: kind of input, see :data:`compare.GROUPS`.
        code_bytes: bytes of one code.
        fill: function from items and an empty folder to the filled engine.
    """

    name: str
    group: str
    code_bytes: float
    fill: Callable[[Floats, Path], Filled]


def installed(package: str) -> bool:
    """Whether an optional package is installed."""
    return importlib.util.find_spec(package) is not None


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Set libraries to one thread where possible, and pin all threads to one core (Linux).

    Both are needed: OpenMP threads that wait for each other on a shared core spin, which costs milliseconds.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()

    def pin(allowed: set[int]) -> None:
        for task in Path("/proc/self/task").iterdir() if allowed else ():
            with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                os.sched_setaffinity(int(task.name), allowed)

    faiss_threads, torch_threads = faiss.omp_get_max_threads(), torch.get_num_threads()
    pin({max(cores)} if cores else set())
    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        faiss.omp_set_num_threads(faiss_threads)
        torch.set_num_threads(torch_threads)
        pin(cores)


def folder_bytes(folder: Path) -> int:
    """Of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def plain_faiss(index: Any) -> Search:
    """The search of a Faiss index."""

    def search(xq: Floats, k: int) -> Ids:
        found: Ids = index.search(pad_vectors(xq, index.d), k)[1]
        return found

    return search


def probing_faiss(index: Any, nprobe: int, keep: Any) -> Search:
    """The same with ``nprobe`` lists of ``index``, which may be wrapped in ``keep``."""

    def search(xq: Floats, k: int) -> Ids:
        index.nprobe = nprobe
        found: Ids = keep.search(pad_vectors(xq, keep.d), k)[1]
        return found

    return search


def _saved(index: Any) -> int:
    return int(faiss.serialize_index(index).nbytes)


def flat_floats(group: str, name: str, width: int) -> Tool:
    """All vectors uncompressed."""

    def fill(items: Floats, folder: Path) -> Filled:
        index: Any = faiss.IndexFlatIP(width)
        index.add(items)
        return Filled({"": plain_faiss(index)}, items.nbytes)

    return Tool(name, group, 4 * width, fill)


def faiss_opq(group: str, train: Floats, bits: int, forms: tuple[int, ...] = (8, 4)) -> Iterator[Tool]:
    """Faiss' own quantisers: OPQ and PQ with 8 and 4 bits a codebook, FastScan, and lists with FastScan.

    All by inner product, the better one of Faiss' two metrics here. The rotation is trained once for all 4-bit forms.
    """
    width = train.shape[1]
    for nbits in forms:
        M = bits // nbits
        rotated = -(-width // M) * M
        rotation = faiss.OPQMatrix(width, M, rotated)
        inner = faiss.ProductQuantizer(rotated, M, nbits)
        rotation.pq = inner
        try:
            rotation.train(train)
        finally:
            rotation.pq = None  # Python frees it
        x = rotation.apply(train)
        flat: Any = faiss.IndexPQ(rotated, M, nbits, faiss.METRIC_INNER_PRODUCT)
        flat.train(x)
        suffix = "" if nbits == 8 else "x4"
        yield _faiss_tool(group, f"OPQ{M},PQ{M}{suffix}", bits / 8, rotation, flat)
        if nbits == 4:
            yield _faiss_tool(group, f"OPQ{M},PQ{M}x4fs", bits / 8, rotation, faiss.IndexPQFastScan(flat))
            lists: Any = faiss.index_factory(rotated, f"IVF{LISTS},PQ{M}x4fs", faiss.METRIC_INNER_PRODUCT)
            lists.train(x)
            yield _faiss_tool(group, f"OPQ{M},IVF{LISTS},PQ{M}x4fs", bits / 8, rotation, lists)


def _faiss_tool(group: str, name: str, code_bytes: float, rotation: Any, empty: Any) -> Tool:
    def fill(items: Floats, folder: Path) -> Filled:
        inner = faiss.clone_index(empty)
        whole: Any = faiss.IndexPreTransform(rotation, inner)
        whole.add(items)
        if isinstance(inner, faiss.IndexIVF):
            searches = {f"nprobe {n}": probing_faiss(inner, n, whole) for n in PROBES}
        else:
            searches = {"": plain_faiss(whole)}
        return Filled(searches, _saved(whole))

    return Tool(f"Faiss {name}", group, code_bytes, fill)


def scann_trees(group: str, train: Floats, bits: int) -> Iterator[Tool]:
    """ScaNN: 4-bit codes of blocks of dimensions, over all items or in the leaves of a tree; nothing is re-scored.

    The anisotropic loss is used where it ranks better here, which is in the tree (where it codes residuals).
    """
    import scann

    width = train.shape[1]
    block = -(-width // (bits // 4))

    def make(leaves: int) -> Callable[[Floats, Path], Filled]:
        def fill(items: Floats, folder: Path) -> Filled:
            builder = scann.scann_ops_pybind.builder(items, 100, "dot_product").set_n_training_threads(1)
            sample = min(len(items), 100_000)
            if leaves:
                builder = builder.tree(
                    num_leaves=leaves, num_leaves_to_search=16, training_sample_size=sample
                )
            searcher = builder.score_ah(
                block,
                anisotropic_quantization_threshold=0.2 if leaves else float("nan"),
                hash_type="lut16",
                training_sample_size=sample,
            ).build()

            def with_leaves(wanted: int = -1) -> Search:
                def search(xq: Floats, k: int) -> Ids:
                    if len(xq) == 1:
                        ids, scores = searcher.search(xq[0], k, leaves_to_search=wanted)
                    else:
                        ids, scores = searcher.search_batched(xq, k, leaves_to_search=wanted)
                    out = np.full((len(xq), k), -1, np.int64)
                    ids, scores = np.atleast_2d(ids), np.atleast_2d(scores)
                    out[:, : ids.shape[1]] = np.where(np.isnan(scores), -1, ids.astype(np.int64))
                    return out

                return search

            searcher.serialize(str(folder))
            searches = {f"leaves {n}": with_leaves(n) for n in PROBES} if leaves else {"": with_leaves()}
            return Filled(searches, folder_bytes(folder))

        return fill

    yield Tool(f"ScaNN AH {bits // 4} blocks", group, bits / 8, make(0))
    yield Tool(f"ScaNN tree {LISTS}, AH {bits // 4} blocks", group, bits / 8, make(LISTS))


def usearch_graphs(group: str, width: int) -> Iterator[Tool]:
    """USearch: a graph (HNSW) over vectors of one byte, or one bit (their signs), per dimension; it has no shorter codes."""
    from usearch.index import Index

    def make(form: str) -> Callable[[Floats, Path], Filled]:
        def fill(items: Floats, folder: Path) -> Filled:
            index: Any = Index(ndim=width, metric="cos" if form == "i8" else "hamming", dtype=form)

            def prepared(x: Floats) -> NDArray[Any]:
                return x if form == "i8" else np.packbits(x > 0, axis=1)

            index.add(np.arange(len(items)), prepared(items), threads=faiss.omp_get_max_threads())

            def with_breadth(breadth: int) -> Search:
                def search(xq: Floats, k: int) -> Ids:
                    index.expansion_search = max(breadth, k)
                    found = index.search(prepared(xq), k, threads=1)
                    out = np.full((len(xq), k), -1, np.int64)
                    keys = np.atleast_2d(np.asarray(found.keys)).astype(np.int64)
                    out[:, : keys.shape[1]] = keys
                    if len(xq) > 1:
                        out[np.arange(k) >= np.asarray(found.counts)[:, None]] = -1
                    return out

                return search

            return Filled({f"ef {n}": with_breadth(n) for n in (100, 400)}, int(index.serialized_length))

        return fill

    yield Tool("USearch HNSW i8", group, width, make("i8"))
    yield Tool("USearch HNSW b1", group, width / 8, make("b1"))


def lancedb_lists(
    group: str,
    name: str,
    bits: int,
    *,
    books: Floats | None = None,
    centroids: Floats | None = None,
    transform: Callable[[Floats], Floats] | None = None,
) -> Tool:
    """LanceDB ``IVF_PQ`` with 8-bit codebooks: its own, or given ones with given centroids.

    It stores the vectors as a column of the table; refinement by them is not used. Vectors are padded with zeros if
    the number of codebooks does not divide their width.
    """
    import lancedb
    import pyarrow
    from lancedb.index import IvfPq

    M = bits // 8

    def fill(items: Floats, folder: Path) -> Filled:
        x = items if transform is None else transform(items)
        width = -(-x.shape[1] // M) * M
        rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(pad_vectors(x, width).ravel()), width)
        table: Any = lancedb.connect(str(folder)).create_table(
            "items", pyarrow.table({"id": np.arange(len(x)), "vector": rows})
        )
        if books is None:
            table.create_index(
                "vector", config=IvfPq(distance_type="dot", num_partitions=LISTS, num_sub_vectors=M)
            )
        else:
            table.to_lance().create_index(
                "vector",
                "IVF_PQ",
                metric="dot",
                num_partitions=1,
                num_sub_vectors=M,
                ivf_centroids=centroids,
                pq_codebook=books,
            )
            table.checkout_latest()

        def with_probes(probes: int) -> Search:
            def search(xq: Floats, k: int) -> Ids:
                wide = pad_vectors(xq if transform is None else transform(xq), width)
                asked: Any = wide[0] if len(wide) == 1 else list(wide)
                found = (
                    table.search(asked)
                    .distance_type("dot")
                    .nprobes(probes)
                    .limit(k)
                    .select(["id", "_distance"])
                    .to_arrow()
                )
                out = np.full((len(xq), k), -1, np.int64)
                ids = found["id"].to_numpy()
                if len(wide) == 1:
                    out[0, : len(ids)] = ids
                    return out
                query, distance = found["query_index"].to_numpy(), found["_distance"].to_numpy()
                order = np.lexsort((distance, query))
                counts = np.bincount(query, minlength=len(xq))
                out[np.arange(k) < counts[:, None]] = ids[order]
                return out

            return search

        searches = (
            {"": with_probes(1)} if books is not None else {f"nprobe {n}": with_probes(n) for n in PROBES}
        )
        indices = folder_bytes(folder / "items.lance" / "_indices")
        return Filled(searches, indices, folder_bytes(folder) - indices)

    return Tool(name, group, bits / 8, fill)


def gpq_engines(group: str, Z: Floats, embed: Callable[[Floats], Floats]) -> Iterator[Tool]:
    """This package: exact, FastScan's own order, and lists; the network is part of a query's time."""
    M = int(Z.shape[0])

    def fill(items: Floats, folder: Path) -> Filled:
        index = MemoryIndex.build(encode(embed(items), Z), Z)
        searches: dict[str, Search] = {"": lambda xq, k: index.search(embed(xq), k, threads=1)[1]}
        return Filled(searches, index.save(folder / "index.faiss").stat().st_size)

    yield Tool("GPQ", group, M / 2, fill)


def gpq_in_faiss(group: str, empty: Any, name: str, bits: int, embed: Callable[[Floats], Floats]) -> Tool:
    """An index of ``gpq export --to factory``, used as any Faiss index."""

    def fill(items: Floats, folder: Path) -> Filled:
        index: Any = faiss.clone_index(empty)
        index.add(embed(items))

        def through(search: Search) -> Search:
            return lambda xq, k: search(embed(xq), k)

        if isinstance(index, faiss.IndexIVF):
            searches = {f"nprobe {n}": through(probing_faiss(index, n, index)) for n in (1, 2, 4)}
        else:
            searches = {"": through(plain_faiss(index))}
        return Filled(searches, _saved(index))

    return Tool(name, group, bits / 8, fill)


def gpq_in_nanopq(group: str, books: Floats, bits: int, embed: Callable[[Floats], Floats]) -> Tool:
    """nanopq with the exported codebooks; it scores one query at a time in numpy and stores a byte per codebook."""
    import nanopq

    M, K, d = books.shape

    def fill(items: Floats, folder: Path) -> Filled:
        pq = nanopq.PQ(M, K, metric="dot", verbose=False)
        pq.codewords, pq.Ds = books, d
        codes = pq.encode(embed(items))

        def search(xq: Floats, k: int) -> Ids:
            out = np.empty((len(xq), k), np.int64)
            for row, q in enumerate(embed(xq)):
                scores = pq.dtable(q).adist(codes)
                best = np.argpartition(-scores, k)[:k]
                out[row] = best[np.argsort(-scores[best], kind="stable")]
            return out

        return Filled({"": search}, codes.nbytes)

    return Tool("nanopq, GPQ's codebooks", group, M, fill)


def empty_folder(path: Path) -> Path:
    """``path`` as a new, empty folder."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
