"""How a search is done where the user names no kind, and that it says so; and results print as the tables of the commands, and in
notebooks as HTML."""

import base64
import io
import logging
import re

import numpy as np
import pytest
from commands import done
from model_factory import make_model
from PIL import Image

import gpq_faiss as gpq
from gpq_faiss import MemoryIndex, rank_scores, render, search
from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.faissio.model import read_model
from gpq_faiss.stages.index import index as build_index
from gpq_faiss.stages.search import SearchResult

N = 20_000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("search") / "model", M=6)


@pytest.fixture(scope="module")
def files(model):
    """Index files of the same codes, a tenth of them distinct, as ``gpq index --kind`` writes them."""
    header = read_model(model)
    rng = np.random.default_rng(1)
    numbers = rng.choice(1 << 24, N // 10, replace=False)[rng.integers(0, N // 10, N)]
    codes = pack_codes((numbers[:, None] >> (4 * np.arange(6)) & 15).astype(np.uint8), 16)
    held = MemoryIndex.build(codes, header.codebooks, model_fingerprint=header.model_fingerprint)
    flat = held.save(model.parent / "source.faiss")
    return {k: build_index(model, flat, model.parent / f"{k}.faiss", kind=k) for k in ("flat", "ivf")}


@pytest.fixture
def queries(tmp_path):
    np.save(tmp_path / "queries.npy", np.random.default_rng(0).normal(size=(40, 20)).astype(np.float32))
    return str(tmp_path / "queries.npy")


def test_the_user_is_told_how_it_was_searched(model, files, queries, caplog):
    caplog.set_level(logging.INFO, logger="gpq_faiss.stages.search")
    for kind, memory, how in (
        ("flat", None, "in memory"),
        ("flat", "500kB", "in place"),
        ("ivf", "500kB", "in place, 16 lists"),
    ):
        caplog.clear()
        result = search(model, files[kind], queries, k=5, memory=memory)
        assert result.description == f"20,000 items {how}"
        assert caplog.messages == [f"{files[kind]}: {result.description}"]


@pytest.mark.parametrize("kind", ["flat", "ivf"])
@pytest.mark.parametrize("memory", [None, "500kB"])
def test_fewer_results_than_asked_for_are_said_aloud(model, files, queries, caplog, kind, memory):
    for k, where, expected in ((5, None, 0), (5, [1, 2, 3, 70_000], 40), (2, [1, 2, 3, 4], 0), (5, [], 40)):
        caplog.clear()
        result = search(model, files[kind], queries, k=k, memory=memory, where=where)
        assert result.short == expected == int((result.ids == -1).any(axis=1).sum())
        warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(warned) == (expected > 0)
        if expected:
            assert warned[0].startswith(f"40 of 40 queries have fewer than {k} results: too few items pass")
    assert search(model, files[kind], queries, min_score=1e9, memory=memory).short == 0


@pytest.mark.parametrize("memory", [None, "500kB"])
def test_a_search_that_stops_early_says_what_is_proven(model, files, queries, memory):
    plain = search(model, files["flat"], queries, k=5)
    every, early = (search(model, files["ivf"], queries, k=5, nprobe=n, memory=memory) for n in (10**6, 4))
    assert plain.exact is None
    assert every.exact.all()
    assert np.array_equal(every.ids, plain.ids)
    assert early.exact is not None
    assert np.array_equal(early.ids[early.exact], plain.ids[early.exact])
    assert early.to_dict()["proven_exact"] == early.exact.sum()
    assert f"{early.exact.sum()} of 40 results are proven to be exact" in early.about()


# Printed --------------------------------------------------------------------------------------------------------------


def result(n, name, description):
    ids, scores = np.zeros((n, 1), np.int64), np.zeros((n, 1), np.float32)
    return SearchResult(ids, scores, np.arange(n), (name,) * n, "", description=description)


def test_a_search_prints_as_its_command_and_shows_pictures_of_queries_that_are_items(shop):
    found = gpq.search(shop.image_model, shop.image_index, shop.images, k=2)
    said = done(f"search {shop.image_model} {shop.image_index} {shop.images} -k 2").rstrip().splitlines()
    assert said == render(found.rows(), digits=4).rstrip().splitlines()
    assert str(found).splitlines()[: len(said)] == said
    assert repr(found) == str(found)
    page = found._repr_html_()
    picture = re.match(r'<img src="data:image/png;base64,([^"]+)">', page)
    assert Image.open(io.BytesIO(base64.b64decode(picture[1]))).width > 300
    assert "<table" in page
    other = gpq.search(shop.image_model, shop.image_index, shop.photo, k=3)
    assert "<img" not in other._repr_html_()


def test_many_rows_are_not_printed_and_not_made_and_names_stay_text(monkeypatch):
    def few(self, real=SearchResult._answers):
        for made, answer in enumerate(real(self)):
            assert made <= 60, "more rows are made than are shown"
            yield answer

    monkeypatch.setattr(SearchResult, "_answers", few)
    found = result(3_000_000, "q", "how")
    lines = str(found).splitlines()
    assert len(lines) == 2 + 60 + 2
    assert lines[-2:] == ["... and more: the first 60 rows are shown", "how"]
    assert found._repr_html_().count("<tr>") == 61
    assert str(result(0, "q", "")) == "nothing found"
    page = result(1, "<script>alert(1)</script>", "<b>")._repr_html_()
    assert set(re.findall(r"<(\w+)", page)) == {"table", "thead", "tbody", "tr", "th", "td", "p"}
    assert "&lt;script&gt;" in page


def test_a_ranking_and_data_print_without_arrays(shop):
    labels = np.arange(6) % 2
    scores = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    found = rank_scores(scores, labels, labels, ks=(1, 3))
    head, _, figures, *about = str(found).splitlines()
    assert head.split() == ["mAP", "P@1", "P@3", "R@1", "R@3"]
    wanted = [found.map, *found.precision.values(), *found.recall.values()]
    assert [float(text) for text in figures.split()] == pytest.approx(wanted, abs=5e-5)
    assert about[0].startswith("6 queries, 6 items in the database")
    assert found.convention in found._repr_html_()
    data = gpq.open_data(shop.images)
    assert "array(" not in repr(data)
    assert data.fingerprint in repr(data)
