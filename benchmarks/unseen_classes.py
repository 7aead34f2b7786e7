"""Measure the rule that chooses ``posterior.unseen_classes``, on features.

    python benchmarks/unseen_classes.py FOLDER                 # needs the packages of scenes.py
    python benchmarks/unseen_classes.py FOLDER --only scenes --out unseen-scenes.json

Every case is trained with the setting ``false`` and ``true``. The AUC by which unlabelled items are
told from labelled ones (:func:`gpq_faiss.methods.unseen.separation`) determines what ``auto``
chooses. FOLDER has ``cifar10-features``, ``omniglot`` and the archive of natural scenes, some of
which have several labels.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    clusters,
    make_parser,
    numbers,
    publish,
    rank_vectors,
    run_main,
    use_threads,
    vectors,
)
from scenes import ARCHIVE, extract_data

from gpq_faiss.config import preset
from gpq_faiss.data.base import FeatureDataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import Split, make_split
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.unseen import LEAST_AUC, MOST_CLASSES, MOST_COMPARED, separation
from gpq_faiss.training.loop import RunOptions, fit

CASES = (
    ("CIFAR-10 features", "2", "all"),
    ("CIFAR-10 features", "1", "500-per-class"),
    ("Omniglot features", "2", "all"),
    ("scenes features", "2", "all"),
    ("scenes features", "1", "20%"),
    ("digits", "2", "all"),
    ("digits", "1", "20-per-class"),
    ("simulated, 10 classes", "2", "all"),
    ("simulated, 10 classes", "1", "100-per-class"),
)
QUERIES = 1000


@functools.cache
def open_case(name: str, folder: Path) -> Any:
    """Open the features of a case."""
    if name.startswith("scenes"):
        return extract_data(folder / ARCHIVE, Path(tempfile.mkdtemp()))[0]
    if name.startswith("simulated"):
        x, y = clusters(6000, 10, 64, 2.0)
        return open_data(x, labels=y)
    if name == "digits":
        digits = open_data("digits")
        x = digits.read(np.arange(len(digits)))[:, :, :, 0].reshape(len(digits), -1)
        return open_data(x.astype(np.float32), labels=digits.require_labels().dense().argmax(1))
    files = folder / {"C": "cifar10-features", "O": "omniglot"}[name[0]]
    return open_data(f"features:{files}/features.npy", labels=str(files / "labels.npy"))


def auc(data: FeatureDataset, split: Split) -> float:
    """Return the AUC that the rule looks at."""
    unlabelled = split.unlabelled[:: -(-len(split.unlabelled) // MOST_COMPARED)]
    x, unlabelled_x = (data.read(rows).astype(np.float32) for rows in (split.labelled, unlabelled))
    deviation = np.sqrt(x.var(axis=0).mean())
    y = split.training_labels(data.require_labels()).dense(split.labelled)
    return separation(x / deviation, y, unlabelled_x / deviation)


def measure(data: FeatureDataset, split: Split, unseen: bool, seed: int) -> tuple[float, float]:
    """Return mAP at 48 bits of the split's queries, and of items of labelled classes."""
    settings = {"posterior": {"unseen_classes": unseen}, "training": {"seed": seed}}
    config, labels = preset("recommended").with_settings(settings), data.require_labels()
    run = {"folder": Path(), "identity": "", "options": RunOptions(checkpoint_seconds=math.inf)}
    training = fit(build_gpq, data, split, config, **run)  # type: ignore[arg-type]
    base, coder = vectors(training, data, split.database), training.method.coder()
    seen = split.seen_classes or range(labels.n_classes)
    of_seen = ~np.delete(labels.dense(split.database, bool), seen, axis=1).any(axis=1)
    scores = []
    for rows in (split.query, split.database[of_seen]):
        queries = rows[:: max(1, len(rows) // QUERIES)]
        xq = vectors(training, data, queries, queries=True)
        pair = labels.take(queries), labels.take(split.database)
        scores.append(rank_vectors(coder, xq, base, *pair).map)
    return scores[0], scores[1]


def markdown(results: dict[str, Any]) -> str:
    """Return the table of all cases."""
    lines = [
        "# The rule for classes without labels\n",
        "mAP of the preset recommended at 48 bits, with `posterior.unseen_classes` as in the head "
        f"of the column, of at most {QUERIES:,} queries. Under protocol 2 queries are of classes "
        "without labels, and half of the unlabelled items, which are the database; in brackets: "
        "items of labelled classes as queries, which find themselves too.\n",
        f"`auto` is `true` from an AUC of {LEAST_AUC} on, up to {MOST_CLASSES} labelled classes.\n",
        "| data | protocol | labelled | seed | AUC | false | true |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    return "\n".join([*lines, *results["rows"]])


def main() -> None:
    """Measure all cases; each is saved at once."""
    parser = make_parser(__doc__, "unseen-rule.json")
    parser.add_argument("data", type=Path, help="folder of CIFAR-10 and Omniglot features")
    parser.add_argument("--seeds", type=numbers, default=(100, 101, 102))
    parser.add_argument("--only", default="", help="part of the names of cases")
    options = parser.parse_args()
    use_threads(1)
    rows: list[str] = []
    cases = [case for case in CASES if options.only in case[0]]
    for seed, (name, protocol, labelled) in itertools.product(options.seeds, cases):
        data = open_case(name, options.data)
        split = make_split(data, protocol, seed=seed, labelled=labelled)
        area, results = auc(data, split), [measure(data, split, on, seed) for on in (False, True)]
        figures = [
            f"{single:.3f} ({seen:.3f})" if protocol == "2" else f"{single:.3f}"
            for single, seen in results
        ]
        cells = name, protocol, labelled, str(seed), f"{area:.3f}", *figures
        rows = sorted([*rows, f"| {' | '.join(cells)} |"])
        publish({"rows": rows}, options.out, markdown)


if __name__ == "__main__":
    run_main(main)
