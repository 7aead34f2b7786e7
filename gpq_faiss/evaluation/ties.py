"""What is measured of rankings: conventions of average precision, and harmonic numbers for its closed form (:mod:`.kernels`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError

Ties = Literal["expected", "id", "best", "worst"]
Denominator = Literal["relevant", "relevant-in-top-k", "min(k, relevant)"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_TIE_NAMES = {
    "expected": "expected value over random order within ties",
    "id": "ties by id",
    "best": "relevant items first within ties",
    "worst": "relevant items last within ties",
}
_DENOMINATOR_NAMES = {
    "relevant": "all relevant items",
    "relevant-in-top-k": "the relevant items in the top k",
    "min(k, relevant)": "min(k, all relevant items)",
}

RECALL_LEVELS: Floats = np.linspace(0.0, 1.0, 21)


@dataclass
class Convention:
    """What is measured of rankings, and how.

    Raises:
        UsageError: an unknown or contradictory value.
    """

    ties: Ties = "expected"
    """"expected" value over random order within equal scores, order of "id", or relevant items first ("best") or last ("worst")."""
    k: int | None = None
    """Average precision of the first k ranks (mAP@k) instead of the full ranking."""
    denominator: Denominator = "relevant"
    """Of average precision: all "relevant" items; or with ``k`` "relevant-in-top-k" or "min(k, relevant)"."""
    ks: Sequence[int] = ()
    """The k of precision and recall."""
    levels: ArrayLike | None = None
    """Rising recall levels in [0, 1] of the mean precision-recall curve, such as :data:`RECALL_LEVELS`; None: no curve."""

    def __post_init__(self) -> None:
        self.ks = list(self.ks)
        self.points: Floats = np.asarray(() if self.levels is None else self.levels, dtype=np.float64)
        for name, known in (("ties", Ties), ("denominator", Denominator)):
            value = getattr(self, name)
            if value not in get_args(known):
                raise UsageError(f"{name}={value!r} is unknown: use one of {', '.join(get_args(known))}")
        for k in (*self.ks, *([] if self.k is None else [self.k])):
            if not isinstance(k, int | np.integer) or k < 1:
                raise UsageError(f"k={k!r}: it must be a whole number, at least 1")
        if self.k is None and self.denominator != "relevant":
            raise UsageError(f"denominator={self.denominator!r} belongs to mAP@k: give k, or use 'relevant'")
        p = self.points
        if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all() or not (np.diff(p) > 0).all():
            raise UsageError("recall levels must rise within [0, 1], such as 0, 0.05, ..., 1")

    def __str__(self) -> str:
        """One line for output."""
        start = "mAP, full ranking" if self.k is None else f"mAP@{self.k}, top {self.k} of the ranking"
        return f"{start}, divided by {_DENOMINATOR_NAMES[self.denominator]}, {_TIE_NAMES[self.ties]}"


def harmonic_numbers(n: int) -> Floats:
    """H(0), H(1), ..., H(n) as float64 [n + 1], correct to one or two units in the last place."""
    sums = np.cumsum(1 / np.arange(1, n + 1, dtype=np.longdouble))
    return np.concatenate([[0.0], sums]).astype(np.float64)
