"""Lists on disk: written in a stream, searched in place, against Faiss' own files and brute force in memory."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import faiss
import numpy as np
import pytest
from build_progress import progress_of

from gpq_faiss.build.coarse import Nearest, Tables, choose
from gpq_faiss.build.shards import Hdf5Shard
from gpq_faiss.build.sort import store_nprobe
from gpq_faiss.build.stream import build_index
from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.encode import decode
from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.faissio.header import list_bytes, list_header, read_header
from gpq_faiss.faissio.io import load_index, read_sidecar, sidecar_path, stored_points
from gpq_faiss.faissio.layout import layout_of
from gpq_faiss.faissio.source import IndexFile
from gpq_faiss.faissio.storage import Packing, Storage, ivf_index
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.filters import Deny
from gpq_faiss.indexes.lists import IvfSettings, assign
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.store import Header, RowWriter

M, MODEL = 6, "a" * 16
PACKINGS: list[Packing] = ["bytes", "fastscan"]
LISTS = Storage("fastscan", lists=True)


def codebooks(M: int = M) -> np.ndarray:
    Z = np.random.default_rng(M).normal(size=(M, 16, 12))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def random_codes(n: int, M: int = M, seed: int = 0, centres: int = 0) -> np.ndarray:
    """Uniform, or around some centres, with many repeats."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, 16, (n, M))
    if centres:
        kept = rng.integers(0, 16, (centres, M))[rng.integers(0, centres, n)]
        indices = np.where(rng.random((n, M)) < 0.8, kept, indices)
    return pack_codes(indices, 16)


def shards(folder: Path, codes: np.ndarray, ids: np.ndarray, parts: int = 3) -> list[Hdf5Shard]:
    found = []
    for i, rows in enumerate(np.array_split(np.arange(len(ids)), parts)):
        path = folder / f"{i}.h5"
        with RowWriter(path, Header("codes", codes.shape[1], MODEL, codebooks(), "d" * 16)) as writer:
            writer.append(codes[rows], ids[rows], None)
            writer.finish()
        found.append(Hdf5Shard(path, codebooks(), MODEL, "the model"))
    return found


def queries(n: int, M: int = M) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(n, M * 12)).astype(np.float32)


@pytest.mark.parametrize("form", PACKINGS)
@pytest.mark.parametrize("M", [2, 3, 7, 12])
def test_a_file_with_lists_is_what_faiss_writes(tmp_path: Path, form: Packing, M: int) -> None:
    Z, path = codebooks(M), tmp_path / "i.faiss"
    for n in (1, 40, 3000):  # few lists filled, some, all
        codes = random_codes(n, M)
        ids = np.random.default_rng(0).permutation(n) * 3 - 5
        ivf = IvfSettings(centroids=queries(10, M), nprobe=4).trained(codes, Z)
        list_of = assign(codes, Z, ivf.centroids)
        index = ivf_index(codes, ids, Z, ivf.centroids, form, list_of)
        index.nprobe = 4
        theirs = faiss.serialize_index(index).tobytes()
        sizes = np.bincount(list_of, minlength=10)
        head = list_header(form, Z, ivf.centroids, 4, sizes)
        assert theirs.startswith(head)
        assert len(theirs) == len(head) + list_bytes(form, sizes, M).sum()
        path.write_bytes(theirs)
        with IndexFile(path) as file:
            found = read_header(file)
            assert (found.packing, found.n, found.nprobe) == (form, n, 4)
            assert np.array_equal(found.sizes, sizes)
            assert np.array_equal(found.centroids, ivf.centroids)
            for number in range(10):
                rows = np.flatnonzero(list_of == number)
                for start in (0, found.rows):
                    some = rows[start:]
                    if len(some):
                        assert np.array_equal(found.codes(file, number, start, len(rows))[:], codes[some])
                        assert np.array_equal(found.ids(file, number, start, len(rows)), ids[some])
                        among = np.arange(len(some))[::2][None]
                        few = found.some_ids(file, number, start, len(rows), among)
                        assert np.array_equal(few, ids[some][among])


@pytest.mark.parametrize("form", PACKINGS)
@pytest.mark.parametrize("way", ["nearest", "tables", "prototypes"])
@pytest.mark.parametrize("memory", [16 << 20, 1 << 30])
def test_a_streamed_build_is_a_sound_index(tmp_path: Path, form: Packing, way: str, memory: int) -> None:
    n = 5000
    codes, ids = random_codes(n, centres=60), np.random.default_rng(1).permutation(n) * 3 - 2**41
    settings = IvfSettings(lists=20, nprobe=5)
    if way == "prototypes":
        settings = dataclasses.replace(settings, lists=None, centroids=queries(7) * 3)
    else:
        settings = dataclasses.replace(settings, assignment=way)
    seen: list[tuple[int, int]] = []
    path = build_index(
        shards(tmp_path, codes, ids),
        tmp_path / "i.faiss",
        codebooks(),
        Storage(form, lists=True),
        settings,
        model_fingerprint=MODEL,
        memory=memory,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (3 * n, 3 * n)
    assert all(a <= b for (a, _), (b, _) in itertools.pairwise(seen))
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".h5") == ["i.faiss", "i.faiss.json"]
    index, sidecar = load_index(path, verify=True)
    layout = layout_of(index, deep=True)
    assert (layout.storage, sidecar["model_fingerprint"], index.nprobe) == (
        Storage(form, lists=True),
        MODEL,
        5,
    )
    order = np.argsort(layout.ids())
    by_id = np.argsort(ids)
    assert np.array_equal(layout.ids()[order], ids[by_id])
    assert np.array_equal(layout.codes()[order], codes[by_id])
    if way != "tables":  # every item is where plain Faiss would put it
        expected = index.quantizer.search(np.pad(decode(codes, codebooks()), ((0, 0), (0, index.d - 72))), 1)[
            1
        ]
        assert np.array_equal(layout.list_numbers()[order], expected[by_id, 0])
    assert open_in_memory(path).kind == "ivf"


def test_faiss_alone_maps_the_fused_form(tmp_path: Path) -> None:
    codes = random_codes(3000)
    path = build_index(
        shards(tmp_path, codes, np.arange(3000) + 9),
        tmp_path / "i.faiss",
        codebooks(),
        Storage("bytes", lists=True),
        IvfSettings(lists=8, nprobe=8),
    )
    mapped = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
    assert isinstance(faiss.downcast_InvertedLists(mapped.invlists), faiss.OnDiskInvertedLists)
    D, found = mapped.search(queries(5), 10)
    expected = MemoryIndex.build(codes, codebooks(), np.arange(3000) + 9).search(queries(5), 10)
    assert np.allclose(D, expected[0], atol=1e-4)
    assert (found == expected[1]).mean() > 0.95  # near ties may change places


@pytest.mark.parametrize("form", PACKINGS)
@pytest.mark.parametrize("way", ["nearest", "tables"])
@pytest.mark.parametrize("centres", [0, 40])
def test_all_lists_give_the_exact_answer(tmp_path: Path, form: Packing, way: str, centres: int) -> None:
    n = 30_000
    codes, ids = random_codes(n, centres=centres), np.random.default_rng(1).permutation(n) * 5 + 2**40
    settings = IvfSettings(lists=3, nprobe=2, assignment=way)
    path = build_index(
        shards(tmp_path, codes, ids), tmp_path / "i.faiss", codebooks(), Storage(form, lists=True), settings
    )
    engine = open_file(path, "100MB", rows=9000)  # a list in several blocks
    memory = MemoryIndex.build(codes, codebooks(), ids, kind="flat")
    for xq, threads in ((queries(1), 1), (queries(7), 2)):
        for k in (1, 25, 800):
            for where in (None, lambda i: i % 3 == 0, Deny(ids[:3000]), ids[:30].tolist()):
                expected = memory.search(xq, k, where=where)
                D, found = engine.search(xq, k, nprobe=99, where=where, threads=threads, block=5)
                assert np.array_equal(found, expected[1])
                assert np.array_equal(D, expected[0])
    least = float(memory.search(queries(4), 300)[0][:, -1].mean())
    for where in (None, lambda i: i % 3 == 0):
        for mine, theirs in zip(
            engine.range_search(queries(4), least, nprobe=3, where=where, block=3),
            memory.range_search(queries(4), least, where=where),
            strict=True,
        ):
            assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("form", PACKINGS)
def test_a_search_is_exact_within_the_lists_it_looks_at(tmp_path: Path, form: Packing) -> None:
    n, nprobe = 9000, 3
    codes, ids = random_codes(n, centres=50), np.arange(n) * 2
    settings = IvfSettings(lists=12, nprobe=nprobe)
    path = build_index(
        shards(tmp_path, codes, ids), tmp_path / "i.faiss", codebooks(), Storage(form, lists=True), settings
    )
    engine, xq = open_file(path), queries(6)
    layout = layout_of(load_index(path)[0])
    list_of = layout.list_numbers()[np.argsort(layout.ids())]
    D, found = engine.search(xq, 20)
    for q in range(len(xq)):
        inside = np.isin(list_of, engine.nearest_lists(xq[q : q + 1], nprobe)[0])
        part = MemoryIndex.build(codes[inside], codebooks(), ids[inside])
        expected = part.search(xq[q : q + 1], 20)
        assert np.array_equal(found[q], expected[1][0])
        assert np.array_equal(D[q], expected[0][0])
    every = engine.search(xq[:1], n, nprobe=1)  # one list does not hold so many
    assert np.array_equal(every[1], MemoryIndex.build(codes, codebooks(), ids).search(xq[:1], n)[1])
    few = engine.search(xq, 9, nprobe=1, where=[4, 6, 8, 1000])
    assert ((few[1] >= 0).sum(axis=1) == 4).all()
    assert (np.isneginf(few[0]) == (few[1] == -1)).all()
    for bad in ({"nprobe": 0}, {"threads": 0}, {"block": 0}):
        with pytest.raises(UsageError):
            engine.search(xq, 5, **bad)
    with pytest.raises(UsageError, match="is too small for"):
        open_file(path, 1000).search(xq, 5)


def test_a_recall_is_reached_and_reported(tmp_path: Path) -> None:
    n = 9000
    codes = random_codes(n)
    path = build_index(
        shards(tmp_path, codes, np.arange(n)), tmp_path / "i.faiss", codebooks(), LISTS, IvfSettings(lists=32)
    )
    engine = open_file(path)
    xq = engine.sample_queries(64)
    assert xq.shape == (64, M * 12)
    assert np.allclose(np.linalg.norm(xq.reshape(64, M, 12), axis=2), 1, atol=1e-5)
    exact = MemoryIndex.build(codes, codebooks()).search(xq, 10)[0][:, -1:]
    chosen = []
    for recall in (0.5, 0.9, 1.0):
        points = engine.tune(recall, k=10, queries=xq)
        point = next(p for p in points if p["nprobe"] == engine.nprobe)
        assert point["recall"] >= recall
        assert all(p["recall"] < recall for p in points if p["nprobe"] < engine.nprobe)
        assert (engine.search(xq, 10)[0] >= exact).mean() >= point["recall"]
        chosen.append(engine.nprobe)
    assert chosen[0] < chosen[1] <= chosen[2] <= 32
    store_nprobe(path, engine.nprobe, points)
    assert open_file(path).nprobe == engine.nprobe
    assert load_index(path, verify=True)[0].nprobe == engine.nprobe
    assert read_sidecar(path)["extra"]["operating_points"] == stored_points(points)
    for recall in (0.0, 1.1, float("nan")):
        with pytest.raises(UsageError, match="recall"):
            engine.tune(recall)


def test_tables_do_about_what_the_nearest_centroid_does() -> None:
    codes = random_codes(20_000, M=12, centres=200)
    Z, xq = codebooks(12), decode(random_codes(50, M=12, seed=0, centres=200), codebooks(12))
    exact = MemoryIndex.build(codes, Z).search(xq, 10)[1]
    shares = {}
    settings = IvfSettings(lists=64).trained(codes, Z)
    for coarse in (Tables(codes[::2], Z, 64), Nearest(settings.centroids, Z)):
        list_of = coarse.assign(codes)
        assert list_of.min() >= 0
        assert len(coarse.centroids) == 64 > list_of.max()
        order = np.argsort(-(xq @ coarse.centroids.T), axis=1)[:, :8]
        shares[type(coarse).__name__] = np.mean(
            [np.isin(list_of[exact[q]], order[q]).mean() for q in range(50)]
        )
    assert shares["Tables"] > 0.8 * shares["Nearest"] > 0.5


@pytest.mark.parametrize("M", [1, 2, 3, 4, 11, 24])
def test_tables_of_codes_of_any_length(M: int) -> None:
    codes = random_codes(700, M)
    coarse = Tables(codes[:300], codebooks(M), 9)
    list_of = coarse.assign(codes)  # codes that the sample lacks, too
    assert list_of.min() >= 0
    assert list_of.max() < len(coarse.centroids) <= 9
    same = assign(codes, codebooks(M), coarse.centroids) == list_of
    assert same.mean() > 0.2  # far more than one in nine


def test_the_way_is_chosen_by_cost() -> None:
    assert choose(IvfSettings(), 10_000) == (100, "nearest")
    assert choose(IvfSettings(), 10**9) == (16_384, "tables")
    assert choose(IvfSettings(lists=10, assignment="tables"), 100) == (10, "tables")
    assert choose(IvfSettings(centroids=queries(3)), 10**9) == (3, "nearest")
    for bad in (IvfSettings(lists=11), IvfSettings(lists=0)):
        with pytest.raises(UsageError, match="lists"):
            choose(bad, 10)
    with pytest.raises(UsageError, match="its own centroids"):
        choose(IvfSettings(centroids=queries(3), assignment="tables"), 10)


def test_a_build_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, ids = random_codes(3000), np.arange(3000) * 2
    parts, out = shards(tmp_path, codes, ids, 4), tmp_path / "i.faiss"
    settings = IvfSettings(lists=8)
    whole = build_index(parts, tmp_path / "whole.faiss", codebooks(), LISTS, settings).read_bytes()
    read: list[str] = []
    real = Hdf5Shard.blocks

    def blocks(self: Hdf5Shard, size: int):
        read.append(self.path.name)
        return real(self, size)

    def stop_at(rows: int):
        def progress(done: int, _: int) -> None:
            if done >= rows:
                raise KeyboardInterrupt

        return progress

    monkeypatch.setattr(Hdf5Shard, "blocks", blocks)
    for rows, shards_done in ((1600, 2), (3100, 4)):  # in the third shard; while rows are moved
        with pytest.raises(KeyboardInterrupt):
            build_index(parts, out, codebooks(), LISTS, settings, progress=stop_at(rows))
        assert progress_of(out) == {"shards": shards_done, "rows": 750 * shards_done}
    with pytest.raises(KeyboardInterrupt):  # while lists are written
        build_index(parts, out, codebooks(), LISTS, settings, progress=stop_at(6100))
    assert read == ["0.h5", "1.h5", "2.h5", "2.h5", "3.h5"]
    assert not out.exists()
    build_index(parts, out, codebooks(), LISTS, settings)
    assert len(read) == 5  # nothing was read again
    assert out.read_bytes() == whole
    assert not (tmp_path / ".i.faiss.building").exists()
    with pytest.raises(KeyboardInterrupt):
        build_index(parts, out, codebooks(), LISTS, settings, progress=stop_at(6100), overwrite=True)
    build_index(
        parts, out, codebooks(), LISTS, IvfSettings(lists=5), overwrite=True
    )  # other lists: other order
    assert len(read) > 5
    assert open_file(out).lists == 5


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    codes, out = random_codes(40), tmp_path / "i.faiss"
    parts = shards(tmp_path, codes, np.arange(40))
    for message, settings, memory in (
        ("at least 16 MiB", None, 1000),
        ("from 1 to the 40 codes", IvfSettings(lists=41), 1 << 30),
        ("raise --memory", IvfSettings(centroids=np.ones((20_000, 72), np.float32)), 16 << 20),
    ):
        with pytest.raises(UsageError, match=message):
            build_index(parts, out, codebooks(), LISTS, settings, memory=memory)
    with pytest.raises(UsageError, match="nothing to index"):
        build_index([], out, codebooks(), LISTS)
    with pytest.raises(DataError, match="is zero"):
        build_index(parts, out, codebooks(), LISTS, IvfSettings(centroids=np.zeros((2, 72), np.float32)))
    for p in tmp_path.glob("*.h5"):
        p.unlink()
    with pytest.raises(DataError, match="occurs more than once"):
        build_index(shards(tmp_path, codes, np.arange(40) // 2), out, codebooks(), LISTS)
    assert not out.exists()


@pytest.mark.parametrize("form", PACKINGS)
def test_damaged_files_are_refused(tmp_path: Path, form: Packing) -> None:
    n = 600
    path = build_index(
        shards(tmp_path, random_codes(n), np.arange(n) * 2),
        tmp_path / "i.faiss",
        codebooks(),
        Storage(form, lists=True),
        IvfSettings(lists=4),
    )
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\1\2")
    with pytest.raises(DataError):
        open_file(path)
    path.write_bytes(data)
    other = read_sidecar(path)
    sidecar_path(path).write_text(
        sidecar_path(path).read_text().replace(other["codebooks_fingerprint"], "0" * 16)
    )
    with pytest.raises(MismatchError, match="is not the file"):
        open_file(path)
    sidecar_path(path).unlink()
    rng = np.random.default_rng(0)
    opened = 0
    for _ in range(300):
        broken = bytearray(data)
        broken[rng.integers(400 if rng.integers(2) else len(data))] = rng.integers(256)
        path.write_bytes(bytes(broken) if rng.integers(4) else bytes(broken[: rng.integers(len(data))]))
        try:
            open_file(path).search(np.ones((1, 72), np.float32), 3, nprobe=4)
            opened += 1
        except DataError as error:
            assert "\n" not in str(error)  # noqa: PT017
    assert 0 < opened < 300
    with pytest.raises(DataError, match="not found"):
        IndexFile(tmp_path / "none.faiss")


def test_lists_of_a_factory_string_are_taken(tmp_path: Path) -> None:
    """Its coarse quantiser is an IndexFlat in memory, and an IndexFlatIP once it was written and read."""
    codes, Z = random_codes(500), codebooks()
    index = faiss.index_factory(72, "IVF4,PQ6x4fs", faiss.METRIC_INNER_PRODUCT)
    assert type(faiss.downcast_index(index.quantizer)) is faiss.IndexFlat
    index.quantizer.add(queries(4))
    faiss.copy_array_to_vector(Z.ravel(), index.pq.centroids)
    index.by_residual, index.is_trained = False, True
    index.add(decode(codes, Z))
    assert layout_of(index, deep=True).storage == LISTS
    assert np.array_equal(layout_of(index).centroids, queries(4))
    expected = MemoryIndex.build(codes, Z).search(queries(5), 10)
    assert np.array_equal(open_in_memory(index, kind="exact").search(queries(5), 10)[1], expected[1])
    faiss.write_index(index, str(tmp_path / "i.faiss"))
    assert np.array_equal(open_file(tmp_path / "i.faiss").search(queries(5), 10, nprobe=4)[1], expected[1])
    far = faiss.index_factory(72, "IVF4,PQ6x4fs", faiss.METRIC_L2)
    far.is_trained = True
    with pytest.raises(DataError, match="metric"):
        layout_of(far)


def test_whether_ids_ascend_is_noted_over_several_blocks(tmp_path: Path) -> None:
    """A list is written in blocks where it is larger than the budget has it; the note must hold across them."""
    n = 700_000
    codes, ids = random_codes(n), np.arange(n) * 2
    for number, (own, ascends) in enumerate(((ids, True), (np.roll(ids, n // 2), False))):
        path = build_index(
            [ArrayShard(codes, own)],
            tmp_path / f"{number}.faiss",
            codebooks(),
            LISTS,
            IvfSettings(lists=1),
            memory=16 << 20,
        )
        assert read_sidecar(path)["extra"]["ascending"] is ascends
        D, found = open_file(path, "64MB").search(queries(4), 5)
        expected = MemoryIndex.build(codes, codebooks(), own).search(queries(4), 5)
        assert np.array_equal(found, expected[1])
        assert np.array_equal(D, expected[0])


class ArrayShard:
    """Rows that are there already."""

    path, kind, row_bytes, data_fingerprint, fingerprint = Path("array"), "codes", 32, "d", "f"

    def __init__(self, codes: np.ndarray, ids: np.ndarray) -> None:
        self.codes, self.ids, self.rows = codes, ids, len(ids)

    def blocks(self, size: int):
        for start in range(0, self.rows, size):
            yield self.codes[start : start + size], self.ids[start : start + size]
