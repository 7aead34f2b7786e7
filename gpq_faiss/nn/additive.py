"""Additive codes in the form of product codes. Not in the paper.

A product code chooses codewords per sub-vector. Here the M codewords of a code are chosen jointly,
so that their sum approximates a target vector t of E dimensions::

    t [B, E]  ─ beam search over S [M, K, E] ─►  codes [B, M],  Σ_m S[m, code_m] ≈ t

The inner product of a query u with that sum is Σ_m u·S[m, code_m], a sum over M tables, as in a
product quantiser. :func:`product_form` expresses the codewords of each codebook in a basis of their
span, and gives codewords and queries one additional coordinate each, which makes them unit-norm
without changing scores. So a plain inner-product ``IndexPQ`` can store such codes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BEAM = 8
"""Beam width: partial sums kept per vector."""


def assign(targets: Tensor, codewords: Tensor, beam: int = BEAM) -> Tensor:
    """Return codes int64 [B, M] whose sums of codewords [M, K, E] approximate the targets [B, E].

    The search keeps the best ``beam`` partial sums of each target.
    """
    residual = targets.unsqueeze(1)
    chosen = targets.new_zeros(targets.shape[0], 1, 0, dtype=torch.long)
    for m, words in enumerate(codewords):
        # |residual - codeword|² for every partial sum and codeword: float [B, beam, K].
        distance = (
            residual.square().sum(dim=2, keepdim=True)
            - 2 * residual @ words.T
            + words.square().sum(dim=1)
        )
        _, parent, word, chosen = _best(distance, chosen, beam if m < len(codewords) - 1 else 1)
        residual = residual.gather(1, parent.expand(-1, -1, residual.shape[2])) - words[word]
    return chosen[:, 0]


def assign_logits(targets: Tensor, codewords: Tensor, beam: int = BEAM) -> Tensor:
    """Return codes int64 [B, M] whose sums of codewords [M, K, C] are logits of the targets [B, C].

    The targets are probabilities, which softmax of the sum s approximates: a beam search minimises
    the cross entropy ``-Σ_c t_c log softmax_c(s)``.
    """
    B, C = targets.shape
    factors = codewords.exp()
    # softmax of the partial sums, and their cost so far: adding a codeword multiplies and
    # renormalises.
    posterior = targets.new_full((B, 1, C), 1.0 / C)
    cost = targets.new_zeros(B, 1)
    chosen = targets.new_zeros(B, 1, 0, dtype=torch.long)
    for m, words in enumerate(codewords):
        # The logarithm is that of the softmax's denominator.
        total = (
            cost.unsqueeze(2) - (targets @ words.T).unsqueeze(1) + (posterior @ factors[m].T).log()
        )
        cost, parent, word, chosen = _best(total, chosen, beam if m < len(codewords) - 1 else 1)
        posterior = posterior.gather(1, parent.expand(-1, -1, C)) * factors[m][word]
        posterior = posterior / posterior.sum(dim=2, keepdim=True)
    return chosen[:, 0]


def _best(cost: Tensor, chosen: Tensor, beam: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the ``beam`` extensions of partial sums that have the least ``cost`` [B, P, K].

    ``chosen`` [B, P, m] are the codewords of the partial sums.

    Returns:
        Of each extension its cost [B, beam], partial sum [B, beam, 1], codeword [B, beam], and all
            codewords [B, beam, m + 1].
    """
    K = cost.shape[2]
    least, best = cost.flatten(1).topk(min(beam, cost.shape[1] * K), dim=1, largest=False)
    parent, word = (best // K).unsqueeze(2), best % K
    extended = torch.cat(
        [chosen.gather(1, parent.expand(-1, -1, chosen.shape[2])), word.unsqueeze(2)], dim=2
    )
    return least, parent, word, extended


def product_form(codewords: Tensor, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return additive codewords as unit-norm codewords of a product quantiser.

    The form is exact if the K codewords of a codebook, or the targets, span at most d - 2
    dimensions; else codewords are projected onto the d - 2 main directions of their codebook.

    Args:
        codewords: float [M, K, E].
        d: dimensions of a sub-vector, at least 3.

    Returns:
        The projected codewords [M, K, E]; the basis [M, E, d - 2] of each codebook; and the
            unit-norm codewords [M, K, d].
    """
    M, _, E = codewords.shape
    inner = d - 2
    if inner >= E:
        basis = torch.eye(E, inner, device=codewords.device).expand(M, -1, -1).contiguous()
    else:
        # Rows of V beyond the rank are orthogonal directions with weight 0.
        directions = torch.linalg.svd(codewords.double(), full_matrices=True).Vh[:, :inner]
        basis = directions.transpose(1, 2).to(codewords.dtype).contiguous()
    coordinates = codewords @ basis
    # One scale for all codebooks, as their tables are added.
    inside = coordinates / coordinates.norm(dim=2).max().clamp_min(1e-12)
    pq_codewords = torch.cat([inside, missing(inside), torch.zeros_like(inside[..., :1])], dim=2)
    return coordinates @ basis.transpose(1, 2), basis, functional.normalize(pq_codewords, dim=2)


def query_form(queries: Tensor, basis: Tensor) -> Tensor:
    """Return queries float [B, E] of norm at most 1 as unit-norm sub-vectors [B, M, d].

    They match the codewords of :func:`product_form`.
    """
    inside = torch.einsum("be,mei->bmi", queries, basis)
    return torch.cat([inside, torch.zeros_like(inside[..., :1]), missing(inside)], dim=2)


def missing(inside: Tensor) -> Tensor:
    """Return the coordinate [..., 1] that makes vectors of norm at most 1 unit-norm."""
    return (1 - inside.square().sum(dim=-1, keepdim=True)).clamp_min(0).sqrt()
