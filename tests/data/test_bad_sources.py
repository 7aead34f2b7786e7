"""Every source on what it cannot use: one line that says what, where and what to do, whichever the
form.
"""

import errno
import gzip
import io
import json
import os
import pickle
import re
import sys
import tarfile
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_files import Items, hub, png, put, raw_tar, refused, save
from torch.utils.data import IterableDataset

from gpq_faiss.data.open import FORMS, open_data

N = 500
X = np.random.default_rng(0).standard_normal((N, 7)).astype(np.float32) + 3
Y, IDS = np.random.default_rng(1).integers(-1, 4, N), np.arange(N)[::-1]
ROWS = [[0.0, 1.0], [1.0, 0.0]]


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def tar(name, kind=tarfile.REGTYPE, data: bytes = png(0)):
    return raw_tar((name, kind, data))


def contradictory():
    """A Parquet file whose column may have missing values by its schema, and none by the statistics
    of its levels. Their reader ends the process, where that of values raises."""
    out = io.BytesIO()
    pq.write_table(pa.table({"id": [0], "label": ["cat"]}), out)
    return out.getvalue().replace(b"\x25\x02\x18\x02id", b"\x25\x00\x18\x02id")


def floats(*rows):
    return {"features": pa.array(rows, pa.list_(pa.float32()))}


FORM_OF = {"txt": "list", "csv": "csv", "parquet": "parquet"}


def named(name, why):
    """The refusal names the file, and says why."""
    return f"(?s)(?=.*{re.escape(name)})(?=.*({why}))"


VECTORS = [
    ("a.xyz", b"1 2", "is empty, or has one line"),
    ("a.parquet", b"PAR1" + b"x" * 99, "is not a file of the form parquet"),
    ("a.npy", npy(X) + b"x", "truncated or damaged: .*its array ends at"),
    ("a.npy", b"\x93NUMPY" + pickle.dumps([1]), "is not a .npy array"),
    ("a.npy", X[0], r"\[7\]: numbers \[N, width\]"),
    ("a.npy", X[:0], r"\[0, 7\]"),
    ("a.npy", np.array([[{}]], object), "Python objects"),
    ("a.npy", X.astype(complex), "numbers"),
    (
        "a.npz",
        {"a": X, "b": X},
        r"which column holds the vectors\? .it has a, b.: name them with --read vectors",
    ),
    ("a.npz", {"x": X, "labels": Y[:5]}, "5 labels"),
    ("a.npz", {"x": X, "ids": IDS[:5]}, "5 ids"),
    ("a.npz", {"x": X, "ids": IDS / 2}, "whole numbers"),
    ("a.npz", {"x": X, "ids": IDS.astype(np.uint64) + 2**63}, "signed 64 bits"),
    ("a.parquet", floats([1, 2], [1, 2], [3]), "1 numbers at row 2"),
    ("a.parquet", floats([1, 2], None), "0 numbers at row 1, 2 elsewhere"),
    ("a.parquet", floats([1, None]), "missing numbers"),
    ("a.parquet", floats(), "has no rows"),
    ("a.parquet", {"features": ROWS, "id": [1, None]}, r"'id': .* \[2\], expected ids: whole"),
]
LABELS = [
    ("l.npy", np.zeros(3, int), "3 labels, the data has 4 items"),
    ("l.npy", np.array(3), "has no column of a usual name"),
    ("l.npy", np.array([0, 1, 0.5, 0]), "row 2 are not whole"),
    ("l.txt", "a\nb\n", "2 lines"),
    ("l.txt", "", "0 lines"),
    ("l.txt", "\n\n\n\n", "no item has a label"),
    ("l.txt", b"\xfa\xfe\n", "saved as UTF-8"),
    ("l.txt", "0\n1\n-5\n2", "label -5"),
    ("l.txt", "0 3\n1\n1\n2", "header .'0 3'. and 3 labels for 4 items"),
    ("l.csv", "0,1\n1,2\n1,1\n0,0", "no column of a usual name .it has '0', '1'"),
    (
        "l.csv",
        "Bild;Klasse\n0;a\n1;b\n2;a\n3;b\n",
        "it has 'Bild', 'Klasse'.: name one with --read label_column",
    ),
    ("l.csv", "id,label,label\n0,a,b\n1,b,a\n", "has the column 'label' twice"),
    ("l.csv", "id;label\n3;cat;x\n", "is not CSV with 2 columns: .*got 3"),
    ("l.csv", 'id,label\n1,"cat\n2,cat\n', "is not a printable name"),
    ("l.csv", "id,label\n1,cat\n1,dog\n", "'1' occurs more than once"),
    (
        "l.csv",
        "id,label\n77,cat\n",
        "no key of a label in 'id' is an id or name of the data .it has .'77'",
    ),
    (
        "l.parquet",
        {"title": ["a"], "label": ["cat"]},
        "has no column 'id' .it has 'title', 'label'.: name one with --read id_column",
    ),
    ("l.parquet", contradictory(), "truncated or damaged.*histogram size mismatch"),
]
LISTS = [
    ("bad.txt", "a.png 1 0\n\nb.png 1 0 1\n", "line 3: 2 labels"),
    ("bad.txt", "a.png 1 0\nb.png 1 2\n", "line 2: 2 labels"),
    ("bad.txt", "a.png 5\nb.png\n", "line 2: one class number"),
    ("bad.txt", "a.png 5\nb.png -2\n", "label -2 at row 1"),
    ("bad.txt", "a.png 5\nb.png 99999999999999999999\n", "line 2: one class number"),
    ("bad.txt", "a.png 5\nb.png 4000000\n", "out of range"),
    ("bad.txt", "", "is empty"),
    ("bad.txt", "a.png 1 0\n\0\n", "of no known form"),
    (
        "bad.txt",
        "a.png\nno.png\n",
        r"1 of 2 images cannot be read \(.*no.png: not found\); .* limit of 1 %",
    ),
    (
        "bad.csv",
        "image,label\nno.png,x\nnor.png,y\n",
        r"none of its 2 images exists \(.*no.png, for one\): .*--read root",
    ),
    ("bad.csv", "", "is empty"),
    ("bad.csv", "image,label\n", "has one line"),
    ("bad.csv", "p,label\na.png,x\n", "no column 'image' .* 'p', 'label'.*--read image_column"),
    ("bad.csv", "image,label\n,x\n", "no column 'image'|no path in row 0 of column 'image'"),
    ("bad.csv", "image,id\na.png,9223372036854775808\n", "whole numbers of 64 bits"),
    ("bad.parquet", {"image": [1, 2]}, "no column 'image'|none of its 2 images"),
    ("bad.parquet", {"image": ["a.png", None]}, "no path in row 1"),
]
ARCHIVES = [
    *[
        (tar("a/x.png", k, b""), "no images")
        for k in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)
    ],
    (tar("a/x.png", data=bytes(3000))[:2000], "truncated"),
    (b"", "not a tar"),
    (b"neither tar nor gzip" * 100, "not a tar"),
    (gzip.compress(tar("a/x.png"))[:-30], "not a tar"),
    (gzip.compress(tar("readme.md")), "no images"),
]
GIVEN = [
    ("no-*.npy", {}, "no file matches"),
    ("features:x.npy", {"keep": "title"}, "x.npy has no column 'title'"),
    ("features:x.npy", {"vectors": ["x", "y"]}, "no column 'x'"),
    ("features:x.npy", {"labels": "no.npy"}, "not found"),
    ("features:C:/x.npy", {}, "C:/x.npy not found"),
    ("features:x.npy", {"ids": "one.txt"}, "ids.*expected ids"),
    ("features:x.npy", {"names": "one.txt"}, "1 name, features:x.npy has 4 items"),
    ("webdataset:x-{3..1}.tar", {}, "no file matches"),
    ("csv:t.csv", {"label_column": "lable"}, r"no column 'lable'.*--read label_column"),
    ("csv:t.csv", {"keep": "price"}, "no column 'price'"),
    ("csv:t.csv", {"keep": "mark,mark"}, "each once"),
    ("csv:t.csv", {"concepts": "81"}, "--read concepts does not apply to csv: it is for nuswide"),
    ("digits:x", {}, "takes no path"),
    ("digits", {"labels": "y.npy"}, "4 labels, the data has 1,797 items"),
    ("digits", {"max_bad": float("nan")}, "give a fraction"),
    ("folder:a\0b", {}, "is not a path"),
    ("none.parquet", {}, "it has picture, n.*--read vectors"),
    ("images/a/0.png", {}, "is an image: images are read by folder:DIR"),
    ("no/where", {}, "no/where not found"),
    ("bad.tar.gz", {}, "bad.tar.gz is not a tar archive"),
    *[(spec, {}, f"unknown data.*{re.escape(FORMS)}") for spec in ("mnist:x", "", "Digits", "no\nsuch", "a\0b")],
    *[(form, {}, "lacks its path") for form in ("nuswide", "csv:", "hf", "features:", "cifar10:")],
    *[(f"{form}:no.npy", {}, "no.npy not found") for form in ("folder", "list", "features", "hf")],
]  # fmt: skip


CASES = [  # what to write, and to open, and what the refusal says
    *[(name, content, f"features:{name}", {}, named(name, why)) for name, content, why in VECTORS],
    *[
        (name, content, "features:x.npy", {"labels": name}, named(name, why))
        for name, content, why in LABELS
    ],
    *[(name, content, f"{FORM_OF[name[4:]]}:{name}", {}, why) for name, content, why in LISTS],
    *[
        ("bad.tar", c, f"{form}:bad.tar", {}, f"bad.tar.*{why}")
        for c, why in ARCHIVES
        for form in ("folder", "webdataset")
    ],
    *[("bad.tar.gz", b"\x1f\x8b" + b"x" * 5000, *given) for given in GIVEN],
]


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
        ("both.parquet", {"image": ["a/0.png"], "emb": [[1.0, 0.0]]}),
        ("none.parquet", {"picture": ["a/0.png"], "n": [1]}),
    ):
        save(folder / name, content)
    return folder


@pytest.mark.parametrize(("name", "content", "spec", "options", "why"), CASES)
@pytest.mark.filterwarnings("error")
def test_files_and_options(sound, monkeypatch, name, content, spec, options, why):
    monkeypatch.chdir(sound)
    save(sound / name, content)
    before = sorted(sound.rglob("*"))
    refused(spec, why, **options)
    assert sorted(sound.rglob("*")) == before, "nothing is extracted"
    (sound / name).unlink()


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.csv"])
def test_what_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch, name):
    def denied(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    save(tmp_path / name, b"x")
    monkeypatch.setattr("io.open", denied)  # root may read everything
    monkeypatch.setattr("builtins.open", denied)
    refused(str(tmp_path / name), f"cannot read {tmp_path / name}: Permission denied$")


def test_what_is_no_regular_file_is_missing(tmp_path):
    put(tmp_path, "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    found = open_data(save(tmp_path / "l.txt", "pipe.png\na.png\n"), max_bad=1.0)
    assert [image is None for image in found.read(slice(None))] == [True, False]


# Objects ------------------------------------------------------------------------------------------

X40, PIXELS = X[:40], np.zeros((40, 8, 8, 3), np.uint8)
HUB = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
PICTURES = hub(HUB, image=[{"bytes": png(i), "path": None} for i in range(3)], label=[0, 1, 0])


def frame(**more):
    return pd.DataFrame(
        {"id": range(40), "path": [f"p/{i}" for i in range(40)], "label": ["a"] * 40, **more}
    )


class Changing(Items):
    def __getitem__(self, i):
        return np.random.default_rng().integers(0, 256, (8, 8, 3), dtype=np.uint8), 0


class Stream(IterableDataset[Any]):
    def __iter__(self):
        yield from X


OBJECTS = [
    (frame(), {}, "which column holds the vectors.*it has id, path, label"),
    (frame(v=list(X40), w=list(X40)), {}, r"which column holds the vectors\? .it has v, w"),
    (
        frame(v=list(X40)),
        {"labels": "kind"},
        r"no column 'kind' \(it has 'id', 'path', 'label', 'v'\)",
    ),
    (frame(v=list(X40)), {"vectors": "path"}, "'path': not vectors of numbers"),
    (frame(v=list(X40)), {"vectors": ["v", "id"]}, "'v', 'id': not vectors of numbers"),
    (frame(v=list(X40)), {"ids": "path"}, r"'path': .* \[40\], expected ids: whole numbers"),
    (frame(v=[x[: 1 + i % 2] for i, x in enumerate(X40)]), {}, "'v' has 2 numbers at rows 1, 3"),
    (frame(v=[None, *X40[1:]]), {}, "'v' has 0 numbers at row 0, which is no vector"),
    (frame(v=[[1, "a"]] * 40), {}, "a column that cannot be converted"),
    (frame(v=list(X40)), {"root": "x"}, "--read root does not apply to a table"),
    (frame(v=list(X40)), {"labels": "label", "label_column": "x"}, "give one"),
    (X40, {"labels": Y[:5]}, "5 labels, the data has 40 items"),
    (X40, {"labels": 3}, "labels: int is not a list of labels|int is not a list of labels"),
    (X40, {"names": ["a"]}, "1 name, array has 40 items"),
    (X40, {"ids": IDS[:5]}, "5 ids, array has 40 items"),
    (X40, {"ids": IDS[:40] / 2}, r"ids: float64 \[40\], expected ids"),
    (X40[0], {}, r"array is float32 \[7\]"),
    (PIXELS / 255, {}, "images are uint8"),
    (Items([]), {}, "Items has no items"),
    (Items([{"image": 1}]), {}, "item 0: dict is not an array of numbers, nor an image"),
    (Changing([0] * 9), {}, "differs at each read"),
    (Stream(), {}, "Stream has no access by index"),
    (3, {}, "int has no access by index"),
    (PICTURES, {"image_column": "picture"}, "--read image_column=picture: no column of images"),
    (PICTURES, {"vectors": "image"}, "'image': not vectors of numbers"),
    (PICTURES, {"keep": "url"}, "no column 'url'"),
    (PICTURES.to_iterable_dataset(), {}, "cannot be read by position"),
    (hub(v=[[1.0], [1.0, 2.0]]), {}, "'v' has 2 numbers at row 1, 1 elsewhere"),
    (hub(v=[["a"], ["b"]]), {}, "vectors of numbers are needed"),
    (hub(v=[]), {}, "which column holds|has no rows"),
]


@pytest.mark.parametrize(("source", "options", "why"), OBJECTS)
def test_objects(source, options, why):
    refused(source, why, **options)


def test_hub_folders(tmp_path, monkeypatch):
    PICTURES.save_to_disk(str(tmp_path / "cut"))
    (tmp_path / "empty").mkdir()
    (arrow,) = (tmp_path / "cut").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:100])
    for name in ("empty", "cut"):
        refused(
            f"hf:{tmp_path}/{name}", "is not a data set that save_to_disk wrote, or it is damaged"
        )
    put(tmp_path, "secret.png")
    rows = {"image": [{"bytes": None, "path": str(tmp_path / "secret.png")}] * 3}
    hub(**rows).save_to_disk(str(tmp_path / "hub"))
    about = tmp_path / "hub" / "dataset_info.json"
    about.write_text(
        json.dumps(json.loads(about.read_text()) | {"features": {"image": {"_type": "Image"}}})
    )
    # A path in a folder from elsewhere is not opened.
    refused(f"hf:{tmp_path}/hub", "there is no image in this row|is not a data set")
    held = hub({"image": datasets.Image()}, image=[str(tmp_path / "secret.png")])
    assert open_data(held).read(slice(None))[0] is not None
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(f"hf:{tmp_path}/hub", "needs the package datasets: pip install 'gpq-faiss.train.'")
