"""``gpq train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

import gpq_faiss as gpq
from gpq_faiss.errors import UsageError
from gpq_faiss.training.launch import launched

from . import options as common


@click.command(
    help=f"""Train a model on DATA and write its folder: model.safetensors, config.json,
metrics.jsonl, split.json.

A killed run continues with --resume and reaches the same codes (on the CPU). docs/settings.md lists
what --set changes. Under torchrun several processes train together.

\b
Examples:
  gpq train digits --labelled 10-per-class --set network.backbone=mlp --out model
  gpq train features:clip.npy --labels labels.npy --bits 48 --out model
  gpq train folder:signs --protocol transfer:'Balinese-*,Latin-*' \
--set posterior.unseen_classes=true --out model
  gpq train cifar10 --labelled 500-per-class --set network.backbone=vgg \
--set network.weights=imagenet --device cuda --amp --out model
  torchrun --nproc-per-node 2 --no-python gpq train folder:photos \
--set network.backbone=vgg --out model

{common.DATA_HELP}
"""
)
@click.argument("data")
@common.out_option
@click.option("--preset", help="Base settings: recommended (default), paper or authors.")
@click.option("--config", "config_file", metavar="TOML", help="Settings that override the preset.")
@common.set_option
@click.option(
    "--bits",
    type=int,
    help="Code length: 12, 24, 32, 48 or any multiple of the bits per codeword.  [default: 48]",
)
@click.option(
    "--labelled",
    default="all",
    show_default=True,
    help="Labels for the training: N-per-class, a share (5%), a file of ids, or all (except the "
    "queries').",
)
@click.option(
    "--protocol",
    default="1",
    show_default=True,
    help="How queries are held out: 1, 2, transfer, gpq-authors or none; transfer:CLASSES (names "
    "separated by commas, with wildcard *) names the unseen classes.",
)
@click.option(
    "--queries",
    help="Queries of protocol 1: N-per-class, or a file of ids.  [default: a sixtieth of each "
    "class, at least 10; NUS-WIDE: 100-per-class]",
)
@click.option(
    "--seed",
    type=int,
    help="Seed of split, initial weights and batches: training.seed.  [default: 0]",
)
@click.option("--amp", is_flag=True, help="Run the backbone in bf16.")
@click.option("--validate-every", default=100, hidden=True, help="Steps between two validations.")
@click.option(
    "--checkpoint-seconds", default=60.0, hidden=True, help="Seconds between two checkpoints."
)
@common.device_option
@click.option("--resume", is_flag=True, help="Continue an unfinished run.")
@common.overwrite_option
@common.data_options
def train(data: str, out: str, data_args: dict[str, Any], **options: Any) -> None:
    settings = ("preset", "config_file", "changes", "bits", "seed")
    config = _settings(**{name: options.pop(name) for name in settings})
    run = ("device", "resume", "amp", "validate_every", "checkpoint_seconds")
    options["options"] = gpq.RunOptions(**{name: options.pop(name) for name in run})
    folder = gpq.train(gpq.open_data(data, **data_args), out, config=config, **options)
    if launched().rank == 0:
        common.emit(_summary(folder, config))


def _settings(
    preset: str | None,
    config_file: str | None,
    changes: tuple[str, ...],
    bits: int | None,
    seed: int | None,
) -> gpq.Config:
    """Return the checked settings: each of preset, file, ``--set``, ``--bits`` and ``--seed``
    overrides those before it.
    """
    from gpq_faiss import config as settings

    base = settings.preset(preset or "recommended")
    if config_file:
        base = settings.read_toml(config_file, base)
        if preset and base.preset != preset:
            raise UsageError(
                f'--preset {preset} contradicts preset = "{base.preset}" in {config_file}: keep one'
            )
    changed = settings.parse_settings(
        [*changes, *([] if seed is None else [f"training.seed={seed}"])]
    )
    base = base.with_settings(changed)
    if bits is not None:
        if "codebooks" in changed.get("quantizer", {}):
            raise UsageError(
                "--bits and --set quantizer.codebooks both set the code length: give one of them"
            )
        M = settings.codebooks_for_bits(bits, base.quantizer.codewords)
        base = base.with_settings({"quantizer": {"codebooks": M}})
    return settings.validate(base)


def _summary(folder: Path, config: gpq.Config) -> str:
    from gpq_faiss.faissio.model import read_description

    training = read_description(folder)["training"]
    # Times are in the metrics alone: of the same data and settings, all else has the same bytes.
    seconds = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["seconds"]
    score = training["validation_map"]
    best = (
        f", validation mAP {score:.4f} at step {training['best_step']}" if score is not None else ""
    )
    return (
        f"{folder}: {config.quantizer.bits} bits, {training['labelled_items']:,} labelled and "
        f"{training['unlabelled_items']:,} unlabelled items, {training['steps']:,} steps in "
        f"{seconds:.1f} s{best}"
    )
