"""How a search is done where the user names no kind, and that it says so."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from model_factory import make_model

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.errors import UsageError
from gpq_faiss.faissio.model import read_model
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.stages.index import index as build_index
from gpq_faiss.stages.search import search

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


def test_the_user_is_told_how_it_was_searched(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(model, tmp_path, 0.1, "flat")
    np.save(tmp_path / "queries.npy", np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32))
    queries = str(tmp_path / "queries.npy")
    caplog.set_level(logging.INFO, logger="gpq_faiss.stages.search")
    result = search(model, path, queries, k=5)
    assert result.description == "exact, 20,000 items"
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
