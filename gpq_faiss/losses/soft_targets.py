"""Cross entropy with class probabilities in place of labels. Not in the paper."""

from __future__ import annotations

from torch import Tensor

from ..nn.quantizer import subspace_cosine
from .cosine import CosineLoss


class SubspaceSoftTargets(CosineLoss):
    """Mean over rows and sub-spaces of CE(p, softmax_c(β x_m·w_mc)): eq. 3 of the paper with class probabilities p as targets.

    Args:
        beta: scale β > 0 of the cosine; the paper's is 4.

    Raises:
        UsageError: β is not positive.
    """

    def __init__(self, beta: float = 4.0) -> None:
        super().__init__(beta)

    def forward(self, x: Tensor, W: Tensor, p: Tensor) -> Tensor:
        """The loss, a scalar; 0 if all rows are zero.

        Args:
            x: float [B, M, d], unit-norm sub-vectors.
            W: float [M, C, d], sub-prototypes (normalised here).
            p: float [B, C], rows that sum to 1; zero rows are ignored.
        """
        log_q = (self.beta * subspace_cosine(x, W)).log_softmax(dim=-1).mean(dim=1)
        known = (p > 0).any(dim=1).sum()
        return -(p.to(log_q.dtype) * log_q).sum() / known.clamp_min(1)
