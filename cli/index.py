"""``gpq index``."""

from __future__ import annotations

import logging
from typing import Any

import click

from .options import describe_point, out_option, overwrite_option, ray_options


@click.command()
@click.argument("model_dir")
@click.argument("sources", metavar="CODES_OR_FEATURES...", nargs=-1)
@out_option
@click.option(
    "--kind",
    type=click.Choice(["flat", "fused", "fastscan", "ivf"]),
    default="flat",
    show_default=True,
    help="Form of the index: flat is a plain 4-bit IndexPQ; ivf has lists.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="Memory budget of the build, such as 2GB: rows stream through files; resumable by source.",
)
@click.option(
    "--lists",
    metavar="N|prototypes",
    help="For ivf: number of lists by k-means, or one per class prototype of the model.  [default: square root of the items]",
)
@click.option(
    "--assign",
    type=click.Choice(["auto", "nearest", "tables"]),
    default="auto",
    show_default=True,
    help="For ivf with --memory: how items are assigned to lists; the cost of tables does not depend on the number of lists.",
)
@click.option(
    "--list-form",
    type=click.Choice(["fastscan", "fused"]),
    default="fastscan",
    show_default=True,
    help="For ivf: 4-bit FastScan lists, the fastest; or 8-bit ones, which plain Faiss can map into memory.",
)
@click.option("--nprobe", type=int, help="For ivf: lists to probe per query.  [default: 8]")
@click.option(
    "--recall", type=float, help="For ivf: choose nprobe for this recall of the top 10, such as 0.95."
)
@click.option(
    "--no-names",
    is_flag=True,
    help="Do not write OUT.items.h5 (names, labels and kept columns for results).",
)
@click.option("--add", is_flag=True, help="Add the shards to the manifest --out.")
@click.option(
    "--remove-shard",
    "remove",
    multiple=True,
    metavar="FILE",
    help="Remove this shard from the manifest --out.",
)
@ray_options
@overwrite_option
def index(
    model_dir: str,
    sources: tuple[str, ...],
    out: str,
    kind: str,
    memory: str | None,
    lists: str | None,
    assign: str,
    list_form: str,
    nprobe: int | None,
    recall: float | None,
    no_names: bool,
    add: bool,
    remove: tuple[str, ...],
    ray: str | None,
    workers: int | None,
    overwrite: bool,
) -> None:
    """Build a Faiss index of codes.h5 or features.h5, with their 64-bit ids.

    CODES_OR_FEATURES... is one file or several, which are shards of one index: codes.h5, features.h5, or Parquet with columns
    "codes" and "id"; or index files, to merge several or convert one.

    With --memory, rows stream through files beside the output (of about its size; twice that for ivf), and an interrupted build
    continues with the first unfinished source. Search such an index with gpq search --memory.

    Names and labels of the items go into OUT.items.h5, and from there into results.

    With --out NAME.json, each source becomes a shard of its own, in NAME.shards, and NAME.json is their manifest, which search, evaluate,
    info and serve take as one index. With --ray, the shards are built on a cluster. --add and --remove-shard change a manifest; both
    together put a shard in the place of another.

    With --recall, operating points are printed before the path.

    \b
    Examples:
      gpq index model codes.h5 --out index.faiss
      gpq index model shard-*.h5 --memory 2GB --out index.faiss
      gpq index model a.faiss b.faiss --out merged.faiss
      gpq index model codes.h5 --kind ivf --recall 0.95 --out index.faiss
      gpq index model shard-*.h5 --kind ivf --lists 4096 --memory 2GB --out lists.faiss
      gpq index model shard-*.h5 --kind ivf --lists prototypes --memory 2GB --out lists.faiss
      gpq index model codes/*.h5 --ray auto --out manifest.json
      gpq index model more.h5 --add --out manifest.json
    """
    from gpq_faiss.errors import UsageError
    from gpq_faiss.faissio.io import read_sidecar
    from gpq_faiss.faissio.model import read_prototypes
    from gpq_faiss.indexes.lists import IvfSettings
    from gpq_faiss.stages.index import index as run
    from gpq_faiss.stages.index import index_shards

    if nprobe is not None and recall is not None:
        raise UsageError("--nprobe and --recall both choose the lists to probe: give one")
    settings: dict[str, Any] = {}
    if lists == "prototypes":
        settings["centroids"] = read_prototypes(model_dir)
    elif lists is not None:
        if not lists.isdecimal():
            raise UsageError(f"--lists {lists}: write a number, or prototypes")
        settings["lists"] = int(lists)
    if nprobe is not None:
        settings["nprobe"] = nprobe
    if assign != "auto":
        if memory is None:
            raise UsageError("--assign needs --memory")
        settings["assignment"] = assign
    ivf = IvfSettings(**settings) if settings else None
    if kind == "fastscan":
        logging.getLogger("gpq_faiss.stages.index").warning(
            "kind fastscan: plain Faiss finds only part of the true results in this file, as FastScan's 8-bit tables round codebooks of "
            "small weight away; measure it with gpq evaluate --index, or take kind flat. gpq search is exact"
        )
    packing: Any = "bytes" if list_form == "fused" else None
    if out.endswith(".json"):
        if recall is not None:
            raise UsageError("--recall is measured on an index file, not on shards: give --nprobe")
        click.echo(
            index_shards(
                model_dir,
                sources,
                out,
                kind=kind,
                memory=memory,
                ivf=ivf,
                packing=packing,
                names=not no_names,
                add=add,
                remove=remove,
                overwrite=overwrite,
                ray=ray,
                workers=workers,
            )
        )
        return
    if ray is not None or workers is not None or add or remove:
        raise UsageError(
            "--ray, --workers, --add and --remove-shard are for shards: name a manifest, --out NAME.json"
        )
    path = run(
        model_dir,
        sources,
        out,
        kind=kind,
        memory=memory,
        ivf=ivf,
        packing=packing,
        recall=recall,
        names=not no_names,
        overwrite=overwrite,
    )
    if recall is not None:
        for point in (read_sidecar(path) or {})["extra"]["operating_points"]:
            click.echo(describe_point(point))
    click.echo(str(path))
