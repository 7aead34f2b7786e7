"""Class folders on disk and in archives, and WebDataset shards: read in place; damage follows the limit; nothing leaves the tar."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import open_folder, png, put, raw_tar

from gpq_faiss.data import folder as tar_module
from gpq_faiss.data.base import ImageDataset
from gpq_faiss.data.folder import layout_of
from gpq_faiss.data.images import decode_image
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError

# Folders ----------------------------------------------------------------------------------------------------------------


def test_folder_of_classes(tmp_path: Path) -> None:
    put(tmp_path, "cat/2.png", "cat/1.PNG", "ant/x/deep.png", "bee/0.jpg", ".hidden/a.png", "bee/._0.jpg")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "ant" / "loop").symlink_to(tmp_path)
    dataset = open_folder(tmp_path)
    names = ["ant/x/deep.png", "bee/0.jpg", "cat/1.PNG", "cat/2.png"]
    assert [os.path.relpath(path, tmp_path) for path in dataset.paths] == names
    assert dataset.labels.class_names == ("ant", "bee", "cat")
    assert dataset.labels.class_ids().tolist() == [0, 1, 2, 2]
    assert dataset.notes == ["1 files without an image extension, left out"]
    assert dataset.native_size == 4


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (["train/x.png", "bus/y.png"], ["bus", "train"]),
        (["train/x.png", "test/y.png"], ["test", "train"]),
        (["set/train/b/x.png", "set/test/a/y.png"], ["b", "a"]),
        (["train/b/x.png", "val/a/y.png"], ["b", "a"]),
        (["train/c/x.png", "val/a/y.png", "test/b/z.png"], ["a", "c", "b"]),
        (["flowers/rose/x.png", "flowers/tulip/y.png"], ["rose", "tulip"]),
        (["x.png", "a/y.png"], ["a", None]),
        (["x.png", "y.png"], [None, None]),
        (["only/x.png"], ["only"]),
    ],
)
def test_layouts(names: list[str], classes: list[str | None]) -> None:
    order, found = layout_of(names)
    assert found == classes
    assert sorted(order) == list(range(len(names)))


@pytest.mark.parametrize(("name", "mode"), [("a.tar.gz", "w:gz"), ("a.tar", "w")])
@pytest.mark.parametrize("prefix", [".", "images"])
def test_archive_reads_like_its_folder(name: str, mode: str, prefix: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    put(source, "test/b/0.png", "train/b/1.png", "train/a/2.png", "test/a/3.png", "train/c/._x.png")
    (source / "README.txt").write_text("about")
    expected = open_folder(source)
    with tarfile.open(tmp_path / name, mode) as out:  # type: ignore[call-overload]
        out.add(source, arcname=prefix)
    dataset = open_folder(tmp_path / name)
    assert np.array_equal(dataset.labels.packed, expected.labels.packed)
    assert dataset.labels.class_names == expected.labels.class_names == ("a", "b")
    for ours, theirs in zip(dataset.read(slice(None)), expected.read(slice(None)), strict=True):
        assert np.array_equal(ours, theirs)
    assert dataset.image_path(0) is None
    assert dataset.paths[0].endswith(f"{name}!{prefix + '/' if prefix != '.' else ''}train/a/2.png")
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, "source"], "nothing is extracted"


def test_archive_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bomb.tar.gz"
    file.write_bytes(gzip.compress(raw_tar(("a/x.png", tarfile.REGTYPE, bytes(1 << 22)))))
    with monkeypatch.context() as small:
        small.setattr(tar_module, "SMALL_UNPACKED", 1 << 20)
        with pytest.raises(DataError, match="unpacks to more than 1,048,576 bytes"):
            tar_module.open_tar(file)
    with pytest.raises(DataError, match="4,194,304 bytes are too large"):
        tar_module.open_tar(file).read("a/x.png", 1 << 20)
    with monkeypatch.context() as few:
        few.setattr(tar_module, "MAX_MEMBERS", 0)
        with pytest.raises(DataError, match="more than 0 members"):
            tar_module.open_tar(file)
    plain = tmp_path / "a.tar"
    plain.write_bytes(raw_tar(("a/x.png", tarfile.REGTYPE, png(0))))
    dataset = open_folder(plain)
    plain.write_bytes(b"")
    with pytest.raises(DataError, match="shorter"):
        dataset.read(np.array([0]))


# WebDataset -------------------------------------------------------------------------------------------------------------


def shard(path: Path, members: Mapping[str, bytes]) -> str:
    path.write_bytes(raw_tar(*((name, tarfile.REGTYPE, content) for name, content in members.items())))
    return f"webdataset:{path}"


def samples(numbers: range, **of_each: str) -> dict[str, bytes]:
    out = {}
    for i in numbers:
        out[f"{i:06d}.png"] = png(i)
        for extension, text in of_each.items():
            out[f"{i:06d}.{extension}"] = text.format(i=i, c=i % 3).encode()
    return out


def test_shards_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for k in (10, 9, 8):
        shard(tmp_path / f"x-{k:03d}.tar", samples(range(4 * k, 4 * k + 4), cls="{c}") | {"README.md": b"x"})
    for pattern in ("x-{008..010}.tar", "x-*.tar", "x-{008..009}*.tar"):
        dataset = open_data(f"webdataset:{tmp_path}/{pattern}")
        n = 8 if "009" in pattern else 12
        assert dataset.texts["name"].tolist() == [f"{i:06d}" for i in range(32, 32 + n)]
        assert dataset.labels is not None
        assert dataset.labels.class_ids().tolist() == [i % 3 for i in range(32, 32 + n)]
        order = np.random.default_rng(0).permutation(n)
        for i, image in zip(order, dataset.read(order), strict=True):
            np.testing.assert_array_equal(image, decode_image(png(int(i) + 32)))


@pytest.mark.parametrize(
    ("members", "options", "classes", "said"),
    [
        ({"json": '{{"label": "c{c}"}}'}, {}, ("c0", "c1", "c2"), "'label'"),
        ({"json": '{{"x": 1, "class": {c}}}'}, {}, ("0", "1", "2"), "'class'"),
        ({"json": '{{"tags": ["t", "c{c}"]}}'}, {"label_column": "tags"}, ("c0", "c1", "c2", "t"), "'tags'"),
        ({"txt": "name {c}\n"}, {}, ("name 0", "name 1", "name 2"), "'txt'"),
        ({"txt": "a caption {i}", "cls": "{c}"}, {}, ("0", "1", "2"), "'cls'"),
        ({"kind": "k{c}", "cls": "{c}"}, {"label_column": "kind"}, ("k0", "k1", "k2"), "'kind'"),
    ],
)
def test_where_labels_stand(
    tmp_path: Path, members: dict[str, str], options: dict[str, str], classes: tuple[str, ...], said: str
) -> None:
    dataset = open_data(shard(tmp_path / "a.tar", samples(range(6), **members)), **options)  # type: ignore[arg-type]
    assert dataset.labels is not None
    assert dataset.labels.class_names == classes
    assert any(said in note for note in dataset.notes)


def test_texts_that_are_kept_and_a_chosen_image(tmp_path: Path) -> None:
    members = samples(range(3), json='{{"label": {c}, "url": "u/{i}"}}', txt="caption {i}")
    members |= {f"{i:06d}.seg.png": png(i + 50) for i in range(3)}
    dataset = open_data(shard(tmp_path / "a.tar", members), keep="url,txt", image_column="seg.png")
    assert dataset.texts["url"].tolist() == ["u/0", "u/1", "u/2"]
    assert dataset.texts["txt"].tolist() == ["caption 0", "caption 1", "caption 2"]
    np.testing.assert_array_equal(dataset.read(slice(0, 1))[0], decode_image(png(50)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"000001.png": None}, r"1 of 20 images cannot be read \(.*a.tar!000001: has no image"),
        (
            {"000001.png": png(1)[:40]},
            r"1 of 20 images cannot be read \(.*a.tar!000001.png: not an image",
        ),
        ({"000001.json": b"{"}, r"a.tar!000001\.json is not a JSON object"),
        ({"000001.json": b"[1]"}, r"a.tar!000001\.json is not a JSON object"),
        ({"000001.json": b"\xff\xfe"}, r"a.tar!000001\.json is not UTF-8 text"),
        ({"000001.json": b"[" * 100_000}, r"a.tar!000001\.json is not a JSON object"),
        ({"000001.json": b" " * (2 << 20)}, r"a.tar!000001\.json: 2,097,152 bytes are too large"),
        (
            {"000001.jpg": b"x"},
            r"a.tar!000001 has several images \(jpg, png\): name one with --read image_column",
        ),
    ],
)
def test_damaged_samples(tmp_path: Path, change: dict[str, bytes | None], why: str) -> None:
    members = samples(range(20), json='{{"label": {c}}}') | change
    spec = shard(
        tmp_path / "a.tar", {name: content for name, content in members.items() if content is not None}
    )
    with pytest.raises(DataError, match=why):
        open_data(spec).read(slice(None))
    if "cannot be read" in why:
        tolerant = open_data(spec, max_bad=0.05)
        assert [image is None for image in tolerant.read(slice(None))] == [i == 1 for i in range(20)]


@given(
    keys=st.lists(
        st.text(
            st.characters(codec="utf-8", exclude_characters="/\\.\0", exclude_categories=("Cs",)),
            min_size=1,
            max_size=9,
        ),
        min_size=1,
        max_size=6,
        unique=True,
    ),
    labels=st.data(),
)
@settings(max_examples=30, deadline=None)
def test_any_keys_and_labels_come_back(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], labels: st.DataObject
) -> None:
    given_labels = [labels.draw(st.integers(-1, 5)) for _ in keys]
    members: dict[str, bytes] = {}
    for i, (key, label) in enumerate(zip(keys, given_labels, strict=True)):
        members |= {f"a/{key}.png": png(i), f"a/{key}.json": json.dumps({"label": label}).encode()}
    dataset = open_data(shard(tmp_path_factory.mktemp("any") / "a.tar", members))
    assert isinstance(dataset, ImageDataset)
    assert dataset.texts["name"].tolist() == [f"a/{key}" for key in keys]
    numbers = [-1] * len(keys)
    if dataset.labels is not None:
        names = [*map(int, dataset.labels.class_names), -1]
        numbers = [names[c] for c in dataset.labels.class_ids()]
    assert numbers == given_labels
