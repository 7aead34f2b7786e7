"""Where the codewords of a committee come from: softening, turns and beam, on splits that no table of results uses.

    OMP_NUM_THREADS=1 python benchmarks/codewords.py            # data: $GPQ_DATA/cifar10-features; under an hour of one core

The choices in ``gpq_faiss/nn/committee.py`` and ``methods/codewords.py`` rest on this. One committee is trained a seed and setting; its
codewords are placed again for each way and code length, and items and queries coded and ranked with them. Between the ways nothing else
differs. Trainings are kept in ``--work``, figures in the JSON, and what is there is not computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import faiss
import numpy as np
import torch
from machine import describe_machine
from numpy.typing import NDArray
from torch import Tensor

from gpq_faiss.config import codebooks_for_bits, merge, preset
from gpq_faiss.data.base import FeatureDataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import Split
from gpq_faiss.encode import Encoder
from gpq_faiss.errors import GpqError, UsageError
from gpq_faiss.evaluate.ranking import rank_codes
from gpq_faiss.evaluate.tables import pivot, render, summarise
from gpq_faiss.files import write_json, write_text
from gpq_faiss.methods.codewords import fit_codewords
from gpq_faiss.nn.additive import assign
from gpq_faiss.nn.committee import CommitteeNetwork
from gpq_faiss.train import train

RESULTS = Path(__file__).parent / "results"
ITEMS = 20_000
"""Unlabelled items that codewords are placed on, as in a training."""
STEP = 4096

Cell = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One way to codewords and codes.

    Attributes:
        softening: power of an item's class probabilities; None: the one of the training, by which the committee is as sure as labelled
            items that are left out say that it is right.
        turns: codewords of :func:`.fit_codewords`; else of Faiss's residual quantiser, trained with the same beam.
        beam: partial sums kept in the search for a code.
    """

    softening: float | None
    turns: bool = True
    beam: int = 8

    @property
    def name(self) -> str:
        """As in the tables."""
        placed = "turns" if self.turns else "residual quantiser"
        power = "t by left-out labels" if self.softening is None else f"t = {self.softening:g}"
        return f"{power}, {placed}, beam {self.beam}"


@dataclass(frozen=True)
class Setting:
    """What a committee is trained for, and the ways that are compared on it."""

    title: str
    preset: str
    protocol: str
    labelled: str
    ways: tuple[Way, ...]


SETTINGS = {
    "500-per-class": Setting(
        "Protocol 1, 500 labels a class",
        "recommended",
        "1",
        "500-per-class",
        (
            *(Way(power) for power in (None, 1.0, 0.8, 0.6, 0.4)),
            Way(None, beam=1),
            Way(None, turns=False),
            Way(1.0, turns=False),
        ),
    ),
    "10-per-class": Setting(
        "Protocol 1, 10 labels a class",
        "recommended",
        "1",
        "10-per-class",
        tuple(Way(power) for power in (None, 1.0, 0.6, 0.4)),
    ),
    "unseen": Setting(
        "Protocol 2",
        "unseen-classes",
        "2",
        "all",
        tuple(Way(power, turns) for turns in (False, True) for power in (1.0, 0.6)),
    ),
}


class Task:
    """A trained committee, and what it says of the items of its split."""

    def __init__(self, data: FeatureDataset, folder: Path) -> None:
        model = Encoder.load(folder).model
        self.network = cast(CommitteeNetwork, model.network)
        split = Split.load(folder / "split.json")
        self.softening = float(self.network.softening)
        self.seed = int(model.description["config"]["training"]["seed"])
        self.data = data
        placed_on = np.random.default_rng([self.seed, 1]).permutation(split.unlabelled)[:ITEMS]
        labels = data.require_labels()
        self.query_labels, self.database_labels = labels.take(split.query), labels.take(split.database)
        self.queries, self.database, self.placed_on = (
            self._said(rows) for rows in (split.query, split.database, np.sort(placed_on))
        )

    @torch.inference_mode()
    def _said(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Features and posteriors."""
        blocks = (self.data.read(rows[start : start + STEP]) for start in range(0, len(rows), STEP))
        found = [self.network.features(torch.from_numpy(block)) for block in blocks]
        return torch.cat([f for f, _ in found]), torch.cat([self.network.posterior(raw) for _, raw in found])

    @torch.inference_mode()
    def measure(self, way: Way, bits: int) -> float:
        """mAP of the queries in the database."""
        net = self.network
        net.softening.fill_(self.softening if way.softening is None else way.softening)

        def targets(said: tuple[Tensor, Tensor]) -> Tensor:
            features, posterior = said
            return net.targets(features, net.softened(posterior))

        M = codebooks_for_bits(bits, 16)
        placed_on = targets(self.placed_on)
        sums = (
            fit_codewords(placed_on, M, 16, seed=self.seed)
            if way.turns
            else residual_codewords(placed_on, M, way.beam)
        )
        parts = torch.split(targets(self.database), STEP)
        codes = torch.cat([assign(part, sums, way.beam) for part in parts])
        tables = torch.einsum("qe,mke->qmk", net.targets(*self.queries), sums)
        return rank_codes(
            tables.numpy(), codes.numpy().astype(np.uint8), self.query_labels, self.database_labels
        ).map


def residual_codewords(x: Tensor, M: int, beam: int) -> Tensor:
    """Codewords float32 [M, 16, E] of Faiss's residual quantiser."""
    quantizer = faiss.ResidualQuantizer(x.shape[1], M, 4)
    quantizer.max_beam_size = beam
    quantizer.train(x.numpy())
    flat: NDArray[np.float32] = faiss.vector_to_array(quantizer.codebooks)
    return torch.from_numpy(flat.reshape(M, 16, -1).copy())


def markdown(results: dict[str, Any]) -> str:
    """The tables of means over the seeds."""
    lines = ["# Where the codewords of a committee come from: mAP of the full ranking", ""]
    for name, setting in SETTINGS.items():
        cells = [cell for cell in results["cells"] if cell["setting"] == name]
        if not cells:
            continue
        seeds = ", ".join(map(str, sorted({cell["seed"] for cell in cells})))
        means = summarise(cells, by=["way", "bits"], values=["map"])
        lines += [
            f"## {setting.title}, preset {setting.preset}, seeds {seeds}",
            "",
            render(pivot(means, "way", "bits", "map"), "markdown", digits=4),
        ]
        powers = {cell["seed"]: cell["softening"] for cell in cells if cell["way"] == Way(None).name}
        if powers:
            found = ", ".join(f"{power:.2f} (seed {seed})" for seed, power in sorted(powers.items()))
            lines += [f"By left-out labels t is {found}.", ""]
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines += [
        "t: power that class probabilities of items are raised to, before they are made to sum to 1 again; turns: beam search and least "
        "squares in turns; residual quantiser: Faiss's. CIFAR-10 features; mAP divided by all relevant items, expected value "
        "over random order within ties. Under protocol 1 these seeds' queries are others than those of the tables "
        "(but for 18 of 1,000); under protocol 2, where a seed asks for three classes of ten, up to a third are the same.",
        "",
        f"Machine: {machine['cpu']}, {machine['cores']} cores ({machine['threads']['torch']} used, shared with other jobs), "
        f"{machine['memory_gib']} GiB, {machine['gpu'] or 'no GPU'}, {machine['os']}; {versions}.",
        "",
        "Command: `python benchmarks/codewords.py`",
    ]
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--bits", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of features.npy and labels.npy (default: $GPQ_DATA/cifar10-features)",
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gpq-codewords")
    parser.add_argument("--out", type=Path, default=RESULTS / "codewords.json", help=".md lies beside it")
    return parser.parse_args()


def main() -> None:
    """Train what is missing, place codewords in every way, keep each figure, write the tables."""
    options = parse()
    if options.data is None:
        if "GPQ_DATA" not in os.environ:
            raise UsageError(
                "no data: pass --data FOLDER, or set GPQ_DATA to the folder that holds cifar10-features"
            )
        options.data = Path(os.environ["GPQ_DATA"]) / "cifar10-features"
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    data = open_data(f"features:{options.data / 'features.npy'}", labels=str(options.data / "labels.npy"))
    assert isinstance(data, FeatureDataset)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"cells": []}
    results["machine"] = describe_machine()
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.settings:
        setting = SETTINGS[name]
        for seed in options.seeds:
            config = merge(preset(setting.preset), {"training": {"seed": seed}})
            folder = options.work / f"{name}-seed-{seed}"
            train(
                data, folder, config=config, protocol=setting.protocol, labelled=setting.labelled, resume=True
            )
            task = Task(data, folder)
            for way in setting.ways:
                for bits in options.bits:
                    cell: Cell = {"setting": name, "seed": seed, "way": way.name, "bits": bits}
                    if any(cell.items() <= there.items() for there in results["cells"]):
                        continue
                    power = task.softening if way.softening is None else way.softening
                    results["cells"].append(cell | {"softening": power, "map": task.measure(way, bits)})
                    write_json(options.out, results)
    write_text(options.out.with_suffix(".md"), markdown(results))
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    try:
        main()
    except GpqError as error:
        sys.exit(f"codewords.py: {error}")
