"""Latest vectors of all labelled training items, for methods that refit codebooks between steps."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class TrainingVectors(nn.Module):
    """Latest network output for each labelled training item, at most one pass over the data old. Stored in buffers, so checkpoints
    include it.

    Args:
        width: D of the vectors.
    """

    rows: Tensor
    vectors: Tensor
    seen: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("rows", torch.empty(0, dtype=torch.int64))
        self.register_buffer("vectors", torch.empty(0, width))
        self.register_buffer("seen", torch.empty(0, dtype=torch.bool))

    def allocate(self, rows: NDArray[np.int64]) -> None:
        """Allocate memory for items ``rows`` int64 [n], ascending; none is seen yet."""
        device = self.vectors.device
        self.rows = torch.from_numpy(np.ascontiguousarray(rows)).to(device)
        self.vectors = torch.zeros(len(rows), self.width, device=device)
        self.seen = torch.zeros(len(rows), dtype=torch.bool, device=device)

    def __len__(self) -> int:
        return len(self.rows)

    def positions(self, rows: NDArray[np.int64]) -> Tensor:
        """Indices int64 [b] of items ``rows`` int64 [b] in the memory."""
        return torch.searchsorted(
            self.rows, torch.from_numpy(np.ascontiguousarray(rows)).to(self.rows.device)
        )

    @torch.no_grad()
    def keep(self, rows: NDArray[np.int64], vectors: Tensor) -> None:
        """Store ``vectors`` float [b, D] of the items ``rows`` int64 [b]; no-op before :meth:`allocate`."""
        if len(self):
            at = self.positions(rows)
            self.vectors[at] = vectors.detach().to(self.vectors.dtype)
            self.seen[at] = True

    def known(self) -> tuple[Tensor, Tensor]:
        """Indices int64 [n] of the items seen so far, and their vectors float32 [n, D]."""
        at = self.seen.nonzero()[:, 0]
        return at, self.vectors[at]
