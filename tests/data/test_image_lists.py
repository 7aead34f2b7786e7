"""Text lists, CSV and Parquet tables of images."""

from __future__ import annotations

import csv
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from image_files import data_folder, open_list, open_table, put

from gpq_faiss.data.images import load_batch
from gpq_faiss.data.label_files import label_cell
from gpq_faiss.errors import DataError

# lists


def test_list_of_hashing_papers(tmp_path: Path) -> None:
    put(tmp_path, "images/a.png", "images/b c.png", "images/d.png")
    (tmp_path / "train.txt").write_text(
        "images/a.png 1 0 1\r\n\nimages/b c.png  0 0 0 \nimages\\d.png 0 1 0\n"
    )
    dataset = open_list(tmp_path / "train.txt")
    assert dataset.labels is not None
    assert dataset.labels.dense(dtype=np.int64).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert dataset.labels.class_names == ("0", "1", "2")
    assert dataset.labels.multi_label
    assert all(image is not None for image in dataset.read(slice(None)))
    (tmp_path / "classes.txt").write_text("sky\nsea\nsun\n")
    named = open_list(tmp_path / "train.txt").labels
    assert named is not None
    assert named.class_names == ("sky", "sea", "sun")


def test_list_of_class_numbers_and_of_bare_paths(tmp_path: Path) -> None:
    put(tmp_path / "x", "a.png", "b.png", "c.png")
    (tmp_path / "ids.txt").write_text("a.png 12\nb.png -1\nc.png 0\n")
    dataset = open_list(tmp_path / "ids.txt", root=str(tmp_path / "x"))
    assert dataset.labels is not None
    assert dataset.labels.class_ids().tolist() == [12, -1, 0]
    (tmp_path / "x" / "bare.txt").write_text("a.png\nb.png\na.png\n")
    bare = open_list(tmp_path / "x" / "bare.txt")
    assert bare.labels is None
    assert bare.notes == ["1 paths are listed more than once (a.png)"]


def test_list_with_labels_in_a_file_of_their_own(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / "img.txt").write_text("a.png\nb.png\n")
    (tmp_path / "multi.txt").write_text("1 0 1\n0 1 0\n")
    np.save(tmp_path / "ids.npy", np.array([3, 1]))
    multi = open_list(tmp_path / "img.txt", labels=str(tmp_path / "multi.txt")).labels
    ids = open_list(tmp_path / "img.txt", labels=str(tmp_path / "ids.npy")).labels
    assert multi is not None
    assert multi.dense(dtype=np.int64).tolist() == [[1, 0, 1], [0, 1, 0]]
    assert ids is not None
    assert ids.class_ids().tolist() == [3, 1]
    (tmp_path / "short.txt").write_text("1 0 1\n")
    with pytest.raises(DataError, match="labels of 1 items, but 2 images"):
        open_list(tmp_path / "img.txt", labels=str(tmp_path / "short.txt"))
    (tmp_path / "pickled.npy").write_bytes(b"\x93NUMPY" + pickle.dumps([1]))
    with pytest.raises(DataError, match="save a plain array"):
        open_list(tmp_path / "img.txt", labels=str(tmp_path / "pickled.npy"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a.png 1 0\nb.png 1\n", "line 2: 2 labels"),
        ("a.png 1 0\n\nb.png 1 0 1\n", "line 3: 2 labels"),
        ("a.png 1 0\nb.png 1 2\n", "line 2: 2 labels"),
        ("a.png 1 0\nb.png x 1\n", "line 2: 2 labels"),
        ("a.png 5\nb.png\n", "line 2: one class number"),
        ("a.png 5\nb.png x\n", "line 2: one class number"),
        ("a.png 5\nb.png -2\n", "-2 .. 5"),
        ("a.png 5\nb.png 99999999999999999999\n", "class numbers from 0"),
        ("a.png 5\nb.png 4000000\n", "out of range"),
        ("", "is empty"),
        ("a.png 1 0\n\0\n", "not a text"),
    ],
)
def test_lists_that_do_not_hold_together(text: str, why: str, tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / "l.txt").write_text(text)
    with pytest.raises(DataError, match=why) as caught:
        open_list(tmp_path / "l.txt")
    assert "\n" not in str(caught.value)


def test_list_that_is_binary_or_missing(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_bytes(b"\xfe\x80a b")
    with pytest.raises(DataError, match="not UTF-8"):
        open_list(tmp_path / "l.txt")
    with pytest.raises(DataError, match="not found"):
        open_list(tmp_path / "none.txt")
    with pytest.raises(DataError, match="is a folder"):
        open_list(tmp_path)


def test_list_with_missing_images_keeps_line_numbers_as_ids(tmp_path: Path) -> None:
    put(tmp_path, *(f"{i}.png" for i in range(20) if i != 6))
    (tmp_path / "l.txt").write_text("".join(f"{i}.png {i % 2} 1\n" for i in range(20)))
    with pytest.raises(DataError, match="1 of 20 images missing"):
        open_list(tmp_path / "l.txt")
    dataset = open_list(tmp_path / "l.txt", max_bad=0.05)
    assert dataset.ids.tolist() == [i for i in range(20) if i != 6]


def test_real_hashing_list_parses() -> None:
    file = data_folder() / "nuswide" / "nuswide_21" / "test.txt"
    with pytest.raises(DataError, match="2,100 of 2,100 images missing") as caught:
        open_list(file)
    assert "images/0484_1544502940.jpg" in str(caught.value)


def test_real_natural_scenes(tmp_path: Path) -> None:
    with tarfile.open(data_folder() / "multilabel-scenes.tar.gz") as tar:
        # Python before 3.11.4 has no filters.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(tmp_path)  # noqa: S202
    folder = tmp_path / "multilabel-scenes"
    dataset = open_list(
        folder / "train_img.txt", root=str(folder / "train_img"), labels=str(folder / "train_label.txt")
    )
    assert len(dataset) == 1500
    assert dataset.labels is not None
    assert dataset.labels.class_names == ("desert", "mountains", "sea", "sunset", "trees")
    truth = np.loadtxt(folder / "train_label.txt", dtype=np.int64)
    assert np.array_equal(dataset.labels.dense(dtype=np.int64), truth)
    lines = (folder / "train_img.txt").read_text().split()
    one_list = folder / "both.txt"
    one_list.write_text(
        "".join(f"train_img/{n} {' '.join(map(str, y))}\n" for n, y in zip(lines, truth, strict=True))
    )
    again = open_list(one_list)
    assert again.labels is not None
    assert again.labels.fingerprint() == dataset.labels.fingerprint()
    assert load_batch(again, np.arange(0, 1500, 100), 64)[1].all()


# tables


def test_csv(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png", "c,d.png")
    (tmp_path / "t.csv").write_text(
        '\ufeffid,image,label,other\n7,a.png,sea|sky,x\n-9223372036854775808,b.png,,y\n\n3,"c,d.png", sky | ,z\n'
    )
    dataset = open_table(tmp_path / "t.csv")
    assert dataset.ids.tolist() == [7, -(2**63), 3]
    assert dataset.labels is not None
    assert dataset.labels.class_names == ("sea", "sky")
    assert dataset.labels.dense(dtype=np.int64).tolist() == [[1, 1], [0, 0], [0, 1]]
    assert all(image is not None for image in dataset.read(slice(None)))


def test_csv_column_names_root_tabs_and_numeric_classes(tmp_path: Path) -> None:
    put(tmp_path / "pictures", "a.png", "b.png", "c.png")
    (tmp_path / "t.tsv").write_text("file\tclass\na.png\t10\nb.png\t9\nc.png\t10\n")
    dataset = open_table(
        tmp_path / "t.tsv", root=str(tmp_path / "pictures"), image_column="file", label_column="class"
    )
    assert dataset.labels is not None
    assert dataset.labels.class_names == ("9", "10")
    assert dataset.labels.class_ids().tolist() == [1, 0, 1]
    assert dataset.ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("text", ["image\na.png\n", "image,label\na.png,\n"])
def test_csv_without_labels(text: str, tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "t.csv").write_text(text)
    dataset = open_table(tmp_path / "t.csv")
    assert dataset.labels is None
    assert "unlabelled" in dataset.notes[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("image,label\n", "no rows"),
        ("path,label\na.png,x\n", "no column 'image' .* 'path', 'label'.*--image-column"),
        ("image,image\na.png,x\n", "twice"),
        ("image,label\na.png\n", "line 2: 1 fields, the header has 2"),
        ("image,label\na.png,x,y\n", "line 2: 3 fields"),
        ("image,label\n,x\n", "line 2: no path"),
        ('image,label\n"a.png"x,y\n', "not CSV"),
        ('image,label\n"a.png,y\n', "not CSV"),
        ("image,id\na.png,x\na.png,1\n", "id 'x'"),
        ("image,id\na.png,1.5\n", "id '1.5'"),
        ("image,id\na.png,\n", "id ''"),
        ("image,id\na.png,9223372036854775808\n", "64-bit"),
        ("image,id\na.png,-1\n", "no result"),
        ("image,id\na.png,4\nb.png,5\nb.png,4\n", "line 4: id 4 is already that of line 2"),
    ],
)
def test_csv_errors(text: str, why: str, tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=why) as caught:
        open_table(tmp_path / "t.csv")
    assert "\n" not in str(caught.value)


def test_a_label_column_asked_for_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image,label\na.png,x\n")
    with pytest.raises(DataError, match=r"no column 'lable'.*--label-column"):
        open_table(tmp_path / "t.csv", label_column="lable")
    with pytest.raises(DataError, match="not found"):
        open_table(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"image,label\n\xff\xfe,\x80\n")
    with pytest.raises(DataError, match="not UTF-8"):
        open_table(tmp_path / "b.csv")


def test_csv_written_by_the_csv_module_comes_back(tmp_path: Path) -> None:
    names = ['q"uote.png', "new\nline.png", "ünï.png", " lead.png"]
    put(tmp_path, *(name.strip() for name in names))
    with (tmp_path / "t.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerows([["image", "label"], *([name, "x"] for name in names)])
    dataset = open_table(tmp_path / "t.csv")
    assert [os.path.basename(path) for path in dataset.paths] == [name.strip() for name in names]


def test_label_cell() -> None:
    assert label_cell("b| a|b||") == ("b", "a")
    assert label_cell("  ") == ()


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    put(tmp_path, "a.png", "b.png", "c.png")
    images = ["a.png", "b.png", "c.png"]
    expected = [[1, 1], [0, 0], [0, 1]]
    for labels, names in (
        (["sea|sky", None, "sky"], ("sea", "sky")),
        ([["sea", "sky"], [], ["sky"]], ("sea", "sky")),
        ([["3", "12"], None, ["12"]], ("3", "12")),
    ):
        pq.write_table(
            pa.table({"image": images, "label": labels, "id": [5, 6, 7], "extra": [0.1, 0.2, 0.3]}),
            tmp_path / "t.parquet",
        )
        dataset = open_table(tmp_path / "t.parquet", form="parquet")
        assert dataset.labels is not None
        assert dataset.labels.class_names == names
        assert dataset.labels.dense(dtype=np.int64).tolist() == expected
        assert dataset.ids.tolist() == [5, 6, 7]
    for column in (pa.array([10, None, 9]), pa.array([10.0, float("nan"), 9.0])):
        pq.write_table(pa.table({"image": images, "label": column}), tmp_path / "t.parquet")
        numbers = open_table(tmp_path / "t.parquet", form="parquet").labels
        assert numbers is not None
        assert numbers.class_names == ("9", "10")
        assert numbers.class_ids().tolist() == [1, -1, 0]


def test_parquet_errors(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    file = tmp_path / "t.parquet"
    with pytest.raises(DataError, match="not found"):
        open_table(file, form="parquet")
    for data in (b"", b"PAR1 is not enough PAR1"):
        file.write_bytes(data)
        with pytest.raises(DataError, match="is empty" if not data else "not a Parquet file"):
            open_table(file, form="parquet")
    pq.write_table(pa.table({"image": [1, 2]}), file)
    with pytest.raises(DataError, match="holds int, a path is expected"):
        open_table(file, form="parquet")
    pq.write_table(pa.table({"image": ["a.png", None]}), file)
    with pytest.raises(DataError, match="row 1: no path"):
        open_table(file, form="parquet")
    pq.write_table(pa.table({"picture": ["a.png"]}), file)
    with pytest.raises(DataError, match="no column 'image'"):
        open_table(file, form="parquet")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError, match="not a Parquet file"):
        open_table(file, form="parquet")
