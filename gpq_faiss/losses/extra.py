"""Losses of plugins, which are added to the method's losses.

``[loss.extra]`` in the settings gives their names and weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..plugins import find_plugin, plugin_names

_OWN = ("total", "npair", "triplet", "classification", "propagation", "entropy")
"""Names of built-in losses in the log."""


class ExtraLosses(nn.Module):
    """Plugin losses by name, with their weights (0: left out).

    Each is a module that maps network outputs float [B + U, D] and labels of the first B, multi-hot
    float [B, C], to a scalar. Their parameters are initialised by ``seed`` and trained with the
    network.

    Raises:
        UsageError: no plugin has a loss of that name, or it cannot be constructed.
    """

    def __init__(self, weights: Mapping[str, float], seed: int = 0) -> None:
        super().__init__()
        self.weights = {name: weight for name, weight in weights.items() if weight}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.parts = nn.ModuleDict({name: _make(name) for name in self.weights})

    def add(self, losses: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Add every plugin loss to ``losses``, and their weighted sum to its ``total``.

        Raises:
            UsageError: a loss does not return a scalar.
        """
        for name, loss in self.parts.items():
            value = loss(x, y)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise UsageError(f"loss '{name}' does not return a scalar tensor")
            losses[name] = value.reshape(())
            losses["total"] = losses["total"] + self.weights[name] * losses[name]
        return losses


def _make(name: str) -> nn.Module:
    plugin = find_plugin("losses", name, _OWN)
    if plugin is None:
        names = ", ".join(plugin_names("losses", _OWN)) or "none"
        raise UsageError(
            f"loss.extra.{name}: no package has a loss of that name (installed: {names})"
        )
    make = plugin.load()
    with plugin.running("be made"):
        loss = make()
        if not isinstance(loss, nn.Module):
            raise TypeError(f"a {type(loss).__name__}: a class of torch.nn.Module is needed")
        return loss
