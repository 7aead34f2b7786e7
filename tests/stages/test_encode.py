"""Encoding that is broken off and gone on with, and the first choice of a network."""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_factory import make_model, random_input

import gpq_faiss.stages.encode as stage
import gpq_faiss.store.writer as writer_room
from gpq_faiss.codes.encode import encode as encode_vectors
from gpq_faiss.config import Config, NetworkConfig
from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import DataError
from gpq_faiss.gpu.tensors import encode_torch
from gpq_faiss.nn.model import build_network
from gpq_faiss.stages.encode import encode
from gpq_faiss.store import RowReader

N = 1000


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    np.save(tmp_path / "x.npy", random_input("features", N))
    return open_data(f"features:{tmp_path / 'x.npy'}")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def fail_once(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The disk is full at the ``at``-th write of a column, and has room again afterwards."""
    write, count = writer_room.write_at, 0

    def full(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    monkeypatch.setattr(writer_room, "write_at", full)


@pytest.mark.parametrize("keep", [True, False])
def test_no_item_is_skipped_after_a_full_disk(
    tmp_path: Path, model: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    monkeypatch.setattr(stage, "_FLUSH_BYTES", 1)
    fail_once(monkeypatch, at=6)
    out = tmp_path / "codes.h5"
    with pytest.raises(DataError, match="disk is full"):
        encode(model, data, out, keep_features=keep, batch_size=100)
    assert not out.exists()
    encode(model, data, out, keep_features=keep, batch_size=100)
    encode(model, data, tmp_path / "whole.h5", keep_features=False, batch_size=100)
    with RowReader(out) as found, RowReader(tmp_path / "whole.h5") as whole:
        np.testing.assert_array_equal(found.ids(), data.ids)
        np.testing.assert_array_equal(found.block(), whole.block())


def test_codes_begun_from_features_are_not_gone_on_with_from_the_network(
    tmp_path: Path, model: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "codes.h5"
    encode(model, data, tmp_path / "other.h5", features=tmp_path / "features.h5")
    monkeypatch.setattr(stage, "_FLUSH_BYTES", 4 * 72 * 100)  # 100 rows per block
    fail_once(monkeypatch, at=6)
    with pytest.raises(DataError, match="disk is full"):
        encode(model, data, out)
    with pytest.raises(DataError, match="begun from a features file"):
        encode(model, data, out, keep_features=False)
    encode(model, data, out)
    with RowReader(out) as found:
        np.testing.assert_array_equal(found.ids(), data.ids)


def test_a_model_is_as_readable_as_other_files(model: Path) -> None:
    modes = {stat.S_IMODE(path.stat().st_mode) for path in model.iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize(
    ("network", "input_", "expected"),
    [
        (NetworkConfig(), {"kind": "images", "image_size": 8}, ("linear", ())),
        (NetworkConfig(), {"kind": "images", "image_size": 16}, ("vgg", ())),
        (NetworkConfig(), {"kind": "features", "width": 9}, ("linear", ())),
        (NetworkConfig(hidden=(7,)), {"kind": "features", "width": 9}, ("mlp", (7,))),
        (NetworkConfig(backbone="mlp"), {"kind": "features", "width": 9}, ("mlp", (512,))),
    ],
)
def test_the_network_that_is_chosen(
    network: NetworkConfig, input_: dict[str, Any], expected: tuple[str, tuple[int, ...]]
) -> None:
    backbone: Any = build_network(Config(network=network), input_, 3).backbone
    name, hidden = expected
    assert backbone.spec.name == name
    layers = getattr(backbone, "layers", ())
    assert tuple(layer.out_features for layer in layers if hasattr(layer, "out_features")) == hidden


def test_codes_found_on_the_device_are_those_of_the_cpu(
    model: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way a GPU goes, on the CPU: vectors straight from the network, in inference mode, to codes."""
    encoder = Encoder.load(model)
    expected = [codes for _, codes in encoder.code_batches(data, batch_size=100)]
    codebooks = encoder.model.codebooks
    monkeypatch.setattr(Encoder, "quantize", lambda _, vectors: encode_torch(vectors, codebooks).numpy())
    found = [codes for _, codes in encoder.code_batches(data, batch_size=100)]
    assert np.array_equal(np.concatenate(found), np.concatenate(expected))
    vectors = np.concatenate([block for _, block in encoder.batches(data, batch_size=100)])
    assert np.array_equal(np.concatenate(found), encode_vectors(vectors, codebooks))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_codes_do_not_depend_on_where_the_nearest_codewords_are_found(
    model: Path, data: Dataset, tmp_path: Path
) -> None:
    """With features on disk the CPU finds the codewords, without them the GPU does; the network runs there in both."""
    encode(model, data, tmp_path / "straight.h5", keep_features=False, device="cuda:0")
    encode(model, data, tmp_path / "codes.h5", device="cuda:0")
    with RowReader(tmp_path / "straight.h5") as one, RowReader(tmp_path / "codes.h5") as other:
        assert np.array_equal(one.block(0, len(data)), other.block(0, len(data)))


def test_arrays_of_any_numbers_are_embedded_alike(model: Path) -> None:
    encoder = Encoder.load(model)
    x = random_input("features", 20)
    expected, fine = encoder.embed(x)
    frozen = x.copy()
    frozen.flags.writeable = False
    backwards: Any = np.ascontiguousarray(x[::-1])[::-1]
    swapped: Any = x.astype(x.dtype.newbyteorder())
    for values in (x.astype(np.float64), frozen, backwards, swapped, x.tolist(), np.asfortranarray(x)):
        vectors, there = encoder.embed(values)
        assert np.array_equal(vectors, expected)
        assert np.array_equal(there, fine)
    whole = np.rint(x * 10)
    assert np.array_equal(encoder.embed(whole.astype(np.int64))[0], encoder.embed(whole)[0])


@pytest.mark.parametrize(
    "values", [np.zeros(5), np.zeros((2, 3)), np.array([["a"]]), [[1.0], [1.0, 2.0]], None]
)
def test_what_is_no_array_of_items_is_one_line(model: Path, values: Any) -> None:
    with pytest.raises(DataError, match="items to embed"):
        Encoder.load(model).embed(values)


def test_query_vectors_are_not_quantized_as_items(tmp_path: Path) -> None:
    """Of a model whose items are codewords: those of queries are none."""
    encoder = Encoder.load(make_model(tmp_path / "model", committee=2))
    values = random_input("features", 50)
    items, queries = (torch.from_numpy(encoder.embed(values, queries=q)[0]) for q in (False, True))
    assert np.array_equal(encoder.quantize(items), encode_vectors(items.numpy(), encoder.model.codebooks))
    with pytest.raises(DataError, match=r"vectors to quantize: rows 0, 1, .* query vectors"):
        encoder.quantize(queries)
    plain = Encoder.load(make_model(tmp_path / "plain"))
    vectors = torch.from_numpy(plain.embed(values, queries=True)[0])
    assert len(plain.quantize(vectors)) == 50


def test_features_of_queries_make_no_codes(tmp_path: Path, data: Dataset) -> None:
    model = make_model(tmp_path / "model", committee=2)
    encode(model, data, tmp_path / "codes.h5", features=tmp_path / "features.h5")
    with RowReader(tmp_path / "features.h5") as reader:
        header, ids = reader.header, reader.ids()
    vectors = Encoder.load(model).embed(random_input("features", N), queries=True)[0]
    with writer_room.RowWriter(tmp_path / "features.h5", header, overwrite=True) as writer:
        writer.append(vectors, ids, None)
        writer.finish()
    with pytest.raises(DataError, match=r"features\.h5: rows .* query vectors"):
        encode(model, data, tmp_path / "codes.h5", features=tmp_path / "features.h5", overwrite=True)
