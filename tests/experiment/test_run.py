"""Runs: made once, taken up after a kill, counted when they fail, and enough to be ranked again."""

import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time

import h5py
import numpy as np
import pytest
from experiment.experiments import DIGITS, ONE, PQ, SMALL, WHOLE, assert_same, made, small_grid

from gpq_faiss import files, open_data, rank_scores, run_experiment
from gpq_faiss.data.protocols import load_split
from gpq_faiss.errors import BusyError, DataError, GpqError
from gpq_faiss.experiment import run as running
from gpq_faiss.experiment.compute import TOP, compute, top_rows
from gpq_faiss.experiment.runs import read_run
from gpq_faiss.signals import Terminated, ended_by_signals
from gpq_faiss.store.hdf5 import read_arrays
from gpq_faiss.training.checkpoint import RunState

# What a run holds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpq_12bits_seed0", "pq_24bits_seed1"])
def test_a_run_can_be_ranked_again_from_its_file(done, name):
    """The tables and the codes of the file alone give the AP that the run says."""
    run = read_run(done / f"{name}.h5")
    more, _ = read_arrays(run.path, "a run")
    tables = more["tables"]
    codes = np.stack([more["codes"] & 15, more["codes"] >> 4], axis=2).reshape(len(more["codes"]), -1)
    full = sum(tables[:, m, codes[:, m]] for m in range(tables.shape[1]))
    width = len(run.class_names)
    query, base = (
        np.unpackbits(more[f"{side}_labels"], axis=1)[:, :width].astype(bool)
        for side in ("query", "database")
    )
    again = rank_scores(full, query, base)
    np.testing.assert_allclose(again.ap, run.arrays["ap"], atol=2e-4)
    assert run.map == pytest.approx(again.map, abs=1e-5)


def test_a_run_says_all_that_it_is(done):
    run = read_run(done / "gpq_24bits_seed1.h5", {"vectors", "vector_rows", "top_ids", "codebooks"})
    arrays = run.arrays
    assert (run.method, run.bits, run.seed, run.variation, run.bits_kept) == ("gpq", 24, 1, "", 24)
    assert (run.settings["training"]["steps"], run.steps) == (20, 20)
    assert set(run.versions) == {"gpq_faiss", "python", "numpy", "torch", "faiss"}
    assert run.machine["cpu"]
    assert run.data == {"name": "digits", "fingerprint": DIGITS.fingerprint, "kind": "images"}
    assert vars(run.counts) == {"queries": 100, "labelled": 200, "unlabelled": 1497, "database": 1497}
    assert set(run.seconds) == {"fit", "encode", "rank"}
    assert "expected value" in run.convention
    shapes = {name: arrays[name].shape for name in ("top_ids", "vectors", "codebooks")}
    assert shapes == {"top_ids": (100, min(TOP, 1497)), "vectors": (30, 6 * 12), "codebooks": (6, 16, 12)}
    # Every method keeps the vectors of the same items, and searches those of the split beside it.
    other = read_run(done / "pq_12bits_seed1.h5", {"vector_rows", "query_rows", "database_rows"}).arrays
    np.testing.assert_array_equal(arrays["vector_rows"], other["vector_rows"])
    split = load_split(done / f"split_{run.split_hash}.json")
    np.testing.assert_array_equal(other["query_rows"], split.query)
    np.testing.assert_array_equal(other["database_rows"], split.database)
    assert set(read_run(done / "float_any_seed0.h5", {"codes"}).arrays) == {"ap"}


def test_top_rows_are_those_of_a_stable_sort():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, (60, 2)).astype(np.uint8)
    weights = rng.standard_normal((7, 2)).round(1)

    def score(rows, distinct):
        return (weights[rows] @ distinct.T.astype(float)).astype(np.float32)

    for k in (1, 5, 59, 60):
        expected = np.argsort(-score(np.arange(7), codes), axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(top_rows(score, codes, 7, k, memory=1000), expected)


# Only once --------------------------------------------------------------------------------------------------------------


def test_what_is_done_is_skipped_and_what_changed_is_not(done, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in done.glob("*.h5")}
    summary = made(done, **WHOLE)
    assert (summary.made, summary.there) == (0, 14)
    assert {path: path.stat().st_mtime_ns for path in done.glob("*.h5")} == before
    for changes, overwrite in (({}, False), ({"seeds": [0, 1]}, False), ({"vectors": 3}, False), ({}, True)):
        grid = small_grid(**ONE | changes)
        assert run_experiment(grid, DIGITS, tmp_path, overwrite=overwrite).made == 1


def test_a_damaged_run_is_one_error_and_made_again(done, tmp_path):
    whole = done / "pq_12bits_seed0.h5"
    shutil.copytree(done, tmp_path / "x")
    path, data = tmp_path / "x" / whole.name, whole.read_bytes()
    zeros = data[:200] + b"\0" * (len(data) - 200)
    for damaged in (b"", data[: len(data) // 2], b"not HDF5 at all", zeros):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="pq_12bits_seed0"):
            read_run(path)
    counts = {"queries": 7, "labelled": 1, "unlabelled": 1, "database": 1}
    for name, value, wrong in (
        ("kind", "rows", "kind"),
        ("format_version", 99, "format_version"),
        ("bits", None, "bits"),
        ("likeness", None, "likeness"),
        ("likeness", '{"nn10_at_100": "much"}', "likeness"),
        ("settings", "[" * 100_000, "settings"),
        ("settings", '{"training": {}, "gone": {}}', "settings"),  # of an earlier version
        ("counts", '{"queries": 7}', "counts"),
        ("counts", json.dumps(counts), "ap"),
        ("map", 0.123, "ap"),
    ):
        path.write_bytes(data)
        with h5py.File(path, "r+") as file:
            del file.attrs[name]
            if value is not None:
                file.attrs[name] = value
        message = f"is not a run of gpq experiment of this version, or damaged .'{wrong}' is"
        with pytest.raises(DataError, match=message):
            read_run(path)
    assert made(path.parent, **WHOLE).made == 1
    assert_same(path, whole)


def test_what_does_not_belong_in_a_folder_and_calls_that_cannot_be(done, tmp_path):
    x = np.random.default_rng(0).standard_normal((200, 20)).astype(np.float32)
    other = open_data(x, labels=np.arange(200) % 2)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "experiment.json").write_text("[]")
    (tmp_path / "b" / "x").touch()
    for change, options, message in (
        ({"protocol": "2"}, {}, "protocol 1, not 2"),
        ({"labelled": "9-per-class"}, {}, "labelled 20-per-class, not 9-per-class"),
        ({"name": "other"}, {}, "grid small, not other"),
        ({"preset": "recommended"}, {}, "preset paper, not recommended"),
        ({"config": {"loss": {"lambda1": 3.0}}}, {}, "}, not {'loss': {'lambda1': 3.0}}: choose"),
        ({"config": {}}, {}, "}, not unset: choose"),
        ({}, {"data": other}, "runs on digits, and these data differ"),
        ({}, {"out": tmp_path / "a"}, "damaged or of another version"),
        ({}, {"out": tmp_path / "b"}, "something other than an experiment"),
        ({}, {"jobs": 0}, "0 jobs"),
        ({}, {"jobs": 2}, "give its name"),
    ):
        arguments = {"data": DIGITS, "out": done} | options
        with pytest.raises(GpqError, match=message):
            run_experiment(small_grid(**WHOLE).with_options(**change), **arguments)
    held = files.lock(tmp_path / "x" / ".partial" / files.LOCK)
    with pytest.raises(BusyError, match="being written by another process"):
        made(tmp_path / "x", **PQ)
    os.close(held)
    summary = run_experiment(small_grid(**ONE, labelled="all"), DIGITS, tmp_path / "y")
    assert "0 items to search: label fewer" in summary.failed["pq_12bits_seed0"]


# Failures and kills -----------------------------------------------------------------------------------------------------


def test_an_interrupted_call_goes_on_with_the_runs_that_are_left(tmp_path, monkeypatch):
    """With ``overwrite`` every run has a file all the time."""
    made(tmp_path, **PQ)
    old = {path.stem: path.stat().st_ino for path in tmp_path.glob("*.h5")}
    again = []

    def watched(spec, *args, **kwargs):
        there = {path.stem: path.stat().st_ino for path in tmp_path.glob("*.h5")}
        assert {name for name in old if there[name] != old[name]} == set(again)
        if len(again) == 1:
            raise KeyboardInterrupt
        again.append(spec.name)
        return compute(spec, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(running, "compute", watched)
        with pytest.raises(KeyboardInterrupt):
            run_experiment(small_grid(**PQ), DIGITS, tmp_path, overwrite=True)
    (tmp_path / f"{again[0]}.h5").unlink()
    # The checkpoint of a run that was killed after its file was written is removed.
    for name, run in json.loads((tmp_path / "experiment.json").read_text())["planned"].items():
        work = tmp_path / ".partial" / f"{name}-{run['identity']}"
        work.mkdir(parents=True)
        (work / "checkpoint.safetensors").touch()
    summary = made(tmp_path, **PQ)
    assert (summary.made, summary.there) == (1, 1)
    assert not (tmp_path / ".partial").exists()


def test_a_failed_run_leaves_the_others_alone(tmp_path, monkeypatch, caplog):
    def broken(spec, *args, **kwargs):
        if spec.bits == 24:
            raise ZeroDivisionError("a defect\nover two lines")
        return compute(spec, *args, **kwargs)

    two = {"methods": ["pq", "itq"], "seeds": [0]}
    with monkeypatch.context() as patched, caplog.at_level(logging.INFO, "gpq_faiss"):
        patched.setattr(running, "compute", broken)
        summary = run_experiment(small_grid(**two), DIGITS, tmp_path)
    assert (summary.made, set(summary.failed)) == (2, {"pq_24bits_seed0", "itq_24bits_seed0"})
    told = summary.failed["pq_24bits_seed0"]
    assert told.startswith("ZeroDivisionError in test_run.py:")
    assert told.endswith("a defect over two lines")
    assert any("pq_24bits_seed0 failed: ZeroDivisionError" in line for line in caplog.messages)
    assert made(tmp_path, **two).made == 2


def test_processes_give_what_one_process_gives(done, tmp_path):
    summary = run_experiment(small_grid(vectors=30, methods=["pq"]), "digits", tmp_path, jobs=2)
    assert (summary.there, summary.made) == (0, 4)
    for path in tmp_path.glob("*.h5"):
        assert_same(path, done / path.name)


def two_trainings(steps):
    return small_grid(methods=["gpq"], seeds=[0], config={"training": SMALL | {"steps": steps}})


def test_where_one_process_is_killed_the_others_end(tmp_path):
    late = []

    def kill():
        while len(list(tmp_path.glob(".partial/*/checkpoint.safetensors"))) < 2:
            time.sleep(0.02)
        first, *_ = workers = multiprocessing.active_children()
        first.kill()
        for worker in workers:
            worker.join(60)
            late.extend([worker] * worker.is_alive())
            worker.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(DataError, match="a process was killed"):
        run_experiment(two_trainings(100_000), "digits", tmp_path, jobs=2, checkpoint_seconds=0.05)
    killer.join()
    assert not late


def call_of_two_processes(folder, steps, waiting, alive):
    """In a process of its own: two trainings in two processes, which hold ``alive``; ``waiting`` for a kill when their state is saved."""
    fork, save = multiprocessing.get_context("fork"), RunState.save

    def saved(self, *arguments):
        save(self, *arguments)
        time.sleep(600 * waiting)

    setattr(RunState, "save", saved)  # noqa: B010
    setattr(multiprocessing, "get_context", lambda _: fork)  # noqa: B010
    try:
        with ended_by_signals():
            run_experiment(two_trainings(steps), "digits", folder, jobs=2, checkpoint_seconds=0.05)
    except Terminated as error:
        sys.exit(128 + error.number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_that_is_killed_ends_with_its_processes_and_the_next_one_goes_on(tmp_path, number):
    """The signal reaches the first process alone. SIGTERM: as a batch system or ``kill`` sends it; all of them save and end."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(running.PRELOADED)
    ended, alive = multiprocessing.Pipe(duplex=False)
    out, killed = tmp_path / "out", number == signal.SIGKILL
    arguments = out, 20 if killed else 100_000, killed, alive
    call = forks.Process(target=call_of_two_processes, args=arguments)
    call.start()
    alive.close()
    deadline = time.monotonic() + 300
    while len(list(out.glob(".partial/*/checkpoint.safetensors"))) < 2:
        assert call.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(call.pid or 0, number)
    call.join(60)
    assert call.exitcode == (-number if killed else 128 + number)
    # All processes have ended, by SIGTERM before the first one did.
    assert ended.poll(60 * killed)
    with pytest.raises(EOFError):
        ended.recv()
    assert not list(out.glob("*.h5"))
    if not killed:
        assert not list(out.glob(".partial/lock"))
        return
    for folder in (out, tmp_path / "whole"):
        summary = None
        while summary is None:  # the lock of a killed process may be freed a moment after its end of the pipe
            with contextlib.suppress(BusyError):
                summary = run_experiment(two_trainings(20), DIGITS, folder)
            assert time.monotonic() < deadline
        assert (summary.made, summary.there, summary.failed) == (2, 0, {})
    for path in out.glob("*.h5"):
        assert_same(path, tmp_path / "whole" / path.name)
        assert read_run(path).steps == 20
    assert not (out / ".partial").exists()
