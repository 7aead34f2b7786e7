"""Encoding is resumed after any interruption, and is of the data that are there now."""

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
from commands import untouched
from index_factory import same
from model_factory import make_model, random_input
from PIL import Image

from gpq_faiss import Encoder, RowReader, encode, open_data
from gpq_faiss.errors import DataError, GpqError, OutputExistsError
from gpq_faiss.store.hdf5 import write_arrays
from gpq_faiss.store.rows import RowWriter

N = 1000


@pytest.fixture
def data(tmp_path):
    np.save(tmp_path / "x.npy", random_input("features", N))
    return open_data(f"features:{tmp_path / 'x.npy'}")


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


def fail_once(monkeypatch, call, error):
    """The ``call``-th commit of rows fails, as on a full disk; the others come after each block."""
    commit, calls = RowWriter.commit, itertools.count(1)

    def failing(self):
        if next(calls) == call:
            raise error
        commit(self)

    monkeypatch.setattr("gpq_faiss.store.rows.COMMIT_SECONDS", 0)
    monkeypatch.setattr(RowWriter, "commit", failing)


def rows_of(path):
    with RowReader(path) as reader:
        return np.array(reader.ids), np.array(reader.values)


@pytest.mark.parametrize("error", [DataError("the disk is full"), KeyboardInterrupt()])
@pytest.mark.parametrize("keep", [(True, True), (False, False), (False, True, False, True)])
def test_rows_are_complete_after_interruptions(tmp_path, model, data, monkeypatch, keep, error):
    """``keep`` says for each of several calls whether it writes features; the last is complete."""
    out = tmp_path / "codes.h5"
    for features in keep[:-1]:
        with monkeypatch.context() as patch:
            fail_once(patch, 14 if features and len(keep) > 2 else 4, error)
            with pytest.raises((DataError, KeyboardInterrupt)):
                encode(model, data, out, keep_features=features, batch_size=100)
    encode(model, data, out, keep_features=keep[-1], batch_size=100)
    encode(model, data, tmp_path / "whole.h5", keep_features=False, batch_size=100)
    assert same(rows_of(out), rows_of(tmp_path / "whole.h5"))


def test_repeated_ids_are_refused_before_the_network_runs(tmp_path, model, data, monkeypatch):
    monkeypatch.setattr(Encoder, "_vectors", None)
    with untouched(tmp_path), pytest.raises(DataError, match="id 4 occurs more than once"):
        encode(
            model, replace(data, ids=np.where(data.ids == 9, 4, data.ids)), tmp_path / "codes.h5"
        )


@pytest.mark.parametrize(
    ("source", "name", "out", "message"),
    [
        ("features.h5", "features.h5", "codes.h5", "features.h5 would be replaced"),
        ("x.h5", "x.h5", "x.h5", "x.h5 would be replaced"),
        ("features*.h5", "features.h5", "codes.h5", "would be replaced"),
        (".", "features.h5", "codes.h5", "would be replaced"),
        (None, "features.h5", "codes.h5", "not a file of gpq encode, and is not replaced"),
    ],
)
def test_data_are_not_replaced(tmp_path, monkeypatch, model, source, name, out, message):
    write_arrays(tmp_path / name, {"features": (x := random_input("features", N))}, {})
    monkeypatch.chdir(tmp_path)  # where arrays have no path
    with untouched(tmp_path), pytest.raises(GpqError, match=message):
        encode(model, x if source is None else f"features:{source}", out, overwrite=True)


# Images -------------------------------------------------------------------------------------------


def bitmaps(root, seed, n=20):
    """Write images of the same names, sizes in bytes and times, whatever the seed."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        path = root / f"{i % 2}" / f"{i:02}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
        os.utime(path, (1e9, 1e9))


@pytest.fixture
def image_model(tmp_path):
    return make_model(tmp_path / "model", kind="images", image_size=8, backbone="mlp")


def test_codes_are_of_the_images_that_are_there_now(tmp_path, image_model):
    bitmaps(tmp_path / "images", 1)
    data, out = f"folder:{tmp_path}/images", tmp_path / "codes.h5"
    encode(image_model, data, out).unlink()
    bitmaps(tmp_path / "images", 2)
    with pytest.raises(OutputExistsError, match=r"features\.h5 exists already"):
        encode(image_model, data, out)  # the features are those of the images before
    encode(image_model, data, out, overwrite=True)
    encode(image_model, data, tmp_path / "new.h5")
    assert same(rows_of(tmp_path / "features.h5"), rows_of(tmp_path / "new.features.h5"))
