"""Indexing: codes, features and indexes become a plain Faiss file, or mapped lists."""

import faiss
import numpy as np
import pytest
from commands import untouched
from index_factory import (
    best,
    books,
    make_model,
    make_rows,
    queries,
    random_ids,
    unit,
)

from gpq_faiss import index, open_index
from gpq_faiss.codes.encode import decode, encode
from gpq_faiss.errors import DataError, MismatchError, UsageError

M, d, N = 6, 4, 300
Z, IDS = books(M), random_ids(N)
X = unit(np.random.default_rng(1).normal(size=(N, M, d))).reshape(N, M * d)
CODES = encode(X, Z)
FORMS = ["flat.faiss", "fused.faiss", "index.lists"]


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model", Z)


@pytest.fixture
def codes(tmp_path):
    return make_rows(tmp_path / "codes.h5", CODES, IDS, Z)


def by_id(path):
    values, ids = open_index(path).items_by_id()
    return dict(zip(ids.tolist(), map(bytes, values), strict=True))


def make(model, source, out, **options):
    """Index by the kind that the name of the output begins with."""
    kind = "fused" if out.name.startswith("fused") else "flat"
    return index(model, source, out, kind=kind, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", ["codes.h5", "features.h5", *FORMS])
def test_every_source_becomes_every_form(model, codes, tmp_path, source, form):
    if source == "features.h5":
        make_rows(tmp_path / source, X, IDS, Z)
    elif source != "codes.h5":
        make(model, codes, tmp_path / source)
    out = make(model, tmp_path / source, tmp_path / f"{form}.new{tmp_path.joinpath(form).suffix}")
    assert by_id(out) == dict(zip(IDS.tolist(), map(bytes, CODES), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_sources_are_merged(model, codes, tmp_path, form):
    sources, expected = [codes], dict(zip(IDS.tolist(), map(bytes, CODES), strict=True))
    for number, name in enumerate(["features.h5", *FORMS], 1):
        ids = IDS[: 50 * number] + 10_000 * number
        rows = make_rows(tmp_path / f"{number}.h5", X[: 50 * number], ids, Z)
        sources.append(rows if name == "features.h5" else make(model, rows, tmp_path / name))
        expected |= zip(ids.tolist(), map(bytes, CODES), strict=False)
    assert (
        by_id(make(model, sources, tmp_path / f"{form}-all{tmp_path.joinpath(form).suffix}"))
        == expected
    )


def test_faiss_file_is_an_index_with_ids(model, codes, tmp_path):
    plain = faiss.read_index(str(index(model, codes, tmp_path / "x.faiss")))
    assert type(plain) is faiss.IndexIDMap2
    plain.check_consistency()
    scores, ids = plain.search(queries(3, M * d), 5)
    exact, exact_ids = best(queries(3, M * d), CODES, Z, 5, IDS)
    assert np.allclose(scores, exact, atol=1e-5)
    assert np.isin(ids, exact_ids).mean() > 0.9


def test_fastscan_warns_of_what_plain_faiss_loses(model, codes, tmp_path, caplog):
    plain = faiss.read_index(str(index(model, codes, tmp_path / "x.faiss", kind="fastscan")))
    assert plain.ntotal == N
    assert "plain Faiss finds only a part" in caplog.text


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("x.lists", {"kind": "fused"}, UsageError, "files have one form, with ids"),
        ("x.lists", {"ids": False}, UsageError, "files have one form, with ids"),
        ("x.faiss", {"ids": False}, DataError, "the ids are not 0 to 299: leave out --no-ids"),
        ("x.faiss", {"kind": "tree"}, UsageError, "choose from flat, fused, fastscan, ivf"),
        ("codes.h5", {"overwrite": True}, UsageError, "which is not the output itself"),
        ("model", {"overwrite": True}, DataError, "cannot write .*model"),
        ("codes.h5/x", {}, DataError, "a part of the path is a file, not a folder"),
    ],
)
def test_unfit_option_is_refused(model, codes, tmp_path, name, options, error, message):
    with untouched(tmp_path), pytest.raises(error, match=message):
        index(model, codes, tmp_path / name, **options)


@pytest.mark.parametrize("form", FORMS)
def test_id_in_two_sources_is_refused(model, codes, tmp_path, form):
    other_source = make_rows(tmp_path / "other.h5", CODES[:1], IDS[7:8], Z)
    with untouched(tmp_path), pytest.raises(DataError, match=f"id {IDS[7]} occurs more than once"):
        make(model, [codes, other_source], tmp_path / form)


@pytest.mark.parametrize("source", ["codes.h5", *FORMS])
def test_source_of_other_codebooks_is_refused(model, codes, tmp_path, source):
    other_source = make_model(tmp_path / "other", books(M, seed=1), "model-2")
    path = codes if source == "codes.h5" else make(model, codes, tmp_path / source)
    with untouched(tmp_path), pytest.raises(MismatchError, match="encode the data again with this"):
        index(other_source, path, tmp_path / "x.faiss")


def test_rows_of_another_model_of_equal_codebooks_are_refused(codes, tmp_path):
    other_source = make_model(tmp_path / "other", Z, "model-2")
    with pytest.raises(MismatchError, match="is of model model-1, not model-2"):
        index(other_source, codes, tmp_path / "x.faiss")


@pytest.mark.parametrize("refused", [True, False])
def test_query_vectors_are_refused_of_items_that_are_codewords(tmp_path, refused):
    model = make_model(tmp_path / "model", Z, asymmetric=True, items_are_codewords=refused)
    items = make_rows(tmp_path / "items.h5", decode(CODES, Z), IDS, Z)
    index(model, items, tmp_path / "items.faiss")
    source = make_rows(tmp_path / "queries.h5", X, IDS, Z)
    if not refused:
        assert index(model, source, tmp_path / "x.faiss").exists()
        return
    with pytest.raises(DataError, match=r"queries\.h5: rows 0, 1, .* query vectors"):
        index(model, source, tmp_path / "x.faiss")
    assert not (tmp_path / "x.faiss").exists()
