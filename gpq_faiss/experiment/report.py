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
from typing import Any

from ..config import from_dict
from ..errors import DataError, UsageError
from ..evaluation.tables import Format, render, summarise
from ..methods.measure import NO_NEIGHBOUR_RECALL
from ..methods.registry import METHODS
from .runs import Description, Run, machine_line, read_description, read_run

log = logging.getLogger(__name__)

CURVES = {
    "{:.2f}": ("pr_recall", "pr_precision"),
    "P@{}": ("ks", "precision"),
    "R@{}": ("ks", "recall"),
}
"""Name of a column -> arrays of a run: the values in the name, and the figures of the column."""
_HEADINGS = {"text": "{}\n", "markdown": "## {}\n\n", "latex": "% {}\n"}
_LONGEST = ("P@1", "P@10", "NN10@100")  # columns of the main table, at the longest code
_DEPTH = [f"{letter}@{k}" for letter in "PR" for k in (1, 10, 100, 1000)]
_RECALL = [f"{tenths / 10:.2f}" for tenths in range(1, 11)]

Table = tuple[str, list[dict[str, Any]]]
"""A caption, and the rows of a table."""


@dataclass(frozen=True)
class Experiment:
    """A folder of runs, in the order in which they were planned, which is that of the tables."""

    folder: Path
    description: Description
    runs: tuple[Run, ...]

    @property
    def bits(self) -> list[int]:
        """Code lengths, ascending, without the 0 of methods without codes."""
        return sorted({run.bits for run in self.runs} - {0}) or [0]

    @property
    def seeds(self) -> str:
        """The seeds of the figures, for captions."""
        seeds = ", ".join(map(str, sorted({run.seed for run in self.runs})))
        return f"mean ± deviation over seeds {seeds}" if "," in seeds else f"seed {seeds}"

    def row_name(self, run: Run) -> str:
        """Return the name of the row of a run: its method and variation."""
        size = "" if run.bits else f" ({run.bits_kept:,} bits per item)"
        return f"{run.method}{size}" + (f" ({run.variation})" if run.variation else "")

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """A line for each run with its figures.

        There is mAP also by code length, for which a method without codes has one figure. Precision
        and recall are those at the longest code, and of methods without codes.
        """
        lines = []
        for run in self.runs:
            line = {"method": self.row_name(run), "bits": run.bits, "seed": run.seed}
            line |= {"steps": run.steps, "mAP": run.map, **run.seconds}
            line |= {str(bits): run.map for bits in self.bits if run.bits in (0, bits)}
            if run.bits in (0, self.bits[-1]):
                for column, (x, y) in CURVES.items():
                    points = zip(run.arrays[x], run.arrays[y], strict=True)
                    line |= {column.format(value): float(figure) for value, figure in points}
                line["NN10@100"] = run.neighbour_recall and run.neighbour_recall.nn10_at_100
            lines.append(line)
        return lines

    def means(self, columns: Iterable[str]) -> list[dict[str, Any]]:
        """Return a line for each row with the means of those columns that any run has."""
        present = {name for line in self.table for name in line if line[name] is not None}
        columns = [name for name in columns if name in present]
        return summarise(self.table, by=["method"], values=columns)

    def missing(self) -> list[str]:
        """Return the names of the requested runs that have no file of the requested identity."""
        files = {run.path.stem: run.identity for run in self.runs}
        planned = self.description.planned.items()
        return [name for name, identity in planned if files.get(name) != identity]


def read_experiment(folder: str | Path) -> Experiment:
    """Read all runs of a folder.

    Raises:
        DataError: not an experiment of this version, no finished run, or a damaged one.
    """
    folder = Path(folder)
    description = read_description(folder)
    order = {name: i for i, name in enumerate(description.planned)}
    paths = sorted(folder.glob("*.h5"), key=lambda path: (order.get(path.stem, len(order)), path))
    if not paths:
        raise DataError(f"{folder} has no finished run: make some with gpq experiment run")
    return Experiment(folder, description, tuple(map(read_run, paths)))


def report_experiment(
    folder: str | Path,
    form: Format = "markdown",
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
    experiment = read_experiment(folder)
    tables = tables_of(experiment)
    notes = notes_of(experiment)
    if table is not None and table not in tables:
        raise UsageError(f"no table '{table}' here: choose one of {', '.join(tables)}")
    tables = tables if table is None else {table: tables[table]}
    if form == "json":
        fields = {"method", "variation", "split_hash", "identity"}
        runs = zip(experiment.table, experiment.runs, strict=True)
        value = {
            "experiment": experiment.description.model_dump(
                exclude={"experiment_format", "planned"}
            ),
            "missing": experiment.missing(),
            "notes": notes,
            "tables": {
                name: {"caption": caption, "rows": json.loads(render(rows, "json"))}
                for name, (caption, rows) in tables.items()
            },
            "runs": [line | run.model_dump(include=fields) for line, run in runs],
        }
        return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    texts = [
        _HEADINGS.get(form, "").format(caption) + render(rows, form, digits=4)
        for caption, rows in tables.values()
    ]
    if form == "csv":
        if experiment.missing():  # CSV cannot contain notes
            log.warning("%s: %s", experiment.folder, notes[0])
        return texts[0]
    if form == "latex" or table is not None:
        return "\n".join(texts)
    title = experiment.description.grid["title"]
    if form == "markdown":
        title = f"# {title}"
    # The caption is also below the picture, since readers do not see the alternative text.
    figures = [f"![{text}]({path})\n\n{text}.\n" for text, path in (pictures or {}).items()]
    paragraphs = [f"{note}\n" for note in notes]
    return "\n".join([f"{title}\n", texts[0], *paragraphs, *texts[1:], *figures])


def tables_of(experiment: Experiment) -> dict[str, Table]:
    """Return all tables of the experiment, by name as in ``--table``; the first is the main one."""
    description = experiment.description
    length = f"{experiment.bits[-1]} bits"
    missing = len(experiment.missing())
    # A copied table must say that it is incomplete.
    incomplete = f" ({missing:,} of {len(description.planned):,} runs missing)" if missing else ""
    rows = experiment.means([*map(str, experiment.bits), *_LONGEST])
    steps: dict[str, set[int]] = {}
    for line in experiment.table:
        if line["steps"]:
            steps.setdefault(line["method"], set()).add(line["steps"])
    if len(set().union(*steps.values())) > 1:
        for row in rows:
            row["steps"] = ", ".join(f"{n:,}" for n in sorted(steps.get(row["method"], ()))) or "–"
    tables = {
        "map": (
            f"{description.grid['title']}: {description.data['name']}, {experiment.seeds}; "
            f"{', '.join(_LONGEST)} at {length}",
            rows,
        ),
        "depth": (f"Precision and recall at k, {length}", experiment.means(_DEPTH)),
        "pr": (f"Precision at levels of recall, {length}", experiment.means(_RECALL)),
        "seconds": (
            "Seconds per run, over all lengths and seeds, one thread",
            experiment.means(("fit", "encode", "rank")),
        ),
    }
    return {name: (caption + incomplete, rows) for name, (caption, rows) in tables.items()}


def notes_of(experiment: Experiment) -> list[str]:
    """Return notes on the tables, the first on missing runs if there are any.

    Others are about data, convention, settings, budget, departures from papers, and machine.
    """
    description = experiment.description
    grid = description.grid
    runs = experiment.runs
    counts = runs[0].counts
    missing = experiment.missing()
    settings = f"Rows that do not say otherwise have the preset {grid['preset']}"
    if grid["config"]:
        settings += f", changed by {json.dumps(grid['config'])}"
    if grid["settings"]:
        settings += f", and on the command line by {json.dumps(grid['settings'])}"
    notes = [
        f"{experiment.seeds.capitalize()}. {runs[0].convention}. {description.data['name']}, "
        f"protocol {grid['protocol']}, labelled {grid['labelled'] or 'by the protocol'}: "
        f"{counts['queries']:,} queries, {counts['labelled']:,} labelled and "
        f"{counts['unlabelled']:,} unlabelled items, {counts['database']:,} in the database.",
        f"{settings}.",
        "Data, networks and budget are not the paper's: compare these figures with each other, not "
        "with its tables.",
    ]
    if missing:
        notes.insert(
            0,
            f"Not complete: {len(missing):,} of {len(description.planned):,} runs are missing, or "
            "are of other settings, data or versions than requested last: "
            f"{', '.join(missing)}. Means are over the seeds that are there.",
        )
    for run in runs:
        name = experiment.row_name(run)
        recall = run.neighbour_recall
        notes.append(f"{recall.definition if recall else NO_NEIGHBOUR_RECALL}.")
        training = run.settings.get("training")
        entry = METHODS.get(run.method)
        if training is not None:
            unlabelled = f" and {training['batch_unlabelled']:,} unlabelled"
            notes.append(
                f"{name}: {run.steps:,} steps of up to {training['batch_labelled']:,} labelled"
                f"{unlabelled * run.uses_unlabelled} items, learning "
                f"rate {training['learning_rate']:g} ({from_dict(run.settings).schedule})."
            )
        if entry and entry.departs:
            notes.append(f"{run.method} departs from its paper: {entry.departs}.")
        if run.bits not in (0, run.bits_kept):
            notes.append(
                f"{name} has {run.bits_kept} bits per item where {run.bits} are requested."
            )
    return list(dict.fromkeys([*notes, *(machine_line(run.machine) for run in runs)]))
