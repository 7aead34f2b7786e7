"""Export of a model's network to one file: ONNX (runs without torch) or ``torch.export``.

The graph maps model input to query vectors::

    features  float32 [B, W]                      ─►  vectors  float32 [B, M·d]
    images    float32 [B, 3, S, S] RGB in [0, 1]      (every sub-vector is unit-norm)

B is variable, other sizes are fixed. The graph normalises its input. Sub-vectors without direction
are (nearly) zero. The file is written only after its graph has given the model's vectors. Its
metadata identify model and codebooks (:mod:`gpq_faiss.encoder`).
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..encoder import METADATA_FILE, Encoder, Metadata, graph_input
from ..errors import DataError, UsageError, one_line, optional
from ..files import atomic_path, check_output, versions
from ..progress import levels

Run = Callable[[NDArray[np.float32]], NDArray[Any]]
"""An exported graph: input to vectors."""

OPSET = 18  # written without conversion, and supported by runtimes since 2023
TOLERANCE = 1e-4
"""Largest difference of a coordinate of a unit-norm vector that the check lets pass."""
_NOISY = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
"""Loggers of the exporters' notes to programmers."""


class _Queries(nn.Module):
    """The exported module: input to query vectors float32 [B, M·d]."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.network.queries(x)
        return vectors


def export_encoder(model_dir: str | Path, out: str | Path, *, overwrite: bool = False) -> Path:
    """Export a model's network to one file.

    The exported network is compared with the model on random input in batches of 1, 2 and 7.

    Args:
        model_dir: model folder.
        out: the file, .onnx or .pt2 (``torch.export``).
        overwrite: replace ``out``.

    Returns:
        ``out``.

    Raises:
        UsageError: another extension, or a missing package.
        DataError: a damaged model, one that cannot be exported (for ONNX: of more than 2 GiB), or
            an exported network that differs from the model.
        OutputExistsError: ``out`` exists.
    """
    out = Path(out)
    if out.suffix.lower() not in (".onnx", ".pt2"):
        raise UsageError(f"{out}: end the name in .onnx, or in .pt2 for torch.export")
    out, onnx = check_output(out, overwrite=overwrite), out.suffix.lower() == ".onnx"
    for name in ("onnx", "onnxscript", "onnxruntime") if onnx else ():
        remedy = "pip install 'gpq-faiss[onnx]', or export as .pt2"
        optional(name, f"exporting to ONNX needs the package {name}: {remedy}")
    encoder = Encoder.load(model_dir)
    with levels(logging.ERROR, *_NOISY), warnings.catch_warnings(action="ignore"), torch.no_grad():
        try:
            data, run = (_to_onnx if onnx else _to_torch)(_trace(encoder), _metadata(encoder))
            agrees = _agrees(encoder, run)
        # dynamo, fx, sympy, converter, checker, protobuf and runtimes have no common base
        except Exception as error:
            reason = f"its network cannot be exported ({one_line(error)})"
            raise DataError(f"{encoder.source}: {reason}{': export it as .pt2' * onnx}") from error
    if not agrees:
        raise DataError(
            f"{encoder.source}: the exported network differs from the model; nothing "
            "was written: use the other format"
        )
    with atomic_path(out) as temporary:
        temporary.write_bytes(data)
    return out


def _trace(encoder: Encoder) -> torch.export.ExportedProgram:
    """Trace the network into a graph with a variable batch size.

    The example is stored in .pt2 files, so it is random data, never the user's.
    """
    example = torch.from_numpy(graph_input(_random_input(encoder, 2)))
    batch = torch.export.Dim("batch", min=1)
    graph = _Queries(encoder.model.network).eval()
    program = torch.export.export(graph, (example,), dynamic_shapes=({0: batch},), strict=False)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths of this machine are nobody's business
    return program


def _to_torch(program: torch.export.ExportedProgram, metadata: dict[str, str]) -> tuple[bytes, Run]:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={METADATA_FILE: json.dumps(metadata)})
    module = torch.export.load(io.BytesIO(buffer.getvalue())).module()
    return buffer.getvalue(), lambda x: cast(
        NDArray[Any], module(torch.from_numpy(x)).detach().numpy()
    )


def _to_onnx(program: torch.export.ExportedProgram, metadata: dict[str, str]) -> tuple[bytes, Run]:
    import onnx
    import onnxruntime

    exported = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        dynamic_shapes=({0: "batch"},),  # its name
        input_names=[metadata["input_kind"]],
        output_names=["vectors"],
        external_data=False,
        verbose=False,
    )
    assert exported is not None
    proto: Any = exported.model_proto
    graph = proto.graph
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for message in (proto, graph, *graph.node, *values):  # paths and lines of this machine
        message.ClearField("metadata_props")
        message.ClearField("doc_string")
    onnx.helper.set_model_props(proto, metadata)
    onnx.checker.check_model(proto, full_check=True)
    data: bytes = proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # From bytes, so that it cannot lean on any other file.
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return data, lambda x: np.asarray(session.run(None, {metadata["input_kind"]: x})[0])


def _random_input(encoder: Encoder, n: int) -> NDArray[Any]:
    """Return random features with the spread of the training data, or images uint8 of noise."""
    rng = np.random.default_rng([0, n])
    if encoder.input_kind == "features":
        normalise = encoder.model.network.extractors()[0].input
        mean, std = (t.detach().float().cpu().numpy() for t in (normalise.mean, normalise.std))
        return np.asarray(
            mean + std * rng.standard_normal((n, encoder.input_width)), dtype=np.float32
        )
    return rng.integers(0, 256, (n, 3, encoder.image_size, encoder.image_size), dtype=np.uint8)


def _agrees(encoder: Encoder, run: Run) -> bool:
    """Whether the graph returns the model's vectors for every batch size."""
    for n in (1, 2, 7):
        values = _random_input(encoder, n)
        expected, fine = encoder.embed(values, queries=True)
        actual = run(graph_input(values))
        same_form = (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        # A sub-vector without a direction is rounding noise divided by almost nothing.
        if not (same_form and np.allclose(actual[fine], expected[fine], rtol=0, atol=TOLERANCE)):
            return False
    return True


def _metadata(encoder: Encoder) -> dict[str, str]:
    """Return the metadata of the file as texts, as ONNX requires; lists and dicts are JSON."""
    M, K, d = encoder.shape
    names = ("codebooks_fingerprint", "input_kind", "input_width", "image_size")
    values: dict[str, Any] = {
        "model_fingerprint": encoder.fingerprint,
        **{name: getattr(encoder, name) for name in names},
        **{
            "codebooks": M,
            "codewords": K,
            "subdim": d,
            "class_names": list(encoder.model.class_names),
        },
        "versions": versions("python", "torch"),
    }
    metadata = Metadata.model_construct(**values).model_dump()
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
    }
