"""``gpq export``."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest
from commands import done, refused
from model_factory import make_model


@pytest.mark.parametrize(
    ("to", "array"), [("numpy", "codebooks"), ("nanopq", "codewords"), ("lancedb", "pq_codebook")]
)
def test_arrays(tmp_path: Path, to: str, array: str) -> None:
    model, out = make_model(tmp_path / "model"), tmp_path / "o.npz"
    assert done("export", model, "--to", to, "--out", out) == f"{out}\n"
    held = np.load(out, allow_pickle=False)
    assert held[array].dtype == np.float32
    assert "exists already" in refused("export", model, "--to", to, "--out", out)
    done("export", model, "--to", to, "--out", out, "--overwrite")


def test_factory_string(tmp_path: Path) -> None:
    model, out = make_model(tmp_path / "model"), tmp_path / "o.faiss"
    call = ("export", model, "--to", "factory", "--out", out)
    done(*call, "--factory", "PQ6x4fs")
    assert isinstance(faiss.read_index(str(out)), faiss.IndexPQFastScan)
    assert "PQ6x4" in refused(*call, "--overwrite", "--factory", "PQ8", code=2)
    assert isinstance(faiss.read_index(str(out)), faiss.IndexPQFastScan)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    refused("export", tmp_path, "--to", "numpy", "--out", tmp_path / "o.npz")
    assert not list(tmp_path.iterdir())
