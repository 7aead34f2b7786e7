"""Data as people have it: labels, ids, columns, files and folders in any usual form are understood,
or named in one line.
"""

import io
import json
import pickle
import zipfile
from decimal import Decimal
from pathlib import Path

import datasets
import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_files import Items, hub, label_texts, png, put, refused, save, shard
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split
from torchvision.datasets import ImageFolder

from gpq_faiss.data.images import decode_image
from gpq_faiss.data.labels import labels_of
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError
from gpq_faiss.scale import scale_of, scale_warning

N = 12
X = np.random.default_rng(0).standard_normal((N, 8)).astype(np.float32) + 2
Y = np.arange(N) % 3
CLASSES = [f"c{y}" for y in Y]
HOT = np.eye(3, dtype=int)[Y]
PNGS = [f"{i}.png" for i in range(N)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "x.npy", X)
    return tmp_path


# Labels in memory ---------------------------------------------------------------------------------

HOT_FORMS = {
    "lists": lambda hot: hot.tolist(),
    "arrays": list,
    "tensors": lambda hot: [torch.tensor(row) for row in hot],
    "bfloat16": lambda hot: torch.tensor(hot).bfloat16(),
    "bools": lambda hot: (hot == 1).tolist(),
    "texts": lambda hot: hot.astype(str).tolist(),
    "texts of numpy": lambda hot: [str([*row]) for row in hot],
    "texts of torch": lambda hot: [str(torch.tensor(row)) for row in hot],
    "texts of bools": lambda hot: (hot == 1).astype(str).tolist(),
    "texts of floats": lambda hot: hot.astype(float).astype(str).tolist(),
    "texts and blanks": lambda hot: [" ".join(row) * ("1" in row) for row in hot.astype(str)],
    "written lists": lambda hot: [str(row.tolist()) for row in hot],
    "written arrays": lambda hot: [str(row.astype(float)) for row in hot],
    "Arrow": lambda hot: pa.array(hot.tolist()),
    "Series": lambda hot: pd.Series(hot.tolist()),
    "array": np.asarray,
    "array of -1 and 1": lambda hot: 2 * hot - 1,
    "sparse array": scipy.sparse.csr_array,
    "sparse tensor": lambda hot: torch.tensor(hot).to_sparse(),
}


@given(st.integers(2, 9), st.sampled_from(sorted(HOT_FORMS)), st.randoms(use_true_random=False))
def test_rows_of_zeros_and_ones_are_multi_hot(width, form, random):
    hot = np.array([[random.randint(0, 1) for _ in range(width)] for _ in range(5)])
    hot[0, 0] = 1
    np.testing.assert_array_equal(labels_of(HOT_FORMS[form](hot), "").dense(dtype=int), hot)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[-1, 1], [1, -1]], "-1 stands beside other labels"),
        ([[-1.0, 1.0], [1.0, -1.0]], "-1 stands beside other labels"),
        ([[0, 2, 0], [1, 0, 0]], "a number twice"),
        ([[0, 1, 0], [0, 1]], "a number twice"),
        ([[0.3, 0.7], [1.0, 0.0]], "label 0.3: class numbers are whole"),
        ([0.5, 1.0], "label 0.5: class numbers are whole"),
        ([{"a": 1}, {"b": 2}], "a label is a dict"),
        ([[[i], [0]] for i in range(5)], "a label is a list"),
    ],
)
def test_rows_that_are_no_classes_are_refused(labels, message):
    with pytest.raises(DataError, match=message):
        labels_of(labels, "labels")


@given(
    st.permutations(range(N)), st.sampled_from([dict, pd.Series, pd.DataFrame, "texts", "floats"])
)
def test_labels_by_id_are_matched(order, form):
    values = [CLASSES[i] for i in order]
    keys = [{"texts": str, "floats": float}.get(form, int)(i) for i in order]
    if form is pd.DataFrame:
        labels = pd.DataFrame({"image_id": keys, "category": values})
    elif form is pd.Series:
        labels = pd.Series(values, index=keys)[:-1]
    else:
        labels = dict(zip(keys, values, strict=True))
    expected = ["" if i == order[-1] and form is pd.Series else CLASSES[i] for i in range(N)]
    assert label_texts(open_data(X, labels=labels)) == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([("a", "b", "c"), ("a",), ("b", "c"), ()] * 3, ["a b c", "a", "b c", ""] * 3),
        (pd.Series([("a", "b", "c"), ("b",), ()] * 4), ["a b c", "b", ""] * 4),
        (Y + 70_000, [str(y + 70_000) for y in Y]),
        (Y[None], [str(y) for y in Y]),
        ({i: ("a", name, "z") for i, name in enumerate(CLASSES)}, [f"a {c} z" for c in CLASSES]),
        (
            pd.DataFrame({"index": range(4), "id": [3, 1, 3, 1], "label": ["a", "b", "c", "b"]}),
            ["", "b", "", "a c", *[""] * 8],
        ),
        (  # ids of images go before ids of annotations
            pd.DataFrame({"id": range(N), "image_id": range(N)[::-1], "label": CLASSES[::-1]}),
            CLASSES,
        ),
        ([{"z", name} for name in CLASSES], [f"{name} z" for name in CLASSES]),
        (np.array(CLASSES, "S"), CLASSES),
        ([name.encode() for name in CLASSES], CLASSES),
        (np.where(Y == 2, np.nan, Y), ["0", "1", ""] * 4),
        (["1.0", "0", "N/A"] * 4, ["1", "0", ""] * 4),
        (pd.Series([pd.NA, "a", "b"] * 4), ["", "a", "b"] * 4),
        ({3: "a"}, ["", "", "", "a", *[""] * 8]),
        ([(i, CLASSES[i]) for i in range(N)][:3:-1], [*[""] * 4, *CLASSES[4:]]),
        ([["x", i] for i in range(N)], [f"{i} x" for i in range(N)]),
        (
            np.array([(3, "a"), (1, "b")], [("id", "i8"), ("label", "U4")]),
            ["", "b", "", "a", *[""] * 8],
        ),
        (["['b' 'a']", "{b, a}", "set()"] * 4, ["a b", "a b", ""] * 4),
        (["[hot dog]", "boys'", '{"hot dog",cat}'] * 4, ["hot dog", "boys'", "cat hot dog"] * 4),
        (["16 0", "2,10", "0"] * 4, ["0 16", "2 10", "0"] * 4),
        (["1.000e+00", "1.1000e+01", ""] * 4, ["1", "11", ""] * 4),
        (np.array([1, 3, -1] * 4), ["1", "3", ""] * 4),
        *[
            (Y.astype(dtype), Y.astype(str).tolist())
            for dtype in (np.uint8, np.int8, np.uint64, np.float16, object)
        ],
        (np.ma.masked_equal(Y, 1), ["0", "", "2"] * 4),
        (np.ma.masked_invalid(np.where(Y == 2, np.nan, Y)), ["0", "1", ""] * 4),
        (np.asmatrix(Y).T, ["0", "1", "2"] * 4),
        (["[1 9]", "[2]", "{}"] * 4, ["1 9", "2", ""] * 4),
        ([[-1, -1], [1, 0], [0, 1]] * 4, ["", "0", "1"] * 4),
        ([[1, 1, 3], [2], []] * 4, ["1 3", "2", ""] * 4),
    ],
)
def test_values_of_labels(labels, expected):
    assert label_texts(open_data(X, labels=labels)) == expected


def test_log_says_what_was_understood(folder, caplog):
    text = "image_id,category\n" + "".join(f"{i},k{i % 2}\n" for i in range(6))
    labels = save(folder / "labels.csv", text)
    with caplog.at_level("INFO", logger="gpq_faiss"):
        open_data("x.npy", labels=labels)
    first, second = [record.getMessage() for record in caplog.records][:2]
    assert first.endswith("6 of 12 items labelled, 2 classes, matched by id in 'image_id'")
    assert second.endswith("items of each class: k0 3, k1 3")


# Tables -------------------------------------------------------------------------------------------

TABLES = {
    "t.csv": lambda path, a, b: save(
        path, "".join(f"{i},{c}\n" for i, c in [(a, b), *enumerate(CLASSES)])
    ),
    "t.tsv": lambda path, a, b: save(
        path, "".join(f"{i}\t{c}\n" for i, c in [(a, b), *enumerate(CLASSES)])
    ),
    "t.parquet": lambda path, a, b: save(path, {a: list(range(N)), b: CLASSES}),
    "t.json": lambda path, a, b: save(
        path, json.dumps([{a: i, b: c} for i, c in enumerate(CLASSES)])
    ),
    "lines.json": lambda path, a, b: pd.DataFrame({a: range(N), b: CLASSES}).to_json(
        path, orient="records", lines=True
    ),
    "t.jsonl": lambda path, a, b: save(
        path, "\n".join(json.dumps({a: i, b: c}) for i, c in enumerate(CLASSES))
    ),
    "t.h5": lambda path, a, b: save(path, {a: np.arange(N), b: np.array(CLASSES, "S")}),
    "t.npz": lambda path, a, b: save(path, {a: np.arange(N), b: np.array(CLASSES)}),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_labels_by_usual_and_by_named_columns(folder, name):
    TABLES[name](folder / name, "Image ID", "Class_Name")
    assert label_texts(open_data("x.npy", labels=name)) == CLASSES
    TABLES[name](folder / name, "nr", "art")
    named = open_data("x.npy", labels=name, id_column="nr", label_column="art")
    assert label_texts(named) == CLASSES
    refused("x.npy", "it has 'art', 'nr'|it has 'nr', 'art'", labels=name)


def test_json_of_names_and_labels(folder):
    for form in (str, lambda name: [name], lambda name: [name] * 2):
        labels = {name: form(label) for name, label in zip(PNGS[3:], CLASSES[3:], strict=True)}
        save(folder / "l.json", json.dumps(labels))
        assert label_texts(open_data(X, names=PNGS, labels="l.json")) == ["", "", "", *CLASSES[3:]]
    pd.DataFrame({"image_id": PNGS, "label": CLASSES}, range(9, N + 9)).to_json("l.json")
    assert label_texts(open_data(X, names=PNGS[::-1], labels="l.json")) == CLASSES[::-1]
    refused(X, "has no column 'kind'", labels=dict(enumerate(CLASSES)), label_column="kind")


@pytest.mark.parametrize("other", [0, -1, ""])
def test_a_column_for_each_class(folder, other):
    columns = {f"c{i}": [1 if i == y else other for y in Y] for i in range(3)}
    pd.DataFrame({"image_id": range(N), **columns}).iloc[::-1].to_csv("l.csv", index=False)
    assert label_texts(open_data(X, labels="l.csv")) == [f"c{i}" for i in Y]


def test_rows_without_an_id_are_left_out(folder):
    rows = [f"{'' if i == 3 else i},{CLASSES[i]}\n" for i in range(N - 1, -1, -1)]
    data = open_data("x.npy", labels=save(folder / "l.csv", "id,label\n" + "".join(rows)))
    assert label_texts(data) == [*CLASSES[:3], "", *CLASSES[4:]]
    assert "ids are row numbers, from 0" in data.notes
    save(folder / "t.csv", "id,label\ntotal,c9\n" + "".join(rows))
    refused("x.npy", "t.csv has the id total in 'id', but the data has no ids", labels="t.csv")


def test_a_table_without_ids_is_in_order_and_says_so(folder):
    data = open_data(X, labels=pd.DataFrame({"price": Y + 0.5, "label": CLASSES}))
    assert label_texts(data) == CLASSES
    assert data.notes[0].endswith("in their order, as no column names ids")


@pytest.mark.parametrize("start", [0, 1])
def test_ids_and_names_in_a_column_of_any_name_are_found(folder, start):
    table = pd.DataFrame({"price": Y, "nr": range(start, N + start), "art": CLASSES})
    table = table.iloc[::-1].reset_index(drop=True)
    options = {"labels": table, "label_column": "art", "id_column": "nr"}
    if start == 1:
        refused(X, "has the id 12 in 'nr', but the data has no ids", **options)
    data = open_data(X, ids=np.arange(start, N + start), **options)
    assert (label_texts(data), "by id in 'nr'" in data.notes[0]) == (CLASSES, True)
    names = [f"{name}.png" for name in table.pop("nr")]
    data = open_data(X, names=names[::-1], labels=table.assign(foto=names), label_column="art")
    assert (label_texts(data), "by name in 'foto'" in data.notes[0]) == (CLASSES, True)


def test_names_in_a_table_are_those_of_data_without_any(folder):
    table = pd.DataFrame({"path": PNGS, "label": CLASSES})
    data = open_data(X, labels=table)
    assert (label_texts(data), data.texts["name"].tolist()) == (CLASSES, PNGS)
    refused(X, "is an id or name of one item", labels=dict(zip(PNGS, CLASSES, strict=True)))
    refused(X, "is an id or name of one item", labels=table, ids=np.arange(N)[::-1])


@pytest.mark.parametrize("column", ["filenames", "image_name", "Image Paths", "url"])
def test_vectors_with_names_take_labels_by_these(folder, column):
    save(folder / "t.parquet", {"emb": list(X), column: PNGS})
    table = pd.DataFrame({"image": PNGS, "label": CLASSES}).iloc[::-1]
    assert label_texts(open_data("t.parquet", labels=table)) == CLASSES


def test_joined_data_sets_of_different_classes_are_refused(folder):
    put(folder, "a/cat/1.png", "a/dog/1.png", "b/eel/1.png", "b/fox/1.png")
    joined = ConcatDataset([ImageFolder("a"), ImageFolder("b")])
    for source in (joined, Subset(joined, [1, 2])):
        refused(source, "joined data sets have different classes")
    assert label_texts(open_data(ConcatDataset([ImageFolder("a")] * 2))) == ["cat", "dog"] * 2


@pytest.mark.parametrize("keys", [PNGS, [99, 1, 2, 0, *range(4, N)], [7 * i for i in range(N)]])
def test_tables_that_share_a_column_are_joined_by_it(folder, keys):
    items = pd.DataFrame({"sku": keys, "emb": list(X), "f": X[:, 0]})
    items.to_parquet("i.parquet")
    table = pd.DataFrame({"f": X[::-1, 0], "sku": keys[::-1], "label": CLASSES[::-1]})
    for source in (items, "i.parquet"):
        assert label_texts(open_data(source, labels=table, names="sku", id_column="sku")) == CLASSES
        refused(source, "join them by --read names=sku and id_column=sku", labels=table)
        assert label_texts(open_data(source, labels=table[::-1].reset_index(drop=True))) == CLASSES


def test_paths_are_the_names_of_images(folder):
    put(folder, *PNGS)
    labels = pd.DataFrame({"file": PNGS, "label": CLASSES}).iloc[::-1].reset_index(drop=True)
    assert label_texts(open_data(PNGS, labels=labels)) == CLASSES
    refused([X[:3].astype(np.uint8)] * N, "no key of a label in 'file'", labels=labels)


def test_file_numbers_that_repeat_name_no_items(folder):
    put(folder, *(f"{c}/{i:03}.png" for c in "ab" for i in (1, 2, 3)))
    refused(folder, "no key of a label in 'id'", labels=pd.DataFrame({"id": [1], "label": ["a"]}))


def test_labels_that_are_a_column_of_the_frame(folder):
    frame = pd.DataFrame({"emb": list(X), "kind": CLASSES}).iloc[::-1]
    data = open_data(frame, labels=frame["kind"], names=pd.Series(PNGS))
    assert (label_texts(data), [*data.texts["name"]]) == (CLASSES[::-1], PNGS[::-1])
    twice = pd.Series(CLASSES, index=[*range(6)] * 2)
    refused(X, r"no key of a label in 'index' .*labels.to_numpy", labels=twice)


KEYS = {
    "bytes": lambda names: [name.encode() for name in names],
    "categories": pd.Categorical,
    "paths of Windows": lambda names: [f"C:\\\\photos\\\\{name}" for name in names],
}


@pytest.mark.parametrize("form", KEYS)
def test_keys_of_any_type_are_matched(folder, form):
    names = [f"p{i}.png" for i in range(N)]
    order = np.random.default_rng(2).permutation(N)
    keys = KEYS[form]([names[i] for i in order])
    table = pd.DataFrame({"filename": keys, "label": [CLASSES[i] for i in order]})
    table.to_parquet("l.parquet")
    for labels in (table, "l.parquet"):
        assert label_texts(open_data(X, names=names, labels=labels)) == CLASSES


@pytest.mark.parametrize(
    ("items", "columns", "expected"),
    [
        *[({}, {"id": [form(i) for i in (2, 0, 3)]}, "b - a c") for form in (str, Decimal, float)],
        ({"ids": [1, 2, 3, 4]}, {"image_id": [9, 8, 7, 6, 4], "rank": range(1, 6)}, "- - - e"),
        ({"ids": [7, 0, 30, 50]}, {"id": [7, 4, 30, 50]}, "a - c d"),
        ({"ids": [2, 1, 4, 3], "names": ["01", "02", "03", "04"]}, {"id": [1, 2, 4]}, "b a c -"),
        ({"names": list("wxyz")}, {"file": ["u", "v", "x"], "Unnamed: 0": range(3)}, "- c - -"),
        ({"names": ["003", "050", "007", "001"]}, {"": range(4)}, "a b c d"),
        ({"ids": [7, 8, 9, 70]}, {"sku": [8, 7, 9, 9]}, "b a c|d -"),
    ],
)
def test_keys_go_before_counts(items, columns, expected):
    table = pd.DataFrame(columns).assign(label=lambda frame: [*"abcde"][: len(frame)])
    texts = [text.strip("-").replace("|", " ") for text in expected.split()]
    assert label_texts(open_data(X[:4], labels=table, **items)) == texts


def test_labels_of_test_files_are_not_given_to_training_files():
    names = [f"train/{i}.jpg" for i in range(4)]
    for parent in ("/data/train", "images", "train/images"):
        labels = {f"{parent}/{i}.jpg": "abcd"[i] for i in range(4)}
        assert label_texts(open_data(X[:4], names=names, labels=labels)) == [*"abcd"]
    labels = {f"test/{i}.jpg": "a" for i in range(4)}
    refused(X[:4], "has files of the same names in train", names=names, labels=labels)


def test_counts_from_0_beside_counts_from_1_are_refused(folder):
    pd.DataFrame({"label": CLASSES}).to_csv("l.csv")
    counted = {"ids": range(1, N + 1)}, {"names": [f"{i}.png" for i in range(1, N + 1)]}
    for items in counted:
        for labels in (dict(enumerate(CLASSES)), dict(enumerate(CLASSES[:5]))):
            refused(X, "one counts from 0 and the other from 1", labels=labels, **items)
        assert label_texts(open_data(X, labels="l.csv", **items)) == CLASSES  # counts lines
    table = pd.DataFrame({"id": range(1, N + 1), "label": CLASSES})
    for labels in (table, table.drop([2, 4])):
        refused(
            X,
            "one counts from 0 and the other from 1",
            labels=labels,
            names=PNGS,
        )


@pytest.mark.parametrize(
    "part",
    [slice(None, 0, -1), slice(2, None, 3), slice(-5, 2, -1)],
)
def test_frames_are_aligned_by_their_index(folder, part):
    table = pd.DataFrame({"label": CLASSES})
    expected = pd.Series("", range(N)).mask(table.index.isin(table.index[part]), CLASSES)
    for labels in (table[part], table["label"][part]):
        assert label_texts(open_data(X, labels=labels)) == expected.tolist()
    items = pd.DataFrame({"emb": list(X)}).sample(frac=1.0, random_state=1)
    for labels in (table, table["label"], table.iloc[::-1]):
        aligned = label_texts(open_data(items, labels=labels))
        assert aligned == [CLASSES[i] for i in items.index]


PAIRS = {
    "array": np.array,
    "items": lambda pairs: dict(pairs).items(),
    "zip": lambda pairs: zip(*zip(*pairs, strict=True), strict=True),
    "tuple": tuple,
    "records": lambda pairs: [{"id": i, "label": label} for i, label in pairs],
    "columns": lambda pairs: dict(zip(("id", "label"), zip(*pairs, strict=True), strict=True)),
    "lists": lambda pairs: {"id": [i for i, _ in pairs], "label": [[name] for _, name in pairs]},
    "boxes": lambda pairs: pd.DataFrame([{"id": i, "x": 1, "y": 2, "class": c} for i, c in pairs]),
    "l.npy": lambda pairs: save(Path("l.npy"), np.array(pairs, [("id", "i8"), ("label", "U9")])),
    "l.json": lambda pairs: save(Path("l.json"), json.dumps(PAIRS["records"](pairs))),
}


@pytest.mark.parametrize("form", PAIRS)
def test_pairs_of_an_id_and_a_label_in_any_form(folder, form):
    pairs = list(enumerate(CLASSES))[:2:-1]
    assert label_texts(open_data(X, labels=PAIRS[form](pairs))) == ["", "", "", *CLASSES[3:]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"f3": ["?", *["0.5"] * 11]}, "which column holds the vectors.*it has f0, f1, f2, f3"),
        ({"genres": HOT.tolist()}, "which column holds the vectors"),
    ],
)
def test_vectors_are_not_guessed(folder, columns, message):
    table = pd.DataFrame(X, columns=[f"f{i}" for i in range(8)]).assign(**columns)
    refused(table, message)
    table.to_parquet("v.parquet")
    refused("v.parquet", message)


@pytest.mark.parametrize("name", ["l{}.json", "l{}.txt"])
def test_labels_in_parts(folder, name):
    for i, rows in enumerate(np.array_split(np.arange(N), 3)):
        records = [{"id": int(row), "label": CLASSES[row]} for row in rows]
        lines = "".join(f"{row} {CLASSES[row]}\n" for row in rows)
        save(folder / name.format(i), lines if name.endswith("txt") else json.dumps(records))
    assert label_texts(open_data(X, labels=name.format("*"))) == CLASSES


@pytest.mark.parametrize("name", ["PK", "RIFF", "BZh", "MATLAB", "7 chars"])
def test_texts_that_begin_as_binary_files_do_are_read(folder, name):
    pd.DataFrame({name: range(N), "label": CLASSES}).iloc[::-1].to_csv("l.csv", index=False)
    assert label_texts(open_data(X, labels="l.csv", id_column=name)) == CLASSES
    save(folder / "l.jsonl", "\n".join(json.dumps({"l": int(y)}, separators=(",", ":")) for y in Y))
    assert label_texts(open_data(X, labels="l.jsonl", label_column="l")) == [str(y) for y in Y]


def test_parts_where_a_column_is_empty(folder):
    for i, captions in enumerate((["a"] * N, [None] * N)):
        pd.DataFrame({"emb": list(X), "caption": captions}).to_parquet(f"p{i}.parquet")
    data = open_data("p*.parquet", keep="caption")
    assert data.texts["caption"].tolist() == ["a"] * N + [""] * N


@pytest.mark.parametrize(
    ("columns", "way"),
    [
        ({"id": range(N), "photo": "p/{:03}.png"}, "name in 'photo'"),
        ({"id": range(N), "photo": "{:03}"}, "name without ending in 'photo'"),
        ({"index": range(100, N + 100), "photo": "p\\{:03}.png"}, "name in 'photo'"),
        ({"id": "{}", "fold": Y}, "name without zeros in 'id'"),
        ({"patient": Y, "photo": "q/{:03}.PNG"}, "name without ending in 'photo'"),
    ],
)
def test_the_column_that_names_most_items_is_found(columns, way):
    names = [f"p/{i:03}.png" for i in range(N)]
    columns = {
        name: list(map(values.format, range(N))) if isinstance(values, str) else list(values)
        for name, values in columns.items()
    }
    table = pd.DataFrame(columns | {"label": CLASSES})
    if "id" in columns and "photo" in columns:
        table["id"] = table["id"].to_numpy()[::-1]
    data = open_data(X, names=names, labels=table.sample(frac=0.8, random_state=0))
    assert data.notes[0].endswith(f"matched by {way}")
    assert all(text in ("", label) for text, label in zip(label_texts(data), CLASSES, strict=True))
    assert data.labels.has().sum() == round(0.8 * N)


@pytest.mark.parametrize("text", ["{:04}.png", "{:04}", None])
def test_row_numbers_in_a_table_do_not_name_items_that_another_column_names(folder, text):
    """As pandas writes them: they count from 0 to 11, and match more items than the names."""
    order, names = np.random.default_rng(1).permutation(N), [f"{i:04}.png" for i in range(N)]
    numbers = [98, 99, *(order[2:] + 1).tolist()]  # two rows are of other items
    keys = {"file": [text.format(i - 1) for i in numbers]} if text else {"image_id": numbers}
    keys = {"Unnamed: 0": range(N), **keys, "label": [CLASSES[i] for i in order]}
    items = {"names": names} if text else {"ids": np.arange(1, N + 1)}
    data = open_data(X, labels=pd.DataFrame(keys), **items)
    is_listed = np.isin(np.arange(N), order[2:])
    assert label_texts(data) == np.where(is_listed, CLASSES, "").tolist()
    refused(X, "has no column 'nr'", labels=pd.DataFrame(keys), id_column="nr", **items)


def test_names_that_do_not_match_are_refused(folder):
    table = pd.DataFrame({"photo": [f"other {i}" for i in range(N)], "label": CLASSES})
    refused(X, "no key of a label in 'photo' is an id or name", names=PNGS, labels=table)
    table["photo"] = [*PNGS[1:], PNGS[1]]
    several = open_data(X, names=PNGS, labels=table)
    assert (label_texts(several)[1], several.notes[2]) == (
        "c0 c2",
        "labels names items again in 1 rows: they have the labels of all",
    )
    indexed = pd.DataFrame({"label": CLASSES}, index=pd.Index(PNGS, name="sample")).iloc[::-1]
    assert label_texts(open_data(X, names=PNGS, labels=indexed)) == CLASSES
    counted = pd.DataFrame({"id": range(N), "file": [f"b{i}" for i in range(N)], "label": CLASSES})
    names = [f"a{i}" for i in range(N)]
    refused(X, "no key of a label in 'file' is an id or name", names=names, labels=counted)
    assert label_texts(open_data(X, names=names, labels=counted, id_column="id")) == CLASSES
    some = counted.rename(columns={"file": "image"}).iloc[1:7]
    refused(X, "no key of a label in 'image' is an id or name", names=names, labels=some)


@pytest.mark.parametrize("text", ["{:03}.png {}", "{:03} {}", '"{:03}.png" {}'])
def test_lines_of_a_name_and_a_label(folder, text):
    lines = [text.format(i, CLASSES[i]) for i in range(N)][::-1]
    labels = save(folder / "train.txt", "\n".join(lines))
    names = [f"p/{i:03}.png" for i in range(N)]
    assert label_texts(open_data(X, names=names, labels=labels)) == CLASSES


def test_a_first_line_with_an_image_is_no_header(folder):
    labels = save(folder / "l.csv", "".join(map("{},{}\n".format, PNGS, CLASSES)))
    assert label_texts(open_data(X, names=PNGS, labels=labels, label_column="1")) == CLASSES


def test_several_arrays_of_one_row_are_refused(folder):
    images = np.zeros((N, 8, 8), np.uint8)
    np.savez("m.npz", train_images=images, test_images=images)
    refused("m.npz", "several columns of images \\(train_images, test_images\\): name one")
    assert len(open_data("m.npz", image_column="train_images")) == N


@pytest.mark.parametrize(("key", "note"), [("{}.png", "file name"), ("{}", "name without ending")])
def test_names_match_without_folder_and_ending(folder, key, note):
    put(folder, "q/cat/0001.png", "q/dog/0002.png")
    text = f"image_id,category\n{key.format('0002')},y\n{key.format('0001')},x\n"
    data = open_data("q", labels=save(folder / "q.csv", text))
    assert (label_texts(data), note in data.notes[0]) == (["x", "y"], True)


SHIFTED = {
    "ids.csv": (
        "id,label\n" + "".join(f"{i + 1},{c}\n" for i, c in enumerate(CLASSES)),
        "has the id 12 in 'id', but the data has no ids",
    ),
    "named.txt": ("label\n" + "\n".join(CLASSES[1:]), "11 labels, features:x.npy has 12 items"),
    "numbers.txt": ("Art\n" + "\n".join(map(str, Y[1:])), "11 labels, features:x.npy has 12 items"),
    "more.txt": ("\n".join([*CLASSES, "c0"]), "13 labels, features:x.npy has 12 items"),
}


@pytest.mark.parametrize("name", SHIFTED)
def test_labels_of_neighbours_are_refused(folder, name):
    text, message = SHIFTED[name]
    refused("x.npy", message, labels=save(folder / name, text))


def test_whole_floats_are_ids(folder):
    save(folder / "ids.txt", "".join(f"{i}.0\n" for i in range(N)))
    for ids in (np.arange(N) * 1.0, "ids.txt"):
        assert open_data("x.npy", ids=ids).ids.tolist() == list(range(N))
    refused(X, "expected ids", ids=np.arange(N) / 2)


# Files --------------------------------------------------------------------------------------------


def zipped(member):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(member, "x")
    return out.getvalue()


FOREIGN = {
    "a.pkl": (pickle.dumps([1]), "is a pickle"),
    "a.png": (png(0), "is an image"),
    "a.xlsx": (zipped("xl/workbook.xml"), "is an Excel sheet"),
    "a.pt": (zipped("archive/data.pkl"), "is a PyTorch file"),
    "a.zip": (zipped("a.txt"), "is a zip archive: extract it"),
    "a.db": (b"SQLite format 3\0", "is an SQLite database"),
    "a.faiss": (b"IxM2" + bytes(40), "is a Faiss index"),
    "a.csv.gz": (b"\x1f\x8b" + bytes(40), "is compressed: extract it"),
    "a.safetensors": (bytes([9, *bytes(7)]) + b'{"a": 1}', "is a safetensors file: save its"),
    "a.bin": (bytes(100), "is a .bin file: save it as"),
    "a.yml": (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS: run git"),
    "a.csv": (b"<!DOCTYPE html>\n", "is a page of HTML or XML: download"),
    "a.yaml": (b"a: 1\nb: 2\n", "is a .yaml file: save it as"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_forms_that_are_not_read_are_named(folder, name):
    content, message = FOREIGN[name]
    save(folder / name, content)
    refused("x.npy", message, labels=name)
    refused(f"features:{name}", message)


def arrow_stream(path, table):
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


MORE_VECTORS = {
    "v.feather": lambda path: pa.feather.write_feather(pa.table({"v": list(X)}), path),
    "stream.arrow": lambda path: arrow_stream(path, pa.table({"v": list(X)})),
    "groups.h5": lambda path: save(path, {"train/v": X, "train/y": Y, "train/ids": Y}),
    "v.csv": lambda path: pd.DataFrame(X).add_prefix("f").to_csv(path),
    "bare.csv": lambda path: np.savetxt(path, X, delimiter=","),
    "blanks.dat": lambda path: np.savetxt(path, X),
    "header.csv": lambda path: np.savetxt(path, X, delimiter=",", header="a,b,c,d,e,f,g,h"),
    "padded.dat": lambda path: np.savetxt(path, X, fmt="%15.7e"),
    "commas.csv": lambda path: pd.DataFrame(X).to_csv(
        path, header=False, index=False, sep=";", decimal=","
    ),
    "words.parquet": lambda path: save(path, dict(zip("hgfedcba", X.T, strict=True))),
    "v.parquet": lambda path: save(path, {f"d{i}": X[:, i] for i in (*range(4, 8), *range(4))}),
    "price.parquet": lambda path: save(path, {**{f"f{i}": X[:, i] for i in range(8)}, "price": Y}),
}


@pytest.mark.parametrize("name", MORE_VECTORS)
def test_more_files_of_vectors(folder, name):
    MORE_VECTORS[name](folder / name)
    np.testing.assert_allclose(open_data(name).read(slice(None)), X, rtol=1e-6)


def test_patterns_choose_columns_of_vectors(folder):
    save(folder / "t.parquet", {f"{c}{i}": X[:, i] for c in "ab" for i in range(8)})
    refused("t.parquet", "which column holds the vectors")
    notes = open_data("t.parquet", vectors="b*").notes
    assert "vectors are the 8 columns 'b0' to 'b7'" in notes
    assert notes[-1].startswith("columns that are not in the vectors: 'a0', 'a1', ")


def test_row_groups_are_read_in_any_order(folder):
    pa.parquet.write_table(
        pa.table({"v": list(X), "label": CLASSES}), "g.parquet", row_group_size=5
    )
    data, rows = open_data("g.parquet"), np.array([11, 0, 6, 4, 0])
    np.testing.assert_array_equal(data.read(rows), X[rows])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("z.npz", {"x": np.zeros((4, 3)), "labels": np.full(4, -1)}),
        ("z.parquet", {"x": [[0.0, 0.0]] * 40, "label": [None] * 40}),
    ],
)
def test_labels_are_read_before_vectors(folder, monkeypatch, name, content):
    data = open_data(save(folder / name, content))
    monkeypatch.setattr(type(data), "read", None)
    with pytest.raises(DataError, match="no item has a label"):
        data.require_labels()


def test_folders_of_embeddings_are_one_set(folder):
    for k in range(2):
        rows = slice(6 * k, 6 * k + 6)
        save(folder / f"c/img_emb/img_emb_{k}.npy", X[rows])
        metadata = {"image_path": [f"p/{k}-{i}.jpg" for i in range(6)], "label": CLASSES[rows]}
        save(folder / f"c/metadata/metadata_{k}.parquet", metadata)
        save(folder / f"f/part-{k}.parquet", {"embedding": list(X[rows]), "id": np.arange(N)[rows]})
    save(folder / "lost/img_emb/img_emb_0.npy", X)
    save(folder / "lost/metadata/metadata_1.parquet", {"image_path": CLASSES})
    refused("lost", "the files of img_emb and metadata have different numbers")
    for data in (open_data("c"), open_data("c/img_emb/*.npy", labels="c/metadata/*.parquet")):
        np.testing.assert_array_equal(data.read(slice(None)), X)
        assert (label_texts(data), data.texts["name"][7]) == (CLASSES, "p/1-1.jpg")
    np.testing.assert_array_equal(open_data("f").read(slice(None)), X)


def test_a_description_beside_data_is_no_data(folder):
    put(folder, "i/1.png")
    save(folder / "i/info.json", '{"a": {"b": 1}}')
    save(folder / "e/part-0.npy", X)
    save(folder / "e/info.json", '{"a": {"b": 1}}')
    assert (len(open_data("i")), len(open_data("e"))) == (1, N)


def test_images_in_arrays_have_the_labels_beside_them(folder):
    images = np.random.default_rng(0).integers(0, 255, (N, 8, 8), dtype=np.uint8)
    np.savez(folder / "i.npz", labels=Y, images=images)
    data = open_data("i.npz")
    assert label_texts(data) == Y.astype(str).tolist()
    np.testing.assert_array_equal(data.image(3)[..., 0], images[3])


def test_a_kept_column_stands_beside_the_hash_of_the_file(folder):
    put(folder, "1.png", "2.png")
    save(folder / "t.csv", "path,content\n1.png,a sea\n2.png,a hill\n")
    data = open_data("t.csv", keep="content")
    assert data.texts["content"].tolist() == ["a sea", "a hill"]
    assert len({*data.texts["file_hash"]}) == 2


@pytest.mark.parametrize("rows", [X, np.repeat(CLASSES, 8).reshape(N, 8)])
def test_numbers_of_columns_are_a_header(folder, rows):
    pd.DataFrame(rows).assign(label=CLASSES).to_csv("t.csv", index=False)
    assert label_texts(open_data("x.npy", labels="t.csv")) == CLASSES


@pytest.mark.parametrize(
    ("table", "written", "read"),
    [
        (pd.DataFrame(X), {}, {}),
        (pd.DataFrame(X), {"sep": ";", "decimal": ","}, {}),
        (pd.DataFrame(X).assign(c=CLASSES), {"header": False}, {"vectors": "[0-7]"}),
        (pd.DataFrame(X).add_prefix("f").assign(filename=PNGS), {}, {"vectors": "f*"}),
        (pd.DataFrame({"emb": [[*x] for x in X]}), {}, {"vectors": "emb"}),
        (pd.DataFrame({"emb": X.tolist(), "n": range(N)}), {}, {"vectors": "emb"}),
        (pd.DataFrame({"emb": list(X), "n": range(N)}), {}, {"vectors": "emb"}),
    ],
)
def test_vectors_in_csv_as_pandas_writes_them(folder, table, written, read):
    table.to_csv("v.csv", index=False, **written)
    np.testing.assert_allclose(open_data("v.csv", **read).read(slice(None)), X, rtol=1e-6)


def test_images_in_parquet_and_in_clones_of_hubs(folder):
    columns = {"image": [png(i) for i in range(4)], "label": ["a", "b"] * 2, "n": list(range(4))}
    columns |= {"bbox": [[0.0, 1.0, 2.0, 3.0]] * 4, "key": list("wxyz")}
    save(folder / "i.parquet", {name.replace("image", "jpg"): columns[name] for name in columns})
    rows = hub({"image": datasets.Image(decode=False)}, **columns)
    (folder / "clone/data").mkdir(parents=True)
    rows.to_parquet("clone/data/train-00000-of-00001.parquet")
    for data in (open_data("i.parquet"), open_data("clone")):
        assert (label_texts(data), [*data.texts["name"]]) == (["a", "b"] * 2, [*"wxyz"])
        assert data.read(slice(0, 1))[0].shape == (4, 4, 3)


def samples(folder, **texts):
    """Six images of a WebDataset, each with a text per extension."""
    members = {f"{i}.png": png(i) for i in range(6)}
    members |= {
        f"{i}.{e}": t.replace("I", str(i)).encode() for i in range(6) for e, t in texts.items()
    }
    return shard(folder / "a.tar", dict(sorted(members.items())))


def test_captions_are_no_labels_unless_named(folder):
    source = samples(folder, txt="caption I", json='{"url": "u", "key": "I"}')
    assert open_data(source).labels is None
    data = open_data(source, label_column="txt", keep="url")
    assert (data.labels.n_classes, data.texts["url"][0], data.texts["name"][1]) == (6, "u", "1")


@pytest.mark.parametrize(
    "texts",
    [{"json": '{"label": I}'}, {"cls": "I"}, {"json": '{"x": {"y": 1}, "class": "I"}'}],
)
def test_labels_and_images_of_shards(folder, texts):
    data = open_data(samples(folder, **texts))
    assert label_texts(data) == list("012345")
    np.testing.assert_array_equal(data.read(slice(3, 4))[0], decode_image(png(3)))


# Objects ------------------------------------------------------------------------------------------


def test_vectors_in_objects(folder):
    with h5py.File("a.h5", "w") as h5:
        h5["v"] = X
        sources = [h5["v"], list(X), X.tolist(), torch.tensor(X), list(torch.tensor(X))]
        for source in (*sources, pd.Series([*X]), pd.Series([*X]).to_numpy()):
            np.testing.assert_array_equal(open_data(source).read(np.array([9, 2, 9])), X[[9, 2, 9]])
    assert open_data(torch.tensor(X).bfloat16()).matrix.shape == (N, 8)


def test_vectors_and_labels_in_one_object(folder):
    tensors = TensorDataset(torch.tensor(X), torch.tensor(Y))
    for source in (
        tensors,
        Subset(tensors, range(N)),
        TensorDataset(*tensors.tensors, torch.ones(N)),
    ):
        assert label_texts(open_data(source)) == Y.astype(str).tolist()
        np.testing.assert_array_equal(open_data(source).read(slice(None)), X)
    assert open_data(TensorDataset(torch.tensor(X))).labels is None
    for convert in (list, tuple, torch.tensor):
        records = [
            {"embedding": convert(x.tolist()), "target": y, "id": 9 * y}
            for x, y in zip(X, Y.tolist(), strict=True)
        ]
        data = open_data(records)
        np.testing.assert_array_equal(data.read(slice(None)), X)
        assert (label_texts(data), data.ids.tolist()) == ([*map(str, Y)], [*(9 * Y)])
    for labels in (CLASSES, torch.tensor(Y), Y.astype(np.uint8)):
        items = [{"pixel_values": png(i), "labels": label} for i, label in enumerate(labels)]
        assert label_texts(open_data(Items(items, classes=["c0", "c1", "c2"]))) == CLASSES
    refused([[Image.open(io.BytesIO(png(0)))] * 2] * 3, "a label is a PngImageFile")


def test_parts_of_torch_data_sets_keep_class_names(folder):
    put(folder / "i", *(f"{c}/{k}.png" for c in ("cat", "dog") for k in range(5)))
    images = ImageFolder("i")
    for source in (Subset(images, [0, 3, 7]), random_split(images, [5, 5])[0]):
        assert open_data(source).labels.class_names == ("cat", "dog")
    assert label_texts(open_data(Subset(Subset(images, range(8)), [1, 6]))) == ["cat", "dog"]


# Folders ------------------------------------------------------------------------------------------

LAYOUTS = {
    "cat/1 cat/@eaDir/1.png/t dog/1 __MACOSX/cat/1 $RECYCLE.BIN/q": ["cat", "dog"],
    "images/cat/1 images/dog/2 annotations/cat/1": ["cat", "dog"],
    "train/a/images/1 train/b/images/2 val/images/v": ["a", "b", ""],
    "images/1 cat/1 dog/1": ["cat", "dog", ""],
    "train/cat/1 val/dog/1 unlabeled/9": ["cat", "", "dog"],
    "train/cat/1 train/dog/2 val/cat/1 raw/8": ["cat", "dog", "", "cat"],
    "train/a/1 train/b/2 query/c/3 gallery/c/4 gallery/d/5": ["a", "b", "c", "c", "d"],
    "cat/raw/1 dog/raw/2": ["cat", "dog"],
    "cat/train/1 cat/test/2 dog/train/1 dog/test/2": ["cat", "dog", "cat", "dog"],
    "Train/00/1 Train/01/1 Test/1 Meta/0": ["00", "01", "", ""],
    "seg_train/seg_train/sea/1 seg_test/seg_test/sea/1 seg_pred/seg_pred/1": ["sea", "", "sea"],
    "G/Final_Training/Images/00/1 G/Final_Test/Images/1": ["00", ""],
    "CUB/images/001.Auk/1 CUB/images/002.Jay/1 CUB/segmentations/001.Auk/1": ["001.Auk", "002.Jay"],
    "train_images/cat/1 val2017/cat/1": ["cat", "cat"],
    "test_tube/1 flask/1": ["flask", "test_tube"],
    "photo/cat/1 photo/dog/1 sketch/cat/1 sketch/dog/2": ["cat", "cat", "dog", "dog"],
    "Latin/character01/1 Greek/character01/2": ["Greek", "Latin"],
    "train/photo/cat/1 train/photo/dog/2 test/sketch/cat/1 test/sketch/dog/2": ["cat", "dog"] * 2,
    "train/x bus/y": ["bus", "train"],
    "train/x test/y": ["", ""],
    "set/train/b/x set/test/a/y": ["b", "a"],
    "flowers/rose/x flowers/tulip/y": ["rose", "tulip"],
    "x a/y": ["a", ""],
    "only/x": ["only"],
    "cat/images/1 cat/masks/1 dog/images/1": ["cat", "dog"],
    "images/mask/1 images/no_mask/2": ["mask", "no_mask"],
    "train/cat/1 train/dog/2 train/unlabeled/3": ["cat", "dog", ""],
    ".h/a cat/1 cat/._2 dog/x/3": ["cat", "dog"],
    "labeled/cat/1 labeled/dog/2 unlabeled/3": ["cat", "dog", ""],
    "train/bus/1 train/train/2 validation/bus/3 validation/train/4": ["bus", "train"] * 2,
    "a/train/good/1 a/ground_truth/bad/2 b/test/3": ["a", "b"],
    "training/cat/1 validation/cat/2 evaluation/dog/3": ["cat", "cat", "dog"],
    "train_station/1 train_interior/2 kitchen/3": ["kitchen", "train_interior", "train_station"],
    "labeled/1 blank/2": ["blank", "labeled"],
    "image/1 table/2 extra/3 unlabeled_images/4": ["extra", "image", "table", ""],
    "train/labeled/cat/1 train/labeled/dog/2 train/unlabeled/3 test/cat/4": [
        "cat",
        "dog",
        "",
        "cat",
    ],
    "train/labelled/cat/1 train/unlabelled/cat/3 test/labelled/dog/4": ["cat", "", "dog"],
    "labelled/train/cat/1 labelled/test/dog/2 unlabelled/3": ["cat", "", "dog"],
    "cat/1 cat/@__thumb/2 cat/thumbs/3 dog/1 ~snapshot/4 RECYCLER/5": ["cat", "dog"],
    "x/x/train/cat/1 x/x/train/dog/2 x/train/cat/3 x/train/dog/4": ["cat", "cat", "dog", "dog"],
    "all/cat/1 all/b2/2 cat/3 b2/4": ["b2", "b2", "cat", "cat"],
    "flowers/rose/1 flowers/tulip/2 unlabeled/x/3": ["rose", "tulip", ""],
    "1/1/x 1/2/x 2/1/x 2/2/x": ["1", "1", "2", "2"],
    "pets/cat/1 pets/dog/2 pets/3": ["cat", "dog", ""],
    "photo/001.ak47/1 photo/002.flag/2 art/001.ak47/3 art/002.flag/4": [
        *("001.ak47", "001.ak47", "002.flag", "002.flag")
    ],
}


@pytest.mark.parametrize("names", LAYOUTS)
def test_layouts_of_folders(tmp_path, names):
    put(tmp_path, *(f"{name}.png" for name in names.split()))
    assert label_texts(open_data(tmp_path)) == LAYOUTS[names]


def test_links_inside_the_tree_are_left_out(tmp_path):
    put(tmp_path, "i/cat/1.png", "i/dog/1.png", "i/dog/2.png", "outside/emu/1.png")
    for link, target in {"cat/dog2": "../dog", "a dog": "dog", "cat/2.png": "../dog/2.png"}.items():
        (tmp_path / "i" / link).symlink_to(target)
    for name in ("emu", "ostrich"):
        (tmp_path / "i" / name).symlink_to(tmp_path / "outside/emu")
    data = open_data(tmp_path / "i")
    assert label_texts(data) == ["cat", "cat", "dog", "dog", "emu"]
    assert "cat/dog2 is a link to a folder that is read anyway: left out" in data.notes
    put(tmp_path, "s/dog/1.png", "s/.store/cat/2.png")
    (tmp_path / "s/cat").symlink_to(".store/cat")
    assert label_texts(open_data(tmp_path / "s")) == ["cat", "dog"]


@pytest.mark.parametrize(("folder", "label"), [(".", ""), ("data", "data")])
def test_a_folder_of_images_beside_a_table_is_a_folder(tmp_path, folder, label):
    put(tmp_path / folder, *(f"{i}.png" for i in range(5)))
    labels = save(tmp_path / "labels.csv", "file,label\n0.png,cat\n3.png,dog\n")
    data = open_data(tmp_path)
    assert (label_texts(data), "1 files .csv left out" in data.notes) == ([label] * 5, True)
    assert label_texts(open_data(tmp_path, labels=labels)) == ["cat", "", "", "dog", ""]


# Scale --------------------------------------------------------------------------------------------


@given(st.floats(0.01, 100), st.floats(-5, 5))
def test_another_scale_is_a_warning(factor, shift):
    x = np.abs(X)
    scale, changed = scale_of(x), factor * x + shift
    expected = not 1 / 1.5 <= scale_of(changed)["norm"] / scale["norm"] <= 1.5
    ends = max(abs(scale_of(changed)[end] - scale[end]) for end in ("low", "high"))
    expected |= ends > 0.5 * (scale["high"] - scale["low"])
    assert (scale_warning(scale, scale_of(changed), N) is not None) == expected
    assert scale_warning(scale, scale_of(x[:1]), 1) is None


@pytest.mark.parametrize(
    ("labels", "note"),
    [
        (["cat", "?", "dog"] * 4, "'?' count as classes"),
        (["cat", "test", "dog"] * 4, "'test' count as classes: if they mean none"),
        ([["x", name] for name in CLASSES], "every item has 'x': no result can be wrong"),
        (["species", *["cat"] * 6, *["dog"] * 5], "the first item alone has 'species': is it a"),
        ([["cat", "z"], *[["cat"]] * 6, *[["dog"]] * 5], "the first item alone has 'z': is it a"),
        ([f"caption {i}" for i in range(N)], "12 of 12 classes have one item: are they ids or"),
    ],
)
def test_labels_that_may_be_mistaken_are_noted(labels, note):
    assert any(text.startswith(note) for text in open_data(X, labels=labels).notes)
