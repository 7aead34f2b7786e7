"""Vectors out of every form, of files, tables and objects, are the same items; of several files their concatenation; nothing is held."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import datasets
import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import save

from gpq_faiss.data.base import FeatureDataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.paths import file_fingerprint
from gpq_faiss.errors import DataError
from gpq_faiss.store import Header, RowWriter

N, W = 300, 7
X = np.random.default_rng(0).standard_normal((N, W)).astype(np.float32) + 3
Y = np.random.default_rng(1).integers(-1, 4, N)
IDS = np.random.default_rng(2).permutation(10_000)[:N]
KINDS = ["cat", "dog", "emu", "fox"]
CELLS = [None if y < 0 else KINDS[y] for y in Y]
NUMBERS = [None if y < 0 else int(y) for y in Y]
NAMES = [f"p/{i}" for i in range(N)]
FORMS = ["npy", "fortran.npy", "npz", "h5", "parquet"]


def write(folder: Path, form: str, x: np.ndarray = X) -> str:
    path = folder / f"a.{form}"
    if form.endswith("npy"):
        save(path, np.asfortranarray(x) if "fortran" in form else x)
    elif form == "npz":
        save(path, {"features": x, "labels": Y, "ids": IDS, "name": np.array(NAMES)})
    elif form == "h5":
        with h5py.File(path, "w") as h5:
            h5.create_dataset("x", data=x, chunks=(33, W), compression="gzip")
            h5["labels"], h5["ids"] = Y, IDS
    else:
        rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1])
        save(path, {"embedding": rows, "label": NUMBERS, "id": IDS, "path": NAMES})
    return f"features:{path}"


def check(data: Any, x: np.ndarray = X, classes: tuple[str, ...] | None = ("0", "1", "2", "3")) -> None:
    assert isinstance(data, FeatureDataset)
    np.testing.assert_array_equal(data.read(slice(None)), x)
    rows = np.random.default_rng(3).integers(0, len(x), 60)
    for some in (slice(17, 230), rows, rows[:0], np.array([len(x) - 1]), np.resize(rows % 2 == 0, len(x))):
        np.testing.assert_array_equal(data.read(some), x[some])
    if classes is None:
        assert data.labels is None
    else:
        assert data.labels is not None
        assert data.labels.class_names == classes
        assert data.labels.class_ids().tolist() == Y.tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int8])
def test_files(tmp_path: Path, form: str, kind: Any) -> None:
    x = (10 * X).astype(kind)
    data = open_data(write(tmp_path, form, x))
    check(data, x.astype(np.float32), None if "npy" in form else ("0", "1", "2", "3"))
    if "npy" not in form:
        assert data.ids.tolist() == IDS.tolist()
    if form in ("npz", "parquet"):
        assert data.texts["name"].tolist() == NAMES


def frame(**more: Any) -> pd.DataFrame:
    return pd.DataFrame({"id": IDS, "path": NAMES, "label": CELLS, **more})


def hub(x: np.ndarray = X, **columns: Any) -> datasets.Dataset:
    kinds = {"emb": datasets.List(datasets.Value("float32"), length=W)}
    found = datasets.Dataset.from_dict({"emb": list(x)}, features=datasets.Features(kinds))
    for name, values in columns.items():
        found = found.add_column(name, values)
    return found


def test_tables_with_a_column_of_vectors(tmp_path: Path) -> None:
    table = frame(embedding=list(X))
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), W)
    held = [
        *(table, pa.Table.from_pandas(table), table.set_index("path").reset_index()),
        pa.table({c: pa.array(table[c]) for c in ("id", "path", "label")}).append_column("embedding", fixed),
    ]
    hubs = hub(id=IDS, path=NAMES, label=CELLS)
    hubs.save_to_disk(str(tmp_path / "hub"))
    found = [open_data(source) for source in (*held, hubs, f"hf:{tmp_path}/hub", tmp_path / "hub")]
    for data in found:
        check(data, classes=tuple(KINDS))
        assert data.ids.tolist() == IDS.tolist()
        assert data.texts["name"].tolist() == NAMES
    assert len({data.fingerprint for data in found[:4]}) == 1
    assert open_data(frame(embedding=list(X + 1))).fingerprint != found[0].fingerprint
    assert open_data(hub()).fingerprint != open_data(hub().select(range(20))).fingerprint


def test_columns_that_are_named() -> None:
    numbers = {f"x{i}": X[:, i] for i in range(W)}
    table = frame(**numbers).rename(columns={"label": "kind", "id": "row", "path": "where"})
    given_: dict[str, Any] = {"labels": "kind", "ids": "row", "names": "where", "vectors": list(numbers)}
    data = open_data(table.assign(noise=1.0), **given_, keep="noise")
    check(data, classes=tuple(KINDS))
    assert (data.ids.tolist(), data.texts["name"].tolist()) == (IDS.tolist(), NAMES)
    assert set(data.texts["noise"].tolist()) == {"1.0"}
    # All other columns of numbers are the dimensions, the index is none.
    for source, more in ((table, {"ids": "row"}), (table.set_index("row"), {})):
        check(open_data(source, label_column="kind", **more), classes=tuple(KINDS))
    reversed_ = open_data(table, **{**given_, "vectors": ["x2", "x0"]})
    np.testing.assert_array_equal(reversed_.read(slice(None)), X[:, [2, 0]])
    shuffled = hub(kind=CELLS, more=[[1.0, 2.0]] * N, key=[str(i) for i in range(N)]).shuffle(seed=3)
    order = np.array(shuffled["key"], int)
    data = open_data(shuffled, vectors="emb", label_column="kind")
    np.testing.assert_array_equal(data.read(np.array([9, 2, 9])), X[order][[9, 2, 9]])
    assert data.texts["name"].tolist() == list(shuffled["key"])
    assert data.require_labels().class_ids().tolist() == Y[order].tolist()


def test_labels_ids_and_names_beside_the_data(tmp_path: Path) -> None:
    save(tmp_path / "y.npy", Y)
    file = write(tmp_path, "npy")
    assert open_data(X, names=NAMES).texts["name"][3] == NAMES[3]
    for source, labels in (
        (frame(v=list(X)).drop(columns="label"), Y),
        (X, Y),
        (X, Y.tolist()),
        (torch.from_numpy(X), torch.from_numpy(Y)),
        (file, Y),
        (file, tmp_path / "y.npy"),
    ):
        data = open_data(source, labels=labels, ids=IDS)
        check(data)
        assert data.ids.tolist() == IDS.tolist()
    check(open_data(X, labels=CELLS), classes=tuple(KINDS))
    assert open_data(X, labels=np.eye(N, 3, dtype=bool)).require_labels().counts().tolist() == [1, 1, 1]
    assert open_data(open_data(X, ids=IDS), labels=Y).ids.tolist() == IDS.tolist()
    kinds = datasets.Features({"labels": datasets.List(datasets.ClassLabel(names=KINDS[:3]))})
    several = datasets.Dataset.from_dict({"labels": [[0, 2], [], [1]]}, features=kinds).add_column(
        "v", list(X[:3])
    )
    assert open_data(several).require_labels().dense().tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


def test_our_own_features_file(tmp_path: Path) -> None:
    Z = np.ones((3, 4, 12), np.float32)
    packed = np.packbits(np.eye(11, dtype=bool)[[0, 3, 10]], axis=1)
    names = tuple(f"c{i}" for i in range(11))
    x = np.random.default_rng(0).standard_normal((3, 36)).astype(np.float32)
    with RowWriter(tmp_path / "f.h5", Header("features", "m", Z, "d", names)) as writer:
        writer.append(x, np.array([5, 6, 7]), packed)
        writer.finish()
    data = open_data(f"features:{tmp_path}/f.h5")
    np.testing.assert_array_equal(data.require_labels().class_ids(), [0, 3, 10])
    assert data.require_labels().class_names == names
    np.testing.assert_array_equal(data.ids, [5, 6, 7])
    np.testing.assert_array_equal(data.read(slice(0, 3)), x)


# Several files, fingerprints, memory ------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rows_of_several_files_are_rows_of_their_concatenation(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=12))
    n = sum(sizes)
    for number, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        rows = slice(end - size, end)
        content = {"features": X[rows], "labels": Y[rows], "name": np.array(NAMES[rows])}
        save(folder / f"shard-{number}.npz", content)  # no zeros before the numbers: 10 comes after 9
    dataset = open_data(f"features:{folder}/shard-*.npz")
    rows = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    np.testing.assert_array_equal(dataset.read(rows), X[rows])
    np.testing.assert_array_equal(dataset.read(slice(None)), X[:n])
    assert dataset.texts["name"].tolist() == NAMES[:n]
    assert dataset.labels is not None
    names = np.array([*dataset.labels.class_names, "-1"])
    assert [int(names[c]) for c in dataset.labels.class_ids()] == Y[:n].tolist()


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    for name, content in (
        ("a-1.npy", np.ones((2, 3))),
        ("a-2.npy", np.ones((2, 4))),
        ("c-1.npz", {"features": np.ones((2, 3)), "labels": np.array([0, 1])}),
        ("c-2.npz", {"features": np.ones((2, 3))}),
        ("x[1].npy", np.ones((2, 3))),
    ):
        save(tmp_path / name, content)
    with pytest.raises(DataError, match=r"a-1\.npy is \[2, 3\], .*a-2\.npy \[2, 4\]"):
        open_data(f"{tmp_path}/a-*.npy")
    with pytest.raises(DataError, match=r"c-1\.npz and .*c-2\.npz do not fit: one has labels"):
        open_data(f"{tmp_path}/c-{{1..2}}.npz")
    assert len(open_data(f"features:{tmp_path}/x[1].npy")) == 2, "a name like a pattern"


def test_fingerprints_follow_content(tmp_path: Path) -> None:
    one = open_data(write(tmp_path, "npy")).fingerprint
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    assert open_data(tmp_path / "b.npy").fingerprint == one
    assert open_data(tmp_path / "b.npy", labels=save(tmp_path / "l.npy", Y)).fingerprint != one
    x = X.copy()
    x[N // 2, 0] += 1
    assert open_data(write(tmp_path, "npy", x)).fingerprint != one
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

    for path in sys.argv[1:]:
        data = open_data("features:" + path)
        assert sum(len(data.read(slice(i, i + 2000))) for i in range(0, len(data), 2000)) == len(data)
        # Not ru_maxrss: on Linux that begins with the size of the parent process.
        print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    paths = []
    for n in (10_000, 160_000):  # 5 and 82 MB
        x = np.ones((n, 128), np.float32)
        paths += [save(tmp_path / f"{n}.npy", x), tmp_path / f"{n}.h5"]
        with h5py.File(paths[-1], "w") as h5:
            h5.create_dataset("x", data=x, chunks=(2048, 128))
    command = [sys.executable, "-c", textwrap.dedent(STREAM), *map(str, paths)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peaks = [int(word) / 1024 for word in output.split()]  # in the order of the files, small ones first
    assert peaks[-1] < peaks[1] + 12, peaks
