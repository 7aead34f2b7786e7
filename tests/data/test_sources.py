"""Images and vectors out of every form, of files, tables and objects, are the same items; damage
follows the limit; nothing is held.
"""

import os
import tracemalloc
from pathlib import Path

import datasets
import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_files import Items, hub, png, put, refused, save, shard
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from gpq_faiss.data.base import FeatureDataset, ImageDataset
from gpq_faiss.data.images import decode_image
from gpq_faiss.data.open import open_data
from gpq_faiss.data.paths import content_of
from gpq_faiss.data.standard import layout_of
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
            shard(root / f"x-{k + 8:02}.tar", dict(sorted(members.items())))
        table = {"image": [f"images/{name}" for name in NAMES], "label": [KINDS[y] for y in Y]}
        save(root / "t.parquet", table)
        lines = ["image,label", *map(",".join, zip(*table.values(), strict=True))]
        save(root / "t.csv", "\n".join(lines))
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
FILES = {"images": "folder", "t.csv": "csv", "t.parquet": "parquet", "l.txt": "list", "hub": "hf"}
FILES |= {"x-{08..10}.tar": "webdataset"}


@pytest.mark.parametrize("form", [*FILES, *OBJECTS])
def test_every_form_is_the_same_images(roots, form):
    root, is_bare = roots[0], form in ("array", "planes")
    sources = [OBJECTS[form]() if form in OBJECTS else f"{r}/{form}" for r in roots]
    data, copy = (open_data(source, labels=Y if is_bare else None) for source in sources)
    assert isinstance(data, ImageDataset)
    assert (data.native_size, data.pixels is not None) == (8, is_bare)
    assert data.require_labels().class_ids().tolist() == Y.tolist()
    is_numbered = is_bare or form in ("tensors", "subset", "l.txt")
    assert data.require_labels().class_names == (("0", "1", "2") if is_numbered else KINDS)
    for rows in (slice(None), np.random.default_rng(0).permutation(N)):
        np.testing.assert_array_equal(np.stack(data.read(rows)), PIXELS[rows])
    is_file = form in ("images", "t.csv", "t.parquet", "l.txt")
    expected = [str(root / "images" / name) if is_file else None for name in NAMES]
    assert [data.image_path(i) for i in range(N)] == expected
    if form in FILES:  # a path is opened by what it is
        named = open_data(f"{FILES[form]}:{root}/{form}")
        assert (named.name, named.fingerprint) == (data.name, data.fingerprint)
    assert copy.fingerprint == data.fingerprint or form == "hub"


def test_columns_of_a_hub_and_its_splits(roots):
    table = {"file": [f"f{i}" for i in range(N)], "path": NAMES, "id": list(range(100, 100 + N))}
    data = open_data(hub(HUB, **COLUMNS, **table), keep="file")
    assert data.ids.tolist() == list(range(100, 100 + N))
    assert (data.texts["name"][4], data.texts["file"][4]) == (NAMES[4], "f4")
    assert "splits: train, test" in open_data(roots[0] / "hub").notes


def test_an_image_is_a_data_set(tmp_path):
    put(tmp_path, "a.png")
    image = open_data(tmp_path / "a.png").read(slice(None))
    np.testing.assert_array_equal(image[0], decode_image(png(0)))
    refused(str(tmp_path / "b.png"), "not found")


# Folders ------------------------------------------------------------------------------------------


def test_folder_of_classes(tmp_path):
    put(
        tmp_path, "cat/2.png", "cat/1.PNG", "ant/x/deep.png", "bee/0.jpg", ".h/a.png", "bee/._0.jpg"
    )
    save(tmp_path / "cat" / "notes.txt", "no image")
    (tmp_path / "ant" / "loop").symlink_to(tmp_path)
    dataset = open_data(tmp_path)
    names = ["ant/x/deep.png", "bee/0.jpg", "cat/1.PNG", "cat/2.png"]
    assert [os.path.relpath(path, tmp_path) for path in dataset.paths] == names
    assert dataset.labels.class_ids().tolist() == [0, 1, 2, 2]
    assert "2 files without an image extension left out" in dataset.notes
    assert "ant/loop is a link to a folder that is read anyway: left out" in dataset.notes


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        ("train/x bus/y", ["train", "bus"]),
        ("train/x test/y", ["", ""]),
        ("set/train/b/x set/test/a/y", ["b", "a"]),
        ("train/c/x val/a/y test/b/z", ["c", "a", "b"]),
        ("flowers/rose/x flowers/tulip/y", ["rose", "tulip"]),
        ("x a/y", ["", "a"]),
        ("only/x", ["only"]),
    ],
)
def test_layouts(names, classes):
    assert layout_of(names.split())[0] == classes


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
    ids = save(tmp_path / "x" / "ids.txt", "a.png 12\nd.png -1\n")
    names = open_data(ids, root=tmp_path / "images").require_labels()
    assert (names.class_names, names.class_ids().tolist()) == (("12",), [0, -1])
    bare = save(tmp_path / "x" / "bare.txt", "a.png\n")
    assert open_data(bare, root=tmp_path / "images").labels is None


def test_columns_of_csv(tmp_path):
    put(tmp_path / "pictures", "a.png", "b.png", "c,d.png")
    rows = '7,a.png,sea|sky,x\n-9223372036854775808,b.png,,y\n\n3,"c,d.png", sky | ,\n'
    file = save(tmp_path / "t.csv", f"\ufeffid,image,label,title\n{rows}")
    dataset = open_data(file, root=tmp_path / "pictures", keep="title")
    assert dataset.ids.tolist() == [7, -(2**63), 3]
    assert dataset.require_labels().dense().tolist() == [[1, 1], [0, 0], [0, 1]]
    assert all(image is not None for image in dataset.read(slice(None)))
    texts = {name: column.tolist() for name, column in dataset.texts.items()}
    assert texts == {"name": ["a.png", "b.png", "c,d.png"], "title": ["x", "y", ""]}


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
    else:
        rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1])
        save(path, {"embedding": rows, "label": NUMBERS, "id": IDS, "path": NAMES})
    return f"features:{path}"


def check(data, x=X, classes=KINDS, ids=False, names=False):
    assert isinstance(data, FeatureDataset)
    rows = np.random.default_rng(3).integers(0, N, 60)
    selections = (slice(None), slice(7, 23), rows, rows[:0], np.array([N - 1]), rows % 2 == 0)
    for selection in selections[:-1]:
        np.testing.assert_array_equal(data.read(selection), x[selection])
    assert (data.labels.class_names if data.labels else None) == classes
    assert classes is None or data.require_labels().class_ids().tolist() == SOME.tolist()
    assert not ids or data.ids.tolist() == IDS.tolist()
    assert not names or data.texts["name"].tolist() == NAMES


@pytest.mark.parametrize("form", ["npy", "fortran.npy", "npz", "h5", "parquet"])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int8])
def test_files_of_vectors(tmp_path, form, kind):
    x, bare = (10 * X).astype(kind), "npy" in form
    classes = None if bare else ("0", "1", "2")
    data = open_data(write(tmp_path, form, x))
    check(data, x.astype(np.float32), classes, not bare, form in ("npz", "parquet"))


def frame(**columns):
    return pd.DataFrame({"id": IDS, "path": NAMES, "label": CELLS, **columns})


def test_tables_with_a_column_of_vectors(tmp_path):
    table = frame(embedding=list(X))
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), W)
    arrow = pa.table({name: pa.array(table[name]) for name in ("id", "path", "label")})
    hubs = hub(EMB, emb=list(X), id=IDS, path=NAMES, label=CELLS)
    hubs.save_to_disk(str(tmp_path / "hub"))
    sources = [table, pa.Table.from_pandas(table), table.set_index("path").reset_index()]
    sources += [arrow.append_column("embedding", fixed), hubs, tmp_path / "hub"]
    marks = [data.fingerprint for data in map(open_data, sources)]
    for source in sources:
        check(open_data(source), ids=True, names=True)
    changed = (frame(embedding=list(X + 1)), hubs.select(range(20)))
    marks += [open_data(source).fingerprint for source in changed]
    assert (len({*marks[:4]}), len({marks[0], marks[4], *marks[6:]})) == (1, 4)


def test_columns_that_are_named():
    numbers = {f"x{i}": X[:, i] for i in range(W)}
    table = frame(**numbers).rename(columns={"label": "kind", "id": "row", "path": "where"})
    columns = {"labels": "kind", "ids": "row", "names": "where", "vectors": list(numbers)}
    check(open_data(table.assign(noise=1.0), **columns, keep="noise"), ids=True, names=True)
    check(open_data(table.set_index("row"), labels="kind"))
    check(open_data(table, labels="kind", vectors=["x2", "x0"]), X[:, [2, 0]])


def test_labels_ids_and_names_beside_the_data(tmp_path):
    file, labels = write(tmp_path, "npy"), save(tmp_path / "y.npy", SOME)
    pairs = [
        (frame(v=list(X)).drop(columns="label"), SOME),
        (torch.from_numpy(X), torch.from_numpy(SOME)),
        (X, SOME.tolist()),
        (file, labels),
    ]
    for source, values in pairs:
        check(open_data(source, labels=values, ids=IDS), classes=("0", "1", "2"), ids=True)
    check(open_data(X, labels=CELLS, names=NAMES), names=True)
    assert open_data(open_data(X, ids=IDS), labels=Y).ids.tolist() == IDS.tolist()
    kinds = {"labels": datasets.List(datasets.ClassLabel(names=list(KINDS)))}
    several = open_data(hub(kinds, labels=[[0, 2], [], [1]], v=list(X[:3]))).require_labels()
    assert several.dense().tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


def test_our_own_features_file(tmp_path):
    codebooks, names = np.ones((3, 4, 12), np.float32), tuple(f"c{i}" for i in range(11))
    packed = np.packbits(np.eye(11, dtype=bool)[[0, 3, 10]], axis=1)
    x = np.random.default_rng(0).standard_normal((3, 36)).astype(np.float32)
    with RowWriter(tmp_path / "f.h5", Header("features", "m", codebooks, "d", names)) as writer:
        writer.append(x, np.array([5, 6, 7]), packed)
        writer.finish()
    data = open_data(f"features:{tmp_path}/f.h5")
    assert data.require_labels().class_ids().tolist() == [0, 3, 10]
    assert (data.require_labels().class_names, data.ids.tolist()) == (names, [5, 6, 7])
    np.testing.assert_array_equal(data.read(slice(0, 3)), x)


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
    assert dataset.labels.class_ids().tolist() == Y[:n].tolist()


def test_files_that_do_not_fit_are_named(tmp_path):
    two = np.ones((2, 3))
    for name, content in (("a-1", two), ("a-2", np.ones((2, 4)))):
        save(tmp_path / f"{name}.npy", content)
    save(tmp_path / "c-1.npz", {"features": two, "labels": np.array([0, 1])})
    save(tmp_path / "c-2.npz", {"features": two})
    save(tmp_path / "p-1.parquet", {"v": two.tolist(), "label": [0, 1]})
    save(tmp_path / "p-2.parquet", {"v": two.tolist()})
    refused(f"{tmp_path}/a-*.npy", r"a-1\.npy is \[2, 3\], .*a-2\.npy \[2, 4\]")
    refused(f"{tmp_path}/c-{{1..2}}.npz", r"c-1\.npz .*do not fit: one lacks labels")
    refused(f"{tmp_path}/p-*.parquet", "do not fit: their columns differ")


def test_fingerprints_follow_content(tmp_path):
    first = open_data(write(tmp_path, "npy")).fingerprint
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    assert open_data(tmp_path / "b.npy").fingerprint == first
    assert open_data(tmp_path / "b.npy", labels=save(tmp_path / "l.npy", Y)).fingerprint != first
    assert open_data(write(tmp_path, "npy", X + 1)).fingerprint != first
    marks = []
    for position in (0, 4000, 100_000, 299_999):
        content = bytearray(300_000)
        content[position] = 1
        marks.append(content_of([save(tmp_path / "a.raw", bytes(content))], 16 << 10))
    assert len({*marks}) == 4


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory is read from /proc")
@pytest.mark.parametrize("suffix", ["npy", "h5"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    """Neither what Python holds, nor what is mapped, comes near the 82 MB of the file."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    x = np.ones((160_000, 128), np.float32)
    file = save(tmp_path / f"x.{suffix}", x if suffix == "npy" else {"x": x})
    data, before, peak = open_data(f"features:{file}"), resident(), 0
    tracemalloc.start()
    for i in range(0, len(data), 2000):
        data.read(slice(i, i + 2000))
        peak = max(peak, resident() - before, tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert peak < 20e6
