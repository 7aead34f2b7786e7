"""Small experiments that the tests share."""

from __future__ import annotations

from typing import Any

from gpq_faiss.experiment.grid import Grid, grid_from

SMALL: dict[str, Any] = {"steps": 20, "batch_labelled": 40, "batch_unlabelled": 40}


def small_grid(**changes: Any) -> Grid:
    """A grid over digits that takes a second or two."""
    values: dict[str, Any] = {
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
