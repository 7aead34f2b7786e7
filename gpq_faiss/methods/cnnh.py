"""Convolutional network hashing (Xia, Pan, Lai, Liu and Yan, "Supervised Hashing for Image
Retrieval via Image Representation Learning", AAAI 2014): codes first, then a network that predicts
them.

*Stage 1.* S_ij is 1 for labelled items that share a label and -1 for others. Codes H of all
labelled items approximate it:

    min over H   ||S - H Hᵀ / q||²_F,      H in [-1, 1]^(n x q),  q bits,

by coordinate descent from a random H: five passes over all entries in random order, with Newton's
step on f = ||H Hᵀ - q S||²,

    d = -f' / f'',  clipped so that H stays in [-1, 1],     L = H Hᵀ - q S,
    f' = 4 (L H)_ij,     f'' = 4 (H_·jᵀ H_·j + H_ij² + L_ii),

and finally H is replaced by its signs. Where the paper keeps the n x n matrix L, items with equal
labels share a row of S here, and (L H)_ij = h_i·(Hᵀ H_·j) - q Σ_k S_ik H_kj is kept up to date from
q + U numbers, for U distinct sets of labels.

*Stage 2.* The network's q tanh outputs are regressed on H (mean squared error); a bit is the sign
of an output. Supervised. Deviations: the shared backbone replaces the paper's; columns are visited
in random order, and the items within each.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.base import Reader
from .baseline import Baseline
from .trainable import TrainingBatch


def descend(
    y: NDArray[np.float32], H: NDArray[np.float64], sweeps: int, rng: np.random.Generator
) -> None:
    """Lower ``||S - H Hᵀ / q||²`` by coordinate descent on H [n, q], in place, in ``sweeps`` passes
    over all entries, for multi-hot labels y [n, C]."""
    n, q = H.shape
    sets, inverse = np.unique(y > 0, axis=0, return_inverse=True)
    # A row and a column per set of labels.
    S = np.where(sets.astype(np.float32) @ sets.T > 0, 1, -1).astype(np.int8)
    set_of_item = inverse.reshape(-1)
    norms = np.einsum("nq,nq->n", H, H).tolist()
    for _ in range(sweeps):
        for j in rng.permutation(q).tolist():
            inner = H.T @ H[:, j]  # Hᵀ H_·j
            # q S H_·j, one number per set of labels.
            pull = S @ np.bincount(set_of_item, weights=H[:, j]) * q
            for i in rng.permutation(n).tolist():
                h, u = H[i], set_of_item[i]
                old = float(h[j])
                slope = float(h @ inner) - float(pull[u])
                if (slope >= 0 and old <= -1) or (slope <= 0 and old >= 1):
                    continue  # at the border of [-1, 1], pointing outwards
                curve = float(inner[j]) + old * old + norms[i] - q
                if curve > 0:
                    new = min(1.0, max(-1.0, old - slope / curve))
                else:  # f has no minimum along this entry: go downhill to the border
                    new = -1.0 if slope > 0 else 1.0
                d = new - old
                inner += d * h
                inner[j] += d * new
                pull += (q * d) * S[u]
                norms[i] += new * new - old * old
                h[j] = new


def factorise(y: NDArray[np.float32], bits: int, *, seed: int = 0) -> NDArray[np.int8]:
    """Stage 1: codes ±1, int8 [n, bits], of items with multi-hot labels [n, C], after five passes
    over all entries."""
    rng = np.random.default_rng([seed, 1])
    H = rng.uniform(-1, 1, (len(y), bits))
    descend(y, H, 5, rng)
    return np.where(H > 0, 1, -1).astype(np.int8)


class CNNH(Baseline):
    """Codes by matrix factorisation and a network regressed on them. A bit is 1 if its output is
    above 0."""

    def fit_labels(
        self,
        reader: Reader,
        rows: NDArray[np.int64],
        y: NDArray[np.float32],
        unlabelled: NDArray[np.int64],
    ) -> None:
        # Not in a checkpoint: a resumed run computes the same codes again.
        self.targets: Tensor = nn.Buffer(
            torch.from_numpy(factorise(y, self.bits, seed=self.seed)).float(), persistent=False
        )

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        errors = self.raw(batch, amp).tanh() - self.targets[batch.positions]
        return {"total": errors.square().mean()}
