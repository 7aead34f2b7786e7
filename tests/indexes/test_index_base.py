"""The same file gives the same answer wherever it is searched: in memory, in place, and by the code for devices."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.codebooks import inject
from gpq_faiss.errors import UsageError
from gpq_faiss.faissio.storage import FORMS
from gpq_faiss.gpu.index import DeviceIndex, to_gpu
from gpq_faiss.indexes.base import Index
from gpq_faiss.indexes.file import FileIndex, open_file
from gpq_faiss.indexes.filters import Deny
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory, open_index

M, N = 5, 12_000


def codebooks() -> np.ndarray:
    Z = np.random.default_rng(0).normal(size=(M, 16, 8))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


@pytest.fixture(params=["positions", "ascending", "any"])
def ids(request: pytest.FixtureRequest) -> np.ndarray | None:
    own = np.arange(N) * 3 - 500
    return {"positions": None, "ascending": own, "any": np.random.default_rng(2).permutation(own)}[
        request.param
    ]


@pytest.fixture(params=FORMS)
def opened(request: pytest.FixtureRequest, tmp_path: Path, ids: np.ndarray | None) -> Iterator[list[Any]]:
    """The same file in memory, in place with little memory and with much, and on a device."""
    rng = np.random.default_rng(1)
    codes = pack_codes(rng.integers(0, 16, (N, M)), 16)
    codes[: N // 2] = codes[rng.integers(0, 40, N // 2)]  # ties, to be in the order of ids
    path = MemoryIndex.build(codes, codebooks(), ids).save(tmp_path / "a.faiss", request.param)
    memory = open_in_memory(path)
    found: list[Any] = [
        memory,
        open_file(path, "2MB"),
        open_file(path, "1GB"),
        to_gpu(memory, "cpu"),
    ]
    with ExitStack() as stack:
        yield [stack.enter_context(closing(index)) for index in found]


def test_every_index_gives_the_same_answer(opened: list[Any], ids: np.ndarray | None) -> None:
    xq = np.random.default_rng(3).normal(size=(7, M * 8)).astype(np.float32)
    own = np.arange(N) if ids is None else ids
    first = opened[0]
    for k in (1, 10, 700):
        for where in (None, Deny(own[::3]), lambda i: i % 2 == 0, own[:5].tolist()):
            expected = first.search(xq, k, where=where, threads=1)
            for index in opened[1:]:
                D, found = index.search(xq, k, where=where, threads=1)
                assert np.array_equal(found, expected[1]), index.describe()
                assert np.array_equal(D, expected[0]), index.describe()
    low = float(first.search(xq, 40)[0][:, -1].max())
    for where in (None, Deny(own[::3]), []):
        expected = first.range_search(xq, low, where=where)
        for index in opened[1:]:
            for mine, theirs in zip(index.range_search(xq, low, where=where), expected, strict=True):
                assert np.array_equal(mine, theirs), index.describe()


def test_every_index_says_what_it_is(opened: list[Any]) -> None:
    first = opened[0]
    for index in opened:
        assert (index.ntotal, index.width) == (N, M * 8)
        assert index.fingerprint == first.fingerprint
        assert np.array_equal(index.codebooks, first.codebooks)
        assert f"{N:,} items" in index.describe()
    with pytest.raises(UsageError, match="on a device it is exact"):
        opened[-1].search(np.ones((1, M * 8), np.float32), 1, nprobe=2)


@pytest.mark.parametrize("name", ["search", "range_search", "describe", "close"])
def test_an_index_on_a_device_is_called_like_the_others(name: str) -> None:
    """But for what only lists on the CPU can do."""
    own = inspect.signature(getattr(DeviceIndex, name)).parameters
    stated = inspect.signature(getattr(Index, name)).parameters
    for parameter in stated.values():
        if parameter.name != "floor":
            assert own[parameter.name].kind == parameter.kind
            assert own[parameter.name].default == parameter.default
    assert all(own[name].default is not inspect.Parameter.empty for name in set(own) - set(stated))


def test_a_closed_file_is_not_searched(tmp_path: Path) -> None:
    made = MemoryIndex.build(pack_codes(np.zeros((9, M), np.uint8), 16), codebooks())
    index = open_index(made.save(tmp_path / "a.faiss"), memory="1MB")
    index.close()
    held = open_file(tmp_path / "a.faiss")
    held.close()
    with pytest.raises(UsageError, match="closed"):
        held.search(np.ones((1, M * 8), np.float32), 1)


def test_a_faiss_index_opens_in_memory_and_takes_no_budget(tmp_path: Path) -> None:
    Z = np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)
    filled = inject(Z)
    filled.add_sa_codes(np.array([[0x00], [0x21], [0x21]], np.uint8))
    xq = np.arange(32.0)[None]
    D, found = open_index(filled).search(xq, 3)
    assert found.tolist() == [[1, 2, 0]]
    faiss.write_index(filled, str(tmp_path / "i.faiss"))
    in_place = open_index(tmp_path / "i.faiss", in_place=True)
    assert isinstance(in_place, FileIndex)
    assert np.array_equal(in_place.search(xq, 3)[0], D)
    in_place.close()
    for options in ({"memory": "1GB"}, {"in_place": True}):
        with pytest.raises(UsageError, match="a Faiss index is in memory"):
            open_index(filled, **options)
