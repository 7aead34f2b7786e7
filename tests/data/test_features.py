"""features: the same vectors out of every format, of one file or several."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import open_features, save

from gpq_faiss.data.open import open_data
from gpq_faiss.data.paths import file_fingerprint
from gpq_faiss.errors import DataError
from gpq_faiss.store import Header, RowWriter

N, W = 500, 7
X = np.random.default_rng(0).standard_normal((N, W)).astype(np.float32) + 3
Y = np.random.default_rng(1).integers(-1, 4, N)
IDS = np.random.default_rng(2).permutation(10_000)[:N]
FORMS = ["npy", "fortran.npy", "npz", "h5", "parquet"]


def write(folder: Path, form: str, x: np.ndarray = X) -> Path:
    path = folder / f"a.{form}"
    if form.endswith("npy"):
        np.save(path, np.asfortranarray(x) if "fortran" in form else x)
    elif form == "npz":
        np.savez_compressed(path, features=x, labels=Y, ids=IDS)
    elif form == "h5":
        with h5py.File(path, "w") as h5:
            h5.create_dataset("x", data=x, chunks=(33, W), compression="gzip")
            h5["labels"], h5["ids"] = Y, IDS
    else:
        rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1])
        labels = [None if y < 0 else int(y) for y in Y]
        pq.write_table(pa.table({"embedding": rows, "label": labels, "id": IDS}), path, row_group_size=64)
    return path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int8])
def test_every_form_reads_the_same(tmp_path: Path, form: str, kind: Any) -> None:
    x = (10 * X).astype(kind)
    data = open_features(write(tmp_path, form, x))
    np.testing.assert_array_equal(data.read(slice(None)), x.astype(np.float32))
    rows = np.random.default_rng(3).integers(0, N, 60)
    for some in (slice(17, 230), rows, rows % 2 == 0, np.array([N - 1]), np.empty(0, np.int64)):
        chosen = np.resize(some, N) if isinstance(some, np.ndarray) and some.dtype == bool else some
        np.testing.assert_array_equal(data.read(chosen), x[chosen].astype(np.float32))
    if "npy" not in form:
        assert data.labels is not None
        assert data.labels.class_ids().tolist() == Y.tolist()
        assert data.ids.tolist() == IDS.tolist()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rows_of_several_files_are_rows_of_their_concatenation(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=12))
    whole, labels = X[: sum(sizes)], Y[: sum(sizes)]
    for number, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        # No zeros before the numbers: shard-10 comes after shard-9.
        rows = slice(end - size, end)
        names = np.array([f"n{i}" for i in range(end - size, end)])
        np.savez(folder / f"shard-{number}.npz", features=whole[rows], labels=labels[rows], name=names)
    dataset = open_data(f"features:{folder}/shard-*.npz")
    rows = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=20)), dtype=np.int64)
    np.testing.assert_array_equal(dataset.read(rows), whole[rows])
    np.testing.assert_array_equal(dataset.read(slice(None)), whole)
    assert dataset.texts["name"].tolist() == [f"n{i}" for i in range(len(whole))]
    assert dataset.labels is not None
    names = np.array([*dataset.labels.class_names, "-1"])
    found = np.where(dataset.labels.has(), dataset.labels.dense().argmax(1), -1)
    assert [int(names[c]) for c in found] == labels.tolist()


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a-1.npy", np.ones((2, 3), np.float32))
    np.save(tmp_path / "a-2.npy", np.ones((2, 4), np.float32))
    np.savez(tmp_path / "c-1.npz", features=np.ones((2, 3)), labels=np.array([0, 1]))
    np.savez(tmp_path / "c-2.npz", features=np.ones((2, 3)))
    for pattern, why in (
        ("a", r"a-1\.npy is \[2, 3\], .*a-2\.npy \[2, 4\]"),
        ("c", r"c-1\.npz and .*c-2\.npz do not fit: one has labels"),
    ):
        with pytest.raises(DataError, match=why):
            open_data(f"features:{tmp_path}/{pattern}-*.np*")
    np.save(tmp_path / "x[1].npy", np.ones((2, 3), np.float32))
    assert len(open_data(f"features:{tmp_path}/x[1].npy")) == 2, "a name like a pattern"


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


def test_columns_of_parquet(tmp_path: Path) -> None:
    table = {
        "features": list(X[:3]),
        "path": ["a", "b", "c"],
        "title": ["1", None, "3"],
        "class": ["x", "", "y|x"],
    }
    data = open_features(save(tmp_path / "x.parquet", table), keep=["title"])
    assert data.texts["name"].tolist() == ["a", "b", "c"]
    assert data.texts["title"].tolist() == ["1", "", "3"]
    assert data.labels is not None
    assert data.labels.dense().tolist() == [[1, 0], [0, 0], [1, 1]]


def test_fingerprints_follow_content(tmp_path: Path) -> None:
    one = open_features(write(tmp_path, "npy")).fingerprint
    moved = tmp_path / "b.npy"
    (tmp_path / "a.npy").rename(moved)
    assert open_features(moved).fingerprint == one
    assert open_features(moved, labels=str(save(tmp_path / "l.npy", Y))).fingerprint != one
    x = X.copy()
    x[N // 2, 0] += 1
    assert open_features(write(tmp_path, "npy", x)).fingerprint != one
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(65 << 20)
        before = file_fingerprint(big)
        file.seek((65 << 20) - 10)
        file.write(b"x")
    assert file_fingerprint(big) != before


STREAM = """
    import sys
    from gpq_faiss.data.open import open_data

    data = open_data("features:" + sys.argv[1])
    assert sum(len(data.read(span)) for span in data.spans(2000)) == len(data)
    # Not ru_maxrss: on Linux that begins with the size of the parent process.
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("form", ["npy", "h5"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, form: str) -> None:
    peaks = []
    for n in (10_000, 160_000):  # 5 and 82 MB
        path = tmp_path / f"{n}.{form}"
        if form == "npy":
            np.save(path, np.ones((n, 128), np.float32))
        else:
            with h5py.File(path, "w") as h5:
                h5.create_dataset("x", data=np.ones((n, 128), np.float32), chunks=(2048, 128))
        command = [sys.executable, "-c", textwrap.dedent(STREAM), str(path)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024)
    assert peaks[1] < peaks[0] + 12, peaks
