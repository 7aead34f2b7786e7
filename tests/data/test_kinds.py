"""Data as people have it: labels, ids, columns, files and folders in any usual form are understood,
or named in one line.
"""

import io
import json
import pickle
import zipfile

import datasets
import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_files import png, put, refused, save, shard
from torch.utils.data import ConcatDataset, Subset, random_split
from torchvision.datasets import ImageFolder

from gpq_faiss.data.base import scale_of, scale_warning
from gpq_faiss.data.images import decode_image
from gpq_faiss.data.labels import labels_of
from gpq_faiss.data.open import open_data

N = 12
X = np.random.default_rng(0).standard_normal((N, 8)).astype(np.float32) + 2
Y = np.arange(N) % 3
CLASSES = [f"c{y}" for y in Y]
HOT = np.eye(3, dtype=int)[Y]


def classes(dataset):
    """The labels of each item in one text."""
    names = dataset.labels.class_names
    return [" ".join(names[c] for c in np.flatnonzero(row)) for row in dataset.labels.dense()]


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
    "written lists": lambda hot: [str(row.tolist()) for row in hot],
    "written arrays": lambda hot: [str(row.astype(float)) for row in hot],
    "Arrow": lambda hot: pa.array(hot.tolist()),
    "Series": lambda hot: pd.Series(hot.tolist()),
    "array": np.asarray,
}


@given(st.integers(2, 9), st.sampled_from(sorted(HOT_FORMS)), st.randoms(use_true_random=False))
def test_rows_of_zeros_and_ones_are_multi_hot(width, form, random):
    hot = np.array([[random.randint(0, 1) for _ in range(width)] for _ in range(5)])
    hot[0, 0] = 1
    np.testing.assert_array_equal(labels_of(HOT_FORMS[form](hot), "").dense(dtype=int), hot)


@given(
    st.permutations(range(N)), st.sampled_from([dict, pd.Series, pd.DataFrame, "texts", "floats"])
)
def test_labels_by_id_are_matched(order, form):
    keys, values = list(order), [CLASSES[i] for i in order]
    if form is pd.DataFrame:
        labels = pd.DataFrame({"image_id": keys, "category": values})
    elif form is pd.Series:
        labels = pd.Series(values, index=keys)
    else:
        labels = {
            {"texts": str, "floats": float}.get(form, int)(k): v
            for k, v in zip(keys, values, strict=True)
        }
    assert classes(open_data(X, labels=labels)) == CLASSES


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([{"z", name} for name in CLASSES], [f"{name} z" for name in CLASSES]),
        (np.array(CLASSES, "S"), CLASSES),
        ([name.encode() for name in CLASSES], CLASSES),
        (np.where(Y == 2, np.nan, Y), ["0", "1", ""] * 4),
        (["1.0", "0", "N/A"] * 4, ["1", "0", ""] * 4),
        (pd.Series([pd.NA, "a", "b"] * 4), ["", "a", "b"] * 4),
        ({3: "a"}, ["", "", "", "a", *[""] * 8]),
    ],
)
def test_values_of_labels(labels, expected):
    assert classes(open_data(X, labels=labels)) == expected


def test_words_for_missing_labels_are_noted():
    data = open_data(X, labels=["cat", "?", "dog"] * 4)
    assert any(note.startswith("'?' count as classes") for note in data.notes)


def test_log_says_what_was_understood(folder, caplog):
    save(
        folder / "labels.csv", "image_id,category\n" + "".join(f"{i},k{i % 2}\n" for i in range(6))
    )
    with caplog.at_level("INFO", logger="gpq_faiss"):
        open_data("x.npy", labels="labels.csv")
    first, second = [record.getMessage() for record in caplog.records][:2]
    assert first.endswith(
        "labels.csv: 6 of 12 items labelled, 2 classes, matched by id in 'image_id'"
    )
    assert second.endswith("items of each class: k0 3, k1 3")


def test_classes_of_one_item_are_noted():
    data = open_data(X, labels=[f"caption {i}" for i in range(N)])
    assert "12 of 12 classes have one item: are they ids or captions?" in data.notes


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
    "t.jsonl": lambda path, a, b: save(
        path, "\n".join(json.dumps({a: i, b: c}) for i, c in enumerate(CLASSES))
    ),
    "t.h5": lambda path, a, b: save(path, {a: np.arange(N), b: np.array(CLASSES, "S")}),
    "t.npz": lambda path, a, b: save(path, {a: np.arange(N), b: np.array(CLASSES)}),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_labels_by_usual_and_by_named_columns(folder, name):
    TABLES[name](folder / name, "Image ID", "Class_Name")
    assert classes(open_data("x.npy", labels=name)) == CLASSES
    TABLES[name](folder / name, "nr", "art")
    named = open_data("x.npy", labels=name, id_column="nr", label_column="art")
    assert classes(named) == CLASSES
    refused("x.npy", "it has 'art', 'nr'|it has 'nr', 'art'", labels=name)


def test_names_match_without_folder_and_ending(folder):
    put(folder, "q/cat/0001.png", "q/dog/0002.png")
    for form, key in (("file name", "{}.png"), ("name without ending", "{}")):
        rows = "".join(
            f"{key.format(name)},{label}\n" for name, label in (("0002", "y"), ("0001", "x"))
        )
        data = open_data("q", labels=save(folder / "q.csv", f"image_id,category\n{rows}"))
        assert (classes(data), form in data.notes[0]) == (["x", "y"], True)


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


def test_series_of_other_rows_is_refused():
    refused(X, "has the id 12 in its keys", labels=pd.Series(CLASSES * 2)[::2])


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
    "a.safetensors": (b"x", "is a .safetensors file: save it as"),
    "a.mat": (b"MATLAB 5.0", "is a MATLAB file: save its arrays"),
    "a.bin": (bytes(100), "is a .bin file: save it as"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_forms_that_are_not_read_are_named(folder, name):
    content, message = FOREIGN[name]
    save(folder / name, content)
    refused("x.npy", message, labels=name)
    refused(f"features:{name}", message)


def fvecs(path):
    np.concatenate([np.full((N, 1), 8, "<i4").view("<f4"), X], axis=1).tofile(path)


MORE_VECTORS = {
    "v.fvecs": fvecs,
    "v.feather": lambda path: pa.feather.write_feather(pa.table({"v": list(X)}), path),
    "v.csv": lambda path: pd.DataFrame(X).add_prefix("f").to_csv(path),
    "bare.csv": lambda path: np.savetxt(path, X, delimiter=","),
    "v.parquet": lambda path: save(path, {f"d{i}": X[:, i] for i in (*range(4, 8), *range(4))}),
    "price.parquet": lambda path: save(path, {**{f"f{i}": X[:, i] for i in range(8)}, "price": Y}),
}


@pytest.mark.parametrize("name", MORE_VECTORS)
def test_more_files_of_vectors(folder, name):
    MORE_VECTORS[name](folder / name)
    data = open_data(name)
    np.testing.assert_allclose(data.read(slice(None)), X, rtol=1e-6)
    if name == "price.parquet":
        assert "vectors are the 8 columns 'f0' to 'f7'" in data.notes


def test_patterns_choose_columns_of_vectors(folder):
    save(folder / "t.parquet", {f"{c}{i}": X[:, i] for c in "ab" for i in range(8)})
    refused("t.parquet", "which column holds the vectors")
    assert open_data("t.parquet", vectors="b*").width == 8


def test_row_groups_are_read_in_any_order(folder):
    pa.parquet.write_table(
        pa.table({"v": list(X), "label": CLASSES}), "g.parquet", row_group_size=5
    )
    data, rows = open_data("g.parquet"), np.array([11, 0, 6, 4, 0])
    np.testing.assert_array_equal(data.read(rows), X[rows])


def test_labels_are_read_before_vectors(folder, monkeypatch):
    save(folder / "z.npz", {"x": np.zeros((4, 3)), "labels": np.full(4, -1)})
    save(folder / "z.parquet", {"x": [[0.0, 0.0]] * 40, "label": [None] * 40})
    for name in ("z.npz", "z.parquet"):
        refused_ = open_data(name)
        monkeypatch.setattr(type(refused_), "read", None)
        with pytest.raises(Exception, match="no item has a label"):
            refused_.require_labels()


def test_folders_of_embeddings_are_one_set(folder):
    for k in range(2):
        rows = slice(6 * k, 6 * k + 6)
        save(folder / f"c/img_emb/img_emb_{k}.npy", X[rows])
        metadata = {"image_path": [f"p/{k}-{i}.jpg" for i in range(6)], "label": CLASSES[rows]}
        save(folder / f"c/metadata/metadata_{k}.parquet", metadata)
        save(folder / f"f/part-{k}.parquet", {"embedding": list(X[rows]), "id": np.arange(N)[rows]})
    for data in (open_data("c"), open_data("c/img_emb/*.npy", labels="c/metadata/*.parquet")):
        np.testing.assert_array_equal(data.read(slice(None)), X)
        assert (classes(data), data.texts["name"][7]) == (CLASSES, "p/1-1.jpg")
    np.testing.assert_array_equal(open_data("f").read(slice(None)), X)


def test_images_in_parquet_and_in_clones_of_hubs(folder):
    columns = {"image": [png(i) for i in range(4)], "label": ["a", "b"] * 2}
    save(folder / "i.parquet", columns)
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image(decode=False))
    (folder / "clone/data").mkdir(parents=True)
    rows.to_parquet("clone/data/train-00000-of-00001.parquet")
    for data in (open_data("i.parquet"), open_data("clone")):
        assert (classes(data), data.read(slice(0, 1))[0].shape) == (["a", "b"] * 2, (4, 4, 3))


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


def test_labels_and_images_of_shards(folder):
    for texts in (
        {"json": '{"label": I}'},
        {"cls": "I"},
        {"json": '{"x": {"y": 1}, "class": "I"}'},
    ):
        for source in (samples(folder, **texts), "a.tar"):
            data = open_data(source)
            assert classes(data) == list("012345")
            np.testing.assert_array_equal(data.read(slice(3, 4))[0], decode_image(png(3)))


def test_archives_of_folders_are_refused_with_the_remedy(folder):
    shard(folder / "f.tar", {f"c{i % 2}/{i}.png": png(i) for i in range(6)})
    refused("f.tar", "extract it, and give the folder")
    refused("folder:f.tar", "extract it, and give the folder")


# Objects ------------------------------------------------------------------------------------------


def test_vectors_in_objects(folder):
    with h5py.File("a.h5", "w") as h5:
        h5["v"] = X
        sources = [h5["v"], list(X), X.tolist(), torch.tensor(X), list(torch.tensor(X))]
        for source in sources:
            np.testing.assert_array_equal(open_data(source).read(np.array([9, 2, 9])), X[[9, 2, 9]])
    assert open_data(torch.tensor(X).bfloat16()).width == 8


def test_parts_of_torch_data_sets_keep_class_names(folder):
    put(folder / "i", *(f"{c}/{k}.png" for c in ("cat", "dog") for k in range(5)))
    images = ImageFolder("i")
    for source in (
        Subset(images, [0, 3, 7]),
        random_split(images, [5, 5])[0],
        ConcatDataset([images, images]),
    ):
        assert open_data(source).labels.class_names == ("cat", "dog")
    assert classes(open_data(Subset(Subset(images, range(8)), [1, 6]))) == ["cat", "dog"]


# Folders ------------------------------------------------------------------------------------------

LAYOUTS = {
    "cat/1 cat/@eaDir/1.png/t dog/1 __MACOSX/cat/1 $RECYCLE.BIN/q": ["cat", "dog"],
    "images/cat/1 images/dog/2 annotations/cat/1": ["cat", "dog"],
    "train/a/images/1 train/b/images/2 val/images/v": ["a", "b", ""],
    "images/1 cat/1 dog/1": ["cat", "dog", ""],
    "train/cat/1 val/dog/1 unlabeled/9": ["cat", "", "dog"],
    "train/cat/1 train/dog/2 val/cat/1 raw/8": ["cat", "dog", "", "cat"],
    "photo/cat/1 photo/dog/1 sketch/cat/1 sketch/dog/2": ["cat", "cat", "dog", "dog"],
    "Latin/character01/1 Greek/character01/2": ["Greek", "Latin"],
}


@pytest.mark.parametrize("names", LAYOUTS)
def test_layouts_of_folders(tmp_path, names):
    put(tmp_path, *(f"{name}.png" for name in names.split()))
    assert classes(open_data(tmp_path)) == LAYOUTS[names]


def test_links_inside_the_tree_are_left_out(tmp_path):
    put(tmp_path / "i", "cat/1.png", "dog/1.png", "dog/2.png")
    put(tmp_path / "outside", "emu/1.png")
    (tmp_path / "i/cat/dog2").symlink_to("../dog")
    (tmp_path / "i/emu").symlink_to(tmp_path / "outside/emu")
    (tmp_path / "i/ostrich").symlink_to(tmp_path / "outside/emu")
    data = open_data(tmp_path / "i")
    assert classes(data) == ["cat", "dog", "dog", "emu"]
    assert "cat/dog2 is a link to a folder that is read anyway: left out" in data.notes


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
