"""Codes, packing, fusing and scores against loops written from the definitions, and against Faiss
itself.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_factory import books, queries, score_codes

from gpq_faiss.codes import encode as encoding
from gpq_faiss.codes.bits import bits_per_code, check_codes, code_size, pack_codes, unpack_codes
from gpq_faiss.codes.checks import CODEWORDS, check_codebooks
from gpq_faiss.codes.codebooks import fuse, inject, pad_vectors, product_index, unfuse
from gpq_faiss.codes.encode import decode, encode
from gpq_faiss.codes.scores import score_tables
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.faissio.model import encode_items


def vectors(n, M, d=12, seed=0):
    """Intra-normalised vectors, float32 [n, M * d]."""
    return books(n, M, d, seed).reshape(n, M * d)


def cosines(x, Z):
    """Scores of all codewords, float64 [n, M, K]."""
    M, _, d = Z.shape
    return np.einsum("nmd,mkd->nmk", x.reshape(-1, M, d).astype(np.float64), Z.astype(np.float64))


def clear(scores, margin):
    """Sub-vectors whose best codeword is clearly better than the second."""
    ordered = np.sort(scores, axis=2)
    return ordered[..., -1] - ordered[..., -2] > margin


@pytest.mark.parametrize("K", CODEWORDS)
@pytest.mark.parametrize("M", [1, 3, 12])
def test_codes_are_the_brute_force_argmax_cosine(M, K):
    Z, x = books(M, K, 12), vectors(200, M)
    truth, codes = cosines(x, Z), encode(x, Z)
    assert np.abs(score_tables(x, Z) - truth).max() < 2e-5
    assignment, mask = unpack_codes(codes, M, K), clear(truth, 1e-5)
    assert mask.mean() > 0.99
    assert np.array_equal(assignment[mask], truth.argmax(axis=2)[mask])
    index = inject(Z)
    assert np.array_equal(codes, index.sa_encode(x))
    assert np.array_equal(decode(codes, Z), index.sa_decode(codes))


@given(
    seed=st.integers(0, 999),
    scale=st.floats(-37, 37),
    separate=st.booleans(),
    K=st.sampled_from([4, 16]),
)
def test_lengths_of_sub_vectors_change_no_code(seed, scale, separate, K):
    """|x|^2 + 1 - 2 x.z alone would lose x.z of long vectors, and all but the 1 of short ones."""
    rng = np.random.default_rng(seed)
    Z, x = books(3, K, 12, seed), vectors(12, 3, seed=seed)
    factor = 10.0 ** (rng.uniform(min(0, scale), max(0, scale), (12, 3, 1)) if separate else scale)
    scaled = (x.reshape(-1, 3, 12).astype(np.float64) * factor).reshape(x.shape).astype(np.float32)
    truth = cosines(x, Z)
    mask = clear(truth, 1e-4)
    assert np.array_equal(unpack_codes(encode(scaled, Z), 3, K)[mask], truth.argmax(axis=2)[mask])


def test_codes_do_not_depend_on_blocks(monkeypatch):
    Z, x = books(12, 16, 12), vectors(3000, 12)
    codes = encode(x, Z)
    monkeypatch.setattr(encoding, "ENCODE_BLOCK", 7)
    assert np.array_equal(codes, encode(x, Z))
    assert encode(x[:0], Z).shape == (0, 6)


@given(
    nbits=st.integers(2, 8), M=st.integers(1, 13), n=st.integers(0, 9), seed=st.integers(0, 1000)
)
def test_packed_codes_are_numbers_of_their_bits(nbits, M, n, seed):
    K = 1 << nbits
    assignment = np.random.default_rng(seed).integers(0, K, (n, M))
    codes = pack_codes(assignment, K)
    assert np.array_equal(unpack_codes(codes, M, K), assignment)
    numbers = [sum(int(a) << (m * nbits) for m, a in enumerate(row)) for row in assignment]
    expected = [number.to_bytes(code_size(M, K), "little") for number in numbers]
    assert [bytes(row) for row in codes] == expected


@pytest.mark.parametrize("M", [1, 2, 3, 12])
def test_fused_codebooks_read_the_same_bytes(M):
    Z, x, xq = books(M, 16, 12), vectors(200, M), queries(5, 12 * M)
    codes, fused = encode(x, Z), fuse(Z)
    assert np.array_equal(unfuse(fused), Z)
    wide = product_index(fused)
    wide.add_sa_codes(codes)
    assert np.array_equal(wide.sa_decode(codes)[:, : M * 12], decode(codes, Z))
    D, ids = wide.search(pad_vectors(xq, wide.d), 200)
    assert np.abs(np.take_along_axis(score_codes(xq, codes, Z), ids, axis=1) - D).max() < 1e-5


GOOD = books(3, 16, 12)


@pytest.mark.parametrize(
    ("Z", "message"),
    [
        (GOOD.astype(np.float64), "float64"),
        (GOOD[0], "expected float32"),
        (GOOD[:, :12], "power of two"),
        (GOOD * np.nan, "codeword 0 of codebook 0"),
        (GOOD * np.float32(1.001), "has norm 1.001"),
    ],
)
def test_unfit_codebooks_are_refused(Z, message):
    with pytest.raises(DataError, match=message):
        check_codebooks(Z)


def test_codebooks_that_are_not_fused_are_refused():
    fused = fuse(GOOD)
    fused[0, 17, 0] += 0.5
    with pytest.raises(DataError, match="not byte-fused"):
        unfuse(fused)
    with pytest.raises(UsageError, match="16 codewords"):
        fuse(books(2, 32))


@pytest.mark.parametrize("K", [0, 2, 3, 15, 512])
def test_unfit_numbers_of_codewords_are_refused(K):
    with pytest.raises(UsageError, match="power of two"):
        bits_per_code(K)


@pytest.mark.parametrize(
    ("value", "message"),
    [(np.nan, "NaN or infinity in rows 104, 131"), (0, "has no direction, in rows 104, 131:")],
)
def test_unfit_vectors_are_refused_by_row(value, message):
    x = vectors(50, 3)
    x[[4, 31], 12:24] = value
    with pytest.raises(DataError, match=message):
        encode(x, GOOD, name="features.h5", first_row=100)
    with pytest.raises(DataError, match=r"\(50, 35\), expected numbers \[n, 36\]"):
        encode(x[:, :35], GOOD)


def test_vectors_that_are_not_codewords_are_no_items():
    x = vectors(50, 3)
    codes, description = encode(x, GOOD), {"items_are_codewords": True}
    assert np.array_equal(encode_items(decode(codes, GOOD), GOOD, description, name="x"), codes)
    with pytest.raises(DataError, match="x: rows 0, 1, 2, 3, 4 and 45 more cannot be items"):
        encode_items(x, GOOD, description, name="x")


def test_codes_out_of_range_are_refused():
    codes = np.zeros((3, 2), np.uint8)
    codes[2, 1] = 0x10  # the spare nibble of three 4-bit codebooks
    with pytest.raises(DataError, match="beyond the last codebook in row 2"):
        check_codes(codes, 3, 16)
    with pytest.raises(DataError, match="expected uint8"):
        check_codes(codes[:, :1], 3, 16)
