"""DTQ: group-hard triplets and the losses against naive loops, codes and codebooks by turns, and that it learns."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from deep_training import (
    features,
    first_batch,
    fitted,
    labels_of,
    made,
    quick_config,
    split_of,
    trained,
    vectors,
)

from gpq_faiss.methods.additive import reconstruct
from gpq_faiss.methods.dtq import DTQ, group_hard_triplets, triplet_margin_loss

IDS = [0, 1, 0, -1, 2, 1, 0, 2, 1, 0]


def vectors_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.from_numpy(np.random.default_rng(0).standard_normal((10, 4)))
    y = labels_of(IDS, 3)
    y[4, 0] = 1  # two labels
    return z, y


@pytest.mark.parametrize("group", [100, 5])
@pytest.mark.parametrize("margin", [0.0, 4.0])
def test_every_pair_takes_one_negative_that_violates_the_margin(group: int, margin: float) -> None:
    z, y = vectors_and_labels()
    shared = (y @ y.T > 0).numpy()
    d = np.square(z.numpy()[:, None] - z.numpy()[None]).sum(axis=2)
    candidates = {}
    for a, p in itertools.permutations(range(10), 2):
        if shared[a, p] and a // group == p // group:
            candidates[a, p] = {
                n
                for n in range(10)
                if a // group == n // group
                and y[a].any()
                and y[n].any()
                and not shared[a, n]
                and d[a, p] - d[a, n] + margin > 0
            }
    drawn: dict[tuple[int, int], set[int]] = {}
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        triplets = group_hard_triplets(z, y, margin, generator, group)
        pairs = list(zip(triplets[0].tolist(), triplets[1].tolist(), strict=True))
        assert len(pairs) == len(set(pairs)) == sum(bool(c) for c in candidates.values())
        for pair, n in zip(pairs, triplets[2].tolist(), strict=True):
            drawn.setdefault(pair, set()).add(n)
    assert drawn == {pair: c for pair, c in candidates.items() if c}, "each of them at random"


def test_the_triplet_loss_is_that_of_a_loop() -> None:
    z, y = vectors_and_labels()
    triplets = group_hard_triplets(z, y, 3.0, torch.Generator().manual_seed(0))
    naive = [
        max(0.0, float(((z[a] - z[p]) ** 2).sum() - ((z[a] - z[n]) ** 2).sum() + 3))
        for a, p, n in zip(*(t.tolist() for t in triplets), strict=True)
    ]
    assert float(triplet_margin_loss(z, triplets, 3.0)) == pytest.approx(np.mean(naive), rel=1e-12)


@pytest.mark.parametrize("ids", [[0, 0, 0], [0, 1, 2], [-1, -1]])
def test_a_batch_without_triplets_costs_nothing(ids: list[int]) -> None:
    z = torch.randn(len(ids), 4)
    triplets = group_hard_triplets(z, labels_of(ids, 3), 5.0, torch.Generator())
    assert [len(t) for t in triplets] == [0, 0, 0]
    assert float(triplet_margin_loss(z, triplets, 5.0)) == 0


def test_codes_and_codebooks_belong_together_after_training() -> None:
    method = copy.deepcopy(trained("dtq").method)
    assert isinstance(method, DTQ)
    # By turns: the codes kept are those of the codebooks kept, and the loss counts the distance to their sums.
    assert bool(method.seen.all())
    kept = method.vectors
    sums = reconstruct(method.codes.numpy(), method.codewords.numpy())
    error = np.square(kept.numpy() - sums).sum(axis=1).mean()
    assert error < 0.5 * kept.numpy().var(axis=0).sum()
    method.eval()
    batch = first_batch(features(), 20, 0)
    parts = {k: v.detach() for k, v in method.losses(batch, amp=False).items()}
    z = method.network(batch.x[:20]).detach().numpy()
    own = reconstruct(method.codes[method.positions(batch)].numpy(), method.codewords.numpy())
    assert float(parts["quantisation"]) == pytest.approx(np.square(z - own).sum(axis=1).mean(), rel=1e-4)
    assert float(parts["total"]) == pytest.approx(
        float(parts["triplet"]) + method.weight * float(parts["quantisation"]), rel=1e-5
    )


def test_the_triplet_loss_goes_down(tmp_path: Path) -> None:
    """On one fixed set of triplets: the selection always looks for those that still cost something."""
    config = quick_config(steps=120)
    before = made("dtq", features())
    after = fitted(DTQ, features(), config, tmp_path).method
    split = split_of(features())
    y = torch.from_numpy(features().require_labels().dense(split.labelled[:60]))
    z = torch.from_numpy(vectors(before, features(), split.labelled[:60]))
    triplets = group_hard_triplets(z, y, before.margin, torch.Generator().manual_seed(0))
    trained = torch.from_numpy(vectors(after, features(), split.labelled[:60]))
    first = triplet_margin_loss(z, triplets, before.margin)
    assert float(triplet_margin_loss(trained, triplets, before.margin)) < 0.3 * float(first)
