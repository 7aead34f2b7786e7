"""Names, labels and kept columns of items: files of rows hold them, and an index finds them by id."""

import contextlib
import sqlite3
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_files import header

from gpq_faiss.errors import DataError
from gpq_faiss.files import atomic_path
from gpq_faiss.store.hdf5 import as_texts
from gpq_faiss.store.items import Item, Items, item_row, items_path
from gpq_faiss.store.items import write_items as write_rows
from gpq_faiss.store.reader import RowReader
from gpq_faiss.store.writer import RowWriter

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
IDS = (st.integers(0, 40) | st.integers(-(2**63), 2**63 - 1)).filter(lambda number: number != -1)
ITEMS = st.builds(
    lambda name, title, labels: Item(
        {"name": name, **({} if title is None else {"title": title})},
        None if labels is None else tuple(labels),
    ),
    TEXTS,
    st.none() | TEXTS,
    st.none() | st.lists(TEXTS, max_size=3),
)


def write_items(path, items, key):
    write_rows(path, (item_row(number, item) for number, item in items), key)


def seen(item):
    return None if item is None else (item.name, item.texts.get("title"), item.labels)


@given(st.dictionaries(IDS, ITEMS, max_size=20), st.dictionaries(IDS, st.none() | ITEMS, max_size=6))
def test_items_are_found_by_id_also_in_a_file_made_from_another(items, changes):
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("a", "again", "changed")]
        for path in paths[:2]:
            write_items(path, items.items(), "mine")
        assert paths[0].read_bytes() == paths[1].read_bytes()
        added = {number: item for number, item in changes.items() if item is not None}
        with Items(paths[0]) as kept:
            rows = [row for row in kept.rows() if row[0] not in changes]
            write_rows(paths[2], [*rows, *(item_row(*one) for one in added.items())], "later")
        left = {number: item for number, item in items.items() if number not in changes} | added
        for path, key, expected in ((paths[0], "mine", items), (paths[2], "later", left)):
            asked = [*items, *changes, -1, 41]
            with Items(path) as found:
                assert found.key == key
                assert [number for number, *_ in found.rows()] == sorted(expected)
                assert list(map(seen, found.lookup(np.array(asked, np.int64)))) == [
                    seen(expected.get(number)) for number in asked
                ]


def test_other_programs_find_items_by_name(tmp_path):
    path = items_path(tmp_path / "index.faiss")
    assert path.name == "index.faiss.items.sqlite"
    names = {7: "pets/red cat.jpg", -(2**62): "pets/dog.jpg", 9: ""}
    write_items(path, ((i, Item({"name": name, "url": "u"}, ("b", "a"))) for i, name in names.items()), "k")
    with contextlib.closing(sqlite3.connect(path)) as db:
        found = db.execute("SELECT * FROM items WHERE name LIKE '%cat%'").fetchall()
        assert found == [(7, names[7], '["a","b"]', '{"url":"u"}')]
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def damaged(path):
    """The error of reading all of the file, if any."""
    try:
        with Items(path) as items:
            list(items.rows())
            items.lookup(np.array([3, 5, 9]))
    except DataError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("DROP TABLE about", "is not the names and labels"),
        ("DELETE FROM about", "damaged"),
        ("PRAGMA user_version = 3", "is not the names and labels"),
        (
            "ALTER TABLE items RENAME TO x; CREATE VIEW items AS SELECT * FROM x",
            "is not the names and labels",
        ),
        ("UPDATE items SET labels = '{}'", "another type"),
        ("UPDATE items SET labels = '[1]'", "is no text"),
        ("UPDATE items SET labels = '['", "damaged"),
        ("UPDATE items SET columns = '[\"x\"]'", "another type"),
        ("UPDATE items SET name = x'ff00'", "is no text"),
        ("UPDATE items SET name = CAST(x'ff' AS TEXT)", "decode"),
        ("UPDATE items SET name = hex(zeroblob(9 << 20))", "too big"),
        *((content, "items") for content in (b"", b"SQLite format 3\0", b"x" * 5000, None)),
    ],
)
def test_a_foreign_or_cut_file_is_one_error(tmp_path, damage, message):
    path = tmp_path / "items"
    write_items(path, [(5, Item({"name": "a"}, ("b",)))], "mine")
    if isinstance(damage, str):
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.executescript(damage)
    else:
        path.write_bytes(path.read_bytes()[:-5000] if damage is None else damage)
    error = damaged(path)
    assert message in error


def test_a_text_that_is_too_large_is_not_written(tmp_path):
    with (
        pytest.raises(DataError, match=r"cannot write .*items: "),
        atomic_path(tmp_path / "items") as temporary,
    ):
        write_items(temporary, [(1, Item({"name": "x" * (17 << 20)}))], "mine")
    assert not list(tmp_path.iterdir())


def texts_of(folder, names):
    """A file of rows with these names."""
    n = len(names)
    with RowWriter(folder / "codes.h5", header("codes")) as writer:
        writer.append(np.zeros((n, 2), np.uint8), np.arange(n), np.zeros((n, 2), np.uint8))
        return writer.finish(np.arange(-1, n)[::-1], {"name": as_texts(["left out", *names][::-1])})


def test_rows_hold_texts(tmp_path):
    with RowReader(texts_of(tmp_path, ["seven", "drei", "日本.jpg"])) as reader:
        assert reader.text_columns == ("name",)
        assert reader.texts()["name"].tolist() == ["seven", "drei", "日本.jpg"]
        assert reader.texts(1, 2)["name"].tolist() == ["drei"]
        assert reader.texts(2, 2)["name"].tolist() == []
    (tmp_path / "codes.h5").unlink()
    with pytest.raises(DataError, match="70,000 bytes"):
        texts_of(tmp_path, ["x" * 70_000])
    assert not (tmp_path / "codes.h5").exists()
    assert as_texts([b"caf\xe9.jpg".decode("utf-8", "surrogateescape")]).tolist() == ["caf\\xe9.jpg"]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("text.name.ends", np.zeros(2, np.int64), r"not int64 \[3\]"),
        ("text.name.ends", np.array([9, 4, 2]), "texts of impossible lengths"),
        ("text.name", np.full(6, 255, np.uint8), "not valid UTF-8"),
    ],
)
def test_damaged_texts_of_rows_are_one_error(tmp_path, name, values, message):
    path = texts_of(tmp_path, ["ab"] * 3)
    with h5py.File(path, "r+") as h5:
        del h5[name]
        h5[name] = values
    with pytest.raises(DataError, match=message), RowReader(path) as reader:
        reader.texts()
