"""Tables, arrays and data sets of torch that a program holds: the same items as from files, and one clear line for what is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset, Subset, TensorDataset

import gpq_faiss as gpq
from gpq_faiss.data.base import ArrayImages, Dataset, FeatureDataset, ImageDataset
from gpq_faiss.errors import DataError, UsageError

N, W = 40, 6
X = np.random.default_rng(0).standard_normal((N, W)).astype(np.float32)
Y = np.random.default_rng(1).integers(-1, 4, N)
IDS = np.random.default_rng(2).permutation(1000)[:N]
KINDS = ["cat", "dog", "emu", "fox"]
PIXELS = np.random.default_rng(3).integers(0, 256, (N, 8, 8, 3), dtype=np.uint8)


def frame(**more: Any) -> pd.DataFrame:
    label = [None if y < 0 else KINDS[y] for y in Y]
    return pd.DataFrame({"id": IDS, "path": [f"p/{i}" for i in range(N)], "label": label, **more})


def check(dataset: Dataset, *, x: np.ndarray = X, names: tuple[str, ...] = tuple(KINDS)) -> None:
    assert isinstance(dataset, FeatureDataset)
    np.testing.assert_array_equal(dataset.read(slice(None)), x)
    rows = np.random.default_rng(4).permutation(N)[:9]
    np.testing.assert_array_equal(dataset.read(rows), x[rows])
    assert dataset.labels is not None
    assert dataset.labels.class_names == names
    assert dataset.labels.class_ids().tolist() == Y.tolist()


def test_tables_of_pandas_and_pyarrow_with_a_column_of_vectors() -> None:
    table = frame(embedding=list(X))
    fixed = pa.table({**{c: pa.array(table[c]) for c in ("id", "path", "label")}}).append_column(
        "embedding", pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), W)
    )
    marks = set()
    for source in (table, pa.Table.from_pandas(table), fixed, table.set_index("path").reset_index()):
        dataset = gpq.open_data(source)
        check(dataset)
        assert dataset.ids.tolist() == IDS.tolist()
        assert dataset.texts["name"].tolist() == [f"p/{i}" for i in range(N)]
        marks.add(dataset.fingerprint)
    assert len(marks) == 1
    assert gpq.open_data(frame(embedding=list(X + 1))).fingerprint not in marks


def test_columns_that_are_named() -> None:
    table = frame(**{f"x{i}": X[:, i] for i in range(W)}).rename(
        columns={"label": "kind", "id": "row", "path": "where"}
    )
    given: dict[str, Any] = {
        "labels": "kind",
        "ids": "row",
        "names": "where",
        "vectors": [f"x{i}" for i in range(W)],
    }
    dataset = gpq.open_data(table.assign(noise=1.0), **given, keep="noise")
    check(dataset)
    assert dataset.ids.tolist() == IDS.tolist()
    assert dataset.texts["name"][7] == "p/7"
    assert set(dataset.texts["noise"].tolist()) == {"1.0"}
    check(gpq.open_data(table, label_column="kind", ids="row"))  # all other columns of numbers
    check(gpq.open_data(table.set_index("row"), labels="kind"))  # the index is no dimension
    reversed_ = gpq.open_data(table, **{**given, "vectors": ["x2", "x0"]})
    np.testing.assert_array_equal(reversed_.read(slice(None)), X[:, [2, 0]])


def test_labels_beside_a_table_or_an_array(tmp_path: Path) -> None:
    bare = frame(v=list(X)).drop(columns="label")
    numbers = tuple(str(c) for c in range(4))
    check(gpq.open_data(bare, labels=Y), names=numbers)
    named = gpq.open_data(X, labels=Y, names=[f"n{i}" for i in range(N)])
    assert named.texts["name"][3] == "n3"
    with pytest.raises(DataError, match="names: 1 names, array has 40 items"):
        gpq.open_data(X, names=["a"])
    check(gpq.open_data(X, labels=Y.tolist()), names=numbers)
    check(gpq.open_data(torch.from_numpy(X), labels=torch.from_numpy(Y)), names=numbers)
    check(gpq.open_data(X, labels=[None if y < 0 else KINDS[y] for y in Y]))
    np.save(tmp_path / "x.npy", X)
    from_file = gpq.open_data(f"features:{tmp_path}/x.npy", labels=Y, ids=IDS)
    check(from_file, names=numbers)
    assert from_file.ids.tolist() == IDS.tolist()
    np.save(tmp_path / "y.npy", Y)
    check(gpq.open_data(f"features:{tmp_path}/x.npy", labels=tmp_path / "y.npy"), names=numbers)
    several = gpq.open_data(X, labels=np.eye(N, 3, dtype=bool)).labels
    assert several is not None
    assert several.counts().tolist() == [1, 1, 1]
    assert gpq.open_data(X, ids=IDS).ids.tolist() == IDS.tolist()
    assert gpq.open_data(gpq.open_data(X, ids=IDS), labels=Y).ids.tolist() == IDS.tolist()


class Items:
    """A map-style data set."""

    def __init__(self, values: list[Any], **attributes: Any) -> None:
        self.values = values
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Any:
        value = self.values[i]
        if isinstance(value, Exception):
            raise value
        return value


@pytest.mark.parametrize("form", ["pillow", "planes", "floats", "subset", "targets"])
def test_images_of_torch_data_sets(form: str) -> None:
    planes = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    source: Any = {
        "pillow": lambda: Items([(Image.fromarray(p), int(y)) for p, y in zip(PIXELS, Y, strict=True)]),
        "planes": lambda: TensorDataset(planes, torch.from_numpy(Y)),
        "floats": lambda: TensorDataset(planes / 255, torch.from_numpy(Y)),
        "subset": lambda: Subset(TensorDataset(planes, torch.from_numpy(Y)), range(N)),
        "targets": lambda: Items(list(planes), targets=Y.tolist(), classes=KINDS),
    }[form]()
    dataset = gpq.open_data(source)
    assert isinstance(dataset, ImageDataset)
    assert dataset.native_size == 8
    assert dataset.labels is not None
    assert dataset.labels.class_ids().tolist() == Y.tolist()
    assert dataset.labels.class_names == (tuple(KINDS) if form == "targets" else ("0", "1", "2", "3"))
    images = dataset.read(slice(None))
    np.testing.assert_array_equal(np.stack([image for image in images if image is not None]), PIXELS)


def test_items_that_fail_follow_the_limit() -> None:
    values: list[Any] = [(p, 0) for p in PIXELS]
    values[17] = OSError("the disk\nis gone")
    with pytest.raises(DataError, match=r"1 of 40 images cannot be read \(item 17: the disk is gone\)"):
        gpq.open_data(Items(values)).read(slice(None))
    tolerant = gpq.open_data(Items(values), max_bad=0.1)
    assert [i for i, image in enumerate(tolerant.read(slice(None))) if image is None] == [17]


def test_arrays_of_images() -> None:
    for array in (PIXELS, PIXELS.transpose(0, 3, 1, 2), PIXELS[..., 0]):
        dataset = gpq.open_data(array, labels=Y)
        assert isinstance(dataset, ArrayImages)
        (image,) = dataset.read(np.array([5]))
        wanted = PIXELS[5] if array.ndim == 4 else np.repeat(PIXELS[5, :, :, :1], 3, axis=2)
        np.testing.assert_array_equal(image, wanted)


class Changing(Items):
    def __getitem__(self, i: int) -> Any:
        return np.random.default_rng().integers(0, 256, (8, 8, 3), dtype=np.uint8), 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from X


@pytest.mark.parametrize(
    ("source", "options", "why"),
    [
        (frame(), {}, "no column of vectors"),
        (frame(v=list(X), w=list(X)), {}, r"which column holds the vectors\? .there are: v, w"),
        (
            frame(v=list(X)),
            {"labels": "kind"},
            r"the DataFrame has no column 'kind' \(it has 'id', 'path', 'label', 'v'\)",
        ),
        (frame(v=list(X)), {"vectors": "path"}, "'path' is not a column of lists"),
        (
            frame(v=list(X)),
            {"vectors": ["v", "id"]},
            "'v' is not of numbers: a column of lists, or columns of numbers",
        ),
        (frame(v=list(X)), {"ids": "path"}, "'path' is .*string.*: ids are whole numbers"),
        (frame(v=[x[: 1 + i % 2] for i, x in enumerate(X)]), {}, "'v' has 2 numbers at rows 1, 3"),
        (frame(v=[None, *X[1:]]), {}, "'v' has no vector at row 0"),
        (frame(v=[[1, "a"]] * N), {}, "a column that cannot be converted"),
        (frame(v=list(X)), {"root": "x"}, "--read root does not apply to a table"),
        (frame(v=list(X)), {"labels": "label", "label_column": "x"}, "give one"),
        (X, {"labels": Y[:5]}, "5 labels, the data has 40 items"),
        (X, {"labels": 3}, "labels: int is not a list of labels"),
        (X, {"ids": IDS[:5]}, "5 ids, array has 40 items"),
        (X, {"ids": IDS / 2}, "ids are float64"),
        (X[0], {}, r"array is float32 \[6\]"),
        (PIXELS / 255, {}, "images are uint8"),
        (Items([]), {}, "Items has no items"),
        (Items([{"image": 1}]), {}, "item 0: dict is not an array of numbers, nor an image"),
        (Items([(X[0], 0)]), {}, r"item 0: \[6\], expected \[H, W, 3\]"),
        (Changing([0] * 9), {}, "differs at each read"),
        (Stream(), {}, "Stream has no access by index"),
        (3, {}, "int has no access by index"),
        (Path("x.npy"), {}, "x.npy not found"),
        ({}, {}, "dict has no items"),
    ],
)
def test_what_cannot_be_used_is_one_line(source: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises((DataError, UsageError), match=why) as caught:
        gpq.open_data(source, **options).read(slice(None))
    assert "\n" not in str(caught.value)
