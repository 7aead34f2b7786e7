"""Building in a stream: against the same done in memory, cut off and gone on with, within its budget, from unfit sources; and of damaged
files nothing is built or answered."""

import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path

import faiss
import numpy as np
import pytest
from index_factory import IDS, M, codebooks, features, make_model, make_rows, random_codes

from gpq_faiss import MemoryIndex, index
from gpq_faiss.build import stream
from gpq_faiss.build.shards import Shard, open_shard
from gpq_faiss.build.stream import build_index
from gpq_faiss.codes.encode import encode
from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.faissio.header import IndexFile, contents_of
from gpq_faiss.faissio.io import load_index, open_header, sidecar_path
from gpq_faiss.faissio.model import ModelHeader
from gpq_faiss.faissio.storage import FORMS, faiss_index, row_header
from gpq_faiss.indexes.file import open_file

MODEL = "model-1"


def shards(folder, ids, parts=3):
    codes, Z, made = random_codes(len(ids), M), codebooks(), []
    for i, rows in enumerate(np.array_split(np.arange(len(ids)), parts)):
        path = make_rows(folder / f"{i}.h5", "codes", codes[rows], ids[rows], Z)
        made.append(open_shard(path, ModelHeader(folder, Z, MODEL)))
    return made


def progress_of(out):
    """Finished sources and rows; None once all rows are in place."""
    record = out.with_name(f".{out.name}.building") / "progress.json"
    if not record.exists():
        return None
    state = json.loads(record.read_text())
    return len(state["state"]["shards"]), state["rows"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ids", ["counting", "ascending", "any"])
def test_a_streamed_build_equals_one_in_memory(tmp_path, form, ids):
    n = 5000
    numbers = np.arange(n) if ids == "counting" else np.arange(n) * 3 - 2**41
    if ids == "any":
        numbers = np.random.default_rng(1).permutation(numbers)
    parts, Z = shards(tmp_path, numbers), codebooks()
    path = build_index(parts, tmp_path / "i.faiss", form, memory=16 << 20)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".h5") == ["i.faiss", "i.faiss.json"]
    held, sidecar = load_index(path)
    mapped = ids != "counting" or form == "ivf"
    assert (held.header.form, held.own_ids is not None) == (form, mapped)
    assert sidecar["model_fingerprint"] == MODEL
    # Items keep the order of the shards, and in lists within each.
    expected = contents_of(faiss_index(random_codes(n, M), numbers if mapped else None, Z, form))
    assert np.array_equal(held.ids, expected.ids)
    assert np.array_equal(held.codes, expected.codes)


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("form", ["flat", "ivf"])
def test_a_build_that_was_cut_off_goes_on(tmp_path, monkeypatch, form):
    parts, out = shards(tmp_path, np.arange(3000) * 2, 4), tmp_path / "i.faiss"
    whole = build_index(parts, tmp_path / "whole.faiss", form).read_bytes()
    read = []
    real = Shard.blocks

    def blocks(self, size):
        read.append(self.path.name)
        for number, block in enumerate(real(self, 300)):
            if read == ["0.h5", "1.h5", "2.h5"] and number:
                raise KeyboardInterrupt
            yield block

    def cut_off():
        with pytest.raises(KeyboardInterrupt):
            build_index(parts, out, form)
        assert not out.exists()
        return progress_of(out)

    monkeypatch.setattr(Shard, "blocks", blocks)
    assert cut_off() == (2, 1500)  # in the third shard
    # While rows are moved to their lists, and while these are written.
    for name, progress in (("write_at", (4, 3000)), ("list_parts", None)) if form == "ivf" else ():
        with monkeypatch.context() as patch:
            patch.setattr(stream, name, interrupt)
            assert cut_off() == progress
    build_index(parts, out, form)
    assert read == ["0.h5", "1.h5", "2.h5", "2.h5", "3.h5"]
    assert out.read_bytes() == whole
    assert not (tmp_path / ".i.faiss.building").exists()


def test_unfinished_work_of_other_shards_starts_anew(tmp_path, monkeypatch):
    """Damaged work: ``tests/store/test_store_interruption.py``."""
    parts, out = shards(tmp_path, np.arange(900)), tmp_path / "i.faiss"
    with monkeypatch.context() as patch:
        patch.setattr(stream, "row_parts", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build_index(parts, out, "flat")
    assert progress_of(out) == (3, 900)
    build_index(parts[::-1], out, "flat")
    assert load_index(out)[0].ids[:300].tolist() == [*range(600, 900)]


@pytest.mark.parametrize("ids", [[1, 2, 3, 2], [5, 4, 5, 1], [1, -1, 2, 3], [7, 7, 8, 9]])
def test_ids_that_cannot_be_are_refused(tmp_path, ids):
    parts = shards(tmp_path, np.array(ids), 2)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"occurs more than once|marks a missing") as refused:
        build_index(parts, tmp_path / "i.faiss", "flat", memory=16 << 20)
    wrong = next(i for i in ids if i == -1 or ids.count(i) > 1)
    holders = [p for start, p in zip((0, 2), parts, strict=True) if wrong in ids[start : start + 2]]
    assert [str(part.path) in str(refused.value) for part in parts] == [part in holders for part in parts]
    # No later build could go on from what there is.
    assert sorted(tmp_path.iterdir()) == before


def test_repeated_ids_are_found_part_by_part(tmp_path, monkeypatch):
    """Many ids at a small budget: several passes, each over a part of the ids."""
    monkeypatch.setattr(stream, "LEAST_MEMORY", 1)
    ids, out = np.random.default_rng(2).permutation(20_000) * 64, tmp_path / "i.faiss"
    build_index(shards(tmp_path, ids), out, "flat", memory=40_000)
    assert np.array_equal(load_index(out)[0].ids, ids)
    ids[17_001] = ids[3]
    for old in tmp_path.glob("?.h5"):
        old.unlink()
    with pytest.raises(DataError, match=rf"id {ids[3]} occurs more than once, in \S*0.h5 and in \S*2.h5"):
        build_index(shards(tmp_path, ids), out, "flat", memory=40_000, overwrite=True)


def test_a_search_on_disk_keeps_to_its_budget(tmp_path):
    """An index of 44 MB searched with 15: the process may not take more than that above what it had."""
    n = 4_000_000
    head, _, tail = row_header("flat", codebooks(), n, mapped="IDMap")
    codes = np.random.default_rng(0).integers(0, 256, (n, 3), dtype=np.uint8).tobytes()
    (tmp_path / "big.faiss").write_bytes(head + codes + tail + np.arange(n).astype("<i8").tobytes())
    script = """
        import numpy as np, resource
        from gpq_faiss.indexes.file import open_file
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        xq = np.random.default_rng(0).normal(size=(5, 72)).astype(np.float32)
        held = open_file("big.faiss", "15MB")
        before = peak()
        assert held.search(xq, 10, threads=1)[1].shape == (5, 10)
        assert peak() - before < 30e6  # the budget, and what Faiss and the allocator keep
    """
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, env=environment, check=True)


def test_a_large_index_opens_at_once(tmp_path):
    """Six gigabytes of codes that are a hole in the file: only the header is read."""
    n = 2_000_000_000
    head, count, tail = row_header("flat", codebooks(), n)
    path = tmp_path / "huge.faiss"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + count)
        file.seek(0, os.SEEK_END)
        file.write(tail)
    start = time.perf_counter()
    with open_file(path) as held:
        assert time.perf_counter() - start < 1
        assert held.ntotal == n
    header, _ = open_header(path, verify=False)
    with contextlib.closing(header.source):
        assert header.codes(0, n - 3, n).tolist() == [[0] * ((M + 1) // 2)] * 3


# Damage ---------------------------------------------------------------------------------------------------------------


def flip_codes(path):
    """Change bytes of codes: any value is a code, so nothing but the hash can tell."""
    data = bytearray(path.read_bytes())
    at = -len(IDS) * 8 - 600
    data[at] ^= 0x11
    data[at + 1] ^= 0x11
    path.write_bytes(data)
    assert faiss.read_index(str(path)).ntotal == len(IDS)


def test_a_damaged_shard_leaves_the_finished_ones_to_the_next_build(tmp_path):
    model = make_model(tmp_path / "model", codebooks())
    codes = make_rows(tmp_path / "codes.h5", "codes", encode(features(), codebooks()), IDS, codebooks())
    other = make_rows(tmp_path / "other.h5", "features", features()[:200], IDS[:200] + 1, codebooks())
    first, second = (index(model, rows, tmp_path / f"flat-{i}") for i, rows in enumerate((other, codes)))
    sound = second.read_bytes()
    flip_codes(second)
    with pytest.raises(MismatchError, match="flat-1"):
        index(model, [first, second], tmp_path / "out.faiss")
    assert (tmp_path / ".out.faiss.building" / "progress.json").exists()
    second.write_bytes(sound)
    index(model, [first, second], tmp_path / "out.faiss")
    assert not (tmp_path / ".out.faiss.building").exists()
    assert len(load_index(tmp_path / "out.faiss")[0].codes) == 700


@pytest.mark.parametrize("way", ["truncated", "overwritten"])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_changes_while_it_is_searched_ends_in_one_line(tmp_path, monkeypatch, form, way):
    """In the middle of a read, or between two: never a signal, never the answers of something else."""
    rng, path = np.random.default_rng(0), tmp_path / "i.faiss"
    codes, ids = rng.integers(0, 256, (20_000, 3), dtype=np.uint8), rng.permutation(20_000) * 3
    xq = features()[:5]
    other = MemoryIndex.build(codes[::-1], codebooks(), ids).save(tmp_path / "other", form)
    read = IndexFile.fill

    def change():
        os.truncate(path, 3000) if way == "truncated" else shutil.copyfile(other, path)

    for during in (0, 1, 3, None):
        MemoryIndex.build(codes, codebooks(), ids).save(path, form, overwrite=True)
        sidecar_path(path).unlink()
        time.sleep(0.02)  # beyond the grain of file times
        with open_file(path, "300kB") as opened, monkeypatch.context() as patch:
            reads = 0

            def fill(self, held, at, during=during):
                nonlocal reads
                if reads == during:
                    change()
                reads += 1
                read(self, held, at)

            patch.setattr(IndexFile, "fill", fill)
            if during is None:
                opened.search(xq, 20)
                change()
            with pytest.raises(DataError, match=r"i\.faiss was changed while it was in use"):  # noqa: PT012
                for _ in range(3):
                    opened.search(xq, 20)
                    opened.range_search(xq, 2.0)


@pytest.mark.parametrize("form", FORMS)
def test_what_a_header_claims_is_not_allocated(tmp_path, form):
    """Dimensions, codebooks and bits far beyond the file are refused before any memory is taken."""
    Z, refused, path = codebooks()[:3], 0, tmp_path / "i.faiss"
    data = faiss.serialize_index(faiss_index(np.zeros((60, 2), np.uint8), None, Z, form)).tobytes()
    factors = (1, 1 << 24, 1), (1, 1, 1 << 24), (1 << 22, 1, 1), (1, 1, 5), (8, 8, 2)
    for sizes in ((36, 3, 4), (48, 2, 8), (36, 2, 4)):
        at = data.find(struct.pack("<QQQ", *sizes))
        for claimed in factors if at > 0 else ():
            lie = [one * factor for one, factor in zip(sizes, claimed, strict=True)]
            path.write_bytes(data[:at] + struct.pack("<QQQ", *lie) + data[at + 24 :])
            for read in (load_index, open_file):
                tracemalloc.start()
                with pytest.raises(DataError, match="damaged or truncated"):
                    read(path)
                assert tracemalloc.get_traced_memory()[1] < 10e6
                tracemalloc.stop()
                refused += 1
    assert refused == 10
