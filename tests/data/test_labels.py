"""Labels as packed rows against dense matrices; labels, ids and names beside the data and in its
columns; every wrong one named.
"""

from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from image_files import label_texts, put, save

from gpq_faiss.data.labels import Labels
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError

NFC, NFD = "Caf\u00e9", "Cafe\u0301"
BAD = np.ones((20, 3), np.float32)
BAD[[4, 9]], BAD[7, 1] = 0, np.nan


@given(arrays(np.bool_, st.tuples(st.integers(0, 30), st.integers(1, 20))))
def test_packed_equals_dense(dense):
    labels = Labels.from_multihot(dense)
    n, c = dense.shape
    assert (len(labels), labels.n_classes, labels.dense().dtype) == (n, c, np.float32)
    assert labels.multi_label == bool((dense.sum(axis=1) > 1).any())
    rows, classes = np.flatnonzero(np.arange(n) % 3 == 0)[::-1], np.arange(c)[::-2]
    selected = labels.over(str(k) for k in classes)
    assert selected.class_names == tuple(str(k) for k in classes)
    for result, expected in (
        (labels.packed, np.packbits(dense, axis=1)),
        (labels.dense(dtype=bool), dense),
        (labels.counts(), dense.sum(axis=0)),
        (labels.has(), dense.any(axis=1)),
        (np.concatenate([labels.rows_with(k) for k in range(c)]), np.nonzero(dense.T)[1]),
        (labels.take(rows).dense(), dense[rows]),
        (labels.dense(slice(1, 4)), dense[1:4]),
        (labels.masked(rows).dense(), dense & np.isin(np.arange(n), rows)[:, None]),
        (selected.dense(), dense[:, classes]),
        (labels.over(["x", *labels.class_names]).dense()[:, 1:], dense),
    ):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Labels.from_ids([0, -2, 1, -3]), "label -2 at rows 1, 3"),
        (
            lambda: Labels.from_ids([0, 3], ["a", "b"]),
            "label 3 at row 1 is out of range: .* 2 classes",
        ),
        (lambda: Labels.from_ids(np.array([2**63], np.uint64)), "at most 65,535"),
        (lambda: Labels.from_ids(np.array([0.5])), "label 0.5 at row 0 is out of range"),
        (lambda: Labels.from_ids([0], ["a", "a"]), "'a' is named twice"),
        (
            lambda: Labels.from_multihot(np.array([[0, 1], [0, np.nan], [2, 0]])),
            "other than 0 and 1 at rows 1, 2",
        ),
        (lambda: Labels.from_multihot(np.zeros((2, 3)), ["a", "b"]), r"\[2, 3\]: 0/1 of 2 classes"),
        (lambda: Labels.from_multihot(np.zeros((1, 65_536), np.uint8)), "65,536 classes"),
        (lambda: open_data(BAD, labels=[0, 1]), "2 labels, array has 20 items"),
        (lambda: open_data(BAD).require_labels(), "no item has a label"),
        (
            lambda: open_data(BAD).read(slice(5, 9)),
            "array: NaN, infinity or only zeros .* in row 7",
        ),
        (lambda: open_data(BAD).read(np.array([1, 9, 4])), "in rows 9, 4: repair"),
    ],
)
def test_what_is_wrong_is_named(make, message):
    with pytest.raises(DataError, match=message):
        make()


@pytest.mark.parametrize("value", [1.0, 1e-40, 3e38])
def test_rows_of_any_length_have_a_direction(value):
    x = np.full((1, 3), value, np.float32)
    np.testing.assert_array_equal(open_data(x).read(slice(0, 1)), x)


# Beside the data and in its columns ---------------------------------------------------------------


WRITTEN = (
    ",;\t",
    ["utf-8", "utf-8-sig", "utf-16"],
    ["csv", "txt", "tsv"],
    ["id", "Key", "item"],
    ["{}", "{:04}"],
)


@given(st.permutations([10, 20, 30, 40, 77]), st.tuples(*map(st.sampled_from, WRITTEN)))
def test_labels_follow_the_ids_in_any_order(tmp_path_factory, order, written):
    """As programs and spreadsheets write them."""
    separator, encoding, suffix, item, number = written
    texts = {10: "Kühe", 20: "", 30: f"dog|{NFC}|{NFD}", 40: "dog", 77: "emu"}
    rows = [("Category", item), *((texts[i], number.format(i)) for i in order), (), ("", "")]
    content = "".join(f"{separator.join(row)}\r\n" for row in rows).encode(encoding)
    table = save(tmp_path_factory.getbasetemp() / f"l.{suffix}", content)
    data = open_data(np.eye(4, 5), labels=table, ids=[40, 10, 30, 20])
    assert label_texts(data) == ["dog", "Kühe", f"{NFC} dog", ""]
    assert "(1 rows are of other items)" in data.notes[0]


@pytest.mark.parametrize(
    "ids", [pa.array(["ab", "cd"]), pa.array(["ab", "cd"]).dictionary_encode()]
)
def test_texts_in_a_column_of_ids_are_names(tmp_path, ids):
    data = open_data(save(tmp_path / "i.parquet", {"id": ids, "emb": [[1.0, 0.0], [0.0, 1.0]]}))
    assert (data.ids.tolist(), data.texts["name"].tolist()) == ([0, 1], ["ab", "cd"])
    assert any("holds texts: they are the names; ids are row" in note for note in data.notes)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("n.txt", "name\none, two\nthree\n4\n"),
        ("n.csv", ',name\n0,"one, two"\n1,three\n2,4\n'),
        ("n.json", '["one, two", "three", "4"]'),
        ("n.parquet", {"photo": ["one, two", "three", "4"]}),
    ],
)
def test_files_of_ids_and_names(tmp_path, file, content):
    ids = save(tmp_path / "ids.txt", "70\n-5 # a comment\n70\n")
    data = open_data(np.eye(3), ids=ids, names=save(tmp_path / file, content))
    assert data.ids.tolist() == [70, -5, 70]
    assert data.texts["name"].tolist() == ["one, two", "three", "4"]


@pytest.mark.parametrize(("ids", "is_error"), [([7, 3, 5], 0), ([3, 5, 7], 1), ([1, 2, 3], 1)])
def test_a_table_of_names_has_the_ids_of_the_data_in_their_order(tmp_path, ids, is_error):
    names = save(tmp_path / "n.csv", "id,name\n7,c\n3,a\n5,b\n")
    assert open_data(np.eye(3), names=names).texts["name"].tolist() == ["c", "a", "b"]
    with pytest.raises(DataError, match="not those of the data") if is_error else nullcontext():
        assert open_data(np.eye(3), ids=ids, names=names).texts["name"].tolist() == ["c", "a", "b"]


def test_labels_of_images_by_name(tmp_path):
    put(tmp_path / "images", "a.png", f"{NFD}/b.png", "c.png")
    names, texts = ["c.png", "a.png", f"{NFC}/b.png"], [["x", "y"], ["y"], None]
    table = save(tmp_path / "l.parquet", {"path": names, "labels": texts})
    data = open_data(tmp_path / "images", labels=table)
    by_name = dict(zip(data.texts["name"].tolist(), label_texts(data), strict=True))
    assert by_name == {"a.png": "y", "c.png": "x y", f"{NFC}/b.png": ""}


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (["sea|sky", None, "sky"], ["sea sky", "", "sky"]),
        ([["sea", "sky"], [], ["sky"]], ["sea sky", "", "sky"]),
        ([["3", "12"], None, ["12"]], ["3 12", "", "12"]),
        (pa.array([10, None, 9]), ["10", "", "9"]),
        (pa.array([10.0, float("nan"), 9.0]), ["10", "", "9"]),
    ],
)
def test_labels_of_columns(tmp_path, column, expected):
    table = {"v": list(np.eye(3)), "label": column}
    assert label_texts(open_data(save(tmp_path / "t.parquet", table))) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("0\n2\n-1\n1\n", ["0", "2", "", "1"]),
        ("label\n10\n9\n\n10\n", ["10", "9", "", "10"]),
        ("cat\ndog\n\nfox", ["cat", "dog", "", "fox"]),
        ("b|a\r\n\r\na\r\nc\r\n", ["a b", "", "a", "c"]),
        (f"{NFC}\n{NFD}\n\nx y", [NFC, NFC, "", "x y"]),
        ("x,y,z\n0,1,0\n1,1,0\n0,0,0\n0,0,1\n", ["y", "x y", "", "z"]),
        ("0\t1\n1\t1\n0\t0\n1\t0\n", ["1", "0 1", "", "0"]),
        ("0 1\n1 1\n0 0\n1 0\n", ["1", "0 1", "", "0"]),
        ("1|2\n3\n\n2\n", ["1 2", "3", "", "2"]),
        ("1,2\n3\n\n2\n", ["1 2", "3", "", "2"]),
        ("1 2\n3\n\n2\n", ["1 2", "3", "", "2"]),
    ],
)
def test_labels_of_texts(tmp_path, content, expected):
    save(tmp_path / "l.txt", content)
    assert label_texts(open_data(np.eye(4, 5), labels=tmp_path / "l.txt")) == expected
