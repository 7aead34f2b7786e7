"""Codes, model folders and files of rows, and brute-force oracles for tests of indexes."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file

from gpq_faiss.codes.bits import pack_codes, unpack_codes
from gpq_faiss.codes.scores import score_tables
from gpq_faiss.store.rows import Header, RowWriter, codebooks_fingerprint


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def books(M: int, K: int = 16, d: int = 4, seed: int = 0) -> np.ndarray:
    return unit(np.random.default_rng([M, K, d, seed]).normal(size=(M, K, d)))


def random_codes(
    n: int, M: int, K: int = 16, seed: int = 0, distinct: int | None = None
) -> np.ndarray:
    """Packed codes; of ``distinct`` ones some are very frequent, many rare."""
    rng = np.random.default_rng([seed, n, M])
    codes = pack_codes(rng.integers(0, K, (distinct or n, M)), K)
    if distinct is None:
        return codes
    return codes[np.minimum((rng.pareto(1, n) * 3).astype(int), distinct - 1)]


def random_ids(n: int, seed: int = 0) -> np.ndarray:
    """Distinct ids in no order, negative and large ones among them."""
    ids = np.random.default_rng([seed, n]).permutation(n) * 3 - n
    ids[ids == -1] = 2**50
    return ids


def queries(Q: int, width: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([seed, Q, width]).standard_normal((Q, width)).astype(np.float32)


def score_codes(xq: np.ndarray, codes: np.ndarray, Z: np.ndarray) -> np.ndarray:
    """Brute force: float32 [Q, n], q_m . Z[m, code_m] added as in codes.scores: (t0 + t1) + ..."""
    words, tables = unpack_codes(codes, *Z.shape[:2]).T, score_tables(xq, Z)
    parts = [tables[:, m, word] for m, word in enumerate(words)]
    pairs = [sum(parts[m + 1 : m + 2], parts[m]) for m in range(0, len(parts), 2)]
    return np.asarray(sum(pairs[1:], pairs[0]))


def best(
    xq: np.ndarray, codes: np.ndarray, Z: np.ndarray, k: int, ids: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Brute force: scores and ids, ties in ascending order of id."""
    scores = score_codes(xq, codes, Z)
    item_ids = np.arange(len(codes)) if ids is None else ids
    order = np.stack([np.lexsort((item_ids, -row)) for row in scores])[:, :k]
    return np.take_along_axis(scores, order, axis=1), item_ids[order]


def padded_best(
    xq: np.ndarray, codes: np.ndarray, Z: np.ndarray, k: int, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Brute force with -inf and -1 where there are fewer than k items."""
    D, best_ids = best(xq, codes, Z, k, ids)
    missing = (0, 0), (0, k - D.shape[1])
    return np.pad(D, missing, constant_values=-np.inf), np.pad(
        best_ids, missing, constant_values=-1
    )


def within(
    xq: np.ndarray, codes: np.ndarray, Z: np.ndarray, min_score: float, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Brute force: lims, scores and ids of all items with at least a score."""
    D, best_ids = best(xq, codes, Z, len(codes), ids)
    mask = np.float64(min_score) <= D
    lims = np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype(np.int64)
    return lims, D[mask], best_ids[mask]


def same(arrays: Iterable[Any], expected: Iterable[Any]) -> bool:
    """Whether arrays are equal, of equal types."""
    pairs = zip(arrays, expected, strict=True)
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


SHAPES = st.sampled_from(
    [(M, 16) for M in (1, 2, 3, 6, 8, 12)] + [(4, 4), (5, 8), (3, 32), (2, 256)]
)
"""Numbers of codebooks and of codewords."""


def make_model(
    folder: Path, Z: np.ndarray, fingerprint: str = "model-1", **changes: object
) -> Path:
    """Write a model folder that has codebooks and no network."""
    folder.mkdir()
    save_file({"codebooks": Z}, folder / "model.safetensors")
    document: dict[str, object] = {"config": {}, "input": {}, "data": {}, "split": {}}
    document |= {"format_version": 2, "method": "gpq", "class_names": [], "run_identity": ""}
    document |= {
        "model_fingerprint": fingerprint,
        "codebooks_fingerprint": codebooks_fingerprint(Z),
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def make_rows(
    path: Path, values: np.ndarray, ids: np.ndarray, Z: np.ndarray, **options: Any
) -> Path:
    """Write codes (uint8) or features; ``labels``, ``texts`` and fields of Header are optional."""
    labels, texts = options.pop("labels", None), options.pop("texts", None)
    kind = "codes" if values.dtype == np.uint8 else "features"
    fields = {"model_fingerprint": "model-1", "data_fingerprint": "data-1", **options}
    with RowWriter(path, Header(kind=kind, codebooks=Z, **fields)) as writer:
        writer.append(values, ids, labels)
        return writer.finish(ids, texts)
