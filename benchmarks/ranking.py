"""Speed of mAP over the full ranking at the size of NUS-WIDE's protocol 2, compared with numpy.

    OMP_NUM_THREADS=1 python benchmarks/ranking.py            # labels: $GPQ_DATA/nuswide

35,272 queries rank 85,415 items (3.0e9 pairs) with the real labels of NUS-WIDE-21. Items are
relevant if they share a label with the query. Codes are PQ codes of *simulated* features, so the
mAP says nothing about images; only sizes, labels and times are real. numpy (look-up of scores,
argsort, cumsum, and the expected value over ties in closed form) ranks a sample of the queries
between the full runs, and its time is extrapolated to all queries.
"""

from __future__ import annotations

import functools
import gzip
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    Floats,
    Results,
    data_path,
    make_parser,
    numbers,
    publish,
    require_data,
    run_main,
    timed,
)
from numpy.typing import NDArray

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.protocols import make_split
from gpq_faiss.errors import GpqError
from gpq_faiss.evaluation.ranking import rank_codes
from gpq_faiss.evaluation.tables import render
from gpq_faiss.methods.faiss_codec import PQ

QUERIES, DATABASE, CONCEPTS = 35_272, 85_415, 21
WIDTH, NOISE = 96, 1.5


def read_labels(folder: Path) -> Labels:
    """Read the labels of the 195,834 images with one of the 21 most frequent concepts.

    Concepts are in alphabetical order, as in the official list, so that a seed draws the same split
    as from the official files.

    Args:
        folder: the folder with ``mul_label_ids.txt.gz`` (lines ``image TAB concept``) and
            ``label_ids.txt`` (lines ``id TAB name``).
    """
    lines = (folder / "label_ids.txt").read_text().splitlines()
    names = [line.split("\t")[1].strip() for line in lines]
    with gzip.open(folder / "mul_label_ids.txt.gz", "rt") as file:
        words = [line.split() for line in file]
    pairs = [(int(image), int(c)) for image, *concepts in words for c in concepts]
    image, concept = np.array(pairs, dtype=np.int64).T
    dense = np.zeros((int(image.max()) + 1, len(names)), dtype=bool)
    dense[image, concept] = True
    frequent = np.argsort(-dense.sum(axis=0), kind="stable")[:CONCEPTS]
    columns = sorted(frequent.tolist(), key=lambda c: names[c])
    matrix = dense[:, columns]
    return Labels.from_multihot(matrix[matrix.any(axis=1)], [names[c] for c in columns])


def simulate(labels: Labels) -> Floats:
    """Simulate features [N, WIDTH]: the scaled sum of the concepts' directions, plus noise."""
    rng = np.random.default_rng([0, CONCEPTS])
    directions = rng.standard_normal((labels.n_classes, WIDTH), dtype=np.float32)
    dense = labels.dense()
    mean: Floats = dense @ directions
    mean /= np.sqrt(np.maximum(dense.sum(axis=1, keepdims=True), 1))
    mean += NOISE * rng.standard_normal(mean.shape, dtype=np.float32)
    return mean


def bit_masks(labels: Labels) -> NDArray[np.uint32]:
    """Return one bit per concept, uint32 [N]."""
    columns = np.arange(labels.n_classes, dtype=np.uint32)
    return np.asarray(labels.dense(dtype=bool).astype(np.uint32) @ (1 << columns))


def numpy_ap(
    tables: Floats, codes: NDArray[np.uint8], relevant: NDArray[np.bool_], harmonic: Floats
) -> float:
    """Return the expected AP of a query by plain numpy: scores, argsort and cumsum."""
    scores = np.zeros(len(codes), np.float32)
    for m in range(codes.shape[1]):
        scores += tables[m][codes[:, m]]
    order = np.argsort(-scores)
    hits, ranked = np.cumsum(relevant[order]), scores[order]
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    a, total = np.append(0, ends[:-1] + 1), hits[ends]
    b = np.append(0, total[:-1])
    n, r = ends + 1 - a, total - b
    p = (r - 1) / np.maximum(n - 1, 1)
    terms = r / n * ((b + 1 - p * (a + 1)) * (harmonic[a + n] - harmonic[a]) + p * n)
    return float(terms[r > 0].sum() / max(1, hits[-1]))


def measure(bits: int, x: Floats, labels: Labels, split: Any, options: Any) -> list[Results]:
    """Time both implementations at one code length, and return a row per number of threads."""
    query, base = split
    method = PQ(bits, seed=0).fit(x[base][:: max(1, len(base) // 20_000)])
    codes = unpack_codes(method.encode(x[base]), method.M, method.K)
    tables = method.score_tables(x[query])
    assert tables is not None
    yq, yb = labels.take(query), labels.take(base)
    query_masks, masks = bit_masks(yq), bit_masks(yb)
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, len(base) + 1))])
    sample = np.random.default_rng([0, bits]).permutation(len(query))[: options.numpy_queries]
    relevant = [(masks & query_masks[q]) != 0 for q in sample]
    rows: list[Results] = []
    for threads in options.threads:
        result, wall, cpu = timed(
            functools.partial(rank_codes, tables, codes, yq.packed, yb.packed, threads=threads)
        )
        expected, numpy_wall, numpy_cpu = timed(
            lambda: [
                numpy_ap(tables[q], codes, r, harmonic)
                for q, r in zip(sample, relevant, strict=True)
            ]
        )
        if np.abs(result.ap[sample] - expected).max() > 1e-5:
            raise GpqError("numpy gives another result: a defect")
        scale = len(query) / len(sample)
        rows.append(
            {
                "bits": bits,
                "distinct codes": result.n_distinct,
                "threads": threads,
                "seconds": wall,
                "CPU seconds": cpu,
                "numpy, same number": numpy_wall * scale,
                "times faster": numpy_wall * scale / wall,
                "per CPU second": numpy_cpu * scale / cpu,
                "mAP": f"{result.map:.4f}",
            }
        )
    return rows


def markdown(results: Results) -> str:
    """Return the table and explanations."""
    return "\n".join(
        [
            "# Whole-ranking mAP at the size of NUS-WIDE, protocol 2",
            "",
            render(results["rows"], "markdown", digits=1),
            f"{results['queries']:,} queries x {results['database']:,} items; real labels of "
            f"NUS-WIDE-21, {results['label_sets']:,} distinct label sets among the queries; "
            "relevant: shares a label. Codes: PQ of simulated features, a random direction of "
            f"{WIDTH} dimensions for each concept, the sum of an image's concepts scaled to unit "
            f"variance, plus Gaussian noise of {NOISE} deviations. The mAP therefore says nothing "
            "about images.",
            "",
            f"numpy: {results['numpy_queries']} of the queries, between the full runs, the time "
            "extrapolated to all: look-up of scores, `argsort`, `cumsum`, then the expected value "
            "over ties in closed form, on one core. *per CPU second* compares work alone.",
        ]
    )


def main() -> None:
    """Measure all code lengths, and write the results after each."""
    parser = make_parser(__doc__, "ranking.json")
    parser.add_argument("--bits", type=numbers, default=(12, 24, 32, 48))
    parser.add_argument("--threads", type=numbers, default=(1, 2))
    parser.add_argument("--numpy-queries", type=int, default=384, help="queries that numpy ranks")
    parser.add_argument("--queries", type=int, default=QUERIES)
    folder = data_path("nuswide")
    parser.add_argument("--data", type=Path, default=folder, help="default: $GPQ_DATA/nuswide")
    options = parser.parse_args()
    labels = read_labels(require_data(options.data, "FOLDER", "the NUS-WIDE labels"))
    x, split = simulate(labels), make_split(labels, "2")
    rng = np.random.default_rng(0)
    count = min(options.queries, len(split.query))
    query = np.sort(rng.choice(split.query, count, replace=False))
    base = np.sort(rng.choice(split.database, DATABASE, replace=False))
    results: Results = {
        "queries": len(query),
        "database": len(base),
        "label_sets": len(np.unique(bit_masks(labels.take(query)))),
        "numpy_queries": options.numpy_queries,
        "rows": [],
    }
    for bits in options.bits:
        results["rows"] += measure(bits, x, labels, (query, base), options)
        publish(results, options.out, markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)
