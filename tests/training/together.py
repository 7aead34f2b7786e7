"""What processes of one training do together, which :func:`start` starts as ``torchrun`` would; as a script, ``gpq`` with its arguments."""

import json
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gpq_faiss.config import preset
from gpq_faiss.data.reader import Reader
from gpq_faiss.data.standard import open_digits
from gpq_faiss.errors import DataError, GpqError
from gpq_faiss.experiment.run import PRELOADED
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.posterior import PosteriorCodes
from gpq_faiss.methods.propagation import PseudoLabels
from gpq_faiss.methods.trainable import TrainableMethod, TrainingBatch
from gpq_faiss.nn.augment import random_flip_crop
from gpq_faiss.nn.joint import Share, join_batch_norm
from gpq_faiss.training.parallel import Group, joined

FILE = Path(__file__).resolve()
ROOT = FILE.parents[2]


def environments(size: int) -> list[dict[str, str]]:
    """Variables of ``size`` processes of one run on this machine."""
    from serve import free_port  # here: the processes themselves need none of it

    port = str(free_port())
    paths = os.pathsep.join(map(str, (ROOT, FILE.parent)))
    return [
        {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": paths,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **{"RANK": str(rank), "WORLD_SIZE": str(size)},
            **{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": "none"},
        }
        for rank in range(size)
    ]


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([*PRELOADED, "gpq_cli.main"])


class Child(NamedTuple):
    """A process, and the files of its output and its error output."""

    process: Any
    said: tuple[Path, Path]

    def ended(self) -> tuple[int, str, str]:
        """Exit code, output and error output."""
        self.process.join(120)
        out, err = self.said
        return self.process.exitcode, out.read_text(), err.read_text()


def start(folder: Path, work: str, device: str, *commands: list[str]) -> list[Child]:
    """Two processes, forks of one that has loaded torch: each calls the functions ``work`` (separated by commas) with a :class:`Group` and
    a device, process 0 prints by name what they return, and the arguments ``commands`` of ``gpq`` are run one after the other."""
    ports = [environments(1)[0]["MASTER_PORT"] for _ in commands]
    children, calls = [], list(zip(ports, commands, strict=True))
    for environment in environments(2):
        said = folder / f"out{environment['RANK']}", folder / f"err{environment['RANK']}"
        said[1].touch()
        process = FORKS.Process(target=_run, args=(environment, said, work, device, calls), daemon=True)
        process.start()
        children.append(Child(process, said))
    return children


# What the processes do ----------------------------------------------------------------------------------------------------

VGG = {"network": {"backbone": "vgg", "image_size": 16}}
MLP = {"network": {"backbone": "mlp", "hidden": [16], "noise": 0.2}}
CLASSES = {"network": {"backbone": "mlp", "hidden": [16, 8], "noise": 0.2}}
SMALL = {"quantizer": {"codebooks": 2}, "posterior": {"networks": 2}}
CONFIGS = {
    "npair": (preset("paper"), MLP),
    "triplet": (preset("paper").with_settings({"method": "gpq-triplet"}), MLP),
    "npair, batch norm": (preset("paper"), VGG),
    "printed": (preset("paper").with_settings({"method": "gpq-printed"}), MLP),
    "authors, batch norm apart": (preset("authors").with_settings({"network": {"weights": "none"}}), VGG),
    "class networks": (preset("recommended"), CLASSES),
    "linear layer, batch norm": (preset("recommended"), VGG),
    "soft targets": (preset("gpq"), CLASSES),
}
ITEMS, LABELLED, SHARE = 16, 8, 5
"""Items of a batch, how many of them are labelled, and how many the first of two processes has."""


def _gradients(method: TrainableMethod, batch: TrainingBatch, group: Group) -> dict[str, Tensor]:
    """Gradients, buffers and losses after the losses of one batch."""
    method.zero_grad(set_to_none=True)
    method.train()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        losses = method.losses(batch, amp=False)
    losses["total"].backward()
    group.average(method.parameters(), False)
    found = {f"gradient of {k}": p.grad for k, p in method.named_parameters() if p.grad is not None}
    found |= dict(method.named_buffers())
    return {**found, **losses}


def gradients(group: Group, device: torch.device) -> dict[str, list[float]]:
    """By configuration, in process 0: the largest difference of any number from that of one process, and the number of gradients."""
    out = {}
    for name, (base, network) in CONFIGS.items():
        config = base.with_settings(SMALL).with_settings(network)
        dataset, labels = open_digits(), open_digits().require_labels()
        rows, n = np.arange(ITEMS), LABELLED
        size = 16 if network is VGG else 8
        with Reader(dataset, size) as reader:
            values, _ = reader.fetch(rows)
        x = torch.from_numpy(values).double().to(device) / 255
        y = torch.from_numpy(labels.dense(rows[:n])).to(device)
        start, stop = ((0, SHARE), (SHARE, ITEMS))[group.rank]
        share = Share(start, stop, ITEMS)
        results = []
        for several in (False, True) if group.main else (True,):
            method = build_gpq(config, dataset, size, labels.n_classes).double().to(device)
            classes = getattr(method, "classes", method)
            if isinstance(classes, PosteriorCodes):
                p = np.random.default_rng(1).random((len(rows), 10), np.float32)
                classes.pseudo_labels = PseudoLabels(rows, p, 0.5)
            part = None
            for layer in method.modules():
                if isinstance(layer, nn.BatchNorm2d) and name.startswith("authors"):
                    layer.momentum = None  # the mean of all batches, of which there are two a step
            if several:
                join_batch_norm(method)
                part = share
            generator = torch.Generator().manual_seed(3)
            seen = random_flip_crop(x[start:stop] if part else x, generator, share=part)
            batch = TrainingBatch(seen, y, 0, 10, generator, rows[:n], rows[n:], part)
            results.append(_gradients(method, batch, group if part else Group()))
            with torch.no_grad():  # by the statistics that are kept, without the other process
                results[-1]["vectors"] = method.eval()(x[:2])
        if not group.main:
            continue
        one, two = results
        assert one.keys() == two.keys()
        scale = max(float(one[k].abs().max()) for k in one if k.startswith("gradient"))
        apart = max(float((one[k].double() - two[k].double()).abs().max()) for k in one if one[k].numel())
        out[name] = [apart / max(scale, 1.0), float(sum(k.startswith("gradient") for k in one))]
    return out


def talk(group: Group, device: torch.device) -> str:
    """What the processes tell each other: all stop after the same step, and an error ends all."""
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.zeros(2)
    assert group.average([weight], group.rank == 1)
    assert not group.average([weight], False)
    try:
        with group.agreed():
            if group.rank == 1:
                raise DataError("no such file")
    except GpqError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _gpq(command: list[str]) -> None:
    sys.argv = ["gpq", *command]
    try:
        runpy.run_module("gpq_cli", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def _run(
    environment: dict[str, str],
    said: tuple[Path, Path],
    work: str,
    device: str,
    calls: list[tuple[int, list[str]]],
) -> None:
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    with joined(device) as (group, own):
        results = {name: globals()[name](group, own) for name in work.split(",")}
    if group.main:
        print(json.dumps(results), flush=True)
    for port, command in calls:
        os.environ["MASTER_PORT"] = str(port)
        _gpq(command)
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert not [name for name in threads if "gloo" in name], threads


if __name__ == "__main__":  # by torchrun
    _gpq(sys.argv[1:])
