"""``gpq experiment``: methods, run, report."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import click

import gpq_faiss as gpq
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.progress import levels

from . import options as common


@click.group(
    help="""Compare methods: a grid of methods, code lengths and seeds on the same splits.

Each run is a file, and tables are made from the files.

\b
Examples:
  gpq experiment methods
  gpq experiment run table2 features:clip.npy --labels labels.npy --jobs 2 --out table2
  gpq experiment report table2 --format markdown --plots table2/plots
"""
)
def experiment() -> None:
    pass


@experiment.command(
    help="""List all methods by their short names, in the order of the paper's tables.

\b
Examples:
  gpq experiment methods
  gpq experiment methods --format json
"""
)
@common.format_option("json", "markdown", "csv")
def methods(format_: Any) -> None:
    from gpq_faiss.methods.registry import find_method, method_names

    rows = [
        {
            "method": name,
            "learns": entry.learns,
            "code": entry.code,
            "network": "trained" if entry.deep else "none",
            "what it is": entry.summary,
            "from": entry.citation,
        }
        for name, entry in ((name, find_method(name)) for name in method_names())
    ]
    common.emit(gpq.render(rows, format_).removesuffix("\n"))


# Options that replace the grid's keys of the same names.
_GRID_KEYS = {
    "methods": "Short names separated by commas, or all.",
    "bits": "Code lengths separated by commas.",
    "seeds": "Seeds of split, weights and batches, separated by commas.",
    "labelled": "Labels for the training: N-per-class, a fraction or a file.",
    "protocol": "1, 2, transfer[:CLASSES] or gpq-authors.",
    "queries": "Queries of protocol 1: N-per-class, or a file of ids.",
    "preset": "Settings of trained methods: recommended, paper or authors.",
}


def _grid_options(command: Any) -> Any:
    for name, text in reversed(_GRID_KEYS.items()):
        command = click.option(f"--{name}", help=f"{text}  [default: the grid's]")(command)
    return command


def _parse_key(name: str, text: str | None) -> Any:
    """Return the value of a grid's key from the text of its option."""
    if text is None or name not in ("methods", "bits", "seeds"):
        return text
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        return words if name == "methods" else [int(word) for word in words]
    except ValueError:
        raise UsageError(f"--{name} {text}: write whole numbers with commas, as 12,24") from None


@experiment.command(
    help=f"""Make the runs of GRID on DATA that are missing in the folder --out.

GRID is table2, table3, ablation, neighbours, sensitivity, tsne or voronoi, or a TOML file. Finished
runs are skipped, interrupted ones are resumed, and a failed run does not stop the others (the exit
code is then 1). Settings of --set apply to all trained rows.

\b
Examples:
  gpq experiment run table2 digits --labelled 20-per-class --methods gpq,pq --bits 24 --out digits
  gpq experiment run table2 features:clip.npy --labels labels.npy --jobs 2 --out table2
  gpq experiment run mine.toml cifar10 --device cuda --out mine

{common.DATA_HELP}
"""
)
@click.argument("grid")
@click.argument("data")
@common.out_option
@_grid_options
@common.set_option
@click.option(
    "--name", "data_name", help="Name of the data in tables.  [default: DATA without folders]"
)
@click.option(
    "--jobs",
    default=1,
    show_default=True,
    help="Concurrent runs, each in its own process with one thread.",
)
@common.device_option
@common.overwrite_option
@common.data_options
def run(grid: str, data: str, changes: tuple[str, ...], **options: Any) -> None:
    from gpq_faiss.config import parse_settings
    from gpq_faiss.experiment.grid import read_grid

    changed = {key: _parse_key(key, options.pop(key)) for key in _GRID_KEYS}
    experiment = read_grid(grid).with_options(settings=parse_settings(changes), **changed)
    # A line for each run that ends is enough: those on the steps of its training are not shown.
    with levels(logging.WARNING, "gpq_faiss.training.loop"):
        summary = gpq.run_experiment(experiment, data, **options)
    counts = [f"{summary.completed:,} runs made", f"{summary.existing:,} already done"]
    counts += [f"{name} left out ({reason})" for name, reason in summary.left_out.items()]
    common.emit(f"{summary.folder}: {'; '.join(counts)}")
    if summary.failed:
        name, reason = next(iter(summary.failed.items()))
        failed = len(summary.failed)
        suffix = f" (and {failed - 1:,} others)" if failed > 1 else ""
        raise DataError(f"{failed:,} of {summary.total:,} runs failed: {name}: {reason}{suffix}")


@experiment.command(
    help="""Tables and pictures of the runs in FOLDER, which is what gpq experiment run wrote.

The first table is mAP by method and code length, mean and deviation over the seeds that are done,
with P@1, P@10 and NN10@100 at the longest code.

\b
Examples:
  gpq experiment report table2
  gpq experiment report table2 --format markdown --plots table2/plots --out table2/report.md
  gpq experiment report table2 --format latex --table map
"""
)
@click.argument("folder")
@common.format_option("markdown", "latex", "csv", "json", note="; csv has one table")
@click.option("--table", help="Only this table: map, depth, pr or seconds.")
@click.option(
    "--plots", metavar="DIR", help="Draw the pictures of the experiment into this folder."
)
@click.option("--out", metavar="FILE", help="Write to this file instead of the terminal.")
@common.overwrite_option
def report(
    folder: str, format_: Any, out: str | None, plots: str | None, overwrite: bool, **options: Any
) -> None:
    common.check_files(overwrite, out)
    pictures = {}
    if plots is not None:
        drawn = gpq.draw_experiment(folder, plots, overwrite=overwrite)
        start = Path(out).parent if out is not None else Path()
        pictures = {caption: os.path.relpath(path, start) for caption, path in drawn.items()}
    common.emit(
        gpq.report_experiment(folder, format_, pictures=pictures, **options).removesuffix("\n"), out
    )
