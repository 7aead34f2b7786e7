"""Searching: names and labels come with results, which print as tables and in notebooks."""

import base64
import io
import json
import logging
import re

import numpy as np
import pytest
from commands import done
from index_factory import padded_best
from model_factory import make_model
from PIL import Image

import gpq_faiss as gpq
from gpq_faiss import Encoder, search
from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.stages.search import SearchResult, parse_rows
from gpq_faiss.store.changes import ChangeWriter
from gpq_faiss.store.items import items_path

N, Q = 300, 8
FORMS = ["index.faiss", "index.lists", "codes.h5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, items with names, labels and a kept column, and indexes of every form."""
    folder, rng = tmp_path_factory.mktemp("search"), np.random.default_rng(0)
    model = make_model(folder / "model", M=4)
    np.savez(
        folder / "x.npz",
        features=rng.standard_normal((N, 20)).astype(np.float32),
        ids=rng.permutation(N) * 3,
        names=np.array([f"{i}.jpg" for i in range(N)]),
        title=np.array([f"Title {i}" for i in range(N)]),
        labels=np.arange(N) % 2,
        class_names=np.array(["cat", "dog"]),
    )
    np.save(folder / "queries.npy", rng.standard_normal((Q, 20)).astype(np.float32))
    data = gpq.open_data(f"features:{folder}/x.npz", keep="title")
    codes = gpq.encode(model, data, folder / "codes.h5")
    for name in ("index.faiss", "index.lists"):
        gpq.index(model, codes, folder / name)
    gpq.index(model, codes, folder / "bare.faiss", names=False)
    return folder


def searched(folder, index="index.faiss", **options):
    return search(folder / "model", folder / index, str(folder / "queries.npy"), **options)


def exact(folder, k, allowed=None):
    """Brute force over the codes file."""
    with gpq.RowReader(folder / "codes.h5") as reader:
        codes, ids, Z = np.array(reader.values), np.array(reader.ids), reader.header.codebooks
    xq, _ = Encoder.load(folder / "model").embed(np.load(folder / "queries.npy"), queries=True)
    mask = np.ones(N, bool) if allowed is None else np.isin(ids, allowed)
    return padded_best(xq, codes[mask], Z, k, ids[mask])


@pytest.mark.parametrize("index", [*FORMS, "bare.faiss"])
def test_results_equal_brute_force(folder, index):
    result, (scores, ids) = searched(folder, index, k=N), exact(folder, N)
    assert np.array_equal(result.ids, ids)
    assert np.array_equal(result.scores, scores)
    assert (result.description, result.short) == ("300 items", 0)


@pytest.mark.parametrize("index", FORMS)
def test_results_have_names_labels_and_columns(folder, index):
    data = np.load(folder / "x.npz")
    for answer in searched(folder, index, k=7).to_dict()["queries"]:
        rows = [data["ids"].tolist().index(number) for number in answer["ids"]]
        assert answer["names"] == [f"{row}.jpg" for row in rows]
        assert answer["title"] == [f"Title {row}" for row in rows]
        assert answer["labels"] == [[("cat", "dog")[row % 2]] for row in rows]


def test_index_without_names_gives_ids(folder):
    answer = searched(folder, "bare.faiss", k=7).to_dict()["queries"][0]
    assert set(answer) == {"id", "name", "ids", "scores"}


@pytest.mark.parametrize("option", ["allow", "deny"])
def test_filters_equal_brute_force(folder, option):
    ids = np.arange(0, 900, 9)
    allowed = ids if option == "allow" else np.setdiff1d(np.arange(900), ids)
    assert np.array_equal(
        searched(folder, k=20, **{option: ids}).ids, exact(folder, 20, allowed)[1]
    )


@pytest.mark.parametrize(
    ("k", "allowed", "short"), [(5, [0, 3, 6], Q), (3, [0, 3, 6], 0), (2, [], Q)]
)
def test_too_few_results_are_a_warning(folder, caplog, k, allowed, short):
    result = searched(folder, k=k, allow=allowed)
    assert result.short == short == int((result.ids == -1).any(axis=1).sum())
    message = f"{short} of {Q} queries have fewer than {k} results: too few items pass"
    assert (message in caplog.text) == bool(short)


def test_minimum_score_equals_brute_force(folder):
    scores, ids = exact(folder, N)
    min_score = float(np.median(scores))
    answers = searched(folder, min_score=min_score).to_dict()
    assert answers["min_score"] == min_score
    for row, answer in enumerate(answers["queries"]):
        assert answer["ids"] == ids[row][scores[row] >= min_score].tolist()
    assert searched(folder, min_score=1e9).short == 0


def test_search_applies_changes(tmp_path, folder, caplog):
    caplog.set_level(logging.INFO, "gpq_faiss")
    top = searched(folder, k=2).ids
    path = gpq.index(folder / "model", folder / "codes.h5", tmp_path / "index.faiss")
    code = gpq.open_index(path).code_of(int(top[0, 0]))
    with ChangeWriter(path, 2, gpq.open_index(path).fingerprint) as writer:
        writer.write({int(top[0, 0]): (None, None, None), 7: (bytes(code), "new", ("owl",))})
    answer = search(folder / "model", path, str(folder / "queries.npy"), k=2).to_dict()["queries"][
        0
    ]
    assert answer["ids"] == [7, int(top[0, 1])]
    assert (answer["names"][0], answer["labels"][0]) == ("new", ["owl"])
    assert "2 changes are applied" in caplog.text


def test_names_of_another_index_are_not_shown(tmp_path, folder, caplog):
    path = gpq.index(folder / "model", folder / "codes.h5", tmp_path / "index.faiss", names=False)
    other = {"features": np.ones((2, 20), np.float32), "names": ["a", "b"]}
    np.savez(tmp_path / "x.npz", **other)
    codes = gpq.encode(folder / "model", f"features:{tmp_path}/x.npz", tmp_path / "codes.h5")
    items = items_path(gpq.index(folder / "model", codes, tmp_path / "other.faiss"))
    items.rename(items_path(path))
    result = search(folder / "model", path, str(folder / "queries.npy"), k=1)
    assert result.items is None
    assert "belongs to another index: results of" in caplog.text


def test_index_of_other_codebooks_is_a_mismatch(tmp_path, folder):
    other = make_model(tmp_path / "other", M=4, seed=1)
    with pytest.raises(MismatchError, match="has other codebooks"):
        search(other, folder / "index.faiss", str(folder / "queries.npy"))


@pytest.mark.parametrize("name", ["codes.h5", "features.h5"])
def test_items_are_no_queries(folder, name):
    with pytest.raises(MismatchError, match="of items: give the data of the queries"):
        search(folder / "model", folder / "index.faiss", folder / name)


def test_no_queries_are_refused(tmp_path, folder):
    np.save(tmp_path / "x.npy", np.empty((0, 20), np.float32))
    with pytest.raises(DataError, match=r"x.npy is float32 \[0, 20\]"):
        search(folder / "model", folder / "index.faiss", str(tmp_path / "x.npy"))


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("0:3", [0, 1, 2]),
        ("5,-1", [5, 9]),
        ("7:", [7, 8, 9]),
        ("::4", [0, 4, 8]),
        ("2,0:2", [2, 0, 1]),
    ],
)
def test_rows_are_slices_and_numbers(text, rows):
    assert parse_rows(text, 10).tolist() == rows


# Printed ------------------------------------------------------------------------------------------


def made(n, name, description):
    ids, scores = np.zeros((n, 1), np.int64), np.zeros((n, 1), np.float32)
    return SearchResult(ids, scores, np.arange(n), (name,) * n, "", description=description)


def test_result_prints_as_its_command(shop):
    result = gpq.search(shop.image_model, shop.image_index, shop.images, k=2)
    stdout = done(f"search {shop.image_model} {shop.image_index} {shop.images} -k 2")
    lines = stdout.rstrip().splitlines()
    assert lines == gpq.render(result.rows(), digits=4).rstrip().splitlines()
    assert str(result).splitlines()[: len(lines)] == lines
    assert repr(result) == str(result)


def test_notebook_shows_pictures_of_queries_that_are_items(shop):
    page = gpq.search(shop.image_model, shop.image_index, shop.images, k=2)._repr_html_()
    picture = re.match(r'<img src="data:image/png;base64,([^"]+)">', page)
    assert Image.open(io.BytesIO(base64.b64decode(picture[1]))).width > 300
    other = gpq.search(shop.image_model, shop.image_index, shop.photo, k=3)._repr_html_()
    assert "<table" in page
    assert "<img" not in other


def test_few_rows_of_many_are_made(monkeypatch):
    answers = SearchResult._answers

    def few(self):
        for count, answer in enumerate(answers(self)):
            assert count <= 60
            yield answer

    monkeypatch.setattr(SearchResult, "_answers", few)
    result = made(3_000_000, "q", "description")
    last = ["... and more: the first 60 rows are shown", "description"]
    assert str(result).splitlines()[-2:] == last
    assert result._repr_html_().count("<tr>") == 61


def test_names_stay_text_in_notebooks():
    page = made(1, "<script>alert(1)</script>", "<b>")._repr_html_()
    assert set(re.findall(r"<(\w+)", page)) == {"table", "thead", "tbody", "tr", "th", "td", "p"}
    assert str(made(0, "q", "")) == "nothing found"


def test_result_is_json(folder):
    document = searched(folder, k=3).to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_ranking_and_data_print_without_arrays(shop):
    labels, scores = np.arange(6) % 2, np.random.default_rng(0).normal(size=(6, 6))
    result = gpq.rank_scores(scores.astype(np.float32), labels, labels, ks=(1, 3))
    head, _, figures, *about = str(result).splitlines()
    assert head.split() == ["mAP", "P@1", "P@3", "R@1", "R@3"]
    expected = [result.map, *result.precision.values(), *result.recall.values()]
    assert [float(text) for text in figures.split()] == pytest.approx(expected, abs=5e-5)
    assert about[0].startswith("6 queries, 6 items in the database")
    assert "array(" not in repr(gpq.open_data(shop.images))
