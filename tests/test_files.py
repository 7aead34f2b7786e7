"""Outputs that are replaced wholly or not at all, whatever kills the process, whoever has put links in the way."""

import os
import shutil
import stat
import threading
from pathlib import Path
from unittest import mock

import pytest
from alone import alone
from kills import every_kill, run_killed

from gpq_faiss import files
from gpq_faiss.errors import DataError
from gpq_faiss.files import (
    atomic_path,
    atomic_paths,
    check_output,
    recover,
    unfinished,
    write_text,
)


def names(folder):
    return sorted(os.listdir(folder))


def make_folder(out, text, partial=None):
    with atomic_path(out, done_with=partial) as temporary:
        temporary.mkdir()
        (temporary / "one").write_text(text)
        (temporary / "two").write_text(text)


def read_folder(out):
    """The text that both files have."""
    (text,) = {path.read_text() for path in out.iterdir()}
    assert names(out) == ["one", "two"]
    return text


def make_pair(out, text):
    """As an index and its sidecar."""
    with atomic_paths(out, f"{out}.json") as (first, second):
        second.write_text(text)
        first.write_text(text)


def read_pair(out):
    text = out.read_text()
    assert Path(f"{out}.json").read_text() == text
    return text


def make_folder_by_two_renames(out, text):
    """As where the system cannot exchange two folders."""
    with mock.patch.object(files.ctypes, "CDLL", str):
        make_folder(out, text)


@alone
def test_an_output_is_old_or_new_after_every_kill_and_the_next_start_sweeps(tmp_path):
    """In between a folder may be gone, and of two files the second, but never is it of another first."""
    for write, read in (
        (write_text, Path.read_text),
        (make_folder, read_folder),
        (make_folder_by_two_renames, read_folder),
        (make_pair, read_pair),
    ):
        folder = tmp_path / write.__name__
        folder.mkdir()
        out, beside = folder / "out", folder / "out.json"
        made, seen = ["out", "out.json"] if write is make_pair else ["out"], set()
        write(out, "old")
        for _ in every_kill(lambda write=write, out=out: write(out, "new"), folder):
            assert not beside.exists() or beside.read_text() == out.read_text()
            check_output(out, overwrite=True, folder=read is read_folder)
            assert names(folder) == made
            seen.add(read(out))
            write(out, "old")
        assert seen == {"old", "new"}


@alone
def test_unfinished_work_is_there_until_the_output_is(tmp_path):
    """A folder; tests/store has the same for a file."""
    out, partial = tmp_path / "out", tmp_path / ".out.partial"

    def work():
        with unfinished(partial, out, keep=("rows",)):
            (partial / "rows").touch()
            make_folder(out, "new", partial)

    finished = 0
    for _ in every_kill(work, tmp_path):
        begun = (partial / "rows").exists()
        recover(out)
        finished += out.exists()
        assert names(tmp_path) in ([], [".out.partial"], ["out"])
        assert out.exists() or (partial / "rows").exists() == begun, "the work was lost"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
    assert finished
    assert names(tmp_path) == ["out"]


def test_renames_that_failed_are_made_by_the_next_start(tmp_path, monkeypatch):
    make_pair(tmp_path / "out", "old")
    with monkeypatch.context() as patched:
        patched.setattr(files, "_put", lambda *_: os.rmdir(tmp_path))
        with pytest.raises(DataError, match=r"cannot write .*out: "):
            make_pair(tmp_path / "out", "new")
    recover(tmp_path / "out")
    assert read_pair(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out", "out.json"]


def test_an_output_of_another_kind_is_not_replaced(tmp_path):
    out = tmp_path / "out"
    make_folder(out, "his")
    for path, folder in ((out, False), (out / "one", True)):
        with pytest.raises(DataError, match=f"cannot write {path}: "):
            check_output(path, overwrite=True, folder=folder)


def test_a_living_owner_keeps_what_is_his(tmp_path):
    out = tmp_path / "out"
    with atomic_path(out) as temporary:
        temporary.write_text("his")
        check_output(out, overwrite=False)
        write_text(out, "mine")
        assert temporary.read_text() == "his"
    assert out.read_text() == "his"
    assert names(tmp_path) == ["out"]


def test_no_other_output_comes_between_the_last_look_and_the_renames(tmp_path):
    out = tmp_path / "out"
    other = threading.Thread(target=write_text, args=(out, "other"))

    def look(_):
        other.start()
        other.join(0.3)
        assert other.is_alive()
        assert not out.exists()

    with atomic_path(out, before=look) as temporary:
        temporary.write_text("mine")
    other.join()
    assert out.read_text() == "other"


def test_what_another_user_left_is_not_touched(tmp_path, monkeypatch):
    """In a folder that all may write, another's journal would say what to put in place of our files."""
    out = tmp_path / "out"

    def work():
        with atomic_path(out) as temporary:
            temporary.write_bytes(b"half")
            (temporary.parent / "last").touch()

    at = 0
    while not list(tmp_path.glob(".out.tmp-*/last")):
        assert run_killed(work, tmp_path, at)
        at += 1
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 123456)
        recover(out)
    assert names(tmp_path) == before
    recover(out)
    assert names(tmp_path) == []


@pytest.fixture
def victim(tmp_path):
    file = tmp_path / "elsewhere" / "precious"
    file.parent.mkdir()
    file.write_bytes(b"precious")
    return file


@pytest.mark.parametrize("dangling", [True, False])
def test_a_link_at_the_very_name_is_not_followed(tmp_path, victim, monkeypatch, dangling):
    """As if the name had been guessed: another is taken."""
    tokens = iter(["0" * 12, "1" * 12, "0" * 12, "2" * 12])
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: next(tokens))
    (tmp_path / ".out.tmp-000000000000").symlink_to(victim.with_name("new") if dangling else victim.parent)
    for _ in range(2):
        write_text(tmp_path / "out", "new")
    assert (tmp_path / "out").read_bytes() == b"new"
    assert names(victim.parent) == ["precious"]
    recover(tmp_path / "out")
    assert names(victim.parent) == ["precious"]


def test_a_workspace_is_its_owners_alone_and_goes_on_an_error(tmp_path):
    with atomic_path(tmp_path / "out") as temporary:
        assert stat.S_IMODE(temporary.parent.stat().st_mode) == 0o700
        temporary.touch()
        expected = stat.S_IMODE(temporary.stat().st_mode)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == expected
    with pytest.raises(ValueError, match="mine"), atomic_path(tmp_path / "out") as temporary:  # noqa: PT012
        temporary.write_bytes(b"half")
        raise ValueError("mine")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out").read_bytes() == b""


@pytest.mark.parametrize("plant", ["folder", "lock", "rows"])
def test_links_in_the_place_of_unfinished_work_are_refused(tmp_path, victim, plant):
    partial = tmp_path / ".out.partial"
    if plant == "folder":
        partial.symlink_to(victim.parent)
    else:
        partial.mkdir()
        (partial / plant).symlink_to(victim)
    with (
        pytest.raises((DataError, OSError), match="symbolic link"),
        unfinished(partial, tmp_path / "out", keep=()),
    ):
        files.open_own(partial / "rows", keep=0)
    assert names(victim.parent) == ["precious"]
    assert victim.read_bytes() == b"precious"


def test_a_locked_folder_is_refused_in_one_line(tmp_path):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    with unfinished(partial, out, keep=("rows",)):
        with (
            pytest.raises(DataError, match=r"out is being written by another"),
            unfinished(partial, out, keep=()),
        ):
            pass
        (partial / "other").touch()
    assert names(tmp_path) == [], "nothing in it was worth keeping"
    with unfinished(partial, out, keep=("rows",)):
        (partial / "rows").touch()
    assert names(partial) == ["rows"]


def test_a_lock_is_of_the_file_that_is_there(tmp_path, monkeypatch):
    """Between our opening and our locking, its owner may have ended and removed it: two would have it then."""
    lock = tmp_path / "lock"
    real = files.fcntl.flock
    calls = []

    def late(descriptor, operation):
        calls.append(descriptor)
        if len(calls) < 3:
            lock.unlink()
        if len(calls) == 2:
            lock.touch()  # as another's
        real(descriptor, operation)

    monkeypatch.setattr(files.fcntl, "flock", late)
    held = files.lock(lock)
    assert os.fstat(held).st_ino == lock.stat().st_ino
    assert len(calls) == 3
    os.close(held)
