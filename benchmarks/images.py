"""Images from random weights at a budget of minutes: the default beside a supervised classifier of the same network, protocol 1.

    OMP_NUM_THREADS=1 python benchmarks/images.py cifar10     # images: $GPQ_DATA/cifar10-jpeg.tar.gz
    OMP_NUM_THREADS=1 python benchmarks/images.py omniglot    # $GPQ_DATA/omniglot/images.tar.gz

VGG, 300 steps, far from converged. The classifier keeps no code: it ranks by its class probabilities, p(query) · p(item). An interrupted
training continues from its checkpoint in ``--work``; finished runs are in the JSON and are not made again.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, cast

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
    use_threads,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional

from gpq_faiss.config import Config, codebooks_for_bits, merge, preset, validate
from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import Split, make_split
from gpq_faiss.evaluation.tables import render
from gpq_faiss.files import fingerprint
from gpq_faiss.methods.coders import Coder
from gpq_faiss.methods.registry import make_builder
from gpq_faiss.methods.trainable import TrainableMethod, TrainingBatch
from gpq_faiss.methods.uncompressed import FloatFeatures
from gpq_faiss.nn.backbones import build_extractor, input_description
from gpq_faiss.training.loop import RunOptions, fit

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set: its archive below the data folder, labels, settings, code lengths, and size of the database (0: all)."""

    title: str
    archive: tuple[str, ...]
    labelled: str
    bits: tuple[int, ...]
    changes: dict[str, dict[str, Any]]
    database: int = 0


_SHARED = {"steps": 300, "batch_labelled": 64}
TASKS = {
    "cifar10": Task(
        "CIFAR-10 (JPEG) images, VGG from random weights, 300 steps",
        ("cifar10-jpeg.tar.gz",),
        "500-per-class",
        (48,),
        {
            "network": {"backbone": "vgg"},
            "training": {**_SHARED, "batch_unlabelled": 64, "validation": 0.1, "augment": "flip-crop"},
        },
        10_000,
    ),
    # A mirrored character is another one.
    "omniglot": Task(
        "Omniglot images, VGG from random weights, 300 steps of labelled images, 10 labels per class",
        ("omniglot", "images.tar.gz"),
        "10-per-class",
        (12, 48),
        {
            "network": {"backbone": "vgg", "image_size": 32},
            "training": {**_SHARED, "batch_unlabelled": 0, "augment": "crop"},
        },
    ),
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


def split_of(task: Task, data: Dataset, seed: int) -> Split:
    """Protocol 1; a drawn part of the database saves minutes of ranking."""
    split = make_split(data, "1", seed=seed, labelled=task.labelled)
    rows = np.random.default_rng([seed, 2]).permutation(split.database)[: task.database or None]
    roles = split.roles & np.uint8(7)
    roles[rows] |= 8
    return dataclasses.replace(split, roles=roles)


def run(task: Task, data: Dataset, method: str, bits: int, seed: int, work: Path) -> Row:
    """Train and rank."""
    config = merge(merge(preset("recommended"), task.changes), {"training": {"seed": seed}})
    if bits:
        config = merge(config, {"quantizer": {"codebooks": codebooks_for_bits(bits)}})
    split = split_of(task, data, seed)
    build = make_builder(method) if bits else build_classifier
    identity = fingerprint(method, str(bits), data.fingerprint, split.hash)
    options = RunOptions(resume=True, amp=True, validate_every=50)
    fitted = fit(
        build, data, split, validate(config), folder=work / identity, identity=identity, options=options
    )
    labels, coder = data.require_labels(), fitted.method.coder()
    ranking = rank_vectors(
        coder,
        vectors(fitted, data, split.query, queries=True),
        vectors(fitted, data, split.database),
        labels.take(split.query),
        labels.take(split.database),
        ks=[10, 100],
    )
    return {
        "method": method,
        "bits": coder.bits,
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
    first = results["runs"][0]
    return "\n".join(
        [
            f"# {results['title']}",
            "",
            render(table, "markdown", digits=3),
            f"Batches of 64 labelled images, labelled {results['labelled']}, bf16, one thread. Nothing has converged: that is a budget "
            f"of minutes. The classifier keeps no code. {first['convention']}. {first['queries']:,} queries and {first['database']:,} "
            "images in the database, drawn by the seed.",
        ]
    )


def main() -> None:
    """Make the missing runs; written after each."""
    parser = make_parser(__doc__, "images.json")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2))
    parser.add_argument("--data", help="default: folder: and the archive below $GPQ_DATA")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gpq-images")
    options = parser.parse_args()
    task = TASKS[options.task]
    if options.out == parser.get_default("out"):
        options.out = options.out.with_name(f"{options.task}-images.json")
    archive = data_path(*task.archive)
    spec = options.data or (f"folder:{archive}" if archive else None)
    require_data(spec, "folder:PATH", task.archive[-1])
    use_threads(1)
    data = open_data(spec)
    results = read_results(options.out, {"title": task.title, "labelled": task.labelled, "runs": []})
    done = {(row["method"], row["bits"], row["seed"]) for row in results["runs"]}
    for seed in options.seeds:
        for method, bits in [*(("posterior", bits) for bits in task.bits), ("classifier", 0)]:
            if (method, bits or 32 * data.require_labels().n_classes, seed) not in done:
                results["runs"].append(run(task, data, method, bits, seed, options.work))
                publish(results, options.out, markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)
