"""``gpq experiment``: methods, run, report."""

from __future__ import annotations

from typing import Any

import click

from .options import (
    DATA_HELP,
    data_options,
    device_option,
    emit,
    open_dataset,
    out_option,
    overwrite_option,
)
from .progress import only_warnings


@click.group(
    help="""Compare methods: a grid of methods, code lengths and seeds on the same splits, one file per run, tables from the files.

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
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json", "markdown", "csv"]),
    default="table",
    show_default=True,
    help="Output format.",
)
def methods(format_: str) -> None:
    from gpq_faiss.evaluation.tables import render
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
    form = {"table": "text"}.get(format_, format_)
    emit(render(rows, form).removesuffix("\n"))  # type: ignore[arg-type]


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """Integers separated by commas."""
    from gpq_faiss.errors import UsageError

    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"{option} {text}: write whole numbers with commas, as 12,24") from None


@experiment.command(
    help=f"""Make the runs of GRID on DATA that are missing in the folder --out.

GRID is table2, table3, ablation, pairs, likeness, sensitivity, scale, tsne or voronoi, or a TOML file. Finished runs are skipped,
interrupted ones are resumed, and a failed run does not stop the others (the exit code is then 1).

\b
Examples:
  gpq experiment run table2 digits --labelled 20-per-class --methods gpq,pq,itq --bits 24 --seeds 0 --out digits
  gpq experiment run table2 features:clip.npy --labels labels.npy --jobs 2 --out table2
  gpq experiment run mine.toml cifar10 --device cuda --out mine

{DATA_HELP}
"""
)
@click.argument("grid")
@click.argument("data")
@out_option
@click.option(
    "--methods", "chosen_methods", help="Short names separated by commas, or all.  [default: the grid's]"
)
@click.option("--bits", help="Code lengths separated by commas.  [default: the grid's]")
@click.option(
    "--seeds", help="Seeds of split, weights and batches, separated by commas.  [default: the grid's]"
)
@click.option("--protocol", help="1, 2, transfer[:SHARE|CLASSES] or gpq-authors.  [default: the grid's]")
@click.option(
    "--labelled",
    help="Labels for the training: N-per-class, a fraction or a file; several separated by commas.  [default: the grid's]",
)
@click.option(
    "--queries",
    help="Queries of protocol 1: N-per-class, or a file of ids.  [default: the grid's, or a sixtieth of each class, at least 10]",
)
@click.option(
    "--preset",
    help="Settings of trained methods: recommended, gpq, unseen-classes, paper or authors.  [default: the grid's]",
)
@click.option(
    "--config",
    "config_file",
    metavar="TOML",
    help="Settings that override the grid's preset; rows with their own preset keep it.",
)
@click.option("--name", "data_name", help="Name of the data in tables.  [default: DATA without folders]")
@click.option(
    "--jobs", default=1, show_default=True, help="Concurrent runs, each in its own process with one thread."
)
@click.option("--checkpoint-seconds", default=60.0, hidden=True, help="Seconds between two checkpoints.")
@device_option
@overwrite_option
@data_options
def run(
    grid: str,
    data: str,
    out: str,
    chosen_methods: str | None,
    bits: str | None,
    seeds: str | None,
    protocol: str | None,
    labelled: str | None,
    queries: str | None,
    preset: str | None,
    config_file: str | None,
    data_name: str | None,
    jobs: int,
    checkpoint_seconds: float,
    device: str,
    overwrite: bool,
    data_args: dict[str, Any],
) -> None:
    from gpq_faiss import config as settings
    from gpq_faiss.errors import DataError, UsageError
    from gpq_faiss.experiment.grid import read_grid
    from gpq_faiss.experiment.run import run_experiment
    from gpq_faiss.methods.registry import METHODS

    wanted = None
    if chosen_methods is not None:
        wanted = tuple(name.strip() for name in chosen_methods.split(",") if name.strip())
    chosen = read_grid(grid).with_options(
        methods=tuple(METHODS) if wanted == ("all",) else wanted,
        bits=_numbers(bits, "--bits"),
        seeds=_numbers(seeds, "--seeds"),
        protocol=protocol,
        labelled=None if labelled is None else tuple(part.strip() for part in labelled.split(",")),
        queries=queries,
        preset=preset,
    )
    base = settings.preset(chosen.preset)
    if config_file is not None:
        base = settings.read_toml(config_file, base)
        if preset is not None and base.preset != preset:
            raise UsageError(
                f'--preset {preset} contradicts preset = "{base.preset}" in {config_file}: keep one'
            )
    dataset = open_dataset(data, data_args)
    # The steps of every training are many; what is of interest here is each run as it ends.
    with only_warnings("gpq_faiss.training.loop"):
        summary = run_experiment(
            chosen,
            data,
            out,
            dataset=dataset,
            data_args=data_args,
            base=settings.validate(base),
            device=device,
            jobs=jobs,
            data_name=data_name,
            overwrite=overwrite,
            checkpoint_seconds=checkpoint_seconds,
        )
    parts = [f"{summary.made:,} runs made", f"{summary.there:,} already done"]
    if summary.elsewhere:
        parts.append(f"{len(summary.elsewhere):,} in progress in another process")
    parts += [f"{name} left out ({why})" for name, why in summary.left_out.items()]
    emit(f"{summary.folder}: {'; '.join(parts)}")
    if summary.failed:
        count = len(summary.failed)
        reasons: dict[str, list[str]] = {}
        for name, why in summary.failed.items():
            reasons.setdefault(why, []).append(name)
        reasons_text = "; ".join(f"{', '.join(which)}: {why}" for why, which in reasons.items())
        raise DataError(f"{count:,} of {summary.total:,} runs failed: {reasons_text}")


@experiment.command(
    help="""Tables and pictures of the runs in FOLDER, which is what gpq experiment run wrote.

The first table is what the experiment is about: mAP by method and length, mean and deviation over the seeds that are done.

\b
Examples:
  gpq experiment report table2
  gpq experiment report table2 --format markdown --plots table2/plots --out table2/report.md
  gpq experiment report table2 --format latex --table map
  gpq experiment report table2 --format html --out table2.html
"""
)
@click.argument("folder")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "markdown", "latex", "csv", "json", "html"]),
    default="table",
    show_default=True,
    help="Output format; csv has one table, html is a page with pictures and needs --out.",
)
@click.option("--table", help="Only this table: map, published, likeness, depth, pr, seconds, grid or scale.")
@click.option("--plots", metavar="DIR", help="Draw the pictures of the experiment into this folder.")
@click.option(
    "--picture-format",
    type=click.Choice(["png", "svg", "pdf"]),
    default="png",
    show_default=True,
    help="Format of the pictures.",
)
@click.option("--images", metavar="DATA", help="The images of the data: adds galleries to the pictures.")
@click.option(
    "--published",
    metavar="CSV",
    help="Published figures to compare with: a CSV with method,12,24,... or with data_set,protocol,method,bits,map.",
)
@click.option("--out", metavar="FILE", help="Write to this file instead of the terminal.")
@overwrite_option
@data_options
def report(
    folder: str,
    format_: str,
    table: str | None,
    plots: str | None,
    picture_format: str,
    images: str | None,
    published: str | None,
    out: str | None,
    overwrite: bool,
    data_args: dict[str, Any],
) -> None:
    import os
    from pathlib import Path

    from gpq_faiss.errors import UsageError
    from gpq_faiss.experiment.page import save_report_page
    from gpq_faiss.experiment.pictures import draw_experiment
    from gpq_faiss.experiment.published import read_published
    from gpq_faiss.experiment.report import report_experiment
    from gpq_faiss.experiment.results import read_experiment
    from gpq_faiss.files import check_output

    if format_ == "html" and (out is None or table is not None or plots is not None):
        raise UsageError(
            "--format html is a page of all tables and pictures: give --out FILE.html, no --table and no --plots"
        )
    if images is not None and plots is None and format_ != "html":
        raise UsageError("--images adds to the pictures: give --plots as well")
    if out is not None:
        check_output(out, overwrite=overwrite)
    about = read_experiment(folder).about if published is not None else {}
    beside = (
        None if published is None else read_published(published, about["data"]["name"], about["protocol"])
    )
    if format_ == "html":
        assert out is not None
        shown = open_dataset(images, data_args) if images is not None else None
        page = save_report_page(folder, out, published=beside, images=shown, overwrite=overwrite)
        emit(str(page))
        return
    drawn = {}
    if plots is not None:
        behind = open_dataset(images, data_args) if images is not None else None
        drawn = draw_experiment(folder, plots, images=behind, ending=picture_format, overwrite=overwrite)
    start = Path(out).parent if out is not None else Path()
    text = report_experiment(
        folder,
        {"table": "text"}.get(format_, format_),  # type: ignore[arg-type]
        table=table,
        published=beside,
        pictures={caption: os.path.relpath(path, start) for caption, path in drawn.items()},
    )
    emit(text.removesuffix("\n"), out)
