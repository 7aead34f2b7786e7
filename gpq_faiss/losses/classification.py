"""The cosine classification loss of the sub-spaces (eq. 3)."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from ..errors import UsageError
from ..nn.quantizer import subspace_cosine
from .cosine import CosineLoss
from .npair import multihot

Variant = Literal["paper", "code"]


class SubspaceClassification(CosineLoss):
    """Cross entropy of cosine classifiers in the M sub-spaces, for labelled rows (eq. 3).

    Two variants, as the paper and its authors' code differ:

    * ``"paper"``: the M classifiers are trained independently: mean over m of CE(softmax_c(β x_m·w_mc)).
    * ``"code"``: both factors are scaled, hence β², and the classifiers are averaged: CE(softmax_c(mean_m β²
      x_m·w_mc)).

    Targets are the multi-hot rows divided by their sum. Unlabelled rows are ignored; a batch without labels has
    loss 0.

    Args:
        variant: ``"paper"`` or ``"code"``.
        beta: scale β > 0 of the cosine; the paper's is 4.

    Raises:
        UsageError: unknown variant, or β not positive.
    """

    def __init__(self, variant: Variant = "paper", beta: float = 4.0) -> None:
        super().__init__(beta)
        if variant not in get_args(Variant):
            raise UsageError(
                f"classification variant {variant!r} is not one of {', '.join(get_args(Variant))}"
            )
        self.variant = variant

    def forward(self, x: Tensor, W: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar.

        Args:
            x: float [B, M, d], unit-norm sub-vectors.
            W: float [M, C, d], sub-prototypes (normalised here).
            labels: multi-hot [B, C], any dtype; a zero row is unlabelled.
        """
        cosine = subspace_cosine(x, W)
        if self.variant == "paper":
            log_p = (self.beta * cosine).log_softmax(dim=-1).mean(dim=1)
        else:
            log_p = (self.beta**2 * cosine).mean(dim=1).log_softmax(dim=-1)
        y = multihot(labels, log_p)
        count = y.sum(dim=1, keepdim=True)
        return -(y / count.clamp_min(1) * log_p).sum() / (count > 0).sum().clamp_min(1)
