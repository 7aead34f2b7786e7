"""Additive codes: an item is a sum of M full-width codewords, one from each codebook.

Composite quantisation and the methods built on it use these codes. Product codes are the special case of codebooks with disjoint
supports. No torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.bits import bits_per_code, pack_codes
from ..codes.codebooks import product_index
from .coders import Coder, Codes, Floats, checked_codebooks

_BLOCK = 4096  # rows; fixed, so that a code hardly depends on the batch


def reconstruct(assignment: NDArray[np.uint8], C: Floats) -> Floats:
    """Sums of the chosen codewords, float32 [n, D], of ``assignment`` uint8 [n, M] and codebooks [M, K, D]."""
    total = np.zeros((len(assignment), C.shape[2]), np.float32)
    for m in range(len(C)):
        total += C[m, assignment[:, m]]
    return total


def iterated_conditional_modes(x: Floats, C: Floats, sweeps: int = 10) -> NDArray[np.uint8]:
    """Codes uint8 [n, M] of vectors float32 [n, D] by codebooks float32 [M, K, D]: a local minimum of ||x - Σ_m C[m, b_m]||².

    The best of all K^M sums is hard to find, so each b_m in turn is set to its best value with the others fixed; no step increases
    the error. The first sweep starts from zero, which is residual quantisation; at most ``sweeps`` follow, until nothing changes.
    """
    M, K, D = C.shape
    flat = C.reshape(M * K, D)
    cross = (flat @ flat.T).reshape(M, K, M, K)
    half = 0.5 * np.einsum("mkd,mkd->mk", C, C)
    codes = np.zeros((len(x), M), np.uint8)
    for i in range(0, len(x), _BLOCK):
        rows = np.ascontiguousarray(x[i : i + _BLOCK], dtype=np.float32)
        # Gain of a codeword: x·c - ||c||²/2, less its inner product with the codewords chosen from other codebooks.
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
    """Refit codebooks to the vectors with fixed assignments, one codebook at a time in closed form.

    Minimises (1/n) Σ_i ||x_i - Σ_m C[m, b_im]||² + γ Σ_{m≠m'} ||C_m C_m'ᵀ||², in ``rounds`` passes over the codebooks. With the others
    fixed this is quadratic in C_m, and no step increases it. An unused codeword stays unchanged if γ is 0, else it goes to zero.

    Args:
        x: float32 [n, D], n > 0.
        assignment: uint8 [n, M].
        C: initial codebooks, float32 [M, K, D].
        orthogonality: γ.
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


class AdditiveCoder(Coder):
    """Items are sums of M full-width codewords, one of each codebook, scored by inner product with the query.

    Raises:
        DataError: codebooks that are not finite float32 [M, K, D], K a power of two from 4 to 256.
    """

    name = "additive codes"

    def __init__(self, codebooks: Floats) -> None:
        self.codebooks = checked_codebooks(codebooks)
        self.M, self.K, self.width = (int(n) for n in self.codebooks.shape)
        super().__init__(self.M * bits_per_code(self.K))

    def _encode(self, x: Floats) -> Codes:
        return pack_codes(iterated_conditional_modes(x, self.codebooks), self.K)

    def _tables(self, x: Floats) -> Floats:
        tables: Floats = (x @ self.codebooks.reshape(-1, self.width).T).reshape(len(x), self.M, self.K)
        return tables

    def index(self) -> Any:
        """``faiss.IndexPQ`` over M copies of the space, so that the query repeated M times has the inner product of the sum. Add codes
        with ``add_sa_codes`` only: ``add`` would quantise each copy independently."""
        return product_index(self.codebooks)

    def search_input(self, xq: NDArray[Any]) -> NDArray[Any]:
        """Each query repeated M times."""
        return np.tile(self._inputs(xq, "queries"), (1, self.M))
