"""``gpq train``."""

from __future__ import annotations

import json
from typing import Any

import click

from .options import (
    DATA_HELP,
    data_options,
    device_option,
    open_dataset,
    out_option,
    overwrite_option,
)


@click.command(
    help=f"""Train a model on DATA and write its folder: model.safetensors, config.json, metrics.jsonl, split.json.

A run that was killed goes on with --resume and reaches the same codes (on the CPU).

\b
Examples:
  gpq train digits --labelled 10-per-class --backbone mlp --out model
  gpq train features:clip.npy --labels labels.npy --bits 48 --out model
  gpq train folder:signs --protocol transfer:'Balinese-*,Latin-*' --preset unseen-classes --out model
  gpq train cifar10 --labelled 500-per-class --backbone vgg --weights imagenet --device cuda --amp --out model

{DATA_HELP}
"""
)
@click.argument("data")
@out_option
@click.option(
    "--preset",
    default=None,
    help="Settings to start from: recommended (default), gpq, unseen-classes, paper or authors.",
)
@click.option("--config", "config_file", metavar="TOML", help="Settings that change the preset's.")
@click.option(
    "--bits", type=int, help="Code length: 12, 24, 32, 48 or any that the codewords divide.  [default: 48]"
)
@click.option("--codebooks", type=int, help="Number of codebooks M, instead of --bits.")
@click.option(
    "--codewords", type=int, help="Codewords K of each: a power of two from 4 to 256.  [default: 16]"
)
@click.option(
    "--backbone", help="vgg, alexnet, cnnf, mlp, linear or timm/NAME.  [default: by the kind of data]"
)
@click.option("--weights", help="First weights of the backbone: imagenet, a file, or none.")
@click.option("--image-size", type=int, help="Side of the square input in pixels.")
@click.option(
    "--labelled",
    default="all",
    show_default=True,
    help="Labels that the training may see: N-per-class, a share (5%), a file of ids, or all but the queries'.",
)
@click.option(
    "--protocol",
    default="1",
    show_default=True,
    help="How queries are set apart: 1, 2, transfer, gpq-authors or none; transfer:SHARE and transfer:CLASSES (names with commas, "
    "* for any characters) say what the training does not see.",
)
@click.option(
    "--queries",
    help="Queries that protocol 1 sets apart: N-per-class, or a file of ids.  [default: 1 in 60; NUS-WIDE: 100-per-class]",
)
@click.option("--steps", type=int, help="Steps of the optimizer.")
@click.option("--epochs", type=float, help="Passes over the data, instead of --steps.")
@click.option(
    "--validation",
    type=float,
    help="Share of the labelled items held out to choose the best checkpoint; 0 keeps the last.",
)
@click.option("--seed", type=int, help="Seed of the split, the first weights and the batches.  [default: 0]")
@click.option("--augment", help="Of images: flip-crop, crop or none.  [default: by the data]")
@click.option("--amp", is_flag=True, help="Run the backbone in bf16.")
@device_option
@click.option("--resume", is_flag=True, help="Go on with an unfinished run.")
@overwrite_option
@data_options
def train(
    data: str,
    out: str,
    preset: str | None,
    config_file: str | None,
    bits: int | None,
    codebooks: int | None,
    codewords: int | None,
    backbone: str | None,
    weights: str | None,
    image_size: int | None,
    labelled: str,
    protocol: str,
    queries: str | None,
    steps: int | None,
    epochs: float | None,
    validation: float | None,
    seed: int | None,
    augment: str | None,
    amp: bool,
    device: str,
    resume: bool,
    overwrite: bool,
    data_args: dict[str, Any],
) -> None:
    from gpq_faiss import config as settings
    from gpq_faiss.errors import UsageError

    if bits is not None and codebooks is not None:
        raise UsageError("--bits and --codebooks both set the code length: give one of them")
    if steps is not None and epochs is not None:
        raise UsageError("--steps and --epochs both set the length of the training: give one of them")
    base = settings.preset(preset or "recommended")
    if config_file:
        base = settings.read_toml(config_file, base)
        if preset and base.preset != preset:
            raise UsageError(
                f'--preset {preset} contradicts preset = "{base.preset}" in {config_file}: keep one'
            )
    K = codewords or base.quantizer.codewords
    if bits is not None:
        codebooks = settings.codebooks_for_bits(bits, K)
    changes: dict[str, dict[str, Any]] = {
        "quantizer": {"codebooks": codebooks, "codewords": codewords},
        "network": {"backbone": backbone, "weights": weights, "image_size": image_size},
        "training": {
            "steps": steps,
            "epochs": 0.0 if steps is not None else epochs,
            "validation": validation,
            "seed": seed,
            "augment": augment,
            "amp": True if amp else None,
        },
    }
    given = {s: {k: v for k, v in section.items() if v is not None} for s, section in changes.items()}
    config = settings.validate(settings.merge(base, given))

    from gpq_faiss.stages.train import train as run

    dataset = open_dataset(data, data_args)
    folder = run(
        dataset,
        out,
        config=config,
        labelled=labelled,
        protocol=protocol,
        queries=queries,
        device=device,
        resume=resume,
        overwrite=overwrite,
    )
    from gpq_faiss.nn.model import read_description

    done = read_description(folder)["training"]
    # Times are in the metrics alone: of the same data and settings, all else has the same bytes.
    seconds = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["seconds"]
    score = done["validation_map"]
    best = f", validation mAP {score:.4f} at step {done['best_step']}" if score is not None else ""
    click.echo(
        f"{folder}: {config.quantizer.bits} bits, {done['labelled_items']:,} labelled and "
        f"{done['unlabelled_items']:,} unlabelled items, {done['steps']:,} steps in {seconds:.1f} s{best}"
    )
