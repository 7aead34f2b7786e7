"""Searching: names and labels come with results, which print and become tables."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from commands import done
from index_factory import padded_best
from model_factory import make_model

import gpq_faiss as gpq
from gpq_faiss import Encoder, search
from gpq_faiss.errors import DataError
from gpq_faiss.stages.search import parse_rows
from gpq_faiss.store.hdf5 import as_texts

N, Q = 300, 8
FORMS = ["index.faiss", "index.lists", "codes.h5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a model, items with names, labels and kept columns, and indexes of every form."""
    folder, rng = tmp_path_factory.mktemp("search"), np.random.default_rng(0)
    model = make_model(folder / "model", M=4)
    np.savez(
        folder / "x.npz",
        features=rng.standard_normal((N, 20)).astype(np.float32),
        ids=rng.permutation(N) * 3,
        names=np.array([f"{i}.jpg" for i in range(N)]),
        title=np.array([f"Title {i}" for i in range(N)]),
        labels=np.array(["cat", "dog"] * N)[:N],
    )
    np.save(folder / "queries.npy", rng.standard_normal((Q, 20)).astype(np.float32))
    data = gpq.open_data(f"features:{folder}/x.npz", keep="title,ids")
    codes = gpq.encode(model, data, folder / "codes.h5")
    for name in ("index.faiss", "index.lists"):
        gpq.index(model, codes, folder / name)
    gpq.index(model, codes, folder / "bare.faiss", names=False)
    return folder


def searched(folder, index="index.faiss", **options):
    return search(folder / "model", folder / index, folder / "queries.npy", **options)


def exact(folder, k, allowed=None):
    """Return scores and ids by brute force over the codes file."""
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
    assert result.description == "300 items"


@pytest.mark.parametrize("index", FORMS)
def test_results_have_names_labels_and_columns(folder, index):
    data = np.load(folder / "x.npz")
    for answer in searched(folder, index, k=7).to_dict()["queries"]:
        rows = [data["ids"].tolist().index(number) for number in answer["ids"]]
        assert answer["names"] == [f"{row}.jpg" for row in rows]
        assert answer["title"] == [f"Title {row}" for row in rows]
        assert answer["labels"] == [[("cat", "dog")[row % 2]] for row in rows]


@pytest.mark.parametrize(
    ("k", "allowed", "short"), [(5, [0, 3, 6], Q), (3, [0, 3, 6], 0), (2, [], Q)]
)
def test_too_few_results_are_a_warning(folder, caplog, k, allowed, short):
    result = searched(folder, k=k, allow=allowed)
    assert int((result.ids == -1).any(axis=1).sum()) == short
    message = f"{short} of {Q} queries have fewer than {k} results: too few items pass"
    assert (message in caplog.text) == bool(short)
    assert len(list(result)) == Q * min(k, len(allowed))


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("0:3", [0, 1, 2]),
        ("5,-1", [5, 9]),
        ("7:", [7, 8, 9]),
        ("::4", [0, 4, 8]),
    ],
)
def test_rows_are_slices_and_numbers(text, rows):
    assert parse_rows(text, 10).tolist() == rows


# Results as tables --------------------------------------------------------------------------------


def test_table_has_a_row_for_each_result(folder):
    result, data = searched(folder, k=3), np.load(folder / "x.npz")
    table = result.to_pandas()
    assert table.columns.tolist() == ["query", "rank", "id", "name", "labels", "score", "title"]
    assert table["id"].tolist() == result.ids.ravel().tolist()
    assert table["score"].tolist() == result.scores.ravel().tolist()
    rows = [data["ids"].tolist().index(number) for number in table["id"]]
    assert table["name"].tolist() == [f"{row}.jpg" for row in rows]
    assert table["labels"].tolist() == [("cat", "dog")[row % 2] for row in rows]
    pd.testing.assert_frame_equal(pd.DataFrame(result), table)


def test_result_prints_as_its_command(shop):
    result = gpq.search(shop.image_model, shop.image_index, shop.images, k=2)
    assert result.query_names[0] == "a/0.png"
    stdout = done(f"search {shop.image_model} {shop.image_index} {shop.images} -k 2")
    assert str(result).startswith(stdout.rstrip())
    assert "<table" in result._repr_html_()


def test_pictures_are_found_by_name(shop, tmp_path, caplog):
    images = gpq.open_data(f"folder:{shop.images}")
    result = gpq.search(shop.image_model, shop.image_index, images, k=2)
    assert result.draw(images, images, tmp_path / "x.png").stat().st_size > 1000
    assert "have changed since" not in caplog.text
    result.draw(replace(images, fingerprint="another"), images, tmp_path / "changed.png")
    assert "have changed since they were encoded: pictures are matched by name" in caplog.text
    pictures = (tmp_path / "x.png").read_bytes()
    assert (tmp_path / "changed.png").read_bytes() == pictures
    replaced = replace(
        images, texts=images.texts | {"file_hash": as_texts(["another"] * len(images))}
    )
    result.draw(replaced, images, tmp_path / "replaced.png")
    result.items[int(result.ids[0, 0])].texts.clear()
    result.draw(images, images, tmp_path / "unnamed.png")
    for name in ("replaced", "unnamed"):
        assert (tmp_path / f"{name}.png").read_bytes() != pictures


def test_pictures_of_other_data_are_refused(shop, tmp_path):
    images = gpq.open_data(np.zeros((12, 8, 8, 3), np.uint8))
    result = gpq.search(shop.image_model, shop.image_index, f"folder:{shop.images}", k=2)
    with pytest.raises(DataError, match="is not the data of the index"):
        result.draw(images, images, tmp_path / "x.png")
