"""The log of changes: what is written is read, what is torn is dropped, what is damaged is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.serve import changes as module
from gpq_faiss.serve.changes import Change, ChangeLog, Changes, read_log, record_type
from gpq_faiss.store import Item

SIZE, PRINT = 3, "0123456789abcdef"

ids = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5)
change = st.tuples(ids, st.none() | st.binary(min_size=SIZE, max_size=SIZE))
frames = st.lists(st.lists(change, min_size=1, max_size=4), max_size=6)


def as_changes(frame: list[tuple[int, bytes | None]]) -> list[Change]:
    return [(number, None if code is None else np.frombuffer(code, np.uint8), None) for number, code in frame]


def state(changes: Changes) -> dict[int, bytes | None]:
    return {
        int(number): code.tobytes() if there else None
        for number, there, code in zip(changes.ids, changes.there, changes.codes, strict=True)
    }


@settings(max_examples=60, deadline=None)
@given(written=frames)
def test_what_is_written_is_read_and_the_last_change_of_an_id_holds(
    written: list[list[tuple[int, bytes | None]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "index.faiss.log"
    log = ChangeLog(path, SIZE, PRINT)
    step = Changes.none(SIZE)
    expected: dict[int, bytes | None] = {}
    for frame in written:
        step = step.then(log.append(as_changes(frame)))
        expected.update(frame)
    records, end = read_log(path, SIZE, PRINT)
    assert end == path.stat().st_size
    at_once = Changes.none(SIZE).then(records)
    assert state(step) == state(at_once) == expected
    assert list(at_once.ids) == sorted(expected)
    for number in (*expected, 7):
        assert (at_once.at(number) >= 0) == (number in expected)
    log.close()
    assert path.exists() == bool(written)


FRAMES: list[list[tuple[int, bytes | None]]] = [
    [(1, b"abc"), (2, b"def")],
    [(1, None)],
    [(3, b"GPQ"), (4, b"xyz")],
]


def written(path: Path) -> tuple[bytes, list[int]]:
    """Bytes of a log of FRAMES, and the ends of the header and of each frame."""
    log = ChangeLog(path, SIZE, PRINT)
    ends = [log.end]
    for frame in FRAMES:
        log.append(as_changes(frame))
        ends.append(log.end)
    log.close()
    return path.read_bytes(), ends


def test_a_log_cut_anywhere_keeps_its_whole_frames_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    data, ends = written(path)
    for cut in range(ends[0], len(data) + 1):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends) - 1
        records, end = read_log(path, SIZE, PRINT)
        assert end == ends[whole]
        assert len(records) == sum(len(frame) for frame in FRAMES[:whole])
        assert path.read_bytes() == data[:cut], "reading changes nothing"
        log = ChangeLog(path, SIZE, PRINT)
        assert path.stat().st_size == ends[whole]
        log.append([(9, None, None)])
        log.close()
        assert int(read_log(path, SIZE, PRINT)[0]["id"][-1]) == 9
    for cut in range(ends[0]):
        path.write_bytes(data[:cut])
        with pytest.raises(DataError, match="is not the log"):
            read_log(path, SIZE, PRINT)


def test_a_changed_bit_is_never_taken_for_a_change(tmp_path: Path) -> None:
    path = tmp_path / "log"
    data, ends = written(path)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        if at < ends[-2]:  # whole frames follow, or it is the header
            with pytest.raises(DataError, match=r"is damaged|is not the log"):
                read_log(path, SIZE, PRINT)
        else:
            records, end = read_log(path, SIZE, PRINT)
            assert end == ends[-2]
            assert len(records) == 3


def test_a_log_of_other_codebooks_is_refused_unless_it_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path)
    with pytest.raises(MismatchError, match="other codebooks"):
        read_log(path, SIZE, "f" * 16)
    with pytest.raises(MismatchError, match="other codebooks"):
        read_log(path, SIZE + 1, PRINT)
    path.unlink()
    ChangeLog(path, SIZE, PRINT)  # a killed process leaves its header
    assert len(ChangeLog(path, SIZE + 1, "f" * 16).records) == 0
    assert read_log(path, SIZE + 1, "f" * 16)[1] == path.stat().st_size


def test_a_compacted_log_keeps_later_changes(tmp_path: Path) -> None:
    log = ChangeLog(tmp_path / "log", SIZE, PRINT)
    log.append(as_changes(FRAMES[0]))
    end = log.end
    log.append(as_changes(FRAMES[2]))
    log.drop_before(end)
    log.append(as_changes(FRAMES[1]))
    records, found = read_log(log.path, SIZE, PRINT)
    assert found == log.end
    assert records["id"].tolist() == [3, 4, 1]
    assert not log.empty


class _Full:
    """A file of a disk that takes some more bytes."""

    def __init__(self, inner: Any, left: int) -> None:
        self.inner, self.left = inner, left

    def write(self, data: Any) -> int:
        part = bytes(data[: self.left])
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= len(part)
        return int(self.inner.write(part))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("left", [0, 1, 20, 30])
def test_a_full_disk_refuses_a_change_whole(tmp_path: Path, left: int) -> None:
    log = ChangeLog(tmp_path / "log", SIZE, PRINT)
    log.append(as_changes(FRAMES[0]))
    inner = log._file
    log._file = _Full(inner, left)  # type: ignore[assignment]
    with pytest.raises(DataError, match="the disk is full"):
        log.append(as_changes(FRAMES[2]))
    log._file = inner
    assert log.path.stat().st_size == log.end
    log.append(as_changes(FRAMES[1]))
    assert read_log(log.path, SIZE, PRINT)[0]["id"].tolist() == [1, 2, 1]


def test_nothing_is_taken_after_a_failed_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ChangeLog(tmp_path / "log", SIZE, PRINT)

    def fsync(number: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "fsync", fsync)
        with pytest.raises(DataError, match="cannot write"):
            log.append(as_changes(FRAMES[0]))
    with pytest.raises(DataError, match="start the service again"):
        log.append(as_changes(FRAMES[0]))


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
described = st.builds(
    lambda name, labels: Item({} if name is None else {"name": name}, tuple(labels) or None),
    st.none() | texts,
    st.lists(texts, max_size=3),
)
named = st.lists(st.tuples(ids, st.binary(min_size=SIZE, max_size=SIZE), st.none() | described), min_size=1)


@settings(max_examples=40, deadline=None)
@given(written=st.lists(named, max_size=4), cut=st.integers(0, 60))
def test_names_and_labels_are_read_with_the_items_or_not_at_all(
    written: list[Any], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    log = ChangeLog(path, SIZE, PRINT)
    ends = [log.end]
    for frame in written:
        log.append([(number, np.frombuffer(code, np.uint8), about) for number, code, about in frame])
        ends.append(log.end)
    log._file.close()  # type: ignore[union-attr]
    size = max(ends[0], ends[-1] - cut)
    path.write_bytes(path.read_bytes()[:size])
    records, end = read_log(path, SIZE, PRINT)
    whole = sum(at <= size for at in ends) - 1
    assert end == ends[whole]
    rows = [row for frame in written[:whole] for row in frame]
    assert [(int(r["id"]), r["code"].tobytes()) for r in records] == [(i, code) for i, code, _ in rows]
    plain = [about if about is not None and (about.texts or about.labels) else None for *_, about in rows]
    found = [
        about if about is not None and (about.texts or about.labels) else None for about in records["about"]
    ]
    assert found == plain


def test_a_changed_bit_in_names_is_damage_or_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = ChangeLog(path, SIZE, PRINT)
    first = log.end
    log.append([(1, np.zeros(SIZE, np.uint8), Item({"name": "one"}, ("a",)))])
    middle = log.end
    log.append([(2, np.zeros(SIZE, np.uint8), Item({"name": "two"}))])
    log.close()
    data = path.read_bytes()
    for at in range(first, len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        if at < middle:
            with pytest.raises(DataError, match="is damaged"):
                read_log(path, SIZE, PRINT)
        else:
            assert [item.name for item in read_log(path, SIZE, PRINT)[0]["about"]] == ["one"]


def test_records_have_no_padding() -> None:
    assert record_type(SIZE).itemsize == 8 + 1 + SIZE
