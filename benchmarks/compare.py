"""Alternatives to this package: ranking quality against speed, on the same features with the same bytes per vector.

    pip install 'gpq-faiss[compare]'
    python benchmarks/compare.py --data cifar10-features      # features.npy [60000, 256], labels.npy [60000]

CIFAR-10 features, protocol 1. All engines are trained on the same items, and search the same items, in the same (shuffled)
order, with the same queries; GPQ's times include the network. mAP@k is computed from the ids that an engine returns,
in its order, over the real items. Queries per second are of one core, over the real items and over many more simulated
ones (mixtures of two items of one class), with all engines of a table interleaved in one run. Finished tables are kept; the
Markdown and the plots are generated from the JSON.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("LANCE_LOG", "error")  # its warnings are about its future versions

import numpy as np
from common import (
    data_path,
    describe_machine,
    make_parser,
    open_features,
    read_results,
    require_data,
    run_main,
    save,
)
from engines import (
    PACKAGES,
    Floats,
    Ids,
    Search,
    Tool,
    empty_folder,
    faiss_opq,
    flat_floats,
    gpq_engines,
    gpq_in_faiss,
    gpq_in_nanopq,
    installed,
    lancedb_lists,
    one_core,
    scann_trees,
    usearch_graphs,
)

from gpq_faiss.config import Config, codebooks_for_bits, merge, preset, to_dict
from gpq_faiss.data.base import FeatureDataset
from gpq_faiss.data.protocols import make_split
from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import UsageError
from gpq_faiss.evaluation.metrics import average_precision
from gpq_faiss.evaluation.tables import render
from gpq_faiss.faissio.export import factory_index
from gpq_faiss.faissio.model import read_model
from gpq_faiss.files import write_json
from gpq_faiss.report.plots import plot_tradeoff
from gpq_faiss.stages.export import export
from gpq_faiss.stages.train import train

TITLE = "Beside other engines: CIFAR-10 features, protocol 1"
K = 100
CUTS = (100, 1000)
LABELLED = "500-per-class"
PROTOCOL = "1"
SINGLE = 50  # single queries per timing
OURS, INSIDE, THEIRS = "this package", "GPQ's vectors in other engines", "the features as they are"
GROUPS = (OURS, INSIDE, THEIRS)
Row = dict[str, Any]


def settings(bits: int, seed: int) -> Config:
    """The preset ``recommended`` at a code length."""
    base = preset("recommended")
    codebooks = codebooks_for_bits(bits, base.quantizer.codewords)
    return merge(base, {"quantizer": {"codebooks": codebooks}, "training": {"seed": seed}})


def quality(ids: Ids, item_class: Ids, query_class: Ids) -> Row:
    """Metrics of the ids [Q, k] that an engine returns, in its order; -1 marks a missing result.

    Returns:
        For each k of :data:`CUTS` the mAP@k divided by min(k, all relevant items) and (``among_found``) by the relevant
        items in the top k; the precision at the first k; the share of places filled (``returned``).
    """
    relevant = (item_class[np.maximum(ids, 0)] == query_class[:, None]) & (ids >= 0)
    total = np.bincount(item_class, minlength=int(query_class.max()) + 1)[query_class]
    out: Row = {"returned": float((ids >= 0).mean())}
    for k in CUTS:
        cut = relevant[:, :k]
        order = np.broadcast_to(-np.arange(cut.shape[1], dtype=np.float64), cut.shape)
        among = average_precision(order, cut, k=k, denominator="relevant-in-top-k")
        share = cut.sum(axis=1) / np.maximum(np.minimum(k, total), 1)
        out[f"map_{k}"] = float((among.values * share).mean())
        out[f"map_{k}_among_found"] = among.mean
    out["precision"] = float(relevant[:, : CUTS[0]].mean())
    return out


class Bench:
    """The data of one table: a trained model, items, queries and what is relevant.

    Args:
        folder: of ``features.npy`` and ``labels.npy``.
        bits: of a code.
        seed: of split, training and shuffling.
        scratch: for the model and the exports.
    """

    def __init__(self, folder: Path, bits: int, seed: int, scratch: Path) -> None:
        data = open_features(folder / "features.npy", folder / "labels.npy")
        assert isinstance(data, FeatureDataset)
        labels = data.require_labels()
        split = make_split(data, PROTOCOL, seed=seed, labelled=LABELLED)
        self.bits = bits
        self.config = settings(bits, seed)
        self.model = train(data, scratch / "model", config=self.config, labelled=LABELLED, protocol=PROTOCOL)
        self.encoder = Encoder.load(self.model)
        self.scratch = scratch
        self._embedded: tuple[Floats, Floats] | None = None
        # Files are often sorted by class; ties in order of ids would then be sorted by class.
        base = np.random.default_rng([seed, 0]).permutation(split.database)
        pool = np.concatenate([split.labelled, split.unlabelled])
        self.items, self.queries = data.read(base), data.read(split.query)
        self.train, self.unit_queries = unit(data.read(np.sort(pool))), unit(self.queries)
        classes = labels.dense(dtype=bool).argmax(axis=1)
        self.item_class, self.query_class = classes[base], classes[split.query]
        self.facts = {
            "seed": seed,
            "items": len(base),
            "queries": len(split.query),
            "labelled": len(split.labelled),
            "training_items": len(pool),
            "preset": to_dict(self.config),
        }

    def embed(self, x: Floats) -> Floats:
        """GPQ vectors of features, float32 [n, M * d]. Those of items are cached for the next engine."""
        if len(x) <= len(self.queries):
            return self.encoder.embed(x, queries=True)[0]
        if self._embedded is None or self._embedded[0] is not x:
            parts = [self.encoder.embed(x[i : i + 4096])[0] for i in range(0, len(x), 4096)]
            self._embedded = (x, np.concatenate(parts))
        return self._embedded[1]

    def asked(self, group: str) -> Floats:
        """The queries as input of a group: features for the network, or normalised features."""
        return self.unit_queries if group == THEIRS else self.queries

    def simulate(self, n: int, seed: int = 1) -> Floats:
        """Mixtures of two items of one class, float32 [n, width]."""
        rng = np.random.default_rng([seed, n])
        members = [np.flatnonzero(self.item_class == c) for c in range(int(self.item_class.max()) + 1)]
        out = np.empty((n, self.items.shape[1]), np.float32)
        step = 1 << 15
        for start in range(0, n, step):
            block = out[start : start + step]
            class_of = rng.integers(0, len(members), len(block))
            pair = np.empty((2, len(block)), np.int64)
            for c, rows in enumerate(members):
                here = np.flatnonzero(class_of == c)
                pair[:, here] = rng.choice(rows, (2, len(here)))
            share = rng.random((len(block), 1), dtype=np.float32)
            block[:] = share * self.items[pair[0]] + (1 - share) * self.items[pair[1]]
        return out

    def tools(self) -> Iterator[Tool]:
        """All engines, trained; those whose package is missing are left out."""
        bits, width = self.bits, self.train.shape[1]
        Z = self.encoder.model.codebooks
        M = len(Z)
        yield from gpq_engines(OURS, Z, self.embed)
        model = read_model(self.model)
        for string in (f"PQ{M}x4fs", f"IVF{int(self.item_class.max()) + 1},PQ{M}x4fs"):
            yield gpq_in_faiss(
                INSIDE, factory_index(model, string), f"Faiss {string}, GPQ's codebooks", bits, self.embed
            )
        if installed("lancedb"):
            held = np.load(export(self.model, self.scratch / "lancedb.npz", to="lancedb"), allow_pickle=False)
            yield lancedb_lists(
                INSIDE, "LanceDB, GPQ's codebooks", bits,
                books=held["pq_codebook"], centroids=held["ivf_centroids"], transform=self.embed,
            )  # fmt: skip
        if installed("nanopq"):
            held = np.load(export(self.model, self.scratch / "nanopq.npz", to="nanopq"), allow_pickle=False)
            yield gpq_in_nanopq(INSIDE, held["codewords"], bits, self.embed)
        yield flat_floats(THEIRS, "Faiss Flat, not quantised", width)
        yield from faiss_opq(THEIRS, self.train, bits)
        if installed("scann"):
            yield from scann_trees(THEIRS, self.train, bits)
        if installed("lancedb"):
            yield lancedb_lists(THEIRS, "LanceDB IVF_PQ", bits)
        if installed("usearch"):
            yield from usearch_graphs(THEIRS, width)


def unit(x: Floats) -> Floats:
    """Rows of length 1."""
    return np.ascontiguousarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)


def speeds(
    searches: dict[tuple[str, str], tuple[Search, Floats]], rounds: int, limit: float
) -> dict[tuple[str, str], Row]:
    """Queries per second of processor time, in one batch and one by one: the best of some interleaved rounds, on one core.

    With all threads on one core, processor time equals the time on a free core; wall time on a shared machine would
    include other work.
    """

    def clock(search: Search, queries: Floats, step: int) -> float:
        start = time.process_time()
        for i in range(0, len(queries), step):
            search(queries[i : i + step], K)
        return time.process_time() - start

    best = {key: {"batch": 0.0, "single": 0.0} for key in searches}
    with one_core():
        asked = {}
        for key, (search, queries) in searches.items():
            search(queries[:2], K)  # the first call includes preparation
            each = clock(search, queries[:4], 4) / 4
            asked[key] = min(len(queries), max(4, int(limit / each)))
        for _ in range(rounds):
            for key, (search, queries) in searches.items():
                some = queries[: asked[key]]
                seconds = clock(search, some, len(some))
                best[key]["batch"] = max(best[key]["batch"], len(some) / seconds)
                some = some[:SINGLE]
                seconds = clock(search, some, 1)
                best[key]["single"] = max(best[key]["single"], len(some) / seconds)
    return best


def table(bench: Bench, simulated: int, rounds: int, limit: float) -> Iterator[list[Row]]:
    """All rows of one code length: first the real, then the simulated items."""
    rows: dict[tuple[str, str], Row] = {}
    tools = []
    for tool in bench.tools():
        print(f"  trained {tool.name}", file=sys.stderr, flush=True)
        tools.append(tool)
    for where in ("real", "simulated") if simulated else ("real",):
        items = bench.items if where == "real" else bench.simulate(simulated)
        lengths_1 = unit(items)
        searches: dict[tuple[str, str], tuple[Search, Floats]] = {}
        for number, tool in enumerate(tools):
            start = time.perf_counter()
            folder = empty_folder(bench.scratch / f"{where}-{number}")
            filled = tool.fill(lengths_1 if tool.group == THEIRS else items, folder)
            seconds = time.perf_counter() - start
            print(f"  {where}: filled {tool.name} in {seconds:.1f} s", file=sys.stderr, flush=True)
            for setting, search in filled.searches.items():
                key = (tool.name, setting)
                row = rows.setdefault(
                    key,
                    {
                        "engine": tool.name,
                        "setting": setting,
                        "group": tool.group,
                        "code_bytes": tool.code_bytes,
                    },
                )
                if where == "real":
                    ids = search(bench.asked(tool.group), max(CUTS))
                    row |= quality(ids, bench.item_class, bench.query_class)
                row[f"{where}_bytes"] = filled.bytes / len(items)
                row[f"{where}_vector_bytes"] = filled.vector_bytes / len(items)
                row[f"{where}_fill_seconds"] = seconds
                searches[key] = search, bench.asked(tool.group)
        for key, speed in speeds(searches, rounds, limit).items():
            rows[key] |= {f"{where}_{way}": value for way, value in speed.items()}
        del searches, items, lengths_1
        gc.collect()
        yield list(rows.values())


def complete(group: dict[str, Any] | None) -> bool:
    """Whether a table is complete."""
    return group is not None and all("simulated_batch" in row for row in group["rows"])


def markdown(results: dict[str, Any]) -> str:
    """The tables with explanations."""
    text = [f"# {TITLE}", ""]
    for bits, group in sorted(results["tables"].items(), key=lambda item: -int(item[0])):
        facts, machine = group["facts"], group["machine"]
        text += [
            f"## {bits} bits ({int(bits) // 8} bytes) a vector",
            "",
            f"mAP over {facts['items']:,} real items, {facts['queries']:,} queries, seed {facts['seed']}. Queries a second "
            f"(q/s) of one core's processor time, k = {K}: over these items"
            + (f" and over {facts['simulated']:,} simulated ones" if complete(group) else "")
            + f", all queries at once and one by one, the best of {facts['rounds']} rounds by turns. The machine had other work "
            "too: compare within the table only.",
            "",
        ]
        for name in GROUPS:
            lines = [
                {
                    "engine": " ".join(part for part in (row["engine"], row["setting"]) if part),
                    "code": f"{row['code_bytes']:g}",
                    "stored": _stored(row),
                    **{f"mAP@{k}": f"{row[f'map_{k}']:.3f}" for k in CUTS},
                    f"P@{CUTS[0]}": f"{row['precision']:.3f}",
                    "q/s real": f"{row['real_batch']:,.0f}",
                    "one by one": f"{row['real_single']:,.0f}",
                    **(
                        {
                            "q/s simulated": f"{row['simulated_batch']:,.0f}",
                            "one by one ": f"{row['simulated_single']:,.0f}",
                        }
                        if complete(group)
                        else {}
                    ),
                }
                for row in group["rows"]
                if row["group"] == name
            ]
            text += [f"### {name[0].upper()}{name[1:]}", "", render(lines, "markdown")]
        versions = ", ".join(f"{name} {v}" for name, v in (machine["versions"] | group["packages"]).items())
        text += [
            f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['os']}; {versions}.",
            "",
        ]
    text += [
        "## How to read it",
        "",
        "mAP@k is divided by min(k, all relevant items); the JSON also has it divided by the relevant items in the top k, which "
        f"asks only for their order. P@{CUTS[0]} is the share of relevant items among the first {CUTS[0]}. Items are shuffled, and "
        "ties stay in the order that the engine gives.",
        "",
        "GPQ (preset `recommended`) learns from the labels of the labelled items; the engines over the features as they are "
        "learn from no label, so the difference in mAP is that of labels, not of search. The rows of GPQ's codes in other "
        "engines separate the two: same network, another engine. The time of the network is part of every GPQ row.",
        "",
        "`code`: bytes of one vector's code; `stored`: bytes a vector of what the engine writes to disk, at the largest "
        "size of the table, + bytes of vectors that it keeps beside. USearch has no code below a bit a dimension, and a graph besides; "
        "LanceDB keeps the vectors in its table; nanopq keeps a byte a codebook. LanceDB reads files, all others memory. "
        "None re-scores with the vectors. ScaNN is made for longer codes (two dimensions a block) that are re-scored: at this "
        "length it is out of its element.",
        "",
    ]
    return "\n".join(text)


def _stored(row: Row) -> str:
    where = "simulated" if "simulated_bytes" in row else "real"
    beside = row[f"{where}_vector_bytes"]
    return f"{row[f'{where}_bytes']:,.1f}" + (f" + {beside:,.0f}" if beside >= 1 else "")


def plot(group: dict[str, Any], bits: str, out: Path) -> Path:
    """mAP against queries a second over the simulated items (the real ones while these are missing)."""
    where = "simulated" if complete(group) else "real"
    items = group["facts"]["simulated" if complete(group) else "items"]
    series: dict[str, dict[str, tuple[list[float], list[float]]]] = {name: {} for name in GROUPS}
    for row in group["rows"]:
        x, y = series[row["group"]].setdefault(row["engine"], ([], []))
        x.append(row[f"{where}_batch"])
        y.append(row[f"map_{K}"])
    return plot_tradeoff(
        series,
        out,
        title=f"CIFAR-10 features, {bits} bits a code",
        x=f"queries a second of one core, {items:,} {where} items, k = {K}",
        y=f"mAP@{K}, {group['facts']['items']:,} real items",
        overwrite=True,
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "compare.json", out_help="JSON; .md and .png lie beside it")
    parser.add_argument("--bits", type=int, nargs="+", default=[48, 24])
    parser.add_argument(
        "--simulated", type=int, default=1_000_000, help="items of the second part; 0 leaves it out"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=0.2, help="seconds a timing; longer batches are cut")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data",
        type=Path,
        default=data_path("cifar10-features"),
        help="folder of features.npy and labels.npy (default: $GPQ_DATA/cifar10-features)",
    )
    parser.add_argument("--redo", action="store_true", help="compute the tables again that are there")
    return parser.parse_args()


def main() -> None:
    """Make the tables that are missing."""
    options = parse()
    require_data(options.data, "FOLDER", "cifar10-features")
    results = read_results(options.out, {"title": TITLE, "tables": {}})
    for bits in options.bits:
        if bits % 8:
            raise UsageError(f"{bits} bits: 8-bit codebooks need a multiple of 8")
        if not options.redo and complete(results["tables"].get(str(bits))):
            continue
        print(f"{bits} bits", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="gpq-compare-") as scratch:
            bench = Bench(options.data, bits, options.seed, Path(scratch))
            for rows in table(bench, options.simulated, options.rounds, options.limit):
                results["tables"][str(bits)] = {
                    "facts": bench.facts
                    | {
                        "simulated": options.simulated,
                        "rounds": options.rounds,
                        "limit_seconds": options.limit,
                    },
                    "machine": describe_machine(),
                    "packages": {name: version(name) for name in PACKAGES if installed(name)},
                    "rows": rows,
                }
                write_json(options.out, results)
    save(results, options.out, markdown)
    most = max(results["tables"], key=int)
    for bits, group in results["tables"].items():
        name = options.out.stem + ("" if bits == most else f"-{bits}")
        print(plot(group, bits, options.out.with_name(f"{name}.png")))
    print(options.out.with_suffix(".md"))


if __name__ == "__main__":
    run_main(main)
