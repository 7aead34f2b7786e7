"""store: what is written is read back, whatever happens in between; nothing broken is believed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.errors import DataError, MismatchError, OutputExistsError, UsageError
from gpq_faiss.store import (
    Header,
    RowReader,
    RowWriter,
    codebooks_fingerprint,
    describe,
    read_hdf5_array,
    sink,
)

M, K, d = 3, 16, 12
NAMES = tuple(f"c{i}" for i in range(11))  # 2 label bytes with 5 padding bits


def codebooks(seed: int = 0, m: int = M, k: int = K) -> np.ndarray:
    Z = np.random.default_rng(seed).standard_normal((m, k, d)).astype(np.float32)
    return Z / np.linalg.norm(Z, axis=2, keepdims=True)


def header(kind: str = "features", **changes: Any) -> Header:
    Z = changes.pop("codebooks", codebooks())
    m, k, _ = Z.shape
    width = m * d if kind == "features" else (m * (k.bit_length() - 1) + 7) // 8
    made = Header(kind, width, "model", Z, "data", NAMES, True, {"note": "x"})  # type: ignore[arg-type]
    return replace(made, **changes)


def rows(kind: str, n: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    if kind == "features":
        values = rng.standard_normal((n, M * d)).astype(np.float32)
    else:
        values = rng.integers(0, 256, (n, 2)).astype(np.uint8)
        values[:, -1] &= 0x0F  # 12 bits
    ids = rng.integers(-(2**62), 2**62, n)
    return values, ids, np.packbits(rng.random((n, 11)) < 0.3, axis=1)


def write(path: Path, kind: str = "features", n: int = 100, step: int = 33, **changes: Any) -> Any:
    values, ids, labels = rows(kind, n)
    with RowWriter(path, header(kind, **changes)) as writer:
        for s in range(0, n, step):
            writer.append(values[s : s + step], ids[s : s + step], labels[s : s + step])
        writer.finish()
    return values, ids, labels


@pytest.mark.parametrize("kind", ["features", "codes"])
def test_round_trip(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "deep" / "a.h5"
    values, ids, labels = write(path, kind)
    assert os.listdir(path.parent) == ["a.h5"]
    with RowReader(path, kind=kind, model_fingerprint="model") as reader:  # type: ignore[arg-type]
        np.testing.assert_array_equal(reader.block(), values)
        np.testing.assert_array_equal(reader.block(7, 50), values[7:50])
        np.testing.assert_array_equal(reader.ids(), ids)
        np.testing.assert_array_equal(reader.labels(), labels)
        assert reader.ntotal == 100
        assert reader.header.fingerprint() == header(kind).fingerprint()
        np.testing.assert_array_equal(reader.header.codebooks, codebooks())
        parts = list(reader.blocks(30))
        assert [part[0] for part in parts] == [0, 30, 60, 90]
        np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), values)
        with pytest.raises(UsageError, match="outside"):
            reader.block(0, 101)


def test_layout_is_as_documented(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", "codes")
    with h5py.File(tmp_path / "a.h5") as h5:
        assert set(h5) == {"codes", "ids", "labels", "codebooks"}
        assert h5["codes"].compression == "gzip"
        assert h5["codes"].shuffle
        assert bool(h5.attrs["complete"])
        assert json.loads(h5.attrs["class_names"]) == list(NAMES)
        assert h5.attrs["codebooks_fingerprint"].decode() == codebooks_fingerprint(codebooks())


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    m=st.integers(1, 5),
    nbits=st.sampled_from([2, 3, 4, 8]),
    labelled=st.booleans(),
)
def test_any_block_sizes_and_codebooks(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], m: int, nbits: int, labelled: bool
) -> None:
    path = tmp_path_factory.mktemp("s") / "c.h5"
    rng = np.random.default_rng(0)
    about = header("codes", codebooks=codebooks(0, m, 1 << nbits), class_names=NAMES if labelled else ())
    n = sum(sizes)
    bits = rng.integers(0, 2, (n, m * nbits)).astype(np.uint8)
    codes = np.packbits(bits, axis=1, bitorder="little")
    labels = np.packbits(rng.random((n, 11)) < 0.3, axis=1) if labelled else None
    with RowWriter(path, about, commit_seconds=0) as writer:
        at = 0
        for size in sizes:
            part = slice(at, at + size)
            writer.append(codes[part], np.arange(n)[part], None if labels is None else labels[part])
            at += size
        writer.finish()
    with RowReader(path) as reader:
        np.testing.assert_array_equal(reader.block(), codes)
        np.testing.assert_array_equal(reader.ids(), np.arange(n))
        if labels is None:
            assert reader.labels() is None
        else:
            np.testing.assert_array_equal(reader.labels(), labels)


def test_several_chunks(tmp_path: Path) -> None:
    """More than one HDF5 chunk a column (1 MiB: 131,072 ids)."""
    n = 300_001
    codes = np.random.default_rng(0).integers(0, 16, (n, 2)).astype(np.uint8)
    with RowWriter(tmp_path / "c.h5", header("codes", class_names=())) as writer:
        writer.append(codes, np.arange(n))
        writer.finish()
    with RowReader(tmp_path / "c.h5") as reader:
        np.testing.assert_array_equal(reader.block(131_000, 270_000), codes[131_000:270_000])
        np.testing.assert_array_equal(reader.ids(262_000), np.arange(262_000, n))


def test_an_error_leaves_the_partial_and_the_next_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    values, ids, labels = rows("features", 100)

    def interrupted() -> None:
        with RowWriter(path, header()) as writer:
            writer.append(values[:60], ids[:60], labels[:60], state={"position": 60})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not path.exists()
    with RowWriter(path, header()) as writer:
        assert (writer.rows, writer.state) == (60, {"position": 60})
        writer.append(values[60:], ids[60:], labels[60:])
        writer.set_state({"position": 100})
    with RowWriter(path, header()) as writer:
        assert (writer.rows, writer.state) == (100, {"position": 100})
        writer.finish()
    with RowReader(path) as reader:
        np.testing.assert_array_equal(reader.block(), values)
        np.testing.assert_array_equal(reader.labels(), labels)


@pytest.mark.parametrize("what", ["model", "codebooks", "extra", "no resume", "damaged", "short", "foreign"])
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
        "extra": {"extra": {"note": "y"}},
    }.get(what, {})
    if what == "damaged":
        (partial / "progress.json").write_text("{")
    if what == "foreign":
        (partial / "progress.json").write_text("[1]")
    if what == "short":
        os.truncate(partial / "features.raw", 10)
    with RowWriter(path, header(**changes), resume=what != "no resume") as writer:
        assert writer.rows == 0
        writer.append(values[:5], ids[:5], labels[:5])
        writer.finish()
    assert (what == "no resume") == ("discarded" not in caplog.text)
    with RowReader(path) as reader:
        assert reader.ntotal == 5


SCRIPT = """
    import sys, time
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from test_store import header, rows
    from gpq_faiss.store import RowWriter
    values, ids, labels = rows("features", 2000)
    with RowWriter(Path({path!r}), header(), commit_seconds=0) as writer:
        {before}
        for s in range(writer.rows, 2000, 10):
            writer.append(values[s:s+10], ids[s:s+10], labels[s:s+10], state={{"at": s + 10}})
            print(s, flush=True)
            time.sleep({pause})
        {after}
        writer.finish()
"""


def child(path: Path, *, pause: float = 0.0, before: str = "", after: str = "") -> list[str]:
    text = textwrap.dedent(SCRIPT).format(
        tests=str(Path(__file__).parent), path=str(path), pause=pause, before=before, after=after
    )
    return [sys.executable, "-c", text]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_loses_nothing_that_was_committed(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "a.h5"
    for round_ in range(2):
        process = subprocess.Popen(
            child(path, pause=0.005), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        for _ in range(15):
            last = int(process.stdout.readline())
        process.send_signal(number)
        process.wait(timeout=20)
        process.stdout.close()
        assert process.returncode != 0
        assert not path.exists()
        assert last >= 140 * (round_ + 1)  # the second run went on after the first
    values, ids, labels = rows("features", 2000)
    with RowWriter(path, header()) as writer:
        assert last < writer.rows < 2000
        assert writer.state == {"at": writer.rows}
        s = writer.rows
        writer.append(values[s:], ids[s:], labels[s:])
        writer.finish()
    with RowReader(path) as reader:
        np.testing.assert_array_equal(reader.block(), values)
        np.testing.assert_array_equal(reader.ids(), ids)
        np.testing.assert_array_equal(reader.labels(), labels)
    assert os.listdir(tmp_path) == ["a.h5"]


def test_killed_while_finishing(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write(path, n=5)
    old = path.read_bytes()
    values, ids, labels = rows("features", 100)
    with RowWriter(path, header(), overwrite=True) as writer:
        writer.append(values, ids, labels)
    (tmp_path / ".a.h5.tmp-1").write_bytes(b"half")  # what kill -9 in finish() leaves
    with RowWriter(path, header(), overwrite=True) as writer:
        assert writer.rows == 100
        assert path.read_bytes() == old
        writer.finish()
    assert os.listdir(tmp_path) == ["a.h5"]
    with RowReader(path) as reader:
        assert reader.ntotal == 100


@pytest.mark.parametrize("limit", [20_000, 250_000, 330_000])
def test_disk_full_in_a_process_of_its_own(tmp_path: Path, limit: int) -> None:
    """A file-size limit stands for a full disk: below, in appending; above, in HDF5, which must not crash."""
    path = tmp_path / "a.h5"
    path.write_bytes(b"precious")
    cap = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    command = child(path, **({"before": cap} if limit < 100_000 else {"after": cap}))
    command[2] = command[2].replace("commit_seconds=0", "overwrite=True")
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if limit > 300_000:  # 288 kB of features compress a little: it fits
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode == 1, result.stderr
    assert "DataError: cannot write" in result.stderr.strip().splitlines()[-1]
    assert path.read_bytes() == b"precious"
    assert not list(tmp_path.glob("*.tmp-*"))
    values, ids, labels = rows("features", 2000)
    with RowWriter(path, header(), overwrite=True) as writer:
        assert writer.rows > 0
        s = writer.rows
        writer.append(values[s:], ids[s:], labels[s:])
        writer.finish()
    with RowReader(path) as reader:
        np.testing.assert_array_equal(reader.block(), values)


def test_disk_full_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.h5"
    values, ids, labels = rows("features", 100)
    real = sink.write_at

    def full(file: Any, offset: int, data: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with RowWriter(path, header()) as writer:
        writer.append(values[:50], ids[:50], labels[:50])
        monkeypatch.setattr("gpq_faiss.store.writer.write_at", full)
        with pytest.raises(DataError, match=r"cannot write .*a\.h5: the disk is full"):
            writer.append(values[50:], ids[50:], labels[50:])
        assert writer.rows == 50
        monkeypatch.setattr("gpq_faiss.store.writer.write_at", real)
        writer.append(values[50:], ids[50:], labels[50:])
        monkeypatch.setattr("gpq_faiss.store.sink.write_at", full)
        with pytest.raises(DataError, match="the disk is full"):
            writer.finish()
        assert not path.exists()
        monkeypatch.setattr("gpq_faiss.store.sink.write_at", real)
        writer.finish()
    with RowReader(path) as reader:
        np.testing.assert_array_equal(reader.block(), values)


def test_interrupt_inside_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.h5"
    values, ids, labels = rows("features", 100)

    def interrupt(file: Any, offset: int, data: Any) -> None:
        raise KeyboardInterrupt

    with RowWriter(path, header()) as writer:
        writer.append(values, ids, labels)
        with monkeypatch.context() as patch:
            patch.setattr("gpq_faiss.store.sink.write_at", interrupt)
            with pytest.raises(KeyboardInterrupt):
                writer.finish()
        assert not path.exists()
        writer.finish()
    assert describe(path)["ntotal"] == 100


def test_existing_output_and_unwritable_folder(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(b"precious")
    with pytest.raises(OutputExistsError, match="--overwrite"):
        RowWriter(path, header())
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*a\.h5"):
        RowWriter(tmp_path / "file" / "a.h5", header())
    assert path.read_bytes() == b"precious"
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(DataError, match="no permission"):
            RowWriter(tmp_path / "b.h5", header())
        tmp_path.chmod(0o700)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "a.h5", header()):
        with pytest.raises(DataError, match="another process"):
            RowWriter(tmp_path / "a.h5", header())
        assert (tmp_path / ".a.h5.partial" / "lock").exists()
    assert os.listdir(tmp_path) == []  # nothing was written, so nothing is left


def test_bad_rows_are_refused(tmp_path: Path) -> None:
    values, ids, labels = rows("features", 10)
    nan = values.copy()
    nan[3, 2] = np.nan
    padded = labels.copy()
    padded[:, 1] |= 1
    with RowWriter(tmp_path / "a.h5", header()) as writer:
        for bad, message in [
            ((values.astype(np.float64), ids, labels), "float64"),
            ((values[:, :5], ids, labels), r"float32 \[10, 5\]"),
            ((values, ids[:5], labels), r"ids are int64 \[5\]"),
            ((values, ids, None), "labels are missing"),
            ((values, ids, padded), "beyond 11 classes"),
            ((nan, ids, labels), "NaN.*row 3"),
        ]:
            with pytest.raises(DataError, match=message):
                writer.append(*bad)
        assert writer.rows == 0
        with pytest.raises(DataError, match="no row"):
            writer.finish()
    codes, ids, labels = rows("codes", 10)
    with RowWriter(tmp_path / "c.h5", header("codes", class_names=())) as writer:
        with pytest.raises(DataError, match="no class names"):
            writer.append(codes, ids, labels)
        with pytest.raises(DataError, match="beyond their 12"):
            writer.append(codes | 0x10, ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 35}, "wide"),
        ({"codebooks": codebooks().astype(np.float64)}, "float64"),
        ({"codebooks": np.zeros((3, 15, 12), np.float32)}, "power of two"),
        ({"codebooks": np.full((3, 16, 12), np.nan, np.float32)}, "finite"),
        ({"class_names": ("a", "a")}, "repeat"),
        ({"kind": "images"}, "neither"),
    ],
)
def test_headers_that_do_not_fit_together(changes: dict[str, Any], message: str) -> None:
    good = header()
    with pytest.raises(DataError, match=message):
        replace(good, **changes)


def foreign(path: Path, how: str) -> None:
    """Make ``path`` wrong in one way."""
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "text":
        path.write_text("not HDF5\n" * 100)
    elif how.startswith("truncated"):
        path.write_bytes(data[: int(len(data) * float(how.split()[1]))])
    else:
        with h5py.File(path, "r+") as h5:
            if how == "other hdf5":
                for name in list(h5.attrs):
                    del h5.attrs[name]
            elif how == "incomplete":
                h5.attrs["complete"] = False
            elif how == "version":
                h5.attrs["format_version"] = 99
            elif how == "rows":
                h5.attrs["ntotal"] = 99
            elif how == "codebooks":
                Z = h5["codebooks"][()]
                Z[0, 0, 0] += 0.5
                h5["codebooks"][...] = Z
            elif how == "json":
                h5.attrs["class_names"] = "{"
            elif how == "no ids":
                del h5["ids"]
            elif how == "type":
                del h5["ids"]
                h5["ids"] = np.zeros(100, np.float32)
            elif how == "link":
                del h5["ids"]
                h5["ids"] = h5py.ExternalLink("/etc/passwd", "ids")


@pytest.mark.parametrize(
    "how",
    [
        "missing",
        "empty",
        "folder",
        "text",
        "truncated 0.02",
        "truncated 0.5",
        "truncated 0.99",
        "other hdf5",
        "incomplete",
        "version",
        "rows",
        "codebooks",
        "json",
        "no ids",
        "type",
        "link",
    ],
)
def test_broken_files_are_one_line(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.h5"
    write(path)
    foreign(path, how)
    with pytest.raises(DataError, match=r"a\.h5") as caught, RowReader(path) as reader:
        list(reader.blocks())
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError):
        describe(path)


def test_flipped_bits_never_pass(tmp_path: Path) -> None:
    """One flipped bit anywhere: either an error, or (unused space) the very same content."""
    path = tmp_path / "a.h5"
    write(path, n=20)
    data = path.read_bytes()
    # In a child, so that a crash of HDF5 would be seen as one.
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import numpy as np
        from pathlib import Path
        from test_store import rows, header
        from gpq_faiss.errors import DataError
        from gpq_faiss.store import RowReader
        path = Path({str(path)!r}); data = path.read_bytes(); rng = np.random.default_rng(0)
        values, ids, labels = rows("features", 20)
        caught = 0
        for at in rng.choice(len(data), 400, replace=False):
            bad = bytearray(data); bad[at] ^= 1 << int(rng.integers(8)); path.write_bytes(bad)
            try:
                with RowReader(path) as reader:
                    same = (reader.block() == values).all() and (reader.ids() == ids).all()
                    same = same and (reader.labels() == labels).all()
                    assert same and reader.header.fingerprint() == header().fingerprint(), at
            except DataError:
                caught += 1
        print(caught)
    """)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 100
    assert len(data) > 3000


def test_the_wrong_file_is_a_mismatch(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write(path)
    with pytest.raises(MismatchError, match="holds features"):
        RowReader(path, kind="codes")
    with pytest.raises(MismatchError, match="of model model, not other"):
        RowReader(path, model_fingerprint="other")


def test_describe(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    _, _, labels = write(path, "codes")
    about = describe(path)
    json.dumps(about)
    assert (about["type"], about["ntotal"], about["bits"], about["width"]) == ("codes", 100, 12, 2)
    assert about["labelled"] == labels.any(axis=1).sum()
    assert about["versions"]["numpy"] == np.__version__


def test_codebooks_fingerprint_is_of_content_and_shape() -> None:
    Z = codebooks()
    assert codebooks_fingerprint(Z) == codebooks_fingerprint(np.asfortranarray(Z)) == "4095bec9e55f7310"
    assert codebooks_fingerprint(Z) != codebooks_fingerprint(Z.reshape(M, K // 2, d * 2))
    Z[1, 2, 3] = np.nextafter(Z[1, 2, 3], np.float32(2))
    assert codebooks_fingerprint(Z) != codebooks_fingerprint(codebooks())


MEMORY = """
    import sys
    import numpy as np
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from test_store import header
    from gpq_faiss.store import RowReader, RowWriter
    n = {n}; block = np.ones((5000, 36), np.float32)
    with RowWriter(Path({path!r}), header(class_names=())) as writer:
        for s in range(0, n, 5000):
            writer.append(block, np.arange(s, s + 5000))
        writer.finish()
    with RowReader(Path({path!r})) as reader:
        total = sum(len(ids) for _, _, ids, _ in reader.blocks(5000))
    assert total == n
    # Not ru_maxrss: on Linux that begins with the size of the parent process.
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peaks = []
    for n in (50_000, 400_000):  # 7 and 58 MB of features
        text = textwrap.dedent(MEMORY).format(
            tests=str(Path(__file__).parent), path=str(tmp_path / f"{n}.h5"), n=n
        )
        out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
        peaks.append(int(out.stdout) / 1024)
    assert peaks[1] < peaks[0] + 10, peaks


def test_foreign_arrays(tmp_path: Path) -> None:
    path = tmp_path / "f.h5"
    x = np.random.default_rng(0).standard_normal((5000, 7)).astype(np.float16)
    with h5py.File(path, "w") as h5:
        h5.create_dataset("x", data=x, chunks=(64, 7), compression="lzf")
        h5["text"] = "hello"
        h5.create_group("group")
        h5["soft"] = h5py.SoftLink("/x")
        h5.create_dataset("outside", (4,), "u1", external=[("/etc/passwd", 0, 4)])
    array = read_hdf5_array(path, ["features", "x"])
    assert array is not None
    assert (array.name, array.shape, array.dtype, len(array)) == ("x", (5000, 7), np.float16, 5000)
    np.testing.assert_array_equal(array.read(slice(10, 200)), x[10:200])
    picked = np.random.default_rng(1).integers(0, 5000, 700)
    np.testing.assert_array_equal(array.read(picked), x[picked])
    far = np.array([4999, 0, 0, 2500, -1])
    np.testing.assert_array_equal(array.read(far), x[far])
    assert array.read(np.empty(0, np.int64)).shape == (0, 7)
    assert read_hdf5_array(path, ["nope"], required=False) is None
    for name, message in [
        ("nope", "none of the datasets"),
        ("text", "not an array of numbers"),
        ("group", "not a dataset"),
        ("soft", "link"),
        ("outside", "other files"),
    ]:
        with pytest.raises(DataError, match=message):
            read_hdf5_array(path, [name])


def test_header_extremes(tmp_path: Path) -> None:
    """65,535 class names do not fit an HDF5 object header; empty strings have no fixed length."""
    names = tuple(f"Klasse {i} ä" for i in range(65_535))
    about = header("codes", class_names=names, model_fingerprint="", data_fingerprint="", extra={})
    codes, ids, _ = rows("codes", 3)
    with RowWriter(tmp_path / "a.h5", about) as writer:
        writer.append(codes, ids, np.zeros((3, 8192), np.uint8))
        writer.finish()
    with RowReader(tmp_path / "a.h5") as reader:
        assert reader.header.fingerprint() == about.fingerprint()
        assert reader.header.class_names == names


def test_commits_follow_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    values, ids, labels = rows("features", 30)
    with RowWriter(tmp_path / "a.h5", header(), commit_seconds=5) as writer:
        writer.append(values[:10], ids[:10], labels[:10])
        assert not (writer.partial / "progress.json").exists()
        now[0] = 6.0
        writer.append(values[10:20], ids[10:20], labels[10:20])
        assert json.loads((writer.partial / "progress.json").read_text())["rows"] == 20
