"""The whole path in one call, what evaluation refuses, and the same on a GPU where there is one."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from model_factory import digits

import gpq_faiss as gpq
from gpq_faiss import Convention, Encoder, RowReader, RunOptions, evaluate, rank_codes, train
from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.codes.encode import encode as encode_vectors
from gpq_faiss.codes.scores import score_tables
from gpq_faiss.config import preset
from gpq_faiss.data.protocols import load_split
from gpq_faiss.errors import MismatchError, UsageError
from gpq_faiss.stages.evaluate import Evaluation
from gpq_faiss.stages.search import SearchResult


def quick():
    """The recommended preset, shortened."""
    changes = {
        "network": {"backbone": "mlp", "hidden": [64]},
        "quantizer": {"codebooks": 6},
        "posterior": {"networks": 2},
        "training": {"steps": 100, "learning_rate": 3e-3},
    }
    return preset("recommended").with_settings(changes)


class Products(NamedTuple):
    """Of all stages in a row."""

    model: Path
    codes: Path
    results: SearchResult
    evaluation: Evaluation


def run(folder, *, compare=(), device="cpu", amp=False):
    data, options = digits(), RunOptions(device=device, amp=amp)
    model = train(data, folder / "model", config=quick(), labelled="20-per-class", options=options)
    codes = gpq.encode(model, data, folder / "codes.h5", device=device)
    index = gpq.index(model, codes, folder / "index.faiss")
    results = gpq.search(gpq.open_encoder(model, device), index, data, rows="0:8")
    return Products(model, codes, results, evaluate(model, data, compare=compare, device=device))


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    return run(tmp_path_factory.mktemp("run"), compare=("pq",))


def test_the_path_ends_in_figures_far_above_chance(products):
    assert products.evaluation.ranking.map > 0.5, "chance is 0.1"
    assert products.results.ids.shape == (8, 10)
    assert next(iter(products.evaluation.measured.values())).bits == 24
    assert products.evaluation.measured["pq"].ranking.map > 0.5
    # The figure of ``evaluate`` is that of the codes that ``encode`` wrote, ranked by hand.
    split = load_split(products.model / "split.json")
    encoder = Encoder.load(products.model)
    Z = encoder.model.codebooks
    labels = digits().require_labels()
    with RowReader(products.codes) as reader:
        codes = unpack_codes(reader.values, *Z.shape[:2])

    def ranked(queries, database):
        _, xq = encoder.embed_rows(digits(), queries, queries=True)
        relevant = labels.take(queries).packed, labels.take(database).packed
        return rank_codes(score_tables(xq, Z), codes[database], *relevant)

    result = ranked(split.query, split.database)
    assert result.map == products.evaluation.ranking.map
    assert products.evaluation.queries.tolist() == split.query.tolist()
    assert result.n_database == products.evaluation.ranking.n_database == len(split.database)
    # So is that of a file of codes, which all items are ranked against.
    all_rows = np.arange(len(labels))
    of_codes = evaluate(products.model, digits(), codes=products.codes)
    assert of_codes.ranking.map == ranked(all_rows, all_rows).map


def test_trained_queries_are_refused_and_other_data_split_anew(products):
    with pytest.raises(MismatchError, match="protocol 1"):
        evaluate(products.model, digits(), protocol="2")
    repeated = evaluate(products.model, digits(), protocol="1")
    assert repeated.ranking.map == products.evaluation.ranking.map
    renamed_data = replace(digits(), fingerprint="another", name="copy")
    result = evaluate(products.model, renamed_data, protocol="transfer")
    assert any("drawn from it" in note for note in result.notes)
    assert result.split_hash != products.evaluation.split_hash


FEW = preset("paper").with_settings({"training": {"steps": 5}})


def test_a_model_without_queries_cannot_be_evaluated(tmp_path):
    model = train(digits(), tmp_path / "m", config=FEW, labelled="0.5", protocol="none")
    with pytest.raises(UsageError, match="protocol none"):
        evaluate(model, digits())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("amp", [False, True])
def test_the_path_on_a_gpu(tmp_path, amp):
    out = run(tmp_path, device="cuda", amp=amp)
    assert out.evaluation.ranking.map > 0.5
    for k in (None, 50):
        options = {"convention": Convention(k=k)}
        on_cuda, expected = (
            evaluate(out.model, digits(), **options, device=device) for device in ("cuda", "cpu")
        )
        assert on_cuda.ranking.map == pytest.approx(expected.ranking.map, abs=5e-3)
        assert on_cuda.ranking.precision == pytest.approx(expected.ranking.precision, abs=2e-2)
    # The same model on both devices: vectors agree to rounding, codes wherever the choice is not a
    # close one.
    rows = np.arange(500)
    _, on_gpu = Encoder.load(out.model, "cuda").embed_rows(digits(), rows)
    _, on_cpu = Encoder.load(out.model, "cpu").embed_rows(digits(), rows)
    np.testing.assert_allclose(on_gpu, on_cpu, atol=2e-3)
    Z = Encoder.load(out.model).model.codebooks
    M, K, _ = Z.shape
    differ = unpack_codes(encode_vectors(on_gpu, Z), M, K) != unpack_codes(
        encode_vectors(on_cpu, Z), M, K
    )
    best = np.sort(score_tables(on_cpu, Z), axis=2)
    assert ((best[..., -1] - best[..., -2])[differ] < 1e-2).all()
