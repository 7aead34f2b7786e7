"""mAP on CIFAR-10 features, protocol 1: GPQ beside PQ, OPQ, ITQ, the float features and a supervised classifier.

    python benchmarks/features.py --data cifar10-features      # features.npy [60000, 256], labels.npy [60000]

A cell is one method, code length and seed. Cells are computed one after the other and written as they are done; a second
run computes only what is missing, or was computed with other settings, data or split. Everything is in the JSON; the
Markdown is derived from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine

from gpq_faiss.config import PRESETS, Config, codebooks_for_bits, preset, to_dict
from gpq_faiss.data.base import FeatureDataset
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import Split, make_split
from gpq_faiss.encode import Encoder
from gpq_faiss.errors import DataError, GpqError, UsageError
from gpq_faiss.evaluate.ranking import RankingResult, rank_codes
from gpq_faiss.evaluate.tables import pivot, render, summarise
from gpq_faiss.files import fingerprint, read_json, write_json, write_text
from gpq_faiss.index.codebooks import encode as encode_vectors
from gpq_faiss.index.codebooks import score_tables, unpack_codes
from gpq_faiss.methods.registry import ARRAY_METHODS, METHODS, make_method
from gpq_faiss.train import train

LABELLED = "500-per-class"
PROTOCOL = "1"
TITLE = "CIFAR-10 features, protocol 1: mAP of the full ranking"
GPQ = {f"gpq-{name}": name for name in ("recommended", "paper")}
ALL_METHODS = (*GPQ, *ARRAY_METHODS)
RESULTS = Path(__file__).parent / "results"

Cell = dict[str, Any]


def gpq_config(name: str, bits: int, seed: int) -> Config:
    """The preset of a GPQ method at a code length."""
    config = preset(GPQ[name])
    return dataclasses.replace(
        config,
        quantizer=dataclasses.replace(
            config.quantizer, codebooks=codebooks_for_bits(bits, config.quantizer.codewords)
        ),
        training=dataclasses.replace(config.training, seed=seed),
    )


def settings_of(name: str, bits: int, seed: int) -> dict[str, Any]:
    """All that decides about a method's codes but the data: what a finished cell is recognised by."""
    return to_dict(gpq_config(name, bits, seed)) if name in GPQ else make_method(name, bits, seed).settings()


def run_gpq(
    name: str, bits: int, seed: int, data: FeatureDataset, labels: Labels, split: Split
) -> tuple[RankingResult, Cell]:
    """Train, encode and rank with a GPQ preset."""
    config = gpq_config(name, bits, seed)
    with tempfile.TemporaryDirectory(prefix="gpq-benchmark-") as folder:
        start = time.perf_counter()
        model = train(data, Path(folder) / "model", config=config, labelled=LABELLED, protocol=PROTOCOL)
        fitted = time.perf_counter()
        encoder = Encoder.load(model)
    Z = encoder.model.codebooks
    M, K, _ = Z.shape
    query_rows, xq = encoder.embed_rows(data, split.query, queries=True)
    base_rows, xb = encoder.embed_rows(data, split.database)
    codes = encode_vectors(xb, Z)
    encoded = time.perf_counter()
    result = rank_codes(
        score_tables(xq, Z), unpack_codes(codes, M, K), labels.take(query_rows), labels.take(base_rows)
    )
    return result, _seconds(start, fitted, encoded) | {"bits_kept": M * (K.bit_length() - 1)}


def run_baseline(
    name: str, bits: int, seed: int, data: FeatureDataset, labels: Labels, split: Split
) -> tuple[RankingResult, Cell]:
    """Fit on all training rows (with the labels of the labelled ones), encode and rank with another method."""
    pool = np.sort(np.concatenate([split.labelled, split.unlabelled]))
    x, seen = data.read(pool), labels.masked(split.labelled).take(pool)
    start = time.perf_counter()
    method = make_method(name, bits, seed).fit(x, seen)
    fitted = time.perf_counter()
    xq = data.read(split.query)
    codes = method.encode(data.read(split.database))
    encoded = time.perf_counter()
    result = rank_codes(
        lambda rows, distinct: method.score(xq[rows], distinct),
        codes,
        labels.take(split.query),
        labels.take(split.database),
    )
    return result, _seconds(start, fitted, encoded) | {"bits_kept": method.bits}


def _seconds(start: float, fitted: float, encoded: float) -> Cell:
    return {
        "seconds": {
            "fit": round(fitted - start, 2),
            "encode": round(encoded - fitted, 2),
            "rank": round(time.perf_counter() - encoded, 2),
        }
    }


def load_results(path: Path) -> dict[str, Any]:
    """What an earlier run left, or an empty set of results."""
    if not path.exists():
        return {"title": TITLE, "machines": {}, "cells": []}
    results = read_json(path, "the results of this benchmark")
    if not isinstance(results, dict) or not {"machines", "cells"} <= results.keys():
        raise DataError(f"{path} does not hold results of this benchmark: name another --out")
    return results


def cell_key(cell: Cell) -> tuple[str, int, int]:
    """The place of a cell in the grid."""
    return cell["method"], cell["bits"], cell["seed"]


def markdown(results: dict[str, Any], bits: list[int]) -> str:
    """The table of means over seeds, and what is needed to read it."""
    cells = sorted(
        results["cells"], key=lambda cell: (ALL_METHODS.index(cell["method"]), cell["bits"], cell["seed"])
    )
    rows, kept = [], {}
    for cell in cells:
        kept[cell["method"]] = cell["bits_kept"]
        # What keeps no code of a given length has one figure for the whole line.
        columns = [cell["bits"]] if cell["bits"] else bits
        rows += [{"method": cell["method"], "bits": b, "map": cell["map"]} for b in columns]
    for row in rows:
        name = row["method"]
        if name in METHODS and not METHODS[name].any_length:
            row["method"] = f"{name} ({kept[name]:,} bits an item)"
    rows.sort(key=lambda row: row["bits"])
    order = list(dict.fromkeys(cell["method"] for cell in cells))
    table = pivot(summarise(rows, by=["method", "bits"], values=["map"]), "method", "bits", "map")
    table.sort(key=lambda line: order.index(line["method"].split(" ")[0]))
    text = [f"# {TITLE}", ""]
    if cells:
        seeds = sorted({cell["seed"] for cell in cells})
        over = (
            f"Mean ± deviation over seeds {', '.join(map(str, seeds))}"
            if len(seeds) > 1
            else f"Seed {seeds[0]}"
        )
        first = cells[0]
        fit = summarise(
            [{"method": c["method"], **c["seconds"]} for c in cells],
            by=["method"],
            values=["fit", "encode", "rank"],
        )
        text += [
            render(table, "markdown", headers={"method": "bits"}, digits=4),
            f"{over}. {first['convention']}. {first['queries']:,} queries, "
            f"{first['labelled']:,} labelled items, {first['database']:,} items in the database.",
            "",
            "Features: 256 dimensions, from an ImageNet-trained EfficientNet-Lite0 on the images as JPEG at 112 x 112. "
            "The presets `paper` and `recommended` of GPQ and `classifier` learn from the labelled items' labels, all others from no "
            "label; every method is fitted on all labelled and unlabelled items.",
            "",
            "Seconds a run, over all code lengths and seeds:",
            "",
            render(fit, "markdown", digits=1),
        ]
        used = {cell["machine"] for cell in cells}
        for key, machine in results["machines"].items():
            if key in used:
                versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
                text.append(
                    f"Machine: {machine['cpu']}, {machine['cores']} cores ({machine['threads']['torch']} used), "
                    f"{machine['memory_gib']} GiB, {machine['gpu'] or 'no GPU'}, {machine['os']}; {versions}."
                )
    return "\n".join(text) + "\n"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    data = os.environ.get("GPQ_DATA")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[12, 24, 32, 48], help="code lengths")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of split and training")
    parser.add_argument("--methods", nargs="+", default=None, choices=ALL_METHODS, help="default: all")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(data) / "cifar10-features" if data else None,
        help="folder of features.npy and labels.npy (default: $GPQ_DATA/cifar10-features)",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "cifar10-features.json", help="JSON; .md lies beside it"
    )
    parser.add_argument("--redo", action="store_true", help="compute the cells again that are there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Fill the grid."""
    options = parse(arguments)
    if options.data is None:
        raise UsageError(
            "no data: pass --data FOLDER, or set GPQ_DATA to the folder that holds cifar10-features"
        )
    methods = options.methods or [name for name in ALL_METHODS if name not in GPQ or GPQ[name] in PRESETS]
    results = load_results(options.out)
    data = open_data(f"features:{options.data / 'features.npy'}", labels=str(options.data / "labels.npy"))
    assert isinstance(data, FeatureDataset)
    labels = data.require_labels()
    machine = describe_machine()
    machine_key = fingerprint(json.dumps(machine, sort_keys=True))
    # Seeds outermost: an interrupted run has whole columns of fewer seeds, which is a table already.
    for seed in options.seeds:
        split = make_split(data, PROTOCOL, seed=seed, labelled=LABELLED)
        for name in methods:
            free = name in METHODS and not METHODS[name].any_length
            for bits in [0] if free else options.bits:
                settings = settings_of(name, bits or options.bits[0], seed)
                identity = fingerprint(json.dumps(settings, sort_keys=True), data.fingerprint, split.hash)
                place = (name, bits, seed)
                if not options.redo and any(
                    cell_key(c) == place and c["identity"] == identity for c in results["cells"]
                ):
                    continue
                run = run_gpq if name in GPQ else run_baseline
                result, extra = run(name, bits or options.bits[0], seed, data, labels, split)
                cell = {
                    "method": name,
                    "bits": bits,
                    "seed": seed,
                    "map": result.map,
                    "convention": result.convention,
                    "distinct_codes": result.n_distinct,
                    "queries": result.n_queries,
                    "labelled": len(split.labelled),
                    "database": result.n_database,
                    **extra,
                    "identity": identity,
                    "split": split.hash,
                    "data": {"name": "cifar10-features", "fingerprint": data.fingerprint},
                    "machine": machine_key,
                    "settings": settings,
                }
                results["cells"] = [c for c in results["cells"] if cell_key(c) != place] + [cell]
                results["machines"][machine_key] = machine
                write(options.out, results)
                print(
                    f"{name:16} {bits or 'any':>4} bits  seed {seed}  mAP {result.map:.4f}  {extra['seconds']}",
                    flush=True,
                )
    write(options.out, results)
    print(options.out.with_suffix(".md").read_text())


def write(path: Path, results: dict[str, Any]) -> None:
    """JSON and Markdown, each replaced whole; machines that no cell is from are left out."""
    used = {cell["machine"] for cell in results["cells"]}
    results["machines"] = {key: m for key, m in results["machines"].items() if key in used}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, results)
    bits = sorted({cell["bits"] for cell in results["cells"]} - {0}) or [0]
    write_text(path.with_suffix(".md"), markdown(results, bits))


if __name__ == "__main__":
    try:
        main()
    except GpqError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
