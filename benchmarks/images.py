r"""Images end to end: VGG from random weights, the presets and other deep methods at a budget of minutes, protocol 1.

    OMP_NUM_THREADS=1 python benchmarks/images.py                       # data: $GPQ_DATA/cifar10-jpeg.tar.gz; about an hour of one core
    python benchmarks/images.py --methods classifier,gpq --bits 48      # a part; runs that are there stay
    python benchmarks/images.py --grid benchmarks/images_omniglot.toml --data folder:$GPQ_DATA/omniglot/images.tar.gz \
        --work /tmp/gpq-omniglot --out benchmarks/results/omniglot-images.json

The runs are those of a grid, by default ``benchmarks/images.toml`` on CIFAR-10 (JPEG), also available by ``gpq experiment run``: the
same network, number of steps and batch size. This script adds validation curves over processor time, and a supervised classifier with
the same network. The methods are far from converged at this budget; for a longer one use another ``--grid``. Killed runs continue when
the same command is repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import faiss
import numpy as np
import torch
from common import (
    data_path,
    describe_machine,
    make_parser,
    numbers,
    require_data,
    run_main,
    save,
    use_threads,
)
from torch import Tensor, nn
from torch.nn import functional

from gpq_faiss.config import Config, merge, preset, to_dict, validate
from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.reader import Reader
from gpq_faiss.errors import DataError
from gpq_faiss.evaluation.ranking import rank_codes
from gpq_faiss.evaluation.tables import render
from gpq_faiss.experiment.compute import compute
from gpq_faiss.experiment.grid import Grid, baseline_config, read_grid
from gpq_faiss.experiment.runfile import is_done, read_run, write_run
from gpq_faiss.experiment.specs import RunSpec, plan, split_of
from gpq_faiss.files import fingerprint, read_json, write_json
from gpq_faiss.methods.base import Coder, Codes, Floats
from gpq_faiss.methods.trainable import TrainableMethod, TrainingBatch
from gpq_faiss.nn.device import resolve_device
from gpq_faiss.nn.model import build_extractor, input_description
from gpq_faiss.report.plots import plot_validation
from gpq_faiss.training.loop import RunOptions, fit
from gpq_faiss.training.vectors import embed_rows

GRID = Path(__file__).with_suffix(".toml")
CLASSIFIER = "classifier"
_CLOCK_STEPS = 10
_COUNTS = (
    "steps", "epochs", "batch_labelled", "learning_rate", "beta1", "schedule", "decay_every", "validation", "seed", "augment",
)  # fmt: skip
"""Training settings that affect the classifier."""
_AMP, _VALIDATE_EVERY = True, 50

Row = dict[str, Any]


class Clock:
    """Processor time of a training that may be interrupted: ``PATH`` has a line every ten steps.

    Wall time says little if other programs share the cores.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[dict[str, float]] | None = None
        self._began = time.process_time()

    def tick(self, step: int, steps: int, figures: dict[str, float]) -> None:
        """For ``fit(progress=)``."""
        now = time.process_time()
        if self._lines is None:
            # A run continues from a checkpoint older than its last line; later steps are repeated.
            self._lines = [line for line in self.read() if line["step"] < step]
            if self._lines:
                self._began = now - self._lines[-1]["cpu_seconds"]
        if step % _CLOCK_STEPS == 0 or figures or step == steps:
            self._lines.append({"step": step, "cpu_seconds": round(now - self._began, 2)})
            self.path.write_text("".join(json.dumps(line) + "\n" for line in self._lines), encoding="utf-8")
        if figures:
            validated = f"  mAP {figures['map']:.3f}" if "map" in figures else ""
            print(f"  step {step} of {steps}{validated}", flush=True)

    def read(self) -> list[dict[str, float]]:
        """Lines so far."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------------------------------------------------- the classifier


class ClassNetwork(nn.Module):
    """The backbone with one linear layer to the classes: images to class probabilities float32 [B, C]."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.backbone(x).float().softmax(dim=1))


class ProbabilityCoder(Coder):
    """Uncompressed class probabilities; the score is p(query) · p(item), the probability that both are of one class."""

    name = "class probabilities"

    def __init__(self, classes: int) -> None:
        super().__init__(32 * classes)
        self.width, self.code_size = classes, 4 * classes

    def _encode(self, x: Floats) -> Codes:
        return x.view(np.uint8)

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        return np.asarray(xq @ codes.view(np.float32).T)

    def index(self) -> Any:
        return faiss.IndexFlatIP(self.width)


class SupervisedClassifier(TrainableMethod):
    """Classifier trained by cross entropy on labelled images, with the network of the other methods. No codes, no unlabelled images."""

    name = CLASSIFIER
    uses_unlabelled = False

    def __init__(self, network: ClassNetwork, classes: int) -> None:
        super().__init__()
        self.network, self.classes = network, classes

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        with torch.autocast(batch.x.device.type, dtype=torch.bfloat16, enabled=amp):
            raw = self.network.backbone(batch.x)
        loss = functional.cross_entropy(raw.float(), batch.y / batch.y.sum(dim=1, keepdim=True))
        return {"total": loss}

    def exported(self) -> nn.Module:
        return self.network

    def coder(self) -> Coder:
        return ProbabilityCoder(self.classes)


def build_classifier(config: Config, dataset: Dataset, image_size: int, n_classes: int) -> TrainableMethod:
    """For ``fit(build=)``."""
    generator = torch.Generator().manual_seed(config.training.seed)
    backbone = build_extractor(config, input_description(dataset, image_size), n_classes, generator)
    return SupervisedClassifier(ClassNetwork(backbone), n_classes)


def run_classifier(grid: Grid, data: Dataset, seed: int, options: argparse.Namespace) -> Row:
    """Train the classifier, or reuse its row; ranked as the runs of the grid."""
    base = merge(preset(grid.preset), dict(grid.config))
    config = validate(merge(baseline_config(base, perceptron=False), {"training": {"seed": seed}}))
    split = split_of(data, grid.protocol, seed, grid.labelled[0], database=grid.variations[0].database)
    # Only relevant settings, so that settings of other methods added later do not invalidate the row.
    counts = {k: getattr(config.training, k) for k in _COUNTS} | {
        "network": config.network.backbone,
        "amp": _AMP,
    }
    identity = fingerprint(json.dumps(counts), data.fingerprint, split.hash, CLASSIFIER)
    done = Path(options.work) / f"{CLASSIFIER}_seed{seed}.json"
    if done.exists():
        row: Row = read_json(done, "a row of this benchmark")
        if row["identity"] == identity:
            return row
    device = resolve_device(options.device)
    clock = Clock(done.with_suffix(".clock.jsonl"))
    how = RunOptions(device, resume=True, amp=_AMP, validate_every=_VALIDATE_EVERY, progress=clock.tick)
    fitted = fit(
        build_classifier, data, split, config, folder=done.with_suffix(".partial"), identity=identity, options=how
    )  # fmt: skip
    labels, coder = data.require_labels(), fitted.method.coder()
    with Reader(data, fitted.image_size) as reader:
        reader.preload()
        xq, query_ok = embed_rows(fitted.method, reader, split.query, device)
        xb, base_ok = embed_rows(fitted.method, reader, split.database, device)
    ranking = rank_codes(
        lambda q, codes: coder.score(xq[q], codes),
        coder.encode(xb),
        labels.take(split.query[query_ok]),
        labels.take(split.database[base_ok]),
        ks=[10, 100],
    )
    row = {
        "identity": identity,
        "method": CLASSIFIER,
        "variation": "",
        "bits": 0,
        "bits kept": coder.bits,
        "seed": seed,
        "map": ranking.map,
        "precision": {str(k): v for k, v in ranking.precision.items()},
        "convention": ranking.convention,
        "queries": ranking.n_queries,
        "database": ranking.n_database,
        "steps": fitted.run.step,
        "held out": fitted.held,
        "settings": to_dict(config),
        "split": split.hash,
        "machine": describe_machine(),
        "curve": with_clock([json.loads(line) for line in fitted.run.lines], clock),
    }
    write_json(done, row)
    return row


# ---------------------------------------------------------------------------------------------------------- the grid's runs


def with_clock(lines: list[dict[str, Any]], clock: Clock) -> list[dict[str, Any]]:
    """The log of a training with the processor time of each line."""
    at = {line["step"]: line["cpu_seconds"] for line in clock.read()}
    return [line | {"cpu_seconds": at.get(line["step"])} for line in lines]


def data_name(grid: Grid) -> str:
    """For reports: the title of the grid up to its first comma."""
    return grid.title.partition(",")[0]


def run_spec(spec: RunSpec, grid: Grid, data: Dataset, options: argparse.Namespace) -> None:
    """Execute a run of the grid and write its file, as ``gpq experiment run`` does, with its processor times."""
    path = Path(options.work) / f"{spec.name}.h5"
    if not is_done(path, spec):
        print(spec.label, flush=True)
        clock = Clock(path.with_suffix(".clock.jsonl"))
        partial = Path(options.work) / ".partial" / f"{spec.name}-{spec.identity}"
        output = compute(
            spec, data, partial, device=options.device, amp=_AMP, validate_every=_VALIDATE_EVERY, progress=clock.tick
        )  # fmt: skip
        write_run(path, spec, grid.name, data, data_name(grid), output)
        shutil.rmtree(partial, ignore_errors=True)


def row_of(spec: RunSpec, options: argparse.Namespace) -> Row:
    """The figures of a finished run."""
    path = Path(options.work) / f"{spec.name}.h5"
    run = read_run(path, {"ks", "precision", "log"})
    about, arrays = run.about, run.arrays
    lines = [json.loads(line) for line in bytes(arrays["log"]).decode().splitlines()]
    at_k = dict(zip(arrays["ks"].tolist(), arrays["precision"].tolist(), strict=True))
    return {
        "identity": about["identity"],
        "method": spec.method,
        "variation": spec.variation,
        "bits": spec.bits,
        "bits kept": about["bits_kept"],
        "seed": spec.seed,
        "map": run.map,
        "precision": {str(k): at_k[k] for k in (10, 100)},
        "convention": about["convention"],
        "queries": about["counts"]["queries"],
        "database": about["counts"]["database"],
        "steps": about["steps"],
        "settings": about["settings"],
        "split": about["split_hash"],
        "machine": about["machine"] | {"versions": about["versions"]},
        "curve": with_clock(lines, Clock(path.with_suffix(".clock.jsonl"))),
    }


# ---------------------------------------------------------------------------------------------------------- the report


def name_of(row: Row) -> str:
    """As in the table."""
    if row["method"] == CLASSIFIER:
        name = "classifier (no code)"
    elif row["method"] in ("gpq", "posterior"):
        name = f"{row['method']}, {row['variation'] or 'preset ' + row['settings']['preset']}"
    else:
        other = str(row["variation"]).removeprefix("preset recommended, ")
        name = f"{row['method']}, {other}" if other else str(row["method"])
    return name if row["seed"] == 0 else f"{name}, seed {row['seed']}"


def cpu_minutes(row: Row) -> str | None:
    """Of the training."""
    seconds = row["curve"][-1]["cpu_seconds"] if row["curve"] else None
    return None if seconds is None else f"{seconds / 60:.1f}"


def markdown(results: dict[str, Any]) -> str:
    """Table, conditions and the picture's name."""
    rows = results["runs"]
    first, machine = rows[0], rows[0]["machine"]
    table = [
        {
            "method": name_of(r),
            "bits": r["bits"] or r["bits kept"],
            "test mAP": r["map"],
            "P@10": r["precision"].get("10"),
            "P@100": r["precision"].get("100"),
            "validation mAP": r["curve"][-1].get("validation_map"),
            "CPU min": cpu_minutes(r),
        }
        for r in rows
    ]
    t = first["settings"]["training"]
    steps = sorted({line["step"] for r in rows for line in r["curve"]})
    over_time = [
        {"step": step}
        | {
            f"{name_of(r)} {r['bits'] or ''}".strip(): next(
                (line.get("validation_map") for line in r["curve"] if line["step"] == step), None
            )
            for r in rows
        }
        for step in steps
    ]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    held = f" {t['validation']:.0%} of the labelled images are held out for the validation, where each ranks the others."
    curves = [
        f"![validation mAP over processor time]({results['picture']})",
        "",
        "Validation mAP:",
        "",
        render(over_time, "markdown"),
    ]
    return "\n".join(
        [
            f"# {results['title']}",
            "",
            render(table, "markdown", digits=3),
            f"Random weights, {first['steps']:,} steps of {t['batch_labelled']} labelled + {t['batch_unlabelled']} unlabelled images "
            "(supervised methods: the labelled ones alone), "
            f"bf16 autocast {'on' if _AMP else 'off'}, augmentation {t['augment']}, one thread, {results['device']}. "
            "That is a budget of minutes: nothing has converged, and the paper trains for far longer. Learning rates are the presets' "
            "(`recommended`'s for the methods that are not GPQ), where a row names no other.",
            "",
            f"{first['convention']}. {first['queries']:,} queries, {first['database']:,} images in the database, drawn by the seed."
            f"{held if results['picture'] else ''} Seed "
            f"{', '.join(map(str, sorted({r['seed'] for r in rows})))}.",
            "",
            *(curves if results["picture"] else []),
            *[line for note in results["notes"] for line in (note, "")],
            f"Machine: {machine['cpu']}, {machine['cores']} cores (1 used, shared with other jobs), {machine['memory_gib']} GiB, "
            f"{machine['gpu'] or 'no GPU'}, {machine['os']}; {versions}.",
            "",
            f"Command: `{results['command']}`",
        ]
    ) + "\n"  # fmt: skip


def command(rows: list[Row], options: argparse.Namespace) -> str:
    """The command that makes these rows."""
    methods = ",".join(dict.fromkeys(str(r["method"]) for r in rows))
    bits = ",".join(map(str, sorted({r["bits"] for r in rows} - {0})))
    seeds = ",".join(map(str, sorted({r["seed"] for r in rows})))
    other = "" if options.grid == GRID else f" --grid benchmarks/{options.grid.name} --data folder:PATH"
    return f"python benchmarks/images.py{other} --methods {methods} --bits {bits or 0} --seeds {seeds}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    images = data_path("cifar10-jpeg.tar.gz")
    parser = make_parser(__doc__, "cifar10-images.json", out_help=".md and .png lie beside it")
    parser.add_argument(
        "--methods", help=f"short names with commas, of the grid and {CLASSIFIER}; default: all of them"
    )
    parser.add_argument("--bits", type=numbers, help="code lengths with commas; default: the grid's")
    parser.add_argument("--seeds", type=numbers, help="with commas; default: the grid's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--grid", type=Path, default=GRID, help="a grid file of your own")
    parser.add_argument(
        "--data",
        default=f"folder:{images}" if images else None,
        help="default: folder:$GPQ_DATA/cifar10-jpeg.tar.gz",
    )
    parser.add_argument(
        "--work",
        default=str(Path(tempfile.gettempdir()) / "gpq-images"),
        help="folder of the runs and checkpoints, for gpq experiment report as well",
    )
    parser.add_argument("--report-only", action="store_true", help="of the runs that are there")
    parser.add_argument("--note", action="append", default=[], help="a line for the Markdown")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Execute missing runs of grid and classifier, and report all."""
    options = parse(arguments)
    require_data(options.data, "folder:PATH", "cifar10-jpeg.tar.gz")
    use_threads(1)
    data = open_data(options.data)
    if options.grid == GRID and len(data) != 60_000:
        raise DataError(f"{data.name} holds {len(data):,} images: the 60,000 of CIFAR-10 are expected")
    whole = read_grid(options.grid)
    wanted = (*whole.methods, CLASSIFIER) if options.methods is None else tuple(options.methods.split(","))
    grid = whole.with_options(bits=options.bits, seeds=options.seeds)
    Path(options.work).mkdir(parents=True, exist_ok=True)
    specs = plan(grid, data, preset(grid.preset)).specs
    for spec in specs:
        if spec.method in wanted and not options.report_only:
            run_spec(spec, grid, data, options)
    if CLASSIFIER in wanted and not options.report_only:
        for seed in grid.seeds:
            run_classifier(grid, data, seed, options)
    report(options, whole.with_options(seeds=options.seeds), data)


def report(options: argparse.Namespace, grid: Grid, data: Dataset) -> None:
    """Write JSON, Markdown and picture of all finished runs."""
    folder = Path(options.work)
    rows = [
        row_of(spec, options)
        for spec in plan(grid, data, preset(grid.preset)).specs
        if is_done(folder / f"{spec.name}.h5", spec)
    ]
    rows += [
        read_json(path, "a row of this benchmark") for path in sorted(folder.glob(f"{CLASSIFIER}_seed*.json"))
    ]
    if not rows:
        raise DataError(f"{folder} holds no run of {grid.name}: make some first")
    held = [r for r in rows if r["curve"] and "validation_map" in r["curve"][-1]]
    picture = options.out.with_suffix(".png")
    results = {
        "title": grid.title,
        "data": {"name": data_name(grid), "fingerprint": data.fingerprint, "notes": data.notes},
        "device": "no GPU" if options.device == "cpu" else options.device,
        "picture": picture.name if held else None,
        "notes": options.note,
        "command": command(rows, options),
        "runs": rows,
    }
    save(results, options.out, markdown)
    timed = [r for r in held if all(line["cpu_seconds"] is not None for line in r["curve"])]
    if timed:
        plot_validation(
            {
                f"{name_of(r)}{', ' + str(r['bits']) + ' bits' if r['bits'] else ''}": (
                    [line["cpu_seconds"] for line in r["curve"]],
                    [line["validation_map"] for line in r["curve"]],
                )
                for r in timed
            },
            picture,
            title=grid.title,
            overwrite=True,
        )
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)
