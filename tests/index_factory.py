"""Codes, model folders and files of rows for tests of indexes and of the stages that make them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from gpq_faiss.codes.bits import pack_codes, unpack_codes
from gpq_faiss.codes.scores import score_tables
from gpq_faiss.store.header import Header, codebooks_fingerprint
from gpq_faiss.store.writer import RowWriter

M, K, d, n = 6, 16, 12, 500
IDS = np.random.default_rng(3).permutation(n) * 1000 + 2**50


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def books(M: int, K: int = 16, d: int = 4, seed: int = 0) -> np.ndarray:
    return unit(np.random.default_rng([M, K, d, seed]).normal(size=(M, K, d)))


def codebooks(seed: int = 0) -> np.ndarray:
    return books(M, K, d, seed)


def features() -> np.ndarray:
    return unit(np.random.default_rng(1).normal(size=(n, M, d))).reshape(n, M * d)


def random_codes(n: int, M: int, K: int = 16, seed: int = 0, distinct: int | None = None) -> np.ndarray:
    """Packed codes; of ``distinct`` ones some are very frequent, many rare."""
    rng = np.random.default_rng([seed, n, M])
    codes = pack_codes(rng.integers(0, K, (distinct or n, M)), K)
    return codes if distinct is None else codes[np.minimum((rng.pareto(1, n) * 3).astype(int), distinct - 1)]


def queries(Q: int, width: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([seed, Q, width]).standard_normal((Q, width)).astype(np.float32)


def score_codes(xq: np.ndarray, codes: np.ndarray, Z: np.ndarray) -> np.ndarray:
    """Brute force: float32 [Q, n] = sum_m q_m . Z[m, code_m], in the order of codes.scores: (t0 + t1) + (t2 + t3) + ..."""
    words, tables = unpack_codes(codes, *Z.shape[:2]).T, score_tables(xq, Z)
    parts = [tables[:, m, word] for m, word in enumerate(words)]
    pairs = [sum(parts[m + 1 : m + 2], parts[m]) for m in range(0, len(parts), 2)]
    return np.asarray(sum(pairs[1:], pairs[0]))


def best(
    xq: np.ndarray, codes: np.ndarray, Z: np.ndarray, k: int, ids: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Brute force: scores and ids, ties in ascending order of id."""
    scores = score_codes(xq, codes, Z)
    own = np.arange(len(codes)) if ids is None else ids
    order = np.stack([np.lexsort((own, -row)) for row in scores])[:, :k]
    return np.take_along_axis(scores, order, axis=1), own[order]


def same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """The same arrays, of the same types."""
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


def make_model(folder: Path, Z: np.ndarray, fingerprint: str = "model-1", **changes: object) -> Path:
    folder.mkdir()
    save_file({"codebooks": Z, "network.weight": np.ones(3, np.float32)}, folder / "model.safetensors")
    document = {"format_version": 1, "config": {}, "input": {}, "class_names": []}
    document |= {
        "model_fingerprint": fingerprint,
        "codebooks_fingerprint": codebooks_fingerprint(Z),
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def make_rows(
    path: Path, kind: str, values: np.ndarray, ids: np.ndarray, Z: np.ndarray, fingerprint: str = "model-1"
) -> Path:
    header = Header(kind=kind, model_fingerprint=fingerprint, codebooks=Z, data_fingerprint="data-1")
    with RowWriter(path, header) as writer:
        writer.append(values, ids, None)
        return writer.finish()
