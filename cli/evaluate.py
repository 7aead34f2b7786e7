"""``gpq evaluate``."""

from __future__ import annotations

from typing import Any

import click

from .options import DATA_HELP, RAY_HELP, data_options, device_option, emit, open_dataset, overwrite_option


@click.command(
    help=f"""Measure a model on labelled DATA: mAP, likeness, precision and recall at k, precision-recall curve.

Queries and database are those of the training split. mAP is over the full ranking, with the expected value over random order within
ties, unless --ties is given. With --device cuda the network and the ranking run on the GPU,
with the same figures; compared methods run on the CPU. NN10@100 is the share of a query's ten nearest items by features that are
among its first 100 results.

MODEL is a model folder; with --codes it may be the network in ONNX (gpq export-encoder), which runs without torch. The database is
then that file, and all labelled items of DATA are the queries.

--compare adds rows to the table: methods, which are fitted on the same items, and models trained on the same split. A model's row has
the name of its method and its preset.

\b
Examples:
  gpq evaluate model digits --protocol 1 --compare pq,opq,itq
  gpq evaluate demo/model digits --compare demo/paper,pq,classifier
  gpq evaluate model features:clip.npy --labels labels.npy --ray auto
  gpq evaluate model features:clip.npy --labels labels.npy --format json --out scores.json
  gpq evaluate model digits --compare pq,classifier --format html --out report.html
  gpq evaluate model digits --index index.faiss
  gpq evaluate encoder.onnx features:queries.npy --labels labels.npy --codes codes.h5

{DATA_HELP}
"""
)
@click.argument("model_dir", metavar="MODEL")
@click.argument("data")
@click.option("--protocol", help="1, 2, transfer[:SHARE|CLASSES] or gpq-authors.  [default: the training's]")
@click.option("--seed", type=int, help="Seed of the split, for data that the model was not trained on.")
@click.option(
    "--labelled",
    default="all",
    help="Labelled part of the split, for data that the model was not trained on.",
)
@click.option(
    "--compare",
    default="",
    metavar="NAMES",
    help="What to compare with, separated by commas: pq, opq, itq, float, classifier, folders of models.",
)
@click.option(
    "--codes",
    metavar="FILE",
    help="Labelled codes (codes.h5) of the database; DATA are the queries, no split is drawn.",
)
@click.option(
    "--index",
    metavar="FILE",
    help="Also measure how much of the exact top 10 plain Faiss finds in this index file.",
)
@click.option("--at", default="1,10,100,1000", show_default=True, help="The k of precision and recall.")
@click.option("-k", "k", type=int, help="mAP@k instead of the full ranking.")
@click.option(
    "--ties",
    type=click.Choice(["expected", "id", "best", "worst"]),
    default="expected",
    show_default=True,
    help="Order within equal scores.",
)
@click.option(
    "--denominator",
    type=click.Choice(["relevant", "relevant-in-top-k", "min(k, relevant)"]),
    default="relevant",
    show_default=True,
    help="Denominator of AP: all relevant items, or with -k one of the two others.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json", "markdown", "csv", "latex", "html"]),
    default="table",
    show_default=True,
    help="Output format; html is a page with plots and pictures, and needs --out.",
)
@click.option("--out", metavar="FILE", help="Write to this file instead of the terminal.")
@click.option("--plot", metavar="FILE", help="Draw the precision-recall curves: .png, .svg or .pdf.")
@click.option("--threads", type=int, help="Threads of the ranking on the CPU.  [default: all cores]")
@click.option("--ray", metavar="ADDRESS", help=RAY_HELP)
@device_option
@overwrite_option
@data_options
def evaluate(
    model_dir: str,
    data: str,
    protocol: str | None,
    seed: int | None,
    labelled: str,
    compare: str,
    codes: str | None,
    index: str | None,
    at: str,
    k: int | None,
    ties: str,
    denominator: str,
    format_: str,
    out: str | None,
    plot: str | None,
    threads: int | None,
    ray: str | None,
    device: str,
    overwrite: bool,
    data_args: dict[str, Any],
) -> None:
    from gpq_faiss.errors import UsageError
    from gpq_faiss.evaluation.tables import render
    from gpq_faiss.files import check_output
    from gpq_faiss.report.figure import check_picture
    from gpq_faiss.stages.evaluate import evaluate as run

    if out is not None:
        check_output(out, overwrite=overwrite)
    if format_ == "html" and (out is None or not out.endswith(".html")):
        raise UsageError("--format html writes a page: name it with --out FILE.html")
    if plot is not None:
        check_picture(plot, overwrite=overwrite)
    try:
        ks = [int(part) for part in at.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"--at {at}: write numbers separated by commas, as 1,10,100") from None
    dataset = open_dataset(data, data_args)
    result = run(
        model_dir,
        dataset,
        protocol=protocol,
        seed=seed,
        labelled=labelled,
        compare=[name.strip() for name in compare.split(",") if name.strip()],
        codes=codes,
        index=index,
        ks=ks,
        k=k,
        ties=ties,  # type: ignore[arg-type]
        denominator=denominator,  # type: ignore[arg-type]
        device=device,
        threads=threads,
        ray=ray,
    )
    if plot is not None:
        result.draw(plot, overwrite=overwrite)
    if format_ == "html":
        assert out is not None
        click.echo(str(result.save_page(dataset, out, ks=ks, overwrite=overwrite)))
        return
    if format_ == "json":
        emit(result.to_dict(), out)
        return
    names = {"table": "text"}
    table = render(result.rows(ks), names.get(format_, format_), digits=4)  # type: ignore[arg-type]
    emit("\n".join([table, *result.about()]) if format_ == "table" else table, out)
