"""``gpq encode``."""

from __future__ import annotations

from typing import Any

import click

from .options import (
    DATA_HELP,
    data_options,
    device_option,
    open_dataset,
    out_option,
    overwrite_option,
)


@click.command(
    help=f"""Encode DATA with a model: write features.h5, then codes.h5.

Streams: memory does not grow with the data. An interrupted run continues where it stopped when called again.

\b
Example:
  gpq encode model features:clip.npy --out codes.h5

{DATA_HELP}
"""
)
@click.argument("model_dir")
@click.argument("data")
@out_option
@click.option("--features", metavar="FILE", help="The features file.  [default: beside --out]")
@click.option("--no-features", is_flag=True, help="Write the codes alone.")
@click.option("--batch-size", type=int, default=0, help="Items per batch.  [default: by the data and device]")
@click.option("--amp", is_flag=True, help="Run the backbone in bf16.")
@device_option
@click.option("--restart", is_flag=True, help="Start again instead of continuing an interrupted run.")
@overwrite_option
@data_options
def encode(
    model_dir: str,
    data: str,
    out: str,
    features: str | None,
    no_features: bool,
    batch_size: int,
    amp: bool,
    device: str,
    restart: bool,
    overwrite: bool,
    data_args: dict[str, Any],
) -> None:
    from gpq_faiss.files import check_output
    from gpq_faiss.stages.encode import encode as run

    # Before the data are opened, which may take a while.
    check_output(out, overwrite=overwrite)
    dataset = open_dataset(data, data_args)
    path = run(
        model_dir,
        dataset,
        out,
        features=features,
        keep_features=not no_features,
        device=device,
        batch_size=batch_size,
        amp=amp,
        resume=not restart,
        overwrite=overwrite,
    )
    from gpq_faiss.store import RowReader

    with RowReader(path) as reader:
        click.echo(f"{path}: {reader.ntotal:,} codes of {reader.header.width} bytes")
