"""Deep Triplet Quantization: Liu, Cao, Long, Wang and Wang, "Deep Triplet Quantization", ACM
Multimedia 2018.

Vectors z = tanh(W f + b) are trained on triplets of anchor, positive and negative, and kept close
to sums of M full-width codewords, one from each codebook::

    L = Σ max(0, ||z_a - z_p||² - ||z_a - z_n||² + δ)               triplet loss
    Q = Σ_i ||z_i - Σ_m C_m b_im||² + γ Σ_{m≠m'} ||C_mᵀ C_m'||²     with weak orthogonality
    min L + λ Q

alternately: the network by gradient, the codes b by iterated conditional modes, each codebook in
closed form. *Group hard* selects triplets: within a group of items, every pair of anchor and
positive takes one random negative among those that violate the margin. Search maximises the inner
product of the query with Σ_m C_m b_m. Both sums are means (over triplets; over items).

Deviations:

* A group is the batch, not a part of the whole training set.
* Codebooks are initialised by residual k-means. Codes and codebooks are refitted after each pass
  over the labelled items, to the network's outputs of that pass, and after the last step; λ applies
  from the first fit on.
* Weak orthogonality is imposed between different codebooks. The paper's exact equation was not
  available.
* δ = 15, chosen on held-out items; 30 in the authors' published code for D = 64.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..codes.bits import bits_per_code, pack_codes
from ..codes.checks import check_codebooks
from ..config import MAX_SEED
from ..data.base import Reader
from ..faissio.kmeans import fit_codebooks
from ..losses.npair import label_pairs
from .baseline import Alternating, triplet_margin
from .coders import Coder, Codes, Floats
from .trainable import TrainingBatch, weighted

WIDTH = 64
"""D of the authors' experiments, for all code lengths."""


def group_hard_triplets(
    z: Tensor, labels: Tensor, margin: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of anchors, positives and negatives, int64 [T] each, of vectors float [B, D] with
    multi-hot labels [B, C]: every ordered pair that shares a label takes a random one, if any, of
    the negatives that violate the margin: ||z_a - z_p||² - ||z_a - z_n||² + margin > 0.
    ``generator`` is on the CPU."""
    distance = torch.cdist(z.detach(), z.detach()).square()
    positive, negative = label_pairs(labels)
    a, p = positive.nonzero(as_tuple=True)
    hard = negative[a] & (distance[a, p][:, None] - distance[a] + margin > 0)
    draw = torch.rand(hard.shape, generator=generator).to(z.device)
    n = draw.masked_fill(~hard, -1).argmax(dim=1)
    exists = hard.any(dim=1)
    return a[exists], p[exists], n[exists]


def iterated_conditional_modes(x: Floats, C: Floats, sweeps: int = 10) -> NDArray[np.uint8]:
    """Codes uint8 [n, M] of vectors float32 [n, D] by codebooks float32 [M, K, D]: a local minimum
    of ||x - Σ_m C[m, b_m]||².

    Each b_m in turn is set to its best value with the others fixed. The first sweep starts from
    zero, which is residual quantisation; ``sweeps`` follow.
    """
    half = 0.5 * np.einsum("mkd,mkd->mk", C, C)
    codes = np.zeros((len(x), len(C)), np.uint8)
    total = np.zeros_like(x)  # of the chosen codewords
    for sweep in range(1 + sweeps):
        for m, words in enumerate(C):
            if sweep:
                total -= words[codes[:, m]]
            codes[:, m] = ((x - total) @ words.T - half[m]).argmax(axis=1)
            total += words[codes[:, m]]
    return codes


def update_codebooks(
    x: Floats, assignment: Codes, C: Floats, gamma: float, rounds: int = 3
) -> Floats:
    """Codebooks C float32 [M, K, D] refitted to vectors float32 [n, D] with fixed ``assignment``
    uint8 [n, M].

    Lowers (1/n) Σ_i ||x_i - Σ_m C[m, b_im]||² + γ Σ_{m≠m'} ||C_m C_m'ᵀ||², in ``rounds`` passes
    over the codebooks, each in closed form with the others fixed. An unused codeword goes to zero.
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
            # (n_k/n + 2γ S) c_k = Σ residual / n, S the scatter of all other codewords; both orders
            # of (m, m') count.
            other_codewords = np.delete(out, m, axis=0).reshape(-1, D)
            values, basis = np.linalg.eigh(other_codewords.T @ other_codewords)
            scale = counts[m][:, None] + 2 * gamma * np.maximum(values, 0)
            solved = (sums / n @ basis) / np.maximum(scale, 1e-12) @ basis.T
            out[m] = np.where((counts[m] > 0)[:, None], solved, 0.0)
            residual -= out[m, assignment[:, m]]
    return out.astype(np.float32)


class AdditiveCoder(Coder):
    """Items are sums of M full-width codewords, one of each codebook float32 [M, K, D], scored by
    inner product with the query."""

    name = "additive codes"

    def __init__(self, codebooks: Floats) -> None:
        self.codebooks = check_codebooks(codebooks, unit=False)
        self.M, self.K, self.width = self.codebooks.shape
        super().__init__(self.M * bits_per_code(self.K))

    def _encode(self, x: Floats) -> Codes:
        return pack_codes(iterated_conditional_modes(x, self.codebooks), self.K)

    def _tables(self, x: Floats) -> Floats:
        tables = np.asarray(x @ self.codebooks.reshape(-1, self.width).T)
        return tables.reshape(len(x), self.M, self.K)


class DTQ(Alternating):
    """See the module docstring. ``codes``: of the labelled items."""

    margin = 15.0
    """δ, for vectors in (-1, 1)^D."""
    weight = 0.1
    """λ of the quantisation loss."""
    orthogonality = 1e-4
    """γ of weak orthogonality."""

    def build(self) -> None:
        self.d = WIDTH
        super().build()

    def output_width(self) -> int:
        return WIDTH

    def fit_labels(
        self, reader: Reader, rows: NDArray[np.int64], y: Floats, unlabelled: NDArray[np.int64]
    ) -> None:
        super().fit_labels(reader, rows, y, unlabelled)
        self.codes = nn.Buffer(torch.zeros(len(rows), self.M, dtype=torch.uint8))

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        z = self.outputs(batch, amp)
        a, p, n = group_hard_triplets(z, batch.y, self.margin, batch.generator)
        parts = {"triplet": triplet_margin(z[a] - z[p], z[a] - z[n], self.margin)}
        if bool(self.fitted):
            codes = self.codes[batch.positions].long()
            sums = self.codewords[torch.arange(self.M, device=z.device), codes].sum(dim=1)
            parts["quantisation"] = (z - sums).square().sum(dim=1).mean()
        return weighted(parts, quantisation=self.weight)

    def refit(self, positions: Tensor, x: Floats) -> Floats:
        """Refit codes and codebooks in turns, and keep the codes."""
        C = self.codewords.cpu().numpy() if bool(self.fitted) else self._first_codebooks(x)
        for _ in range(3):
            C = update_codebooks(
                x, iterated_conditional_modes(x, C, sweeps=3), C, self.orthogonality
            )
        codes = iterated_conditional_modes(x, C, sweeps=3)
        self.codes[positions] = torch.from_numpy(codes).to(self.codes.device)
        return C

    def _first_codebooks(self, x: Floats) -> Floats:
        C = np.zeros((self.M, self.K, WIDTH), np.float32)
        residual = x.copy()
        for m in range(self.M):
            C[m] = fit_codebooks(residual, 1, self.K, seed=(self.seed + m) % (MAX_SEED + 1))[0]
            residual -= C[m, iterated_conditional_modes(residual, C[m : m + 1])[:, 0]]
        return C

    def coder(self) -> AdditiveCoder:
        return AdditiveCoder(self.codewords.cpu().numpy())
