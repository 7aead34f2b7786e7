"""Export of a model's network to one file: ONNX (runs without torch) or ``torch.export``.

The graph maps model input to query vectors::

    features  float32 [B, W]                      ─►  vectors  float32 [B, M·d], every sub-vector unit-norm
    images    float32 [B, 3, S, S] RGB in [0, 1]       codes   uint8 [B, M], codeword indices (optional)

Codes are those of items, as from ``gpq encode``; vectors are query vectors, which may differ from item vectors (``recommended``). B is
variable, other sizes are fixed. The graph normalises its input. Sub-vectors without direction are (nearly) zero: ``gpq encode`` rejects
such items, and programs that use the file should as well.

The file is written only after its graph has been compared with the model. Its metadata identify model and codebooks:
:func:`gpq_faiss.exported.read_encoder_metadata` reads them without running the graph.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata as packages
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import __version__
from ..data.open import open_data
from ..data.reader import Reader
from ..encoder import Encoder
from ..errors import DataError, UsageError, one_line
from ..exported import FORMAT_VERSION, KIND, METADATA_FILE
from ..files import atomic_path, check_output
from ..nn.model import Model
from ..nn.posterior import PosteriorNetwork

log = logging.getLogger(__name__)

Format = Literal["onnx", "torch"]
Floats = NDArray[np.float32]
Run = Callable[[Floats], list[NDArray[Any]]]
"""An exported graph: input to its outputs."""

OPSET = 18  # written without conversion, and supported by runtimes since 2023
TOLERANCE = 1e-4
"""Largest difference of a coordinate of a unit-norm vector that the check lets pass."""

ONNX_LIMIT = 2**31 - 1 - (16 << 20)
"""Maximum bytes of weights in one ONNX file: protobuf's limit of 2 GiB, less some for the graph."""

_SUFFIXES: dict[str, Format] = {".onnx": "onnx", ".pt2": "torch"}
_BATCHES = (1, 2, 7)
_SAMPLE = 64  # items of the user's data to compare
_CODE_MARGIN = 1e-5  # two codewords this close in cosine are equally near in float32


@dataclass(frozen=True)
class Check:
    """How the exported graph compared with the model.

    Attributes:
        max_difference: largest absolute difference of any coordinate of the vectors.
        items: how many items were compared.
        given: how many of them came from the caller; the others are random.
    """

    max_difference: float
    items: int
    given: int


class _Graph(nn.Module):
    """The exported module: the network, and with codebooks the nearest codewords."""

    def __init__(self, network: Any, codebooks: Floats | None) -> None:
        super().__init__()
        self.network: nn.Module = network
        self.M = int(network.M)
        self.Z: Tensor | None
        self.register_buffer("Z", None if codebooks is None else torch.from_numpy(codebooks.copy()))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Vectors float32 [B, M·d]; with codebooks also codeword indices uint8 [B, M]."""
        network: Any = self.network
        vectors: Tensor = network.queries(x)
        if self.Z is None:
            return vectors
        items = (network(x) if network.asymmetric else vectors).unflatten(1, (self.M, -1))
        # Unit-norm codewords: the largest inner product is the largest cosine; of equal ones the first wins.
        return vectors, torch.einsum("bmd,mkd->bmk", items, self.Z).argmax(dim=-1).to(torch.uint8)


def export_encoder(
    model_dir: str | Path,
    out: str | Path,
    *,
    format: Format | None = None,
    check: object = None,
    with_codes: bool = False,
    tolerance: float = TOLERANCE,
    overwrite: bool = False,
    on_check: Callable[[Check], None] | None = None,
) -> Path:
    """Export a model's network, and compare it with the model.

    The graph is run on random input in batches of 1, 2 and 7, and on ``check``; every coordinate must be within ``tolerance`` of
    :class:`gpq_faiss.encoder.Encoder`, and every code a nearest codeword.

    Args:
        model_dir: model folder.
        out: the file; ``.onnx`` or ``.pt2`` determines the format.
        format: ``onnx`` or ``torch``, needed for other suffixes.
        check: real input for the comparison, anything that :func:`gpq_faiss.open_data` takes; 64 evenly spaced items are used.
        with_codes: add an output ``codes``, uint8 [B, M]: unpacked codeword indices.
        tolerance: maximum difference per coordinate.
        overwrite: replace ``out``.
        on_check: called with the result of a passed check.

    Returns:
        ``out``.

    Raises:
        UsageError: an unknown or contradictory format, a missing package, or an invalid ``tolerance``.
        DataError: a damaged model, one that cannot be exported or is too large for one ONNX file, or a graph that differs.
        MismatchError: ``check`` does not fit the model.
        OutputExistsError: ``out`` exists.
    """
    kind = _format_of(Path(out), format)
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise UsageError(f"tolerance {tolerance:g}: it must be a number above 0")
    out = check_output(out, overwrite=overwrite)
    if kind == "onnx":
        _require_onnx()
    encoder = Encoder.load(model_dir)
    given = None if check is None else _given_input(encoder, check)
    model = encoder.model
    graph = _Graph(model.network, model.codebooks if with_codes else None).eval()
    size = sum(t.numel() * t.element_size() for t in graph.state_dict().values())
    if kind == "onnx" and size > ONNX_LIMIT:
        raise DataError(
            f"{model.folder} has {size / 2**30:.1f} GiB of weights, more than one ONNX file can hold (2 GiB): export it as .pt2"
        )
    with _quiet(), torch.no_grad():
        try:
            program = _trace(graph, model)
            write, runner = (_to_onnx, _onnx_runner) if kind == "onnx" else (_to_torch, _torch_runner)
            data = write(program, model, _metadata(model, kind, with_codes))
        except Exception as error:  # dynamo, fx, sympy, converter, checker and protobuf: no common base
            other = ": export it as .pt2" if kind == "onnx" else ""
            raise DataError(
                f"{model.folder}: its network cannot be exported ({one_line(error)}){other}"
            ) from error
        result = _compare(encoder, runner(data), given, with_codes, tolerance)
    log.debug("%s: within %.1e of the model on %d items", out, result.max_difference, result.items)
    with atomic_path(out) as temporary:
        temporary.write_bytes(data)
    if on_check is not None:
        on_check(result)
    return out


def _format_of(out: Path, format: Format | None) -> Format:
    by_suffix = _SUFFIXES.get(out.suffix.lower())
    if format is not None and format not in get_args(Format):
        raise UsageError(f"format '{format}' is unknown: choose one of {', '.join(get_args(Format))}")
    if format is None and by_suffix is None:
        raise UsageError(
            f"{out} has neither of the suffixes .onnx and .pt2: name the file so, or give the format"
        )
    if None not in (format, by_suffix) and format != by_suffix:
        raise UsageError(
            f"{out} is to be of format {format}, but its suffix says {by_suffix}: change one of them"
        )
    return cast(Format, format or by_suffix)


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
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# Tracing and the two formats ---------------------------------------------------------------------------------------


def _trace(graph: _Graph, model: Model) -> torch.export.ExportedProgram:
    """The graph with a variable batch size. The example is stored in .pt2 files, so it is random, never the user's."""
    example = torch.from_numpy(_graph_input(_random_input(model, 2)))
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(graph, (example,), dynamic_shapes=({0: batch},), strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine are nobody's business
    return program


def _to_torch(program: torch.export.ExportedProgram, model: Model, about: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={METADATA_FILE: json.dumps(about)})
    return buffer.getvalue()


def _torch_runner(data: bytes) -> Run:
    module = torch.export.load(io.BytesIO(data)).module()

    def run(x: Floats) -> list[NDArray[Any]]:
        found = module(torch.from_numpy(x))
        return [t.detach().numpy() for t in (found if isinstance(found, tuple | list) else [found])]

    return run


def _to_onnx(program: torch.export.ExportedProgram, model: Model, about: dict[str, str]) -> bytes:
    import onnx

    exported = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=[model.input_kind],
        output_names=json.loads(about["outputs"]),
        external_data=False,
        verbose=False,
    )
    assert exported is not None
    proto = exported.model_proto
    _tidy(proto)
    onnx.helper.set_model_props(proto, about)
    onnx.checker.check_model(proto, full_check=True)
    return cast(bytes, proto.SerializeToString())


def _tidy(proto: Any) -> None:
    """Call the free dimension ``batch``, and leave out the exporter's notes: paths and lines of this machine."""
    graph = proto.graph
    free = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == free:
                dim.dim_param = "batch"
    for part in (
        proto,
        graph,
        *graph.node,
        *graph.value_info,
        *graph.input,
        *graph.output,
        *graph.initializer,
    ):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def _onnx_runner(data: bytes) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # From bytes, so that it cannot lean on any other file.
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    (name,) = (node.name for node in session.get_inputs())
    return lambda x: [np.asarray(a) for a in session.run(None, {name: x})]


# The comparison ------------------------------------------------------------------------------------------------------


def _given_input(encoder: Encoder, check: object) -> NDArray[Any]:
    """At most 64 items of the caller's input, spread evenly: float32 [n, W], or uint8 [n, 3, S, S]."""
    dataset = open_data(check)
    encoder.check(dataset)
    if not len(dataset):
        raise DataError(f"{dataset.name} is empty: there is nothing to check the export on")
    rows = np.unique(np.linspace(0, len(dataset) - 1, min(len(dataset), _SAMPLE)).astype(np.int64))
    with Reader(dataset, encoder.model.image_size) as reader:
        return reader.fetch(rows)[0]


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


def _compare(
    encoder: Encoder, run: Run, given: NDArray[Any] | None, with_codes: bool, tolerance: float
) -> Check:
    model, folder = encoder.model, encoder.model.folder
    M, _, d = model.codebooks.shape
    worst, items = 0.0, 0
    for values in [*(_random_input(model, n) for n in _BATCHES), *([] if given is None else [given])]:
        expected, fine = encoder.embed(values, queries=True)
        x, n = _graph_input(values), len(values)
        try:
            outputs = run(x)
        except Exception as error:  # onnxruntime's and torch's errors have no common base
            raise DataError(
                f"{folder}: the exported network does not run on a batch of {n} ({one_line(error)}); nothing was written"
            ) from error
        wanted = [(np.dtype(np.float32), (n, M * d)), (np.dtype(np.uint8), (n, M))][: 1 + with_codes]
        found = [(a.dtype, a.shape) for a in outputs]
        if found != wanted:
            raise DataError(
                f"{folder}: the exported network gives {found}, not {wanted}; nothing was written"
            )
        if fine.any():
            # A sub-vector without a direction is rounding noise divided by almost nothing: it has no code to protect.
            difference = np.abs(outputs[0][fine].astype(np.float64) - expected[fine]).max()
            worst = max(worst, float(np.nan_to_num(difference, nan=np.inf)))
            items += int(fine.sum())
        elif values is given:
            raise DataError("none of the items to check on has a direction in every sub-space: give others")
        if worst > tolerance:
            raise DataError(
                f"{folder}: the exported network differs from the model by up to {worst:.2g}, the limit "
                f"is {tolerance:g}; nothing was written: use the other format, or allow more with --tolerance"
            )
        if with_codes:
            _, coded = encoder.embed(values)
            _check_codes(model, x[fine & coded], outputs[1][fine & coded], tolerance)
    if not items:
        raise DataError(
            f"{folder}: the network gives no vector with a direction for random input: "
            "train it again, or give real items to check on"
        )
    return Check(worst, items, 0 if given is None else len(given))


def _check_codes(model: Model, x: Floats, codes: NDArray[np.uint8], tolerance: float) -> None:
    """Codes must be as near to the items as the model's own; where two are equally near, either may be."""
    network: Any = model.network
    Z = torch.from_numpy(model.codebooks)
    M, K, _ = Z.shape
    fine = int(codes.max(initial=0)) < K
    if fine and len(codes):
        chosen = torch.from_numpy(codes.astype(np.int64))
        with torch.no_grad():
            if isinstance(network, PosteriorNetwork):
                features, raw = network.features(torch.from_numpy(x))
                posterior = network.posterior(raw)
                own = network.assign(features, posterior)
                above = network.cost(features, posterior, chosen) - network.cost(features, posterior, own)
                # Logits are at most some tens: an error of the tolerance in a probability changes a cost by less than 40 of it.
                fine = bool((above <= 40 * tolerance).all())
            else:
                items = network(torch.from_numpy(x)).unflatten(1, (M, -1))
                cosine = torch.einsum("nmd,mkd->nmk", items.double(), Z.double())
                of_chosen = cosine.gather(2, chosen[:, :, None])[:, :, 0]
                fine = bool((of_chosen >= cosine.amax(dim=2) - _CODE_MARGIN).all())
    if not fine:
        raise DataError(
            f"{model.folder}: the exported network gives codes that are not the nearest; nothing was written"
        )


# What the file says of itself ------------------------------------------------------------------------------------------


def _metadata(model: Model, kind: Format, with_codes: bool) -> dict[str, str]:
    """All values are text, as in ONNX; lists and dicts as JSON."""
    description, (M, K, d) = model.description, model.codebooks.shape
    versions = {
        "gpq_faiss": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if kind == "onnx":
        versions |= {name: packages.version(name) for name in ("onnx", "onnxscript", "onnxruntime")}
        versions["opset"] = str(OPSET)
    size = (
        {"input_width": str(model.input_width)}
        if model.input_width
        else {"image_size": str(model.image_size)}
    )
    return {
        "kind": KIND,
        "format_version": str(FORMAT_VERSION),
        "model_fingerprint": model.fingerprint,
        "codebooks_fingerprint": str(description["codebooks_fingerprint"]),
        "input_kind": model.input_kind,
        **size,
        "outputs": json.dumps(["vectors", "codes"][: 1 + with_codes]),
        "codebooks": str(M),
        "codewords": str(K),
        "subdim": str(d),
        "class_names": json.dumps(list(model.class_names)),
        "multi_label": json.dumps(bool(description.get("multi_label", False))),
        "versions": json.dumps(versions),
    }
