"""Small experiments that the tests share."""

from pathlib import Path
from typing import Any

import numpy as np

from gpq_faiss.data.open import open_data
from gpq_faiss.experiment.grid import Grid, grid_from
from gpq_faiss.experiment.run import Summary, run_experiment
from gpq_faiss.store.hdf5 import read_arrays

DIGITS = open_data("digits")
SMALL = {"steps": 20, "batch_labelled": 40, "batch_unlabelled": 40}
SHORT = {"training": SMALL | {"steps": 2}}
PQ = {"methods": ["pq"], "seeds": [0]}
ONE = PQ | {"bits": [12]}
NO_ENTROPY = {"name": "λ2 = 0", "methods": ["gpq"], "config": {"loss": {"lambda2": 0.0}}}
WHOLE = {
    "methods": ["float", "pq", "gpq", "gpq-f"],
    "variation": [{}, NO_ENTROPY],
    "vectors": 30,
}


def small_grid(**changes: Any) -> Grid:
    """A grid over digits that takes a second or two."""
    values = {
        "name": "small",
        "title": "Small",
        "methods": ["gpq", "pq", "float"],
        "bits": [12, 24],
        "seeds": [0, 1],
        "labelled": "20-per-class",
        "preset": "paper",
        "config": {"training": SMALL},
    }
    return grid_from(values | changes)


def complete(folder: Path, **changes: Any) -> Summary:
    """Make the missing runs of a small grid, none of which may fail."""
    summary = run_experiment(small_grid(**changes), DIGITS, folder)
    assert not summary.failed
    return summary


def assert_same(path: Path, expected: Path) -> None:
    """Two runs have the same arrays."""
    first, second = (read_arrays(file, "a run")[0] for file in (path, expected))
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=f"{path.name} {name}")
