"""The state of an unfinished training, in one safetensors file with JSON metadata.

Batches and dropout depend on seed and step only, so the state is weights, optimizer, best weights
and log lines.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.optim import Optimizer

from ..errors import DataError
from ..files import atomic_path
from ..inputs import reading
from ..methods.model import save_tensors
from ..methods.trainable import TrainableMethod

CHECKPOINT = "checkpoint.safetensors"
"""File name of the checkpoint in the folder of an unfinished run."""


@dataclass
class RunState:
    """Steps and results of a run.

    Attributes:
        step, seconds: steps and training time so far.
        best, best_step, best_state: the best validation mAP, its step (-1 and 0: none yet) and
            weights.
        lines: log lines.
    """

    step: int = 0
    seconds: float = 0.0
    best: float = -1.0
    best_step: int = 0
    lines: list[str] = field(default_factory=list)
    best_state: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def save(
        self, path: Path, identity: str, method: TrainableMethod, optimizer: Optimizer
    ) -> None:
        """Write the checkpoint atomically; ``identity`` is the hash of settings and data.

        Raises:
            DataError: the file cannot be written.
        """
        groups = {"method": method.state_dict(), "best": self.best_state}
        groups |= {str(i): state for i, state in optimizer.state_dict()["state"].items()}
        tensors = {f"{group}.{name}": x for group in groups for name, x in groups[group].items()}
        values = {name: value for name, value in vars(self).items() if name != "best_state"}
        with atomic_path(path) as temporary:
            save_tensors(tensors, temporary, {"identity": identity, "state": json.dumps(values)})


def load_checkpoint(
    path: Path, identity: str, method: TrainableMethod, optimizer: Optimizer
) -> RunState:
    """Read a checkpoint into ``method`` and ``optimizer``, and return the state of its run.

    Raises:
        DataError: damaged, or of other settings, data or versions.
    """
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    with (
        reading(path, "a checkpoint (--overwrite starts again)"),
        safe_open(path, framework="pt") as file,
    ):
        metadata = file.metadata()
        for name in file.keys():  # noqa: SIM118
            group, key = name.split(".", 1)
            groups[group][key] = file.get_tensor(name)
    if metadata.get("identity") != identity:
        raise DataError(
            f"{path.parent} was begun with other settings, data or versions: give the same ones "
            "to --resume it, or start again with --overwrite"
        )
    # A fused optimizer takes for granted that its state has the memory format of the weights.
    state = {
        int(name): {
            k: x.to(memory_format=torch.channels_last if x.ndim == 4 else torch.preserve_format)
            for k, x in values.items()
        }
        for name, values in groups.items()
        if name.isdecimal()
    }
    with reading(path, "a checkpoint of this version (start again with --overwrite)"):
        method.load_state_dict(groups["method"])
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return RunState(**json.loads(metadata["state"]), best_state=groups["best"])
