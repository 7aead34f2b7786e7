"""Runs: made once, taken up after a kill, counted when they fail, and enough to be ranked again."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import faiss
import h5py
import numpy as np
import pytest
from experiment.experiments import SMALL, small_grid
from PIL import Image

from gpq_faiss import files
from gpq_faiss.config import merge, preset, read_toml
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.open import open_data
from gpq_faiss.data.split import Split
from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.evaluation.ranking import rank_scores
from gpq_faiss.experiment import workers
from gpq_faiss.experiment.compute import TOP, compute, top_rows
from gpq_faiss.experiment.run import read_about, run_experiment
from gpq_faiss.experiment.runfile import is_done, read_run
from gpq_faiss.experiment.specs import RunSpec, plan
from gpq_faiss.experiment.workers import RunContext, RunResult, make_runs
from gpq_faiss.methods import posterior_codebooks
from gpq_faiss.store import read_arrays

DIGITS = open_data("digits")


def content(path: Path) -> dict[str, Any]:
    """All arrays of a run but its log, which has times in it."""
    arrays, _ = read_arrays(path, "a run")
    arrays.pop("log", None)
    return arrays


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small grid, run."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    summary = run_experiment(small_grid(vectors=30), DIGITS, folder)
    assert (summary.made, summary.there, summary.total) == (10, 0, 10)
    assert not summary.failed
    return folder


def test_transfer_searches_classes_that_no_run_was_trained_on(tmp_path: Path) -> None:
    grid = small_grid(
        protocol="transfer:8,9", bits=[12], seeds=[0], methods=["gpq", "dtq", "pq", "classifier"]
    )
    summary = run_experiment(grid, DIGITS, tmp_path / "runs")
    assert (summary.made, summary.failed) == (4, {})
    of_item = DIGITS.require_labels().class_ids()
    for path in (tmp_path / "runs").glob("*.h5"):
        assert read_run(path).about["seen_classes"] == list(range(8))
        held = content(path)
        for role in ("query_rows", "database_rows"):
            assert set(of_item[held[role]]) == {8, 9}
    split = Split.load(next((tmp_path / "runs").glob("split_*.json")))
    assert set(of_item[np.concatenate([split.labelled, split.unlabelled])]) == set(range(8))


# --------------------------------------------------------------------------------------------------- what a run holds


@pytest.mark.parametrize("name", ["gpq_12bits_seed0", "pq_24bits_seed1"])
def test_a_run_can_be_ranked_again_from_its_file(done: Path, name: str) -> None:
    """Faiss, with the index and the codes of the file alone, gives the AP that the run says."""
    run = read_run(done / f"{name}.h5")
    more = content(run.path)
    index = faiss.deserialize_index(more["index"])
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
    inner.add_sa_codes(more["codes"])
    index.ntotal = inner.ntotal
    scores, found = index.search(more["search_input"], index.ntotal)
    names = run.about["class_names"]
    query = np.unpackbits(more["query_labels"], axis=1)[:, : len(names)].astype(bool)
    base = np.unpackbits(more["database_labels"], axis=1)[:, : len(names)].astype(bool)
    # PQ searches by distance; Faiss's rounding may split ties, so equal codes are given one score again.
    sign = -1.0 if scores[0, 0] <= scores[0, -1] else 1.0
    _, code_of = np.unique(more["codes"], axis=0, return_inverse=True)
    full = np.empty((len(query), len(base)), np.float32)
    for q in range(len(query)):
        row = np.empty(len(base))
        row[found[q]] = sign * scores[q]
        total = np.bincount(code_of, weights=row) / np.bincount(code_of)
        full[q] = total[code_of]
    again = rank_scores(full, Labels.from_multihot(query), Labels.from_multihot(base))
    np.testing.assert_allclose(again.ap, run.arrays["ap"], atol=2e-4)
    assert run.map == pytest.approx(again.map, abs=1e-5)


def test_a_run_says_all_that_it_is(done: Path) -> None:
    run = read_run(done / "gpq_24bits_seed1.h5", {"vectors", "vector_rows", "log", "top_ids", "codebooks"})
    about = run.about
    assert (run.method, run.bits, run.seed, run.variation) == ("gpq", 24, 1, "")
    assert about["bits_kept"] == 24
    assert about["settings"]["training"]["steps"] == 20
    assert about["steps"] == 20
    assert set(about["versions"]) == {"gpq_faiss", "python", "numpy", "torch", "faiss"}
    assert about["machine"]["cpu"]
    assert about["data"] == {"name": "digits", "fingerprint": DIGITS.fingerprint, "kind": "images"}
    assert about["counts"] == {"queries": 100, "labelled": 200, "unlabelled": 1497, "database": 1497}
    assert set(about["seconds"]) == {"fit", "encode", "rank"}
    assert "expected value" in about["convention"]
    assert run.arrays["top_ids"].shape == (100, min(TOP, 1497))
    assert run.arrays["vectors"].shape == (30, 6 * 12)
    assert run.arrays["codebooks"].shape == (6, 16, 12)
    log = [json.loads(line) for line in run.arrays["log"].tobytes().decode().splitlines()]
    assert [line["step"] for line in log] == [20]  # a line per 100 steps, and the last
    # Every method keeps the vectors of the same items.
    other = read_run(done / "pq_12bits_seed1.h5", {"vector_rows"})
    np.testing.assert_array_equal(run.arrays["vector_rows"], other.arrays["vector_rows"])
    whole = read_run(done / "float_any_seed0.h5", {"codes"})
    assert (whole.bits, set(whole.arrays)) == (0, {"ap"})


def test_the_splits_of_the_runs_are_there(done: Path) -> None:
    runs = [read_run(path) for path in done.glob("*.h5")]
    splits = {path.name: Split.load(path) for path in done.glob("split_*.json")}
    assert set(splits) == {f"split_{run.about['split_hash']}.json" for run in runs}
    assert sorted(split.seed for split in splits.values()) == [0, 1]
    for run in runs:
        split = splits[f"split_{run.about['split_hash']}.json"]
        assert split.hash == run.about["split_hash"]
        np.testing.assert_array_equal(content(run.path)["query_rows"], split.query)
        assert len(split.labelled) == run.about["counts"]["labelled"]


def test_top_rows_are_those_of_a_stable_sort() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, (60, 2)).astype(np.uint8)
    weights = rng.standard_normal((7, 2)).round(1)

    def score(rows: Any, distinct: Any) -> Any:
        return (weights[rows] @ distinct.T.astype(float)).astype(np.float32)

    full = score(np.arange(7), codes)
    for k in (1, 5, 59, 60):
        expected = np.argsort(-full, axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(top_rows(score, codes, 7, k, memory=1000), expected)


# ------------------------------------------------------------------------------------------------------------ only once


def test_what_is_done_is_skipped_and_what_changed_is_not(done: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in done.glob("*.h5")}
    summary = run_experiment(small_grid(vectors=30), DIGITS, done)
    assert (summary.made, summary.there) == (0, 10)
    assert {path: path.stat().st_mtime_ns for path in done.glob("*.h5")} == before

    folder = tmp_path / "x"
    pq = small_grid(methods=["pq"], seeds=[0])
    assert run_experiment(pq, DIGITS, folder).made == 2
    assert run_experiment(small_grid(methods=["pq"], seeds=[0, 1]), DIGITS, folder).made == 2
    assert run_experiment(dataclasses.replace(pq, vectors=3), DIGITS, folder).made == 2
    assert run_experiment(dataclasses.replace(pq, vectors=3), DIGITS, folder, overwrite=True).made == 2


def test_a_damaged_run_is_made_again(tmp_path: Path) -> None:
    grid = small_grid(methods=["pq"], seeds=[0], bits=[12])
    run_experiment(grid, DIGITS, tmp_path)
    path = tmp_path / "pq_12bits_seed0.h5"
    whole = content(path)
    spec = plan(grid, DIGITS, preset("paper")).specs[0]
    assert is_done(path, spec)
    data = bytearray(path.read_bytes())
    for damaged in (b"", data[: len(data) // 2], b"not HDF5 at all", data[:200] + b"\0" * (len(data) - 200)):
        path.write_bytes(damaged)
        assert not is_done(path, spec)
        with pytest.raises(DataError, match="pq_12bits_seed0"):
            read_run(path)
    assert run_experiment(grid, DIGITS, tmp_path).made == 1
    for name, array in content(path).items():
        np.testing.assert_array_equal(array, whole[name])


def test_a_folder_holds_one_experiment(done: Path, tmp_path: Path) -> None:
    grid = small_grid(vectors=30)
    for change, message in (
        ({"protocol": "2"}, "protocol 1, not 2"),
        ({"labelled": ("9-per-class",)}, "labelled"),
        ({"name": "other"}, "grid small, not other"),
    ):
        with pytest.raises(MismatchError, match=message):
            run_experiment(dataclasses.replace(grid, **change), DIGITS, done)  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="preset"):
        run_experiment(grid, DIGITS, done, base=preset("recommended"))
    changed = merge(preset("recommended"), {"loss": {"beta": 3.0}})
    folder = tmp_path / "y"
    pq = small_grid(methods=["pq"], bits=[12], seeds=[0])
    run_experiment(pq, DIGITS, folder, base=changed)
    assert read_about(folder)["changes"] == {"loss": {"beta": 3.0}}
    with pytest.raises(MismatchError, match="changes"):
        run_experiment(pq, DIGITS, folder, base=preset("recommended"))
    x = np.random.default_rng(0).standard_normal((200, 20)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(200) % 2)
    other = open_data(f"features:{tmp_path / 'x.npy'}", labels=str(tmp_path / "y.npy"))
    with pytest.raises(MismatchError, match="runs on digits, and these data differ"):
        run_experiment(pq, other, folder, base=changed)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "experiment.json").write_text("[]")
    with pytest.raises(MismatchError, match="not an experiment of this version"):
        run_experiment(pq, DIGITS, tmp_path / "foreign")


def test_an_experiment_is_not_gone_on_with_after_its_images_were_replaced(tmp_path: Path) -> None:
    """By others of the same names, sizes and times."""
    rng, data = np.random.default_rng(0), f"folder:{tmp_path / 'images'}"
    for seed in (0, 1):
        for i in range(120):
            path = tmp_path / "images" / f"{i % 2}" / f"{i:03}.bmp"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
            os.utime(path, (1e9, 1e9))
        grid = small_grid(methods=["pq"], bits=[12], seeds=[0, 1], labelled=["9-per-class"])
        if seed == 0:
            run_experiment(dataclasses.replace(grid, seeds=(0,)), open_data(data), tmp_path / "out")
        else:
            with pytest.raises(MismatchError, match="these data differ: choose another --out"):
                run_experiment(grid, open_data(data), tmp_path / "out")


def test_arguments_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 jobs"):
        run_experiment("table2", DIGITS, tmp_path, jobs=0)
    with pytest.raises(UsageError, match="give its name"):
        run_experiment("table2", DIGITS, tmp_path, jobs=2)
    for changes, key in (({"training": {"seed": 5}}, "seeds"), ({"quantizer": {"codebooks": 9}}, "bits")):
        with pytest.raises(UsageError, match=f"it follows from the grid's {key}"):
            run_experiment(small_grid(), DIGITS, tmp_path, base=merge(preset("paper"), changes))
    all_labelled = small_grid(methods=["pq"], bits=[12], seeds=[0], labelled=["all"])
    summary = run_experiment(all_labelled, DIGITS, tmp_path)
    assert "0 items to search: label fewer" in summary.failed["pq_12bits_seed0"]


def test_overwriting_replaces_run_by_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run has a file all the time, and what is cut off goes on with the runs that are left."""
    grid = small_grid(methods=["pq"], bits=[12, 24], seeds=[0, 1])
    run_experiment(grid, DIGITS, tmp_path)
    old = {path.name: path.stat().st_ino for path in tmp_path.glob("*.h5")}
    assert len(old) == 4
    real = compute
    made: list[str] = []

    def watched(spec: RunSpec, *args: Any, **kwargs: Any) -> Any:
        there = {path.name: path.stat().st_ino for path in tmp_path.glob("*.h5")}
        assert there.keys() == old.keys()
        assert {name for name in old if there[name] != old[name]} == {f"{name}.h5" for name in made}
        if len(made) == stop:
            raise KeyboardInterrupt
        made.append(spec.name)
        return real(spec, *args, **kwargs)

    monkeypatch.setattr(workers, "compute", watched)
    stop = 1
    with pytest.raises(KeyboardInterrupt):
        run_experiment(grid, DIGITS, tmp_path, overwrite=True)
    stop = 99
    summary = run_experiment(grid, DIGITS, tmp_path)
    assert (summary.made, summary.there) == (3, 1)
    assert sorted(made) == sorted(name.removesuffix(".h5") for name in old)
    assert not (tmp_path / ".partial").exists()
    assert (summary.made + summary.there, run_experiment(grid, DIGITS, tmp_path).made) == (4, 0)


def test_overwriting_leaves_a_run_to_the_process_that_is_at_it(tmp_path: Path) -> None:
    grid = small_grid(methods=["pq"], bits=[12, 24], seeds=[0])
    run_experiment(grid, DIGITS, tmp_path)
    held = files.lock(tmp_path / ".partial" / "pq_12bits_seed0" / files.LOCK)
    begun = tmp_path / ".partial" / "pq_12bits_seed0" / "0123456789abcdef"
    begun.mkdir()
    assert held is not None
    summary = run_experiment(grid, DIGITS, tmp_path, overwrite=True)
    assert summary.made == 1
    assert begun.exists(), "what another process works in was removed"
    os.close(held)
    run_experiment(grid, DIGITS, tmp_path)
    assert not (tmp_path / ".partial").exists()


def call_of(folder: Path, steps: int) -> list[str]:
    """Arguments of ``gpq`` for two trainings of so many steps, which save their state twenty times a second."""
    config = "".join(f"{key} = {value}\n" for key, value in (SMALL | {"steps": steps}).items())
    (folder / "c.toml").write_text(f"[training]\n{config}")
    (folder / "g.toml").write_text(
        'methods = ["gpq"]\nbits = [12, 24]\nlabelled = ["20-per-class"]\npreset = "paper"\n'
    )
    files = [str(folder / "g.toml"), "digits", "--config", str(folder / "c.toml")]
    return ["experiment", "run", *files, "--checkpoint-seconds", "0.05"]


@pytest.mark.slow
def test_sigterm_ends_an_experiment_of_several_processes(tmp_path: Path) -> None:
    """Sent to the first process alone, as a batch system or ``kill`` does: all of them save and end."""
    run, out = call_of(tmp_path, 100_000), tmp_path / "out"
    start = "from gpq_cli.main import cli; cli()"
    command = [sys.executable, "-c", start, "-q", *run, "--jobs", "2", "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 600  # three processes load torch first
            while len(list(out.glob(".partial/*/*/checkpoint.safetensors"))) < 2:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.terminate()
            _, stderr = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 143
    assert stderr == "gpq: ended by SIGTERM: run the same command again\n"
    # The processes ended before it did, and each let its lock go.
    assert not list(out.glob(".partial/*/lock"))


# ------------------------------------------------------------------------------------------------------------ failures


def test_a_failed_run_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = compute

    def broken(spec: RunSpec, *args: Any, **kwargs: Any) -> Any:
        if spec.bits == 24:
            raise ZeroDivisionError("a defect\nover two lines")
        return real(spec, *args, **kwargs)

    monkeypatch.setattr(workers, "compute", broken)
    grid = small_grid(methods=["pq", "itq"], seeds=[0])
    with caplog.at_level(logging.INFO, "gpq_faiss"):
        summary = run_experiment(grid, DIGITS, tmp_path)
    assert summary.made == 2
    assert set(summary.failed) == {"pq_24bits_seed0", "itq_24bits_seed0"}
    told = summary.failed["pq_24bits_seed0"]
    assert told.startswith("ZeroDivisionError in test_run.py:")
    assert told.endswith("a defect over two lines")
    assert any("pq 24 bits seed 0 failed: ZeroDivisionError" in line for line in caplog.messages)
    assert set(read_about(tmp_path)["failed"]) == set(summary.failed)
    monkeypatch.setattr(workers, "compute", real)
    assert run_experiment(grid, DIGITS, tmp_path).made == 2
    assert read_about(tmp_path)["failed"] == {}


def test_a_run_that_another_process_has_is_left_to_it(tmp_path: Path) -> None:
    grid = small_grid(methods=["pq"], bits=[12, 24], seeds=[0])
    lock = tmp_path / ".partial" / "pq_12bits_seed0" / "lock"
    lock.parent.mkdir(parents=True)
    code = (
        "import fcntl, sys, time\n"
        "f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('mine', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mine\n"
        summary = run_experiment(grid, DIGITS, tmp_path)
        other.kill()
    assert summary.elsewhere == ["pq_12bits_seed0"]
    assert summary.made == 1
    assert run_experiment(grid, DIGITS, tmp_path).made == 1


@pytest.mark.slow
def test_processes_give_what_one_process_gives_and_one_may_die(done: Path, tmp_path: Path) -> None:
    grid = small_grid(vectors=30, methods=["pq"])
    specs = plan(grid, DIGITS, preset("paper")).specs
    place = RunContext(tmp_path, "small", "digits", {}, "digits")
    heard: list[RunResult] = []

    def kill() -> None:
        while not multiprocessing.active_children():
            time.sleep(0.01)
        pid = multiprocessing.active_children()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    make_runs(place, specs, dataset=DIGITS, jobs=2, report=heard.append)
    killer.join()
    assert {finished.spec.name for finished in heard} == {spec.name for spec in specs}
    failed = [finished for finished in heard if finished.status == "failed"]
    assert [f.text for f in failed] == ["its process was killed (out of memory?)"]
    finished = [f.spec.name for f in heard if f.status == "done"]
    assert len(finished) == len(specs) - 1
    for name in finished:
        alone, beside = content(done / f"{name}.h5"), content(tmp_path / f"{name}.h5")
        assert alone.keys() == beside.keys()
        for key in alone:
            np.testing.assert_array_equal(alone[key], beside[key], err_msg=f"{name} {key}")


def _log(path: Path) -> list[str]:
    return read_run(path, {"log"}).arrays["log"].tobytes().decode().splitlines()


@pytest.mark.slow
def test_a_killed_experiment_goes_on_and_comes_to_the_same(tmp_path: Path) -> None:
    """kill -9 in the middle of a training: the processes end too, and the next call takes up the checkpoint."""
    run = call_of(tmp_path, 200)
    start = "from gpq_cli.main import cli; cli()"
    command = [sys.executable, "-c", start, *run, "--jobs", "2", "--out", str(tmp_path / "killed")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 240  # three processes load torch first
        while not list((tmp_path / "killed").glob(".partial/*/*/checkpoint.safetensors")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
    assert not list((tmp_path / "killed").glob("*.h5"))
    time.sleep(1.5)  # the processes see that their parent is gone
    for out in ("killed", "whole"):
        base = read_toml(tmp_path / "c.toml", preset("paper"))
        summary = run_experiment(tmp_path / "g.toml", "digits", tmp_path / out, base=base)
        assert (summary.made, summary.there) == (2, 0)
        assert not summary.failed
        steps = [json.loads(line)["step"] for line in _log(tmp_path / out / "gpq_12bits_seed0.h5")]
        assert steps[-1] == 200
    for name in ("gpq_12bits_seed0.h5", "gpq_24bits_seed0.h5"):
        killed, whole = content(tmp_path / "killed" / name), content(tmp_path / "whole" / name)
        for key in whole:
            np.testing.assert_array_equal(killed[key], whole[key], err_msg=f"{name} {key}")
    assert not (tmp_path / "killed" / ".partial").exists()


def test_a_training_that_is_shared_between_lengths_is_that_of_each_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posterior_codebooks, "_TABLE_STEPS", 30)
    grid = small_grid(
        methods=["posterior"],
        bits=[8, 12],
        seeds=[0],
        preset="recommended",
        config={"training": {**SMALL, "validation": 0.0}, "posterior": {"committee_hidden": 16}},
    )
    together, alone = tmp_path / "together", tmp_path / "alone"
    run_experiment(grid, "digits", together)
    run_experiment(grid.with_options(bits=(12,)), "digits", alone)
    (path,) = alone.glob("posterior*.h5")
    one = read_run(path, {"codes", "codebooks", "ap", "search_input"}).arrays
    shared = read_run(together / path.name, set(one)).arrays
    for name, values in one.items():
        np.testing.assert_array_equal(values, shared[name])
    seconds = {read_run(path).about["seconds"]["fit"] for path in together.glob("posterior*.h5")}
    assert len(seconds) == 1  # of one training


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("kind", "rows", "is not a run of gpq experiment"),
        ("format_version", 99, "has format 99"),
        ("bits", None, "'bits' is missing or wrong"),
        ("likeness", '{"definition": 3}', "'likeness' is missing or wrong"),
        ("counts", '{"queries": 7}', "'counts' is missing or wrong"),
        ("counts", '{"queries": 7, "labelled": 1, "unlabelled": 1, "database": 1}', "'ap' is missing"),
        ("map", 0.123, "its mAP is not the mean"),
    ],
)
def test_a_damaged_run_is_one_error(
    done: Path, tmp_path: Path, attribute: str, value: Any, message: str
) -> None:
    run = shutil.copy(next(done.glob("*.h5")), tmp_path / "run.h5")
    with h5py.File(run, "r+") as file:
        assert attribute in file.attrs
        del file.attrs[attribute]
        if value is not None:
            file.attrs[attribute] = value
    with pytest.raises(DataError, match=message):
        read_run(run)
