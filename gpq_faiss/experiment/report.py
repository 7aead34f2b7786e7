"""Tables of an experiment, derived only from the files of its runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..config import COMMITTEE_RATE, CONVOLUTION_RATE
from ..errors import DataError, UsageError
from ..evaluation.tables import pivot, render, summarise
from ..methods.measure import NO_LIKENESS
from ..methods.registry import METHODS
from .results import (
    Experiment,
    curve_rows,
    depth_rows,
    likeness_rows,
    main_rows,
    missing_runs,
    position,
    read_experiment,
    row_name,
    run_labelled,
    second_rows,
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
        return render(
            self.rows,
            form,
            headers={"method": self.head},
            digits=self.digits,
            caption=self.caption if caption and form in ("text", "latex") else None,
        )


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
        chosen = [t for t in tables if t.name == table]
        if not chosen:
            raise UsageError(f"no table '{table}' here: choose one of {', '.join(t.name for t in tables)}")
        tables = chosen
    if form == "csv":
        # CSV cannot contain notes.
        for line in missing_runs(experiment).notes():
            log.warning("%s: %s", experiment.folder, line)
        return tables[0].text("csv")
    if form == "latex":
        return "\n".join(t.text("latex") for t in tables)
    if form == "json":
        return _json(experiment, tables)
    if table is not None:
        lines = [f"\n{line}\n" for line in missing_runs(experiment).notes()]
        return tables[0].text(form) + "".join(lines)
    return _page(experiment, tables, form, pictures or {})


def tables_of(experiment: Experiment, published: _Published) -> list[Table]:
    """All tables of the experiment; the first is the main one."""
    kind, longest = experiment.about["kind"], max(experiment.bits)
    several = len(experiment.labelled) > 1
    caption = f"{experiment.about['title']}: {_data_and_seeds(experiment)}"
    at = f"{longest} bits" + (f", {experiment.labelled[-1]}" if several else "")
    first = Table("map", caption, main_rows(experiment), "" if several else "bits")
    if kind == "sensitivity":
        tables = [_sensitivity(experiment, panel) for panel in weight_panels(experiment)]
    elif kind == "scale":
        tables = [Table("scale", caption, scale_rows(experiment), "method")]
    else:
        tables = [first]
    if published:
        tables.append(_beside(experiment, published))
    if kind in ("table", "ablation") and experiment.about["data"]["perceptron"]:
        found = likeness_rows(experiment, longest)
        beside = replace(first, caption=f"{caption}; NN10@100 at {at}")
        tables[0] = replace(beside, rows=_joined(first.rows, found, "NN10@100"))
        lengths = main_rows(experiment, "nn10_at_100")
        about = f"NN10@100; within class and distinct items in tops (as a share of the places) at {at}"
        rows = _joined(lengths, found, "within class", "distinct in tops")
        tables.append(Table("likeness", about, rows, first.head))
    if kind in ("table", "ablation", "tsne", "voronoi"):
        depth, curve = depth_rows(experiment, longest, KS), curve_rows(experiment, longest, LEVELS)
        tables.append(Table("depth", f"Precision and recall at k, {at}", depth, "k"))
        tables.append(Table("pr", f"Precision at levels of recall, {at}", curve, "recall"))
    if kind in ("table", "ablation"):
        about = "Seconds per run, over all lengths and seeds, one thread"
        tables.append(Table("seconds", about, second_rows(experiment), "", 1))
    # A copied table must itself tell that it is incomplete.
    short = missing_runs(experiment).short
    return [replace(t, caption=f"{t.caption} ({short})") for t in tables] if short else tables


def _data_and_seeds(experiment: Experiment) -> str:
    return f"{experiment.about['data']['name']}, {experiment.over_seeds()}"


def _joined(rows: list[dict[str, Any]], more: list[dict[str, Any]], *columns: str) -> list[dict[str, Any]]:
    """Rows with columns of other rows of the same method."""
    found = {row["method"]: row for row in more}
    return [row | {name: found.get(row["method"], {}).get(name) for name in columns} for row in rows]


def weights_of(run: Run) -> tuple[float, float]:
    """λ1 and λ2 of a run."""
    loss = run.about["settings"]["loss"]
    return float(loss["lambda1"]), float(loss["lambda2"])


@dataclass(frozen=True)
class Panel:
    """A grid over the weights, for a method, a code length and a number of labels.

    Attributes:
        runs: by weights.
        name: difference from the other grids; empty for a single one.
    """

    method: str
    bits: int
    labelled: str
    runs: tuple[Run, ...]
    name: str

    @property
    def at(self) -> str:
        """For captions."""
        return f"{self.method} at {self.bits} bits, {self.labelled} labelled"


def weight_panels(experiment: Experiment) -> list[Panel]:
    """Grids over the weights λ1 and λ2, one per GPQ variant.

    Raises:
        DataError: no run has these weights.
    """
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in experiment.runs:
        method = METHODS.get(run.method)
        if method is not None and method.module == ".gpq":
            groups.setdefault((run.method, run.bits, run_labelled(run)), []).append(run)
    if not groups:
        raise DataError(f"{experiment.folder}: no run of GPQ, which alone has the weights λ1 and λ2")
    methods, labels = list(METHODS), experiment.labelled
    keys = sorted(groups, key=lambda key: (methods.index(key[0]), key[1], labels.index(key[2])))
    differ = [len(set(values)) > 1 for values in zip(*keys, strict=True)]
    return [
        Panel(
            *key,
            tuple(sorted(groups[key], key=weights_of)),
            "-".join(str(part).replace(" ", "-") for part, varies in zip(key, differ, strict=True) if varies),
        )
        for key in keys
    ]


def _sensitivity(experiment: Experiment, panel: Panel) -> Table:
    """λ1 down, λ2 across."""
    long = [
        {"method": f"λ1 = {weights_of(run)[0]:g}", "λ2": f"λ2 = {weights_of(run)[1]:g}", "map": run.map}
        for run in panel.runs
    ]
    rows = pivot(summarise(long, by=["method", "λ2"], values=["map"]), "method", "λ2", "map")
    # Also where some combinations are missing, columns are in the order of the weights.
    columns = sorted({name for row in rows for name in row} - {"method"}, key=lambda name: float(name[5:]))
    rows = [{name: row.get(name) for name in ("method", *columns)} for row in rows]
    caption = (
        f"mAP of {panel.at}, over λ1 and λ2: {experiment.about['data']['name']}, {experiment.over_seeds()}"
    )
    return Table(f"grid-{panel.name}" if panel.name else "grid", caption, rows, "")


def scale_rows(experiment: Experiment) -> list[dict[str, Any]]:
    """One line per method and size: unlabelled items, database, mAP, seconds.

    Sizes beyond those of the data are the same run again, and count once.
    """
    once: dict[tuple[Any, ...], Run] = {}
    for run in experiment.runs:
        counts = run.about["counts"]
        sizes = (counts["unlabelled"], counts["database"])
        once.setdefault((run.method, run.bits, run.seed, run_labelled(run), *sizes), run)
    several = len(experiment.labelled) > 1
    long = [
        {
            "method": run.method,
            "bits": run.bits or "any",
            **({"labelled": run_labelled(run)} if several else {}),
            "unlabelled": run.about["counts"]["unlabelled"],
            "database": run.about["counts"]["database"],
            "mAP": run.map,
            **{f"{name} s": run.about["seconds"][name] for name in ("fit", "encode", "rank")},
        }
        for run in once.values()
    ]
    by = ["method", "bits", *(["labelled"] if several else []), "unlabelled", "database"]
    order = list(METHODS)
    rows = summarise(long, by=by, values=["mAP", "fit s", "encode s", "rank s"])
    return sorted(
        rows,
        key=lambda row: (
            position(order, row["method"]),
            0 if row["bits"] == "any" else row["bits"],
            experiment.labelled.index(row["labelled"]) if several else 0,
            -row["database"],
            row["unlabelled"],
        ),
    )


def _beside(experiment: Experiment, published: _Published) -> Table:
    """Each row of the experiment and the published figure of its method."""
    for bits in sorted({bits for _, bits in published} - set(experiment.bits)):
        log.warning("no run has %d bits: figures published for them are not shown", bits)
    labelled = experiment.labelled[-1]
    ours = [
        {"method": row_name(experiment, run), "bits": bits, "map": run.map}
        for run in experiment.runs
        if run_labelled(run) == labelled
        for bits in ([run.bits] if run.bits else experiment.bits)
    ]
    means = {(row["method"], row["bits"]): row["map"] for row in summarise(ours, ["method", "bits"], ["map"])}
    # Row -> method; other methods with a published figure have rows too.
    named = {
        row_name(experiment, run): run.method for run in experiment.runs if run_labelled(run) == labelled
    }
    named |= {name: name for name, _ in published if name not in named.values()}
    order = list(METHODS)
    rows = []
    for name, method in sorted(named.items(), key=lambda item: position(order, item[1])):
        row: dict[str, Any] = {"method": name}
        for bits in experiment.bits:
            row[f"{bits}, ours"] = means.get((name, bits))
            row[f"{bits}, published"] = published.get((method, bits))
        rows.append(row)
    return Table(
        "published", "Beside the published figures, which are of other data or weights", rows, "bits"
    )


# --------------------------------------------------------------------------------------------------------------- pages


def _page(experiment: Experiment, tables: list[Table], form: Form, pictures: Mapping[str, str]) -> str:
    about = experiment.about
    marks = form == "markdown"
    parts = [f"# {about['title']}\n" if marks else about["title"] + "\n"]
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
    about, first = experiment.about, experiment.runs[0].about
    counts = first["counts"]
    over = experiment.over_seeds()
    differ = len({json.dumps(run.about["counts"]) for run in experiment.runs}) > 1
    lines = [
        *missing_runs(experiment).notes(),
        f"{over[0].upper()}{over[1:]}. {first['convention']}. {about['data']['name']}, protocol {about['protocol']}, labelled "
        f"{', '.join(experiment.labelled)}: {counts['queries']:,} queries, {counts['labelled']:,} labelled and "
        f"{counts['unlabelled']:,} unlabelled items, {counts['database']:,} in the database"
        + (" (of the first run)." if differ else "."),
        *_likeness(experiment),
        *_settings(experiment),
        *_budget(experiment),
        _differs(experiment),
        *_departures(experiment),
    ]
    kept: dict[str, dict[int, int]] = {}
    for run in experiment.runs:
        if run.bits and run.bits != int(run.about["bits_kept"]):
            kept.setdefault(row_name(experiment, run), {})[run.bits] = int(run.about["bits_kept"])
    lines += [
        f"{name}: {', '.join(map(str, bits.values()))} bits per item where {', '.join(map(str, bits))} are requested."
        for name, bits in kept.items()
    ]
    lines += [f"{name} has no row: {why}." for name, why in about["left_out"].items()]
    lines += [f"Failed: {name}: {why}." for name, why in about["failed"].items()]
    return lines + _machines(experiment)


def _likeness(experiment: Experiment) -> list[str]:
    """Definition of the likeness figures, or why there are none."""
    if experiment.about["kind"] not in ("table", "ablation"):
        return []
    if not experiment.about["data"]["perceptron"]:
        return [f"{NO_LIKENESS}."]
    definitions = dict.fromkeys(run.likeness["definition"] for run in experiment.runs if run.likeness)
    return [f"{line}." for line in definitions]


def _trained(experiment: Experiment) -> list[Run]:
    """Runs of trained methods."""
    return [run for run in experiment.runs if "training" in run.about["settings"]]


def _settings(experiment: Experiment) -> list[str]:
    """The preset, and its changes by the command."""
    about = experiment.about
    if not _trained(experiment):
        return []
    changed = [f"{part}.{k} = {v}" for part, values in about["changes"].items() for k, v in values.items()]
    line = f"Rows that do not say otherwise have the settings of the preset {about['preset']}"
    return [f"{line}, with {', '.join(changed)}." if changed else f"{line}."]


def _budget(experiment: Experiment) -> list[str]:
    """Steps and batches of the trained methods."""
    trained = _trained(experiment)
    if not trained:
        return []
    # Batch sizes larger than some run's data.
    small: set[tuple[str, int]] = set()
    for run in trained:
        t, counts = run.about["settings"]["training"], run.about["counts"]
        labelled = counts["labelled"] * (1 - t["validation"])  # the rest is held out
        for name, there in (("labelled", labelled), ("unlabelled", counts["unlabelled"] or labelled)):
            if t[f"batch_{name}"] > there:
                small.add((name, t[f"batch_{name}"]))

    def batch(t: Mapping[str, Any], name: str) -> str:
        size = t[f"batch_{name}"]
        return f"{'up to ' if (name, size) in small else ''}{size:,}"

    groups: dict[str, list[str]] = {}
    for run in trained:
        t = run.about["settings"]["training"]
        text = (
            f"{run.about['steps']:,} steps of {batch(t, 'labelled')} labelled items, and {batch(t, 'unlabelled')} unlabelled ones "
            f"for those that use them, learning rate {t['learning_rate']:g} ({t['schedule']})"
        )
        groups.setdefault(text, []).append(row_name(experiment, run))
    committees = [run for run in trained if run.about["settings"].get("method") in ("gpq-soft", "posterior")]
    backbones = {run.about["settings"]["network"]["backbone"] for run in committees}
    perceptrons = {"mlp", "linear", *(["auto"] if experiment.about["data"]["perceptron"] else [])}
    own = [
        f"{name} are trained at {rate:g} times that rate, and an average of their weights is used."
        for name, rate, there in (
            ("Class networks", COMMITTEE_RATE, backbones & perceptrons),
            ("Class networks over convolutions, and these,", CONVOLUTION_RATE, backbones - perceptrons),
        )
        if there
    ]
    if len(groups) == 1:
        return [f"Every trained method has {next(iter(groups))}, and the same split and data.", *own]
    # The most common budget is listed without names.
    usual = max(groups, key=lambda text: len(groups[text]))
    others = [
        f"{', '.join(dict.fromkeys(names))}: {text}." for text, names in groups.items() if text != usual
    ]
    return [
        f"Trained methods have {usual}, except those named next; all have the same split and data.",
        *own,
        *others,
    ]


def _differs(experiment: Experiment) -> str:
    about = experiment.about
    perceptron = bool(about["data"]["perceptron"])
    weights = {
        run.about["settings"]["network"]["weights"]
        for run in experiment.runs
        if "network" in run.about["settings"]
    }
    network = (
        "no convolutions, where the paper trains a VGG (GPQ-F: CNN-F) on images: here GPQ has the network of its preset and the other "
        "trained methods a perceptron with one hidden layer"
        if perceptron
        else f"networks on images with first weights: {', '.join(sorted(map(str, weights))) or 'none'}"
    )
    return (
        f"What differs from the paper: the data are {about['data']['name']}; {network}; the budget above; and the average precision, "
        "which takes its expected value over the order of equal scores. So these figures are to be compared with each other, not with "
        "the paper's."
    )


def _departures(experiment: Experiment) -> list[str]:
    """Deviations of methods from their papers that affect the figures."""
    there = {run.method for run in experiment.runs}
    departures = [f"{k}: {METHODS[k].departs}" for k in METHODS if k in there and METHODS[k].departs]
    return [f"Departures from their papers that count: {'; '.join(departures)}."] if departures else []


def _machines(experiment: Experiment) -> list[str]:
    lines = []
    for run in experiment.runs:
        machine, versions = run.about["machine"], run.about["versions"]
        libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
        lines.append(
            f"Machine: {machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB, "
            f"{machine.get('gpu') or 'no GPU'}, {machine.get('os')}; {libraries}."
        )
    return list(dict.fromkeys(lines))


def _json(experiment: Experiment, tables: list[Table]) -> str:
    missing = missing_runs(experiment)
    value = {
        "experiment": {
            k: v for k, v in experiment.about.items() if k not in ("experiment_format", "planned")
        },
        "missing": {
            "asked": missing.asked,
            "runs": {row: list(runs) for row, runs in missing.runs.items()},
            "outdated": list(missing.outdated),
        },
        "notes": notes_of(experiment),
        "tables": {
            table.name: {"caption": table.caption, "rows": json.loads(table.text("json"))} for table in tables
        },
        "runs": [_run_json(run) for run in experiment.runs],
    }
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _run_json(run: Run) -> dict[str, Any]:
    about, arrays = run.about, run.arrays
    ks, levels = map(str, arrays["ks"]), (f"{level:g}" for level in arrays["pr_recall"])
    return {
        "method": run.method,
        "variation": run.variation,
        "labelled": about["labelled"],
        "bits": run.bits,
        "bits_kept": int(about["bits_kept"]),
        "seed": run.seed,
        "map": run.map,
        "precision": dict(zip(ks, arrays["precision"].tolist(), strict=True)),
        "recall": dict(zip(map(str, arrays["ks"]), arrays["recall"].tolist(), strict=True)),
        "precision_at_recall": dict(zip(levels, arrays["pr_precision"].tolist(), strict=True)),
        "likeness": run.likeness or None,
        "seconds": about["seconds"],
        "counts": about["counts"],
        "split_hash": about["split_hash"],
        "identity": about["identity"],
    }
