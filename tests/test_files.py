"""Outputs are old or new, never half, whatever ends the process."""

import os
from unittest import mock

import pytest
from alone import alone
from kills import every_kill

from gpq_faiss import files
from gpq_faiss.errors import DataError
from gpq_faiss.files import atomic_path, check_output, unfinished, write_text


def names(folder):
    return sorted(os.listdir(folder))


def write_folder(out, text):
    with atomic_path(out, folder=True) as temporary:
        (temporary / "one").write_text(text)
        (temporary / "two").write_text(text)


def write_folder_by_two_renames(out, text):
    """Write a folder where the system cannot exchange two."""
    with mock.patch.object(files.ctypes, "CDLL", str):
        write_folder(out, text)


def read(out):
    if out.is_file():
        return out.read_text()
    (text,) = {path.read_text() for path in out.iterdir()}
    assert names(out) == ["one", "two"]
    return text


@alone
@pytest.mark.parametrize("write", [write_text, write_folder])
def test_kill_at_any_operation_leaves_old_or_new(tmp_path, write):
    out, outcomes = tmp_path / "out", set()
    write(out, "old")
    for _ in every_kill(lambda: write(out, "new"), tmp_path):
        outcomes.add(read(out))
        write(out, "old")
        assert names(tmp_path) == ["out"], "the next command removes what was left"
    assert outcomes == {"old", "new"}


@pytest.mark.parametrize("write", [write_text, write_folder, write_folder_by_two_renames])
def test_output_is_replaced(tmp_path, write):
    for text in ("old", "new"):
        write(tmp_path / "deep" / "out", text)
        assert read(tmp_path / "deep" / "out") == text
    assert names(tmp_path / "deep") == ["out"]


@pytest.mark.parametrize("folder", [False, True])
def test_error_leaves_the_old_output(tmp_path, folder):
    out = tmp_path / "out"
    (write_folder if folder else write_text)(out, "old")
    with pytest.raises(ValueError, match="mine"), atomic_path(out, folder=folder):
        raise ValueError("mine")
    assert read(out) == "old"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("name", "folder"), [("out", False), ("out/one", True), ("out/one/x", False)]
)
def test_output_of_another_kind_is_kept(tmp_path, name, folder):
    write_folder(tmp_path / "out", "old")
    with pytest.raises(DataError, match=f"cannot write {tmp_path / name}: "):
        check_output(tmp_path / name, overwrite=True, folder=folder)
    assert read(tmp_path / "out") == "old"


# Unfinished work ----------------------------------------------------------------------------------


def test_unfinished_work_is_locked(tmp_path):
    partial, out = tmp_path / ".out.partial", tmp_path / "out"
    with unfinished(partial, out, keep=("rows",)):
        second = unfinished(partial, out, keep=())
        with pytest.raises(DataError, match="out is being written by another process"), second:
            raise AssertionError("both have the lock")
        (partial / "other").touch()
    assert names(tmp_path) == [], "nothing in it was worth keeping"
