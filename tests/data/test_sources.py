"""Images and vectors out of every form, of files, tables and objects, are the same items; damage
follows the limit; nothing is held.
"""

import tracemalloc

import datasets
import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from faiss.contrib.vecs_io import fvecs_write
from hypothesis import given
from hypothesis import strategies as st
from image_files import Items, class_numbers, hub, png, put, refused, save, shard
from PIL import Image
from scipy.io import savemat
from scipy.sparse import csc_matrix
from torch.utils.data import Subset, TensorDataset

from gpq_faiss.data.base import FeatureDataset, ImageDataset
from gpq_faiss.data.images import decode_image
from gpq_faiss.data.open import open_data
from gpq_faiss.files import content_of
from gpq_faiss.store.rows import Header, RowWriter

N, W = 24, 7
KINDS = ("ant", "bee", "cat")
Y = np.sort(np.arange(N) % 3)
NAMES = [f"{KINDS[y]}/{i:02d}.png" for i, y in enumerate(Y)]
PIXELS = np.stack([decode_image(png(i, 8)) for i in range(N)])
COLUMNS = {"image": [{"bytes": png(i, 8), "path": None} for i in range(N)], "label": Y.tolist()}
HUB = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(KINDS))}

# Vectors are of the same kinds, but some have no label.
X = np.random.default_rng(0).standard_normal((N, W)).astype(np.float32) + 3
IDS = np.random.default_rng(2).permutation(10_000)[:N]
SOME = np.where(np.arange(N) % 5, Y, -1)
CELLS = [None if y < 0 else KINDS[y] for y in SOME]
NUMBERS = [None if y < 0 else int(y) for y in SOME]
EMB = {"emb": datasets.List(datasets.Value("float32"), length=W)}


# Images in every form -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Two folders with the images in every form of files."""
    folders = [tmp_path_factory.mktemp("root") for _ in range(2)]
    for root in folders:
        put(root / "images", *NAMES, size=8)
        for k in range(3):
            rows = range(8 * k, 8 * k + 8)
            texts = {f"{i:02}.json": f'{{"label": "{KINDS[Y[i]]}"}}'.encode() for i in rows}
            members = texts | {f"{i:02}.png": png(i, 8) for i in rows}
            shard(root / f"tars/x-{k + 8:02}.tar", dict(sorted(members.items())))
        table = {"image": [f"images/{name}" for name in NAMES], "label": [KINDS[y] for y in Y]}
        save(root / "t.parquet", table)
        pd.DataFrame(table).to_csv(root / "t.csv", index=False)
        lines = [f"images\\{n} {y}\r\n" for n, y in zip(NAMES, Y, strict=True)]
        save(root / "l.txt", "".join(lines))
        pictures = hub(HUB, **COLUMNS)
        splits = {"test": pictures.select(range(20, N)), "train": pictures.select(range(20))}
        datasets.DatasetDict(splits).save_to_disk(str(root / "hub"))
    return folders


PLANES = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
OBJECTS = {
    "Dataset": lambda: hub(HUB, **COLUMNS),
    "items": lambda: Items(
        [(Image.fromarray(p), KINDS[y]) for p, y in zip(PIXELS, Y, strict=True)]
    ),
    "targets": lambda: Items(list(PLANES), targets=Y.tolist(), classes=list(KINDS)),
    "tensors": lambda: TensorDataset(PLANES / 255, torch.from_numpy(Y)),
    "subset": lambda: Subset(TensorDataset(PLANES, torch.from_numpy(Y)), range(N)),
    "array": lambda: PIXELS,
    "planes": PLANES.numpy,
}
FILES = {
    **{"images": "folder", "t.csv": "csv", "t.parquet": "parquet", "l.txt": "list", "hub": "hf"},
    **{"tars": "webdataset", "tars/x-*.tar": "webdataset"},
}


@pytest.mark.parametrize("form", [*FILES, *OBJECTS])
def test_every_form_is_the_same_images(roots, form):
    root, is_bare = roots[0], form in ("array", "planes")
    sources = [OBJECTS[form]() if form in OBJECTS else f"{r}/{form}" for r in roots]
    data, copy = (open_data(source, labels=Y if is_bare else None) for source in sources)
    assert isinstance(data, ImageDataset)
    assert data.native_size == 8
    assert data.require_labels().dense().argmax(axis=1).tolist() == Y.tolist()
    is_numbered = is_bare or form in ("tensors", "subset", "l.txt")
    assert data.require_labels().class_names == (("0", "1", "2") if is_numbered else KINDS)
    for rows in (slice(None), np.random.default_rng(0).permutation(N)):
        np.testing.assert_array_equal(np.stack(data.read(rows)), PIXELS[rows])
    if form in ("images", "t.csv", "t.parquet", "l.txt"):
        assert list(data.paths) == [str(root / "images" / name) for name in NAMES]
    if form in FILES:  # a path is opened by what it is
        named = open_data(f"{FILES[form]}:{root}/{form}")
        assert (named.name, named.fingerprint) == (data.name, data.fingerprint)
    assert copy.fingerprint == data.fingerprint or form == "hub"


# Folders ------------------------------------------------------------------------------------------


BROKEN = [{"bytes": b"no image" if i == 1 else png(i), "path": None} for i in range(20)]
GONE = [OSError("the disk\nis gone") if i == 1 else PIXELS[i] for i in range(20)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (hub({"image": datasets.Image()}, image=BROKEN), "hf:Dataset!1: not an"),
        (Items(GONE, targets=[0] * 20), "item 1: the disk is gone"),
    ],
)
def test_damaged_images_follow_the_limit(source, message):
    refused(source, rf"1 of 20 images cannot be read \({message}")
    images = open_data(source, max_bad=0.05).read(slice(None))
    assert [image is None for image in images] == [i == 1 for i in range(20)]


# Lists and tables of images -----------------------------------------------------------------------


def test_list_of_hashing_papers(tmp_path):
    put(tmp_path, "images/a.png", "images/b c.png", "images/d.png")
    lines = "images/a.png 1 0 1\r\n\nimages/b c.png  0 0 0 \nimages\\d.png 0 1 0\n"
    dataset = open_data(save(tmp_path / "train.txt", lines))
    assert dataset.require_labels().dense().tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert all(image is not None for image in dataset.read(slice(None)))


def test_columns_of_csv(tmp_path):
    put(tmp_path / "pictures", "a.png", "c,d.png")
    rows = '-9223372036854775808,a.png,sea|sky,x\n\n3,"c,d.png", sky | ,\n'
    file = save(tmp_path / "t.csv", f"\ufeffid,image,label,title\n{rows}")
    dataset = open_data(file, root=tmp_path / "pictures", keep="title")
    assert dataset.ids.tolist() == [-(2**63), 3]
    assert dataset.require_labels().dense().tolist() == [[1, 1], [0, 1]]
    assert all(image is not None for image in dataset.read(slice(None)))
    assert dataset.texts["title"].tolist() == ["x", ""]


# Vectors in every form ----------------------------------------------------------------------------


def write(folder, form, x=X):
    path = folder / f"a.{form}"
    if form.endswith("npy"):
        save(path, np.asfortranarray(x) if "fortran" in form else x)
    elif form == "npz":
        save(path, {"features": x, "labels": SOME, "ids": IDS, "name": np.array(NAMES)})
    elif form == "h5":
        save(path, {"labels": SOME, "ids": IDS})
        with h5py.File(path, "a") as h5:
            h5.create_dataset("x", data=x, chunks=(5, W), compression="gzip")
    elif form == "mat":
        labels = csc_matrix(SOME[:, None] == np.arange(3))
        savemat(path, {"X": x, "labels": labels, "ids": IDS, "name": np.array(NAMES, object)})
    elif form == "fvecs":
        fvecs_write(path, x)
    else:
        rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1])
        save(path, {"embedding": rows, "label": NUMBERS, "id": IDS, "path": NAMES})
    return f"features:{path}"


def check(data, x=X, classes=KINDS, ids=False, names=False):
    assert isinstance(data, FeatureDataset)
    rows = np.random.default_rng(3).integers(0, N, 60)
    for selection in (slice(None), slice(7, 23), rows, rows[:0], np.array([N - 1])):
        np.testing.assert_array_equal(data.read(selection), x[selection])
    assert (data.labels.class_names if data.labels else None) == classes
    assert classes is None or class_numbers(data) == SOME.tolist()
    assert not ids or data.ids.tolist() == IDS.tolist()
    assert not names or data.texts["name"].tolist() == NAMES


@pytest.mark.parametrize("form", ["npy", "fortran.npy", "npz", "h5", "parquet", "mat", "fvecs"])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int8])
def test_files_of_vectors(tmp_path, form, kind):
    x, bare = (10 * X).astype(kind), form[-3:] in ("npy", "ecs")
    classes = None if bare else ("0", "1", "2")
    data = open_data(write(tmp_path, form, x))
    check(data, x.astype(np.float32), classes, not bare, form in ("npz", "parquet", "mat"))


def frame(**columns):
    return pd.DataFrame({"id": IDS, "path": NAMES, "label": CELLS, **columns})


def test_tables_with_a_column_of_vectors(tmp_path):
    table = frame(embedding=list(X))
    hubs = hub(EMB, emb=list(X), id=IDS, path=NAMES, label=CELLS)
    hubs.save_to_disk(str(tmp_path / "hub"))
    for source in (table, pa.Table.from_pandas(table), hubs, tmp_path / "hub"):
        check(open_data(source), ids=True, names=True)
    sources = (table, hubs, frame(embedding=list(X + 1)), hubs.select(range(20)))
    assert len({open_data(source).fingerprint for source in sources}) == 4


def test_columns_that_are_named():
    numbers = {f"x{i}": X[:, i] for i in range(W)}
    table = frame(**numbers).rename(columns={"label": "kind", "id": "row", "path": "where"})
    columns = {"labels": "kind", "ids": "row", "names": "where", "vectors": list(numbers)}
    check(open_data(table.assign(noise=1.0), **columns, keep="noise"), ids=True, names=True)
    check(open_data(table, labels="kind", id_column="row", vectors=list(numbers)), ids=True)
    check(open_data(table.set_index("row"), labels="kind"))
    check(open_data(table, labels="kind", vectors=["x2", "x0"]), X[:, [2, 0]])


def test_our_own_features_are_refused(tmp_path):
    header = Header("features", "m", np.ones((1, 4, 12), np.float32), "d", KINDS)
    with RowWriter(tmp_path / "f.h5", header) as writer:
        packed = np.packbits(np.eye(3, dtype=bool)[[0, 2]], axis=1)
        writer.append(np.ones((2, 12), np.float32), np.array([5, 6]), packed)
        writer.finish()
    refused(tmp_path / "f.h5", "was written by gpq encode: give the data that it encoded")


# Several files, fingerprints, memory --------------------------------------------------------------


@given(st.lists(st.integers(1, 2), min_size=1, max_size=12), st.data())
def test_rows_of_files_are_those_of_their_concatenation(tmp_path_factory, sizes, data):
    folder, n = tmp_path_factory.mktemp("shards"), sum(sizes)
    for number, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        rows = slice(end - size, end)
        content = {"features": X[rows], "labels": Y[rows], "name": np.array(NAMES[rows])}
        save(folder / f"shard-{number}.npz", content)  # 10 comes after 9
    dataset = open_data(f"features:{folder}/shard-*.npz")
    rows = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    np.testing.assert_array_equal(dataset.read(rows), X[rows])
    assert dataset.texts["name"].tolist() == NAMES[:n]
    assert dataset.labels.dense().argmax(axis=1).tolist() == Y[:n].tolist()


@pytest.mark.parametrize(
    ("suffix", "first", "second", "message"),
    [
        ("npy", X, X[:, 1:], r"a-1\.npy is \[24, 7\], .*a-2\.npy \[24, 6\]"),
        ("npz", {"x": X, "labels": Y}, {"x": X}, r"a-1\.npz .*do not fit: one lacks labels"),
        ("parquet", {"v": list(X), "label": Y}, {"v": list(X)}, "do not fit: one lacks label"),
    ],
)
def test_files_that_do_not_fit_are_named(tmp_path, suffix, first, second, message):
    save(tmp_path / f"a-1.{suffix}", first)
    save(tmp_path / f"a-2.{suffix}", second)
    refused(f"{tmp_path}/a-*.{suffix}", message)


def test_fingerprints_follow_content(tmp_path):
    first = open_data(write(tmp_path, "npy")).fingerprint
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    assert open_data(tmp_path / "b.npy").fingerprint == first
    assert open_data(tmp_path / "b.npy", labels=Y).fingerprint != first
    assert open_data(write(tmp_path, "npy", X + 1)).fingerprint != first


@pytest.mark.parametrize("suffix", ["npy", "h5"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    x = np.ones((160_000, 128), np.float32)
    data = open_data(save(tmp_path / f"x.{suffix}", x if suffix == "npy" else {"x": x}))
    tracemalloc.start()
    for i in range(0, len(data), 2000):
        data.read(slice(i, i + 2000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.nbytes / 4


@pytest.mark.parametrize("position", [0, 4000, 100_000, 299_999])
def test_a_changed_byte_changes_the_fingerprint_of_a_file(tmp_path, position):
    content = bytearray(300_000)
    first = content_of([save(tmp_path / "a.raw", bytes(content))], 16 << 10)
    content[position] = 1
    assert content_of([save(tmp_path / "a.raw", bytes(content))], 16 << 10) != first


def test_lists_of_class_numbers_in_a_hub_are_several_labels():
    kinds = {"labels": datasets.List(datasets.ClassLabel(names=list(KINDS)))}
    several = open_data(hub(kinds, labels=[[0, 2], [], [1]], v=list(X[:3]))).require_labels()
    assert several.dense().tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
