"""``gpq encode``."""

from __future__ import annotations

import functools
from typing import Any

import click

import gpq_faiss as gpq

from . import options as common


@click.command(
    help=f"""Encode DATA with a model: write features.h5, then codes.h5.

Streams: memory does not grow with the data. An interrupted run continues where it stopped when
called again, unless the data has changed: names, sizes, labels and samples of the content are
compared. --overwrite runs the network again.

With --ray, the codes are written in shards, files of shard_items items each, into the folder --out;
existing shards of the same model and data are kept.

\b
Examples:
  gpq encode model features:clip.npy --out codes.h5
  gpq encode model features:clip.npy --ray auto --out codes

{common.DATA_HELP}
"""
)
@click.argument("model", metavar="MODEL_DIR")
@click.argument("data")
@common.out_option
@click.option(
    "--no-features", is_flag=True, help="Write only the codes, not the features beside them."
)
@click.option(
    "--batch-size", type=int, default=0, help="Items per batch.  [default: by the data and device]"
)
@click.option("--amp", is_flag=True, help="Run the backbone in bf16.")
@common.ray_option("workers", "shard_items")
@common.device_option
@common.overwrite_option
@common.data_options
def encode(
    data: str, out: str, no_features: bool, ray: dict[str, Any], data_args: Any, **options: Any
) -> None:
    if ray["ray"] is not None:
        cluster = gpq.RayCluster(ray.pop("ray"), **ray)
        paths = gpq.encode_on_ray(
            data=functools.partial(gpq.open_data, data, **data_args),
            out=out,
            cluster=cluster,
            **options,
        )
        common.emit(f"{out}: {len(paths):,} shards of codes")
        return
    # Before the data are opened, which may take a while.
    common.check_files(options["overwrite"], out)
    dataset = gpq.open_data(data, **data_args)
    path = gpq.encode(data=dataset, out=out, keep_features=not no_features, **options)
    with gpq.RowReader(path) as reader:
        common.emit(f"{path}: {reader.ntotal:,} codes of {reader.header.width} bytes")
