"""Additive codes: an item is a sum of M codewords, each as long as the vector itself, one of every codebook.

What composite quantisation, and the methods built on it, end in. A product code is the special case whose codebooks have disjoint
supports. Plain arrays throughout; no torch.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import pack_codes, unpack_codes
from ..errors import DataError
from .base import Codes, Floats
from .coders import TableCoder

_BLOCK = 4096  # rows; fixed, so that the code of a vector hardly depends on how many are encoded with it


def check_additive(codebooks: Floats) -> Floats:
    """Codebooks float32 [M, K, D], contiguous and finite, K a power of two from 4 to 256.

    Raises:
        DataError: of another form.
    """
    C = np.ascontiguousarray(codebooks, dtype=np.float32)
    if C.ndim != 3 or not 4 <= C.shape[1] <= 256 or C.shape[1] & (C.shape[1] - 1) or not np.isfinite(C).all():
        raise DataError(
            f"codebooks {list(C.shape)}: finite [M, K, D] with K a power of two, 4 to 256, are needed"
        )
    return C


def reconstruct(assignment: NDArray[np.uint8], C: Floats) -> Floats:
    """Sums of the chosen codewords, float32 [n, D], of ``assignment`` uint8 [n, M] and codebooks [M, K, D]."""
    total = np.zeros((len(assignment), C.shape[2]), np.float32)
    for m in range(len(C)):
        total += C[m, assignment[:, m]]
    return total


def iterated_conditional_modes(x: Floats, C: Floats, sweeps: int = 10) -> NDArray[np.uint8]:
    """Codewords whose sum is near each vector: a local minimum of ||x - Σ_m C[m, b_m]||².

    To find the best of all K^M sums is hard. Here every b_m in turn is set to its best value while the others are held; no
    step makes the error larger. The first sweep starts from no codeword at all, that is, from residual quantisation.

    Args:
        x: float32 [n, D].
        C: codebooks float32 [M, K, D].
        sweeps: passes over the M codebooks after the first, at most; it ends where nothing changes any more.

    Returns:
        uint8 [n, M].
    """
    M, K, D = C.shape
    flat = C.reshape(M * K, D)
    cross = (flat @ flat.T).reshape(M, K, M, K)
    half = 0.5 * np.einsum("mkd,mkd->mk", C, C)
    codes = np.zeros((len(x), M), np.uint8)
    for i in range(0, len(x), _BLOCK):
        rows = np.ascontiguousarray(x[i : i + _BLOCK], dtype=np.float32)
        # What a codeword gains by itself: x·c - ||c||²/2; each chosen one elsewhere takes its inner product off.
        gain = (rows @ flat.T).reshape(len(rows), M, K) - half
        chosen = codes[i : i + _BLOCK]
        taken = np.zeros((len(rows), M, K), np.float32)
        for sweep in range(1 + sweeps):
            changed = False
            for m in range(M):
                best = (gain[:, m] - taken[:, m]).argmax(axis=1).astype(np.uint8)
                moved = np.flatnonzero(best != chosen[:, m]) if sweep else np.arange(len(rows))
                if not moved.size:
                    continue
                changed = True
                step = cross[m, best[moved]]
                if sweep:
                    step = step - cross[m, chosen[moved, m]]
                step[:, m] = 0
                taken[moved] += step
                chosen[moved, m] = best[moved]
            if not changed:
                break
    return codes


def update_codebooks(
    x: Floats, assignment: NDArray[np.uint8], C: Floats, *, orthogonality: float = 0.0, rounds: int = 3
) -> Floats:
    """Codebooks that fit the vectors better, their assignment held: one codebook after the other in closed form.

    Minimises (1/n) Σ_i ||x_i - Σ_m C[m, b_im]||² + γ Σ_{m≠m'} ||C_m C_m'ᵀ||². With the other codebooks held this is quadratic in
    C_m, and no step makes it larger. A codeword that no item has chosen stays as it is where γ is 0, and goes to zero where not.

    Args:
        x: float32 [n, D], n > 0.
        assignment: uint8 [n, M].
        C: codebooks float32 [M, K, D], to start from.
        orthogonality: γ.
        rounds: passes over the M codebooks.

    Returns:
        float32 [M, K, D].
    """
    M, K, D = C.shape
    out = C.astype(np.float64)
    n = len(x)
    residual = x.astype(np.float64) - sum(out[m, assignment[:, m]] for m in range(M))
    counts = np.stack([np.bincount(assignment[:, m], minlength=K) for m in range(M)]) / n
    for _ in range(rounds):
        for m in range(M):
            residual += out[m, assignment[:, m]]
            sums = np.zeros((K, D))
            np.add.at(sums, assignment[:, m], residual)
            used = counts[m] > 0
            if orthogonality:
                # (n_k/n + 2γ S) c_k = Σ residual / n, S the scatter of all other codewords; both orders of (m, m') count.
                others = np.delete(out, m, axis=0).reshape(-1, D)
                values, basis = np.linalg.eigh(others.T @ others)
                scale = counts[m][:, None] + 2 * orthogonality * np.maximum(values, 0)
                solved = (sums / n @ basis) / np.maximum(scale, 1e-12) @ basis.T
                out[m] = np.where(used[:, None], solved, 0.0)
            else:
                out[m, used] = sums[used] / (n * counts[m][used, None])
            residual -= out[m, assignment[:, m]]
    return out.astype(np.float32)


class AdditiveCoder(TableCoder):
    """Sums of M codewords, one of each codebook, and the inner product of a query with the sum.

    Args:
        codebooks: float32 [M, K, D], K a power of two from 4 to 256.
        sweeps: see :func:`iterated_conditional_modes`.

    Raises:
        DataError: codebooks of another form, or not finite.
    """

    name = "additive codes"

    def __init__(self, codebooks: Floats, sweeps: int = 10) -> None:
        self.codebooks = check_additive(codebooks)
        self.sweeps = sweeps
        self.M, self.K, self.width = (int(n) for n in self.codebooks.shape)
        super().__init__(self.M * (self.K.bit_length() - 1))
        self.code_size = (self.bits + 7) // 8

    def _encode(self, x: Floats) -> Codes:
        return pack_codes(iterated_conditional_modes(x, self.codebooks, self.sweeps), self.K)

    def decode(self, codes: Codes) -> Floats:
        """The sums that codes stand for, float32 [n, D]."""
        return reconstruct(unpack_codes(codes, self.M, self.K), self.codebooks)

    def score_tables(self, xq: NDArray[Any]) -> Floats:
        x = self._inputs(xq, "queries")
        tables: Floats = (x @ self.codebooks.reshape(-1, self.width).T).reshape(len(x), self.M, self.K)
        return tables

    def index(self) -> Any:
        """``faiss.IndexPQ`` over M copies of the space: the inner product of the query, M times in a row, with the codewords one
        after the other is that with their sum. Codes go in by ``add_sa_codes`` only: ``add`` would quantise each copy apart."""
        index = faiss.IndexPQ(
            self.M * self.width, self.M, self.K.bit_length() - 1, faiss.METRIC_INNER_PRODUCT
        )
        faiss.copy_array_to_vector(self.codebooks.ravel(), index.pq.centroids)
        index.is_trained = True
        return index

    def search_input(self, xq: NDArray[Any]) -> NDArray[Any]:
        """The queries, each M times in a row."""
        return np.tile(self._inputs(xq, "queries"), (1, self.M))
