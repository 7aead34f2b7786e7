"""External weights of backbones: torchvision's ImageNet files, or a file of the user.

Nothing is unpickled: ``.pth`` files are read with ``weights_only=True``, ``.safetensors`` contain only tensors.
Errors name tensors that do not fit; nothing is loaded partially.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError, UsageError
from ..inputs import check_memory

_LOG = logging.getLogger(__name__)

#: Timeout of downloads in seconds (the system's default is minutes).
DOWNLOAD_TIMEOUT = 30.0

#: Possible prefixes of a backbone's tensor names: our model files, DataParallel, other trainers.
_PREFIXES = ("", "network.", "backbone.", "network.backbone.", "module.", "model.")

#: Tensors specific to task or data: loaded if they fit, else left as initialised.
_OPTIONAL = ("head.", "input.")


def first_line(error: BaseException) -> str:
    """First line of an error's text, or its type if it has none, for one-line messages."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".: ") if lines else type(error).__name__


@contextlib.contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    old = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(old)


def imagenet_state(arch: str) -> dict[str, Tensor]:
    """torchvision's ImageNet weights of ``vgg16_bn`` or ``alexnet`` (IMAGENET1K_V1), downloaded once.

    The file is cached in ``$TORCH_HOME/hub/checkpoints``; its hash is checked after download.

    Raises:
        DataError: it cannot be downloaded, or the cached file is damaged.
        UsageError: another architecture.
    """
    from torchvision.models import AlexNet_Weights, VGG16_BN_Weights

    known = {"vgg16_bn": VGG16_BN_Weights.IMAGENET1K_V1, "alexnet": AlexNet_Weights.IMAGENET1K_V1}
    if arch not in known:
        raise UsageError(f"there are no ImageNet weights of {arch}: there are those of {', '.join(known)}")
    url = str(known[arch].url)
    name = url.rsplit("/", 1)[-1]
    place = Path(torch.hub.get_dir()) / "checkpoints" / name
    cached = place.exists()
    try:
        with _socket_timeout(DOWNLOAD_TIMEOUT):
            state: dict[str, Tensor] = known[arch].get_state_dict(
                progress=False, check_hash=True, weights_only=True, map_location="cpu"
            )
    except Exception as error:  # urllib, ssl, socket, OSError, a bad hash: all mean the same to the user
        if cached:
            raise DataError(
                f"{place} is damaged ({first_line(error)}): delete it to download it again, "
                "or set network.weights=PATH"
            ) from error
        raise DataError(
            f"cannot download {name} ({first_line(error)}), which is not in {place.parent} either: "
            f"download {url} elsewhere and set network.weights to its path, or to none"
        ) from error
    return state


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a ``.safetensors`` or ``.pth`` file (a state dict, or one under "state_dict").

    Raises:
        DataError: missing, damaged, or not a file of named tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"no weights file {path}: network.weights takes none, imagenet, or the path of a file"
        )
    try:
        if zipfile.is_zipfile(path):  # torch.save's format: if compressed, it could expand to any size
            with zipfile.ZipFile(path) as archive:
                check_memory(sum(member.file_size for member in archive.infolist()), str(path))
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {os.strerror(error.errno) if error.errno else error}"
        ) from error
    except Exception as error:  # pickle, zip and safetensors errors have no common base
        raise DataError(
            f"{path} is not a weights file ({first_line(error)}): "
            "give a .safetensors file, or a .pth that holds a state dict"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise DataError(f"{path} is not a state dict of tensors: save model.state_dict(), not the model")
    return dict(state)


def load_into(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copy all tensors of ``module`` from ``state``; additional tensors of ``state`` are ignored.

    Common prefixes (``network.``, ``module.`` ...) are recognised, for timm also the bare names. The last layer
    (``head.*``) and the input statistics (``input.*``) are optional: they are loaded only if they fit.

    Args:
        module: a backbone, changed in place.
        state: names and tensors.
        source: name of ``state`` in errors, usually its path.

    Raises:
        DataError: a tensor is missing, has another shape or is not finite; the module is then unchanged.
    """
    own = module.state_dict()
    needed = [k for k in own if not k.startswith(_OPTIONAL) and not k.endswith("num_batches_tracked")]
    wanted = needed or list(own)

    def spellings(prefix: str, bare: str) -> dict[str, str]:
        return {k: prefix + k.removeprefix(bare) for k in own}

    candidates = [spellings(prefix, bare) for bare in ("", "trunk.") for prefix in _PREFIXES]
    names = max(candidates, key=lambda c: sum(c[k] in state for k in wanted))
    if not any(names[k] in state for k in wanted):
        names = candidates[0]
    found: dict[str, Tensor] = {}
    for key, target in own.items():
        tensor = state.get(names[key])
        fits = tensor is not None and tensor.shape == target.shape
        if tensor is not None and fits:
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise DataError(f"{source}: tensor '{names[key]}' holds NaN or infinity: the file is damaged")
            found[key] = tensor
        elif key not in wanted:
            _LOG.info("%s: no fitting '%s', left as initialised", source, names[key])
        elif tensor is None:
            raise DataError(
                f"{source}: tensor '{names[key]}' is missing: these are not weights of this backbone; "
                "set the network.backbone that they were trained for"
            )
        else:
            raise DataError(
                f"{source}: tensor '{names[key]}' has shape {list(tensor.shape)} where the backbone has "
                f"{list(target.shape)}: set the network.backbone that these weights were trained for"
            )
    module.load_state_dict({**own, **found})
