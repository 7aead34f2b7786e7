"""The rules of protocol 2 for images of several concepts, counted over the real labels of NUS-WIDE-21; and its size for other benchmarks.

    OMP_NUM_THREADS=1 python benchmarks/nuswide.py            # labels: $GPQ_DATA/nuswide

195,834 images of 21 concepts, 15 of them seen and 6 unseen. An image of both belongs to one side by a rule, and the paper does not say
which. Every rule is counted over all choices of the unseen concepts.
"""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from common import data_path, describe_machine, machine_line, make_parser, require_data, run_main, save
from numpy.typing import NDArray

from gpq_faiss.data.labels import Labels
from gpq_faiss.errors import DataError
from gpq_faiss.evaluation.tables import render

CONCEPTS, SEEN = 21, 15
# Protocol 2 in the paper's table 1.
PAPER = 35_272 / 85_415
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


def count_rules(labels: Labels) -> list[dict[str, Any]]:
    """Share of queries under each rule, in the mean over *every* choice of the unseen concepts.

    Besides the package's rules these are counted: the side of an image's rarest or commonest concept, and leaving out images with
    concepts of both sides.
    """
    dense = labels.dense(dtype=bool)
    sets, items = np.unique(dense, axis=0, return_counts=True)
    total, counts, weight = sets.sum(axis=1), dense.sum(axis=0), items.astype(np.float64)
    # The first of equally common concepts, as numpy's argmin and argmax.
    rarest = np.where(sets, counts, len(dense) + 1).argmin(axis=1)
    commonest = np.where(sets, counts, -1).argmax(axis=1)
    n_classes = labels.n_classes
    found: dict[str, list[NDArray[np.float64]]] = {}
    kept: list[NDArray[np.float64]] = []
    choices = itertools.combinations(range(n_classes), n_classes - SEEN)
    while chosen := list(itertools.islice(choices, 2048)):
        unseen = np.zeros((len(chosen), n_classes), dtype=np.float32)
        unseen[np.arange(len(chosen))[:, None], np.array(chosen)] = 1
        hidden = sets.astype(np.float32) @ unseen.T
        whole = total[:, None]
        sides = {
            "any": hidden > 0,
            "half": 2 * hidden >= whole,
            "majority": 2 * hidden > whole,
            "all": hidden == whole,
            "rarest": unseen.T[rarest] > 0,
            "commonest": unseen.T[commonest] > 0,
        }
        for name, side in sides.items():
            found.setdefault(name, []).append(weight @ side)
        kept.append(weight @ (sides["all"] | ~sides["any"]))
    rows = []
    for name, parts in found.items():
        share = np.concatenate(parts) / len(labels)
        rows.append(_rule_row(name, share, len(labels) / 2))
    pure = np.concatenate(kept)
    rows.append(_rule_row("mixed left out", np.concatenate(found["all"]) / pure, float(pure.mean()) / 2))
    return rows


def _rule_row(name: str, share: NDArray[np.float64], database: float) -> dict[str, Any]:
    return {
        "rule": name,
        "choices": len(share),
        "queries": float(share.mean()) * database,
        "database": database,
        "queries / database": float(share.mean()),
        "deviation": float(share.std()),
        "ratio to paper": float(share.mean()) / PAPER,
    }


_RULE_TEXT = {
    "any": "any of its concepts is unseen",
    "half": "at least half of them are",
    "majority": "more than half of them are",
    "all": "all of them are",
    "rarest": "its rarest concept is",
    "commonest": "its commonest concept is",
    "mixed left out": "all are; images of both sides are left out",
}


def markdown(results: dict[str, Any]) -> str:
    """The table of the rules."""
    rows = [
        {
            "on the unseen side if": _RULE_TEXT[row["rule"]],
            "name": f"`{row['rule']}`" if row["rule"] in ("any", "half", "majority", "all") else "–",
            "queries": f"{row['queries']:,.0f}",
            "database": f"{row['database']:,.0f}",
            "queries / database": f"{row['queries / database']:.3f} ± {row['deviation']:.3f}",
            "of the paper's": f"{row['ratio to paper']:.2f}",
        }
        for row in results["rules"]
    ]
    choices = results["rules"][0]["choices"]
    return "\n".join(
        [
            "# NUS-WIDE, protocol 2: which side an image of several concepts is on",
            "",
            f"{results['images']:,} images with one of the 21 most frequent concepts. 15 seen and 6 unseen concepts; mean over all "
            f"{choices:,} choices of the 6. The paper has 35,272 queries and 85,415 database items: "
            f"{PAPER:.3f}. The database is half of the images under every rule (train25 + test75), so that quotient is what a rule "
            "decides. Nearest in the mean: `any`, the default.",
            "",
            render(rows, "markdown"),
            "± is the deviation between choices: which concepts are unseen matters more than the rule.",
            "",
            machine_line(results["machine"], "python benchmarks/nuswide.py"),
            "",
        ]
    )


def main() -> None:
    """Count the rules."""
    parser = make_parser(__doc__, "nuswide.json")
    parser.add_argument("--data", type=Path, default=data_path("nuswide"), help="default: $GPQ_DATA/nuswide")
    options = parser.parse_args()
    labels = read_labels(options.data)
    results = {"images": len(labels), "rules": count_rules(labels), "machine": describe_machine()}
    save(results, options.out, markdown)


if __name__ == "__main__":
    run_main(main)
