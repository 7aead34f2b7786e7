"""The network of GPQ with soft targets: items are coded by the nearest codeword, queries realise score tables."""

from __future__ import annotations

import faiss
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
from gpq_faiss.nn.posterior import PosteriorNetwork

WIDTH, C = 9, 5


def network(M: int = 3, K: int = 8, d: int = 12, *, seed: int = 0) -> SoftGPQNetwork:
    config = validate(
        merge(
            preset("gpq"),
            {
                "quantizer": {"codebooks": M, "codewords": K, "subdim": d},
                "posterior": {"networks": 2},
                "network": {"hidden": [16]},
                "training": {"seed": seed},
            },
        )
    )
    net = build_network(config, {"kind": "features", "width": WIDTH}, C)
    assert isinstance(net, SoftGPQNetwork)
    return net.eval()


def items(n: int = 40, seed: int = 1) -> Tensor:
    return 3 * torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


def codewords(net: SoftGPQNetwork) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.ascontiguousarray(net.codebooks().detach().numpy())


@torch.no_grad()
def test_items_codewords_and_queries_are_unit_norm_in_every_subspace() -> None:
    net = network()
    for vectors in (net(items()), net.queries(items())):
        assert vectors.dtype == torch.float32
        torch.testing.assert_close(vectors.view(40, 3, 12).norm(dim=2), torch.ones(40, 3))
    torch.testing.assert_close(net.codebooks().norm(dim=2), torch.ones(3, 8))


@torch.no_grad()
def test_faiss_encodes_items_as_the_network_does() -> None:
    net = network()
    x = items()
    index = inject(codewords(net))
    assert isinstance(index, faiss.IndexPQ)
    by_faiss = unpack_codes(index.sa_encode(net(x).numpy()), 3, 8)
    ours = net.codes(net.posterior(x)).numpy()
    assert len(np.unique(ours, axis=0)) > 1
    np.testing.assert_array_equal(by_faiss, ours)
    np.testing.assert_array_equal(unpack_codes(encode(net(x).numpy(), codewords(net)), 3, 8), ours)


@torch.no_grad()
def test_queries_score_what_their_belief_expects_of_the_sub_prototypes() -> None:
    """Σ_c p_c w_mc · z_mk, as long as the belief is sure: no norm of a sub-vector is lost."""
    net = network()
    x = items()
    p, found = net.posterior(x), net.queries(x).view(40, 3, 12)
    tables = torch.einsum("mkd,mcd->mkc", net.codewords(), net.classifier())
    for m in range(3):
        for k in range(8):
            expected = sum(p[:, c] * tables[m, k, c] for c in range(C))
            torch.testing.assert_close(found[:, m] @ net.codebooks()[m, k], expected)


@settings(max_examples=25, deadline=None)
@given(K=st.sampled_from([4, 8]), more=st.integers(1, 6), M=st.integers(1, 4), seed=st.integers(0, 1000))
@torch.no_grad()
def test_queries_realise_any_score_tables_but_for_one_factor(K: int, more: int, M: int, seed: int) -> None:
    net = network(M, K, K + more, seed=seed)
    tables = torch.randn(M, K, C, generator=torch.Generator().manual_seed(seed))
    net.set_queries(tables)
    x = items()
    wanted = torch.einsum("bc,mkc->bmk", net.posterior(x), tables)
    found = torch.einsum("bmd,mkd->bmk", net.queries(x).view(40, M, -1), net.codebooks())
    factor = float((found * wanted).sum() / wanted.square().sum())
    assert factor > 0
    torch.testing.assert_close(found, factor * wanted, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(net.prototypes.norm(dim=2), torch.ones(M, C))


def test_tables_need_as_many_dimensions_as_codewords() -> None:
    with pytest.raises(UsageError, match="more than 8 dimensions"):
        network(d=8).set_queries(torch.zeros(3, 8, C))


@torch.no_grad()
def test_prototypes_are_the_queries_of_sure_items() -> None:
    net = network()
    net.set_queries(torch.randn(3, 8, C, generator=torch.Generator().manual_seed(3)))
    net.classes.posterior = lambda raw: torch.eye(C)  # type: ignore[method-assign, assignment, misc]
    torch.testing.assert_close(net.queries(items(C)).view(C, 3, 12).transpose(0, 1), net.prototypes)


def test_straight_through_gives_codewords_and_the_gradient_of_their_mean() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.nn.functional.normalize(torch.randn(6, 2, 4, generator=generator), dim=2).requires_grad_()
    Z = torch.nn.functional.normalize(torch.randn(2, 5, 4, generator=generator), dim=2).requires_grad_()
    weigh = torch.randn(6, 2, 4, generator=generator)
    found = straight_through(x, Z, 3.0)
    for b in range(6):
        for m in range(2):
            nearest = max(range(5), key=lambda k: float(x[b, m] @ Z[m, k]))
            torch.testing.assert_close(found[b, m], Z[m, nearest])
    mean = torch.einsum("bmk,mkd->bmd", (3 * torch.einsum("bmd,mkd->bmk", x, Z)).softmax(2), Z)
    (ours,) = torch.autograd.grad((found * weigh).sum(), x)
    (theirs,) = torch.autograd.grad((mean * weigh).sum(), x)
    torch.testing.assert_close(ours, theirs)


def test_the_class_networks_inside_keep_next_to_no_codewords() -> None:
    net = network()
    assert isinstance(net.classes, PosteriorNetwork)
    assert net.classes.tables.numel() == C
    assert net.classes.feature_codewords.numel() == 0
