"""Devices by name, and the context in which networks run on them.

A missing GPU is an error; there is no silent fall-back to the CPU. torch is imported on first use,
so that CPU search works without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ..errors import DeviceError, UsageError

if TYPE_CHECKING:
    import torch


def resolve_device(name: str) -> torch.device:
    """Return the device ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (the first GPU, if any).

    Raises:
        UsageError: another name.
        DeviceError: no such GPU.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9]\d?))?", name):
        raise UsageError(f"no device is called '{name}': use cpu, cuda, cuda:N or auto")
    device = torch.device("cuda:0" if name == "cuda" else name)
    if device.type == "cuda" and device.index >= count:
        raise DeviceError(
            f"device '{name}' was requested, but torch sees {count or 'no'} GPU here: "
            "use --device cpu"
        )
    return device


def full_float32() -> AbstractContextManager[None]:
    """Disable TF32 convolutions, torch's default on newer GPUs, for a ``with`` block.

    They would give other codes than the CPU. (Matrix products are in float32 by default.)
    """
    import torch

    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


def to_input(values: NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a batch as network input, float32 on ``device``.

    Images uint8 are scaled to [0, 1], channels last.
    """
    import torch

    x = torch.as_tensor(values).to(device)
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
