"""``gpq search``."""

from __future__ import annotations

from typing import Any

import click

from .options import (
    RenamedOption,
    data_options,
    device_option,
    emit,
    open_dataset,
    overwrite_option,
    ray_options,
)


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
    "--allow-ids",
    cls=RenamedOption,
    before="--where-ids",
    metavar="FILE",
    help="Only items with these ids: .npy, or text with one per line.",
)
@click.option(
    "--deny-ids",
    cls=RenamedOption,
    before="--without-ids",
    metavar="FILE",
    help="No items with these ids: .npy, or text with one per line.",
)
@click.option(
    "--min-score",
    cls=RenamedOption,
    before="--least",
    type=float,
    metavar="SCORE",
    help="Instead of k: all items with at least this score.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json", "h5", "png", "html"]),
    default="table",
    show_default=True,
    help="Output format; h5, png and html need --out.",
)
@click.option("--out", metavar="FILE", help="Write to this file instead of the terminal.")
@click.option("--images", metavar="DATA", help="For png and html: images of the items, as DATA.")
@click.option("--threads", type=int, help="Threads of the search on the CPU.  [default: all cores]")
@ray_options
@click.option(
    "--replicas",
    type=int,
    default=1,
    show_default=True,
    help="With --ray: copies of each shard, which share the queries.",
)
@click.option(
    "--allow-partial",
    is_flag=True,
    help="With --ray: skip shards that cannot be searched, and name them.",
)
@device_option
@overwrite_option
@data_options
def search(
    model_dir: str,
    index_file: str,
    queries: str,
    k: int | None,
    rows: str | None,
    memory: str | None,
    nprobe: int | None,
    allow_ids: str | None,
    deny_ids: str | None,
    min_score: float | None,
    format_: str,
    out: str | None,
    images: str | None,
    threads: int | None,
    ray: str | None,
    workers: int | None,
    replicas: int,
    allow_partial: bool,
    device: str,
    overwrite: bool,
    data_args: dict[str, Any],
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
      gpq search model manifest.json queries.npy --ray auto --replicas 2
      gpq search model lists.faiss queries.npy --memory 2GB
      gpq search model index.faiss queries.npy --deny-ids seen.txt --threads 2
      gpq search model index.faiss queries.npy --min-score 3.5 --format json
      gpq search model index.faiss digits --rows 0:8 --format png --images digits --out ranked.png
      gpq search model index.faiss digits --rows 0:8 --format html --images digits --out ranked.html
    """
    from gpq_faiss.data.id_files import read_ids
    from gpq_faiss.errors import UsageError
    from gpq_faiss.evaluation.tables import render
    from gpq_faiss.files import check_output
    from gpq_faiss.indexes.filters import Allow, Deny
    from gpq_faiss.inputs import parse_bytes
    from gpq_faiss.report.figure import check_picture
    from gpq_faiss.stages.queries import open_queries
    from gpq_faiss.stages.search import search as run

    if ray is None and (workers is not None or replicas != 1 or allow_partial):
        raise UsageError("--workers, --replicas and --allow-partial need --ray")
    if min_score is not None and k is not None:
        raise UsageError("--min-score returns all items with at least that score: leave out -k")
    if allow_ids is not None and deny_ids is not None:
        raise UsageError("--allow-ids and --deny-ids exclude each other: give one")
    where: Any = None
    if allow_ids is not None:
        where = Allow(read_ids(allow_ids))
    elif deny_ids is not None:
        where = Deny(read_ids(deny_ids))
    if out is not None:
        (check_picture if format_ == "png" else check_output)(out, overwrite=overwrite)
    elif format_ in {"h5", "png", "html"}:
        raise UsageError(f"--format {format_} needs --out FILE")
    if format_ in {"png", "html"} and images is None:
        raise UsageError(f"--format {format_} needs --images DATA, the images of the items in the index")
    if format_ == "html" and out is not None and not out.endswith(".html"):
        raise UsageError(f"--format html writes a page: --out {out} must end in .html")
    shown = open_dataset(images, data_args) if images is not None else None
    own = queries.endswith((".h5", ".hdf5"))
    # Half of the budget is for the search itself.
    budget = None if memory is None else parse_bytes(memory) // 2
    source = queries if own else open_queries(queries, memory=budget, **data_args)
    result = run(
        model_dir,
        index_file,
        source,
        k=10 if k is None else k,
        rows=rows,
        memory=memory,
        nprobe=nprobe,
        where=where,
        min_score=min_score,
        device=device,
        threads=threads,
        ray=ray,
        workers=workers,
        replicas=replicas,
        allow_partial=allow_partial,
    )
    if format_ in {"png", "html"}:
        assert shown is not None
        assert out is not None
        asked = shown if isinstance(source, str) else source
        click.echo(str(result.draw(shown, asked, out, overwrite=overwrite)))
    elif format_ == "h5":
        assert out is not None
        click.echo(str(result.save_hdf5(out)))
    else:
        found = result.rows()
        emit(
            result.to_dict() if format_ == "json" else render(found, digits=4) if found else "no item found",
            out,
        )
