"""Export of a model's network to one file: ONNX (runs without torch) or ``torch.export``.

The graph maps model input to the vectors of one side, queries or items::

    features  float32 [B, W]                      ─►  query_vectors or item_vectors
    images    float32 [B, 3, S, S] RGB in [0, 1]      float32 [B, M·d], every sub-vector unit-norm

B is variable, other sizes are fixed. The graph normalises its input. Sub-vectors without direction
are (nearly) zero. The file is written only after its graph has given the model's vectors. Its
metadata identify model, codebooks and side (:mod:`gpq_faiss.encoder`).
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..encoder import METADATA_FILE, SIDES, Encoder, Metadata, Side, graph_input
from ..errors import DataError, UsageError, one_line, optional
from ..files import atomic_path, check_output, versions
from ..progress import levels

OPSET = 18  # written without conversion, and supported by runtimes since 2023
TOLERANCE = 1e-4
"""Largest difference of a coordinate of a unit-norm vector that the check lets pass."""
_NOISY = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
"""Loggers of the exporters' notes to programmers."""


class _Vectors(nn.Module):
    """The exported module: input to vectors float32 [B, M·d] of one side."""

    def __init__(self, network: Any, queries: bool) -> None:
        super().__init__()
        self.network, self.queries = network, queries

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.network.finish(self.network.raw(x, queries=self.queries))
        return vectors


def export_encoder(
    model_dir: str | Path, out: str | Path, *, side: Side = "queries", overwrite: bool = False
) -> Path:
    """Export a model's network to one file.

    The exported network is compared with the model on random input.

    Args:
        model_dir: model folder.
        out: the file, .onnx or .pt2 (``torch.export``).
        side: ``queries``, or ``items``; their vectors differ for models with class networks
            (``recommended``).
        overwrite: replace ``out``.

    Returns:
        ``out``.

    Raises:
        UsageError: another extension or side, or a missing package.
        DataError: a damaged model, one that cannot be exported (for ONNX: of more than 2 GiB), or
            an exported network that differs from the model.
        OutputExistsError: ``out`` exists.
    """
    suffix = Path(out).suffix.lower()
    exporters = {".onnx": _to_onnx, ".pt2": _to_torch}
    if suffix not in exporters:
        raise UsageError(f"{out}: end the name in .onnx, or in .pt2 for torch.export")
    if side not in SIDES:
        raise UsageError(f"--side {side}: choose from {', '.join(SIDES)}")
    out = check_output(out, overwrite=overwrite)
    for name in ("onnx", "onnxscript", "onnxruntime") if suffix == ".onnx" else ():
        optional(name, f"ONNX needs {name}: pip install 'gpq-faiss[onnx]', or export as .pt2")
    encoder = Encoder.load(model_dir)
    graph = _Vectors(encoder.model.network, side == "queries").eval()
    values = _random_input(encoder, 7)
    expected, valid = encoder.embed(values, queries=side == "queries")
    with levels(logging.ERROR, *_NOISY), warnings.catch_warnings(action="ignore"), torch.no_grad():
        try:
            # The example is stored in .pt2 files, so it is random data, never the user's.
            example = torch.from_numpy(graph_input(values[:2]))
            batch = torch.export.Dim("batch", min=1)
            program = torch.export.export(
                graph, (example,), dynamic_shapes=({0: batch},), strict=False
            )
            for module in program.graph_module.modules():
                for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                    node.meta.pop("stack_trace", None)  # paths of this machine
            data, run = exporters[suffix](program, _metadata(encoder, side))
            vectors = run(graph_input(values))
        # dynamo, fx, sympy, converter, checker, protobuf and runtimes have no common base
        except Exception as error:
            reason = f"its network cannot be exported ({one_line(error)})"
            raise DataError(f"{encoder.source}: {reason}: try the other format") from error
    # A sub-vector without a direction is rounding noise divided by almost nothing.
    if vectors.shape != expected.shape or not np.allclose(
        vectors[valid], expected[valid], rtol=0, atol=TOLERANCE
    ):
        raise DataError(
            f"{encoder.source}: the exported network differs from the model; nothing "
            "was written: use the other format"
        )
    with atomic_path(out) as temporary:
        temporary.write_bytes(data)
    return out


Run = Callable[[NDArray[np.float32]], NDArray[Any]]
"""An exported graph: input to vectors."""


def _to_torch(program: torch.export.ExportedProgram, metadata: dict[str, str]) -> tuple[bytes, Run]:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={METADATA_FILE: json.dumps(metadata)})
    module = torch.export.load(io.BytesIO(buffer.getvalue())).module()
    return buffer.getvalue(), lambda x: np.asarray(module(torch.from_numpy(x)).detach())


def _to_onnx(program: torch.export.ExportedProgram, metadata: dict[str, str]) -> tuple[bytes, Run]:
    import onnx
    import onnxruntime

    exported = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        dynamic_shapes=({0: "batch"},),  # its name
        input_names=[metadata["input_kind"]],
        output_names=[SIDES[metadata["side"]]],
        external_data=False,
        verbose=False,
    )
    assert exported is not None
    proto: Any = exported.model_proto
    onnx.helper.set_model_props(proto, metadata)
    onnx.checker.check_model(proto, full_check=True)
    data: bytes = proto.SerializeToString()
    # From bytes, so that it cannot lean on any other file.
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda x: np.asarray(session.run(None, {metadata["input_kind"]: x})[0])


def _random_input(encoder: Encoder, n: int) -> NDArray[Any]:
    """Return random features with the spread of the training data, or images uint8 of noise."""
    rng = np.random.default_rng(0)
    side = encoder.image_size
    if encoder.input_kind == "images":
        return rng.integers(0, 256, (n, 3, side, side), dtype=np.uint8)
    normalise = encoder.model.network.backbone.input
    mean, std = (t.detach().float().cpu().numpy() for t in (normalise.mean, normalise.std))
    values = mean + std * rng.standard_normal((n, encoder.input_width))
    return np.asarray(values, dtype=np.float32)


def _metadata(encoder: Encoder, side: Side) -> dict[str, str]:
    """Return the metadata of the file as texts, as ONNX requires; lists and dicts are JSON."""
    M, K, d = encoder.shape
    metadata = Metadata.model_construct(
        side=side,
        model_fingerprint=encoder.fingerprint,
        codebooks_fingerprint=encoder.codebooks_fingerprint,
        input_kind=encoder.input_kind,
        input_width=encoder.input_width,
        image_size=encoder.image_size,
        codebooks=M,
        codewords=K,
        subdim=d,
        scale=encoder.scale,
        class_names=encoder.model.description["class_names"],
        versions=versions("python", "torch"),
    )
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in metadata.model_dump(warnings=False).items()
    }
