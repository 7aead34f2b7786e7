"""A finished experiment."""

from pathlib import Path

import pytest
from experiment.experiments import WHOLE, complete


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpq (two variations), pq and float at two lengths and two seeds, gpq-f left out."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    summary = complete(folder, **WHOLE)
    assert (summary.completed, summary.existing, summary.total) == (14, 0, 14)
    return folder
