"""The committee network: what it believes, what it codes, and where its codewords come from."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpq_faiss.config import Config, merge, preset, validate
from gpq_faiss.data.digits import open_digits
from gpq_faiss.data.open import open_data
from gpq_faiss.data.reader import Reader
from gpq_faiss.encode import Encoder
from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.index.build import index, read_prototypes
from gpq_faiss.index.codebooks import encode as encode_vectors
from gpq_faiss.index.codebooks import unpack_codes
from gpq_faiss.losses import SubspaceClassification, SubspaceEntropy
from gpq_faiss.methods.codewords import fit_codewords
from gpq_faiss.methods.gpq_committee import CommitteeGPQ
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.additive import assign
from gpq_faiss.nn.committee import CLASS_DIM, DIRECTIONS, LEAST_SOFTENING, SOFTENING, CommitteeNetwork
from gpq_faiss.nn.heads import SubspaceHeads
from gpq_faiss.nn.model import build_network
from gpq_faiss.pipeline import encode, search
from gpq_faiss.store import RowReader
from gpq_faiss.train import train

C, WIDTH, D = 5, 9, 18
SHARES = (0.0, 0.7)


def config_of(neighbours: float = 0.0, **training: object) -> Config:
    return validate(
        merge(
            preset("recommended"),
            {
                "quantizer": {"codebooks": 3, "neighbours": neighbours},
                "network": {"committee": 4, "committee_hidden": 16},
                "training": training,
            },
        )
    )


def method(neighbours: float = 0.0, *, width: int = WIDTH, ema: float = 0.99) -> CommitteeGPQ:
    config = config_of(neighbours, ema=ema)
    net = build_network(config, {"kind": "features", "width": width}, C)
    assert isinstance(net, CommitteeNetwork)
    return CommitteeGPQ(net, config)


def network(neighbours: float = 0.0, *, width: int = WIDTH) -> CommitteeNetwork:
    """A network that means nothing, with codewords placed on what it says."""
    made = method(neighbours, width=width, ema=0.0)
    made.settle(Sampler(items(600, width=width)))
    return made.network.eval()


def items(n: int, seed: int = 0, width: int = WIDTH) -> Tensor:
    """Features whose directions are of unlike weight, float32 [n, width]."""
    x = np.random.default_rng([seed, n]).normal(size=(n, width)) * np.linspace(2, 0.5, width) + 0.3
    return torch.from_numpy(x).float()


def targets_of(net: CommitteeNetwork, x: Tensor, *, queries: bool = False) -> Tensor:
    """What is coded of items, or searched with."""
    features, raw = net.features(x)
    p = net.posterior(raw)
    return net.targets(features, p if queries else net.softened(p))


class Sampler:
    """What :meth:`settle` draws from; remembers how many items it was asked for."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.asked: list[int] = []

    def __call__(self, n: int) -> Iterator[Tensor]:
        self.asked.append(n)
        yield from torch.split(self.x[:n], 100)


# ------------------------------------------------------------------------------------------------------- what is coded


def test_the_posterior_is_the_mean_of_the_class_networks() -> None:
    net = network()
    _, raw = net.features(items(6))
    found = net.posterior(raw)
    parts = raw.reshape(6, 4, CLASS_DIM)
    each = []
    for n in range(4):
        W = net.classifier.raw[n] / net.classifier.raw[n].norm(dim=1, keepdim=True)
        v = parts[:, n] / parts[:, n].norm(dim=1, keepdim=True)
        each.append(torch.softmax(net.beta * v @ W.T, dim=1))
    assert torch.allclose(found, torch.stack(each).mean(0), atol=1e-5)
    assert torch.allclose(found.sum(1), torch.ones(6), atol=1e-5)
    features, raw = net.features(items(6))
    assert torch.equal(net.targets(features, net.posterior(raw)), net.posterior(raw))


def test_of_items_the_posterior_is_softened() -> None:
    """To p^t / Σ p^t: the order of the classes stays, and that of items by the odds of two classes."""
    net = network()
    p = net.posterior(net.features(items(50))[1]).detach()
    soft = net.softened(p)
    t = float(net.softening)
    assert 0 < t < 1
    expected = np.array([[v**t for v in row] for row in p.double().tolist()])
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(soft.numpy(), expected, rtol=1e-5)
    assert torch.equal(soft.argsort(dim=1), p.argsort(dim=1))
    assert bool((soft.max(dim=1).values < p.max(dim=1).values).all())
    # One that is sure of its class stays so; equal classes stay equal.
    assert torch.equal(net.softened(torch.eye(C)), torch.eye(C))
    torch.testing.assert_close(net.softened(torch.full((1, C), 1 / C)), torch.full((1, C), 1 / C))
    torch.testing.assert_close(network(0.7).softened(p), p)


@given(aim=st.floats(0.05, 1.0), seed=st.integers(0, 50), n=st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_the_committee_is_made_as_sure_as_it_is_right(aim: float, seed: int, n: int) -> None:
    net = network()
    p = torch.softmax(4 * torch.randn(n, C, generator=torch.Generator().manual_seed(seed)), dim=1)
    p[0] = torch.eye(C)[0]  # some probabilities are 0
    net.soften(p, aim)
    power = float(net.softening)

    def sureness(at: float) -> float:
        raised = p.double() ** at
        return float((raised / raised.sum(dim=1, keepdim=True)).amax(dim=1).mean())

    assert LEAST_SOFTENING <= power <= 1
    clamped = min(max(aim, sureness(LEAST_SOFTENING)), sureness(1.0))
    assert float(net.softened(p).amax(dim=1).mean()) == pytest.approx(clamped, abs=1e-4)


def test_beside_neighbours_no_softening_is_set() -> None:
    net = network(0.7)
    net.soften(torch.softmax(4 * torch.randn(20, C), dim=1), 0.4)
    assert float(net.softening) == 1


def test_a_known_accuracy_softens_what_is_coded() -> None:
    made = method()
    draw = Sampler(items(600))
    made.settle(draw)
    first = made.codebooks().copy()
    assert float(made.exported().softening) == pytest.approx(SOFTENING)
    p = made.exported().posterior(made.exported().features(items(600))[1])
    # Between what the greatest and the least power give.
    made.accuracy = float(0.8 * p.amax(dim=1).mean() + 0.2 / C)
    made.settle(draw)
    assert made.average is not None
    assert float(made.average.softening) == float(made.network.softening) != pytest.approx(SOFTENING)
    assert float(made.average.softened(p).amax(dim=1).mean()) == pytest.approx(made.accuracy, abs=1e-4)
    assert not np.allclose(made.codebooks(), first, atol=0.01)


def test_the_softening_is_kept_with_the_weights() -> None:
    net, other = network(), network()
    other.softening.fill_(1.0)
    other.load_state_dict(net.state_dict())
    assert float(other.softening) == float(net.softening) != 1
    state = {name: value for name, value in net.state_dict().items() if name != "softening"}
    with pytest.raises(RuntimeError, match="softening"):
        other.load_state_dict(state)


@pytest.mark.parametrize("width", [WIDTH, DIRECTIONS + 8])
@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_targets_compare_beliefs_and_places_in_the_main_directions(share: float, width: int) -> None:
    net = network(share, width=width)
    seen, x = items(600, width=width), items(20, 1, width)
    with torch.no_grad():
        everything, _ = net.features(seen)
        features, raw = net.features(x)
        p = net.posterior(raw).double().numpy()
        targets = net.targets(features, net.posterior(raw)).double().numpy()
    # The main directions by numpy.
    whole = everything.double().numpy()
    mean = whole.mean(axis=0)
    _, _, V = np.linalg.svd(whole - mean, full_matrices=False)
    kept = min(DIRECTIONS, width)
    f = (features.double().numpy() - mean) @ V[:kept].T
    f /= np.linalg.norm(f, axis=1, keepdims=True)
    np.testing.assert_allclose(targets @ targets.T, (1 - share) * p @ p.T + share * f @ f.T, atol=1e-5)
    assert targets.shape == (20, C + kept)
    assert np.linalg.norm(targets, axis=1).max() < 1 + 1e-6


def test_of_images_the_place_is_that_of_evened_features() -> None:
    """Their trunks have features of any scale."""
    config = config_of(0.5)
    net = build_network(config, {"kind": "images", "image_size": 8}, C)
    assert isinstance(net, CommitteeNetwork)
    net.eval()
    features, raw = net.features(torch.rand(30, 3, 8, 8))
    net.survey(features)
    p = net.posterior(raw)
    torch.testing.assert_close(net.targets(7 * features + 2, p), net.targets(features, p), rtol=0, atol=1e-4)


@pytest.mark.parametrize("share", SHARES)
def test_item_vectors_are_the_codewords_of_the_best_sum(share: float) -> None:
    net = network(share)
    x = items(40, 1)
    with torch.no_grad():
        found = net(x).reshape(40, 3, D)
        targets = targets_of(net, x)
    codes = assign(targets, net.sums)
    for m in range(3):
        torch.testing.assert_close(found[:, m], net.codebooks()[m][codes[:, m]])
    assert len({*map(tuple, codes.tolist())}) > 10  # or a constant would do
    # Encoding them as any vectors gives these codes.
    packed = encode_vectors(found.flatten(1).numpy(), net.codebooks().numpy())
    np.testing.assert_array_equal(unpack_codes(packed, 3, 16), codes.numpy())
    every = torch.tensor(list(itertools.product(range(16), repeat=3)))
    all_sums = torch.stack([net.sums[m][every[:, m]] for m in range(3)]).sum(dim=0)
    nearest = torch.cdist(targets, all_sums).min(dim=1).values
    reached = torch.stack([net.sums[m][codes[:, m]] for m in range(3)]).sum(dim=0)
    assert float((targets - reached).norm(dim=1).mean()) < 1.1 * float(nearest.mean())


@pytest.mark.parametrize("share", SHARES)
def test_vectors_are_unit_norm_and_score_as_the_targets_do(share: float) -> None:
    """The score is query target · sum of codewords, but for one factor; so of a product quantiser nothing is left."""
    net = network(share)
    x, ask = items(50, 1), items(7, 2)
    with torch.no_grad():
        vectors, queries = net(x), net.queries(ask)
        targets = targets_of(net, ask, queries=True)
        codes = assign(targets_of(net, x), net.sums)
    for found in (vectors, queries, net.codebooks()):
        norms = found.reshape(-1, D).norm(dim=1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-5)
    reached = torch.stack([net.sums[m][codes[:, m]] for m in range(3)]).sum(dim=0)
    scale = net.sums.norm(dim=2).max()
    torch.testing.assert_close(queries @ vectors.T * scale, targets @ reached.T, rtol=1e-4, atol=2e-5)


def test_codes_are_chosen_among_the_codewords_that_are_left() -> None:
    """With fewer dimensions than the codewords have: what is lost of them must not decide."""
    config = merge(config_of(), {"quantizer": {"subdim": 5}})
    net = build_network(config, {"kind": "features", "width": WIDTH}, C)
    assert isinstance(net, CommitteeNetwork)
    whole = torch.randn(3, 16, C, generator=torch.Generator().manual_seed(0))
    net.place(whole)
    net.eval()
    assert not torch.allclose(net.sums, whole, atol=0.1)
    x = items(40, 1)
    with torch.no_grad():
        targets, vectors, queries = targets_of(net, x), net(x), net.queries(x)
        asked = targets_of(net, x, queries=True)
    reached = net.sums[torch.arange(3), assign(targets, net.sums)].sum(dim=1)
    scale = net.sums.norm(dim=2).max()
    torch.testing.assert_close(queries @ vectors.T * scale, asked @ reached.T, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("share", SHARES)
def test_an_infinite_input_gives_no_vector(share: float) -> None:
    net = network(share)
    x = items(4, 1)
    x[1, 3], x[2] = float("inf"), float("nan")
    with torch.no_grad():
        vectors, queries = net(x), net.queries(x)
    for found in (vectors, queries):
        assert found.isfinite().all(dim=1).tolist() == [True, False, False, True]
    with pytest.raises(DataError, match="vectors to encode"):
        encode_vectors(vectors.numpy(), net.codebooks().numpy())


@pytest.mark.parametrize("share", SHARES)
def test_prototypes_are_queries_for_one_class(share: float) -> None:
    net = network(share)
    certain = torch.zeros(C, net.sums.shape[2])
    certain[:, :C] = (1 - share) ** 0.5 * torch.eye(C)
    # A sub-vector holds the target in the basis, nothing, and what is missing to norm 1.
    assert net.prototypes.shape == (3, C, D)
    for m in range(3):
        inside = certain @ net.basis[m]
        torch.testing.assert_close(net.prototypes[m, :, : D - 2], inside)
        assert not net.prototypes[m, :, D - 2].any()
    torch.testing.assert_close(net.prototypes.norm(dim=2), torch.ones(3, C), rtol=0, atol=1e-5)
    # An item that is surely of a class, and of average features, is found by the query for it.
    net.place(fit_codewords(certain.repeat(8, 1), 3, 16, seed=0))
    codes = assign(certain, net.sums)
    vectors = net.words[torch.arange(3), codes]
    scores = torch.einsum("cmd,mqd->cq", vectors, net.prototypes)
    assert scores.argmax(dim=1).tolist() == list(range(C))


# ---------------------------------------------------------------------------------------------------------- the method


@pytest.mark.parametrize("share", SHARES)
def test_settling_places_codewords_on_what_the_average_believes(share: float) -> None:
    made = method(share)
    with torch.no_grad():
        for p in made.network.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    assert made.average is not None
    random = made.codebooks().copy()
    draw = Sampler(items(700))
    made.settle(draw)
    net = made.exported()
    assert net is made.average
    with torch.no_grad():
        targets = targets_of(net, items(700))
        assert not torch.allclose(targets, targets_of(made.network.eval(), items(700)), atol=1e-3)
    expected = fit_codewords(targets, 3, 16, seed=made.config.training.seed)
    # Wide enough for 16 codewords: nothing is lost but digits.
    torch.testing.assert_close(net.sums, expected, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(made.codebooks(), random)
    for name, value in made.network.named_buffers():
        if name in ("mean", "axes", "softening", "sums", "basis", "words", "prototypes"):
            torch.testing.assert_close(value, net.get_buffer(name), msg=name)
    reached = net.sums[torch.arange(3), assign(targets, net.sums)].sum(dim=1)
    spread = (targets - targets.mean(dim=0)).square().sum()
    assert float((targets - reached).square().sum()) < 0.5 * float(spread)
    made.settle(draw, final=True)
    assert draw.asked[1] > draw.asked[0] >= 1000


def test_codewords_follow_the_network() -> None:
    made = method(ema=0.0)
    draw = Sampler(items(600))
    made.settle(draw)
    first = made.codebooks().copy()
    made.settle(draw)
    np.testing.assert_array_equal(made.codebooks(), first)
    with torch.no_grad():
        made.network.classifier.raw.add_(torch.randn(made.network.classifier.raw.shape))
    made.settle(draw)
    assert not np.allclose(made.codebooks(), first, atol=0.01)


def test_too_few_items_to_settle_on_are_refused() -> None:
    with pytest.raises(DataError, match="15 items cannot place 16 codewords"):
        method().settle(Sampler(items(15)))


def test_a_saved_state_brings_the_codewords_back() -> None:
    made = method(0.7)
    made.settle(Sampler(items(600)))
    fresh = method(0.7)
    fresh.load_state_dict(made.state_dict())
    x = items(10, 3)
    for ask in (False, True):
        assert torch.equal(
            made.exported().raw(x, queries=ask),
            fresh.exported().raw(x, queries=ask),
        )


def batch(n: int = 15, unlabelled: int = 30) -> TrainingBatch:
    y = torch.eye(C)[torch.arange(n) % C]
    return TrainingBatch(items(n + unlabelled, 5), y, 3, 10, torch.Generator())


def test_the_loss_is_that_of_the_class_networks() -> None:
    made = method().eval()
    parts = made.losses(batch(), amp=False)
    net, loss = made.network, made.config.loss
    with torch.no_grad():
        v = net.features(batch().x)[1].reshape(45, 4, CLASS_DIM)
        v = v / v.norm(dim=2, keepdim=True)
        classification = SubspaceClassification(loss.classification, loss.beta)(
            v[:15], net.classifier.raw, batch().y
        )
        entropy = SubspaceEntropy(loss.beta)(v[15:], net.classifier.raw)
    torch.testing.assert_close(parts["classification"].detach(), classification)
    torch.testing.assert_close(parts["entropy"].detach(), entropy)
    expected = loss.lambda1 * classification - loss.lambda2 * entropy
    torch.testing.assert_close(parts["total"].detach(), expected)
    assert set(made.losses(batch(unlabelled=0), amp=False)) == {"total", "classification"}


@pytest.mark.parametrize("part", ["classification", "entropy"])
def test_both_losses_teach_the_class_networks_and_none_the_codewords(part: str) -> None:
    made = method(0.7)
    before = made.codebooks().copy()
    made.losses(batch(), amp=False)[part].backward()  # type: ignore[no-untyped-call]
    taught = {n for n, p in made.network.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert taught == {"classifier.raw", *(f"backbone.head.{name}" for name in ("into", "bias", "out"))}
    assert taught == {n for n, _ in made.network.named_parameters()}
    optimizer = made.optimizer(made.config.training)
    optimizer.step()
    made.after_step(0)
    np.testing.assert_allclose(made.codebooks(), before, atol=1e-6)


def test_the_class_networks_lower_the_entropy_that_the_classifier_raises() -> None:
    """The mini-max of eq. 4: gradients of the entropy, those of the networks with the other sign."""
    made = method().eval()
    net = made.network
    assert isinstance(net.backbone.head, SubspaceHeads)
    parameters = [net.classifier.raw, net.backbone.head.out]
    found = torch.autograd.grad(made.losses(batch(), amp=False)["entropy"], parameters)
    plain = SubspaceEntropy(made.config.loss.beta)(
        net.directions(net.features(batch().x[15:])[1]), net.classifier.raw
    )
    expected = torch.autograd.grad(plain, parameters)
    assert all(bool((g.abs() > 1e-5).any()) for g in expected)
    torch.testing.assert_close(found, (expected[0], -expected[1]))


def test_the_class_networks_move_faster_than_a_trunk() -> None:
    config = merge(config_of(), {"network": {"hidden": [8]}})
    net = build_network(config, {"kind": "features", "width": WIDTH}, C)
    assert isinstance(net, CommitteeNetwork)
    slow, fast = CommitteeGPQ(net, config).optimizer(config.training).param_groups
    own = {id(p) for p in (*net.backbone.head.parameters(), *net.classifier.parameters())}
    assert {id(p) for p in fast["params"]} == own
    assert {id(p) for p in slow["params"]} == {id(p) for p in net.parameters()} - own
    assert len(slow["params"]) > 0
    assert fast["times"] == 2.0


def test_over_convolutions_the_class_networks_are_linear_and_move_as_these() -> None:
    config = merge(config_of(), {"network": {"backbone": "vgg"}})
    state = torch.random.get_rng_state()
    nets = [build_network(config, {"kind": "images", "image_size": 32}, C) for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), state)
    net = nets[0]
    assert isinstance(net, CommitteeNetwork)
    assert isinstance(net.backbone.head, nn.Linear)
    assert net.backbone.head.out_features == net.N * CLASS_DIM
    for one, other in zip(*(made.state_dict().values() for made in nets), strict=True):
        assert torch.equal(one, other)
    (group,) = CommitteeGPQ(net, config).optimizer(config.training).param_groups
    assert group.get("times", 1.0) == 1.0
    assert len(group["params"]) == len(list(net.parameters()))
    x = torch.rand(3, 3, 32, 32)
    assert net.eval().posterior(net.features(x)[1]).sum(dim=1).tolist() == pytest.approx([1, 1, 1], abs=1e-5)


# ---------------------------------------------------------------------------------------------------------- whole path


@pytest.fixture(scope="module", params=SHARES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("committee")
    config = config_of(request.param, steps=60, batch_labelled=50, batch_unlabelled=100, validation=0.0)
    return train(open_digits(), folder / "model", config=config, labelled="10-per-class")


def test_a_search_ranks_by_belief_in_the_sums_of_codewords(model: Path, tmp_path: Path) -> None:
    data = open_digits()
    codes = encode(model, data, tmp_path / "codes.h5")
    built = index(model, codes, tmp_path / "index.faiss")
    result = search(model, built, data, rows="0:5", k=7)
    encoder = Encoder.load(model)
    _, xq = encoder.embed_rows(data, np.arange(5), queries=True)
    _, xb = encoder.embed_rows(data, np.arange(len(data)))
    Z = encoder.model.codebooks
    chosen = np.einsum("nmd,mkd->nmk", xb.reshape(-1, 3, D), Z).argmax(2)
    scores = xq @ Z[np.arange(3), chosen].reshape(-1, 3 * D).T
    best = -np.sort(-scores, axis=1)[:, :7]
    assert np.abs(result.scores - best).max() < 1e-5
    with RowReader(codes) as reader:
        np.testing.assert_array_equal(unpack_codes(reader.block(), 3, 16), chosen)
    # The same without any vector: beliefs, and the codewords that add up to them.
    net = encoder.model.network
    assert isinstance(net, CommitteeNetwork)
    with Reader(data, encoder.model.image_size) as images, torch.no_grad():
        pixels = torch.from_numpy(images.fetch(np.arange(5))[0]).float() / 255
        belief = targets_of(net, pixels, queries=True)
    sums = net.sums[torch.arange(3), torch.from_numpy(chosen)].sum(dim=1)
    expected = (belief @ sums.T / net.sums.norm(dim=2).max()).numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-4)


def test_item_vectors_are_no_queries(model: Path, tmp_path: Path) -> None:
    codes = encode(model, open_digits(), tmp_path / "codes.h5")
    built = index(model, codes, tmp_path / "index.faiss")
    with pytest.raises(MismatchError, match="holds vectors of items"):
        search(model, built, str(tmp_path / "features.h5"), k=3)


def test_the_prototypes_of_a_model_are_its_queries_for_one_class(model: Path) -> None:
    net = Encoder.load(model).model.network
    assert isinstance(net, CommitteeNetwork)
    found = read_prototypes(model)
    assert found.shape == (10, 3 * D)
    np.testing.assert_allclose(found, net.prototypes.transpose(0, 1).flatten(1).numpy(), atol=1e-6)
    # Placed anew they say the same; directions of no weight may be others.
    again = copy.deepcopy(net)
    again.place(net.sums)
    scores = [torch.einsum("mcd,mkd->mck", n.prototypes, n.words) for n in (again, net)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-4)


def test_an_infinite_item_is_not_encoded(tmp_path: Path) -> None:
    """Features that are finite, and too large for the network."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.normal(size=(120, 6)).astype(np.float32))
    np.save(tmp_path / "y.npy", np.arange(120) % 3)
    data = open_data(f"features:{tmp_path / 'x.npy'}", labels=str(tmp_path / "y.npy"))
    config = config_of(steps=3, batch_labelled=20, batch_unlabelled=20, validation=0.0)
    made = train(data, tmp_path / "model", config=config, labelled="10-per-class", protocol="none")
    huge = np.load(tmp_path / "x.npy")
    huge[7] = 3e38
    np.save(tmp_path / "huge.npy", huge)
    with pytest.raises(DataError):
        encode(made, f"features:{tmp_path / 'huge.npy'}", tmp_path / "codes.h5")
    assert not (tmp_path / "codes.h5").exists()


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("section", "changes", "named"),
    [
        ("network", {"committee": -1}, "network.committee"),
        ("network", {"heads": 16}, "network.heads"),
        ("network", {"committee_hidden": 0}, "network.committee_hidden"),
        ("loss", {"lambda0": 1.0}, "loss.lambda0"),
        ("loss", {"lambda1": 0.0}, "loss.lambda1"),
        ("loss", {"lambda3": 1.0}, "loss.lambda3"),
        ("training", {"codebook_start": 0.25}, "training.codebook_start"),
        ("quantizer", {"reexpress": True}, "quantizer.reexpress"),
        ("quantizer", {"neighbours": 1.5}, "quantizer.neighbours"),
        ("quantizer", {"neighbours": -0.1}, "quantizer.neighbours"),
        ("quantizer", {"subdim": 2}, "quantizer.subdim"),
        ("network", {"committee": 0}, "nothing would train the codewords"),
    ],
)
def test_settings_that_cannot_be_are_refused(section: str, changes: dict[str, float], named: str) -> None:
    config = config_of()
    config = dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **changes)}
    )
    with pytest.raises(UsageError, match=named):
        validate(config)


def test_neighbours_need_a_committee() -> None:
    paper = preset("paper")
    config = dataclasses.replace(paper, quantizer=dataclasses.replace(paper.quantizer, neighbours=0.5))
    with pytest.raises(UsageError, match=r"quantizer\.neighbours = 0\.5 needs a committee"):
        validate(config)
