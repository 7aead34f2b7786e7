"""Index files: every form there and back, as Faiss has it, and every kind of damage refused in one line."""

import itertools
import json

import faiss
import numpy as np
import pytest
from index_factory import books, random_codes

from gpq_faiss.build.shards import open_shard
from gpq_faiss.build.stream import build_index
from gpq_faiss.codes.blocks import pack_blocks, unpack_blocks
from gpq_faiss.codes.codebooks import fuse, inject
from gpq_faiss.codes.encode import decode, encode
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError, MismatchError, OutputExistsError, UsageError
from gpq_faiss.faissio.header import contents_of
from gpq_faiss.faissio.io import load_index, save_index, sidecar_path
from gpq_faiss.faissio.model import ModelHeader
from gpq_faiss.faissio.storage import FORMS, OLD_LISTS, faiss_index
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import of_faiss, open_in_memory


def codebooks(M=6, K=16):
    return books(M, K, 12)


def some(M=6, K=16, n=203):
    return random_codes(n, M, K), np.random.default_rng([M, n]).permutation(np.arange(n) * 3 + 2**40)


def made(form="flat", M=6, ids=True):
    codes, own = some(M)
    return faiss_index(codes, own if ids else None, codebooks(M), form)


def by_id(ids, codes):
    return {int(i): c.tobytes() for i, c in zip(ids, codes, strict=True)}


@pytest.fixture
def saved(tmp_path):
    return save_index(made(), tmp_path / "index.faiss", model_fingerprint="m" * 16, extra={"a": 1})


@pytest.mark.parametrize("M", [2, 13])
@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("source", FORMS)
def test_every_form_becomes_every_other(tmp_path, source, own_ids, M):
    """In memory and by files; nothing is encoded again, Faiss writes the same bytes, and finds the same."""
    codes, ids = some(M)
    ids, Z = ids if own_ids else np.arange(len(codes)), codebooks(M)
    index = made(source, M, own_ids)
    path = save_index(index, tmp_path / "a.faiss")
    xq = np.random.default_rng(1).normal(size=(3, M * 12)).astype(np.float32)
    truth = dict(zip(ids.tolist(), score_codes(xq, codes, Z).T, strict=True))
    for form in FORMS:
        out = build_index([open_shard(path, ModelHeader(path, Z, ""))], tmp_path / f"{form}.faiss", form)
        plain = faiss.read_index(str(out))
        assert faiss.serialize_index(plain).tobytes() == out.read_bytes()
        for other in (of_faiss(index).to_faiss(form), plain):
            held = contents_of(other)
            assert by_id(held.ids, held.codes) == by_id(ids, codes)
            mapped = own_ids or "ivf" in (form, source if other is plain else form)
            assert (held.header.form, held.own_ids is not None) == (form, mapped)
            assert (held.header.faiss_class, held.header.width) == (type(other).__name__, other.d)
            assert np.array_equal(held.header.codebooks, Z)
        if form == "ivf":
            lists = faiss.extract_index_ivf(plain)
            lists.nprobe = lists.nlist
        D, found = plain.search(np.pad(xq, ((0, 0), (0, plain.d - xq.shape[1]))), 20)
        exact = np.array([[truth[int(i)][q] for i in row] for q, row in enumerate(found)])
        assert np.abs(exact - D).max() < (0.15 if form in ("fastscan", "ivf") else 1e-4)


@pytest.mark.parametrize("K", [4, 8, 16, 32, 64, 128, 256])
def test_plain_faiss_indexes_of_any_codewords_are_read(tmp_path, K):
    Z, x = codebooks(3, K), np.random.default_rng(1).normal(size=(60, 36)).astype(np.float32)
    index = faiss.IndexIDMap2(inject(Z))
    index.add_with_ids(x, np.arange(60)[::-1] * 5)
    faiss.write_index(index, str(tmp_path / "plain"))
    path = save_index(index, tmp_path / "i.faiss", model_fingerprint="abc")
    assert path.read_bytes() == (tmp_path / "plain").read_bytes()
    for held, sidecar in (load_index(path), load_index(tmp_path / "plain")):
        assert np.array_equal(held.codes, encode(x, Z))
        assert np.array_equal(held.ids, np.arange(60)[::-1] * 5)
        assert np.array_equal(held.header.codebooks, Z)
        assert sidecar.get("model_fingerprint", "abc") == "abc"
    empty, sidecar = load_index(save_index(inject(Z), tmp_path / "empty.faiss"))
    assert (sidecar["kind"], sidecar["ntotal"], len(empty.codes)) == ("flat", 0, 0)
    assert [sidecar[key] for key in ("codebooks", "codewords", "subdim")] == [3, K, 12]


@pytest.mark.parametrize("form", OLD_LISTS)
@pytest.mark.parametrize("lists", [5, 300])  # most of 300 are empty, and Faiss leaves them out
def test_lists_of_earlier_versions_open_and_are_converted(tmp_path, form, lists):
    """Around vectors, without residuals."""
    (codes, ids), Z = some(), codebooks()
    factory = f"IVF{lists},PQ3x8" if form == "ivf-fused" else f"IVF{lists},PQ6x4fs"
    index = faiss.index_factory(72, factory, faiss.METRIC_INNER_PRODUCT)
    index.quantizer.add(np.random.default_rng(0).normal(size=(lists, 72)).astype(np.float32))
    index.by_residual = False
    faiss.copy_array_to_vector((fuse(Z) if form == "ivf-fused" else Z).ravel(), index.pq.centroids)
    index.is_trained = True
    index.add_with_ids(decode(codes, Z), ids)
    faiss.write_index(index, str(tmp_path / "old.faiss"))
    made = MemoryIndex.build(codes, Z, ids)
    xq = np.random.default_rng(1).normal(size=(3, 72)).astype(np.float32)
    opened = open_in_memory(tmp_path / "old.faiss")
    assert all(map(np.array_equal, opened.search(xq, 20), made.search(xq, 20)))
    with pytest.raises(DataError, match="lists of an earlier version"):
        open_file(tmp_path / "old.faiss")
    shard = open_shard(tmp_path / "old.faiss", ModelHeader(tmp_path, Z, ""))
    with open_file(build_index([shard], tmp_path / "new.faiss", "ivf")) as placed:
        assert np.array_equal(placed.search(xq, 20)[1], made.search(xq, 20)[1])
    index.by_residual = True
    with pytest.raises(DataError, match="damaged or truncated, or set up"):
        contents_of(index)


def test_fastscan_blocks_of_any_height_are_unpacked():
    for M, rows, n in itertools.product((1, 2, 7, 8), (32, 64, 96, 128), (0, 1, 100)):
        codes, _ = some(M, n=n)
        assert np.array_equal(unpack_blocks(pack_blocks(codes, M, rows), n, M, rows), codes)


def test_conversions_that_cannot_be_and_an_existing_file_are_refused(tmp_path):
    wide, one = (MemoryIndex.build(some(M, K)[0], codebooks(M, K)) for M, K in ((3, 32), (1, 16)))
    calls = [(wide, form, "needs 16 codewords") for form in FORMS[1:]]
    calls += [(one, "fused", "needs two codebooks"), (one, "hnsw", "choose from")]
    for index, form, message in calls:
        with pytest.raises(UsageError, match=message):
            index.to_faiss(form)
    with pytest.raises(DataError, match="is empty"):
        of_faiss(inject(codebooks(3)))
    before = wide.save(tmp_path / "i.faiss").read_bytes()
    with pytest.raises(OutputExistsError):
        one.save(tmp_path / "i.faiss")
    assert (tmp_path / "i.faiss").read_bytes() == before


def test_a_sidecar_that_does_not_fit_is_refused(saved):
    text = sidecar_path(saved).read_text()
    mine = json.loads(text)
    of_another = {"codebooks_fingerprint": "0" * 16, "ntotal": 59, "kind": "fused", "bytes": 3, "sha256": "0"}
    for key, value in of_another.items():
        sidecar_path(saved).write_text(json.dumps({**mine, key: value}))
        with pytest.raises(
            MismatchError, match=r"index\.faiss is not the file that index\.faiss\.json describes"
        ):
            load_index(saved)
    with open_file(saved) as opened:  # the last one changes the hash alone
        assert opened.ntotal == 203
    partial = {key: value for key, value in mine.items() if key != "kind"}
    damaged = [{**mine, "ntotal": "60"}, {**mine, "format_version": 99}, [1], partial]
    for changed in (text[:50], *map(json.dumps, damaged)):
        sidecar_path(saved).write_text(changed)
        with pytest.raises(DataError, match=r"index\.faiss\.json"):
            load_index(saved)


def test_files_that_are_no_index_are_refused(tmp_path):
    flat = faiss.IndexFlatIP(4)
    contents = {
        b"": "is empty",
        b"Ix": "not the product-quantised codes",
        b"IxPq": "truncated",
        b"hello, world\n" * 10: "not a Faiss index",
        faiss.serialize_index(flat).tobytes(): "type 'IxFI'",
        faiss.serialize_index(faiss.IndexIDMap2(flat)).tobytes(): "type 'IxFI'",
    }
    for content, message in contents.items():
        path = tmp_path / "i.faiss"
        path.write_bytes(content)
        for read in (load_index, open_file):
            with pytest.raises(DataError, match=rf"i\.faiss.*{message}") as caught:
                read(path)
            assert "\n" not in str(caught.value)


def test_indexes_that_contradict_gpq_are_refused(tmp_path):
    x = np.random.default_rng(0).normal(size=(400, 36)).astype(np.float32)
    ip = faiss.METRIC_INNER_PRODUCT

    def refused(index, message):
        for read in (contents_of, lambda index: save_index(index, tmp_path / "out.faiss")):
            with pytest.raises(DataError, match=message):
                read(index)
        assert not list(tmp_path.iterdir())

    l2 = faiss.IndexPQ(36, 3, 4)
    l2.train(x)
    refused(l2, "metric")
    refused(faiss.IndexPQ(36, 3, 4, ip), "not trained")
    plain = faiss.IndexPQ(36, 3, 4, ip)
    plain.train(x)
    refused(plain, "norm")
    refused(faiss.IndexIVFPQ(faiss.IndexFlatL2(36), 36, 4, 3, 4, ip), "not trained")
    short = faiss.IndexIDMap(inject(codebooks(3)))
    short.add_with_ids(x, np.arange(400))
    faiss.copy_array_to_vector(np.arange(399), short.id_map)
    refused(short, "contradict each other")

    def swap(vector, one, other):
        values = faiss.vector_to_array(vector)
        values[[one, other]] = values[[other, one]]
        faiss.copy_array_to_vector(values, vector)

    changes = (
        lambda outer, inner, moved: setattr(inner, "by_residual", False),
        lambda outer, inner, moved: setattr(outer, "ntotal", 5),
        lambda outer, inner, moved: swap(moved.map, 0, 1),
        lambda outer, inner, moved: swap(moved.map, 3, 13),
        lambda outer, inner, moved: moved.map.resize(7),
        lambda outer, inner, moved: swap(inner.pq.centroids, 0, 14),
        lambda outer, inner, moved: inner.quantizer.reset(),
        lambda outer, inner, moved: setattr(inner, "nprobe", 0),
        lambda outer, inner, moved: inner.set_direct_map_type(faiss.DirectMap.Hashtable),
    )
    for change in changes:
        index = made("ivf")
        change(index, faiss.downcast_index(index.index), faiss.downcast_VectorTransform(index.chain.at(0)))
        with pytest.raises(DataError, match=r"contradict each other|not 1"):
            contents_of(index)
    # What only a reader of all rows can see.
    for ids, message in (([1, 2, 2, 3], "id 2 occurs more than once"), ([-1, 5], "id -1")):
        index = faiss.IndexIDMap(inject(codebooks(3)))
        index.add_with_ids(x[: len(ids)], np.array(ids))
        with pytest.raises(DataError, match=message):
            contents_of(index)
    spare = inject(codebooks(3))
    spare.add_sa_codes(np.full((4, 2), 255, np.uint8))
    with pytest.raises(DataError, match="beyond the last"):
        contents_of(spare)


@pytest.mark.parametrize("form", FORMS)
def test_any_change_of_a_file_is_noticed(tmp_path, form):
    """By the hash; and of the header, or of the length, also without."""
    path = save_index(made(form), tmp_path / "a.faiss")
    data = path.read_bytes()
    for position in np.random.default_rng(0).integers(0, len(data), 15):
        broken = bytearray(data)
        broken[position] ^= 1 << (position % 8)
        path.write_bytes(broken)
        with pytest.raises(DataError):
            load_index(path)
    sidecar_path(path).unlink()
    for content in (data[:-1], data[: len(data) // 2], data[:40], data + b"\0"):
        path.write_bytes(content)
        for read in (load_index, open_file):
            with pytest.raises(DataError, match=r"truncated|damaged"):
                read(path)
