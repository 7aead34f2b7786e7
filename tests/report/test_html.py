"""Pages: whole in one file, safe whatever the names are, and with the figures that went in."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gpq_faiss.errors import OutputExistsError
from gpq_faiss.report import html
from gpq_faiss.report.gallery import Ranked


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_names_stay_text(name: str) -> None:
    grey = np.full((4, 5), 7, np.uint8)
    page = html.gallery([Ranked(grey, [grey], [0.5], [True], name, [name])]) + html.table([{name: name}])
    found = read(page)
    assert {tag for tag, _ in found.tags} <= {
        *("div", "figure", "img", "figcaption", "table", "thead", "tbody", "tr", "th", "td")
    }
    assert all(set(attrs) <= {"class", "alt", "src"} for _, attrs in found.tags)
    if name.strip():
        assert name in found.texts


def test_pictures_are_inside_and_small_ones_exact() -> None:
    small = np.random.default_rng(0).integers(0, 256, (9, 8, 3), dtype=np.uint8)
    large = np.zeros((900, 300, 3), np.uint8)
    page = html.gallery([Ranked(small, [large], relevant=[False])])
    sources = re.findall(r'src="data:image/\w+;base64,([^"]*)"', page)
    first, second = (Image.open(io.BytesIO(base64.b64decode(source))) for source in sources)
    np.testing.assert_array_equal(np.asarray(first), small)
    assert max(second.size) <= 160
    assert 'class="wrong"' in page


def test_a_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    rows = [{"method": "pq", "bits": 48, "mAP": 0.123456}, {"method": "float", "bits": None, "mAP": 1.0}]
    (tmp_path / "p.svg").write_text('<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"></svg>')
    parts = [html.heading("a < b"), html.note("note"), html.table(rows), html.plot(tmp_path / "p.svg")]
    out = html.save_page("Title & more", parts, tmp_path / "o.html")
    text = out.read_text()
    found = read(text)
    assert "0.1235" in found.texts
    assert "–" in found.texts
    assert not [a for _, a in found.tags if a.get("src") or a.get("href")]
    assert "script" not in {tag for tag, _ in found.tags}
    with pytest.raises(OutputExistsError):
        html.save_page("t", parts, out)
