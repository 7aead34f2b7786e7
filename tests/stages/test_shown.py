"""Results print as the tables of the commands, and in notebooks as HTML."""

import base64
import io
import re

import numpy as np
import pytest
from commands import done
from PIL import Image

import gpq_faiss as gpq
from gpq_faiss import rank_scores, render
from gpq_faiss.stages.search_result import SearchResult


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
