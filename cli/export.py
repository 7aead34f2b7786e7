"""``gpq export``."""

from __future__ import annotations

from typing import Any

import click

from .options import emit, out_option, overwrite_option


@click.command()
@click.argument("source")
@click.option(
    "--to",
    type=click.Choice(["factory", "numpy", "nanopq", "lancedb", "parquet"]),
    required=True,
    help="The tool that reads it.",
)
@out_option
@click.option(
    "--factory",
    metavar="STRING",
    help="For factory: such as IDMap2,PQ12x4 or PQ12x4fs.  [default: IDMap2,PQ of the model]",
)
@overwrite_option
def export(source: str, out: str, **options: Any) -> None:
    """Write a model's codebooks, or codes, for another tool. SOURCE is a model folder; for parquet, codes.h5.

    factory is an empty, trained index as faiss.index_factory makes it of STRING: PQ of the model's codebooks, with fs for FastScan,
    half as many of 8 bits for byte-fused codebooks, IDMap2 for ids. numpy, nanopq and lancedb are .npz files of float32 codebooks (of
    lancedb byte-fused: two codebooks of 16 are one of 256, for the same bytes). parquet is a table of ids, codes, names and labels.
    docs/databases.md shows how each is loaded.

    \b
    Examples:
      gpq export model --to numpy --out codebooks.npz
      gpq export model --to factory --factory PQ12x4fs --out fastscan.faiss
      gpq export codes.h5 --to parquet --out codes.parquet
    """
    from gpq_faiss.stages.export import export as run

    emit(str(run(source, out, **options)))
