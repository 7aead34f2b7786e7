"""Opening an index: its names belong to it, and the changes of a service are applied."""

import shutil

import numpy as np
import pytest
from index_factory import books, make_model, make_rows, random_codes

from gpq_faiss import index, open_index
from gpq_faiss.errors import DataError
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
    options = {"texts": {"name": names}, "class_names": classes}
    return make_rows(path, values, ids, Z, labels=np.packbits(flags, axis=1), **options)


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
        names = [(opened.items.item(i) or Item({})).name for i in ids.tolist()]
    return {i: (bytes(c), name) for i, c, name in zip(ids.tolist(), values, names, strict=True)}


START = {i: (bytes(code), f"item {i}") for i, code in zip(IDS.tolist(), CODES, strict=True)}


# Names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_names_and_labels_come_with_the_index(folder, form):
    with open_index(built(folder, form)) as opened:
        assert contents(opened) == START
        expected = [Item({"name": "item 3"}, ("dog",)), Item({"name": "item 6"}, ("cat",)), None]
        assert [opened.items.item(number) for number in (3, 6, 4)] == expected


@pytest.mark.parametrize("form", ["index.faiss", "index.lists"])
def test_names_of_another_index_are_not_shown(folder, form, caplog):
    path = built(folder, form)
    codes(folder / "other.h5", IDS + 1)
    shutil.copy(items_path(built(folder, f"other-{form}", "other.h5")), items_path(path))
    before = items_path(path).read_bytes()
    assert open_index(path).items is None
    assert "items.sqlite belongs to another index: results of" in caplog.text
    assert items_path(path).read_bytes() == before


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
        assert opened.items.item(6) == Item({"name": "replaced"}, ("new",))
        assert opened.items.item(3) is None
    assert contents(open_index(path, changes=False)) == START


@pytest.mark.parametrize("form", ["index.faiss", "index.lists"])
@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("removed", [[3], IDS.tolist()])
def test_index_takes_changes_up(folder, removed, source, form):
    path = built(folder, source)
    change(path, dict.fromkeys(removed, REMOVE) | {6: add(0, "replaced"), 1000: add(1)})
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
