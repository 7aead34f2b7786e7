"""Results print as the tables of the commands, and in notebooks as HTML."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from commands import done
from model_factory import make_model
from PIL import Image

import gpq_faiss as gpq
from gpq_faiss.evaluation.ranking import rank_scores
from gpq_faiss.evaluation.tables import render
from gpq_faiss.stages.search_result import SearchResult


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of images, 30 images, and an index of them."""
    here = tmp_path_factory.mktemp("shop")
    rng = np.random.default_rng(0)
    for i in range(30):
        path = here / "images" / f"{i % 3}" / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    make_model(here / "model", kind="images", image_size=8, backbone="mlp", class_names=("0", "1", "2"))
    gpq.encode(here / "model", str(here / "images"), here / "codes.h5")
    gpq.index(here / "model", here / "codes.h5", here / "index.faiss")
    return here


def search(shop: Path, queries: Path, k: int = 15) -> SearchResult:
    return gpq.search(shop / "model", shop / "index.faiss", queries, k=k)


def result(n: int, name: str, description: str) -> SearchResult:
    ids, scores = np.zeros((n, 1), np.int64), np.zeros((n, 1), np.float32)
    return SearchResult(ids, scores, np.arange(n), (name,) * n, "", description=description)


def test_a_search_prints_as_its_command(shop: Path) -> None:
    found = search(shop, shop / "images", k=2)
    said = done(f"search {shop}/model {shop}/index.faiss {shop}/images -k 2").rstrip().splitlines()
    assert said == render(found.rows(), digits=4).rstrip().splitlines()
    assert str(found).splitlines()[: len(said)] == said
    assert repr(found) == str(found)


def test_many_rows_are_not_printed_and_not_made() -> None:
    found = result(3_000_000, "q", "how")
    lines = str(found).splitlines()
    assert len(lines) == 2 + 60 + 2
    assert lines[-2:] == ["... and more: the first 60 rows are shown", "how"]
    assert found._repr_html_().count("<tr>") == 61
    assert str(result(0, "q", "")) == "nothing found"


def test_a_notebook_shows_pictures_where_queries_and_items_are_the_same_images(shop: Path) -> None:
    page = search(shop, shop / "images", k=3)._repr_html_()
    picture = re.match(r'<img src="data:image/png;base64,([^"]+)">', page)
    assert picture is not None
    assert Image.open(io.BytesIO(base64.b64decode(picture[1]))).width > 300
    assert "<table" in page
    assert "<img" not in search(shop, shop / "images" / "0" / "00.png", k=3)._repr_html_()


def test_names_in_notebooks_stay_text() -> None:
    page = result(1, "<script>alert(1)</script>", "<b>")._repr_html_()
    assert set(re.findall(r"<(\w+)", page)) == {"table", "thead", "tbody", "tr", "th", "td", "p"}
    assert "&lt;script&gt;" in page


def test_a_ranking_and_data_print_without_arrays(shop: Path) -> None:
    labels = np.arange(6) % 2
    scores = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    found = rank_scores(scores, labels, labels, ks=(1, 3))
    head, _, figures, *about = str(found).splitlines()
    assert head.split() == ["mAP", "P@1", "P@3", "R@1", "R@3"]
    assert [float(text) for text in figures.split()] == pytest.approx(
        [found.map, found.precision[1], found.precision[3], found.recall[1], found.recall[3]], abs=5e-5
    )
    assert about[0].startswith("6 queries, 6 items in the database")
    assert found.convention in found._repr_html_()
    data = gpq.open_data(shop / "images")
    assert "array(" not in repr(data)
    assert data.fingerprint in repr(data)
