"""The cosine classification loss of the sub-spaces (eq. 3), with labels or with class probabilities as targets."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from ..nn.quantizer import subspace_cosine
from .npair import multihot


def cross_entropy(log_p: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of float [B, C], a scalar: the mean over rows of ``targets`` that sum to 1; zero rows are ignored."""
    known = (targets > 0).any(dim=1).sum()
    return -(targets * log_p).sum() / known.clamp_min(1)


def shares(labels: Tensor, like: Tensor) -> Tensor:
    """Multi-hot labels [B, C] of any dtype, each row divided by its sum, with dtype and device of ``like``; zero rows stay zero."""
    y = multihot(labels, like)
    return y / y.sum(dim=1, keepdim=True).clamp_min(1)


class SubspaceSoftTargets(nn.Module):
    """Cross entropy of cosine classifiers in the M sub-spaces with class probabilities.

    Two variants, as the paper and its authors' code differ:

    * ``"paper"``: the M classifiers are trained independently: mean over m of CE(softmax_c(β x_m·w_mc)).
    * ``"code"``: both factors are scaled, hence β², and the classifiers are averaged: CE(softmax_c(mean_m β² x_m·w_mc)).

    Args:
        beta: scale β > 0 of the cosine; the paper's is 4.
        variant: ``"paper"`` or ``"code"``.
    """

    def __init__(self, beta: float = 4.0, variant: Literal["paper", "code"] = "paper") -> None:
        super().__init__()
        self.beta = beta
        self.variant = variant

    def log_p(self, x: Tensor, W: Tensor) -> Tensor:
        """Logarithms of class probabilities, float [B, C]; in the paper's variant their mean over the sub-spaces."""
        cosine = subspace_cosine(x, W)
        if self.variant == "paper":
            return (self.beta * cosine).log_softmax(dim=-1).mean(dim=1)
        return (self.beta**2 * cosine).mean(dim=1).log_softmax(dim=-1)

    def forward(self, x: Tensor, W: Tensor, p: Tensor) -> Tensor:
        """The loss of unit-norm sub-vectors float [B, M, d] by sub-prototypes float [M, C, d], with rows of p float [B, C] that sum to 1
        (zero rows are ignored)."""
        log_p = self.log_p(x, W)
        return cross_entropy(log_p, p.to(log_p.dtype))


class SubspaceClassification(SubspaceSoftTargets):
    """The same with labels (eq. 3): multi-hot [B, C], any dtype; the targets are their equal shares, zero rows are unlabelled."""

    def forward(self, x: Tensor, W: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar; 0 without labels."""
        return super().forward(x, W, shares(labels, x))
