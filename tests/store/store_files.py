"""Files of rows for the tests of the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpq_faiss.store.header import Header
from gpq_faiss.store.reader import RowReader
from gpq_faiss.store.writer import RowWriter

M, K, d = 3, 16, 12
NAMES = tuple(f"c{i}" for i in range(11))  # 2 label bytes with 5 padding bits


def codebooks(seed: int = 0, m: int = M, k: int = K) -> np.ndarray:
    Z = np.random.default_rng(seed).standard_normal((m, k, d)).astype(np.float32)
    return Z / np.linalg.norm(Z, axis=2, keepdims=True)


def header(kind: str = "features", **changes: Any) -> Header:
    Z = changes.pop("codebooks", codebooks())
    made = Header(kind, "model", Z, "data", NAMES, True, {"note": "x"})  # type: ignore[arg-type]
    return replace(made, **changes)


def rows(kind: str, n: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    if kind == "features":
        values = rng.standard_normal((n, M * d)).astype(np.float32)
    else:
        values = rng.integers(0, 256, (n, 2)).astype(np.uint8)
        values[:, -1] &= 0x0F  # 12 bits
    ids = rng.integers(-(2**62), 2**62, n)
    return values, ids, np.packbits(rng.random((n, 11)) < 0.3, axis=1)


def write(path: Path, kind: str = "features", n: int = 100, step: int = 33, **changes: Any) -> Any:
    values, ids, labels = rows(kind, n)
    with RowWriter(path, header(kind, **changes)) as writer:
        for s in range(0, n, step):
            writer.append(values[s : s + step], ids[s : s + step], labels[s : s + step])
        writer.finish()
    return values, ids, labels


def finish(path: Path, n: int, **options: Any) -> int:
    """Write the rest of ``n`` rows of features; returns how many there were before, which the file has too."""
    values, ids, labels = rows("features", n)
    with RowWriter(path, header(), **options) as writer:
        at = writer.rows
        writer.append(values[at:], ids[at:], labels[at:])
        writer.finish()
    with RowReader(path) as reader:
        np.testing.assert_array_equal(reader.block(), values)
        np.testing.assert_array_equal(reader.ids(), ids)
        np.testing.assert_array_equal(reader.labels(), labels)
    return at
