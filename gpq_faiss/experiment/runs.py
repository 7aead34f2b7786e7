"""The runs of a grid in order of execution, and the file of each.

A run is done if its file has the run's identity: a hash of the settings, data, split, revision of the method, and versions of the
libraries used. So a run is repeated when its results could differ. The file is HDF5, written atomically:

=====================  =======================  =============================================================
dataset                type                     meaning
=====================  =======================  =============================================================
``ap``                 float64 [Q]              average precision of each query
``ks``                 int64 [P]                the k of mean ``precision`` and ``recall``, float64 [P]
``pr_recall``          float64 [L]              recall levels of the mean interpolated ``pr_precision``
``query_*``            [Q], [Q, ceil(C/8)]      ``rows`` in the data set, ``ids``, packed ``labels``
``database_*``         [N], [N, ceil(C/8)]      the same for the database
``codes``              uint8 [N, W]             as packed by Faiss (not for methods without codes)
``index``              uint8 [B]                a trained, empty Faiss index with the method's ranking
``search_input``       [Q, ...]                 query vectors for ``index``
``top_ids``            int64 [Q, 1000]          the best ids of each query, ties by position
``vectors``            float32 [n, D]           of some items, if the grid requests them
``codebooks``          float32 [M, K, d]        of trained quantisers
=====================  =======================  =============================================================

Attributes are those of :class:`_About`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from ..config import codebooks_for_bits, merge, to_dict, validate
from ..data.base import Dataset
from ..data.protocols import make_split
from ..errors import DataError, UsageError
from ..files import fingerprint
from ..inputs import parse_json
from ..methods.measure import needs_perceptron
from ..methods.registry import find_method, make_method, method_names
from ..store import read_arrays, write_arrays
from .grid import Grid, Variation, method_config
from .machine import describe_machine, versions

RUN_FORMAT = 1
"""Version of the run files; part of every identity."""
WHAT = "a run of gpq experiment"
FIGURES = ("ap", "ks", "precision", "recall", "pr_recall", "pr_precision")
"""Names of the arrays with measures."""


@dataclass(frozen=True)
class RunSpec:
    """One run: a method at one code length, seed and variation of the settings, on one split.

    Attributes:
        method: short name.
        bits: requested code length; 0 for methods without codes.
        seed: of the split, weights and batches.
        variation: its name; empty for unchanged methods.
        settings: everything that determines the codes except the data: a config's dict, or an array method's settings.
        split_args: arguments of :func:`gpq_faiss.data.protocols.make_split` besides the data.
        vectors: number of database items whose vectors are stored.
        split_hash: of the split.
        identity: hash of everything that the results depend on.
        name: of its file without extension; unique in the grid.
    """

    method: str
    bits: int
    seed: int
    variation: str
    settings: Mapping[str, Any]
    split_args: Mapping[str, Any]
    vectors: int
    split_hash: str
    identity: str
    name: str


def plan(grid: Grid, dataset: Dataset) -> tuple[list[RunSpec], dict[str, str]]:
    """The runs of ``grid`` on ``dataset``, seeds outermost, so that an interrupted grid is a complete table of fewer seeds; and
    method -> reason why it has no run on these data.

    A run that differs from an earlier one only in the name of its variation, as those of methods without settings do, is left out.

    Raises:
        UsageError: invalid settings; a code length that a method does not support; a method that is not installed.
        DataError: too few items for the protocol.
    """
    perceptron = needs_perceptron(dataset)
    used = {name for variation in grid.variation for name in grid.methods_of(variation)}
    entries = {name: find_method(name) for name in method_names() if name in used}
    no_room = "its network has no room for convolutions in these items (features, tiny images)"
    left_out = {name: no_room for name, e in entries.items() if perceptron and e.convolutional}
    for name in entries.keys() - left_out.keys():
        entries[name].load()
    computing = json.dumps(versions(), sort_keys=True)
    specs: dict[str, RunSpec] = {}
    splits = {seed: make_split(dataset, **split_args(grid, seed)).hash for seed in grid.seeds}
    for seed, variation in itertools.product(grid.seeds, grid.variation):
        for method in grid.methods_of(variation):
            lengths = () if method in left_out else grid.bits if entries[method].any_length else (0,)
            for bits in lengths:
                settings = _settings(grid, variation, method, bits, seed, perceptron=perceptron)
                condition = fingerprint(
                    str(RUN_FORMAT),
                    f"{method} {entries[method].revision}",
                    str(bits),
                    dataset.fingerprint,
                    splits[seed],
                    computing,
                    str(grid.vectors),
                )
                identity = fingerprint(condition, json.dumps(settings, sort_keys=True))
                length = f"{bits}bits" if bits else "any"
                name = f"{method}_{length}_seed{seed}" + (
                    f"_{_slug(variation.name)}" if variation.name else ""
                )
                of_run = (method, bits, seed, variation.name, settings, split_args(grid, seed), grid.vectors)
                specs.setdefault(identity, RunSpec(*of_run, splits[seed], identity, name))
    if not specs:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UsageError(f"grid {grid.name}: nothing to run ({why or 'no method'})")
    return list(specs.values()), left_out


def split_args(grid: Grid, seed: int) -> dict[str, Any]:
    """Arguments of :func:`gpq_faiss.data.protocols.make_split` besides the data."""
    return {"protocol": grid.protocol, "seed": seed, "labelled": grid.labelled, "queries": grid.queries}


def _slug(text: str) -> str:
    """Part of a file name: readable, and unique for each text."""
    readable = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:40]
    return f"{readable}-{fingerprint(text)[:4]}"


def _settings(
    grid: Grid, variation: Variation, method: str, bits: int, seed: int, *, perceptron: bool
) -> dict[str, Any]:
    if not find_method(method).deep:
        return make_method(method, bits or 32, seed).settings()
    config = method_config(grid, variation, method, perceptron=perceptron)
    M = codebooks_for_bits(bits, config.quantizer.codewords)
    return to_dict(validate(merge(config, {"quantizer": {"codebooks": M}, "training": {"seed": seed}})))


# Files ------------------------------------------------------------------------------------------------------------------


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Likeness(_Checked):
    definition: str
    nn10_at_100: Annotated[float, Ge(0), Le(1)]


class _Counts(_Checked):
    queries: int
    labelled: int
    unlabelled: int
    database: int


class _About(_Checked):
    """What the attributes of a run must be; those that are not text or numbers are stored as JSON."""

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
    machine = describe_machine()
    attributes = {
        "kind": "run",
        "format_version": RUN_FORMAT,
        "grid": about["grid"],
        **{name: getattr(spec, name) for name in ("method", "bits", "seed", "variation", "identity")},
        "protocol": spec.split_args["protocol"],
        "labelled": spec.split_args["labelled"],
        "settings": dict(spec.settings),
        "split_hash": spec.split_hash,
        "data": {key: about["data"][key] for key in ("name", "fingerprint", "kind")},
        "versions": machine.pop("versions"),
        "machine": machine,
        **measured,
        "complete": True,
    }
    write_arrays(path, arrays, attributes)


def read_run(path: str | Path, names: Collection[str] = FIGURES) -> Run:
    """Read a run, with the arrays ``names``.

    Raises:
        DataError: missing, damaged, or of another format.
    """
    path = Path(path)
    arrays, attributes = read_arrays(path, WHAT, {*names, "ap"})
    if (attributes.get("kind"), attributes.get("format_version")) != ("run", RUN_FORMAT):
        raise DataError(f"{path} is not {WHAT} of this version: delete it and run it again")
    about = {name: value if name in _TEXTS else _decoded(value) for name, value in attributes.items()}
    ap, wrong = arrays.get("ap", np.empty(0)), ""
    try:
        counts = _About.model_validate(about).counts
        if ap.shape != (counts.queries,) or not abs(float(ap.mean()) - about["map"]) < 1e-9:
            wrong = "ap"
    except ValidationError as error:
        wrong = str(error.errors()[0]["loc"][0])
    if wrong:
        raise DataError(f"{path} is damaged ({wrong!r} is missing or wrong): delete it and run it again")
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
