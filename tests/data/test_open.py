"""``open_data``: every form, and one clear line for what is none."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from image_files import put

from gpq_faiss.data.base import ImageDataset
from gpq_faiss.data.forms import FORMS
from gpq_faiss.data.item_ids import stable_id
from gpq_faiss.data.open import open_data
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


@pytest.mark.parametrize("spec", ["mnist", "mnist:x", "", ":", "Digits", "no\nsuch", "a\0b"])
def test_unknown_forms_list_the_known_ones(spec: str) -> None:
    with pytest.raises(UsageError, match="unknown data") as caught:
        open_data(spec)
    assert FORMS in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("path", "scheme"),
    [
        ("images", "folder"),
        ("f.npy", "features"),
        ("t.csv", "csv"),
        ("l.txt", "list"),
        ("v.parquet", "features"),
        ("t.parquet", "parquet"),
        ("images.tar", "folder"),
        ("images.tar.gz", "folder"),
        ("shards.tar", "webdataset"),
        ("s-*.npy", "features"),
        ("s-{0..1}.npy", "features"),
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_a_bare_path_is_opened_by_what_it_is(here: Path, path: str, scheme: str, kind: type) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"image": ["a/0.png", "b/1.png"], "label": ["x", "y"]}), "t.parquet")
    pq.write_table(pa.table({"emb": [[1.0, 0.0], [0.0, 1.0]], "label": ["x", "y"]}), "v.parquet")
    for mode, name in (("w", "images.tar"), ("w:gz", "images.tar.gz")):
        with tarfile.open(name, mode) as tar:  # type: ignore[call-overload]
            tar.add("images", arcname=".")
    with tarfile.open("shards.tar", "w") as tar:
        for i in range(2):
            (here / "y.cls").write_text(str(i))
            tar.add(f"images/{'ab'[i]}/{i}.png", arcname=f"{i}.png")
            tar.add("y.cls", arcname=f"{i}.cls")
    np.save("s-0.npy", np.eye(2))
    np.save("s-1.npy", np.eye(2))
    root = {"root": "images"} if scheme in {"csv", "list", "parquet"} else {}
    found = open_data(kind(path), **root)  # type: ignore[arg-type]
    named = open_data(f"{scheme}:{path}", **root)  # type: ignore[arg-type]
    assert found.name == named.name
    assert found.fingerprint == named.fingerprint
    assert found.ids.tolist() == named.ids.tolist()


def test_a_prefix_comes_before_a_file_of_its_name(here: Path) -> None:
    (here / "digits").mkdir()
    assert len(open_data("digits")) == 1797
    with pytest.raises(DataError, match="digits contains no images"):
        open_data(Path("digits"))


def test_a_path_that_fits_several_forms_or_none_is_one_line(here: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"image": ["a/0.png"], "emb": [[1.0, 0.0]]}), "both.parquet")
    pq.write_table(pa.table({"picture": ["a/0.png"], "n": [1]}), "none.parquet")
    (here / "x.bin").write_bytes(b"x")
    (here / "bad.tar").write_bytes(b"x" * 5000)
    (here / "bad.tar.gz").write_bytes(b"\x1f\x8b" + b"x" * 5000)
    for path, error, why in (
        ("both.parquet", UsageError, "write features:both.parquet or parquet:both.parquet"),
        ("none.parquet", DataError, "it has picture, n.*--read image_column"),
        ("x.bin", UsageError, "its ending tells no form"),
        ("images/a/0.png", UsageError, "is one image"),
        ("no.npy", DataError, "no.npy not found"),
        ("no-*.npy", DataError, "no file matches"),
        ("no.xlsx", DataError, "no.xlsx not found"),
        ("no/where", DataError, "no/where not found"),
        ("bad.tar", DataError, "bad.tar is not a readable tar"),
        ("bad.tar.gz", DataError, "bad.tar.gz is not a readable tar"),
    ):
        with pytest.raises(error, match=why) as caught:
            open_data(path)
        assert str(caught.value).isprintable()
        assert FORMS not in str(caught.value)
    assert open_data("none.parquet", image_column="picture", root="images").kind == "images"


def texts_in_id(form: str) -> str:
    """DATA of two items whose column of ids holds texts."""
    ids = ["ab", "17"] if form != "csv" else ["ab", "cd"]
    if form == "csv":
        Path("i.csv").write_text(f"image,id\na/0.png,{ids[0]}\nb/1.png,{ids[1]}\n")
    elif form == "npz":
        np.savez("i.npz", features=np.eye(2), ids=np.array(ids))
    else:
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        import pyarrow.parquet as pq

        column = pa.array(ids)
        column = column.dictionary_encode() if form == "dictionary" else column
        pq.write_table(pa.table({"id": column, "emb": [[1.0, 0.0], [0.0, 1.0]]}), "i.parquet")
    return {"csv": "i.csv", "npz": "i.npz"}.get(form, "i.parquet")


@pytest.mark.parametrize("form", ["parquet", "dictionary", "npz", "csv"])
def test_texts_in_a_column_of_ids_are_names(here: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    path = texts_in_id(form)
    root = {"root": "images"} if form == "csv" else {}
    with caplog.at_level("INFO", logger="gpq_faiss"):
        data = open_data(path, **root)  # type: ignore[arg-type]
    assert data.ids.tolist() == [0, 1]
    assert data.texts["name"].tolist() == (["ab", "cd"] if form == "csv" else ["ab", "17"])
    assert "holds texts: they are the names; ids are row numbers" in caplog.text
    stable = open_data(path, id_from="path", **root)  # type: ignore[arg-type]
    assert stable.ids.tolist() == [stable_id(name.encode()) for name in data.texts["name"].tolist()]


def test_local_folders_of_the_downloaded_sets(here: Path) -> None:
    (here / "set" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"cifar-10-python.tar.gz.*read by folder:"):
        open_data("cifar10:set", download=False)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.*not found in set"):
        open_data("fashion-mnist", root="set", download=False)
    with pytest.raises(DataError, match=r"ImageList/Imagelist.txt not found in set"):
        open_data("nuswide", root="set")
