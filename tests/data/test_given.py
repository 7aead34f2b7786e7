"""Labels, ids and names beside the data, and in the columns of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import put, save

from gpq_faiss.data.arrays import stable_id
from gpq_faiss.data.open import open_data

NFC, NFD = "Caf\u00e9", "Cafe\u0301"


def names_of(dataset: Any) -> list[tuple[str, ...]]:
    labels = dataset.labels
    return [tuple(labels.class_names[c] for c in np.flatnonzero(row)) for row in labels.dense()]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("0\n2\n-1\n1\n", ["0", "2", "", "1"]),
        ("label\n10\n9\n\n10\n", ["10", "9", "", "10"]),
        ("cat\ndog\n\nfox", ["cat", "dog", "", "fox"]),
        ("b|a\r\n\r\na\r\nc\r\n", ["a b", "", "a", "c"]),
        (f"{NFC}\n{NFD}\n\nx y", [NFC, NFC, "", "x y"]),
        ("x,y,z\n0,1,0\n1,1,0\n0,0,0\n0,0,1\n", ["1", "0 1", "", "2"]),
        ("0\t1\n1\t1\n0\t0\n1\t0\n", ["1", "0 1", "", "0"]),
        ("0 1\n1 1\n0 0\n1 0\n", ["1", "0 1", "", "0"]),
    ],
)
def test_label_texts(tmp_path: Path, content: str, expected: list[str]) -> None:
    data = open_data(np.eye(4, 5), labels=save(tmp_path / "l.txt", content))
    assert [" ".join(names) for names in names_of(data)] == expected
    assert any("l.txt: 3 of 4 items are labelled, in their order" in note for note in data.notes)


@settings(max_examples=30, deadline=None)
@given(
    order=st.permutations([10, 20, 30, 40, 77]),
    separator=st.sampled_from(",;\t"),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    suffix=st.sampled_from(["csv", "txt", "tsv"]),
    item=st.sampled_from(["id", "Key", "item"]),
)
def test_labels_follow_the_ids_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    order: list[int],
    separator: str,
    encoding: str,
    suffix: str,
    item: str,
) -> None:
    """As programs and spreadsheets write them."""
    says = {10: "Kühe", 20: "", 30: f"dog|{NFC}|{NFD}", 40: "dog", 77: "emu"}
    lines = [f"Category{separator}{item}", *(f"{says[i]}{separator}{i}" for i in order), "", separator]
    table = tmp_path_factory.mktemp("t") / f"l.{suffix}"
    table.write_bytes("".join(f"{line}\r\n" for line in lines).encode(encoding))
    data = open_data(np.eye(4, 5), labels=table, ids=[40, 10, 30, 20])
    assert names_of(data) == [("dog",), ("Kühe",), (NFC, "dog"), ()]
    (note,) = [n for n in data.notes if table.name in n]
    assert (
        f"3 of 4 items are labelled, matched by id in '{item}' (1 rows are of other items); 3 classes" in note
    )


def test_images_by_name_and_a_column_that_is_named(tmp_path: Path) -> None:
    put(tmp_path / "images", "a.png", f"{NFD}/b.png", "c.png")
    table: dict[str, Any] = {"path": ["c.png", "a.png", f"{NFC}/b.png"], "kind": ["k", "", "l"]}
    table["labels"] = [["x", "y"], ["y"], None]
    given = str(save(tmp_path / "l.parquet", table))
    found = open_data(tmp_path / "images", labels=given)
    by_name = dict(zip(found.texts["name"].tolist(), names_of(found), strict=True))
    assert by_name == {"a.png": ("y",), "c.png": ("x", "y"), f"{NFC}/b.png": ()}
    kinds = open_data(tmp_path / "images", labels=given, label_column="kind")
    assert sorted(names_of(kinds)) == [(), ("k",), ("l",)]


def test_ids_and_names(tmp_path: Path) -> None:
    put(tmp_path / "data", "cat/b.png", "dog/c.png")
    before = open_data(tmp_path / "data", id_from="path")
    assert before.ids.tolist() == [stable_id(b"cat/b.png"), stable_id(b"dog/c.png")]
    put(tmp_path / "data", "cat/a.png")
    assert open_data(tmp_path / "data", id_from="path").ids[1:].tolist() == before.ids.tolist()
    assert open_data(tmp_path / "data").ids.tolist() == [0, 1, 2]
    (tmp_path / "ids.txt").write_text("70\n-5 # a comment\n70\n")
    (tmp_path / "names.txt").write_text("one\ntwo\nthree\n")
    given: dict[str, Any] = {"ids": str(tmp_path / "ids.txt"), "names": str(tmp_path / "names.txt")}
    data = open_data(tmp_path / "data", **given, labels=np.array([1, -1, 0]))
    assert data.ids.tolist() == [70, -5, 70]
    assert data.texts["name"].tolist() == ["one", "two", "three"]
    assert data.require_labels().class_ids().tolist() == [1, -1, 0]
    assert data.notes[-1] == "1 of the 3 ids are repeated"
    marks = [open_data(tmp_path / "data", **{k: v}).fingerprint for k, v in given.items()]
    assert len({data.fingerprint, *marks}) == 3


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["sea|sky", None, "sky"], [("sea", "sky"), (), ("sky",)]),
        ([["sea", "sky"], [], ["sky"]], [("sea", "sky"), (), ("sky",)]),
        ([["3", "12"], None, ["12"]], [("3", "12"), (), ("12",)]),
        (pa.array([10, None, 9]), [("10",), (), ("9",)]),
        (pa.array([10.0, float("nan"), 9.0]), [("10",), (), ("9",)]),
    ],
)
def test_parquet(tmp_path: Path, labels: Any, expected: list[tuple[str, ...]]) -> None:
    put(tmp_path, "a.png", "b.png", "c.png")
    save(tmp_path / "t.parquet", {"image": ["a.png", "b.png", "c.png"], "label": labels, "id": [5, 6, 7]})
    dataset = open_data(f"parquet:{tmp_path}/t.parquet")
    assert names_of(dataset) == expected
    assert dataset.ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("form", ["parquet", "parquet-dictionary", "csv"])
def test_texts_in_a_column_of_ids_are_names(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, "a.png", "b.png")
    path, column = tmp_path / f"i.{form.partition('-')[0]}", pa.array(["ab", "cd"])
    column = column.dictionary_encode() if form.endswith("dictionary") else column
    table = {"id": column, "emb": [[1.0, 0.0], [0.0, 1.0]]}
    save(path, "image,id\na.png,ab\nb.png,cd\n" if form == "csv" else table)
    with caplog.at_level("INFO", logger="gpq_faiss"):
        data = open_data(path)
    assert data.ids.tolist() == [0, 1]
    assert data.texts["name"].tolist() == ["ab", "cd"]
    assert "holds texts: they are the names; ids are row numbers" in caplog.text
    assert open_data(path, id_from="path").ids.tolist() == [stable_id(b"ab"), stable_id(b"cd")]
