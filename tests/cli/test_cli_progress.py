"""What a command writes to stderr while it works: on a terminal, elsewhere, and with -q and -v."""

import io
import logging
import re
import sys

import pytest
from gpq_cli.main import cli

from gpq_faiss import progress
from gpq_faiss.progress import stage

log = logging.getLogger("gpq_faiss.test")


@pytest.fixture
def written(monkeypatch):
    """Return what stderr gets from a command with one counted stage and two notes."""

    def work(path):
        with stage("training", 40, "step") as training:
            for _ in range(4):
                training.update(10)
            log.info("a note")
            log.debug("a detail")
        return {"kind": "x"}

    def run(*flags, terminal=False):
        screen = io.StringIO()
        screen.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stderr", screen)
        with pytest.raises(SystemExit) as ended:
            cli([*flags, "info", "x"], prog_name="gpq")
        assert ended.value.code == 0
        return screen.getvalue()

    monkeypatch.setattr("gpq_faiss.info", work, raising=False)
    monkeypatch.setattr(progress, "MIN_DURATION", 0.0)
    monkeypatch.setattr(progress, "MIN_INTERVAL", 1e-9)
    return run


def test_file_gets_lines_with_the_time_to_go(written):
    lines = written().splitlines()
    pattern = r"training: +\d+% (\d+)/40 \[00:00<.*step/s\]"
    steps = [int(match[1]) for match in map(re.compile(pattern).fullmatch, lines) if match]
    assert (steps[0], steps[-1]) == (10, 40)
    assert steps == sorted(steps)
    assert [line for line in lines if "training" not in line] == ["a note", "gpq info: 00:00"]


def test_terminal_shows_a_bar_that_goes(written):
    text = written(terminal=True)
    assert "gpq info ..." in text
    assert re.search(r"\rtraining: .*40/40 \[.*step/s\]", text)
    assert "a note\n" in text
    assert text.splitlines()[-1].endswith("gpq info: 00:00")


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_leaves_errors(written, terminal):
    assert written("-q", terminal=terminal) == ""
