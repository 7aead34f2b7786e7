"""The sub-space entropy, the adversarial term for unlabelled data (eq. 4)."""

from __future__ import annotations

from torch import Tensor

from ..nn.quantizer import subspace_cosine
from .cosine import CosineLoss


class SubspaceEntropy(CosineLoss):
    """Mean entropy of softmax_c(β x_m·w_mc) over rows and sub-spaces: 0 (certain) to log C (uniform).

    The sub-prototypes maximise it and the network minimises it: pass sub-vectors that went through
    :class:`~gpq_faiss.nn.quantizer.GradientReversal` *before* intra-normalisation, and subtract λ2 times this
    value from the total loss. Labels are never looked at.

    Args:
        beta: scale β > 0 of the cosine; the paper's is 4.

    Raises:
        UsageError: β is not positive.
    """

    def __init__(self, beta: float = 4.0) -> None:
        super().__init__(beta)

    def forward(self, x: Tensor, W: Tensor) -> Tensor:
        """The mean entropy, a scalar >= 0 (0 for an empty batch).

        Args:
            x: float [B, M, d], unit-norm sub-vectors of unlabelled rows.
            W: float [M, C, d], sub-prototypes (normalised here).
        """
        log_p = (self.beta * subspace_cosine(x, W)).log_softmax(dim=-1)
        return -(log_p.exp() * log_p).sum() / max(x.shape[0] * x.shape[1], 1)
