"""Networks side by side for the sub-spaces, the losses of GPQ, and what holds of every preset."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_factory import own_settings

from gpq_faiss.config import PRESETS
from gpq_faiss.data.open import open_data
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.heads import SubspaceHeads

sizes = st.integers(1, 5)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@given(B=sizes, width=sizes, M=sizes, hidden=sizes, d=sizes)
def test_heads_are_m_perceptrons_side_by_side(B, width, M, hidden, d):
    heads = SubspaceHeads(width, M, hidden, d, generator=generator())
    with torch.no_grad():
        heads.bias.normal_(generator=generator(1))
    x = torch.randn(B, width, generator=generator(2))
    out = heads(x).view(B, M, d)
    for m in range(M):
        expected = (x @ heads.into[m] + heads.bias[m]).clamp_min(0) @ heads.out[m]
        torch.testing.assert_close(out[:, m], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.5, 0.75])
def test_dropout_leaves_out_the_same_hidden_units_for_all_items(dropout):
    heads = SubspaceHeads(6, 2, 20, 20, dropout=dropout, generator=generator())
    with torch.no_grad():
        heads.bias.fill_(10.0)  # all units are above zero
        heads.out.copy_(torch.eye(20))
    x = torch.randn(7, 6, generator=generator(1))
    full = heads.eval()(x)
    outs = [heads.train()(x) for _ in range(2)]
    for out in outs:
        retained = out.any(dim=0)
        assert retained.view(2, 20).sum(dim=1).tolist() == 2 * [round(20 * (1 - dropout))]
        torch.testing.assert_close(out, full * retained / (1 - dropout))
    assert not torch.equal(*outs)


CONFIGS = {n: c for n, c in PRESETS.items() if c.network.backbone != "vgg"} | {
    "own settings": own_settings()
}
"""Every preset for features, and every setting of the network without class networks."""


def method(config):
    data = open_data(np.eye(6, 10, dtype=np.float32), labels=np.arange(6) % 3)
    return build_gpq(config, data, 0, 3)


def batch(unlabelled=6):
    x = torch.randn(12 + unlabelled, 10, generator=generator(9))
    return TrainingBatch(x, torch.eye(3)[torch.arange(12) % 3], 9, 10, generator())


@pytest.mark.parametrize("name", list(CONFIGS))
def test_losses_reach_every_parameter_and_bf16_stays_close(name):
    gpq = method(CONFIGS[name])
    gpq.losses(batch(), amp=False)["total"].backward()
    trained = [(n, p) for n, p in gpq.named_parameters() if p.requires_grad]
    assert [n for n, p in trained if p.grad is None or not p.grad.any()] == []
    gpq.eval()
    exact, rounded = gpq.losses(batch(), amp=False), gpq.losses(batch(), amp=True)
    assert all(v.dtype == torch.float32 for v in rounded.values())
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.05)
    assert any(not torch.equal(rounded[p], exact[p]) for p in exact), "autocast did nothing"
