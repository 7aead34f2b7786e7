"""Network-in-network hashing: its layer for each bit, its threshold, its triplets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deep_training import features, first_batch, made

from gpq_faiss.methods.ninh import SLICE, DivideAndEncode, piecewise_threshold
from gpq_faiss.methods.ssdh import triplet_ranking


def test_the_threshold_is_piece_wise() -> None:
    s = torch.tensor([0.0, 0.29, 0.31, 0.5, 0.69, 0.71, 1.0], requires_grad=True)
    out = piecewise_threshold(s, 0.2)
    assert out.tolist() == pytest.approx([0, 0, 0.31, 0.5, 0.69, 1, 1])
    out.sum().backward()
    assert s.grad is not None
    assert s.grad.tolist() == [0, 0, 1, 1, 1, 0, 0]


def test_a_bit_is_a_function_of_its_slice_alone() -> None:
    encode = DivideAndEncode(4, torch.Generator().manual_seed(0))
    x = torch.randn(6, 4 * SLICE, generator=torch.Generator().manual_seed(1))
    out = encode(x)
    for bit in range(4):
        own = slice(SLICE * bit, SLICE * bit + SLICE)
        changed = x.clone()
        changed[:, own] += 0.1
        moved = encode(changed) != out
        assert moved[:, bit].all()
        assert moved.sum() == 6
        torch.testing.assert_close(out[:, bit], 1 / (1 + torch.exp(-(x[:, own] @ encode.weight[bit]))))


def test_bits_are_values_above_a_half_and_the_loss_is_over_their_triplets() -> None:
    assert made("ninh", features(), bits=48).margin == 4
    method, batch = made("ninh", features(), bits=12).eval(), first_batch(features(), 30, 9)
    with torch.no_grad():
        method.encode.weight.mul_(30)
        shifted = method.exported()(batch.x)
        values = method.encode(method.network.backbone(batch.x).relu())
    assert torch.equal(shifted > 0, values > 0.5)
    assert ((values == 0) | (values == 1)).any()
    bits = np.unpackbits(method.coder().encode(shifted.numpy()), axis=1, bitorder="little")[:, :12]
    np.testing.assert_array_equal(bits, values.numpy() > 0.5)
    distances = torch.cdist(values[:30].double(), values[:30].double()).square()
    expected = triplet_ranking(distances, batch.y, 1.0)
    assert float(method.losses(batch, amp=False)["total"].detach()) == pytest.approx(
        float(expected), rel=1e-4
    )
