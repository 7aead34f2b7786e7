"""Description of the machine, stored with a run's figures, without host names or paths."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..faissio.blob import faiss_threads, faiss_version


def _first_line(path: str, prefix: str) -> str | None:
    """Value of the first line that starts with ``prefix`` in a file of ``key: value`` or ``key=value``."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(prefix):
            return line[len(prefix) :].strip().lstrip(":=").strip().strip('"')
    return None


def _usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def versions() -> dict[str, str]:
    """Versions of Python and the numerical packages."""
    return {
        "gpq_faiss": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "faiss": faiss_version(),
    }


def describe_machine() -> dict[str, Any]:
    """Processor, memory, system, GPU, thread counts and :func:`versions`; JSON-serialisable."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _first_line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": _usable_cores(),
        "memory_gib": _memory_gib(),
        "os": _first_line("/etc/os-release", "PRETTY_NAME") or platform.system(),
        "gpu": ", ".join(gpus) or None,
        "threads": {"torch": torch.get_num_threads(), "faiss": faiss_threads()},
        "versions": versions(),
    }
