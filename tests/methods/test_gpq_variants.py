"""The paper's variants of GPQ are settings: GPQ-H, GPQ-F and GPQ-T."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from model_factory import averaged

from gpq_faiss.config import (
    Config,
    LossConfig,
    NetworkConfig,
    QuantizerConfig,
    TrainingConfig,
    preset,
    validate,
)
from gpq_faiss.data.protocols import make_split
from gpq_faiss.data.standard import open_digits
from gpq_faiss.methods.gpq import GPQ, build_gpq
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.backbones import CNNF
from gpq_faiss.nn.model import build_network
from gpq_faiss.nn.quantizer import intra_normalize
from gpq_faiss.training.loop import RunOptions, fit

BASES = {"paper": preset("paper"), "averaged": averaged()}


def small(loss: LossConfig | None = None, base: str = "paper", metric: str = "npair") -> Config:
    config = BASES[base]
    return validate(
        replace(
            config,
            quantizer=replace(config.quantizer, codebooks=3, subdim=6),
            network=NetworkConfig(hidden=(24,)),
            loss=loss or config.loss,
            gpq=replace(config.gpq, metric=metric),
        )
    )


def method(config: Config) -> GPQ:
    return GPQ(build_network(config, {"kind": "features", "width": 10}, 4), config).eval()


def batch() -> TrainingBatch:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, 10, generator=generator)
    y = torch.eye(4)[torch.arange(12) % 4]
    return TrainingBatch(x, y, 0, 10, generator)


def test_gpq_t_replaces_the_npair_loss_by_triplets() -> None:
    """The total, with the triplet term worked out by a loop over anchors and positives."""
    gpq = method(small(metric="triplet"))
    parts = gpq.losses(batch(), amp=False)
    assert set(parts) == {"total", "triplet", "classification", "entropy"}
    net, given = gpq.network, batch()
    with torch.no_grad():
        x = intra_normalize(net.backbone(given.x[:12]), 3)
        q = net.codebooks()
        soft = torch.stack(
            [torch.stack([(20 * q[m] @ x[i, m]).softmax(0) @ q[m] for m in range(3)]) for i in range(12)]
        )
        soft = soft / soft.norm(dim=-1, keepdim=True)
    s = torch.einsum("imd,jmd->ij", x, soft).double().numpy() / 3
    group = given.y.argmax(dim=1).numpy()
    lost = []
    for a in range(12):
        negatives = s[a, group != group[a]]
        for p in range(12):
            if p == a or group[p] != group[a]:
                continue
            below = negatives[negatives < s[a, p]]
            n = below.max() if len(below) else negatives.min()
            lost.append(max(0.0, 0.1 + n - s[a, p]))
    assert parts["triplet"].item() == pytest.approx(np.mean(lost), rel=1e-4)
    expected = parts["triplet"] + 0.1 * parts["classification"] - 0.1 * parts["entropy"]
    torch.testing.assert_close(parts["total"], expected)


@pytest.mark.parametrize("base", list(BASES))
def test_gpq_h_has_the_metric_loss_alone(base: str) -> None:
    loss = replace(BASES[base].loss, lambda1=0.0, lambda2=0.0)
    gpq = method(small(loss, base))
    parts = gpq.losses(batch(), amp=False)
    assert not {"classification", "entropy"} & set(parts)
    parts["total"].backward()
    # The sub-prototypes still carry z' = s(z; α, W).
    assert gpq.network.classifier.raw.grad is not None
    assert gpq.network.classifier.raw.grad.any()


def test_gpq_f_takes_cnn_f() -> None:
    config = replace(
        preset("paper"), network=NetworkConfig(backbone="cnnf"), quantizer=QuantizerConfig(codebooks=3)
    )
    network = build_network(config, {"kind": "images", "image_size": 64}, 4)
    assert isinstance(network.backbone, CNNF)
    assert network.eval()(torch.rand(2, 3, 64, 64)).shape == (2, 36)


@pytest.mark.parametrize(
    "config",
    [small(metric="triplet"), small(LossConfig(lambda1=0.0, lambda2=0.0))],
    ids=["gpq-t", "gpq-h"],
)
def test_variants_train_on_digits(config: Config, tmp_path: Path) -> None:
    dataset = open_digits()
    split = make_split(dataset, "1", seed=0, labelled="50-per-class")
    training = TrainingConfig(
        steps=60,
        batch_labelled=100,
        batch_unlabelled=50,
        learning_rate=3e-3,
        validation=0.2,
    )
    config = replace(config, training=training)

    def run(name: str, learning_rate: float) -> float:
        changed = replace(config, training=replace(training, learning_rate=learning_rate))
        fitted = fit(
            build_gpq,
            dataset,
            split,
            changed,
            folder=tmp_path / name,
            identity=name,
            options=RunOptions(validate_every=30),
        )
        return fitted.run.best

    assert run("trained", 3e-3) > run("untrained", 1e-9) + 0.1
