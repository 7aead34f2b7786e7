"""SSGAH: its terms against plain loops, that each network gets its own gradient alone, and that it learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deep_training import digits, features, first_batch, made, parts_of
from torch import Tensor, nn

from gpq_faiss.data.base import Dataset
from gpq_faiss.methods.baseline import squared_distances, triplet_margin, triplet_ranking
from gpq_faiss.methods.ssgah import SSGAH, Discriminator, Generator, draw_triplets


@pytest.fixture(params=["images", "features"])
def data(request: pytest.FixtureRequest) -> Dataset:
    return digits() if request.param == "images" else features()


def networks(method: SSGAH) -> dict[str, nn.Module]:
    return {"H": method.network, "G": method.generator, "D": method.discriminator}


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in module.parameters()]


def test_losses_are_the_terms_on_the_right_items(data: Dataset) -> None:
    method, batch = made("ssgah", data).eval(), first_batch(data, 12, 9)
    batch, method.blur = replace(batch, step=9), 0.0
    losses = parts_of(method, batch)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        v = method.network.backbone.input(batch.x)
        z = torch.randn(21, method.noise, generator=generator)
        pair = method.generator(v, z)
        h, hp, hn = (method.network(t, True).sigmoid() for t in (v, *pair))
        a, p, n = draw_triplets(batch.y, generator)
        fake, swapped, real = (
            method.discriminator(*t).sigmoid() for t in ((v, *pair), (v[a], v[n], v[p]), (v[a], v[p], v[n]))
        )
    d = squared_distances(h[:12], h[:12])
    assert losses["rank"] == pytest.approx(float(triplet_ranking(d, batch.y, method.margin)), rel=1e-4)
    hinge = float(triplet_margin(h - hp, h - hn, method.margin))
    assert losses["synthetic"] == pytest.approx(hinge, rel=1e-4)
    assert losses["adversary"] == pytest.approx(hinge, rel=1e-4)
    s = method.smooth
    says = -(s * real.log() + (1 - s) * (1 - real).log()).mean()
    says = says - (1 - fake).log().mean() / 2 - (1 - swapped).log().mean() / 2
    assert losses["discriminator"] == pytest.approx(float(says), rel=1e-4)
    assert losses["generator"] == pytest.approx(float(-fake.log().mean()), rel=1e-4)
    total = losses["rank"] + method.synthetic * losses["synthetic"] + losses["discriminator"]
    total += losses["generator"] - method.adversary * losses["adversary"]
    assert losses["total"] == pytest.approx(total, rel=1e-5)


def test_every_network_gets_the_gradient_of_its_own_objective_alone(data: Dataset) -> None:
    """The invariant: one backward through the sum is three separate ones."""
    method, batch = made("ssgah", data).eval(), replace(first_batch(data, 12, 9), step=9)

    def losses() -> dict[str, Tensor]:
        batch.generator.manual_seed(0)
        method.zero_grad(set_to_none=True)
        return method.losses(batch, amp=False)

    own = {"H": ("rank", "synthetic"), "D": ("discriminator",), "G": ("generator", "adversary")}
    losses()["total"].backward()  # type: ignore[no-untyped-call]
    together = {name: gradients(net) for name, net in networks(method).items()}
    assert all(any(g.abs().sum() > 0 for g in grads) for grads in together.values())
    for name, terms in own.items():
        parts = losses()
        weights = {"synthetic": method.synthetic, "adversary": -method.adversary}
        sum(weights.get(t, 1.0) * parts[t] for t in terms).backward()  # type: ignore[union-attr]
        for other, net in networks(method).items():
            for g, expected in zip(gradients(net), together[other], strict=True):
                wanted = expected if other == name else torch.zeros_like(g)
                torch.testing.assert_close(g, wanted, rtol=1e-4, atol=1e-6)


def test_synthetic_triplets_count_once_the_generator_has_learnt() -> None:
    method, batch = made("ssgah", digits()).eval(), first_batch(digits(), 12, 9)
    shares = []
    for step in (0, 2, 5, 9):
        batch.generator.manual_seed(0)
        losses = parts_of(method, replace(batch, step=step))
        others = losses["rank"] + losses["discriminator"] + losses["generator"]
        others -= method.adversary * losses["adversary"]
        shares.append((losses["total"] - others) / losses["synthetic"] / method.synthetic)
    assert shares == pytest.approx([0, 0, 0.5, 1], abs=1e-4)


def test_synthetic_items_stay_out_of_running_statistics() -> None:
    method, batch = made("ssgah", digits()).train(), first_batch(digits(), 12, 9)
    norm: Any = nn.BatchNorm1d(64)
    method.extractor.layers.insert(1, norm)
    layer = method.extractor.layers[0]
    real = layer(method.extractor.input(batch.x).flatten(1)).mean(dim=0)
    method.losses(batch, amp=False)
    torch.testing.assert_close(norm.running_mean, 0.1 * real)


def test_image_networks_take_any_size() -> None:
    for size in (4, 7, 33):
        x, z = torch.randn(2, 3, size, size), torch.randn(2, 5)
        similar, dissimilar = Generator(0, 5, 16)(x, z)
        assert similar.shape == dissimilar.shape == x.shape
        assert Discriminator(0, 16)(x, similar, dissimilar).shape == (2,)
