"""Runs: made once, resumed after an interruption, counted if they fail, and ranked again by
file."""

import dataclasses
import shutil

import numpy as np
import pytest
from experiment.experiments import DIGITS, ONE, PQ, WHOLE, assert_same, complete, small_grid

from gpq_faiss import open_data, rank_scores, run_experiment
from gpq_faiss.data.protocols import make_split
from gpq_faiss.errors import DataError, GpqError
from gpq_faiss.experiment import run as running
from gpq_faiss.experiment.run import compute, top_rows
from gpq_faiss.experiment.runs import read_run
from gpq_faiss.store.hdf5 import read_arrays

# Content of a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpq_12bits_seed0", "pq_24bits_seed1"])
def test_tables_and_codes_of_a_file_give_its_ap(finished, name):
    arrays, _ = read_arrays(finished / f"{name}.h5", "a run")
    run = read_run(finished / f"{name}.h5")
    tables, packed = arrays["tables"], arrays["codes"]
    codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)
    scores = sum(tables[:, m, codes[:, m]] for m in range(tables.shape[1]))
    ranking = rank_scores(scores, arrays["query_labels"], arrays["database_labels"])
    np.testing.assert_allclose(ranking.ap, run.arrays["ap"], atol=2e-4)
    assert run.map == pytest.approx(ranking.map, abs=1e-5)


def test_methods_of_a_seed_share_split_and_stored_items(finished):
    names = {"vectors", "vector_rows", "top_ids", "query_rows", "database_rows"}
    run, pq_run = (read_run(finished / f"{x}_12bits_seed1.h5", names) for x in ("gpq", "pq"))
    assert run.arrays["vectors"].shape == (30, 3 * 12)
    assert run.arrays["top_ids"].shape == (100, 1000)
    split = make_split(DIGITS, "1", seed=1, labelled="20-per-class")
    assert run.split_hash == split.hash
    np.testing.assert_array_equal(run.arrays["vector_rows"], pq_run.arrays["vector_rows"])
    np.testing.assert_array_equal(pq_run.arrays["query_rows"], split.query)
    np.testing.assert_array_equal(pq_run.arrays["database_rows"], split.database)


@pytest.mark.parametrize("k", [1, 5, 59, 60])
def test_top_rows_equal_a_stable_sort(k):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, (60, 2)).astype(np.uint8)
    weights = rng.standard_normal((7, 2)).round(1)

    def score(rows, distinct):
        return (weights[rows] @ distinct.T.astype(float)).astype(np.float32)

    expected = np.argsort(-score(np.arange(7), codes), axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(top_rows(score, codes, 7, k), expected)


# Finished and damaged runs ------------------------------------------------------------------------


def test_changed_and_overwritten_runs_are_repeated(tmp_path):
    for changes, overwrite in (
        ({}, False),
        ({"seeds": [0, 1]}, False),
        ({"vectors": 3}, False),
        ({}, True),
    ):
        grid = small_grid(**ONE | changes)
        assert run_experiment(grid, DIGITS, tmp_path, overwrite=overwrite).completed == 1


@pytest.mark.parametrize("size", [0, 200, 9000])
def test_a_damaged_file_is_an_error_and_repeated(finished, tmp_path, size):
    folder = shutil.copytree(finished, tmp_path / "x")
    path = folder / "pq_12bits_seed0.h5"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match="pq_12bits_seed0"):
        read_run(path)
    assert complete(folder, **WHOLE).completed == 1
    assert_same(path, finished / path.name)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"protocol": "2"}, {}, "protocol 1, not 2"),
        ({"labelled": "9-per-class"}, {}, "labelled 20-per-class, not 9-per-class"),
        ({"name": "other"}, {}, "name small, not other"),
        ({"config": {"loss": {"lambda1": 3.0}}}, {}, "}, not {'loss': {'lambda1': 3.0}}: choose"),
        ({"settings": {"loss": {"lambda1": 3.0}}}, {}, "settings unset, not"),
        (
            {},
            {"data": open_data(np.eye(200, dtype=np.float32), labels=np.arange(200) % 2)},
            "experiment with data",
        ),
    ],
)
def test_another_experiment_in_the_folder_is_refused(finished, change, options, message):
    grid = small_grid(**WHOLE).with_options(**change)
    with pytest.raises(GpqError, match=message):
        run_experiment(grid, **{"data": DIGITS, "out": finished} | options)


# Failures and interruptions -----------------------------------------------------------------------


def test_a_failed_run_does_not_stop_the_others(tmp_path, monkeypatch):
    def broken(spec, *args, **kwargs):
        if spec.bits == 24:
            raise ZeroDivisionError("a defect\nover two lines")
        return compute(spec, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(running, "compute", broken)
        summary = run_experiment(small_grid(**PQ), DIGITS, tmp_path)
    assert summary.completed == 1
    assert summary.failed["pq_24bits_seed0"].endswith("a defect over two lines")
    assert complete(tmp_path, **PQ).completed == 1


def test_a_split_without_database_fails_in_one_line(tmp_path):
    summary = run_experiment(small_grid(**ONE, labelled="all"), DIGITS, tmp_path)
    assert "0 items to search: label fewer" in summary.failed["pq_12bits_seed0"]


def test_two_processes_give_the_files_of_one(finished, tmp_path):
    grid = small_grid(vectors=30, methods=["pq"])
    assert run_experiment(grid, "digits", tmp_path, jobs=2).completed == 4
    for path in tmp_path.glob("*.h5"):
        assert_same(path, finished / path.name)


def test_an_interrupted_training_resumes_to_the_same_file(finished, tmp_path, monkeypatch):
    grid = {"methods": ["gpq"], "bits": [12], "seeds": [0], "vectors": 30}

    def stop(step, steps):
        raise KeyboardInterrupt

    def interrupted(spec, dataset, work, options):
        options = dataclasses.replace(
            options, checkpoint_seconds=0.0, validate_every=5, progress=stop
        )
        return compute(spec, dataset, work, options)

    with monkeypatch.context() as patched:
        patched.setattr(running, "compute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            complete(tmp_path, **grid)
    assert list(tmp_path.glob(".partial/*/checkpoint.safetensors"))
    assert complete(tmp_path, **grid).completed == 1
    assert_same(tmp_path / "gpq_12bits_seed0.h5", finished / "gpq_12bits_seed0.h5")


def test_foreign_folders_are_refused(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(DataError, match="something other than an experiment"):
        complete(tmp_path, **ONE)
