"""Codewords whose sums approximate given vectors, and the class codebooks of class-posterior codes.
Not in the paper.

Every codebook starts with the same k-means centroids, each at a smaller scale than the one before,
like the digits of a number; or, where centroids merge classes, with those of what the codebooks
before it leave, as a residual quantiser (Chen, Guan and Wang, "Approximate nearest neighbor search
by residual vector quantization", Sensors 2010). Then codes (beam search) and codewords are updated
alternately (Babenko and Lempitsky, "Additive quantization", CVPR 2014). For classes they are

*sums of probabilities*, if classes are few beside the codewords: M codewords add up to the tempered
posterior (least squares), and the score is Σ_m p_q·S_m;

*sums of logits* otherwise: codewords add up to logits (codes by the least cross entropy), so that
they multiply probabilities, as the digits of an error-correcting code do. Their score tables are
then fitted to the codes by logistic regression: pairs of items are similar with the probability
p_i·p_j. (The N-pair loss, eq. 2, asks for their order among the items of a query alone, and ranks
worse.)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..faissio.kmeans import kmeans
from ..nn.additive import BEAM, assign, assign_logits

_STARTS = 5
"""Runs of k-means; the best is kept. Missing a class is the costliest failure."""
_SCALE_RATIO = 0.4
"""Initial scale of a codebook relative to the one before."""
_ITERATIONS = 10
"""Alternations of codes and codewords."""
_RIDGE = 1e-3
"""Ridge weight. Codewords are determined only up to shifts between codebooks: the shortest are
chosen."""
_WEIGHT_QUERIES, _WEIGHT_ITEMS = 500, 5000
"""Items for weighting class and features."""
_FLOOR = 1e-3
"""Added to probabilities before taking logarithms for the initial codewords."""
_DIGIT_LOGIT = 12.0
"""Sum of the logits of a class if all digits are its own."""
_LOGIT_STEPS = 10
"""Steps of Adam on the codewords between two choices of codes, if they add logits."""
_LOGIT_RATE = 0.05
"""Learning rate of these steps."""
_LOGIT_RIDGE = 1e-4
"""Ridge weight of these steps."""
_TABLE_STEPS = 300
"""Steps of Adam on the score tables."""
_TABLE_RATE = 0.02
"""Learning rate of the score tables."""
_TABLE_BATCH = 1000
"""Items of a step of the score tables."""
_LIMIT = 20.0
"""Limit of logits: exponentials of larger sums could overflow."""
_BLOCK_NUMBERS = 1 << 24
"""Limit of the temporary arrays of a beam search: items times partial sums times classes."""


def fit_codewords(targets: Tensor, M: int, K: int, *, seed: int, residual: bool = False) -> Tensor:
    """Fit M codebooks of K codewords, float32 [M, K, E], on the CPU, whose sums approximate
    ``targets`` float [n, E].

    Args:
        seed: of k-means.
        residual: whether codebooks start as a residual quantiser, as they should where K centroids
            merge classes, instead of the same centroids at falling scales.
    """
    x = targets.float().cpu()
    if residual:
        codewords = _residual_codewords(x, M, K, seed=seed)
    else:
        scales = _SCALE_RATIO ** np.arange(M, dtype=np.float32)
        codewords = torch.from_numpy(
            (scales / scales.sum())[:, None, None] * kmeans(x.numpy(), K, seed, nredo=_STARTS)
        )
    for _ in range(_ITERATIONS):
        codewords = least_squares(x, assign(x, codewords), K)
    return codewords


def _residual_codewords(x: Tensor, M: int, K: int, *, seed: int) -> Tensor:
    """M codebooks of K codewords, float32 [M, K, E], of a residual quantiser of x float32 [n, E]:
    k-means of what those before it leave."""
    words: list[Tensor] = []
    for _ in range(M):
        words.append(torch.from_numpy(kmeans(x.numpy(), K, seed, nredo=_STARTS)))
        x = x - words[-1][assign(x, words[-1][None])[:, 0]]
    return torch.stack(words)


def least_squares(targets: Tensor, codes: Tensor, K: int) -> Tensor:
    """Codewords float [M, K, E] whose sums by the codes int64 [n, M] have the least squared
    difference from ``targets`` float [n, E].

    All codebooks are solved jointly, as E is small (:func:`.dtq.update_codebooks` solves them one
    at a time)."""
    chosen = torch.nn.functional.one_hot(codes, K).flatten(1).double()
    gram = chosen.T @ chosen + _RIDGE * torch.eye(
        chosen.shape[1], dtype=torch.double, device=chosen.device
    )
    solved: Tensor = torch.linalg.solve(gram, chosen.T @ targets.double())
    return solved.reshape(codes.shape[1], K, -1).to(targets.dtype)


class ClassCodebooks(NamedTuple):
    """Codebooks of the class part of a code: score tables for query posteriors, float32 [A, K, C],
    and logits, float32 [A, K, C], by which codes are chosen (cross entropy); without logits, [0, K,
    C], the tables choose them (least squares)."""

    tables: Tensor
    logits: Tensor

    def assign(self, tempered: Tensor) -> Tensor:
        """Codes int64 [n, A] of tempered posteriors float [n, C]."""
        choose, words = (assign_logits, self.logits) if len(self.logits) else (assign, self.tables)
        size = max(256, _BLOCK_NUMBERS // (BEAM * tempered.shape[1]))
        return torch.cat([choose(block, words) for block in torch.split(tempered, size)])


def fit_class_codebooks(
    posterior: Tensor, tempered: Tensor, A: int, K: int, *, seed: int
) -> ClassCodebooks:
    """A codebooks of K codewords for class probabilities float [n, C] of unlabelled items; the
    ``tempered`` ones are coded."""
    t = tempered.float().cpu()
    # One codebook has a codeword for every second class, or all have two for each class. Sums of
    # logits are better for more: Omniglot features of 50 classes have 0.75 mAP with 12 bits, by
    # sums of probabilities 0.62.
    if t.shape[1] <= K * max(2, A / 2):
        words = fit_codewords(t, A, K, seed=seed, residual=t.shape[1] > K)
        return ClassCodebooks(words, words[:0])
    logits = fit_logit_codewords(t, A, K, seed=seed)
    codes = ClassCodebooks(logits, logits).assign(t)
    return ClassCodebooks(fit_tables(posterior.float().cpu(), codes, logits, seed=seed), logits)


def weights_of_parts(
    class_codebooks: ClassCodebooks,
    feature_codewords: Tensor,
    posterior: Tensor,
    tempered: Tensor,
    residual: Tensor,
    feature_weight: float,
) -> Tensor:
    """Weights float [2] of the class and feature parts of a query, normalised by the standard
    deviation of their scores.

    Args:
        class_codebooks: the class codebooks.
        feature_codewords: float [L, K, E].
        posterior, tempered: float [n, C], of unlabelled items.
        residual: float [n, E], of the same items.
        feature_weight: weight of the feature similarity, from 0 to 1; the class has the rest.
    """
    class_codes = class_codebooks.assign(tempered[:_WEIGHT_ITEMS])
    feature_codes = assign(residual[:_WEIGHT_ITEMS], feature_codewords)
    class_items = _add_codewords(class_codebooks.tables, class_codes)
    feature_items = _add_codewords(feature_codewords, feature_codes)
    deviations = torch.stack(
        [
            (posterior[:_WEIGHT_QUERIES] @ class_items.T).std(),
            (residual[:_WEIGHT_QUERIES] @ feature_items.T).std(),
        ]
    ).double()
    # The network normalises codewords by the longest of their part.
    longest = torch.stack(
        [words.norm(dim=2).max() for words in (class_codebooks.tables, feature_codewords)]
    ).double()
    weights = torch.tensor([1 - feature_weight, feature_weight], dtype=torch.double)
    return (weights * longest / deviations.clamp_min(1e-12)).float()


@torch.enable_grad()
def fit_logit_codewords(targets: Tensor, M: int, K: int, *, seed: int) -> Tensor:
    """Codewords float32 [M, K, C] whose sums are logits of nearly the target probabilities float
    [n, C]: codes (:func:`.additive.assign_logits`) and codewords (cross entropy, Adam) are updated
    alternately."""
    logits = (targets + _FLOOR).log()
    logits -= logits.mean(dim=1, keepdim=True)
    # Alike classes share codewords of a residual quantiser. Where all classes are equally unlike,
    # it merges most of them, and digits tell them apart.
    codewords = min(
        _residual_codewords(logits, M, K, seed=seed),
        _digit_codewords(targets.shape[1], M, K),
        key=lambda start: _cross_entropy(targets, start).item(),
    )
    for _ in range(_ITERATIONS):
        codes = ClassCodebooks(codewords, codewords).assign(targets)
        trained = codewords.clone().requires_grad_(True)
        optimizer = torch.optim.Adam([trained], lr=_LOGIT_RATE)
        for _ in range(_LOGIT_STEPS):
            optimizer.zero_grad()
            ridge = _LOGIT_RIDGE * trained.square().sum(dim=2).mean()
            loss: Any = ridge + _cross_entropy(targets, trained, codes)
            loss.backward()
            optimizer.step()
        # Adding a constant to all logits changes no probability.
        codewords = (trained - trained.mean(dim=2, keepdim=True)).detach().clamp(-_LIMIT, _LIMIT)
    return codewords


def _digit_codewords(C: int, M: int, K: int) -> Tensor:
    """M codebooks of K codewords of logits, float32 [M, K, C]: a codeword means the classes that
    have its number as a digit. Up to K²·K/2 classes have different digits, if M is at least 3."""
    c, m = torch.arange(C), torch.arange(M)[:, None]
    digits = (c + m * (c // K) + m**2 * (c // K**2)) % K
    return _DIGIT_LOGIT / M * (torch.nn.functional.one_hot(digits, K).transpose(1, 2) - 1 / K)


def _cross_entropy(targets: Tensor, codewords: Tensor, codes: Tensor | None = None) -> Tensor:
    """Mean cross entropy of ``targets`` float [n, C] and the sums of codewords, float [M, K, C], by
    these codes, or else by the best."""
    if codes is None:
        codes = ClassCodebooks(codewords, codewords).assign(targets)
    return -(targets * _add_codewords(codewords, codes).log_softmax(dim=1)).sum(dim=1).mean()


@torch.enable_grad()
def fit_tables(posterior: Tensor, codes: Tensor, start: Tensor, *, seed: int) -> Tensor:
    """Score tables float32 [M, K, C] for the codes int64 [n, M] of items with probabilities float
    [n, C], from ``start`` on: the logistic function of a score and an offset is the probability
    p_i·p_j that two items share a class. In batches by ``seed``."""
    tables = start.clone().requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)

    def pairs() -> tuple[Tensor, Tensor]:
        """Scores of random pairs, and the probabilities that they share a class."""
        q, i = torch.randint(
            len(posterior), (2, min(_TABLE_BATCH, len(posterior))), generator=generator
        )
        return posterior[q] @ _add_codewords(tables, codes[i]).T, posterior[q] @ posterior[i].T

    with torch.no_grad():
        scores, shared = pairs()
        # Few pairs share a class: exp(score + offset) has the mean of their probabilities.
        offset = shared.mean().log() - scores.flatten().logsumexp(dim=0) + math.log(scores.numel())
    optimizer = torch.optim.Adam([tables, offset.requires_grad_(True)], lr=_TABLE_RATE)
    for step in range(_TABLE_STEPS):
        optimizer.param_groups[0]["lr"] = (
            _TABLE_RATE * 0.5 * (1 + math.cos(math.pi * step / _TABLE_STEPS))
        )
        scores, shared = pairs()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores + offset, shared)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return tables.detach()


def _add_codewords(codewords: Tensor, codes: Tensor) -> Tensor:
    """Sums float [n, C] of the codewords [M, K, C] selected by codes int64 [n, M]."""
    M, K, C = codewords.shape
    return torch.nn.functional.embedding_bag(
        codes + K * torch.arange(M), codewords.reshape(M * K, C), mode="sum"
    )
