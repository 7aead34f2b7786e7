"""Labels from tables that name their items."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.data.drawing import parse_labelled
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError, UsageError


@pytest.fixture
def vectors(tmp_path: Path) -> str:
    np.save(tmp_path / "x.npy", np.eye(4, 5, dtype=np.float32))
    np.save(tmp_path / "ids.npy", np.array([40, 10, 30, 20]))
    return f"features:{tmp_path / 'x.npy'}"


def names_of(dataset: object) -> list[tuple[str, ...]]:
    labels = dataset.labels  # type: ignore[attr-defined]
    return [tuple(labels.class_names[c] for c in np.flatnonzero(row)) for row in labels.dense()]


@settings(max_examples=30, deadline=None)
@given(order=st.permutations([10, 20, 30, 40, 77]))
def test_labels_follow_the_ids_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("t")
    np.save(folder / "x.npy", np.eye(4, 5, dtype=np.float32))
    np.save(folder / "ids.npy", np.array([40, 10, 30, 20]))
    says = {10: "cat", 20: "", 30: "dog|cat", 40: "dog", 77: "emu"}
    (folder / "l.csv").write_text("category,id\n" + "".join(f"{says[i]},{i}\n" for i in order))
    data = open_data(
        f"features:{folder / 'x.npy'}", labels=str(folder / "l.csv"), ids=str(folder / "ids.npy")
    )
    assert names_of(data) == [("dog",), ("cat",), ("cat", "dog"), ()]
    (note,) = [n for n in data.notes if "l.csv" in n]
    assert "'category'" in note
    assert "3 of 4 items are labelled; 1 rows are of other items" in note


def test_parquet_and_images_by_name(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from PIL import Image

    for name in ("a", "b", "c"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    (tmp_path / "list.csv").write_text("image\na.png\nb.png\nc.png\n")
    table = {"path": ["c.png", "a.png"], "labels": [["x", "y"], ["y"]]}
    parquet.write_table(pyarrow.table(table), tmp_path / "l.parquet")
    data = open_data(f"csv:{tmp_path / 'list.csv'}", labels=str(tmp_path / "l.parquet"))
    assert names_of(data) == [("y",), (), ("x", "y")]


def test_what_does_not_fit_is_said(vectors: str, tmp_path: Path) -> None:
    table = tmp_path / "l.csv"
    table.write_text("id,label\n1,cat\n1,dog\n")
    with pytest.raises(DataError, match="'1' occurs more than once"):
        open_data(vectors, labels=str(table))
    table.write_text("id,label\n99,cat\n")
    with pytest.raises(DataError, match="no value of the column 'id' with a label"):
        open_data(vectors, labels=str(table))
    table.write_text("id,label\n1,cat,x\n")
    with pytest.raises(DataError, match="line 2: 3 fields"):
        open_data(vectors, labels=str(table))
    table.write_text("id,kind\n1,animal\n0,plant\n")
    assert names_of(open_data(vectors, labels=str(table), label_column="kind"))[:2] == [
        ("plant",),
        ("animal",),
    ]
    table.write_text("id,label,kind\n1,cat,animal\n0,,plant\n")
    assert names_of(open_data(vectors, labels=str(table), label_column="kind"))[:2] == [
        ("plant",),
        ("animal",),
    ]
    with pytest.raises(DataError, match="no column 'colour'"):
        open_data(vectors, labels=str(table), label_column="colour")
    # A list without a column of items is still one label per line.
    table.write_text("label\ncat\ndog\n\ncat\n")
    assert names_of(open_data(vectors, labels=str(table))) == [("cat",), ("dog",), (), ("cat",)]


def test_a_share_may_be_a_percentage() -> None:
    assert parse_labelled("5%") == parse_labelled("0.05")
    assert parse_labelled("100%") == ("fraction", 1.0)
    for bad in ("0%", "101%", "-3%"):
        with pytest.raises(UsageError, match="fraction"):
            parse_labelled(bad)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("l.csv", b"id,label\n10,cat\n20,d\xff\n", "is not UTF-8 text"),
        ("l.csv", b'id,label\n10,"cat\n', "is not CSV"),
        ("l.csv", b"id,label\n10,cat,3\n", "line 2: 3 fields, the header has 2"),
        ("l.csv", b"id,label\n", "has no rows"),
        (
            "l.csv",
            b"id,label\n77,cat\n",
            "no value of the column 'id' with a label is an id or name of the data",
        ),
    ],
)
def test_a_table_that_cannot_be_labels_is_refused(
    vectors: str, tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_data(vectors, labels=str(tmp_path / file), ids=str(tmp_path / "ids.npy"))


def test_a_parquet_of_labels_names_its_items(vectors: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"title": ["a"], "label": ["cat"]}), tmp_path / "l.parquet")
    with pytest.raises(DataError, match=r"has no column 'id or .*'title'"):
        open_data(vectors, labels=str(tmp_path / "l.parquet"))


def test_empty_lines_of_a_table_are_skipped(vectors: str, tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("id,label\n\n10,cat\n\n")
    data = open_data(vectors, labels=str(tmp_path / "l.csv"), ids=str(tmp_path / "ids.npy"))
    assert names_of(data) == [(), ("cat",), (), ()]
