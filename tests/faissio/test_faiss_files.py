"""Faiss files: plain Faiss reads, searches and changes them; other files are named."""

import tempfile
from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_factory import SHAPES, best, books, queries, random_codes, random_ids, score_codes

from gpq_faiss.codes.codebooks import fuse, inject, pad_vectors
from gpq_faiss.codes.encode import decode
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.faissio.convert import check_kind, to_faiss
from gpq_faiss.faissio.files import write_index
from gpq_faiss.indexes.opening import open_index

M, K, D, N = 6, 16, 24, 500
Z, CODES, IDS = books(M), random_codes(N, M), random_ids(N)
XQ = queries(7, D)


def by_id(index):
    codes, ids = index.items_by_id()
    return dict(zip(ids.tolist(), map(bytes, codes), strict=True))


def trained(index):
    index.train(queries(300, index.d))
    return index


@settings(max_examples=40)
@given(shape=SHAPES, n=st.integers(1, 300), with_ids=st.booleans(), fused=st.booleans())
def test_file_gives_codes_ids_and_codebooks_back(shape, n, with_ids, fused):
    Z, codes = books(*shape), random_codes(n, *shape)
    kind = "fused" if fused and shape[1] == 16 else "flat"
    ids = random_ids(n) if with_ids else None
    with tempfile.TemporaryDirectory() as folder:
        path = write_index(to_faiss(codes, ids, Z, kind), Path(folder, "x.faiss"))
        index = open_index(path)
        plain = faiss.read_index(str(path))
    expected = np.arange(n) if ids is None else ids
    assert by_id(index) == dict(zip(expected.tolist(), map(bytes, codes), strict=True))
    assert np.array_equal(index.codebooks, Z)
    assert index.metric_type == faiss.METRIC_INNER_PRODUCT
    assert type(plain) is (faiss.IndexIDMap2 if with_ids else faiss.IndexPQ)


@pytest.mark.parametrize("M", [2, 5, 12])
@pytest.mark.parametrize("kind", ["flat", "fused"])
def test_plain_faiss_has_equal_scores(M, kind):
    Z, codes = books(M), random_codes(N, M)
    index = to_faiss(codes, IDS, Z, kind)
    scores, ids = index.search(pad_vectors(queries(5, 4 * M), index.d), N)
    exact = dict(zip(IDS.tolist(), score_codes(queries(5, 4 * M), codes, Z).T, strict=True))
    assert (
        np.abs(
            np.array([[exact[i][q] for i in row] for q, row in enumerate(ids.tolist())]) - scores
        ).max()
        < 1e-5
    )


def test_plain_faiss_adds_and_removes():
    index = to_faiss(CODES, IDS, Z)
    x = decode(CODES, Z)[:3]
    index.add_with_ids(x, np.array([7_001, 7_002, 7_003]))
    assert index.remove_ids(IDS[:100]) == 100
    assert np.allclose(index.reconstruct(7_002), x[1])
    expected = dict(zip(IDS[100:].tolist(), map(bytes, CODES[100:]), strict=True))
    expected |= {7_001 + row: bytes(CODES[row]) for row in range(3)}
    assert by_id(open_index(index)) == expected


def test_bare_index_takes_vectors():
    index = to_faiss(CODES, None, Z)
    index.add(decode(CODES[:2], Z))
    codes, _ = open_index(index).items_by_id()
    assert np.array_equal(codes, np.concatenate([CODES, CODES[:2]]))


@pytest.mark.parametrize("M", [2, 5])
def test_fastscan_export_is_for_plain_faiss(M, tmp_path):
    Z, codes = books(M), random_codes(N, M)
    path = write_index(to_faiss(codes, IDS, Z, "fastscan"), tmp_path / "x.faiss")
    scores, ids = faiss.read_index(str(path)).search(queries(5, 4 * M), 10)
    assert np.abs(scores - best(queries(5, 4 * M), codes, Z, 10)[0]).max() < 0.2
    assert np.isin(ids, IDS).all()
    with pytest.raises(DataError, match="is IndexPQFastScan, not codes"):
        open_index(path)


@pytest.fixture
def ivf():
    index = to_faiss(CODES, IDS, Z, "ivf")
    assert (type(index), index.nlist, index.nprobe) == (faiss.IndexIVFPQ, 16, 2)
    index.nprobe = index.nlist
    return index


def test_ivf_export_finds_what_flat_finds(ivf):
    scores, ids = ivf.search(XQ, 20)
    exact, exact_ids = best(XQ, CODES, Z, 20, IDS)
    assert np.abs(scores - exact).max() < 1e-5
    apart = np.abs(np.diff(exact, prepend=np.inf, append=-np.inf, axis=1)).min(axis=1) > 1e-5
    assert np.array_equal(ids[apart], exact_ids[apart])


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("tree", (6, 16), "choose from flat, fused, fastscan, ivf"),
        ("fused", (6, 256), "needs 16 codewords per codebook, these have 256"),
        ("ivf", (6, 8), "needs 16 codewords"),
    ],
)
def test_unfit_kind_is_refused(kind, shape, message):
    with pytest.raises(UsageError, match=message):
        check_kind(kind, *shape)


# Files of other programs --------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("mapped", [faiss.IndexIDMap, faiss.IndexIDMap2])
def test_trained_index_of_faiss_is_read(bits, mapped):
    index = trained(faiss.IndexPQ(D, M, bits))
    outer = mapped(index)
    outer.add_with_ids(XQ, IDS[:7])
    opened = open_index(outer)
    assert opened.codebooks.shape == (M, 1 << bits, D // M)
    assert by_id(opened) == dict(
        zip(IDS[:7].tolist(), map(bytes, index.sa_encode(XQ)), strict=True)
    )
    assert opened.metric_type == faiss.METRIC_L2


FOREIGN = {
    "OPQ6,PQ6x4": "IndexPreTransform,",
    "PCA12,Flat": "IndexPreTransform,",
    "IVF4,PQ6x4": "IndexIVFPQ,",
    "IVF4,PQ6x4fs": "IndexIVFPQFastScan",
    "IDMap,IVF4,Flat": "IndexIVFFlat,",
    "HNSW8,PQ6x4": "IndexHNSWPQ",
    "HNSW8": "IndexHNSWFlat",
    "Flat": "IndexFlatL2",
    "PQ6x4fs": "IndexPQFastScan",
    "PQ6x10": "IndexPQ, not codes of a product quantiser (IndexPQ of 2 to 8 bits)",
    "SQ8": "IndexScalarQuantizer",
    "RQ6x4": "IndexResidualQuantizer",
}


@pytest.mark.parametrize("factory", FOREIGN)
def test_other_index_is_named(factory, tmp_path):
    index = faiss.index_factory(D, factory)
    faiss.write_index(index if "x10" in factory else trained(index), str(tmp_path / "x.faiss"))
    with pytest.raises(DataError) as refused:
        open_index(tmp_path / "x.faiss")
    assert str(refused.value).startswith(f"{tmp_path}/x.faiss is ")
    assert FOREIGN[factory] in str(refused.value)


def test_binary_index_is_named(tmp_path):
    faiss.write_index_binary(faiss.IndexBinaryFlat(64), str(tmp_path / "x.faiss"))
    with pytest.raises(DataError, match=r"x\.faiss is a binary index, not product codes"):
        open_index(tmp_path / "x.faiss")


def test_untrained_index_is_refused():
    with pytest.raises(DataError, match="is not trained"):
        open_index(faiss.IndexPQ(D, M, 4))


@pytest.mark.parametrize("ids", [[5, 5, 6], [5, -1, 6]])
def test_unfit_ids_are_refused(ids):
    index = faiss.IndexIDMap2(inject(Z))
    index.add_with_ids(XQ[:3], np.array(ids))
    with pytest.raises(DataError, match=r"id 5 occurs more than once|has the id -1"):
        open_index(index)


def test_eight_bits_that_are_not_fused_stay_eight_bits():
    index = open_index(to_faiss(random_codes(9, 3, 256), None, books(3, 256)))
    assert index.codebooks.shape == (3, 256, 4)
    assert open_index(to_faiss(CODES, None, fuse(Z))).codebooks.shape == Z.shape


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "content: empty"),
        (b"SQLite format 3\0", "is not an index .*content: an SQLite database"),
        (b"\x93NUMPY" + bytes(99), "is not an index .*content: npy"),
        (b"PK\x03\x04" + bytes(99), "content: a zip archive"),
        (b"PAR1" + bytes(99), "content: parquet"),
        (b"\x89PNG" + bytes(99), "content: an image"),
        (b"IxPQ" + bytes(99), "is not an index file|damaged"),
        (b"Index of all files\n", "content: text"),
    ],
)
def test_other_file_is_named(tmp_path, content, message):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_index(tmp_path / "x")
