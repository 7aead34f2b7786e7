"""``open_data``: every form, and one clear line for what is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_files import put

from gpq_faiss.data.base import FeatureDataset, ImageDataset
from gpq_faiss.data.open import FORMS, open_data, parse_spec
from gpq_faiss.errors import DataError, UsageError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one of each, as the working directory."""
    put(tmp_path, "images/a/0.png", "images/b/1.png")
    (tmp_path / "l.txt").write_text("a/0.png 1 0\nb/1.png 0 1\n")
    (tmp_path / "t.csv").write_text("image,label,mark\na/0.png,x,u\nb/1.png,y,v\n")
    np.save(tmp_path / "f.npy", np.eye(3, dtype=np.float32))
    np.save(tmp_path / "y.npy", np.array([0, 1, 0]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_form_of_images(here: Path) -> None:
    for dataset in (
        open_data("folder:images"),
        open_data("folder:" + str(here / "images")),
        open_data("list:l.txt", root="images"),
        open_data("csv:t.csv", root="images"),
    ):
        assert isinstance(dataset, ImageDataset)
        assert dataset.kind == "images"
        assert len(dataset) == 2
        assert dataset.labels is not None
        assert dataset.labels.class_ids().tolist() == [0, 1]
        assert all(image is not None for image in dataset.read(slice(None)))
    assert len(open_data("digits")) == 1797
    labels = open_data("csv:t.csv", root="images", label_column="mark").labels
    assert labels is not None
    assert labels.class_names == ("u", "v")


def test_parquet_form(here: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"image": ["a/0.png", "b/1.png"], "label": ["x", "y"]}), "t.parquet")
    assert open_data("parquet:t.parquet", root="images").name == "parquet:t.parquet"


def test_features_form(here: Path) -> None:
    dataset = open_data("features:f.npy", labels="y.npy")
    assert isinstance(dataset, FeatureDataset)
    assert dataset.width == 3
    assert dataset.labels is not None
    assert dataset.labels.class_ids().tolist() == [0, 1, 0]


@pytest.mark.parametrize("spec", ["mnist", "mnist:x", "", ":", "Digits", "features.npy", "no\nsuch", "a\0b"])
def test_unknown_forms_list_the_known_ones(spec: str) -> None:
    with pytest.raises(UsageError, match="unknown data") as caught:
        open_data(spec)
    assert FORMS in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("images", "folder:images"),
        ("f.npy", "features:f.npy"),
        ("t.csv", "csv:t.csv"),
        ("l.txt", "list:l.txt"),
    ],
)
def test_a_bare_path_gets_a_hint(here: Path, spec: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant}"):
        open_data(spec)


@pytest.mark.parametrize("scheme", ["nuswide", "folder", "list", "csv", "parquet", "features"])
def test_a_path_is_needed_and_must_exist(scheme: str, here: Path) -> None:
    for spec in (scheme, scheme + ":"):
        with pytest.raises(UsageError, match="lacks its path"):
            open_data(spec)
    with pytest.raises(DataError, match=r"nowhere\.x not found") as caught:
        open_data(f"{scheme}:nowhere.x")
    assert not isinstance(caught.value, UsageError)


@pytest.mark.parametrize(
    ("spec", "options", "why"),
    [
        ("digits:x", {}, "takes no path"),
        ("digits", {"labels": "y.npy"}, "--labels does not apply to digits"),
        ("folder:images", {"root": "images"}, "--root does not apply to folder"),
        ("folder:images", {"label_column": "x"}, "--label-column does not apply"),
        ("list:l.txt", {"image_column": "x"}, "--image-column does not apply"),
        ("csv:t.csv", {"concepts": "81"}, "--concepts does not apply to csv"),
        ("cifar10:a", {"root": "b"}, "names its folder already"),
        ("nuswide:images", {"root": "b"}, "names its folder already"),
        ("digits", {"max_bad": 2.0}, "give a fraction"),
        ("cifar10:", {}, "lacks its path"),
        ("folder:a\0b", {}, "is not a path"),
    ],
)
def test_options_that_cannot_be_right(spec: str, options: dict[str, object], why: str, here: Path) -> None:
    with pytest.raises(UsageError, match=why):
        open_data(spec, **options)  # type: ignore[arg-type]


def test_max_bad_reaches_the_source(here: Path) -> None:
    (here / "images" / "b" / "1.png").unlink()
    with pytest.raises(DataError, match="1 of 2 images missing"):
        open_data("list:l.txt", root="images")
    assert len(open_data("list:l.txt", root="images", max_bad=0.5)) == 1


def test_local_folders_of_the_downloaded_sets(here: Path) -> None:
    (here / "set" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"cifar-10-python.tar.gz.*read by folder:"):
        open_data("cifar10:set", download=False)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.*not found in set"):
        open_data("fashion-mnist", root="set", download=False)
    with pytest.raises(DataError, match=r"ImageList/Imagelist.txt not found in set"):
        open_data("nuswide", root="set")


def test_parse_spec_keeps_colons_in_paths() -> None:
    assert parse_spec("list:C:/a:b.txt") == ("list", "C:/a:b.txt")
    assert parse_spec("cifar10") == ("cifar10", None)
