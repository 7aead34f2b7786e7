"""``gpq search``."""

from __future__ import annotations

from typing import Any

import click

from .options import device_option, emit, format_option, overwrite_option, ray_option, read_option


@click.command()
@click.argument("model_dir", metavar="MODEL")
@click.argument("index_file", metavar="INDEX")
@click.argument("queries")
@click.option("-k", "k", type=int, help="Results per query.  [default: 10]")
@click.option("--rows", help="Only these queries: 0:8, or 3,5,9.")
@click.option(
    "--memory",
    metavar="SIZE",
    help="Memory budget of the search, such as 2GB; a larger index is searched in place on disk. With a GPU: memory "
    "of a search in addition to the index.",
)
@click.option(
    "--nprobe",
    type=int,
    help="Visit only this many lists, the most promising ones: approximate, and the answer says for how many queries it is proven to be "
    "exact.  [default: the exact result]",
)
@click.option(
    "--allow-ids", metavar="FILE", help="Only items with these ids: .npy, or text with one per line."
)
@click.option("--deny-ids", metavar="FILE", help="No items with these ids: .npy, or text with one per line.")
@click.option(
    "--min-score", type=float, metavar="SCORE", help="Instead of k: all items with at least this score."
)
@format_option("json", "h5", "png", "html", note="; h5, png and html need --out")
@click.option("--out", metavar="FILE", help="Write to this file instead of the terminal.")
@click.option("--images", metavar="DATA", help="For png and html: images of the items, as DATA.")
@click.option("--threads", type=int, help="Threads of the search on the CPU.  [default: all cores]")
@ray_option(workers=click.INT, replicas=click.INT, allow_partial=click.BOOL)
@device_option
@overwrite_option
@read_option
def search(
    model_dir: str,
    index_file: str,
    queries: str,
    k: int | None,
    allow_ids: str | None,
    deny_ids: str | None,
    format_: str,
    out: str | None,
    images: str | None,
    overwrite: bool,
    ray: dict[str, Any],
    data_args: dict[str, Any],
    **options: Any,
) -> None:
    """Find the k best items of an index for each query.

    MODEL is a model folder, or its network as gpq export-encoder writes it in ONNX, which runs without torch.
    QUERIES is a file of embeddings (.npy, .npz, .parquet), an image, a folder of images, any DATA that gpq train takes, or, for a
    model of the presets paper and authors, its features.h5 (with other presets, query and item vectors differ).

    Results are exact, ties in the order of ids, except with --nprobe.
    With --device cuda the network and the search run on the GPU, with the same results; unsupported options are errors.
    Queries with fewer than k results, for example with a filter, are reported on stderr.

    \b
    Examples:
      gpq search model index.faiss queries.npy -k 10 --format json
      gpq search model index.faiss photo.jpg
      gpq search encoder.onnx index.faiss queries.npy
      gpq search model index.faiss queries.npy --device cuda
      gpq search model manifest.json queries.npy --ray auto,replicas=2
      gpq search model lists.faiss queries.npy --memory 2GB
      gpq search model index.faiss queries.npy --deny-ids seen.txt --threads 2
      gpq search model index.faiss queries.npy --min-score 3.5 --format json
      gpq search model index.faiss digits --rows 0:8 --format png --images digits --out ranked.png
      gpq search model index.faiss digits --rows 0:8 --format html --images digits --out ranked.html
    """
    from gpq_faiss.data.ids import read_ids
    from gpq_faiss.errors import UsageError
    from gpq_faiss.evaluation.tables import render
    from gpq_faiss.indexes.filters import Allow, Deny
    from gpq_faiss.stages.queries import own_features
    from gpq_faiss.stages.search import search as run

    if options["min_score"] is not None and k is not None:
        raise UsageError("--min-score returns all items with at least that score: leave out -k")
    if allow_ids is not None and deny_ids is not None:
        raise UsageError("--allow-ids and --deny-ids exclude each other: give one")
    where: Any = None if allow_ids is None else Allow(read_ids(allow_ids))
    where = where if deny_ids is None else Deny(read_ids(deny_ids))
    items = _check_form(format_, out, images, data_args, overwrite=overwrite)
    result = run(
        model_dir,
        index_file,
        queries,
        k=10 if k is None else k,
        where=where,
        data_args=data_args,
        **ray,
        **options,
    )
    if out is not None and items is not None:
        asked = items if own_features(queries) else None  # of vectors alone, the images are the items'
        emit(str(result.draw(items, asked, out, overwrite=overwrite)))
    elif out is not None and format_ == "h5":
        emit(str(result.save_hdf5(out)))
    elif format_ == "json":
        emit(result.to_dict(), out)
    else:
        emit(render(rows, digits=4) if (rows := result.rows()) else "no item found", out)


def _check_form(
    form: str, out: str | None, images: str | None, data_args: dict[str, Any], *, overwrite: bool
) -> Any:
    """Check what the format needs, before any work; returns the images of a picture or page."""
    from gpq_faiss.errors import UsageError
    from gpq_faiss.files import check_output
    from gpq_faiss.report.figure import check_picture

    from .options import open_dataset

    if out is not None:
        (check_picture if form == "png" else check_output)(out, overwrite=overwrite)
    elif form in {"h5", "png", "html"}:
        raise UsageError(f"--format {form} needs --out FILE")
    if form not in {"png", "html"}:
        return None
    if images is None:
        raise UsageError(f"--format {form} needs --images DATA, the images of the items in the index")
    if form == "html" and not str(out).endswith(".html"):
        raise UsageError(f"--format html writes a page: --out {out} must end in .html")
    return open_dataset(images, data_args)
