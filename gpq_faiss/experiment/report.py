"""Tables of an experiment, as means over seeds of one table of runs.

A *row* of a report is a method in one variation; columns are code lengths.
"""

from __future__ import annotations

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
from ..methods.measure import NO_NEIGHBOUR_RECALL
from ..methods.registry import METHODS
from .runs import Description, Run, machine_line, read_description, read_run

log = logging.getLogger(__name__)

Form = Literal["text", "markdown", "latex", "csv", "json"]
CURVES = {
    "{:.2f}": ("pr_recall", "pr_precision"),
    "P@{}": ("ks", "precision"),
    "R@{}": ("ks", "recall"),
}
"""Name of a column -> arrays of a run: the values in the name, and the figures of the column."""
_BESIDE_MAP = ("P@1", "P@10", "NN10@100")  # columns of the main table, at the longest code
_DEPTH = [f"{letter}@{k}" for letter in "PR" for k in (1, 10, 100, 1000)]
_RECALL = [f"{tenths / 10:.2f}" for tenths in range(1, 11)]
_MAX_NAMED = 30  # missing runs in a note


@dataclass(frozen=True)
class Experiment:
    """A folder of runs, in the order of the tables.

    The order is that of methods in the paper, variations in the grid, lengths, and seeds.
    """

    folder: Path
    description: Description
    runs: tuple[Run, ...]

    @property
    def bits(self) -> list[int]:
        """Code lengths, ascending, without the 0 of methods without codes."""
        return sorted({run.bits for run in self.runs} - {0}) or [0]

    @property
    def seeds(self) -> list[int]:
        """Seeds, ascending."""
        return sorted({run.seed for run in self.runs})

    def row_name(self, run: Run) -> str:
        """Return the name of the row of a run: its variation if there is only one method."""
        planned = {name.partition("_")[0] for name in self.description.planned}
        if run.variation and planned | {each.method for each in self.runs} == {run.method}:
            return run.variation
        size = "" if run.bits else f" ({run.bits_kept:,} bits per item)"
        return f"{run.method}{size}" + (f" ({run.variation})" if run.variation else "")

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """A line for each run with all its figures.

        There is mAP also by code length, for which a method without codes has one figure.
        """
        lines = []
        for run in self.runs:
            line = {"method": self.row_name(run), "bits": run.bits, "seed": run.seed}
            line |= {str(bits): run.map for bits in self.bits if run.bits in (0, bits)}
            line |= {"mAP": run.map, **run.seconds}
            if run.neighbour_recall:
                line["NN10@100"] = run.neighbour_recall.nn10_at_100
            for column, (x, y) in CURVES.items():
                points = zip(run.arrays[x], run.arrays[y], strict=True)
                line |= {column.format(value): float(figure) for value, figure in points}
            lines.append(line)
        return lines

    def means(self, columns: Iterable[str], *, longest: bool = True) -> list[dict[str, Any]]:
        """Return a line for each row with the means of those columns that any run has.

        They are means over the runs at the longest code and those without codes, or over all runs.
        """
        lines = [line for line in self.table if not longest or line["bits"] in (0, self.bits[-1])]
        columns = [name for name in columns if any(name in line for line in lines)]
        return summarise(lines, by=["method"], values=columns)

    def missing(self) -> list[str]:
        """Return the names of the requested runs that have no file of the requested identity."""
        files = {run.path.stem: run.identity for run in self.runs}
        planned = self.description.planned.items()
        return [name for name, (_, identity) in planned if files.get(name) != identity]


def read_experiment(folder: str | Path) -> Experiment:
    """Read all runs of a folder.

    Raises:
        DataError: not an experiment of this version, no finished run, or a damaged one.
    """
    folder = Path(folder)
    description = read_description(folder)
    runs = [read_run(path) for path in sorted(folder.glob("*.h5"))]
    if not runs:
        raise DataError(f"{folder} has no finished run: make some with gpq experiment run")
    # Methods and variations that are no longer there come last.
    methods = {name: i for i, name in enumerate(METHODS)}
    variations = {name: i for i, name in enumerate(description.variations)}
    runs.sort(
        key=lambda run: (
            methods.get(run.method, len(methods)),
            run.method,
            variations.get(run.variation, len(variations)),
            run.variation,
            run.bits,
            run.seed,
        )
    )
    return Experiment(folder, description, tuple(runs))


@dataclass(frozen=True)
class Table:
    """One table of a report; ``head`` is the header of its first column."""

    caption: str
    rows: list[dict[str, Any]]
    head: str
    digits: int = 4

    def text(self, form: Form, *, caption: bool = True) -> str:
        """Render the table; CSV and JSON have all digits."""
        headers = {"method": self.head}
        above = f"{self.caption}\n" if caption and form in ("text", "latex") else ""
        return above + render(self.rows, form, headers=headers, digits=self.digits)


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
        form: ``text`` and ``markdown`` are a page, ``latex`` all tables, ``json`` all tables and
            all runs, ``csv`` one table.
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
        if missing:  # CSV cannot contain notes
            log.warning("%s: %s", experiment.folder, missing)
        return first.text("csv")
    if form == "latex":
        return "\n".join(table.text("latex") for table in tables.values())
    if form == "json":
        return _json(experiment, tables)
    if table is not None:
        return first.text(form) + (f"\n{missing}\n" if missing else "")
    mark = "#" if form == "markdown" else ""
    parts = [f"{mark} {experiment.description.grid['title']}\n".lstrip()]
    parts += [first.text(form, caption=False), *(f"{line}\n" for line in notes_of(experiment))]
    for below in others:
        parts += [f"## {below.caption}\n", below.text(form)] if mark else [below.text(form)]
    for caption, path in (pictures or {}).items() if mark else ():
        # The caption is also below the picture, since readers do not see the alternative text.
        parts.append(f"![{caption}]({path})\n\n{caption}.\n")
    return "\n".join(parts)


def _json(experiment: Experiment, tables: Mapping[str, Table]) -> str:
    """Return all tables and all runs as JSON."""
    stated = {"method", "variation", "split_hash", "identity", "steps"}
    runs = zip(experiment.table, experiment.runs, strict=True)
    value = {
        "experiment": experiment.description.model_dump(exclude={"experiment_format", "planned"}),
        "missing": experiment.missing(),
        "notes": notes_of(experiment),
        "tables": {
            name: {"caption": table.caption, "rows": json.loads(table.text("json"))}
            for name, table in tables.items()
        },
        "runs": [line | run.model_dump(include=stated) for line, run in runs],
    }
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def tables_of(experiment: Experiment) -> dict[str, Table]:
    """Return all tables of the experiment, by name as in ``--table``; the first is the main one."""
    description, length = experiment.description, f"{experiment.bits[-1]} bits"
    missing, total = len(experiment.missing()), len(description.planned)
    # A copied table must say that it is incomplete.
    short = f" ({missing:,} of {total:,} runs missing)" if missing else ""
    rows = experiment.means(map(str, experiment.bits), longest=False)
    figures = {row["method"]: row for row in experiment.means(_BESIDE_MAP)}
    rows = [row | figures.get(row["method"], {}) for row in rows]
    steps: dict[str, set[str]] = {}
    for run in experiment.runs:
        steps.setdefault(experiment.row_name(run), set()).add(
            f"{run.steps:,}" if run.steps else "–"
        )
    if len(set().union(*steps.values()) - {"–"}) > 1:
        rows = [row | {"steps": ", ".join(sorted(steps[row["method"]]))} for row in rows]
    beside = [name for name in _BESIDE_MAP if any(name in row for row in rows)]
    title, data = description.grid["title"], description.data["name"]
    caption = f"{title}: {data}, {_seeds(experiment)}; {', '.join(beside)} at {length}{short}"
    depth, curve = experiment.means(_DEPTH), experiment.means(_RECALL)
    seconds = experiment.means(("fit", "encode", "rank"), longest=False)
    time = f"Seconds per run, over all lengths and seeds, one thread{short}"
    return {
        "map": Table(caption, rows, "bits"),
        "depth": Table(f"Precision and recall at k, {length}{short}", depth, "k"),
        "pr": Table(f"Precision at levels of recall, {length}{short}", curve, "recall"),
        "seconds": Table(time, seconds, "", digits=1),
    }


def _seeds(experiment: Experiment) -> str:
    """Return the seeds of the figures, for captions."""
    seeds = ", ".join(map(str, experiment.seeds))
    return f"mean ± deviation over seeds {seeds}" if "," in seeds else f"seed {seeds}"


def _missing(experiment: Experiment) -> str:
    """Return a line that names the missing runs; empty if there are none."""
    missing = experiment.missing()
    surplus = len(missing) - _MAX_NAMED
    names = ", ".join(missing[:_MAX_NAMED]) + (f" and {surplus:,} more" if surplus > 0 else "")
    line = (
        f"Not complete: {len(missing):,} of {len(experiment.description.planned):,} runs are "
        "missing, or are of other settings, data or versions than requested last: "
        f"{names}. Means are over the seeds that are there."
    )
    return line if missing else ""


def notes_of(experiment: Experiment) -> list[str]:
    """Return notes on the tables.

    They are about missing runs, data, convention, budget, departures from papers, and machine.
    """
    grid, data, runs = experiment.description.grid, experiment.description.data, experiment.runs
    counts, seeds = runs[0].counts, _seeds(experiment)
    notes = [
        _missing(experiment),
        f"{seeds[0].upper()}{seeds[1:]}. {runs[0].convention}. {data['name']}, protocol "
        f"{grid['protocol']}, labelled {grid['labelled'] or 'by the protocol'}: "
        f"{counts['queries']:,} queries, {counts['labelled']:,} labelled and "
        f"{counts['unlabelled']:,} unlabelled items, {counts['database']:,} in the database.",
    ]
    for run in runs:
        recall = run.neighbour_recall
        notes.append(f"{recall.definition if recall else NO_NEIGHBOUR_RECALL}.")
    notes += _trainings(experiment)
    notes.append(
        "Data, networks and budget are not the paper's: compare these figures with each other, not "
        "with its tables."
    )
    entries = {run.method: METHODS[run.method] for run in runs if run.method in METHODS}
    departures = [f"{name}: {entry.departs}" for name, entry in entries.items() if entry.departs]
    if departures:
        notes.append(f"Departures from their papers that count: {'; '.join(departures)}.")
    for run in runs:
        if run.bits and run.bits != run.bits_kept:
            name = experiment.row_name(run)
            notes.append(
                f"{name} has {run.bits_kept} bits per item where {run.bits} are requested."
            )
    left_out = experiment.description.left_out.items()
    notes += [f"{name} has no row: {reason}." for name, reason in left_out]
    notes += [machine_line(run.machine) for run in runs]
    return list(filter(None, dict.fromkeys(notes)))


def _trainings(experiment: Experiment) -> list[str]:
    """Return lines on the preset and its changes, and on steps, batches and rates by row."""
    grid, rows = experiment.description.grid, dict[str, dict[str, None]]()
    for run in experiment.runs:
        if training := run.settings.get("training"):
            text = (
                f"{run.steps:,} steps of up to {training['batch_labelled']:,} labelled items, and "
                f"up to {training['batch_unlabelled']:,} unlabelled ones for those that use them, "
                f"learning rate {training['learning_rate']:g} "
                f"({from_dict(run.settings).schedule})"
            )
            rows.setdefault(text, {})[experiment.row_name(run)] = None
    changes = [
        f", with {section} = {json.dumps(values)}"
        for config in (grid["config"], grid["settings"])
        for section, values in config.items()
    ]
    usual = max(rows, key=lambda text: len(rows[text]), default="")
    notes = [
        f"Rows that do not say otherwise have the settings of the preset {grid['preset']}"
        f"{''.join(changes)}.",
        f"Trained methods have {usual}; all have the same split and data.",
        *(f"{', '.join(names)}: {text}." for text, names in rows.items() if text != usual),
    ]
    return notes if rows else []
