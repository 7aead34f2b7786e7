"""Ids from names and content: the same for the same item, whatever else a listing holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gpq_faiss.data.item_ids import stable_id
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError, UsageError


def photo(path: Path, grey: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((9, 8, 3), grey, np.uint8)).save(path)


def ids_by_name(spec: str, **how: str) -> dict[str, int]:
    dataset = open_data(spec, **how)  # type: ignore[arg-type]
    return dict(zip(dataset.texts["name"].tolist(), dataset.ids.tolist(), strict=True))


@pytest.mark.parametrize("how", ["path", "content"])
def test_an_item_keeps_its_id_when_others_come(tmp_path: Path, how: str) -> None:
    photo(tmp_path / "cat" / "b.png", 10)
    photo(tmp_path / "dog" / "c.png", 20)
    before = ids_by_name(f"folder:{tmp_path}", id_from=how)
    photo(tmp_path / "cat" / "a.png", 30)
    after = ids_by_name(f"folder:{tmp_path}", id_from=how)
    assert set(after) == {"cat/a.png", "cat/b.png", "dog/c.png"}
    assert {name: after[name] for name in before} == before
    assert min(after.values()) >= 0
    # By position the newcomer moves the others.
    assert ids_by_name(f"folder:{tmp_path}") == {"cat/a.png": 0, "cat/b.png": 1, "dog/c.png": 2}


def test_ids_are_defined_by_name_and_bytes(tmp_path: Path) -> None:
    photo(tmp_path / "cat" / "b.png", 10)
    assert ids_by_name(f"folder:{tmp_path}", id_from="path") == {"cat/b.png": stable_id(b"cat/b.png")}
    content = (tmp_path / "cat" / "b.png").read_bytes()
    assert ids_by_name(f"folder:{tmp_path}", id_from="content") == {"cat/b.png": stable_id(content)}


def test_equal_files_are_named(tmp_path: Path) -> None:
    photo(tmp_path / "cat" / "a.png", 10)
    photo(tmp_path / "dog" / "b.png", 10)
    with pytest.raises(DataError, match=r"dog/b\.png has the content of cat/a\.png"):
        open_data(f"folder:{tmp_path}", id_from="content")
    assert len(ids_by_name(f"folder:{tmp_path}", id_from="path")) == 2


def test_a_file_of_ids_goes_with_images(tmp_path: Path) -> None:
    photo(tmp_path / "data" / "cat" / "a.png", 10)
    photo(tmp_path / "data" / "cat" / "b.png", 20)
    (tmp_path / "ids.txt").write_text("70\n-5\n")
    assert ids_by_name(f"folder:{tmp_path / 'data'}", ids=str(tmp_path / "ids.txt")) == {
        "cat/a.png": 70,
        "cat/b.png": -5,
    }
    (tmp_path / "ids.txt").write_text("70\n")
    with pytest.raises(DataError, match="1 ids"):
        open_data(f"folder:{tmp_path / 'data'}", ids=str(tmp_path / "ids.txt"))
    with pytest.raises(UsageError, match="both say"):
        open_data(f"folder:{tmp_path / 'data'}", ids=str(tmp_path / "ids.txt"), id_from="path")


def test_vectors_have_content_but_no_paths(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4) + 1
    np.save(tmp_path / "x.npy", x)
    found = open_data(f"features:{tmp_path / 'x.npy'}", id_from="content")
    assert found.ids.tolist() == [stable_id(row.tobytes()) for row in x]
    with pytest.raises(UsageError, match="have no paths"):
        open_data(f"features:{tmp_path / 'x.npy'}", id_from="path")


def test_columns_are_kept_by_name(tmp_path: Path) -> None:
    photo(tmp_path / "a.png", 1)
    photo(tmp_path / "b.png", 2)
    (tmp_path / "t.csv").write_text(
        "image,label,title,url\na.png,cat,A cat,http://x/1\nb.png,dog,,http://x/2\n"
    )
    data = open_data(f"csv:{tmp_path / 't.csv'}", keep="title,url")
    assert {name: column.tolist() for name, column in data.texts.items()} == {
        "name": ["a.png", "b.png"],
        "title": ["A cat", ""],
        "url": ["http://x/1", "http://x/2"],
    }
    assert data.fingerprint != open_data(f"csv:{tmp_path / 't.csv'}").fingerprint
    with pytest.raises(DataError, match="no column 'price'"):
        open_data(f"csv:{tmp_path / 't.csv'}", keep="price")
    with pytest.raises(UsageError, match="each once"):
        open_data(f"csv:{tmp_path / 't.csv'}", keep="title,title")
    with pytest.raises(UsageError, match="does not apply to digits"):
        open_data("digits", keep="title")


def test_features_bring_names(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    x = np.eye(3, 4, dtype=np.float32)
    np.savez(tmp_path / "x.npz", features=x, names=np.array(["a", "b", "c"]), title=np.array(["1", "2", "3"]))
    table = {"features": list(x), "path": ["a", "b", "c"], "title": ["1", None, "3"]}
    parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    for form, last in (("npz", "2"), ("parquet", "")):
        data = open_data(f"features:{tmp_path / 'x'}.{form}", keep=["title"])
        assert data.texts["name"].tolist() == ["a", "b", "c"]
        assert data.texts["title"].tolist() == ["1", last, "3"]
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(UsageError, match="no columns to keep"):
        open_data(f"features:{tmp_path / 'x.npy'}", keep="title")


def test_repeated_names_are_told(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("a\nb\na\na\n")
    data = open_data(np.eye(4), names=str(tmp_path / "names.txt"))
    assert "2 of the 4 names are repeated" in data.notes
    assert open_data(np.eye(2), names=["a", "b"]).notes == ["no labels"]
    with pytest.raises(DataError, match="pairs"):
        open_data(np.eye(4), names=str(tmp_path / "names.txt"), id_from="path")
