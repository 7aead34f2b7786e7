"""The exported graph gives the model's vectors and codes, elsewhere and for any batch, or there is no file."""

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
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from model_factory import make_model, random_input
from torch import Tensor

from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import DataError, MismatchError, OutputExistsError, UsageError
from gpq_faiss.exported import read_encoder_metadata
from gpq_faiss.nn.model import load_model
from gpq_faiss.nn.posterior import PosteriorNetwork
from gpq_faiss.stages import export_encoder as module
from gpq_faiss.stages.export_encoder import Check, export_encoder
from gpq_faiss.stages.export_faiss import export_faiss

onnx = pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")

M, K, D = 5, 16, 12  # an odd number of codebooks: half a byte stays empty


def graph_input(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return values.astype(np.float32) / np.float32(255) if values.dtype == np.uint8 else values


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A features model with all that an mlp can have, and a VGG at 32 pixels."""
    root = tmp_path_factory.mktemp("models")
    return {
        "features": make_model(root / "mlp", "features", M=M, K=K, d=D, dropout=0.3, seed=3),
        "images": make_model(root / "vgg", "images", M=M, K=K, d=D, backbone="vgg", seed=4),
    }


@pytest.fixture(scope="module")
def exports(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """(kind, format) to its file; those of features have codes too."""
    root = tmp_path_factory.mktemp("exports")
    return {
        (kind, suffix): export_encoder(
            folder, root / f"{kind}.{suffix}", check=random_input(kind, 3), with_codes=kind == "features"
        )
        for kind, folder in models.items()
        for suffix in ("onnx", "pt2")
    }


def run_file(path: Path, values: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    x = graph_input(values)
    if path.suffix == ".onnx":
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return list(session.run(None, {session.get_inputs()[0].name: x}))
    found = torch.export.load(path).module()(torch.from_numpy(x))
    return [t.detach().numpy() for t in (found if isinstance(found, tuple | list) else [found])]


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
@pytest.mark.parametrize("kind", ["features", "images"])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_the_file_gives_the_vectors_of_the_model(
    models: dict[str, Path], exports: dict[tuple[str, str], Path], kind: Any, suffix: str, batch: int
) -> None:
    values = random_input(kind, batch, seed=99)
    expected, fine = Encoder.load(models[kind]).embed(values)
    assert fine.all()
    outputs = run_file(exports[kind, suffix], values)
    assert len(outputs) == (2 if kind == "features" else 1)
    assert outputs[0].dtype == np.float32
    assert outputs[0].shape == (batch, M * D)
    assert np.abs(outputs[0] - expected).max() < 1e-5
    norms = np.linalg.norm(outputs[0].reshape(batch, M, D), axis=-1)
    assert np.abs(norms - 1).max() < 1e-5


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_the_second_output_is_the_nearest_codeword(
    models: dict[str, Path], exports: dict[tuple[str, str], Path], suffix: str
) -> None:
    vectors, codes = run_file(exports["features", suffix], random_input("features", 40, seed=5))
    Z = load_model(models["features"]).codebooks
    for n in range(40):
        for m in range(M):
            cosines = [float(vectors[n, m * D : (m + 1) * D] @ Z[m, k]) for k in range(K)]
            assert cosines[codes[n, m]] >= max(cosines) - 1e-6
    assert codes.dtype == np.uint8
    assert len(np.unique(codes)) > 4  # or all of this would hold of a constant


@pytest.mark.parametrize(("kind", "suffix"), [("features", "onnx"), ("images", "pt2")])
def test_a_committee_gives_vectors_of_queries_and_codes_of_items(
    kind: Any, suffix: str, tmp_path: Path
) -> None:
    folder = make_model(
        tmp_path / "model", kind, M=M, d=D, image_size=8, hidden=(), backbone="linear", committee=4
    )
    values = random_input(kind, 20, image_size=8, seed=7)
    out = export_encoder(folder, tmp_path / f"e.{suffix}", check=values, with_codes=True)
    vectors, codes = run_file(out, values)
    encoder = Encoder.load(folder)
    (asked, _), (items, _) = encoder.embed(values, queries=True), encoder.embed(values)
    assert np.abs(vectors - asked).max() < 1e-5
    assert np.abs(asked - items).max() > 0.1  # or both outputs could be of either
    expected = np.einsum("nmd,mkd->nmk", items.reshape(-1, M, D), encoder.model.codebooks)
    chosen = np.take_along_axis(expected, codes[:, :, None].astype(np.int64), axis=2)[:, :, 0]
    assert (chosen > expected.max(axis=2) - 1e-5).all()


ELSEWHERE = """
import json, sys
import faiss, numpy as np, onnxruntime
encoder, index_file, queries, out = sys.argv[1:]
session = onnxruntime.InferenceSession(encoder, providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
vectors, codes = session.run(None, {about["input_kind"]: np.load(queries)})
index = faiss.read_index(index_file)
index.add(vectors)
scores, ids = index.search(vectors[:4], 3)
loaded = sorted(m for m in ("torch", "gpq_faiss", "onnx", "h5py") if m in sys.modules)
np.savez(out, vectors=vectors, codes=codes, scores=scores, ids=ids, stored=faiss.vector_to_array(index.codes))
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
    # Low nibble first: the packed codes of the index are the codeword indices of the second output.
    stored = arrays["stored"].reshape(30, 3)
    nibbles = np.stack([stored & 15, stored >> 4], axis=2).reshape(30, 6)
    assert (nibbles[:, :M] == arrays["codes"]).all()
    assert not nibbles[:, M].any()


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_the_file_of_images_says_their_size(exports: dict[tuple[str, str], Path], suffix: str) -> None:
    found = read_encoder_metadata(exports["images", suffix])
    assert (found.get("input_width"), found["image_size"], found["outputs"]) == (None, 32, ["vectors"])


def test_an_onnx_file_stands_alone_and_tells_nothing_of_this_machine(
    exports: dict[tuple[str, str], Path],
) -> None:
    for (kind, suffix), path in exports.items():
        assert not {p.name for p in path.parent.iterdir()} - {p.name for p in exports.values()}
        raw = path.read_bytes()
        assert str(Path(module.__file__).parent).encode() not in raw
        assert random_input(kind, 3)[0].tobytes() not in raw  # type: ignore[arg-type]
        if suffix == "onnx":
            proto = onnx.load(str(path), load_external_data=False)
            onnx.checker.check_model(proto, full_check=True)
            assert not any(t.external_data for t in proto.graph.initializer)
            shapes = [
                [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input
            ]
            assert shapes == [["batch", 20] if kind == "features" else ["batch", 3, 32, 32]]


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_the_check_runs_on_real_data(tmp_path: Path, suffix: str) -> None:
    """scikit-learn's digits, through the whole reading of images, and the largest difference is told."""
    folder = make_model(tmp_path / "model", "images", image_size=8, backbone="mlp")
    passed: list[Check] = []
    export_encoder(folder, tmp_path / f"e.{suffix}", check="digits", on_check=passed.append)
    assert [(c.items, c.given) for c in passed] == [(1 + 2 + 7 + 64, 64)]
    assert 0 <= passed[0].max_difference < 1e-5


# A graph that differs ---------------------------------------------------------------------------------------------


def shifted(by: float) -> Any:
    def forward(self: Any, x: torch.Tensor) -> Any:
        x = self.network(x).unflatten(1, (self.M, -1))
        if self.Z is None:
            return x.flatten(1) + by
        return x.flatten(1), torch.einsum("bmd,mkd->bmk", x, -self.Z).argmax(dim=-1).to(torch.uint8)

    return forward


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
@pytest.mark.parametrize(("with_codes", "by"), [(False, 1e-3), (False, float("nan")), (True, 0.0)])
def test_a_graph_that_differs_leaves_no_file(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    with_codes: bool,
    by: float,
) -> None:
    """Vectors that are off, NaN, or (with codes) the farthest codeword for the nearest."""
    out = tmp_path / f"e.{suffix}"
    out.write_bytes(b"kept")
    monkeypatch.setattr(module._Graph, "forward", shifted(by))
    with pytest.raises(DataError, match="nothing was written"):
        export_encoder(models["features"], out, with_codes=with_codes, overwrite=True)
    assert out.read_bytes() == b"kept"
    assert [p.name for p in tmp_path.iterdir()] == [out.name]
    if by == 1e-3:  # only the tolerance decides
        passed: list[Check] = []
        export_encoder(models["features"], out, tolerance=2e-3, overwrite=True, on_check=passed.append)
        assert passed[0].max_difference == pytest.approx(1e-3, rel=1e-2)


def test_a_batch_size_that_is_baked_in_leaves_no_file(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._onnx_runner

    def only_two(data: bytes) -> Any:
        run = real(data)
        return lambda x: run(x[:2])

    monkeypatch.setattr(module, "_onnx_runner", only_two)
    with pytest.raises(DataError, match="nothing was written"):
        export_encoder(models["features"], tmp_path / "e.onnx")
    assert not list(tmp_path.iterdir())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 4), st.integers(1, 15))
def test_the_check_of_codes_finds_one_wrong_index(
    models: dict[str, Path], seed: int, subspace: int, step: int
) -> None:
    model = load_model(models["features"])
    x = random_input("features", 6, seed=seed)
    vectors, _ = Encoder.load(models["features"]).embed(x)
    cosine = np.einsum("nmd,mkd->nmk", vectors.reshape(6, M, D), model.codebooks)
    codes = cosine.argmax(-1).astype(np.uint8)
    module._check_codes(model, x, codes, 1e-4)
    codes[2, subspace] = (codes[2, subspace] + step) % K
    gap = cosine[2, subspace].max() - cosine[2, subspace, codes[2, subspace]]
    if gap > 1e-4:
        with pytest.raises(DataError, match="nearest"):
            module._check_codes(model, x, codes, 1e-4)
    codes[0, 0] = K
    with pytest.raises(DataError, match="nearest"):
        module._check_codes(model, x, codes, 1e-4)


def test_the_check_of_a_committees_codes_lets_ties_pass_and_finds_wrong_codes(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "features", M=M, d=D, hidden=(), backbone="linear", committee=4)
    model = load_model(folder)
    net = model.network
    assert isinstance(net, PosteriorNetwork)
    tables = torch.randn(net.tables.shape, generator=torch.Generator().manual_seed(0)) * 0.3
    x = random_input("features", 200, seed=5)

    def coded() -> Tensor:
        net.place(tables, tables, net.feature_codewords, net.weights, by_logits=False)
        with torch.no_grad():
            return net.codes(torch.from_numpy(x))

    # Two codewords of the last codebook that are the same but for rounding, one of them much used.
    word = int(coded()[:, -1].mode().values)
    twin = (word + 1) % K
    tables[-1, twin] = tables[-1, word] + 1e-6
    codes = coded().numpy().astype(np.uint8)
    tied = np.isin(codes[:, -1], [word, twin])
    assert tied.any()
    swapped = codes.copy()
    swapped[tied, -1] = word + twin - swapped[tied, -1]
    for fine in (codes, swapped):
        module._check_codes(model, x, fine, 1e-4)
    for place, value in ((0, (codes[3, 0] + 1) % K), (-1, (word + 2) % K), (1, K)):
        wrong = codes.copy()
        wrong[3, place] = value
        with pytest.raises(DataError, match="nearest"):
            module._check_codes(model, x, wrong, 1e-4)


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"out": "e.bin"}, UsageError, "suffix"),
        ({"out": "e.pt2", "format": "onnx"}, UsageError, "suffix"),
        ({"out": "e.onnx", "format": "tflite"}, UsageError, "tflite"),
        ({"out": "e.pt2", "tolerance": 0.0}, UsageError, "tolerance"),
        ({"out": "e.pt2", "tolerance": float("nan")}, UsageError, "tolerance"),
        ({"out": "e.pt2", "check": np.zeros((3, 19), np.float32)}, MismatchError, "20"),
        ({"out": "e.pt2", "check": np.zeros(20, np.float32)}, DataError, "width"),
        ({"out": "e.pt2", "check": np.zeros((0, 20), np.float32)}, DataError, "no row"),
        ({"out": "e.pt2", "check": np.full((3, 20), np.nan, np.float32)}, DataError, "NaN"),
        ({"out": "e.pt2", "check": np.full((3, 20), "x")}, DataError, "array"),
        ({"out": "e.pt2", "check": "digits"}, MismatchError, "features"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(
    models: dict[str, Path], tmp_path: Path, kwargs: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        export_encoder(models["features"], tmp_path / kwargs.pop("out"), **kwargs)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_images_to_check_on_must_be_images(models: dict[str, Path], tmp_path: Path, dtype: type) -> None:
    with pytest.raises(DataError, match="images uint8"):
        export_encoder(models["images"], tmp_path / "e.pt2", check=np.full((2, 3, 32, 32), 200, dtype))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_its_remedy(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"{package}: pip install 'gpq-faiss\[onnx\]'"):
        export_encoder(models["features"], tmp_path / "e.onnx")
    assert not list(tmp_path.iterdir())
    assert export_encoder(models["features"], tmp_path / "e.pt2").is_file()


def test_more_than_one_onnx_file_can_hold_is_refused(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ONNX_LIMIT", 1000)
    with pytest.raises(DataError, match=r"2 GiB.*\.pt2"):
        export_encoder(models["features"], tmp_path / "e.onnx")
    assert not list(tmp_path.iterdir())


def test_an_output_that_exists_is_kept_without_overwrite(models: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "e.pt2"
    out.write_bytes(b"kept")
    with pytest.raises(OutputExistsError, match="--overwrite"):
        export_encoder(models["features"], out)
    assert out.read_bytes() == b"kept"
    export_encoder(models["features"], out, overwrite=True)
    assert read_encoder_metadata(out)["input_width"] == 20


# The command -----------------------------------------------------------------------------------------------------------


def test_the_command_tells_the_difference(models: dict[str, Path], tmp_path: Path) -> None:
    from cli.export_encoder import export_encoder as command

    out = tmp_path / "e.pt2"
    np.save(tmp_path / "x.npy", random_input("features", 12))
    arguments = [str(models["features"]), "--out", str(out), "--check", f"features:{tmp_path / 'x.npy'}"]
    done = CliRunner().invoke(command, [*arguments, "--format", "json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["bytes"] == out.stat().st_size
    assert (said["items"], said["given_items"]) == (22, 12)
    assert said["max_difference"] < 1e-5
    done = CliRunner().invoke(command, [*arguments, "--overwrite"])
    assert done.exit_code == 0, done.output
    assert "22 items" in done.stdout
    assert "gpq export-encoder model --out" in CliRunner().invoke(command, ["--help"]).stdout
