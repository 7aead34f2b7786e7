"""Names, labels and kept columns of items: files of rows hold them, and an index finds them by id."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpq_faiss.errors import DataError
from gpq_faiss.store import (
    Header,
    ItemBlock,
    Items,
    RowReader,
    RowWriter,
    as_texts,
    items_path,
    write_items,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
CLASSES = ("cat", "dog", "sea")


def header() -> Header:
    books = np.random.default_rng(0).standard_normal((2, 16, 3)).astype(np.float32)
    return Header("codes", 1, "model", books, "data", CLASSES, True)


def write(path: Path, ids: NDArray[np.int64], names: list[str], labels: NDArray[np.uint8], size: int) -> Path:
    texts = {"name": as_texts(names), "title": as_texts(name[::-1] for name in names)}

    def blocks() -> Iterator[ItemBlock]:
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            yield ItemBlock(ids[part], labels[part], {name: column[part] for name, column in texts.items()})

    return write_items(path, blocks, class_names=CLASSES, columns=("name", "title"), key="mine")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_items_are_found_by_id(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 40) | st.integers(-(2**63), 2**63 - 1), unique=True, max_size=30))
    names = data.draw(st.lists(NAMES, min_size=len(ids), max_size=len(ids)))
    on = data.draw(st.lists(st.integers(0, 7), min_size=len(ids), max_size=len(ids)))
    labels = np.packbits(np.array([[n & 1, n >> 1 & 1, n >> 2] for n in on], np.uint8).reshape(-1, 3), axis=1)
    held = np.array(ids, dtype=np.int64)
    asked = np.array([*ids[::-1], -1, 41, 17], dtype=np.int64)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "i.h5", held, names, labels, data.draw(st.integers(1, 7)))
        with Items(path) as items:
            found = items.lookup(asked)
            assert items.columns == ("name", "title")
            assert items.key == "mine"
            blocks = list(items.blocks(3))
    assert [int(i) for block in blocks for i in block.ids] == ids
    assert [str(t) for block in blocks for t in block.texts["name"]] == names
    expected = {
        i: (name or None, name[::-1], tuple(c for c, bit in zip(CLASSES, (1, 2, 4), strict=True) if n & bit))
        for i, name, n in zip(ids, names, on, strict=True)
    }
    for i, item in zip(asked.tolist(), found, strict=True):
        got = None if item is None else (item.name, item.texts["title"], item.labels)
        assert got == expected.get(i)


def test_ids_that_count_up_take_no_table(tmp_path: Path) -> None:
    n = 50_000
    names = [f"images/2024/class-{i % 100:03d}/photo-{i:07d}.jpg" for i in range(n)]
    labels = np.zeros((n, 1), np.uint8)
    write(tmp_path / "a.h5", np.arange(n), names, labels, 4096)
    with h5py.File(tmp_path / "a.h5") as h5:
        assert "ids" not in h5
    # The names have 40 bytes each; what is stored is a fraction of that.
    assert (tmp_path / "a.h5").stat().st_size < 2 * 40 * n / 3
    with Items(tmp_path / "a.h5") as items:
        assert [item and item.name for item in items.lookup(np.array([49_999, 3, 50_000]))] == [
            names[-1],
            names[3],
            None,
        ]


def test_where_the_items_of_an_index_lie() -> None:
    assert items_path("x/index.faiss") == Path("x/index.faiss.items.h5")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 255))
def test_a_damaged_file_is_an_error_or_gives_texts(at: int, value: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(
            Path(folder) / "i.h5", np.array([5, 3, 9]), ["a", "bb", ""], np.zeros((3, 1), np.uint8), 2
        )
        raw = bytearray(path.read_bytes())
        raw[at % len(raw)] = value
        path.write_bytes(raw)
        try:
            with Items(path) as items:
                items.lookup(np.array([3, 5, 9]))
        except DataError as error:
            said = str(error)
        else:
            said = str(path)
        assert str(path) in said


def test_rows_hold_texts(tmp_path: Path) -> None:
    ids = np.array([7, 3, 5], dtype=np.int64)
    names = {7: "seven", 3: "drei", 5: "日本.jpg"}
    with RowWriter(tmp_path / "codes.h5", header()) as writer:
        writer.append(np.zeros((3, 1), np.uint8), ids, np.zeros((3, 1), np.uint8))
        writer.finish({"name": lambda asked: as_texts(names[int(i)] for i in asked)})
    with RowReader(tmp_path / "codes.h5") as reader:
        assert reader.text_columns == ("name",)
        assert reader.texts()["name"].tolist() == ["seven", "drei", "日本.jpg"]
        assert reader.texts(1, 2)["name"].tolist() == ["drei"]


def test_a_text_that_is_too_long_is_named(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "codes.h5", header()) as writer:
        writer.append(np.zeros((1, 1), np.uint8), np.array([1]), np.zeros((1, 1), np.uint8))
        with pytest.raises(DataError, match="70,000 bytes"):
            writer.finish({"name": lambda _: as_texts(["x" * 70_000])})
    assert not (tmp_path / "codes.h5").exists()


def test_bytes_that_are_no_text_become_one() -> None:
    assert as_texts([b"caf\xe9.jpg".decode("utf-8", "surrogateescape")]).tolist() == ["caf\\xe9.jpg"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda h5: h5.attrs.pop("key"), "has no attribute 'key'"),
        (lambda h5: h5.attrs.__setitem__("kind", np.bytes_("rows")), "is not "),
        (lambda h5: _replace(h5, "ids", np.zeros(2, np.int64)), "is not int64 \\[3\\]: damaged"),
        (lambda h5: _replace(h5, "labels", np.zeros((3, 2), np.uint8)), "labels are \\[3, 2\\]: damaged"),
        (lambda h5: _replace(h5, "rows", np.array([0, 9, 1])), "a row 9 of 3: damaged"),
        (lambda h5: _replace(h5, "text.name.ends", np.zeros(2, np.int64)), "not a column of 3 texts"),
        (lambda h5: _replace(h5, "text.name.ends", np.array([9, 4, 2])), "texts of impossible lengths"),
        (lambda h5: _replace(h5, "text.name", np.full(6, 255, np.uint8)), "not valid UTF-8"),
    ],
)
def test_a_damaged_file_of_items_is_one_error(
    tmp_path: Path, damage: Callable[[h5py.File], object], message: str
) -> None:
    ids = np.array([30, 10, 20])
    path = write(tmp_path / "i.h5", ids, ["ab", "cd", "ef"], np.zeros((3, 1), np.uint8), 2)
    with h5py.File(path, "r+") as h5:
        damage(h5)
    with pytest.raises(DataError, match=message), Items(path) as items:
        items.lookup(ids)


def _replace(h5: h5py.File, name: str, values: NDArray[np.generic]) -> None:
    assert name in h5
    del h5[name]
    h5[name] = values
