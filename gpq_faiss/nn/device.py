"""Devices by name. A GPU that is requested and is not there is an error, never a quiet run on the CPU.

torch is imported where it is needed: what runs on the CPU without a network does without.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import DeviceError, UsageError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def on_cpu(name: str) -> bool:
    """Whether a device name means the CPU: ``auto`` does where there is no GPU, or no torch.

    Raises:
        UsageError, DeviceError: as :func:`resolve_device`.
        ModuleNotFoundError: a GPU is requested, and torch is not installed.
    """
    if name == "cpu" or (name == "auto" and importlib.util.find_spec("torch") is None):
        return True
    return resolve_device(name).type == "cpu"


def resolve_device(name: str) -> torch.device:
    """``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (the first GPU where there is one) as a torch device.

    Raises:
        UsageError: not a name of that form.
        DeviceError: this machine has no such GPU.
    """
    import torch

    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        log.info("on the first GPU (--device cpu for the CPU)")
        return torch.device("cuda", 0)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"no device is called '{name}': use cpu, cuda, cuda:N or auto") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise UsageError(f"device '{name}' is not supported: use cpu, cuda, cuda:N or auto")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise DeviceError(f"device '{name}' was requested, but torch sees no GPU here: use --device cpu")
    if (device.index or 0) >= count:
        raise DeviceError(
            f"device '{name}' was requested, but there are {count} GPUs (cuda:0 to cuda:{count - 1})"
        )
    return torch.device("cuda", device.index or 0)


@contextmanager
def full_float32() -> Iterator[None]:
    """Convolutions of float32 in float32: left alone, torch has newer GPUs round their inputs to TF32, 10 bits of 23, and codes
    would not be those of the CPU. (Matrix products are in full float32 unless a program asks for less; bf16 stays bf16.)"""
    import torch

    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextmanager
def gpu_memory(remedy: str) -> Iterator[None]:
    """One line where torch finds no memory on a GPU, which says what to do.

    Raises:
        DeviceError: torch ran out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported for it
            raise
        raise DeviceError(f"out of memory on the GPU: {remedy}") from None


def image_batch(most: int, image_size: int) -> int:
    """Images per batch, ``most`` up to 64 pixels per side, and beyond that as many as have no more pixels together (at least 16): what
    convolutions hold in memory grows with these."""
    return max(min(16, most), min(most, most * 64**2 // max(1, image_size) ** 2))
