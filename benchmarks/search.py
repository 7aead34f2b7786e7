"""Speed of exact search on the CPU, compared with scans of the same codes by Faiss.

    python benchmarks/search.py --models FOLDER --items 100000,1000000,10000000
    python benchmarks/search.py --codes "random 12,random 48" --items 1000000

Codes are those of models trained with a few labels on features of ``$GPQ_DATA`` (:data:`TRAINED`),
and are kept in the folder ``--models``. Queries are not among the items. For any number of items,
codes are drawn with repetition, and each codeword is changed with probability 0.05. Random codes,
uniform with normal queries, come last: they are the worst case, which does not occur in practice.

All searches of a group (codes, items) are timed in round robin. A ratio is the median of the ratios
within rounds, so it is valid on a busy machine too. ``recall`` is the share of the true top k, by
scores. Each group is saved when it is done, and a second run computes the missing ones.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from common import (
    Results,
    data_path,
    describe_machine,
    gpq,
    make_parser,
    numbers,
    read_results,
    require_data,
    run_main,
    save,
)
from numpy.typing import NDArray

from gpq_faiss.codes.bits import pack_codes, unpack_codes
from gpq_faiss.codes.codebooks import inject
from gpq_faiss.codes.encode import decode
from gpq_faiss.data.protocols import load_split
from gpq_faiss.encoder import open_encoder
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.evaluation.tables import render
from gpq_faiss.indexes.index import Index
from gpq_faiss.store.rows import RowReader

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]

CHANGED = 0.05  # probability that a codeword of an item is drawn again
SUBDIM = 12
ROUNDS = 5
SECONDS = 0.1  # approximate maximum for one search in a round
# Seconds of rest before several threads are timed: those of OpenMP wait actively for 15 ms after a
# search, which slows others down.
REST = 0.03
PLAIN = 100_000  # maximum number of items for which IndexPQ is timed
SAMPLE = 16  # queries whose results are compared
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
        if name not in TRAINED:
            raise UsageError(f"no codes '{name}': choose from {', '.join(TRAINED)}, random")
        data, preset, bits, labelled = TRAINED[name]
        source = require_data(data_path(data), "", "features")
        out.mkdir(parents=True, exist_ok=True)
        x, model, items = source / "features.npy", out / "model", out / "items.npy"
        options = [
            "--preset",
            preset,
            "--bits",
            bits,
            "--labelled",
            labelled,
            "--set",
            "training.seed=0",
        ]
        options += ["--labels", source / "labels.npy", "--overwrite", "--out", model]
        gpq("train", f"features:{x}", *options)
        split, features = load_split(model / "split.json"), np.load(x, allow_pickle=False)
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
        xq = open_encoder(model).embed(features[split.query], queries=True)[0]
        np.save(out / "queries.npy", xq)
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


def draw_codes(name: str, models: Path, n: int, queries: int) -> tuple[Floats, Codes, Floats]:
    """Return codebooks, codes and query vectors: ``random``, ``random 12``, or of a trained model.

    Raises:
        UsageError: there is no such model.
    """
    source, _, bits = name.partition(" ")
    if source == "random":
        return random_codes(int(bits or 48), n, queries)
    folder = trained(models, name)
    with RowReader(folder / "codes.h5") as reader:
        Z, codes = reader.header.codebooks, np.asarray(reader.values)
    xq = np.load(folder / "queries.npy", allow_pickle=False).astype(np.float32)
    return Z, enlarged(codes, len(Z), n), np.resize(xq, (queries, xq.shape[1]))


def recall(ids: NDArray[np.int64], truth: Floats, codes: Codes, Z: Floats, xq: Floats) -> float:
    """Return the share of results [Q, k] whose score reaches that of the true k-th result.

    Args:
        ids: int64 [Q, k], the results.
        truth: float32 [Q, k], the true scores in descending order.
    """
    vectors = decode(codes[ids.ravel()], Z).reshape(*ids.shape, -1)
    scores = np.einsum("qkd,qd->qk", vectors, xq)
    return float((scores >= truth[:, -1:] - 1e-5).mean())


def searches(Z: Floats, codes: Codes) -> dict[str, Callable[[Floats, int, int], Any]]:
    """Return each search over the codes, a function of queries, k and threads, by name."""
    flat: Any = inject(Z)
    flat.add_sa_codes(codes)
    fast, lists = faiss.IndexPQFastScan(flat), Index.build(codes, Z)
    built: dict[str, Callable[[Floats, int, int], Any]] = {
        "lists": lambda xq, k, threads: lists.search(xq, k, threads=threads),
        "FastScan": lambda xq, k, threads: fast.search(xq, k),
    }
    if len(codes) <= PLAIN:
        built["IndexPQ"] = lambda xq, k, threads: flat.search(xq, k)
    return built


def group(Z: Floats, codes: Codes, xq: Floats, options: argparse.Namespace) -> list[Results]:
    """Time all searches over the same codes, and return a row for each."""
    built, rows = searches(Z, codes), []
    for k, batch, threads in itertools.product(options.k, options.batches, options.threads):
        faiss.omp_set_num_threads(threads)
        sample = xq[:SAMPLE]
        results = {name: search(sample, k, threads) for name, search in built.items()}
        truth = results["lists"][0]
        if "IndexPQ" in built and not np.allclose(results["IndexPQ"][0], truth, atol=1e-4):
            raise DataError(f"{len(codes):,} codes, k = {k}: lists differ from IndexPQ: a defect")
        blocks = np.array_split(xq, max(1, len(xq) // batch))
        calls, times = dict.fromkeys(built, 1), {name: list[float]() for name in built}
        for number in range(ROUNDS + 1):
            for name, search in built.items():
                time.sleep(REST if threads > 1 else 0)
                start = time.perf_counter()
                for block in blocks[: calls[name]]:
                    search(block, k, threads)
                seconds = (time.perf_counter() - start) / calls[name]
                if number == 0:  # warm-up, which determines the calls per round
                    calls[name] = min(max(1, int(SECONDS / seconds)), len(blocks))
                else:
                    times[name].append(1e6 * seconds / len(blocks[0]))
        for name, (_, ids) in results.items():
            faster = float(np.median(np.array(times["FastScan"]) / np.array(times[name])))
            row = {"k": k, "batch": batch, "threads": threads, "search": name}
            row |= {"µs": round(float(np.median(times[name]))), "faster": faster}
            rows.append(row | {"recall": recall(ids, truth, codes, Z, sample)})
    return rows


def markdown(result: Results) -> str:
    """Return the tables of the results."""
    machine = result["machine"]
    lines = [
        "# Exact search on the CPU",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, Faiss {machine['versions']['faiss']}. "
        "`lists` is `gpq_faiss.open_index`'s exact search. FastScan and IndexPQ are Faiss' own. "
        f"Microseconds a query: median of {ROUNDS} rounds; "
        "`faster`: median over rounds of FastScan's time over this one. "
        "`recall`: share of the true top k, by scores. Made by `benchmarks/search.py`.",
    ]
    for name, cells in result["groups"].items():
        source, n = name.split("/")
        lines += ["", f"## {source.split()[0]} codes, {cells['bits']} bits, {int(n):,} items", ""]
        lines.append(render(cells["rows"], "markdown", digits=3).rstrip())
    return "\n".join(lines)


def main() -> None:
    """Parse options, compute missing groups, write results."""
    parser = make_parser(__doc__, "search.json")
    codes = "default,omniglot,paper,random 12,random 48"
    parser.add_argument("--codes", default=codes, help="of trained models, or random BITS")
    parser.add_argument("--models", type=Path, default=Path("models"), help="of trained codes")
    parser.add_argument("--items", type=numbers, default=(100_000, 1_000_000))
    parser.add_argument("-k", type=numbers, default=(10, 100))
    parser.add_argument("--batches", type=numbers, default=(1, 32, 1024))
    parser.add_argument("--threads", type=numbers, default=(1, 2))
    parser.add_argument("--queries", type=int, default=1024)
    args = parser.parse_args()
    result = read_results(args.out, {"groups": {}}) | {"machine": describe_machine()}
    for n, name in itertools.product(args.items, args.codes.split(",")):
        if f"{name}/{n}" not in result["groups"]:
            print(f"{name}, {n:,} items", file=sys.stderr, flush=True)
            arrays = draw_codes(name, args.models, n, args.queries)
            result["groups"][f"{name}/{n}"] = {
                "bits": 4 * len(arrays[0]),
                "rows": group(*arrays, args),
            }
            save(result, args.out, markdown)
    print(args.out.with_suffix(".md"))


if __name__ == "__main__":
    run_main(main)
