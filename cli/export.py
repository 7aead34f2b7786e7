"""``gpq export``."""

from __future__ import annotations

from typing import Any

import click

from .options import out_option, overwrite_option


@click.command()
@click.argument("model_dir")
@click.option(
    "--to",
    "to",
    type=click.Choice(["numpy", "nanopq", "faiss-factory", "lancedb"]),
    required=True,
    help="The tool that reads it.",
)
@out_option
@click.option(
    "--factory",
    metavar="STRING",
    help="For faiss-factory: such as IDMap2,PQ12x4 or IVF10,PQ12x4fs.  [default: IDMap2,PQ of the model]",
)
@overwrite_option
def export(model_dir: str, to: Any, out: str, factory: str | None, overwrite: bool) -> None:
    """Write the model's codebooks in the form that another tool takes.

    numpy, nanopq and lancedb get an .npz file of float32 arrays (lancedb in the byte-fused form: two codebooks of 16 are
    one of 256, for the same bytes). faiss-factory is an empty, trained index as faiss.index_factory makes it of STRING:
    PQ of the model's codebooks, with fs for FastScan, half as many of 8 bits for the byte-fused form, IDMap2 for ids, or
    IVF with one list a class of the model. docs/existing-pipelines.md shows how each is loaded.

    \b
    Examples:
      gpq export model --to numpy --out codebooks.npz
      gpq export model --to faiss-factory --factory PQ12x4fs --out fastscan.faiss
    """
    from gpq_faiss.faissio.export import export as run

    click.echo(str(run(model_dir, out, to=to, factory=factory, overwrite=overwrite)))
