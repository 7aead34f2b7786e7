"""store: whatever happens while a file is written, nothing that was committed is lost."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from killing import every_kill
from store_files import codebooks, finish, header, rows, write

from gpq_faiss.errors import DataError
from gpq_faiss.files import recover
from gpq_faiss.store.reader import RowReader
from gpq_faiss.store.writer import RowWriter


@pytest.mark.parametrize("what", ["model", "codebooks", "damaged", "short"])
def test_a_partial_that_does_not_fit_is_discarded(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.h5"
    values, ids, labels = rows("features", 10)
    with RowWriter(path, header()) as writer:
        writer.append(values, ids, labels)
    partial = tmp_path / ".a.h5.partial"
    changes: dict[str, Any] = {
        "model": {"model_fingerprint": "other"},
        "codebooks": {"codebooks": codebooks(9)},
    }.get(what, {})
    if what == "damaged":
        (partial / "progress.json").write_text("{")
    if what == "short":
        os.truncate(partial / "features.raw", 10)
    with RowWriter(path, header(**changes)) as writer:
        assert writer.rows == 0
        writer.append(values[:5], ids[:5], labels[:5])
        writer.finish()
    assert "discarded" in caplog.text
    with RowReader(path) as reader:
        assert reader.ntotal == 5


SCRIPT = """
    import signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from store_files import header, rows
    from gpq_faiss.store.writer import RowWriter
    values, ids, labels = rows("features", 2000)
    with RowWriter(Path({path!r}), header(), overwrite=True) as writer:
        {before}
        for s in range(writer.rows, 2000, 10):
            writer.append(values[s:s+10], ids[s:s+10], labels[s:s+10], state={{"at": s + 10}})
            {commit}
            print(s, flush=True)
            time.sleep({pause})
        {after}
        writer.finish()
"""


def child(
    path: Path, *, pause: float = 0.0, commit: str = "", before: str = "", after: str = ""
) -> list[str]:
    given = {"pause": pause, "commit": commit, "before": before, "after": after}
    text = textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parent), path=str(path), **given)
    return [sys.executable, "-c", text]


def test_a_killed_process_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    for round_, number in enumerate((signal.SIGKILL, signal.SIGINT), 1):
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(
            child(path, pause=0.005, commit="writer.commit()"), text=True, **pipes
        ) as process:
            assert process.stdout is not None
            for _ in range(15):
                last = int(process.stdout.readline())
            process.send_signal(number)
            process.wait(timeout=20)
        assert process.returncode != 0
        assert not path.exists()
        assert last >= 140 * round_  # the second run went on after the first
    with RowWriter(path, header()) as writer:
        assert writer.state == {"at": writer.rows}
    assert last < finish(path, 2000) < 2000
    assert os.listdir(tmp_path) == ["a.h5"]


def test_killed_while_finishing(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write(path, n=5)
    old = path.read_bytes()

    def work() -> None:
        finish(path, 100, overwrite=True)

    work()
    new = path.read_bytes()
    assert os.listdir(tmp_path) == ["a.h5"]
    path.write_bytes(old)
    seen = set()
    for _ in every_kill(work, tmp_path):
        assert path.read_bytes() in (old, new)
        recover(path)
        seen.add((path.read_bytes() == new, (tmp_path / ".a.h5.partial").exists()))
        if path.read_bytes() == old:
            work()
        assert os.listdir(tmp_path) == ["a.h5"]
        assert path.read_bytes() == new
        path.write_bytes(old)
    # The rows are there until the file is, and no longer.
    assert seen == {(False, False), (False, True), (True, False)}


@pytest.mark.parametrize("limit", [20_000, 250_000])
def test_disk_full_in_a_process_of_its_own(tmp_path: Path, limit: int) -> None:
    """A file-size limit stands for a full disk: below, in appending; above, in HDF5, which must not crash."""
    path = tmp_path / "a.h5"
    path.write_bytes(b"precious")
    cap = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    command = child(path, **({"before": cap} if limit < 100_000 else {"after": cap}))
    # Coverage's own file would fail as well.
    environment = {name: value for name, value in os.environ.items() if name != "COVERAGE_PROCESS_CONFIG"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert result.returncode == 1, result.stderr
    assert "DataError: cannot write" in result.stderr.strip().splitlines()[-1]
    assert path.read_bytes() == b"precious"
    assert not list(tmp_path.glob("*.tmp-*"))
    assert finish(path, 2000, overwrite=True) > 0


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["raw", "hdf5"])
def test_a_full_disk_or_an_interrupt_says_so_and_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, where: str
) -> None:
    path = tmp_path / "a.h5"
    values, ids, labels = rows("features", 100)
    full = isinstance(error, OSError)

    def fail(file: Any, offset: int, data: Any) -> None:
        raise error

    with RowWriter(path, header()) as writer:
        writer.append(values[:50], ids[:50], labels[:50])
        with monkeypatch.context() as patched:
            patched.setattr(f"gpq_faiss.store.{where}.write_at", fail)
            with pytest.raises(
                DataError if full else KeyboardInterrupt, match="the disk is full" if full else ""
            ):
                writer.append(values[50:], ids[50:], labels[50:]) if where == "raw" else writer.finish()
        assert writer.rows == 50
        assert not path.exists()
    assert finish(path, 100) == 50


def test_rows_that_are_lost_meanwhile_are_not_made_up(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "a.h5", header()) as writer:
        writer.append(*rows("features", 100))
        os.truncate(writer.partial / "features.raw", 50 * 4 * 36)
        with pytest.raises(DataError, match=r"features\.raw ends after 50 rows: it is truncated"):
            writer.finish()
    assert not (tmp_path / "a.h5").exists()


def test_commits_follow_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    values, ids, labels = rows("features", 30)
    with RowWriter(tmp_path / "a.h5", header()) as writer:
        writer.append(values[:10], ids[:10], labels[:10])
        assert not (writer.partial / "progress.json").exists()
        now[0] = 5.0
        writer.append(values[10:20], ids[10:20], labels[10:20])
        assert json.loads((writer.partial / "progress.json").read_text())["rows"] == 20
