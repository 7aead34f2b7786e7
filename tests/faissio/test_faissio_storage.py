"""Every form into every other, to disk and back: the same ids with the same codes, and the same answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from gpq_faiss.build.shards import IndexShard
from gpq_faiss.build.stream import build_index
from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.blocks import unpack_blocks
from gpq_faiss.codes.codebooks import fuse, inject
from gpq_faiss.codes.encode import decode
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError, MismatchError, OutputExistsError, UsageError
from gpq_faiss.faissio.io import load_index, save_index, sidecar_path
from gpq_faiss.faissio.layout import layout_of
from gpq_faiss.faissio.storage import FORMS, OLD_LISTS, Form, faiss_index
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import of_faiss, open_in_memory


def codebooks(M: int, K: int = 16, seed: int = 0) -> np.ndarray:
    Z = np.random.default_rng(seed).normal(size=(M, K, 12))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def some(M: int, n: int = 203) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([M, n])
    return pack_codes(rng.integers(0, 16, (n, M)), 16), rng.permutation(np.arange(n) * 3 + 2**40)


def form_of(form: Form, M: int, ids: np.ndarray | None) -> object:
    return faiss_index(some(M)[0], ids, codebooks(M), form)


def old_lists(form: str, ids: np.ndarray) -> object:
    """Lists as earlier versions wrote them: around vectors, without residuals."""
    codes, M = some(6)[0], 6
    Z = codebooks(M)
    index = faiss.index_factory(
        72, "IVF5,PQ3x8" if form == "ivf-fused" else "IVF5,PQ6x4fs", faiss.METRIC_INNER_PRODUCT
    )
    index.quantizer.add(np.random.default_rng(0).normal(size=(5, 72)).astype(np.float32))
    index.by_residual = False
    faiss.copy_array_to_vector((fuse(Z) if form == "ivf-fused" else Z).ravel(), index.pq.centroids)
    index.is_trained = True
    index.add_with_ids(decode(codes, Z), ids)
    return index


def convert(index: object, form: str) -> object:
    """The same codes in another form; nothing is encoded again."""
    return of_faiss(index).to_faiss(form)


def by_id(index: object) -> dict[int, bytes]:
    layout = layout_of(index, deep=True)
    return {int(i): c.tobytes() for i, c in zip(layout.ids(), layout.codes(), strict=True)}


@pytest.mark.parametrize("M", [2, 3, 8, 13])
@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("source", FORMS)
def test_every_form_becomes_every_other(source: Form, own_ids: bool, M: int) -> None:
    codes, ids = some(M)
    index = form_of(source, M, ids if own_ids else None)
    Z = codebooks(M)
    expected = {
        int(i): c.tobytes() for i, c in zip(ids if own_ids else range(len(codes)), codes, strict=True)
    }
    xq = np.random.default_rng(1).normal(size=(3, M * 12)).astype(np.float32)
    truth = dict(zip(expected, score_codes(xq, codes, Z).T, strict=True))
    for form in FORMS:
        other = convert(index, form)
        layout = layout_of(other)
        assert by_id(other) == expected
        assert layout.form == form
        assert layout.mapped == (own_ids or form == "ivf")
        assert np.array_equal(layout.codebooks, Z)
        # and Faiss itself makes the same of it
        if form == "ivf":
            lists = faiss.extract_index_ivf(other)
            lists.nprobe = lists.nlist
        D, found = other.search(np.pad(xq, ((0, 0), (0, other.d - xq.shape[1]))), 20)
        exact = np.array([[truth[int(i)][q] for i in row] for q, row in enumerate(found)])
        assert np.abs(exact - D).max() < (0.15 if form in ("fastscan", "ivf") else 1e-4)
    assert by_id(index) == expected


@pytest.mark.parametrize("form", FORMS)
def test_every_form_survives_the_disk(tmp_path: Path, form: Form) -> None:
    _, ids = some(6)
    index = form_of(form, 6, ids)
    path = save_index(index, tmp_path / "a.faiss", model_fingerprint="m" * 16)
    back, sidecar = load_index(path)
    assert sidecar["kind"] == form
    assert by_id(back.index) == by_id(index)
    plain = faiss.read_index(str(path))
    assert by_id(plain) == by_id(index)
    data = path.read_bytes()
    for position in np.random.default_rng(0).integers(0, len(data), 15):
        broken = bytearray(data)
        broken[position] ^= 1 << (position % 8)
        path.write_bytes(broken)
        with pytest.raises(DataError):
            load_index(path)


@pytest.mark.parametrize("form", OLD_LISTS)
def test_lists_of_earlier_versions_open_and_are_converted(tmp_path: Path, form: str) -> None:
    codes, ids = some(6)
    path = tmp_path / "old.faiss"
    index = old_lists(form, ids)
    assert layout_of(index).form == form
    faiss.write_index(index, str(path))
    made = MemoryIndex.build(codes, codebooks(6), ids)
    xq = np.random.default_rng(1).normal(size=(3, 72)).astype(np.float32)
    opened = open_in_memory(path)
    for mine, others in zip(opened.search(xq, 20), made.search(xq, 20), strict=True):
        assert np.array_equal(mine, others)
    with pytest.raises(DataError, match="lists of an earlier version"):
        open_file(path)
    shard = IndexShard(path, codebooks(6), "", "")
    with open_file(build_index([shard], tmp_path / "new.faiss", codebooks(6), "ivf")) as placed:
        assert np.array_equal(placed.search(xq, 20)[1], made.search(xq, 20)[1])


def test_fastscan_blocks_of_any_height_are_unpacked() -> None:
    codes, _ = some(7, 100)
    flat = inject(codebooks(7))
    flat.add_sa_codes(codes)
    for rows in (32, 64, 96):
        fast = faiss.IndexPQFastScan(flat, rows)
        assert np.array_equal(unpack_blocks(faiss.vector_to_array(fast.codes), 100, 7, rows), codes)


def test_conversions_that_cannot_be_are_refused() -> None:
    wide, one = inject(codebooks(3, 32)), inject(codebooks(1))
    wide.add_sa_codes(np.zeros((2, 2), np.uint8))
    one.add_sa_codes(np.zeros((2, 1), np.uint8))
    for form in FORMS[1:]:
        with pytest.raises(UsageError, match="needs 16 codewords"):
            convert(wide, form)
    with pytest.raises(UsageError, match="needs two codebooks"):
        convert(one, "fused")
    with pytest.raises(UsageError, match="choose from"):
        of_faiss(wide).to_faiss("hnsw")
    with pytest.raises(DataError, match="is empty"):
        convert(inject(codebooks(3)), "ivf")


def test_lists_that_contradict_gpq_are_refused() -> None:
    def refused(index: object, message: str) -> None:
        with pytest.raises(DataError, match=message):
            layout_of(index)

    ids = some(6)[1]
    residual = old_lists("ivf-fused", ids)
    residual.by_residual = True
    refused(residual, "by_residual is True")
    short = old_lists("ivf-fused", ids)
    short.ntotal += 1
    refused(short, "lists hold 203 items, not 204")
    mapped = old_lists("ivf-fused", ids)
    mapped.set_direct_map_type(faiss.DirectMap.Hashtable)
    refused(mapped, "direct map")
    few = old_lists("ivf-fastscan", ids)
    few.quantizer.reset()
    refused(few, "0 coarse centroids contradict 5 lists")

    def changed(change: Callable[[Any, Any, Any], object], message: str) -> None:
        index = form_of("ivf", 6, None)
        change(index, faiss.downcast_index(index.index), faiss.downcast_VectorTransform(index.chain.at(0)))
        refused(index, message)

    def swap(vector: Any, one: int, other: int) -> None:
        values = faiss.vector_to_array(vector)
        values[[one, other]] = values[[other, one]]
        faiss.copy_array_to_vector(values, vector)

    changed(lambda outer, inner, moved: setattr(inner, "by_residual", False), "by_residual is False")
    changed(lambda outer, inner, moved: setattr(outer, "ntotal", 5), "contradict 5")
    changed(lambda outer, inner, moved: swap(moved.map, 0, 1), "not those of|not 1")
    changed(lambda outer, inner, moved: swap(moved.map, 3, 13), "not those of|not 1")
    changed(lambda outer, inner, moved: moved.map.resize(7), "not those of")
    changed(lambda outer, inner, moved: swap(inner.pq.centroids, 0, 14), "not those of|not 1")
    changed(lambda outer, inner, moved: inner.quantizer.reset(), "0 coarse centroids")
    kernel = form_of("fastscan", 6, None)
    kernel.implem = 12
    refused(kernel, "name a kernel")
    l2 = faiss.IndexIVFPQ(faiss.IndexFlatL2(36), 36, 4, 3, 4)
    refused(l2, "metric")


@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_an_index_comes_back_as_it_was(tmp_path: Path, form: Form, own_ids: bool) -> None:
    codes, ids = some(6)
    codes[50:100] = codes[:50]
    index = MemoryIndex.build(codes, codebooks(6), ids if own_ids else None, model_fingerprint="m" * 16)
    xq = np.random.default_rng(1).normal(size=(4, 72)).astype(np.float32)
    path = index.save(tmp_path / "e.faiss", form)
    with pytest.raises(OutputExistsError):
        index.save(path)
    back = open_in_memory(path)
    assert back.model_fingerprint == "m" * 16
    assert np.array_equal(back.ids, np.sort(ids) if own_ids else np.arange(len(codes)))
    for other in (back, of_faiss(faiss.read_index(str(path)))):
        for mine, others in zip(index.search(xq, 20), other.search(xq, 20), strict=True):
            assert np.array_equal(mine, others)


def test_a_sidecar_of_another_form_is_refused(tmp_path: Path) -> None:
    path = MemoryIndex.build(some(6)[0], codebooks(6)).save(tmp_path / "e.faiss")
    document = json.loads(sidecar_path(path).read_text())
    document["extra"]["engine"] = "grouped"  # of an earlier version
    sidecar_path(path).write_text(json.dumps(document))
    assert open_in_memory(path).ntotal == 203
    document["kind"] = "fused"
    sidecar_path(path).write_text(json.dumps(document))
    with pytest.raises(MismatchError):
        open_in_memory(path)
