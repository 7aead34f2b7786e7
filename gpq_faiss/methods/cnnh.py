"""Convolutional network hashing (Xia, Pan, Lai, Liu and Yan, "Supervised Hashing for Image Retrieval via Image Representation
Learning", AAAI 2014): codes first, then a network that predicts them.

*Stage 1.* S_ij is 1 for labelled items that share a label and -1 for others. Codes H of all labelled items approximate it:

    min over H   ||S - H Hᵀ / q||²_F,      H in [-1, 1]^(n x q),  q bits,

by coordinate descent from a random H: five passes over all entries in random order, with Newton's step on f = ||H Hᵀ - q S||²,

    d = -f' / f'',  clipped so that it stays in [-1, 1],   f' = 4 (L H)_ij,   f'' = 4 (H_·jᵀ H_·j + H_ij² + L_ii),   L = H Hᵀ - q S,

and finally H is replaced by its signs. The paper keeps the n x n matrix L. Here items with equal labels share a row of S, and
(L H)_ij = h_i·(Hᵀ H_·j) - q Σ_k S_ik H_kj is kept up to date from q + U numbers, for U distinct sets of labels: memory is n q + U².

*Stage 2.* The network's q tanh outputs are regressed on H (mean squared error). CNNH+ (``plus=True``) adds an output per class,
trained with cross entropy. Tables of later papers list CNNH, so that is the default. A bit is the sign of an output. Supervised:
unlabelled items are not used.

Deviations: the shared backbone replaces the paper's; columns are visited in random order, and the items within each, so that terms per
column are computed once.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..config import Config
from ..data.base import Dataset
from ..data.reader import Reader
from ..errors import DataError, UsageError
from ..losses.npair import multihot
from ..nn.model import build_extractor, input_description
from .coders import SignCoder
from .trainable import TrainableMethod, TrainingBatch

_STAGE_1 = 1  # stream of random numbers


class Similarities:
    """The similarity matrix S of labelled items, one row per distinct label set.

    Args:
        y: multi-hot [n, C].

    Attributes:
        group: int64 [n], label set of each item.
        S: int8 [U, U], 1 where two sets share a label, else -1.
    """

    def __init__(self, y: NDArray[np.float32]) -> None:
        sets, group = np.unique(y > 0, axis=0, return_inverse=True)
        self.group: NDArray[np.int64] = group.reshape(-1).astype(np.int64)
        shared = sets.astype(np.float32) @ sets.T.astype(np.float32) > 0
        self.S: NDArray[np.int8] = np.where(shared, 1, -1).astype(np.int8)

    def times(self, H: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows of S H for each set of labels, float64 [U, q], of H [n, q]."""
        sums = np.zeros((len(self.S), H.shape[1]))
        np.add.at(sums, self.group, H)
        return self.S @ sums

    def objective(self, H: NDArray[np.float64]) -> float:
        """||S - H Hᵀ / q||²_F, divided by n²."""
        n, q = H.shape
        members = np.bincount(self.group, minlength=len(self.S)).astype(np.float64)
        # ||S||² = n², as its entries are ±1.
        cross = float(np.sum(self.times(H)[self.group] * H))
        gram = H.T @ H
        return float((members.sum() ** 2 - 2 * cross / q + np.sum(gram * gram) / q**2) / n**2)


def descend(
    similar: Similarities, H: NDArray[np.float64], sweeps: int, rng: np.random.Generator
) -> list[float]:
    """Coordinate descent on H [n, q], in place; returns the objective after each sweep."""
    n, q = H.shape
    group, S = similar.group.tolist(), similar.S
    norms = np.einsum("nq,nq->n", H, H).tolist()
    objectives = []
    for _ in range(sweeps):
        for j in rng.permutation(q).tolist():
            inner = H.T @ H[:, j]  # Hᵀ H_·j
            pulled = similar.times(H[:, j : j + 1])[:, 0] * q  # q S H_·j, one number per label set
            for i in rng.permutation(n).tolist():
                h, u = H[i], group[i]
                old = float(h[j])
                slope = float(h @ inner) - float(pulled[u])
                if (slope >= 0 and old <= -1) or (slope <= 0 and old >= 1):
                    continue  # at the border of [-1, 1], pointing outwards
                curve = float(inner[j]) + old * old + norms[i] - q
                new = old - slope / curve if curve > 0 else (-1.0 if slope > 0 else 1.0)
                new = min(1.0, max(-1.0, new))
                d = new - old
                inner += d * h
                inner[j] += d * new
                pulled += (q * d) * S[u]
                norms[i] += new * new - old * old
                h[j] = new
        objectives.append(similar.objective(H))
    return objectives


def factorise(y: NDArray[np.float32], bits: int, *, sweeps: int = 5, seed: int = 0) -> NDArray[np.int8]:
    """Stage 1: codes ±1, int8 [n, bits], of items with multi-hot labels [n, C], after ``sweeps`` passes over all entries."""
    rng = np.random.default_rng([seed, _STAGE_1])
    H = rng.uniform(-1, 1, (len(y), bits))
    descend(Similarities(y), H, sweeps, rng)
    return np.where(H > 0, 1, -1).astype(np.int8)


class CNNH(TrainableMethod):
    """Codes by matrix factorisation and a network regressed on them.

    Args:
        config: of the run; ``config.quantizer.bits`` is the length of the code.
        input_: description of the items, see :func:`~gpq_faiss.nn.model.input_description`.
        n_classes: C.
        plus: CNNH+: also learn the classes.
        sweeps: passes of stage 1 over all entries of H.

    Raises:
        UsageError: ``sweeps`` below 1.
    """

    name = "cnnh"
    uses_unlabelled = False

    targets: Tensor

    def __init__(
        self,
        config: Config,
        input_: dict[str, object],
        n_classes: int,
        *,
        plus: bool = False,
        sweeps: int = 5,
    ) -> None:
        super().__init__()
        if sweeps < 1:
            raise UsageError(f"{self.name}: {sweeps} sweeps: at least 1 is needed")
        self.bits = config.quantizer.bits
        self.sweeps = sweeps
        self.plus = plus
        self.seed = config.training.seed
        generator = torch.Generator().manual_seed(self.seed)
        width = self.bits + (n_classes if plus else 0)
        self.network = _Network(build_extractor(config, input_, width, generator), self.bits)
        # Not in a checkpoint: a resumed run computes the same codes again.
        self.register_buffer("targets", torch.empty(0, self.bits), persistent=False)
        self._rows = np.empty(0, np.int64)

    def fit_labels(self, reader: Reader, rows: NDArray[np.int64], y: NDArray[np.float32]) -> None:
        """Stage 1, for all labelled training items."""
        del reader
        codes = factorise(y, self.bits, sweeps=self.sweeps, seed=self.seed)
        self._rows = rows
        self.targets = torch.from_numpy(codes).float()

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """Mean squared error of the codes, and for CNNH+ the cross entropy of the classes."""
        at = np.searchsorted(self._rows, batch.rows)
        if not len(self._rows) or (at >= len(self._rows)).any() or (self._rows[at] != batch.rows).any():
            raise DataError(
                f"{self.name}: a batch has items that stage 1 has not seen: call fit_labels first"
            )
        target = self.targets[torch.from_numpy(at).to(self.targets.device)]
        x = batch.x[: len(batch.y)]
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
            out = self.network.backbone(x)
        out = out.float()
        regression = (out[:, : self.bits].tanh() - target).square().mean()
        if not self.plus:
            return {"total": regression}
        y = multihot(batch.y, out)
        y = y / y.sum(dim=1, keepdim=True).clamp_min(1)
        classes = -(y * out[:, self.bits :].log_softmax(dim=1)).sum(dim=1).mean()
        return {"total": regression + classes, "regression": regression, "classes": classes}

    def exported(self) -> nn.Module:
        """The network up to its q outputs."""
        return self.network

    def coder(self) -> SignCoder:
        """A bit is 1 if its output is above 0."""
        return SignCoder(self.bits)


class _Network(nn.Module):
    """From input to one output per bit, float [B, bits]."""

    def __init__(self, backbone: nn.Module, bits: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.backbone(x))[:, : self.bits]


def build(config: Config, dataset: Dataset, image_size: int, n_classes: int) -> CNNH:
    """An untrained CNNH for ``dataset``."""
    return CNNH(config, input_description(dataset, image_size), n_classes)
