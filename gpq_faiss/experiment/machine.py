"""Description of the machine, stored with a run's figures, without host names or paths."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from .. import __version__
from ..evaluation.ranking import usable_cores


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
    cpu, system, memory = platform.processor() or platform.machine(), platform.system(), None
    with contextlib.suppress(OSError, AttributeError, ValueError, TypeError):  # of other systems than Linux
        memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
        cpu = re.search(r"^model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(), re.M)[1]  # type: ignore[index]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu,
        "cores": usable_cores(),
        "memory_gib": memory,
        "os": system,
        "gpu": ", ".join(gpus) or None,
        "threads": {"torch": torch.get_num_threads(), "faiss": faiss.omp_get_max_threads()},
        "versions": versions(),
    }
