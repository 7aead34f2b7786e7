"""Devices by name. A GPU that is asked for and is not there is an error, never a quiet run on the CPU."""

from __future__ import annotations

import torch

from ..errors import DeviceError, UsageError


def resolve_device(name: str) -> torch.device:
    """``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (the first GPU where there is one) as a torch device.

    Raises:
        UsageError: not a name of that form.
        DeviceError: this machine has no such GPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
        raise DeviceError(f"device '{name}' was asked for, but torch sees no GPU here: use --device cpu")
    if (device.index or 0) >= count:
        raise DeviceError(
            f"device '{name}' was asked for, but there are {count} GPUs (cuda:0 to cuda:{count - 1})"
        )
    return torch.device("cuda", device.index or 0)
