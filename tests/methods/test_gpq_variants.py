"""The paper's variants of GPQ are settings: GPQ-H, GPQ-F and GPQ-T."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from model_factory import own_settings

from gpq_faiss.config import merge, preset, validate
from gpq_faiss.data.open import open_data
from gpq_faiss.losses.npair import npair, triplet
from gpq_faiss.methods.gpq import GPQ
from gpq_faiss.methods.registry import METHODS, make_builder
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.backbones import CNNF
from gpq_faiss.nn.model import build_network
from gpq_faiss.nn.quantizer import intra_normalize, soft_assign

BASES = {"paper": preset("paper"), "own settings": own_settings()}


@pytest.mark.parametrize("base", list(BASES))
@pytest.mark.parametrize("variant", ["gpq", "gpq-h", "gpq-t"])
def test_a_variant_is_its_losses(variant: str, base: str) -> None:
    small: dict[str, Any] = {
        "quantizer": {"codebooks": 3, "subdim": 6},
        "network": {"hidden": [24], "dropout": 0.0},
    }
    config = validate(merge(merge(BASES[base], small), dict(METHODS[variant].changes)))
    data = open_data(np.eye(8, 10, dtype=np.float32), labels=np.arange(8) % 4)
    gpq = make_builder(variant)(config, data, 0, 4).eval()
    assert isinstance(gpq, GPQ)
    x = torch.randn(20, 10, generator=torch.Generator().manual_seed(3))
    y = torch.eye(4)[torch.arange(12) % 4]
    parts = gpq.losses(TrainingBatch(x, y, 0, 10, torch.Generator()), amp=False)
    net = gpq.network
    labelled = intra_normalize(net.backbone(x[:12]), 3)
    metric = "triplet" if variant == "gpq-t" else "npair"
    loss = {"triplet": triplet, "npair": npair}[metric]
    torch.testing.assert_close(parts[metric], loss(labelled, soft_assign(labelled, net.codebooks(), 20.0), y))
    weights = {metric: 1.0}
    if variant != "gpq-h":
        weights |= {"classification": config.loss.lambda1, "entropy": -config.loss.lambda2}
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
