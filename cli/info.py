"""``gpq info``."""

from __future__ import annotations

from typing import Any

import click

import gpq_faiss as gpq

from . import options as common


@click.command()
@click.argument("path")
@common.format_option("json", note="; JSON has everything")
def info(path: str, format_: str) -> None:
    """Describe and verify a file or folder: shapes, sizes, fingerprints, versions.

    PATH is a model folder, an unfinished run, features.h5, codes.h5, a split, an index, an exported
    encoder (.onnx, .pt2), or arrays (.npy, .npz). Of an index, the changes that a service has made
    beside it are counted.

    \b
    Examples:
      gpq info model
      gpq info index.faiss --format json
    """
    description = gpq.info(path)
    if format_ == "json":
        common.emit(description)
        return
    rows = _flat(description)
    width = max(map(len, rows))
    common.emit("\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows.items()))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values as texts by dotted name."""
    rows: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        rows |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: _text(value)}
    return rows


def _text(value: Any) -> str:
    """Return a value as text; a long list is cut off."""
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        suffix = f" ... ({len(value)} in all)" if len(value) > 20 else ""
        return ", ".join(map(_text, value[:20])) + suffix
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
