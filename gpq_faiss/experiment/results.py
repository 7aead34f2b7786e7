"""The folder of an experiment: what it is (``experiment.json``), and its runs as a table, of which reports and pictures take means over
seeds.

A *row* of a report is a method in one variation; columns are code lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ..data.base import Dataset
from ..errors import DataError, MismatchError
from ..evaluation.tables import summarise
from ..files import read_json, write_json
from ..methods.registry import METHODS
from .grid import Grid
from .runs import Run, RunSpec, read_run

ABOUT = "experiment.json"
CURVES = {
    "{:.2f}": ("pr_recall", "pr_precision"),
    "P@{}": ("ks", "precision"),
    "R@{}": ("ks", "recall"),
}
"""Columns of a table -> arrays of a run: what the columns are named by, and their figures."""
_OF_ONE_FOLDER = ("grid", "protocol", "labelled", "queries", "preset", "config")


class Data(BaseModel):
    """The data of all runs."""

    name: str
    fingerprint: str
    kind: str


class Planned(BaseModel):
    """A run that a call has requested."""

    variation: str
    identity: str


class About(BaseModel):
    """What an experiment is: contents of ``experiment.json``. ``planned``: name -> run, of all calls, so that missing ones can be told;
    ``left_out``: method -> why it has no run."""

    model_config = ConfigDict(strict=True)

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
            old, new = (getattr(of, what) or "not set" for of in (before, about))
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


@dataclass(frozen=True)
class Experiment:
    """A folder of runs, which are in the order of the tables: methods as in the paper, variations as in the grid, lengths, seeds."""

    folder: Path
    about: About
    runs: tuple[Run, ...]

    @property
    def bits(self) -> list[int]:
        """Code lengths, ascending, without the 0 of methods without codes."""
        return sorted({run.bits for run in self.runs} - {0}) or [0]

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    @cached_property
    def one_method(self) -> bool:
        """Whether all runs, including missing ones, are of one method."""
        first = self.runs[0].method
        of_first = all(name.startswith(f"{first}_") for name in self.about.planned)
        return of_first and all(run.method == first for run in self.runs)

    @property
    def over_seeds(self) -> str:
        """The seeds of the figures, for captions."""
        several = f"mean ± deviation over seeds {', '.join(map(str, self.seeds))}"
        return several if len(self.seeds) > 1 else f"seed {self.seeds[0]}"

    @property
    def at(self) -> str:
        """The longest code, for captions."""
        return f"{max(self.bits)} bits"

    def row_name(self, run: Run) -> str:
        """The name of a run's row."""
        if run.variation and self.one_method:
            return run.variation
        kept = "" if run.bits else f" ({run.bits_kept:,} bits per item)"
        return f"{run.method}{kept}" + (f" ({run.variation})" if run.variation else "")

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """The figures of each run, one after another: mAP also by code length, where a method without codes has one figure for all."""
        lines = []
        for run in self.runs:
            line = {"method": self.row_name(run), "bits": run.bits, "seed": run.seed, "mAP": run.map}
            line |= {str(bits): run.map for bits in self.bits if run.bits in (0, bits)} | run.seconds
            line |= {"NN10@100": run.likeness.nn10_at_100} if run.likeness else {}
            for column, (x, y) in CURVES.items():
                points = zip(run.arrays[x], run.arrays[y], strict=True)
                line |= {column.format(at): float(up) for at, up in points}
            lines.append(line)
        return lines

    def means(self, columns: Iterable[str], *, longest: bool = True) -> list[dict[str, Any]]:
        """A line per row with the means of columns of the table that any run has: of the runs at the longest code (and of methods without
        codes), or of all."""
        lines = [line for line in self.table if not longest or line["bits"] in (0, max(self.bits))]
        there = [name for name in columns if any(name in line for line in lines)]
        return summarise(lines, by=["method"], values=there)

    def missing(self) -> list[str]:
        """Names of the requested runs that are not there, or are of other settings, data or versions than requested last."""
        there = {run.path.stem: run.identity for run in self.runs}
        return [name for name, run in self.about.planned.items() if there.get(name) != run.identity]


def read_experiment(folder: str | Path) -> Experiment:
    """Read all runs of a folder. Raises DataError: not an experiment of this version, no finished run, or a damaged one."""
    folder = Path(folder)
    about = read_about(folder)
    runs = [read_run(path) for path in sorted(folder.glob("*.h5"))]
    if not runs:
        raise DataError(f"{folder} has no finished run: make some with gpq experiment run")
    orders = [{name: i for i, name in enumerate(of)} for of in (METHODS, about.variations)]

    def place(run: Run) -> tuple[Any, ...]:
        """In the tables; methods and variations that are no more come last."""
        method, variation = (
            (order.get(name, len(order)), name)
            for order, name in zip(orders, (run.method, run.variation), strict=True)
        )
        return method, variation, run.bits, run.seed

    runs.sort(key=place)
    for run, following in itertools.pairwise(runs):
        if place(run) == place(following):
            raise DataError(f"{following.path} is the same run as {run.path.name}: delete one of them")
    return Experiment(folder, about, tuple(runs))
