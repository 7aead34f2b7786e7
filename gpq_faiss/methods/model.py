"""The model folder: ``model.safetensors`` (network and codebooks), ``config.json``,
``metrics.jsonl``, ``split.json``.

No pickles. The codebooks are the plain tensor ``codebooks`` beside the weights, so that export and
indexing can read them without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from ..config import from_dict
from ..data.protocols import Split
from ..errors import DataError, MismatchError, one_line
from ..faissio.model import FORMAT_VERSION, ModelHeader, read_model, read_weights
from ..files import atomic_path, fingerprint, write_json
from ..nn.backbones import backbone_plugin
from ..store.rows import codebooks_fingerprint
from .gpq import build_network
from .trainable import CodeMethod


def save_tensors(
    state: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors of any device to a safetensors file."""
    # Copies, as safetensors refuses tensors that share memory.
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    # Not save_file: it hides the number of the system's error, and its file is private.
    path.write_bytes(save(tensors, metadata))


def save_model(
    out: Path,
    network: CodeMethod,
    description: dict[str, Any],
    *,
    metrics: str,
    split: Split,
) -> None:
    """Write the model folder ``out`` atomically: network, its codebooks, and split; ``description``
    has further entries of ``config.json``, ``metrics`` the lines of ``metrics.jsonl``.

    Raises:
        DataError: the folder cannot be written.
    """
    state = {f"network.{name}": value for name, value in network.state_dict().items()}
    codebooks = network.coder().codebooks
    state["codebooks"] = torch.from_numpy(codebooks)
    with atomic_path(out, folder=True) as folder:
        path = folder / "model.safetensors"
        save_tensors(state, path)
        entries = {
            "format_version": FORMAT_VERSION,
            "asymmetric": network.asymmetric,
            "items_are_codewords": network.items_are_codewords,
            "codebooks_fingerprint": codebooks_fingerprint(codebooks),
            "model_fingerprint": fingerprint(path.read_bytes()),
        }
        write_json(folder / "config.json", entries | description)
        (folder / "metrics.jsonl").write_text(metrics, encoding="utf-8")
        split.save(folder / "split.json")


@dataclass(frozen=True)
class Model(ModelHeader):
    """A trained model, ready to encode; ``network``: input to intra-normalised vectors, in eval
    mode."""

    network: CodeMethod = field(kw_only=True)


def load_model(folder: str | Path, device: torch.device | None = None) -> Model:
    """Load a model folder onto ``device`` (default: the CPU).

    Raises:
        DataError: files missing, truncated or damaged.
        MismatchError: weights and ``config.json`` belong to different models, or the plugin with
            the backbone is not installed.
        ModuleNotFoundError: torchvision or timm, which the backbone needs, is not installed.
    """
    folder = Path(folder)
    path = folder / "model.safetensors"
    header = read_model(folder)
    description = header.description
    try:
        settings = description["config"]
        origin = description.get("backbone_of")
        name = settings["network"]["backbone"]
        if origin and backbone_plugin(name) is None:
            raise MismatchError(
                f"{folder} has the backbone '{name}' of {origin}, which is not installed: "
                "install it"
            )
        # The folder has the weights: download nothing.
        config = from_dict({**settings, "network": {**settings["network"], "weights": "none"}})
        network = build_network(config, description["input"], len(description["class_names"]))
        network.load_state_dict(
            {
                name.removeprefix("network."): tensor
                for name, tensor in load(read_weights(header)).items()
                if name != "codebooks"
            }
        )
    except (MismatchError, MemoryError, ModuleNotFoundError):
        raise
    except Exception as error:  # what damage raises has no common base
        # An invalid setting is a usage error in training, but damage in a model folder.
        raise DataError(
            f"{path} does not fit its config.json ({one_line(error)}): "
            "the model is damaged or of another version"
        ) from None
    network.eval().to(device)
    return Model(folder, header.codebooks, header.model_fingerprint, description, network=network)
