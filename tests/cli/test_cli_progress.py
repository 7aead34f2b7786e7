"""What a command says while it works: on a terminal, in a pipe, and where -q and -v may stand."""

import contextlib
import io
import logging
import os
import re
import sys
import threading
import time

import pytest
from click.testing import CliRunner
from gpq_cli.main import cli
from gpq_cli.progress import shown, watched

from gpq_faiss import progress as stages
from gpq_faiss.progress import Stage, describe, duration, stage, under_way

log = logging.getLogger("gpq_faiss.test")


class Screen(io.StringIO):
    """What stderr shows: a terminal of so many columns, or a pipe without any."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def isatty(self):
        return self.columns > 0

    def fileno(self):
        return 2


def work(columns=0, **how):
    """What comes to stderr of stages of known lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", screen := Screen(columns))
        patch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 25)))
        patch.setattr(stages, "LONG", 0.1)
        for name, seconds in {"look": 0.02, "first": 0.05, "apart": 0.12}.items():
            patch.setitem(watched.__wrapped__.__kwdefaults__, name, seconds)
        with shown(**{"quiet": False, "verbose": False, **how}), stage("gpq test"):
            log.info("a note at the start")
            with stage("placing lists"):
                time.sleep(0.3)
            with stage("training", 40, "step") as training:
                for step in range(40):
                    time.sleep(0.015)
                    training.advance()
                    if step == 20:
                        log.info("half of it is done")
                        log.debug("this is of interest to few")
            with stage("short", 3):
                pass
    return screen.getvalue()


def timeless(line):
    """The line without its numbers, which depend on the machine."""
    return re.sub(r"\d+", "N", line)


# What is logged on the way and at the end of a stage.
NOTES = {"a note at the start", "half of it is done", "placing lists: N s", "training: N steps in N s"}


def test_a_pipe_gets_lines_with_the_time_to_go():
    lines = work().splitlines()
    assert sum(timeless(line) == "placing lists: N s" for line in lines) >= 2
    steps = [re.fullmatch(r"training: (\d+) of 40 steps, \d+ s, \d+ s to go", line) for line in lines]
    counts = [int(match[1]) for match in steps if match]
    # Two lines of it are some way apart, not one a step.
    assert 2 <= len(counts) <= 20
    assert counts == sorted(counts)
    assert set(map(timeless, lines)) >= NOTES
    assert not {"short", "this is of interest to few"} & {line.split(":")[0] for line in lines}
    assert work(quiet=True) == ""
    assert "this is of interest to few" in work(verbose=True).splitlines()


def test_a_terminal_shows_no_less_than_a_pipe():
    wide, narrow = work(100), work(20)
    assert {timeless(line.strip()) for line in re.split(r"[\r\n]|\x1b\[K", wide)} >= NOTES
    # The line is redrawn; it has the name, the count, the time so far and the time to go; and it is gone at the end.
    lines = re.findall(r"\r\x1b\[Ktraining: (\d+) of 40 steps, \d+ s, \d+ s to go", wide)
    assert len(set(lines)) >= 3
    assert wide.endswith("\r\x1b[K")
    lines = re.findall(r"\x1b\[K(training[^\x1b\r\n]*)", narrow)
    assert 0 < max(len(line) for line in lines if " in " not in line) <= 20


def call(line):
    return CliRunner().invoke(cli, line.split(), prog_name="gpq")


@pytest.mark.parametrize("flag", ["-q", "--verbose"])
def test_quiet_and_verbose_stand_before_or_after_the_command(shop, tmp_path, flag):
    root, package = logging.getLogger(), logging.getLogger("gpq_faiss")
    logged = list(root.handlers), package.level, threading.active_count()
    search = f"search {shop.model} {shop.index} {shop.queries} -k 3"
    before, after, none = call(f"{flag} {search}"), call(f"{search} {flag}"), call(search)
    assert before.exit_code == after.exit_code == 0, after.stderr
    assert before.stdout == after.stdout == none.stdout
    assert before.stderr == after.stderr
    assert (after.stderr == "") == (flag == "-q")
    data = f"{shop.data} --labels {shop.labels} --labelled 20-per-class"
    run = call(f"experiment {flag} run table2 {data} --methods pq --bits 12 --seeds 0 --out {tmp_path}/runs")
    assert run.exit_code == 0, run.stderr
    assert ("pq_12bits" in run.stderr) == (flag != "-q")
    call(f"search {shop.model} {shop.index} missing.npy")
    assert (list(root.handlers), package.level, threading.active_count()) == logged


def test_a_command_says_what_it_is_at(shop, tmp_path, monkeypatch):
    """The stages of a command, each with its name, however short."""
    seen = []
    real = stages.Stage
    monkeypatch.setattr(stages, "Stage", lambda *args: seen.append(real(*args)) or seen[-1])
    model, codes = f"{tmp_path}/m", f"{tmp_path}/codes.h5"
    for line in (
        f"train {shop.data} --labels {shop.labels} --labelled 5-per-class --set training.steps=5 --out {model}",
        f"encode {model} {shop.data} --out {codes}",
        f"index {model} {codes} --out {tmp_path}/i.faiss",
        f"index {model} {codes} --kind ivf --memory 64MB --out {tmp_path}/lists.faiss",
        f"search {model} {tmp_path}/i.faiss {shop.queries}",
        f"evaluate {model} {shop.data} --labels {shop.labels}",
    ):
        assert call(line).exit_code == 0
    assert {
        *("gpq train", "reading", "neighbours", "propagating labels", "training", "fitting codebooks"),
        *("gpq encode", "encoding", "features to codes", "gpq index", "reading codes", "writing the index"),
        *("making lists", "sorting by lists"),
        *("gpq search", "opening the index", "encoding queries", "searching", "gpq evaluate", "ranking"),
    } <= {one.name for one in seen}
    # Where there is a number, the work came to its end.
    assert not [(one.name, one.done, one.total) for one in seen if one.total and one.done != one.total]
    assert under_way() == ()


def test_lines_tell_how_far_and_how_long():
    made = Stage("training", 800, "step", 300, 100)
    made.began -= 20
    assert describe((made,)) == "training: 300 of 800 steps, 20 s, 50 s to go"
    outer = Stage("table2", 48, "run", 3)
    assert describe((outer, made)).startswith("table2: 3 of 48 runs, 0 s, 0 s to go; training: 300 of")
    assert describe((Stage("lists"),)) == "lists: 0 s"
    assert describe((Stage("search", 1, "query"),)) == "search: 0 of 1 query, 0 s"
    assert describe((Stage("search", 9, "query"),)) == "search: 0 of 9 queries, 0 s"
    assert [duration(s) for s in (0.4, 59.6, 200, 7500)] == ["0 s", "1 min 00 s", "3 min 20 s", "2 h 05 min"]


def test_a_stage_that_only_has_a_name_makes_way_for_what_is_inside(monkeypatch):
    with contextlib.suppress(KeyError), stage("whole"), stage("part", 2):
        assert [one.name for one in under_way()] == ["part"]
        raise KeyError
    assert under_way() == ()
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with watched(True, look=0.01, first=0.0), stage("whole"):
        threading.Event().wait(0.1)
        with stage("part", 2):
            threading.Event().wait(0.2)
        threading.Event().wait(0.1)
    drawn = re.findall(r"whole|part", screen.getvalue())
    assert drawn[0] == drawn[-1] == "whole"
    middle = drawn[drawn.index("part") : len(drawn) - drawn[::-1].index("part")]
    assert set(middle) == {"part"}
