"""Tables of an experiment, derived from the files of its runs and from nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..config import COMMITTEE_RATE
from ..errors import DataError, UsageError
from ..evaluation.tables import Row, pivot, render, summarise
from ..methods.registry import METHODS
from ..stages.evaluate import NO_LIKENESS
from .results import (
    Experiment,
    curve_rows,
    depth_rows,
    likeness_rows,
    main_rows,
    missing_runs,
    place_in,
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
"""Of recall, in the table of the precision-recall curve."""
_Published = Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class Table:
    """One table of a report.

    Attributes:
        name: by which it is asked for: ``map``, ``published``, ``likeness``, ``depth``, ``pr``, ``seconds``, ``grid``, ``scale``.
        caption: a sentence.
        rows: as :func:`gpq_faiss.evaluation.tables.render` takes them.
        head: of the first column.
        digits: decimals.
    """

    name: str
    caption: str
    rows: list[dict[str, Any]]
    head: str
    digits: int = 4

    def text(self, form: Form, *, caption: bool = True) -> str:
        """The table; in CSV and JSON with all digits."""
        return render(
            self.rows,
            form,
            headers={"method": self.head},
            digits=self.digits,
            caption=self.caption if caption and form in ("text", "latex") else None,
        )


def report(
    folder: str | Path,
    form: Form = "markdown",
    *,
    table: str | None = None,
    published: _Published | None = None,
    pictures: Mapping[str, str] | None = None,
) -> str:
    """The report of a folder of runs.

    Args:
        folder: of the experiment.
        form: ``text`` and ``markdown`` are a page, ``latex`` all tables, ``json`` all tables and all runs, ``csv`` one table.
        table: only this one; CSV holds one, the first if none is named.
        published: figures from elsewhere, to be put beside the experiment's.
        pictures: caption -> path, shown on a Markdown page.

    Raises:
        UsageError: an unknown form, or a table that this experiment has not.
        DataError: no experiment there, no finished run, or a damaged one.
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
        # It has no place for a note.
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
    """All tables of the experiment; the first is the one that it is about."""
    kind, longest = experiment.about["kind"], max(experiment.bits)
    caption = f"{experiment.about['title']}: {experiment.about['data']['name']}, {_over_seeds(experiment)}"
    several = len(experiment.labelled) > 1
    whole = Table("map", caption, main_rows(experiment), "bits" if not several else "")
    tables = [whole]
    if kind == "sensitivity":
        tables = [_sensitivity(experiment, panel) for panel in weight_panels(experiment)]
    if kind == "scale":
        tables = [_scale(experiment)]
    if published:
        tables.append(_beside(experiment, published))
    at = f"{longest} bits" + (f", {experiment.labelled[-1]}" if several else "")
    if kind in ("table", "ablation") and experiment.about["data"]["perceptron"]:
        kept = {row["method"]: row for row in likeness_rows(experiment, longest)}
        tables[0] = replace(
            whole,
            caption=f"{caption}; NN10@100 at {at}",
            rows=[row | {"NN10@100": kept.get(row["method"], {}).get("NN10@100")} for row in whole.rows],
        )
        more = ("within class", "distinct in tops")
        tables.append(
            Table(
                "likeness",
                f"NN10@100; within class and distinct items in tops (as a share of the places) at {at}",
                [
                    row | {name: kept.get(row["method"], {}).get(name) for name in more}
                    for row in main_rows(experiment, "nn10_at_100")
                ],
                whole.head,
            )
        )
    if kind in ("table", "ablation", "tsne", "voronoi"):
        tables.append(
            Table(
                "depth",
                f"Precision and recall at k, {at}",
                depth_rows(experiment, longest, KS),
                "k",
            )
        )
        tables.append(
            Table(
                "pr",
                f"Precision at levels of recall, {at}",
                curve_rows(experiment, longest, LEVELS),
                "recall",
            )
        )
    if kind in ("table", "ablation"):
        tables.append(
            Table(
                "seconds",
                "Seconds a run, over all lengths and seeds, one thread",
                second_rows(experiment),
                "",
                1,
            )
        )
    # A table tells by itself, wherever it is pasted, that it is not whole.
    short = missing_runs(experiment).short
    return [replace(t, caption=f"{t.caption} ({short})") for t in tables] if short else tables


def _over_seeds(experiment: Experiment) -> str:
    seeds = experiment.seeds
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"mean ± deviation over seeds {', '.join(map(str, seeds))}"


def weights_of(run: Run) -> tuple[float, float]:
    """λ1 and λ2 of a run."""
    loss = run.about["settings"]["loss"]
    return float(loss["lambda1"]), float(loss["lambda2"])


@dataclass(frozen=True)
class Panel:
    """One grid over the weights: of a method, at a code length, with so many labels.

    Attributes:
        runs: by their weights.
        name: what tells it from the others, empty where there is one.
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
    """The grids over the weights of those methods that have them, which are GPQ and its variants.

    Raises:
        DataError: no run has them.
    """
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in experiment.runs:
        method = METHODS.get(run.method)
        if method is not None and method.module == "gpq":
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
            "-".join(str(part).replace(" ", "-") for part, told in zip(key, differ, strict=True) if told),
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
    # A weight may be there with some of the others only: its column still has its place.
    columns = sorted({name for row in rows for name in row} - {"method"}, key=lambda name: float(name[5:]))
    rows = [{name: row.get(name) for name in ("method", *columns)} for row in rows]
    caption = (
        f"mAP of {panel.at}, over λ1 and λ2: {experiment.about['data']['name']}, {_over_seeds(experiment)}"
    )
    return Table(f"grid-{panel.name}" if panel.name else "grid", caption, rows, "")


def scale_rows(experiment: Experiment) -> list[dict[str, Any]]:
    """A line a method and size: unlabelled items, database, mAP, seconds.

    Sizes beyond what the data have are the same run again, and count once.
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
            place_in(order, row["method"]),
            0 if row["bits"] == "any" else row["bits"],
            experiment.labelled.index(row["labelled"]) if several else 0,
            -row["database"],
            row["unlabelled"],
        ),
    )


def _scale(experiment: Experiment) -> Table:
    caption = f"{experiment.about['title']}: {experiment.about['data']['name']}, {_over_seeds(experiment)}"
    return Table("scale", caption, scale_rows(experiment), "method")


def _beside(experiment: Experiment, published: _Published) -> Table:
    """Every row of ours and the published figure of its method."""
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
    # Row -> method; what is published of others comes in its place.
    named = {
        row_name(experiment, run): run.method for run in experiment.runs if run_labelled(run) == labelled
    }
    named |= {name: name for name, _ in published if name not in named.values()}
    order = list(METHODS)
    rows = []
    for name, method in sorted(named.items(), key=lambda item: place_in(order, item[1])):
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
        # Beneath the picture too: readers do not see the text in its place.
        parts += [f"![{caption}]({path})\n\n{caption}.\n" for caption, path in pictures.items()]
    return "\n".join(parts)


def notes_of(experiment: Experiment) -> list[str]:
    """What is needed to read the tables: data, convention, budget, what differs from the paper, what is missing, machine."""
    about, first = experiment.about, experiment.runs[0].about
    counts = first["counts"]
    over = _over_seeds(experiment)
    lines = [
        *missing_runs(experiment).notes(),
        f"{over[0].upper()}{over[1:]}. {first['convention']}. {about['data']['name']}, protocol {about['protocol']}, labelled "
        f"{', '.join(experiment.labelled)}: {counts['queries']:,} queries, {counts['labelled']:,} labelled and "
        f"{counts['unlabelled']:,} unlabelled items, {counts['database']:,} in the database"
        + (
            " (of the first run)."
            if len({json.dumps(r.about["counts"]) for r in experiment.runs}) > 1
            else "."
        ),
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
        f"{name}: {', '.join(map(str, bits.values()))} bits an item where {', '.join(map(str, bits))} are asked for."
        for name, bits in kept.items()
    ]
    lines += [f"{name} has no line: {why}." for name, why in about["left_out"].items()]
    lines += [f"Failed: {name}: {why}." for name, why in about["failed"].items()]
    lines += _machines(experiment)
    return lines


def _likeness(experiment: Experiment) -> list[str]:
    """What the figures of likeness are, or why there are none."""
    if experiment.about["kind"] not in ("table", "ablation"):
        return []
    if not experiment.about["data"]["perceptron"]:
        return [f"{NO_LIKENESS}."]
    told = dict.fromkeys(run.likeness["definition"] for run in experiment.runs if run.likeness)
    without = sum(not run.likeness for run in experiment.runs)
    old = [f"{without:,} of {len(experiment.runs):,} runs are of earlier versions and have no NN10@100."]
    return [f"{line}." for line in told] + old * bool(without)


def _settings(experiment: Experiment) -> list[str]:
    """The preset, and what the command changed of it."""
    about = experiment.about
    if not any("training" in run.about["settings"] for run in experiment.runs):
        return []
    changed = [f"{part}.{k} = {v}" for part, values in about["changes"].items() for k, v in values.items()]
    line = f"Rows that do not say otherwise have the settings of the preset {about['preset']}"
    return [f"{line}, with {', '.join(changed)}." if changed else f"{line}."]


def _budget(experiment: Experiment) -> list[str]:
    """Steps and batches of the trained methods."""
    groups: dict[str, list[str]] = {}
    trained = [run for run in experiment.runs if "training" in run.about["settings"]]
    # Where some runs have fewer items than a batch has room for.
    small: dict[str, set[int]] = {"labelled": set(), "unlabelled": set()}
    for run in trained:
        t, counts = run.about["settings"]["training"], run.about["counts"]
        learnt = counts["labelled"] * (1 - t["validation"])  # the rest is held out
        for name, there in (("labelled", learnt), ("unlabelled", counts["unlabelled"] or learnt)):
            if t[f"batch_{name}"] > there:
                small[name].add(t[f"batch_{name}"])

    def batch(t: Mapping[str, Any], name: str) -> str:
        size = t[f"batch_{name}"]
        return f"up to {size:,}" if size in small[name] else f"{size:,}"

    for run in trained:
        t = run.about["settings"]["training"]
        length = f"{t['epochs']:g} epochs" if t["epochs"] else f"{t['steps']:,} steps"
        labelled, pool = batch(t, "labelled"), batch(t, "unlabelled")
        text = (
            f"{length} of {labelled} labelled items, and {pool} unlabelled ones for those that use "
            f"them, learning rate {t['learning_rate']:g} ({t['schedule']})"
        )
        groups.setdefault(text, []).append(row_name(experiment, run))
    if not groups:
        return []
    own = []
    if experiment.about["data"]["perceptron"] and any(
        run.about["settings"].get("method") in ("gpq-soft", "posterior") for run in experiment.runs
    ):
        own = [
            f"GPQ's committee moves with {COMMITTEE_RATE:g} times that rate, and an average of its weights is what counts."
        ]
    if len(groups) == 1:
        return [f"Every trained method has {next(iter(groups))}, and the same split and data.", *own]
    # What most have needs no list of names.
    usual = max(groups, key=lambda text: len(groups[text]))
    lines = [f"{', '.join(dict.fromkeys(names))}: {text}." for text, names in groups.items() if text != usual]
    return [
        f"Trained methods have {usual}, but for those named next, and all the same split and data.",
        *own,
        *lines,
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
    """Where methods depart from their own papers in what the figures depend on."""
    there = {run.method for run in experiment.runs}
    told = [f"{name}: {METHODS[name].departs}" for name in METHODS if name in there and METHODS[name].departs]
    return [f"Departures from their papers that count: {'; '.join(told)}."] if told else []


def _machines(experiment: Experiment) -> list[str]:
    lines = []
    for run in experiment.runs:
        machine, versions = run.about["machine"], run.about["versions"]
        gpu = machine.get("gpu") or "no GPU"
        told = ", ".join(f"{name} {version}" for name, version in versions.items())
        line = (
            f"Machine: {machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB, {gpu}, "
            f"{machine.get('os')}; {told}."
        )
        if line not in lines:
            lines.append(line)
    return lines


def _json(experiment: Experiment, tables: list[Table]) -> str:
    def loaded(rows: list[Row]) -> Any:
        return json.loads(render(rows, "json"))

    runs: list[Row] = [
        {
            "method": run.method,
            "variation": run.variation,
            "labelled": run.about.get("labelled"),
            "bits": run.bits,
            "bits_kept": run.about["bits_kept"],
            "seed": run.seed,
            "map": run.map,
        }
        for run in experiment.runs
    ]
    more = [
        {
            "precision": dict(zip(map(str, run.arrays["ks"]), run.arrays["precision"].tolist(), strict=True)),
            "recall": dict(zip(map(str, run.arrays["ks"]), run.arrays["recall"].tolist(), strict=True)),
            "precision_at_recall": {
                f"{level:g}": float(value)
                for level, value in zip(run.arrays["pr_recall"], run.arrays["pr_precision"], strict=True)
            },
            "likeness": run.likeness or None,
            "seconds": run.about["seconds"],
            "counts": run.about["counts"],
            "split_hash": run.about["split_hash"],
            "identity": run.about["identity"],
        }
        for run in experiment.runs
    ]
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
            table.name: {"caption": table.caption, "rows": loaded(list(table.rows))} for table in tables
        },
        "runs": [{**run, **extra} for run, extra in zip(loaded(runs), more, strict=True)],
    }
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
