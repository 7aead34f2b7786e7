"""What an engine keeps from one search to the next never shows in later answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError
from gpq_faiss.indexes.items import Items
from gpq_faiss.indexes.memory import MemoryIndex

N = 10_000


def made(distinct: int, queries: int = 80) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, 3], some of them very frequent, codebooks [6, 16, 12], queries [queries, 72]."""
    rng = np.random.default_rng(distinct)
    Z = rng.normal(size=(6, 16, 12))
    few = pack_codes(rng.integers(0, 16, (distinct, 6)), 16)
    codes = few[np.minimum((rng.pareto(1, N) * 3).astype(int), distinct - 1)]
    return (
        codes,
        (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32),
        rng.normal(size=(queries, 72)).astype(np.float32),
    )


def brute_force(xq: np.ndarray, codes: np.ndarray, Z: np.ndarray, ids: np.ndarray, k: int):
    scores = score_codes(xq, codes, Z)
    order = np.stack([np.lexsort((ids, -row)) for row in scores])[:, :k]
    return np.take_along_axis(scores, order, axis=1), ids[order]


def test_threads_that_search_a_new_index_together_all_get_the_answer() -> None:
    codes, Z, xq = made(30)
    rng = np.random.default_rng(0)
    ids = rng.permutation(10**6)[:N]
    lists = [ids[rng.random(N) < share] for share in (0.2, 0.9, 0.3)]
    expected = [brute_force(xq, codes, Z, ids, 50)]
    for some in lists:
        among = np.isin(ids, some)
        expected.append(brute_force(xq, codes[among], Z, ids[among], 50))
    engine = MemoryIndex.build(codes, Z, ids)

    def run(seed: int) -> bool:
        order = np.random.default_rng(seed)
        right = True
        for _ in range(10):
            number, first = int(order.integers(4)), int(order.integers(70))
            where = None if number == 0 else lists[number - 1]
            D, found = engine.search(xq[first:], 50, where=where, threads=1)
            right &= np.array_equal(D, expected[number][0][first:])
            right &= np.array_equal(found, expected[number][1][first:])
        return bool(right)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


def test_ids_of_their_own_go_up_past_those_below_zero() -> None:
    codes, Z, _ = made(30)
    engine = MemoryIndex.build(codes[:3], Z, [-9, -5, -2])
    engine.add(codes[:2])
    assert engine.ids.tolist() == [-9, -5, -2, 0, 1]  # -1 is no id


@pytest.mark.parametrize("ids", [[1.7], [[1]], ["1"]])
def test_what_is_no_list_of_ids_removes_nothing(ids: list[object]) -> None:
    codes, Z, _ = made(30)
    engine = MemoryIndex.build(codes[:3], Z)
    with pytest.raises(DataError, match="ids to remove"):
        engine.remove(ids)  # type: ignore[arg-type]
    assert engine.ids.tolist() == [0, 1, 2]


def test_ids_that_repeat_are_not_taken_for_positions() -> None:
    codes = np.arange(9, dtype=np.uint8).reshape(3, 3)
    items = Items.ordered(codes, np.array([2, 0, 0]))
    assert items.ids.tolist() == [0, 0, 2]
    assert items.codes.tolist() == codes[[1, 2, 0]].tolist()
    assert Items.ordered(codes, np.array([2, 0, 1])).own is None
