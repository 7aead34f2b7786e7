"""Cost of GPQ: a training step, a whole training, and the memory of encoding.

    OMP_NUM_THREADS=1 python benchmarks/cost.py                      # all parts; a few minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/cost.py --parts memory
    OMP_NUM_THREADS=1 python benchmarks/cost.py --parts train --trainings 300000x10x290 300000x10x10 1000000x1000x10

The part "step" compares two alternatives, interleaved (A B A B ...), so that changes of the machine's speed affect both.
Times are processor times (with one thread equal to the time on a free core), because wall time on a shared machine
includes other work; figures are medians, with the quartiles of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    describe_machine,
    machine_line,
    make_parser,
    numbers,
    own_command,
    read_results,
    run_main,
    save,
    use_threads,
)
from torch import Tensor, nn

from gpq_faiss.config import Config, merge, preset
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import UsageError
from gpq_faiss.evaluation.tables import render
from gpq_faiss.methods.gpq import GPQ
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.backbones import build_backbone
from gpq_faiss.nn.gpq import GPQNetwork
from gpq_faiss.nn.model import build_network
from gpq_faiss.stages.train import train

TITLE = "Cost"
PARTS = ("step", "train", "memory")
CLASSES, WIDTH = 10, 256

Row = dict[str, Any]
_IMAGES = {"kind": "images", "image_size": 32}
_FEATURES = {"kind": "features", "width": WIDTH}


def by_turns(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Processor seconds of each alternative, in ``repeats`` interleaved rounds after one uncounted round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        # The order changes, so that none always runs after the same one.
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            start = time.process_time()
            ways[name]()
            if turn:
                seconds[name].append(time.process_time() - start)
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Median of ours over theirs, and the quartiles over turns."""
    low, middle, high = np.percentile(np.array(ours) / np.array(theirs), [25, 50, 75])
    return {"ratio": float(middle), "low": float(low), "high": float(high)}


def with_backbone(backbone: str, **training: Any) -> Config:
    """The preset ``paper`` over a backbone."""
    hidden = [512] if backbone == "mlp" else []
    return merge(preset("paper"), {"network": {"backbone": backbone, "hidden": hidden}, "training": training})


# ------------------------------------------------------------------------------------------------------- training step


class _Plain(nn.Module):
    """Backbone and a linear classifier, as the baseline."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.backbone(x))
        return logits


def step_cost(backbone: str, batch: int, repeats: int, amp: bool) -> Row:
    """A step of GPQ on ``batch`` labelled and as many unlabelled items; the same items through backbone, linear and Adam."""
    config = with_backbone(backbone)
    generator = torch.Generator().manual_seed(0)
    shape = (2 * batch, 3, 32, 32) if backbone == "vgg" else (2 * batch, WIDTH)
    x = torch.rand(shape, generator=generator)
    if x.ndim == 4:
        x = x.to(memory_format=torch.channels_last)
    classes = torch.randint(CLASSES, (2 * batch,), generator=generator)
    y = nn.functional.one_hot(classes[:batch], CLASSES).float()
    network = build_network(config, _IMAGES if backbone == "vgg" else _FEATURES, CLASSES)
    assert isinstance(network, GPQNetwork)
    method = GPQ(network, config)
    spec: Any = method.network.backbone.spec
    plain = _Plain(build_backbone(spec, generator=generator), config.quantizer.width)
    method.train()
    plain.train()
    our_adam = method.optimizer(config.training)
    adam = torch.optim.Adam(plain.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def ours() -> None:
        our_adam.zero_grad()
        losses = method.losses(TrainingBatch(x, y, 0, 1, generator), amp=amp)
        losses["total"].backward()  # type: ignore[no-untyped-call]
        our_adam.step()
        method.after_step(0)

    def bare() -> None:
        adam.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            logits = plain(x)
        nn.functional.cross_entropy(logits.float(), classes).backward()  # type: ignore[no-untyped-call]
        adam.step()

    seconds = by_turns({"gpq": ours, "plain": bare}, repeats)
    return {
        "backbone": backbone,
        "bf16": amp,
        "batch": f"{batch} + {batch}",
        "plain ms": 1e3 * float(np.median(seconds["plain"])),
        "GPQ ms": 1e3 * float(np.median(seconds["gpq"])),
        **ratio(seconds["gpq"], seconds["plain"]),
    }


# ------------------------------------------------------------------------------------------------------ whole training


def train_cost(scratch: Path, trainings: list[str]) -> list[Row]:
    """Trainings ``ITEMSxCLASSESxLABELS`` with the preset ``recommended``, from features on disk to the model folder."""
    rows: list[Row] = []
    for text in trainings:
        try:
            items, classes, each = (int(part) for part in text.split("x"))
        except ValueError:
            raise UsageError(
                f"--trainings {text}: ITEMSxCLASSESxLABELS is expected, as 300000x10x290"
            ) from None
        rng = np.random.default_rng(0)
        labels = np.arange(items) % classes
        centres = rng.standard_normal((classes, WIDTH)).astype(np.float32)
        array = np.lib.format.open_memmap(
            scratch / "x.npy", mode="w+", dtype=np.float16, shape=(items, WIDTH)
        )
        for start in range(0, items, 10_000):
            own = labels[start : start + 10_000]
            array[start : start + 10_000] = centres[own] + 4 * rng.standard_normal(
                (len(own), WIDTH), dtype=np.float32
            )
        array.flush()
        np.save(scratch / "y.npy", labels)
        data = open_data(f"features:{scratch / 'x.npy'}", labels=str(scratch / "y.npy"))
        config = preset("recommended")
        first: list[tuple[int, float]] = []

        def told(step: int, steps: int, figures: dict[str, float], first: list[Any] = first) -> None:
            if not first:
                first.append((steps, time.process_time()))

        began = time.perf_counter(), time.process_time()
        train(data, scratch / f"m{text}", config=config, labelled=f"{each}-per-class", progress=told)
        ended = time.perf_counter(), time.process_time()
        rows.append(
            {
                "items": f"{items:,} x {WIDTH}",
                "classes": classes,
                "labels per class": each,
                "steps": first[0][0],
                "to the first step CPU s": first[0][1] - began[1],
                "the rest CPU s": ended[1] - first[0][1],
                "whole CPU s": ended[1] - began[1],
                "whole wall s": ended[0] - began[0],
                # Peak of the whole process so far: give large trainings last.
                "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            }
        )
        print(render(rows[-1:]), flush=True)
    return rows


# --------------------------------------------------------------------------------------------------------------- memory

_ENCODE = """
import contextlib, sys
from gpq_cli.main import cli
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
    cli(sys.argv[1:])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def write_rows(path: Path, n: int) -> Path:
    """``n`` rows of 256 float16, written a block at a time."""
    block = np.random.default_rng(0).standard_normal((10_000, WIDTH)).astype(np.float16)
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(n, WIDTH))
    for start in range(0, n, len(block)):
        array[start : start + len(block)] = np.roll(block, start // len(block), axis=1)[: n - start]
    array.flush()
    return path


def memory_cost(scratch: Path, sizes: tuple[int, ...]) -> list[Row]:
    """Peak resident memory (VmHWM) of ``gpq encode`` in a separate process, for files of different lengths."""
    small = write_rows(scratch / "train.npy", 2000)
    np.save(scratch / "labels.npy", np.arange(2000) % CLASSES)
    data = open_data(f"features:{small}", labels=str(scratch / "labels.npy"))
    config = with_backbone("linear", steps=2, validation=0.0)
    model = train(data, scratch / "linear", config=config, labelled="all", protocol="none")
    rows: list[Row] = []
    for n in sizes:
        file = write_rows(scratch / f"rows-{n}.npy", n)
        out = scratch / f"codes-{n}.h5"
        done = subprocess.run(
            [sys.executable, "-c", _ENCODE, "encode", str(model), f"features:{file}", "--out", str(out)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UsageError(f"gpq encode failed: {done.stderr.strip().splitlines()[-1]}")
        rows.append(
            {
                "rows": n,
                "peak MiB": int(done.stdout.split()[-1]) / 1024,
                "input MiB": file.stat().st_size / 2**20,
            }
        )
        for made in (file, out, scratch / f"features-{n}.h5"):
            made.unlink(missing_ok=True)
    for row in rows:
        row["ratio"] = row["peak MiB"] / rows[0]["peak MiB"]
    return rows


# --------------------------------------------------------------------------------------------------------------- report

_TEXT = {
    "step": (
        "A training step",
        "GPQ against the same backbone with a linear classifier, cross entropy and Adam, on the same items (random ones, 32 x 32 or "
        "256-d; 48 bits, 10 classes; mlp: one hidden layer of 512). Aim: at most 1.10 for the VGG.",
    ),
    "train": (
        "A whole training",
        "The preset `recommended`, 48 bits, from simulated features on the disk to the model folder. To the first step belong reading, "
        "the noise that the labels call for, and the propagation of labels; wall time is of a machine shared with other jobs.",
    ),
    "memory": (
        "Memory of encoding",
        "Peak resident memory of `gpq encode` on 256-d float16 rows (.npy), each in a process of its own, features.h5 and codes.h5 "
        "written. The ratio is to the first line. Aim: within 1.10.",
    ),
}  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    """A table a part."""
    text = [f"# {TITLE}", ""]
    text += [
        "Compared by turns; medians of processor time, and quartiles (low, high) of the ratio over the turns.",
        "",
    ]
    for part in PARTS:
        if part not in results["parts"]:
            continue
        head, note = _TEXT[part]
        found = results["parts"][part]
        text += [f"## {head}", "", note, "", render(found["rows"], "markdown")]
        text += [machine_line(found["machine"], found["command"]), ""]
    return "\n".join(text)


def run_part(part: str, scratch: Path, options: argparse.Namespace) -> list[Row]:
    """Rows of one part."""
    if part == "step":
        return [
            step_cost("vgg", options.batch, options.repeats, amp=False),
            step_cost("vgg", options.batch, options.repeats, amp=True),
            step_cost("mlp", options.batch, 20 * options.repeats, amp=False),
        ]
    if part == "train":
        return train_cost(scratch, options.trainings)
    return memory_cost(scratch, options.sizes)


def main() -> None:
    """Measure the requested parts; others keep the results of an earlier run."""
    parser = make_parser(__doc__, "cost.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=7, help="turns")
    parser.add_argument(
        "--batch", type=int, default=128, help="labelled items a step, and as many unlabelled"
    )
    parser.add_argument(
        "--trainings", nargs="+", default=["300000x10x290"], help="ITEMSxCLASSESxLABELS (per class)"
    )
    parser.add_argument("--sizes", type=numbers, default=(10_000, 1_000_000), help="rows, for the memory")
    options = parser.parse_args()
    use_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes of the memory part
    results = read_results(options.out, {"title": TITLE, "parts": {}})
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="gpq-cost-") as scratch:
            rows = run_part(part, Path(scratch), options)
        results["parts"][part] = {"rows": rows, "machine": describe_machine(), "command": own_command()}
        print(render(rows), flush=True)
        save(results, options.out, markdown)


if __name__ == "__main__":
    run_main(main)
