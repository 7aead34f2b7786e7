"""The sub-space entropy, the adversarial term for unlabelled data (eq. 4)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from ..nn.quantizer import subspace_cosine


class SubspaceEntropy(nn.Module):
    """Mean entropy of the cosine classifiers over rows: 0 (certain) to log C (uniform).

    The sub-prototypes maximise it and the network minimises it: pass sub-vectors that went through
    :func:`~gpq_faiss.nn.quantizer.reverse_gradient` *before* intra-normalisation, and subtract λ2 times this
    value from the total loss. Labels are not used.

    Args:
        beta: scale β > 0 of the cosine; the paper's is 4.
        variant: ``"paper"``: softmax_c(β x_m·w_mc), the mean over the M sub-spaces of their entropies; ``"code"``, the authors':
            softmax_c(mean_m β² x_m·w_mc), one entropy per row.
    """

    def __init__(self, beta: float = 4.0, variant: Literal["paper", "code"] = "paper") -> None:
        super().__init__()
        self.beta = beta
        self.variant = variant

    def forward(self, x: Tensor, W: Tensor) -> Tensor:
        """The mean entropy of unit-norm sub-vectors float [B, M, d] by sub-prototypes float [M, C, d], a scalar >= 0 (0 for no rows)."""
        cosine = subspace_cosine(x, W)
        if self.variant == "code":
            cosine = self.beta * cosine.mean(dim=1, keepdim=True)
        log_p = (self.beta * cosine).log_softmax(dim=-1)
        return -(log_p.exp() * log_p).sum() / max(log_p.shape[0] * log_p.shape[1], 1)
