"""GPQ and its variants by their equations; with soft targets its score tables, and the way from images to Faiss."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from model_factory import own_settings

from gpq_faiss import encode, evaluate, search, train
from gpq_faiss.config import Config, merge, preset, validate
from gpq_faiss.data.open import open_data
from gpq_faiss.data.standard import open_digits
from gpq_faiss.encoder import Encoder
from gpq_faiss.losses.classification import shares, subspace_classification, subspace_entropy
from gpq_faiss.losses.npair import npair, soft_npair, triplet
from gpq_faiss.methods.gpq import GPQ
from gpq_faiss.methods.gpq_soft import SoftGPQ
from gpq_faiss.methods.registry import METHODS, make_builder
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.backbones import CNNF
from gpq_faiss.nn.gpq_soft import SoftGPQNetwork
from gpq_faiss.nn.model import build_network
from gpq_faiss.nn.quantizer import intra_normalize, soft_assign
from gpq_faiss.stages.export import export_faiss
from gpq_faiss.stages.export_encoder import export_encoder
from gpq_faiss.stages.index import index
from gpq_faiss.store import RowReader

C, WIDTH, M = 4, 10, 3
LABELLED, ITEMS = 12, 20


def config_of(**sections: dict[str, Any]) -> Config:
    small = {
        "quantizer": {"codebooks": M, "codewords": 8, "subdim": 12},
        "network": {"hidden": [16], "noise": 0.0},
        "posterior": {"networks": 2},
    }
    return validate(merge(merge(preset("gpq"), small), sections))


def method(classes: int = C, **sections: dict[str, Any]) -> SoftGPQ:
    config = config_of(**sections)
    net = build_network(config, {"kind": "features", "width": WIDTH}, classes)
    assert isinstance(net, SoftGPQNetwork)
    return SoftGPQ(net, config).train()


def batch() -> TrainingBatch:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ITEMS, WIDTH, generator=generator)
    return TrainingBatch(x, torch.eye(C)[torch.arange(LABELLED) % C], 0, 10, generator)


def test_the_losses_are_those_of_class_networks_and_of_pairs() -> None:
    gpq = method(loss={"lambda1": 0.9, "lambda2": 0.3}, posterior={"propagation": 0.0})
    given = batch()
    parts = {k: v.item() for k, v in gpq.losses(given, amp=False).items()}
    theirs = {k: v.item() for k, v in super(SoftGPQ, gpq).losses(given, amp=False).items()}
    net = gpq.network
    with torch.no_grad():
        p = net.eval().posterior(given.x)
        x, Z, W = net.subvectors(p), net.codewords(), net.classifier()
        told = torch.cat([given.y, p[LABELLED:]])
        expected: dict[str, float] = {
            "classification": float(subspace_classification(x, W, told, 20.0)),
            "entropy": float(subspace_entropy(x[LABELLED:], W, 20.0)),
        }
        # Items score by their nearest codewords, queries by the sub-prototypes that they expect.
        tables = torch.einsum("mcd,mkd->mck", W, Z)
        scores = torch.zeros(ITEMS, ITEMS)
        for i, j, m in itertools.product(range(ITEMS), range(ITEMS), range(M)):
            scores[i, j] += told[i] @ tables[m, :, (Z[m] @ x[j, m]).argmax()] / M
        expected["npair"] = float(soft_npair(net.log_scale.exp() * scores, told, told))
    total = theirs.pop("total") + expected["npair"]
    total += 0.9 * expected["classification"] - 0.3 * expected["entropy"]
    expected |= {"total": total} | {f"class_{name}": value for name, value in theirs.items()}
    assert parts == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_pairs_teach_the_codes_and_not_the_class_networks() -> None:
    gpq = method()
    gpq.losses(batch(), amp=False)["npair"].backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in gpq.network.classes.parameters())
    ours = [p for name, p in gpq.network.named_parameters() if not name.startswith("classes.")]
    assert all(p.grad is not None and bool(p.grad.any()) for p in ours)


def test_every_parameter_is_stepped_once() -> None:
    gpq = method()
    groups = gpq.optimizer(gpq.config.training).param_groups
    stepped = [id(p) for group in groups for p in group["params"]]
    assert sorted(stepped) == sorted(id(p) for p in gpq.network.parameters())
    rates = {id(p): group.get("times", 1.0) for group in groups for p in group["params"]}
    theirs = {rates[id(p)] for p in gpq.network.classes.parameters()}
    assert {rates[id(gpq.network.codewords.raw)], rates[id(gpq.network.classifier.raw)]} == {5.0}
    assert theirs == {2.0}
    assert {name.split(".")[0] for name in gpq.state_dict()} == {"network"}, "the class networks once"


def test_score_tables_are_refitted_after_the_training() -> None:
    x = 4 * torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(1))
    short = {"quantizer": {"subdim": 8}}, {"quantizer": {"codewords": 4}, "classes": 9}
    # Not to sub-vectors that are too short for them, nor with more classes than codewords.
    for changes, refitted in zip(({}, *short), (True, False, False), strict=True):
        gpq = method(**changes)  # type: ignore[arg-type]
        with torch.no_grad():
            gpq.network.codewords.raw.mul_(3)  # of any length
        gpq.fit_codebooks(lambda n: iter([x[:n]]), final=False)
        as_trained = gpq.network.prototypes.clone()
        gpq.fit_codebooks(lambda n: iter([x[:n]]), final=True)
        assert torch.equal(as_trained, gpq.network.prototypes) != refitted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = merge(
        preset("gpq"),
        {
            "quantizer": {"codebooks": 6},
            "posterior": {"networks": 3},
            "network": {"hidden": [64]},
            "training": {"steps": 60, "learning_rate": 3e-3},
        },
    )
    return train(
        open_digits(), tmp_path_factory.mktemp("gpq") / "model", config=config, labelled="20-per-class"
    )


def test_digits_are_found_by_their_class(model: Path) -> None:
    found = evaluate(model, open_digits(), protocol="1")
    assert found.ranking.map > 0.8, "chance is 0.1"
    lines = [json.loads(line) for line in (model / "metrics.jsonl").read_text().splitlines()]
    assert {"npair", "classification", "entropy", "class_classification", "class_entropy"} <= set(lines[-1])


def test_faiss_makes_the_codes_and_search_finds_the_items(model: Path, tmp_path: Path) -> None:
    digits = open_digits()
    codes = encode(model, digits, tmp_path / "codes.h5")
    encoder = Encoder.load(model)
    Z = encoder.model.codebooks
    np.testing.assert_allclose(np.linalg.norm(Z, axis=2), 1, atol=1e-6)
    rows = np.arange(len(digits))
    _, xb = encoder.embed_rows(digits, rows)
    _, xq = encoder.embed_rows(digits, rows[:20], queries=True)
    empty = faiss.read_index(str(export_faiss(model, tmp_path / "empty.faiss")))
    with RowReader(codes) as reader:
        stored = reader.block()
    np.testing.assert_array_equal(empty.sa_encode(xb), stored)
    assert len(np.unique(stored, axis=0)) > 50
    # Items are no codewords: the network leaves it to Faiss to find the nearest.
    assert not np.allclose(empty.sa_decode(stored), xb, atol=1e-3)
    export_encoder(model, tmp_path / "encoder.pt2")  # which compares with the model
    empty.add(xb)
    expected, _ = empty.search(xq, 10)
    for kind in ("flat", "ivf"):
        file = index(model, codes, tmp_path / f"{kind}.faiss", kind=kind)
        found = search(model, file, open_digits(), k=10, rows=":20")
        np.testing.assert_allclose(found.scores, expected, atol=1e-5)


# Variants -------------------------------------------------------------------------------------------------------------

BASES = {"paper": preset("paper"), "own settings": own_settings()}


@pytest.mark.parametrize("base", list(BASES))
@pytest.mark.parametrize("variant", ["gpq", "gpq-h", "gpq-t"])
def test_a_variant_is_its_losses(variant: str, base: str) -> None:
    small: dict[str, Any] = {
        "quantizer": {"codebooks": 3, "subdim": 6},
        "network": {"hidden": [24]},
    }
    config = validate(merge(merge(BASES[base], small), dict(METHODS[variant].changes)))
    data = open_data(np.eye(8, 10, dtype=np.float32), labels=np.arange(8) % 4)
    gpq = make_builder(variant)(config, data, 0, 4).eval()
    assert isinstance(gpq, GPQ)
    x, y = batch().x, batch().y
    parts = gpq.losses(batch(), amp=False)
    net = gpq.network
    labelled = intra_normalize(net.backbone(x[:12]), 3)
    metric = "triplet" if variant == "gpq-t" else "npair"
    loss = {"triplet": triplet, "npair": npair}[metric]
    expected = {metric: loss(labelled, soft_assign(labelled, net.codebooks(), 20.0), y)}
    weights = {metric: 1.0}
    if variant != "gpq-h":
        weights |= {"classification": config.loss.lambda1, "entropy": -config.loss.lambda2}
        W, beta, others = net.classifier.raw, config.beta, intra_normalize(net.backbone(x[12:]), 3)
        kind: Any = "paper" if config.gpq.variant == "printed" else "code"
        expected["classification"] = subspace_classification(labelled, W, shares(y, x), beta, kind)
        expected["entropy"] = subspace_entropy(others, W, beta)
    for name, value in expected.items():
        torch.testing.assert_close(parts[name], value)
    assert set(parts) == {"total", *weights}
    torch.testing.assert_close(parts["total"], sum(weight * parts[name] for name, weight in weights.items()))
    parts["total"].backward()  # type: ignore[no-untyped-call]
    # Without a classifier the sub-prototypes still carry z' = s(z; α, W).
    assert net.classifier.raw.grad is not None
    assert net.classifier.raw.grad.any()


def test_gpq_f_takes_cnn_f() -> None:
    config = merge(preset("paper"), dict(METHODS["gpq-f"].changes))
    network = build_network(config, {"kind": "images", "image_size": 64}, 4)
    assert isinstance(network.backbone, CNNF)
    assert network.eval()(torch.rand(2, 3, 64, 64)).shape == (2, config.quantizer.width)
