"""The exported graph gives the model's vectors of one side, for any batch, or there is no file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from commands import refused
from model_factory import make_model, random_input

from gpq_faiss import Encoder, export_encoder, open_encoder
from gpq_faiss.encoder import graph_input, read_encoder_metadata
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.stages import export_encoder as module

onnx = pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")

M, D = 5, 12
FILES = [
    ("features", "queries", "onnx"),
    ("features", "queries", "pt2"),
    ("images", "queries", "onnx"),
    ("posterior", "queries", "onnx"),
    ("posterior", "items", "onnx"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory, encoders):
    """Make a perceptron, a VGG at 32 pixels, and class networks, whose queries are no items."""
    root = tmp_path_factory.mktemp("models")
    return {
        "features": encoders[0],
        "images": make_model(root / "vgg", "images", M=M, d=D, backbone="vgg", seed=4),
        "posterior": make_model(root / "p", M=M, d=D, hidden=(), backbone="linear", networks=4),
    }


@pytest.fixture(scope="module")
def exports(models, encoders, tmp_path_factory):
    """Return the path of each of FILES."""
    root = tmp_path_factory.mktemp("exports")
    files = {
        (kind, side, suffix): export_encoder(models[kind], root / f"{kind}-{side}.onnx", side=side)
        for kind, side, suffix in FILES[2:]
    }
    return files | dict(zip(FILES[:2], encoders[1:], strict=True))


def inputs(kind, n):
    return random_input("images" if kind == "images" else "features", n, seed=99)


def run_file(path, values):
    """Run an exported file without this package."""
    x = graph_input(values)
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(torch.from_numpy(x)).detach().numpy()
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (vectors,) = session.run(None, {session.get_inputs()[0].name: x})
    return vectors


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("file", FILES)
def test_file_gives_the_vectors_of_the_model(models, exports, file, batch):
    kind, side, _ = file
    values = inputs(kind, batch)
    expected, valid = Encoder.load(models[kind]).embed(values, queries=side == "queries")
    assert valid.all()
    vectors = run_file(exports[file], values)
    assert (vectors.dtype, vectors.shape) == (np.float32, (batch, M * D))
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_file_of_the_other_side_is_refused(exports, tmp_path):
    items, queries = (exports["posterior", side, "onnx"] for side in ("items", "queries"))
    line = refused("search", items, "index.faiss", "digits", code=2)
    assert "makes vectors of items, not of queries: export the encoder with --side queries" in line
    line = refused("serve", tmp_path / "index.faiss", "--model", items, "--port", 0, code=2)
    assert "makes vectors of items, not of queries" in line
    with pytest.raises(UsageError, match="makes vectors of queries, not of items"):
        open_encoder(queries, side="items")
    with pytest.raises(UsageError, match="makes vectors of queries only"):
        open_encoder(queries).embed(inputs("posterior", 2))


@pytest.mark.parametrize("file", FILES)
def test_metadata_name_model_and_side(models, exports, file):
    kind, side, suffix = file
    metadata, encoder = read_encoder_metadata(exports[file]), Encoder.load(models[kind])
    assert metadata.side == side
    assert metadata.scale == encoder.scale
    assert metadata.codebooks_fingerprint == encoder.codebooks_fingerprint
    assert metadata.input_shape == ([3, 32, 32] if kind == "images" else [20])
    raw = exports[file].read_bytes()
    assert str(Path(module.__file__).parent).encode() not in raw, "a path of this machine"
    if suffix == "onnx":
        proto = onnx.load(str(exports[file]), load_external_data=False)
        onnx.checker.check_model(proto, full_check=True)
        assert [output.name for output in proto.graph.output] == [
            "query_vectors" if side == "queries" else "item_vectors"
        ]


def test_graph_that_differs_leaves_no_file(models, tmp_path, monkeypatch):
    real = module._Vectors.forward
    monkeypatch.setattr(module._Vectors, "forward", lambda self, x: real(self, x) + 1e-3)
    with pytest.raises(DataError, match="nothing was written"):
        export_encoder(models["features"], tmp_path / "e.pt2")
    assert not list(tmp_path.iterdir())
