"""``gpq export``, ``gpq export-faiss`` and ``gpq export-encoder``."""

from __future__ import annotations

from typing import Any

import click

import gpq_faiss as gpq

from . import options as common


@click.command()
@click.argument("source")
@click.option(
    "--to",
    type=click.Choice(["factory", "numpy", "nanopq", "lancedb", "parquet"]),
    required=True,
    help="The tool that reads it.",
)
@common.out_option
@click.option(
    "--factory",
    metavar="STRING",
    help="For factory: such as IDMap2,PQ12x4 or PQ12x4fs.  [default: IDMap2,PQ of the model]",
)
@common.overwrite_option
def export(**options: Any) -> None:
    """Write a model's codebooks, or codes, for another tool. SOURCE is a model folder; for parquet,
    codes.h5.

    factory is an empty, trained index as faiss.index_factory makes it of STRING: PQ of the model's
    codebooks, with fs for FastScan, half as many of 8 bits for byte-fused codebooks, IDMap2 for
    ids. numpy, nanopq and lancedb are .npz files of float32 codebooks (of lancedb byte-fused: two
    codebooks of 16 are one of 256, for the same bytes). parquet is a table of ids, codes, names and
    labels. docs/databases.md shows how each is loaded.

    \b
    Examples:
      gpq export model --to numpy --out codebooks.npz
      gpq export model --to factory --factory PQ12x4fs --out fastscan.faiss
      gpq export codes.h5 --to parquet --out codes.parquet
    """
    common.emit(str(gpq.export(**options)))


@click.command()
@click.argument("model_dir")
@common.out_option
@common.overwrite_option
def export_faiss(**options: Any) -> None:
    """Write an empty, trained faiss IndexPQ (inner product) with the model's codebooks.

    Any Faiss program reads it with faiss.read_index and adds vectors of items to it; they must come
    from the model's network (gpq encode). Queries are the network's too (the file of gpq
    export-encoder). If query and item vectors differ, as with all presets except paper and authors,
    a note says so: Faiss cannot tell them apart.

    \b
    Example:
      gpq export-faiss model --out empty.faiss
    """
    common.emit(str(gpq.export_faiss(**options)))


@click.command()
@click.argument("model_dir")
@common.out_option
@common.overwrite_option
def export_encoder(**options: Any) -> None:
    """Write a model's network as one file, ONNX or (.pt2) torch.export: from input to query
    vectors.

    Features go in as float32 [B, W], images as float32 RGB [B, 3, S, S] in [0, 1]. The file is
    written only after its graph gave the model's vectors on random input. ONNX needs pip install
    'gpq-faiss[onnx]'.

    \b
    Examples:
      gpq export-encoder model --out encoder.onnx
      gpq export-encoder model --out encoder.pt2
    """
    path = gpq.export_encoder(**options)
    common.emit(f"{path}: {path.stat().st_size:,} bytes, vectors of queries as the model's")
