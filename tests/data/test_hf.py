"""hf: Hugging Face data sets from disk and from memory give the items, labels and splits that went in."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from image_files import png
from PIL import Image

import gpq_faiss as gpq
from gpq_faiss.data.base import FeatureDataset, ImageDataset
from gpq_faiss.errors import DataError, UsageError

N, W = 30, 5
X = np.random.default_rng(0).standard_normal((N, W)).astype(np.float32)
KINDS = ["cat", "dog", "emu"]
Y = np.arange(N) % 3


def pictures(**columns: Any) -> datasets.Dataset:
    images = [Image.open(io.BytesIO(png(i, 8))) for i in range(N)]
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=KINDS)}
    found = datasets.Dataset.from_dict(
        {"image": images, "label": Y.tolist()}, features=datasets.Features(kinds)
    )
    for name, values in columns.items():
        found = found.add_column(name, values)
    return found


def vectors(**columns: Any) -> datasets.Dataset:
    kind = datasets.Features({"emb": datasets.List(datasets.Value("float32"), length=W)})
    found = datasets.Dataset.from_dict({"emb": list(X)}, features=kind)
    for name, values in columns.items():
        found = found.add_column(name, values)
    return found


def pixels(i: int) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png(i, 8))))


def test_images_on_disk_and_in_memory(tmp_path: Path) -> None:
    source = pictures(
        file=[f"f{i}" for i in range(N)], path=[f"p/{i}" for i in range(N)], id=list(range(100, 100 + N))
    )
    source.save_to_disk(str(tmp_path / "hub"))
    for given in (f"hf:{tmp_path}/hub", source):
        dataset = gpq.open_data(given, keep="file")
        assert isinstance(dataset, ImageDataset)
        assert dataset.native_size == 8
        assert dataset.labels is not None
        assert dataset.labels.class_names == tuple(KINDS)
        assert dataset.labels.class_ids().tolist() == Y.tolist()
        assert dataset.ids.tolist() == list(range(100, 100 + N))
        assert dataset.texts["name"][4] == "p/4"
        assert dataset.texts["file"][4] == "f4"
        rows = np.random.default_rng(1).permutation(N)[:7]
        for i, image in zip(rows, dataset.read(rows), strict=True):
            np.testing.assert_array_equal(image, pixels(int(i)))


def test_vectors_chosen_and_shuffled_rows(tmp_path: Path) -> None:
    source = vectors(kind=[KINDS[y] for y in Y], more=[[1.0, 2.0]] * N, key=[f"k{i}" for i in range(N)])
    shuffled = source.shuffle(seed=3)
    shuffled.save_to_disk(str(tmp_path / "hub"))
    order = [int(key[1:]) for key in shuffled["key"]]
    for given in (f"hf:{tmp_path}/hub", shuffled):
        dataset = gpq.open_data(given, vectors="emb", label_column="kind")
        assert isinstance(dataset, FeatureDataset)
        np.testing.assert_array_equal(dataset.read(slice(None)), X[order])
        np.testing.assert_array_equal(dataset.read(np.array([9, 2, 9])), X[order][[9, 2, 9]])
        assert dataset.texts["name"].tolist() == [f"k{i}" for i in order]
        assert dataset.labels is not None
        assert dataset.labels.class_ids().tolist() == Y[order].tolist()
    one, other = (
        gpq.open_data(vectors(), vectors="emb"),
        gpq.open_data(vectors().select(range(20)), vectors="emb"),
    )
    assert one.fingerprint != other.fingerprint


def test_parts_follow_each_other_the_test_part_last(tmp_path: Path) -> None:
    parts = {"test": pictures().select(range(20, 30)), "train": pictures().select(range(20))}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "hub"))
    for given in (f"hf:{tmp_path}/hub", datasets.DatasetDict(parts)):
        dataset = gpq.open_data(given)
        assert "parts: train, test" in dataset.notes
        np.testing.assert_array_equal(dataset.read(np.array([25]))[0], pixels(25))


def test_several_labels_of_an_item() -> None:
    kind = datasets.Features(
        {
            "v": datasets.List(datasets.Value("float32")),
            "labels": datasets.List(datasets.ClassLabel(names=KINDS)),
        }
    )
    given = [[0, 2], [], [1]]
    dataset = gpq.open_data(datasets.Dataset.from_dict({"v": list(X[:3]), "labels": given}, features=kind))
    assert dataset.labels is not None
    assert dataset.labels.dense(np.arange(3)).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


def test_broken_images_follow_the_limit_and_no_path_is_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(1))
    kinds = datasets.Features({"image": datasets.Image()})
    rows = [{"bytes": png(i), "path": None} for i in range(30)]
    rows[3] = {"bytes": b"no image", "path": None}
    source = datasets.Dataset.from_dict({"image": rows}, features=kinds)
    with pytest.raises(DataError, match=r"1 of 30 images cannot be read \(Dataset!row 3: not an image"):
        gpq.open_data(source).read(slice(None))
    assert [
        i for i, image in enumerate(gpq.open_data(source, max_bad=0.1).read(slice(None))) if image is None
    ] == [3]
    # A folder made by someone else may hold paths in place of images.
    plain = datasets.Dataset.from_dict({"image": [{"bytes": None, "path": str(secret)}] * 3})
    plain.save_to_disk(str(tmp_path / "hub"))
    info = json.loads((tmp_path / "hub" / "dataset_info.json").read_text())
    info["features"]["image"] = {"_type": "Image"}
    (tmp_path / "hub" / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(DataError, match=r"there is no image in this row|is not a data set"):
        gpq.open_data(f"hf:{tmp_path}/hub").read(slice(None))
    in_memory = gpq.open_data(datasets.Dataset.from_dict({"image": [str(secret)]}, features=kinds))
    assert in_memory.read(slice(None))[0] is not None


@pytest.mark.parametrize("wrong", [["z"], 3])
def test_class_names_that_are_no_texts_are_one_clear_error(tmp_path: Path, wrong: object) -> None:
    kinds = datasets.Features(
        {"x": datasets.Sequence(datasets.Value("float32")), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    rows = {"x": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1]}
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(str(tmp_path / "hub"))
    info = json.loads((tmp_path / "hub" / "dataset_info.json").read_text())
    info["features"]["label"]["names"] = ["a", wrong]
    (tmp_path / "hub" / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(DataError, match="class names of the labels are not texts"):
        gpq.open_data(f"hf:{tmp_path}/hub")


@pytest.mark.parametrize(
    ("source", "options", "why"),
    [
        (
            pictures(),
            {"image_column": "picture"},
            "--read image_column=picture: no column of images",
        ),
        (pictures(), {"label_column": "kind"}, "no column 'kind'"),
        (pictures(), {"vectors": "label"}, "'label' is not a column of lists"),
        (pictures(), {"keep": "url"}, "no column 'url'"),
        (pictures(), {"root": "x"}, "--read root does not apply"),
        (
            datasets.Dataset.from_dict({"a": [[1.0]], "b": [[1.0]]}),
            {},
            "which column holds the vectors",
        ),
        (vectors(label=[f"c{i}" for i in range(N)]), {"ids": "label"}, "ids are whole numbers"),
        (
            datasets.Dataset.from_dict({"v": [[1.0], [1.0, 2.0]]}),
            {},
            "'v' has 2 numbers at row 1, 1 elsewhere",
        ),
        (datasets.Dataset.from_dict({"v": [["a"], ["b"]]}), {}, "vectors of numbers are needed"),
        (datasets.Dataset.from_dict({"v": []}), {}, "which column holds|has no rows"),
        (pictures().to_iterable_dataset(), {}, "cannot be read by position"),
    ],
)
def test_what_cannot_be_used_is_one_line(source: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises((DataError, UsageError), match=why) as caught:
        gpq.open_data(source, **options).read(slice(None))
    assert "\n" not in str(caught.value)


def test_folders_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors().save_to_disk(str(tmp_path / "hub"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    shutil.copytree(tmp_path / "hub", tmp_path / "cut")
    (arrow,) = (tmp_path / "cut").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:100])
    for name, why in (
        ("none", "none not found"),
        ("empty", "is not a data set that save_to_disk wrote"),
        ("file", "is not a data set that save_to_disk wrote"),
        ("cut", "or it is damaged"),
    ):
        with pytest.raises(DataError, match=why) as caught:
            gpq.open_data(f"hf:{tmp_path}/{name}")
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package datasets: pip install 'gpq-faiss\[hf\]'"):
        gpq.open_data(f"hf:{tmp_path}/hub")
