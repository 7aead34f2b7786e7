"""How a search is done where the user names no kind, and that it says so."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from model_factory import make_model

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.groups import GROUP_SHARE, Groups
from gpq_faiss.errors import UsageError
from gpq_faiss.faissio.model import read_model
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.stages.index import index as build_index
from gpq_faiss.stages.queries import query_vectors
from gpq_faiss.stages.search import open_index, search

N = 20_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("search") / "model", M=6)


def saved(model: Path, folder: Path, share: float, kind: str) -> Path:
    """An index file of codes of which this share is distinct, as ``gpq index --kind`` writes it."""
    header = read_model(model)
    Z, document = header.codebooks, header.document
    rng = np.random.default_rng(1)
    numbers = rng.choice(1 << 24, int(share * N), replace=False)
    distinct = pack_codes((numbers[:, None] >> (4 * np.arange(6)) & 15).astype(np.uint8), 16)
    codes = distinct[
        np.concatenate([np.arange(len(distinct)), rng.integers(0, len(distinct), N - len(distinct))])
    ]
    engine = MemoryIndex.build(codes, Z, kind="flat", model_fingerprint=document["model_fingerprint"])
    flat = engine.save(folder / "source.faiss", overwrite=True)
    return build_index(model, flat, folder / f"{kind}.faiss", kind=kind, overwrite=True)


@pytest.mark.parametrize("kind", ["flat", "exact", "auto", "fastscan"])
@pytest.mark.parametrize(
    ("share", "expected"), [(0.1, "grouped"), (GROUP_SHARE - 0.05, "grouped"), (1.0, "exact")]
)
def test_codes_that_repeat_are_grouped_unless_a_kind_is_named(
    model: Path, tmp_path: Path, kind: str, share: float, expected: str
) -> None:
    path = saved(model, tmp_path, share, kind)
    engine = open_index(path)
    assert engine.plan.kind == expected
    assert engine.distinct == (int(share * N) if expected == "grouped" else None)
    for named in ("exact", "fused"):
        assert open_index(path, named).distinct is None
    xq = np.random.default_rng(2).normal(size=(5, 72)).astype(np.float32)
    for one, other in zip(engine.search(xq, 20), open_index(path, "flat").search(xq, 20), strict=True):
        assert np.array_equal(one, other)


def test_codes_are_grouped_only_within_the_memory(model: Path, tmp_path: Path) -> None:
    path = saved(model, tmp_path, 0.01, "flat")
    size = path.stat().st_size
    queries = np.random.default_rng(3).normal(size=(40, 72)).astype(np.float32)
    for kind, memory, expected in (
        ("auto", 20 * size, "grouped"),
        ("auto", 20 * size - 1, "exact"),
        ("exact", 20 * size - 1, "exact"),
        ("auto", 4 * size, "exact"),
        ("auto", 4 * size - 1, "disk"),
    ):
        engine = open_index(path, kind, memory)
        engine.search(queries, 50)
        assert engine.describe().split(",")[0] == expected
        assert ("distinct" in engine.describe()) == (
            expected == "grouped"
        )  # ties do not make it group later either
    lists = build_index(model, path, tmp_path / "lists.faiss", kind="ivf")
    for sidecar in (True, False):
        if not sidecar:
            lists.with_name("lists.faiss.json").unlink()
        assert open_index(lists, "auto", 5 * lists.stat().st_size).plan.search == "ivf"


def test_choosing_nprobe_keeps_to_the_memory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ranks all items, and many are tied."""
    grouped: list[int] = []
    of = Groups.of
    monkeypatch.setattr(Groups, "of", lambda codes: grouped.append(len(codes)) or of(codes))
    lists = build_index(model, saved(model, tmp_path, 0.01, "flat"), tmp_path / "lists.faiss", kind="ivf")
    queries = np.random.default_rng(3).normal(size=(300, 72)).astype(np.float32)
    for memory, expected in ((None, [N, N]), (5 * lists.stat().st_size, [])):
        grouped.clear()
        engine = open_index(lists, "auto", memory)
        engine.tune(0.9, k=50, queries=queries)
        engine.to("exact").search(queries, 50)
        assert grouped == expected


def test_the_user_is_told_how_it_was_searched(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(model, tmp_path, 0.1, "flat")
    np.save(tmp_path / "queries.npy", np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32))
    queries = str(tmp_path / "queries.npy")
    caplog.set_level(logging.INFO, logger="gpq_faiss.stages.search")
    result = search(model, path, queries, k=5)
    assert result.description == "grouped, 2,000 distinct codes of 20,000 items"
    assert caplog.messages == [f"{path}: {result.description}"]
    in_place = search(model, path, queries, k=5, memory="200kB")
    assert in_place.description == "disk, 20,000 items in place"
    assert np.array_equal(in_place.ids, result.ids)
    lists = build_index(model, path, tmp_path / "lists.faiss", kind="ivf")
    assert search(model, lists, queries, k=5).description == "ivf, 20,000 items"


@pytest.mark.parametrize(
    ("kind", "memory"),
    [(kind, None) for kind in ("auto", "exact", "fused", "flat", "fastscan", "ivf")]
    + [("auto", "200kB"), ("ivf", "600kB")],
)
def test_fewer_results_than_asked_for_are_said_aloud(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, memory: str | None
) -> None:
    path = saved(model, tmp_path, 0.1, "ivf" if kind == "ivf" else "flat")
    np.save(tmp_path / "queries.npy", np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32))
    queries = str(tmp_path / "queries.npy")
    for k, where, expected in ((5, None, 0), (5, [1, 2, 3, 70_000], 3), (2, [1, 2, 3, 4], 0), (5, [], 3)):
        caplog.clear()
        result = search(model, path, queries, k=k, kind=kind, memory=memory, where=where)
        if kind == "fastscan" and where and not expected:
            continue  # it may leave out one of so few
        assert result.short == expected == int((result.ids == -1).any(axis=1).sum())
        warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(warned) == (expected > 0)
        if expected:
            assert warned[0].startswith(f"3 of 3 queries have fewer than {k} results: too few items pass")
    assert search(model, path, queries, min_score=1e9, kind=kind, memory=memory).short == 0


def test_what_fastscan_leaves_out_is_said_aloud(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It gives no item whose code is the worst in every sub-space, as it is here for the opposite of a query."""
    header = read_model(model)
    Z, document = header.codebooks, header.document
    np.save(tmp_path / "queries.npy", np.random.default_rng(0).normal(size=(1, 20)).astype(np.float32))
    xq = query_vectors(model, str(tmp_path / "queries.npy"))[0].reshape(6, 1, -1)
    worst = (xq * Z).sum(axis=2).argmin(axis=1)
    codes = pack_codes(np.concatenate([np.zeros((8, 6)), np.tile(worst, (4, 1))]).astype(np.uint8), 16)
    engine = MemoryIndex.build(codes, Z, kind="flat", model_fingerprint=document["model_fingerprint"])
    path = engine.save(tmp_path / "i.faiss")
    result = search(model, path, str(tmp_path / "queries.npy"), k=12, kind="fastscan")
    assert result.short == 1
    assert "use exact" in caplog.text
    assert search(model, path, str(tmp_path / "queries.npy"), k=12).short == 0


def test_all_items_from_a_score_on_are_sought_in_all_lists(model: Path, tmp_path: Path) -> None:
    flat, lists = (saved(model, tmp_path, 0.1, kind) for kind in ("flat", "ivf"))
    np.save(tmp_path / "queries.npy", np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32))
    queries = str(tmp_path / "queries.npy")
    least = float(np.median(search(model, flat, queries, k=500).scores))
    expected = search(model, flat, queries, min_score=least)
    for memory in (None, "600kB"):
        result = search(model, lists, queries, min_score=least, memory=memory)
        assert np.array_equal(result.ids, expected.ids)
        assert np.array_equal(result.scores, expected.scores)
    for options in ({"nprobe": 3}, {"recall": 0.9}):
        with pytest.raises(UsageError, match="visits all lists: leave out nprobe and recall"):
            search(model, lists, queries, min_score=least, **options)
