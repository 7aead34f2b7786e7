"""External weights of backbones: torchvision's ImageNet file, or a file of the user.

Nothing is unpickled, or loaded partially.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ..errors import DataError, one_line
from ..inputs import reading

PUBLISHED = {"vgg": "vgg16_bn", "alexnet": "alexnet"}
"""Backbones -> the networks of torchvision whose ImageNet weights fit."""


def imagenet_state(backbone: str) -> dict[str, Tensor]:
    """Return torchvision's ImageNet weights of a backbone in :data:`PUBLISHED`.

    They are downloaded once to ``$TORCH_HOME/hub/checkpoints``, and checked by their hash.

    Raises:
        DataError: the download or the check fails.
    """
    from torchvision.models import get_model_weights

    weights: Any = get_model_weights(PUBLISHED[backbone])["IMAGENET1K_V1"]
    try:
        return dict(
            weights.get_state_dict(
                progress=False, check_hash=True, weights_only=True, map_location="cpu"
            )
        )
    except Exception as error:  # of urllib, ssl, the system, or a bad hash
        raise DataError(
            f"cannot download {weights.url} to {torch.hub.get_dir()}/checkpoints, or the file "
            f"there is damaged ({one_line(error)}): delete a damaged file, or download it "
            "elsewhere and set network.weights to its path, or to none"
        ) from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a ``.safetensors`` or ``.pth`` file.

    A ``.pth`` file holds a state dict, or one under "state_dict" or "model". Names lose the prefix
    of torch's wrappers for several GPUs (``module.``) and of ``torch.compile`` (``_orig_mod.``), of
    Lightning (``model.``), or of the models of this package.

    Raises:
        DataError: the file holds none.
    """
    with reading(
        path,
        "a weights file (network.weights takes none, imagenet, or the path of a .safetensors file "
        "or a .pth that holds a state dict)",
    ):
        state: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
        state = state.get("state_dict", state.get("model", state))
        if not all(isinstance(value, Tensor) for value in state.values()):
            raise TypeError("not a state dict of tensors")
        for prefix in ("module.", "_orig_mod.", "model.", "network.backbone.", "backbone."):
            consume_prefix_in_state_dict_if_present(state, prefix)
        return dict(state)


def load_into(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copy all tensors of a backbone from ``state``; additional tensors of ``state`` are ignored.

    Names may lack ``trunk.``, as those of the network's own package do. The last layer (``head.*``)
    and the statistics of the input (``input.*``) are loaded only if they fit. ``source`` names the
    state in errors.

    Raises:
        DataError: a tensor is missing or has another shape; the module is then unchanged.
    """
    current = module.state_dict()
    needed = [
        k
        for k in current
        if not k.startswith(("head.", "input.")) and not k.endswith("num_batches_tracked")
    ] or list(current)
    for key, target in current.items():
        name = key if key in state else key.removeprefix("trunk.")
        tensor = state.get(name)
        if tensor is not None and tensor.shape == target.shape:
            current[key] = tensor
        elif key in needed:
            problem = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
            raise DataError(
                f"{source}: tensor '{name}' {problem} where the backbone has "
                f"{list(target.shape)}: give the weights of this backbone, or set the "
                "network.backbone of these, and for a transformer their network.image_size"
            )
    module.load_state_dict(current)
