"""webdataset: the images, labels and keys of tar shards, read in place; damaged samples follow the limit; nothing leaves the tar."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import png

from gpq_faiss.data.images import FileImages, decode_image
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError


def shard(path: Path, members: Mapping[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def samples(numbers: range, **of_each: str) -> dict[str, bytes]:
    out = {}
    for i in numbers:
        out[f"{i:06d}.png"] = png(i)
        for extension, text in of_each.items():
            out[f"{i:06d}.{extension}"] = text.format(i=i, c=i % 3).encode()
    return out


def names(dataset: object) -> list[str]:
    assert isinstance(dataset, FileImages)
    return [str(name) for name in dataset.texts["name"]]


def test_shards_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for k in (10, 9, 8):
        shard(tmp_path / f"x-{k:03d}.tar", samples(range(4 * k, 4 * k + 4), cls="{c}"))
    wanted = [f"{i:06d}" for i in range(32, 44)]
    for pattern in ("x-{008..010}.tar", "x-*.tar", "x-{008..009}*.tar"):
        dataset = open_data(f"webdataset:{tmp_path}/{pattern}")
        assert isinstance(dataset, FileImages)
        n = 8 if "009" in pattern else 12
        assert names(dataset) == wanted[:n]
        assert dataset.labels is not None
        assert dataset.labels.class_ids().tolist() == [i % 3 for i in range(32, 32 + n)]
        assert dataset.ids.tolist() == list(range(n))
        order = np.random.default_rng(0).permutation(n)
        for i, image in zip(order, dataset.read(order), strict=True):
            assert image is not None
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
    shard(tmp_path / "a.tar", samples(range(6), **members))
    dataset = open_data(f"webdataset:{tmp_path}/a.tar", **options)  # type: ignore[arg-type]
    assert dataset.labels is not None
    assert dataset.labels.class_names == classes
    assert any(said in note for note in dataset.notes)


def test_texts_that_are_kept_and_ids_of_keys(tmp_path: Path) -> None:
    shard(tmp_path / "a.tar", samples(range(3), json='{{"label": {c}, "url": "u/{i}"}}', txt="caption {i}"))
    dataset = open_data(f"webdataset:{tmp_path}/a.tar", keep="url,txt", id_from="path")
    assert dataset.texts["url"].tolist() == ["u/0", "u/1", "u/2"]
    assert dataset.texts["txt"].tolist() == ["caption 0", "caption 1", "caption 2"]
    assert dataset.labels is not None
    shard(tmp_path / "b.tar", dict(list(samples(range(2, 3)).items())))
    again = open_data(f"webdataset:{tmp_path}/b.tar", id_from="path")
    assert again.ids.tolist() == dataset.ids[2:].tolist()
    assert again.labels is None


def test_damaged_members_follow_the_limit(tmp_path: Path) -> None:
    members = samples(range(20), cls="{c}")
    members["000003.png"] = members["000003.png"][:40]
    shard(tmp_path / "a.tar", members)
    spec = f"webdataset:{tmp_path}/a.tar"
    with pytest.raises(
        DataError, match=r"1 of 20 images cannot be read \(.*a.tar!000003.png: .*--read max_bad"
    ):
        open_data(spec).read(slice(None))
    tolerant = open_data(spec, max_bad=0.05)
    assert [i for i, image in enumerate(tolerant.read(slice(None))) if image is None] == [3]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"000001.png": None}, "000001 has no image"),
        ({"000001.json": b"{"}, r"000001 \.json is not JSON"),
        ({"000001.json": b"[1]"}, r"000001 \.json is not an object"),
        ({"000001.json": b"\xff\xfe"}, r"000001 \.json is not UTF-8 text"),
        ({"000001.json": b"[" * 100_000}, r"000001 \.json is not JSON"),
        ({"000001.json": b" " * (2 << 20)}, r"000001 \.json has 2,097,152 bytes"),
        ({"000001.jpg": b"x"}, r"000001 has several images \(jpg, png\): name one with --read image_column"),
    ],
)
def test_unusable_samples_are_left_out_up_to_the_limit(
    tmp_path: Path, change: dict[str, bytes | None], why: str
) -> None:
    members = samples(range(20), json='{{"label": {c}}}')
    members |= {name: content for name, content in change.items() if content is not None}
    for name, content in change.items():
        if content is None:
            del members[name]
    shard(tmp_path / "a.tar", members)
    spec = f"webdataset:{tmp_path}/a.tar"
    with pytest.raises(DataError, match=rf"1 of 20 samples are unusable \({why}\), above the limit of 1 %"):
        open_data(spec)
    dataset = open_data(spec, max_bad=0.05)
    assert names(dataset) == [f"{i:06d}" for i in range(20) if i != 1]
    assert all(image is not None for image in dataset.read(slice(None)))
    assert any("1 of 20 samples are unusable" in note for note in dataset.notes)


def test_a_chosen_image(tmp_path: Path) -> None:
    members = samples(range(2)) | {f"{i:06d}.seg.png": png(i + 50) for i in range(2)}
    shard(tmp_path / "a.tar", members)
    (first,) = open_data(f"webdataset:{tmp_path}/a.tar", image_column="seg.png").read(slice(0, 1))
    np.testing.assert_array_equal(first, decode_image(png(50)))


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
    dataset = open_data(f"webdataset:{shard(tmp_path_factory.mktemp('any') / 'a.tar', members)}")
    assert names(dataset) == [f"a/{key}" for key in keys]
    found = [-1] * len(keys) if dataset.labels is None else dataset.labels.class_ids().tolist()
    assert found == given_labels
