"""Spectral hashing: its functions are the box's eigenfunctions with the smallest eigenvalues, along principal axes."""

from __future__ import annotations

import numpy as np
import pytest
from array_methods import QUERIES, assert_bits_rank_as_score, digits, digits_map
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.decomposition import PCA

from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.methods.sh import SH, eigenfunction, smallest_modes

WIDTH = 10


def vectors(n: int, seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    mix = np.random.default_rng(7).standard_normal((WIDTH, WIDTH))
    return (rng.uniform(-1, 1, (n, WIDTH)) * np.linspace(3, 0.2, WIDTH) @ mix + 5).astype(np.float32)


X, XB = vectors(400, 0), vectors(150, 1)


@given(lengths=st.lists(st.floats(0.01, 10), min_size=1, max_size=6), count=st.integers(1, 20))
@settings(deadline=None, max_examples=80)
def test_modes_have_the_smallest_eigenvalues_of_all(lengths: list[float], count: int) -> None:
    modes = smallest_modes(np.array(lengths), count)
    assert modes.shape == (count, 2)
    assert len({tuple(m) for m in modes.tolist()}) == count
    assert modes[:, 1].min() >= 1

    def eigenvalue(axis: int, k: int) -> float:
        # In logs: 1 - exp(-t) runs into 1 where t is large. A small ε keeps the order.
        return (k * np.pi / lengths[axis]) ** 2

    chosen = [eigenvalue(axis, k) for axis, k in modes.tolist()]
    assert chosen == sorted(chosen)
    every = sorted(eigenvalue(axis, k) for axis in range(len(lengths)) for k in range(1, count + 1))
    np.testing.assert_allclose(chosen, every[:count], rtol=1e-9)


def test_the_functions_solve_the_boxes_equation() -> None:
    """Φ'' = -(kπ / (b - a))² Φ inside, Φ' = 0 on the border: the Laplacian's eigenfunctions with Neumann's condition."""
    low, high = np.array([-1.0, 2.0, 0.0]), np.array([3.0, 2.5, 7.0])
    k = np.array([1, 2, 5])
    h = 1e-3 * (high - low)
    x = low + (high - low) * np.linspace(0.05, 0.95, 19)[:, None]

    def f(at: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(eigenfunction(at, k, low, high), dtype=np.float64)

    second = (f(x + h) - 2 * f(x) + f(x - h)) / h**2
    np.testing.assert_allclose(second / (k * np.pi / (high - low)) ** 2, -f(x), atol=0.05)
    for border in (low, high):
        np.testing.assert_allclose(np.abs(f(border[None])), 1, atol=1e-6)


@pytest.mark.parametrize(("bits", "normalize"), [(6, False), (12, False), (12, True), (30, True)])
def test_bits_are_signs_of_sines_along_principal_axes(bits: int, normalize: bool) -> None:
    method = SH(bits, normalize=normalize).fit(X)

    def scale(a: NDArray[np.float32]) -> NDArray[np.float32]:
        return a / np.linalg.norm(a, axis=1, keepdims=True) if normalize else a

    pca = PCA(min(bits, WIDTH), svd_solver="full").fit(scale(X).astype(np.float64))
    train, base = pca.transform(scale(X)), pca.transform(scale(XB))
    # The sign of an axis is free, and a sine of even k does not change with it, one of odd k turns over.
    turn = np.sign((pca.components_ * method.axes).sum(axis=1))
    train, base = train * turn, base * turn
    low, high = train.min(axis=0), train.max(axis=0)
    np.testing.assert_allclose(method.box, np.stack([low, high], axis=1), atol=1e-4)
    for bit, (axis, k) in enumerate(smallest_modes(high - low, bits).tolist()):
        value = np.sin(np.pi / 2 + k * np.pi / (high[axis] - low[axis]) * (base[:, axis] - low[axis]))
        clear = np.abs(value) > 1e-3
        got = method.encode(XB)[:, bit // 8] >> (bit % 8) & 1
        np.testing.assert_array_equal(got[clear], (value > 0)[clear])
    # The first bit halves the longest axis' range.
    assert method.modes[0].tolist() == [0, 1]


def test_the_index_ranks_as_the_score_and_codes_repeat() -> None:
    method = SH(12).fit(X)
    assert_bits_rank_as_score(method, X[:9], XB)
    again = SH(12, seed=5).fit(X)
    np.testing.assert_array_equal(method.encode(XB), again.encode(XB))
    assert again.settings() == {**method.settings(), "seed": 5}


def test_an_axis_without_length_gives_no_bit() -> None:
    flat = X.copy()
    flat[:, 3:] = 1
    method = SH(24, normalize=False).fit(flat)
    assert len(method.axes) == 3
    assert method.modes[:, 0].max() == 2
    with pytest.raises(DataError, match="are equal"):
        SH(4).fit(np.ones((9, 4), np.float32))
    with pytest.raises(DataError, match="give at least 2"):
        SH(4).fit(X[:1])
    with pytest.raises(MismatchError, match="width 9"):
        SH(4).fit(X).encode(X[:, :9])


def test_works_on_digits() -> None:
    assert digits_map(SH(24).fit(digits()[0][QUERIES:])) > 0.35
