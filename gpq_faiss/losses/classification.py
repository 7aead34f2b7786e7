"""Losses of the cosine classifiers of the sub-spaces: classification (eq. 3) and entropy (eq. 4).

Both take unit-norm sub-vectors x float [B, M, d], sub-prototypes W float [M, C, d] and the scale β
> 0 of the cosine (the paper's is 4), in two variants, as the paper and its authors' code differ.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ..nn.quantizer import subspace_cosine

Variant = Literal["paper", "code"]


def cross_entropy(log_p: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of log-probabilities and targets, float [B, C], a scalar.

    It is the mean over the rows of ``targets`` that sum to 1; rows of zeros, of items of unknown
    class, are ignored.
    """
    labelled_rows = (targets > 0).any(dim=1).sum()
    return -(targets * log_p).sum() / labelled_rows.clamp_min(1)


def shares(labels: Tensor) -> Tensor:
    """Divide each row of multi-hot labels, float [B, C], by its sum: labels have equal shares."""
    return labels / labels.sum(dim=1, keepdim=True)


def subspace_classification(
    x: Tensor, W: Tensor, p: Tensor, beta: float = 4.0, variant: Variant = "paper"
) -> Tensor:
    """Return the cross entropy of the classifiers, a scalar.

    Targets p float [B, C] are :func:`shares` of labels (eq. 3).

    * ``"paper"``: the M classifiers are trained independently: mean over m of CE(softmax_c(β
      x_m·w_mc)).
    * ``"code"``: both factors are scaled, hence β², and the classifiers are averaged:
      CE(softmax_c(mean_m β² x_m·w_mc)).
    """
    cosine = subspace_cosine(x, W)
    log_p = (
        (beta**2 * cosine).mean(dim=1).log_softmax(dim=-1)
        if variant == "code"
        else (beta * cosine).log_softmax(dim=-1).mean(dim=1)
    )
    return cross_entropy(log_p, p)


def subspace_entropy(x: Tensor, W: Tensor, beta: float = 4.0, variant: Variant = "paper") -> Tensor:
    """Return the mean entropy of the classifiers over rows, a scalar.

    It lies between 0 (certain) and log C (uniform). Labels are not used. The sub-prototypes
    maximise it and the network minimises it: subtract λ2 times it from the total loss, computed on
    sub-vectors that went through :func:`~gpq_faiss.nn.quantizer.reverse_gradient` *before*
    intra-normalisation.

    * ``"paper"``: softmax_c(β x_m·w_mc), the mean over the M sub-spaces of their entropies.
    * ``"code"``: softmax_c(mean_m β² x_m·w_mc), one entropy per row.
    """
    cosine = subspace_cosine(x, W)
    if variant == "code":
        cosine = beta * cosine.mean(dim=1, keepdim=True)
    log_p = (beta * cosine).log_softmax(dim=-1)
    return -(log_p.exp() * log_p).sum() / (log_p.shape[0] * log_p.shape[1])
