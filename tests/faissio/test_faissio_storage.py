"""Every form into every other, to disk and back: the same ids with the same codes, and the same answers."""

from __future__ import annotations

import json
from pathlib import Path

import faiss
import numpy as np
import pytest

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.blocks import unpack_blocks
from gpq_faiss.codes.codebooks import inject
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError, MismatchError, OutputExistsError, UsageError
from gpq_faiss.faissio.blob import add_codes
from gpq_faiss.faissio.io import load_index, save_index, sidecar_path
from gpq_faiss.faissio.layout import layout_of
from gpq_faiss.faissio.storage import STORAGES, Storage, ivf_index, row_index
from gpq_faiss.indexes.lists import IvfSettings, assign
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import of_faiss, open_in_memory
from gpq_faiss.indexes.plan import KINDS


def codebooks(M: int, K: int = 16, seed: int = 0) -> np.ndarray:
    Z = np.random.default_rng(seed).normal(size=(M, K, 12))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def some(M: int, n: int = 203) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([M, n])
    return pack_codes(rng.integers(0, 16, (n, M)), 16), rng.permutation(np.arange(n) * 3 + 2**40)


def form_of(form: str, M: int, ids: np.ndarray | None) -> object:
    codes, _ = some(M)
    Z = codebooks(M)
    storage = STORAGES[form]
    if not storage.lists:
        return row_index(codes, ids, Z, storage.packing)
    ivf = IvfSettings(lists=5).trained(codes, Z)
    list_of = assign(codes, Z, ivf.centroids)
    return ivf_index(codes, ids, Z, ivf.centroids, storage.packing, list_of, nprobe=ivf.nprobe)


def convert(index: object, form: str, ivf: IvfSettings | None = None) -> object:
    """The same codes in another form; nothing is encoded again."""
    listed = ivf is not None or (form.startswith("ivf") and layout_of(index).storage.lists)
    return of_faiss(index, kind="ivf" if listed else "exact", ivf=ivf).to_faiss(STORAGES[form])


def by_id(index: object) -> dict[int, bytes]:
    layout = layout_of(index, deep=True)
    return {int(i): c.tobytes() for i, c in zip(layout.ids(), layout.codes(), strict=True)}


@pytest.mark.parametrize("M", [2, 3, 8, 13])
@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("source", STORAGES)
def test_every_form_becomes_every_other(source: str, own_ids: bool, M: int) -> None:
    codes, ids = some(M)
    index = form_of(source, M, ids if own_ids else None)
    Z = codebooks(M)
    expected = {
        int(i): c.tobytes() for i, c in zip(ids if own_ids else range(len(codes)), codes, strict=True)
    }
    xq = np.random.default_rng(1).normal(size=(3, M * 12)).astype(np.float32)
    truth = dict(zip(expected, score_codes(xq, codes, Z).T, strict=True))
    for form in STORAGES:
        other = convert(index, form)
        layout = layout_of(other)
        assert by_id(other) == expected
        assert layout.storage == STORAGES[form]
        assert layout.mapped == (own_ids or form.startswith("ivf"))
        assert np.array_equal(layout.codebooks, Z)
        # and Faiss itself makes the same of it
        if form.startswith("ivf"):
            other.nprobe = other.nlist
        D, found = other.search(np.pad(xq, ((0, 0), (0, other.d - xq.shape[1]))), 20)
        exact = np.array([[truth[int(i)][q] for i in row] for q, row in enumerate(found)])
        assert np.abs(exact - D).max() < (0.15 if "fastscan" in form else 1e-4)
    assert by_id(index) == expected


@pytest.mark.parametrize("form", STORAGES)
def test_every_form_survives_the_disk(tmp_path: Path, form: str) -> None:
    _, ids = some(6)
    index = form_of(form, 6, ids)
    path = save_index(index, tmp_path / "a.faiss", model_fingerprint="m" * 16)
    back, sidecar = load_index(path)
    assert sidecar["kind"] == form
    assert by_id(back) == by_id(index)
    plain = faiss.read_index(str(path))
    assert by_id(plain) == by_id(index)
    data = path.read_bytes()
    for position in np.random.default_rng(0).integers(0, len(data), 15):
        broken = bytearray(data)
        broken[position] ^= 1 << (position % 8)
        path.write_bytes(broken)
        with pytest.raises(DataError):
            load_index(path)


def test_lists_are_kept_and_made_anew_on_request() -> None:
    index = form_of("ivf-fastscan", 6, None)
    index.nprobe = 3
    other = convert(index, "ivf-fused")
    assert (other.nlist, other.nprobe) == (5, 3)
    assert [other.invlists.list_size(i) for i in range(5)] == [index.invlists.list_size(i) for i in range(5)]
    new = convert(index, "ivf-fused", ivf=IvfSettings(lists=2, nprobe=9))
    assert (new.nlist, new.nprobe) == (2, 2)


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
    for form in list(STORAGES)[1:]:
        with pytest.raises(UsageError, match="needs 16 codewords"):
            convert(wide, form)
    with pytest.raises(UsageError, match="needs two codebooks"):
        convert(one, "fused")
    with pytest.raises(UsageError, match="4-bit codes in lists"):
        of_faiss(wide, kind="flat").to_faiss(Storage("4-bit", lists=True))
    with pytest.raises(UsageError, match="choose from"):
        of_faiss(wide, kind="hnsw")
    with pytest.raises(DataError, match="is empty"):
        convert(inject(codebooks(3)), "ivf-fused")
    for settings, error, message in (
        (IvfSettings(lists=0), UsageError, "lists 0"),
        (IvfSettings(lists=999), UsageError, "999 lists"),
        (IvfSettings(nprobe=0), UsageError, "nprobe 0"),
        (IvfSettings(centroids=np.zeros((2, 36), np.float32)), DataError, "centroid 0 is zero"),
        (IvfSettings(centroids=np.ones((2, 35), np.float32)), DataError, "35 dimensions"),
        (IvfSettings(centroids=np.full((2, 36), np.nan)), DataError, "NaN"),
    ):
        with pytest.raises(error, match=message):
            MemoryIndex.build(some(3)[0], codebooks(3), kind="ivf", ivf=settings)


def test_lists_that_contradict_gpq_are_refused() -> None:
    def refused(index: object, message: str) -> None:
        with pytest.raises(DataError, match=message):
            layout_of(index)

    residual = form_of("ivf-fused", 6, None)
    residual.by_residual = True
    refused(residual, "residuals")
    short = form_of("ivf-fused", 6, None)
    short.ntotal += 1
    refused(short, "lists hold 203 items, not 204")
    mapped = form_of("ivf-fused", 6, None)
    mapped.set_direct_map_type(faiss.DirectMap.Hashtable)
    refused(mapped, "direct map")
    few = form_of("ivf-fastscan", 6, None)
    few.quantizer.reset()
    refused(few, "0 coarse centroids contradict 5 lists")
    kernel = form_of("fastscan", 6, None)
    kernel.implem = 12
    refused(kernel, "name a kernel")
    l2 = faiss.IndexIVFPQ(faiss.IndexFlatL2(36), 36, 4, 3, 4)
    refused(l2, "metric")


@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "auto"])
def test_an_engine_comes_back_as_it_was(tmp_path: Path, kind: str, own_ids: bool) -> None:
    codes, ids = some(6)
    codes[50:100] = codes[:50]
    ivf = IvfSettings(lists=6, nprobe=2)
    engine = MemoryIndex.build(
        codes, codebooks(6), ids if own_ids else None, kind=kind, ivf=ivf, model_fingerprint="m" * 16
    )
    xq = np.random.default_rng(1).normal(size=(4, 72)).astype(np.float32)
    path = engine.save(tmp_path / "e.faiss")
    back = open_in_memory(path)
    assert (back.plan, back.model_fingerprint) == (engine.plan, "m" * 16)
    for mine, others in zip(engine.search(xq, 20), back.search(xq, 20), strict=True):
        assert np.array_equal(mine, others)
    assert np.array_equal(back.ids, np.sort(ids) if own_ids else np.arange(len(codes)))
    with pytest.raises(OutputExistsError):
        engine.save(path)
    exact = open_in_memory(path, "exact")
    expected = MemoryIndex.build(codes, codebooks(6), ids if own_ids else None, kind="flat").search(xq, 20)
    for other in (exact, of_faiss(faiss.read_index(str(path)))):
        for mine, others in zip(expected, other.search(xq, 20), strict=True):
            assert np.array_equal(mine, others)


def test_a_sidecar_of_another_form_is_refused(tmp_path: Path) -> None:
    path = MemoryIndex.build(some(6)[0], codebooks(6)).save(tmp_path / "e.faiss")
    document = json.loads(sidecar_path(path).read_text())
    document["extra"]["engine"] = "grouped"  # of an earlier version
    sidecar_path(path).write_text(json.dumps(document))
    assert open_in_memory(path).kind == "exact"
    document["kind"] = "fused"
    sidecar_path(path).write_text(json.dumps(document))
    with pytest.raises(MismatchError):
        open_in_memory(path)


def test_codes_of_another_width_are_not_added() -> None:
    with pytest.raises(DataError, match="codes of 2 bytes, but the index holds 3"):
        add_codes(faiss.IndexPQ(12, 6, 4, faiss.METRIC_INNER_PRODUCT), np.zeros((4, 2), np.uint8))
    with pytest.raises(DataError, match="codes of 2 bytes, but the index holds 3"):
        add_codes(faiss.IndexBinaryFlat(24), np.zeros((4, 2), np.uint8))
    assert add_codes(faiss.IndexBinaryFlat(24), np.zeros((4, 3), np.uint8)).ntotal == 4
