"""Labels as packed rows against dense matrices; labels, ids and names beside the data and in its
columns; every wrong one named.
"""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from image_files import put, save

from gpq_faiss.data.base import FeatureDataset
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
        (np.array([labels.column(k) for k in range(c)]), dense.T),
        (labels.take(rows).dense(), dense[rows]),
        (labels.dense(slice(1, 4)), dense[1:4]),
        (labels.masked(rows).dense(), dense & np.isin(np.arange(n), rows)[:, None]),
        (selected.dense(), dense[:, classes]),
        (labels.over(["x", *labels.class_names]).dense()[:, 1:], dense),
    ):
        np.testing.assert_array_equal(result, expected)


@given(st.lists(st.integers(-1, 40), max_size=50))
def test_ids_round_trip(ids):
    labels = Labels.from_ids(ids)
    assert labels.class_ids().tolist() == ids
    assert (labels.n_classes, labels.multi_label) == (max([0, *ids]) + 1, False)
    small = np.array([i for i in ids if i >= 0], np.uint8)
    np.testing.assert_array_equal(Labels.from_ids(small).class_ids(), small)


def memory(x, **options):
    return FeatureDataset(name="m", ids=np.arange(len(x)), fingerprint="f", matrix=x, **options)


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
        (lambda: Labels.from_multihot(np.zeros((2, 3)), ["a", "b"]), "2 class names"),
        (lambda: Labels.from_multihot(np.zeros((2, 2)), ["a", "b", "c"]), "3 class names"),
        (lambda: Labels.from_multihot(np.zeros((1, 65_536), np.uint8)), "65,536 different labels"),
        (lambda: Labels.from_multihot(np.ones((3, 2))).class_ids(), "rows 0, 1, 2 have several"),
        (lambda: memory(BAD, labels=Labels.from_ids([0, 1])), "2 labels, m has 20 items"),
        (lambda: memory(BAD).require_labels(), "no item has a label"),
        (lambda: memory(BAD).read(slice(5, 9)), "m: row 7 holds NaN or infinity"),
        (lambda: memory(BAD).read(np.array([1, 9, 4])), "rows 9, 4 are all zero"),
    ],
)
def test_what_is_wrong_is_named(make, message):
    with pytest.raises(DataError, match=message):
        make()


def test_rows_of_any_length_have_a_direction():
    for value in (1.0, 1e-40, 3e38):  # in float32 the square of the last two vanishes, or overflows
        x = np.full((1, 3), value, np.float32)
        np.testing.assert_array_equal(memory(x).read(slice(0, 1)), x)


# Beside the data and in its columns ---------------------------------------------------------------


def names_of(dataset):
    """The labels of each item, with spaces between them."""
    names = dataset.labels.class_names
    return [" ".join(names[c] for c in np.flatnonzero(row)) for row in dataset.labels.dense()]


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
        (["sea|sky", None, "sky"], ["sea sky", "", "sky"]),
        ([["sea", "sky"], [], ["sky"]], ["sea sky", "", "sky"]),
        ([["3", "12"], None, ["12"]], ["3 12", "", "12"]),
        (pa.array([10, None, 9]), ["10", "", "9"]),
        (pa.array([10.0, float("nan"), 9.0]), ["10", "", "9"]),
    ],
)
def test_labels_of_texts_and_of_columns(tmp_path, content, expected):
    if isinstance(content, str):
        data = open_data(np.eye(4, 5), labels=save(tmp_path / "l.txt", content))
        assert data.notes[0].startswith("l.txt: 3 of 4 items labelled, ")
    else:
        put(tmp_path, *(names := ["a.png", "b.png", "c.png"]))
        save(tmp_path / "t.parquet", {"image": names, "label": content, "id": [5, 6, 7]})
        data = open_data(f"parquet:{tmp_path}/t.parquet")
        assert data.ids.tolist() == [5, 6, 7]
    assert names_of(data) == expected


WRITTEN = (",;\t", ["utf-8", "utf-8-sig", "utf-16"], ["csv", "txt", "tsv"], ["id", "Key", "item"])


@given(st.permutations([10, 20, 30, 40, 77]), st.tuples(*map(st.sampled_from, WRITTEN)))
def test_labels_follow_the_ids_in_any_order(tmp_path_factory, order, written):
    """As programs and spreadsheets write them."""
    separator, encoding, suffix, item = written
    says = {10: "Kühe", 20: "", 30: f"dog|{NFC}|{NFD}", 40: "dog", 77: "emu"}
    lines = [
        f"Category{separator}{item}",
        *(f"{says[i]}{separator}{i}" for i in order),
        "",
        separator,
    ]
    text = "".join(f"{line}\r\n" for line in lines).encode(encoding)
    table = save(tmp_path_factory.mktemp("t") / f"l.{suffix}", text)
    data = open_data(np.eye(4, 5), labels=table, ids=[40, 10, 30, 20])
    assert names_of(data) == ["dog", "Kühe", f"{NFC} dog", ""]
    (note,) = [n for n in data.notes if table.name in n]
    says_ = (
        f"3 of 4 items labelled, 3 classes, matched by id in '{item}' (1 rows are of other items)"
    )
    assert says_ in note


def test_images_by_name_and_a_column_that_is_named(tmp_path):
    put(tmp_path / "images", "a.png", f"{NFD}/b.png", "c.png")
    table = {"path": ["c.png", "a.png", f"{NFC}/b.png"], "kind": ["k", "", "l"]}
    table["labels"] = [["x", "y"], ["y"], None]
    labels_path = str(save(tmp_path / "l.parquet", table))
    data = open_data(tmp_path / "images", labels=labels_path)
    by_name = dict(zip(data.texts["name"].tolist(), names_of(data), strict=True))
    assert by_name == {"a.png": "y", "c.png": "x y", f"{NFC}/b.png": ""}
    kinds = open_data(tmp_path / "images", labels=labels_path, label_column="kind")
    assert sorted(names_of(kinds)) == ["", "k", "l"]


def test_ids_and_names(tmp_path):
    folder = tmp_path / "data"
    put(folder, "cat/a.png", "cat/b.png", "dog/c.png")
    assert open_data(folder).ids.tolist() == [0, 1, 2]
    files = {"ids": str(save(tmp_path / "ids.txt", "70\n-5 # a comment\n70\n"))}
    files["names"] = str(save(tmp_path / "names.txt", "one\ntwo\nthree\n"))
    data = open_data(folder, **files, labels=np.array([1, -1, 0]))
    assert (data.ids.tolist(), data.texts["name"].tolist()) == (
        [70, -5, 70],
        ["one", "two", "three"],
    )
    assert data.require_labels().class_ids().tolist() == [1, -1, 0]
    assert "1 of the 3 ids are repeated" in data.notes
    marks = [open_data(folder, **{k: v}).fingerprint for k, v in files.items()]
    assert len({data.fingerprint, *marks}) == 3


@pytest.mark.parametrize("form", ["parquet", "parquet-dictionary", "csv"])
def test_texts_in_a_column_of_ids_are_names(tmp_path, form, caplog):
    put(tmp_path, "a.png", "b.png")
    column = pa.array(["ab", "cd"])
    table = {
        "id": column.dictionary_encode() if "-" in form else column,
        "emb": [[1.0, 0.0], [0.0, 1.0]],
    }
    path = tmp_path / f"i.{form.partition('-')[0]}"
    save(path, "image,id\na.png,ab\nb.png,cd\n" if form == "csv" else table)
    with caplog.at_level("INFO", logger="gpq_faiss"):
        data = open_data(path)
    assert (data.ids.tolist(), data.texts["name"].tolist()) == ([0, 1], ["ab", "cd"])
    assert "holds texts: they are the names; ids are row numbers" in caplog.text
