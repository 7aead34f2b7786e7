"""GPQ and its variants by their equations; with soft targets its network and the way from images to Faiss; the preset ``authors``."""

import dataclasses
import itertools
import json

import faiss
import numpy as np
import pytest
import torch
from gpq_faiss.store.reader import RowReader
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from model_factory import own_settings
from safetensors.torch import load_file

from gpq_faiss import encode, evaluate, search, train
from gpq_faiss.config import preset, validate
from gpq_faiss.data.open import open_data
from gpq_faiss.data.standard import open_digits
from gpq_faiss.encoder import Encoder
from gpq_faiss.losses.classification import shares, subspace_classification, subspace_entropy
from gpq_faiss.losses.npair import npair, soft_npair, triplet
from gpq_faiss.methods.gpq import build_network
from gpq_faiss.methods.gpq_soft import straight_through
from gpq_faiss.methods.registry import METHODS
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.augment import random_flip_crop
from gpq_faiss.nn.backbones import VGG, BackboneSpec, build_backbone
from gpq_faiss.nn.quantizer import intra_normalize, soft_assign
from gpq_faiss.stages.export import export_faiss
from gpq_faiss.stages.export_encoder import export_encoder
from gpq_faiss.stages.index import index

C, WIDTH, M = 4, 10, 3
LABELLED, ITEMS = 12, 20


def method(classes=C, **sections):
    small = {
        "quantizer": {"codebooks": M, "codewords": 8, "subdim": 12},
        "network": {"hidden": [16], "noise": 0.0},
        "posterior": {"networks": 2},
    }
    config = preset("gpq").with_settings(small).with_settings(sections)
    return build_network(config, {"kind": "features", "width": WIDTH}, classes).train()


def items(n=40):
    return 3 * torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(1))


def batch():
    """The two parts differ in mean and spread, so that joint statistics are neither's."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ITEMS, WIDTH, generator=generator)
    x[LABELLED:] = 2 * x[LABELLED:] + 1.5
    return TrainingBatch(x, torch.eye(C)[torch.arange(LABELLED) % C], 0, 10, generator)


def floats(parts):
    return {name: value.item() for name, value in parts.items()}


def test_the_losses_are_those_of_class_networks_and_of_pairs():
    gpq = method(loss={"lambda1": 0.9, "lambda2": 0.3}, posterior={"propagation": 0.0})
    given = batch()
    parts = floats(gpq.losses(given, amp=False))
    theirs = floats(gpq.classes.losses(given, amp=False))
    net = gpq
    with torch.no_grad():
        p = net.eval().posterior(given.x)
        x, Z, W = intra_normalize(net.raw_subvectors(p), net.M), net.codewords(), net.classifier()
        told = torch.cat([given.y, p[LABELLED:]])
        expected = {
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


def test_every_parameter_is_stepped_once_and_the_pairs_teach_the_codes_alone():
    gpq = method()
    groups = gpq.optimizer(gpq.config).param_groups
    rates = [(id(p), group["times"]) for group in groups for p in group["params"]]
    gpq.losses(batch(), amp=False)["npair"].backward()
    for name, p in gpq.named_parameters():
        of_class = name.startswith("classes.")
        assert [rate for of, rate in rates if of == id(p)] == [2.0 if of_class else 5.0], name
        assert (p.grad is not None and bool(p.grad.any())) != of_class, name
    assert len(rates) == len(list(gpq.parameters()))
    parts = {"classes", "codewords", "classifier", "log_scale", "layers", "prototypes"}
    assert {name.split(".")[0] for name in gpq.state_dict()} == parts, "the class networks once"
    assert gpq.classes.tables.numel() + gpq.classes.feature_codewords.numel() == C, "next to no codewords"


def test_score_tables_are_refitted_after_the_training():
    x = items(400)
    short = {"quantizer": {"subdim": 8}}, {"quantizer": {"codewords": 4}, "classes": 9}
    # Not to sub-vectors that are too short for them, nor with more classes than codewords.
    for changes, refitted in zip(({}, *short), (True, False, False), strict=True):
        gpq = method(**changes)
        with torch.no_grad():
            gpq.codewords.raw.mul_(3)  # of any length
        gpq.fit_codebooks(lambda n: iter([x[:n]]), final=False)
        as_trained = gpq.prototypes.clone()
        gpq.fit_codebooks(lambda n: iter([x[:n]]), final=True)
        assert torch.equal(as_trained, gpq.prototypes) != refitted


def test_digits_are_found_by_their_class_and_faiss_makes_the_codes(tmp_path):
    changes = {
        "quantizer": {"codebooks": 6},
        "posterior": {"networks": 3},
        "network": {"hidden": [64]},
        "training": {"steps": 60, "learning_rate": 3e-3},
    }
    digits, config = open_digits(), preset("gpq").with_settings(changes)
    model = train(digits, tmp_path / "model", config=config, labelled="20-per-class")
    assert evaluate(model, digits, protocol="1").ranking.map > 0.8, "chance is 0.1"
    last = json.loads((model / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"npair", "classification", "entropy", "class_classification", "class_entropy"} <= set(last)
    codes = encode(model, digits, tmp_path / "codes.h5")
    encoder = Encoder.load(model)
    np.testing.assert_allclose(np.linalg.norm(encoder.model.codebooks, axis=2), 1, atol=1e-6)
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
        found = search(model, file, digits, k=10, rows=":20")
        np.testing.assert_allclose(found.scores, expected, atol=1e-5)


@settings(max_examples=25, deadline=None)
@drawn(K=st.sampled_from([4, 8]), more=st.integers(1, 6), M=st.integers(1, 4), seed=st.integers(0, 1000))
@torch.no_grad()
def test_queries_realise_any_score_tables_but_for_one_factor(K, more, M, seed):
    """Without tables, those of the sub-prototypes: Σ_c p_c w_mc · z_mk."""
    sizes = {"codebooks": M, "codewords": K}
    net = method(quantizer=sizes | {"subdim": K + more}, training={"seed": seed}).eval()
    x = items()
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
    net.classes.posterior = lambda raw: torch.eye(C)
    sure = net.queries(items(C)).view(C, M, -1).transpose(0, 1)
    torch.testing.assert_close(sure, net.prototypes, rtol=0, atol=1e-3)


def test_straight_through_gives_codewords_and_the_gradient_of_their_mean():
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


# Variants -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [preset("paper"), own_settings()], ids=["paper", "own settings"])
@pytest.mark.parametrize("variant", ["gpq", "gpq-h", "gpq-t"])
def test_a_variant_is_its_losses(variant, base):
    small = {"quantizer": {"codebooks": 3, "subdim": 6}, "network": {"hidden": [24]}}
    config = base.with_settings(small).with_settings(dict(METHODS[variant].changes))
    data = open_data(np.eye(8, WIDTH, dtype=np.float32), labels=np.arange(8) % C)
    gpq = METHODS[variant].load()(config, data, 0, C).eval()
    x, y, net = batch().x, batch().y, gpq
    parts = gpq.losses(batch(), amp=False)
    labelled = intra_normalize(net.backbone(x[:12]), 3)
    loss = triplet if variant == "gpq-t" else npair
    expected = {loss.__name__: loss(labelled, soft_assign(labelled, net.codebooks(), 20.0), y)}
    weights = {loss.__name__: 1.0}
    if variant != "gpq-h":
        weights |= {"classification": config.loss.lambda1, "entropy": -config.loss.lambda2}
        W, beta, others = net.classifier.raw, config.beta, intra_normalize(net.backbone(x[12:]), 3)
        kind = "paper" if config.method == "gpq-printed" else "code"
        expected["classification"] = subspace_classification(labelled, W, shares(y, x), beta, kind)
        expected["entropy"] = subspace_entropy(others, W, beta)
        # Raised by the classifier, lowered by the network (eq. 4).
        for parameter, sign in ((W, 1), (net.backbone.head.weight, -1)):
            ours, plain = (
                torch.autograd.grad(v["entropy"], parameter, retain_graph=True)[0] for v in (parts, expected)
            )
            torch.testing.assert_close(ours, sign * plain)
            assert plain.any()
    for name, value in expected.items():
        torch.testing.assert_close(parts[name], value)
    assert set(parts) == {"total", *weights}
    torch.testing.assert_close(parts["total"], sum(weight * parts[name] for name, weight in weights.items()))
    parts["total"].backward()
    # Without a classifier the sub-prototypes still carry z' = s(z; α, W).
    assert net.classifier.raw.grad.any()


# The preset "authors" -------------------------------------------------------------------------------------------------

D, HIDDEN = 5, 6


def small(variant="gpq-authors"):
    """GPQ of the preset over a perceptron with batch norm."""
    changes = {
        "quantizer": {"codebooks": M, "codewords": 4, "subdim": D},
        "network": {"backbone": "mlp", "hidden": [HIDDEN], "weights": "none"},
        "method": variant,
    }
    config = validate(preset("authors").with_settings(changes))
    net = build_network(config, {"kind": "features", "width": WIDTH}, C)
    norm = torch.nn.BatchNorm1d(HIDDEN)
    net.backbone.layers.insert(1, norm)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, HIDDEN))
        norm.bias.copy_(torch.linspace(-0.2, 0.3, HIDDEN))
    return net.train()


def by_hand(gpq, parts):
    """The perceptron's output, each of ``parts`` normalised by its own mean and deviation, and the averages that move with each."""
    state = {k: v.double().numpy() for k, v in gpq.backbone.state_dict().items()}
    out, mean, variance = [], np.zeros(HIDDEN), np.ones(HIDDEN)
    for x in parts:
        h = x @ state["layers.0.weight"].T + state["layers.0.bias"]
        mean, variance = 0.9 * mean + 0.1 * h.mean(axis=0), 0.9 * variance + 0.1 * h.var(axis=0, ddof=1)
        h = (h - h.mean(axis=0)) / np.sqrt(h.var(axis=0) + 1e-5)
        h = np.maximum(h * state["layers.1.weight"] + state["layers.1.bias"], 0)
        out.append(h @ state["head.weight"].T + state["head.bias"])
    return np.concatenate(out), mean, variance


@pytest.mark.parametrize("variant", ["gpq-authors", "gpq"])
def test_batch_statistics_and_entropy_are_those_of_a_plain_calculation(variant):
    gpq, given = small(variant), batch()
    x = given.x.double().numpy()
    raw, *averages = by_hand(gpq, [x[:LABELLED], x[LABELLED:]] if variant == "gpq-authors" else [x])
    parts = floats(gpq.losses(given, amp=False))
    norm = gpq.backbone.get_submodule("layers.1")
    np.testing.assert_allclose(np.stack([norm.running_mean, norm.running_var]), averages, rtol=1e-4)
    split = raw.reshape(ITEMS, M, D)
    directions = split / np.linalg.norm(split, axis=2, keepdims=True)
    W = gpq.classifier.raw.detach().double()
    labelled, unlabelled = torch.from_numpy(directions).split([LABELLED, ITEMS - LABELLED])
    # The authors': one vote of all sub-spaces, scaled by β².
    kind = "code" if variant == "gpq-authors" else "paper"
    entropy = float(subspace_entropy(unlabelled, W, 4.0, kind))
    assert parts["entropy"] == pytest.approx(entropy, rel=1e-5)
    y = given.y.double()
    classification = float(subspace_classification(labelled, W, shares(y, W), 4.0, "code"))
    assert parts["classification"] == pytest.approx(classification, rel=1e-5)
    quantised = soft_assign(labelled, gpq.codebooks().detach().double(), 20.0)
    pairs = float(npair(labelled, quantised, y))
    assert parts["npair"] == pytest.approx(pairs, rel=1e-5)
    assert parts["total"] == pytest.approx(pairs + 0.1 * classification - 0.1 * entropy, rel=1e-5)


def test_without_unlabelled_items_there_is_one_batch():
    given = batch()
    alone = dataclasses.replace(given, x=given.x[:LABELLED])
    apart, joint = (small(s).losses(alone, amp=False) for s in ("gpq-authors", "gpq"))
    assert floats(apart) == floats(joint)


def test_it_starts_from_imagenet_weights_pads_by_their_mean_colour_and_ends_in_a_model(tmp_path, monkeypatch):
    ids = np.arange(60) % 2
    pixels = np.random.default_rng(0).integers(0, 180, (60, 16, 16, 3)) + 60 * ids[:, None, None, None]
    pictures = open_data(pixels.astype(np.uint8), labels=ids)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    place = tmp_path / "torch" / "hub" / "checkpoints" / "vgg16_bn-6c64b313.pth"
    place.parent.mkdir(parents=True)
    spec = BackboneSpec("vgg", "images", 4, image_size=16)
    vgg = build_backbone(spec, generator=torch.Generator().manual_seed(99))
    state = {k: v for k, v in vgg.state_dict().items() if k.startswith("features.")}
    torch.save(state, place)
    seen = []

    def spy(x, *args, colour, **options):
        seen.append(colour.flatten())
        return random_flip_crop(x, *args, colour=colour, **options)

    monkeypatch.setattr("gpq_faiss.training.loop.random_flip_crop", spy)
    training = {"steps": 1, "batch_unlabelled": 20, "learning_rate": 1e-9, "augment": "crop"}
    config = preset("authors").with_settings({"quantizer": {"codebooks": 2}, "training": training})
    model = train(pictures, tmp_path / "model", config=config, labelled="5-per-class")
    torch.testing.assert_close(seen, [torch.tensor([0.485, 0.456, 0.406])], check_dtype=False)
    trained = load_file(model / "model.safetensors")
    for name, tensor in state.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(trained[f"network.backbone.{name}"], tensor, atol=1e-7, rtol=0)
    assert int(trained["network.backbone.features.1.num_batches_tracked"]) == 2, "a batch each, one step"
    backbone = Encoder.load(model).model.network.get_submodule("backbone")
    assert (type(backbone), backbone.spec.tap) == (VGG, "pool"), "as it was trained"
    assert evaluate(model, pictures).method == "gpq (authors)"
