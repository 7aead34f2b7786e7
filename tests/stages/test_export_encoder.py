"""The exported graph gives the model's vectors, elsewhere and for any batch, or there is no
file.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import done
from model_factory import make_model, random_input

from gpq_faiss import Encoder, export_encoder
from gpq_faiss.encoder import read_encoder_metadata
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.faissio.model import read_model
from gpq_faiss.stages import export_encoder as module

onnx = pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")

M, K, D = 5, 16, 12
MADE = [("features", "onnx"), ("features", "pt2"), ("images", "onnx"), ("asymmetric", "pt2")]


@pytest.fixture(scope="module")
def models(tmp_path_factory, encoders):
    """A features model with all that an mlp can have, a VGG at 32 pixels, and class networks, whose
    queries are no items.
    """
    root = tmp_path_factory.mktemp("models")
    return {
        "features": encoders[0],
        "images": make_model(root / "vgg", "images", M=M, K=K, d=D, backbone="vgg", seed=4),
        "asymmetric": make_model(root / "own", M=M, d=D, hidden=(), backbone="linear", networks=4),
    }


@pytest.fixture(scope="module")
def exports(models, encoders, tmp_path_factory):
    """(kind, suffix) to its file."""
    root, made = tmp_path_factory.mktemp("exports"), dict(zip(MADE, encoders[1:], strict=False))
    for kind, suffix in MADE[2:]:
        made[kind, suffix] = export_encoder(models[kind], root / f"{kind}.{suffix}")
    return made


def inputs(kind, n, seed=99):
    return random_input("images" if kind == "images" else "features", n, seed=seed)


def run_file(path, values):
    x = values.astype(np.float32) / np.float32(255) if values.dtype == np.uint8 else values
    if path.suffix == ".onnx":
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: x})
        return np.asarray(found)
    return np.asarray(torch.export.load(path).module()(torch.from_numpy(x)).detach())


@pytest.mark.parametrize(("kind", "suffix"), MADE)
def test_the_file_gives_the_query_vectors_of_the_model(models, exports, kind, suffix):
    encoder = Encoder.load(models[kind])
    for batch in (1, 16):
        values = inputs(kind, batch)
        expected, fine = encoder.embed(values, queries=True)
        assert fine.all()
        found = run_file(exports[kind, suffix], values)
        assert (found.dtype, found.shape) == (np.float32, (batch, M * D))
        assert np.abs(found - expected).max() < 1e-5
        items, _ = encoder.embed(values)
        assert (np.abs(found - items).max() > 0.1) == (kind == "asymmetric")


def test_a_file_says_what_it_takes_and_tells_nothing_of_this_machine(models, exports):
    for (kind, suffix), path in exports.items():
        about = read_encoder_metadata(path)
        assert about.codebooks_fingerprint == read_model(models[kind]).codebooks_fingerprint
        assert about.input_shape == ([3, 32, 32] if kind == "images" else [20])
        assert not {p.name for p in path.parent.iterdir()} - {p.name for p in exports.values()}
        raw = path.read_bytes()
        assert str(Path(module.__file__).parent).encode() not in raw
        if suffix == "onnx":
            proto = onnx.load(str(path), load_external_data=False)
            onnx.checker.check_model(proto, full_check=True)
            assert not any(t.external_data for t in proto.graph.initializer)
            (shape,) = [v.type.tensor_type.shape.dim for v in proto.graph.input]
            assert [d.dim_param or d.dim_value for d in shape] == ["batch", *about.input_shape]


def test_a_graph_that_differs_leaves_no_file(models, tmp_path, monkeypatch):
    """In its vectors, or by a batch size that is baked in."""
    out, real = tmp_path / "e.pt2", module._to_torch

    def only_two(*given):
        data, run = real(*given)
        return data, lambda x: run(x[:2])

    out.write_bytes(b"kept")
    for name, wrong in (
        ("_to_torch", only_two),
        ("_Queries.forward", lambda self, x: self.network(x) + 1e-3),
        ("_Queries.forward", lambda self, x: self.network(x) + float("nan")),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"{module.__name__}.{name}", wrong)
            with pytest.raises(DataError, match="nothing was written"):
                export_encoder(models["features"], out, overwrite=True)
        assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [(out.name, b"kept")]


def test_a_missing_package_is_named_and_the_size_is_said(models, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UsageError, match=r"onnxscript: pip install 'gpq-faiss\[onnx\]'"):
        export_encoder(models["features"], tmp_path / "e.onnx")
    out = tmp_path / "e.pt2"
    said = done("export-encoder", models["features"], "--out", out)
    assert said.startswith(f"{out}: {out.stat().st_size:,} bytes")
