"""Mapped indexes of any size, compared with scans of the same codes by Faiss.

    python benchmarks/large.py --codes models/default --items 1000000,1000000000 --folder SCRATCH

Building, opening, and first and warm queries are measured. ``--codes`` names a folder that
``search.py --models models`` has made; its codes are multiplied as in that script. An item takes 6
bytes of disk for its code, up to 10 during the build, and 5 to 9 in the end. Each size is saved
when it is done, and a second run computes the missing ones. The best scores of two queries are
compared with those of Faiss' ``IndexPQ``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from common import (
    Results,
    describe_machine,
    make_parser,
    numbers,
    read_results,
    run_main,
    save,
    timed,
)
from numpy.typing import NDArray
from search import enlarged, recall

from gpq_faiss.codes.codebooks import inject
from gpq_faiss.errors import DataError
from gpq_faiss.evaluation.tables import render
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


def times(search: Callable[[Any], Any], xq: Any, digits: int) -> str:
    """Return milliseconds per query: the median of single queries, and the mean in a batch."""
    single = [timed(partial(search, query[None]))[1] for query in xq[:SINGLE]]
    batch = timed(partial(search, xq[:BATCH]))[1] / min(BATCH, len(xq))
    return f"{1e3 * np.median(single):.{digits}f} / {1e3 * batch:.{digits}f}"


def best_scores(source: Codes, Z: Any, xq: Any) -> Any:
    """Return the K best scores of each query by Faiss' ``IndexPQ``, block by block."""
    best = np.full((len(xq), K), -np.inf, np.float32)
    for codes, _ in source.blocks(BLOCK):
        plain = inject(Z)
        plain.add_sa_codes(codes)
        scores, _ = plain.search(xq, K)
        best = -np.sort(-np.concatenate([best, scores], axis=1), axis=1)[:, :K]
    return best


def measure(folder: Path, codes: Any, Z: Any, xq: Any, n: int) -> Results:
    """Build an index of n items, and return its row of the table.

    Raises:
        DataError: the scores are not those of Faiss' ``IndexPQ``: a defect.
    """
    path, source = folder / f"{n}.lists", Codes(folder / f"{n}.codes", codes, len(Z), n)
    _, building, _ = timed(partial(write_lists, path, [source], Z))
    open_index(path).search(xq[-1:], K)  # loads the compiled loops
    index, opening, _ = timed(partial(open_index, path))
    _, first, _ = timed(partial(index.search, xq[:1], K))
    index.search(xq, K)
    warm = times(partial(index.search, k=K, threads=1), xq, 3)
    sample = xq[:SINGLE]
    best, plain, _ = timed(partial(best_scores, source, Z, xq[:2]))
    truth = index.search(sample, K)[0]
    if not np.allclose(best, truth[:2], atol=1e-4):
        raise DataError(f"{n:,} items: the scores are not those of IndexPQ: a defect")
    row: Results = {
        "items": n,
        "build": f"{building:.0f} s",
        "bytes an item": path.stat().st_size / n,
        "open": f"{opening:.2f} s",
        "first query": f"{1e3 * first:.1f} ms",
        "warm queries": warm,
        "IndexPQ": f"{1e3 * plain / 2:.1f}",
    }
    if n <= MOST_IN_MEMORY:
        flat = inject(Z)
        flat.add_sa_codes(np.asarray(source.mapped))
        fast: Any = faiss.IndexPQFastScan(flat)
        ids, queries = fast.search(sample, K)[1], xq[: max(2, min(BATCH, 10**10 // n))]
        row["FastScan"] = times(partial(fast.search, k=K), queries, 2)
        row["recall"] = f"{recall(ids, truth, source.mapped, Z, sample):.3f}"
    return row


def markdown(result: Results) -> str:
    """Return the table."""
    machine = result["machine"]
    return (
        f"# Large indexes\n\n{machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, "
        f"Faiss {machine['versions']['faiss']}; one thread, k = {K}. `index.lists` of the "
        "default's codes, mapped; its results are exact. Milliseconds a "
        f"query: median of {SINGLE} single ones / batch of {BATCH:,}, warm. "
        "FastScan is not exact: `recall` is the share of the true "
        "ten, by scores. The best scores equal those of `IndexPQ`. Made by `benchmarks/large.py`."
        f"\n\n{render(result['rows'], 'markdown', digits=2)}"
    )


def main() -> None:
    """Parse options, compute missing sizes, write results."""
    parser = make_parser(__doc__, "large.json")
    parser.add_argument("--codes", type=Path, required=True)
    parser.add_argument("--items", type=numbers, default=(1_000_000, 10_000_000, 100_000_000))
    help_text = "for the files, which are removed"
    parser.add_argument("--folder", type=Path, required=True, help=help_text)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    faiss.omp_set_num_threads(1)
    with RowReader(args.codes / "codes.h5") as reader:
        Z, codes = reader.header.codebooks, np.asarray(reader.values)
    xq = np.load(args.codes / "queries.npy", allow_pickle=False).astype(np.float32)
    result = read_results(args.out, {"rows": []}) | {"machine": describe_machine()}
    for n in sorted(set(args.items) - {row["items"] for row in result["rows"]}):
        result["rows"].append(measure(args.folder, codes, Z, xq, n))
        save(result, args.out, markdown)
        for path in args.folder.glob(f"{n}.*"):
            path.unlink()
    print(args.out.with_suffix(".md"))


if __name__ == "__main__":
    run_main(main)
