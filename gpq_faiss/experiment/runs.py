"""The runs of a grid in order of execution, the file of each, and ``experiment.json``, which says what their folder holds.

A run is done if its file has the run's identity: a hash of the settings, data, split, revision of the method, and versions of the
libraries used. So a run is repeated when its results could differ. The file is HDF5, written atomically; its attributes are those of
:class:`Run`:

=====================  =======================  =============================================================
dataset                type                     meaning
=====================  =======================  =============================================================
``ap``                 float64 [Q]              average precision of each query
``ks``                 int64 [P]                the k of mean ``precision`` and ``recall``, float64 [P]
``pr_recall``          float64 [L]              recall levels of the mean interpolated ``pr_precision``
``query_*``            [Q], [Q, ceil(C/8)]      ``rows`` in the data set, ``ids``, packed ``labels``
``database_*``         [N], [N, ceil(C/8)]      the same for the database
``codes``              uint8 [N, W]             as packed by Faiss (not for methods without codes)
``tables``             float32 [Q, M, K]        score of each codeword for each query; an item has the sum over its code
``top_ids``            int64 [Q, 1000]          the best ids of each query, ties by position
``vectors``            float32 [n, D]           of some items, if the grid requests them
``codebooks``          float32 [M, K, d]        of trained quantisers
=====================  =======================  =============================================================
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Json, ValidationError

from ..config import codebooks_for_bits, from_dict, to_dict, validate
from ..data.base import Dataset
from ..data.protocols import make_split
from ..errors import DataError, MismatchError, UsageError
from ..evaluation.likeness import Likeness
from ..evaluation.ranking import usable_cores
from ..files import fingerprint, read_json, versions, write_json
from ..methods.measure import needs_perceptron
from ..methods.registry import find_method, make_method, method_names
from ..store.hdf5 import read_arrays, write_arrays
from .grid import Grid, method_config

ABOUT = "experiment.json"
_COMPUTING = ("python", "numpy", "torch", "faiss")
_OF_ONE_FOLDER = ("grid", "protocol", "labelled", "queries", "preset", "config")
RUN_FORMAT = 1
"""Version of the run files; part of every identity."""
WHAT = "a run of gpq experiment"
FIGURES = ("ap", "ks", "precision", "recall", "pr_recall", "pr_precision")
"""Names of the arrays with measures."""


@dataclass(frozen=True)
class RunSpec:
    """One run: a method at one code length, seed and variation of the settings, on one split."""

    method: str
    bits: int
    """Requested code length; 0 for methods without codes."""
    seed: int
    variation: str
    settings: Mapping[str, Any]
    """All that determines the codes except the data: a config's dict, or an array method's settings."""
    split_args: Mapping[str, Any]
    """Of :func:`gpq_faiss.data.protocols.make_split`."""
    vectors: int
    split_hash: str
    identity: str
    """Hash of everything that the results depend on."""
    name: str
    """Of its file without extension; unique in the grid."""


def plan(grid: Grid, dataset: Dataset) -> tuple[list[RunSpec], dict[str, str]]:
    """The runs of ``grid`` on ``dataset``, seeds outermost, so that an interrupted grid is a complete table of fewer seeds; and
    method -> reason why it has no run on these data.

    A run that differs from an earlier one only in the name of its variation, as those of methods without settings do, is left out.

    Raises:
        UsageError: invalid settings; a code length that a method does not support; a method that is not installed.
        DataError: too few items for the protocol.
    """
    perceptron = needs_perceptron(dataset)
    used = {name for variation in grid.variations for name in grid.methods_of(variation)}
    entries = {name: find_method(name) for name in method_names() if name in used}
    no_room = "its network has no room for convolutions in these items (features, tiny images)"
    left_out = {name: no_room for name, e in entries.items() if perceptron and e.convolutional}
    for name in entries.keys() - left_out.keys():
        entries[name].load()
    computing = json.dumps(versions(*_COMPUTING), sort_keys=True)
    specs: dict[str, RunSpec] = {}
    for seed in grid.seeds:
        chosen: dict[str, Any] = grid.model_dump(include={"protocol", "labelled", "queries"}) | {"seed": seed}
        split = make_split(dataset, **chosen).hash
        for variation, method in itertools.product(grid.variations, entries):
            skipped = method in left_out or method not in grid.methods_of(variation)
            for bits in () if skipped else grid.bits if entries[method].any_length else (0,):
                if entries[method].deep:
                    config = method_config(grid, variation, method, perceptron=perceptron)
                    M = codebooks_for_bits(bits, config.quantizer.codewords)
                    own = {"quantizer": {"codebooks": M}, "training": {"seed": seed}}
                    settings = to_dict(validate(config.with_settings(own)))
                else:
                    settings = make_method(method, bits or 32, seed).settings()
                revision = f"{method} {entries[method].revision}"
                of_data = dataset.fingerprint, split, computing, str(grid.vectors)
                condition = fingerprint(str(RUN_FORMAT), revision, str(bits), *of_data)
                identity = fingerprint(condition, json.dumps(settings, sort_keys=True))
                name = f"{method}_{f'{bits}bits' if bits else 'any'}_seed{seed}"
                if variation.name:
                    readable = re.sub(r"[^a-z0-9.]+", "-", variation.name.lower()).strip("-.")[:40]
                    name += f"_{readable}-{fingerprint(variation.name)[:4]}"
                of_run = method, bits, seed, variation.name, settings, chosen, grid.vectors, split
                specs.setdefault(identity, RunSpec(*of_run, identity, name))
    if not specs:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UsageError(f"grid {grid.name}: nothing to run ({why or 'no method'})")
    return list(specs.values()), left_out


# Files ------------------------------------------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)


class Counts(_Strict):
    """Numbers of items."""

    queries: int
    labelled: int
    unlabelled: int
    database: int


class Run(_Strict):
    """A finished run: attributes of its file (as JSON if not text or numbers), the file, and the requested arrays."""

    kind: Literal["run"]
    format_version: Literal[1]
    method: str
    bits: int
    """Code length; 0 for methods without codes."""
    bits_kept: int
    seed: int
    variation: str
    identity: str
    split_hash: str
    map: float
    """Mean average precision of the queries."""
    convention: str
    settings: Json[dict[str, Any]]
    data: Json[dict[str, Any]]
    counts: Json[Counts]
    seconds: Json[dict[str, float]]
    likeness: Json[Likeness | None]
    class_names: Json[list[str]]
    machine: Json[dict[str, Any]]
    versions: Json[dict[str, str]]
    steps: int = 0
    path: Path
    arrays: dict[str, Any]


def write_run(
    path: Path,
    about: Mapping[str, Any],
    spec: RunSpec,
    arrays: Mapping[str, NDArray[Any]],
    measured: Mapping[str, Any],
) -> None:
    """Write the file of a run atomically; ``about`` is of the experiment, ``arrays`` and ``measured`` of :func:`.compute.compute`."""
    machine = describe_machine()
    stated = ("method", "bits", "seed", "variation", "identity", "settings", "split_hash")
    attributes = {
        "kind": "run",
        "format_version": RUN_FORMAT,
        "grid": about["grid"],
        **{name: getattr(spec, name) for name in stated},
        **{name: spec.split_args[name] for name in ("protocol", "labelled")},
        "data": {key: about["data"][key] for key in ("name", "fingerprint", "kind")},
        "versions": machine.pop("versions"),
        "machine": machine,
        **measured,
        "complete": True,
    }
    write_arrays(path, arrays, attributes)


def read_run(path: str | Path, names: Collection[str] = FIGURES) -> Run:
    """Read a run, with the arrays ``names``. Raises DataError: it is missing, damaged, or of another format."""
    path = Path(path)
    arrays, attributes = read_arrays(path, WHAT, {*names, "ap"})
    what = "ap"
    try:
        run = Run.model_validate({**attributes, "path": path, "arrays": arrays})
        ap = arrays.get("ap", np.empty(0))
        if ap.shape == (run.counts.queries,) and abs(float(ap.mean()) - run.map) < 1e-9:
            if "training" in run.settings:
                from_dict(run.settings)
            return run
    except ValidationError as error:
        what = str(error.errors()[0]["loc"][0])
    except UsageError:
        what = "settings"
    raise DataError(
        f"{path} is not {WHAT} of this version, or damaged ({what!r} is missing or wrong): delete it and run it again"
    )


def is_done(path: Path, spec: RunSpec) -> bool:
    """Whether the file of a run exists, is undamaged and has this identity; otherwise the run is repeated."""
    try:
        return path.exists() and read_run(path).identity == spec.identity
    except DataError:
        return False


# Folder -----------------------------------------------------------------------------------------------------------------


class Data(BaseModel):
    """The data of all runs."""

    name: str
    fingerprint: str
    kind: str


class Planned(BaseModel):
    """A run that a call has requested."""

    variation: str
    identity: str


class About(_Strict):
    """What an experiment is: contents of ``experiment.json``. ``planned``: name -> run, of all calls, so that missing ones can be told;
    ``left_out``: method -> why it has no run."""

    experiment_format: Literal[2] = 2
    grid: str
    title: str
    kind: str
    protocol: str
    labelled: str | None
    queries: str | None
    preset: str
    config: dict[str, Any]
    data: Data
    variations: list[str]
    left_out: dict[str, str]
    planned: dict[str, Planned]


def read_about(folder: str | Path) -> About:
    """The ``experiment.json`` of a folder. Raises DataError: it is missing, damaged or of another version."""
    path = Path(folder) / ABOUT
    held = read_json(path, "an experiment (gpq experiment run makes one)")
    try:
        return About.model_validate({"experiment_format": None, **(held if isinstance(held, dict) else {})})
    except ValidationError as error:
        wrong = str(error.errors()[0]["loc"][0])
        raise DataError(
            f"{path} is damaged or of another version ({wrong!r} is missing or wrong): choose another folder"
        ) from None


def begin(
    folder: Path,
    grid: Grid,
    dataset: Dataset,
    specs: Sequence[RunSpec],
    left_out: Mapping[str, str],
    data_name: str | None = None,
) -> About:
    """Write the description of the folder with the runs that are requested now, or check that it agrees. What earlier calls requested
    is kept, so that reports can list what is missing."""
    kind, _, path = dataset.name.partition(":")
    data = Data(
        # Without folders, which differ between machines.
        name=data_name or (f"{kind}:{Path(path).name}" if path else Path(kind).name),
        fingerprint=dataset.fingerprint,
        kind=dataset.kind,
    )
    about = About(
        grid=grid.name,
        data=data,
        variations=[variation.name for variation in grid.variations],
        left_out=dict(left_out),
        planned={s.name: Planned(variation=s.variation, identity=s.identity) for s in specs},
        **grid.model_dump(include=set(About.model_fields)),
    )
    if (folder / ABOUT).exists():
        before = read_about(folder)
        for what in _OF_ONE_FOLDER:
            old, new = (getattr(of, what) or "unset" for of in (before, about))
            if old != new:
                raise MismatchError(
                    f"{folder} holds an experiment with {what} {old}, not {new}: choose another --out"
                )
        if before.data.fingerprint != data.fingerprint:
            raise MismatchError(
                f"{folder} holds runs on {before.data.name}, and these data differ: choose another --out"
            )
        # Variations that are no longer in the grid are not expected.
        kept = {k: run for k, run in before.planned.items() if run.variation in about.variations}
        about.planned = kept | about.planned
        about.data = data if data_name else before.data
    write_json(folder / ABOUT, about.model_dump())
    return about


# Machine ----------------------------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, Any]:
    """Processor, memory, system, GPU, thread counts and versions, without host names or paths; JSON-serialisable."""
    cpu, system, memory = platform.processor() or platform.machine(), platform.system(), None
    with contextlib.suppress(OSError, AttributeError, ValueError, TypeError):  # of other systems than Linux
        memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
        cpu = re.search(r"^model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(), re.M)[1]  # type: ignore[index]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu,
        "cores": usable_cores(),
        "memory_gib": memory,
        "os": system,
        "gpu": ", ".join(gpus) or None,
        "threads": {"torch": torch.get_num_threads(), "faiss": faiss.omp_get_max_threads()},
        "versions": versions(*_COMPUTING),
    }


def machine_line(machine: Mapping[str, Any], of: Mapping[str, str]) -> str:
    """A machine and the versions on it in a sentence."""
    libraries = ", ".join(f"{name} {version}" for name, version in of.items())
    return (
        f"Machine: {machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB, "
        f"{machine.get('gpu') or 'no GPU'}, {machine.get('os')}; {libraries}."
    )
