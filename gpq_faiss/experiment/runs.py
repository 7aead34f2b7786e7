"""The files of an experiment: one HDF5 file for each run, and ``experiment.json`` for their folder.

A run is done if its file has the identity of the run: a hash of the settings, data, split, revision
of the method, and versions of the libraries used. So a run is repeated when its results could
differ. The file is written atomically; its attributes are those of :class:`Run`:

=====================  =======================  ====================================================
dataset                type                     meaning
=====================  =======================  ====================================================
``ap``                 float64 [Q]              average precision of each query
``ks``                 int64 [P]                k of mean ``precision`` and ``recall``, float64 [P]
``pr_recall``          float64 [L]              recall levels of the mean ``pr_precision``
``query_*``            [Q], [Q, ceil(C/8)]      ``rows`` in the data, ``ids``, packed ``labels``
``database_*``         [N], [N, ceil(C/8)]      the same for the database
``vector_*``           [n], [n, ceil(C/8)]      the same for the items of ``vectors``
``codes``              uint8 [N, W]             the stored bytes of an item, up to 256
``tables``             float32 [Q, M, K]        score of each codeword for each query; an item has
                                                the sum over its code
``top_ids``            int64 [Q, 1000]          the best ids of each query, ties by position
``vectors``            float32 [n, D]           of some items, if the grid requests them
``codebooks``          float32 [M, K, d]        of trained quantisers
=====================  =======================  ====================================================
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import faiss
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Json

from ..data.base import Dataset
from ..errors import DataError, MismatchError
from ..evaluation.neighbour_recall import NeighbourRecall
from ..evaluation.ranking import usable_cores
from ..files import versions, write_json
from ..inputs import reading
from ..store.hdf5 import read_arrays, write_arrays
from .grid import COMPUTING, RUN_FORMAT, Grid, RunSpec

DESCRIPTION = "experiment.json"
CONTENT = "a run of this version of gpq experiment"
MEASURES = ("ap", "ks", "precision", "recall", "pr_recall", "pr_precision")
"""Names of the arrays with measures."""
_FIXED = ("name", "protocol", "labelled", "queries", "preset", "config", "settings")
"""Keys of the grid that all runs of a folder share."""


class Run(BaseModel, strict=True, arbitrary_types_allowed=True):
    """A finished run: the attributes of its file, its path, and the requested arrays.

    Attributes:
        bits: requested code length, 0 for methods without codes; ``bits_kept`` is the actual one.
        map: mean average precision of the queries.
        counts: number of queries, of labelled and unlabelled items, and of items in the database.
        seconds: for fitting, encoding and ranking.
        steps: number of training steps, 0 for methods that are not trained.
    """

    format_version: Literal[3]
    method: str
    bits: int
    bits_kept: int
    seed: int
    variation: str
    identity: str
    split_hash: str
    map: float
    convention: str
    settings: Json[dict[str, Any]]
    counts: Json[dict[str, int]]
    seconds: Json[dict[str, float]]
    neighbour_recall: Json[NeighbourRecall | None]
    class_names: Json[list[str]]
    machine: Json[dict[str, Any]]
    steps: int = 0
    uses_unlabelled: bool = False
    path: Path
    arrays: dict[str, Any]


def write_run(
    path: Path, spec: RunSpec, arrays: Mapping[str, NDArray[Any]], measured: Mapping[str, Any]
) -> None:
    """Write the file of a run atomically; ``arrays`` and ``measured`` are those of
    :func:`.run.compute`.
    """
    attributes = {
        "format_version": RUN_FORMAT,
        "method": spec.method,
        "bits": spec.bits,
        "seed": spec.seed,
        "variation": spec.variation,
        "identity": spec.identity,
        "settings": spec.settings,
        "split_hash": spec.split_hash,
        "machine": describe_machine(),
        **measured,
    }
    write_arrays(path, arrays, attributes)


def read_run(path: str | Path, names: Collection[str] = MEASURES) -> Run:
    """Read a run with the arrays ``names``.

    Raises:
        DataError: the file is missing, damaged, or of another version.
    """
    arrays, attributes = read_arrays(path, CONTENT, names)
    with reading(Path(path), CONTENT):
        return Run.model_validate({**attributes, "path": path, "arrays": arrays})


def is_done(folder: Path, spec: RunSpec) -> bool:
    """Return whether a run has an undamaged file of its identity in the folder."""
    try:
        return read_run(folder / f"{spec.name}.h5").identity == spec.identity
    except DataError:
        return False


# Folder -------------------------------------------------------------------------------------------


class Description(BaseModel, strict=True):
    """The contents of ``experiment.json``.

    Attributes:
        grid: the :class:`Grid` of the last call.
        data: name, fingerprint and kind of the data of all runs.
        planned: name of a run -> its identity, of all calls, so that missing runs are known.
    """

    experiment_format: Literal[4]
    grid: dict[str, Any]
    data: dict[str, str]
    planned: dict[str, str]


def read_description(folder: str | Path) -> Description:
    """Read the ``experiment.json`` of a folder.

    Raises:
        DataError: it is missing, damaged or of another version.
    """
    path = Path(folder) / DESCRIPTION
    with reading(path, "an experiment of this version (gpq experiment run makes one)"):
        return Description.model_validate_json(path.read_bytes())


def begin(folder: Path, grid: Grid, dataset: Dataset, specs: Sequence[RunSpec]) -> None:
    """Write the description of a folder with the runs that are requested now.

    Runs that earlier calls requested are kept, so that reports can list what is missing.

    Raises:
        MismatchError: the folder holds another experiment.
    """
    # Names have no folders, which differ between machines.
    name = re.sub(r"[^:]*/", "", dataset.name)
    description = Description(
        experiment_format=4,
        grid=grid.model_dump(mode="json", exclude={"variation", "product"}),
        data={"name": name, "fingerprint": dataset.fingerprint, "kind": dataset.kind},
        planned={spec.name: spec.identity for spec in specs},
    )
    if (folder / DESCRIPTION).exists():
        earlier = read_description(folder)
        fixed = {key: (earlier.grid.get(key), description.grid[key]) for key in _FIXED}
        fixed["data"] = earlier.data["fingerprint"], dataset.fingerprint
        for key, (old, new) in fixed.items():
            if old != new:
                raise MismatchError(
                    f"{folder} holds an experiment with {key} {old or 'unset'}, not "
                    f"{new or 'unset'}: choose another --out"
                )
        description.planned = earlier.planned | description.planned
    write_json(folder / DESCRIPTION, description.model_dump())


# Machine ------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, Any]:
    """Return processor, memory, system, GPU, thread counts and versions, for JSON.

    There are no host names and no paths in it.
    """
    cpu = platform.processor() or platform.machine()
    system = platform.system()
    with contextlib.suppress(OSError, IndexError):  # only on Linux
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
        cpu = re.findall(r"(?m)^model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())[0]
    return {
        "cpu": cpu,
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "os": system,
        "gpu": ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or None,
        "threads": {"torch": torch.get_num_threads(), "faiss": faiss.omp_get_max_threads()},
        "versions": versions(*COMPUTING),
    }


def machine_line(machine: Mapping[str, Any]) -> str:
    """Describe a machine and the versions on it in a sentence."""
    return (
        f"Machine: {machine['cpu']}, {machine['cores']} cores ({machine['threads']['torch']} "
        f"used), {machine['memory_gib']} GiB, {machine['gpu'] or 'no GPU'}, {machine['os']}; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + "."
    )
