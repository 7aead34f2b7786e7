"""``gpq encode``."""

from __future__ import annotations

from typing import Any

import click

from .options import DATA_HELP, data_options, device_option, emit, out_option, overwrite_option, ray_option


@click.command(
    help=f"""Encode DATA with a model: write features.h5, then codes.h5.

Streams: memory does not grow with the data. An interrupted run continues where it stopped when called again,
unless the data has changed: names, sizes, labels and samples of the content are compared. --overwrite runs the network again.

With --ray, the codes are written in shards, files of shard_items items each, into the folder --out; existing shards
of the same model and data are kept.

\b
Examples:
  gpq encode model features:clip.npy --out codes.h5
  gpq encode model features:clip.npy --ray auto --out codes

{DATA_HELP}
"""
)
@click.argument("model_dir")
@click.argument("data")
@out_option
@click.option("--no-features", is_flag=True, help="Write only the codes, not the features beside them.")
@click.option("--batch-size", type=int, default=0, help="Items per batch.  [default: by the data and device]")
@click.option("--amp", is_flag=True, help="Run the backbone in bf16.")
@ray_option("workers", "shard_items")
@device_option
@overwrite_option
@data_options
def encode(
    model_dir: str,
    data: str,
    out: str,
    no_features: bool,
    ray: dict[str, Any],
    data_args: Any,
    **options: Any,
) -> None:
    from gpq_faiss.data.open import open_data
    from gpq_faiss.files import check_output
    from gpq_faiss.stages.encode import encode as run
    from gpq_faiss.stages.encode import encode_shards
    from gpq_faiss.store.reader import RowReader

    if ray["ray"] is not None:
        paths = encode_shards(model_dir, data, out, data_args=data_args, **ray, **options)
        emit(f"{out}: {len(paths):,} shards of codes")
        return
    # Before the data are opened, which may take a while.
    check_output(out, overwrite=options["overwrite"])
    dataset = open_data(data, **data_args)
    path = run(model_dir, dataset, out, keep_features=not no_features, **options)
    with RowReader(path) as reader:
        emit(f"{path}: {reader.ntotal:,} codes of {reader.header.width} bytes")
