"""The two stages: model -> empty trained index, codes or features -> filled index."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import faiss
import numpy as np
import pytest
from index_factory import IDS, M, codebooks, d, features, make_model, make_rows, n

from gpq_faiss.codes.encode import decode, encode
from gpq_faiss.errors import DataError, MismatchError, OutputExistsError
from gpq_faiss.faissio.header import contents_of
from gpq_faiss.faissio.io import load_index, read_sidecar
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.stages.export import export, export_faiss
from gpq_faiss.stages.index import index


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", codebooks())


@pytest.fixture
def codes(tmp_path: Path) -> Path:
    return make_rows(tmp_path / "codes.h5", "codes", encode(features(), codebooks()), IDS, codebooks())


def test_export_is_an_empty_trained_index_with_the_codebooks(model: Path, tmp_path: Path) -> None:
    out = export_faiss(model, tmp_path / "new folder" / "empty.faiss")
    plain = faiss.read_index(str(out))
    assert isinstance(plain, faiss.IndexPQ)
    assert plain.is_trained
    assert (plain.ntotal, plain.d, plain.metric_type) == (0, M * d, faiss.METRIC_INNER_PRODUCT)
    assert np.array_equal(faiss.vector_to_array(plain.pq.centroids), codebooks().ravel())
    plain.add(features())
    assert np.array_equal(contents_of(plain).codes, encode(features(), codebooks()))
    assert load_index(out)[1]["model_fingerprint"] == "model-1"
    with pytest.raises(OutputExistsError):
        export_faiss(model, out)
    export_faiss(model, out, overwrite=True)


@pytest.mark.parametrize("kind", ["codes", "features"])
def test_codes_and_features_give_the_same_index(model: Path, tmp_path: Path, kind: str) -> None:
    values = features() if kind == "features" else encode(features(), codebooks())
    source = make_rows(tmp_path / "rows.h5", kind, values, IDS, codebooks())
    out = index(model, source, tmp_path / "index.faiss")
    layout, sidecar = load_index(out)
    loaded = faiss.read_index(str(out))
    assert isinstance(loaded, faiss.IndexIDMap2)
    assert np.array_equal(layout.codes, encode(features(), codebooks()))
    assert np.array_equal(layout.ids, IDS)
    assert sidecar["model_fingerprint"] == "model-1"
    assert sidecar["extra"] == {"source": kind, "data_fingerprint": "data-1"}
    # an item is found by its own vector: nothing scores higher than its own code
    loaded.check_consistency()
    D, found = open_in_memory(loaded).search(features()[:50], 10)
    own = np.array([features()[i] @ loaded.reconstruct(int(IDS[i])) for i in range(50)])
    assert (D[:, 0] >= own - 1e-5).all()
    assert (found[:, 0] == IDS[:50]).mean() > 0.9


@pytest.mark.parametrize(
    ("kind", "memory"), [("flat", None), ("fastscan", None), ("ivf", None), ("flat", "32MB")]
)
def test_vectors_that_are_no_items_are_refused(tmp_path: Path, kind: str, memory: str | None) -> None:
    """Of a model whose items are codewords, as it declares (earlier ones: that their queries have vectors of their own)."""
    Z = codebooks()
    items = decode(encode(features(), Z), Z)
    wrong = items.copy()
    wrong[[117, 118]] = features()[[117, 118]]
    good = make_rows(tmp_path / "good.h5", "features", items, IDS, Z)
    bad = make_rows(tmp_path / "bad.h5", "features", wrong, IDS, Z)
    both = {"asymmetric": True, "items_are_codewords": True}
    for number, (declared, refused) in enumerate(
        (
            (both, True),
            ({"asymmetric": True}, True),
            (both | {"items_are_codewords": False}, False),
            ({}, False),
        )
    ):
        model = make_model(tmp_path / f"model-{number}", Z, **declared)
        index(model, good, tmp_path / "i.faiss", kind=kind, memory=memory, overwrite=True)
        if not refused:
            index(model, bad, tmp_path / "i.faiss", kind=kind, memory=memory, overwrite=True)
            continue
        with pytest.raises(DataError, match=r"bad\.h5: rows 117, 118 .* query vectors") as caught:
            index(model, bad, tmp_path / "j.faiss", kind=kind, memory=memory)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "j.faiss").exists()


def test_an_export_says_where_queries_have_vectors_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gpq_faiss")
    for own in (False, True):
        model = make_model(tmp_path / f"model-{own}", codebooks(), asymmetric=own)
        for target in ("faiss", "numpy", "factory"):
            caplog.clear()
            out = tmp_path / f"{own}.{target}"
            export_faiss(model, out) if target == "faiss" else export(model, out, to=target)  # type: ignore[arg-type]
            assert ["different vectors for queries and items" in m for m in caplog.messages] == [True] * own
            extra = json.loads(str(np.load(out)["meta"])) if target == "numpy" else read_sidecar(out)["extra"]
            assert extra.get("asymmetric", False) == own


def test_rows_of_another_model_are_a_mismatch(model: Path, tmp_path: Path) -> None:
    values = encode(features(), codebooks())
    for name, seed, message in (("model-2", 0, "model-2"), ("model-1", 1, "other codebooks")):
        other = make_rows(tmp_path / f"{seed}.h5", "codes", values, IDS, codebooks(seed), name)
        with pytest.raises(MismatchError, match=message):
            index(model, other, tmp_path / "index.faiss")
    assert not list(tmp_path.glob("index.faiss*"))


def test_rows_that_cannot_be_indexed_are_refused(model: Path, tmp_path: Path) -> None:
    ids, values = IDS.copy(), features()
    ids[400] = ids[3]
    source = make_rows(tmp_path / "b.h5", "codes", encode(values, codebooks()), ids, codebooks())
    with pytest.raises(DataError, match=f"id {ids[3]} occurs more than once"):
        index(model, source, tmp_path / "index.faiss")
    assert not (tmp_path / "index.faiss").exists()
    values[321, d : 2 * d] = 0
    source = make_rows(tmp_path / "a.h5", "features", values, IDS, codebooks())
    with pytest.raises(DataError, match="no direction, in row 321"):
        index(model, source, tmp_path / "index.faiss")


@pytest.mark.parametrize("memory", [None, "32MB"])
@pytest.mark.parametrize("kind", ["flat", "fused", "fastscan", "ivf"])
def test_every_kind_holds_the_same_codes(
    model: Path, codes: Path, tmp_path: Path, kind: str, memory: str | None
) -> None:
    x, Z = features(), codebooks()
    other = make_rows(tmp_path / "features.h5", "features", x[:200], IDS[:200] + 1, Z)
    path = index(model, [codes, other], tmp_path / "i.faiss", kind=kind, memory=memory)
    layout = load_index(path)[0]
    expected = dict(
        zip([*IDS.tolist(), *(IDS[:200] + 1).tolist()], [*encode(x, Z), *encode(x[:200], Z)], strict=True)
    )
    assert {int(i): c.tobytes() for i, c in zip(layout.ids, layout.codes, strict=True)} == {
        i: c.tobytes() for i, c in expected.items()
    }
    held = open_in_memory(path)
    assert read_sidecar(path)["model_fingerprint"] == held.model_fingerprint == "model-1"
    truth = held.search(x[:5], 20)
    D, found = open_file(path, "32MB").search(x[:5], 20)
    assert np.array_equal(found, truth[1])
    assert np.array_equal(D, truth[0])


FORMS = ["flat", "fused", "fastscan", "ivf"]


@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("source", FORMS)
def test_index_files_are_converted_and_merged(
    model: Path, codes: Path, tmp_path: Path, source: str, target: str
) -> None:
    x, Z = features(), codebooks()
    other = make_rows(tmp_path / "other.h5", "features", x[:200], IDS[:200] + 1, Z)
    first = index(model, codes, tmp_path / "a.faiss", kind=source)
    second = index(model, other, tmp_path / "b.faiss")
    merged = index(model, [first, second], tmp_path / "c.faiss", kind=target)
    direct = index(model, [codes, other], tmp_path / "d.faiss")
    expected, found = (load_index(path)[0] for path in (direct, merged))
    assert dict(zip(expected.ids.tolist(), map(bytes, expected.codes), strict=True)) == dict(
        zip(found.ids.tolist(), map(bytes, found.codes), strict=True)
    )
    alone = index(model, first, tmp_path / "e.faiss", kind=target)
    assert len(load_index(alone)[0].codes) == n
    with pytest.raises(DataError, match=r"occurs more than once"):
        index(model, [first, first], tmp_path / "f.faiss", kind=target)


@pytest.mark.parametrize("kind", FORMS)
def test_index_files_of_other_models_are_refused(model: Path, codes: Path, tmp_path: Path, kind: str) -> None:
    made = index(model, codes, tmp_path / "a.faiss", kind=kind)
    other = make_model(tmp_path / "other", codebooks(1), "model-2")
    with pytest.raises(MismatchError, match="other codebooks"):
        index(other, made, tmp_path / "b.faiss")
    sister = make_model(tmp_path / "sister", codebooks(), "model-2")
    with pytest.raises(MismatchError, match="is of model model-1"):
        index(sister, made, tmp_path / "b.faiss")
    with pytest.raises(DataError, match="is empty"):
        index(model, export_faiss(model, tmp_path / "empty.faiss"), tmp_path / "b.faiss")
    made.write_bytes(made.read_bytes() + b"x")
    with pytest.raises(DataError, match=r"a\.faiss"):
        index(model, made, tmp_path / "b.faiss")
