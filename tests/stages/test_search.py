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
    engine = MemoryIndex.build(codes, Z, model_fingerprint=document["model_fingerprint"])
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
    assert result.description == "20,000 items in memory"
    assert caplog.messages == [f"{path}: {result.description}"]
    in_place = search(model, path, queries, k=5, memory="500kB")
    assert in_place.description == "20,000 items in place"
    assert np.array_equal(in_place.ids, result.ids)
    lists = build_index(model, path, tmp_path / "lists.faiss", kind="ivf")
    assert search(model, lists, queries, k=5, memory="500kB").description == "20,000 items in place, 16 lists"


@pytest.mark.parametrize("kind", ["flat", "ivf"])
@pytest.mark.parametrize("memory", [None, "500kB"])
def test_fewer_results_than_asked_for_are_said_aloud(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, memory: str | None
) -> None:
    path = saved(model, tmp_path, 0.1, kind)
    np.save(tmp_path / "queries.npy", np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32))
    queries = str(tmp_path / "queries.npy")
    for k, where, expected in ((5, None, 0), (5, [1, 2, 3, 70_000], 3), (2, [1, 2, 3, 4], 0), (5, [], 3)):
        caplog.clear()
        result = search(model, path, queries, k=k, memory=memory, where=where)
        assert result.short == expected == int((result.ids == -1).any(axis=1).sum())
        warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(warned) == (expected > 0)
        if expected:
            assert warned[0].startswith(f"3 of 3 queries have fewer than {k} results: too few items pass")
    assert search(model, path, queries, min_score=1e9, memory=memory).short == 0


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
    with pytest.raises(UsageError, match="by minimum score is exact: leave out nprobe"):
        search(model, lists, queries, min_score=least, nprobe=3)


def test_a_search_that_stops_early_says_what_is_proven(model: Path, tmp_path: Path) -> None:
    path = saved(model, tmp_path, 0.5, "ivf")
    np.save(tmp_path / "queries.npy", np.random.default_rng(0).normal(size=(40, 20)).astype(np.float32))
    queries = str(tmp_path / "queries.npy")
    exact = search(model, path, queries, k=5)
    assert exact.exact is None
    for memory in (None, "500kB"):
        early = search(model, path, queries, k=5, nprobe=4, memory=memory)
        assert early.exact is not None
        assert np.array_equal(early.ids[early.exact], exact.ids[early.exact])
        assert early.to_dict()["proven_exact"] == early.exact.sum()
        assert f"{early.exact.sum()} of 40 results are proven to be exact" in early.about()
        every = search(model, path, queries, k=5, nprobe=10**6, memory=memory)
        assert every.exact is not None
        assert every.exact.all()
        assert np.array_equal(every.ids, exact.ids)
