"""``gpq index``."""

from __future__ import annotations

import logging
from typing import Any

import click

import gpq_faiss as gpq
from gpq_faiss.errors import UsageError

from . import options as common


@click.command()
@click.argument("model_dir")
@click.argument("sources", metavar="CODES_OR_FEATURES...", nargs=-1)
@common.out_option
@click.option(
    "--kind",
    type=click.Choice(["flat", "fused", "fastscan", "ivf"]),
    default="flat",
    show_default=True,
    help="Kind of the index: flat is a plain 4-bit IndexPQ; ivf has lists made of codewords, for search in place.",
)
@click.option("--memory", metavar="SIZE", help="Memory budget of the build, such as 2GB.  [default: 512MiB]")
@click.option(
    "--no-names",
    is_flag=True,
    help="Do not write OUT.items.sqlite (names, labels and kept columns for results).",
)
@click.option("--add", is_flag=True, help="Add the shards to the manifest --out.")
@click.option(
    "--remove-shard",
    "remove",
    multiple=True,
    metavar="FILE",
    help="Remove this shard from the manifest --out.",
)
@common.ray_option("workers")
@common.overwrite_option
def index(
    model_dir: str, sources: tuple[str, ...], out: str, no_names: bool, ray: dict[str, Any], **options: Any
) -> None:
    """Build a Faiss index of codes.h5 or features.h5, with their 64-bit ids.

    CODES_OR_FEATURES... is one file or several, which are shards of one index: codes.h5 or features.h5; or index files, to merge
    several or convert one.

    Rows stream through files beside the output (of about its size; twice that for ivf), and an interrupted build continues with the
    first unfinished source. Search a large index with gpq search --memory.

    Names and labels of the items go into OUT.items.sqlite, and from there into results.

    With --out NAME.json, each source becomes a shard of its own, in NAME.shards, and NAME.json is their manifest, which search, evaluate,
    info and serve take as one index. With --ray, the shards are built on a cluster. --add and --remove-shard change a manifest; both
    together put a shard in the place of another.

    \b
    Examples:
      gpq index model codes.h5 --out index.faiss
      gpq index model shard-*.h5 --memory 2GB --out index.faiss
      gpq index model a.faiss b.faiss --out merged.faiss
      gpq index model shard-*.h5 --kind ivf --memory 2GB --out lists.faiss
      gpq index model index.faiss --kind ivf --out lists.faiss
      gpq index model codes/*.h5 --ray auto --out manifest.json
      gpq index model more.h5 --add --out manifest.json
    """
    if options["kind"] == "fastscan":
        logging.getLogger("gpq_faiss.stages.index").warning(
            "kind fastscan: plain Faiss finds only part of the true results in this file, as FastScan's 8-bit tables round codebooks of "
            "small weight away (docs/existing-pipelines.md); take kind flat, or gpq search, which is exact"
        )
    options["names"] = not no_names
    if out.endswith(".json"):
        common.emit(str(gpq.index_shards(model_dir, sources, out, **ray, **options)))
        return
    if ray["ray"] is not None or any([options.pop("add"), options.pop("remove")]):
        raise UsageError("--ray, --add and --remove-shard are for shards: name a manifest, --out NAME.json")
    common.emit(str(gpq.index(model_dir, sources, out, **options)))
