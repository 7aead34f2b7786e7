"""Codebooks for other tools: each form is loaded by the tool it is for, and ranks the same data alike."""

import json

import faiss
import numpy as np
import pytest
from model_factory import make_model

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.codes.codebooks import pad_vectors
from gpq_faiss.codes.encode import encode
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import UsageError
from gpq_faiss.faissio.header import contents_of
from gpq_faiss.faissio.io import load_index
from gpq_faiss.faissio.model import read_model
from gpq_faiss.stages.export import export

N, Q, TOP = 700, 4, 20


@pytest.fixture(scope="module", params=[5, 6])
def model(request, tmp_path_factory):
    """Of an odd number of codebooks, whose last one shares its byte with none, and of an even one."""
    return make_model(tmp_path_factory.mktemp("export") / "model", M=request.param)


def vectors(Z, n, seed):
    """Vectors near the codewords of random codes, float32 [n, M*d], sub-vectors of unit norm.

    Each is clearly nearer to one codeword than to the next, so that rounding decides no code.
    """
    M, K, d = Z.shape
    rng = np.random.default_rng([seed, n])
    x = Z[np.arange(M), rng.integers(0, K, (4 * n, M))] + 0.2 * rng.standard_normal((4 * n, M, d))
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    cosines = np.sort(np.einsum("nmd,mkd->nmk", x, Z), axis=2)
    clear = (cosines[:, :, -1] - cosines[:, :, -2] > 1e-4).all(axis=1)
    assert clear.sum() >= n
    return x[clear][:n].reshape(n, -1).astype(np.float32)


def truth(model):
    """Items, queries, the items' codes, and the scores [Q, N] of all by brute force."""
    Z = read_model(model).codebooks
    x, xq = vectors(Z, N, 0), vectors(Z, Q, 1)
    codes = encode(x, Z)
    return x, xq, codes, score_codes(xq, codes, Z)


def same_ranking(scores, ids, exact):
    """``ids`` of one query are the best by ``exact``; items that differ by rounding may change places."""
    best = np.sort(exact)[::-1][: len(ids)]
    assert len(set(ids.tolist())) == len(ids)
    np.testing.assert_allclose(scores, best, atol=1e-5)
    np.testing.assert_allclose(exact[ids], best, atol=1e-5)


def test_numpy_arrays_score_the_code_bytes(model, tmp_path):
    out = export(model, tmp_path / "codebooks.npz", to="numpy")
    held = np.load(out, allow_pickle=False)
    header = read_model(model)
    meta = json.loads(held["meta"].item())
    assert meta["codebooks_fingerprint"] == header.codebooks_fingerprint
    assert meta["model_fingerprint"] == header.model_fingerprint
    np.testing.assert_array_equal(held["codebooks"], header.codebooks)
    _, xq, codes, exact = truth(model)
    bytes_, _, width = held["fused"].shape
    tables = np.einsum(
        "qpw,pbw->qpb", pad_vectors(xq, bytes_ * width).reshape(Q, bytes_, width), held["fused"]
    )
    np.testing.assert_allclose(tables[:, np.arange(bytes_), codes].sum(axis=2), exact, atol=1e-5)


def test_nanopq_encodes_and_ranks_alike(model, tmp_path):
    nanopq = pytest.importorskip("nanopq", reason="nanopq is not installed: pip install nanopq")
    held = np.load(export(model, tmp_path / "nanopq.npz", to="nanopq"), allow_pickle=False)
    M, K, d = held["codewords"].shape
    pq = nanopq.PQ(M, K, metric="dot", verbose=False)
    pq.codewords, pq.Ds = held["codewords"], d
    x, xq, codes, exact = truth(model)
    theirs = pq.encode(x)
    np.testing.assert_array_equal(theirs, unpack_codes(codes, M, K))
    for q, right in zip(xq, exact, strict=True):
        scores = pq.dtable(q).adist(theirs)
        ids = np.argsort(-scores, kind="stable")[:TOP]
        same_ranking(scores[ids], ids, right)


def test_lancedb_ranks_alike(model, tmp_path):
    lancedb = pytest.importorskip("lancedb", reason="LanceDB is not installed: pip install lancedb pylance")
    pytest.importorskip("lance", reason="LanceDB's file library is not installed: pip install pylance")
    import pyarrow

    held = np.load(export(model, tmp_path / "lancedb.npz", to="lancedb"), allow_pickle=False)
    books, centroids = held["pq_codebook"], held["ivf_centroids"]
    width = centroids.shape[1]
    x, xq, _, exact = truth(model)
    rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(pad_vectors(x, width).ravel()), width)
    database = lancedb.connect(str(tmp_path / "db"))
    table = database.create_table("items", pyarrow.table({"id": np.arange(N), "vector": rows}))
    sizes = {"num_partitions": 1, "num_sub_vectors": len(books)}
    books = {"ivf_centroids": centroids, "pq_codebook": books}
    table.to_lance().create_index("vector", "IVF_PQ", metric="dot", **sizes, **books)
    table.checkout_latest()
    assert len(table.list_indices()) == 1
    for q, right in zip(pad_vectors(xq, width), exact, strict=True):
        found = table.search(q).distance_type("dot").limit(TOP).to_arrow()
        # Its distance of dot products is 1 - score. Without the index it would be the score of the vector itself.
        same_ranking(1 - found["_distance"].to_numpy(), found["id"].to_numpy(), right)


@pytest.mark.parametrize(
    "string", [None, "PQ{M}x4", "IDMap,PQ{M}x4np", "PQ{half}", "IDMap2,PQ{half}x8", "PQ{M}x4fs"]
)
def test_factory_strings_search_as_faiss_does(model, tmp_path, string):
    M = len(read_model(model).codebooks)
    if string is not None:
        if "half" in string and M % 2:  # a byte would be shared with vectors to come
            with pytest.raises(UsageError, match=r"go into PQ5x4, PQ5x4fs, with"):
                export(model, tmp_path / "o.faiss", to="factory", factory="PQ3")
            return
        string = string.format(M=M, half=M // 2)
    out = export(model, tmp_path / "empty.faiss", to="factory", factory=string)
    assert load_index(out)[1]["codebooks_fingerprint"] == read_model(model).codebooks_fingerprint
    index = faiss.read_index(str(out))
    # What the string means to Faiss is what was written.
    made = faiss.index_factory(index.d, string or f"IDMap2,PQ{M}x4", faiss.METRIC_INNER_PRODUCT)
    assert (type(made), index.ntotal) == (type(index), 0)
    x, xq, codes, exact = truth(model)
    rows, ids = pad_vectors(x, index.d), np.arange(N)
    if isinstance(index, faiss.IndexIDMap):
        ids = ids[::-1] + (1 << 40)
        index.add_with_ids(rows, ids)
    else:
        index.add(rows)
    held = contents_of(index)
    np.testing.assert_array_equal(held.codes[np.argsort(held.ids)], codes[np.argsort(ids)])
    D, found = index.search(pad_vectors(xq, index.d), TOP)
    found = np.argsort(ids)[np.searchsorted(np.sort(ids), found)]
    if "fs" not in (string or ""):
        for scores, one, right in zip(D, found, exact, strict=True):
            same_ranking(scores, one, right)
        return
    # Tables are rounded to 8 bits: a score is off by M steps of a 255th of what all tables span, at most.
    Z = read_model(model).codebooks
    spans = np.einsum("qmd,mkd->qmk", xq.reshape(Q, *Z.shape[::2]), Z)
    bound = (spans.max(axis=2) - spans.min(axis=2)).sum(axis=1) / 255 * M + 1e-5
    assert (np.abs(D - np.take_along_axis(exact, found, axis=1)) <= bound[:, None]).all()
    assert (D[:, 0] >= exact.max(axis=1) - 2 * bound).all()


def test_what_cannot_be_is_refused(tmp_path):
    model, wide = make_model(tmp_path / "model"), make_model(tmp_path / "wide", M=2, K=32)
    strings = ("PQ7x4", "PQ6x5", "PQ3x8fs", "IVF3,PQ6x4", "OPQ6,PQ6x4", "PQ6x4,RFlat", "PQ6x4fsnp", "")
    calls = [
        *((model, "factory", string, "codebooks go into") for string in strings),
        (model, "numpy", "PQ6x4", "belongs to"),
        (model, "pickle", None, "choose from"),
        (wide, "lancedb", None, "32 codewords"),
    ]
    for source, to, factory, message in calls:
        with pytest.raises(UsageError, match=message):
            export(source, tmp_path / "o", to=to, factory=factory)
    assert len(list(tmp_path.iterdir())) == 2
    assert "fused" not in np.load(export(wide, tmp_path / "n.npz", to="numpy"))
    large = np.load(export(make_model(tmp_path / "large", M=2, K=256), tmp_path / "l.npz", to="lancedb"))
    assert large["pq_codebook"].shape[:2] == (2, 256)
