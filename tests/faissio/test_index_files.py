"""Index files: every form there and back, as Faiss has it, and every kind of damage refused in one line. Codebooks for other tools: each
form is loaded by the tool it is for, and ranks the same data alike."""

import itertools
import json

import faiss
import numpy as np
import pytest
from index_factory import books, random_codes, score_codes
from model_factory import make_model

from gpq_faiss.build.shards import open_shard
from gpq_faiss.build.stream import build_index
from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.codes.blocks import pack_blocks, unpack_blocks
from gpq_faiss.codes.codebooks import fuse, inject, pad_vectors
from gpq_faiss.codes.encode import decode, encode
from gpq_faiss.errors import DataError, MismatchError, OutputExistsError, UsageError
from gpq_faiss.faissio.header import contents_of
from gpq_faiss.faissio.io import load_index, save_index, sidecar_path
from gpq_faiss.faissio.model import ModelHeader, read_model
from gpq_faiss.faissio.storage import FORMS, OLD_LISTS, faiss_index
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.stages.export import export


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
        for other in (open_in_memory(index).to_faiss(form), plain):
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
        open_in_memory(inject(codebooks(3)))
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
            with pytest.raises(DataError, match=rf"i\.faiss.*{message}"):
                read(path)


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


# Codebooks for other tools --------------------------------------------------------------------------------------------


N, Q, TOP = 700, 4, 20


@pytest.fixture(scope="module", params=[5, 6])
def model(request, tmp_path_factory):
    """Of an odd number of codebooks, whose last one shares its byte with none, and of an even one."""
    return make_model(tmp_path_factory.mktemp("export") / "model", M=request.param)


def vectors(Z, n, seed):
    """Vectors near the codewords of random codes, float32 [n, M*d], sub-vectors of unit norm: each is clearly
    nearer to one codeword than to the next, so that rounding decides no code."""
    M, K, d = Z.shape
    rng = np.random.default_rng([seed, n])
    x = Z[np.arange(M), rng.integers(0, K, (4 * n, M))] + 0.2 * rng.standard_normal((4 * n, M, d))
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    cosines = np.sort(np.einsum("nmd,mkd->nmk", x, Z), axis=2)
    clear = (cosines[:, :, -1] - cosines[:, :, -2] > 1e-4).all(axis=1)
    assert clear.sum() >= n
    return x[clear][:n].reshape(n, -1).astype(np.float32)


def truth(model):
    """Items, queries, the items' codes, and the scores [Q, N] of all by brute force."""
    Z = read_model(model).codebooks
    x, xq = vectors(Z, N, 0), vectors(Z, Q, 1)
    codes = encode(x, Z)
    return x, xq, codes, score_codes(xq, codes, Z)


def same_ranking(scores, ids, exact):
    """``ids`` of one query are the best by ``exact``; items that differ by rounding may change places."""
    best = np.sort(exact)[::-1][: len(ids)]
    assert len(set(ids.tolist())) == len(ids)
    np.testing.assert_allclose(scores, best, atol=1e-5)
    np.testing.assert_allclose(exact[ids], best, atol=1e-5)


def test_numpy_arrays_score_the_code_bytes(model, tmp_path):
    out = export(model, tmp_path / "codebooks.npz", to="numpy")
    held = np.load(out, allow_pickle=False)
    header = read_model(model)
    meta = json.loads(held["meta"].item())
    assert meta["codebooks_fingerprint"] == header.codebooks_fingerprint
    assert meta["model_fingerprint"] == header.model_fingerprint
    np.testing.assert_array_equal(held["codebooks"], header.codebooks)
    _, xq, codes, exact = truth(model)
    bytes_, _, width = held["fused"].shape
    tables = np.einsum(
        "qpw,pbw->qpb", pad_vectors(xq, bytes_ * width).reshape(Q, bytes_, width), held["fused"]
    )
    np.testing.assert_allclose(tables[:, np.arange(bytes_), codes].sum(axis=2), exact, atol=1e-5)


def test_nanopq_encodes_and_ranks_alike(model, tmp_path):
    nanopq = pytest.importorskip("nanopq", reason="nanopq is not installed: pip install nanopq")
    held = np.load(export(model, tmp_path / "nanopq.npz", to="nanopq"), allow_pickle=False)
    M, K, d = held["codewords"].shape
    pq = nanopq.PQ(M, K, metric="dot", verbose=False)
    pq.codewords, pq.Ds = held["codewords"], d
    x, xq, codes, exact = truth(model)
    theirs = pq.encode(x)
    np.testing.assert_array_equal(theirs, unpack_codes(codes, M, K))
    for q, right in zip(xq, exact, strict=True):
        scores = pq.dtable(q).adist(theirs)
        ids = np.argsort(-scores, kind="stable")[:TOP]
        same_ranking(scores[ids], ids, right)


def test_lancedb_ranks_alike(model, tmp_path):
    lancedb = pytest.importorskip("lancedb", reason="LanceDB is not installed: pip install lancedb pylance")
    pytest.importorskip("lance", reason="LanceDB's file library is not installed: pip install pylance")
    import pyarrow

    held = np.load(export(model, tmp_path / "lancedb.npz", to="lancedb"), allow_pickle=False)
    books, centroids = held["pq_codebook"], held["ivf_centroids"]
    width = centroids.shape[1]
    x, xq, _, exact = truth(model)
    rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(pad_vectors(x, width).ravel()), width)
    database = lancedb.connect(str(tmp_path / "db"))
    table = database.create_table("items", pyarrow.table({"id": np.arange(N), "vector": rows}))
    sizes = {"num_partitions": 1, "num_sub_vectors": len(books)}
    books = {"ivf_centroids": centroids, "pq_codebook": books}
    table.to_lance().create_index("vector", "IVF_PQ", metric="dot", **sizes, **books)
    table.checkout_latest()
    assert len(table.list_indices()) == 1
    for q, right in zip(pad_vectors(xq, width), exact, strict=True):
        found = table.search(q).distance_type("dot").limit(TOP).to_arrow()
        # Its distance of dot products is 1 - score. Without the index it would be the score of the vector itself.
        same_ranking(1 - found["_distance"].to_numpy(), found["id"].to_numpy(), right)


@pytest.mark.parametrize(
    "string", [None, "PQ{M}x4", "IDMap,PQ{M}x4np", "PQ{half}", "IDMap2,PQ{half}x8", "PQ{M}x4fs"]
)
def test_factory_strings_search_as_faiss_does(model, tmp_path, string):
    M = len(read_model(model).codebooks)
    if string is not None:
        if "half" in string and M % 2:  # a byte would be shared with vectors to come
            with pytest.raises(UsageError, match=r"go into PQ5x4, PQ5x4fs, with"):
                export(model, tmp_path / "o.faiss", to="factory", factory="PQ3")
            return
        string = string.format(M=M, half=M // 2)
    out = export(model, tmp_path / "empty.faiss", to="factory", factory=string)
    assert load_index(out)[1]["codebooks_fingerprint"] == read_model(model).codebooks_fingerprint
    index = faiss.read_index(str(out))
    # What the string means to Faiss is what was written.
    made = faiss.index_factory(index.d, string or f"IDMap2,PQ{M}x4", faiss.METRIC_INNER_PRODUCT)
    assert (type(made), index.ntotal) == (type(index), 0)
    x, xq, codes, exact = truth(model)
    rows, ids = pad_vectors(x, index.d), np.arange(N)
    if isinstance(index, faiss.IndexIDMap):
        ids = ids[::-1] + (1 << 40)
        index.add_with_ids(rows, ids)
    else:
        index.add(rows)
    held = contents_of(index)
    np.testing.assert_array_equal(held.codes[np.argsort(held.ids)], codes[np.argsort(ids)])
    D, found = index.search(pad_vectors(xq, index.d), TOP)
    found = np.argsort(ids)[np.searchsorted(np.sort(ids), found)]
    if "fs" not in (string or ""):
        for scores, one, right in zip(D, found, exact, strict=True):
            same_ranking(scores, one, right)
        return
    # Tables are rounded to 8 bits: a score is off by M steps of a 255th of what all tables span, at most.
    Z = read_model(model).codebooks
    spans = np.einsum("qmd,mkd->qmk", xq.reshape(Q, *Z.shape[::2]), Z)
    bound = (spans.max(axis=2) - spans.min(axis=2)).sum(axis=1) / 255 * M + 1e-5
    assert (np.abs(D - np.take_along_axis(exact, found, axis=1)) <= bound[:, None]).all()
    assert (D[:, 0] >= exact.max(axis=1) - 2 * bound).all()


def test_what_cannot_be_is_refused(tmp_path):
    model, wide = make_model(tmp_path / "model"), make_model(tmp_path / "wide", M=2, K=32)
    strings = ("PQ7x4", "PQ6x5", "PQ3x8fs", "IVF3,PQ6x4", "OPQ6,PQ6x4", "PQ6x4,RFlat", "PQ6x4fsnp", "")
    calls = [
        *((model, "factory", string, "codebooks go into") for string in strings),
        (model, "numpy", "PQ6x4", "belongs to"),
        (model, "pickle", None, "choose from"),
        (wide, "lancedb", None, "32 codewords"),
    ]
    for source, to, factory, message in calls:
        with pytest.raises(UsageError, match=message):
            export(source, tmp_path / "o", to=to, factory=factory)
    assert len(list(tmp_path.iterdir())) == 2
    assert "fused" not in np.load(export(wide, tmp_path / "n.npz", to="numpy"))
    large = np.load(export(make_model(tmp_path / "large", M=2, K=256), tmp_path / "l.npz", to="lancedb"))
    assert large["pq_codebook"].shape[:2] == (2, 256)
