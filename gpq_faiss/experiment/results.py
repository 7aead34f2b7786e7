"""Tables of the runs of a folder.

A *row* of a table is a method in one variation; columns are code lengths (and numbers of labels, if several); values are means and
standard deviations over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


@dataclass(frozen=True)
class Experiment:
    """A folder of runs.

    Attributes:
        folder: its path.
        about: contents of ``experiment.json``.
        runs: in the order of the tables: methods as in the paper, then variations as in the grid, labels, lengths, seeds.
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
        planned = self.about["planned"].values()
        return len({run.method for run in self.runs} | {run["method"] for run in planned}) == 1

    @property
    def labelled(self) -> list[str]:
        """The kinds of labelled set, as :func:`labelled_name` calls them, in the order of the grid."""
        order = [labelled_name(value) for value in self.about["labelled"]]
        found = {run_labelled(run) for run in self.runs}
        return [name for name in order if name in found] + sorted(found - set(order))

    def over_seeds(self) -> str:
        """The seeds of the figures, for captions."""
        seeds = self.seeds
        if len(seeds) == 1:
            return f"seed {seeds[0]}"
        return f"mean ± deviation over seeds {', '.join(map(str, seeds))}"


@dataclass(frozen=True)
class Missing:
    """Requested runs that are not in the folder.

    Attributes:
        asked: number of requested runs.
        runs: row of the table (and labels, if several kinds) -> missing lengths and seeds.
        outdated: runs with other settings, data or versions than last requested.
    """

    asked: int
    runs: Mapping[str, tuple[str, ...]]
    outdated: tuple[str, ...]

    @property
    def count(self) -> int:
        return sum(len(of_row) for of_row in self.runs.values())

    @property
    def short(self) -> str:
        """For a caption; empty if nothing is missing."""
        parts = [f"{self.count:,} of {self.asked:,} runs missing"] if self.count else []
        parts += [f"{len(self.outdated):,} out of date"] if self.outdated else []
        return ", ".join(parts)

    def notes(self, most: int = 12) -> list[str]:
        """Lines for a report, naming at most ``most`` rows."""
        lines = []
        if self.runs:
            rows = [f"{row} ({', '.join(runs)})" for row, runs in self.runs.items()]
            more = f"; and {len(rows) - most:,} more rows" if len(rows) > most else ""
            lines.append(
                f"Not complete: {self.count:,} of {self.asked:,} runs are missing: {'; '.join(rows[:most])}{more}. "
                "Means are over the seeds that are there."
            )
        if self.outdated:
            names = ", ".join(self.outdated[:most]) + (", ..." if len(self.outdated) > most else "")
            lines.append(
                f"Out of date: {len(self.outdated):,} runs have other settings, data or versions than were requested last: {names}."
            )
        return lines


def missing_runs(experiment: Experiment) -> Missing:
    """Compare the runs of the folder with those that were requested."""
    there = {run.path.stem: str(run.about["identity"]) for run in experiment.runs}
    asked: dict[str, dict[str, Any]] = experiment.about["planned"]
    kinds = {labelled_name(run["labelled"]) for run in asked.values()}
    several = len(kinds | set(experiment.labelled)) > 1
    methods, variations = list(METHODS), list(experiment.about["variations"])
    lacking: dict[str, list[str]] = {}
    absent = [run for name, run in asked.items() if name not in there]
    for run in sorted(
        absent,
        key=lambda run: (
            position(methods, run["method"]),
            position(variations, run["variation"]),
            run["bits"],
            run["seed"],
        ),
    ):
        row = _name(run["method"], run["variation"], experiment.one_method)
        row += f", {labelled_name(run['labelled'])}" if several else ""
        length = f"{run['bits']} bits " if run["bits"] else ""
        lacking.setdefault(row, []).append(f"{length}seed {run['seed']}")
    outdated = [name for name, run in asked.items() if there.get(name, run["identity"]) != run["identity"]]
    return Missing(len(asked), {row: tuple(runs) for row, runs in lacking.items()}, tuple(outdated))


def position(names: Sequence[str], name: str) -> int:
    """Position of ``name`` in ``names``; last if missing."""
    return names.index(name) if name in names else len(names)


def labelled_name(value: Any) -> str:
    """A value of ``labelled`` as shown in tables: all, a file's name, or such as "20 per class"."""
    text = "all" if value is None else Path(str(value)).name
    return text.removesuffix("-per-class") + " per class" if text.endswith("-per-class") else text


def run_labelled(run: Run) -> str:
    """See :func:`labelled_name`."""
    return labelled_name(run.about["labelled"])


def read_experiment(folder: str | Path, names: Collection[str] = FIGURES) -> Experiment:
    """Read all runs of a folder.

    Args:
        folder: of :func:`gpq_faiss.experiment.run.run_experiment`.
        names: arrays of the runs to read.

    Raises:
        DataError: not an experiment, no finished run, or a damaged one.
        MismatchError: of another version.
    """
    folder = Path(folder)
    about = read_about(folder)
    runs = [read_run(path, names) for path in sorted(folder.glob("*.h5"))]
    if not runs:
        raise DataError(f"{folder} has no finished run{_failures(about)}: make some with gpq experiment run")
    seen: dict[tuple[Any, ...], Path] = {}
    for run in runs:
        key = (run.method, run.variation, str(run.about["labelled"]), run.bits, run.seed)
        if key in seen:
            raise DataError(f"{run.path} is the same run as {seen[key].name}: delete one of them")
        seen[key] = run.path
    methods, variations = list(METHODS), list(about["variations"])

    def order(run: Run) -> tuple[Any, ...]:
        method, variation = position(methods, run.method), position(variations, run.variation)
        return method, variation, run.variation, run_labelled(run), run.bits, run.seed

    return Experiment(folder, about, tuple(sorted(runs, key=order)))


def _failures(about: dict[str, Any]) -> str:
    failed = about["failed"]
    return f" ({len(failed)} failed)" if failed else ""


def row_name(experiment: Experiment, run: Run) -> str:
    """The name of a run's row."""
    kept = f" ({run.about['bits_kept']:,} bits per item)" if not run.bits else ""
    return _name(run.method, run.variation, experiment.one_method, kept)


def _name(method: str, variation: str, one_method: bool, kept: str = "") -> str:
    if variation and one_method:
        return variation
    return f"{method}{kept} ({variation})" if variation else f"{method}{kept}"


def row_names(experiment: Experiment) -> list[str]:
    """All rows, in the order of the tables."""
    return list(dict.fromkeys(row_name(experiment, run) for run in experiment.runs))


def column_name(experiment: Experiment, bits: int, labelled: str) -> str:
    """The name of a column: the bits, and the labels if there are several kinds."""
    return str(bits) if len(experiment.labelled) == 1 else f"{bits} bits, {labelled}"


def main_rows(experiment: Experiment, values: Literal["map", "nn10_at_100"] = "map") -> list[dict[str, Any]]:
    """The table of the experiment: one line per row, one column per code length, each a mean and deviation over seeds.

    A method without codes has one figure for the whole row.
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


def _means(
    experiment: Experiment, runs: Iterable[Run], figures: Callable[[Run], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One line per row: means and standard deviations over seeds of the ``figures`` of a run."""
    rows = [{"method": row_name(experiment, run), **figures(run)} for run in runs]
    values = dict.fromkeys(name for row in rows for name in row if name != "method")
    return summarise(rows, by=["method"], values=list(values))


def depth_rows(experiment: Experiment, bits: int, ks: Sequence[int]) -> list[dict[str, Any]]:
    """Precision and recall at each k, at one code length (and the most labels), means over seeds."""

    def figures(run: Run) -> dict[str, float]:
        at = {int(k): i for i, k in enumerate(run.arrays["ks"])}
        both = (("P", run.arrays["precision"]), ("R", run.arrays["recall"]))
        return {f"{letter}@{k}": float(values[at[k]]) for letter, values in both for k in ks if k in at}

    rows = _means(experiment, runs_at(experiment, bits, experiment.labelled[-1]), figures)
    # Precision first, even if some runs have more k than others.
    return [{name: row[name] for name in sorted(row, key=lambda name: "mPR".index(name[0]))} for row in rows]


def likeness_rows(experiment: Experiment, bits: int) -> list[dict[str, Any]]:
    """NN10@100, the same within the class, and distinct items in tops, at one code length (and the most labels), means over seeds.

    Distinct items are a share of the possible maximum: ten times the number of queries, or the database if smaller.
    """

    def figures(run: Run) -> dict[str, float | None]:
        found = run.likeness
        if not found:
            return dict.fromkeys(("NN10@100", "within class", "distinct in tops"))
        most = min(NEAREST * found["queries"], run.about["counts"]["database"])
        return {
            "NN10@100": found["nn10_at_100"],
            "within class": found["within_class"],
            "distinct in tops": float(found["distinct_in_tops"] / most),
        }

    return _means(experiment, runs_at(experiment, bits, experiment.labelled[-1]), figures)


def curve_rows(experiment: Experiment, bits: int, levels: Sequence[float]) -> list[dict[str, Any]]:
    """Interpolated precision at each level of recall, at one code length (and the most labels), means over seeds."""

    def figures(run: Run) -> dict[str, float]:
        recall, precision = run.arrays["pr_recall"], run.arrays["pr_precision"]
        at = {level: int(np.abs(recall - level).argmin()) for level in levels}
        return {f"{level:g}": float(precision[i]) for level, i in at.items() if abs(recall[i] - level) < 1e-9}

    return _means(experiment, runs_at(experiment, bits, experiment.labelled[-1]), figures)


def second_rows(experiment: Experiment) -> list[dict[str, Any]]:
    """Seconds of fitting, encoding and ranking of a run, over all lengths and seeds."""
    return _means(experiment, experiment.runs, lambda run: run.about["seconds"])


def runs_at(experiment: Experiment, bits: int, labelled: str | None = None) -> list[Run]:
    """Runs of a code length, and of methods without codes, in the order of the tables."""
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
