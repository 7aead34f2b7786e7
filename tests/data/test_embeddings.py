"""embeddings: the same vectors out of every format, and one clear line for everything that is not vectors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import open_features, save

from gpq_faiss.data.label_files import read_labels
from gpq_faiss.data.open import open_data
from gpq_faiss.data.paths import file_fingerprint
from gpq_faiss.data.vectors import Vectors
from gpq_faiss.errors import DataError
from gpq_faiss.store import Header, RowWriter

N, W = 500, 7
X = np.random.default_rng(0).standard_normal((N, W)).astype(np.float32) + 3
Y = np.random.default_rng(1).integers(-1, 4, N)
IDS = np.random.default_rng(2).permutation(10_000)[:N]


def parquet(path: Path, x: np.ndarray, *, fixed: bool = True, **columns: Any) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows: Any = pa.array(list(x), pa.list_(pa.from_numpy_dtype(x.dtype), x.shape[1] if fixed else -1))
    pq.write_table(pa.table({"embedding": rows, **columns}), path, row_group_size=64)
    return path


def write(path: Path, form: str, x: np.ndarray = X) -> Path:
    if form == "npy":
        np.save(path / "a.npy", x)
        return path / "a.npy"
    if form == "npz":
        np.savez_compressed(path / "a.npz", features=x, labels=Y, ids=IDS)
        return path / "a.npz"
    if form == "hdf5":
        with h5py.File(path / "a.h5", "w") as h5:
            h5.create_dataset("x", data=x, chunks=(33, W), compression="gzip")
            h5["labels"], h5["ids"] = Y, IDS
        return path / "a.h5"
    labels = [None if y < 0 else int(y) for y in Y]
    return parquet(path / "a.parquet", x, fixed=form == "fixed", label=labels, id=IDS)


FORMS = ["npy", "npz", "hdf5", "fixed", "list"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_vectors(tmp_path: Path, form: str) -> None:
    data = open_features(write(tmp_path, form))
    assert (len(data), data.width, data.kind) == (N, W, "features")
    if form != "npy":
        assert data.labels is not None
        np.testing.assert_array_equal(data.labels.class_ids(), Y)
        np.testing.assert_array_equal(data.ids, IDS)
    else:
        assert data.labels is None
        np.testing.assert_array_equal(data.ids, np.arange(N))
    rng = np.random.default_rng(3)
    for rows in (
        slice(0, N),
        slice(60, 70),
        slice(490, 700),
        slice(3, 100, 7),
        slice(5, 5),
        rng.integers(0, N, 90),
        np.array([N - 1, 0, 0, 64, -1]),
        np.empty(0, np.int64),
    ):
        got = data.read(rows)
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got, X[rows])


@pytest.mark.parametrize(
    "dtype", ["f2", "f4", "f8", ">f4", ">f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
)
def test_every_number_type(tmp_path: Path, dtype: str) -> None:
    x = (np.abs(X) * 10 + 1).astype(dtype)
    np.save(tmp_path / "a.npy", x)
    np.testing.assert_array_equal(open_features(tmp_path / "a.npy").read(slice(0, N)), x.astype(np.float32))


class Wide(Vectors):
    """An array that is read in runs."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x
        self.n, self.width = x.shape

    def _run(self, start: int, stop: int) -> np.ndarray:
        return self.x[start:stop]


@settings(deadline=None)
@given(st.lists(st.integers(0, 99), max_size=40), st.integers(1, 3))
def test_gather_is_indexing(rows: list[int], width: int) -> None:
    x = np.arange(100 * width * 8192, dtype=np.float32).reshape(
        100, -1
    )  # rows of 32 KiB or more: gaps matter
    got = Wide(x).read(np.array(rows, np.int64))
    np.testing.assert_array_equal(got, x[rows] if rows else x[:0])


def archived(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_bad_rows_are_named_when_read(tmp_path: Path, form: str) -> None:
    x = X.copy()
    x[[70, 80]] = 0
    x[90, 3] = np.inf
    data = open_features(write(tmp_path, form, x))
    data.read(slice(0, 70))
    with pytest.raises(DataError, match="rows 70, 80 are all zero"):
        data.read(slice(60, 85))
    with pytest.raises(DataError, match="row 90 holds NaN or infinity"):
        data.read(np.array([91, 90]))


def test_multi_hot_and_names_inside(tmp_path: Path) -> None:
    hot = np.random.default_rng(0).random((N, 9)) < 0.2
    for path in (
        archived(tmp_path / "a.npz", x=X, labels=hot),
        save(tmp_path / "a.h5", {"data": X, "y": hot.astype("u1")}),
    ):
        data = open_features(path)
        assert data.labels is not None
        np.testing.assert_array_equal(data.labels.dense(dtype=bool), hot)
    path = archived(tmp_path / "b.npz", only=X, label=Y, class_names=np.array(["a", "b", "c", "d"]))
    labels = open_features(path).labels
    assert labels is not None
    assert labels.class_names == ("a", "b", "c", "d")


def test_parquet_names_and_several_labels(tmp_path: Path) -> None:
    cells = [["sea", "sky"], [], None, ["sky"]]
    labels = open_features(parquet(tmp_path / "a.parquet", X[:4], labels=cells)).labels
    assert labels is not None
    assert labels.class_names == ("sea", "sky")
    np.testing.assert_array_equal(labels.dense(), [[1, 1], [0, 0], [0, 0], [0, 1]])
    texts = open_features(parquet(tmp_path / "b.parquet", X[:4], label=["dog", "", None, "cat|dog"])).labels
    assert texts is not None
    np.testing.assert_array_equal(texts.dense(), [[0, 1], [0, 0], [0, 0], [1, 1]])


def test_our_own_features_file(tmp_path: Path) -> None:
    Z = np.ones((3, 4, 12), np.float32)
    packed = np.packbits(np.eye(11, dtype=bool)[[0, 3, 10]], axis=1)
    names = tuple(f"c{i}" for i in range(11))
    x = np.random.default_rng(0).standard_normal((3, 36)).astype(np.float32)
    with RowWriter(tmp_path / "f.h5", Header("features", 36, "m", Z, "d", names)) as writer:
        writer.append(x, np.array([5, 6, 7]), packed)
        writer.finish()
    data = open_features(tmp_path / "f.h5")
    assert data.labels is not None
    np.testing.assert_array_equal(data.labels.class_ids(), [0, 3, 10])
    assert data.labels.class_names == names
    np.testing.assert_array_equal(data.ids, [5, 6, 7])
    np.testing.assert_array_equal(data.read(slice(0, 3)), x)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("0\n2\n-1\n1\n", [[1, 0, 0], [0, 0, 1], [0, 0, 0], [0, 1, 0]]),
        ("label\n0\n2\n\n1\n", [[1, 0, 0], [0, 0, 1], [0, 0, 0], [0, 1, 0]]),
        ("cat\ndog\n\nfox", [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]]),
        ("b|a\r\n\r\na\r\nc\r\n", [[1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 1]]),
        ("2|0\n0\n\n1", [[1, 0, 1], [1, 0, 0], [0, 0, 0], [0, 1, 0]]),
        ("x,y,z\n0,1,0\n1,1,0\n0,0,0\n0,0,1\n", [[0, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]]),
        ("0\t1\n1\t1\n0\t0\n1\t0\n", [[0, 1], [1, 1], [0, 0], [1, 0]]),
    ],
)
def test_label_texts(tmp_path: Path, content: str, expected: list[list[int]]) -> None:
    path = save(tmp_path / "l.csv", content)
    np.testing.assert_array_equal(read_labels(str(path), 4).dense(), expected)


def test_fingerprints_follow_content(tmp_path: Path) -> None:
    one = open_features(write(tmp_path, "npy")).fingerprint
    moved = tmp_path / "b.npy"
    (tmp_path / "a.npy").rename(moved)
    assert open_features(moved).fingerprint == one
    assert open_features(moved, labels=save(tmp_path / "l.npy", Y)).fingerprint != one
    x = X.copy()
    x[N // 2, 0] += 1
    assert open_features(write(tmp_path, "npy", x)).fingerprint != one
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(65 << 20)
        before = file_fingerprint(big)
        file.seek((65 << 20) - 10)
        file.write(b"x")
        file.flush()
    assert file_fingerprint(big) != before


STREAM = """
    import sys
    from gpq_faiss.data.open import open_data

    data = open_data("features:" + sys.argv[1])
    total = 0
    for span in data.spans(2000):
        total += len(data.read(span))
    assert total == len(data)
    # Not ru_maxrss: on Linux that begins with the size of the parent process.
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("form", ["npy", "hdf5"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, form: str) -> None:
    peaks = []
    for n in (10_000, 160_000):  # 5 and 82 MB
        x = np.ones((n, 128), np.float32)
        path = tmp_path / f"{n}.{'npy' if form == 'npy' else 'h5'}"
        if form == "npy":
            np.save(path, x)
        else:
            with h5py.File(path, "w") as h5:
                h5.create_dataset("x", data=x, chunks=(2048, 128))
        command = [sys.executable, "-c", textwrap.dedent(STREAM), str(path)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024)
    assert peaks[1] < peaks[0] + 12, peaks


def test_repeated_ids_are_noted(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", features=np.eye(3, 4, dtype=np.float32), ids=np.array([7, 7, 8]))
    notes = open_data(f"features:{tmp_path / 'x.npz'}").notes
    assert any("1 of the 3 ids are repeated" in note for note in notes)
