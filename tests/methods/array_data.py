"""Vectors around three centres, for the tests of methods that learn from a matrix of them."""

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from gpq_faiss.codes.codebooks import product_index
from gpq_faiss.data.labels import Labels
from gpq_faiss.methods.coders import BinaryMethod, Coder, scaled_rows
from gpq_faiss.methods.dtq import AdditiveCoder
from gpq_faiss.methods.faiss_codec import FaissCodec
from gpq_faiss.methods.registry import make_method
from gpq_faiss.methods.uncompressed import Classifier

WIDTH, CLASSES = 20, 3


def clusters(n: int, seed: int) -> tuple[NDArray[np.float32], Labels]:
    """Vectors with correlated noise, and their classes."""
    centres = np.random.default_rng(99).standard_normal((CLASSES, WIDTH)) * 1.5
    mix = np.random.default_rng(98).standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, CLASSES, n)
    x = centres[ids] + rng.standard_normal((n, WIDTH)) @ mix
    return x.astype(np.float32), Labels.from_ids(ids, "abc")


X, Y = clusters(900, 0)
XB, YB = clusters(300, 1)
XQ, YQ = clusters(15, 2)


def quick(name: str, bits: int, seed: int = 0, steps: int = 40) -> Coder:
    """The method, with few steps where it trains a network."""
    method = make_method(name, bits, seed)
    if isinstance(method, Classifier):
        method.steps, method.batch, method.hidden = steps, 64, 64
    return method


def reconstruct(codes: NDArray[np.uint8], C: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums of the chosen codewords [M, K, D]."""
    sums: NDArray[np.float32] = C[np.arange(len(C)), codes].sum(axis=1)
    return sums


def assert_faiss_ranks_alike(coder: Any, xq: NDArray[Any], xb: NDArray[Any]) -> None:
    """Faiss, given the codes, finds every item with the distance that the score is."""
    codes, sign, index = coder.encode(xb), -1, faiss.IndexBinaryFlat(8 * coder.code_size)
    if isinstance(coder, BinaryMethod) or "LSH" in getattr(coder, "description", ""):
        queries = coder.encode(xq)
        index.add(codes)
    else:
        inner, queries = coder, np.ascontiguousarray(xq, np.float32)
        if isinstance(coder, FaissCodec):
            scaled = scaled_rows(queries) if coder.unit else queries
            inner, queries = coder.quantizer, coder._transformed(scaled)
        elif isinstance(coder, AdditiveCoder):
            queries = np.tile(queries, (1, coder.M))
        index = product_index(inner.codebooks)
        if getattr(inner, "metric", "ip") == "ip":
            sign = 1
        else:
            index.metric_type = faiss.METRIC_L2
        index.add_sa_codes(codes)
    distances, ids = index.search(queries, len(xb))
    assert (np.sort(ids, axis=1) == np.arange(len(xb))).all()
    scores = np.take_along_axis(coder.score(xq, codes), ids, axis=1)
    np.testing.assert_allclose(scores, sign * distances.astype(np.float64), rtol=1e-5, atol=2e-5)
