"""Images from random weights: the default and the paper's method beside a supervised classifier of the same network, protocol 1.

    python benchmarks/images.py --device cuda --steps 7000           # CIFAR-10: $GPQ_DATA/cifar10-jpeg.tar.gz
    python benchmarks/images.py --steps 800 --size 16 --out small.json    # on a CPU: some minutes a run
    python benchmarks/images.py --steps 300 --size 32 --data list:multilabel-scenes.txt --labelled 50% --out scenes.json

The network is VGG. The classifier keeps no code: it ranks by its class probabilities, p(query) · p(item). An interrupted training continues
from its checkpoint in ``--work``; finished runs are in the JSON and are not made again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, cast

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
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional

from gpq_faiss.config import Config, codebooks_for_bits, preset, validate
from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import make_split
from gpq_faiss.errors import UsageError
from gpq_faiss.evaluation.tables import render
from gpq_faiss.files import fingerprint
from gpq_faiss.methods.coders import Coder
from gpq_faiss.methods.registry import find_method
from gpq_faiss.methods.trainable import TrainableMethod, TrainingBatch
from gpq_faiss.methods.uncompressed import FloatFeatures
from gpq_faiss.nn.backbones import build_extractor, input_description
from gpq_faiss.nn.device import resolve_device
from gpq_faiss.training.loop import RunOptions, fit

Row = dict[str, Any]
NAMES = {"posterior": "default", "gpq": "GPQ, preset paper"}


BITS = 48
CHANGES = {
    "network": {"backbone": "vgg"},
    "training": {"batch_labelled": 64, "batch_unlabelled": 64, "validation": 0.1, "augment": "flip-crop"},
}


class ProbabilityCoder(FloatFeatures):
    """Uncompressed class probabilities; the score is the probability that query and item are of one class."""

    name, unit = "class probabilities", False

    def __init__(self, classes: int) -> None:
        super().__init__(32 * classes)
        self.width = classes
        self._store(classes)


class SupervisedClassifier(TrainableMethod):
    """The backbone of the other rows with one linear layer to the classes, from images to class probabilities float32 [B, C]; trained by
    cross entropy on labelled images."""

    name = "classifier"
    uses_unlabelled = False

    def __init__(self, backbone: nn.Module, classes: int) -> None:
        super().__init__()
        self.backbone, self.classes = backbone, classes

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.backbone(x).float().softmax(dim=1))

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        with torch.autocast(batch.x.device.type, dtype=torch.bfloat16, enabled=amp):
            raw = self.backbone(batch.x)
        return {"total": functional.cross_entropy(raw.float(), batch.y / batch.y.sum(dim=1, keepdim=True))}

    def coder(self) -> Coder:
        return ProbabilityCoder(self.classes)


def build_classifier(config: Config, dataset: Dataset, image_size: int, n_classes: int) -> TrainableMethod:
    """For ``fit(build=)``."""
    generator = torch.Generator().manual_seed(config.training.seed)
    backbone = build_extractor(config, input_description(dataset, image_size), n_classes, generator)
    return SupervisedClassifier(backbone, n_classes)


def conditions(data: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a results file share."""
    name = Path(data.name.split(":", 1)[-1]).name
    return {"data": name, "steps": options.steps, "size": options.size, "labelled": options.labelled}


def run(data: Dataset, method: str, seed: int, options: argparse.Namespace) -> Row:
    """Train and rank."""
    config = preset("paper" if method == "gpq" else "recommended").with_settings(CHANGES)
    config = config.with_settings({"training": {"seed": seed, "steps": options.steps}})
    config = config.with_settings({"network": {"image_size": options.size}})
    config = config.with_settings({"quantizer": {"codebooks": codebooks_for_bits(BITS)}})
    split = make_split(data, "1", seed=seed, labelled=options.labelled)
    device = resolve_device(options.device)
    fitted = fit(
        build_classifier if method == "classifier" else find_method(method).load(),
        data,
        split,
        validate(config),
        folder=options.work / "-".join(map(str, (method, seed, *conditions(data, options).values()))),
        identity=fingerprint(method, data.fingerprint, split.hash),
        options=RunOptions(str(device), resume=True, amp=True, validate_every=max(400, options.steps // 10)),
    )
    labels, coder = data.require_labels(), fitted.method.coder()
    ranking = rank_vectors(
        coder,
        vectors(fitted, data, split.query, queries=True, device=device),
        vectors(fitted, data, split.database, device=device),
        labels.take(split.query),
        labels.take(split.database),
        ks=[10, 100],
    )
    return {
        "method": NAMES.get(method, method),
        "bits": 0 if method == "classifier" else coder.bits,
        "seed": seed,
        "map": ranking.map,
        "precision": {str(k): v for k, v in ranking.precision.items()},
        "convention": ranking.convention,
        "queries": ranking.n_queries,
        "database": ranking.n_database,
        "curve": [json.loads(line) for line in fitted.run.lines],
        "seconds": fitted.run.seconds,
    }


def markdown(results: dict[str, Any]) -> str:
    """Table and conditions."""
    table = [
        {
            "method": f"{row['method']}, seed {row['seed']}",
            "bits": row["bits"],
            "test mAP": row["map"],
            "P@10": row["precision"]["10"],
            "P@100": row["precision"]["100"],
            "validation mAP": row["curve"][-1].get("validation_map") if row["curve"] else None,
            "minutes": row["seconds"] / 60,
        }
        for row in results["runs"]
    ]
    first, side = results["runs"][0], results["size"]
    size = f" of {side} x {side} pixels" if side else ""
    return "\n".join(
        [
            f"# {results['data']}: images{size}, VGG from random weights, {results['steps']:,} steps",
            "",
            render(table, "markdown", digits=3),
            f"Batches of 64 labelled images (and 64 without label, for methods that use them), labelled {results['labelled']}, bf16. The "
            f"classifier keeps no code. {first['convention']}. {first['queries']:,} queries and {first['database']:,} images in the "
            "database, drawn by the seed.",
        ]
    )


def main() -> None:
    """Make the missing runs; written after each."""
    parser = make_parser(__doc__, "cifar10-images.json")
    parser.add_argument("--seeds", type=numbers, default=(0, 1))
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--methods", default="posterior,gpq,classifier")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", help="default: folder: and the archive below $GPQ_DATA")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gpq-images")
    parser.add_argument("--labelled", default="500-per-class")
    parser.add_argument("--size", type=int, default=0, help="pixels of a side; 0: the images' own")
    options = parser.parse_args()
    archive = data_path("cifar10-jpeg.tar.gz")
    spec = options.data or (f"folder:{archive}" if archive else None)
    require_data(spec, "folder:PATH", "cifar10-jpeg.tar.gz")
    data = open_data(spec)
    asked = conditions(data, options)
    results = read_results(options.out, asked | {"runs": []})
    if any(results[key] != value for key, value in asked.items()):
        raise UsageError(f"{options.out} has runs of other data, labels, sizes or steps: give another --out")
    done = {(row["method"], row["seed"]) for row in results["runs"]}
    methods = options.methods.split(",")
    for method in methods:
        if method != "classifier" and not find_method(method).deep:
            raise UsageError(f"--methods {method}: it trains no network")
    for seed in options.seeds:
        for method in methods:
            if (NAMES.get(method, method), seed) not in done:
                results["runs"].append(run(data, method, seed, options))
                publish(results, options.out, markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)
