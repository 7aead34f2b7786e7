"""The quantiser of GPQ: intra-normalisation, soft assignment (eq. 1), codebooks and z'.

Shapes, with D = M * d::

    x  [B, M, d]   sub-vectors of the network's output, unit-norm in the last axis
    Z  [M, K, d]   codewords, K of them in each of the M codebooks
    W  [M, C, d]   sub-prototypes, one per class and sub-space

All functions normalise codewords and sub-prototypes, so raw parameters may be passed; ``x`` is not
normalised. Everything computes in float32 at least, outside the backbone's bf16 region: a soft
assignment with α = 20 on cosines of eight bits would choose other codewords.

Paper: Jang and Cho, "Generalized Product Quantization Network for Semi-supervised Image Retrieval",
CVPR 2020.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-6
"""Sub-vectors shorter than this have no meaningful direction.

They are divided by it instead of by their norm, which bounds the gradient.
"""


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` itself if float32 or float64, else (float16, bfloat16) its float32 copy."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def unit(x: Tensor) -> Tensor:
    """Normalise the last axis to length one, in float32 at least."""
    return F.normalize(at_least_float32(x), dim=-1, eps=NORM_EPS)


def intra_normalize(x: Tensor, M: int) -> Tensor:
    """Split float [B, M * d] in M sub-vectors and normalise each to length one: [B, M, d].

    This is section 3.1 of the paper. A zero sub-vector has no direction: it stays (nearly) zero and
    gets a bounded gradient. The encoding stage must reject such rows (:func:`zero_subvectors`).
    """
    return unit(torch.unflatten(x, 1, (M, -1)))


def zero_subvectors(x: Tensor, M: int) -> Tensor:
    """Return which sub-vectors of float [B, M * d] have no direction, bool [B, M].

    Before normalisation, they are not finite, or no longer than :data:`NORM_EPS`.
    """
    norm: Tensor = torch.linalg.vector_norm(
        at_least_float32(torch.unflatten(x, 1, (M, -1))), dim=-1
    )
    return ~((norm > NORM_EPS) & torch.isfinite(norm))


def subspace_cosine(x: Tensor, W: Tensor) -> Tensor:
    """Return inner products of sub-vectors with the vectors of their sub-space, float [B, M, C].

    The vectors W [M, C, d] are normalised, the sub-vectors x [B, M, d] are not.
    """
    return torch.einsum("bmd,mcd->bmc", at_least_float32(x), unit(W))


def soft_assign(x: Tensor, Z: Tensor, alpha: float) -> Tensor:
    """Return the soft assignment s(x; α, Z) of eq. 1, float [B, M, d], of unit-norm x [B, M, d].

    It is the mean of the codewords Z [M, K, d] weighted by softmax_k(+α x_m·z_mk), normalised
    again. The paper prints a minus sign in the exponent, which would prefer the farthest codeword;
    its authors' code uses -α(1 - x·z), as here. As α grows (the paper's is 20) this becomes the
    hard assignment.
    """
    weight = (alpha * subspace_cosine(x, Z)).softmax(dim=-1)
    return unit(torch.einsum("bmk,mkd->bmd", weight, unit(Z)))


def reexpress(Z: Tensor, W: Tensor, alpha: float) -> Tensor:
    """Return z' = s(z; α, W), codewords re-expressed over the sub-prototypes of their sub-space.

    Codewords are float [M, K, d], sub-prototypes [M, C, d]; the result is unit-norm. These are the
    codebooks of GPQ in training, encoding, search and export: the raw codewords rank far worse.
    """
    return soft_assign(unit(Z).transpose(0, 1), W, alpha).transpose(0, 1)


def reverse_gradient(x: Tensor) -> Tensor:
    """Return ``x`` with a negated gradient (Ganin and Lempitsky 2015)."""
    return 2 * x.detach() - x  # exact: doubling is


def random_directions(M: int, n: int, d: int, generator: torch.Generator) -> nn.Parameter:
    """Return a trainable parameter, float32 [M, n, d], of n random directions in each sub-space.

    Codewords Z and sub-prototypes W, the weights of a cosine classifier in each sub-space, start
    from them. In training their lengths change, which nothing depends on.
    """
    return nn.Parameter(unit(torch.randn(M, n, d, generator=generator)))
