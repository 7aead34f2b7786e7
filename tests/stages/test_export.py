"""Codebooks and codes for other tools: each file is loaded by its tool, and ranks alike."""

import json
from pathlib import Path

import faiss
import model_factory
import numpy as np
import pytest
from index_factory import books, make_model, make_rows, queries, random_codes, score_codes, unit

from gpq_faiss import RowReader, export, export_faiss, index, open_index
from gpq_faiss.codes.codebooks import pad_vectors
from gpq_faiss.codes.encode import encode
from gpq_faiss.errors import DataError, MismatchError
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


def test_lancedb_ranks_alike(model, tmp_path):
    lancedb = pytest.importorskip("lancedb", reason="pip install lancedb pylance")
    pytest.importorskip("lance", reason="pip install pylance")
    pa = pytest.importorskip("pyarrow")
    fused = np.load(export(model, tmp_path / "x.npz", to="numpy"))["fused"]
    width = fused.shape[0] * fused.shape[2]
    x, xq, _, exact = truth(model)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(pad_vectors(x, width).ravel()), width)
    items = pa.table({"id": np.arange(N), "vector": rows})
    table = lancedb.connect(str(tmp_path / "db")).create_table("items", items)
    options = {"pq_codebook": fused, "ivf_centroids": np.zeros((1, width), np.float32)}
    options |= {"num_partitions": 1, "num_sub_vectors": len(fused)}
    table.to_lance().create_index("vector", "IVF_PQ", metric="dot", **options)
    table.checkout_latest()
    for q, expected in zip(pad_vectors(xq, width), exact, strict=True):
        results = table.search(q).distance_type("dot").limit(TOP).to_arrow()
        # Its distance is 1 - score. Without the index it would be that of the vector itself.
        check_ranking(1 - results["_distance"].to_numpy(), results["id"].to_numpy(), expected)


@pytest.mark.parametrize(
    ("kind", "index_type"),
    [("flat", faiss.IndexPQ), ("fused", faiss.IndexPQ), ("fastscan", faiss.IndexPQFastScan)],
)
def test_kind_of_the_empty_index(model, tmp_path, kind, index_type):
    plain = faiss.read_index(str(export_faiss(model, tmp_path / "x.faiss", kind=kind)))
    assert (type(plain), plain.is_trained, plain.ntotal) == (index_type, True, 0)
    x, xq, _, exact = truth(model)
    plain.add(pad_vectors(x, plain.d))
    scores, ids = plain.search(pad_vectors(xq, plain.d), TOP)
    tolerance = 0.1 if kind == "fastscan" else 1e-5
    np.testing.assert_allclose(scores, np.take_along_axis(exact, ids, axis=1), atol=tolerance)


# Codes as a table ---------------------------------------------------------------------------------


@pytest.fixture(params=[5, 6])
def folder(request, tmp_path):
    """A network, codes of items with names and labels, their table and their index."""
    pytest.importorskip("pyarrow")
    model = read_model(model_factory.make_model(tmp_path / "model", M=request.param))
    rng, Z = np.random.default_rng(1), model.codebooks
    np.save(tmp_path / "queries.npy", queries(2, 20))
    flags = rng.random((N, 3)) < 0.4
    options = {"labels": np.packbits(flags, axis=1), "class_names": ("cat", "dog", "owl")}
    options["texts"] = dict.fromkeys(
        ("name", "codes"), as_texts(f"item-{number}" for number in range(N))
    )
    options["model_fingerprint"] = model.model_fingerprint
    ids = np.arange(N) * 7
    codes = make_rows(tmp_path / "codes.h5", random_codes(N, len(Z)), ids, Z, **options)
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
    description = json.loads(table.schema.metadata[b"gpq_faiss"])
    assert description["model_fingerprint"] == read_model(folder / "model").model_fingerprint


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


def test_duckdb_ranks_alike(folder, monkeypatch):
    pytest.importorskip("duckdb")
    monkeypatch.chdir(folder)
    names, scores, ids = run_example("search_in_duckdb.py", 10)
    check_same_items(*zip(*names["found"], strict=True), scores, ids)
