"""Tables of an experiment, derived only from the files of its runs, as means over seeds.

A *row* of a report is a method in one variation; columns are code lengths.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from ..config import from_dict
from ..errors import DataError, UsageError
from ..evaluation.tables import render, summarise
from ..methods.measure import NO_LIKENESS
from ..methods.registry import METHODS
from .runs import About, Run, machine_line, read_about, read_run

log = logging.getLogger(__name__)

Form = Literal["text", "markdown", "latex", "csv", "json"]
KS = (1, 10, 100, 1000)
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Recall levels in the table of the precision-recall curve."""
CURVES = {
    "{:.2f}": ("pr_recall", "pr_precision"),
    "P@{}": ("ks", "precision"),
    "R@{}": ("ks", "recall"),
}
"""Columns of a table -> arrays of a run: what the columns are named by, and their figures."""
_MOST_NAMED = 30  # missing runs


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


@dataclass(frozen=True)
class Table:
    """One table of a report; ``head`` is the header of its first column."""

    caption: str
    rows: list[dict[str, Any]]
    head: str
    digits: int = 4

    def text(self, form: Form, *, caption: bool = True) -> str:
        """Render the table; CSV and JSON have all digits."""
        shown = self.caption if caption and form in ("text", "latex") else None
        return render(self.rows, form, headers={"method": self.head}, digits=self.digits, caption=shown)


def report_experiment(
    folder: str | Path,
    form: Form = "markdown",
    *,
    table: str | None = None,
    pictures: Mapping[str, str] | None = None,
) -> str:
    """Report on a folder of runs.

    Args:
        folder: folder of the experiment.
        form: ``text`` and ``markdown`` are a page, ``latex`` all tables, ``json`` all tables and all runs, ``csv`` one table.
        table: only this table; for CSV the default is the first.
        pictures: caption -> path, shown on a Markdown page.

    Raises:
        UsageError: an unknown form, or a table that this experiment does not have.
        DataError: not an experiment, no finished run, or a damaged one.
    """
    if form not in get_args(Form):
        raise UsageError(f"format {form!r}: choose one of {', '.join(get_args(Form))}")
    experiment = read_experiment(folder)
    tables = tables_of(experiment)
    if table is not None:
        if table not in tables:
            raise UsageError(f"no table '{table}' here: choose one of {', '.join(tables)}")
        tables = {table: tables[table]}
    first, *others = tables.values()
    missing = _missing(experiment)
    if form == "csv":
        for line in missing:  # CSV cannot contain notes
            log.warning("%s: %s", experiment.folder, line)
        return first.text("csv")
    if form == "latex":
        return "\n".join(t.text("latex") for t in tables.values())
    if form == "json":
        rows = {k: {"caption": t.caption, "rows": json.loads(t.text("json"))} for k, t in tables.items()}
        value = {
            "experiment": experiment.about.model_dump(exclude={"experiment_format", "planned"}),
            "missing": experiment.missing(),
            "notes": notes_of(experiment),
            "tables": rows,
            "runs": [
                line | run.model_dump(include={"method", "variation", "split_hash", "identity"})
                for line, run in zip(experiment.table, experiment.runs, strict=True)
            ],
        }
        return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if table is not None:
        return first.text(form) + "".join(f"\n{line}\n" for line in missing)
    marks = form == "markdown"
    parts = [f"{'# ' * marks}{experiment.about.title}\n", first.text(form, caption=False)]
    parts += [f"{line}\n" for line in notes_of(experiment)]
    for other in others:
        parts += [f"## {other.caption}\n"] * marks + [other.text(form)]
    if marks:
        # The caption is also below the picture, since readers do not see the alternative text.
        parts += [f"![{caption}]({path})\n\n{caption}.\n" for caption, path in (pictures or {}).items()]
    return "\n".join(parts)


def tables_of(experiment: Experiment) -> dict[str, Table]:
    """All tables of the experiment, by name as in ``--table``; the first is the main one."""
    about, at, missing = experiment.about, experiment.at, len(experiment.missing())
    # A copied table must itself tell that it is incomplete.
    short = f" ({missing:,} of {len(about.planned):,} runs missing)" if missing else ""
    caption = f"{about.title}: {about.data.name}, {experiment.over_seeds}"
    rows = experiment.means(map(str, experiment.bits), longest=False)
    likeness = {row["method"]: row["NN10@100"] for row in experiment.means(["NN10@100"]) if len(row) > 1}
    if likeness:
        rows = [row | {"NN10@100": likeness.get(row["method"])} for row in rows]
        caption += f"; NN10@100 at {at}"
    depth = experiment.means(f"{letter}@{k}" for letter in "PR" for k in KS)
    curve = experiment.means(f"{level:.2f}" for level in LEVELS)
    seconds = experiment.means(("fit", "encode", "rank"), longest=False)
    return {
        "map": Table(caption + short, rows, "bits"),
        "depth": Table(f"Precision and recall at k, {at}{short}", depth, "k"),
        "pr": Table(f"Precision at levels of recall, {at}{short}", curve, "recall"),
        "seconds": Table(
            f"Seconds per run, over all lengths and seeds, one thread{short}", seconds, "", digits=1
        ),
    }


def _missing(experiment: Experiment) -> list[str]:
    """A line that names the missing runs, if there are any."""
    missing, total = experiment.missing(), len(experiment.about.planned)
    more = f" and {len(missing) - _MOST_NAMED:,} more" if len(missing) > _MOST_NAMED else ""
    return [
        f"Not complete: {len(missing):,} of {total:,} runs are missing, or are of other settings, data or versions than requested last: "
        f"{', '.join(missing[:_MOST_NAMED])}{more}. Means are over the seeds that are there."
    ] * bool(missing)


def notes_of(experiment: Experiment) -> list[str]:
    """Notes for the tables: missing runs, data, convention, budget, differences from the papers, machine."""
    about, runs, over = experiment.about, experiment.runs, experiment.over_seeds
    counts = runs[0].counts
    differ = any(run.counts != counts for run in runs)
    there = {run.method for run in runs}
    departures = [f"{k}: {entry.departs}" for k, entry in METHODS.items() if k in there and entry.departs]
    notes = [
        *_missing(experiment),
        f"{over[0].upper()}{over[1:]}. {runs[0].convention}. {about.data.name}, protocol {about.protocol}, labelled "
        f"{about.labelled or 'by the protocol'}: {counts.queries:,} queries, {counts.labelled:,} labelled and "
        f"{counts.unlabelled:,} unlabelled items, {counts.database:,} in the database"
        + (" (of the first run)." if differ else "."),
        *(f"{run.likeness.definition if run.likeness else NO_LIKENESS}." for run in runs),
        *_trainings(experiment),
        "Data, networks and budget are not the paper's: compare these figures with each other, not with its tables.",
        *([f"Departures from their papers that count: {'; '.join(departures)}."] if departures else []),
        *(
            f"{experiment.row_name(run)} has {run.bits_kept} bits per item where {run.bits} are requested."
            for run in runs
            if run.bits and run.bits != run.bits_kept
        ),
        *(f"{name} has no row: {why}." for name, why in about.left_out.items()),
        *(machine_line(run.machine, run.versions) for run in runs),
    ]
    return list(dict.fromkeys(notes))


def _trainings(experiment: Experiment) -> list[str]:
    """The preset with its changes by the command, and steps, batches and rates of the trained methods."""
    rows_of: dict[str, dict[str, None]] = {}
    for run in experiment.runs:
        if "training" in run.settings:
            t = run.settings["training"]
            text = (
                f"{run.steps:,} steps of up to {t['batch_labelled']:,} labelled items, and up to {t['batch_unlabelled']:,} "
                f"unlabelled ones for those that use them, learning rate {t['learning_rate']:g} ({from_dict(run.settings).schedule})"
            )
            rows_of.setdefault(text, {})[experiment.row_name(run)] = None
    if not rows_of:
        return []
    config = experiment.about.config.items()
    changed = [f"{part}.{k} = {v}" for part, of in config if isinstance(of, dict) for k, v in of.items()]
    usual = max(rows_of, key=lambda text: len(rows_of[text]))
    return [
        f"Rows that do not say otherwise have the settings of the preset {experiment.about.preset}"
        + (f", with {', '.join(changed)}." if changed else "."),
        f"Trained methods have {usual}{', except those named next' if len(rows_of) > 1 else ''}; all have the same split and data.",
        *(f"{', '.join(names)}: {text}." for text, names in rows_of.items() if text != usual),
    ]
