"""External weights of backbones: torchvision's ImageNet file, or a file of the user.

Nothing is unpickled, or loaded partially.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import DataError, one_line
from ..inputs import reading

log = logging.getLogger(__name__)

_DESCRIPTION = (
    "a weights file (network.weights takes none, imagenet, or the path of a .safetensors file "
    "or a .pth that holds a state dict)"
)
_OPTIONAL = ("head.", "input.")
"""Tensors specific to task or data: loaded if they fit, else left as initialised."""


def imagenet_state() -> dict[str, Tensor]:
    """Return torchvision's ImageNet weights of ``vgg16_bn``.

    They are downloaded once to ``$TORCH_HOME/hub/checkpoints``, and checked by their hash.

    Raises:
        DataError: the download or the check fails.
    """
    from torchvision.models import VGG16_BN_Weights

    weights = VGG16_BN_Weights.IMAGENET1K_V1
    try:
        state: dict[str, Tensor] = weights.get_state_dict(
            progress=False, check_hash=True, weights_only=True, map_location="cpu"
        )
    except Exception as error:  # of urllib, ssl, the system, or a bad hash
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise DataError(
            f"cannot download {weights.url} to {folder}, or the file there is damaged "
            f"({one_line(error)}): delete a damaged file, or download it elsewhere and set "
            "network.weights to its path, or to none"
        ) from error
    return state


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a ``.safetensors`` or ``.pth`` file.

    A ``.pth`` file holds a state dict, or one under "state_dict".

    Raises:
        DataError: the file holds none.
    """
    path = Path(path)
    with reading(path, _DESCRIPTION):
        if path.suffix == ".safetensors":
            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        state = state.get("state_dict", state)
        if not all(isinstance(value, Tensor) for value in state.values()):
            raise TypeError("not a state dict of tensors")
        return dict(state)


def load_into(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copy all tensors of a backbone from ``state``; additional tensors of ``state`` are ignored.

    Names may have a prefix (``network.``, ``module.`` ...), and may lack ``trunk.``. The last layer
    (``head.*``) and the statistics of the input (``input.*``) are loaded only if they fit.
    ``source`` names the state in errors.

    Raises:
        DataError: a tensor is missing, has another shape or is not finite; the module is then
            unchanged.
    """
    current = module.state_dict()
    needed = [
        k for k in current if not k.startswith(_OPTIONAL) and not k.endswith("num_batches_tracked")
    ]
    needed = needed or list(current)
    ends = (needed[0], needed[0].removeprefix("trunk."))
    prefixes = [name.removesuffix(end) for end in ends for name in state if name.endswith(end)]
    spellings = [
        {k: prefix + k.removeprefix(cut) for k in current}
        for prefix in ("", *prefixes)
        for cut in ("", "trunk.")
    ]
    names = max(spellings, key=lambda spelling: sum(name in state for name in spelling.values()))
    loaded: dict[str, Tensor] = {}
    for key, target in current.items():
        tensor, wrong = state.get(names[key]), ""
        if tensor is None:
            wrong = "is missing"
        elif tensor.shape != target.shape:
            wrong = f"has shape {list(tensor.shape)} where the backbone has {list(target.shape)}"
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            wrong = "holds NaN or infinity"
        else:
            loaded[key] = tensor
        if wrong and key in needed:
            raise DataError(
                f"{source}: tensor '{names[key]}' {wrong}: give the weights of this "
                "backbone, or set the network.backbone of these"
            )
        if wrong and tensor is not None:
            log.info("%s: '%s' %s, left as initialised", source, names[key], wrong)
    module.load_state_dict({**current, **loaded})
