"""Design choices of class-posterior codes: kind of class codes, number of class codebooks, weight of features, tempering, propagation.

    OMP_NUM_THREADS=1 python benchmarks/posterior.py            # data: $GPQ_DATA; about an hour of one core

Basis of the choices in ``gpq_faiss/nn/posterior.py``, ``methods/posterior.py`` and ``methods/posterior_codebooks.py``. One ensemble of
class networks is trained per data set and seed; only its codebooks are then fitted for each variation and code length, and items and
queries are encoded and ranked. Queries are those of protocol 1 for seeds not used in any table of results, without the queries of the
seeds 0, 1 and 2. Trainings are kept in ``--work``, figures in the JSON; neither is computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from common import (
    data_path,
    describe_machine,
    make_parser,
    open_features,
    require_data,
    run_main,
    use_threads,
)
from numpy.typing import NDArray
from torch import Tensor

from gpq_faiss.config import codebooks_for_bits, merge, preset, to_dict
from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import Split, make_split
from gpq_faiss.data.reader import Reader
from gpq_faiss.encoder import Encoder
from gpq_faiss.evaluation.likeness import Neighbours, likeness, nearest, spaced_queries
from gpq_faiss.evaluation.ranking import RankingResult, ScoreFunction, rank_codes
from gpq_faiss.evaluation.tables import render, summarise
from gpq_faiss.files import read_json, write_json, write_text
from gpq_faiss.methods.codewords import fit_codewords
from gpq_faiss.methods.leave_one_out import MOST_ROWS, least_error, leave_one_out
from gpq_faiss.methods.posterior import LEAST_SHARE
from gpq_faiss.methods.posterior_codebooks import ClassCodebooks, fit_each_kind, weights_of_parts
from gpq_faiss.methods.propagation import propagate
from gpq_faiss.nn.additive import query_form
from gpq_faiss.nn.posterior import PosteriorNetwork, count_class_codebooks
from gpq_faiss.report.plots import plot_tradeoff
from gpq_faiss.stages.train import train
from gpq_faiss.training.vectors import to_input

TITLE = "Class-posterior codes: the choices behind them"
TABLE_SEEDS = (0, 1, 2)
"""Seeds of the tables of results, whose queries are not used here."""
QUERIES, LIKENESS_QUERIES = 500, 400
"""Evenly spaced ones of those that are left."""
ITEMS = 20_000
"""Unlabelled items for fitting codebooks, as in training, and for measuring the gate."""
BITS = (12, 24, 48)
WEIGHTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.3)
STEP = 4096

Codes = Literal["probabilities", "logits", "chosen"]
Power = Literal["1", "root", "calibrated"]
Cell = dict[str, Any]
FIGURES = ("map", "nn10_at_100", "within_class", "distinct")


@dataclass(frozen=True)
class Task:
    """A data set and its labels.

    Attributes:
        title: for the tables.
        folder: of ``features.npy`` and ``labels.npy`` below the data folder; empty: the digits of scikit-learn.
        labelled: as for ``gpq train --labelled``.
    """

    title: str
    folder: str
    labelled: str

    def open(self, data: Path) -> Dataset:
        """The data set."""
        if not self.folder:
            return open_data("digits")
        root = data / self.folder
        return open_features(root / "features.npy", root / "labels.npy")


TASKS = {
    "digits": Task("Digits, 20 labels per class", "", "20-per-class"),
    "omniglot": Task("Omniglot features, 242 classes, 10 labels per class", "omniglot", "10-per-class"),
    "cifar10": Task("CIFAR-10 features, 500 labels per class", "cifar10-features", "500-per-class"),
    "cifar10-few": Task("CIFAR-10 features, 10 labels per class", "cifar10-features", "10-per-class"),
}


@dataclass(frozen=True)
class Variation:
    """One way to fit codebooks.

    Attributes:
        bits: of a code.
        class_codebooks: number of codebooks that encode the class.
        codes: kind of class codes; chosen: by expected mAP, as in training.
        power: of the tempering; calibrated: by the accuracy on left-out labels; root: its square root.
        feature_weight: as ``posterior.feature_weight``; no effect if all codebooks encode the class.
    """

    bits: int
    class_codebooks: int
    codes: Codes
    power: Power
    feature_weight: float


def standard(bits: int, classes: int, feature_weight: float, class_codebooks: int | None = None) -> Variation:
    """The variation of a training with this weight, with the given or default number of class codebooks."""
    M = codebooks_for_bits(bits)
    A = count_class_codebooks(M, classes) if class_codebooks is None else class_codebooks
    if not feature_weight or A == M:
        return Variation(bits, M, "chosen", "calibrated", 0.0)
    return Variation(bits, A, "chosen", "root", feature_weight)


def variations(classes: int) -> dict[str, list[tuple[str, Variation]]]:
    """The rows of every table: name of the row and what it shows, the same one in several tables where it has several names."""
    weight = preset("recommended").posterior.feature_weight
    kinds = {"probabilities": "sums of probabilities", "logits": "sums of logits", "chosen": "chosen"}
    longest = codebooks_for_bits(max(BITS))
    numbers = {
        "half": longest // 2,
        "rule": count_class_codebooks(longest, classes),
        "all but two": longest - 2,
        "all": longest,
    }
    powers = {"1": "1", "root": "square root of calibrated", "calibrated": "calibrated"}
    shared = [bits for bits in BITS if standard(bits, classes, weight).feature_weight]
    return {
        "codes": [
            (kinds[codes], Variation(bits, codebooks_for_bits(bits), cast(Codes, codes), "calibrated", 0.0))
            for codes in kinds
            for bits in BITS
        ],
        "number": [(f"{name}: {A}", standard(max(BITS), classes, weight, A)) for name, A in numbers.items()],
        "weight": [(f"{w:g}", standard(bits, classes, w)) for bits in shared for w in WEIGHTS],
        "power": [
            (name, Variation(v.bits, v.class_codebooks, "chosen", cast(Power, power), v.feature_weight))
            for power, name in powers.items()
            for v in (standard(bits, classes, weight) for bits in BITS)
        ],
    }


@dataclass(frozen=True)
class Seen:
    """Features float32 [n, width] and class probabilities float32 [n, C] of items."""

    features: Tensor
    posterior: Tensor

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Some rows of both at a time."""
        return zip(torch.split(self.features, STEP), torch.split(self.posterior, STEP), strict=True)


class Committee:
    """Trained class networks, and their outputs for the items of the split."""

    def __init__(self, data: Dataset, folder: Path, task: Task) -> None:
        model = Encoder.load(folder).model
        self.network = cast(PosteriorNetwork, model.network)
        self.data = data
        self.image_size = model.image_size
        self.split = Split.load(folder / "split.json")
        self.seed = int(model.description["config"]["training"]["seed"])
        self.K = self.network.tables.shape[1]
        labels = data.require_labels()
        used = [make_split(data, "1", seed=seed, labelled=task.labelled).query for seed in TABLE_SEEDS]
        left = np.setdiff1d(self.split.query, np.concatenate(used))
        self.query_rows = left[spaced_queries(len(left), QUERIES)]
        self.query_labels = labels.take(self.query_rows)
        self.database_labels = labels.take(self.split.database)
        sample = np.random.default_rng([self.seed, 1]).permutation(self.split.unlabelled)[:ITEMS]
        self.sample_rows = np.sort(sample)
        self.fits: dict[tuple[int, float], tuple[ClassCodebooks, ...]] = {}

    def inputs(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Inputs of the items, float32 [n, W]: features or pixels."""
        with Reader(self.data, self.image_size) as reader:
            values, _ = reader.fetch(rows)
        return np.asarray(values.reshape(len(values), -1), np.float32)

    @torch.inference_mode()
    def see(self, rows: NDArray[np.int64]) -> Seen:
        """Outputs of the class networks for the items."""
        blocks = [rows[start : start + STEP] for start in range(0, len(rows), STEP)]
        with Reader(self.data, self.image_size) as reader:
            found = [
                self.network.features(to_input(values, torch.device("cpu")))
                for values, _ in reader.stream(blocks)
            ]
        posterior = [self.network.posterior(raw) for _, raw in found]
        return Seen(torch.cat([features for features, _ in found]).clone(), torch.cat(posterior).clone())

    @cached_property
    def queries(self) -> Seen:
        """The measured queries."""
        return self.see(self.query_rows)

    @cached_property
    def database(self) -> Seen:
        """The database items."""
        return self.see(self.split.database)

    @cached_property
    def sample(self) -> Seen:
        """Unlabelled items for fitting codebooks."""
        return self.see(self.sample_rows)

    @torch.inference_mode()
    def centred(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Centred inputs of the class networks, float32 [n, W], used for leave-one-out and propagation."""
        with Reader(self.data, self.image_size) as reader:
            values, _ = reader.fetch(rows)
        x = self.network.backbone.input(to_input(values, torch.device("cpu"))).flatten(1)
        return np.asarray((x - x.mean(dim=0)).numpy(), np.float32)

    def shape(self, M: int, A: int) -> PosteriorNetwork:
        """The network with other numbers of codebooks, not yet fitted."""
        net = self.network
        generator = torch.Generator().manual_seed(self.seed)
        width = net.principal_axes.shape[0]
        return PosteriorNetwork(
            net.backbone,
            net.N,
            (M, self.K, net.d),
            net.C,
            width=width,
            beta=net.beta,
            A=A,
            generator=generator,
        )

    @cached_property
    def calibrated(self) -> float:
        """The power that matches the mean confidence to the accuracy on left-out labels."""
        rows = self.split.labelled[:: -(-len(self.split.labelled) // MOST_ROWS)]
        accuracy = leave_one_out(self.centred(rows), self.data.require_labels().dense(rows)).accuracy
        net = self.shape(1, 1)
        net.fit_power(self.sample.posterior, accuracy)
        return float(net.power)

    def power(self, name: Power) -> float:
        """The numeric power of a tempering."""
        return {"1": 1.0, "root": math.sqrt(self.calibrated), "calibrated": self.calibrated}[name]

    def class_codebooks(self, net: PosteriorNetwork, codes: Codes) -> ClassCodebooks:
        """Those of a kind, for the network's number and power; each pair is fitted once."""
        key = net.A, float(net.power)
        if key not in self.fits:
            p = self.sample.posterior
            with torch.enable_grad():
                self.fits[key] = fit_each_kind(p, net.tempered(p), net.A, self.K, seed=self.seed)
        kinds = self.fits[key]
        if codes == "chosen":
            return max(kinds, key=lambda kind: kind.expected_map)
        (kind,) = (kind for kind in kinds if kind.by_logits == (codes == "logits"))
        return kind

    def fit(self, variation: Variation) -> tuple[PosteriorNetwork, ClassCodebooks]:
        """The network with the codebooks of a variation, as after training."""
        M = codebooks_for_bits(variation.bits, self.K)
        net = self.shape(M, variation.class_codebooks).eval()
        features, posterior = self.sample.features, self.sample.posterior
        net.power.fill_(self.power(variation.power))
        net.fit_residual(features, posterior)
        found = self.class_codebooks(net, variation.codes)
        residual = net.residual(features, posterior)
        words = residual.new_zeros(0, self.K, residual.shape[1])
        if net.A < M:
            words = fit_codewords(residual, M - net.A, self.K, seed=self.seed)
        tempered = net.tempered(posterior)
        weights = weights_of_parts(found, words, posterior, tempered, residual, variation.feature_weight)
        net.place(found.logits, found.tables, words, weights, by_logits=found.by_logits)
        return net, found

    @torch.no_grad()
    def measure(self, variation: Variation) -> Cell:
        """Fit, encode and rank: the figures of a variation."""
        net, found = self.fit(variation)
        codes = torch.cat([net.assign(features, p) for features, p in self.database.blocks()])
        packed = codes.numpy().astype(np.uint8)
        vectors = query_form(net.query_targets(self.queries.features, self.queries.posterior), net.basis)
        tables = torch.einsum("qmd,mkd->qmk", vectors, net.pq_codewords).numpy()
        ranking = rank_codes(tables, packed, self.query_labels, self.database_labels)
        return {
            "kind": "logits" if found.by_logits else "probabilities",
            "expected_map": found.expected_map,
            "power_value": self.power(variation.power),
            **self.figures(tables, packed, ranking),
        }

    def floats(self) -> Cell:
        """The figures of p·p' without codes."""
        p, items = self.queries.posterior.numpy(), self.database.posterior.numpy()

        def scores(queries: NDArray[np.int64], numbers: NDArray[np.uint8]) -> NDArray[np.float32]:
            rows = np.ascontiguousarray(numbers).view("<u4").ravel()
            return np.asarray(p[queries] @ items[rows].T, np.float32)

        # Every item has its own code: its number.
        numbers = np.arange(len(items), dtype="<u4").view(np.uint8).reshape(-1, 4)
        ranking = rank_codes(scores, numbers, self.query_labels, self.database_labels)
        return self.figures(scores, numbers, ranking)

    @cached_property
    def neighbours(self) -> Neighbours:
        """Nearest items of some queries by their inputs."""
        some = spaced_queries(len(self.query_rows), LIKENESS_QUERIES)
        rows = self.split.database
        blocks = (self.inputs(rows[start : start + STEP]) for start in range(0, len(rows), STEP))
        return nearest(
            some,
            self.inputs(self.query_rows[some]),
            blocks,
            self.query_labels.take(some),
            self.database_labels,
        )

    def figures(
        self, scorer: NDArray[np.float32] | ScoreFunction, codes: NDArray[np.uint8], ranking: RankingResult
    ) -> Cell:
        """The stored figures of a ranking."""
        like = likeness(scorer, codes, self.neighbours, n_queries=len(self.query_rows))
        return {
            "map": ranking.map,
            "nn10_at_100": like.nn10_at_100,
            "within_class": like.within_class,
            "distinct": like.distinct_in_tops,
            "convention": ranking.convention,
        }

    def gate(self) -> Cell:
        """Accuracy of ridge regression and neighbours on left-out labels and on unlabelled items."""
        labels = self.data.require_labels()
        rows = np.union1d(self.split.labelled, self.sample_rows)
        x, y = self.centred(rows), labels.dense(rows)
        seen = np.isin(rows, self.split.labelled)
        at = np.flatnonzero(seen)
        found, neighbours = propagate(x, at, y[seen])
        ridge = leave_one_out(x[seen], y[seen]).accuracy
        weight = preset("recommended").posterior.propagation * y.shape[1] / len(at)
        return {
            "labels": len(at),
            "items": int((~seen).sum()),
            "weight": weight,
            "ridge_left_out": ridge,
            "ridge_true": right(ridge_predictions(x[seen], y[seen], x[~seen]), y[~seen]),
            "neighbours_left_out": neighbours,
            "neighbours_true": right(found[~seen], y[~seen]),
            "passes": neighbours >= LEAST_SHARE * ridge,
        }


def ridge_predictions(
    x: NDArray[np.float32], y: NDArray[np.float32], others: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Predictions for ``others`` [q, W] of ridge regression of labels ``y`` [n, C] on ``x`` [n, W] with the least leave-one-out error."""
    sigma, _ = least_error(x, y)
    mean = x.mean(axis=0, dtype=np.float64)
    X = x - mean
    gram = X.T @ X + len(x) * sigma**2 * np.eye(x.shape[1])
    predicted: NDArray[np.float64] = (others - mean) @ np.linalg.solve(gram, X.T @ (y - y.mean(axis=0)))
    predicted += y.mean(axis=0)
    return predicted


def right(predicted: NDArray[np.float64], y: NDArray[np.float32]) -> float:
    """Share of items whose likeliest class is correct; items without prediction count as wrong."""
    known = predicted.any(axis=1)
    return float((known & (y[np.arange(len(y)), predicted.argmax(axis=1)] > 0)).mean())


# ---------------------------------------------------------------------------------------------------------- the report


def markdown(results: dict[str, Any]) -> str:
    """All tables of means over the seeds, with explanations."""
    cells: list[Cell] = results["cells"]
    lines = [f"# {TITLE}", ""]
    for name, task in TASKS.items():
        own = [cell for cell in cells if cell["task"] == name]
        if own:
            lines += _section(task, own)
    gates = summarise(
        results["gates"],
        by=["task"],
        values=["ridge_left_out", "ridge_true", "neighbours_left_out", "neighbours_true"],
    )
    for gate in gates:
        own = [g for g in results["gates"] if g["task"] == gate["task"]]
        gate["weight"] = f"{own[0]['weight']:.2f}"
        gate["share"] = ", ".join(f"{g['neighbours_left_out'] / g['ridge_left_out']:.2f}" for g in own)
        gate["task"] = TASKS[gate["task"]].title
    headers = {name: name.replace("_", ", ").replace("left, out", "left out") for name in (gates or [{}])[0]}
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines += [
        "## The gate of label propagation",
        "",
        render(gates, "markdown", headers=headers, digits=3),
        "How often the class that is predicted is right: of labelled items that are left out one at a time (this the training knows), "
        f"and of up to {ITEMS:,} unlabelled items (this it does not), by a ridge regression on the labels and by labels that are "
        "propagated over neighbours. Labels are propagated where neighbours have at least "
        f"{LEAST_SHARE} of the ridge regression's accuracy on left-out labels. Share: that ratio, one value a seed. Weight: of what "
        "is propagated, against the labels; below 0.15 nothing is, whatever neighbours know.",
        "",
        "## How to read it",
        "",
        "One committee for each data set and seed, of the preset `recommended`; between the rows of a data set only codebooks "
        "differ. Means ± deviation over the seeds, if there are several. "
        f"Rankings: {results['convention']}, of up to {QUERIES} queries, evenly spaced ones of those of protocol 1 that are no query of "
        f"the seeds {', '.join(map(str, TABLE_SEEDS))}. NN10@100: share of a query's ten nearest items by the cosine of the inputs "
        "that are among its first 100 results, expected value over random order within ties, of up to "
        f"{LIKENESS_QUERIES} of these queries; within class: the same among items of the query's class (1 where these are 100 or "
        "fewer); distinct: different items among the first ten results of these queries, ties in the order of items. "
        "Codes are chosen (`chosen`) by the expected mAP of held-out unlabelled items by the committee's probabilities. Power 1 "
        "leaves class probabilities as they are; with the calibrated power they are as sure as left-out labels say that they are "
        "right.",
        "",
        f"Machine: {machine['cpu']}, {machine['cores']} cores ({machine['threads']['torch']} used, shared with other jobs), "
        f"{machine['memory_gib']} GiB, {machine['gpu'] or 'no GPU'}, {machine['os']}; {versions}.",
        "",
        "Command: `python benchmarks/posterior.py`",
    ]
    return "\n".join(lines) + "\n"


def _section(task: Task, cells: list[Cell]) -> list[str]:
    """The tables of one data set."""
    tables = variations(cells[0]["classes"])
    seeds = ", ".join(map(str, sorted({cell["seed"] for cell in cells})))
    queries, items = cells[0]["queries"], cells[0]["items"]
    floats = [cell for cell in cells if cell["variation"] is None]
    lines = [
        f"## {task.title}",
        "",
        f"{'Seeds' if ',' in seeds else 'Seed'} {seeds}; {queries} queries, {items:,} items in the database.",
        "",
    ]

    wanted = len({variation for table in tables.values() for _, variation in table}) + 1
    for seed in sorted({cell["seed"] for cell in cells}):
        there = sum(cell["seed"] == seed for cell in cells)
        if there < wanted:
            lines += [f"**Not finished:** seed {seed} has {there} of {wanted} measurements.", ""]

    def rows(table: str) -> Iterator[tuple[str, int, Cell]]:
        for row, variation in tables[table]:
            for cell in cells:
                if cell["variation"] == asdict(variation):
                    yield row, variation.bits, cell

    def across(table: str, title: str) -> list[str]:
        found = [{title: row, "bits": bits, "map": cell["map"]} for row, bits, cell in rows(table)]
        if table == "codes":
            name = "floats, p·p' (no code)"
            found += [{title: name, "bits": bits, "map": cell["map"]} for bits in BITS for cell in floats]
        wide: dict[str, dict[str, Any]] = {}
        for mean in summarise(found, by=[title, "bits"], values=["map"]):
            wide.setdefault(mean[title], {title: mean[title]})[f"{mean['bits']} bits"] = mean["map"]
        return [render(list(wide.values()), "markdown", digits=4)]

    def figures(table: str, title: str) -> list[str]:
        found = [
            {"bits": bits, title: row, **{name: cell[name] for name in FIGURES}}
            for row, bits, cell in rows(table)
        ]
        headers = {"map": "mAP", "nn10_at_100": "NN10@100", "within_class": "within class"}
        means = summarise(found, by=["bits", title], values=FIGURES)
        for mean in means:
            mean["distinct"] = round(mean["distinct"].mean)
        return [render(means, "markdown", headers=headers, digits=4)]

    kinds = {
        bits: ", ".join(cell["kind"] for row, b, cell in rows("codes") if b == bits and row == "chosen")
        for bits in BITS
    }
    return [
        *lines,
        "Kind of class codes, all codebooks for the class, mAP:",
        "",
        *across("codes", "class codes"),
        "Chosen: " + "; ".join(f"{bits} bits {kind}" for bits, kind in kinds.items() if kind) + ".",
        "",
        "Number of class codebooks:",
        "",
        *figures("number", "class codebooks"),
        "Weight of the features (0: all codebooks for the class):",
        "",
        *(
            figures("weight", "feature_weight")
            if tables["weight"]
            else ["The rule gives all codebooks to the class.", ""]
        ),
        "Power that tempers class probabilities, mAP:",
        "",
        *across("power", "power"),
    ]


def plot(results: dict[str, Any], out: Path) -> Path:
    """mAP against likeness: a line for each data set and code length, through the weights of features."""
    groups: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for name, task in TASKS.items():
        cells = [cell for cell in results["cells"] if cell["task"] == name]
        if not cells:
            continue
        group = groups[task.title] = {}
        for _, variation in variations(cells[0]["classes"])["weight"]:
            own = [cell for cell in cells if cell["variation"] == asdict(variation)]
            _add(group.setdefault(f"{variation.bits} bits", ([], [])), own)
        _add(
            group.setdefault("floats, p·p'", ([], [])), [cell for cell in cells if cell["variation"] is None]
        )
    return plot_tradeoff(
        groups,
        out,
        title="Weight of the features in class-posterior codes",
        x="NN10@100",
        y="mAP",
        logarithmic=False,
        overwrite=True,
    )


def _add(line: tuple[list[float], list[float]], cells: list[Cell]) -> None:
    """Add the means of the figures of some seeds to a line, if there are any yet."""
    if cells:
        line[0].append(float(np.mean([cell["nn10_at_100"] for cell in cells])))
        line[1].append(float(np.mean([cell["map"] for cell in cells])))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "posterior.json", out_help="JSON; .md and .png lie beside it")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--data",
        type=Path,
        default=data_path(),
        help="folder of cifar10-features and omniglot (default: $GPQ_DATA)",
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gpq-posterior")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run missing trainings, fit codebooks for each variation, write figures and tables after each data set and seed."""
    options = parse(arguments)
    if any(TASKS[name].folder for name in options.tasks):
        require_data(options.data, "FOLDER", "cifar10-features and omniglot")
    use_threads(options.threads)
    results: dict[str, Any] = {
        "title": TITLE,
        "machine": describe_machine(),
        "preset": to_dict(preset("recommended")),
        "convention": "",
        "cells": [],
        "gates": [],
    }
    # Results of the same preset and versions are kept.
    if options.out.exists():
        held = read_json(options.out, "the results of this benchmark")
        now = json.loads(json.dumps(results))
        if held["preset"] == now["preset"] and held["machine"]["versions"] == results["machine"]["versions"]:
            for key in ("convention", "cells", "gates"):
                results[key] = held[key]
    options.work.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for name in options.tasks:
            fill(results, name, seed, options)
    write_text(options.out.with_suffix(".md"), markdown(results))
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


def fill(results: dict[str, Any], name: str, seed: int, options: argparse.Namespace) -> None:
    """All missing variations of one trained network."""
    task = TASKS[name]
    data = task.open(options.data)
    labels = data.require_labels()

    @cache
    def committee() -> Committee:
        """Trained on demand."""
        folder = options.work / f"{name}-seed-{seed}"
        config = merge(preset("recommended"), {"training": {"seed": seed}})
        train(data, folder, config=config, protocol="1", labelled=task.labelled, resume=True)
        return Committee(data, folder, task)

    own = {"task": name, "seed": seed}
    if not any(own.items() <= gate.items() for gate in results["gates"]):
        results["gates"].append(own | committee().gate())
        write_json(options.out, results)
    every = [variation for table in variations(labels.n_classes).values() for _, variation in table]
    for variation in (None, *dict.fromkeys(every)):
        key = own | {"variation": None if variation is None else asdict(variation)}
        if any(key.items() <= cell.items() for cell in results["cells"]):
            continue
        made = committee()
        figures = made.floats() if variation is None else made.measure(variation)
        results["convention"] = figures.pop("convention")
        sizes = {
            "classes": labels.n_classes,
            "queries": len(made.query_rows),
            "items": len(made.split.database),
        }
        results["cells"].append(key | sizes | figures)
        write_json(options.out, results)
        print(json.dumps(results["cells"][-1]), flush=True)
    write_text(options.out.with_suffix(".md"), markdown(results))
    plot(results, options.out.with_suffix(".png"))


if __name__ == "__main__":
    run_main(main)
