"""Re-score Faiss' shortlist on a device: exact results, and for which queries they are proven.

If the k-th exact score exceeds everything that Faiss left out by more than the maximum difference
of two float32 evaluations of a score, the result is proven.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .scan import Scan
from .tensors import EMPTY_KEY, best_of, keys_of, split_keys

SPARE = 32
"""Minimum number of candidates beyond k."""
_UNIT = 2.0**-23  # twice the relative error of one float32 operation
_TINY = 2.0**-126


def decide(
    scan: Scan, queries: Tensor, tables: Tensor, found: tuple[Tensor, Tensor], k: int, held: Tensor
) -> tuple[Tensor, Tensor]:
    """The best of the shortlist.

    Args:
        scan: the codes.
        queries: float32 [q, M*d]. tables: their :meth:`.scan.Scan.tables`.
        found: Faiss' scores float32 and positions int64 (-1: none), both [q, c].
        held: int64 [q], number of codes Faiss searched.

    Returns:
        int64 keys [q, k], descending, padded with empty keys; bool [q], whether they are proven.
    """
    approximate, positions = found
    there = positions >= 0
    exact = scan.exact_scores(tables, positions.clamp_min(0))
    best = best_of(torch.where(there, keys_of(exact, positions), EMPTY_KEY), k)
    if best.shape[1] < k:
        more = best.new_full((len(best), k - best.shape[1]), EMPTY_KEY)
        best = torch.cat([best, more], dim=1)
    slack = _rounding(scan, queries)
    # Faiss' scores are checked against exact ones: if they differ too much, nothing is proven.
    near = (approximate - exact).abs() <= slack[:, None]
    proven = (near | ~there).all(dim=1) & (there.sum(dim=1) == held.clamp_max(there.shape[1]))
    least = torch.where(there, approximate, torch.inf).amin(dim=1)
    proven &= (held <= there.shape[1]) | (split_keys(best[:, -1])[0] > least + slack)
    return best, proven


def _rounding(scan: Scan, queries: Tensor) -> Tensor:
    """Maximum difference of two float32 evaluations of a score: float32 [q].

    Both add 2d + M products in some order; with unit-norm codewords each is within (2d + M + 2) u of the true value
    times sum_m |q_m| (Higham 2002, section 3.1, with Cauchy-Schwarz a sub-space).
    """
    M, d = scan.M, scan.d
    norms = torch.linalg.vector_norm(queries.double().reshape(-1, M, d), dim=2).sum(dim=1)
    # rounded upwards
    slack: Tensor = (1.01 * (2 * d + M + 2) * (_UNIT * norms + 2 * M * d * _TINY) * (1 + _UNIT)).float()
    return slack
