"""Speed of whole-ranking mAP at the size of NUS-WIDE's protocol 2, compared with numpy's argsort and cumsum.

    OMP_NUM_THREADS=1 python benchmarks/ranking.py            # labels: $GPQ_DATA/nuswide

35,272 queries x 85,415 items (3.0e9 pairs), the real label matrix of NUS-WIDE-21, relevant if a label is shared. Codes are PQ
codes of *simulated* features, so the mAP says nothing about images; only sizes, labels and times are real. numpy ranks a
sample of the queries, in rounds between the full runs, and its time for all of them is extrapolated from the time a query.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    data_path,
    describe_machine,
    machine_line,
    make_parser,
    numbers,
    own_command,
    require_data,
    run_main,
    save,
    timed,
)
from numpy.typing import NDArray

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.codes.codebooks import product_index
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.protocols import make_split
from gpq_faiss.errors import DataError, GpqError
from gpq_faiss.evaluation.ranking import RankingResult, rank_codes
from gpq_faiss.evaluation.tables import render
from gpq_faiss.methods.faiss_codec import PQ

QUERIES, DATABASE = 35_272, 85_415
TITLE = "Whole-ranking mAP at the size of NUS-WIDE, protocol 2"
_BLOCK = 32  # queries per matrix product

Floats = NDArray[np.float32]
Cell = dict[str, Any]
CONCEPTS = 21
WIDTH = 96
NOISE = 1.5
SIMULATED = (
    f"simulated features: a fixed random direction of {WIDTH} dimensions for each concept, the mean of an image's concepts "
    f"scaled to unit variance, plus Gaussian noise of {NOISE} deviations"
)


def read_labels(root: Path | None) -> Labels:
    """Labels of the 195,834 images with one of the 21 most frequent concepts, in the order of the official image list.

    Concepts are in alphabetical order, which is that of the official list, so that a split of a seed is the one that
    the official files would give.

    Args:
        root: folder of ``mul_label_ids.txt.gz`` (``image TAB concept`` a line) and ``label_ids.txt`` (``id TAB name``).

    Raises:
        UsageError: no folder. DataError: the files are missing or damaged.
    """
    require_data(root, "FOLDER", "the NUS-WIDE labels")
    assert root is not None
    try:
        names = [line.split("\t")[1].strip() for line in (root / "label_ids.txt").read_text().splitlines()]
        with gzip.open(root / "mul_label_ids.txt.gz", "rt") as file:
            pairs = [(int(words[0]), int(c)) for words in map(str.split, file) for c in words[1:]]
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DataError(f"{root} does not hold the NUS-WIDE label lists ({error})") from None
    image, concept = np.array(pairs, dtype=np.int64).T
    dense = np.zeros((int(image.max()) + 1, len(names)), dtype=bool)
    dense[image, concept] = True
    frequent = np.argsort(-dense.sum(axis=0), kind="stable")[:CONCEPTS]
    columns = sorted(frequent.tolist(), key=lambda c: names[c])
    matrix = dense[:, columns]
    return Labels.from_multihot(matrix[matrix.any(axis=1)], [names[c] for c in columns])


def simulate(labels: Labels) -> NDArray[np.float32]:
    """Features float32 [N, WIDTH] (:data:`SIMULATED`). They say nothing about images: only sizes and times are real."""
    rng = np.random.default_rng([0, CONCEPTS])
    directions = rng.standard_normal((labels.n_classes, WIDTH), dtype=np.float32)
    dense = labels.dense()
    mean: NDArray[np.float32] = dense @ directions
    mean /= np.sqrt(np.maximum(dense.sum(axis=1, keepdims=True), 1))
    mean += NOISE * rng.standard_normal(mean.shape, dtype=np.float32)
    return mean


class Clock:
    """Wall and CPU seconds of a part."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def run(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``part``, and add its time."""
        result, wall, cpu = timed(lambda: part(*arguments))
        self.wall += wall
        self.cpu += cpu
        return result


class Numpy:
    """The usual numpy code: scores, ``argsort``, ``cumsum``, one query at a time, as batches are not faster.

    Scores come from the faster of two ways, tried on some queries: look-up tables of two codebooks (a byte of the code) at
    once, or a matrix product with the decoded items. Relevance is one AND of 32-bit label masks.
    """

    def __init__(self, tables: Floats, assignment: NDArray[np.uint8], queries: Floats, items: Floats) -> None:
        self.tables, self.queries, self.items = tables, queries, items
        self.offset = 0.5 * np.einsum("nd,nd->n", items, items)
        m = assignment.shape[1]
        pairs = [(j, min(j + 1, m - 1)) for j in range(0, m, 2)]
        self.bytes = [
            assignment[:, a].astype(np.intp) + 16 * (assignment[:, b] if b > a else 0) for a, b in pairs
        ]
        n = len(items)
        self.ranks = np.arange(1, n + 1)
        self.harmonic = np.concatenate([[0.0], np.cumsum(1 / self.ranks)])
        some = np.arange(_BLOCK)
        tried = {}
        for name, way in (("look-up", self.look_up), ("matrix product", self.product)):
            way(some)
            clock = Clock()
            clock.run(way, some)
            tried[name] = clock.cpu
        self.way = min(tried, key=tried.__getitem__)
        self.scores = self.look_up if self.way == "look-up" else self.product

    def look_up(self, rows: NDArray[np.int64]) -> list[Floats]:
        """Scores [N] of each query."""
        result = []
        for q in rows:
            total = np.zeros(len(self.items), np.float32)
            for j, index in enumerate(self.bytes):
                two = self.tables[q, 2 * j : 2 * j + 2]
                joint = two[0] if len(two) == 1 else (two[1][:, None] + two[0]).ravel()
                total += joint[index]
            result.append(total)
        return result

    def product(self, rows: NDArray[np.int64]) -> list[Floats]:
        """The same, a block of queries at a time; up to a constant and a factor of each query."""
        return list(self.queries[rows] @ self.items.T - self.offset)

    def plain(
        self, scores: Floats, masks: NDArray[np.uint32], mask: np.uint32
    ) -> tuple[float, NDArray[Any], NDArray[Any]]:
        """AP with ties in the order of the sort, so it differs from ours if codes tie."""
        order = np.argsort(-scores)
        hit = ((masks & mask) != 0)[order]
        found = np.cumsum(hit)
        ap = float((found[hit] / self.ranks[hit]).sum() / max(1, found[-1]))
        return ap, order, found

    def expected(self, scores: Floats, order: NDArray[Any], found: NDArray[Any]) -> float:
        """AP as the expected value over ties: the same number as ours."""
        ranked = scores[order]
        ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
        a, upto = np.append(0, ends[:-1] + 1), found[ends]
        b = np.append(0, upto[:-1])
        some = upto > b
        a, n, b, r = a[some], (ends + 1 - a)[some], b[some], (upto - b)[some]
        p = (r - 1) / np.maximum(n - 1, 1)
        terms = r / n * ((b + 1 - p * (a + 1)) * (self.harmonic[a + n] - self.harmonic[a]) + p * n)
        return float(terms.sum() / max(1, found[-1]))

    def rank(
        self,
        rows: NDArray[np.int64],
        query_masks: NDArray[np.uint32],
        masks: NDArray[np.uint32],
        tie: Clock,
        base: Clock,
    ) -> NDArray[np.float64]:
        """Expected AP of ``rows``; ``base`` times scores, sort and cumsum, ``tie`` the handling of ties."""
        values = []
        for start in range(0, len(rows), _BLOCK):
            block = rows[start : start + _BLOCK]
            scores = base.run(self.scores, block)
            for q, s in zip(block, scores, strict=True):
                _, order, found = base.run(self.plain, s, masks, query_masks[q])
                values.append(tie.run(self.expected, s, order, found))
        return np.array(values)


def bit_masks(labels: Labels) -> NDArray[np.uint32]:
    """One bit per concept."""
    dense = labels.dense(dtype=bool)
    masks: NDArray[np.uint32] = (dense.astype(np.uint32) << np.arange(dense.shape[1], dtype=np.uint32)).sum(
        axis=1, dtype=np.uint32
    )
    return masks


def measure(
    bits: int,
    x: Floats,
    labels: Labels,
    query: NDArray[np.int64],
    base: NDArray[np.int64],
    options: argparse.Namespace,
) -> Cell:
    """All ways at one code length."""
    method = PQ(bits, seed=0).fit(x[base][:: max(1, len(base) // 20_000)])
    packed = method.encode(x[base])
    codes, tables = unpack_codes(packed, method.M, method.K), method.score_tables(x[query])
    assert tables is not None
    yq, yb = labels.take(query), labels.take(base)
    unit = x[query] / np.linalg.norm(x[query], axis=1, keepdims=True)
    assert method.quantizer is not None
    decoded = product_index(method.quantizer.codebooks).sa_decode(packed)[:, : method.width]
    numpy_way = Numpy(tables, codes, unit, decoded)
    sample = np.random.default_rng([0, bits]).permutation(len(query))[: options.numpy_queries]
    rounds = np.array_split(sample, len(options.threads) + 1)
    plain, ties = Clock(), Clock()
    masks = bit_masks(yq), bit_masks(yb)
    reference = [numpy_way.rank(rounds[0], *masks, ties, plain)]
    cell: Cell = {"bits": bits, "runs": []}
    results: list[RankingResult] = []
    for threads, part in zip(options.threads, rounds[1:], strict=True):
        clock = Clock()
        results.append(clock.run(partial(rank_codes, tables, codes, yq.packed, yb.packed, threads=threads)))
        cell["runs"].append(
            {
                "threads": threads,
                "seconds": clock.wall,
                "cpu_seconds": clock.cpu,
            }
        )
        reference.append(numpy_way.rank(part, *masks, ties, plain))
    if any((result.ap != results[0].ap).any() for result in results):
        raise GpqError("the number of threads changed the result: a defect")
    scale = len(query) / len(sample)
    difference = float(np.abs(results[0].ap[sample] - np.concatenate(reference)).max())
    cell |= {
        "distinct": results[0].n_distinct,
        "map": results[0].map,
        "convention": results[0].convention,
        "without_relevant": results[0].queries_without_relevant,
        "numpy": {
            "queries": len(sample),
            "scores": numpy_way.way,
            "seconds": (plain.wall + ties.wall) * scale,
            "cpu_seconds": (plain.cpu + ties.cpu) * scale,
            "seconds_without_ties": plain.wall * scale,
            "cpu_seconds_without_ties": plain.cpu * scale,
        },
        "largest_difference": difference,
    }
    return cell


def markdown(results: dict[str, Any]) -> str:
    """Table and explanations."""
    rows = []
    for cell in results["cells"]:
        reference = cell["numpy"]
        for run in cell["runs"]:
            rows.append(
                {
                    "bits": cell["bits"],
                    "distinct codes": f"{cell['distinct']:,}",
                    "threads": run["threads"],
                    "seconds": f"{run['seconds']:.1f}",
                    "CPU seconds": f"{run['cpu_seconds']:.1f}",
                    "numpy, same number": f"{reference['seconds']:.0f} ({reference['cpu_seconds']:.0f})",
                    "times faster": f"{reference['seconds'] / run['seconds']:.1f}",
                    "per CPU second": f"{reference['cpu_seconds'] / run['cpu_seconds']:.1f}",
                    "than numpy without ties": f"{reference['seconds_without_ties'] / run['seconds']:.1f}",
                    "mAP": f"{cell['map']:.4f}",
                }
            )
    cells = results["cells"]
    return "\n".join(
        [
            f"# {TITLE}",
            "",
            render(rows, "markdown"),
            f"{results['queries']:,} queries x {results['database']:,} items = {results['queries'] * results['database'] / 1e9:.1f}e9 "
            f"pairs; real labels of NUS-WIDE-21, {results['label_sets']:,} distinct label sets among the queries. "
            f"{cells[0]['convention']}; relevant: shares a label.",
            "",
            f"Codes: PQ of {results['features']}. The mAP therefore says nothing about images; sizes, labels and times are real.",
            "",
            f"numpy: {cells[0]['numpy']['queries']} of the queries, in rounds before, between and after the full runs, time a query "
            "extrapolated to all; wall seconds, and CPU seconds in brackets. Scores by "
            + ", ".join(f"{c['numpy']['scores']} ({c['bits']} bits)" for c in cells)
            + " (the faster of the two), `argsort`, `cumsum`, then the expected value over ties in closed form. *Without ties* leaves "
            "the last step out: a different number where codes tie. numpy sorts on one core.",
            "",
            f"Largest difference of an AP between the two: {max(c['largest_difference'] for c in cells):.0e} (numpy adds float32 scores, "
            "so that near scores change places; ours are exact sums). Every number of threads gives the same bits.",
            "",
            "CPU seconds / seconds are the cores that a run had: fewer where the machine has other work, and wall times are longer then. "
            "*per CPU second* compares work alone.",
            "",
            machine_line(results["machine"], results["command"]),
            "",
        ]
    )


def main() -> None:
    """Run all code lengths; results are written after each."""
    parser = make_parser(__doc__, "ranking.json")
    parser.add_argument("--bits", type=numbers, default=(12, 24, 32, 48))
    parser.add_argument("--threads", type=numbers, default=(1, 2))
    parser.add_argument("--numpy-queries", type=int, default=384, help="queries that numpy ranks")
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--data", type=Path, default=data_path("nuswide"), help="default: $GPQ_DATA/nuswide")
    options = parser.parse_args()
    labels = read_labels(options.data)
    x = simulate(labels)
    split = make_split(labels, "2")
    rng = np.random.default_rng(0)
    query = np.sort(rng.choice(split.query, min(options.queries, len(split.query)), replace=False))
    base = np.sort(rng.choice(split.database, DATABASE, replace=False))
    results: dict[str, Any] = {
        "title": TITLE,
        "machine": describe_machine(),
        "command": own_command(),
        "queries": len(query),
        "database": len(base),
        "label_sets": len(np.unique(bit_masks(labels.take(query)))),
        "features": SIMULATED,
        "split_hash": split.hash,
        "cells": [],
    }
    for bits in options.bits:
        results["cells"].append(measure(bits, x, labels, query, base, options))
        save(results, options.out, markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)
