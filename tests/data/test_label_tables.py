"""Labels from tables that name their items."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError


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
    assert "3 of 4 items are labelled, matched by id" in note
    assert "1 rows are of other items" in note


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


def test_the_column_of_labels_may_be_named(vectors: str, tmp_path: Path) -> None:
    table = tmp_path / "l.csv"
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


def test_empty_lines_of_a_table_are_skipped(vectors: str, tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("id,label\n\n10,cat\n\n")
    data = open_data(vectors, labels=str(tmp_path / "l.csv"), ids=str(tmp_path / "ids.npy"))
    assert names_of(data) == [(), ("cat",), (), ()]


# As spreadsheets write them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("suffix", [".csv", ".txt"])
def test_a_table_is_read_whatever_separates_its_columns(
    vectors: str, tmp_path: Path, separator: str, encoding: str, suffix: str
) -> None:
    table = tmp_path / f"labels{suffix}"
    lines = [["id", "label"], ["2", "Füchse"], ["0", "Bär|Kuh"], ["1", "Bär"], ["", ""]]
    table.write_bytes("".join(separator.join(line) + "\r\n" for line in lines).encode(encoding))
    data = open_data(vectors, labels=str(table))
    assert names_of(data) == [("Bär", "Kuh"), ("Bär",), ("Füchse",), ()]
    (note,) = [note for note in data.notes if table.name in note]
    assert "3 of 4 items are labelled, matched by id in 'id'; 3 classes in 'label'" in note
    assert ("separated by" in note) == (separator != ",")


def test_the_mark_of_excel_is_no_header(vectors: str, tmp_path: Path) -> None:
    table = tmp_path / "l.csv"
    table.write_text("sep=;\nid;label\n3;cat\n1;dog\n")
    assert names_of(open_data(vectors, labels=str(table))) == [(), ("dog",), (), ("cat",)]
    table.write_text("sep=;\nid;label\n3;cat;x\n")
    with pytest.raises(DataError, match=r"l\.csv line 3: 3 fields, the header has 2"):
        open_data(vectors, labels=str(table))


def test_rows_of_zeros_and_ones_may_have_semicolons(vectors: str, tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("1;0\n1;1\n0;0\n0;1\n")
    data = open_data(vectors, labels=str(tmp_path / "l.csv"))
    assert names_of(data) == [("0",), ("0", "1"), (), ("1",)]


def test_labels_in_the_order_of_the_items_are_told(vectors: str, tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("cat\ndog\n\ncat\n")
    data = open_data(vectors, labels=str(tmp_path / "l.txt"))
    assert any("l.txt: 3 of 4 items are labelled, in their order; 2 classes" in note for note in data.notes)


NFC, NFD = "Caf\u00e9", "Cafe\u0301"


def test_a_name_in_two_forms_of_unicode_is_one_class(vectors: str, tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text(f"id,label\n0,{NFC}\n1,{NFD}\n2,{NFC}|{NFD}\n3,x\n", encoding="utf-8")
    data = open_data(vectors, labels=str(tmp_path / "l.csv"))
    assert names_of(data) == [(NFC,)] * 3 + [("x",)]
    assert names_of(open_data(np.eye(3, 5), labels=[NFD, NFC, "x"])) == [(NFC,), (NFC,), ("x",)]


def test_folders_and_tables_of_names_in_two_forms_of_unicode(tmp_path: Path) -> None:
    """As macOS writes folders, and others the tables beside them."""
    from PIL import Image

    for i, folder in enumerate((NFC, NFD, "x")):
        (tmp_path / "images" / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8), (100 * i, 0, 0)).save(tmp_path / "images" / folder / f"{i}.png")
    data = open_data(f"folder:{tmp_path / 'images'}")
    assert names_of(data) == [(NFC,), (NFC,), ("x",)]
    assert [int(image[0, 0, 0]) for image in data.read(slice(0, 3))] == [0, 100, 200]
    (tmp_path / "l.csv").write_text(f"name,label\n{NFD}/0.png,a\n{NFC}/1.png,b\n", encoding="utf-8")
    assert names_of(open_data(f"folder:{tmp_path / 'images'}", labels=str(tmp_path / "l.csv"))) == [
        ("a",),
        ("b",),
        (),
    ]


def test_tables_of_images_may_have_semicolons(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("a", "b"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    (tmp_path / "t.csv").write_text("image;label;id\na.png;cat;7\nb.png;-1;8\n;;\n", encoding="utf-16")
    data = open_data(f"csv:{tmp_path / 't.csv'}")
    assert names_of(data) == [("cat",), ()]
    assert data.ids.tolist() == [7, 8]
