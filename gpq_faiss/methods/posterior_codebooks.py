"""Codebooks for class posteriors: codes and score tables of two kinds.

*Sums of probabilities*, for few classes, at most twice as many as a codebook has codewords: M codewords add up to the tempered
posterior (least squares, :mod:`.codewords`), and the score is Σ_m p_q·S_m.

*Sums of logits*, for more classes: codewords add up to logits (codes by the least cross entropy), so that they multiply probabilities, as
the digits of an error-correcting code do. Their score tables are then fitted to the codes by the N-pair loss of the paper (eq. 2) with
soft targets: pairs of items are similar with the probability p_i·p_j.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..losses.npair import soft_npair_of_posteriors
from ..nn.additive import assign, assign_logits
from .codewords import PLACE, STARTS, check_targets, fit_codewords
from .pq import kmeans

_ROUNDS = 10
"""Alternations of codes and codewords."""
_ITEMS = 10_000
"""Items for fitting logit codewords and tables."""
_WEIGHT_QUERIES, _WEIGHT_ITEMS = 500, 5000
"""Items for weighting class and features."""
_FLOOR = 1e-3
"""Added to probabilities before taking logarithms for the initial codewords."""
_LOGIT_STEPS, _LOGIT_RATE, _LOGIT_RIDGE = 30, 0.05, 1e-4
_TABLE_STEPS, _TABLE_RATE, _TABLE_BATCH = 300, 0.02, 1000
_LIMIT = 20.0
"""Limit of logits: exponentials of larger sums could overflow."""
_NUMBERS = 1 << 24
"""Bytes of temporary arrays."""


@dataclass(frozen=True)
class ClassCodebooks:
    """Codebooks of the class part of a code.

    Attributes:
        by_logits: whether codes are chosen by ``logits`` (cross entropy) or by ``tables`` (least squares).
        logits: float32 [A, K, C].
        tables: float32 [A, K, C], score tables for query posteriors.
    """

    by_logits: bool
    logits: Tensor
    tables: Tensor

    def assign(self, tempered: Tensor) -> Tensor:
        """Codes int64 [n, A] of tempered posteriors float [n, C]."""
        return torch.cat([self._assign(block) for block in _blocks(tempered)])

    def _assign(self, tempered: Tensor) -> Tensor:
        return assign_logits(tempered, self.logits) if self.by_logits else assign(tempered, self.tables)

    def scores(self, posterior: Tensor, codes: Tensor) -> Tensor:
        """Scores float [Q, n] of codes int64 [n, A] for posteriors float [Q, C]."""
        return posterior @ _add_codewords(self.tables, codes).T


def are_few(classes: int, K: int) -> bool:
    """Whether a codebook of K codewords has one for at least every second class. With 20 classes both kinds of codes rank alike, with
    50 and 12 bits sums of logits have 0.75 mAP, sums of probabilities 0.62 (Omniglot features)."""
    return classes <= 2 * K


def fit_class_codebooks(posterior: Tensor, tempered: Tensor, A: int, K: int, *, seed: int) -> ClassCodebooks:
    """Codebooks for class probabilities; their kind depends on the number of classes.

    Args:
        posterior: float [n, C], of unlabelled items.
        tempered: float [n, C], tempered posteriors of the same items, which are coded.
        A: codebooks.
        K: codewords per codebook.
        seed: random seed.

    Raises:
        DataError: fewer items than codewords, or probabilities that are not finite.
    """
    p, t = posterior.float().cpu(), tempered.float().cpu()
    if are_few(p.shape[1], K):
        words = fit_codewords(t, A, K, seed=seed)
        return ClassCodebooks(False, words, words)
    check_targets(t, K)
    every = -(-len(p) // _ITEMS)
    p, t = p[::every], t[::every]
    logits = fit_logit_codewords(t, A, K, seed=seed)
    kind = ClassCodebooks(True, logits, logits)
    return dataclasses.replace(kind, tables=fit_tables(p, kind.assign(t), logits, seed=seed))


def weights_of_parts(
    found: ClassCodebooks,
    feature_codewords: Tensor,
    posterior: Tensor,
    tempered: Tensor,
    residual: Tensor,
    feature_weight: float,
) -> Tensor:
    """Weights float [2] of the class and feature parts of a query, normalised by the standard deviation of their scores.

    Args:
        found: the class codebooks.
        feature_codewords: float [L, K, E], L may be 0.
        posterior, tempered: float [n, C], of unlabelled items.
        residual: float [n, E], of the same items.
        feature_weight: weight of the feature similarity, from 0 to 1; the class has the rest.
    """
    if not len(feature_codewords):
        return torch.tensor([1.0, 0.0])
    queries, items = slice(0, _WEIGHT_QUERIES), slice(0, _WEIGHT_ITEMS)
    own = found.scores(posterior[queries], found.assign(tempered[items])).std()
    codes = assign(residual[items], feature_codewords)
    likeness = residual[queries] @ feature_codewords[torch.arange(len(feature_codewords)), codes].sum(dim=1).T
    # The network normalises codewords by the longest of their part.
    scale = [float(c.norm(dim=2).max()) for c in (found.tables, feature_codewords)]
    w = feature_weight
    return torch.tensor(
        [(1 - w) * scale[0] / max(float(own), 1e-12), w * scale[1] / max(float(likeness.std()), 1e-12)]
    )


def fit_logit_codewords(targets: Tensor, M: int, K: int, *, seed: int) -> Tensor:
    """Codewords float32 [M, K, C] whose sums are logits of nearly the target probabilities float [n, C].

    Codes (:func:`.additive.assign_logits`) and codewords (cross entropy, Adam) are updated alternately.
    """
    logits = (targets + _FLOOR).log()
    logits = logits - logits.mean(dim=1, keepdim=True)
    scales = PLACE ** torch.arange(M, dtype=torch.float32)
    start = torch.from_numpy(kmeans(logits.numpy(), K, seed, nredo=STARTS))
    codewords = (scales / scales.sum())[:, None, None] * start
    for _ in range(_ROUNDS):
        codes = torch.cat([assign_logits(block, codewords) for block in _blocks(targets)])
        trained = codewords.clone().requires_grad_(True)
        optimizer = torch.optim.Adam([trained], lr=_LOGIT_RATE)
        for _ in range(_LOGIT_STEPS):
            log_p = _add_codewords(trained, codes).log_softmax(dim=1)
            loss = -(targets * log_p).sum(dim=1).mean()
            loss = loss + _LOGIT_RIDGE * trained.square().sum(dim=2).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        # Adding a constant to all logits changes no probability.
        codewords = (trained - trained.mean(dim=2, keepdim=True)).detach().clamp(-_LIMIT, _LIMIT)
    return codewords


def fit_tables(posterior: Tensor, codes: Tensor, start: Tensor, *, seed: int) -> Tensor:
    """Score tables float32 [M, K, C] for fixed codes, by the N-pair loss (eq. 2) with soft targets.

    Args:
        posterior: float [n, C], of items.
        codes: int64 [n, M], of the same items.
        start: initial tables, float [M, K, C].
        seed: of the batches.
    """
    tables = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([tables], lr=_TABLE_RATE)
    generator = torch.Generator().manual_seed(seed)
    batch = min(_TABLE_BATCH, len(posterior))
    for step in range(_TABLE_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _TABLE_RATE * 0.5 * (1 + math.cos(math.pi * step / _TABLE_STEPS))
        q, i = torch.randint(len(posterior), (2, batch), generator=generator)
        loss = soft_npair_of_posteriors(posterior[q], posterior[i], _add_codewords(tables, codes[i]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return tables.detach()


def _add_codewords(codewords: Tensor, codes: Tensor) -> Tensor:
    """Sums float [n, C] of the codewords [M, K, C] selected by codes int64 [n, M]."""
    M, K, C = codewords.shape
    return functional.embedding_bag(codes + K * torch.arange(M), codewords.reshape(M * K, C), mode="sum")


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    """Rows [n, C] in blocks whose beam search fits into memory."""
    step = max(256, _NUMBERS // (8 * rows.shape[1]))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]
