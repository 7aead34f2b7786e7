"""``gpq search``."""

from __future__ import annotations

from typing import Any

import click

import gpq_faiss as gpq
from gpq_faiss.errors import UsageError

from . import options as common


@click.command()
@click.argument("model")
@click.argument("index")
@click.argument("queries")
@click.option("-k", "k", type=int, help="Results per query.  [default: 10]")
@click.option("--rows", help="Only these queries: 0:8, or 3,5,9.")
@click.option(
    "--allow-ids",
    metavar="FILE",
    help="Only items with these ids: .npy, or text with one per line.",
)
@click.option(
    "--deny-ids", metavar="FILE", help="No items with these ids: .npy, or text with one per line."
)
@click.option(
    "--min-score",
    type=float,
    metavar="SCORE",
    help="Instead of k: all items with at least this score.",
)
@common.format_option("json", "png", note="; png needs --out and --images")
@click.option("--out", metavar="FILE", help="Write to this file instead of the terminal.")
@click.option("--images", metavar="DATA", help="For png: images of the items, as DATA.")
@click.option("--threads", type=int, help="Threads of the search on the CPU.  [default: all cores]")
@common.device_option
@common.overwrite_option
@common.read_option
def search(
    model: str,
    queries: str,
    k: int | None,
    allow_ids: str | None,
    deny_ids: str | None,
    format_: str,
    out: str | None,
    images: str | None,
    threads: int | None,
    device: str,
    overwrite: bool,
    data_args: dict[str, Any],
    **options: Any,
) -> None:
    """Find the k best items of an index for each query.

    MODEL is a model folder, or its network as gpq export-encoder writes it in ONNX, which runs
    without torch. INDEX is index.faiss, index.lists or codes.h5. QUERIES is a file of embeddings
    (.npy, .npz, .parquet), an image, a folder of images, or any DATA that gpq train takes.

    Results are exact, ties in the order of ids. With --device cuda the network and the search run
    on the GPU, with the same results.

    \b
    Examples:
      gpq search model index.faiss queries.npy -k 10 --format json
      gpq search encoder.onnx index.lists photo.jpg
      gpq search model index.faiss queries.npy --deny-ids seen.txt --threads 2
      gpq search model codes.h5 queries.npy --min-score 3.5 --format json
      gpq search model index.faiss digits --rows 0:8 --format png --images digits --out ranked.png
    """
    import faiss

    from gpq_faiss.codes.checks import check_count
    from gpq_faiss.data.arrays import read_ids
    from gpq_faiss.stages.search import open_queries

    if options["min_score"] is not None and k is not None:
        raise UsageError("--min-score returns all items with at least that score: leave out -k")
    if allow_ids is not None and deny_ids is not None:
        raise UsageError("--allow-ids and --deny-ids exclude each other: give one")
    if format_ == "png" and (out is None or images is None):
        raise UsageError("--format png needs --out FILE, and --images DATA of the index")
    if threads is not None:
        faiss.omp_set_num_threads(check_count(threads, "--threads"))
    common.check_files(overwrite, *([None, out] if format_ == "png" else [out]))
    items = gpq.open_data(images, **data_args) if format_ == "png" and images is not None else None
    result = gpq.search(
        gpq.open_encoder(model, device),
        queries=open_queries(queries, **data_args),
        k=10 if k is None else k,
        allow=None if allow_ids is None else read_ids(allow_ids),
        deny=None if deny_ids is None else read_ids(deny_ids),
        **options,
    )
    if items is not None and out is not None:
        # Of queries that are vectors alone, the images are the items'.
        common.emit(str(result.draw(items, result.queries or items, out, overwrite=overwrite)))
    elif format_ == "json":
        common.emit(result.to_dict(), out)
    else:
        rows = result.rows()
        common.emit(gpq.render(rows, digits=4) if rows else "no item was found", out)
