"""``gpq export-faiss``."""

from __future__ import annotations

import click

from .options import emit, out_option, overwrite_option


@click.command()
@click.argument("model_dir")
@out_option
@overwrite_option
def export_faiss(model_dir: str, out: str, overwrite: bool) -> None:
    """Write an empty, trained faiss IndexPQ (inner product) with the model's codebooks.

    Any Faiss program reads it with faiss.read_index and adds vectors of items to it; they must come from the model's
    network (gpq encode). Queries are the network's too (the file of gpq export-encoder). If query and
    item vectors differ, as with all presets except paper and authors, a note says so: Faiss cannot tell them apart.

    \b
    Example:
      gpq export-faiss model --out empty.faiss
    """
    from gpq_faiss.stages.export import export_faiss as run

    emit(str(run(model_dir, out, overwrite=overwrite)))
