"""Export of a model's network to one file: ONNX (runs without torch) or ``torch.export``.

The graph maps model input to query vectors::

    features  float32 [B, W]                      ─►  vectors  float32 [B, M·d], every sub-vector unit-norm
    images    float32 [B, 3, S, S] RGB in [0, 1]

B is variable, other sizes are fixed. The graph normalises its input. Sub-vectors without direction are (nearly) zero. The file is written
only after its graph has given the model's vectors. Its metadata identify model and codebooks (:mod:`gpq_faiss.exported`).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import platform
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import __version__
from ..encoder import Encoder
from ..errors import DataError, UsageError, one_line
from ..exported import METADATA_FILE
from ..files import atomic_path, check_output
from ..nn.model import Model

Format = Literal["onnx", "torch"]
Floats = NDArray[np.float32]
Run = Callable[[Floats], NDArray[Any]]
"""An exported graph: input to vectors."""

OPSET = 18  # written without conversion, and supported by runtimes since 2023
TOLERANCE = 1e-4
"""Largest difference of a coordinate of a unit-norm vector that the check lets pass."""
ONNX_LIMIT = 2**31 - 1 - (16 << 20)
"""Maximum bytes of weights in one ONNX file: protobuf's limit of 2 GiB, less some for the graph."""
_SUFFIXES: dict[str, Format] = {".onnx": "onnx", ".pt2": "torch"}
_NOISY = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


class _Queries(nn.Module):
    """The exported module."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Query vectors float32 [B, M·d]."""
        vectors: Tensor = cast(Any, self.network).queries(x)
        return vectors


def export_encoder(
    model_dir: str | Path, out: str | Path, *, format: Format | None = None, overwrite: bool = False
) -> Path:
    """Export a model's network, and compare it with the model on random input in batches of 1, 2 and 7.

    Args:
        model_dir: model folder.
        out: the file.
        format: ``onnx`` or ``torch`` (default: by the suffix of ``out``, .onnx or .pt2).
        overwrite: replace ``out``.

    Returns:
        ``out``.

    Raises:
        UsageError: an unknown format, or a missing package.
        DataError: a damaged model, one that cannot be exported or is too large for one ONNX file, or a graph that differs.
        OutputExistsError: ``out`` exists.
    """
    kind = format or _SUFFIXES.get(Path(out).suffix.lower())
    if kind not in _SUFFIXES.values():
        raise UsageError(f"{out}: the format is onnx or torch: end the name in .onnx or .pt2, or give --to")
    out = check_output(out, overwrite=overwrite)
    if kind == "onnx":
        _require_onnx()
    encoder = Encoder.load(model_dir)
    graph = _Queries(encoder.model.network).eval()
    size = sum(t.numel() * t.element_size() for t in graph.state_dict().values())
    if kind == "onnx" and size > ONNX_LIMIT:
        raise DataError(
            f"{encoder.source} has {size / 2**30:.1f} GiB of weights, more than one ONNX file can hold (2 GiB): export it as .pt2"
        )
    with _quiet(), torch.no_grad():
        try:
            program = _trace(graph, encoder.model)
            write, runner = (_to_onnx, _onnx_runner) if kind == "onnx" else (_to_torch, _torch_runner)
            data = write(program, _metadata(encoder))
            agrees = _agrees(encoder, runner(data))
        except (
            Exception
        ) as error:  # dynamo, fx, sympy, converter, checker, protobuf and runtimes: no common base
            other = ": export it as .pt2" if kind == "onnx" else ""
            raise DataError(
                f"{encoder.source}: its network cannot be exported ({one_line(error)}){other}"
            ) from error
    if not agrees:
        raise DataError(
            f"{encoder.source}: the exported network differs from the model; nothing was written: use the other format"
        )
    with atomic_path(out) as temporary:
        temporary.write_bytes(data)
    return out


def _require_onnx() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(name)
        except ImportError:
            raise UsageError(
                f"exporting to ONNX needs the package {name}: pip install 'gpq-faiss[onnx]', or export as .pt2"
            ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' notes to programmers off the user's terminal."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _trace(graph: nn.Module, model: Model) -> torch.export.ExportedProgram:
    """The graph with a variable batch size. The example is stored in .pt2 files, so it is random, never the user's."""
    example = torch.from_numpy(_graph_input(_random_input(model, 2)))
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(graph, (example,), dynamic_shapes=({0: batch},), strict=False)
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths of this machine are nobody's business
    return program


def _to_torch(program: torch.export.ExportedProgram, about: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={METADATA_FILE: json.dumps(about)})
    return buffer.getvalue()


def _torch_runner(data: bytes) -> Run:
    module = torch.export.load(io.BytesIO(data)).module()
    return lambda x: cast(NDArray[Any], module(torch.from_numpy(x)).detach().numpy())


def _to_onnx(program: torch.export.ExportedProgram, about: dict[str, str]) -> bytes:
    import onnx

    exported = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=[about["input_kind"]],
        output_names=["vectors"],
        external_data=False,
        verbose=False,
    )
    assert exported is not None
    proto: Any = exported.model_proto
    graph = proto.graph
    free = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    values = (*graph.input, *graph.output, *graph.value_info)
    for dim in (dim for value in values for dim in value.type.tensor_type.shape.dim):
        if dim.dim_param == free:
            dim.dim_param = "batch"
    for part in (proto, graph, *graph.node, *values, *graph.initializer):  # paths and lines of this machine
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    onnx.helper.set_model_props(proto, about)
    onnx.checker.check_model(proto, full_check=True)
    return cast(bytes, proto.SerializeToString())


def _onnx_runner(data: bytes) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # From bytes, so that it cannot lean on any other file.
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    (name,) = (node.name for node in session.get_inputs())
    return lambda x: np.asarray(session.run(None, {name: x})[0])


def _random_input(model: Model, n: int) -> NDArray[Any]:
    """Features as the training data were spread, or images uint8 of noise."""
    rng = np.random.default_rng([0, n])
    if model.input_kind == "features":
        normalise = cast(Any, model.network).backbone.input
        mean, std = (t.detach().float().cpu().numpy() for t in (normalise.mean, normalise.std))
        return np.asarray(mean + std * rng.standard_normal((n, model.input_width)), dtype=np.float32)
    return rng.integers(0, 256, (n, 3, model.image_size, model.image_size), dtype=np.uint8)


def _graph_input(values: NDArray[Any]) -> Floats:
    scale = np.float32(255 if values.dtype == np.uint8 else 1)
    return np.ascontiguousarray(values.astype(np.float32) / scale)


def _agrees(encoder: Encoder, run: Run) -> bool:
    """Whether the graph gives the model's vectors, whatever the batch size."""
    for n in (1, 2, 7):
        values = _random_input(encoder.model, n)
        expected, fine = encoder.embed(values, queries=True)
        found = run(_graph_input(values))
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            return False
        # A sub-vector without a direction is rounding noise divided by almost nothing.
        if not np.allclose(found[fine], expected[fine], rtol=0, atol=TOLERANCE):
            return False
    return True


def _metadata(encoder: Encoder) -> dict[str, str]:
    """All values are text, as in ONNX; lists and dicts as JSON."""
    M, K, d = encoder.shape
    versions = {
        "gpq_faiss": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    return {
        "kind": "gpq-encoder",
        "format_version": "1",
        "model_fingerprint": encoder.fingerprint,
        "codebooks_fingerprint": encoder.codebooks_fingerprint,
        "input_kind": encoder.input_kind,
        "input_width": str(encoder.input_width),
        "image_size": str(encoder.image_size),
        "codebooks": str(M),
        "codewords": str(K),
        "subdim": str(d),
        "class_names": json.dumps(list(encoder.model.class_names)),
        "versions": json.dumps(versions),
    }
