"""Description of HDF5 files, indexes, and their JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import DataError
from ...files import read_json
from .common import SMALL_JSON, head


def describe_hdf5(path: Path) -> dict[str, Any]:
    """Features, codes, or the results of a search."""
    from ...store import describe, read_hdf5_array

    results = {name: read_hdf5_array(path, [name], required=False) for name in ("ids", "scores", "query_ids")}
    if all(array is not None for array in results.values()):
        arrays = {
            n: {"shape": list(a.shape), "dtype": str(a.dtype)} for n, a in results.items() if a is not None
        }
        return head("results", path, arrays=arrays)
    found = describe(path)
    kind, names = str(found.pop("kind", None) or found.pop("type")), list(found.pop("classes"))
    for key in ("type", "path", "bytes"):
        found.pop(key, None)
    return head(
        kind,
        path,
        shape=[found["ntotal"], found.pop("width")],
        dtype="float32" if kind == "features" else "uint8",
        **found,
        classes=len(names),
        class_names=names,
    )


def describe_index(path: Path) -> dict[str, Any]:
    """A Faiss index and its sidecar."""
    from ...faissio.io import load_index, sidecar_path
    from ...faissio.layout import layout_of

    index, sidecar = load_index(path)
    layout = layout_of(index, what=str(path))
    M, K, d = (int(n) for n in layout.codebooks.shape)
    beside = sidecar_path(path)
    return head(
        "index",
        path,
        layout=layout.form,
        faiss_class=type(index).__name__,
        metric="inner product",
        ntotal=layout.ntotal,
        shape=[layout.ntotal, layout.code_size],
        dtype="uint8",
        dimension=int(index.d),
        codebooks=M,
        codewords=K,
        subdim=d,
        bits=M * (K.bit_length() - 1),
        code_size=layout.code_size,
        own_ids=layout.mapped,
        model_fingerprint=sidecar["model_fingerprint"],
        codebooks_fingerprint=layout.fingerprint,
        sidecar=str(beside) if beside.exists() else None,
        sha256=sidecar["sha256"],
        verified=beside.exists(),
        versions=sidecar["versions"],
        extra=sidecar.get("extra", {}),
    )


def describe_manifest(path: Path) -> dict[str, Any]:
    """The shards of an index, each verified."""
    from ...indexes.manifest import read_manifest, verify_manifest

    manifest = read_manifest(path)
    verify_manifest(manifest)
    return head(
        "shards",
        path,
        ntotal=manifest.ntotal,
        codebooks_fingerprint=manifest.codebooks_fingerprint,
        model_fingerprint=manifest.model_fingerprint,
        shards=[f"{shard.file} ({shard.ntotal:,} items)" for shard in manifest.shards],
        verified=True,
    )


def describe_json(path: Path) -> dict[str, Any]:
    """A split, or the index that this sidecar belongs to."""
    if path.stat().st_size > SMALL_JSON:
        return _split(path)
    value = read_json(path, "a split or an index's sidecar")
    if isinstance(value, dict) and value.get("kind") == "shards":
        return describe_manifest(path)
    if isinstance(value, dict) and {"codebooks_fingerprint", "sha256", "ntotal"} <= set(value):
        index = path.with_name(path.name.removesuffix(".json"))
        if index == path or not index.is_file():
            raise DataError(f"{path} describes an index that is not beside it: copy both files")
        return describe_index(index)
    return _split(path)


def _split(path: Path) -> dict[str, Any]:
    return head("split", path, **split_summary(path))


def split_summary(path: Path) -> dict[str, Any]:
    """Name, seed, hash and the sizes of the roles of a split file."""
    from ...data.split import load_split

    split = load_split(path)
    return {
        "protocol": split.name,
        "seed": split.seed,
        "hash": split.hash,
        "items": split.n,
        **{role: len(getattr(split, role)) for role in ("query", "labelled", "unlabelled", "database")},
        "seen_classes": None if split.seen_classes is None else list(split.seen_classes),
    }
