"""Speed of exact search on the CPU, compared with scans of the same codes by Faiss.

    python benchmarks/search.py --models FOLDER --items 100000,1000000,10000000
    python benchmarks/search.py --codes "" --items 1000000 --bits 12,48    # random codes alone

Codes are those of models trained with a few labels on features of ``$GPQ_DATA`` (:data:`TRAINED`),
and are kept in the folder ``--models``. Queries are not among the items. For any number of items,
codes are drawn with repetition, and each codeword is changed with probability 0.05. Random codes,
uniform with normal queries, come last: they are the worst case, which does not occur in practice.

All searches of a group (codes, items) are timed in round robin. A ratio is the median of the ratios
within rounds, so it is valid on a busy machine too. ``recall`` is the share of the true top k, by
scores. Each group is saved when it is done, and a second run computes the missing ones.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from common import (
    data_path,
    describe_machine,
    gpq,
    make_parser,
    numbers,
    read_results,
    run_main,
    save,
)
from numpy.typing import NDArray

from gpq_faiss.codes.bits import pack_codes, unpack_codes
from gpq_faiss.codes.codebooks import inject
from gpq_faiss.data.protocols import load_split
from gpq_faiss.encoder import open_encoder
from gpq_faiss.errors import UsageError
from gpq_faiss.indexes.index import Index
from gpq_faiss.store.rows import RowReader

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Search = Callable[[Floats, int], tuple[Any, Any]]

CHANGED = 0.05  # probability that a codeword of an item is drawn again
SUBDIM = 12
ROUNDS = 5
SECONDS = 0.1  # approximate maximum for one search in a round
# Seconds of rest before several threads are timed: those of OpenMP wait actively for 15 ms after a
# search, which slows others down.
REST = 0.03
PLAIN = 100_000  # maximum number of items for which IndexPQ is timed
TRAINED = {
    "default": ("cifar10-features", "recommended", 48, "500-per-class"),
    "omniglot": ("omniglot", "recommended", 48, "10-per-class"),
    "paper": ("cifar10-features", "paper", 48, "500-per-class"),
    "default-32": ("cifar10-features", "recommended", 32, "500-per-class"),
}
"""Data set, preset, bits and labels of each name of trained codes."""


def trained(models: Path, name: str) -> Path:
    """Return the folder ``models/name``, after training and encoding if it is missing.

    It holds ``codes.h5``, the codes of the items, and ``queries.npy``, the vectors of the queries.
    """
    out = models / name
    if not (out / "queries.npy").is_file():
        data, preset, bits, labelled = TRAINED[name]
        source = data_path(data)
        if source is None:
            raise UsageError("no data: set GPQ_DATA to the folder of features")
        out.mkdir(parents=True, exist_ok=True)
        x, model = source / "features.npy", out / "model"
        options = [
            "--preset",
            preset,
            "--bits",
            bits,
            "--labelled",
            labelled,
            "--seed",
            0,
            "--overwrite",
        ]
        gpq("train", f"features:{x}", "--labels", source / "labels.npy", *options, "--out", model)
        split, features = load_split(model / "split.json"), np.load(x, allow_pickle=False)
        items = out / "items.npy"
        np.save(items, features[split.database])
        gpq(
            "encode",
            model,
            f"features:{items}",
            "--no-features",
            "--overwrite",
            "--out",
            out / "codes.h5",
        )
        np.save(
            out / "queries.npy", open_encoder(model).embed(features[split.query], queries=True)[0]
        )
    return out


def enlarged(codes: Codes, M: int, n: int) -> Codes:
    """Draw n codes with repetition from uint8 [N, size], and change 5 % of their codewords."""
    rng = np.random.default_rng([M, n])
    out = np.empty((n, codes.shape[1]), np.uint8)
    for start in range(0, n, 1 << 20):
        stop = min(n, start + (1 << 20))
        indices = unpack_codes(codes[rng.integers(0, len(codes), stop - start)], M, 16)
        changed = rng.random(indices.shape, np.float32) < CHANGED
        indices[changed] = rng.integers(0, 16, int(changed.sum()), np.uint8)
        out[start:stop] = pack_codes(indices, 16)
    return out


def random_codes(bits: int, n: int, queries: int) -> tuple[Floats, Codes, Floats]:
    """Return codebooks, uniform codes and normal queries."""
    rng = np.random.default_rng([bits, 0])
    M = bits // 4
    Z = rng.standard_normal((M, 16, SUBDIM))
    Z = (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)
    codes = rng.integers(0, 256, (n, (M + 1) // 2), dtype=np.uint8)
    if M % 2:
        codes[:, -1] &= 15
    return Z, codes, rng.standard_normal((queries, M * SUBDIM)).astype(np.float32)


def trained_codes(folder: Path, n: int, queries: int) -> tuple[Floats, Codes, Floats]:
    """Return codebooks, codes and query vectors of a folder made by :func:`trained`."""
    with RowReader(folder / "codes.h5") as reader:
        Z = reader.header.codebooks
        codes = np.asarray(reader.values)
    xq = np.load(folder / "queries.npy", allow_pickle=False).astype(np.float32)
    return Z, enlarged(codes, len(Z), n), np.resize(xq, (queries, xq.shape[1]))


def ways(
    Z: Floats, codes: Codes
) -> Iterator[tuple[str, Callable[[Floats, int, int], Any], dict[str, Any]]]:
    """Yield each search: its name, a function of queries, k and threads, and facts to report."""

    def plain(index: Any) -> Callable[[Floats, int, int], Any]:
        def search(xq: Floats, k: int, threads: int) -> Any:
            faiss.omp_set_num_threads(threads)
            return index.search(xq, k)

        return search

    flat: Any = inject(Z)
    flat.add_sa_codes(codes)
    yield "FastScan", plain(faiss.IndexPQFastScan(flat)), {}
    if len(codes) <= PLAIN:
        yield "IndexPQ", plain(flat), {}
    start = time.perf_counter()
    index = Index.build(codes, Z)
    seconds, lists = time.perf_counter() - start, index.segments[0]
    facts = {
        "build_seconds": seconds,
        "lists": len(lists.arrays.names),
        "distinct": int(lists.arrays.ends[-1]),
    }

    def exact(xq: Floats, k: int, threads: int) -> Any:
        return index.search(xq, k, threads=threads)

    yield "lists", exact, facts


def recall(ids: NDArray[np.int64], truth: Floats, codes: Codes, Z: Floats, xq: Floats) -> float:
    """Return the share of results [Q, k] whose exact score reaches that of the true k-th result.

    Args:
        ids: int64 [Q, k], the results.
        truth: float32 [Q, k], the true scores in descending order.
    """
    good = 0
    for query, query_ids, least in zip(xq, ids, truth[:, -1], strict=True):
        result_codes = codes[query_ids[query_ids >= 0]]
        good += int(
            (Index.build(result_codes, Z).search(query[None], len(result_codes))[0] >= least).sum()
        )
    return good / ids.size


def group(
    Z: Floats,
    codes: Codes,
    xq: Floats,
    ks: tuple[int, ...],
    batches: tuple[int, ...],
    threads: tuple[int, ...],
) -> list[dict[str, Any]]:
    """Time all searches over the same codes."""
    built = list(ways(Z, codes))
    cells: list[dict[str, Any]] = []
    for k in ks:
        sample = xq[: min(100, max(8, 20_000_000 // len(codes)))]
        answers = {name: search(sample, k, 1) for name, search, _ in built}
        truth = answers["lists"][0]
        checked = next(name for name, _, _ in built if name != "FastScan")
        equal = bool(np.allclose(answers[checked][0], truth, atol=1e-4))
        recalls = {name: recall(ids, truth, codes, Z, sample) for name, (_, ids) in answers.items()}
        for batch in batches:
            for count in threads:
                times: dict[str, list[float]] = {name: [] for name, _, _ in built}
                calls: dict[str, int] = {}
                for number in range(ROUNDS + 1):
                    for name, search, _ in built:
                        blocks = [
                            xq[position : position + batch]
                            for position in range(0, max(1, len(xq) - batch + 1), max(1, batch))
                        ][: calls.get(name, 2)]
                        if count > 1:
                            time.sleep(REST)
                        # The first calls build what later ones reuse, and wake threads.
                        for block in blocks if number == 0 else blocks[: count - 1]:
                            search(block, k, count)
                        start = time.perf_counter()
                        for block in blocks:
                            search(block, k, count)
                        seconds = (time.perf_counter() - start) / len(blocks)
                        if number == 0:  # warm-up, which determines the calls per round
                            calls[name] = max(1, min(len(xq) // batch, int(SECONDS / seconds)))
                        else:
                            times[name].append(seconds / batch)
                for name, _, facts in built:
                    ratio = np.median(np.array(times["FastScan"]) / np.array(times[name]))
                    cells.append(
                        {
                            "way": name,
                            "k": k,
                            "batch": batch,
                            "threads": count,
                            "us": float(np.median(times[name])) * 1e6,
                            "us_best": min(times[name]) * 1e6,
                            "times_faster_than_fastscan": float(ratio),
                            "recall": recalls[name],
                            "equals_brute_force": equal if checked != "lists" else None,
                            **facts,
                        }
                    )
    return cells


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of the results."""
    machine = result["machine"]
    lines = [
        "# Exact search on the CPU",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, Faiss {machine['versions']['faiss']}, "
        f"{result['settings']['queries']} queries. "
        "`lists` is `gpq_faiss.open_index`'s exact search. FastScan and IndexPQ are Faiss' own. "
        f"Microseconds a query: median of {ROUNDS} rounds; "
        "`faster`: median over rounds of FastScan's time over this one. "
        "`recall`: share of the true top k, by scores; "
        "Made by `benchmarks/search.py`.",
        "",
    ]
    for name, cells in result["groups"].items():
        source, bits, n = name.split("/")
        lists_cell = next(cell for cell in cells if cell["way"] == "lists")
        lines += [
            f"## {source} codes, {bits} bits, {int(n):,} items",
            "",
            f"{lists_cell['distinct']:,} distinct codes, {lists_cell['lists']:,} lists, "
            f"made in {lists_cell['build_seconds']:.1f} s.",
            "",
            "| k | batch | threads | search | µs | faster | recall |",
            "|--:|--:|--:|---|--:|--:|--:|",
        ]
        lines += [
            f"| {c['k']} | {c['batch']} | {c['threads']} | {c['way']} | {c['us']:,.0f} | "
            f"{c['times_faster_than_fastscan']:.2f} | {c['recall']:.3f} |"
            for c in cells
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Parse options, compute missing groups, write results."""
    parser = make_parser(__doc__, "search.json")
    parser.add_argument(
        "--codes", default="default,omniglot,paper", help="trained codes, before random ones"
    )
    parser.add_argument("--models", type=Path, default=Path("models"), help="of trained codes")
    parser.add_argument("--items", type=numbers, default=(100_000, 1_000_000))
    parser.add_argument("--bits", type=numbers, default=(12, 48), help="of random codes")
    parser.add_argument("-k", type=numbers, default=(10, 100))
    parser.add_argument("--batches", type=numbers, default=(1, 32, 1024))
    parser.add_argument("--threads", type=numbers, default=(1, 2))
    parser.add_argument("--queries", type=int, default=1024)
    args = parser.parse_args()
    names = [name for name in args.codes.split(",") if name]
    if unknown := sorted(set(names) - set(TRAINED)):
        raise UsageError(f"--codes {','.join(unknown)}: names of {', '.join(TRAINED)} are expected")
    result: dict[str, Any] = read_results(args.out, {"groups": {}})
    result["machine"] = describe_machine()
    result["settings"] = {"queries": args.queries, "rounds": ROUNDS, "changed": CHANGED}
    for n in args.items:
        draws = {
            name: functools.partial(trained_codes, trained(args.models, name), n) for name in names
        }
        draws |= {f"random {bits}": functools.partial(random_codes, bits, n) for bits in args.bits}
        for source, draw in draws.items():
            Z, codes, xq = draw(args.queries)
            name = f"{source.split()[0]}/{4 * len(Z)}/{n}"
            if name in result["groups"]:
                continue
            print(name, file=sys.stderr, flush=True)
            result["groups"][name] = group(Z, codes, xq, args.k, args.batches, args.threads)
            save(result, args.out, markdown)
    print(args.out.with_suffix(".md"))


if __name__ == "__main__":
    run_main(main)
