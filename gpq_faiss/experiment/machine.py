"""Description of the machine, stored with a run's figures, without host names or paths."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from .. import __version__


def _found_in(path: str, key: str) -> str | None:
    """The first value of ``key`` in a file of ``key: value`` or ``key=value`` lines."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(rf'^{key}\s*[:=]\s*"?([^"\n]*)', text, re.M)
    return found and found[1].strip()


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
        "faiss": faiss.__version__,
    }


def describe_machine() -> dict[str, Any]:
    """Processor, memory, system, GPU, thread counts and :func:`versions`; JSON-serialisable."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    linux = hasattr(os, "sched_getaffinity")
    return {
        "cpu": _found_in("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1,
        "memory_gib": _memory_gib(),
        "os": _found_in("/etc/os-release", "PRETTY_NAME") or platform.system(),
        "gpu": ", ".join(gpus) or None,
        "threads": {"torch": torch.get_num_threads(), "faiss": faiss.omp_get_max_threads()},
        "versions": versions(),
    }
