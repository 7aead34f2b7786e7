"""The exported graph gives the model's vectors, elsewhere and for any batch, or there is no file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from commands import done
from model_factory import make_model, random_input

from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import DataError, OutputExistsError, UsageError
from gpq_faiss.exported import read_encoder_metadata
from gpq_faiss.nn.model import load_model
from gpq_faiss.stages import export_encoder as module
from gpq_faiss.stages.export import export_faiss
from gpq_faiss.stages.export_encoder import export_encoder

onnx = pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")

M, K, D = 5, 16, 12
MADE = [("features", "onnx"), ("features", "pt2"), ("images", "onnx"), ("asymmetric", "pt2")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A features model with all that an mlp can have, a VGG at 32 pixels, and class networks, whose queries are no items."""
    root = tmp_path_factory.mktemp("models")
    return {
        "features": make_model(root / "mlp", "features", M=M, K=K, d=D, seed=3),
        "images": make_model(root / "vgg", "images", M=M, K=K, d=D, backbone="vgg", seed=4),
        "asymmetric": make_model(root / "own", M=M, d=D, hidden=(), backbone="linear", networks=4),
    }


@pytest.fixture(scope="module")
def exports(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """(kind, suffix) to its file."""
    root = tmp_path_factory.mktemp("exports")
    return {(kind, suffix): export_encoder(models[kind], root / f"{kind}.{suffix}") for kind, suffix in MADE}


def inputs(kind: str, n: int, seed: int = 99) -> np.ndarray[Any, Any]:
    return random_input("images" if kind == "images" else "features", n, seed=seed)


def run_file(path: Path, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = values.astype(np.float32) / np.float32(255) if values.dtype == np.uint8 else values
    if path.suffix == ".onnx":
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: x})
        return np.asarray(found)
    return np.asarray(torch.export.load(path).module()(torch.from_numpy(x)).detach())


@pytest.mark.parametrize(("kind", "suffix"), MADE)
@pytest.mark.parametrize("batch", [1, 16])
def test_the_file_gives_the_query_vectors_of_the_model(
    models: dict[str, Path], exports: dict[tuple[str, str], Path], kind: str, suffix: str, batch: int
) -> None:
    values = inputs(kind, batch)
    expected, fine = Encoder.load(models[kind]).embed(values, queries=True)
    assert fine.all()
    found = run_file(exports[kind, suffix], values)
    assert (found.dtype, found.shape) == (np.float32, (batch, M * D))
    assert np.abs(found - expected).max() < 1e-5
    items, _ = Encoder.load(models[kind]).embed(values)
    assert (np.abs(found - items).max() > 0.1) == (kind == "asymmetric")


ELSEWHERE = """
import json, sys
import faiss, numpy as np, onnxruntime
encoder, index_file, queries, out = sys.argv[1:]
session = onnxruntime.InferenceSession(encoder, providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
(vectors,) = session.run(None, {about["input_kind"]: np.load(queries)})
index = faiss.read_index(index_file)
index.add(vectors)
scores, ids = index.search(vectors[:4], 3)
loaded = sorted(m for m in ("torch", "gpq_faiss", "onnx", "h5py") if m in sys.modules)
np.savez(out, vectors=vectors, scores=scores, ids=ids)
print(json.dumps({"loaded": loaded, "about": about, "D": index.d}))
"""


def test_a_program_without_torch_queries_a_faiss_index(
    models: dict[str, Path], exports: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """Only onnxruntime, numpy and faiss: encode, add, search, and get what this package gets."""
    index_file = export_faiss(models["features"], tmp_path / "empty.faiss")
    values = random_input("features", 30, seed=6)
    np.save(tmp_path / "queries.npy", values)
    paths = [exports["features", "onnx"], index_file, tmp_path / "queries.npy", tmp_path / "out.npz"]
    done = subprocess.run(
        [sys.executable, "-I", "-c", ELSEWHERE, *map(str, paths)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["loaded"] == []
    assert said["D"] == M * D
    assert (
        said["about"]["codebooks_fingerprint"]
        == load_model(models["features"]).description["codebooks_fingerprint"]
    )
    with np.load(tmp_path / "out.npz") as found:
        arrays = {name: found[name] for name in found.files}
    expected, _ = Encoder.load(models["features"]).embed(values)
    index: Any = faiss.read_index(str(index_file))
    index.add(expected)
    scores, ids = index.search(expected[:4], 3)
    assert np.allclose(arrays["scores"], scores, atol=1e-5)
    assert (arrays["ids"][:, 0] == ids[:, 0]).all()


def test_a_file_says_what_it_takes_and_tells_nothing_of_this_machine(
    exports: dict[tuple[str, str], Path],
) -> None:
    for (kind, suffix), path in exports.items():
        about = read_encoder_metadata(path)
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


@pytest.mark.parametrize("by", [1e-3, float("nan"), None])
def test_a_graph_that_differs_leaves_no_file(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: float | None
) -> None:
    """In its vectors, or by a batch size that is baked in."""
    out, real = tmp_path / "e.pt2", module._to_torch

    def only_two(*given: Any) -> Any:
        data, run = real(*given)
        return data, lambda x: run(x[:2])

    if by is None:
        monkeypatch.setattr(module, "_to_torch", only_two)
    else:
        monkeypatch.setattr(module._Queries, "forward", lambda self, x: self.network(x) + by)
    out.write_bytes(b"kept")
    with pytest.raises(DataError, match="nothing was written"):
        export_encoder(models["features"], out, overwrite=True)
    assert out.read_bytes() == b"kept"
    assert [p.name for p in tmp_path.iterdir()] == [out.name]


def test_what_cannot_be_exported_is_one_line(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = models["features"], tmp_path / "e.pt2"
    with pytest.raises(UsageError, match=r"\.onnx, or in \.pt2"):
        export_encoder(model, tmp_path / "e.bin")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxscript", None)
        with pytest.raises(UsageError, match=r"onnxscript: pip install 'gpq-faiss\[onnx\]'"):
            export_encoder(model, tmp_path / "e.onnx")
    assert not list(tmp_path.iterdir())
    out.write_bytes(b"kept")
    with pytest.raises(OutputExistsError, match="--overwrite"):
        export_encoder(model, out)
    assert out.read_bytes() == b"kept"
    said = done("export-encoder", model, "--out", out, "--overwrite")
    assert said.startswith(f"{out}: {out.stat().st_size:,} bytes")
