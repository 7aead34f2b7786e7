"""The killers of ``benchmarks/kills.py``, for tests of what is left of a process that was killed and what comes next."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from kills import every_kill, run_killed

__all__ = ["every_kill", "run_killed"]
