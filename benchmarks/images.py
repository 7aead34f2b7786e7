"""CIFAR-10 (JPEG) images end to end: the paper's VGG from random weights, its losses, protocol 1.

    OMP_NUM_THREADS=1 python benchmarks/images.py                                   # about an hour of one CPU core
    python benchmarks/images.py --device cuda --preset-batches --epochs 300 --bits 12 24 32 48

Network, losses, learning rate and splits are those of the preset ``paper``. What one CPU hour needs otherwise is an option
and stands beside the figures: a smaller batch (more steps in the same time), and the decay of the learning rate spread over
the steps that there are. A run that was killed goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import faiss
import torch
from machine import describe_machine

from gpq_faiss.config import Config, codebooks_for_bits, preset, validate
from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError, GpqError, UsageError
from gpq_faiss.evaluate.tables import render
from gpq_faiss.files import read_json, write_json, write_text
from gpq_faiss.report.plots import plot_validation
from gpq_faiss.train import train

LABELLED, PROTOCOL = "500-per-class", "1"
TITLE = "CIFAR-10 (JPEG) images end to end: VGG from random weights, protocol 1"
RESULTS = Path(__file__).parent / "results"
DECAYS = 60
"""Times that the learning rate is multiplied by 0.95 over a whole run (the last rate is then 5 % of the first)."""
_CLOCK_STEPS = 10


class Clock:
    """Processor time of a training that may be interrupted: ``clock.jsonl`` beside the run, a line every ten steps.

    Seconds by the wall say little where other programs share the cores, so both are kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[dict[str, float]] | None = None
        self._cpu = 0.0

    def tick(self, step: int, steps: int, figures: dict[str, float]) -> None:
        """For ``train(progress=)``."""
        now = time.process_time()
        if self._lines is None:
            # The checkpoint that a run goes on from is older than its last line: what came after is done again.
            self._lines = [line for line in self.read() if line["step"] < step]
            self._cpu = now - (self._lines[-1]["cpu_seconds"] if self._lines else 0.0)
        if step % _CLOCK_STEPS == 0 or figures or step == steps:
            self._lines.append({"step": step, "cpu_seconds": round(now - self._cpu, 2)})
            self.path.write_text("".join(json.dumps(line) + "\n" for line in self._lines), encoding="utf-8")

    def read(self) -> list[dict[str, float]]:
        """Lines so far."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


def make_config(options: argparse.Namespace, bits: int) -> Config:
    """The preset ``paper`` with what the command line changes."""
    base = preset("paper")
    training = dataclasses.replace(
        base.training,
        steps=options.steps,
        epochs=options.epochs,
        validate_every=options.validate_every,
        checkpoint_seconds=60.0,
        seed=options.seed,
        amp=options.amp,
        augment="flip-crop",
        validation=0.1,  # 500 images, so that the curve is smooth
    )
    if not options.preset_batches:
        training = dataclasses.replace(
            training,
            batch_labelled=options.batch,
            batch_unlabelled=options.batch,
            decay_every=max(1, options.steps // DECAYS),
        )
    quantizer = dataclasses.replace(base.quantizer, codebooks=codebooks_for_bits(bits))
    network = dataclasses.replace(base.network, backbone="vgg")
    return validate(dataclasses.replace(base, quantizer=quantizer, network=network, training=training))


def run(options: argparse.Namespace, bits: int, data: Dataset) -> dict[str, Any]:
    """Train (or go on, or take the finished model), then rank the whole database for the test queries."""
    # Not imported above: a run of hours should not depend on what only its last minutes need.
    from gpq_faiss.evaluation import evaluate

    folder = Path(options.work) / f"vgg-{bits}-bits-seed-{options.seed}"
    clock = Clock(folder.with_name(f"{folder.name}.clock.jsonl"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not (options.evaluate_only and (folder / "config.json").exists()):

        def progress(step: int, steps: int, figures: dict[str, float]) -> None:
            clock.tick(step, steps, figures)
            if figures:
                text = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
                print(f"{time.strftime('%H:%M:%S')}  {bits} bits  step {step} of {steps}  {text}", flush=True)

        train(
            data,
            folder,
            config=make_config(options, bits),
            labelled=LABELLED,
            protocol=PROTOCOL,
            device=options.device,
            resume=True,
            progress=progress,
        )
    description = read_json(folder / "config.json", "a model's settings")
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    at = {line["step"]: line["cpu_seconds"] for line in clock.read()}
    for line in curve:
        line["cpu_seconds"] = at.get(line["step"])
    start = time.perf_counter()
    result = evaluate(folder, data, device=options.device, threads=options.threads)
    if result.split_hash != description["split"]["hash"]:
        raise DataError(f"{folder} was trained on another split than it would be measured on: remove it")
    training = description["config"]["training"]
    return {
        "bits": bits,
        "seed": options.seed,
        "map": result.ranking.map,
        "precision": {str(k): v for k, v in result.ranking.precision.items()},
        "convention": result.ranking.convention,
        "queries": result.ranking.n_queries,
        "database": result.ranking.n_database,
        "distinct_codes": result.ranking.n_distinct,
        "steps": description["training"]["steps"],
        "best_step": description["training"]["best_step"],
        "validation_map": description["training"]["validation_map"],
        "validation_items": description["training"]["validation_items"],
        "train_wall_seconds": description["training"]["seconds"],
        "train_cpu_seconds": curve[-1]["cpu_seconds"] if curve else None,
        "evaluate_wall_seconds": round(time.perf_counter() - start, 1),
        "device": description["training"]["device"],
        "split": result.split_hash,
        "settings": {
            key: training[key]
            for key in (
                "batch_labelled", "batch_unlabelled", "learning_rate", "beta1", "schedule", "decay", "decay_every",
                "amp", "augment", "validate_every",
            )
        },
        "curve": curve,
    }  # fmt: skip


def minutes(seconds: float | None) -> str | None:
    """``"12.3"``: a table's digits are those of its mAP."""
    return None if seconds is None else f"{seconds / 60:.1f}"


def markdown(results: dict[str, Any]) -> str:
    """Table, conditions and the picture's name."""
    runs = results["runs"]
    rows = [
        {
            "bits": r["bits"],
            "test mAP": r["map"],
            "P@10": r["precision"].get("10"),
            "P@100": r["precision"].get("100"),
            "validation mAP": r["validation_map"],
            "steps": r["steps"],
            "best step": r["best_step"],
            "wall min": minutes(r["train_wall_seconds"]),
            "CPU min": minutes(r["train_cpu_seconds"]),
        }
        for r in runs
    ]
    first, machine = runs[0], runs[-1]["machine"]
    s = first["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    curve = [
        {
            "step": line["step"],
            "CPU min": minutes(line["cpu_seconds"]),
            "wall min": minutes(line["seconds"]),
            "validation mAP": line.get("validation_map"),
        }
        for line in first["curve"]
    ]
    keep = max(1, len(curve) // 12)
    return "\n".join(
        [
            f"# {TITLE}",
            "",
            render(rows, "markdown", digits=4),
            f"{first['convention']}. {first['queries']:,} queries, {first['database']:,} images in the database, 5,000 labelled "
            f"({first['validation_items']:,} of them held out for the validation, where each ranks the others). Not the "
            "paper's like for like: these are JPEG images, and the paper trains for far longer.",
            "",
            f"Preset `paper` with batches of {s['batch_labelled']} labelled + {s['batch_unlabelled']} unlabelled images (the paper: "
            f"500 + 500), learning rate {s['learning_rate']} x{s['decay']} every {s['decay_every']} steps (the paper: every 100), "
            f"bf16 autocast {'on' if s['amp'] else 'off'}, augmentation {s['augment']}, "
            f"device {first['device']}.",
            "",
            f"![validation mAP over training time]({results['picture']})",
            "",
            f"Validation over time, {first['bits']} bits:",
            "",
            render([line for i, line in enumerate(curve) if (i + 1) % keep == 0 or i in (0, len(curve) - 1)], "markdown"),
            *results["notes"],
            "",
            f"Machine: {machine['cpu']}, {machine['cores']} cores ({machine['threads']['torch']} used, shared with other jobs where "
            f"wall and CPU time differ), {machine['memory_gib']} GiB, {machine['gpu'] or 'no GPU'}, {machine['os']}; {versions}.",
            "",
            *[f"Command: `{text}`" for text in dict.fromkeys(r["command"] for r in runs)],
        ]
    ) + "\n"  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    data = os.environ.get("GPQ_DATA")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[48], help="code lengths, one training each")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--epochs", type=float, default=0.0, help="where not 0, counts instead of --steps")
    parser.add_argument(
        "--batch", type=int, default=100, help="labelled images a step, and as many unlabelled"
    )
    parser.add_argument(
        "--preset-batches", action="store_true", help="batches and decay as in the paper (500 + 500)"
    )
    parser.add_argument("--validate-every", type=int, default=100, help="steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True, help="bf16 autocast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--data",
        default=f"folder:{Path(data) / 'cifar10-jpeg.tar.gz'}" if data else None,
        help="default: folder:$GPQ_DATA/cifar10-jpeg.tar.gz",
    )
    parser.add_argument(
        "--work",
        default=str(Path(tempfile.gettempdir()) / "gpq-images"),
        help="folder for models and checkpoints",
    )
    parser.add_argument("--evaluate-only", action="store_true", help="take finished models as they are")
    parser.add_argument("--note", action="append", default=[], help="a line for the Markdown")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "cifar10-images.json", help=".md and .png lie beside it"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train and report each code length; a length already in the results of other lengths is kept there."""
    options = parse(arguments)
    if options.data is None:
        raise UsageError(
            "no data: pass --data folder:PATH, or set GPQ_DATA to the folder of cifar10-jpeg.tar.gz"
        )
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    data = open_data(options.data)
    if len(data) != 60_000:
        raise DataError(f"{data.name} holds {len(data):,} images: the 60,000 of CIFAR-10 are expected")
    picture = options.out.with_suffix(".png")
    runs: list[dict[str, Any]] = []
    if options.out.exists():
        before = read_json(options.out, "the results of this benchmark")["runs"]
        runs = [r for r in before if r["bits"] not in options.bits]
    for bits in options.bits:
        found = run(options, bits, data) | {"machine": describe_machine(), "command": command(options)}
        runs = sorted([*runs, found], key=lambda r: int(r["bits"]))
        results = {
            "title": TITLE,
            "data": {"name": "cifar10-jpeg", "fingerprint": data.fingerprint, "notes": data.notes},
            "picture": picture.name,
            "notes": options.note,
            "runs": runs,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, results)
        write_text(options.out.with_suffix(".md"), markdown(results))
        plot_validation(
            {
                f"{r['bits']} bits": (
                    [
                        line["seconds" if line["cpu_seconds"] is None else "cpu_seconds"]
                        for line in r["curve"]
                    ],
                    [line["validation_map"] for line in r["curve"]],
                )
                for r in runs
            },
            picture,
            title="CIFAR-10 (JPEG), VGG from random weights",
            overwrite=True,
        )
        print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


def command(options: argparse.Namespace) -> str:
    """The command to give for these results, without paths."""
    bits = " ".join(map(str, options.bits))
    length = f"--epochs {options.epochs:g}" if options.epochs else f"--steps {options.steps}"
    batches = "--preset-batches" if options.preset_batches else f"--batch {options.batch}"
    amp = "--amp" if options.amp else "--no-amp"
    return (
        f"python benchmarks/images.py --bits {bits} {length} {batches} {amp} --device {options.device} "
        f"--seed {options.seed} --threads {options.threads}"
    )


if __name__ == "__main__":
    try:
        main()
    except GpqError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
