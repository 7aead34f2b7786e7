"""``gpq search``."""

from __future__ import annotations

from typing import Any

import click

from .options import data_options, device_option, emit, open_dataset, overwrite_option, progress


@click.command()
@click.argument("model_dir")
@click.argument("index_file", metavar="INDEX")
@click.argument("queries")
@click.option("-k", "k", default=10, show_default=True, help="Results a query.")
@click.option("--rows", help="Only these queries: 0:8, or 3,5,9.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json", "h5", "png"]),
    default="table",
    show_default=True,
    help="How results are given; h5 and png need --out.",
)
@click.option("--out", metavar="FILE", help="Write here instead of to the terminal.")
@click.option("--images", metavar="DATA", help="For png: the images of the items, as DATA.")
@click.option("--threads", type=int, help="Threads of the search.  [default: all cores]")
@device_option
@overwrite_option
@data_options
def search(
    model_dir: str,
    index_file: str,
    queries: str,
    k: int,
    rows: str | None,
    format_: str,
    out: str | None,
    images: str | None,
    threads: int | None,
    device: str,
    overwrite: bool,
    data_args: dict[str, Any],
) -> None:
    """Find the k best items of an index for each query.

    QUERIES is a features.h5 of the model, a file of embeddings (.npy, .npz, .parquet), an image, a folder of images, or
    any DATA that gpq train takes.

    \b
    Examples:
      gpq search model index.faiss queries.npy -k 10 --format json
      gpq search model index.faiss photo.jpg
      gpq search model index.faiss digits --rows 0:8 --format png --images digits --out ranked.png
    """
    from gpq_faiss.errors import UsageError
    from gpq_faiss.evaluate.tables import render
    from gpq_faiss.files import check_output
    from gpq_faiss.report.figure import check_picture
    from gpq_faiss.search import draw_results, open_queries
    from gpq_faiss.search import search as run

    if out is not None:
        (check_picture if format_ == "png" else check_output)(out, overwrite=overwrite)
    elif format_ in {"h5", "png"}:
        raise UsageError(f"--format {format_} needs --out FILE")
    if format_ == "png" and images is None:
        raise UsageError("--format png needs --images DATA, the images of the items in the index")
    shown = open_dataset(images, data_args) if images is not None else None
    own = queries.endswith((".h5", ".hdf5"))
    source = queries if own else open_queries(queries, **data_args)
    with progress("encode queries", "item") as update:
        result = run(
            model_dir, index_file, source, k=k, rows=rows, device=device, threads=threads, progress=update
        )
    if format_ == "png":
        assert shown is not None
        assert out is not None
        asked = shown if isinstance(source, str) else source
        click.echo(str(draw_results(result, shown, asked, out, overwrite=overwrite)))
    elif format_ == "h5":
        assert out is not None
        click.echo(str(result.save_hdf5(out)))
    else:
        emit(result.to_dict() if format_ == "json" else render(result.rows(), digits=4), out)
