"""Files of rows for the tests of the store."""

from collections.abc import Iterator
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
    made = Header(kind, "model", Z, "data", NAMES, True, {"note": "x"})
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


def appended(writer: RowWriter, n: int, step: int = 1000) -> Iterator[int]:
    """Append what is left of ``n`` rows, ``step`` at a time; yields the first of each part."""
    whole = rows(writer.header.kind, n)
    for at in range(writer.rows, n, step):
        writer.append(*(column[at : at + step] for column in whole), state={"at": at})
        yield at


def write(path: Path, kind: str = "features", n: int = 100, **options: Any) -> Any:
    """A file of ``n`` rows, which are returned."""
    with RowWriter(path, header(kind), **options) as writer:
        list(appended(writer, n, 33))
        writer.finish()
    return rows(kind, n)


def finish(path: Path, n: int, about: Header | None = None, **options: Any) -> int:
    """Write the rest of ``n`` rows of features; returns how many there were before, which the file has too."""
    with RowWriter(path, about or header(), **options) as writer:
        before = writer.rows
        list(appended(writer, n))
        writer.finish()
    with RowReader(path) as reader:
        for found, expected in zip(
            (reader.block(), reader.ids(), reader.labels()), rows("features", n), strict=True
        ):
            np.testing.assert_array_equal(found, expected)
    return before
