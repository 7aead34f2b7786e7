"""Every source on what it cannot use: one line that says what, where and what to do, whichever the form."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from image_files import Items, png, put, raw_tar, save
from torch.utils.data import IterableDataset

from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError, UsageError

N, W = 500, 7
X = np.random.default_rng(0).standard_normal((N, W)).astype(np.float32) + 3
Y = np.random.default_rng(1).integers(-1, 4, N)
IDS = np.random.default_rng(2).permutation(10_000)[:N]
ROWS = [[0.0, 1.0], [1.0, 0.0]]


def header_only(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    """A .npy that claims a shape and holds nothing."""
    out = io.BytesIO()
    about = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, about)  # type: ignore[arg-type]
    return out.getvalue()


def tar(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = png(0)) -> bytes:
    return raw_tar((name, kind, data))


def whole(suffix: str) -> Any:
    """Sound content of a file of vectors."""
    columns = {"features": list(X), "label": [None if y < 0 else int(y) for y in Y], "id": IDS}
    return X if suffix == ".npy" else columns if suffix == ".parquet" else {"x": X, "labels": Y, "ids": IDS}


def floats(*rows: Any) -> dict[str, Any]:
    return {"features": pa.array(rows, pa.list_(pa.float32()))}


VECTORS: list[tuple[str, Any, str]] = [
    ("a.xyz", b"1 2", "not from .xyz"),
    *[(f"a{s}", b"", "empty") for s in (".npy", ".npz", ".h5", ".parquet")],
    *[(f"a{s}", b"hello world " * 50, "not an? ") for s in (".npy", ".npz", ".h5", ".parquet")],
    ("a.npy", header_only((10**12, 512)), "truncated"),
    ("a.npy", b"PK\3\4" + b"x" * 99, "is not a .npy array"),
    ("a.npy", b"\x93NUMPY" + pickle.dumps([1]), "is not a .npy array"),
    ("a.npy", X[0], r"\[7\]: numbers \[N, width\]"),
    ("a.npy", X[:0], r"\[0, 7\]"),
    ("a.npy", X[:, :0], r"\[500, 0\]"),
    ("a.npy", np.array([[{}]], object), "Python objects"),
    ("a.npy", np.array([["a"]]), "numbers"),
    ("a.npy", X.astype(complex), "numbers"),
    ("a.npz", {"a": X, "b": X}, r"which column holds the vectors\? .there are: a, b"),
    ("a.npz", {"x": X, "labels": Y[:5]}, "5 labels"),
    ("a.npz", {"x": X, "labels": Y - 5}, "label -"),
    ("a.npz", {"x": X, "ids": IDS[:5]}, "5 ids"),
    ("a.npz", {"x": X, "ids": IDS / 2}, "whole numbers"),
    ("a.npz", {"x": X, "ids": IDS.astype(np.uint64) + 2**63}, "signed 64 bits"),
    ("a.h5", {"other": X}, "no column of vectors .it has no array of a usual name"),
    ("a.h5", {"x": "hello"}, "not an array of numbers"),
    ("a.h5", {"x": X[0]}, "numbers"),
    ("a.h5", {"x": X, "y": Y[:3]}, "3 labels"),
    ("a.parquet", floats([1, 2], [1, 2], [3]), "1 numbers at row 2"),
    ("a.parquet", floats([1, 2], None), "no vector at row 1"),
    ("a.parquet", floats([1, None]), "missing numbers"),
    ("a.parquet", floats(), r"\[0, 0\]"),
    ("a.parquet", {"a": ROWS, "b": ROWS}, "which column holds the vectors"),
    ("a.parquet", {"features": ROWS, "id": [1, None]}, r"ids are float64 \[2\], not whole"),
    ("a.parquet", {"features": ROWS, "id": [1.0, 2.0]}, "ids are float64"),
]
LABELS: list[tuple[str, Any, str]] = [
    ("l.npy", np.zeros(3, int), "3 labels, the data has 4 items"),
    ("l.npy", np.array(3), "not a list of labels|needed"),
    ("l.npy", np.array([0, 1, 2, 70_000]), "at most 65,535"),
    ("l.npy", np.array([0, 1, -7, 0]), "label -7 at row 2"),
    ("l.npy", np.array([0, 1, 0.5, 0]), "row 2 are not whole"),
    ("l.npy", np.full((4, 2), 2), "other than 0 and 1"),
    ("l.npy", np.array(["a"] * 4, object), "Python objects"),
    ("l.npy", header_only((10**15,), "<i8"), "truncated"),
    ("l.txt", "a\nb\n", "2 lines"),
    ("l.txt", "", "0 lines"),
    ("l.txt", "\n\n\n\n", "no item has a label"),
    ("l.txt", b"\xfa\xfe\n", "not UTF-8 text"),
    ("l.txt", "0\n1\n-5\n2", "label -5"),
    ("l.txt", "0 3\n1\n1\n2", "several columns"),
    ("l.csv", "0,1\n1\n1,1\n0,0", "several columns"),
    ("l.csv", "0,1\n1,2\n1,1\n0,0", "several columns"),
    ("l.csv", "Bild;Klasse\n0;a\n1;b\n2;a\n3;b\n", "a table with a column of ids or names"),
    ("l.csv", "id,label,label\n0,a,b\n1,b,a\n", "has the column 'label' twice"),
    ("l.csv", "id;label;id\n0;a;0\n", "has the column 'id' twice"),
    ("l.csv", "id;label\n3;cat;x\n", "line 2 is not CSV: 3 fields, the header has 2"),
    ("l.csv", b"id,label\n1,cat\n2,d\xff\n", "is not UTF-8 text"),
    ("l.csv", 'id,label\n1,"cat\n', "is not CSV"),
    ("l.csv", "id,label\n", "no value of the column"),
    ("l.csv", "id,label\n1,cat\n1,dog\n", "'1' occurs more than once"),
    ("l.csv", "id,label\n77,cat\n", "no value of the column 'id' with a label is an id or name of the data"),
    ("l.parquet", {"title": ["a"], "label": ["cat"]}, "has no column 'ids or .*'title'"),
]
LISTS = [
    ("a.png 1 0\nb.png 1\n", "line 2: 2 labels"),
    ("a.png 1 0\n\nb.png 1 0 1\n", "line 3: 2 labels"),
    ("a.png 1 0\nb.png 1 2\n", "line 2: 2 labels"),
    ("a.png 1 0\nb.png x 1\n", "line 2: 2 labels"),
    ("a.png 5\nb.png\n", "line 2: one class number"),
    ("a.png 5\nb.png x\n", "line 2: one class number"),
    ("a.png 5\nb.png -2\n", "label -2 at row 1"),
    ("a.png 5\nb.png 99999999999999999999\n", "line 2: one class number"),
    ("a.png 5\nb.png 4000000\n", "out of range"),
    ("", "is empty"),
    ("a.png 1 0\n\0\n", "not a text"),
    (b"\xfe\x80a b", "not UTF-8"),
    (
        "a.png\nno.png\n",
        r"1 of 2 images cannot be read \(.*no.png: not found\); that is above the limit of 1 %",
    ),
    ("a\tb.png\n", "a.*b.png.*: not found"),
]
TABLES: list[tuple[Any, str]] = [
    ("", "is empty"),
    ("image,label\n", "has no rows"),
    ("path,label\na.png,x\n", "no column 'image' .* 'path', 'label'.*--read image_column"),
    ("image,image\na.png,x\n", "twice"),
    ("image,label\na.png\n", "line 2 is not CSV: 1 fields, the header has 2"),
    ("image,label\n,x\n", "has '' in row 0 of column 'image'"),
    ('image,label\n"a.png"x,y\n', "not CSV"),
    ('image,label\n"a.png,y\n', "not CSV"),
    ("image,id\na.png,9223372036854775808\n", "whole numbers of 64 bits"),
    (b"image,label\n\xff\xfe,\x80\n", "not UTF-8"),
    ({"image": [1, 2]}, "has 1 in row 0 of column"),
    ({"image": ["a.png", None]}, "has None in row 1"),
    ({"picture": ["a.png"]}, "no column 'image'"),
]
ARCHIVES = [
    (tar("../a/x.png"), "points outside"),
    (tar("/a/x.png"), "points outside"),
    (tar("a\\x.png"), "points outside"),
    (tar("a/x.png", tarfile.SYMTYPE, b""), "no images"),
    (tar("a/x.png", tarfile.LNKTYPE, b""), "no images"),
    (tar("a/x.png", tarfile.FIFOTYPE, b""), "no images"),
    (raw_tar(("a/x.png", tarfile.REGTYPE, png(0)), ("a/x.png", tarfile.REGTYPE, png(1))), "two members"),
    (tar("a/x.png", data=bytes(3000))[:2000], "truncated"),
    (b"", "readable tar"),
    (b"neither tar nor gzip" * 100, "readable tar"),
    (gzip.compress(b"no tar" * 1000), "readable tar"),
    (gzip.compress(tar("a/x.png"))[:-30], "readable tar"),
    (gzip.compress(tar("a/x.txt", data=bytes(80 << 20))), "unpacks to more than 67,108,864 bytes"),
    (tar("readme.md"), "no images"),
]
GIVEN: list[tuple[str, dict[str, Any], str]] = [
    ("features:no.npy", {}, "not found"),
    ("features:no-*.npy", {}, "no file matches"),
    ("features:x.npy", {"keep": "title"}, "--read keep: x.npy has no columns"),
    ("features:x.npy", {"vectors": "x"}, "--read vectors: x.npy has no columns"),
    ("features:x.npy", {"vectors": ["x", "y"]}, "only of a table in memory"),
    ("features:x.npy", {"id_from": "path"}, "have no paths"),
    ("features:x.npy", {"id_from": "content"}, "--read id_from=content: choose from"),
    ("features:x.npy", {"labels": "no.npy"}, "not found"),
    ("features:x.npy", {"labels": "images"}, "is a folder"),
    ("features:x.npy", {"ids": "y.npy", "id_from": "path"}, "both say"),
    ("webdataset:x-{3..1}.tar", {}, "is not a range"),
    ("webdataset:x-{0..999999999}.tar", {}, "is not a range"),
    ("csv:t.csv", {"label_column": "lable"}, r"no column 'lable'.*--read label_column"),
    ("csv:t.csv", {"keep": "price"}, "no column 'price'"),
    ("csv:t.csv", {"keep": "mark,mark"}, "each once"),
    ("list:images", {}, "is a folder"),
    ("digits", {"keep": "title"}, "does not apply to digits"),
    ("digits:x", {}, "takes no path"),
    ("digits", {"labels": "y.npy"}, "4 labels, the data has 1,797 items"),
    ("digits", {"max_bad": 2.0}, "give a fraction"),
    ("digits", {"max_bad": float("nan")}, "give a fraction"),
    ("folder:images", {"root": "images"}, "--read root does not apply to folder"),
    ("folder:images", {"label_column": "x"}, "--read label_column does not apply"),
    ("list:l.txt", {"image_column": "x"}, "--read image_column does not apply"),
    ("csv:t.csv", {"concepts": "81"}, "--read concepts does not apply to csv"),
    ("cifar10:a", {"root": "b"}, "--read root does not apply to cifar10"),
    ("cifar10:", {}, "lacks its path"),
    ("folder:a\0b", {}, "is not a path"),
]


X40, PIXELS = X[:40], np.zeros((40, 8, 8, 3), np.uint8)
HUB = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
PICTURES = datasets.Dataset.from_dict(
    {"image": [{"bytes": png(i), "path": None} for i in range(3)], "label": [0, 1, 0]}, features=HUB
)


def frame(**more: Any) -> pd.DataFrame:
    return pd.DataFrame({"id": range(40), "path": [f"p/{i}" for i in range(40)], "label": ["a"] * 40, **more})


def hub(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


class Changing(Items):
    def __getitem__(self, i: int) -> Any:
        return np.random.default_rng().integers(0, 256, (8, 8, 3), dtype=np.uint8), 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from X


OBJECTS: list[tuple[Any, dict[str, Any], str]] = [
    (frame(), {}, "no column of vectors"),
    (frame(v=list(X40), w=list(X40)), {}, r"which column holds the vectors\? .there are: v, w"),
    (frame(v=list(X40)), {"labels": "kind"}, r"no column 'kind' \(it has 'id', 'path', 'label', 'v'\)"),
    (frame(v=list(X40)), {"vectors": "path"}, "'path' is not a column of lists"),
    (frame(v=list(X40)), {"vectors": ["v", "id"]}, "'v' is not of numbers: a column of lists, or columns of"),
    (frame(v=list(X40)), {"ids": "path"}, r"'path': ids are object \[40\], not whole numbers"),
    (frame(v=[x[: 1 + i % 2] for i, x in enumerate(X40)]), {}, "'v' has 2 numbers at rows 1, 3"),
    (frame(v=[None, *X40[1:]]), {}, "'v' has no vector at row 0"),
    (frame(v=[[1, "a"]] * 40), {}, "a column that cannot be converted"),
    (frame(v=list(X40)), {"root": "x"}, "--read root does not apply to a table"),
    (frame(v=list(X40)), {"labels": "label", "label_column": "x"}, "give one"),
    (X40, {"labels": Y[:5]}, "5 labels, the data has 40 items"),
    (X40, {"labels": 3}, "labels: int is not a list of labels"),
    (X40, {"names": ["a"]}, "names: 1 names, array has 40 items"),
    (X40, {"ids": IDS[:5]}, "5 ids, array has 40 items"),
    (X40, {"ids": IDS[:40] / 2}, "ids are float64"),
    (X40[0], {}, r"array is float32 \[7\]"),
    (PIXELS / 255, {}, "images are uint8"),
    (Items([]), {}, "Items has no items"),
    (Items([{"image": 1}]), {}, "item 0: dict is not an array of numbers, nor an image"),
    (Items([(X[0], 0)]), {}, r"item 0: \[7\], expected \[H, W, 3\]"),
    (Changing([0] * 9), {}, "differs at each read"),
    (Stream(), {}, "Stream has no access by index"),
    (3, {}, "int has no access by index"),
    ({}, {}, "dict has no items"),
    (PICTURES, {"image_column": "picture"}, "--read image_column=picture: no column of images"),
    (PICTURES, {"label_column": "kind"}, "no column 'kind'"),
    (PICTURES, {"vectors": "label"}, "'label' is not a column of lists"),
    (PICTURES, {"keep": "url"}, "no column 'url'"),
    (PICTURES, {"root": "x"}, "--read root does not apply"),
    (PICTURES.to_iterable_dataset(), {}, "cannot be read by position"),
    (hub(a=[[1.0]], b=[[1.0]]), {}, "which column holds the vectors"),
    (hub(v=[[1.0]], label=["a"]), {"ids": "label"}, "not whole numbers of 64 bits"),
    (hub(v=[[1.0], [1.0, 2.0]]), {}, "'v' has 2 numbers at row 1, 1 elsewhere"),
    (hub(v=[["a"], ["b"]]), {}, "vectors of numbers are needed"),
    (hub(v=[]), {}, "which column holds|has no rows"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four vectors, a folder of images and a table, in the working directory."""
    put(tmp_path, "a.png", "b.png", "images/a/0.png")
    np.save(tmp_path / "x.npy", np.eye(4, 5, dtype=np.float32))
    np.save(tmp_path / "y.npy", np.arange(4))
    (tmp_path / "t.csv").write_text("image,label,mark\na.png,x,u\n")
    (tmp_path / "l.txt").write_text("a.png 1 0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(spec: Any, **options: Any) -> str:
    with pytest.raises((DataError, UsageError)) as caught:
        open_data(spec, **options).read(slice(None))
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.mark.parametrize(("name", "content", "why"), VECTORS)
def test_vectors(here: Path, name: str, content: Any, why: str) -> None:
    save(here / name, content)
    assert_says(refused(f"features:{name}"), why, name)


def assert_says(message: str, why: str, name: str) -> None:
    assert re.search(why, message), message
    assert name in message


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".h5", ".parquet"])
@pytest.mark.parametrize("share", [0.01, 0.6, 0.99, 1.01])
def test_vectors_cut_off_or_longer(here: Path, suffix: str, share: float) -> None:
    path = here / f"a{suffix}"
    save(path, whole(suffix))
    size = path.stat().st_size
    if share > 1 and suffix != ".npy":
        pytest.skip("what follows the end of these forms is not theirs")
    os.truncate(path, int(size * share))
    assert_says(refused(f"features:{path}"), "truncated|damaged|not an? |bytes after", path.name)


@pytest.mark.parametrize(("name", "content", "why"), LABELS)
def test_labels(here: Path, name: str, content: Any, why: str) -> None:
    save(here / name, content)
    assert_says(refused("features:x.npy", labels=name), why, name)


@pytest.mark.parametrize(("content", "why"), LISTS)
def test_lists(here: Path, content: Any, why: str) -> None:
    save(here / "bad.txt", content)
    assert_says(refused("list:bad.txt"), why, "")


@pytest.mark.parametrize(("content", "why"), TABLES)
def test_tables(here: Path, content: Any, why: str) -> None:
    form = "parquet" if isinstance(content, dict) else "csv"
    save(here / f"bad.{form}", content)
    assert_says(refused(f"{form}:bad.{form}"), why, f"bad.{form}")


@pytest.mark.parametrize(("content", "why"), ARCHIVES, ids=range(len(ARCHIVES)))
@pytest.mark.parametrize("form", ["folder", "webdataset"])
@pytest.mark.filterwarnings("error")
def test_archives(here: Path, content: bytes, why: str, form: str) -> None:
    save(here / "bad.tar", content)
    before = sorted(here.rglob("*"))
    assert_says(refused(f"{form}:bad.tar"), why, "bad.tar")
    assert sorted(here.rglob("*")) == before, "nothing is extracted"


@pytest.mark.parametrize(("spec", "options", "why"), GIVEN)
def test_options_and_paths(here: Path, spec: str, options: dict[str, Any], why: str) -> None:
    assert_says(refused(spec, **options), why, "")


@pytest.mark.parametrize(
    "scheme", ["nuswide", "folder", "list", "csv", "parquet", "features", "webdataset", "hf"]
)
def test_a_path_is_needed_and_must_exist(scheme: str, here: Path) -> None:
    for spec in (scheme, scheme + ":"):
        assert "lacks its path" in refused(spec)
    assert "nowhere.x not found" in refused(f"{scheme}:nowhere.x")


def test_what_is_no_regular_file_is_missing(here: Path) -> None:
    os.mkfifo(here / "pipe.png")
    (here / "bad.txt").write_text("pipe.png\na.png\n")
    assert [image is None for image in open_data("list:bad.txt", max_bad=1.0).read(slice(None))] == [
        True,
        False,
    ]
    assert "is a device or a pipe" in refused("features:x.npy", labels="/dev/zero")


@pytest.mark.parametrize(("source", "options", "why"), OBJECTS)
def test_objects(source: Any, options: dict[str, Any], why: str) -> None:
    assert_says(refused(source, **options), why, "")


@pytest.mark.parametrize("wrong", [["z"], 3])
def test_hub_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: object) -> None:
    for name in ("hub", "cut"):
        PICTURES.save_to_disk(str(tmp_path / name))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (arrow,) = (tmp_path / "cut").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:100])
    for name in ("empty", "file", "cut"):
        assert "is not a data set that save_to_disk wrote, or it is damaged" in refused(
            f"hf:{tmp_path}/{name}"
        )
    about = tmp_path / "hub" / "dataset_info.json"
    info = json.loads(about.read_text())
    info["features"]["label"]["names"] = ["a", wrong]
    about.write_text(json.dumps(info))
    assert "class names of the labels are not texts" in refused(f"hf:{tmp_path}/hub")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "needs the package datasets: pip install 'gpq-faiss[hf]'" in refused(f"hf:{tmp_path}/hub")
