"""An index in one file, and the same items in the shards of a manifest."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from index_factory import books

from gpq_faiss.indexes.manifest import update_manifest
from gpq_faiss.indexes.memory import MemoryIndex

M, d = 4, 6


def codebooks(seed: int = 0) -> np.ndarray:
    return books(M, d=d, seed=seed)


@dataclass
class Made:
    """An index in one file, and the same items in shards."""

    single: Path
    manifest: Path
    ids: np.ndarray
    queries: np.ndarray


def make(folder: Path, seed: int, n: int, shards: int, *, form: str = "flat", distinct: int = 40) -> Made:
    """Few distinct codes, so that most scores are shared by items of several shards."""
    rng = np.random.default_rng(seed)
    Z = codebooks()
    codes = rng.integers(0, 256, (distinct, 2), np.uint8)[rng.integers(0, distinct, n)]
    ids = rng.choice(5 * n, n, replace=False).astype(np.int64) - n
    ids[ids == -1] = 10**7
    of = np.concatenate([np.arange(shards), rng.integers(0, shards, n - shards)])
    parts = []
    for shard in range(shards):
        rows = np.flatnonzero(of == shard)
        made = MemoryIndex.build(codes[rows], Z, ids[rows])
        parts.append(made.save(folder / "shards" / f"{shard}.faiss", form))
    single = MemoryIndex.build(codes, Z, ids).save(folder / "single.faiss", form)
    update_manifest(folder / "manifest.json", parts, new=True)
    queries = rng.normal(size=(5, M * d)).astype(np.float32)
    return Made(single, folder / "manifest.json", ids, queries)
