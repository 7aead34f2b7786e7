"""The changes beside an index: what is written is read, what is torn never was, what is damaged is refused."""

import contextlib
import shutil
import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.serve.changes import Change, ChangeFile, changes_path, read_changes
from gpq_faiss.store.items import Item

SIZE, PRINT = 3, "0123456789abcdef"

ids = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
items = st.builds(
    lambda name, labels: Item({} if name is None else {"name": name}, tuple(labels) or None),
    st.none() | texts,
    st.lists(texts, max_size=3),
).filter(lambda item: item.name is not None or item.labels is not None)
change = st.just(Change(None)) | st.builds(Change, st.binary(min_size=SIZE, max_size=SIZE), st.none() | items)
transactions = st.lists(st.dictionaries(ids, change, min_size=1, max_size=4), max_size=6)


@contextlib.contextmanager
def opened(index, *changes):
    """The open file, with these transactions."""
    with contextlib.closing(ChangeFile(index, SIZE, PRINT)) as file:
        for one in changes:
            file.write(one)
        yield file


def joined(transactions):
    return {number: one for changes in transactions for number, one in changes.items()}


@settings(max_examples=15, deadline=None)
@given(written=transactions, data=st.data())
def test_the_last_change_of_an_id_holds_until_it_is_dropped(written, data, tmp_path_factory):
    index = tmp_path_factory.mktemp("changes") / "index.faiss"
    with opened(index, *written) as file:
        assert file.number == len(written)
        assert read_changes(index, SIZE, PRINT) == joined(written)
        upto = data.draw(st.integers(0, len(written)))
        file.drop(upto)
        later = joined(written[upto:])
        assert read_changes(index, SIZE, PRINT) == later
    assert sorted(path.name for path in index.parent.iterdir()) == [changes_path(index).name] * bool(later)
    with opened(index):
        assert read_changes(index, SIZE, PRINT) == later


WRITTEN = [
    {1: Change(b"abc", Item({"name": "one"}, ("a",))), 2: Change(b"\0\0\0")},
    {1: Change(None)},
    {3: Change(b"\1\1\1", Item({"name": "two"}))},
]


def test_a_changed_byte_is_never_taken_for_a_change(tmp_path):
    index = tmp_path / "index.faiss"
    with opened(index, *WRITTEN):
        pass
    data = changes_path(index).read_bytes()
    refused = 0
    places = [*range(100), *range(4096, len(data), 7), *(i for i, byte in enumerate(data) if byte)]
    for at, value in [*((at, data[at] ^ 16) for at in places), *((at, 0) for at in places)]:
        changes_path(index).write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
        try:
            assert read_changes(index, SIZE, PRINT) == joined(WRITTEN)
        except DataError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("DROP TABLE changes", "is not the changes of an index"),
        ("PRAGMA user_version = 2", "is not the changes of an index"),
        ("UPDATE changes SET code = x'00'", "checksum"),
        ("UPDATE changes SET code = 'abc'", "damaged"),
        ("UPDATE changes SET name = 'other'", "checksum"),
        (None, "not a database"),
    ],
)
def test_foreign_or_damaged_files_are_one_error(tmp_path, damage, message):
    index = tmp_path / "index.faiss"
    with opened(index, WRITTEN[0]):
        pass
    if damage is None:
        changes_path(index).write_bytes(b"nothing" * 1000)
    else:
        with contextlib.closing(sqlite3.connect(changes_path(index), isolation_level=None)) as db:
            db.executescript(damage)
    for read in (read_changes, ChangeFile):
        with pytest.raises(DataError, match=message):
            read(index, SIZE, PRINT)
    assert not list(tmp_path.glob("*.lock"))


def test_changes_of_other_codebooks_are_refused_unless_there_are_none(tmp_path):
    index, killed = tmp_path / "index.faiss", tmp_path / "killed"
    with opened(index, *WRITTEN):
        pass
    for other in ((index, SIZE, "f" * 16), (index, SIZE + 1, PRINT)):
        for read in (read_changes, ChangeFile):
            with pytest.raises(MismatchError, match="other codebooks"):
                read(*other)
    with opened(index) as file:
        file.drop(file.number)
        shutil.copytree(tmp_path, killed)
    other = killed / "index.faiss", SIZE + 1, "f" * 16
    with contextlib.closing(ChangeFile(*other)) as file:
        file.write({1: Change(b"abcd")})
        assert read_changes(*other) == {1: Change(b"abcd")}


def test_changes_in_the_form_of_an_earlier_version_are_not_ignored_and_a_link_is_not_followed(tmp_path):
    (tmp_path / "index.faiss.log").touch()
    for read in (read_changes, ChangeFile):
        with pytest.raises(
            DataError, match=r"index\.faiss\.log has changes in the form of an earlier version: "
        ):
            read(tmp_path / "index.faiss", SIZE, PRINT)
    assert [path.name for path in tmp_path.iterdir()] == ["index.faiss.log"]
    changes_path(tmp_path / "other.faiss").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="symbolic link"):
        ChangeFile(tmp_path / "other.faiss", SIZE, PRINT)
    assert not (tmp_path / "elsewhere").exists()
