"""The state of an unfinished training, in one file of safetensors with JSON in its head.

Batches and dropout follow from the seed and the step, so weights, optimizer, best weights and the figures so far are all.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import DataError
from ..files import atomic_path, write_error
from ..inputs import parse_json
from ..methods.trainable import TrainableMethod
from ..nn.model import save_tensors

CHECKPOINT = "checkpoint.safetensors"
"""The file, in the folder of an unfinished run."""
BEGUN = "begun.json"
"""Beside it where the run is to replace a finished model: ``identity`` of the run, and which model it ``replaces``."""


def other_run(folder: Path) -> DataError:
    """The error of a run that other settings are given for."""
    return DataError(
        f"{folder} was begun with other settings, data or versions: give the same ones to --resume it, "
        "or start again with --overwrite"
    )


_KEYS = {"identity", "step", "seconds", "best", "best_step", "lines"}


class RunState:
    """What a checkpoint holds, and where it lies.

    Args:
        folder: of the unfinished run.
        method, optimizer: whose state it is.

    Attributes:
        step, seconds: steps and time so far.
        best, best_step, best_state: the best validation mAP, its step (0: none yet) and weights.
        lines: of the log.
        saved: when the last checkpoint was written, by the monotonic clock.
    """

    def __init__(self, folder: Path, method: TrainableMethod, optimizer: torch.optim.Optimizer) -> None:
        self.folder = folder
        self.method = method
        self.optimizer = optimizer
        self.step = 0
        self.seconds = 0.0
        self.best = -math.inf
        self.best_step = 0
        self.best_state: dict[str, Tensor] = {}
        self.lines: list[str] = []
        self._began = self.saved = time.monotonic()

    def start(self) -> None:
        """Start the clock of this process, after the seconds of earlier ones."""
        self.saved = time.monotonic()
        self._began = self.saved - self.seconds

    def tick(self) -> None:
        """Bring :attr:`seconds` up to date."""
        self.seconds = time.monotonic() - self._began

    @property
    def checkpoint(self) -> Path:
        """The file."""
        return self.folder / CHECKPOINT

    def keep_best(self, score: float) -> None:
        """Remember the present weights as the best so far."""
        self.best, self.best_step = score, self.step
        self.best_state = {k: v.detach().cpu().clone() for k, v in self.method.state_dict().items()}

    def save(self, identity: str) -> None:
        """Write the checkpoint, wholly or not at all; ``identity`` names settings and data.

        Raises:
            DataError: it cannot be written.
        """
        self.tick()
        meta, tensors = self._state(identity)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self.folder, error) from error
        with atomic_path(self.checkpoint) as temporary:
            save_tensors(tensors, temporary, metadata={"state": json.dumps(meta)})
        self.saved = time.monotonic()

    def _state(self, identity: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors = {f"method.{k}": v for k, v in self.method.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in self.best_state.items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{k}": v for k, v in state.items()}
        meta = {
            "identity": identity,
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best if self.best_step else None,
            "best_step": self.best_step,
            "lines": self.lines,
        }
        return meta, {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}

    def read(self, identity: str) -> dict[str, Any]:
        """What the checkpoint holds, for :meth:`take`: its tensors, and the rest by the name ``meta``.

        Raises:
            DataError: damaged, or of other settings or data.
        """
        try:
            with safe_open(self.checkpoint, framework="pt") as file:
                meta = parse_json((file.metadata() or {})["state"])
                if not isinstance(meta, dict) or not set(meta) >= _KEYS:
                    raise ValueError("no state of a training")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise DataError(f"{self.checkpoint} is damaged ({error}): start again with --overwrite") from None
        if meta["identity"] != identity:
            raise other_run(self.folder)
        return {"meta": meta, **tensors}

    def take(self, found: dict[str, Any]) -> None:
        """Take up what :meth:`read` gave, here or in another process.

        Raises:
            DataError: it is not of this network.
        """
        meta = found["meta"]
        tensors = {name: value for name, value in found.items() if name != "meta"}

        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        try:
            self.method.load_state_dict(part("method."))
        except RuntimeError:
            raise DataError(
                f"{self.checkpoint} does not fit this network, it is of another version of gpq-faiss: "
                "start again with --overwrite"
            ) from None
        self.best_state = part("best.")
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in part("optimizer.").items():
            i, key = name.split(".", 1)
            state.setdefault(int(i), {})[key] = value
        full = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": state, "param_groups": full["param_groups"]})
        for parameter, moments in self.optimizer.state.items():
            for name, value in moments.items():
                # In the parameter's memory format (channels last on a GPU), as they were before they were saved.
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    moments[name] = torch.empty_like(parameter).copy_(value)
        self.step, self.seconds, self.lines = meta["step"], meta["seconds"], meta["lines"]
        self.best_step = meta["best_step"]
        self.best = -math.inf if meta["best"] is None else meta["best"]
