"""The two stages: model -> empty trained index, codes or features -> filled index."""

import json
import logging

import faiss
import numpy as np
import pytest
from index_factory import IDS, M, codebooks, d, features, make_model, make_rows, n, same

from gpq_faiss import export, export_faiss, index
from gpq_faiss.codes.encode import decode, encode
from gpq_faiss.errors import DataError, MismatchError, OutputExistsError
from gpq_faiss.faissio.header import contents_of
from gpq_faiss.faissio.io import load_index, read_sidecar
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.opening import open_in_memory

FORMS = ["flat", "fused", "fastscan", "ivf"]


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model", codebooks())


@pytest.fixture
def codes(tmp_path):
    return make_rows(tmp_path / "codes.h5", "codes", encode(features(), codebooks()), IDS, codebooks())


def test_export_is_an_empty_trained_index_with_the_codebooks(model, tmp_path):
    out = export_faiss(model, tmp_path / "new folder" / "empty.faiss")
    plain = faiss.read_index(str(out))
    assert isinstance(plain, faiss.IndexPQ)
    assert plain.is_trained
    assert (plain.ntotal, plain.d, plain.metric_type) == (0, M * d, faiss.METRIC_INNER_PRODUCT)
    plain.add(features())
    assert np.array_equal(contents_of(plain).codes, encode(features(), codebooks()))
    assert load_index(out)[1]["model_fingerprint"] == "model-1"
    with pytest.raises(OutputExistsError):
        export_faiss(model, out)
    export_faiss(model, out, overwrite=True)


@pytest.mark.parametrize(
    ("kind", "memory"), [("flat", None), ("fastscan", None), ("ivf", None), ("flat", "32MB")]
)
def test_vectors_that_are_no_items_are_refused(tmp_path, kind, memory):
    """Of a model whose items are codewords."""
    Z = codebooks()
    items = decode(encode(features(), Z), Z)
    wrong = items.copy()
    wrong[[117, 118]] = features()[[117, 118]]
    good = make_rows(tmp_path / "good.h5", "features", items, IDS, Z)
    bad = make_rows(tmp_path / "bad.h5", "features", wrong, IDS, Z)
    both = {"asymmetric": True, "items_are_codewords": True}
    cases = ((both, True), (both | {"items_are_codewords": False}, False), ({}, False))
    for number, (declared, refused) in enumerate(cases):
        model = make_model(tmp_path / f"model-{number}", Z, **declared)
        index(model, good, tmp_path / "i.faiss", kind=kind, memory=memory, overwrite=True)
        if not refused:
            index(model, bad, tmp_path / "i.faiss", kind=kind, memory=memory, overwrite=True)
            continue
        with pytest.raises(DataError, match=r"bad\.h5: rows 117, 118 .* query vectors"):
            index(model, bad, tmp_path / "j.faiss", kind=kind, memory=memory)
        assert not (tmp_path / "j.faiss").exists()


def test_an_export_says_where_queries_have_vectors_of_their_own(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="gpq_faiss")
    for own in (False, True):
        model = make_model(tmp_path / f"model-{own}", codebooks(), asymmetric=own)
        for target in ("faiss", "numpy", "factory"):
            caplog.clear()
            out = tmp_path / f"{own}.{target}"
            export_faiss(model, out) if target == "faiss" else export(model, out, to=target)
            assert ["different vectors for queries and items" in m for m in caplog.messages] == [True] * own
            extra = json.loads(str(np.load(out)["meta"])) if target == "numpy" else read_sidecar(out)["extra"]
            assert extra.get("asymmetric", False) == own


def as_dict(layout):
    """Id -> code."""
    return dict(zip(layout.ids.tolist(), map(bytes, layout.codes), strict=True))


@pytest.mark.parametrize("memory", [None, "32MB"])
@pytest.mark.parametrize("kind", FORMS)
def test_every_kind_holds_the_codes_of_all_sources(model, codes, tmp_path, kind, memory):
    """Of codes and of features, which give the same ones, and of an index of any kind."""
    x, Z = features(), codebooks()
    sources, ids, parts = [codes], IDS.tolist(), [x]
    for number, source in enumerate(("rows", *FORMS), 1):
        part, own = x[: 50 * number], IDS[: 50 * number] + number
        rows = make_rows(tmp_path / f"{source}.h5", "features", part, own, Z)
        made = rows if source == "rows" else index(model, rows, tmp_path / f"{source}.faiss", kind=source)
        sources, ids, parts = [*sources, made], [*ids, *own.tolist()], [*parts, part]
    path = index(model, sources, tmp_path / "i.faiss", kind=kind, memory=memory)
    layout, sidecar = load_index(path)
    assert as_dict(layout) == dict(zip(ids, map(bytes, encode(np.vstack(parts), Z)), strict=True))
    with pytest.raises(DataError, match=r"occurs more than once"):
        index(model, [path, codes], tmp_path / "f.faiss", kind=kind)
    held = open_in_memory(path)
    assert sidecar["model_fingerprint"] == held.model_fingerprint == "model-1"
    assert same(held.search(x[:50], 20), open_file(path, "32MB").search(x[:50], 20))


@pytest.mark.parametrize("kind", ["codes", "features"])
def test_an_index_says_what_it_was_made_of(model, tmp_path, kind):
    values = features() if kind == "features" else encode(features(), codebooks())
    out = index(model, make_rows(tmp_path / "x.h5", kind, values, IDS, codebooks()), tmp_path / "i.faiss")
    assert read_sidecar(out)["extra"] == {"source": kind, "data_fingerprint": "data-1"}
    loaded = faiss.read_index(str(out))
    assert isinstance(loaded, faiss.IndexIDMap2)
    loaded.check_consistency()
    assert np.array_equal(faiss.vector_to_array(loaded.id_map), IDS)


@pytest.mark.parametrize("kind", ["rows", *FORMS])
def test_sources_of_other_models_and_what_cannot_be_indexed_are_refused(model, codes, tmp_path, kind):
    Z, x, out = codebooks(), features(), tmp_path / "out.faiss"
    made = codes if kind == "rows" else index(model, codes, tmp_path / "a.faiss", kind=kind)
    other = make_model(tmp_path / "other", codebooks(1), "model-2")
    sister = make_model(tmp_path / "sister", Z, "model-2")
    x[321, d : 2 * d] = 0
    ids = np.where(np.arange(n) == 400, IDS[3], IDS)
    for of, source, error, message in (
        (other, made, MismatchError, "other codebooks"),
        (sister, made, MismatchError, "of model model-1"),
        (model, export_faiss(model, tmp_path / "empty.faiss"), DataError, "is empty"),
        (model, make_rows(tmp_path / "f.h5", "features", x, IDS, Z), DataError, "no direction, in row 321"),
        (
            model,
            make_rows(tmp_path / "c.h5", "codes", encode(features(), Z), ids, Z),
            DataError,
            f"id {IDS[3]} occurs more than once",
        ),
    ):
        with pytest.raises(error, match=message):
            index(of, source, out)
    made.write_bytes(made.read_bytes()[:-1])
    with pytest.raises(DataError, match=made.name):
        index(model, made, out)
    assert not list(tmp_path.glob("out.faiss*"))
