"""Encoding that is broken off and gone on with, and the first choice of a network."""

import errno
import os
import tarfile
from dataclasses import replace

import h5py
import numpy as np
import pytest
from commands import untouched
from model_factory import make_model, random_input
from PIL import Image

import gpq_faiss.stages.encode as stage
from gpq_faiss import Encoder, RowReader, encode, open_data
from gpq_faiss.config import Config, NetworkConfig
from gpq_faiss.data.base import sampled_content
from gpq_faiss.errors import BusyError, DataError, OutputExistsError, UsageError
from gpq_faiss.methods.gpq import build_network
from gpq_faiss.store import writer as store_writer
from gpq_faiss.store.writer import RowWriter

N = 1000


@pytest.fixture
def data(tmp_path):
    np.save(tmp_path / "x.npy", random_input("features", N))
    return open_data(f"features:{tmp_path / 'x.npy'}")


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


def fail_once(monkeypatch, at):
    """The disk is full at the ``at``-th write of a column, and has room again afterwards."""
    write, count = store_writer.write_at, 0

    def full(*args):
        nonlocal count
        count += 1
        if count == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    monkeypatch.setattr(store_writer, "write_at", full)


def same_rows(one, other):
    """Two files have the same items and values; the values."""
    with RowReader(one) as first, RowReader(other) as second:
        np.testing.assert_array_equal(first.ids(), second.ids())
        np.testing.assert_array_equal(values := first.block(), second.block())
        return values


@pytest.mark.parametrize("keep", [True, False])
def test_no_item_is_skipped_after_a_full_disk(tmp_path, model, data, monkeypatch, keep):
    monkeypatch.setattr("gpq_faiss.store.writer.COMMIT_SECONDS", 0)
    fail_once(monkeypatch, at=6)
    out = tmp_path / "codes.h5"
    with pytest.raises(DataError, match="disk is full"):
        encode(model, data, out, keep_features=keep, batch_size=100)
    assert not out.exists()
    encode(model, data, out, keep_features=keep, batch_size=100)
    encode(model, data, tmp_path / "whole.h5", keep_features=False, batch_size=100)
    same_rows(out, tmp_path / "whole.h5")


def test_codes_begun_from_features_are_not_gone_on_with_from_the_network(tmp_path, model, data, monkeypatch):
    out = tmp_path / "codes.h5"
    encode(model, data, out).rename(tmp_path / "other.h5")
    monkeypatch.setattr(stage, "_BLOCK_BYTES", 4 * 72 * 100)  # 100 rows per block
    fail_once(monkeypatch, at=6)
    with pytest.raises(DataError, match="disk is full"):
        encode(model, data, out)
    with pytest.raises(DataError, match="begun from a features file"):
        encode(model, data, out, keep_features=False)
    encode(model, data, out)
    same_rows(out, tmp_path / "other.h5")


def test_the_network_that_is_chosen():
    features = {"kind": "features", "width": 9}
    for network, input_, name, hidden in (
        (NetworkConfig(), {"kind": "images", "image_size": 8}, "linear", []),
        (NetworkConfig(), {"kind": "images", "image_size": 16}, "vgg", []),
        (NetworkConfig(), features, "linear", []),
        (NetworkConfig(hidden=(7,)), features, "mlp", [7]),
        (NetworkConfig(backbone="mlp"), features, "mlp", [512]),
    ):
        backbone = build_network(Config(network=network), input_, 3).backbone
        assert backbone.spec.name == name
        layers = getattr(backbone, "layers", ())
        assert [layer.out_features for layer in layers if hasattr(layer, "out_features")] == hidden


def test_features_of_queries_make_no_codes(tmp_path, data):
    model = make_model(tmp_path / "model", networks=2)
    encode(model, data, tmp_path / "codes.h5").unlink()
    with RowReader(tmp_path / "features.h5") as reader:
        header, ids = reader.header, reader.ids()
    vectors = Encoder.load(model).embed(random_input("features", N), queries=True)[0]
    with RowWriter(tmp_path / "features.h5", header, overwrite=True) as writer:
        writer.append(vectors, ids, None)
        writer.finish()
    with pytest.raises(DataError, match=r"features\.h5: rows .* query vectors"):
        encode(model, data, tmp_path / "codes.h5")


# Images that are replaced ---------------------------------------------------------------------------------------------------


def bitmaps(root, seed, n=20):
    """Images of the same names and sizes in bytes, whatever the seed, and of one time."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        path = root / f"{i % 2}" / f"{i:02}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
        os.utime(path, (1e9, 1e9))


def put(form, root, seed):
    """DATA: images in a folder, listed in a file, in a plain tar of one, or in that as WebDataset."""
    bitmaps(root / "images", seed)
    if form == "list":
        (root / "x").write_text("".join(f"images/{i % 2}/{i:02}.bmp {i % 2}\n" for i in range(20)))
        return f"list:{root}/x"
    if form == "folder":
        return f"folder:{root}/images"
    with tarfile.open(root / "images.tar", "w") as tar:
        tar.add(root / "images", arcname=".")
    return f"{'webdataset' if form == 'webdataset' else 'folder'}:{root}/images.tar"


@pytest.mark.parametrize("form", ["folder", "tar", "list", "webdataset"])
def test_codes_are_of_the_images_that_are_there_now(tmp_path, form):
    a, b, c, d = (
        open_data(put(form, tmp_path / f"{i}", seed)).fingerprint for i, seed in enumerate((1, 1, 2, 2))
    )
    assert a == b != c == d
    model = make_model(tmp_path / "model", kind="images", image_size=8, backbone="mlp")
    out, found = tmp_path / "codes.h5", []
    for seed in (1, 2):
        data = put(form, tmp_path / "data", seed)
        encode(model, data, tmp_path / f"fresh{seed}.h5")
        if seed == 2:
            out.unlink()
            with pytest.raises(OutputExistsError, match=r"features\.h5 exists already"):
                encode(model, data, out)  # the features are those of the images before
        encode(model, data, out, overwrite=seed == 2)
        found.append(same_rows(tmp_path / "features.h5", tmp_path / f"fresh{seed}.features.h5"))
    assert (found[0] != found[1]).any(axis=1).all()  # vectors of random weights differ, if their codes do not


def test_overwrite_runs_the_network(tmp_path, model, data):
    """Even where a change of the data cannot be seen in their fingerprint."""
    out = tmp_path / "codes.h5"
    encode(model, data, out)
    other = open_data(random_input("features", N)[::-1].copy())
    other = replace(other, fingerprint=data.fingerprint)
    encode(model, other, out, overwrite=True)
    encode(model, other, tmp_path / "fresh.h5", keep_features=False)
    same_rows(out, tmp_path / "fresh.h5")


@pytest.mark.parametrize(("name", "out"), [("features.h5", "codes.h5"), ("x.h5", "x.h5")])
def test_the_data_are_not_replaced(tmp_path, model, name, out):
    """Vectors of one's own may well have the name of the features beside the codes."""
    with h5py.File(tmp_path / name, "w") as file:
        file["features"] = random_input("features", N)
    before = (tmp_path / name).read_bytes()
    with pytest.raises(UsageError, match=f"{name} would be replaced"):
        encode(model, open_data(tmp_path / name), tmp_path / out, overwrite=True)
    assert (tmp_path / name).read_bytes() == before


def test_broken_images_count_over_an_interruption(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model", kind="images", image_size=8, backbone="mlp")
    bitmaps(tmp_path / "images", 1)
    for name in ("0/02.bmp", "1/11.bmp"):
        (tmp_path / "images" / name).write_bytes(b"")
    data, above = f"folder:{tmp_path}/images", "2 of 20 images cannot be read.*above the limit of 5 %"
    monkeypatch.setattr("gpq_faiss.store.writer.COMMIT_SECONDS", 0)
    fail_once(monkeypatch, at=6)
    how = {"keep_features": False, "batch_size": 5}
    for limit, says in ((0.1, "disk is full"), (0.05, above)):
        with pytest.raises(DataError, match=says):
            encode(model, open_data(data, max_bad=limit), tmp_path / "codes.h5", **how)
    with RowReader(encode(model, open_data(data, max_bad=0.1), tmp_path / "codes.h5", **how)) as reader:
        assert reader.ntotal == 18


def test_a_sample_of_a_large_file_has_both_its_ends(tmp_path):
    path, found = tmp_path / "a.raw", set()
    for at in (None, 0, 4000, 100_000, 299_999):
        content = bytearray(300_000)
        if at is not None:
            content[at] = 1
        path.write_bytes(content)
        found.add(sampled_content([(str(path), 0, 300_000)]))
    assert len(found) == 5


# Two at the same time ---------------------------------------------------------------------------------------------------------


def test_a_second_encoding_to_the_same_output_is_refused(tmp_path, model, data, monkeypatch):
    out, refused, write = tmp_path / "out", [], stage.encode_items

    def encode_again(*args, **options):
        with untouched(tmp_path), pytest.raises(BusyError, match="out is being written by another") as caught:
            encode(model, data, out, overwrite=True)
        refused.append(caught.value)
        return write(*args, **options)

    monkeypatch.setattr(stage, "encode_items", encode_again)
    encode(model, data, out, batch_size=100)
    assert len(refused) == 1
