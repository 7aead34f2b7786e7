"""Images of folders, archives, lists, tables and objects are the same items; damage follows the limit; nothing leaves a tar."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import Items, png, put, raw_tar, save
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from gpq_faiss.data import folder as folder_module
from gpq_faiss.data.base import ImageDataset
from gpq_faiss.data.folder import layout_of, open_tar, read_piece
from gpq_faiss.data.images import decode_image
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError

N = 24
KINDS = ["ant", "bee", "cat"]
Y = np.sort(np.arange(N) % 3)
NAMES = [f"{KINDS[y]}/{i:02d}.png" for i, y in enumerate(Y)]
PIXELS = np.stack([decode_image(png(i, 8)) for i in range(N)])
HUB = {"image": datasets.Image(), "label": datasets.ClassLabel(names=KINDS)}


def hub(rows: slice = slice(None), **columns: Any) -> datasets.Dataset:
    held = {"image": [Image.fromarray(p) for p in PIXELS[rows]], "label": Y[rows].tolist()}
    found = datasets.Dataset.from_dict(held, features=datasets.Features(HUB))
    for name, values in columns.items():
        found = found.add_column(name, values)
    return found


def shard(path: Path, members: dict[str, bytes]) -> str:
    path.write_bytes(raw_tar(*((name, tarfile.REGTYPE, content) for name, content in members.items())))
    return f"webdataset:{path}"


def source(form: str, root: Path) -> Any:
    """The images in a form. Names are those of files, numbers of rows, or none."""
    for i, name in enumerate(NAMES):
        (root / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "images" / name).write_bytes(png(i, 8))
    kinds = [KINDS[y] for y in Y]
    images = [Image.fromarray(p) for p in PIXELS]
    planes = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    if form in ("a.tar", "a.tar.gz"):
        with tarfile.open(root / form, "w:gz" if form.endswith("gz") else "w") as out:  # type: ignore[call-overload]
            out.add(root / "images", arcname="top" if form.endswith("gz") else ".")
    elif form == "shards":
        for k in (8, 9, 10):
            part = range(8 * (k - 8), 8 * (k - 7))
            members = {
                f"{i}.{e}": c for i in part for e, c in (("png", png(i, 8)), ("cls", kinds[i].encode()))
            }
            shard(root / f"x-{k}.tar", members)
        return f"webdataset:{root}/x-{{8..10}}.tar"
    elif form in ("t.csv", "t.parquet"):
        table = {"image": [f"images/{name}" for name in NAMES], "label": kinds}
        lines = ["image,label", *map(",".join, zip(*table.values(), strict=True))]
        save(root / form, table if form.endswith("parquet") else "\n".join(lines))
    elif form == "l.txt":
        (root / "classes.txt").write_text("\n".join(KINDS))
        save(
            root / form,
            "".join(
                f"images\\{n} {' '.join(str(int(y == c)) for c in range(3))}\r\n"
                for n, y in zip(NAMES, Y, strict=True)
            ),
        )
    elif form == "hub":
        datasets.DatasetDict({"test": hub(slice(20, None)), "train": hub(slice(20))}).save_to_disk(
            str(root / form)
        )
    return {
        "Dataset": hub,
        "items": lambda: Items(list(zip(images, kinds, strict=True))),
        "targets": lambda: Items(list(planes), targets=Y.tolist(), classes=KINDS),
        "tensors": lambda: TensorDataset(planes / 255, torch.from_numpy(Y)),
        "subset": lambda: Subset(TensorDataset(planes, torch.from_numpy(Y)), range(N)),
        "array": lambda: PIXELS,
        "planes": lambda: PIXELS.transpose(0, 3, 1, 2),
    }.get(form, lambda: root / form)()


FILES = {"images": "folder", "a.tar": "folder", "a.tar.gz": "folder", "shards": "", "t.csv": "csv"}
FILES |= {"hub": "hf", "t.parquet": "parquet", "l.txt": "list"}


@pytest.mark.parametrize(
    "form", [*FILES, "Dataset", "items", "targets", "tensors", "subset", "array", "planes"]
)
def test_every_form_is_the_same_images(tmp_path: Path, form: str) -> None:
    given_ = source(form, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    data = open_data(given_, labels=Y) if form in ("array", "planes") else open_data(given_)
    assert isinstance(data, ImageDataset)
    assert data.native_size == 8
    assert data.require_labels().class_ids().tolist() == Y.tolist()
    names = ("0", "1", "2") if form in ("tensors", "subset", "array", "planes") else tuple(KINDS)
    assert data.require_labels().class_names == names
    order = np.random.default_rng(0).permutation(N)
    for rows in (slice(None), order):
        for image, pixels in zip(data.read(rows), PIXELS[rows], strict=True):
            np.testing.assert_array_equal(image, pixels)
    assert (data.pixels is not None) == (form in ("array", "planes"))
    is_file = form in ("images", "t.csv", "t.parquet", "l.txt")
    assert [data.image_path(i) for i in range(N)] == [
        str(tmp_path / "images" / n) if is_file else None for n in NAMES
    ]
    if form in ("images", "a.tar"):
        assert data.texts["name"].tolist() == NAMES
    assert sorted(tmp_path.rglob("*")) == before, "nothing is extracted"
    if FILES.get(form):  # a path is opened by what it is
        named = open_data(f"{FILES[form]}:{given_}")
        assert (named.name, named.fingerprint) == (data.name, data.fingerprint)
        assert open_data(str(given_)).name == data.name
    again = source(form, tmp_path / "other")
    again = open_data(again, labels=Y) if form in ("array", "planes") else open_data(again)
    assert (again.fingerprint == data.fingerprint) or form in ("hub", "a.tar.gz")


BROKEN: Any = [{"bytes": b"no image" if i == 3 else png(i), "path": None} for i in range(30)]
GONE: Any = [OSError("the disk\nis gone") if i == 3 else (PIXELS[i % N], 0) for i in range(30)]


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (
            datasets.Dataset.from_dict({"image": BROKEN}).cast_column("image", datasets.Image()),
            "Dataset!row 3: not an",
        ),
        (Items(GONE), "item 3: the disk is gone"),
    ],
)
def test_broken_images_follow_the_limit(held: Any, why: str) -> None:
    with pytest.raises(DataError, match=rf"1 of 30 images cannot be read \({why}"):
        open_data(held).read(slice(None))
    tolerant = open_data(held, max_bad=0.1)
    assert [i for i, image in enumerate(tolerant.read(slice(None))) if image is None] == [3]


def test_columns_of_a_hub_and_its_parts(tmp_path: Path) -> None:
    held = hub(file=[f"f{i}" for i in range(N)], path=NAMES, id=list(range(100, 100 + N)))
    data = open_data(held, keep="file")
    assert data.ids.tolist() == list(range(100, 100 + N))
    assert (data.texts["name"][4], data.texts["file"][4]) == (NAMES[4], "f4")
    assert "parts: train, test" in open_data(source("hub", tmp_path)).notes


# Folders and archives ---------------------------------------------------------------------------------------------------


def test_folder_of_classes(tmp_path: Path) -> None:
    put(tmp_path, "cat/2.png", "cat/1.PNG", "ant/x/deep.png", "bee/0.jpg", ".hidden/a.png", "bee/._0.jpg")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "ant" / "loop").symlink_to(tmp_path)
    dataset: Any = open_data(tmp_path)
    names = ["ant/x/deep.png", "bee/0.jpg", "cat/1.PNG", "cat/2.png"]
    assert [os.path.relpath(path, tmp_path) for path in dataset.paths] == names
    assert dataset.labels.class_ids().tolist() == [0, 1, 2, 2]
    assert dataset.notes == ["1 files without an image extension, left out"]


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


def test_archive_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bomb.tar.gz"
    file.write_bytes(gzip.compress(raw_tar(("a/x.png", tarfile.REGTYPE, bytes(1 << 22)))))
    for name, most, why in (
        ("SMALL_UNPACKED", 1 << 20, "unpacks to more than 1,048,576 bytes"),
        ("MAX_MEMBERS", 0, "more than 0 members"),
    ):
        with monkeypatch.context() as small:
            small.setattr(folder_module, name, most)
            with pytest.raises(DataError, match=why):
                open_tar(file)
    with pytest.raises(DataError, match="4,194,304 bytes are too large"):
        read_piece(open_tar(file)["a/x.png"], "x", 1 << 20)
    dataset = open_data(shard(tmp_path / "a.tar", {"a/x.png": png(0)}).replace("webdataset", "folder"))
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(DataError, match="shorter"):
        dataset.read(np.array([0]))


# WebDataset -------------------------------------------------------------------------------------------------------------


def samples(numbers: range, **of_each: str) -> dict[str, bytes]:
    out = {}
    for i in numbers:
        texts = {extension: text.format(i=i, c=i % 3).encode() for extension, text in of_each.items()}
        out |= {f"{i:06d}.{extension}": content for extension, content in ({"png": png(i)} | texts).items()}
    return out


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
    tmp_path: Path, members: dict[str, str], options: Any, classes: tuple[str, ...], said: str
) -> None:
    dataset = open_data(shard(tmp_path / "a.tar", samples(range(6), **members)), **options)
    assert dataset.require_labels().class_names == classes
    assert any(said in note for note in dataset.notes)


def test_texts_that_are_kept_and_a_chosen_image(tmp_path: Path) -> None:
    members = samples(range(3), json='{{"label": {c}, "url": "u/{i}"}}', txt="caption {i}")
    members |= {f"{i:06d}.seg.png": png(i + 50) for i in range(3)}
    dataset = open_data(shard(tmp_path / "a.tar", members), keep="url,txt", image_column="seg.png")
    assert dataset.texts["url"].tolist() == ["u/0", "u/1", "u/2"]
    assert dataset.texts["txt"].tolist() == ["caption 0", "caption 1", "caption 2"]
    np.testing.assert_array_equal(dataset.read(slice(0, 1))[0], decode_image(png(50)))


NO_JSON = r"a.tar!000001\.json is not a JSON object"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"000001.png": None}, r"1 of 20 images cannot be read \(.*a.tar!000001: has no image"),
        ({"000001.png": png(1)[:40]}, r"1 of 20 images cannot be read \(.*a.tar!000001.png: not an image"),
        ({"000001.json": b"{"}, NO_JSON),
        ({"000001.json": b"[" * 100_000}, NO_JSON),
        ({"000001.json": b'{"label": ' + b"[" * 900 + b"]" * 900 + b"}"}, "a label is a list in a list"),
        ({"000001.json": b"\xff\xfe"}, r"a.tar!000001\.json is not UTF-8 text"),
        ({"000001.json": b" " * (2 << 20)}, r"a.tar!000001\.json: 2,097,152 bytes are too large"),
        ({"000001.jpg": b"x"}, r"has several images \(jpg, png\): name one with --read image_column"),
    ],
)
def test_damaged_samples(tmp_path: Path, change: dict[str, bytes | None], why: str) -> None:
    members = samples(range(20), json='{{"label": {c}}}') | change
    spec = shard(tmp_path / "a.tar", {n: content for n, content in members.items() if content is not None})
    with pytest.raises(DataError, match=why):
        open_data(spec).read(slice(None))
    if "cannot be read" in why:
        tolerant = open_data(spec, max_bad=0.05)
        assert [image is None for image in tolerant.read(slice(None))] == [i == 1 for i in range(20)]


TEXT = st.characters(codec="utf-8", exclude_characters="/\\.\0", exclude_categories=("Cs",))


@given(st.dictionaries(st.text(TEXT, min_size=1, max_size=4), st.integers(-1, 5), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_any_keys_and_labels_come_back(
    tmp_path_factory: pytest.TempPathFactory, given_: dict[str, int]
) -> None:
    members: dict[str, bytes] = {}
    for i, (key, label) in enumerate(given_.items()):
        members |= {f"a/{key}.png": png(i), f"a/{key}.json": json.dumps({"label": label}).encode()}
    dataset = open_data(shard(tmp_path_factory.mktemp("any") / "a.tar", members))
    assert dataset.texts["name"].tolist() == [f"a/{key}" for key in given_]
    numbers = [-1] * len(given_)
    if dataset.labels is not None:
        names = [*map(int, dataset.labels.class_names), -1]
        numbers = [names[c] for c in dataset.labels.class_ids()]
    assert numbers == list(given_.values())


# Lists and tables -------------------------------------------------------------------------------------------------------


def test_list_of_hashing_papers(tmp_path: Path) -> None:
    put(tmp_path, "images/a.png", "images/b c.png", "images/d.png")
    lines = "images/a.png 1 0 1\r\n\nimages/b c.png  0 0 0 \nimages\\d.png 0 1 0\n"
    dataset = open_data(save(tmp_path / "train.txt", lines))
    assert dataset.require_labels().dense().tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert all(image is not None for image in dataset.read(slice(None)))
    (tmp_path / "x").mkdir()
    ids = open_data(save(tmp_path / "x" / "ids.txt", "a.png 12\nd.png -1\n"), root=tmp_path / "images")
    assert ids.require_labels().class_ids().tolist() == [12, -1]
    assert open_data(save(tmp_path / "x" / "bare.txt", "a.png\n"), root=tmp_path / "images").labels is None


def test_columns_of_csv(tmp_path: Path) -> None:
    put(tmp_path / "pictures", "a.png", "b.png", "c,d.png")
    text = '\ufeffid,image,label,title\n7,a.png,sea|sky,x\n-9223372036854775808,b.png,,y\n\n3,"c,d.png", sky | ,\n'
    file, root = save(tmp_path / "t.csv", text), tmp_path / "pictures"
    dataset = open_data(file, root=root, keep="title")
    assert dataset.ids.tolist() == [7, -(2**63), 3]
    assert dataset.require_labels().dense().tolist() == [[1, 1], [0, 0], [0, 1]]
    assert all(image is not None for image in dataset.read(slice(None)))
    texts = {name: column.tolist() for name, column in dataset.texts.items()}
    assert texts == {"name": ["a.png", "b.png", "c,d.png"], "title": ["x", "y", ""]}
    assert dataset.fingerprint != open_data(file, root=root).fingerprint
    other = save(tmp_path / "t.tsv", "file\tkind\na.png\t10\nb.png\t9\n")
    found = open_data(other, image_column="file", label_column="kind", root=root)
    assert found.require_labels().class_names == ("9", "10")
