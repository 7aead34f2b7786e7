"""Names in the form of earlier versions (HDF5) are converted once, when they are read."""

import contextlib
import json
import os
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.build import item_files
from gpq_faiss.build.item_files import open_items
from gpq_faiss.errors import DataError
from gpq_faiss.store.items import Item, items_path

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 30), unique=True, max_size=12)
CLASSES = ("dog", "cat", "日本", *(f"class {i}" for i in range(7)))


def write_old(index, ids, columns, labels, key="mine"):
    """The files of an index of these items, but for the index itself, as earlier versions wrote them."""
    n, order = len(ids), np.argsort(ids, kind="stable")
    held = {} if list(ids) == list(range(n)) else {"ids": np.array(ids, np.int64)[order], "rows": order}
    if labels is not None:
        on = np.array([[name in row for name in CLASSES] for row in labels], bool).reshape(n, len(CLASSES))
        held["labels"] = np.packbits(on, axis=1)
    for name, texts in columns.items():
        encoded = [text.encode() for text in texts]
        held[f"text.{name}"] = np.frombuffer(b"".join(encoded), np.uint8)
        held[f"text.{name}.ends"] = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    path = Path(f"{index}.items.h5")
    with h5py.File(path, "w", libver=("v110", "v110")) as h5:
        for name, array in held.items():
            packing = {"compression": "gzip", "shuffle": True, "fletcher32": True} if array.size else {}
            h5.create_dataset(name, data=array, **packing)
        classes = json.dumps(() if labels is None else CLASSES)
        attributes = {"kind": "items", "class_names": classes, "key": key}
        h5.attrs.update({name: np.bytes_(value.encode()) for name, value in attributes.items()})
        h5.attrs.update(format_version=1, ntotal=n)
    write_sidecar(index, {"items": "mine"})
    return path


def write_sidecar(index, extra):
    stated = dict.fromkeys(("codebooks_fingerprint", "model_fingerprint", "sha256"), "0")
    stated |= dict.fromkeys(("format_version", "ntotal", "codebooks", "codewords", "subdim", "bytes"), 1)
    Path(f"{index}.json").write_text(
        json.dumps({**stated, "kind": "IndexPQ", "versions": {}, "extra": extra})
    )


@given(data=st.data(), ids=IDS | st.integers(1, 9).map(range), named=st.booleans(), labelled=st.booleans())
def test_old_names_are_those_of_the_converted_file(data, ids, named, labelled):
    n = len(ids)
    texts = st.lists(TEXTS, min_size=n, max_size=n)
    columns = {name: data.draw(texts) for name in (["name", "title"] if named else ["title"])}
    rows = st.lists(st.lists(st.sampled_from(CLASSES), unique=True), min_size=n, max_size=n)
    labels = data.draw(rows) if labelled else None
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index.faiss"
        old = write_old(index, ids, columns, labels)
        before = old.read_bytes()
        for _ in range(2):
            items = open_items(index)
            with items:
                assert [number for number, *_ in items.rows()] == sorted(ids)
                found = items.lookup(np.array([*ids, 31, -1], np.int64))
            for row, item in enumerate(found[:n]):
                told = {name: of[row] for name, of in columns.items() if name != "name" or of[row]}
                assert item == Item(told, None if labels is None else tuple(labels[row]))
            assert found[n + 1] is None
            assert old.read_bytes() == before
            old.write_bytes(b"never read again")
            before = old.read_bytes()
        left = {path.name for path in Path(folder).iterdir()}
        assert left == {"index.faiss.items.h5", "index.faiss.items.sqlite", "index.faiss.json"}


def test_old_names_of_another_index_or_in_a_folder_that_cannot_be_written_are_not_converted(
    tmp_path, caplog, monkeypatch
):
    index = tmp_path / "index.faiss"
    for key, why in (("other", "belongs to another index"), ("mine", "its folder cannot be written")):
        write_old(index, [0, 1], {"name": ["a", "b"]}, None, key=key)
        assert open_items(index) is None
        assert why in caplog.text
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert not items_path(index).exists()


@pytest.mark.parametrize("by", ["conversion", "index"])
def test_what_another_process_publishes_meanwhile_stays(tmp_path, monkeypatch, by):
    index, write = tmp_path / "index.faiss", item_files.write_items
    write_old(index, [0, 1], {"name": ["a", "b"]}, None)

    def slowly(path, rows, key):
        write(path, rows, key)
        if by == "conversion":
            write(items_path(index), [(0, "first", None, None)], key)
        else:
            write_sidecar(index, {})

    monkeypatch.setattr(item_files, "write_items", slowly)
    with open_items(index) or contextlib.nullcontext() as items:
        names = None if items is None else [row[1] for row in items.rows()]
    assert names == (["first"] if by == "conversion" else None)
    assert items_path(index).exists() == (by == "conversion")


DAMAGE = {
    "row out of range": lambda h5: h5["rows"].write_direct(np.array([0, 1, 3])),
    "repeated id": lambda h5: h5["ids"].write_direct(np.array([5, 5, 9])),
    "claimed rows": lambda h5: h5.attrs.update(ntotal=1 << 60),
    "claimed ids": lambda h5: (
        h5.pop("ids"),
        h5.create_dataset("ids", (1 << 40,), np.int64, chunks=(1 << 10,)),
    ),
    "class names": lambda h5: h5.attrs.update(class_names=np.bytes_(b"[1]")),
    "lengths": lambda h5: h5["text.name.ends"].write_direct(np.array([1, 70_000, 3])),
    "version": lambda h5: h5.attrs.update(format_version=2),
    "no key": lambda h5: h5.attrs.pop("key"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_or_foreign_old_names_are_one_error(tmp_path, what):
    index = tmp_path / "index.faiss"
    path = write_old(index, [9, 5, 7], {"name": ["a", "b", "c"]}, [["dog"], [], ["cat"]])
    with h5py.File(path, "r+") as h5:
        DAMAGE[what](h5)
    with pytest.raises(DataError, match=r"index\.faiss\.items\.h5"):
        open_items(index)
    assert not items_path(index).exists()
    assert len(list(tmp_path.iterdir())) == 2
