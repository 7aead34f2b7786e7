"""The N-pair loss with beliefs: against a loop written from its definition, eq. 2 where beliefs are labels, and gradcheck."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpq_faiss.losses import NPairPQLoss, SoftNPairLoss
from gpq_faiss.losses.npair import soft_npair_of_posteriors


def naive(scores: Tensor, p: Tensor, r: Tensor) -> float:
    S, P, R = scores.tolist(), p.tolist(), r.tolist()
    items = [j for j in range(len(R)) if sum(R[j]) > 0]
    lost = []
    for i in range(len(P)):
        t = {j: sum(a * b for a, b in zip(P[i], R[j], strict=True)) for j in items}
        whole = sum(t.values())
        if whole == 0:
            continue
        most = max(S[i][j] for j in items)
        down = most + math.log(sum(math.exp(S[i][j] - most) for j in items))
        lost.append(-sum(t[j] / whole * (S[i][j] - down) for j in items))
    return sum(lost) / len(lost) if lost else 0.0


def beliefs(n: int, C: int, generator: torch.Generator) -> Tensor:
    """Beliefs float64 [n, C]: some of labels, some nothing, some in between."""
    p = torch.rand(n, C, generator=generator, dtype=torch.float64).pow(4)
    p = p / p.sum(dim=1, keepdim=True)
    kind = torch.randint(4, (n,), generator=generator)
    p[kind == 0] = 0
    p[kind == 1] = torch.eye(C, dtype=torch.float64)[
        torch.randint(C, (int((kind == 1).sum()),), generator=generator)
    ]
    return p


@settings(max_examples=60, deadline=None)
@given(A=st.integers(1, 6), B=st.integers(1, 7), C=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_it_is_the_loop_over_queries_and_items(A: int, B: int, C: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, r = beliefs(A, C, generator), beliefs(B, C, generator)
    scores = 5 * torch.randn(A, B, generator=generator, dtype=torch.float64)
    found = SoftNPairLoss()(scores, p, r)
    assert math.isclose(float(found), naive(scores, p, r), rel_tol=1e-9, abs_tol=1e-9)


@settings(max_examples=30, deadline=None)
@given(B=st.integers(1, 8), C=st.integers(1, 4), M=st.integers(1, 3), seed=st.integers(0, 10_000))
def test_with_labels_it_is_the_loss_of_the_paper(B: int, C: int, M: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, q = (torch.randn(B, M, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    y = torch.cat([torch.eye(C), torch.zeros(1, C)])[torch.randint(C + 1, (B,), generator=generator)].double()
    torch.testing.assert_close(SoftNPairLoss()(x.flatten(1) @ q.flatten(1).T, y, y), NPairPQLoss()(x, q, y))


def test_without_a_known_pair_it_is_nothing_and_teaches_nothing() -> None:
    scores = torch.randn(3, 3, requires_grad=True)
    loss = SoftNPairLoss()(scores, torch.zeros(3, 2), torch.zeros(3, 2))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert scores.grad is not None
    assert not scores.grad.any()


@given(A=st.integers(1, 6), B=st.integers(1, 6), C=st.integers(1, 5), seed=st.integers(0, 1000))
@settings(deadline=None)
def test_of_posteriors_it_is_the_loss_of_their_scores(A: int, B: int, C: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = (3 * torch.randn(A, C, generator=generator, dtype=torch.double)).softmax(dim=1)
    r = (3 * torch.randn(B, C, generator=generator, dtype=torch.double)).softmax(dim=1)
    sums = torch.randn(B, C, generator=generator, dtype=torch.double)
    torch.testing.assert_close(soft_npair_of_posteriors(p, r, sums), SoftNPairLoss()(p @ sums.T, p, r))
