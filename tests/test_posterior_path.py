"""Class-posterior codes from training to search."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from model_factory import make_model, random_input
from posterior_factory import CLASS_CODEBOOKS, D, config_of, few_steps, scored  # noqa: F401  # an autouse fixture

from gpq_faiss import Encoder, RowReader, encode, index, search, train
from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.data.reader import Reader
from gpq_faiss.data.standard import open_digits
from gpq_faiss.errors import DataError
from gpq_faiss.nn.posterior import PosteriorNetwork


@pytest.fixture(scope="module", params=CLASS_CODEBOOKS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("posterior")
    config = config_of(request.param, steps=60, batch_labelled=50, batch_unlabelled=100, validation=0.0)
    return train(open_digits(), folder / "model", config=config, labelled="10-per-class")


def test_a_search_ranks_by_class_probabilities_in_sums_of_codewords(model, tmp_path):
    data = open_digits()
    codes = encode(model, data, tmp_path / "codes.h5")
    built = index(model, codes, tmp_path / "index.faiss")
    result = search(model, built, data, rows="0:5", k=7)
    encoder = Encoder.load(model)
    _, xq = encoder.embed_rows(data, np.arange(5), queries=True)
    _, xb = encoder.embed_rows(data, np.arange(len(data)))
    Z = encoder.model.codebooks
    chosen = np.einsum("nmd,mkd->nmk", xb.reshape(-1, 3, D), Z).argmax(2)
    scores = xq @ Z[np.arange(3), chosen].reshape(-1, 3 * D).T
    best = -np.sort(-scores, axis=1)[:, :7]
    assert np.abs(result.scores - best).max() < 1e-5
    with RowReader(codes) as reader:
        np.testing.assert_array_equal(unpack_codes(reader.block(), 3, 16), chosen)
    # The same without any vector: class probabilities, and the codewords that add up to them.
    net = encoder.model.network
    assert isinstance(net, PosteriorNetwork)
    with Reader(data, encoder.model.image_size) as images, torch.no_grad():
        pixels = torch.from_numpy(images.fetch(np.arange(5))[0]).float() / 255
        expected = scored(net, pixels, torch.from_numpy(chosen)).numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-4)


def test_prototypes_placed_anew_say_the_same(model):
    net = Encoder.load(model).model.network
    assert isinstance(net, PosteriorNetwork)
    # Directions of no weight may be others.
    again = copy.deepcopy(net)
    again.place(net.logits, net.tables, net.feature_codewords, net.weights, by_logits=net._by_logits)
    scores = [torch.einsum("mcd,mkd->mck", n.prototypes, n.pq_codewords) for n in (again, net)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-4)


def test_an_infinite_item_is_not_encoded(tmp_path):
    """Features that are finite, and too large for the network."""
    x = random_input("features", 120)
    x[7] = 3e38
    np.save(tmp_path / "huge.npy", x)
    made = make_model(tmp_path / "model", networks=2)
    with pytest.raises(DataError):
        encode(made, f"features:{tmp_path / 'huge.npy'}", tmp_path / "codes.h5")
    assert not (tmp_path / "codes.h5").exists()
