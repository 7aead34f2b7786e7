"""The typical scale of vectors: embeddings at another scale than the training's get wrong codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Dataset, FeatureDataset

_NAMES = ("norm", "least_norm", "largest_norm", "low", "high")
_FACTOR = 1.5  # between scales of the same embeddings
_FEW = 10  # vectors, whose norms may be far from the median


def scale_of(x: NDArray[Any]) -> dict[str, float]:
    """Return the scale of vectors [n, width], or nothing without finite ones.

    It is the median of their norms, percentiles 1 and 99 of the norms, and of all numbers.
    """
    x = np.asarray(x, np.float64)
    norms = np.linalg.norm(x, axis=1)
    fine = np.isfinite(norms)
    if not fine.any():
        return {}
    values = [*np.percentile(norms[fine], (50, 1, 99)), *np.percentile(x[fine], (1, 99))]
    return dict(zip(_NAMES, map(float, values), strict=True))


def typical_scale(dataset: Dataset, sample: int = 1000) -> dict[str, float]:
    """Return the scale of about ``sample`` vectors, in eight evenly spaced blocks; of images {}."""
    if not isinstance(dataset, FeatureDataset):
        return {}
    starts = np.linspace(0, max(0, len(dataset) - sample // 8), num=8).astype(np.int64)
    rows = np.unique((starts[:, None] + np.arange(sample // 8)).clip(max=len(dataset) - 1))
    return scale_of(np.asarray(dataset.matrix[rows]))


def scale_warning(
    expected: Mapping[str, float], measured: Mapping[str, float], n: int
) -> str | None:
    """Return a warning if ``n`` vectors are not ``measured`` at the ``expected`` scale."""
    if not expected or not measured or not measured["norm"]:
        return None
    least, largest = ("least_norm", "largest_norm") if n < _FEW else ("norm", "norm")
    is_same = expected[least] / _FACTOR <= measured["norm"] <= expected[largest] * _FACTOR
    shift = max(abs(measured[end] - expected[end]) for end in ("low", "high"))
    extent = expected["high"] - expected["low"]
    if is_same and (n < _FEW or shift <= (_FACTOR - 1) * extent):
        return None
    norms, ranges = [
        f"norms of about {scale['norm']:.3g} and numbers from {scale['low']:.3g} to {scale['high']:.3g}"
        for scale in (measured, expected)
    ]
    factor = expected["norm"] / measured["norm"]
    remedy = f"scale (here by {factor:.3g}) or shift them as for the training"
    return f"the vectors have {norms}, those of the training have {ranges}: {remedy}"
