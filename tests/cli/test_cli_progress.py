"""What a command writes to stderr while it works: on a terminal, elsewhere, and with -q and -v."""

import io
import logging
import re
import sys

import pytest
from click.testing import CliRunner
from gpq_cli.main import cli
from gpq_cli.progress import shown

from gpq_faiss import progress
from gpq_faiss.progress import stage

log = logging.getLogger("gpq_faiss.test")


class Screen(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture
def written(monkeypatch):
    """What stderr gets from a command with one counted stage and two notes."""

    def run(*, terminal=False, quiet=False, verbose=False):
        monkeypatch.setattr(sys, "stderr", screen := Screen(terminal))
        with (
            shown(quiet=quiet, verbose=verbose),
            stage("opening"),
            stage("training", 40, "step") as training,
        ):
            for _ in range(4):
                training.advance(10)
            log.info("a note")
            log.debug("a detail")
        return screen.getvalue()

    monkeypatch.setattr(progress, "LONG", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    return run


def test_a_file_gets_lines_with_the_time_to_go(written):
    lines = written().splitlines()
    counts = [re.fullmatch(r"training: +\d+% (\d+)/40 \[00:00<.*step/s\]", line) for line in lines]
    steps = [int(match[1]) for match in counts if match]
    assert steps[0] == 10
    assert steps[-1] == 40
    assert steps == sorted(steps)
    rest = [line for line, match in zip(lines, counts, strict=True) if not match]
    assert rest == ["a note", "opening: 00:00"]


def test_stages_below_two_seconds_are_not_logged(written, monkeypatch):
    monkeypatch.setattr(progress, "LONG", 2.0)
    monkeypatch.setattr(progress, "INTERVAL", 10.0)
    assert written() == "a note\n"


def test_a_terminal_shows_a_bar_that_goes(written):
    text = written(terminal=True)
    assert "opening ..." in text
    assert re.search(r"\rtraining: .*40/40 \[.*step/s\]", text)
    assert "a note\n" in text
    assert text.splitlines()[-1].endswith("opening: 00:00")


def test_verbose_adds_details_and_quiet_leaves_errors(written):
    assert "a detail" in written(verbose=True).splitlines()
    assert written(quiet=True) == written(quiet=True, terminal=True) == ""


@pytest.mark.parametrize("flag", ["-q", "--verbose"])
def test_quiet_and_verbose_stand_before_or_after_the_command(shop, flag):
    search = f"search {shop.model} {shop.index} {shop.queries} -k 3"
    before, after = (
        CliRunner().invoke(cli, line.split()) for line in (f"{flag} {search}", f"{search} {flag}")
    )
    assert before.exit_code == after.exit_code == 0, after.stderr
    assert before.stdout == after.stdout
    assert before.stderr == after.stderr
    assert (after.stderr == "") == (flag == "-q")


def test_a_command_leaves_logging_as_it_was(shop):
    root, package = logging.getLogger(), logging.getLogger("gpq_faiss")
    before = list(root.handlers), package.level
    CliRunner().invoke(cli, ["search", str(shop.model), str(shop.index), "missing.npy"])
    assert (list(root.handlers), package.level) == before
