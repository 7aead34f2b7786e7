"""Options shared by several commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from gpq_faiss.errors import UsageError, unknown
from gpq_faiss.files import check_output, write_text

DATA_HELP = """\b
DATA is a path; its type is detected, or given by a prefix such as features:
  digits                      scikit-learn's handwritten digits (8 x 8 images, bundled)
  cifar10[:ROOT]              CIFAR-10 by torchvision
  fashion-mnist[:ROOT]        Fashion-MNIST by torchvision
  nuswide:ROOT                NUS-WIDE in its official layout, 21 concepts
  folder:PATH                 images in one folder per class
  list:FILE                   lines of an image path and 0/1 labels or class numbers
  csv:FILE, parquet:FILE      tables with a column of image paths, and often one of labels
  webdataset:FILES            WebDataset shards, as 'shard-*.tar'
  hf:FOLDER                   a Hugging Face data set that save_to_disk wrote
  features:FILES              embeddings: .npy, .npz, .h5, .parquet ...; several: 'shard-*.npy', \
or a folder
The FILES of webdataset may be URLs (https://, s3:// ...)."""

READ: dict[str, click.ParamType[Any]] = {
    "ids": click.STRING,
    "names": click.STRING,
    "keep": click.STRING,
    "root": click.STRING,
    "image_column": click.STRING,
    "label_column": click.STRING,
    "id_column": click.STRING,
    "vectors": click.STRING,
    "max_bad": click.FloatRange(0, 1),
}
"""Arguments of :func:`gpq_faiss.open_data` that ``--read`` takes, and their types."""

ENDINGS = {
    ".csv": "csv",
    ".json": "json",
    ".md": "markdown",
    ".parquet": "parquet",
    ".png": "png",
    ".tex": "latex",
}
"""Formats by the ending of ``--out``."""


def _read_arguments(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> dict[str, Any]:
    """Return the values of the ``KEY=VALUE`` texts of ``--read`` by key.

    Raises:
        UsageError: another form, an unknown key, or a value of another type.
    """
    values: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key not in READ:
            raise UsageError(unknown(f"--read '{key}'", key, READ))
        if not value:
            raise UsageError(f"--read {text}: write {key}=VALUE")
        try:
            values[key] = READ[key].convert(value, param, ctx)
        except click.BadParameter as error:
            raise UsageError(f"--read {text}: {error.message}") from None
    return values


read_option = click.option(
    "--read",
    "data_args",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_read_arguments,
    help=f"How DATA is read, repeatable: {', '.join(READ)} (docs/data.md).",
)
labels_option = click.option(
    "--labels",
    metavar="FILE",
    help="Labels: a table (.csv, .parquet, .json ...) with a column of ids or names of items "
    "and one of labels (--read id_column=, label_column=); or, in the order of the items: .npy "
    "with class numbers (-1: none) or 0/1 per class, or text with one line per item. Separate "
    "several labels by |; an empty entry means none.",
)
set_option = click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Set one setting of the training, as in a TOML file (docs/settings.md); repeatable.",
)
device_option = click.option(
    "--device",
    default="auto",
    show_default=True,
    help="auto (a GPU if available), cpu, cuda or cuda:N. A missing GPU is an error.",
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing output.")
out_option = click.option("--out", required=True, metavar="PATH", help="Output path.")
file_option = click.option(
    "--out",
    metavar="FILE",
    help="Write to this file instead of the terminal; its ending selects the format.",
)


def format_option(*formats: str) -> Callable[[Any], Any]:
    """Add ``--format``."""
    return click.option(
        "--format",
        "form",
        type=click.Choice(["text", *formats]),
        help="Output format.  [default: text]",
    )


def output_form(form: str | None, out: str | None, overwrite: bool) -> str:
    """Check before any work that the output can be written, and return its format.

    Raises:
        UsageError, DataError: as :func:`gpq_faiss.files.check_output`.
        BadParameter: the command does not write the format of the ending.
    """
    if out is not None:
        check_output(out, overwrite=overwrite)
    ctx = click.get_current_context()
    option = next(option for option in ctx.command.params if option.name == "form")
    ending = Path(out or "").suffix.lower()
    if form is None and ending not in {*ENDINGS, ".txt", ""}:
        raise UsageError(f"--out {out}: no format ends in {ending}: write another, or use --format")
    chosen = form or ENDINGS.get(ending, "text")
    return str(option.type.convert(chosen, option, ctx))


def emit(value: Any, out: str | None = None) -> None:
    """Print a result, or write it to the file ``out``. A value that is not text is written as
    JSON.
    """
    text = value if isinstance(value, str) else json.dumps(value, indent=2, allow_nan=False)
    # Names of files may be bytes that are no text.
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if out is None:
        with tqdm.external_write_mode():
            click.echo(text)
    else:
        write_text(out, f"{text}\n")
