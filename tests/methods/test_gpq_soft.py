"""GPQ with soft targets: its losses, its choice of score tables, and the way from images to Faiss; and that ``paper`` has none of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss import encode, evaluate, search, train
from gpq_faiss.config import Config, merge, preset, validate
from gpq_faiss.data.standard import open_digits
from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import UsageError
from gpq_faiss.methods.gpq import GPQ
from gpq_faiss.methods.gpq_soft import SoftGPQ, fit_tables, score_codes
from gpq_faiss.methods.posterior_codebooks import expected_map
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.gpq_soft import SoftGPQNetwork
from gpq_faiss.nn.model import build_network
from gpq_faiss.stages.export_encoder import export_encoder
from gpq_faiss.stages.export_faiss import export_faiss
from gpq_faiss.stages.index import index
from gpq_faiss.store import RowReader

C, WIDTH, M = 4, 10, 3
LABELLED, ITEMS = 12, 20


def config_of(**sections: dict[str, Any]) -> Config:
    small = {
        "quantizer": {"codebooks": M, "codewords": 8, "subdim": 12},
        "network": {"dropout": 0.0, "noise": 0.0},
        "posterior": {"committee": 2, "committee_hidden": 16},
    }
    return validate(merge(merge(preset("gpq"), small), sections))


def method(**sections: dict[str, Any]) -> SoftGPQ:
    config = config_of(**sections)
    net = build_network(config, {"kind": "features", "width": WIDTH}, C)
    assert isinstance(net, SoftGPQNetwork)
    return SoftGPQ(net, config).train()


def batch() -> TrainingBatch:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ITEMS, WIDTH, generator=generator)
    return TrainingBatch(x, torch.eye(C)[torch.arange(LABELLED) % C], 0, 10, generator)


def test_the_paper_has_the_losses_that_are_printed() -> None:
    """The preset ``paper`` from its equations (N-pair, eq. 2; classification as the authors' code has it; entropy, eq. 4)."""
    config = preset("paper")
    config = dataclasses.replace(config, quantizer=dataclasses.replace(config.quantizer, codebooks=M))
    gpq = GPQ(build_network(config, {"kind": "features", "width": WIDTH}, C), config)
    given = batch()
    parts = {k: v.item() for k, v in gpq.losses(given, amp=False).items()}
    net = gpq.network
    with torch.no_grad():
        split = net.backbone(given.x).reshape(ITEMS, M, -1)
        x = (split / split.norm(dim=2, keepdim=True)).double().numpy()
        Z, W = (
            t / np.linalg.norm(t, axis=2, keepdims=True)
            for t in (net.codewords.raw.numpy(), net.classifier.raw.numpy())
        )

    def soft(v: Any, words: Any) -> Any:
        weight = np.exp(20 * words @ v)
        mean = weight @ words
        return mean / np.linalg.norm(mean)

    books = [[soft(Z[m, k], W[m]) for k in range(16)] for m in range(M)]
    q = np.array([[soft(x[i, m], np.array(books[m])) for m in range(M)] for i in range(LABELLED)])
    y = given.y.numpy()
    npair = classification = entropy = 0.0
    for i in range(LABELLED):
        s = np.array([sum(x[i, m] @ q[j, m] for m in range(M)) for j in range(LABELLED)])
        t = y @ y[i]
        npair -= (t / t.sum()) @ (s - np.log(np.exp(s).sum())) / LABELLED
        vote = np.mean([16 * W[m] @ x[i, m] for m in range(M)], axis=0)
        classification -= y[i] @ (vote - np.log(np.exp(vote).sum())) / LABELLED
    for i, m in itertools.product(range(LABELLED, ITEMS), range(M)):
        p = np.exp(4 * W[m] @ x[i, m])
        p /= p.sum()
        entropy -= p @ np.log(p) / (M * (ITEMS - LABELLED))
    expected = {
        "total": npair + 0.1 * classification - 0.1 * entropy,
        "npair": npair,
        "classification": classification,
        "entropy": entropy,
    }
    assert parts == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("targets", ["beliefs", "labels"])
@pytest.mark.parametrize("queries", ["auto", "items"])
def test_the_losses_are_those_of_class_networks_and_of_pairs(targets: str, queries: str) -> None:
    """All terms against loops over items, sub-spaces and pairs."""
    gpq = method(
        pairs={"targets": targets, "queries": queries},
        loss={"lambda1": 0.9, "lambda2": 0.3},
        posterior={"propagation": 0.0},
    )
    given = batch()
    parts = {k: v.item() for k, v in gpq.losses(given, amp=False).items()}
    theirs = {k: v.item() for k, v in gpq.class_networks.losses(given, amp=False).items()}
    net = gpq.network
    with torch.no_grad():
        p = gpq.exported().eval().posterior(given.x)
        x = net.subvectors(p).double().numpy()
        Z, W, scale = (t.double().numpy() for t in (net.codewords(), net.classifier(), net.log_scale.exp()))
    p = p.double().numpy()
    told = p.copy() if targets == "beliefs" else np.zeros((ITEMS, C))
    told[:LABELLED] = given.y.numpy()
    known = [i for i in range(ITEMS) if told[i].any()]
    npair = classification = 0.0
    for i in known:
        asked = [told[i] @ W[m] if queries == "auto" else x[i, m] for m in range(M)]
        s = {
            j: scale * np.mean([asked[m] @ Z[m, (Z[m] @ x[j, m]).argmax()] for m in range(M)]) for j in known
        }
        t = {j: told[i] @ told[j] for j in known}
        down = np.log(sum(np.exp(list(s.values()))))
        npair -= sum(t[j] / sum(t.values()) * (s[j] - down) for j in known) / len(known)
        for m in range(M):
            vote = 20 * W[m] @ x[i, m]
            classification -= told[i] @ (vote - np.log(np.exp(vote).sum())) / M / len(known)
    entropy = 0.0
    for i, m in itertools.product(range(LABELLED, ITEMS), range(M)):
        soft = np.exp(20 * W[m] @ x[i, m])
        soft /= soft.sum()
        entropy -= soft @ np.log(np.maximum(soft, 1e-300)) / (M * (ITEMS - LABELLED))
    assert parts["npair"] == pytest.approx(npair, rel=1e-4)
    assert parts["classification"] == pytest.approx(classification, rel=1e-4)
    assert parts["entropy"] == pytest.approx(entropy, rel=1e-4, abs=1e-6)
    assert parts["total"] == pytest.approx(
        theirs["total"] + npair + 0.9 * classification - 0.3 * entropy, rel=1e-4
    )
    assert {k.removeprefix("class_") for k in parts if k.startswith("class_")} == set(theirs) - {"total"}


def test_the_pairs_teach_the_codes_and_not_the_class_networks() -> None:
    gpq = method()
    gpq.losses(batch(), amp=False)["npair"].backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in gpq.network.committee.parameters())
    ours = [p for name, p in gpq.network.named_parameters() if not name.startswith("committee.")]
    assert all(p.grad is not None and bool(p.grad.any()) for p in ours)


def test_every_parameter_is_stepped_once() -> None:
    gpq = method()
    groups = gpq.optimizer(gpq.config.training).param_groups
    stepped = [id(p) for group in groups for p in group["params"]]
    assert sorted(stepped) == sorted(id(p) for p in gpq.network.parameters())
    rates = {id(p): group.get("times", 1.0) for group in groups for p in group["params"]}
    theirs = {rates[id(p)] for p in gpq.network.committee.parameters()}
    assert {rates[id(gpq.network.codewords.raw)], rates[id(gpq.network.classifier.raw)]} == {5.0}
    assert theirs == {2.0}


def test_the_state_holds_the_class_networks_once() -> None:
    names = list(method().state_dict())
    assert {name.split(".")[0] for name in names} == {"network", "average"}


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 7), seed=st.integers(0, 1000), ties=st.booleans())
def test_the_expected_map_is_a_mean_over_what_may_be_relevant(n: int, seed: int, ties: bool) -> None:
    """Σ over k of P(k relevant) times the expected precision at k given that, divided by the expected number: by all subsets."""
    rng = np.random.default_rng(seed)
    r = rng.random(n)
    s = rng.integers(0, 3, n).astype(float) if ties else rng.permutation(n).astype(float)
    if ties:
        r = np.array([r[s == v].mean() for v in s])
    order = np.argsort(-s, kind="stable")
    expected = 0.0
    for chosen in itertools.product([0, 1], repeat=n):
        weight = np.prod(np.where(chosen, r, 1 - r))
        ranked = np.array(chosen)[order]
        expected += weight * float((ranked * np.cumsum(ranked) / np.arange(1, n + 1)).sum())
    found = expected_map(torch.from_numpy(s)[None], torch.from_numpy(r)[None])
    assert found == pytest.approx(expected / r.sum())


def test_fitted_tables_are_the_least_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(300, C, generator=generator)
    codes = torch.randint(8, (300, M), generator=generator)
    tables = fit_tables(p, codes, 8)
    chosen = torch.nn.functional.one_hot(codes, 8).flatten(1).double()
    best = chosen @ torch.linalg.lstsq(chosen, p.double(), driver="gelsd").solution
    off = p.double() - best
    said = score_codes(torch.eye(C), tables, codes).T
    assert float((p - said).square().sum()) == pytest.approx(float(off.square().sum()), rel=1e-4)


def _world(gpq: SoftGPQ) -> Any:
    """Beliefs of 400 items, all but sure of one of the classes."""
    generator = torch.Generator().manual_seed(1)
    x = 4 * torch.randn(400, WIDTH, generator=generator)
    return lambda n: iter([x[:n]])


@pytest.mark.parametrize("tables", ["trained", "fitted", "auto"])
def test_tables_are_those_that_are_asked_for_or_better_by_belief(tables: str) -> None:
    gpq = method(pairs={"queries": tables})
    with torch.no_grad():
        gpq.network.codewords.raw.mul_(3)  # of any length
    gpq.average = None
    gpq.fit_codebooks(_world(gpq), final=False)
    as_trained = gpq.network.prototypes.clone()
    with torch.no_grad():
        p = torch.cat([gpq.network.eval().posterior(x) for x in _world(gpq)(400)])
    gpq.fit_codebooks(_world(gpq), final=True)
    same = torch.equal(as_trained, gpq.network.prototypes)
    if tables != "auto":
        assert same == (tables == "trained")
        return
    # Random sub-prototypes say nothing: fitted tables must be better, and are so by the beliefs themselves.
    assert not same
    codes = gpq.network.codes(p)
    by_trained, by_fitted = (
        expected_map(score_codes(p[:50], t, codes[50:]), p[:50] @ p[50:].T)
        for t in (gpq.network.trained_tables(), fit_tables(p[50:], codes[50:], 8))
    )
    assert by_fitted > by_trained


def test_better_trained_tables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gpq = method()
    gpq.average = None
    monkeypatch.setattr("gpq_faiss.methods.gpq_soft.fit_tables", lambda p, codes, K: -torch.ones(M, K, C))
    before = gpq.network.prototypes.clone()
    gpq.fit_codebooks(_world(gpq), final=True)
    torch.testing.assert_close(gpq.network.prototypes, before)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"quantizer": {"neighbours": 0.3}}, "neighbours"),
        ({"loss": {"metric": "triplet"}}, "metric"),
        ({"pairs": {"queries": "fitted"}, "quantizer": {"subdim": 8}}, "subdim = 8 must be above"),
        ({"pairs": {"queries": "best"}}, "pairs.queries"),
    ],
)
def test_settings_that_cannot_be_are_refused(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        config_of(**sections)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = merge(
        preset("gpq"),
        {
            "quantizer": {"codebooks": 6},
            "posterior": {"committee": 3, "committee_hidden": 64},
            "training": {"steps": 150, "learning_rate": 3e-3},
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
    empty.add(xb)
    expected, _ = empty.search(xq, 10)
    for kind in ("flat", "ivf"):
        file = index(model, codes, tmp_path / f"{kind}.faiss", kind=kind)
        found = search(model, file, open_digits(), k=10, rows=":20")
        np.testing.assert_allclose(found.scores, expected, atol=1e-5)


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_the_exported_encoder_has_the_queries_and_the_codes_of_items(
    model: Path, tmp_path: Path, suffix: str
) -> None:
    if suffix == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    file = export_encoder(model, tmp_path / f"encoder.{suffix}")
    assert file.stat().st_size > 0
    if suffix == "onnx":
        import onnxruntime

        with_images = open_digits()
        encoder = Encoder.load(model)
        _, xb = encoder.embed_rows(with_images, np.arange(30))
        _, xq = encoder.embed_rows(with_images, np.arange(30), queries=True)
        assert not np.allclose(xb, xq, atol=1e-2)
        assert onnxruntime.InferenceSession(str(file)).get_outputs()[0].shape[1] == xq.shape[1]


def test_a_stopped_training_goes_on_to_the_same_codes(tmp_path: Path) -> None:
    config = merge(
        preset("gpq"),
        {
            "quantizer": {"codebooks": 3},
            "posterior": {"committee": 2, "committee_hidden": 16},
            "training": {"steps": 12},
        },
    )

    def stop(step: int, steps: int, figures: dict[str, float]) -> None:
        if step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(
            open_digits(),
            tmp_path / "cut",
            config=config,
            labelled="5-per-class",
            checkpoint_seconds=0.0,
            progress=stop,
        )
    cut = train(open_digits(), tmp_path / "cut", config=config, labelled="5-per-class", resume=True)
    whole = train(open_digits(), tmp_path / "whole", config=config, labelled="5-per-class")
    prints = [json.loads((f / "config.json").read_text())["model_fingerprint"] for f in (cut, whole)]
    assert prints[0] == prints[1]
