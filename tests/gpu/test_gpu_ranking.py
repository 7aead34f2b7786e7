"""Rankings measured on a device: the numbers of the ranking on the CPU, whatever the convention."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from gpu_helpers import FEW, on_devices
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.data.labels import Labels
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.evaluation.ranking import RankingResult, rank_codes
from gpq_faiss.evaluation.ties import RECALL_LEVELS
from gpq_faiss.gpu import ranking
from gpq_faiss.gpu.ranking import rank_on_device

CONVENTIONS: list[dict[str, Any]] = [
    *({"ties": ties} for ties in ("expected", "id", "best", "worst")),
    *({"ties": ties, "k": 3} for ties in ("expected", "id", "best", "worst")),
    {"k": 7, "denominator": "min(k, relevant)"},
    {"k": 20, "denominator": "relevant-in-top-k"},
]


def agree(found: RankingResult, expected: RankingResult) -> None:
    for name in ("map", "ap", "precision", "recall", "pr_precision"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-12)
    for name in (
        "n_queries",
        "n_database",
        "n_distinct",
        "queries_without_relevant",
        "convention",
        "notes",
    ):
        assert getattr(found, name) == getattr(expected, name)
    assert np.array_equal(found.pr_recall, expected.pr_recall)
    assert list(found.precision) == list(expected.precision)


@on_devices
@FEW
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 400),
    classes=st.integers(1, 90),
    share=st.floats(0.01, 0.5),
    spread_of_codes=st.integers(1, 16),
    M=st.sampled_from([1, 3, 6, 12]),
    whole_numbers=st.booleans(),
    blocks=st.booleans(),
    convention=st.sampled_from(CONVENTIONS),
    levels=st.sampled_from([None, (0.0, 1.0), tuple(RECALL_LEVELS)]),
    ks=st.sampled_from([(), (1,), (1, 5, 100)]),
)
def test_every_measure_is_that_of_the_ranking_on_the_cpu(
    device: str,
    seed: int,
    n: int,
    classes: int,
    share: float,
    spread_of_codes: int,
    M: int,
    whole_numbers: bool,
    blocks: bool,
    convention: dict[str, Any],
    levels: tuple[float, ...] | None,
    ks: tuple[int, ...],
) -> None:
    rng = np.random.default_rng(seed)
    Q = 9
    tables = rng.normal(size=(Q, M, 16))
    tables = (np.rint(tables) if whole_numbers else tables).astype(
        np.float32
    )  # sums tie across codes as well
    codes = rng.integers(0, spread_of_codes, (n, M)).astype(np.uint8)
    yq, yb = rng.random((Q, classes)) < share, rng.random((n, classes)) < share
    options = {**convention, "levels": levels, "ks": ks}
    expected = rank_codes(tables, codes, yq, yb, **options)
    memory = ranking._CELL * n * 2 if blocks else None
    agree(rank_on_device(tables, codes, yq, yb, device=device, memory=memory, **options), expected)
    agree(rank_on_device(tables, codes, np.packbits(yq, axis=1), yb, device=device, **options), expected)


@on_devices
def test_labels_of_every_form(device: str) -> None:
    rng = np.random.default_rng(3)
    tables = rng.normal(size=(6, 2, 16)).astype(np.float32)
    codes = rng.integers(0, 16, (50, 2)).astype(np.uint8)
    classes = rng.integers(-1, 3, 56)
    labels = Labels.from_ids(classes, ("a", "b", "c"))
    expected = rank_codes(tables, codes, classes[:6], classes[6:])
    for given_labels in (classes, labels):
        take = given_labels.take if isinstance(given_labels, Labels) else given_labels.__getitem__
        found = rank_on_device(tables, codes, take(np.arange(6)), take(np.arange(6, 56)), device=device)
        agree(found, expected)


def test_long_rankings_keep_their_digits() -> None:
    """The expansion of harmonic numbers takes over at high ranks: the same values."""
    rng = np.random.default_rng(0)
    tables = rng.normal(size=(5, 3, 16)).astype(np.float32)
    codes = rng.integers(0, 16, (20_000, 3)).astype(np.uint8)
    yq, yb = rng.random((5, 10)) < 0.2, rng.random((20_000, 10)) < 0.1
    expected = rank_codes(tables, codes, yq, yb).ap
    assert rank_on_device(tables, codes, yq, yb, device="cpu").ap == pytest.approx(expected, abs=1e-13)


def test_rankings_that_cannot_be_are_refused() -> None:
    tables = np.zeros((2, 3, 16), np.float32)
    codes = np.zeros((5, 3), np.uint8)
    yq, yb = np.ones((2, 4), bool), np.ones((5, 4), bool)
    rank = functools.partial(rank_on_device, device="cpu")
    bad = np.full_like(tables, np.nan)
    for arguments, error, match in (
        ((tables[0], codes, yq, yb), DataError, r"tables must be float32 \[Q, M, K\]"),
        ((tables.astype(np.float64), codes, yq, yb), DataError, "tables must be float32"),
        ((bad, codes, yq, yb), DataError, "NaN, infinity or values too large"),
        ((tables, codes[:, :2], yq, yb), UsageError, "2 codewords each, the tables 3"),
        ((tables, codes + np.uint8(16), yq, yb), DataError, "codeword 16 is out of range"),
        ((tables, codes[:0], yq, yb[:0]), DataError, "at least one"),
        ((tables, codes, yq[:1], yb), DataError, "query labels: .* does not fit 2 items"),
        ((tables, codes, yq, yb[:1]), DataError, "database labels: .* does not fit 5 items"),
        ((tables, codes.astype(int), yq, yb), DataError, "uint8"),
        ((tables, codes, yq.astype(int), yb), DataError, "packed"),
    ):
        with pytest.raises(error, match=match):
            rank(*arguments)
    for options, match in (
        ({"memory": 10}, "raise memory"),
        ({"ties": "none"}, "unknown"),
        ({"k": 0}, "at least 1"),
        ({"ks": (0,)}, "at least 1"),
        ({"denominator": "min(k, relevant)"}, "belongs to mAP@k"),
        ({"levels": (0.5, 0.2)}, "must rise"),
    ):
        with pytest.raises(UsageError, match=match):
            rank(tables, codes, yq, yb, **options)
