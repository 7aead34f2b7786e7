"""What each part of the preset `recommended` is worth: mAP on CIFAR-10 features with one part off at a time.

    python benchmarks/ablation.py --data cifar10-features      # features.npy [60000, 256], labels.npy [60000]

Writes results/ablation.json and, derived from it, results/ablation.md. Protocol 1, tie-aware mAP of the full ranking.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from machine import describe_machine

from gpq_faiss.config import Config, codebooks_for_bits, merge, preset
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import UsageError
from gpq_faiss.evaluate.tables import pivot, render, summarise
from gpq_faiss.evaluation import evaluate
from gpq_faiss.files import write_json, write_text
from gpq_faiss.train import train

RESULTS = Path(__file__).parent / "results"
LINEAR = {"network": {"heads": 0, "noise": 0.0, "dropout": 0.0}}
VARIANTS: dict[str, dict[str, Any]] = {
    "recommended": {},
    "one linear layer instead of heads": LINEAR,
    "heads without noise": {"network": {"noise": 0.0}},
    "vectors not re-expressed": {"quantizer": {"reexpress": False}},
    "N-pair loss alone, no score regression": {"loss": {"lambda0": 1.0, "lambda3": 0.0}},
    "score regression alone, no N-pair loss": {"loss": {"lambda0": 0.0, "lambda3": 20.0}},
    "no entropy of unlabelled items": {"loss": {"lambda2": 0.0}},
    "codewords random, from the first step": {"training": {"codebook_start": 0.0}},
    "last weights instead of the average": {"training": {"ema": 0.0}},
    "preset paper": {"preset": "paper"},
}


def variant(changes: dict[str, Any], bits: int, seed: int) -> Config:
    """The preset with one part changed."""
    base = preset(changes.get("preset", "recommended"))
    config = merge(base, {k: v for k, v in changes.items() if k != "preset"})
    return merge(config, {"quantizer": {"codebooks": codebooks_for_bits(bits)}, "training": {"seed": seed}})


def main() -> None:
    """Every variant at every code length, number of labels and seed."""
    data = os.environ.get("GPQ_DATA")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[12, 48], help="code lengths")
    parser.add_argument("--labelled", type=int, nargs="+", default=[10, 500], help="labelled items a class")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of split and training")
    parser.add_argument("--data", type=Path, default=Path(data) / "cifar10-features" if data else None)
    parser.add_argument("--out", type=Path, default=RESULTS / "ablation.json")
    options = parser.parse_args()
    if options.data is None:
        raise UsageError(
            "no data: pass --data FOLDER, or set GPQ_DATA to the folder that holds cifar10-features"
        )
    dataset = open_data(f"features:{options.data / 'features.npy'}", labels=str(options.data / "labels.npy"))
    cells: list[dict[str, Any]] = []
    convention = ""
    grid = [
        (n, bits, seed, name)
        for seed in options.seeds
        for n in options.labelled
        for bits in options.bits
        for name in VARIANTS
    ]
    for labels, bits, seed, name in grid:
        with tempfile.TemporaryDirectory(prefix="gpq-ablation-") as folder:
            config = variant(VARIANTS[name], bits, seed)
            model = train(dataset, Path(folder) / "model", config=config, labelled=f"{labels}-per-class")
            ranking = evaluate(model, dataset).ranking
        convention = ranking.convention
        cells.append({"variant": name, "labels": labels, "bits": bits, "seed": seed, "map": ranking.map})
        print(f"{labels} a class, {bits} bits, seed {seed}: {name}: {ranking.map:.4f}", flush=True)
        machine = describe_machine()
        write_json(options.out, {"machine": machine, "convention": convention, "cells": cells})
        rows = [{**c, "column": f"{c['bits']} bits, {c['labels']} labels a class"} for c in cells]
        table = pivot(summarise(rows, by=["variant", "column"], values=["map"]), "variant", "column", "map")
        versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
        text = (
            "# What each part of the preset `recommended` is worth\n\n"
            "CIFAR-10 features (60,000 x 256), protocol 1, one part off at a time. "
            f"Seeds {', '.join(map(str, options.seeds))}; {convention}.\n\n{render(table, 'markdown', digits=4)}\n\n"
            f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
            f"{machine['gpu'] or 'no GPU'}; {versions}. Command: `python benchmarks/ablation.py`\n"
        )
        write_text(options.out.with_suffix(".md"), text)


if __name__ == "__main__":
    main()
