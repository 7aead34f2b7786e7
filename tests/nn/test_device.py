"""Float32 as float32, and batches of images that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_factory import random_input

from gpq_faiss.config import Config, NetworkConfig
from gpq_faiss.encoder import Encoder
from gpq_faiss.nn.device import full_float32, image_batch
from gpq_faiss.nn.model import build_network


@pytest.mark.parametrize("before", [True, False])
def test_tf32_is_off_in_an_encoder_and_as_before_outside(monkeypatch, before):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    seen: list[bool] = []

    class Network:
        M = 12

        def raw(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
            seen.append(torch.backends.cudnn.allow_tf32)
            if len(seen) == 2:
                raise ValueError("inside")
            return torch.ones(len(x), 144)

        def finish(self, raw: torch.Tensor) -> torch.Tensor:
            return raw

    about: dict[str, Any] = {"source": Path("m"), "shape": (12, 16, 12), "input_width": 0, "fingerprint": ""}
    about |= {"input_kind": "images", "image_size": 32, "codebooks_fingerprint": ""}
    model: Any = type("Model", (), {"network": Network()})
    encoder = Encoder(**about, model=model, device=torch.device("cpu"))
    encoder.embed(np.zeros((2, 3, 32, 32), np.uint8))
    with pytest.raises(ValueError, match="inside"):
        encoder.embed(np.zeros((2, 3, 32, 32), np.uint8))
    assert seen == [False, False]
    assert torch.backends.cudnn.allow_tf32 is before


@pytest.mark.parametrize("most", [1, 128, 1024])
def test_a_batch_of_images_has_bounded_pixels(most):
    assert image_batch(most, 32) == image_batch(most, 64) == most
    sizes = [image_batch(most, side) for side in range(1, 1000)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(n == min(16, most) or n * side**2 <= most * 64**2 for side, n in enumerate(sizes, 1))
    assert sizes[-1] >= min(16, most)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_convolutions_on_a_gpu_give_the_vectors_of_the_cpu():
    """TF32 would be off by a thousandth."""
    config = Config(network=NetworkConfig(backbone="vgg"))
    net = build_network(config, {"kind": "images", "image_size": 32}, 5).eval()
    x = torch.from_numpy(random_input("images", 8)).float() / 255
    with torch.inference_mode(), full_float32():
        expected = net(x)
        found = net.to("cuda")(x.cuda()).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
