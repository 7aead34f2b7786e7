"""Base class of losses with scaled cosines."""

from __future__ import annotations

from torch import nn

from ..errors import UsageError


class CosineLoss(nn.Module):
    """A loss of scaled cosines; ``beta`` is their scale.

    Raises:
        UsageError: β is not positive.
    """

    def __init__(self, beta: float) -> None:
        super().__init__()
        if not beta > 0:
            raise UsageError(f"beta is {beta}: it must be positive")
        self.beta = beta
