"""``benchmarks/kills.py`` in short: a few kills of every stage that goes on after one and replaces an output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_killed_commands_end_in_equal_products_and_leave_nothing():
    """In a process of its own: it forks, which one with threads must not."""
    script = [sys.executable, str(ROOT / "benchmarks" / "kills.py"), "--kills", "4", "--only", "replacing"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert "equal products, no leftovers" in last
    assert int(last.split()[0]) >= 4
