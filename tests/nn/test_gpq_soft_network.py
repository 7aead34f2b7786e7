"""The network of GPQ with soft targets: items are coded by the nearest codeword, queries realise score tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.codes.codebooks import inject
from gpq_faiss.codes.encode import encode
from gpq_faiss.config import merge, preset, validate
from gpq_faiss.errors import UsageError
from gpq_faiss.nn.gpq_soft import SoftGPQNetwork, straight_through
from gpq_faiss.nn.model import build_network

WIDTH, C = 9, 5


def network(M: int = 3, K: int = 8, d: int = 12, *, seed: int = 0) -> SoftGPQNetwork:
    sections = {
        "quantizer": {"codebooks": M, "codewords": K, "subdim": d},
        "posterior": {"networks": 2},
        "network": {"hidden": [16]},
        "training": {"seed": seed},
    }
    config = validate(merge(preset("gpq"), sections))
    net = build_network(config, {"kind": "features", "width": WIDTH}, C)
    assert isinstance(net, SoftGPQNetwork)
    return net.eval()


def items(n: int = 40, seed: int = 1) -> Tensor:
    return 3 * torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_faiss_encodes_items_as_the_network_does() -> None:
    net, x = network(), items()
    Z = np.ascontiguousarray(net.codebooks().numpy())
    ours = net.codes(net.posterior(x)).numpy()
    assert len(np.unique(ours, axis=0)) > 1
    for codes in (inject(Z).sa_encode(net(x).numpy()), encode(net(x).numpy(), Z)):
        np.testing.assert_array_equal(unpack_codes(codes, 3, 8), ours)
    for vectors in (net(x), net.queries(x)):
        assert vectors.dtype == torch.float32
        torch.testing.assert_close(vectors.view(40, 3, 12).norm(dim=2), torch.ones(40, 3))
    torch.testing.assert_close(net.codebooks().norm(dim=2), torch.ones(3, 8))
    # The class networks keep next to no codewords.
    assert net.classes.tables.numel() + net.classes.feature_codewords.numel() == C


@settings(max_examples=25, deadline=None)
@given(K=st.sampled_from([4, 8]), more=st.integers(1, 6), M=st.integers(1, 4), seed=st.integers(0, 1000))
@torch.no_grad()
def test_queries_realise_any_score_tables_but_for_one_factor(K: int, more: int, M: int, seed: int) -> None:
    """Without tables, those of the sub-prototypes: Σ_c p_c w_mc · z_mk."""
    net, x = network(M, K, K + more, seed=seed), items()
    given_tables = torch.randn(M, K, C, generator=torch.Generator().manual_seed(seed))
    for tables in (None, given_tables):
        net.set_queries(tables)
        whole = torch.einsum("mkd,mcd->mkc", net.codewords(), net.classifier()) if tables is None else tables
        wanted = torch.einsum("bc,mkc->bmk", net.posterior(x), whole)
        found = torch.einsum("bmd,mkd->bmk", net.queries(x).view(40, M, -1), net.codebooks())
        factor = 1.0 if tables is None else float((found * wanted).sum() / wanted.square().sum())
        assert factor > 0
        torch.testing.assert_close(found, factor * wanted, rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(net.prototypes.norm(dim=2), torch.ones(M, C))
    # Prototypes are the queries of sure items.
    net.classes.posterior = lambda raw: torch.eye(C)  # type: ignore[method-assign, assignment, misc]
    sure = net.queries(items(C)).view(C, M, -1).transpose(0, 1)
    torch.testing.assert_close(sure, net.prototypes, rtol=0, atol=1e-3)
    with pytest.raises(UsageError, match=f"more than {K} dimensions"):
        network(M, K, K).set_queries(given_tables)


def test_straight_through_gives_codewords_and_the_gradient_of_their_mean() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.nn.functional.normalize(torch.randn(6, 2, 4, generator=generator), dim=2).requires_grad_()
    Z = torch.nn.functional.normalize(torch.randn(2, 5, 4, generator=generator), dim=2)
    weigh = torch.randn(6, 2, 4, generator=generator)
    found = straight_through(x, Z, 3.0)
    cosines = torch.einsum("bmd,mkd->bmk", x, Z)
    torch.testing.assert_close(found, Z[torch.arange(2), cosines.argmax(dim=2)])
    mean = torch.einsum("bmk,mkd->bmd", (3 * cosines).softmax(2), Z)
    (ours,) = torch.autograd.grad((found * weigh).sum(), x)
    (theirs,) = torch.autograd.grad((mean * weigh).sum(), x)
    torch.testing.assert_close(ours, theirs)
