"""Names, labels and kept columns by id: in SQLite, in a codes file, and under later changes."""

import contextlib
import sqlite3
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_factory import books, make_rows

from gpq_faiss.errors import DataError
from gpq_faiss.store.changes import Change
from gpq_faiss.store.hdf5 import as_texts
from gpq_faiss.store.items import (
    ChangedItems,
    IndexDescription,
    Item,
    Items,
    PictureRows,
    RowItems,
    as_json,
    items_path,
    write_items,
)
from gpq_faiss.store.rows import RowReader

CLASSES = tuple("abcdefghij")
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9)
IDS = st.integers(-(2**62), 2**62).filter(lambda number: number != -1)
ITEMS = st.dictionaries(
    st.integers(0, 20) | IDS,
    st.tuples(TEXTS, TEXTS, st.none() | st.lists(st.sampled_from(CLASSES), unique=True)),
    min_size=1,
    max_size=12,
)
DESCRIPTION = IndexDescription(3, 4, "data", "identity", 7)


def item(name, title, labels):
    texts = {"title": title, **({"name": name} if name else {})}
    return Item(texts, None if labels is None else tuple(sorted(labels)))


def row(number, value):
    texts = dict(value.texts)
    return number, texts.pop("name", None), as_json(value.labels), as_json(texts)


@contextlib.contextmanager
def stored(items):
    """Write items to SQLite, and open the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = items_path(Path(folder, "index.faiss"))
        write_items(path, (row(number, value) for number, value in items.items()), DESCRIPTION)
        with Items(path) as source:
            yield source


def check(source, items):
    """Items are looked up by id, and ``rows`` writes the same ones again."""
    ids = [*items, -1, 99, *items]
    assert [source.item(number) for number in ids] == [items.get(number) for number in ids]
    with tempfile.TemporaryDirectory() as folder:
        write_items(Path(folder, "copy"), source.rows(), DESCRIPTION)
        with Items(Path(folder, "copy")) as copy:
            assert {number: copy.item(number) for number in items} == items
            assert len(list(copy.rows())) == len(items)


@given(ITEMS)
def test_items_in_sqlite(values):
    items = {number: item(*value) for number, value in values.items()}
    with stored(items) as source:
        assert source.description == DESCRIPTION
        assert [number for number, *_ in source.rows()] == sorted(items)
        check(source, items)


@settings(max_examples=40)
@given(ITEMS)
def test_items_in_a_codes_file(values):
    items = {
        number: item(name, title, labels or None)
        for number, (name, title, labels) in values.items()
    }
    flags = [[name in (value.labels or ()) for name in CLASSES] for value in items.values()]
    names = as_texts(value.name or "" for value in items.values())
    texts = {"name": names, "title": as_texts(value.texts["title"] for value in items.values())}
    ids = np.array([*items], np.int64)
    options = {"labels": np.packbits(flags, axis=1), "class_names": CLASSES, "texts": texts}
    with tempfile.TemporaryDirectory() as folder:
        codes = np.zeros((len(ids), 2), np.uint8)
        path = make_rows(Path(folder, "codes.h5"), codes, ids, books(4), **options)
        with RowReader(path) as reader:
            source = RowItems(reader)
            for number, expected in items.items():
                value = source.item(number)
                assert (value.name, value.labels) == (expected.name, expected.labels)
            rows = {number: texts for number, *texts in source.rows()}
            assert rows == {number: list(row(number, value)[1:]) for number, value in items.items()}


CHANGES = st.dictionaries(
    st.integers(0, 20),
    st.builds(
        Change,
        st.just(1),
        st.none() | st.just(b"xx"),
        st.none() | TEXTS.filter(bool),
        st.none() | st.lists(TEXTS, max_size=2).map(lambda labels: tuple(sorted(labels))),
    ),
    max_size=6,
)


@given(ITEMS, CHANGES, CHANGES)
def test_changed_items_have_what_their_change_says(values, changes, later):
    items = {number: item(*value) for number, value in values.items()}
    with stored(items) as source:
        changed = ChangedItems(ChangedItems(source, changes), later)
        for number, change in {**changes, **later}.items():
            items.pop(number, None)
            if change.code is not None and (change.name, change.labels) != (None, None):
                texts = {"name": change.name} if change.name else {}
                items[number] = Item(texts, change.labels)
        for number in [*items, *changes, *later, -1]:
            assert (changed.item(number) or Item({})) == items.get(number, Item({}))
        assert {number for number, *_ in changed.rows()} == set(items)


def test_other_programs_query_the_items(tmp_path):
    path = items_path(tmp_path / "index.faiss")
    assert path.name == "index.faiss.items.sqlite"
    rows = [(7, "pets/red cat.jpg", '["a","b"]', '{"url":"u"}'), (9, "dog.jpg", None, None)]
    write_items(path, rows, DESCRIPTION)
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT * FROM items WHERE name LIKE '%cat%'").fetchall() == rows[:1]
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.parametrize(
    "damage",
    [
        "DROP TABLE about",
        "DELETE FROM about",
        "DROP TABLE items",
        "UPDATE items SET labels = '['",
        "UPDATE items SET columns = '{'",
        "UPDATE items SET name = CAST(x'ff' AS TEXT)",
        b"",
        b"SQLite format 3\0",
        b"x" * 5000,
    ],
)
def test_damaged_file_is_one_line(tmp_path, damage):
    path = tmp_path / "items"
    write_items(path, [(5, "a", '["b"]', "{}")], DESCRIPTION)
    if isinstance(damage, str):
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.executescript(damage)
    else:
        path.write_bytes(damage)
    with pytest.raises(DataError, match=r"items .*index the codes again"), Items(path) as items:
        items.item(5)


def test_files_are_found_by_name_and_content():
    texts = {"name": ["a", "b", "", "c", "c"], "file_hash": ["1", "2", "3", "4", "4"]}
    files = PictureRows(np.arange(5), {name: as_texts(texts[name]) for name in texts})
    items = [("b", "2"), ("b", "1"), ("", "3"), ("c", "4"), ("d", "5")]
    assert [files.find(7, Item({"name": n, "file_hash": c})) for n, c in items] == [1, *4 * [-1]]
