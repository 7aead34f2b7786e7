"""Model folders and files of rows for tests of the stages ``index`` and ``export-faiss``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from gpq_faiss.store import Header, RowWriter, codebooks_fingerprint

M, K, d, n = 6, 16, 12, 500
IDS = np.random.default_rng(3).permutation(n) * 1000 + 2**50


def codebooks(seed: int = 0) -> np.ndarray:
    Z = np.random.default_rng(seed).normal(size=(M, K, d))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def features() -> np.ndarray:
    x = np.random.default_rng(1).normal(size=(n, M, d))
    return (x / np.linalg.norm(x, axis=2, keepdims=True)).reshape(n, M * d).astype(np.float32)


def make_model(folder: Path, Z: np.ndarray, fingerprint: str = "model-1", **changes: object) -> Path:
    folder.mkdir()
    save_file({"codebooks": Z, "network.weight": np.ones(3, np.float32)}, folder / "model.safetensors")
    document = {
        "format_version": 1,
        "config": {},
        "input": {},
        "class_names": [],
        "model_fingerprint": fingerprint,
        "codebooks_fingerprint": codebooks_fingerprint(Z),
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def make_rows(
    path: Path, kind: str, values: np.ndarray, ids: np.ndarray, Z: np.ndarray, fingerprint: str = "model-1"
) -> Path:
    header = Header(
        kind=kind,  # type: ignore[arg-type]
        model_fingerprint=fingerprint,
        codebooks=Z,
        data_fingerprint="data-1",
    )
    with RowWriter(path, header) as writer:
        writer.append(values, ids, None)
        return writer.finish()
