"""The state of an unfinished training, in one file of torch.

Batches and dropout depend on seed and step only, so the state is weights, optimizer, best weights and log lines.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import DataError, one_line
from ..files import atomic_path
from ..methods.trainable import TrainableMethod
from ..nn.weights import load_tensors

CHECKPOINT = "checkpoint.pt"
"""File name of the checkpoint in the folder of an unfinished run."""
_KEPT = ("step", "seconds", "best", "best_step", "best_state", "lines")


class RunState:
    """State of a run and its checkpoint file.

    Args:
        folder: folder of the unfinished run.
        method, optimizer: the objects whose state is saved.

    Attributes:
        step, seconds: steps and training time so far, the latter up to the last :meth:`tick`.
        best, best_step, best_state: the best validation mAP, its step (-1 and 0: none yet) and weights.
        lines: log lines.
        saved: monotonic time of the last checkpoint.
    """

    def __init__(self, folder: Path, method: TrainableMethod, optimizer: Optimizer) -> None:
        self.checkpoint = folder / CHECKPOINT
        self.method = method
        self.optimizer = optimizer
        self.step = self.best_step = 0
        self.seconds, self.best = 0.0, -1.0
        self.best_state: dict[str, Tensor] = {}
        self.lines: list[str] = []
        self.start()

    def start(self) -> None:
        """Start the clock, after the seconds of earlier processes."""
        self.saved = time.monotonic()
        self._began = self.saved - self.seconds

    def tick(self) -> None:
        """Update :attr:`seconds`."""
        self.seconds = time.monotonic() - self._began

    def keep_best(self, score: float) -> None:
        """Store the current weights as the best so far."""
        self.best, self.best_step = score, self.step
        self.best_state = {k: v.detach().cpu().clone() for k, v in self.method.state_dict().items()}

    def save(self, identity: str) -> None:
        """Write the checkpoint atomically; ``identity`` identifies settings and data.

        Raises:
            DataError: the file cannot be written.
        """
        self.tick()
        state = {name: getattr(self, name) for name in _KEPT} | {"identity": identity}
        state |= {"method": self.method.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}
        # Not by its path: torch would say no more than that writing failed.
        with atomic_path(self.checkpoint) as temporary, temporary.open("wb") as file:
            torch.save(state, file)
        self.saved = time.monotonic()

    def read(self, identity: str) -> dict[str, Any]:
        """Contents of the checkpoint for :meth:`take`.

        Raises:
            DataError: damaged, or of other settings or data.
        """
        try:
            found = load_tensors(self.checkpoint)
            if not isinstance(found, dict) or not set(found) >= {"identity", "method", "optimizer", *_KEPT}:
                raise ValueError("no state of a training")
        except Exception as error:  # pickle and zip errors have no common base
            why = one_line(error)
            raise DataError(f"{self.checkpoint} is damaged ({why}): start again with --overwrite") from None
        if found["identity"] != identity:
            raise DataError(
                f"{self.checkpoint.parent} was begun with other settings, data or versions: give the same ones to --resume it, "
                "or start again with --overwrite"
            )
        return found

    def take(self, found: dict[str, Any]) -> None:
        """Restore the result of :meth:`read`, from this or another process.

        Raises:
            DataError: it does not fit this network.
        """
        try:
            self.method.load_state_dict(found["method"])
        except RuntimeError:
            raise DataError(
                f"{self.checkpoint} does not fit this network; it is from another version of gpq-faiss: "
                "start again with --overwrite"
            ) from None
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": found["optimizer"]})
        for name in _KEPT:
            setattr(self, name, found[name])
