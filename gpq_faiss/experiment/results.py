"""The runs of a folder as a table: a line per run, from which reports and pictures take means over seeds.

A *row* of a report is a method in one variation; columns are code lengths (and numbers of labels, if several).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..evaluation.likeness import NEAREST
from ..evaluation.tables import summarise
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
        first = self.runs[0].method
        of_first = all(name.startswith(f"{first}_") for name in self.about["planned"])
        return of_first and all(run.method == first for run in self.runs)

    @property
    def labelled(self) -> list[str]:
        """The kinds of labelled set, as :func:`labelled_name` calls them, in the order of the grid."""
        found = {run.about["labelled"] for run in self.runs}
        return [labelled_name(value) for value in self.about["labelled"] if value in found]

    @property
    def over_seeds(self) -> str:
        """The seeds of the figures, for captions."""
        several = f"mean ± deviation over seeds {', '.join(map(str, self.seeds))}"
        return several if len(self.seeds) > 1 else f"seed {self.seeds[0]}"

    @property
    def at(self) -> str:
        """The longest code (and the most labels, if there are several kinds), for captions."""
        return f"{max(self.bits)} bits" + (f", {self.labelled[-1]}" if len(self.labelled) > 1 else "")

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
    def rows(self) -> list[str]:
        """The names of all rows, in the order of the tables."""
        return list(dict.fromkeys(line["method"] for line in self.table))

    @property
    def longest(self) -> list[int]:
        """Positions of the runs at the longest code (and the most labels), and of methods without codes."""
        bits, labelled = (0, max(self.bits)), self.labelled[-1]
        return [
            i for i, line in enumerate(self.table) if line["bits"] in bits and line["labelled"] == labelled
        ]

    def means(self, columns: Sequence[str], *, longest: bool = True) -> list[dict[str, Any]]:
        """A line per row with the means of columns of the table that any run has: of :attr:`longest`, or of all runs."""
        lines = [self.table[i] for i in self.longest] if longest else self.table
        there = [name for name in columns if any(name in line for line in lines)]
        return summarise(lines, by=["method"], values=there)

    def by_length(self, figure: str) -> list[dict[str, Any]]:
        """A line per row with the means of a figure by code length (and labels). A method without codes has one figure for all."""
        several = len(self.labelled) > 1
        columns = {
            (labelled, bits): f"{bits} bits, {labelled}" if several else str(bits)
            for labelled in self.labelled
            for bits in self.bits
        }
        rows = {name: {"method": name, **dict.fromkeys(columns.values())} for name in self.rows}
        for (labelled, bits), column in columns.items():
            lines = [
                line for line in self.table if (line["labelled"], line["bits"] or bits) == (labelled, bits)
            ]
            for found in summarise(lines, ["method"], [figure]):
                rows[found["method"]][column] = found[figure]
        return list(rows.values())


def _figures(run: Run) -> dict[str, Any]:
    about, arrays, like = run.about, run.arrays, run.about["likeness"]
    figures: dict[str, Any] = {
        "bits": run.bits,
        "labelled": labelled_name(about["labelled"]),
        "seed": run.seed,
        "unlabelled": about["counts"]["unlabelled"],
        "database": about["counts"]["database"],
        "mAP": run.map,
    }
    if like:
        # Distinct items in tops are a share of the possible maximum.
        most = min(NEAREST * like["queries"], about["counts"]["database"])
        figures["NN10@100"], figures["within class"] = like["nn10_at_100"], like["within_class"]
        figures["distinct in tops"] = like["distinct_in_tops"] / most
    if "ks" in arrays:
        for letter, name in (("P", "precision"), ("R", "recall")):
            figures |= {f"{letter}@{k}": float(v) for k, v in zip(arrays["ks"], arrays[name], strict=True)}
        curve = zip(arrays["pr_recall"], arrays["pr_precision"], strict=True)
        figures |= {f"{level:g}": float(precision) for level, precision in curve}
    return {**figures, **about["seconds"]}


def position(names: Sequence[str], name: str) -> int:
    """Position of ``name`` in ``names``; last if missing."""
    return names.index(name) if name in names else len(names)


def labelled_name(value: Any) -> str:
    """A value of ``labelled`` as shown in tables: all, a file's name, or such as "20 per class"."""
    text = "all" if value is None else Path(str(value)).name
    return text.removesuffix("-per-class") + " per class" if text.endswith("-per-class") else text


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
        failed = f" ({len(about['failed'])} failed)" if about["failed"] else ""
        raise DataError(f"{folder} has no finished run{failed}: make some with gpq experiment run")
    methods, variations = list(METHODS), list(about["variations"])

    def place(run: Run) -> tuple[Any, ...]:
        method = (position(methods, run.method), run.method)
        labelled = str(run.about["labelled"])
        return *method, position(variations, run.variation), run.variation, labelled, run.bits, run.seed

    runs.sort(key=place)
    for run, following in itertools.pairwise(runs):
        if place(run) == place(following):
            raise DataError(f"{following.path} is the same run as {run.path.name}: delete one of them")
    return Experiment(folder, about, tuple(runs))


def scale_rows(experiment: Experiment) -> list[dict[str, Any]]:
    """A line per method and size: unlabelled items, database, mAP, seconds.

    Sizes beyond those of the data are the same run again, and count once.
    """
    several = ["labelled"] if len(experiment.labelled) > 1 else []
    by = ["method", "bits", *several, "unlabelled", "database"]
    once: dict[str, dict[str, Any]] = {}
    for run, figures in zip(experiment.runs, experiment.table, strict=True):
        seconds = {f"{name} s": value for name, value in run.about["seconds"].items()}
        line = figures | seconds | {"method": run.method}
        once.setdefault(str([line[name] for name in (*by, "labelled", "seed")]), line)

    def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
        labelled = experiment.labelled.index(row["labelled"]) if several else 0
        method = position(list(METHODS), row["method"])
        return method, row["method"], row["bits"], labelled, -row["database"], row["unlabelled"]

    rows = sorted(summarise(list(once.values()), by, ["mAP", "fit s", "encode s", "rank s"]), key=place)
    return [row | {"bits": row["bits"] or "any"} for row in rows]


@dataclass(frozen=True)
class Panel:
    """The mAPs over the weights λ1 and λ2 of a variant of GPQ at one code length and number of labels.

    Attributes:
        name: difference from the other panels; empty for a single one.
        at: for captions.
        values: (λ1, λ2) -> mAP of each seed.
    """

    name: str
    at: str
    values: Mapping[tuple[float, float], Sequence[float]]


def weight_panels(experiment: Experiment) -> list[Panel]:
    """Grids over the weights λ1 and λ2, one per GPQ variant, length and number of labels.

    Raises:
        DataError: no run has these weights.
    """
    groups: dict[tuple[str, int, str], dict[tuple[float, float], list[float]]] = {}
    for run in experiment.runs:
        if run.method in METHODS and METHODS[run.method].module == ".gpq":
            loss = run.about["settings"]["loss"]
            panel = groups.setdefault((run.method, run.bits, labelled_name(run.about["labelled"])), {})
            panel.setdefault((float(loss["lambda1"]), float(loss["lambda2"])), []).append(run.map)
    if not groups:
        raise DataError(f"{experiment.folder}: no run of GPQ, which alone has the weights λ1 and λ2")
    methods, labels = list(METHODS), experiment.labelled
    keys = sorted(groups, key=lambda key: (methods.index(key[0]), key[1], labels.index(key[2])))
    differ = [len(set(values)) > 1 for values in zip(*keys, strict=True)]
    return [
        Panel(
            "-".join(str(part).replace(" ", "-") for part, varies in zip(key, differ, strict=True) if varies),
            "{} at {} bits, {} labelled".format(*key),
            groups[key],
        )
        for key in keys
    ]


@dataclass(frozen=True)
class Missing:
    """What a folder lacks of the runs that were requested.

    Attributes:
        asked: number of requested runs.
        runs: names of those that are not there.
        outdated: names of those with other settings, data or versions than were requested last.
    """

    asked: int
    runs: Sequence[str]
    outdated: Sequence[str]

    @property
    def short(self) -> str:
        """For a caption; empty if nothing is missing."""
        parts = [f"{len(self.runs):,} of {self.asked:,} runs missing"] if self.runs else []
        return ", ".join(parts + ([f"{len(self.outdated):,} out of date"] if self.outdated else []))

    def notes(self, most: int = 30) -> list[str]:
        """Lines for a report, naming at most ``most`` runs."""

        def names(runs: Sequence[str]) -> str:
            return ", ".join(runs[:most]) + (f" and {len(runs) - most:,} more" if len(runs) > most else "")

        missing = (
            f"Not complete: {len(self.runs):,} of {self.asked:,} runs are missing: {names(self.runs)}. Means are over the seeds that "
            "are there."
        )
        outdated = (
            f"Out of date: {len(self.outdated):,} runs have other settings, data or versions than were requested last: "
            f"{names(self.outdated)}."
        )
        return [missing] * bool(self.runs) + [outdated] * bool(self.outdated)


def missing_runs(experiment: Experiment) -> Missing:
    """Compare the runs of the folder with those that were requested."""
    there = {run.path.stem: run.about["identity"] for run in experiment.runs}
    asked = {name: run["identity"] for name, run in experiment.about["planned"].items()}
    outdated = [name for name, identity in asked.items() if there.get(name, identity) != identity]
    return Missing(len(asked), [name for name in asked if name not in there], outdated)
