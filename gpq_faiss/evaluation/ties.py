"""Conventions of average precision, and the harmonic numbers that its closed form needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

Ties = Literal["expected", "best", "worst", "id"]
Denominator = Literal["relevant", "relevant-in-top-k", "min(k, relevant)"]

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]

_TIES = {
    "expected": "expected value over random order within ties",
    "best": "relevant items first within ties",
    "worst": "relevant items last within ties",
    "id": "ties by id",
}
_DENOMINATORS = {
    "relevant": "all relevant items",
    "relevant-in-top-k": "the relevant items in the top k (usual in papers on hashing)",
    "min(k, relevant)": "min(k, all relevant items)",
}

RECALL_LEVELS: Doubles = np.linspace(0.0, 1.0, 21)
"""Recall levels of precision-recall curves."""


@dataclass(frozen=True)
class Convention:
    """How average precision is computed.

    Attributes:
        ties: order within equal scores: ``"expected"`` is the expected value over random order,
            ``"id"`` the order of the items, ``"best"`` and ``"worst"`` put the relevant items first
            or last.
        k: None for the full ranking, else the number of ranks of mAP@k.
        denominator: number that the sum of precisions is divided by: all ``"relevant"`` items; with
            ``k`` also ``"relevant-in-top-k"``, which most papers on hashing use (``CalcTopMap`` in
            their code), or ``"min(k, relevant)"``.

    Raises:
        UsageError: an unknown or contradictory value.
    """

    ties: Ties = "expected"
    k: int | None = None
    denominator: Denominator = "relevant"

    def __post_init__(self) -> None:
        for name, choices in (("ties", _TIES), ("denominator", _DENOMINATORS)):
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"{name}={value!r} is unknown: use one of {', '.join(choices)}")
        if self.k is not None:
            check_rank(self.k)
        elif self.denominator != "relevant":
            raise UsageError(
                f"denominator={self.denominator!r} belongs to mAP@k: give k, or use 'relevant'"
            )

    def __str__(self) -> str:
        """Describe the convention in one line."""
        ranks = f"mAP@{self.k}, top {self.k} of the ranking" if self.k else "mAP, full ranking"
        return f"{ranks}, divided by {_DENOMINATORS[self.denominator]}, {_TIES[self.ties]}"


def check_rank(k: object) -> None:
    """Check a number of ranks. Raises UsageError: it is not a whole number, or below 1."""
    if not isinstance(k, int | np.integer) or k < 1:
        raise UsageError(f"k={k!r}: it must be a whole number, at least 1")


def harmonic_numbers(n: int) -> Doubles:
    """Return H(0), H(1), ..., H(n), float64 [n + 1], correct to two units in the last place."""
    sums = np.cumsum(1 / np.arange(1, n + 1, dtype=np.longdouble))
    return np.concatenate([[0.0], sums]).astype(np.float64)
