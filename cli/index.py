"""``gpq index``."""

from __future__ import annotations

import click

from .options import out_option, overwrite_option, progress


@click.command()
@click.argument("model_dir")
@click.argument("source", metavar="CODES_OR_FEATURES")
@out_option
@overwrite_option
def index(model_dir: str, source: str, out: str, overwrite: bool) -> None:
    """Build a Faiss index of codes.h5 or features.h5, with the 64-bit ids that they carry.

    \b
    Example:
      gpq index model codes.h5 --out index.faiss
    """
    from gpq_faiss.index.build import index as run

    with progress("index", "code") as update:
        path = run(model_dir, source, out, overwrite=overwrite, progress=update)
    click.echo(str(path))
