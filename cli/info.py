"""``gpq info``."""

from __future__ import annotations

from typing import Any

import click

from .options import emit, format_option


@click.command()
@click.argument("path")
@format_option("json", note="; JSON has everything")
def info(path: str, format_: str) -> None:
    """Describe and verify a file or folder: shapes, sizes, fingerprints, versions.

    PATH is a model folder, an unfinished run, features.h5, codes.h5, a split, a Faiss index, a manifest of shards, an exported
    encoder (.onnx, .pt2), or arrays (.npy, .npz).

    Checksums are compared where there are any. "verified" tells whether there was one and it matched, for an index, an encoder and .npz.

    \b
    Examples:
      gpq info model
      gpq info index.faiss --format json
    """
    from gpq_faiss.stages.info import info as run

    found = run(path)
    emit(found if format_ == "json" else _table(found))


def _table(found: dict[str, Any]) -> str:
    """Two columns; nested values have dotted names, and long lists are truncated."""
    rows = _flat(found)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        rows += _flat(value, f"{name}.") if isinstance(value, dict) else [(name, _text(name, value))]
    return rows


def _text(name: str, value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        more = f" ... ({len(value)} in all)" if len(value) > 20 else ""
        return (" x " if "shape" in name else ", ").join(_text("", v) for v in value[:20]) + more
    if isinstance(value, int) and name.rsplit(".", maxsplit=1)[-1] not in {"format_version", "seed"}:
        return f"{value:,}"
    return str(value)
