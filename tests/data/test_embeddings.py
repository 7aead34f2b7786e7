"""embeddings: the same vectors out of every format, and one clear line for everything that is not vectors."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_files import open_features

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


@given(st.lists(st.integers(0, 99), max_size=40), st.integers(1, 3))
def test_gather_is_indexing(rows: list[int], width: int) -> None:
    x = np.arange(100 * width * 8192, dtype=np.float32).reshape(
        100, -1
    )  # rows of 32 KiB or more: gaps matter
    got = Wide(x).read(np.array(rows, np.int64))
    np.testing.assert_array_equal(got, x[rows] if rows else x[:0])


def header_only(path: Path, shape: tuple[int, ...], descr: str = "<f4", fortran: bool = False) -> Path:
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file,
            {"descr": descr, "fortran_order": fortran, "shape": shape},  # type: ignore[arg-type]
        )
    return path


def cut(path: Path, share: float) -> Path:
    os.truncate(path, int(path.stat().st_size * share))
    return path


def text(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def saved(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


def archived(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def hdf5(path: Path, **arrays: Any) -> Path:
    with h5py.File(path, "w") as h5:
        for name, array in arrays.items():
            h5[name] = array
    return path


def ragged(path: Path, rows: list[Any]) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"features": pa.array(rows, pa.list_(pa.float32()))}), path)
    return path


BAD: list[tuple[str, Callable[[Path], Path], str]] = [
    ("missing", lambda d: d / "no.npy", "not found"),
    ("folder", lambda d: d.joinpath("x.npy").mkdir() or d / "x.npy", "is a folder"),  # type: ignore[func-returns-value]
    ("suffix", lambda d: text(d / "a.txt", b"1 2"), "not from .txt"),
    *[
        (f"empty{s}", lambda d, s=s: text(d / f"a{s}", b""), "empty")
        for s in (".npy", ".npz", ".h5", ".parquet")
    ],
    *[
        (f"foreign{s}", lambda d, s=s: text(d / f"a{s}", b"hello world " * 50), "not a")
        for s in (".npy", ".npz", ".h5", ".parquet")
    ],
    *[
        (f"cut {form} {share}", lambda d, f=form, s=share: cut(write(d, f), s), "truncated|damaged|not an? ")
        for form in FORMS
        for share in (0.01, 0.6, 0.99)
    ],
    ("longer", lambda d: text(d / "a.npy", write(d, "npy").read_bytes() + b"x"), "1 bytes after"),
    ("huge", lambda d: header_only(d / "a.npy", (10**12, 512)), "truncated"),
    ("fortran", lambda d: saved(d / "a.npy", np.asfortranarray(X)), "ascontiguousarray"),
    ("one dimension", lambda d: saved(d / "a.npy", X[0]), r"\[7\]: numbers \[N, width\]"),
    ("no rows", lambda d: saved(d / "a.npy", X[:0]), "no row"),
    ("no columns", lambda d: saved(d / "a.npy", X[:, :0]), "no column"),
    ("objects", lambda d: saved(d / "a.npy", np.array([[{}]], object)), "Python objects"),
    ("strings", lambda d: saved(d / "a.npy", np.array([["a"]])), "numbers"),
    ("complex", lambda d: saved(d / "a.npy", X.astype(complex)), "numbers"),
    ("two matrices", lambda d: archived(d / "a.npz", a=X, b=X), "which array"),
    ("no matrix", lambda d: archived(d / "a.npz", a=X[0]), "which array"),
    ("labels short", lambda d: archived(d / "a.npz", x=X, labels=Y[:5]), "5 labels"),
    ("labels wrong", lambda d: archived(d / "a.npz", x=X, labels=Y - 5), "label -"),
    ("ids short", lambda d: archived(d / "a.npz", x=X, ids=IDS[:5]), "5 ids"),
    ("ids float", lambda d: archived(d / "a.npz", x=X, ids=IDS / 2), "whole numbers"),
    ("no dataset", lambda d: hdf5(d / "a.h5", other=X), "none of the datasets"),
    ("hdf5 text", lambda d: hdf5(d / "a.h5", x="hello"), "not an array of numbers"),
    ("hdf5 1-D", lambda d: hdf5(d / "a.h5", x=X[0]), "numbers"),
    ("hdf5 labels", lambda d: hdf5(d / "a.h5", x=X, y=Y[:3]), "3 labels"),
    ("ragged", lambda d: ragged(d / "a.parquet", [[1, 2], [1, 2], [3]]), "1 numbers at row 2"),
    ("null row", lambda d: ragged(d / "a.parquet", [[1, 2], None]), "no vector at row 1"),
    ("null number", lambda d: ragged(d / "a.parquet", [[1, None]]), "missing numbers"),
    ("parquet empty", lambda d: ragged(d / "a.parquet", []), "no rows"),
]


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_files_are_one_line(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    path = make(tmp_path)

    def use() -> None:
        data = open_features(path)
        data.read(slice(0, len(data)))

    with pytest.raises(DataError, match=message) as caught:
        use()
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)


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


def test_doubles_beyond_single_precision_are_named(tmp_path: Path) -> None:
    x = X.astype(np.float64)
    x[5, 5] = 1e300
    with pytest.raises(DataError, match="row 5 holds NaN or infinity"):
        open_features(saved(tmp_path / "a.npy", x)).read(slice(0, 9))


def test_multi_hot_and_names_inside(tmp_path: Path) -> None:
    hot = np.random.default_rng(0).random((N, 9)) < 0.2
    for path in (
        archived(tmp_path / "a.npz", x=X, labels=hot),
        hdf5(tmp_path / "a.h5", data=X, y=hot.astype("u1")),
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


def test_labels_beside_replace_those_inside(tmp_path: Path) -> None:
    other = (Y + 2) % 4
    data = open_features(write(tmp_path, "npz"), labels=saved(tmp_path / "l.npy", other.astype(np.uint8)))
    assert data.labels is not None
    np.testing.assert_array_equal(data.labels.class_ids(), other)


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
    path = text(tmp_path / "l.csv", content.encode())
    np.testing.assert_array_equal(read_labels(str(path), 4).dense(), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "no.npy", "not found"),
        (lambda d: d, "is a folder"),
        (lambda d: saved(d / "l.npy", np.zeros(3, int)), "labels of 3 items, the data has 4"),
        (lambda d: saved(d / "l.npy", np.array(3)), "0 items"),
        (lambda d: saved(d / "l.npy", np.array([0, 1, 2, 70_000])), "at most 65,535"),
        (lambda d: saved(d / "l.npy", np.array([0, 1, -7, 0])), "label -7 at row 2"),
        (lambda d: saved(d / "l.npy", np.array([0, 1, 0.5, 0])), "row 2 are not whole"),
        (lambda d: saved(d / "l.npy", np.full((4, 2), 2)), "other than 0 and 1"),
        (lambda d: saved(d / "l.npy", np.array(["a"] * 4, object)), "Python objects"),
        (lambda d: header_only(d / "l.npy", (10**15,), "<i8"), "truncated"),
        (lambda d: cut(saved(d / "l.npy", np.zeros(4, int)), 0.9), "truncated"),
        (lambda d: text(d / "l.txt", b"a\nb\n"), "2 lines"),
        (lambda d: text(d / "l.txt", b""), "0 lines"),
        (lambda d: text(d / "l.txt", b"\n\n\n\n"), "no item has a label"),
        (lambda d: text(d / "l.txt", b"\xfa\xfe\n"), "not UTF-8 text"),
        (lambda d: text(d / "l.txt", b"0\n1\n-5\n2"), "label -5"),
        (lambda d: text(d / "l.txt", b"0\n99999\n1\n2"), "99,999"),
        (lambda d: text(d / "l.txt", b"0|99999\n1\n1\n2"), "99999 is out of range"),
        (lambda d: text(d / "l.csv", b"0,1\n1\n1,1\n0,0"), "different lengths"),
        (lambda d: text(d / "l.csv", b"0,1\n1,2\n1,1\n0,0"), "not all 0 or 1"),
    ],
)
def test_bad_label_files(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_labels(str(make(tmp_path)), 4)
    assert "\n" not in str(caught.value)


def test_fingerprints_follow_content(tmp_path: Path) -> None:
    one = open_features(write(tmp_path, "npy")).fingerprint
    moved = tmp_path / "b.npy"
    (tmp_path / "a.npy").rename(moved)
    assert open_features(moved).fingerprint == one
    assert open_features(moved, labels=saved(tmp_path / "l.npy", Y)).fingerprint != one
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


def test_the_real_features(tmp_path: Path) -> None:
    root = os.environ.get("GPQ_DATA")
    if not root:
        pytest.skip("GPQ_DATA is not set")
    folder = Path(root) / "cifar10-features"
    data = open_features(folder / "features.npy", labels=folder / "labels.npy")
    assert (len(data), data.width) == (60_000, 256)
    assert set(data.require_labels().counts()) == {6000}
    array = np.load(folder / "features.npy", mmap_mode="r")
    rows = np.random.default_rng(0).integers(0, 60_000, 500)
    np.testing.assert_array_equal(data.read(rows), array[rows].astype(np.float32))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"ids": np.array([1, 2, 2**63], np.uint64)}, "signed 64 bits"),
        ({"title": np.array([1.0, 2.0, 3.0])}, "'title' is float64: texts are needed"),
        ({"other": np.array(["a", "b", "c"])}, "title"),
    ],
)
def test_columns_of_an_archive_that_cannot_be_what_is_named(
    tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "x.npz", features=np.eye(3, 4, dtype=np.float32), **arrays)
    with pytest.raises(DataError, match=message):
        open_data(f"features:{tmp_path / 'x.npz'}", keep="title")


def test_repeated_ids_are_noted(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", features=np.eye(3, 4, dtype=np.float32), ids=np.array([7, 7, 8]))
    notes = open_data(f"features:{tmp_path / 'x.npz'}").notes
    assert any("1 of the 3 ids are repeated" in note for note in notes)


def test_parquet_without_one_column_of_vectors_or_with_empty_ids(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [[0.0, 1.0], [1.0, 0.0]]
    parquet.write_table(pyarrow.table({"a": rows, "b": rows}), tmp_path / "two.parquet")
    with pytest.raises(DataError, match="which column holds the vectors"):
        open_data(f"features:{tmp_path / 'two.parquet'}")
    parquet.write_table(pyarrow.table({"features": rows, "id": [1, None]}), tmp_path / "ids.parquet")
    with pytest.raises(DataError, match="'id' has 1 empty cells"):
        open_data(f"features:{tmp_path / 'ids.parquet'}")
