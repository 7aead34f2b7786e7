"""The runs of a folder as a table: a line per run, from which reports and pictures take means over seeds.

A *row* of a report is a method in one variation; columns are code lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..evaluation.tables import summarise
from ..methods.registry import METHODS
from .run import read_about
from .runs import Run, read_run


@dataclass(frozen=True)
class Experiment:
    """A folder of runs.

    Attributes:
        folder: its path.
        about: contents of ``experiment.json``.
        runs: in the order of the tables: methods as in the paper, then variations as in the grid, lengths, seeds.
    """

    folder: Path
    about: dict[str, Any]
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
        of_first = all(name.startswith(f"{first}_") for name in self.about["planned"])
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
        kept = f" ({run.about['bits_kept']:,} bits per item)" if not run.bits else ""
        return f"{run.method}{kept}" + (f" ({run.variation})" if run.variation else "")

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """The figures of each run, one after another."""
        return [{"method": self.row_name(run), **_figures(run)} for run in self.runs]

    @property
    def longest(self) -> list[int]:
        """Positions of the runs at the longest code, and of methods without codes."""
        return [i for i, line in enumerate(self.table) if line["bits"] in (0, max(self.bits))]

    def means(self, columns: Sequence[str], *, longest: bool = True) -> list[dict[str, Any]]:
        """A line per row with the means of columns of the table that any run has: of :attr:`longest`, or of all runs."""
        lines = [self.table[i] for i in self.longest] if longest else self.table
        there = [name for name in columns if any(name in line for line in lines)]
        return summarise(lines, by=["method"], values=there)

    def by_length(self, figure: str) -> list[dict[str, Any]]:
        """A line per row with the means of a figure by code length. A method without codes has one figure for all."""
        rows: dict[str, dict[str, Any]] = {
            line["method"]: {"method": line["method"], **dict.fromkeys(map(str, self.bits))}
            for line in self.table
        }
        for bits in self.bits:
            lines = [line for line in self.table if line["bits"] in (0, bits)]
            for found in summarise(lines, ["method"], [figure]):
                rows[found["method"]][str(bits)] = found[figure]
        return list(rows.values())

    def missing(self) -> list[str]:
        """Names of the requested runs that are not there, or are of other settings, data or versions than requested last."""
        there = {run.path.stem: run.about["identity"] for run in self.runs}
        planned = self.about["planned"].items()
        return [name for name, run in planned if there.get(name) != run["identity"]]


def _figures(run: Run) -> dict[str, Any]:
    about, arrays = run.about, run.arrays
    figures: dict[str, Any] = {"bits": run.bits, "seed": run.seed, "mAP": run.map, **about["seconds"]}
    if about["likeness"]:
        figures["NN10@100"] = about["likeness"]["nn10_at_100"]
    for head, across, up in (
        ("P@", "ks", "precision"),
        ("R@", "ks", "recall"),
        ("", "pr_recall", "pr_precision"),
    ):
        figures |= {f"{head}{x:g}": float(y) for x, y in zip(arrays[across], arrays[up], strict=True)}
    return figures


def position(name: str) -> int:
    """Position of a method in the paper's tables; last if it is not one of ours."""
    return list(METHODS).index(name) if name in METHODS else len(METHODS)


def read_experiment(folder: str | Path) -> Experiment:
    """Read all runs of a folder. Raises DataError: not an experiment of this version, no finished run, or a damaged one."""
    folder = Path(folder)
    about = read_about(folder)
    runs = [read_run(path) for path in sorted(folder.glob("*.h5"))]
    if not runs:
        raise DataError(f"{folder} has no finished run: make some with gpq experiment run")
    variations = {name: i for i, name in enumerate(about["variations"])}

    def place(run: Run) -> tuple[Any, ...]:
        variation = variations.get(run.variation, len(variations)), run.variation
        return position(run.method), run.method, variation, run.bits, run.seed

    runs.sort(key=place)
    for run, following in itertools.pairwise(runs):
        if place(run) == place(following):
            raise DataError(f"{following.path} is the same run as {run.path.name}: delete one of them")
    return Experiment(folder, about, tuple(runs))
