"""Damage to index files: where it is noticed, and that nothing is built of it or answered from it."""

import os
import shutil
import struct
import time
import tracemalloc

import faiss
import numpy as np
import pytest
from index_factory import IDS, codebooks, features, make_model, make_rows

from gpq_faiss import MemoryIndex, index
from gpq_faiss.codes.encode import encode
from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.faissio.header import IndexFile
from gpq_faiss.faissio.io import load_index, sidecar_path
from gpq_faiss.faissio.storage import FORMS, faiss_index
from gpq_faiss.indexes.file import open_file


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
