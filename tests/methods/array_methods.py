"""What the tests of methods without a network share: digits in an order of their own, and an index of bits that agrees."""

from __future__ import annotations

from functools import cache

import faiss
import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from gpq_faiss.data.labels import Labels
from gpq_faiss.evaluation.ranking import rank_codes
from gpq_faiss.methods.base import Coder

QUERIES = 100
"""The first digits of :func:`digits` are requested among the others."""


@cache
def digits() -> tuple[NDArray[np.float32], Labels]:
    """The pixels float32 [1797, 64] and the labels, shuffled."""
    source = load_digits()
    order = np.random.default_rng(0).permutation(len(source.data))
    return source.data[order].astype(np.float32), Labels.from_ids(source.target[order])


def digits_map(method: Coder) -> float:
    """mAP of a fitted method over digits; chance is 0.1."""
    x, y = digits()
    return rank_codes(
        lambda q, codes: method.score(x[:QUERIES][q], codes),
        method.encode(x[QUERIES:]),
        y.take(slice(0, QUERIES)),
        y.take(slice(QUERIES, None)),
    ).map


def assert_bits_rank_as_score(method: Coder, xq: NDArray[np.float32], xb: NDArray[np.float32]) -> None:
    """Hamming distances of the binary index are the scores, turned round."""
    index = method.index()
    assert isinstance(index, faiss.IndexBinaryFlat)
    index.add(method.search_input(xb))
    distances, ids = index.search(method.search_input(xq), len(xb))
    scores = method.score(xq, method.encode(xb))
    np.testing.assert_array_equal(np.take_along_axis(scores, ids, axis=1), -distances)
