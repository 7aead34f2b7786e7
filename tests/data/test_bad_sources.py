"""Every source on what it cannot use: one line that says what, where and what to do, whichever the
form.
"""

import errno
import io
import re
import sys
from unittest.mock import Mock

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from image_files import Items, hub, png, put, refused, save

from gpq_faiss.data.open import FORMS

N = 500
X = np.random.default_rng(0).standard_normal((N, 7)).astype(np.float32) + 3
Y, IDS = np.random.default_rng(1).integers(-1, 4, N), np.arange(N)[::-1]
ROWS = [[0.0, 1.0], [1.0, 0.0]]


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def floats(*rows):
    return {"features": pa.array(rows, pa.list_(pa.float32()))}


VECTORS = [
    ("a.xyz", b"a b", "is empty, has a header line alone"),
    ("a.parquet", b"PAR1" + b"x" * 99, "is not a file of the form parquet"),
    ("a.npy", npy(X)[:-9], "is not a file of the form npy .*truncated"),
    ("a.npy", X[0], r"\[7\]: numbers \[N, width\]"),
    ("a.npy", X[:0], r"\[0, 7\]"),
    ("a.npy", np.array([[{}]], object), "no Python objects"),
    ("a.npy", X.astype(complex), "numbers"),
    ("a.npz", {"a": X, "b": X}, r"which column holds .* .it has a, b.: .*--read vectors"),
    ("a.npz", {"x": X, "labels": Y[:5]}, "has 500 items"),
    ("a.npz", {"x": X, "ids": IDS[:5]}, "has 500 items"),
    ("a.npz", {"x": X, "ids": IDS / 2}, "whole numbers"),
    ("a.npz", {"x": X, "ids": IDS.astype(np.uint64) + 2**63}, "signed 64 bits"),
    ("a.parquet", floats([1, 2], [1, 2], [3]), "2 numbers in row 0, but not in row 2"),
    ("a.parquet", floats([1, 2], None), "2 numbers in row 0, but not in row 1"),
    ("a.parquet", floats([1, None]), "in row 0"),
    ("a.parquet", floats(), r"\[0, 0\]"),
    ("a.parquet", {"features": ROWS, "id": [1, None]}, r"'id': .* \[2\], expected ids: whole"),
]
LABELS = [
    ("l.npy", np.zeros(3, int), "3 labels, features:x.npy has 4 items"),
    ("l.npy", np.array(3), "has no column of a usual name"),
    ("l.npy", np.array([0, 1, 0.5, 0]), "label 0.5 at row 2"),
    ("l.txt", "a\nb\n", "2 labels, features:x.npy has 4 items"),
    ("l.txt", b"\xfa\xfe\n", "saved as UTF-8"),
    ("l.txt", "0\n1\n-5\n2", "label -5"),
    ("l.txt", "x 3\n1\n1\n2", "3 labels, features:x.npy has 4 items"),
    ("l.csv", "0,1\n1,2\n1,1\n0,0", "no column of a usual name .it has '0', '1'"),
    ("l.csv", "Bild;Klasse\n0;a\n1;b\n", "it has 'Bild', 'Klasse'.: name one .* label_column"),
    ("l.csv", "id,label,label\n0,a,b\n1,b,a\n", "names a column twice"),
    ("l.csv", "id;label\n3;cat;x\n", "is not a file of the form csv.*Expected 2 columns, got 3"),
    ("l.csv", 'id,label\n1,"cat\n2,cat\n', "not printable"),
    ("l.csv", "nr,label\n1,cat\n2,emu\n2,dog\n", "no column of a usual name .it has 'nr', 'lab"),
    ("l.csv", "rank,label\n1,a\n0,b\n", "'rank', 'label'.*: name one with --read id_column"),
    (
        "l.csv",
        ",label\n3,a\n0,b\n2,c\n1,d\n",
        "'Unnamed: 0' may number the items, but does not count them in",
    ),
    ("l.json", '{"images": [{"id": 1}], "annotations": []}', "l.json is JSON of COCO.*a file_name"),
    ("l.csv", "id,label\n77,cat\n", "no key of a label in 'id' is .* of one item .it has .'77'"),
    (
        "l.parquet",
        {"title": ["a"], "label": ["cat"]},
        "has no column of a usual name .*--read id_column",
    ),
]
LISTS = [
    ("list:b.txt", "a.png 1 0\n\nb.png 1 0 1\n", "b.txt: .*an item has a number twice"),
    ("list:b.txt", "a.png 1 0\nb.png 1 1\nb.png 1 2\n", "b.txt: .*an item has a number twice"),
    ("list:b.txt", "a.png 5\nb.png -2\n", "label -2"),
    ("list:b.txt", "", "none of its 0 images exists"),
    ("list:b.txt", "a.png\nno.png\n", r"1 of 2 images .*no.png: not found\); .* limit of 1 %"),
    ("csv:b.csv", "image,label\nno.png,x\n", r"none of its 1 images exists .*--read root"),
    ("csv:b.csv", "image,label\n", "has a header line alone"),
    ("csv:b.csv", "p,label\na.png,x\n", "which column holds the vectors. .it has p, label"),
    ("csv:b.csv", "image,id\na.png,9223372036854775808\n", "whole numbers of signed 64 bits"),
    ("webdataset:b.tar", "neither tar nor gzip" * 100, "b.tar cannot be read by datasets"),
    ("folder:b.tar", "", "b.tar is not found, or not a folder: extract it"),
]
OPTIONS = [
    ("no-*.npy", {}, "no file matches"),
    ("features:x.npy", {"keep": "title"}, "x.npy has no column 'title'"),
    ("features:x.npy", {"vectors": ["x", "y"]}, "no column 'x'"),
    ("features:x.npy", {"labels": "no.npy"}, "not found"),
    ("features:x.npy", {"ids": "one.txt"}, "ids.*expected ids"),
    ("features:x.npy", {"names": "x.npy"}, "x.npy has no column of a usual name"),
    ("features:x.npy", {"names": "one.txt"}, "1 name, features:x.npy has 4 items"),
    ("csv:t.csv", {"label_column": "lable"}, r"no column 'lable'.*--read label_column"),
    ("csv:t.csv", {"size": "81"}, "--read size does not apply to csv"),
    ("digits:x", {}, "takes no path"),
    ("digits", {"labels": "y.npy"}, "4 labels, digits has 1,797 items"),
    ("none.parquet", {}, r"\[1\]: numbers \[N, width\] are needed"),
    ("bad.tar.gz", {}, "bad.tar.gz is compressed: extract it"),
    *[
        (spec, {}, f"unknown data.*{re.escape(FORMS)}")
        for spec in ("mnist:x", "", "Digits", "a\nb")
    ],
    *[(form, {}, "needs a path") for form in ("nuswide", "csv:", "hf", "cifar10:")],
    *[
        (f"{form}:no.npy", {}, "no.npy.* not found")
        for form in ("folder", "list", "features", "hf")
    ],
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Four vectors, a folder of images and tables."""
    folder = tmp_path_factory.mktemp("sound")
    put(folder, "a.png", "b.png", "images/a/0.png")
    for name, content in (
        ("x.npy", np.eye(4, 5, dtype=np.float32)),
        ("y.npy", np.arange(4)),
        ("t.csv", "image,label,mark\na.png,x,u\n"),
        ("one.txt", "a.png 1 0\n"),
        ("none.parquet", {"picture": ["a/0.png"], "n": [1]}),
        ("bad.tar.gz", b"\x1f\x8b" + b"x" * 5000),
    ):
        save(folder / name, content)
    return folder


@pytest.fixture
def folder(sound, monkeypatch):
    monkeypatch.chdir(sound)
    return sound


@pytest.mark.parametrize(("name", "content", "message"), VECTORS)
def test_files_of_vectors(folder, name, content, message):
    save(folder / name, content)
    refused(f"features:{name}", f"(?=.*{name}).*{message}")


@pytest.mark.parametrize(("name", "content", "message"), LABELS)
def test_files_of_labels(folder, name, content, message):
    save(folder / name, content)
    refused("features:x.npy", message, labels=name)


@pytest.mark.parametrize(("spec", "content", "message"), LISTS)
def test_lists_and_archives_of_images(folder, spec, content, message):
    save(folder / spec.partition(":")[2], content)
    refused(spec, message)


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.csv"])
def test_what_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch, name):
    denied = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    path = save(tmp_path / name, b"x")
    monkeypatch.setattr("io.open", denied)  # root may read everything
    monkeypatch.setattr("builtins.open", denied)
    refused(str(path), f"cannot read {path}: Permission denied$")


# Objects ------------------------------------------------------------------------------------------

X40, PIXELS = X[:40], np.zeros((40, 8, 8, 3), np.uint8)
HUB = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
PICTURES = hub(HUB, image=[{"bytes": png(i), "path": None} for i in range(3)], label=[0, 1, 0])


def frame(**columns):
    return pd.DataFrame(
        {"id": range(40), "path": [f"p/{i}" for i in range(40)], "label": ["a"] * 40, **columns}
    )


OBJECTS = [
    (frame(), {}, "which column holds the vectors.*it has id, path, label"),
    (
        pd.DataFrame({"image_id": ["a.jpg", "b.jpg"], "cat": [1, 0], "dog": [0.0, 1.0]}),
        {},
        r"which column holds the vectors.*image_column=NAME",
    ),
    (frame(v=list(X40), w=list(X40)), {}, r"which column holds the vectors\? .it has v, w"),
    (
        frame(v=list(X40)),
        {"labels": "kind"},
        r"no column 'kind' .it has 'id', 'path', 'label', 'v'",
    ),
    (frame(v=list(X40)), {"vectors": "path"}, "numbers .N, width. are needed"),
    (frame(v=list(X40)), {"vectors": ["v", "id"]}, "which column holds the vectors"),
    (frame(v=list(X40)), {"ids": "path"}, r"'path': .* \[40\], expected ids: whole numbers"),
    (frame(v=[x[: 1 + i % 2] for i, x in enumerate(X40)]), {}, "'v' has 1 numbers in row 0, but"),
    (frame(v=[[1, "a"]] * 40), {}, "a column that cannot be converted"),
    (X40, {"labels": Y[:5]}, "5 labels, array has 40 items"),
    (X40, {"labels": pd.Series(["a"] * 90)[::2]}, "has the id 40 in 'index', but"),
    *[
        (X40, {"labels": labels}, "index.*' may number the items, .*labels.to_numpy")
        for labels in (
            pd.Series(range(40)).sample(frac=1.0),
            pd.DataFrame({"label": range(40)}).sample(frac=1.0),
        )
    ],
    (X40, {"labels": 3}, "int is not a list of labels"),
    (X40, {"names": ["a"]}, "1 name, array has 40 items"),
    (X40, {"names": dict.fromkeys(range(40), "a")}, "names in a dict have no order"),
    (X40, {"ids": dict(enumerate(range(40)))}, "expected ids"),
    (X40, {"ids": IDS[:40] / 2}, r"ids: float64 \[40\], expected ids"),
    (X40, {"ids": np.arange(2**24, 2**24 + 40, dtype=np.float32)}, r"ids: float32 \[40\]"),
    (X40, {"ids": np.ones(40, bool)}, r"ids: bool \[40\], expected"),
    (X40[0], {}, r"array is float32 \[7\]"),
    *[
        (images, {}, "or brightest pixels: float64 .* expected uint8, or floats from 0 to 1")
        for images in (PIXELS + 255.5, PIXELS + np.arange(40.0).reshape(-1, 1, 1, 1))
    ],
    (Items([]), {}, "Items is empty, or not read as items"),
    (Items([{"image": {}}]), {}, "item 0: dict of object is not an array of numbers, nor an image"),
    (3, {}, "int is empty, or not read as items"),
    ((X40, [0] * 40), {}, "tuple is empty, or not read as items: .* labels are given as labels="),
    (PICTURES, {"image_column": "picture"}, "has no column 'picture' .*--read image_column"),
    (PICTURES, {"vectors": "image"}, "numbers .N, width. are needed"),
    (PICTURES.to_iterable_dataset(), {}, "is a stream, or has a transform"),
    (hub(v=[["a"], ["b"]]), {}, "which column holds the vectors"),
]


@pytest.mark.parametrize(("source", "options", "message"), [*OPTIONS, *OBJECTS])
@pytest.mark.usefixtures("folder")
def test_objects_and_options(source, options, message):
    refused(source, message, **options)


def test_hub_folders(tmp_path, monkeypatch):
    PICTURES.save_to_disk(str(tmp_path / "cut"))
    (arrow,) = (tmp_path / "cut").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:100])
    refused(f"hf:{tmp_path}/cut", "cut cannot be read by datasets")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(f"hf:{tmp_path}/cut", "needs the package datasets: pip install 'gpq-faiss.train.'")
