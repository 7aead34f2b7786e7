"""The typical scale of vectors: embeddings at another scale than the training's get wrong codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .data.base import FeatureDataset

_MAX_FACTOR = 1.5  # between the scales of two samples of the same embeddings
_MIN_VECTORS = 10  # the norms of fewer vectors may be far from the median


def scale_of(x: NDArray[Any]) -> dict[str, float]:
    """Return the scale of vectors [n, width], or nothing without finite ones.

    It is the median of their norms, percentiles 1 and 99 of the norms, and of all numbers.
    """
    x = np.asarray(x, np.float64)
    x = x[np.isfinite(x).all(axis=1)]
    if not len(x):
        return {}
    norm, least, largest = np.percentile(np.linalg.norm(x, axis=1), (50, 1, 99)).tolist()
    low, high = np.percentile(x, (1, 99)).tolist()
    return {"norm": norm, "least_norm": least, "largest_norm": largest, "low": low, "high": high}


def typical_scale(dataset: FeatureDataset) -> dict[str, float]:
    """Return the scale of up to 1,000 vectors, in eight evenly spaced blocks."""
    starts = np.linspace(0, max(0, len(dataset) - 125), num=8).astype(np.int64)
    rows = np.unique((starts[:, None] + np.arange(125)).clip(max=len(dataset) - 1))
    return scale_of(np.asarray(dataset.matrix[rows]))


def scale_warning(
    expected: Mapping[str, float], measured: Mapping[str, float], n: int
) -> str | None:
    """Return a warning if ``n`` vectors are not ``measured`` at the ``expected`` scale."""
    if not expected or not measured or not measured["norm"]:
        return None
    # Of few vectors, only the norm is compared, with the norms of single vectors.
    are_few = n < _MIN_VECTORS
    least = expected["least_norm" if are_few else "norm"] / _MAX_FACTOR
    largest = expected["largest_norm" if are_few else "norm"] * _MAX_FACTOR
    shift = max(abs(measured[end] - expected[end]) for end in ("low", "high"))
    largest_shift = (_MAX_FACTOR - 1) * (expected["high"] - expected["low"])
    if least <= measured["norm"] <= largest and (are_few or shift <= largest_shift):
        return None
    scale = "norms of about {norm:.3g} and numbers from {low:.3g} to {high:.3g}"
    return (
        f"the vectors have {scale.format(**measured)}, those of the training have "
        f"{scale.format(**expected)}: scale (here by "
        f"{expected['norm'] / measured['norm']:.3g}) or shift them as for the training"
    )
