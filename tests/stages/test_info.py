"""``info`` describes everything that the stages write, and refuses what is damaged or foreign."""

import json

import numpy as np
import pytest
from commands import done
from model_factory import random_input

import gpq_faiss as gpq
from gpq_faiss import info
from gpq_faiss.data.labels import Labels
from gpq_faiss.errors import DataError

N = 23


@pytest.fixture(scope="module")
def files(tmp_path_factory, encoders):
    """Make a file of every kind, of one model."""
    root = tmp_path_factory.mktemp("files")
    model, onnx, pt2 = encoders
    x, labels = random_input("features", N), [0] * 7 + [-1] * (N - 7)
    np.save(root / "data.npy", x)
    names = ("cat", "dog", "owl")
    data = gpq.open_data(root / "data.npy", labels=Labels.from_ids(labels, names))
    gpq.encode(model, data, root / "codes.h5")
    for name, kind in (("index.faiss", "flat"), ("index.lists", "flat"), ("ivf.faiss", "ivf")):
        gpq.index(model, root / "codes.h5", root / name, kind=kind)
    names = "features.h5", "codes.h5", "index.faiss", "index.lists", "ivf.faiss"
    return {"model": model, "onnx": onnx, "pt2": pt2, **{name: root / name for name in names}}


CODES = {"codebooks": 5, "codewords": 16, "subdim": 12, "bits": 20}
ROWS = {**CODES, "ntotal": N, "labelled": 7, "classes": 3, "class_names": ["cat", "dog", "owl"]}
INDEX = {**CODES, "kind": "index", "ntotal": N, "dimension": 60, "code_size": 3}
ENCODER = {**CODES, "kind": "encoder", "side": "queries", "input_shape": ["batch", 20]}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model", {**CODES, "kind": "model", "input": {"kind": "features", "width": 20}}),
        ("features.h5", {**ROWS, "kind": "features", "shape": [N, 60]}),
        ("codes.h5", {**ROWS, "kind": "codes", "shape": [N, 3]}),
        ("index.faiss", {**INDEX, "form": "faiss", "metric": "inner product"}),
        ("index.lists", {**INDEX, "form": "lists", "changes": None}),
        ("pt2", ENCODER),
        ("onnx", ENCODER),
    ],
)
def test_every_kind_is_described(files, name, expected):
    path = files[name]
    description = info(path)
    assert description | expected == description
    assert description["path"] == str(path)
    model = gpq.load_model(files["model"])
    assert description["codebooks_fingerprint"] == model.codebooks_fingerprint
    assert json.loads(done("info", path, "--format", "json")) == description
    assert f"{description['kind']}\n" in done("info", path)


# Damaged and foreign ------------------------------------------------------------------------------


def test_an_index_that_faiss_alone_searches_is_described(files):
    expected = {"ntotal": N, "form": "IndexIVFPQ, searched by Faiss alone"}.items()
    assert expected <= info(files["ivf.faiss"]).items()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("picture.png", b"\x89PNG\r\n\x1a\n" + bytes(50)),
        ("x.npy", b"\x93NUMPY"),
        ("empty.onnx", b"\x08\x0a"),
        ("x.pt2", b"PK\x05\x06" + bytes(18)),
        ("x.json", b'{"a": 1}'),
        ("empty", b""),
        ("index.faiss.items.sqlite", b"SQLite format 3\0"),
    ],
)
def test_foreign_file_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        info(tmp_path / name)
