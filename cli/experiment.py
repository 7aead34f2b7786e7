"""``gpq experiment``: methods, run, report."""

import logging
import os
from pathlib import Path
from typing import Any

import click

import gpq_faiss as gpq
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.progress import levels

from . import options as common


@click.group(short_help="Compare methods on the same splits.")
def experiment() -> None:
    """Compare methods: a grid of methods, code lengths and seeds on the same splits.

    Each run is a file, and tables are made from the files.

    \b
    Examples:
      gpq experiment methods
      gpq experiment run table2 features:clip.npy --labels labels.npy --jobs 2 --out table2
      gpq experiment report table2 --format markdown --plots table2/plots
    """


@experiment.command(
    short_help="List all methods.",
    help="""List all methods by their short names, in the order of the paper's tables.

\b
Examples:
  gpq experiment methods
  gpq experiment methods --format json
""",
)
@common.format_option("json", "markdown", "csv")
def methods(form: Any) -> None:
    from gpq_faiss.methods.registry import find_method, method_names

    entries = {name: find_method(name) for name in method_names()}
    rows = [
        {
            "method": name,
            "learns": entry.learns,
            "code": entry.code,
            "network": "trained" if entry.deep else "none",
            "what it is": entry.summary,
            "from": entry.citation,
        }
        for name, entry in entries.items()
    ]
    common.emit(gpq.render(rows, form or "text").removesuffix("\n"))


def _whole_numbers(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    try:
        return None if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"--{param.name} {text}: write numbers with commas, as 12,24") from None


@experiment.command(
    short_help="Make the runs of a grid.",
    help=f"""Make the runs of GRID on DATA that are missing in the folder --out.

GRID is table2, table3, ablation, neighbours, sensitivity, tsne or voronoi, or a TOML file
(docs/experiments.md). The options from --methods to --preset replace its values, and those of --set
apply to all methods that are trained.

Finished runs are skipped, and interrupted ones are resumed. A failed run does not stop the others;
the exit code is then 1.

\b
Examples:
  gpq experiment run table2 digits --labelled 20-per-class --methods gpq,pq --bits 24 --out digits
  gpq experiment run table2 features:clip.npy --labels labels.npy --jobs 2 --out table2
  gpq experiment run mine.toml cifar10 --device cuda --out mine

{common.DATA_HELP}
""",
)
@click.argument("grid")
@click.argument("data")
@common.out_option
@click.option(
    "--methods",
    callback=lambda ctx, param, text: text and text.replace(" ", "").split(","),
    help="Short names separated by commas, or all.",
)
@click.option("--bits", callback=_whole_numbers, help="Code lengths separated by commas.")
@click.option(
    "--seeds",
    callback=_whole_numbers,
    help="Seeds of split, weights and batches, separated by commas.",
)
@click.option(
    "--labelled", help="Labels for the training: N-per-class, a share (5%), or a file of ids."
)
@click.option("--protocol", help="1, 2 or transfer.")
@click.option(
    "--preset",
    help="Settings of trained methods: recommended, paper or authors.",
)
@common.set_option
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Concurrent runs, each in its own process with one thread.",
)
@common.device_option
@common.overwrite_option
@common.labels_option
@common.read_option
def run(
    grid: str,
    data: str,
    changes: tuple[str, ...],
    labels: str | None,
    data_args: dict[str, Any],
    **options: Any,
) -> None:
    from gpq_faiss.config import parse_settings
    from gpq_faiss.experiment.grid import read_grid

    names = "methods", "bits", "seeds", "labelled", "protocol", "preset"
    changed = {name: options.pop(name) for name in names}
    experiment = read_grid(grid).with_options(settings=parse_settings(changes), **changed)
    dataset = gpq.open_data(data, labels=labels, **data_args)
    # A line for each run that ends is enough: those on the steps of its training are not shown.
    with levels(logging.WARNING, "gpq_faiss.training.loop"):
        summary = gpq.run_experiment(experiment, dataset, **options)
    counts = f"{summary.completed:,} runs made; {summary.existing:,} already done"
    common.emit(f"{summary.folder}: {counts}")
    if summary.failed:
        name, reason = next(iter(summary.failed.items()))
        raise DataError(
            f"{len(summary.failed):,} of {summary.total:,} runs failed, such as {name}: {reason}"
        )


@experiment.command(
    short_help="Make tables and pictures of finished runs.",
    help="""Make tables and pictures of the runs in FOLDER, the --out of gpq experiment run.

The first table has mAP by method and code length, as mean and deviation over the finished seeds,
and P@1, P@10 and NN10@100 of the longest code.

\b
Examples:
  gpq experiment report table2
  gpq experiment report table2 --format markdown --plots table2/plots --out table2/report.md
  gpq experiment report table2 --format latex --table map
""",
)
@click.argument("folder")
@common.format_option("markdown", "latex", "csv", "json")
@click.option("--table", help="Only this table: map, depth, pr or seconds.")
@click.option(
    "--plots", metavar="DIR", help="Draw the pictures of the experiment into this folder."
)
@common.file_option
@common.overwrite_option
def report(
    folder: str,
    form: str | None,
    out: str | None,
    plots: str | None,
    overwrite: bool,
    **options: Any,
) -> None:
    name: Any = common.output_form(form, out, overwrite)
    drawn = {} if plots is None else gpq.draw_experiment(folder, plots, overwrite=overwrite)
    pictures = {
        caption: os.path.relpath(path, Path(out or "").parent) for caption, path in drawn.items()
    }
    text = gpq.report_experiment(folder, name, pictures=pictures, **options)
    common.emit(text.removesuffix("\n"), out)
