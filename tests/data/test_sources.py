"""Images and vectors out of every form, of files, tables and objects, are the same items; damage
follows the limit; nothing is held.
"""

import json
import os
import tarfile
import tracemalloc
from pathlib import Path

import datasets
import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import Items, hub, png, put, refused, save, shard
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from gpq_faiss.data.base import FeatureDataset, ImageDataset
from gpq_faiss.data.folder import layout_of
from gpq_faiss.data.images import decode_image
from gpq_faiss.data.open import open_data
from gpq_faiss.data.paths import file_fingerprint
from gpq_faiss.errors import DataError
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
    found = [tmp_path_factory.mktemp("root") for _ in range(2)]
    for root in found:
        put(root / "images", *NAMES, size=8)
        for form, mode, top in (("a.tar", "w", "."), ("a.tar.gz", "w:gz", "top")):
            with tarfile.open(root / form, mode) as out:
                out.add(root / "images", arcname=top)
        for k in range(3):
            part = range(8 * k, 8 * k + 8)
            members = {f"{i}.png": png(i, 8) for i in part} | {
                f"{i}.cls": KINDS[Y[i]].encode() for i in part
            }
            shard(
                root / f"x-{k + 8:02}.tar",
                dict(sorted(members.items(), key=lambda m: int(m[0][:-4]))),
            )
        table = {"image": [f"images/{name}" for name in NAMES], "label": [KINDS[y] for y in Y]}
        save(root / "t.parquet", table)
        lines = ["image,label", *map(",".join, zip(*table.values(), strict=True))]
        save(root / "t.csv", "\n".join(lines))
        save(root / "classes.txt", "\n".join(KINDS))
        flags = [" ".join(map(str, row)) for row in np.eye(3, dtype=int)[Y]]
        lines = [f"images\\{n} {row}\r\n" for n, row in zip(NAMES, flags, strict=True)]
        save(root / "l.txt", "".join(lines))
        pictures = hub(HUB, **COLUMNS)
        parts = {"test": pictures.select(range(20, N)), "train": pictures.select(range(20))}
        datasets.DatasetDict(parts).save_to_disk(str(root / "hub"))
    return found


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
FILES = {"images": "folder", "a.tar": "folder", "a.tar.gz": "folder", "t.csv": "csv", "hub": "hf"}
FILES |= {"x-{08..10}.tar": "webdataset", "t.parquet": "parquet", "l.txt": "list"}


@pytest.mark.parametrize("form", [*FILES, *OBJECTS])
def test_every_form_is_the_same_images(roots, form):
    root, bare = roots[0], form in ("array", "planes")
    prefix = "webdataset:" if form.startswith("x-") else ""
    before = sorted(root.rglob("*"))
    given_ = [OBJECTS[form]() if form in OBJECTS else f"{prefix}{r}/{form}" for r in roots]
    data, again = (open_data(source, labels=Y if bare else None) for source in given_)
    assert isinstance(data, ImageDataset)
    assert (data.native_size, data.pixels is not None) == (8, bare)
    assert data.require_labels().class_ids().tolist() == Y.tolist()
    numbered = bare or form in ("tensors", "subset")
    assert data.require_labels().class_names == (("0", "1", "2") if numbered else KINDS)
    for rows in (slice(None), np.random.default_rng(0).permutation(N)):
        np.testing.assert_array_equal(np.stack(data.read(rows)), PIXELS[rows])
    is_file = form in ("images", "t.csv", "t.parquet", "l.txt")
    assert [data.image_path(i) for i in range(N)] == [
        str(root / "images" / name) if is_file else None for name in NAMES
    ]
    if form in ("images", "a.tar"):
        assert data.texts["name"].tolist() == NAMES
    assert sorted(root.rglob("*")) == before, "nothing is extracted"
    if form in FILES and not prefix:  # a path is opened by what it is
        named = open_data(f"{FILES[form]}:{root}/{form}")
        assert (named.name, named.fingerprint) == (data.name, data.fingerprint)
    assert (again.fingerprint == data.fingerprint) or form in ("hub", "a.tar.gz")


def test_columns_of_a_hub_and_its_parts(roots):
    held = hub(
        HUB, **COLUMNS, file=[f"f{i}" for i in range(N)], path=NAMES, id=list(range(100, 100 + N))
    )
    data = open_data(held, keep="file")
    assert data.ids.tolist() == list(range(100, 100 + N))
    assert (data.texts["name"][4], data.texts["file"][4]) == (NAMES[4], "f4")
    assert "parts: train, test" in open_data(roots[0] / "hub").notes


# Folders and archives -----------------------------------------------------------------------------


def test_folder_of_classes(tmp_path):
    put(
        tmp_path,
        "cat/2.png",
        "cat/1.PNG",
        "ant/x/deep.png",
        "bee/0.jpg",
        ".hidden/a.png",
        "bee/._0.jpg",
    )
    save(tmp_path / "cat" / "notes.txt", "no image")
    (tmp_path / "ant" / "loop").symlink_to(tmp_path)
    dataset = open_data(tmp_path)
    names = ["ant/x/deep.png", "bee/0.jpg", "cat/1.PNG", "cat/2.png"]
    assert [os.path.relpath(path, tmp_path) for path in dataset.paths] == names
    assert dataset.labels.class_ids().tolist() == [0, 1, 2, 2]
    assert "1 files without an image extension left out (.txt 1)" in dataset.notes
    assert "ant/loop is a link to a folder that is read anyway: left out" in dataset.notes


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (["train/x.png", "bus/y.png"], ["bus", "train"]),
        (["train/x.png", "test/y.png"], [None, None]),
        (["set/train/b/x.png", "set/test/a/y.png"], ["b", "a"]),
        (["train/b/x.png", "val/a/y.png"], ["b", "a"]),
        (["train/c/x.png", "val/a/y.png", "test/b/z.png"], ["a", "c", "b"]),
        (["flowers/rose/x.png", "flowers/tulip/y.png"], ["rose", "tulip"]),
        (["x.png", "a/y.png"], ["a", None]),
        (["x.png", "y.png"], [None, None]),
        (["only/x.png"], ["only"]),
    ],
)
def test_layouts(names, classes):
    order, found, _ = layout_of(names)
    assert (sorted(order), found) == (list(range(len(names))), classes)


def test_an_archive_that_shrinks(tmp_path):
    dataset = open_data(
        shard(tmp_path / "a.tar", {"a/x.png": png(0)}).replace("webdataset", "folder")
    )
    save(tmp_path / "a.tar", b"")
    with pytest.raises(DataError, match="shorter"):
        dataset.read(np.array([0]))


# WebDataset ---------------------------------------------------------------------------------------


def samples(number, **of_each):
    """Images, each with a text per extension."""
    texts = {
        f"{i:06d}.{e}": t.format(i=i, c=i % 3).encode()
        for i in range(number)
        for e, t in of_each.items()
    }
    return dict(sorted(({f"{i:06d}.png": png(i) for i in range(number)} | texts).items()))


@pytest.mark.parametrize(
    ("members", "column", "classes", "said"),
    [
        ({"json": '{{"label": "c{c}"}}'}, None, "c0,c1,c2", "'label'"),
        ({"json": '{{"x": 1, "class": {c}}}'}, None, "0,1,2", "'class'"),
        ({"json": '{{"tags": ["t", "c{c}"]}}'}, "tags", "c0,c1,c2,t", "'tags'"),
        ({"txt": "name {c}\n"}, None, "name 0,name 1,name 2", "'txt'"),
        ({"txt": "a caption {i}", "cls": "{c}"}, None, "0,1,2", "'cls'"),
        ({"kind": "k{c}", "cls": "{c}"}, "kind", "k0,k1,k2", "'kind'"),
    ],
)
def test_where_labels_stand(tmp_path, members, column, classes, said):
    dataset = open_data(shard(tmp_path / "a.tar", samples(6, **members)), label_column=column)
    assert ",".join(dataset.require_labels().class_names) == classes
    assert any(said in note for note in dataset.notes)


def test_texts_that_are_kept_and_a_chosen_image(tmp_path):
    members = samples(3, json='{{"label": {c}, "url": "u/{i}"}}', txt="caption {i}")
    members |= {f"{i:06d}.seg.png": png(i + 50) for i in range(3)}
    dataset = open_data(shard(tmp_path / "a.tar", members), keep="url,txt", image_column="seg.png")
    assert dataset.texts["url"].tolist() == ["u/0", "u/1", "u/2"]
    assert dataset.texts["txt"].tolist() == ["caption 0", "caption 1", "caption 2"]
    np.testing.assert_array_equal(dataset.read(slice(0, 1))[0], decode_image(png(50)))


BROKEN = [{"bytes": b"no image" if i == 1 else png(i), "path": None} for i in range(20)]
GONE = [OSError("the disk\nis gone") if i == 1 else (PIXELS[i], 0) for i in range(20)]
ONE_OF_20 = r"1 of 20 images cannot be read \("
NO_JSON = r"a.tar!000001\.json is no text, or no JSON object"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (hub({"image": datasets.Image()}, image=BROKEN), ONE_OF_20 + "Dataset!row 1: not an"),
        (Items(GONE), ONE_OF_20 + "item 1: the disk is gone"),
        ({"000001.png": None}, ONE_OF_20 + ".*a.tar!000001: has no image"),
        ({"000001.png": png(1)[:40]}, ONE_OF_20 + ".*a.tar!000001.png: not an image"),
        ({"000001.json": b"{"}, NO_JSON),
        ({"000001.json": b"[" * 100_000}, NO_JSON),
        ({"000001.json": b'{"label": ' + b"[" * 900 + b"]" * 900 + b"}"}, "list in a list"),
        ({"000001.json": b"\xff\xfe"}, r"a.tar!000001\.json is no text, or"),
        (
            {"000001.jpg": b"x"},
            r"has several images \(jpg, png\): name one with --read image_column",
        ),
    ],
)
def test_damaged_images_follow_the_limit(tmp_path, source, why):
    if isinstance(source, dict):  # what changes in a shard
        source = shard(tmp_path / "a.tar", samples(20, json='{{"label": {c}}}') | source)
    refused(source, why)
    if why.startswith(ONE_OF_20):
        tolerant = open_data(source, max_bad=0.05)
        assert [image is None for image in tolerant.read(slice(None))] == [
            i == 1 for i in range(20)
        ]


TEXT = st.characters(codec="utf-8", exclude_characters="/\\.\0", exclude_categories=("Cs",))


@given(
    st.dictionaries(
        st.text(TEXT, min_size=1, max_size=4), st.integers(-1, 5), min_size=1, max_size=4
    ).filter(lambda given_: max(given_.values()) >= 0)  # shards without any label are refused
)
@settings(max_examples=15, deadline=None)
def test_any_keys_and_labels_come_back(tmp_path_factory, given_):
    members = {}
    for i, (key, label) in enumerate(given_.items()):
        members |= {f"a/{key}.png": png(i), f"a/{key}.json": json.dumps({"label": label}).encode()}
    dataset = open_data(shard(tmp_path_factory.mktemp("any") / "a.tar", members))
    assert dataset.texts["name"].tolist() == [f"a/{key}" for key in given_]
    assert numbers_of(dataset) == list(given_.values())


def numbers_of(dataset):
    """Labels whose names are numbers; -1 for none."""
    if dataset.labels is None:
        return [-1] * len(dataset)
    names = [*map(int, dataset.labels.class_names), -1]
    return [names[c] for c in dataset.labels.class_ids()]


# Lists and tables of images -----------------------------------------------------------------------


def test_list_of_hashing_papers(tmp_path):
    put(tmp_path, "images/a.png", "images/b c.png", "images/d.png")
    lines = "images/a.png 1 0 1\r\n\nimages/b c.png  0 0 0 \nimages\\d.png 0 1 0\n"
    dataset = open_data(save(tmp_path / "train.txt", lines))
    assert dataset.require_labels().dense().tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert all(image is not None for image in dataset.read(slice(None)))
    ids = open_data(
        save(tmp_path / "x" / "ids.txt", "a.png 12\nd.png -1\n"), root=tmp_path / "images"
    )
    assert ids.require_labels().class_ids().tolist() == [12, -1]
    assert (
        open_data(save(tmp_path / "x" / "bare.txt", "a.png\n"), root=tmp_path / "images").labels
        is None
    )


def test_columns_of_csv(tmp_path):
    put(tmp_path / "pictures", "a.png", "b.png", "c,d.png")
    text = '\ufeffid,image,label,title\n7,a.png,sea|sky,x\n-9223372036854775808,b.png,,y\n\n3,"c,d.png", sky | ,\n'
    file, root = save(tmp_path / "t.csv", text), tmp_path / "pictures"
    dataset = open_data(file, root=root, keep="title")
    assert dataset.ids.tolist() == [7, -(2**63), 3]
    assert dataset.require_labels().dense().tolist() == [[1, 1], [0, 0], [0, 1]]
    assert all(image is not None for image in dataset.read(slice(None)))
    texts = {name: column.tolist() for name, column in dataset.texts.items()}
    assert texts == {"name": ["a.png", "b.png", "c,d.png"], "title": ["x", "y", ""]}
    assert dataset.fingerprint != open_data(file, root=root).fingerprint
    other = save(tmp_path / "t.tsv", "file\tkind\na.png\t10\nb.png\t9\n")
    found = open_data(other, image_column="file", label_column="kind", root=root)
    assert found.require_labels().class_names == ("9", "10")


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
    for some in (
        slice(None),
        slice(7, 23),
        rows,
        rows[:0],
        np.array([N - 1]),
        np.resize(rows % 2 == 0, N),
    ):
        np.testing.assert_array_equal(data.read(some), x[some])
    assert (data.labels.class_names if data.labels else None) == classes
    assert classes is None or data.require_labels().class_ids().tolist() == SOME.tolist()
    assert not ids or data.ids.tolist() == IDS.tolist()
    assert not names or data.texts["name"].tolist() == NAMES


@pytest.mark.parametrize("form", ["npy", "fortran.npy", "npz", "h5", "parquet"])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int8])
def test_files_of_vectors(tmp_path, form, kind):
    x, bare = (10 * X).astype(kind), "npy" in form
    data = open_data(write(tmp_path, form, x))
    check(
        data,
        x.astype(np.float32),
        None if bare else ("0", "1", "2"),
        not bare,
        form in ("npz", "parquet"),
    )


def frame(**more):
    return pd.DataFrame({"id": IDS, "path": NAMES, "label": CELLS, **more})


def test_tables_with_a_column_of_vectors(tmp_path):
    table = frame(embedding=list(X))
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), W)
    arrow = pa.table({name: pa.array(table[name]) for name in ("id", "path", "label")})
    hubs = hub(EMB, emb=list(X), id=IDS, path=NAMES, label=CELLS)
    hubs.save_to_disk(str(tmp_path / "hub"))
    held = [table, pa.Table.from_pandas(table), table.set_index("path").reset_index()]
    held += [arrow.append_column("embedding", fixed), hubs, f"hf:{tmp_path}/hub", tmp_path / "hub"]
    found = [open_data(source) for source in held]
    for data in found:
        check(data, ids=True, names=True)
    assert len({data.fingerprint for data in found[:4]}) == 1
    others = [
        open_data(x).fingerprint for x in (frame(embedding=list(X + 1)), hubs.select(range(20)))
    ]
    assert len({found[0].fingerprint, found[4].fingerprint, *others}) == 4


def test_columns_that_are_named():
    numbers = {f"x{i}": X[:, i] for i in range(W)}
    table = frame(**numbers).rename(columns={"label": "kind", "id": "row", "path": "where"})
    given_ = {"labels": "kind", "ids": "row", "names": "where", "vectors": list(numbers)}
    data = open_data(table.assign(noise=1.0), **given_, keep="noise")
    check(data, ids=True, names=True)
    assert set(data.texts["noise"].tolist()) == {"1.0"}
    # All other columns of numbers are the dimensions, the index is none.
    for source, more in ((table, {"ids": "row"}), (table.set_index("row"), {})):
        check(open_data(source, label_column="kind", **more))
    reversed_ = open_data(table, **{**given_, "vectors": ["x2", "x0"]})
    np.testing.assert_array_equal(reversed_.read(slice(None)), X[:, [2, 0]])
    shuffled = hub(
        EMB, emb=list(X), kind=CELLS, more=[[1.0, 2.0]] * N, key=[str(i) for i in range(N)]
    )
    shuffled = shuffled.shuffle(seed=3)
    order = np.array(shuffled["key"], int)
    data = open_data(shuffled, vectors="emb", label_column="kind")
    np.testing.assert_array_equal(data.read(np.array([9, 2, 9])), X[order][[9, 2, 9]])
    assert data.texts["name"].tolist() == list(shuffled["key"])
    assert data.require_labels().class_ids().tolist() == SOME[order].tolist()


def test_labels_ids_and_names_beside_the_data(tmp_path):
    file, labels = write(tmp_path, "npy"), save(tmp_path / "y.npy", SOME)
    held = [
        (frame(v=list(X)).drop(columns="label"), SOME),
        (torch.from_numpy(X), torch.from_numpy(SOME)),
    ]
    for source, given_ in [*held, (X, SOME), (X, SOME.tolist()), (file, SOME), (file, labels)]:
        check(open_data(source, labels=given_, ids=IDS), classes=("0", "1", "2"), ids=True)
    check(open_data(X, labels=CELLS, names=NAMES), names=True)
    assert open_data(X, labels=np.eye(N, 3, dtype=bool)).require_labels().counts().tolist() == [
        1,
        1,
        1,
    ]
    assert open_data(open_data(X, ids=IDS), labels=Y).ids.tolist() == IDS.tolist()
    kinds = {"labels": datasets.List(datasets.ClassLabel(names=list(KINDS)))}
    several = hub(kinds, labels=[[0, 2], [], [1]], v=list(X[:3]))
    assert open_data(several).require_labels().dense().tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


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


@given(st.data())
def test_rows_of_several_files_are_rows_of_their_concatenation(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("shards")
    sizes = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=12))
    n = sum(sizes)
    for number, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        rows = slice(end - size, end)
        content = {"features": X[rows], "labels": SOME[rows], "name": np.array(NAMES[rows])}
        save(
            folder / f"shard-{number}.npz", content
        )  # no zeros before the numbers: 10 comes after 9
    dataset = open_data(f"features:{folder}/shard-*.npz")
    rows = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    np.testing.assert_array_equal(dataset.read(rows), X[rows])
    np.testing.assert_array_equal(dataset.read(slice(None)), X[:n])
    assert dataset.texts["name"].tolist() == NAMES[:n]
    assert numbers_of(dataset) == SOME[:n].tolist()


def test_files_that_do_not_fit_are_named(tmp_path):
    two = np.ones((2, 3))
    for name, content in (("a-1", two), ("a-2", np.ones((2, 4))), ("x[1]", two), ("{1..2}", two)):
        save(tmp_path / f"{name}.npy", content)
    save(tmp_path / "c-1.npz", {"features": two, "labels": np.array([0, 1])})
    save(tmp_path / "c-2.npz", {"features": two})
    refused(f"{tmp_path}/a-*.npy", r"a-1\.npy is \[2, 3\], .*a-2\.npy \[2, 4\]")
    refused(f"{tmp_path}/c-{{1..2}}.npz", r"c-1\.npz .*do not fit: one lacks labels")
    for name in ("x[1]", "{1..2}"):
        assert len(open_data(f"features:{tmp_path}/{name}.npy")) == 2, "a name like a pattern"


def test_fingerprints_follow_content(tmp_path):
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
    marks = set()
    for cut in (1, 2):  # the same bytes in files of other sizes
        for name, part in (("a.png", b"123"[:cut]), ("b.png", b"123"[cut:])):
            (tmp_path / "images/c").mkdir(parents=True, exist_ok=True)
            (tmp_path / "images/c" / name).write_bytes(part)
        marks.add(open_data(f"folder:{tmp_path}/images").fingerprint)
    assert len(marks) == 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory is read from /proc")
@pytest.mark.parametrize("suffix", ["npy", "h5"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    """Neither what Python holds, nor what is mapped, comes near the 82 MB of the file."""

    def taken():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    x = np.ones((160_000, 128), np.float32)
    data = open_data(
        f"features:{save(tmp_path / f'x.{suffix}', x if suffix == 'npy' else {'x': x})}"
    )
    before, most, rows = taken(), 0, 0
    tracemalloc.start()
    for i in range(0, len(data), 2000):
        rows += len(data.read(slice(i, i + 2000)))
        most = max(most, taken() - before, tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert rows == len(x)
    assert most < 20e6
