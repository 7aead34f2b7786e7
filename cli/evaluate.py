"""``gpq evaluate``."""

from __future__ import annotations

from typing import Any

import click

import gpq_faiss as gpq

from . import options as common


@click.command(
    help=f"""Measure a model on labelled DATA: mAP, precision and recall at k, neighbour recall.

Queries and database are those of the training split. mAP is over the full ranking, with the
expected value over random order within ties (gpq.evaluate in Python has other orders). NN10@100 is
the share of a query's ten nearest items by features that are among its first 100 results. Networks
run on --device, rankings on the CPU.

MODEL is a model folder; with --codes it may be the network in ONNX (gpq export-encoder), which runs
without torch. The database is then that file, and all labelled items of DATA are the queries.

--compare adds rows to the table: methods, which are fitted on the same items, and models trained on
the same split. A model's row has the name of its method and its preset.

\b
Examples:
  gpq evaluate model digits --protocol 1 --compare pq,opq,itq
  gpq evaluate model digits -k 100 --denominator relevant-in-top-k
  gpq evaluate model features:clip.npy --labels labels.npy --format json --out scores.json
  gpq evaluate encoder.onnx features:queries.npy --labels labels.npy --codes codes.h5

{common.DATA_HELP}
"""
)
@click.argument("model")
@click.argument("data")
@click.option(
    "--protocol", help="1, 2, transfer[:CLASSES] or gpq-authors.  [default: the training's]"
)
@click.option(
    "--compare",
    default="",
    metavar="NAMES",
    help="Rows to add, separated by commas: pq, opq, itq, float, classifier, faiss:FACTORY_STRING, "
    "folders of models.",
)
@click.option(
    "--codes",
    metavar="FILE",
    help="Labelled codes (codes.h5) of the database; DATA are the queries, no split is drawn.",
)
@click.option("-k", "k", type=int, help="mAP@k instead of the full ranking.")
@click.option(
    "--denominator",
    type=click.Choice(["relevant", "relevant-in-top-k", "min(k, relevant)"]),
    default="relevant",
    show_default=True,
    help="Divisor of mAP@k: all relevant items, those in the top k (usual in papers on hashing), "
    "or min(k, relevant).",
)
@common.format_option("json", "markdown", "csv", "latex")
@click.option("--out", metavar="FILE", help="Write to this file instead of the terminal.")
@click.option(
    "--plot", metavar="FILE", help="Draw the precision-recall curves: .png, .svg or .pdf."
)
@common.device_option
@common.overwrite_option
@common.data_options
def evaluate(
    data: str,
    k: int | None,
    denominator: Any,
    format_: Any,
    out: str | None,
    plot: str | None,
    overwrite: bool,
    data_args: dict[str, Any],
    **options: Any,
) -> None:
    common.check_files(overwrite, out, plot)
    convention = gpq.Convention(k=k, denominator=denominator)
    dataset = gpq.open_data(data, **data_args)
    result = gpq.evaluate(data=dataset, convention=convention, **options)
    if plot is not None:
        result.draw(plot, overwrite=overwrite)
    if format_ == "json":
        common.emit(result.to_dict(), out)
    else:
        lines = result.about() if format_ == "text" else []
        common.emit("\n".join([gpq.render(result.rows(), format_, digits=4), *lines]), out)
