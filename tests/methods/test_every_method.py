"""What every method must do: rank by class, score as Faiss does, give equal codes equal scores,
repeat itself, refuse bad input."""

import json
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from array_data import XB, XQ, YB, YQ, X, Y, assert_faiss_ranks_alike, quick
from deep_training import (
    codes_of,
    digits,
    features,
    fitted,
    made,
    quick_config,
    split_of,
    trained,
    vectors,
)
from numpy.typing import NDArray

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.data.labels import Labels
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.evaluation.ranking import rank_codes
from gpq_faiss.methods.coders import BinaryMethod, Coder
from gpq_faiss.methods.registry import ARRAY_METHODS, METHODS, find_method, make_method

DEEP = {
    # Of the loss, the part that training lowers, and the share of it that is left at most.
    "ssgah": ("rank", 0.5),
    "bgdh": ("pairs", 0.7),
    "ssdh": ("total", 0.5),
    "pqn": ("total", 0.5),
    "dtq": ("quantisation", 0.8),
    "dqn": ("cosine", 0.95),
    "subic": ("classification", 0.7),
    "ninh": ("total", 0.3),
    "cnnh": ("total", 0.5),
}
LENGTHS = {"pq": (4, 12, 16), "opq": (12, 16), "itq": (5, 12)}  # 12: zero-padded
CODECS = ("faiss:RQ2x6", "faiss:RaBitQ", "faiss:ITQ12,LSH", "faiss:OPQ3,PQ3x4")
ARRAYS = [(name, bits) for name in (*ARRAY_METHODS, *CODECS) for bits in LENGTHS.get(name, (12,))]
each_deep = pytest.mark.parametrize("name", DEEP)
each_array = pytest.mark.parametrize(("name", "bits"), ARRAYS)
each_case = pytest.mark.parametrize(("name", "bits"), [*ARRAYS, *((name, 16) for name in DEEP)])


class Case(NamedTuple):
    coder: Coder
    xq: NDArray[Any]
    xb: NDArray[Any]
    yq: Labels
    yb: Labels

    @property
    def map(self):
        codes = self.coder.encode(self.xb)
        return rank_codes(
            lambda q, c: self.coder.score(self.xq[q], c), codes, self.yq.packed, self.yb.packed
        ).map


def of_network(method):
    split, labels = split_of(features()), features().require_labels()
    xq, xb = (vectors(method, features(), rows) for rows in (split.query, split.database))
    return Case(method.coder(), xq, xb, labels.take(split.query), labels.take(split.database))


@cache
def case(name, bits):
    if name in DEEP:
        return of_network(trained(name).method)
    return Case(quick(name, bits).fit(X, Y), XQ, XB, YQ, YB)


@each_case
def test_scores_are_sums_of_tables_and_rank_as_faiss(name, bits):
    coder, xq, xb, *_ = case(name, bits)
    tables = coder.score_tables(xq)
    assert (tables is None) == (
        name in ("lopq", "float", "classifier", "classifier-6", "faiss:RQ2x6", "faiss:RaBitQ")
    )
    if tables is None:
        return
    codes = coder.encode(xb)
    summed = tables[:, np.arange(coder.M), unpack_codes(codes, coder.M, coder.K)].sum(axis=2)
    np.testing.assert_allclose(coder.score(xq, codes), summed, rtol=1e-5, atol=2e-5)
    assert isinstance(coder, BinaryMethod) == (
        find_method(name).code == "binary" and name not in ("subic", "itq")
    )
    assert_faiss_ranks_alike(coder, xq, xb)


@each_case
def test_equal_codes_have_bit_equal_scores_whatever_lies_around(name, bits):
    coder, xq, xb, *_ = case(name, bits)
    codes = coder.encode(xb)
    assert (codes.dtype, codes.shape) == (np.uint8, (len(xb), coder.code_size))
    rows = np.random.default_rng(5).integers(0, len(codes), 500)
    alone = coder.score(xq, codes)
    assert alone.dtype == np.float32
    np.testing.assert_array_equal(coder.score(xq, codes[rows]), alone[:, rows])
    np.testing.assert_array_equal(coder.score(xq, codes[7:8])[:, 0], alone[:, 7])
    parts = np.concatenate([coder.encode(xb[:0]), coder.encode(xb[:1]), coder.encode(xb[1:])])
    if name.startswith("class"):  # torch's sums follow the batch in the last bits
        np.testing.assert_allclose(
            parts.view(np.float32), codes.view(np.float32), rtol=1e-4, atol=1e-6
        )
    else:
        assert (parts != codes).any(axis=1).mean() <= 0.01


@each_array
def test_array_methods_repeat_by_seed_and_rank_well_above_chance(name, bits):
    method = case(name, bits).coder
    of_torch, of_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    np.testing.assert_array_equal(method.encode(XB), quick(name, bits).fit(X, Y).encode(XB))
    assert torch.equal(of_torch, torch.get_rng_state())
    assert (of_numpy == np.random.get_state()[1]).all()  # noqa: NPY002
    second = quick(name, bits, 7).fit(X, Y)
    if name not in ("float", "sh", "faiss:RaBitQ"):  # which have nothing to draw
        assert (method.encode(XB) != second.encode(XB)).any()
    assert case(name, bits).map > (0.9 if name.startswith(("class", "sdh")) else 0.45)


@each_deep
def test_training_lowers_the_objective_and_ranks_better(name):
    piece, remainder = DEEP[name]
    values = [json.loads(line)[piece] for line in trained(name).run.lines]
    assert values[-1] < remainder * values[0], values
    before, after = of_network(made(name, features())).map, case(name, 16).map
    assert after > max(0.55, before + 0.25), (before, after)


@pytest.mark.parametrize("name", [*DEEP, "gpq"])
def test_the_seed_determines_the_codes_also_of_resumed_runs(name, tmp_path):
    def cut(step, steps):
        if step == 5:
            raise InterruptedError

    config, often = (
        quick_config(12, 8, validation=0.2),
        {"checkpoint_seconds": 0.0, "validate_every": 4},
    )
    full = fitted(name, digits(), config, tmp_path / "whole", validate_every=4)
    with pytest.raises(InterruptedError):
        fitted(name, digits(), config, tmp_path / "cut", progress=cut, **often)
    again = fitted(name, digits(), config, tmp_path / "cut", resume=True, **often)
    assert again.run.step == 8
    states = [run.method.state_dict() for run in (full, again)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    codes = codes_of(full.method, digits())
    np.testing.assert_array_equal(codes, codes_of(again.method, digits()))
    second = fitted(
        name, digits(), config.with_settings({"training": {"seed": 2}}), tmp_path / "other"
    )
    assert (codes != codes_of(second.method, digits())).any()


@pytest.mark.parametrize("name", ARRAY_METHODS)
def test_refuses_what_cannot_be(name):
    assert make_method(name, 24, seed=5).name == name
    with pytest.raises(UsageError, match="bits"):
        make_method(name, 0)
    bad = X.copy()
    bad[[4, 9], 3] = np.nan, np.inf
    refused = [
        (bad, Y, "training vectors: NaN or infinity in rows 4, 9"),
        (X[0], None, "expected numbers"),
    ]
    if METHODS[name].learns == "supervised":
        refused.append((X, Y.masked(np.arange(0)), "no item has one"))
    for x, y, match in refused:
        with pytest.raises(DataError, match=match):
            make_method(name, 12).fit(x, y)
    method = case(name, 12).coder
    assert (METHODS[name].code != "none") == (method.bits == 12)
    with pytest.raises(DataError, match=r"expected numbers \[n, 20\]"):
        method.encode(XB[:, :19])
