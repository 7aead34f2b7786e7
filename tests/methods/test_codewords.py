"""Codewords placed so that their sums are near given vectors: what they promise, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gpq_faiss.errors import DataError
from gpq_faiss.methods import codewords as module
from gpq_faiss.methods.codewords import fit_codewords
from gpq_faiss.nn.additive import assign


def belief(n: int, C: int = 10, seed: int = 0) -> Tensor:
    """Posteriors, most of them sure of one of C classes: float32 [n, C]."""
    return torch.from_numpy(np.random.default_rng([seed, n]).dirichlet(np.full(C, 0.1), n)).float()


def cloud(n: int, E: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, n]).normal(size=(n, E))).float()


def error(x: Tensor, S: Tensor, beam: int = 8) -> float:
    """Mean squared distance of vectors to the sums of their codes."""
    codes = assign(x, S, beam)
    reached = torch.stack([S[m][codes[:, m]] for m in range(len(S))]).sum(dim=0)
    return float((x - reached).square().sum(dim=1).mean())


@pytest.mark.parametrize("make", [belief, lambda n: cloud(n, 6, 3)], ids=["simplex", "gaussian"])
@pytest.mark.parametrize("M", [1, 3, 6])
def test_turns_end_no_worse_than_they_began(
    make: Callable[[int], Tensor], M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = make(1500)
    found = fit_codewords(x, M, 8, seed=0)
    monkeypatch.setattr(module, "_ITERATIONS", 0)
    start = fit_codewords(x, M, 8, seed=0)
    # The first codebook of the start is the largest; the others are the same at smaller scales.
    scales = start.flatten(1).norm(dim=1)
    torch.testing.assert_close(start, start[:1] * (scales / scales[0])[:, None, None])
    assert M == 1 or bool((scales[1:] < scales[:-1]).all())
    assert error(x, found) < error(x, start) * (1 + 1e-6)
    if M > 1:
        assert error(x, found) < 0.8 * error(x, start)


def test_a_turn_is_the_least_squares_of_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other codewords are nearer to the vectors with these codes, but for the small weight on their length."""
    x = belief(400)
    monkeypatch.setattr(module, "_ITERATIONS", 0)
    codes = assign(x, fit_codewords(x, 3, 4, seed=0)).numpy()
    monkeypatch.setattr(module, "_ITERATIONS", 1)
    found = fit_codewords(x, 3, 4, seed=0).double().numpy()
    A = np.zeros((400, 12))
    for m in range(3):
        A[np.arange(400), 4 * m + codes[:, m]] = 1
    best = np.linalg.lstsq(A, x.double().numpy(), rcond=None)[0]
    least = ((A @ best - x.numpy()) ** 2).sum()
    assert ((A @ found.reshape(12, -1) - x.numpy()) ** 2).sum() == pytest.approx(least, rel=1e-4)


def test_as_many_vectors_as_codewords_are_enough_and_repeats_do_no_harm() -> None:
    x = belief(8)
    assert error(x, fit_codewords(x, 2, 8, seed=0)) < 1e-4
    same = torch.full((50, 4), 0.25)
    S = fit_codewords(same, 3, 8, seed=0)
    assert torch.isfinite(S).all()
    assert error(same, S) < 1e-4


def test_too_few_or_infinite_vectors_are_refused() -> None:
    with pytest.raises(DataError, match="7 items are too few for 8 codewords"):
        fit_codewords(belief(7), 2, 8, seed=0)
    for bad in (float("nan"), float("inf")):
        x = belief(20)
        x[3, 2] = bad
        with pytest.raises(DataError, match="infinite"):
            fit_codewords(x, 2, 8, seed=0)
