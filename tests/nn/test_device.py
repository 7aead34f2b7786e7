"""Float32 as float32, and batches of images that fit."""

import pytest
import torch
from model_factory import make_model, random_input

from gpq_faiss.config import Config, NetworkConfig
from gpq_faiss.encoder import Encoder
from gpq_faiss.methods.gpq import build_network
from gpq_faiss.nn.device import full_float32, image_batch


@pytest.mark.parametrize("before", [True, False])
def test_tf32_is_off_in_an_encoder_and_as_before_outside(tmp_path, monkeypatch, before):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    encoder, recorded = Encoder.load(make_model(tmp_path / "model")), []
    real = encoder.model.network.raw

    def raw(*args, **options):
        recorded.append(torch.backends.cudnn.allow_tf32)
        if len(recorded) == 2:
            raise ValueError("inside")
        return real(*args, **options)

    monkeypatch.setattr(encoder.model.network, "raw", raw)
    encoder.embed(random_input("features", 2))
    assert torch.backends.cudnn.allow_tf32 is before
    with pytest.raises(ValueError, match="inside"):
        encoder.embed(random_input("features", 2))
    assert recorded == [False, False]
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
        result = net.to("cuda")(x.cuda()).cpu()
    torch.testing.assert_close(result, expected, rtol=0, atol=5e-5)
