"""DTQ and PQN with the other parts of the default: pseudo-labels, adapted noise, averaged weights.

    OMP_NUM_THREADS=1 python benchmarks/pseudo_labels.py        # data: $GPQ_DATA; about half an hour of one core for each data set

The class networks of the default preset are trained on labelled and unlabelled items. Their most probable class is the label of each
unlabelled item; DTQ and PQN are then trained on all items, with the default's input noise and averaged weights. Everything else is as in
table 2 of the experiments: network, steps, learning rate 2e-3, split, evaluation. Batches have 250 items instead of 125.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    data_path,
    describe_machine,
    make_parser,
    numbers,
    open_features,
    read_results,
    require_data,
    run_main,
    save,
    use_threads,
)
from numpy.typing import NDArray
from torch import Tensor, nn

from gpq_faiss.config import Config, codebooks_for_bits, preset, to_dict, validate
from gpq_faiss.data.base import Dataset, FeatureDataset
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import make_split
from gpq_faiss.data.reader import Reader
from gpq_faiss.data.split import Split
from gpq_faiss.evaluation.tables import pivot, render, summarise
from gpq_faiss.methods.additive import iterated_conditional_modes, update_codebooks
from gpq_faiss.methods.base import Coder
from gpq_faiss.methods.dtq import DTQ
from gpq_faiss.methods.measure import Coded, input_neighbours
from gpq_faiss.methods.posterior import PosteriorCodes
from gpq_faiss.methods.registry import make_builder
from gpq_faiss.methods.trainable import TrainableMethod, TrainingBatch
from gpq_faiss.nn.heads import SubspaceHeads
from gpq_faiss.training.loop import fit
from gpq_faiss.training.vectors import embed_rows

TITLE = "DTQ and PQN with the default's pseudo-labels, noise and average of weights"
METHODS = ("dtq", "pqn")
BATCH = 250
DATA = {
    "CIFAR-10 features, 500 labels per class": ("cifar10-features", "500-per-class"),
    "CIFAR-10 features, 10 labels per class": ("cifar10-features", "10-per-class"),
    "Omniglot features, 10 labels per class": ("omniglot", "10-per-class"),
    "Digits, 20 labels per class": ("", "20-per-class"),
}
_CPU, _NO_ROWS = torch.device("cpu"), np.empty(0, np.int64)
_SWEEPS = 3
"""Of DTQ's codes and codebooks after the training, as within it."""

Rows = NDArray[np.int64]


class Averaged(TrainableMethod):
    """A wrapped method that averages its weights over the steps."""

    uses_unlabelled = False

    def __init__(self, method: TrainableMethod, ema: float) -> None:
        super().__init__()
        self.name = method.name
        self.method = method
        self.ema = ema
        self.average: dict[str, Tensor] = {}

    def fit_labels(self, reader: Reader, rows: Rows, y: NDArray[np.float32]) -> None:
        """As the method's."""
        self.method.fit_labels(reader, rows, y)

    def before_step(self, step: int, steps: int, sample: Callable[[int], Iterator[Tensor]]) -> None:
        """As the method's."""
        self.method.before_step(step, steps, sample)

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """As the method's."""
        return self.method.losses(batch, amp=amp)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """As the method's; also updates the average, as in the default."""
        self.method.after_step(step)
        weight = 1 - min(self.ema, (step + 1) / (step + 10))
        for name, now in self.method.named_parameters():
            self.average.setdefault(name, now.detach().clone()).lerp_(now, weight)

    @torch.no_grad()
    def fit_codebooks(self, sample: Callable[[int], Iterator[Tensor]], *, final: bool = False) -> None:
        """Load the averaged weights into the method; DTQ's codebooks are fitted to the vectors of that network."""
        for name, parameter in self.method.named_parameters():
            parameter.copy_(self.average[name])
        method = self.method.eval()
        method.fit_codebooks(sample, final=final)
        if isinstance(method, DTQ):
            x = torch.cat([method.exported()(block) for block in sample(20_000)]).numpy()
            C = method.codewords.numpy()
            for _ in range(_SWEEPS):
                codes = iterated_conditional_modes(x, C, sweeps=_SWEEPS)
                C = update_codebooks(x, codes, C, orthogonality=method.orthogonality)
            method.codewords.copy_(torch.from_numpy(C))

    def exported(self) -> nn.Module:
        """As the method's."""
        return self.method.exported()

    def coder(self) -> Coder:
        """As the method's."""
        return self.method.coder()


def open_task(data: Path, folder: str) -> FeatureDataset | Dataset:
    """The features below the data folder; the digits for no folder."""
    if not folder:
        return open_data("digits")
    return open_features(data / folder / "features.npy", data / folder / "labels.npy")


def settings(bits: int, seed: int, **training: Any) -> Config:
    """The default's settings, as the trained methods of table 2 have them."""
    base = preset("recommended")
    quantizer = dataclasses.replace(base.quantizer, codebooks=codebooks_for_bits(bits))
    return dataclasses.replace(
        base, quantizer=quantizer, training=dataclasses.replace(base.training, seed=seed, **training)
    )


def predict(dataset: Dataset, split: Split, seed: int) -> tuple[NDArray[np.float32], float]:
    """Class probabilities float32 [U, C] of the unlabelled items by the default's class networks, and their input noise."""
    with tempfile.TemporaryDirectory() as scratch:
        fitted = fit(
            make_builder("posterior"),
            dataset,
            split,
            validate(settings(12, seed)),
            folder=Path(scratch),
            identity="",
        )
    method = fitted.method
    assert isinstance(method, PosteriorCodes)
    network = method.exported().eval()
    head = network.backbone.head
    parts = []
    with torch.inference_mode(), Reader(dataset, fitted.image_size) as reader:
        for first in range(0, len(split.unlabelled), 4096):
            values, _ = reader.fetch(split.unlabelled[first : first + 4096])
            x = torch.from_numpy(values).float() / (1 if dataset.kind == "features" else 255)
            parts.append(network.posterior(network.features(x)[1]).numpy())
    noise = (
        float(head.noise) if isinstance(head, SubspaceHeads) else preset("recommended").network.first_noise
    )
    return np.concatenate(parts), noise


def train_and_rank(
    method: str,
    bits: int,
    seed: int,
    dataset: Dataset,
    split: Split,
    found: tuple[NDArray[np.float32], float],
) -> dict[str, Any]:
    """A training on labels and pseudo-labels, and the figures of its codes."""
    p, noise = found
    known = dataset.require_labels()
    dense = known.masked(split.labelled).dense().astype(np.uint8)
    dense[split.unlabelled, p.argmax(axis=1)] = 1
    labels = Labels.from_multihot(dense, known.class_names)
    relabelled = dataclasses.replace(dataset, labels=labels)
    everything = np.union1d(split.labelled, split.unlabelled)
    training = dataclasses.replace(
        split, query=_NO_ROWS, labelled=everything, unlabelled=_NO_ROWS, database=_NO_ROWS
    )
    config = settings(bits, seed, learning_rate=2e-3, batch_labelled=BATCH)
    config = dataclasses.replace(
        config,
        network=dataclasses.replace(config.network, hidden=(512,), dropout=0.2, noise=noise),
    )
    build = make_builder(method)
    with tempfile.TemporaryDirectory() as scratch:
        fitted = fit(
            lambda *arguments: Averaged(build(*arguments), config.training.ema),
            relabelled,
            training,
            config,
            folder=Path(scratch),
            identity="",
        )
    with Reader(dataset, fitted.image_size) as reader:
        xq, _ = embed_rows(fitted.method, reader, split.query, _CPU, queries=True)
        xb, _ = embed_rows(fitted.method, reader, split.database, _CPU)
    coder = fitted.method.coder()
    coded = Coded(coder, split.query, split.database, xq=xq, codes=coder.encode(xb))
    neighbours = input_neighbours(dataset, fitted.image_size, split.query, split.database, known)
    assert neighbours is not None
    return {
        "map": coded.rank(known).map,
        "nn10_at_100": coded.likeness(neighbours, dataset).as_dict()["nn10_at_100"],
        "noise": noise,
        "seconds": round(fitted.run.seconds, 1),
    }


def markdown(results: dict[str, Any]) -> str:
    """A table for each data set."""
    lines = [f"# {TITLE}", ""]
    for title in dict.fromkeys(cell["data"] for cell in results["cells"]):
        cells = [cell for cell in results["cells"] if cell["data"] == title]
        lines += [f"## {title}", ""]
        for value, name in (("map", "mAP"), ("nn10_at_100", "NN10@100")):
            table = pivot(summarise(cells, by=["method", "bits"], values=[value]), "method", "bits", value)
            lines += [f"{name}:", "", render(table, "markdown", digits=4), ""]
    seeds = sorted({cell["seed"] for cell in results["cells"]})
    over = "Mean ± deviation over seeds" if len(seeds) > 1 else "Seed"
    there = {cell["data"] for cell in results["cells"]}
    sets = ",".join(str(place) for place, title in enumerate(DATA) if title in there)
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines += [
        f"{over} {', '.join(map(str, seeds))}. Protocol 1, mAP of the full ranking, expected "
        "value over random order within ties.",
        "",
        f"Machine: {machine['cpu']}, {machine['cores']} cores (one used), {machine['os']}; {versions}.",
        "",
        f"Command: `OMP_NUM_THREADS=1 python benchmarks/pseudo_labels.py --seeds {','.join(map(str, seeds))} --sets {sets}`",
        "",
    ]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "pseudo-labels.json", whole=True)
    parser.add_argument("--data", type=Path, default=data_path(), help="folder; default: $GPQ_DATA")
    parser.add_argument("--bits", type=numbers, default=(12, 48))
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2))
    parser.add_argument(
        "--sets", type=numbers, default=tuple(range(len(DATA))), help="positions of data sets"
    )
    return parser.parse_args()


def main() -> None:
    """Compute missing results; written after every training."""
    options = parse()
    require_data(options.data, "FOLDER", "the features")
    use_threads(1)
    results = read_results(
        options.out,
        {
            "title": TITLE,
            "machine": describe_machine(),
            "preset": to_dict(preset("recommended")),
            "cells": [],
        },
    )
    done = {(c["data"], c["method"], c["bits"], c["seed"]) for c in results["cells"]}
    for at in options.sets:
        title, (folder, labelled) = list(DATA.items())[at]
        dataset = open_task(options.data, folder)
        for seed in options.seeds:
            wanted = [(m, b) for b in options.bits for m in METHODS if (title, m, b, seed) not in done]
            if not wanted:
                continue
            split = make_split(dataset, "1", seed=seed, labelled=labelled)
            found = predict(dataset, split, seed)
            for method, bits in wanted:
                cell = train_and_rank(method, bits, seed, dataset, split, found)
                results["cells"].append({"data": title, "method": method, "bits": bits, "seed": seed, **cell})
                save(results, options.out, markdown)
                print(title, method, bits, seed, cell, flush=True)


if __name__ == "__main__":
    run_main(main)
