"""Training with several processes started by ``torchrun``: their ranks and communication.

Equal to training in one process: items of every step, augmentation, dropout and noise, losses and batch norm of the joint batch.
Different: rounding of gradient sums, and random numbers of third-party layers (stochastic depth of timm), which every process draws
independently. With the same number of processes, training is bit-reproducible, resumed or not.

Only process 0 does the work before the first step, validates, fits codebooks, and writes.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # whose functions keep the group that is there when they are first imported
from numpy.typing import NDArray
from torch import Tensor, nn

from ..errors import DataError, DeviceError, GpqError, ProcessError, UsageError
from ..nn.device import resolve_device
from ..nn.joint import connected
from .launch import Launch, launched

_PATIENCE = datetime.timedelta(hours=12)
"""Timeout of communication. The end of a process is noticed at once, but fitting codebooks or reading all images takes time."""


@dataclass(frozen=True)
class Group:
    """The processes of a training; by default a single one, for which all methods are no-ops.

    Attributes:
        rank, size: number of this process, from 0, and number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """Whether this is process 0, which writes."""
        return self.rank == 0

    def share(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """This process' part of ``rows``; parts differ by at most one item."""
        return rows[len(rows) * self.rank // self.size : len(rows) * (self.rank + 1) // self.size]

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in rank order, such as :meth:`copy` takes."""
        values = [value] * self.size
        if self.size > 1:
            with connected():
                dist.all_gather_object(values, value, weights_only=True)
        return values

    def copy(self, value: Any) -> Any:
        """The ``value`` of process 0: tensors on the CPU, numbers, texts, None, or lists and dictionaries of these."""
        box = [value]
        if self.size > 1:
            with connected():
                dist.broadcast_object_list(box, 0, weights_only=True)
        return box[0]

    def backward(self, loss: Tensor) -> None:
        """Backpropagate the loss of the joint batch. Raises ProcessError: another process has ended."""
        with connected() if self.size > 1 else contextlib.nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def average(self, parameters: Iterable[nn.Parameter], flag: bool) -> bool:
        """Average gradients over all processes; returns whether any process has set ``flag``."""
        if self.size == 1:
            return flag
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([*(g.flatten() for g in gradients), gradients[0].new_tensor([float(flag)])])
        with connected():
            dist.all_reduce(flat)
        *summed, flags = torch.split_with_sizes(flat, [*(g.numel() for g in gradients), 1])
        for gradient, total in zip(gradients, summed, strict=True):
            gradient.copy_(total.view_as(gradient)).div_(self.size)
        return bool(flags > 0)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Context for local work: if it fails in one process, all end. Process 0 reports the error; others raise ProcessError."""
        own: GpqError | None = None
        try:
            yield
        except GpqError as error:
            own = error
        found = self.gather("" if own is None else f"{own.exit_code}{own}")
        for rank, text in enumerate(found):
            if own is not None and self.main:
                raise own
            if text:
                kind = ProcessError if not self.main else UsageError if text.startswith("2") else DataError
                raise kind(f"process {rank} of {self.size}: {text[1:]}")


@contextlib.contextmanager
def joined(device: str) -> Iterator[tuple[Group, torch.device]]:
    """The processes of this training, a single one without a launcher, and this process' device by :func:`own_device`.

    Raises:
        ProcessError: the other processes cannot be reached.
    """
    launch = launched()
    if launch is None:
        yield Group(), resolve_device(device)
        return
    own = own_device(device, launch)
    ours = not dist.is_initialized()
    if ours:
        if own.type == "cuda":
            torch.cuda.set_device(own)
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo", timeout=_PATIENCE)
        except (RuntimeError, ValueError) as error:
            meeting = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise ProcessError(
                f"process {launch.rank} of {launch.size} cannot reach the others at {meeting} "
                f"({str(error).splitlines()[0][:100]}): start them with torchrun"
            ) from error
    done = False
    try:
        yield Group(launch.rank, launch.size), own
        done = True
    finally:
        # After a failure NCCL would wait for the others; they notice the end of this process. While anything keeps the group, threads of
        # gloo run on, and can abort the program as it ends.
        if ours and (done or own.type == "cpu"):
            dist.destroy_process_group()


def own_device(name: str, launch: Launch) -> torch.device:
    """The device of one of several processes: the CPU, or the GPU with its local rank.

    Raises:
        UsageError: a single GPU is named.
        DeviceError: fewer GPUs than processes.
    """
    device = resolve_device(name)
    if device.type == "cpu":
        return device
    if ":" in name:
        raise UsageError(
            f"--device {name} is one GPU, but each of {launch.size} processes needs its own: use --device cuda"
        )
    there = torch.cuda.device_count()
    if launch.local_size > there:
        raise DeviceError(
            f"{launch.local_size} processes on this machine need a GPU each, and there are {there}: "
            f"use --nproc-per-node {there}, or --device cpu"
        )
    return torch.device("cuda", launch.local_rank)
