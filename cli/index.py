"""``gpq index``."""

from __future__ import annotations

from typing import Any

import click

import gpq_faiss as gpq

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
    help="Kind of the Faiss file: flat is an IndexPQ; the others are exports for plain Faiss.",
)
@click.option(
    "--no-ids",
    is_flag=True,
    help="Write a bare index, in which an item's id is its position; ids must be 0 to n - 1.",
)
@click.option(
    "--no-names",
    is_flag=True,
    help="Do not write OUT.items.sqlite (names, labels and kept columns for results).",
)
@common.overwrite_option
def index(sources: tuple[str, ...], no_ids: bool, no_names: bool, **options: Any) -> None:
    """Build an index of codes.h5 or features.h5, with the 64-bit ids of the items.

    CODES_OR_FEATURES... is one file or several, which are merged: codes.h5, features.h5, or an
    index. The changes that a service has made beside an index are taken up.

    OUT is a plain Faiss file (an IndexPQ in an IndexIDMap2), or NAME.lists: a file that is mapped
    into memory when it is opened, at once and in place of any size, for gpq search and gpq serve.

    Names and labels of the items go into OUT.items.sqlite, and from there into results.

    \b
    Examples:
      gpq index model codes.h5 --out index.faiss
      gpq index model codes-*.h5 --out index.lists
      gpq index model a.faiss b.faiss --out merged.faiss
      gpq index model served.faiss --out new.faiss
      gpq index model codes.h5 --kind fused --out fused.faiss
    """
    paths = list(sources)
    common.emit(str(gpq.index(source=paths, ids=not no_ids, names=not no_names, **options)))
