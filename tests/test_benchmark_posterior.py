"""benchmarks/posterior.py: its tables are those of its figures, and its variations are those that a training would make."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpq_faiss.methods.leave_one_out import least_error

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def posterior() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("posterior")


def test_the_committed_tables_are_those_of_the_committed_figures(posterior: Any) -> None:
    results = json.loads((RESULTS / "posterior.json").read_text(encoding="utf-8"))
    assert posterior.markdown(results) == (RESULTS / "posterior.md").read_text(encoding="utf-8")


def test_ridge_regression_says_of_an_item_what_leaving_it_out_says(posterior: Any) -> None:
    rng = np.random.default_rng(0)
    y = np.eye(3, dtype=np.float32)[rng.integers(0, 3, 60)]
    x = (y @ rng.normal(size=(3, 5)) + rng.normal(size=(60, 5))).astype(np.float32)
    sigma, left_out = least_error(x, y)
    with pytest.MonkeyPatch.context() as patch:
        # The same σ without each item: nσ² is the weight of all 60.
        patch.setattr(posterior, "least_error", lambda a, b: (sigma * (60 / 59) ** 0.5, None))
        for i in range(5):
            others = np.arange(60) != i
            one = posterior.ridge_predictions(x[others], y[others], x[i : i + 1])[0]
            np.testing.assert_allclose(one, left_out[i], atol=1e-4)


@pytest.mark.parametrize(("classes", "rule"), [(10, 4), (242, 10)])
def test_weight_zero_gives_all_codebooks_to_the_class(posterior: Any, classes: int, rule: int) -> None:
    tables = posterior.variations(classes)
    for row, way in tables["weight"]:
        assert float(row) == way.feature_weight
        assert way.class_codebooks == (rule if way.feature_weight else way.bits // 4)
        assert way.power == ("root" if way.feature_weight else "calibrated")
    assert [way.class_codebooks for _, way in tables["number"]] == [6, rule, 10, 12]
    assert {way.power for _, way in tables["power"]} == {"1", "root", "calibrated"}
