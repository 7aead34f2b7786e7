"""Adam and AdamW of PyTorch without ``torch.optim.Optimizer``, which loads PyTorch's compiler: two seconds at the start of each training.

The step itself is :func:`torch.optim.adam.adam`, so that weights have the bits of ``torch.optim.Adam`` and ``AdamW`` (a test compares
them).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam


class Adam:
    """Adam (Kingma and Ba, ICLR 2015) with ε = 1e-8; with ``weight_decay``, AdamW (Loshchilov and Hutter, ICLR 2019).

    Args:
        parameters: tensors with ``requires_grad``.
        lr: learning rate.
        betas: decay rates of the two moments.
        weight_decay: factor on the learning rate by which weights shrink in each step.

    Attributes:
        param_groups: a dict with ``params`` and ``lr`` per group; callers may add entries of their own.
        state: tensors ``step``, ``exp_avg`` and ``exp_avg_sq`` per parameter that has had a gradient.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.add_param_group({"params": parameters})

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add ``group``, with the entry ``params``; it has the common learning rate if it names none."""
        self.param_groups.append({"lr": self.lr, **group, "params": list(group["params"])})

    def zero_grad(self) -> None:
        """Remove all gradients."""
        for parameter in self._parameters():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for p in trained:
                if p not in self.state:
                    self.state[p] = {
                        "step": torch.tensor(0.0, dtype=torch.float32),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
            states = [self.state[p] for p in trained]
            adam(
                trained,
                [p.grad for p in trained],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=group["lr"],
                weight_decay=self.weight_decay,
                decoupled_weight_decay=True,
                eps=1e-8,
                maximize=False,
            )

    def state_dict(self) -> dict[int, dict[str, Tensor]]:
        """:attr:`state` by the number of the parameter."""
        return {i: self.state[p] for i, p in enumerate(self._parameters()) if p in self.state}

    def load_state_dict(self, saved: dict[int, dict[str, Tensor]]) -> None:
        """Restore a :meth:`state_dict`, in the device and memory format of each parameter (channels last on a GPU)."""
        parameters = self._parameters()
        self.state = {
            parameters[i]: {
                name: value if name == "step" else torch.empty_like(parameters[i]).copy_(value)
                for name, value in tensors.items()
            }
            for i, tensors in saved.items()
        }

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
