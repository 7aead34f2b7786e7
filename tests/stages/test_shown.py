"""Results print as the tables of the commands, and in notebooks as HTML."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gpq_cli.main import cli
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


def tags(html: str) -> set[str]:
    found: set[str] = set()
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, attrs: found.add(tag)  # type: ignore[method-assign]
    reader.feed(html)
    return found


def test_a_search_prints_as_its_command(shop: Path) -> None:
    found = search(shop, shop / "images", k=2)
    command = ["search", str(shop / "model"), str(shop / "index.faiss"), str(shop / "images"), "-k", "2"]
    said = CliRunner().invoke(cli, ["-q", *command]).stdout.rstrip().splitlines()
    assert said == render(found.rows(), digits=4).rstrip().splitlines()
    assert str(found).splitlines()[: len(said)] == said
    assert repr(found) == str(found)


def test_many_rows_are_not_printed_and_not_made() -> None:
    n = 3_000_000
    found = SearchResult(
        np.zeros((n, 1), np.int64),
        np.zeros((n, 1), np.float32),
        np.arange(n),
        ("q",) * n,
        "",
        description="how",
    )
    lines = str(found).splitlines()
    assert len(lines) == 2 + 60 + 2
    assert lines[-2:] == ["... and more: the first 60 rows are shown", "how"]
    assert found._repr_html_().count("<tr>") == 61
    none = SearchResult(
        np.empty((0, 1), np.int64), np.empty((0, 1), np.float32), np.empty(0, np.int64), (), ""
    )
    assert str(none) == "nothing found"


def test_a_notebook_shows_pictures_where_queries_and_items_are_the_same_images(shop: Path) -> None:
    page = search(shop, shop / "images", k=3)._repr_html_()
    picture = re.match(r'<img src="data:image/png;base64,([^"]+)">', page)
    assert picture is not None
    assert Image.open(io.BytesIO(base64.b64decode(picture[1]))).width > 300
    assert "<table" in page
    assert "<img" not in search(shop, shop / "images" / "0" / "00.png", k=3)._repr_html_()


def test_names_in_notebooks_stay_text() -> None:
    found = SearchResult(
        np.zeros((1, 1), np.int64),
        np.ones((1, 1), np.float32),
        np.zeros(1, np.int64),
        ("<script>alert(1)</script>",),
        "",
        description="<b>",
    )
    assert tags(found._repr_html_()) == {"table", "thead", "tbody", "tr", "th", "td", "p"}
    assert "&lt;script&gt;" in found._repr_html_()


def test_a_ranking_and_data_print_without_arrays(shop: Path) -> None:
    labels = np.arange(6) % 2
    found = rank_scores(
        np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32), labels, labels, ks=(1, 3)
    )
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
