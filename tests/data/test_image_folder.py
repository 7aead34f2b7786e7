"""Class folders on disk and in archives: layouts, limits, hostile archives."""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from image_files import open_folder, png, put, raw_tar

from gpq_faiss.data import archive as archive_module
from gpq_faiss.data.folder import layout_of
from gpq_faiss.errors import DataError

# folder


def test_folder_of_classes(tmp_path: Path) -> None:
    put(tmp_path, "cat/2.png", "cat/1.PNG", "ant/x/deep.png", "bee/0.jpg")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    put(tmp_path, ".hidden/a.png", "bee/._0.jpg")
    dataset = open_folder(tmp_path)
    assert [os.path.relpath(p, tmp_path) for p in dataset.paths] == [
        "ant/x/deep.png",
        "bee/0.jpg",
        "cat/1.PNG",
        "cat/2.png",
    ]
    assert dataset.labels is not None
    assert dataset.labels.class_names == ("ant", "bee", "cat")
    assert dataset.labels.class_ids().tolist() == [0, 1, 2, 2]
    assert dataset.official is None
    assert dataset.notes == ["1 files without an image extension, left out"]
    assert dataset.native_size == 4


@pytest.mark.parametrize(
    ("names", "classes", "official"),
    [
        (["train/x.png", "bus/y.png"], ["bus", "train"], None),
        (["train/x.png", "test/y.png"], ["test", "train"], None),
        (["set/train/a/x.png", "set/test/a/y.png"], ["a", "a"], [0, 1]),
        (["train/a/x.png", "val/b/y.png"], ["a", "b"], [0, 1]),
        (["train/a/x.png", "val/b/y.png", "test/a/z.png"], ["a", "b", "a"], [0, 0, 1]),
        (["train/a/x.png", "train/b/y.png"], ["a", "b"], None),
        (["flowers/rose/x.png", "flowers/tulip/y.png"], ["rose", "tulip"], None),
        (["x.png", "a/y.png"], ["a", None], None),
        (["x.png", "y.png"], [None, None], None),
        (["only/x.png"], ["only"], None),
    ],
)
def test_layouts(names: list[str], classes: list[str | None], official: list[int] | None) -> None:
    layout = layout_of(names)
    assert layout.classes == classes
    assert (None if layout.official is None else layout.official.tolist()) == official
    assert sorted(layout.order.tolist()) == list(range(len(names)))


def test_folder_links_do_not_go_round(tmp_path: Path) -> None:
    put(tmp_path, "a/0.png")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert len(open_folder(tmp_path)) == 1


# archives


def tar_of(folder: Path, target: Path, mode: str, prefix: str = "") -> Path:
    with tarfile.open(target, mode) as out:  # type: ignore[call-overload]
        out.add(folder, arcname=prefix or ".")
    return target


@pytest.mark.parametrize(("name", "mode"), [("a.tar.gz", "w:gz"), ("a.tar", "w")])
@pytest.mark.parametrize("prefix", ["", "images"])
def test_archive_reads_like_its_folder(name: str, mode: str, prefix: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    put(source, "test/b/0.png", "train/b/1.png", "train/a/2.png", "test/a/3.png", "train/c/._x.png")
    (source / "README.txt").write_text("about")
    expected = open_folder(source)
    dataset = open_folder(tar_of(source, tmp_path / name, mode, prefix))
    assert dataset.labels is not None
    assert expected.labels is not None
    assert np.array_equal(dataset.labels.packed, expected.labels.packed)
    assert dataset.labels.class_names == expected.labels.class_names == ("a", "b")
    assert np.array_equal(dataset.official, expected.official)  # type: ignore[arg-type]
    for ours, theirs in zip(dataset.read(slice(None)), expected.read(slice(None)), strict=True):
        assert np.array_equal(ours, theirs)  # type: ignore[arg-type]
    assert dataset.image_path(0) is None
    assert dataset.item_name(0).endswith(f"{name}!{prefix + '/' if prefix else ''}train/a/2.png")
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, "source"], "nothing is extracted"


def test_archive_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bomb.tar.gz"
    file.write_bytes(gzip.compress(raw_tar(("a/x.png", tarfile.REGTYPE, bytes(1 << 22)))))
    with monkeypatch.context() as small:
        small.setattr(archive_module, "MAX_UNPACKED", 1 << 20)
        with pytest.raises(DataError, match="unpacks to more than 1,048,576 bytes"):
            archive_module.open_archive(file)
    monkeypatch.setattr(archive_module, "MAX_MEMBER_BYTES", 1 << 20)
    with pytest.raises(DataError, match="too large for an image"):
        archive_module.open_archive(file)
    monkeypatch.setattr(archive_module, "MAX_MEMBERS", 0)
    with pytest.raises(DataError, match="more than 0 members"):
        archive_module.open_archive(file)


def test_archive_replaced_under_us(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(raw_tar(("a/x.png", tarfile.REGTYPE, png(0))))
    dataset = open_folder(file)
    file.write_bytes(b"")
    with pytest.raises(DataError, match="shorter"):
        dataset.read(np.array([0]))
