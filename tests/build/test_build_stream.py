"""Building in a stream, and searching in place: against the same done in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import faiss
import numpy as np
import pytest
from build_progress import progress_of

from gpq_faiss.build.shards import Hdf5Shard, ParquetShard
from gpq_faiss.build.stream import build_index, check_stored_ids
from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.codebooks import inject
from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.faissio.header import pack_rows, read_header, row_header
from gpq_faiss.faissio.io import load_index, sidecar_path
from gpq_faiss.faissio.layout import layout_of
from gpq_faiss.faissio.source import IndexFile
from gpq_faiss.faissio.storage import Form, faiss_index
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.filters import Deny
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.inputs import parse_bytes
from gpq_faiss.store import Header, RowWriter

M, MODEL = 6, "a" * 16
ROWFORMS: list[Form] = ["flat", "fused", "fastscan"]


def codebooks(M: int = M, K: int = 16) -> np.ndarray:
    Z = np.random.default_rng(M).normal(size=(M, K, 12))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def random_codes(n: int, seed: int = 0, M: int = M) -> np.ndarray:
    return pack_codes(np.random.default_rng(seed).integers(0, 16, (n, M)), 16)


def write_shard(path: Path, codes: np.ndarray, ids: np.ndarray) -> Hdf5Shard:
    header = Header("codes", codes.shape[1], MODEL, codebooks(), "d" * 16)
    with RowWriter(path, header) as writer:
        writer.append(codes, ids, None)
        writer.finish()
    return Hdf5Shard(path, codebooks(), MODEL, "the model")


def shards(folder: Path, ids: np.ndarray, parts: int = 3) -> list[Hdf5Shard]:
    codes = random_codes(len(ids))
    cut = np.array_split(np.arange(len(ids)), parts)
    return [write_shard(folder / f"{i}.h5", codes[rows], ids[rows]) for i, rows in enumerate(cut)]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("M", [1, 3, 8])
@pytest.mark.parametrize("form", ROWFORMS)
def test_a_file_in_rows_is_what_faiss_writes(tmp_path: Path, form: Form, M: int, mapped: bool) -> None:
    if (form, M) == ("fused", 1):
        pytest.skip("there is no such form")
    for n in (1, 31, 64, 203):
        codes, Z = random_codes(n, M=M), codebooks(M)
        ids = np.random.default_rng(0).permutation(n) - 7 if mapped else None
        head, count, tail = row_header(form, Z, n, mapped=mapped)
        packed = pack_rows(form, codes, M).tobytes()
        assert len(packed) == count
        mine = head + packed + tail + (b"" if ids is None else ids.astype("<i8").tobytes())
        theirs = faiss.serialize_index(faiss_index(codes, ids, Z, form)).tobytes()
        assert mine.replace(b"IxMp", b"IxM2", 1) == theirs
        path = tmp_path / "a.faiss"
        path.write_bytes(mine)
        with IndexFile(path) as file:
            found = read_header(file)
            assert (found.form, found.n) == (form, n)
            for start, stop in ((0, n), (n // 3, n), (0, n // 2)):
                assert np.array_equal(found.codes(file, 0, start, stop), codes[start:stop])
                expected = np.arange(start, stop) if ids is None else ids[start:stop]
                assert np.array_equal(found.ids(file, 0, start, stop), expected)


@pytest.mark.parametrize("form", [*ROWFORMS, "ivf"])
@pytest.mark.parametrize("ids", ["counting", "ascending", "any"])
def test_a_streamed_build_equals_one_in_memory(tmp_path: Path, form: Form, ids: str) -> None:
    n = 5000
    numbers = np.arange(n) if ids == "counting" else np.arange(n) * 3 - 2**41
    if ids == "any":
        numbers = np.random.default_rng(1).permutation(numbers)
    seen: list[tuple[int, int]] = []
    path = build_index(
        shards(tmp_path, numbers),
        tmp_path / "i.faiss",
        codebooks(),
        form,
        model_fingerprint=MODEL,
        memory=16 << 20,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == ((3 * n, 3 * n) if form == "ivf" else (n, n))
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".h5") == ["i.faiss", "i.faiss.json"]
    layout, sidecar = load_index(path)
    assert (layout.form, layout.mapped, sidecar["model_fingerprint"]) == (
        form,
        ids != "counting" or form == "ivf",
        MODEL,
    )
    own = layout.ids()
    assert np.array_equal(np.sort(own), np.sort(numbers))
    at = np.argsort(numbers)
    assert np.array_equal(layout.codes(), random_codes(n)[at[np.searchsorted(numbers, own, sorter=at)]])
    # Items keep the order of the shards, and in lists within each.
    theirs = faiss_index(random_codes(n), numbers if layout.mapped else None, codebooks(), form)
    assert layout_of(theirs).ids().tolist() == layout.ids().tolist()


def test_a_build_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = shards(tmp_path, np.arange(3000) * 2, 4)
    out = tmp_path / "i.faiss"
    read: list[str] = []
    real = Hdf5Shard.blocks

    def failing(self: Hdf5Shard, size: int):
        read.append(self.path.name)
        for number, block in enumerate(real(self, 300)):
            if self.path.name == "2.h5" and number and len(read) == 3:
                raise KeyboardInterrupt
            yield block

    monkeypatch.setattr(Hdf5Shard, "blocks", failing)
    with pytest.raises(KeyboardInterrupt):
        build_index(parts, out, codebooks(), "flat")
    assert not out.exists()
    assert progress_of(out) == {"shards": 2, "rows": 1500}
    build_index(parts, out, codebooks(), "flat")
    assert read == ["0.h5", "1.h5", "2.h5", "2.h5", "3.h5"]
    assert progress_of(out) is None
    layout = load_index(out)[0]
    assert np.array_equal(layout.codes(), random_codes(3000))
    assert np.array_equal(layout.ids(), np.arange(3000) * 2)


def test_a_build_of_lists_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, out = shards(tmp_path, np.arange(3000) * 2, 4), tmp_path / "i.faiss"
    whole = build_index(parts, tmp_path / "whole.faiss", codebooks(), "ivf").read_bytes()
    read: list[str] = []
    real = Hdf5Shard.blocks

    def blocks(self: Hdf5Shard, size: int):
        read.append(self.path.name)
        return real(self, size)

    def stop_at(rows: int):
        return lambda done, _: _interrupt(done >= rows)

    monkeypatch.setattr(Hdf5Shard, "blocks", blocks)
    for rows, shards_done in ((1600, 2), (3100, 4)):  # in the third shard; while rows are moved
        with pytest.raises(KeyboardInterrupt):
            build_index(parts, out, codebooks(), "ivf", progress=stop_at(rows))
        assert progress_of(out) == {"shards": shards_done, "rows": 750 * shards_done}
    with pytest.raises(KeyboardInterrupt):  # while lists are written
        build_index(parts, out, codebooks(), "ivf", progress=stop_at(6100))
    assert read == ["0.h5", "1.h5", "2.h5", "2.h5", "3.h5"]
    assert not out.exists()
    build_index(parts, out, codebooks(), "ivf")
    assert len(read) == 5  # nothing was read again
    assert out.read_bytes() == whole
    assert not (tmp_path / ".i.faiss.building").exists()


def test_a_build_of_other_shards_starts_anew(tmp_path: Path) -> None:
    parts = shards(tmp_path, np.arange(900))
    out = tmp_path / "i.faiss"
    with pytest.raises(KeyboardInterrupt):
        build_index(parts, out, codebooks(), "flat", progress=lambda done, _: _interrupt(done > 600))
    assert progress_of(out) == {"shards": 2, "rows": 600}
    build_index(parts[::-1], out, codebooks(), "flat")
    assert load_index(out)[0].index.id_map.at(0) == 600


def _interrupt(now: bool) -> None:
    if now:
        raise KeyboardInterrupt


@pytest.mark.parametrize("ids", [[1, 2, 3, 2], [5, 4, 5, 1], [1, -1, 2, 3], [7, 7, 8, 9]])
def test_ids_that_cannot_be_are_refused(tmp_path: Path, ids: list[int]) -> None:
    parts = shards(tmp_path, np.array(ids), 2)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"occurs more than once|has the id -1") as refused:
        build_index(parts, tmp_path / "i.faiss", codebooks(), "flat", memory=16 << 20)
    wrong = next(i for i in ids if i == -1 or ids.count(i) > 1)
    holders = [p for start, p in zip((0, 2), parts, strict=True) if wrong in ids[start : start + 2]]
    assert [str(part.path) in str(refused.value) for part in parts] == [part in holders for part in parts]
    # No later build could go on from what there is.
    assert sorted(tmp_path.iterdir()) == before


def test_repeated_ids_are_found_part_by_part(tmp_path: Path) -> None:
    """Many ids at a small budget: several passes, each over a part of the ids."""
    ids = np.random.default_rng(2).permutation(20_000) * 64
    parts, stored, out = shards(tmp_path, ids), tmp_path / "ids.raw", tmp_path / "i.faiss"
    stored.write_bytes(ids.astype("<i8").tobytes())
    assert check_stored_ids(stored, parts, 40_000, out)
    ids[17_001] = ids[3]
    stored.write_bytes(ids.astype("<i8").tobytes())
    with pytest.raises(DataError, match=rf"id {ids[3]} occurs more than once, in \S*0.h5 and in \S*2.h5"):
        check_stored_ids(stored, parts, 40_000, out)


def test_shards_of_another_model_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "0.h5", random_codes(10), np.arange(10))
    with pytest.raises(MismatchError, match="encode the data again"):
        Hdf5Shard(tmp_path / "0.h5", codebooks(), "b" * 16, "model")
    with pytest.raises(MismatchError, match="other codebooks"):
        Hdf5Shard(tmp_path / "0.h5", codebooks(7), MODEL, "model")


def test_parquet_shards(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    codes, ids = random_codes(700), np.arange(700)[::-1] * 5
    rows = [c.tobytes() for c in codes]
    columns = {
        "binary": arrow.array(rows, arrow.binary()),
        "fixed": arrow.array(rows, arrow.binary(3)),
        "list": arrow.array(codes.tolist(), arrow.list_(arrow.uint8())),
        "fixed list": arrow.FixedSizeListArray.from_arrays(arrow.array(codes.reshape(-1)), 3),
    }
    path = tmp_path / "a.parquet"
    for column in columns.values():
        parquet.write_table(arrow.table({"codes": column, "id": ids}), path)
        shard = ParquetShard(path, codebooks())
        assert shard.rows == 700
        got = list(shard.blocks(300))
        assert len(got) == 3
        assert np.array_equal(np.concatenate([g[0] for g in got]), codes)
        assert np.array_equal(np.concatenate([g[1] for g in got]), ids)
    bad = {
        "no columns": {"x": ids},
        "'codes' is": {"codes": ids, "id": ids},
        "does not have 3 bytes": {"codes": arrow.array([*rows[:-2], b"ab", b"abcd"]), "id": ids},
        "not have 3 bytes": {"codes": arrow.array([*rows[:-1], None]), "id": ids},
        "does not have integers": {"codes": columns["binary"], "id": ids / 2},
    }
    for message, table in bad.items():
        parquet.write_table(arrow.table(table), path)
        with pytest.raises(DataError, match=message):
            list(ParquetShard(path, codebooks()).blocks(300))
    for text, message in ((b"", "is empty"), (b"PAR1 no more", "not a Parquet file")):
        path.write_bytes(text)
        with pytest.raises(DataError, match=message):
            ParquetShard(path, codebooks())
    with pytest.raises(DataError, match="not found"):
        ParquetShard(tmp_path / "b.parquet", codebooks())


@pytest.mark.parametrize("form", [*ROWFORMS, "ivf"])
@pytest.mark.parametrize("queries", [2, 20])
def test_a_search_on_disk_equals_one_in_memory(tmp_path: Path, form: Form, queries: int) -> None:
    n = 30_000
    ids = np.random.default_rng(1).permutation(n) * 5 + 2**40
    path = build_index(
        shards(tmp_path, ids), tmp_path / "i.faiss", codebooks(), form, model_fingerprint=MODEL
    )
    engine = open_file(path, "1MB")  # several blocks
    assert (engine.ntotal, engine.model_fingerprint) == (n, MODEL)
    memory = MemoryIndex.build(random_codes(n), codebooks(), ids)
    xq = np.random.default_rng(3).normal(size=(queries, M * 12)).astype(np.float32)
    for k in (1, 25, 800):
        for where in (None, lambda i: i % 3 == 0, Deny(ids[:5000]), ids[:30].tolist()):
            expected = memory.search(xq, k, where=where)
            for threads in (1, 2):
                D, found = engine.search(xq, k, where=where, threads=threads)
                assert np.array_equal(found, expected[1])
                assert np.array_equal(D, expected[0])


def test_a_range_search_on_disk_equals_one_in_memory(tmp_path: Path) -> None:
    n = 9000
    ids = np.random.default_rng(1).permutation(n) * 5 - 7000
    ids[ids == -1] = 10**6
    path = build_index(shards(tmp_path, ids), tmp_path / "i.faiss", codebooks(), "fastscan")
    engine = open_file(path, "300kB")
    memory = MemoryIndex.build(random_codes(n), codebooks(), ids)
    xq = np.random.default_rng(3).normal(size=(4, M * 12)).astype(np.float32)
    low = float(memory.search(xq, 300)[0][:, -1].mean())
    for least in (low, 1e9, -1e9):
        for where in (None, lambda i: i % 3 == 0, []):
            for mine, theirs in zip(
                engine.range_search(xq, least, where=where),
                memory.range_search(xq, least, where=where),
                strict=True,
            ):
                assert mine.dtype == theirs.dtype
                assert np.array_equal(mine, theirs)
    with pytest.raises(DataError, match="more than 5 results"):
        engine.range_search(xq, low, limit=5)
    with pytest.raises(UsageError, match="NaN"):
        engine.range_search(xq, float("nan"))


def test_a_search_on_disk_keeps_to_its_budget(tmp_path: Path) -> None:
    """An index of 120 MB searched with 30: the process may not take more than that above what it had."""
    n = 10_000_000
    head, _, tail = row_header("flat", codebooks(), n, mapped=True)
    with (tmp_path / "big.faiss").open("wb") as file:
        file.write(head)
        rng = np.random.default_rng(0)
        for _ in range(10):
            file.write(rng.integers(0, 256, (n // 10, 3), dtype=np.uint8).tobytes())
        file.write(tail)
        for part in range(10):
            file.write((np.arange(n // 10) + part * n // 10).astype("<i8").tobytes())
    np.save(tmp_path / "xq.npy", rng.normal(size=(5, M * 12)).astype(np.float32))
    script = """
        import numpy as np, resource, time
        from gpq_faiss.indexes.file import open_file
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        xq = np.load("xq.npy")
        start = time.perf_counter()
        engine = open_file("big.faiss", "30MB")
        took = time.perf_counter() - start
        before = peak()
        D, I = engine.search(xq, 10, threads=1)
        print(took, peak() - before)
        np.save("I.npy", I)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    took, grown = map(float, result.stdout.split())
    assert took < 1
    assert grown < 45e6  # the budget, and what Faiss and the allocator keep
    assert np.load(tmp_path / "I.npy").shape == (5, 10)


@pytest.mark.parametrize("form", ["fastscan", "ivf"])
def test_files_that_cannot_be_searched_in_place_are_refused(tmp_path: Path, form: Form) -> None:
    path = build_index(shards(tmp_path, np.arange(300) * 2), tmp_path / "i.faiss", codebooks(), form)
    data = path.read_bytes()

    def refused(content: bytes, message: str) -> None:
        path.write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            open_file(path)
        assert "\n" not in str(caught.value)

    refused(data[:-1], "damaged")
    refused(data[:30], "not an index that can be searched in place|no lists of")
    refused(data[:200], "impossible sizes|truncated|damaged")
    refused(data[:-3000], "truncated")
    refused(data + b"\0", "damaged")
    refused(b"", "not an index that can be searched in place")
    refused(
        faiss.serialize_index(faiss.IndexFlatIP(3)).tobytes(), "not an index that can be searched in place"
    )
    refused(faiss.serialize_index(inject(codebooks())).tobytes(), "not the file that")
    sidecar_path(path).unlink()
    refused(faiss.serialize_index(inject(codebooks())).tobytes(), "empty")
    with pytest.raises(DataError, match="not found"):
        open_file(tmp_path / "none.faiss")
    rng = np.random.default_rng(0)
    opened = 0
    for _ in range(300):
        broken = bytearray(data)
        broken[rng.integers(400 if rng.integers(2) else len(data))] = rng.integers(256)
        path.write_bytes(broken)
        try:
            open_file(path).search(np.ones((1, 72), np.float32), 3)
            opened += 1
        except DataError as error:
            assert "\n" not in str(error)  # noqa: PT017
    assert 0 < opened < 300


def test_budgets(tmp_path: Path) -> None:
    for text, expected in (("2GB", 2 * 10**9), ("512 MiB", 512 << 20), ("1.5k", 1500), (7, 7), ("10", 10)):
        assert parse_bytes(text) == expected
    for text in ("", "GB", "2 parsecs", "-1GB", "nan", "0", "inf", "0.4B", "0.0001k", "1e300 TB"):
        with pytest.raises(UsageError, match="memory"):
            parse_bytes(text)
    parts = shards(tmp_path, np.arange(30), 1)
    with pytest.raises(UsageError, match="at least 16 MiB"):
        build_index(parts, tmp_path / "i.faiss", codebooks(), "flat", memory=1000)
    with pytest.raises(UsageError, match="nothing to index"):
        build_index([], tmp_path / "i.faiss", codebooks(), "flat")
    with pytest.raises(UsageError, match="1,000 bytes is too small"):
        open_file(build_index(parts, tmp_path / "i.faiss", codebooks(), "flat"), 1000)


def test_a_large_index_opens_at_once(tmp_path: Path) -> None:
    """Six gigabytes of codes that are a hole in the file: only the header is read."""
    n = 2_000_000_000
    head, count, tail = row_header("flat", codebooks(), n, mapped=False)
    path = tmp_path / "huge.faiss"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + count)
        file.seek(0, os.SEEK_END)
        file.write(tail)
    start = time.perf_counter()
    engine = open_file(path)
    assert time.perf_counter() - start < 1
    assert engine.ntotal == n
    assert engine.codes(0, n - 3, n).tolist() == [[0] * ((M + 1) // 2)] * 3
