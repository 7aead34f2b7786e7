"""What users of the package as a library run into: other sizes, arrays of their own, files that change, slips."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from gpq_faiss.codes.codebooks import inject
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.faissio.io import load_index, save_index
from gpq_faiss.faissio.storage import FORMS as NAMES
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.filters import Allow, Deny
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.inputs import parse_bytes


def books(M: int, K: int = 16, d: int = 4, seed: int = 0) -> np.ndarray:
    Z = np.random.default_rng([seed, M, K, d]).standard_normal((M, K, d))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def draw(n: int, M: int, K: int = 16, seed: int = 0) -> np.ndarray:
    """Packed codes."""
    bits = K.bit_length() - 1
    digits = np.random.default_rng([seed, n, M]).integers(0, K, (n, M))
    spread = (digits[:, :, None] >> np.arange(bits)) & 1
    return np.packbits(spread.reshape(n, -1).astype(np.uint8), axis=1, bitorder="little")


def ask(Q: int, width: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([seed, Q, width]).standard_normal((Q, width)).astype(np.float32)


def best(xq: np.ndarray, codes: np.ndarray, Z: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    scores = score_codes(xq, codes, Z)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, axis=1), order


# ------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("K", [4, 8, 64, 256])
@pytest.mark.parametrize("queries", [1, 4, 9])
def test_codebooks_of_any_size_are_searched_on_disk(tmp_path: Path, K: int, queries: int) -> None:
    Z, codes = books(4, K, 3), draw(20_000, 4, K)
    MemoryIndex.build(codes, Z).save(tmp_path / "a.faiss")
    xq = ask(queries, 12)
    with open_file(tmp_path / "a.faiss", "8MB") as engine:
        D, found = engine.search(xq, 10)
    expected_D, expected = best(xq, codes, Z, 10)
    assert np.array_equal(D, expected_D)
    assert np.array_equal(found, expected)
    for call in (lambda: engine.search(xq, 10), lambda: engine.range_search(xq, 1.0)):
        with pytest.raises(UsageError, match="was closed"):
            call()


@pytest.mark.parametrize("K", [4, 8, 16, 256])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_sub_vectors_of_few_dimensions(K: int, d: int) -> None:
    """Faiss' kernel for two dimensions takes no four codewords."""
    Z, codes = books(3, K, d), draw(9000, 3, K)
    xq = ask(5, 3 * d)
    D, found = MemoryIndex.build(codes, Z).search(xq, 7)
    expected_D, expected = best(xq, codes, Z, 7)
    assert np.array_equal(D, expected_D)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("M", [128, 255, 256])
def test_as_many_codebooks_as_a_training_takes(tmp_path: Path, M: int) -> None:
    Z, codes = books(M, 16, 2), draw(9000, M)
    engine = MemoryIndex.build(codes, Z)
    xq = ask(3, 2 * M)
    D, found = engine.search(xq, 10)
    expected_D, expected = best(xq, codes, Z, 10)
    assert np.array_equal(D, expected_D)
    assert np.array_equal(found, expected)
    for form in ("flat", "fastscan"):
        engine.save(tmp_path / f"{form}.faiss", form)
        assert np.array_equal(open_in_memory(tmp_path / f"{form}.faiss").search(xq, 10)[1], expected)


def test_more_codebooks_are_refused_and_never_scanned_in_sixteen_bits() -> None:
    with pytest.raises(UsageError, match="257 codebooks: at most 256"):
        MemoryIndex.build(draw(10, 257), books(257))


# ------------------------------------------------------------------------------------------------------ arrays and files


def test_what_the_caller_does_with_its_arrays_changes_nothing() -> None:
    Z, codes, ids = books(5), draw(500, 5), np.arange(500) * 3
    kept = Z.copy(), codes.copy(), ids.copy()
    engine = MemoryIndex.build(codes, Z, ids)
    xq = ask(6, 20)
    before = engine.search(xq, 9)
    for array in (Z, codes, ids):
        array[:] = array[::-1].copy()
    after = engine.search(xq, 9)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    again = MemoryIndex.build(kept[1], kept[0], kept[2]).search(xq, 9)
    assert all(np.array_equal(a, b) for a, b in zip(before, again, strict=True))


FORMS: list[tuple[Any, bool]] = [(form, ids) for form in NAMES for ids in (False, True)]


@pytest.mark.parametrize(("form", "ids"), FORMS)
def test_an_open_file_that_is_replaced_goes_on_answering(tmp_path: Path, form: Any, *, ids: bool) -> None:
    """As ``--overwrite`` replaces it: by another file of the same name."""
    Z, path = books(6), tmp_path / "a.faiss"
    numbers = np.random.default_rng(0).permutation(20_000) * 7 - 5 if ids else None
    MemoryIndex.build(draw(20_000, 6), Z, numbers).save(path, form)
    xq = ask(5, 24)
    with open_file(path, "3MB") as engine:
        before = engine.search(xq, 8)
        ranged = engine.range_search(xq, float(before[0][:, 3].max()))
        other = None if numbers is None else numbers[::-1] * 3
        MemoryIndex.build(draw(20_000, 6, seed=5), Z, other).save(path, form, overwrite=True)
        assert all(np.array_equal(a, b) for a, b in zip(before, engine.search(xq, 8), strict=True))
        path.unlink()
        again = engine.range_search(xq, float(before[0][:, 3].max()))
        assert all(np.array_equal(a, b) for a, b in zip(ranged, again, strict=True))


@pytest.mark.parametrize(("form", "ids"), FORMS)
def test_an_open_file_that_is_cut_off_is_one_line(tmp_path: Path, form: Any, *, ids: bool) -> None:
    Z, path = books(6), tmp_path / "a.faiss"
    numbers = np.arange(20_000) * 7 if ids else None
    MemoryIndex.build(draw(20_000, 6), Z, numbers).save(path, form)
    with open_file(path, "3MB") as engine:
        os.truncate(path, 5000)
        with pytest.raises(DataError, match="was changed while it was in use"):
            engine.range_search(ask(5, 24), 1.0)


def test_a_pipe_is_no_index(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="a device or a pipe"):
        open_file(tmp_path / "pipe")


def test_an_item_without_an_id_in_a_foreign_file_is_refused(tmp_path: Path) -> None:
    index = faiss.IndexIDMap(inject(books(3)))
    index.add_with_ids(ask(4, 12), np.array([5, -1, 7, 8]))
    faiss.write_index(index, str(tmp_path / "a.faiss"))
    with pytest.raises(DataError, match="has the id -1"):
        load_index(tmp_path / "a.faiss")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"ntotal": ' + "9" * 5000 + "}"])
def test_a_sidecar_that_is_too_much_for_python_is_one_line(tmp_path: Path, text: str) -> None:
    index = inject(books(3))
    index.add_sa_codes(draw(5, 3))
    save_index(index, tmp_path / "a.faiss")
    (tmp_path / "a.faiss.json").write_text(text)
    with pytest.raises(DataError, match=r"a\.faiss\.json"):
        load_index(tmp_path / "a.faiss")


# ------------------------------------------------------------------------------------------------------------- slips


def test_ids_beyond_64_bits_are_nobodys() -> None:
    engine = MemoryIndex.build(draw(10, 3), books(3), np.arange(10) - 705)
    wrong = np.array([2**64 - 700], np.uint64)
    with pytest.raises(DataError, match="does not fit signed 64 bits"):
        engine.remove(wrong)
    for where in (Allow(wrong), Deny(wrong), wrong):
        with pytest.raises(DataError, match="does not fit signed 64 bits"):
            engine.search(ask(1, 12), 1, where=where)
    assert engine.ntotal == 10


def test_parquet_with_ids_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    from gpq_faiss.build.shards import ParquetShard

    table = {"id": pyarrow.array([1, 2**63 + 5], pyarrow.uint64()), "codes": [bytes(2), bytes(2)]}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="does not fit signed 64 bits"):
        list(ParquetShard(tmp_path / "a.parquet", books(3)).blocks(100))


def test_allowed_ids_in_any_collection() -> None:
    engine = MemoryIndex.build(draw(50, 3), books(3))
    xq = ask(2, 12)
    expected = engine.search(xq, 4, where=[3, 5, 7, 9])[1]
    for where in ((3, 5, 7, 9), {3, 5, 7, 9}, frozenset({3, 5, 7, 9}), range(3, 10, 2), Allow({3, 5, 7, 9})):
        assert np.array_equal(engine.search(xq, 4, where=where)[1], expected)


SLIPS: list[dict[str, Any]] = [
    {"threads": 1.5},
    {"threads": "2"},
    {"threads": 10**12},
    {"threads": 0},
    {"threads": True},
]


@pytest.mark.parametrize("slip", SLIPS, ids=str)
def test_numbers_that_cannot_be_are_usage_errors(tmp_path: Path, slip: dict[str, Any]) -> None:
    engine = MemoryIndex.build(draw(50, 3), books(3))
    engine.save(tmp_path / "a.faiss")
    with open_file(tmp_path / "a.faiss", "3MB") as disk:
        for made in (engine, disk):
            with pytest.raises(UsageError, match=next(iter(slip))):
                made.search(ask(2, 12), 3, **slip)


@pytest.mark.parametrize("least", [None, "0", True, float("nan")])
def test_a_least_score_that_is_none_is_a_usage_error(least: Any) -> None:
    with pytest.raises(UsageError, match="minimum score"):
        MemoryIndex.build(draw(50, 3), books(3)).range_search(ask(1, 12), least)


def test_a_file_with_a_direct_map_is_refused(tmp_path: Path) -> None:
    MemoryIndex.build(draw(50, 3), books(3)).save(tmp_path / "a.faiss", "ivf")
    index = faiss.read_index(str(tmp_path / "a.faiss"))
    faiss.extract_index_ivf(index).set_direct_map_type(faiss.DirectMap.Hashtable)
    faiss.write_index(index, str(tmp_path / "b.faiss"))
    with pytest.raises(
        DataError, match=r"b\.faiss is damaged .* or set up in a way that GPQ codes do not have"
    ):
        open_file(tmp_path / "b.faiss", "3MB")


@pytest.mark.parametrize("least", [1e39, -1e39, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["memory", "flat", "ivf"])
def test_beyond_float32_every_score_or_none_is_enough(kind: str, least: float, tmp_path: Path) -> None:
    n = 0 if least > 0 else 50
    engine = MemoryIndex.build(draw(50, 3), books(3))
    engine.save(tmp_path / "a.faiss", "flat" if kind == "memory" else kind)
    with warnings.catch_warnings(), open_file(tmp_path / "a.faiss", "3MB") as disk:
        warnings.simplefilter("error")
        lims, _, ids = (engine if kind == "memory" else disk).range_search(ask(2, 12), least)
    assert lims.tolist() == [0, n, 2 * n]
    assert sorted(ids[:n].tolist()) == list(range(n))


def test_rows_of_different_lengths_are_data_errors() -> None:
    Z, codes = books(3), draw(3, 3)
    engine = MemoryIndex.build(codes, Z)
    ragged: Any = [[1, 2], [3]]
    for call in (
        lambda: engine.search(ragged, 1),
        lambda: MemoryIndex.build(ragged, Z),
        lambda: MemoryIndex.build(codes, ragged),
        lambda: MemoryIndex.build(codes, Z, ragged),
        lambda: engine.search(ask(1, 12), 1, where=Allow(ragged)),
        lambda: engine.add(5),
        lambda: engine.add(ragged),
    ):
        with pytest.raises(DataError):
            call()


def test_engines_on_disk_are_not_merged_in_memory(tmp_path: Path) -> None:
    engine = MemoryIndex.build(draw(5, 3), books(3))
    engine.save(tmp_path / "a.faiss")
    with open_file(tmp_path / "a.faiss") as disk, pytest.raises(UsageError, match="FileIndex"):
        engine.merge(disk)


@pytest.mark.parametrize("nprobe", [2.5, 0, "3"])
def test_numbers_of_lists_that_cannot_be(nprobe: Any) -> None:
    with pytest.raises(UsageError, match="nprobe"):
        MemoryIndex.build(draw(50, 3), books(3)).search(ask(1, 12), 3, nprobe=nprobe)


@pytest.mark.parametrize(("memory", "expected"), [(2e9, 2 * 10**9), (np.int64(5), 5), ("2 GB", 2 * 10**9)])
def test_memory_in_any_number(memory: Any, expected: int) -> None:
    assert parse_bytes(memory) == expected


@pytest.mark.parametrize("memory", [True, None, 0.5, float("nan"), "much"])
def test_memory_that_is_none(memory: Any) -> None:
    with pytest.raises(UsageError, match="memory"):
        parse_bytes(memory)


@pytest.mark.parametrize("limit", [-1, 2.5, True, "10"])
def test_a_limit_that_is_not_a_number_of_results_is_an_error(tmp_path: Path, limit: Any) -> None:
    index = MemoryIndex.build(
        np.zeros((2, 1), np.uint8), np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)
    )
    index.save(tmp_path / "i.faiss")
    with open_file(tmp_path / "i.faiss") as stored:
        for each in (index, stored):
            with pytest.raises(UsageError, match="limit"):
                each.range_search(np.ones((1, 32), np.float32), 1.0, limit=limit)


def test_a_filter_function_that_searches_the_same_file_is_an_error_and_no_standstill(tmp_path: Path) -> None:
    MemoryIndex.build(draw(50, 3), books(3)).save(tmp_path / "a.faiss")
    with open_file(tmp_path / "a.faiss", "3MB") as disk:
        xq = ask(1, 12)
        expected = disk.search(xq, 3)[1]
        with pytest.raises(UsageError, match="filter function searches"):
            disk.search(xq, 3, where=lambda ids: np.isin(ids, disk.search(xq, 3)[1]))
        assert np.array_equal(disk.search(xq, 3, where=lambda ids: np.isin(ids, expected))[1], expected)
