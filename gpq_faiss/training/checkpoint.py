"""The state of an unfinished training, in one safetensors file with JSON metadata.

Batches and dropout depend on seed and step only, so the state is weights, optimizer, best weights and log lines.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import Optimizer

from ..errors import DataError
from ..files import atomic_path, fingerprint
from ..inputs import parse_json
from ..methods.model import save_tensors, state_fingerprint
from ..methods.trainable import TrainableMethod

CHECKPOINT = "checkpoint.safetensors"
"""File name of the checkpoint in the folder of an unfinished run."""
_NOTED = ("step", "seconds", "best", "best_step", "lines")


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
        tensors = {f"method.{k}": v for k, v in self.method.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in self.best_state.items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{k}": v for k, v in state.items()}
        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
        meta = json.dumps({"identity": identity, **{name: getattr(self, name) for name in _NOTED}})
        checksum = fingerprint(meta, state_fingerprint(tensors))
        with atomic_path(self.checkpoint) as temporary:
            save_tensors(tensors, temporary, metadata={"state": meta, "checksum": checksum})
        self.saved = time.monotonic()

    def read(self, identity: str) -> dict[str, Any]:
        """Contents of the checkpoint for :meth:`take`: its tensors, and other values under ``meta``.

        Raises:
            DataError: damaged, or of other settings or data.
        """
        try:
            with safe_open(self.checkpoint, framework="pt") as file:
                noted = file.metadata() or {}
                meta = parse_json(noted["state"])
                if not isinstance(meta, dict) or not set(meta) >= {"identity", *_NOTED}:
                    raise ValueError("no state of a training")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if noted.get("checksum") != fingerprint(noted["state"], state_fingerprint(tensors)):
                raise ValueError("its checksum is another")
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise DataError(f"{self.checkpoint} is damaged ({error}): start again with --overwrite") from None
        if meta["identity"] != identity:
            raise DataError(
                f"{self.checkpoint.parent} was begun with other settings, data or versions: give the same ones to --resume it, "
                "or start again with --overwrite"
            )
        return {"meta": meta, **tensors}

    def take(self, found: dict[str, Any]) -> None:
        """Restore the result of :meth:`read`, from this or another process.

        Raises:
            DataError: it does not fit this network.
        """

        def part(kind: str) -> dict[str, Tensor]:
            return {k.removeprefix(kind): v for k, v in found.items() if k.startswith(kind)}

        try:
            self.method.load_state_dict(part("method."))
        except RuntimeError:
            raise DataError(
                f"{self.checkpoint} does not fit this network; it is from another version of gpq-faiss: "
                "start again with --overwrite"
            ) from None
        self.best_state = part("best.")
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in part("optimizer.").items():
            i, key = name.split(".", 1)
            state.setdefault(int(i), {})[key] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        for name in _NOTED:
            setattr(self, name, found["meta"][name])
