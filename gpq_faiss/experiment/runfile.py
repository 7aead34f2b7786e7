"""The file of a run: written atomically when the run is done, checked when read.

=====================  =======================  =============================================================
dataset                type                     meaning
=====================  =======================  =============================================================
``ap``                 float64 [Q]              average precision of each query
``ks``                 int64 [P]                the k of the next two
``precision``          float64 [P]              mean precision at k
``recall``             float64 [P]              mean recall at k
``pr_recall``          float64 [L]              recall levels of the precision-recall curve
``pr_precision``       float64 [L]              mean interpolated precision there
``query_rows, _ids``   int64 [Q]                positions in the data set, and ids
``query_labels``       uint8 [Q, ceil(C/8)]     packed multi-hot
``database_*``         [N], [N, ceil(C/8)]      the same for the database
``codes``              uint8 [N, W]             as packed by Faiss (not for methods without codes)
``index``              uint8 [B]                a trained, empty Faiss index with the method's ranking
``search_input``       [Q, ...]                 query vectors for ``index``
``top_ids``            int64 [Q, 1000]          the best ids of each query, ties by position
``vectors``            float32 [n, D]           of some items, if the grid requests them
``codebooks``          float32 [M, K, d]        of trained quantisers
``log``                uint8 [B]                JSON lines of the training
=====================  =======================  =============================================================

Attributes describe the run: method, bits, seed, variation, settings, data, split, times, machine, versions; and its mAP and
``likeness`` (JSON of :class:`gpq_faiss.evaluation.likeness.Likeness`; null for images).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import DataError
from ..inputs import parse_json
from ..store import read_arrays, write_arrays
from .machine import describe_machine
from .specs import RUN_FORMAT, RunSpec

WHAT = "a run of gpq experiment"
FIGURES = ("ap", "ks", "precision", "recall", "pr_recall", "pr_precision")
"""Names of the arrays with measures."""
_Share = Annotated[float, Ge(0), Le(1)]
_Positive = Annotated[int, Ge(1)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Likeness(_Checked):
    definition: str
    nn10_at_100: _Share
    within_class: _Share | None
    distinct_in_tops: _Positive
    queries: _Positive


class _Counts(_Checked):
    queries: int
    labelled: int
    unlabelled: int
    database: int


class _About(_Checked):
    """What the attributes of a run must be."""

    grid: str
    method: str
    bits: int
    bits_kept: int
    seed: int
    variation: str
    protocol: str
    labelled: str | None
    identity: str
    split_hash: str
    map: float
    convention: str
    distinct_codes: int
    queries_without_relevant: int
    settings: dict[str, Any]
    data: dict[str, Any]
    counts: _Counts
    seconds: dict[str, float]
    likeness: _Likeness | None
    machine: dict[str, Any]
    versions: dict[str, str]


_TEXTS = {name for name, field in _About.model_fields.items() if field.annotation is str}


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        path: its file.
        about: the attributes, with JSON decoded.
        arrays: the requested arrays.
    """

    path: Path
    about: dict[str, Any]
    arrays: dict[str, NDArray[Any]]

    @property
    def method(self) -> str:
        return str(self.about["method"])

    @property
    def bits(self) -> int:
        """Code length; 0 for methods without codes."""
        return int(self.about["bits"])

    @property
    def seed(self) -> int:
        return int(self.about["seed"])

    @property
    def variation(self) -> str:
        return str(self.about["variation"])

    @property
    def map(self) -> float:
        """Mean average precision of the queries."""
        return float(self.about["map"])


def write_run(
    path: Path,
    about: Mapping[str, Any],
    spec: RunSpec,
    arrays: Mapping[str, NDArray[Any]],
    measured: Mapping[str, Any],
) -> None:
    """Write the file of a run atomically; ``about`` is of the experiment, and ``arrays`` and ``measured`` of :func:`.compute.compute`.

    Raises:
        DataError: it cannot be written.
    """
    attributes = dict(measured)
    text = "".join(json.dumps(line) + "\n" for line in attributes.pop("log", [])).encode()
    machine = describe_machine()
    versions = machine.pop("versions")
    attributes = {
        "kind": "run",
        "format_version": RUN_FORMAT,
        "grid": about["grid"],
        "method": spec.method,
        "bits": spec.bits,
        "seed": spec.seed,
        "variation": spec.variation,
        "protocol": spec.split_args["protocol"],
        "labelled": spec.labelled,
        "identity": spec.identity,
        "settings": dict(spec.settings),
        "split_hash": spec.split_hash,
        "data": {key: about["data"][key] for key in ("name", "fingerprint", "kind")},
        "machine": machine,
        "versions": versions,
        **attributes,
        "complete": True,
    }
    log = {"log": np.frombuffer(text, np.uint8)} if text else {}
    write_arrays(path, {**arrays, **log}, attributes, compress=True)


def read_run(path: str | Path, names: Collection[str] = FIGURES) -> Run:
    """Read a run.

    Args:
        path: its file.
        names: arrays to read.

    Raises:
        DataError: missing, damaged, or of another format.
    """
    path = Path(path)
    arrays, attributes = read_arrays(path, WHAT, {*names, "ap"})
    if attributes.get("kind") != "run":
        raise DataError(f"{path} is not {WHAT}")
    if attributes.get("format_version") != RUN_FORMAT:
        raise DataError(
            f"{path} has format {attributes.get('format_version')}, not {RUN_FORMAT}: delete it and run it again"
        )
    about = {name: value if name in _TEXTS else _decoded(value) for name, value in attributes.items()}
    wrong = ""
    try:
        _About.model_validate(about)
    except ValidationError as error:
        wrong = f"{error.errors()[0]['loc'][0]!r} is missing or wrong"
    ap = arrays.get("ap")
    if not wrong and (ap is None or ap.ndim != 1 or len(ap) != about["counts"]["queries"]):
        wrong = "'ap' is missing or wrong"
    elif not wrong and ap is not None and not abs(float(ap.mean()) - about["map"]) < 1e-9:
        wrong = "its mAP is not the mean of its queries'"
    if wrong:
        raise DataError(f"{path} is damaged ({wrong}): delete it and run it again")
    return Run(path, about, arrays)


def _decoded(value: Any) -> Any:
    """Decoded if JSON of None, a list or an object, as which they are written; else unchanged."""
    if isinstance(value, str) and value.startswith(("null", "[", "{")):
        with contextlib.suppress(ValueError):
            return parse_json(value)
    return value


def is_done(path: Path, spec: RunSpec) -> bool:
    """Whether the file of a run exists, is undamaged and has this identity; otherwise the run is repeated."""
    try:
        return path.exists() and bool(read_run(path).about["identity"] == spec.identity)
    except DataError:
        return False
