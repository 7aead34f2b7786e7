"""store: whatever happens while a file is written, nothing that was committed is lost."""

import errno
import json
import os
import resource
import time

import pytest
from alone import alone
from kills import every_kill, run_killed
from store_files import appended, codebooks, finish, header, write

from gpq_faiss.errors import DataError
from gpq_faiss.files import recover
from gpq_faiss.store.writer import RowWriter


@pytest.mark.parametrize("what", ["model", "codebooks", "damaged", "short"])
def test_a_partial_that_does_not_fit_is_discarded(tmp_path, what, caplog):
    path = tmp_path / "a.h5"
    with RowWriter(path, header()) as writer:
        list(appended(writer, 10))
    partial = tmp_path / ".a.h5.partial"
    changes = {
        "model": {"model_fingerprint": "other"},
        "codebooks": {"codebooks": codebooks(9)},
    }.get(what, {})
    if what == "damaged":
        (partial / "progress.json").write_text("{")
    if what == "short":
        os.truncate(partial / "features.raw", 10)
    assert finish(path, 5, header(**changes)) == 0
    assert "discarded" in caplog.text


@alone
def test_a_kill_anywhere_loses_nothing_that_was_committed(tmp_path):
    told = tmp_path / "told"
    path = tmp_path / "out" / "a.h5"
    write(path, n=5)
    old = path.read_bytes()

    def work():
        with RowWriter(path, header(), overwrite=True) as writer:
            for _ in appended(writer, 100, 40):
                writer.commit()
                told.write_text(str(writer.rows))
            writer.finish()

    work()
    new = path.read_bytes()
    seen = set()
    for _ in every_kill(work, path.parent):
        assert path.read_bytes() in (old, new)
        recover(path)
        partial = path.with_name(".a.h5.partial").exists()
        seen.add((path.read_bytes() == new, partial))
        if path.read_bytes() == old:
            with RowWriter(path, header(), overwrite=True) as writer:
                committed = int(told.read_text())
                assert writer.rows in (committed, min(100, committed + 40))
                assert writer.state == ({"at": (writer.rows - 1) // 40 * 40} if writer.rows else {})
            work()
        assert os.listdir(path.parent) == ["a.h5"]
        assert path.read_bytes() == new
        path.write_bytes(old)
        told.write_text("0")
    # The rows are there until the file is, and no longer.
    assert seen == {(False, False), (False, True), (True, False)}


@pytest.mark.parametrize(("limit", "since"), [(20_000, 0), (250_000, 1990)])
def test_disk_full_in_a_process_of_its_own(tmp_path, limit, since):
    """A file-size limit stands for a full disk: below, in appending; above, in HDF5, which must not crash."""
    path = tmp_path / "a.h5"
    path.write_bytes(b"precious")

    def work():
        with RowWriter(path, header(), overwrite=True) as writer:
            for at in appended(writer, 2000, 10):
                if at == since:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            writer.finish()

    def refused():
        with pytest.raises(DataError, match="cannot write"):
            work()

    assert not run_killed(refused, tmp_path)
    assert path.read_bytes() == b"precious"
    assert not list(tmp_path.glob(".*.tmp-*"))
    assert finish(path, 2000, overwrite=True) > 0


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["writer", "hdf5"])
def test_a_full_disk_or_an_interrupt_says_so_and_loses_no_row(tmp_path, monkeypatch, error, where):
    path = tmp_path / "a.h5"
    refused = DataError if isinstance(error, OSError) else KeyboardInterrupt

    def fail(file, offset, data):
        raise error

    with RowWriter(path, header()) as writer:
        parts = appended(writer, 100, 50)
        next(parts)
        with monkeypatch.context() as patched:
            patched.setattr(f"gpq_faiss.store.{where}.write_at", fail)
            with pytest.raises(refused) as caught:
                next(parts) if where == "writer" else writer.finish()
        assert caught.value is error or "the disk is full" in str(caught.value)
        assert writer.rows == 50
        assert not path.exists()
    assert finish(path, 100) == 50


def test_rows_that_are_lost_meanwhile_are_not_made_up(tmp_path):
    with RowWriter(tmp_path / "a.h5", header()) as writer:
        list(appended(writer, 100))
        os.truncate(writer.folder / "features.raw", 50 * 4 * 36)
        with pytest.raises(DataError, match=r"features\.raw ends after 50 rows: it is truncated"):
            writer.finish()
    assert not (tmp_path / "a.h5").exists()


def test_commits_follow_the_clock(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with RowWriter(tmp_path / "a.h5", header()) as writer:
        parts = appended(writer, 30, 10)
        next(parts)
        assert not (writer.folder / "progress.json").exists()
        now[0] = 5.0
        next(parts)
        assert json.loads((writer.folder / "progress.json").read_text())["rows"] == 20
