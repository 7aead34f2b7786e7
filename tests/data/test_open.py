"""``open_data``: what a path without a prefix is, and one clear line for what is none."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from image_files import png, put, raw_tar, save

from gpq_faiss.data.open import FORMS, open_data
from gpq_faiss.errors import DataError, UsageError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "images/a/0.png")
    save(Path("v.parquet"), {"emb": [[1.0, 0.0], [0.0, 1.0]], "label": ["x", "y"]})
    save(Path("both.parquet"), {"image": ["a/0.png"], "emb": [[1.0, 0.0]]})
    save(Path("none.parquet"), {"picture": ["a/0.png"], "n": [1]})
    for name in ("f.npy", "s-0.npy", "s-1.npy"):
        np.save(name, np.eye(2, dtype=np.float32))
    regular = tarfile.REGTYPE
    save(Path("shards.tar"), raw_tar(("0.png", regular, png(0)), ("0.cls", regular, b"7")))
    return tmp_path


@pytest.mark.parametrize("path", ["f.npy", "v.parquet", "s-*.npy", "s-{0..1}.npy", "shards.tar"])
def test_a_bare_path_is_opened_by_what_it_is(here: Path, path: str) -> None:
    """More in test_image_sources."""
    named = open_data(f"{'webdataset' if 'tar' in path else 'features'}:{path}")
    for found in (open_data(path), open_data(Path(path))):
        assert (found.name, found.fingerprint) == (named.name, named.fingerprint)


@pytest.mark.parametrize("spec", ["mnist", "mnist:x", "", ":", "Digits", "no\nsuch", "a\0b"])
def test_unknown_forms_list_the_known_ones(spec: str) -> None:
    with pytest.raises(UsageError, match="unknown data") as caught:
        open_data(spec)
    assert FORMS in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_prefix_comes_before_a_file_of_its_name(here: Path) -> None:
    (here / "digits").mkdir()
    assert len(open_data("digits")) == 1797
    with pytest.raises(DataError, match="digits contains no images"):
        open_data(Path("digits"))


@pytest.mark.parametrize(
    ("path", "error", "why"),
    [
        ("both.parquet", UsageError, "write features:both.parquet or parquet:both.parquet"),
        ("none.parquet", UsageError, "it has picture, n.*--read image_column"),
        ("x.bin", UsageError, "its ending tells no form"),
        ("images/a/0.png", UsageError, "or give their folder"),
        ("no.npy", DataError, "no.npy not found"),
        ("no-*.npy", DataError, "no file matches"),
        ("no.xlsx", DataError, "no.xlsx not found"),
        ("no/where", DataError, "no/where not found"),
        ("bad.tar", DataError, "bad.tar is not a readable tar"),
        ("bad.tar.gz", DataError, "bad.tar.gz is not a readable tar"),
    ],
)
def test_a_path_that_fits_several_forms_or_none_is_one_line(
    here: Path, path: str, error: type[Exception], why: str
) -> None:
    save(here / "x.bin", "x")
    save(here / "bad.tar", b"x" * 5000)
    save(here / "bad.tar.gz", b"\x1f\x8b" + b"x" * 5000)
    with pytest.raises(error, match=why) as caught:
        open_data(path)
    assert str(caught.value).isprintable()
    assert FORMS not in str(caught.value)
    assert open_data("none.parquet", image_column="picture", root="images").kind == "images"
