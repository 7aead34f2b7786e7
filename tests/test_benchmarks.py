"""The benchmarks: every script starts; kills and mutated files in short runs."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tools.fuzz import run

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_how_to_call_it(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(name).main()
    assert f"python benchmarks/{name}.py" in capsys.readouterr().out


@pytest.mark.slow
def test_killed_commands_end_in_equal_products_and_leave_nothing():
    """In a process of its own: it forks, which one with threads must not."""
    options = ["--step", "9", "--only", "index, replacing", "--kills", "3"]
    script = [sys.executable, str(FOLDER / "kills.py"), *options]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "kills, equal products, no leftovers" in result.stdout
    assert "none lost" in result.stdout


def test_mutated_files_neither_crash_nor_hang():
    outcome = run(120)  # each kind of file in each way
    assert outcome.failed == []
    assert outcome.read > 4
    assert outcome.refused > 24
