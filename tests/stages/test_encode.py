"""Encoding is resumed after any interruption, and is of the data that are there now."""

import errno
import os
from dataclasses import replace

import h5py
import numpy as np
import pytest
from commands import untouched
from index_factory import same
from model_factory import make_model, random_input
from PIL import Image

import gpq_faiss.stages.encode as stage
from gpq_faiss import Encoder, RowReader, encode, open_data
from gpq_faiss.config import Config, NetworkConfig
from gpq_faiss.errors import BusyError, DataError, OutputExistsError, UsageError
from gpq_faiss.methods.gpq import build_network
from gpq_faiss.store.rows import RowWriter

N = 1000


@pytest.fixture
def data(tmp_path):
    np.save(tmp_path / "x.npy", random_input("features", N))
    return open_data(f"features:{tmp_path / 'x.npy'}")


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


def fail_once(monkeypatch, call, error=None):
    """The ``call``-th commit of rows fails, as on a full disk; the others come after each block."""
    commit, calls = RowWriter.commit, []

    def failing(self):
        calls.append(self.rows)
        if len(calls) == call:
            raise error or DataError("the disk is full")
        commit(self)

    monkeypatch.setattr("gpq_faiss.store.rows.COMMIT_SECONDS", 0)
    monkeypatch.setattr(RowWriter, "commit", failing)


def rows_of(path):
    with RowReader(path) as reader:
        return np.array(reader.ids), np.array(reader.values)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_no_item_is_skipped_after_an_interruption(tmp_path, model, data, monkeypatch, keep, error):
    out, options = tmp_path / "codes.h5", {"keep_features": keep, "batch_size": 100}
    fail_once(monkeypatch, 4, error)
    with pytest.raises(DataError if error is None else KeyboardInterrupt):
        encode(model, data, out, **options)
    assert not out.exists()
    encode(model, data, out, **options)
    encode(model, data, tmp_path / "whole.h5", keep_features=False, batch_size=100)
    assert same(rows_of(out), rows_of(tmp_path / "whole.h5"))


def test_codes_begun_from_features_are_not_resumed_from_the_network(
    tmp_path, model, data, monkeypatch
):
    out = tmp_path / "codes.h5"
    encode(model, data, out).rename(tmp_path / "other.h5")
    monkeypatch.setattr(stage, "_BLOCK_BYTES", 4 * 72 * 100)  # 100 rows per block
    fail_once(monkeypatch, 6)
    with pytest.raises(DataError, match="disk is full"):
        encode(model, data, out)
    with pytest.raises(DataError, match="begun from a features file"):
        encode(model, data, out, keep_features=False)
    encode(model, data, out)
    assert same(rows_of(out), rows_of(tmp_path / "other.h5"))


def test_repeated_ids_are_refused_before_the_network_runs(tmp_path, model, data, monkeypatch):
    monkeypatch.setattr(Encoder, "_vectors", None)
    repeated = replace(data, ids=np.where(np.arange(N) == 9, 4, np.arange(N)))
    with untouched(tmp_path), pytest.raises(DataError, match="id 4 occurs more than once"):
        encode(model, repeated, tmp_path / "codes.h5")


def test_query_vectors_make_no_codes(tmp_path, data):
    model = make_model(tmp_path / "model", networks=2)
    encode(model, data, tmp_path / "codes.h5").unlink()
    with RowReader(tmp_path / "features.h5") as reader:
        header, ids = reader.header, np.array(reader.ids)
    vectors, _ = Encoder.load(model).embed(random_input("features", N), queries=True)
    with RowWriter(tmp_path / "features.h5", header, overwrite=True) as writer:
        writer.append(vectors, ids)
        writer.finish()
    with pytest.raises(DataError, match=r"features\.h5: rows .* query vectors"):
        encode(model, data, tmp_path / "codes.h5")


def test_second_encoding_is_refused_before_it_writes(tmp_path, model, data, monkeypatch):
    out, real = tmp_path / "codes.h5", stage.encode_items

    def encode_again(*args, **options):
        with untouched(tmp_path), pytest.raises(BusyError, match=r"codes\.h5 is being written by"):
            encode(model, data, out, overwrite=True)
        return real(*args, **options)

    monkeypatch.setattr(stage, "encode_items", encode_again)
    assert encode(model, data, out).exists()


@pytest.mark.parametrize(("name", "out"), [("features.h5", "codes.h5"), ("x.h5", "x.h5")])
def test_data_are_not_replaced(tmp_path, model, name, out):
    with h5py.File(tmp_path / name, "w") as file:
        file["features"] = random_input("features", N)
    with untouched(tmp_path), pytest.raises(UsageError, match=f"{name} would be replaced"):
        encode(model, open_data(tmp_path / name), tmp_path / out, overwrite=True)


def test_overwriting_runs_the_network(tmp_path, model, data):
    """Even if a change of the data cannot be seen in their fingerprint."""
    out = tmp_path / "codes.h5"
    encode(model, data, out)
    other = open_data(random_input("features", N)[::-1].copy())
    other = replace(other, fingerprint=data.fingerprint)
    encode(model, other, out, overwrite=True)
    encode(model, other, tmp_path / "new.h5", keep_features=False)
    assert same(rows_of(out), rows_of(tmp_path / "new.h5"))


def test_rows_that_a_kill_left_beside_their_file_are_removed(tmp_path, model, data):
    encode(model, data, tmp_path / "codes.h5").unlink()
    (tmp_path / ".features.h5.partial").mkdir()
    encode(model, data, tmp_path / "codes.h5")
    assert not (tmp_path / ".features.h5.partial").exists()


# Images -------------------------------------------------------------------------------------------


def bitmaps(root, seed, n=20):
    """Write images of the same names, sizes in bytes and times, whatever the seed."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        path = root / f"{i % 2}" / f"{i:02}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
        os.utime(path, (1e9, 1e9))


def put(form, root, seed):
    """Return DATA: images in a folder, or listed in a file."""
    bitmaps(root / "images", seed)
    if form == "list":
        lines = [f"images/{i % 2}/{i:02}.bmp {i % 2}\n" for i in range(20)]
        (root / "x").write_text("".join(lines))
        return f"list:{root}/x"
    return f"folder:{root}/images"


@pytest.fixture
def image_model(tmp_path):
    return make_model(tmp_path / "model", kind="images", image_size=8, backbone="mlp")


@pytest.mark.parametrize("form", ["folder", "list"])
def test_codes_are_of_the_images_that_are_there_now(tmp_path, image_model, form):
    data, out = put(form, tmp_path / "data", 1), tmp_path / "codes.h5"
    encode(image_model, data, out).unlink()
    data = put(form, tmp_path / "data", 2)
    with pytest.raises(OutputExistsError, match=r"features\.h5 exists already"):
        encode(image_model, data, out)  # the features are those of the images before
    encode(image_model, data, out, overwrite=True)
    encode(image_model, data, tmp_path / "new.h5")
    assert same(rows_of(tmp_path / "features.h5"), rows_of(tmp_path / "new.features.h5"))


@pytest.mark.parametrize("form", ["folder", "list"])
def test_fingerprint_is_of_the_images(tmp_path, form):
    data = [put(form, tmp_path / f"{i}", seed) for i, seed in enumerate((1, 1, 2))]
    first, equal, other = (open_data(name).fingerprint for name in data)
    assert first == equal != other


def test_broken_images_count_over_an_interruption(tmp_path, image_model, monkeypatch):
    bitmaps(tmp_path / "images", 1)
    for name in ("0/02.bmp", "1/11.bmp"):
        (tmp_path / "images" / name).write_bytes(b"")
    data, options = f"folder:{tmp_path}/images", {"keep_features": False, "batch_size": 5}
    out, message = tmp_path / "codes.h5", "2 of 20 images cannot be read.*the limit of 5 %"
    fail_once(monkeypatch, 3)
    with pytest.raises(DataError, match="disk is full"):
        encode(image_model, open_data(data, max_bad=0.1), out, **options)
    with pytest.raises(DataError, match=message):
        encode(image_model, open_data(data, max_bad=0.05), out, **options)
    assert len(rows_of(encode(image_model, open_data(data, max_bad=0.1), out, **options))[0]) == 18


@pytest.mark.parametrize(
    ("network", "input_", "name", "hidden"),
    [
        (NetworkConfig(), {"kind": "images", "image_size": 8}, "linear", []),
        (NetworkConfig(), {"kind": "images", "image_size": 16}, "vgg", []),
        (NetworkConfig(), {"kind": "features", "width": 9}, "linear", []),
        (NetworkConfig(hidden=(7,)), {"kind": "features", "width": 9}, "mlp", [7]),
        (NetworkConfig(backbone="mlp"), {"kind": "features", "width": 9}, "mlp", [512]),
    ],
)
def test_network_follows_the_input(network, input_, name, hidden):
    backbone = build_network(Config(network=network), input_, 3).backbone
    layers = getattr(backbone, "layers", ())
    sizes = [layer.out_features for layer in layers if hasattr(layer, "out_features")]
    assert (backbone.spec.name, sizes) == (name, hidden)


def test_full_disk_is_one_line(tmp_path, model, data, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot write .*features\.h5: the disk is full"):
        encode(model, data, tmp_path / "codes.h5")
