"""The first ten results where items have several labels: codes against class probabilities.

    python benchmarks/several_labels.py FOLDER

FOLDER has ``omniglot/features.npy`` and ``labels.npy``. The default is trained on simulated items
and on sums of Omniglot features, a tenth of them labelled. Its codes are compared with what they
approximate: the probability p(query) · p(item) by its own class networks, uncompressed.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    Results,
    make_parser,
    numbers,
    publish,
    rank_vectors,
    run_main,
    use_threads,
    vectors,
)

from gpq_faiss.config import codebooks_for_bits, preset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import make_split
from gpq_faiss.evaluation.ranking import RankingResult, rank_scores
from gpq_faiss.evaluation.tables import render, summarise
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.training.loop import RunOptions, fit

ITEMS, LABELLED, CLASSES, KS = 4000, "0.1", 80, (1, 10)
SIMULATED = {"simulated, little noise": (32, 1.0), "simulated, much noise": (64, 3.0)}
"""Name of a set of 50 classes -> width, and standard deviation of the noise."""


def open_set(name: str, folder: Path) -> Any:
    """Open a set, whose items are sums of one to three rows of features, with noise."""
    rng = np.random.default_rng(1)
    if name in SIMULATED:
        width, noise = SIMULATED[name]
        # The first class is seven times as frequent as the last.
        x, y, weights = rng.standard_normal((50, width)), np.arange(50), np.arange(1, 51) ** -0.5
    else:
        x, y = (np.load(folder / "omniglot" / f"{part}.npy") for part in ("features", "labels"))
        x, y, noise = x[y < CLASSES].astype(np.float64), y[y < CLASSES], 0.0
        weights = np.ones(len(x))
    items = noise * rng.standard_normal((ITEMS, x.shape[1]))
    labels = np.zeros((ITEMS, int(y.max()) + 1), np.uint8)
    for i in range(ITEMS):
        count = rng.integers(1, 4)
        rows = rng.choice(len(x), count, replace=False, p=weights / weights.sum())
        items[i] += x[rows].sum(axis=0) / count**0.5
        labels[i, y[rows]] = 1
    return open_data(items.astype(np.float32), labels=labels)


def measure(data: Any, bits: int, seed: int) -> dict[str, RankingResult]:
    """Train the default, and rank by codes and by class probabilities."""
    labels, split = data.require_labels(), make_split(data, "1", seed=seed, labelled=LABELLED)
    settings = {"quantizer": {"codebooks": codebooks_for_bits(bits)}, "training": {"seed": seed}}
    training: Any = fit(
        build_gpq,
        data,
        split,
        preset("recommended").with_settings(settings),
        folder=Path(),
        identity="",
        options=RunOptions(checkpoint_seconds=math.inf),
    )
    truth = labels.take(split.query), labels.take(split.database)
    with torch.no_grad():
        p, q = (
            training.method.mean_posterior(
                training.method.features(torch.from_numpy(data.read(rows)))[1]
            )
            for rows in (split.database, split.query)
        )
    return {
        f"codes of {bits} bits": rank_vectors(
            training.method.coder(),
            vectors(training, data, split.query, queries=True),
            vectors(training, data, split.database),
            *truth,
            ks=KS,
        ),
        "class probabilities": rank_scores(
            (q @ p.T).numpy(), *(labels.packed for labels in truth), ks=KS
        ),
    }


def markdown(results: Results) -> str:
    """Return the table of means over the seeds, with explanations."""
    rows = summarise(results["cells"], ["data", "ranking"], ["mAP", "P@1", "P@10"])
    return (
        "# The first ten results where items have several labels\n\n"
        f"{render(rows, 'markdown')}\n"
        f"Mean ± deviation over seeds {results['seeds']}; {results['convention']}. Each set has "
        f"{ITEMS:,} items of one to three labels, a tenth of each class labelled; protocol 1, "
        "preset recommended. *Class probabilities*: p(query) · p(item) by the model's own class "
        f"networks, uncompressed. Simulated: 50 classes; sums of Omniglot features: {CLASSES} "
        "classes."
    )


def main() -> None:
    """Measure all sets; each training is saved at once."""
    parser = make_parser(__doc__, "several-labels.json")
    parser.add_argument("data", type=Path, help="folder of Omniglot features")
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2))
    options = parser.parse_args()
    use_threads(1)
    results: Results = {"cells": [], "seeds": ", ".join(map(str, options.seeds))}
    for name, seed, bits in itertools.product((*SIMULATED, "sums"), options.seeds, (12, 48)):
        for ranking, measures in measure(open_set(name, options.data), bits, seed).items():
            cell = {
                "data": name,
                "ranking": ranking,
                "seed": seed,
                "mAP": measures.map,
                **{f"P@{k}": measures.precision[k] for k in KS},
            }
            if cell not in results["cells"]:  # class networks do not depend on the bits
                results["cells"].append(cell)
        results["cells"].sort(key=lambda cell: (cell["data"], cell["ranking"], cell["seed"]))
        publish(results | {"convention": measures.convention}, options.out, markdown)


if __name__ == "__main__":
    run_main(main)
