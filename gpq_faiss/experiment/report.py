"""Tables of an experiment, derived only from the files of its runs."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..config import COMMITTEE_RATE, CONVOLUTION_RATE
from ..data.base import Dataset
from ..errors import UsageError
from ..evaluation.tables import Spread, render
from ..files import check_output
from ..methods.measure import NO_LIKENESS
from ..methods.registry import METHODS
from ..report import html
from .pictures import draw_experiment
from .results import (
    Experiment,
    Panel,
    labelled_name,
    missing_runs,
    position,
    read_experiment,
    scale_rows,
    weight_panels,
)
from .runfile import Run

log = logging.getLogger(__name__)

Form = Literal["text", "markdown", "latex", "csv", "json"]
KS = (1, 10, 100, 1000)
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Recall levels in the table of the precision-recall curve."""
_Published = Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class Table:
    """One table of a report.

    Attributes:
        name: as in ``--table``: ``map``, ``published``, ``likeness``, ``depth``, ``pr``, ``seconds``, ``grid``, ``scale``.
        caption: a sentence.
        rows: for :func:`gpq_faiss.evaluation.tables.render`.
        head: header of the first column.
        digits: number of decimals.
    """

    name: str
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
    published: _Published | None = None,
    pictures: Mapping[str, str] | None = None,
) -> str:
    """Report on a folder of runs.

    Args:
        folder: folder of the experiment.
        form: ``text`` and ``markdown`` are a page, ``latex`` all tables, ``json`` all tables and all runs, ``csv`` one table.
        table: only this table; for CSV the default is the first.
        published: published figures to compare with.
        pictures: caption -> path, shown on a Markdown page.

    Raises:
        UsageError: an unknown form, or a table that this experiment does not have.
        DataError: not an experiment, no finished run, or a damaged one.
    """
    if form not in get_args(Form):
        raise UsageError(f"format {form!r}: choose one of {', '.join(get_args(Form))}")
    experiment = read_experiment(folder)
    tables = tables_of(experiment, published or {})
    if table is not None:
        names = [t.name for t in tables]
        if table not in names:
            raise UsageError(f"no table '{table}' here: choose one of {', '.join(names)}")
        tables = [tables[names.index(table)]]
    missing = missing_runs(experiment).notes()
    if form == "csv":
        for line in missing:  # CSV cannot contain notes
            log.warning("%s: %s", experiment.folder, line)
        return tables[0].text("csv")
    if form == "latex":
        return "\n".join(t.text("latex") for t in tables)
    if form == "json":
        return _json(experiment, tables)
    if table is not None:
        return tables[0].text(form) + "".join(f"\n{line}\n" for line in missing)
    return _page(experiment, tables, form, pictures or {})


def save_report_page(
    folder: str | Path,
    out: str | Path,
    *,
    published: _Published | None = None,
    images: Dataset | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the report of a folder of runs as a self-contained HTML page: tables, notes and pictures.

    Args:
        folder: folder of the experiment.
        out: the page, .html.
        published: published figures to compare with.
        images: images of the data, for galleries.
        overwrite: replace an existing file.

    Raises:
        UsageError: another extension.
        DataError: not an experiment, no finished run, or a damaged one.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if Path(out).suffix.lower() != ".html":
        raise UsageError(f"--out {out}: a page ends in .html")
    check_output(out, overwrite=overwrite)
    experiment = read_experiment(folder)
    parts = []
    for i, table in enumerate(tables_of(experiment, published or {})):
        parts += [html.heading(table.caption)] * bool(i) + [html.table(table.rows, table.digits)]
        parts += [] if i else map(html.note, notes_of(experiment))
    with tempfile.TemporaryDirectory() as place:
        for caption, path in draw_experiment(folder, place, images=images, ending="svg").items():
            parts += [html.heading(caption), html.plot(path)]
    return html.save_page(experiment.about["title"], parts, out, overwrite=overwrite)


# Tables -----------------------------------------------------------------------------------------------------------------


def tables_of(experiment: Experiment, published: _Published) -> list[Table]:
    """All tables of the experiment; the first is the main one."""
    kind, at = experiment.about["kind"], experiment.at
    caption = f"{experiment.about['title']}: {_data_and_seeds(experiment)}"
    head = "" if len(experiment.labelled) > 1 else "bits"
    compared = kind in ("table", "ablation")
    likeness = experiment.means(("NN10@100", "within class", "distinct in tops"))
    if kind == "sensitivity":
        tables = [_sensitivity(experiment, panel) for panel in weight_panels(experiment)]
    elif kind == "scale":
        tables = [Table("scale", caption, scale_rows(experiment), "method")]
    else:
        tables = [Table("map", caption, experiment.by_length("mAP"), head)]
    if published:
        tables.append(_beside(experiment, published))
    if compared and experiment.about["data"]["perceptron"]:
        rows = _joined(tables[0].rows, likeness, "NN10@100")
        tables[0] = replace(tables[0], rows=rows, caption=f"{caption}; NN10@100 at {at}")
        about = f"NN10@100; within class and distinct items in tops (as a share of the places) at {at}"
        rows = _joined(experiment.by_length("NN10@100"), likeness, "within class", "distinct in tops")
        tables.append(Table("likeness", about, rows, head))
    if compared or kind in ("tsne", "voronoi"):
        depth = experiment.means([f"{letter}@{k}" for letter in "PR" for k in KS])
        curve = experiment.means([f"{level:g}" for level in LEVELS])
        tables.append(Table("depth", f"Precision and recall at k, {at}", depth, "k"))
        tables.append(Table("pr", f"Precision at levels of recall, {at}", curve, "recall"))
    if compared:
        about = "Seconds per run, over all lengths and seeds, one thread"
        seconds = experiment.means(("fit", "encode", "rank"), longest=False)
        tables.append(Table("seconds", about, seconds, "", 1))
    # A copied table must itself tell that it is incomplete.
    short = missing_runs(experiment).short
    return [replace(t, caption=f"{t.caption} ({short})") for t in tables] if short else tables


def _data_and_seeds(experiment: Experiment) -> str:
    return f"{experiment.about['data']['name']}, {experiment.over_seeds}"


def _joined(rows: list[dict[str, Any]], more: list[dict[str, Any]], *columns: str) -> list[dict[str, Any]]:
    """Rows with columns of other rows of the same method."""
    found = {row["method"]: row for row in more}
    return [row | {name: found.get(row["method"], {}).get(name) for name in columns} for row in rows]


def _sensitivity(experiment: Experiment, panel: Panel) -> Table:
    """λ1 down, λ2 across."""
    down, across = (sorted(set(weights)) for weights in zip(*panel.values, strict=True))
    rows = []
    for a in down:
        found = {f"λ2 = {b:g}": panel.values.get((a, b)) for b in across}
        rows.append({"method": f"λ1 = {a:g}"} | {k: Spread.of(v) if v else None for k, v in found.items()})
    caption = f"mAP of {panel.at}, over λ1 and λ2: {_data_and_seeds(experiment)}"
    return Table(f"grid-{panel.name}" if panel.name else "grid", caption, rows, "")


def _beside(experiment: Experiment, published: _Published) -> Table:
    """Each row of the experiment and the published figure of its method; other methods with a published figure have rows too."""
    for bits in sorted({bits for _, bits in published} - set(experiment.bits)):
        log.warning("no run has %d bits: figures published for them are not shown", bits)
    labelled = experiment.labelled[-1]
    prefix = f" bits, {labelled}" if len(experiment.labelled) > 1 else ""
    ours = {row["method"]: row for row in experiment.by_length("mAP")}
    named = {
        experiment.row_name(run): run.method
        for run in experiment.runs
        if labelled_name(run.about["labelled"]) == labelled
    }
    named |= {name: name for name, _ in published if name not in named.values()}
    rows = []
    for name, method in sorted(named.items(), key=lambda item: position(list(METHODS), item[1])):
        row: dict[str, Any] = {"method": name}
        for bits in experiment.bits:
            row[f"{bits}, ours"] = ours.get(name, {}).get(f"{bits}{prefix}")
            row[f"{bits}, published"] = published.get((method, bits))
        rows.append(row)
    about = "Beside the published figures, which are of other data or weights"
    return Table("published", about, rows, "bits")


# Pages ------------------------------------------------------------------------------------------------------------------


def _page(experiment: Experiment, tables: list[Table], form: Form, pictures: Mapping[str, str]) -> str:
    title, marks = experiment.about["title"], form == "markdown"
    parts = [f"# {title}\n" if marks else f"{title}\n"]
    for i, table in enumerate(tables):
        if i and marks:
            parts.append(f"## {table.caption}\n")
        parts.append(table.text(form, caption=bool(i)))
        if not i:
            parts += [f"{line}\n" for line in notes_of(experiment)]
    if marks:
        # The caption is also below the picture, since readers do not see the alternative text.
        parts += [f"![{caption}]({path})\n\n{caption}.\n" for caption, path in pictures.items()]
    return "\n".join(parts)


def notes_of(experiment: Experiment) -> list[str]:
    """Notes for the tables: data, convention, budget, differences from the paper, missing runs, machine."""
    about, runs = experiment.about, experiment.runs
    first, counts, over = runs[0].about, runs[0].about["counts"], experiment.over_seeds
    differ = any(run.about["counts"] != counts for run in runs)
    there = {run.method for run in runs}
    departures = [f"{k}: {entry.departs}" for k, entry in METHODS.items() if k in there and entry.departs]
    kept: dict[str, dict[int, int]] = {}
    for run in runs:
        if run.bits and run.bits != run.about["bits_kept"]:
            kept.setdefault(experiment.row_name(run), {})[run.bits] = run.about["bits_kept"]
    return [
        *missing_runs(experiment).notes(),
        f"{over[0].upper()}{over[1:]}. {first['convention']}. {about['data']['name']}, protocol {about['protocol']}, labelled "
        f"{', '.join(experiment.labelled)}: {counts['queries']:,} queries, {counts['labelled']:,} labelled and "
        f"{counts['unlabelled']:,} unlabelled items, {counts['database']:,} in the database"
        + (" (of the first run)." if differ else "."),
        *_likeness(experiment),
        *_trainings(experiment),
        _differs(experiment),
        *([f"Departures from their papers that count: {'; '.join(departures)}."] if departures else []),
        *(
            f"{name}: {', '.join(map(str, bits.values()))} bits per item where {', '.join(map(str, bits))} are requested."
            for name, bits in kept.items()
        ),
        *(f"{name} has no row: {why}." for name, why in about["left_out"].items()),
        *(f"Failed: {name}: {why}." for name, why in about["failed"].items()),
        *dict.fromkeys(map(_machine, runs)),
    ]


def _likeness(experiment: Experiment) -> list[str]:
    """Definition of the likeness figures, or why there are none."""
    if experiment.about["kind"] not in ("table", "ablation"):
        return []
    if not experiment.about["data"]["perceptron"]:
        return [f"{NO_LIKENESS}."]
    found = [run.about["likeness"] for run in experiment.runs]
    return [f"{line}." for line in dict.fromkeys(like["definition"] for like in found if like)]


def _trainings(experiment: Experiment) -> list[str]:
    """The preset with its changes by the command, and steps, batches and rates of the trained methods."""
    about = experiment.about
    trained = [run for run in experiment.runs if "training" in run.about["settings"]]
    if not trained:
        return []
    changed = [f"{part}.{k} = {v}" for part, values in about["changes"].items() for k, v in values.items()]
    lines = [
        f"Rows that do not say otherwise have the settings of the preset {about['preset']}"
        + (f", with {', '.join(changed)}." if changed else ".")
    ]
    rows_of: dict[str, list[str]] = {}
    for run in trained:
        t = run.about["settings"]["training"]
        text = (
            f"{run.about['steps']:,} steps of up to {t['batch_labelled']:,} labelled items, and up to {t['batch_unlabelled']:,} "
            f"unlabelled ones for those that use them, learning rate {t['learning_rate']:g} ({t['schedule']})"
        )
        rows_of.setdefault(text, []).append(experiment.row_name(run))
    usual = max(rows_of, key=lambda text: len(rows_of[text]))
    others = [(text, dict.fromkeys(names)) for text, names in rows_of.items() if text != usual]
    if others:
        lines.append(
            f"Trained methods have {usual}, except those named next; all have the same split and data."
        )
    else:
        lines.append(f"Every trained method has {usual}, and the same split and data.")
    soft = [run for run in trained if run.about["settings"].get("method") in ("gpq-soft", "posterior")]
    backbones = {run.about["settings"]["network"]["backbone"] for run in soft}
    perceptrons = {"mlp", "linear", *(["auto"] if about["data"]["perceptron"] else [])}
    for what, rate, there in (
        ("Class networks", COMMITTEE_RATE, backbones & perceptrons),
        ("Class networks over convolutions, and these,", CONVOLUTION_RATE, backbones - perceptrons),
    ):
        if there:
            lines.append(
                f"{what} are trained at {rate:g} times that rate, and an average of their weights is used."
            )
    return lines + [f"{', '.join(names)}: {text}." for text, names in others]


def _differs(experiment: Experiment) -> str:
    settings = [run.about["settings"] for run in experiment.runs]
    weights = {str(each["network"]["weights"]) for each in settings if "network" in each}
    network = (
        "no convolutions, where the paper trains a VGG (GPQ-F: CNN-F) on images: here GPQ has the network of its preset and the other "
        "trained methods a perceptron with one hidden layer"
        if experiment.about["data"]["perceptron"]
        else f"networks on images with first weights: {', '.join(sorted(weights)) or 'none'}"
    )
    return (
        f"What differs from the paper: the data are {experiment.about['data']['name']}; {network}; the budget above; and the average "
        "precision, which takes its expected value over the order of equal scores. So these figures are to be compared with each other, "
        "not with the paper's."
    )


def _machine(run: Run) -> str:
    machine = run.about["machine"]
    libraries = ", ".join(f"{name} {version}" for name, version in run.about["versions"].items())
    return (
        f"Machine: {machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB, "
        f"{machine.get('gpu') or 'no GPU'}, {machine.get('os')}; {libraries}."
    )


def _json(experiment: Experiment, tables: list[Table]) -> str:
    hidden = ("experiment_format", "planned")
    value = {
        "experiment": {k: v for k, v in experiment.about.items() if k not in hidden},
        "missing": vars(missing_runs(experiment)),
        "notes": notes_of(experiment),
        "tables": {t.name: {"caption": t.caption, "rows": json.loads(t.text("json"))} for t in tables},
        "runs": [_run_json(run) for run in experiment.runs],
    }
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _run_json(run: Run) -> dict[str, Any]:
    about, arrays = run.about, run.arrays
    ks, levels = [str(k) for k in arrays["ks"]], [f"{level:g}" for level in arrays["pr_recall"]]
    named = ("method", "variation", "labelled", "bits", "bits_kept", "seed", "map")
    more = ("likeness", "seconds", "counts", "split_hash", "identity")
    return {
        **{name: about[name] for name in named},
        "precision": dict(zip(ks, arrays["precision"].tolist(), strict=True)),
        "recall": dict(zip(ks, arrays["recall"].tolist(), strict=True)),
        "precision_at_recall": dict(zip(levels, arrays["pr_precision"].tolist(), strict=True)),
        **{name: about[name] for name in more},
    }
