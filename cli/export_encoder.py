"""``gpq export-encoder``."""

from __future__ import annotations

from typing import Any

import click

from .options import emit, format_option, open_dataset, out_option, overwrite_option, read_option


@click.command()
@click.argument("model_dir")
@out_option
@click.option(
    "--to",
    "to",
    type=click.Choice(["onnx", "torch"]),
    help="ONNX, or torch.export.  [default: by the suffix of --out, .onnx or .pt2]",
)
@click.option(
    "--check",
    metavar="DATA",
    help="Real input for the comparison (DATA as in gpq train), besides random input.",
)
@click.option("--with-codes", is_flag=True, help="Add an output of codeword indices, uint8 [B, M].")
@click.option("--tolerance", default=1e-4, show_default=True, help="Maximum difference from the model.")
@format_option("json")
@overwrite_option
@read_option
def export_encoder(
    model_dir: str,
    out: str,
    to: Any,
    check: str | None,
    with_codes: bool,
    tolerance: float,
    format_: str,
    overwrite: bool,
    data_args: dict[str, Any],
) -> None:
    """Write a model's network as one ONNX (or torch.export) file: from input to query vectors.

    Features go in as float32 [B, W], images as float32 RGB [B, 3, S, S] in [0, 1]. The file is written only after
    its graph gave the model's vectors on random input, and on DATA with --check. ONNX needs pip install 'gpq-faiss[onnx]'.

    \b
    Examples:
      gpq export-encoder model --out encoder.onnx
      gpq export-encoder model --out encoder.onnx --check features:clip.npy --with-codes
      gpq export-encoder model --out encoder.pt2
    """
    from gpq_faiss.files import check_output
    from gpq_faiss.stages.export_encoder import Check
    from gpq_faiss.stages.export_encoder import export_encoder as run

    # Before the data are opened, which may take a while.
    check_output(out, overwrite=overwrite)
    passed: list[Check] = []
    path = run(
        model_dir,
        out,
        format=to,
        check=None if check is None else open_dataset(check, data_args),
        with_codes=with_codes,
        tolerance=tolerance,
        overwrite=overwrite,
        on_check=passed.append,
    )
    result = passed[0]
    said = {
        "path": str(path),
        "bytes": path.stat().st_size,
        "max_difference": result.max_difference,
        "items": result.items,
        "given_items": result.given,
    }
    emit(
        said
        if format_ == "json"
        else f"{path}: {said['bytes']:,} bytes, within {result.max_difference:.1e} of the model on "
        f"{result.items} items ({result.given} of them from --check)"
    )
