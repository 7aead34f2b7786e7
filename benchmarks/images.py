"""Training on images from random weights: the default, the paper's method, and a classifier.

    python benchmarks/images.py --device cuda --steps 7000        # $GPQ_DATA/cifar10-jpeg.tar.gz
    python benchmarks/images.py --steps 800 --size 16 --out small.json   # on a CPU: minutes a run
    python benchmarks/images.py --steps 300 --data list:scenes.txt --labelled 50% --out s.json

The protocol is 1, and the network is VGG. The classifier has the same network and makes no codes:
it ranks by its class probabilities, p(query) · p(item). An interrupted training continues from its
checkpoint in ``--work``. Finished runs are in the JSON file and are not repeated.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import cast

import torch
from common import (
    Results,
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
from gpq_faiss.training.loop import RunOptions, fit

NAMES = {"posterior": "default", "gpq": "GPQ, preset paper", "classifier": "classifier"}
SETTINGS = {
    "network": {"backbone": "vgg"},
    "quantizer": {"codebooks": codebooks_for_bits(48)},
    "training": {
        "batch_labelled": 64,
        "batch_unlabelled": 64,
        "validation": 0.1,
        "augment": "flip-crop",
    },
}


class ProbabilityCoder(FloatFeatures):
    """Uncompressed class probabilities. The score is the probability of sharing a class."""

    name, unit = "class probabilities", False

    def __init__(self, classes: int) -> None:
        super().__init__(32 * classes)
        self.width = classes
        self._store(classes)


class SupervisedClassifier(TrainableMethod):
    """A network that returns class probabilities float32 [B, C], trained on labelled images."""

    name = "classifier"
    uses_unlabelled = False

    def __init__(self, backbone: nn.Module, classes: int) -> None:
        super().__init__()
        self.backbone, self.classes = backbone, classes

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.backbone(x).float().softmax(dim=1))

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        with torch.autocast(batch.x.device.type, dtype=torch.bfloat16, enabled=amp):
            logits = self.backbone(batch.x)
        targets = batch.y / batch.y.sum(dim=1, keepdim=True)
        return {"total": functional.cross_entropy(logits.float(), targets)}

    def coder(self) -> Coder:
        return ProbabilityCoder(self.classes)


def build_classifier(
    config: Config, dataset: Dataset, image_size: int, n_classes: int
) -> TrainableMethod:
    """Build the classifier, for :func:`gpq_faiss.training.loop.fit`."""
    generator = torch.Generator().manual_seed(config.training.seed)
    inputs = input_description(dataset, image_size)
    return SupervisedClassifier(build_extractor(config, inputs, n_classes, generator), n_classes)


def conditions(data: Dataset, options: argparse.Namespace) -> Results:
    """Return the settings that all runs of a results file share."""
    return {
        "data": Path(data.name.split(":", 1)[-1]).name,
        "steps": options.steps,
        "size": options.size,
        "labelled": options.labelled,
    }


def run(data: Dataset, method: str, seed: int, options: argparse.Namespace) -> Results:
    """Train a method, rank the database for all queries, and return the metrics."""
    changes = {
        "training": {"seed": seed, "steps": options.steps},
        "network": {"image_size": options.size},
    }
    config = preset("paper" if method == "gpq" else "recommended").with_settings(SETTINGS)
    split = make_split(data, "1", seed=seed, labelled=options.labelled)
    validate_every, device = max(400, options.steps // 10), torch.device(options.device)
    run_name = "-".join(map(str, (method, seed, *conditions(data, options).values())))
    training = fit(
        build_classifier if method == "classifier" else find_method(method).load(),
        data,
        split,
        validate(config.with_settings(changes)),
        folder=options.work / run_name,
        identity=fingerprint(method, data.fingerprint, split.hash),
        options=RunOptions(options.device, resume=True, amp=True, validate_every=validate_every),
    )
    labels, coder = data.require_labels(), training.method.coder()
    xq = vectors(training, data, split.query, queries=True, device=device)
    xb = vectors(training, data, split.database, device=device)
    truth = labels.take(split.query), labels.take(split.database)
    ranking = rank_vectors(coder, xq, xb, *truth, ks=[1, 10, 100])
    last = json.loads(training.run.lines[-1]) if training.run.lines else {}
    return {
        "method": f"{NAMES[method]}, seed {seed}",
        "bits": 0 if method == "classifier" else coder.bits,
        "test mAP": ranking.map,
        **{f"P@{k}": precision for k, precision in ranking.precision.items()},
        "validation mAP": last.get("validation_map"),
        "minutes": training.run.seconds / 60,
        "about": f"{ranking.convention}. {ranking.n_queries:,} queries and {ranking.n_database:,} "
        "images in the database, drawn by the seed.",
    }


def markdown(results: Results) -> str:
    """Return the table and the settings."""
    rows, side = results["runs"], results["size"]
    table = [{name: row[name] for name in row if name != "about"} for row in rows]
    size = f" of {side} x {side} pixels" if side else ""
    return "\n".join(
        [
            f"# {results['data']}: images{size}, VGG from random weights, {results['steps']:,} "
            "steps",
            "",
            render(table, "markdown", digits=3),
            "Batches of 64 labelled images (and 64 without label, for methods that use them), "
            f"labelled {results['labelled']}, bf16. The classifier keeps no code. "
            f"{rows[0]['about']}",
        ]
    )


def main() -> None:
    """Run what is missing, and write the results after each run."""
    parser = make_parser(__doc__, "cifar10-images.json")
    parser.add_argument("--seeds", type=numbers, default=(0, 1))
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--methods", default=",".join(NAMES), help="of posterior, gpq, classifier")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", help="default: folder: and the archive below $GPQ_DATA")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "gpq-images"))
    parser.add_argument("--labelled", default="500-per-class")
    parser.add_argument("--size", type=int, default=0, help="pixels of a side; 0: the images' own")
    options = parser.parse_args()
    archive = data_path("cifar10-jpeg.tar.gz")
    spec = options.data or (f"folder:{archive}" if archive else None)
    data = open_data(require_data(spec, "folder:PATH", "cifar10-jpeg.tar.gz"))
    shared = conditions(data, options)
    results = read_results(options.out, shared | {"runs": []})
    if not shared.items() <= results.items():
        raise UsageError(f"{options.out} has runs of other conditions: give another --out")
    methods = options.methods.split(",")
    if unknown := set(methods) - NAMES.keys():
        raise UsageError(f"--methods {', '.join(unknown)}: choose from {', '.join(NAMES)}")
    finished = {row["method"] for row in results["runs"]}
    for seed in options.seeds:
        for method in methods:
            if f"{NAMES[method]}, seed {seed}" not in finished:
                results["runs"].append(run(data, method, seed, options))
                publish(results, options.out, markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)
