"""The committee network: what it believes, what it codes, and that nothing of the codes moves its beliefs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from gpq_faiss.config import Config, preset, validate
from gpq_faiss.data.digits import open_digits
from gpq_faiss.encode import Encoder
from gpq_faiss.errors import MismatchError, UsageError
from gpq_faiss.index.build import index, read_prototypes
from gpq_faiss.index.codebooks import encode as encode_vectors
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.gpq_committee import CommitteeGPQ, neighbours
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.committee import CLASS_DIM, CommitteeNetwork
from gpq_faiss.nn.model import build_network
from gpq_faiss.pipeline import encode, search
from gpq_faiss.train import train

C = 5


def settings(**training: object) -> Config:
    base = preset("recommended")
    return dataclasses.replace(
        base,
        quantizer=dataclasses.replace(base.quantizer, codebooks=3),
        network=dataclasses.replace(base.network, heads=16, committee=4, committee_hidden=16),
        training=dataclasses.replace(base.training, **training),  # type: ignore[arg-type]
    )


def network() -> CommitteeNetwork:
    net = build_network(settings(), {"kind": "features", "width": 9}, C)
    assert isinstance(net, CommitteeNetwork)
    return net.eval()


def test_the_posterior_is_the_mean_of_the_class_networks() -> None:
    net = network()
    x = torch.randn(6, 9)
    _, raw = net.features(x)
    found = net.posterior(raw)
    parts = raw.reshape(6, 4, CLASS_DIM)
    each = []
    for n in range(4):
        W = net.classifier.raw[n] / net.classifier.raw[n].norm(dim=1, keepdim=True)
        v = parts[:, n] / parts[:, n].norm(dim=1, keepdim=True)
        each.append(torch.softmax(net.beta * v @ W.T, dim=1))
    assert torch.allclose(found, torch.stack(each).mean(0), atol=1e-5)
    assert torch.allclose(found.sum(1), torch.ones(6), atol=1e-5)


def test_items_and_queries_are_unit_norm_and_not_the_same() -> None:
    net = network()
    x = torch.randn(6, 9)
    items, queries = net(x), net.queries(x)
    for vectors in (items, queries):
        assert vectors.shape == (6, 36)
        assert torch.allclose(vectors.reshape(6, 3, 12).norm(dim=2), torch.ones(6, 3), atol=1e-5)
    assert not torch.allclose(items, queries, atol=0.1)
    assert torch.allclose(net.codebooks().norm(dim=2), torch.ones(3, 16), atol=1e-5)


def test_the_ranking_teaches_the_codes_and_not_the_committee() -> None:
    config = settings(ema=0.0)
    method = build_gpq(config, open_digits(), 8, 10)
    assert isinstance(method, CommitteeGPQ)
    x = torch.rand(30, 3, 8, 8)
    y = torch.nn.functional.one_hot(torch.arange(10), 10).float()
    batch = TrainingBatch(x, y, 9, 10, torch.Generator())
    method.losses(batch, amp=False)["ranking"].backward()  # type: ignore[no-untyped-call]
    moved = {
        name for name, p in method.network.named_parameters() if p.grad is not None and bool(p.grad.any())
    }
    assert moved == {
        "codewords.raw",
        *(f"{part}.{name}" for part in ("items", "asks") for name in ("into", "bias", "out")),
    }


def test_neighbours_are_the_nearest_share_of_pairs() -> None:
    torch.manual_seed(0)
    features = torch.randn(40, 6)
    found = neighbours(features, 4)
    centred = features - features.mean(0)
    unit = centred / centred.norm(dim=1, keepdim=True)
    cosine = unit @ unit.T
    assert torch.equal(
        found.flatten().argsort(stable=True), torch.sigmoid(20 * cosine).flatten().argsort(stable=True)
    ) or ((found.flatten()[cosine.flatten().argsort()].diff() >= -1e-6).all())
    assert float((found > 0.5).float().mean()) == pytest.approx(0.25, abs=0.02)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("committee")
    config = settings(steps=60, batch_labelled=50, batch_unlabelled=100, validation=0.0)
    return train(open_digits(), folder / "model", config=config, labelled="10-per-class")


def test_a_search_uses_query_vectors(model: Path, tmp_path: Path) -> None:
    data = open_digits()
    codes = encode(model, data, tmp_path / "codes.h5")
    built = index(model, codes, tmp_path / "index.faiss")
    result = search(model, built, data, rows="0:5", k=7)
    encoder = Encoder.load(model)
    _, xq = encoder.embed_rows(data, np.arange(5), queries=True)
    _, xb = encoder.embed_rows(data, np.arange(len(data)))
    Z = encoder.model.codebooks
    chosen = np.einsum("nmd,mkd->nmk", xb.reshape(-1, 3, 12), Z).argmax(2)
    scores = xq @ Z[np.arange(3), chosen].reshape(-1, 36).T
    best = -np.sort(-scores, axis=1)[:, :7]
    assert np.abs(result.scores - best).max() < 1e-5
    assert encode_vectors(xb, Z).shape == (len(data), 2)


def test_item_vectors_are_no_queries(model: Path, tmp_path: Path) -> None:
    codes = encode(model, open_digits(), tmp_path / "codes.h5")
    built = index(model, codes, tmp_path / "index.faiss")
    with pytest.raises(MismatchError, match="holds vectors of items"):
        search(model, built, str(tmp_path / "features.h5"), k=3)


def test_prototypes_are_vectors_of_certain_items(model: Path) -> None:
    net = Encoder.load(model).model.network
    assert isinstance(net, CommitteeNetwork)
    found = read_prototypes(model)
    assert found.shape == (10, 36)
    with torch.no_grad():
        items = net.finish(net.items(net.knowledge(torch.zeros(10, net.width), torch.eye(10))))
    assert np.abs(found - items.numpy()).max() < 1e-5


@pytest.mark.parametrize(
    ("section", "changes", "named"),
    [
        ("network", {"committee": -1}, "network.committee"),
        ("network", {"heads": 0}, "network.heads"),
        ("loss", {"lambda4": 0.0}, "loss.lambda4"),
        ("loss", {"lambda0": 1.0}, "loss.lambda0"),
        ("loss", {"neighbours": 1.5}, "loss.neighbours"),
        ("network", {"committee": 0}, "loss.lambda4"),
    ],
)
def test_settings_that_cannot_be_are_refused(section: str, changes: dict[str, float], named: str) -> None:
    config = settings()
    config = dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **changes)}
    )
    with pytest.raises(UsageError, match=named):
        validate(config)
