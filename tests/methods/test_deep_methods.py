"""What every trained method beside GPQ must do, on digits: learn, rank better for it, end in an index that agrees, repeat itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from deep_training import (
    codes_of,
    digits,
    features,
    filled,
    fitted,
    logged,
    quality,
    quick_config,
    split_of,
    trained,
    vectors,
)

from gpq_faiss.data.base import Dataset
from gpq_faiss.methods.registry import METHODS, make_builder


@dataclass(frozen=True)
class Expected:
    """Of a method.

    Attributes:
        part: of its loss, that training lowers.
        left: share of it that is left at most.
        index: kind of its Faiss index.
    """

    part: str
    left: float
    index: type = faiss.IndexBinaryFlat


EXPECTED = {
    "ssgah": Expected("rank", 0.5),
    "bgdh": Expected("pairs", 0.7),
    "ssdh": Expected("total", 0.5),
    "pqn": Expected("total", 0.5, faiss.IndexPQ),
    "dtq": Expected("quantisation", 0.8, faiss.IndexPQ),
    "dqn": Expected("cosine", 0.95, faiss.IndexPQ),
    "subic": Expected("classification", 0.7, faiss.IndexPQ),
    "ninh": Expected("total", 0.3),
    "cnnh": Expected("total", 0.5),
}
each_method = pytest.mark.parametrize("name", list(EXPECTED))


def test_no_trained_method_is_left_out() -> None:
    assert set(EXPECTED) == {name for name, entry in METHODS.items() if entry.deep and entry.module != ".gpq"}


@each_method
def test_training_lowers_the_objective_and_ranks_better(name: str) -> None:
    run, expected = trained(name), EXPECTED[name]
    values = logged(run, expected.part)
    assert values[-1] < expected.left * values[0], values
    before = quality(make_builder(name)(quick_config(), features(), 8, 10), features())
    after = quality(run.method, features())
    assert after > max(0.55, before + 0.25), (before, after)


@each_method
def test_the_index_ranks_as_the_score(name: str) -> None:
    """A Faiss index filled with the codes finds every item, at the score of the coder."""
    method = trained(name).method
    split, coder = split_of(features()), method.coder()
    xq, xb = vectors(method, features(), split.query), vectors(method, features(), split.database)
    codes = coder.encode(xb)
    index = filled(coder, codes)
    assert isinstance(index, EXPECTED[name].index)
    distances, ids = index.search(coder.search_input(xq), len(xb))
    scores = np.take_along_axis(coder.score(xq, codes), ids, axis=1)
    # Larger scores are better, and smaller distances; those of bits are whole numbers.
    sign = 1 if index.metric_type == faiss.METRIC_INNER_PRODUCT else -1
    exact = isinstance(index, faiss.IndexBinary)
    rtol, atol = (0.0, 0.0) if exact else (1e-5, 2e-5 * float(np.abs(scores).max()))
    np.testing.assert_allclose(scores, sign * distances.astype(np.float64), rtol=rtol, atol=atol)
    assert np.array_equal(np.sort(ids, axis=1), np.tile(np.arange(len(xb)), (len(xq), 1)))


@each_method
def test_the_seed_determines_the_codes_also_of_a_run_that_was_cut(name: str, tmp_path: Path) -> None:
    build = make_builder(name)

    def cut(step: int, steps: int, figures: dict[str, float]) -> None:
        if step == 7:
            raise InterruptedError

    short: dict[str, Any] = {"bits": 12, "steps": 12, "validation": 0.2}
    often: dict[str, Any] = {"checkpoint_seconds": 0.0}
    four: dict[str, Any] = {"validate_every": 4}
    whole = fitted(build, features(), quick_config(**short), tmp_path / "whole", **four)
    with pytest.raises(InterruptedError):
        fitted(build, features(), quick_config(**short), tmp_path / "cut", progress=cut, **often, **four)
    again = fitted(build, features(), quick_config(**short), tmp_path / "cut", resume=True, **often, **four)
    assert again.run.step == 12
    states = [run.method.state_dict() for run in (whole, again)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
    codes = codes_of(whole.method, features())
    np.testing.assert_array_equal(codes, codes_of(again.method, features()))
    other = fitted(build, features(), quick_config(**short, seed=1), tmp_path / "other", **four)
    assert not np.array_equal(codes, codes_of(other.method, features()))


@each_method
def test_images_work_too_and_repeat_themselves(name: str, tmp_path: Path) -> None:
    dataset: Dataset = digits()
    same, again, other = (
        codes_of(
            fitted(make_builder(name), dataset, quick_config(steps=12, seed=seed), tmp_path / part).method,
            dataset,
        )
        for part, seed in (("same", 1), ("again", 1), ("other", 2))
    )
    assert (same == again).all()
    assert (same != other).any()
