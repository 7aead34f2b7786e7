"""Description of models and unfinished runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from ...errors import DataError, MismatchError
from ...faissio.model import read_description, read_model
from ...files import read_json
from ...inputs import parse_json
from .common import KNOWN, first_line, head
from .rows import split_summary

_UNFINISHED = re.compile(r"^\.(?P<name>.+)\.partial$")


def describe_folder(path: Path) -> dict[str, Any]:
    """A model, or an unfinished run by its name."""
    if (path / "config.json").exists() or (path / "model.safetensors").exists():
        return describe_model(path)
    if _UNFINISHED.match(path.resolve().name):
        return describe_unfinished(path)
    raise DataError(f"{path} is not a model folder: it has no config.json; {KNOWN} can be described")


def describe_model(path: Path) -> dict[str, Any]:
    """A model folder. Also loads the network, to verify it. Without torch, only description and codebooks are checked, and
    ``backbone``, ``parameters`` and ``dtype`` are left out."""
    network = _network(path) if importlib.util.find_spec("torch") is not None else {}
    header, description = read_model(path), read_description(path)
    M, K, d = (int(n) for n in header.codebooks.shape)
    split = _model_split(path, description)
    return head(
        "model",
        path,
        method=description.get("method"),
        **{key: network[key] for key in ("backbone",) if key in network},
        input=description["input"],
        codebooks=M,
        codewords=K,
        subdim=d,
        bits=M * (K.bit_length() - 1),
        **{key: network[key] for key in ("parameters", "dtype") if key in network},
        classes=len(description["class_names"]),
        class_names=list(description["class_names"]),
        multi_label=bool(description.get("multi_label", False)),
        model_fingerprint=header.model_fingerprint,
        codebooks_fingerprint=header.codebooks_fingerprint,
        data=description.get("data"),
        split=split,
        training=description.get("training"),
        files={f.name: f.stat().st_size for f in sorted(path.iterdir()) if f.is_file()},
        format_version=description["format_version"],
        versions=description.get("versions", {}),
    )


def _network(path: Path) -> dict[str, Any]:
    """Entries that need the loaded network."""
    from ...nn.model import load_model

    network = load_model(path).network
    spec = getattr(getattr(network, "backbone", None), "spec", None)
    return {
        "backbone": getattr(spec, "name", None),
        "parameters": sum(p.numel() for p in network.parameters()),
        "dtype": str(next(network.parameters()).dtype).removeprefix("torch."),
    }


def _model_split(path: Path, description: dict[str, Any]) -> dict[str, Any] | None:
    """The model's training split; None if its file is missing, as only evaluation needs it."""
    if not (path / "split.json").is_file():
        return None
    split = split_summary(path / "split.json")
    stated = (description.get("split") or {}).get("hash")
    if stated is not None and stated != split["hash"]:
        raise MismatchError(
            f"{path / 'split.json'} (hash {split['hash']}) is not the split of this model ({stated}): "
            "copy the whole folder again"
        )
    return split


def describe_unfinished(path: Path) -> dict[str, Any]:
    """An interrupted training or encoding, with its progress."""
    match = _UNFINISHED.match(path.resolve().name)
    out = str(path.parent / match["name"]) if match else None
    if (path / "progress.json").exists() or (path / "ids.raw").exists():
        return _unfinished_rows(path, out)
    checkpoint = path / "checkpoint.safetensors"
    if not checkpoint.exists():
        return head("unfinished training", path, out=out, step=0, remedy="nothing is saved yet: run it again")
    state = _checkpoint(checkpoint)
    return head(
        "unfinished training",
        path,
        out=out,
        step=int(state["step"]),
        seconds=round(float(state["seconds"]), 3),
        best_step=state["best_step"] or None,
        validation_map=state["best"],
        run_identity=str(state["identity"]),
        remedy="gpq train ... --resume continues it",
    )


def _checkpoint(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            state = parse_json((file.metadata() or {})["state"])
        if not isinstance(state, dict) or not {"step", "seconds", "best", "best_step", "identity"} <= set(
            state
        ):
            raise ValueError("no state of a training")
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise DataError(f"{path} is damaged ({first_line(error)}): start again with --overwrite") from None
    return state


def _unfinished_rows(path: Path, out: str | None) -> dict[str, Any]:
    kind = next((k for k in ("features", "codes") if (path / f"{k}.raw").exists()), None)
    if kind is None:
        raise DataError(f"{path} is damaged: it has neither features.raw nor codes.raw; delete it")
    rows, progress = 0, path / "progress.json"
    if progress.exists():
        value = read_json(progress, "the progress of a partial file")
        if not isinstance(value, dict) or not isinstance(value.get("rows"), int):
            raise DataError(f"{progress} has no number of rows: it is damaged; delete {path}")
        rows = value["rows"]
        if (path / "ids.raw").stat().st_size < rows * 8 if (path / "ids.raw").exists() else rows > 0:
            raise DataError(f"{path} is damaged: ids.raw is shorter than its {rows:,} rows; delete it")
    return head(
        f"unfinished {kind}", path, out=out, rows=rows, remedy="the same gpq encode command continues it"
    )
