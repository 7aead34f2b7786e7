"""Network-in-network hashing: its layer for each bit, its threshold, its triplets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from deep_training import quick_config
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.config import NetworkConfig, QuantizerConfig
from gpq_faiss.errors import UsageError
from gpq_faiss.methods.ninh import NINH, DivideAndEncode, piecewise_threshold, triplet_ranking_loss
from gpq_faiss.methods.trainable import TrainingBatch


def naive(values: np.ndarray, labels: np.ndarray, margin: float) -> float:
    """Eq. 2 over all triplets, by a triple loop."""
    lost, count = 0.0, 0
    for a in range(len(values)):
        for p in range(len(values)):
            for n in range(len(values)):
                like = p != a and (labels[a] * labels[p]).any()
                unlike = labels[n].any() and labels[a].any() and not (labels[a] * labels[n]).any()
                if like and unlike:
                    near = ((values[a] - values[p]) ** 2).sum()
                    far = ((values[a] - values[n]) ** 2).sum()
                    lost, count = lost + max(0.0, margin + near - far), count + 1
    return lost / max(1, count)


@given(
    n=st.integers(1, 12),
    classes=st.integers(1, 4),
    several=st.booleans(),
    margin=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=80)
def test_the_loss_is_the_mean_over_all_triplets(
    n: int, classes: int, several: bool, margin: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.random((n, classes)) < 0.4 if several else np.eye(classes)[rng.integers(0, classes, n)]
    values = rng.random((n, 5))
    got = triplet_ranking_loss(torch.from_numpy(values), torch.from_numpy(labels * 1.0), margin)
    assert got.item() == pytest.approx(naive(values, labels * 1, margin), abs=1e-9)


def test_the_gradient_of_the_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.eye(3)[torch.tensor([0, 1, 2, 0, 1, 2, 0])]
    assert torch.autograd.gradcheck(lambda v: triplet_ranking_loss(v, labels), (values,))


def test_the_threshold_is_piece_wise() -> None:
    s = torch.tensor([0.0, 0.29, 0.31, 0.5, 0.69, 0.71, 1.0], requires_grad=True)
    out = piecewise_threshold(s, 0.2)
    assert out.tolist() == pytest.approx([0, 0, 0.31, 0.5, 0.69, 1, 1])
    out.sum().backward()
    assert s.grad is not None
    assert s.grad.tolist() == [0, 0, 1, 1, 1, 0, 0]


def test_a_bit_is_a_function_of_its_slice_alone() -> None:
    encode = DivideAndEncode(4, 5, 1.5, 0.5, torch.Generator().manual_seed(0))
    features = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
    out = encode(features)
    for bit in range(4):
        changed = features.clone()
        changed[:, 5 * bit : 5 * bit + 5] += 1
        moved = encode(changed) != out
        assert moved[:, bit].all()
        assert moved.sum() == 6
        by_hand = features[:, 5 * bit : 5 * bit + 5] @ encode.weight[bit] + encode.bias[bit]
        torch.testing.assert_close(out[:, bit], 1 / (1 + torch.exp(-1.5 * by_hand)))


def test_bits_are_values_above_a_half_whatever_the_threshold() -> None:
    method = NINH(quick_config(bits=12), {"kind": "features", "width": 10}, epsilon=0.01).eval()
    x = torch.randn(50, 10, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        shifted = method.exported()(x)
        values = method.network.encode(method.network.features(x).relu())
    assert shifted.shape == (50, 12)
    assert torch.equal(shifted > 0, values > 0.5)
    assert ((values == 0) | (values == 1)).any()
    bits = np.unpackbits(method.coder().encode(shifted.numpy()), axis=1, bitorder="little")[:, :12]
    np.testing.assert_array_equal(bits, values.numpy() > 0.5)


def test_the_margin_grows_with_the_code() -> None:
    wide = replace(quick_config(bits=12), quantizer=QuantizerConfig(codebooks=12))
    for c, expected in ((quick_config(bits=12), 1.0), (wide, 4.0)):
        assert NINH(c, {"kind": "features", "width": 10}).margin == expected
    assert NINH(wide, {"kind": "features", "width": 10}, margin=0.5).margin == 0.5


def test_unlabelled_items_are_not_looked_at() -> None:
    method = NINH(quick_config(bits=12), {"kind": "features", "width": 10}).eval()
    assert not method.uses_unlabelled
    x = torch.randn(30, 10, generator=torch.Generator().manual_seed(2))
    y = torch.eye(3)[torch.arange(20) % 3]
    generator = torch.Generator()
    whole = method.losses(TrainingBatch(x, y, 0, 1, generator), amp=False)["total"]
    part = method.losses(TrainingBatch(x[:20], y, 0, 1, generator), amp=False)["total"]
    assert torch.equal(whole, part)
    rounded = method.losses(TrainingBatch(x, y, 0, 1, generator), amp=True)["total"]
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(whole.item(), rel=0.05)


def test_takes_images() -> None:
    c = replace(quick_config(bits=12), network=NetworkConfig(backbone="vgg"))
    method = NINH(c, {"kind": "images", "image_size": 16})
    batch = TrainingBatch(torch.rand(6, 3, 16, 16), torch.eye(3).repeat(2, 1), 0, 1, torch.Generator())
    method.losses(batch, amp=False)["total"].backward()
    assert all(p.grad is not None for p in method.parameters())


@pytest.mark.parametrize("bad", [{"slice_width": 0}, {"beta": 0.0}, {"epsilon": 0.0}, {"margin": -1.0}])
def test_refuses_what_cannot_be(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must be above 0"):
        NINH(quick_config(bits=12), {"kind": "features", "width": 10}, **bad)  # type: ignore[arg-type]
