"""The runs of a folder, and the figures in them as rows.

A *row* of a table is a method in a variation; its columns are code lengths (and numbers of labels, where there are several); its
values are means and deviations over seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import DataError
from ..evaluation.likeness import NEAREST
from ..evaluation.tables import pivot, summarise
from ..methods.registry import METHODS
from .run import read_about
from .runfile import FIGURES, Run, read_run

_Cell = tuple[str, str, str, int, int]
"""Method, variation, labels, length and seed."""


@dataclass(frozen=True)
class Experiment:
    """A folder of runs.

    Attributes:
        folder: where it is.
        about: what ``experiment.json`` says.
        runs: in the order of the tables: methods as in the paper, then variations as in the grid, lengths, seeds.
    """

    folder: Path
    about: dict[str, Any]
    runs: tuple[Run, ...]

    @property
    def bits(self) -> list[int]:
        """Code lengths, ascending; those of methods without a code are not among them."""
        return sorted({run.bits for run in self.runs} - {0}) or [0]

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    @cached_property
    def one_method(self) -> bool:
        """Whether all runs are of one method, those that are yet to be made among them."""
        planned = self.about.get("planned", {}).values()
        return len({run.method for run in self.runs} | {run["method"] for run in planned}) == 1

    @property
    def labelled(self) -> list[str]:
        """What training saw, in the order of the grid; names of the kinds that ``--labelled`` takes."""
        order = [labelled_name(value) for value in self.about["labelled"]]
        found = {run_labelled(run) for run in self.runs}
        return [name for name in order if name in found] + sorted(found - set(order))


@dataclass(frozen=True)
class Missing:
    """What a folder lacks of the runs that were asked for.

    Attributes:
        asked: how many were asked for.
        runs: row of the table (and labels, where there are several kinds) -> the lengths and seeds that are not there.
        outdated: runs that are there, but of other settings, data or versions than were asked for last.
    """

    asked: int
    runs: Mapping[str, tuple[str, ...]]
    outdated: tuple[str, ...]

    @property
    def count(self) -> int:
        return sum(len(of_row) for of_row in self.runs.values())

    @property
    def short(self) -> str:
        """For a caption; empty where nothing is missing."""
        parts = [f"{self.count:,} of {self.asked:,} runs missing"] if self.count else []
        parts += [f"{len(self.outdated):,} out of date"] if self.outdated else []
        return ", ".join(parts)

    def notes(self, most: int = 12) -> list[str]:
        """Lines for a report, that name ``most`` rows."""
        lines = []
        if self.runs:
            rows = [f"{row} ({', '.join(runs)})" for row, runs in self.runs.items()]
            more = f"; and {len(rows) - most:,} rows more" if len(rows) > most else ""
            lines.append(
                f"Not complete: {self.count:,} of {self.asked:,} runs are missing: {'; '.join(rows[:most])}{more}. "
                "Means are over the seeds that are there."
            )
        if self.outdated:
            names = ", ".join(self.outdated[:most]) + (", ..." if len(self.outdated) > most else "")
            lines.append(
                f"Out of date: {len(self.outdated):,} runs are of other settings, data or versions than were asked for last: {names}."
            )
        return lines


def missing_runs(experiment: Experiment) -> Missing:
    """The runs that were asked for and are not there.

    Of runs that the folder does not say of that they were asked for (those of earlier versions), every row should be there at every
    length and seed.
    """
    there = {run.path.stem: str(run.about["identity"]) for run in experiment.runs}
    asked: dict[str, dict[str, Any]] = experiment.about.get("planned", {})
    kinds = {labelled_name(run["labelled"]) for run in asked.values()}
    several = len(kinds | set(experiment.labelled)) > 1
    lacking: dict[str, list[str]] = {}
    methods, variations = list(METHODS), list(experiment.about["variations"])
    in_order = sorted(
        asked.items(),
        key=lambda item: (
            place_in(methods, item[1]["method"]),
            place_in(variations, item[1]["variation"]),
            item[1]["bits"],
            item[1]["seed"],
        ),
    )
    for name, run in in_order:
        if name in there:
            continue
        row = _name(run["method"], run["variation"], experiment.one_method)
        row += f", {labelled_name(run['labelled'])}" if several else ""
        _note(lacking, row, run["bits"], run["seed"])
    outdated = [name for name, run in asked.items() if there.get(name, run["identity"]) != run["identity"]]
    unasked = [run for run in experiment.runs if run.path.stem not in asked]
    places = {
        (run["method"], run["variation"], labelled_name(run["labelled"]), run["bits"], run["seed"])
        for run in asked.values()
    }
    expected, holes = _holes(experiment, unasked, places, several)
    for row, lengths in holes.items():
        lacking.setdefault(row, []).extend(lengths)
    return Missing(
        len(asked) + expected, {row: tuple(lengths) for row, lengths in lacking.items()}, tuple(outdated)
    )


def place_in(names: Sequence[str], name: str) -> int:
    """Where it stands; what is not among them (of another version) comes last."""
    return names.index(name) if name in names else len(names)


def _holes(
    experiment: Experiment, runs: Sequence[Run], asked: Collection[_Cell], several: bool
) -> tuple[int, dict[str, list[str]]]:
    """The number of runs of a full table of the rows of ``runs``, but for those ``asked`` for, and what is not there of it."""
    total, lacking = 0, dict[str, list[str]]()
    lengths, seeds = sorted({run.bits for run in runs} - {0}), sorted({run.seed for run in runs})
    found = {(run.method, run.variation, run_labelled(run), run.bits, run.seed) for run in experiment.runs}
    rows = {(run.method, run.variation, run_labelled(run)): run for run in runs}
    for row, run in rows.items():
        for bits, seed in itertools.product(lengths if run.bits else [0], seeds):
            place = (*row, bits, seed)
            if place in asked:
                continue
            total += 1
            if place not in found:
                name = row_name(experiment, run)
                _note(lacking, f"{name}, {row[2]}" if several else name, bits, seed)
    return total, lacking


def _note(lacking: dict[str, list[str]], row: str, bits: int, seed: int) -> None:
    lacking.setdefault(row, []).append(f"{bits} bits seed {seed}" if bits else f"seed {seed}")


def labelled_name(value: Any) -> str:
    """A ``labelled`` as tables show it."""
    text = "all" if value is None else Path(str(value)).name
    return text.removesuffix("-per-class") + " a class" if text.endswith("-per-class") else text


def run_labelled(run: Run) -> str:
    """See :func:`labelled_name`."""
    return labelled_name(run.about.get("labelled"))


def read_experiment(folder: str | Path, names: Collection[str] = FIGURES) -> Experiment:
    """Read all runs of a folder.

    Args:
        folder: of :func:`gpq_faiss.experiment.run.run_experiment`.
        names: arrays of the runs to read.

    Raises:
        DataError: no experiment there, no finished run, or a damaged one.
        MismatchError: of another version.
    """
    folder = Path(folder)
    about = read_about(folder)
    runs = [read_run(path, names) for path in sorted(folder.glob("*.h5"))]
    if not runs:
        raise DataError(f"{folder} has no finished run{_failures(about)}: make some with gpq experiment run")
    places: dict[tuple[Any, ...], Path] = {}
    for run in runs:
        place_of = (run.method, run.variation, str(run.about.get("labelled")), run.bits, run.seed)
        if place_of in places:
            raise DataError(f"{run.path} is the same run as {places[place_of].name}: delete one of them")
        places[place_of] = run.path
    methods, variations = list(METHODS), list(about["variations"])

    def place(run: Run) -> tuple[Any, ...]:
        order, where = place_in(methods, run.method), place_in(variations, run.variation)
        return order, where, run.variation, run_labelled(run), run.bits, run.seed

    return Experiment(folder, about, tuple(sorted(runs, key=place)))


def _failures(about: dict[str, Any]) -> str:
    failed = about.get("failed", {})
    return f" ({len(failed)} failed)" if failed else ""


def row_name(experiment: Experiment, run: Run) -> str:
    """What the row of a run is called."""
    kept = f" ({run.about['bits_kept']:,} bits an item)" if not run.bits else ""
    return _name(run.method, run.variation, experiment.one_method, kept)


def _name(method: str, variation: str, one_method: bool, kept: str = "") -> str:
    if variation and one_method:
        return variation
    return f"{method}{kept} ({variation})" if variation else f"{method}{kept}"


def row_names(experiment: Experiment) -> list[str]:
    """All rows, in the order of the tables."""
    return list(dict.fromkeys(row_name(experiment, run) for run in experiment.runs))


def column_name(experiment: Experiment, bits: int, labelled: str) -> str:
    """What a column is called: the bits, and the labels where there are several kinds."""
    return str(bits) if len(experiment.labelled) == 1 else f"{bits} bits, {labelled}"


def main_rows(experiment: Experiment, values: Literal["map", "nn10_at_100"] = "map") -> list[dict[str, Any]]:
    """The table of the experiment: a line a row, a column a code length, each a mean and deviation over seeds.

    What keeps no code has one figure for the whole line. Runs of earlier versions have no NN10@100.
    """
    long: list[dict[str, Any]] = [
        {
            "method": row_name(experiment, run),
            "column": column_name(experiment, bits, run_labelled(run)),
            "order": (experiment.labelled.index(run_labelled(run)), bits),
            values: run.map if values == "map" else run.likeness.get(values),
        }
        for run in experiment.runs
        for bits in ([run.bits] if run.bits else experiment.bits)
    ]
    names = row_names(experiment)
    long.sort(key=lambda row: (row["order"], names.index(str(row["method"]))))
    table = pivot(summarise(long, by=["method", "column"], values=[values]), "method", "column", values)
    return sorted(table, key=lambda row: names.index(str(row["method"])))


def depth_rows(experiment: Experiment, bits: int, ks: Sequence[int]) -> list[dict[str, Any]]:
    """Precision and recall at each k, at one code length (and the most labels), means over seeds."""
    labelled = experiment.labelled[-1]
    rows = []
    for run in runs_at(experiment, bits, labelled):
        at = {int(k): i for i, k in enumerate(run.arrays["ks"])}
        rows.append(
            {
                "method": row_name(experiment, run),
                **{f"P@{k}": float(run.arrays["precision"][at[k]]) for k in ks if k in at},
                **{f"R@{k}": float(run.arrays["recall"][at[k]]) for k in ks if k in at},
            }
        )
    values = list(dict.fromkeys(name for row in rows for name in row if name != "method"))
    values.sort(key=lambda name: name[0])
    return summarise(rows, by=["method"], values=values)


def likeness_rows(experiment: Experiment, bits: int) -> list[dict[str, Any]]:
    """NN10@100, the same within the class, and distinct items in tops, at one code length (and the most labels), means over seeds.

    Distinct items as a share of the most that there could be: ten times the queries measured, or the database if that is smaller.
    """
    long = [
        {
            "method": row_name(experiment, run),
            "NN10@100": run.likeness.get("nn10_at_100"),
            "within class": run.likeness.get("within_class"),
            "distinct in tops": _distinct_share(run),
        }
        for run in runs_at(experiment, bits, experiment.labelled[-1])
    ]
    values = ["NN10@100", "within class", "distinct in tops"]
    return summarise(long, by=["method"], values=values)


def _distinct_share(run: Run) -> float | None:
    if not run.likeness:
        return None
    places = min(NEAREST * run.likeness["queries"], run.about["counts"]["database"])
    return float(run.likeness["distinct_in_tops"] / places)


def curve_rows(experiment: Experiment, bits: int, levels: Sequence[float]) -> list[dict[str, Any]]:
    """Interpolated precision at each level of recall, at one code length (and the most labels), means over seeds."""
    rows = []
    for run in runs_at(experiment, bits, experiment.labelled[-1]):
        recall, precision = run.arrays["pr_recall"], run.arrays["pr_precision"]
        at = {level: int(np.abs(recall - level).argmin()) for level in levels}
        rows.append(
            {"method": row_name(experiment, run)}
            | {f"{level:g}": float(precision[i]) for level, i in at.items() if abs(recall[i] - level) < 1e-9}
        )
    values = list(dict.fromkeys(name for row in rows for name in row if name != "method"))
    return summarise(rows, by=["method"], values=values)


def second_rows(experiment: Experiment) -> list[dict[str, Any]]:
    """Seconds of fitting, encoding and ranking a run, over all lengths and seeds."""
    rows = [{"method": row_name(experiment, run), **run.about["seconds"]} for run in experiment.runs]
    return summarise(rows, by=["method"], values=["fit", "encode", "rank"])


def runs_at(experiment: Experiment, bits: int, labelled: str | None = None) -> list[Run]:
    """Runs of a code length (methods without a code among them), in the order of the tables."""
    return [run for run in experiment.runs if run.bits in (0, bits) and labelled in (None, run_labelled(run))]


def mean_curves(
    experiment: Experiment, bits: int, x: str, y: str
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> (x, mean of y over seeds) of two arrays of the runs, at one code length and the most labels."""
    groups: dict[str, list[Run]] = {}
    for run in runs_at(experiment, bits, experiment.labelled[-1]):
        groups.setdefault(row_name(experiment, run), []).append(run)
    curves = {}
    for name, runs in groups.items():
        n = min(len(run.arrays[x]) for run in runs)
        curves[name] = (runs[0].arrays[x][:n], np.mean([run.arrays[y][:n] for run in runs], axis=0))
    return curves
