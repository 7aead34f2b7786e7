"""Large indexes: building lists made of codewords within a budget, exact search in place and in memory, and Faiss' scan of the same codes.

    python benchmarks/large.py --codes models/default --items 10000,100000,1000000,10000000,100000000,1000000000 --folder SCRATCH

``--codes`` names a folder that ``search.py --models models`` has made; codes are enlarged as there (of 32 bits: ``--codes default-32``
there). An item takes 22 bytes of disk, twice that while lists are built. Each size is stored when it is done; a second run computes missing
ones. The answers in place are compared with those in memory. More items than memory can sort are searched from the file with a budget that
keeps all that queries visit, and compared with the answers of Faiss' ``IndexPQ`` to the first queries.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from common import describe_machine, make_parser, numbers, read_results, run_main, save
from search import enlarged, recall

from gpq_faiss.build.shards import open_shard
from gpq_faiss.build.stream import build_index
from gpq_faiss.faissio.io import open_header
from gpq_faiss.faissio.model import ModelHeader
from gpq_faiss.faissio.storage import row_header
from gpq_faiss.files import atomic_path
from gpq_faiss.indexes.codeword_lists import CodewordLists
from gpq_faiss.indexes.file import FileIndex, open_file
from gpq_faiss.inputs import parse_bytes
from gpq_faiss.store.reader import RowReader

BLOCK = 10_000_000
K = 10
SINGLE, BATCH = 64, 1024
_DEEP = 400_000_000
"""Items up to which the lists are also made in memory."""
_LARGE = "14GB"
"""Budget that takes the place of lists in memory above."""
_GRAPH = 1_000_000
"""Items up to which the reconstructed vectors are searched by HNSW."""


def peak() -> int:
    """The peak of this process in bytes since :func:`fresh`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


def fresh() -> None:
    """Reset the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def write_rows(path: Path, codes: Any, Z: Any, n: int) -> None:
    """A flat index file of ``n`` codes."""
    head, _, tail = row_header("flat", Z, n)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(head)
        for start in range(0, n, BLOCK):
            rng = np.random.default_rng([n, start])
            rows = codes[rng.permutation(len(codes))]  # another draw for every block
            file.write(enlarged(rows, len(Z), min(BLOCK, n - start)).tobytes())
        file.write(tail)


def times(search: Callable[[Any], Any], xq: Any) -> dict[str, float]:
    """Milliseconds a query: median of single queries, and of a batch."""
    single = []
    for query in xq[:SINGLE]:
        start = time.perf_counter()
        search(query[None])
        single.append(time.perf_counter() - start)
    start = time.perf_counter()
    search(xq[:BATCH])
    batch = (time.perf_counter() - start) / min(BATCH, len(xq))
    return {"single_ms": 1e3 * float(np.median(single)), "batch_ms": 1e3 * batch}


def in_place(index: FileIndex, xq: Any) -> dict[str, Any]:
    """First queries, then warm ones, and what was read."""
    fresh()
    before, lists = peak(), index.lists
    read = []
    start = time.perf_counter()
    index.search(xq[:1], K)
    first = time.perf_counter() - start
    read.append(lists.read)
    start = time.perf_counter()
    index.search(xq[:SINGLE], K)
    warming = time.perf_counter() - start
    read.append(lists.read)
    lists.scored = lists.searched = 0
    found = times(partial(index.search, k=K, threads=1), xq)
    return found | {
        "first_ms": 1e3 * first,
        "warming_s": warming,
        "visited": lists.scored / lists.searched / index.ntotal,
        "read_first": read[0],
        "read_64": read[1],
        "read": lists.read,
        "peak_above_start": peak() - before,
    }


def graph(plain: Any, xq: Any, truth: Any, raw: Any, Z: Any) -> dict[str, Any]:
    """HNSW over the reconstructed vectors, with Faiss' default settings."""
    index: Any = faiss.IndexHNSWFlat(plain.d, 32, faiss.METRIC_INNER_PRODUCT)
    faiss.omp_set_num_threads(2)
    index.add(plain.reconstruct_n(0, plain.ntotal))
    faiss.omp_set_num_threads(1)
    few = xq[: len(truth)]
    found = times(partial(index.search, k=K), xq)
    return found | {"recall": recall(index.search(few, K)[1], truth, raw, Z, few)}


def lists_in_faiss(rows: Path, path: Path, xq: Any, few: Any, truth: Any, Z: Any) -> dict[str, Any]:
    """The lists of a file, searched by plain Faiss with the ``nprobe`` of the file."""
    lists: Any = faiss.read_index(str(path))
    found: dict[str, Any] = times(partial(lists.search, k=K), xq)
    flat, _ = open_header(rows, verify=False)
    with contextlib.closing(flat.source):
        seen = lists.search(few, K)[1]
        own = np.stack([[flat.codes(0, i, i + 1)[0] for i in row] for row in seen.tolist()])
    at = np.arange(seen.size).reshape(seen.shape)
    share = recall(at, truth, own.reshape(seen.size, -1), Z, few)
    return found | {"recall": share, "nprobe": int(faiss.extract_index_ivf(lists).nprobe)}


def size(folder: Path, codes: Any, Z: Any, xq: Any, n: int, memory: str) -> dict[str, Any]:
    """All figures of one size."""
    rows, path = folder / f"{n}.rows.faiss", folder / f"{n}.lists.faiss"
    if not rows.exists():
        write_rows(rows, codes, Z, n)
    fresh()
    before, start = peak(), time.perf_counter()
    build_index(
        [open_shard(rows, ModelHeader(path, Z, ""))], path, "ivf", memory=parse_bytes(memory), overwrite=True
    )
    cell: dict[str, Any] = {
        "build_s": time.perf_counter() - start,
        "build_peak": peak() - before,
        "file_bytes": path.stat().st_size,
        "flat_bytes": rows.stat().st_size,
    }
    with open_file(path, memory) as index:
        index.search(xq[-1:], K)  # loads the compiled loops
    start = time.perf_counter()
    with open_file(path, memory) as index:
        cell["open_s"] = time.perf_counter() - start
        cell |= {"lists": index.lists.lists, "P": index.lists.P, "place": in_place(index, xq)}
        few = xq[:SINGLE]
        D, found = index.search(few, K)
    if n > _DEEP:
        with open_file(path, _LARGE) as index:
            fresh()
            before = peak()
            index.search(xq[:BATCH], K)
            cell["memory"] = times(partial(index.search, k=K, threads=1), xq)
            cell["memory_peak"] = peak() - before
    plain: Any = faiss.read_index(str(rows))
    raw: Any = faiss.rev_swig_ptr(plain.codes.data(), plain.codes.size()).reshape(n, -1)  # a view
    if n <= _DEEP:
        fresh()
        before, start = peak(), time.perf_counter()
        held = CodewordLists(raw, Z)
        cell["memory_build_s"] = time.perf_counter() - start
        cell["memory_peak"] = peak() - before
        cell["memory"] = times(partial(held.search, k=K, threads=1), xq)
        truth, ids = held.search(few, K)
        cell["same"] = bool(np.array_equal(D, truth) and np.array_equal(found, ids))
        del held
    else:
        few = few[:2]
        cell["same"] = bool(np.allclose(plain.search(few, K)[0], D[:2], atol=1e-4))
        truth = D[:2]
    faiss.omp_set_num_threads(1)
    cell["plain"] = times(partial(plain.search, k=K), xq[:2])
    if n <= _GRAPH:
        cell["hnsw"] = graph(plain, xq, truth, raw, Z)
    fast: Any = faiss.IndexPQFastScan(plain)
    cell["fastscan"] = times(partial(fast.search, k=K), xq[: max(2, min(BATCH, 20_000_000_000 // n))])
    cell["fastscan"]["recall"] = recall(fast.search(few, K)[1], truth, raw, Z, few)
    del fast, raw, plain
    cell["faiss_lists"] = lists_in_faiss(rows, path, xq, few, truth, Z)
    return cell


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    machine = result["machine"]
    lines = [
        "# Large indexes",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Faiss {machine['versions']['faiss']}; one thread, "
        f"k = {K}; budget {result['settings']['memory']}. Milliseconds a query: median of {SINGLE} single ones / batch of {BATCH:,}. "
        "In place: exact search of the file of kind `ivf`, warm, its lists kept within the budget; `first`: ms of the first query; "
        f"`read`: bytes that it, and then {SINGLE} queries, read; `visited`: share of the items in lists that are visited. "
        f"In memory: exact; above {_DEEP:,} items from the file, with a budget "
        f"of {_LARGE}. FastScan, HNSW (of the reconstructed vectors) and the lists of the file searched by plain Faiss are not exact: "
        "share of the true ten, by scores (of two queries above that size). Made by `benchmarks/large.py`.",
        "",
        "| items | in place | first | read | visited | in memory | FastScan | recall | HNSW | recall | lists in plain Faiss | recall | "
        "build | file, flat |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]

    def shown(cell: dict[str, Any] | None) -> str:
        return "–" if cell is None else f"{cell['single_ms']:.2f} / {cell['batch_ms']:.2f}"

    def share(cell: dict[str, Any] | None) -> str:
        return "–" if cell is None else f"{cell['recall']:.3f}"

    for n, cell in sorted(result["sizes"].items(), key=lambda one: int(one[0])):
        place = cell["place"]
        lines.append(
            f"| {int(n):,} | {shown(place)} | {place['first_ms']:.0f} | "
            f"{place['read_first'] / 1e6:,.0f}, {place['read_64'] / 1e6:,.0f} MB | "
            f"{place['visited']:.3%} | {shown(cell.get('memory'))} | {shown(cell['fastscan'])} | {share(cell['fastscan'])} | "
            f"{shown(cell.get('hnsw'))} | {share(cell.get('hnsw'))} | {shown(cell['faiss_lists'])} (nprobe "
            f"{cell['faiss_lists']['nprobe']:,} of {cell['lists']:,}) | {cell['faiss_lists']['recall']:.3f} | {cell['build_s']:.0f} s | "
            f"{cell['file_bytes'] / 1e9:.2f} GB, {cell['flat_bytes'] / 1e9:.2f} GB |"
        )
    lines += [
        "",
        "![milliseconds a query](large.png)",
        "",
        "The answers in place equal those in memory: " + _equal(result["sizes"]),
    ]
    return "\n".join(lines) + "\n"


def draw(sizes: dict[str, Any], path: Path) -> None:
    """Milliseconds of single queries against the number of items; the recall of what is not exact beside its points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    every = sorted(sizes.items(), key=lambda one: int(one[0]))
    for name, label, mark in (
        ("memory", "exact, lists in memory", "o-"),
        ("place", "exact, lists in place", "s-"),
        ("faiss_lists", "kind ivf in plain Faiss (recall)", "^--"),
        ("fastscan", "IndexPQFastScan (recall)", "x--"),
        ("plain", "IndexPQ", "+--"),
        ("hnsw", "IndexHNSWFlat of reconstructed vectors (recall)", "d--"),
    ):
        points = [(int(n), cell[name]) for n, cell in every if name in cell]
        axes.loglog([n for n, _ in points], [cell["single_ms"] for _, cell in points], mark, label=label)
        for n, cell in points:
            if "recall" in cell:
                axes.annotate(
                    f"{cell['recall']:.2f}",
                    (n, cell["single_ms"]),
                    (2, 4),
                    textcoords="offset points",
                    fontsize=7,
                )
    axes.set(xlabel="items", ylabel="ms a query, one thread")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _equal(sizes: dict[str, Any]) -> str:
    wrong = [n for n, cell in sizes.items() if not cell["same"]]
    return "all." if not wrong else f"NOT for {', '.join(wrong)} items."


def main() -> None:
    """Parse options, compute missing sizes, write results."""
    parser = make_parser(__doc__, "large.json")
    parser.add_argument("--codes", type=Path, required=True)
    parser.add_argument("--items", type=numbers, default=(1_000_000, 10_000_000, 100_000_000))
    parser.add_argument("--folder", type=Path, required=True, help="for the files, which are removed")
    parser.add_argument("--memory", default="2GB")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with RowReader(args.codes / "codes.h5") as reader:
        Z, codes = reader.header.codebooks, reader.block()
    assert Z is not None
    xq = np.load(args.codes / "queries.npy", allow_pickle=False).astype(np.float32)
    result: dict[str, Any] = read_results(args.out, {"sizes": {}})
    result["machine"], result["settings"] = describe_machine(), {"memory": args.memory}
    for n in args.items:
        if str(n) not in result["sizes"]:
            print(f"{n:,} items", file=sys.stderr, flush=True)
            result["sizes"][str(n)] = size(args.folder, codes, Z, xq, n, args.memory)
            save(result, args.out, markdown)
            for path in args.folder.glob(f"{n}.*"):
                path.unlink()
    draw(result["sizes"], args.out.with_suffix(".png"))
    print(args.out.with_suffix(".md"))


if __name__ == "__main__":
    run_main(main)
