"""NUS-WIDE at its true size, end to end: real labels, simulated features, both protocols.

    OMP_NUM_THREADS=1 python benchmarks/nuswide.py            # labels: $GPQ_DATA/nuswide

195,834 images of 21 concepts. Protocol 1: 2,100 queries, 10,500 labelled, the rest is the database. Protocol 2: train75, test75,
train25, test25 of 15 seen and 6 unseen concepts. The features are *simulated*, so the mAP says nothing about images; only
sizes, times and memory of the stages are meaningful. Also counts the parts of protocol 2 under each rule for images of several
concepts. Cells are written when done; a second run computes missing ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from common import data_path, describe_machine, make_parser, read_results, run_main, save
from numpy.typing import NDArray
from nuswide_data import SIMULATED, as_dataset, read_labels, simulate

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.codes.encode import encode as encode_vectors
from gpq_faiss.codes.scores import score_tables
from gpq_faiss.config import codebooks_for_bits, preset
from gpq_faiss.data.base import FeatureDataset
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.protocols import RULES, Split, make_split, unseen_items
from gpq_faiss.encoder import Encoder
from gpq_faiss.evaluation.ranking import RankingResult, rank_codes
from gpq_faiss.evaluation.tables import render
from gpq_faiss.files import fingerprint
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.methods.pq import PQ
from gpq_faiss.stages.train import train

TITLE = "NUS-WIDE at true size: real labels, simulated features"
METHODS = ("gpq", "pq")
PRESET = {"1": "recommended", "2": "unseen-classes"}
# Protocol 2 in the paper's table 1; under both protocols its images add up to the same number.
PAPER = {"queries": 35_272, "labelled": 48_956, "database": 85_415}
SEEN = 15
K, SEARCHED = 100, 1000  # top k, and number of queries to time

Cell = dict[str, Any]


# ---- rules of protocol 2


def count_rules(labels: Labels) -> list[dict[str, Any]]:
    """Share of queries under each rule, in the mean over *every* choice of the unseen concepts.

    Besides :data:`RULES` these are counted: the side of an image's rarest or commonest concept, and leaving out images with
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
    paper = PAPER["queries"] / PAPER["database"]
    return {
        "rule": name,
        "choices": len(share),
        "queries": float(share.mean()) * database,
        "database": database,
        "queries / database": float(share.mean()),
        "deviation": float(share.std()),
        "ratio to paper": float(share.mean()) / paper,
    }


# ---- the path


class Stages:
    """Wall and CPU seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds[name] = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


@dataclasses.dataclass(frozen=True)
class Task:
    """Data and split of a cell."""

    data: FeatureDataset
    split: Split
    folder: Path
    bits: int
    threads: int

    @property
    def labels(self) -> Labels:
        return self.data.require_labels()

    def rank(self, tables: NDArray[np.float32], codes: NDArray[np.uint8]) -> RankingResult:
        """Of all queries over the whole database."""
        yq, yb = self.labels.take(self.split.query), self.labels.take(self.split.database)
        return rank_codes(tables, codes, yq, yb, threads=self.threads)


def run_gpq(task: Task, stages: Stages) -> RankingResult:
    """Train, encode, index, search and evaluate with the protocol's preset."""
    base = preset(PRESET[task.split.name])
    quantizer = dataclasses.replace(
        base.quantizer, codebooks=codebooks_for_bits(task.bits, base.quantizer.codewords)
    )
    with tempfile.TemporaryDirectory(dir=task.folder) as scratch:
        with stages("train"):
            model = train(
                task.data,
                Path(scratch) / "model",
                config=dataclasses.replace(base, quantizer=quantizer),
                labelled="500-per-class" if task.split.name == "1" else "all",
                protocol=task.split.name,
            )
        encoder = Encoder.load(model)
    Z = encoder.model.codebooks
    M, size, _ = Z.shape
    with stages("encode"):
        _, xq = encoder.embed_rows(task.data, task.split.query, queries=True)
        parts = [encode_vectors(vectors, Z) for _, vectors in encoder.batches(task.data, task.split.database)]
        codes = np.concatenate(parts)
    with stages("index"):
        engine = MemoryIndex.build(codes, Z, ids=task.split.database)
    with stages("search"):
        engine.search(xq[:SEARCHED], K, threads=task.threads)
    with stages("evaluate"):
        return task.rank(score_tables(xq, Z), unpack_codes(codes, M, size))


def run_pq(task: Task, stages: Stages) -> RankingResult:
    """The same with product quantisation of the features."""
    method = PQ(task.bits, seed=0)
    with stages("train"):
        method.fit(task.data.read(np.sort(np.concatenate([task.split.labelled, task.split.unlabelled]))))
    with stages("encode"):
        xq, xb = task.data.read(task.split.query), task.data.read(task.split.database)
        packed = method.encode(xb)
    with stages("index"):
        index = method.index()
        index.add(xb)
    with stages("search"):
        index.search(xq[:SEARCHED], K)
    with stages("evaluate"):
        return task.rank(method.score_tables(xq), unpack_codes(packed, method.M, method.K))


RUN: dict[str, Callable[[Task, Stages], RankingResult]] = {"gpq": run_gpq, "pq": run_pq}


def cell_key(cell: Cell) -> tuple[Any, ...]:
    """Key of a finished cell."""
    return cell["protocol"], cell["method"], cell["bits"], cell["split_hash"], cell["data"]


def fill(results: dict[str, Any], data: FeatureDataset, folder: Path, options: argparse.Namespace) -> None:
    """Compute missing cells."""
    done = {cell_key(cell) for cell in results["cells"]}
    for protocol in options.protocols:
        split = make_split(data, protocol)
        results["splits"][protocol] = {
            "hash": split.hash,
            "queries": len(split.query),
            "labelled": len(split.labelled),
            "unlabelled": len(split.unlabelled),
            "database": len(split.database),
            "unseen concepts": [
                name
                for c, name in enumerate(results["concepts"])
                if split.seen_classes is not None and c not in split.seen_classes
            ],
        }
        for bits, method in itertools.product(options.bits, METHODS):
            cell: Cell = {
                "protocol": protocol,
                "method": method,
                "bits": bits,
                "split_hash": split.hash,
                "data": results["data"],
            }
            if cell_key(cell) in done:
                continue
            stages = Stages()
            result = RUN[method](Task(data, split, folder, bits, options.threads), stages)
            cell |= {
                "map": result.map,
                "distinct": result.n_distinct,
                "seconds": stages.seconds,
                "convention": result.convention,
            }
            cell["without_relevant"] = result.queries_without_relevant
            results["cells"].append(cell)
            save(results, options.out, markdown)
            print(f"protocol {protocol}, {bits} bits, {method}: mAP {result.map:.4f}", flush=True)


def markdown(results: dict[str, Any]) -> str:
    """Tables and explanations."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = [
        f"# {TITLE}",
        "",
        f"{results['images']:,} images with one of the 21 most frequent concepts, {results['label_sets']:,} distinct label sets. Labels "
        f"are the real ones. Features are not: {results['features']}. **The mAP therefore says nothing about images**; sizes, times "
        "and counts are real.",
        "",
        "## Protocol 2: which side an image of several concepts is on",
        "",
        f"15 seen and 6 unseen concepts; mean over all {results['rules'][0]['choices']:,} choices of the 6. The paper has "
        f"{PAPER['queries']:,} queries and {PAPER['database']:,} database items: {PAPER['queries'] / PAPER['database']:.3f}. The "
        "database is half of the images under every rule (train25 + test75), so that quotient is what a rule decides; the paper's "
        f"table 1 adds up to {sum(PAPER.values()):,} images under both protocols, fewer than here. Nearest in the mean: "
        "`any`, the default.",
        "",
        render(
            [
                {
                    "on the unseen side if": _RULE_TEXT[row["rule"]],
                    "name": f"`{row['rule']}`" if row["rule"] in RULES else "–",
                    "queries": f"{row['queries']:,.0f}",
                    "database": f"{row['database']:,.0f}",
                    "queries / database": f"{row['queries / database']:.3f} ± {row['deviation']:.3f}",
                    "of the paper's": f"{row['ratio to paper']:.2f}",
                }
                for row in results["rules"]
            ],
            "markdown",
        ),
        "± is the deviation between choices: which concepts are unseen matters more than the rule. Seed 0, the default, draws:",
        "",
        render(
            [
                {
                    "rule": f"`{row['rule']}`",
                    **{k: f"{row[k]:,}" for k in ("train75", "test75", "train25", "test25")},
                }
                for row in results["seed0"]
            ],
            "markdown",
        ),
    ]
    for protocol, split in results["splits"].items():
        parts += [f"## Protocol {protocol}", ""]
        unseen = (
            f"; unseen concepts: {', '.join(split['unseen concepts'])}" if split["unseen concepts"] else ""
        )
        parts += [
            f"{split['queries']:,} queries, {split['labelled']:,} labelled, {split['unlabelled']:,} unlabelled, database "
            f"{split['database']:,}{unseen}. Split {split['hash']} (seed 0).",
            "",
        ]
        rows = []
        for cell in sorted(
            (c for c in results["cells"] if c["protocol"] == protocol), key=lambda c: (c["bits"], c["method"])
        ):
            seconds = cell["seconds"]
            rows.append(
                {
                    "bits": cell["bits"],
                    "method": cell["method"],
                    "mAP": f"{cell['map']:.4f}",
                    "distinct codes": f"{cell['distinct']:,}",
                    **{name: f"{seconds[name]['wall']:.1f} ({seconds[name]['cpu']:.1f})" for name in seconds},
                }
            )
        parts += [render(rows, "markdown")]
    cells = results["cells"]
    parts += [
        f"Seconds of each stage, CPU seconds in brackets (the machine was shared with other work). Search: top {K} of {SEARCHED:,} "
        f"queries, exact. Evaluate: all queries over the whole database, {results['threads']} threads. "
        f"{cells[0]['convention'] if cells else ''}; relevant: shares a label. GPQ has the preset "
        + " and ".join(f"`{name}` under protocol {protocol}" for protocol, name in PRESET.items())
        + ".",
        "",
        "Under protocol 2 a training can lose to PQ here: the simulated directions of concepts are independent, so nothing that is "
        "learnt of the seen ones serves the others. For images nothing follows from that either.",
        "",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['gpu'] or 'no GPU'}, {machine['os']}; "
        f"{versions}.",
        "",
        f"Command: `{results['command']}`",
        "",
    ]
    return "\n".join(parts)


_RULE_TEXT = {
    "any": "any of its concepts is unseen",
    "half": "at least half of them are",
    "majority": "more than half of them are",
    "all": "all of them are",
    "rarest": "its rarest concept is",
    "commonest": "its commonest concept is",
    "mixed left out": "all are; images of both sides are left out",
}


def seed0(labels: Labels, data: FeatureDataset) -> list[dict[str, Any]]:
    """Sizes of the four parts under each rule, for the default seed."""
    rows = []
    for rule in RULES:
        split = make_split(data, "2", rule=rule)
        assert split.seen_classes is not None
        unseen = np.ones(labels.n_classes, dtype=bool)
        unseen[list(split.seen_classes)] = False
        hidden = unseen_items(labels, unseen, rule)[split.database]
        rows.append(
            {
                "rule": rule,
                "train75": len(split.labelled),
                "test75": int((~hidden).sum()),
                "train25": int(hidden.sum()),
                "test25": len(split.query),
            }
        )
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "nuswide.json")
    parser.add_argument("--bits", type=int, nargs="+", default=[12, 24, 32, 48])
    parser.add_argument("--protocols", nargs="+", default=["1", "2"], choices=["1", "2"])
    parser.add_argument("--threads", type=int, default=2, help="of search and evaluation")
    parser.add_argument("--data", type=Path, default=data_path("nuswide"), help="default: $GPQ_DATA/nuswide")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Count the rules, then fill the grid."""
    options = parse(arguments)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(options.threads)
    labels = read_labels(options.data)
    with tempfile.TemporaryDirectory(prefix="gpq-nuswide-") as scratch:
        data = as_dataset(labels, simulate(labels), Path(scratch))
        earlier = read_results(options.out, {"cells": []})
        results: dict[str, Any] = {
            "title": TITLE,
            "machine": describe_machine(),
            "command": "OMP_NUM_THREADS=1 python benchmarks/nuswide.py",
            "images": len(labels),
            "concepts": list(labels.class_names),
            "label_sets": len(np.unique(labels.packed, axis=0)),
            "features": SIMULATED,
            "data": fingerprint(SIMULATED, labels.fingerprint()),
            "threads": options.threads,
            "rules": count_rules(labels),
            "seed0": seed0(labels, data),
            "splits": {},
            "cells": earlier["cells"],
        }
        fill(results, data, Path(scratch), options)
        save(results, options.out, markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)
