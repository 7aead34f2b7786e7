"""Text lists, CSV and Parquet tables of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_files import open_list, open_table, put

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


def test_list_with_missing_images_keeps_line_numbers_as_ids(tmp_path: Path) -> None:
    put(tmp_path, *(f"{i}.png" for i in range(20) if i != 6))
    (tmp_path / "l.txt").write_text("".join(f"{i}.png {i % 2} 1\n" for i in range(20)))
    with pytest.raises(DataError, match="1 of 20 images missing"):
        open_list(tmp_path / "l.txt")
    dataset = open_list(tmp_path / "l.txt", max_bad=0.05)
    assert dataset.ids.tolist() == [i for i in range(20) if i != 6]


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
