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

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.base import Dataset
from ..errors import DataError
from ..faissio.blob import add_codes, from_bytes
from ..inputs import parse_json
from ..store import read_arrays, write_arrays
from .compute import RunOutput
from .machine import describe_machine
from .specs import RUN_FORMAT, RunSpec

WHAT = "a run of gpq experiment"
# Attribute -> type; dict, list and None are stored as JSON.
_NEEDED: dict[str, type] = {
    "grid": str,
    "method": str,
    "bits": int,
    "bits_kept": int,
    "seed": int,
    "variation": str,
    "protocol": str,
    "identity": str,
    "split_hash": str,
    "map": float,
    "convention": str,
    "distinct_codes": int,
    "queries_without_relevant": int,
    "settings": dict,
    "data": dict,
    "counts": dict,
    "seconds": dict,
    "machine": dict,
    "versions": dict,
}
FIGURES = ("ap", "ks", "precision", "recall", "pr_recall", "pr_precision")
"""Names of the arrays with measures."""


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

    @property
    def likeness(self) -> Mapping[str, Any]:
        """As :meth:`gpq_faiss.evaluation.likeness.Likeness.as_dict`; empty for images."""
        return self.about["likeness"] or {}


def write_run(
    path: Path, spec: RunSpec, grid: str, dataset: Dataset, data_name: str, output: RunOutput
) -> Path:
    """Write the file of a run atomically.

    Raises:
        DataError: it cannot be written.
    """
    attributes = dict(output.attributes)
    log = attributes.pop("log", [])
    machine = describe_machine()
    about = {
        "kind": "run",
        "format_version": RUN_FORMAT,
        "grid": grid,
        "method": spec.method,
        "bits": spec.bits,
        "seed": spec.seed,
        "variation": spec.variation,
        "protocol": spec.protocol,
        "labelled": spec.labelled,
        "identity": spec.identity,
        "settings": dict(spec.settings),
        "split_hash": spec.split_hash,
        "data": {"name": data_name, "fingerprint": dataset.fingerprint, "kind": dataset.kind},
        "machine": {k: v for k, v in machine.items() if k != "versions"},
        "versions": machine["versions"],
        **attributes,
        "class_names": list(dataset.require_labels().class_names),
        "complete": True,
    }
    text = "".join(json.dumps(line) + "\n" for line in log).encode()
    arrays = output.arrays | ({"log": np.frombuffer(text, np.uint8)} if text else {})
    return write_arrays(path, arrays, about, compress=True)


def read_run(path: str | Path, names: Collection[str] = FIGURES) -> Run:
    """Read a run.

    Args:
        path: its file.
        names: arrays to read.

    Raises:
        DataError: missing, damaged, foreign, or of another format.
    """
    path = Path(path)
    arrays, attributes = read_arrays(path, WHAT, {*names, "ap"})
    if attributes.get("kind") != "run":
        raise DataError(f"{path} is not {WHAT}")
    if attributes.get("format_version") != RUN_FORMAT:
        raise DataError(
            f"{path} has format {attributes.get('format_version')}, not {RUN_FORMAT}: delete it and run it again"
        )
    about: dict[str, Any] = {}
    for name, value in attributes.items():
        needed = _NEEDED.get(name)
        about[name] = _decoded(value) if needed not in (str, int, float) else value
    for name, kind in _NEEDED.items():
        if not isinstance(about.get(name), kind):
            raise DataError(f"{path} is damaged ({name!r} is missing or wrong): delete it and run it again")
    for name in ("labelled", "likeness"):  # they may be None
        if name not in about or (name == "likeness" and not _is_likeness(about[name])):
            raise DataError(f"{path} is damaged ({name!r} is missing or wrong): delete it and run it again")
    ap = arrays.get("ap")
    if ap is None or ap.ndim != 1 or len(ap) != about["counts"].get("queries"):
        raise DataError(f"{path} is damaged ('ap' is missing or wrong): delete it and run it again")
    if abs(float(ap.mean()) - float(about["map"])) > 1e-9:
        raise DataError(
            f"{path} is damaged (its mAP is not the mean of its queries'): delete it and run it again"
        )
    return Run(path, about, arrays)


def _is_likeness(value: Any) -> bool:
    """Whether this is a valid likeness of a run: None, or its figures."""
    if value is None:
        return True
    if not isinstance(value, dict) or not isinstance(value.get("definition"), str):
        return False
    shares = [value.get("nn10_at_100"), value.get("within_class", 0.0) or 0.0]
    counts = [value.get(name) for name in ("distinct_in_tops", "queries")]
    return all(isinstance(x, int | float) and 0 <= x <= 1 for x in shares) and all(
        isinstance(x, int) and x > 0 for x in counts
    )


def _decoded(value: Any) -> Any:
    """Decoded if JSON, else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def is_done(path: Path, spec: RunSpec) -> bool:
    """Whether the file of a run exists, is undamaged and has this identity; otherwise the run is repeated."""
    if not path.exists():
        return False
    try:
        return bool(read_run(path).about["identity"] == spec.identity)
    except DataError:
        return False


def filled_index(path: str | Path) -> Any:
    """The Faiss index of a run with its database; ids are positions in ``database_rows``.

    Searching it with the run's ``search_input`` gives the method's ranking.

    Raises:
        DataError: no such run, or one without codes or index (methods without codes; LOPQ, whose index Faiss cannot write).
    """
    run = read_run(path, {"codes", "index"})
    if not {"codes", "index"} <= run.arrays.keys():
        raise DataError(f"{path} has no codes or no index: {run.method} has none that Faiss can write")
    return add_codes(from_bytes(run.arrays["index"], str(path)), run.arrays["codes"])
