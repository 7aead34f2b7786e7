"""``gpq export``."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest
from commands import done, refused
from model_factory import make_model

import gpq_faiss as gpq


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


@pytest.mark.parametrize("to", ["faiss", "torch"])
def test_it_writes_what_the_command_of_that_form_writes(tmp_path: Path, to: str) -> None:
    model = make_model(tmp_path / "model")
    by_export, by_own = tmp_path / "a" / f"o.{to}", tmp_path / "b" / f"o.{to}"
    by_export.parent.mkdir()
    by_own.parent.mkdir()
    done("export", model, "--to", to, "--out", by_export)
    own = ("export-faiss", model) if to == "faiss" else ("export-encoder", model, "--to", to)
    done(*own, "--out", by_own)
    assert gpq.info(by_export)["kind"] == gpq.info(by_own)["kind"]
    if to == "faiss":
        assert by_export.read_bytes() == by_own.read_bytes()


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    refused("export", tmp_path, "--to", "numpy", "--out", tmp_path / "o.npz")
    assert not list(tmp_path.iterdir())
