"""Mapped indexes of any size, compared with scans of the same codes by Faiss.

    python benchmarks/large.py --codes models/default --items 1000000,1000000000 --folder SCRATCH

Building, opening, first and warm queries, and memory are measured. ``--codes`` names a folder that
``search.py --models models`` has made; its codes are multiplied as in that script. An item takes 6
bytes of disk for its code, up to 10 during the build, and about 6.5 in the end. Each size is saved
when it is done, and a second run computes the missing ones. The best scores of two queries are
compared with those of Faiss' ``IndexPQ``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from common import describe_machine, make_parser, numbers, read_results, run_main, save
from numpy.typing import NDArray
from search import enlarged, recall

from gpq_faiss.codes.codebooks import inject
from gpq_faiss.indexes.list_file import write_lists
from gpq_faiss.indexes.opening import open_index
from gpq_faiss.store.rows import RowReader

BLOCK = 10_000_000
K = 10
SINGLE, BATCH = 64, 1024
MOST_IN_MEMORY = 100_000_000
"""Maximum number of items for which Faiss' FastScan is timed."""


class Codes:
    """Codes in a mapped file, with their row numbers as ids."""

    def __init__(self, path: Path, codes: NDArray[np.uint8], M: int, n: int) -> None:
        self.ntotal = n
        width = codes.shape[1]
        self.mapped: Any = np.memmap(path, np.uint8, "w+", shape=(n, width))
        for start in range(0, n, BLOCK):
            rng = np.random.default_rng([n, start])
            rows = codes[rng.permutation(len(codes))]  # each block draws differently
            self.mapped[start : start + BLOCK] = enlarged(rows, M, min(BLOCK, n - start))

    def blocks(self, size: int) -> Iterator[tuple[Any, Any]]:
        """Yield codes and ids."""
        for start in range(0, self.ntotal, size):
            block = np.asarray(self.mapped[start : start + size])
            yield block, np.arange(start, start + len(block))


def private_bytes() -> int:
    """Return the memory of this process that is not mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10


def times(search: Callable[[Any], Any], xq: Any) -> dict[str, float]:
    """Return milliseconds per query: the median of single queries, and the mean in a batch."""
    single = []
    for query in xq[:SINGLE]:
        start = time.perf_counter()
        search(query[None])
        single.append(time.perf_counter() - start)
    start = time.perf_counter()
    search(xq[:BATCH])
    batch = (time.perf_counter() - start) / min(BATCH, len(xq))
    return {"single_ms": 1e3 * float(np.median(single)), "batch_ms": 1e3 * batch}


def best_scores(source: Codes, Z: Any, xq: Any) -> Any:
    """Search by Faiss' ``IndexPQ`` block by block.

    Returns:
        The K best scores of each query, and milliseconds per query.
    """
    best = np.full((len(xq), K), -np.inf, np.float32)
    seconds = 0.0
    for codes, _ in source.blocks(BLOCK):
        plain = inject(Z)
        plain.add_sa_codes(codes)
        start = time.perf_counter()
        scores, _ = plain.search(xq, K)
        seconds += time.perf_counter() - start
        best = -np.sort(-np.concatenate([best, scores], axis=1), axis=1)[:, :K]
    return best, 1e3 * seconds / len(xq)


def measure(folder: Path, codes: Any, Z: Any, xq: Any, n: int) -> dict[str, Any]:
    """Build an index of n items, and return all figures."""
    path = folder / f"{n}.lists"
    source = Codes(folder / f"{n}.codes", codes, len(Z), n)
    start = time.perf_counter()
    write_lists(path, [source], Z)
    cell: dict[str, Any] = {
        "build_s": time.perf_counter() - start,
        "file_bytes": path.stat().st_size,
    }
    open_index(path).search(xq[-1:], K)  # loads the compiled loops
    before, start = private_bytes(), time.perf_counter()
    index = open_index(path)
    cell["open_s"] = time.perf_counter() - start
    start = time.perf_counter()
    index.search(xq[:1], K)
    cell["first_ms"] = 1e3 * (time.perf_counter() - start)
    index.search(xq, K)
    cell["warm"] = times(partial(index.search, k=K, threads=1), xq)
    cell["private_bytes"] = private_bytes() - before
    sample = xq[:2]
    scores, plain_ms = best_scores(source, Z, sample)
    cell["plain_ms"] = plain_ms
    cell["same"] = bool(np.allclose(scores, index.search(sample, K)[0], atol=1e-4))
    if n <= MOST_IN_MEMORY:
        plain = inject(Z)
        plain.add_sa_codes(np.asarray(source.mapped))
        fast: Any = faiss.IndexPQFastScan(plain)
        sample = xq[:SINGLE]
        truth, results = index.search(sample, K)[0], fast.search(sample, K)[1]
        cell["fastscan"] = times(partial(fast.search, k=K), xq[: max(2, min(BATCH, 10**10 // n))])
        cell["fastscan"]["recall"] = recall(results, truth, source.mapped, Z, sample)
    return cell


def markdown(result: dict[str, Any]) -> str:
    """Return the table."""
    machine = result["machine"]
    lines = [
        "# Large indexes",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Faiss {machine['versions']['faiss']}; one thread, k = {K}. `index.lists` of the "
        "default's codes, mapped; its results are exact. Milliseconds a "
        f"query: median of {SINGLE} single ones / batch of {BATCH:,}, warm. `private`: memory that "
        "is not mapped from the file. FastScan is not exact: `recall` is the share of the true "
        "ten, by scores. Made by `benchmarks/large.py`.",
        "",
        "| items | build | bytes an item | open | first query | warm queries | private "
        "| IndexPQ | FastScan | recall |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for n, cell in sorted(result["sizes"].items(), key=lambda size: int(size[0])):
        fast = cell.get("fastscan")
        scan = "– | –"
        if fast is not None:
            scan = f"{fast['single_ms']:.2f} / {fast['batch_ms']:.2f} | {fast['recall']:.3f}"
        warm = cell["warm"]
        lines.append(
            f"| {int(n):,} | {cell['build_s']:.0f} s | {cell['file_bytes'] / int(n):.2f} "
            f"| {cell['open_s']:.2f} s | "
            f"{cell['first_ms']:.1f} ms | {warm['single_ms']:.3f} / {warm['batch_ms']:.3f} | "
            f"{cell['private_bytes'] / 1e6:.0f} MB | {cell['plain_ms']:.1f} | {scan} |"
        )
    wrong = [n for n, cell in result["sizes"].items() if not cell["same"]]
    equal = "all." if not wrong else f"NOT for {', '.join(wrong)} items."
    lines += ["", f"The best scores equal those of `IndexPQ`: {equal}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse options, compute missing sizes, write results."""
    parser = make_parser(__doc__, "large.json")
    parser.add_argument("--codes", type=Path, required=True)
    parser.add_argument("--items", type=numbers, default=(1_000_000, 10_000_000, 100_000_000))
    parser.add_argument(
        "--folder", type=Path, required=True, help="for the files, which are removed"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    faiss.omp_set_num_threads(1)
    with RowReader(args.codes / "codes.h5") as reader:
        Z, codes = reader.header.codebooks, np.asarray(reader.values)
    xq = np.load(args.codes / "queries.npy", allow_pickle=False).astype(np.float32)
    result: dict[str, Any] = read_results(args.out, {"sizes": {}})
    result["machine"] = describe_machine()
    for n in args.items:
        if str(n) not in result["sizes"]:
            print(f"{n:,} items", file=sys.stderr, flush=True)
            result["sizes"][str(n)] = measure(args.folder, codes, Z, xq, n)
            save(result, args.out, markdown)
            for path in args.folder.glob(f"{n}.*"):
                path.unlink()
    print(args.out.with_suffix(".md"))


if __name__ == "__main__":
    run_main(main)
