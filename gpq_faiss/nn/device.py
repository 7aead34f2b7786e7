"""Devices by name, and the context in which networks run on them.

A missing GPU is an error; there is no silent fall-back to the CPU. torch is imported on first use,
so that CPU search works without it.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ..errors import DeviceError, UsageError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def on_cpu(name: str) -> bool:
    """Whether a device name means the CPU; ``auto`` does without a GPU or without torch.

    Raises:
        UsageError, DeviceError: as :func:`resolve_device`.
    """
    if name == "cpu" or (name == "auto" and importlib.util.find_spec("torch") is None):
        return True
    return resolve_device(name).type == "cpu"


def resolve_device(name: str) -> torch.device:
    """Return the device ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (the first GPU, if any).

    Raises:
        UsageError: another name.
        DeviceError: no such GPU.
    """
    import torch

    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        log.info("using the first GPU (--device cpu for the CPU)")
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
        raise DeviceError(
            f"device '{name}' was requested, but torch sees no GPU here: use --device cpu"
        )
    if (device.index or 0) >= count:
        raise DeviceError(
            f"device '{name}' was requested, but there are {count} GPUs "
            f"(cuda:0 to cuda:{count - 1})"
        )
    return torch.device("cuda", device.index or 0)


@contextmanager
def full_float32() -> Iterator[None]:
    """Disable TF32 convolutions, torch's default on newer GPUs, for a ``with`` block.

    They would give other codes than the CPU. (Matrix products are in float32 by default.)
    """
    import torch

    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """Let torch use this number of threads in a ``with`` block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def to_input(values: NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a batch as network input, float32 on ``device``.

    Images uint8 are scaled to [0, 1], channels last.
    """
    import torch

    x = torch.as_tensor(values)
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    x = x.to(device, non_blocking=True)
    if x.dtype == torch.uint8:
        x = x.to(memory_format=torch.channels_last).float().div_(255)
    return x


@contextmanager
def gpu_memory(remedy: str) -> Iterator[None]:
    """Turn torch's out-of-memory error into a DeviceError of one line with a remedy."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # by name, without importing torch
            raise
        raise DeviceError(f"out of memory on the GPU: {remedy}") from None


def image_batch(batch_size: int, image_size: int) -> int:
    """Return the number of images in a batch, which limits memory.

    It is ``batch_size`` up to 64 pixels per side; larger images have the same number of pixels in a
    batch (but at least 16 images).
    """
    return max(min(16, batch_size), min(batch_size, batch_size * 64**2 // max(1, image_size) ** 2))
