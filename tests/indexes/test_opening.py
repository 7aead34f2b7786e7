"""Opening an index: its names belong to it, and the changes of a service are applied."""

import contextlib
import logging
import shutil
import sqlite3
import time

import faiss
import numpy as np
import pytest
from index_factory import books, make_model, make_rows, queries, random_codes, random_ids, same

from gpq_faiss import Index, index, info, open_index
from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.store.changes import ChangeWriter, changes_path, read_changes
from gpq_faiss.store.hdf5 import as_texts
from gpq_faiss.store.items import Item, items_path

M, N = 4, 60
Z, CODES, IDS = books(M), random_codes(N, M), np.arange(N) * 3
NEW = random_codes(9, M, seed=7)
FORMS = ["index.faiss", "index.lists", "codes.h5"]


@pytest.fixture
def folder(tmp_path):
    """A model, and codes with names and labels."""
    make_model(tmp_path / "model", Z)
    codes(tmp_path / "codes.h5")
    return tmp_path


def codes(path, ids=IDS, values=CODES, prefix="item", classes=("cat", "dog")):
    """Write rows of which odd ones have the last class and even ones the first."""
    names = as_texts(f"{prefix} {number}" for number in ids.tolist())
    flags = np.eye(len(classes), dtype=bool)[np.arange(len(ids)) % 2 * (len(classes) - 1)]
    about = {"texts": {"name": names}, "class_names": classes}
    return make_rows(path, values, ids, Z, labels=np.packbits(flags, axis=1), **about)


def built(folder, form="index.faiss", source="codes.h5", **options):
    """Return the path of an index of any form."""
    if form == "codes.h5":
        return folder / source
    return index(folder / "model", folder / source, folder / form, **options)


def change(path, changes):
    """Make changes as a service does: id -> code (None: remove), name and labels."""
    with ChangeWriter(path, 2, open_index(path, changes=False).fingerprint) as writer:
        writer.write(
            {number: (code, name, labels) for number, (code, name, labels) in changes.items()}
        )


def add(row, name="new"):
    return bytes(NEW[row]), name, ("new",)


REMOVE = None, None, None


def contents(opened):
    """Code and name of every item by id."""
    values, ids = opened.items_by_id()
    names = [None] * len(ids)
    if opened.items is not None:
        names = [value and value.name for value in opened.items.lookup(ids)]
    return {i: (bytes(c), name) for i, c, name in zip(ids.tolist(), values, names, strict=True)}


START = {i: (bytes(code), f"item {i}") for i, code in zip(IDS.tolist(), CODES, strict=True)}


# Names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_names_and_labels_come_with_the_index(folder, form):
    with open_index(built(folder, form)) as opened:
        assert contents(opened) == START
        expected = [Item({"name": "item 3"}, ("dog",)), Item({"name": "item 6"}, ("cat",)), None]
        assert opened.items.lookup(np.array([3, 6, 4])) == expected


def test_index_goes_without_names(folder):
    path = built(folder, names=False)
    assert not items_path(path).exists()
    assert open_index(path).items is None


@pytest.mark.parametrize("form", ["index.faiss", "index.lists"])
def test_names_of_another_index_are_not_shown(folder, form, caplog):
    path = built(folder, form)
    codes(folder / "other.h5", IDS + 1)
    other = built(folder, f"other-{form}", "other.h5")
    shutil.copy(items_path(other), items_path(path))
    before = items_path(path).read_bytes()
    assert open_index(path).items is None
    assert "items.sqlite belongs to another index: results of" in caplog.text
    assert items_path(path).read_bytes() == before


def test_renamed_index_keeps_its_names(folder):
    path = built(folder)
    moved = path.rename(folder / "moved.faiss")
    items_path(path).rename(items_path(moved))
    assert contents(open_index(moved)) == START


def test_rebuilt_index_drops_the_old_names(folder):
    path = built(folder)
    built(folder, names=False, overwrite=True)
    assert not items_path(path).exists()


def test_every_source_keeps_its_classes(folder):
    codes(folder / "more.h5", IDS + 1, prefix="more", classes=("emu", "fox", "cat"))
    sources = [folder / "codes.h5", folder / "more.h5"]
    with open_index(index(folder / "model", sources, folder / "both.faiss")) as opened:
        expected = ("cat",), ("emu",), ("dog",), ("cat",)
        looked_up = opened.items.lookup(np.array([0, 1, 3, 4]))
        assert tuple(item.labels for item in looked_up) == expected
        assert [item.name for item in looked_up[:2]] == ["item 0", "more 1"]


def test_items_file_without_its_tables_is_one_line(folder):
    path = built(folder)
    items_path(path).write_bytes(b"SQLite format 3\0")
    with pytest.raises(DataError, match=r"items.sqlite is truncated, damaged or foreign"):
        open_index(path)


# Changes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_changes_are_applied(folder, form):
    path = built(folder, form)
    change(path, {3: REMOVE, 6: add(0, "replaced"), 1000: add(1), 1001: add(2, None)})
    change(path, {1001: REMOVE, 999: REMOVE})
    expected = START | {6: (bytes(NEW[0]), "replaced"), 1000: (bytes(NEW[1]), "new")}
    del expected[3]
    with open_index(path) as opened:
        assert contents(opened) == expected
        assert opened.items.lookup(np.array([6, 3])) == [Item({"name": "replaced"}, ("new",)), None]
    assert contents(open_index(path, changes=False)) == START


def test_changed_index_searches_as_a_new_one(folder):
    path, xq = built(folder), queries(5, M * 4)
    change(path, {3: REMOVE, 6: add(0), 1000: add(1)})
    ids = np.array([*(i for i in IDS.tolist() if i not in (3, 6)), 6, 1000])
    values = np.concatenate([CODES[~np.isin(IDS, (3, 6))], NEW[:2]])
    assert same(open_index(path).search(xq, 59), Index.build(values, Z, ids).search(xq, 59))


@pytest.mark.parametrize("form", ["index.faiss", "index.lists"])
@pytest.mark.parametrize("source", FORMS)
def test_index_takes_changes_up(folder, source, form):
    path = built(folder, source)
    change(path, {3: REMOVE, 6: add(0, "replaced"), 1000: add(1)})
    expected = contents(open_index(path))
    new = index(folder / "model", path, folder / f"new-{form}")
    number = read_changes(path, 2, open_index(path).fingerprint).number
    with open_index(new) as opened:
        assert contents(opened) == expected
        assert opened.contained[1] == number == 1


def test_changes_after_those_taken_up_are_applied(folder):
    path = built(folder)
    change(path, {3: REMOVE, 6: add(0)})
    new = index(folder / "model", path, folder / "new.faiss")
    change(path, {3: add(1, "again"), 9: REMOVE})
    expected = contents(open_index(path))
    shutil.copy(changes_path(path), changes_path(new))  # the service opens the newer index
    assert contents(open_index(new)) == expected
    assert expected[3] == (bytes(NEW[1]), "again")


def test_only_later_changes_are_applied(folder, caplog):
    caplog.set_level(logging.INFO, "gpq_faiss")
    path = built(folder)
    change(path, {3: REMOVE, 6: add(0)})
    new = index(folder / "model", path, folder / "new.faiss")
    change(path, {9: REMOVE})
    shutil.copy(changes_path(path), changes_path(new))
    caplog.clear()
    open_index(new)
    assert "new.faiss.changes.sqlite: 1 changes are applied" in caplog.text


def test_nightly_rebuild_neither_undoes_nor_loses_a_change(folder):
    path = built(folder)
    change(path, {3: REMOVE, 1000: add(1)})
    expected = contents(open_index(path))
    built(folder, overwrite=True)  # of the same rows, without the changes
    assert contents(open_index(path)) == expected


def test_changes_of_another_identity_are_applied_whole(folder):
    path = built(folder)
    change(path, {3: REMOVE})
    new = index(folder / "model", path, folder / "new.faiss")
    change(new, {6: REMOVE})  # a file of its own, whose numbers begin anew
    assert contents(open_index(new)).keys() == START.keys() - {3, 6}


def test_removed_id_does_not_return_with_its_name(folder):
    path = built(folder)
    change(path, {3: REMOVE})
    new = index(folder / "model", path, folder / "new.faiss")
    change(new, {3: add(0, None)})
    for opened in (
        open_index(new),
        open_index(index(folder / "model", new, folder / "third.faiss")),
    ):
        assert contents(opened)[3] == (bytes(NEW[0]), None)


def test_index_without_any_item_is_one_line(folder):
    path = built(folder)
    change(path, dict.fromkeys(IDS.tolist(), REMOVE))
    with pytest.raises(DataError, match="all items were removed: index the codes again"):
        open_index(path)


def test_changes_of_other_codebooks_are_a_mismatch(folder):
    path, other = built(folder), folder / "other.faiss"
    faiss.write_index(Index.build(CODES, books(M, seed=1)).to_faiss(), str(other))
    change(other, {3: REMOVE})
    shutil.copy(changes_path(other), changes_path(path))
    with pytest.raises(MismatchError, match="changes of an index with other codebooks"):
        open_index(path)


@pytest.mark.parametrize("damage", [b"", b"SQLite format 3\0", b"x" * 5000])
def test_damaged_changes_are_one_line(folder, damage):
    path = built(folder)
    changes_path(path).write_bytes(damage)
    with pytest.raises(DataError, match=r"changes\.sqlite cannot be read as changes of an index"):
        open_index(path)


def test_journal_that_a_kill_left_is_rolled_back(folder):
    path = built(folder)
    change(path, {3: REMOVE})
    with contextlib.closing(sqlite3.connect(changes_path(path), isolation_level=None)) as db:
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN IMMEDIATE")
        rows = [(number, 2, None, "x" * 900, None) for number in range(100)]
        db.executemany("REPLACE INTO changes VALUES (?, ?, ?, ?, ?)", rows)
        killed = folder / "killed.faiss"
        for file in folder.glob("index.faiss*"):
            shutil.copy(file, folder / file.name.replace("index", "killed", 1))
    assert (folder / "killed.faiss.changes.sqlite-journal").exists()
    assert contents(open_index(killed)).keys() == START.keys() - {3}


def test_info_counts_the_changes(folder):
    path = built(folder)
    change(path, {3: REMOVE, 1000: add(1), 1001: add(2)})
    about = info(path)
    assert (about["ntotal"], about["changed_items"]) == (N + 1, 3)
    assert (about["changes"], about["names"]) == (str(changes_path(path)), str(items_path(path)))


# Mapped lists -------------------------------------------------------------------------------------


def test_lists_open_at_once(folder):
    n = 300_000
    make_rows(folder / "many.h5", random_codes(n, M), random_ids(n), Z)
    path = built(folder, "index.lists", "many.h5")
    open_index(path)
    start = time.perf_counter()
    assert open_index(path).ntotal == n
    assert time.perf_counter() - start < 0.1


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data[:100], lambda data: data[:9]]
)
def test_damaged_lists_are_one_line(folder, damage):
    path = built(folder, "index.lists")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"index\.lists"):
        open_index(path)
