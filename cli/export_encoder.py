"""``gpq export-encoder``."""

from __future__ import annotations

import click

from .options import emit, out_option, overwrite_option


@click.command()
@click.argument("model_dir")
@out_option
@overwrite_option
def export_encoder(model_dir: str, out: str, overwrite: bool) -> None:
    """Write a model's network as one file, ONNX or (.pt2) torch.export: from input to query vectors.

    Features go in as float32 [B, W], images as float32 RGB [B, 3, S, S] in [0, 1]. The file is written only after
    its graph gave the model's vectors on random input. ONNX needs pip install 'gpq-faiss[onnx]'.

    \b
    Examples:
      gpq export-encoder model --out encoder.onnx
      gpq export-encoder model --out encoder.pt2
    """
    from gpq_faiss.stages.export_encoder import export_encoder as run

    path = run(model_dir, out, overwrite=overwrite)
    emit(f"{path}: {path.stat().st_size:,} bytes, vectors of queries as the model's")
