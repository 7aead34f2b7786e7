"""A finished experiment."""

from pathlib import Path

import pytest
from experiment.experiments import DIGITS, WHOLE, small_grid

from gpq_faiss.experiment.run import run_experiment


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpq (two variations), pq and float at two lengths and two seeds, gpq-f left out."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    summary = run_experiment(small_grid(**WHOLE), DIGITS, folder)
    assert (summary.made, summary.there, summary.total, summary.failed) == (14, 0, 14, {})
    assert set(summary.left_out) == {"gpq-f"}
    return folder
