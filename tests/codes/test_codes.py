"""Codes, packing, fusing and scores against loops written from the definitions, and against Faiss
itself.
"""

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_factory import score_codes, unit

from gpq_faiss.codes import encode as encoding
from gpq_faiss.codes.bits import bits_per_code, check_codes, code_size, pack_codes, unpack_codes
from gpq_faiss.codes.checks import CODEWORDS, check_codebooks
from gpq_faiss.codes.codebooks import fuse, inject, pad_vectors, product_index, unfuse
from gpq_faiss.codes.encode import decode, encode
from gpq_faiss.codes.scores import score_tables
from gpq_faiss.errors import DataError, UsageError


def random_codebooks(rng, M, K, d=12):
    return unit(rng.normal(size=(M, K, d)))


def random_vectors(rng, n, M, d=12):
    return random_codebooks(rng, n, M, d).reshape(n, M * d)


def cosines(x, Z):
    """[N, M, K] in float64."""
    M, _, d = Z.shape
    return np.einsum("nmd,mkd->nmk", x.reshape(-1, M, d).astype(np.float64), Z.astype(np.float64))


@pytest.mark.parametrize("K", CODEWORDS)
@pytest.mark.parametrize("M", [1, 3, 12])
def test_codes_are_the_brute_force_argmax_cosine(M, K):
    rng = np.random.default_rng([M, K])
    Z, x = random_codebooks(rng, M, K), random_vectors(rng, 200, M)
    truth, codes = cosines(x, Z), encode(x, Z)
    assert np.abs(score_tables(x, Z) - truth).max() < 2e-5
    assignment = unpack_codes(codes, M, K)
    ordered = np.sort(truth, axis=2)
    clear = ordered[..., -1] - ordered[..., -2] > 1e-5
    assert clear.mean() > 0.99
    assert np.array_equal(assignment[clear], truth.argmax(axis=2)[clear])
    chosen = np.take_along_axis(truth, assignment[..., None].astype(int), axis=2)[..., 0]
    assert (
        ordered[..., -1] - chosen
    ).max() < 1e-5  # near ties may go either way, but only near ties
    index = inject(Z)
    assert (index.is_trained, index.ntotal) == (True, 0)
    assert np.array_equal(faiss.vector_to_array(index.pq.centroids).reshape(Z.shape), Z)
    assert np.array_equal(decode(codes, Z), index.sa_decode(codes))


@pytest.mark.parametrize("d", [2, 12, 20])
@pytest.mark.parametrize("K", CODEWORDS)
def test_the_lowest_of_equal_codewords_wins(K, d):
    rng = np.random.default_rng([K, d])
    half = random_codebooks(rng, 3, K // 2, d)
    Z = np.concatenate([half, half], axis=1)
    Z[1] = half[1, 0]  # a whole codebook of one codeword
    assignment = unpack_codes(encode(random_vectors(rng, 300, 3, d), Z), 3, K)
    assert assignment.max() < K // 2
    assert not assignment[:, 1].any()


@given(
    seed=st.integers(0, 999),
    scale=st.floats(-37, 37),
    each=st.booleans(),
    K=st.sampled_from([4, 16]),
)
def test_the_length_of_a_vector_changes_no_code(seed, scale, each, K):
    """Of whole vectors, or of each sub-vector its own: |x|^2 + 1 - 2 x.z alone would lose x.z, or
    all but the 1.
    """
    rng = np.random.default_rng(seed)
    M = 3
    Z, x = random_codebooks(rng, M, K), random_vectors(rng, 12, M)
    factor = 10.0 ** (rng.uniform(min(0, scale), max(0, scale), (12, M, 1)) if each else scale)
    scaled = (x.reshape(-1, M, 12).astype(np.float64) * factor).reshape(x.shape).astype(np.float32)
    truth = cosines(x, Z)
    ordered = np.sort(truth, axis=2)
    clear = ordered[..., -1] - ordered[..., -2] > 1e-4
    codes = encode(scaled, Z)
    assert np.array_equal(unpack_codes(codes, M, K)[clear], truth.argmax(axis=2)[clear])
    assert np.array_equal(codes, np.concatenate([encode(row[None], Z) for row in scaled]))


def test_encode_equals_faiss_and_does_not_depend_on_blocks_or_threads(monkeypatch):
    rng = np.random.default_rng(5)
    Z, x = random_codebooks(rng, 12, 16), random_vectors(rng, 3000, 12)
    codes, before = encode(x, Z), faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1 if before > 1 else 3)
    assert np.array_equal(codes, encode(x, Z))
    faiss.omp_set_num_threads(before)
    assert np.array_equal(codes, inject(Z).sa_encode(x))
    assert np.array_equal(codes, encode(x.astype(np.float64), Z))
    assert encode(x[:0], Z).shape == (0, 6)
    monkeypatch.setattr(encoding, "ENCODE_BLOCK", 7)
    assert np.array_equal(codes, encode(x, Z))
    x[[450, 2900], 3] = np.nan
    with pytest.raises(DataError, match=r"row 450$"):
        encode(x, Z)


@given(
    nbits=st.integers(2, 8), M=st.integers(1, 13), n=st.integers(0, 9), seed=st.integers(0, 1000)
)
def test_packing_is_that_of_faiss_and_inverts(nbits, M, n, seed):
    K = 1 << nbits
    assignment = np.random.default_rng(seed).integers(0, K, (n, M))
    codes = pack_codes(assignment, K)
    assert (codes.dtype, codes.shape) == (np.uint8, (n, code_size(M, K)))
    assert np.array_equal(unpack_codes(codes, M, K), assignment)
    # one number of M * nbits bits per item, least significant bits first
    numbers = [sum(int(a) << (m * nbits) for m, a in enumerate(row)) for row in assignment]
    assert [bytes(row) for row in codes] == [
        number.to_bytes(code_size(M, K), "little") for number in numbers
    ]
    if n:
        assert np.array_equal(codes, faiss.pack_bitstrings(assignment.astype(np.int32), nbits))


@pytest.mark.parametrize("M", [1, 2, 3, 12])
def test_fused_codebooks_read_the_same_bytes_and_give_the_same_scores(M):
    rng = np.random.default_rng(M)
    Z, x = random_codebooks(rng, M, 16), random_vectors(rng, 200, M)
    codes, fused = encode(x, Z), fuse(Z)
    assert fused.shape == ((M + 1) // 2, 256, 24)
    assert np.array_equal(unfuse(fused), Z)
    wide = product_index(fused)
    wide.add_sa_codes(codes)
    assert np.array_equal(wide.sa_decode(codes)[:, : M * 12], decode(codes, Z))
    xq = rng.normal(size=(5, M * 12)).astype(np.float32)
    D, found = wide.search(pad_vectors(xq, wide.d), 200)
    assert np.abs(np.take_along_axis(score_codes(xq, codes, Z), found, axis=1) - D).max() < 1e-5


def test_unfit_codebooks_are_refused():
    good = random_codebooks(np.random.default_rng(0), 3, 16)
    nan, long = good.copy(), good.copy()
    nan[1, 7, 3] = np.nan
    long[2, 5] *= 1.001
    for Z, message in (
        (good.astype(np.float64), "float64"),
        (good[0], "expected float32"),
        (good[:0], "expected float32"),
        (good[:, :12], "power of two"),
        (good[:, :2], "power of two"),
        (nan, "codeword 7 of codebook 1"),
        (long, "codeword 5 of codebook 2 has norm 1.001"),
        (np.zeros_like(good), "norm 0"),
    ):
        for function in (check_codebooks, inject):
            with pytest.raises(DataError, match=message):
                function(Z)
    fused = fuse(good)
    fused[0, 17, 0] += 0.5
    for Z in (fused, good):
        with pytest.raises(DataError, match="not byte-fused"):
            unfuse(Z)
    with pytest.raises(UsageError, match="16 codewords"):
        fuse(random_codebooks(np.random.default_rng(0), 2, 32))
    for K in (0, 2, 3, 15, 512):
        with pytest.raises(UsageError, match="power of two"):
            bits_per_code(K)


def test_vectors_that_cannot_be_encoded_are_refused_by_row():
    rng = np.random.default_rng(0)
    Z, x = random_codebooks(rng, 3, 16), random_vectors(rng, 50, 3)
    nan, infinite, zero = x.copy(), x.copy(), x.copy()
    nan[[4, 31], 7] = np.nan
    infinite[40, 5] = -np.inf
    zero[33, 12:24] = 0
    zero[10, 0] = 0  # one zero among others is fine
    for wrong, message in (
        (nan, "NaN or infinity in rows 104, 131"),
        (infinite, r"features.h5: NaN or infinity in row 140$"),
        (zero, "no direction, in row 133:"),
        (x[:, :35], r"\(50, 35\), expected numbers \[n, 36\]"),
        (x[0], r"\(36,\), expected numbers"),
        (x.astype(str), "<U.*expected numbers"),
    ):
        with pytest.raises(DataError, match=message):
            encode(wrong, Z, name="features.h5", first_row=100)
    zero[33] = x[33]
    assert len(encode(zero, Z)) == 50
    with pytest.raises(DataError, match="too large"):
        score_tables(np.full((1, 36), 3e38, np.float32), Z)


def test_codes_out_of_range_are_refused():
    codes = np.zeros((3, 2), np.uint8)
    codes[2, 1] = 0x10  # the spare nibble of three 4-bit codebooks
    with pytest.raises(DataError, match="beyond the last codebook in row 2"):
        check_codes(codes, 3, 16)
    for array in (codes[:, :1], codes.astype(np.int64), codes[0]):
        with pytest.raises(DataError, match="expected uint8"):
            unpack_codes(array, 3, 16)
