"""The changes beside an index: whole transactions are read, and damage is refused."""

import contextlib
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.store.changes import Change, ChangeWriter, changes_path, read_changes

SIZE, CODEBOOKS = 3, "0123456789abcdef"

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
new_changes = st.tuples(
    st.none() | st.binary(min_size=SIZE, max_size=SIZE),
    st.none() | texts,
    st.none() | st.lists(texts, max_size=3).map(tuple),
)
ids = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5)
transactions = st.lists(st.dictionaries(ids, new_changes, min_size=1, max_size=4), max_size=6)


@pytest.fixture
def index(tmp_path):
    return tmp_path / "index.faiss"


def read(index):
    return read_changes(index, SIZE, CODEBOOKS)


def write(index, *transactions):
    with ChangeWriter(index, SIZE, CODEBOOKS) as writer:
        for changes in transactions:
            writer.write(changes)


ADD, REMOVE = (b"abc", "a name", ("x", "y")), (None, None, None)


@settings(max_examples=25)
@given(transactions)
def test_the_last_change_of_each_id_is_read(written):
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index.faiss"
        write(index, *written)
        expected = {
            id_: Change(number, *change)
            for number, changes in enumerate(written, 1)
            for id_, change in changes.items()
        }
        assert read(index)[1:] == (len(written), expected)


def test_another_file_has_another_identity(index):
    write(index)
    identity = read(index).identity
    changes_path(index).unlink()
    write(index)
    assert read(index).identity != identity


def test_only_one_process_may_write(index):
    with ChangeWriter(index, SIZE, CODEBOOKS), pytest.raises(DataError, match="another process"):
        ChangeWriter(index, SIZE, CODEBOOKS)
    write(index, {1: ADD})


@pytest.mark.parametrize("expected", [(SIZE, "f" * 16), (SIZE + 1, CODEBOOKS)])
def test_changes_of_other_codebooks_are_refused(index, expected):
    write(index, {1: ADD})
    with pytest.raises(MismatchError, match="other codebooks"):
        ChangeWriter(index, *expected)


@pytest.mark.parametrize(
    "statement", ["DROP TABLE changes", "DELETE FROM about", "UPDATE changes SET labels = '['"]
)
def test_damaged_changes_are_one_error(index, statement):
    write(index, {1: ADD})
    with contextlib.closing(sqlite3.connect(changes_path(index), isolation_level=None)) as db:
        db.execute(statement)
    with pytest.raises(DataError, match="restore it from a backup"):
        read(index)


def test_a_full_disk_makes_no_change(index):
    with ChangeWriter(index, SIZE, CODEBOOKS) as writer:
        writer._db.execute("PRAGMA max_page_count = 4")
        with pytest.raises(DataError, match="disk is full"):
            writer.write(dict.fromkeys(range(20), (b"abc", "x" * 999, None)))
        writer.write({1: ADD})
    assert read(index)[1:] == (1, {1: Change(1, *ADD)})


@pytest.mark.parametrize("replace", [False, True])
def test_a_lost_file_is_noticed_before_the_next_change(index, replace):
    with ChangeWriter(index, SIZE, CODEBOOKS) as writer:
        writer.write({1: ADD})
        path = changes_path(index)
        copy = path.rename(path.with_name("moved"))
        if replace:
            path.write_bytes(copy.read_bytes())
        with pytest.raises(DataError, match="deleted or replaced"):
            writer.write({2: ADD})


KILLED = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.executescript("PRAGMA cache_size = 1; BEGIN; UPDATE changes SET name = hex(zeroblob(99))")
os.kill(os.getpid(), 9)
"""


def test_a_journal_that_a_kill_left_is_rolled_back(index):
    write(index, dict.fromkeys(range(500), ADD))
    before = read(index)
    subprocess.run([sys.executable, "-c", KILLED, changes_path(index)], check=False)
    assert Path(f"{changes_path(index)}-journal").stat().st_size > 0
    assert read(index) == before
