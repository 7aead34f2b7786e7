"""Options shared by several commands."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import click

from gpq_faiss.errors import UsageError, unknown

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

DATA_HELP = """\b
DATA is a path (.npy, .npz, .h5, .parquet, .csv, .txt, .tar or a folder of images or such files), \
or one of
  digits                      scikit-learn's digits (embedded)
  cifar10[:ROOT]              CIFAR-10 by torchvision
  fashion-mnist[:ROOT]        Fashion-MNIST by torchvision
  nuswide:ROOT                NUS-WIDE in its official layout, 21 concepts
  folder:PATH                 images in one folder per class
  list:FILE                   lines of an image path and 0/1 labels
  csv:FILE, parquet:FILE      tables with a column of image paths and one of labels
  webdataset:FILES            WebDataset shards, as 'shard-{000..009}.tar'
  hf:FOLDER                   a Hugging Face data set that save_to_disk wrote
  features:FILES              embeddings: .npy, .npz, .h5, .parquet ...; several: 'shard-*.npy', \
or a folder
FILE, FILES and tar files may be URLs (https://, s3:// ...)."""

READ: dict[str, click.ParamType[Any]] = {
    **dict.fromkeys(("labels", "ids", "names", "keep"), click.STRING),
    **dict.fromkeys(("root", "image_column", "label_column", "id_column", "vectors"), click.STRING),
    "concepts": click.INT,
    "max_bad": click.FLOAT,
    "download": click.BOOL,
}
"""Arguments of :func:`gpq_faiss.open_data` that ``--read`` takes, and their types."""


def pairs(
    option: str, texts: list[str], kinds: Mapping[str, click.ParamType[Any]]
) -> dict[str, Any]:
    """Return the values of ``KEY=VALUE`` texts by key.

    Raises:
        UsageError: another form, an unknown key, a key given twice, or a value of another type.
    """
    values: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if key not in kinds:
            raise UsageError(unknown(f"{option} '{key}'", key, kinds))
        if not equals or not value or key in values:
            raise UsageError(f"{option} {text}: write {key}=VALUE, once")
        try:
            values[key] = kinds[key].convert(value, None, None)
        except click.BadParameter as error:
            raise UsageError(f"{option} {text}: {error.message}") from None
    return values


read_option = click.option(
    "--read",
    "data_args",
    metavar="KEY=VALUE",
    multiple=True,
    callback=lambda ctx, param, texts: pairs("--read", texts, READ),
    help=f"How DATA is read, repeatable: {', '.join(READ)} (docs/data.md).",
)


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for reading DATA.

    The command gets them as ``data_args``, the keyword arguments of :func:`gpq_faiss.open_data`.
    """

    @click.option(
        "--labels",
        metavar="FILE",
        help="Labels: a table (.csv, .parquet, .json ...) with a column of ids or names of items "
        "and one of labels (--read id_column=, label_column=); or, in the order of the items: .npy "
        "with class numbers (-1: none) or 0/1 per class, or text with one line per item. Separate "
        "several labels by |; an empty entry means none.",
    )
    @read_option
    @functools.wraps(command)
    def wrapper(*args: Any, labels: str | None, data_args: dict[str, Any], **kwargs: Any) -> Any:
        if labels is not None:
            if "labels" in data_args:
                raise UsageError("--labels and --read labels= are the same: give one of them")
            data_args = {"labels": labels} | data_args
        return command(*args, data_args=data_args, **kwargs)

    return wrapper


def ray_option(*keys: str) -> Decorator:
    """Add ``--ray ADDRESS[,KEY=N]`` with these keys.

    The command gets a dict ``ray`` of arguments for the library: the address as ``ray``, and the
    numbers that were given.
    """

    def parse(ctx: click.Context, param: click.Parameter, text: str | None) -> dict[str, Any]:
        del ctx, param
        address, *texts = (text or "").split(",")
        if text is not None and not address:
            raise UsageError(f"--ray {text}: the address comes first, as in --ray auto")
        return {"ray": address or None} | pairs(
            "--ray ADDRESS,", texts, dict.fromkeys(keys, click.INT)
        )

    return click.option(
        "--ray",
        metavar="".join(["ADDRESS", *(f"[,{key}=N]" for key in keys)]),
        callback=parse,
        help="Run on a Ray cluster: local (only this machine), auto (a cluster running here), or "
        "HOST:PORT. Its nodes must see the same files under the same paths (docs/scale.md).",
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


def format_option(*formats: str, note: str = "") -> Decorator:
    """Add ``--format``, with ``table`` as the default.

    The command gets it as ``format_``, which is ``text`` for a table.
    """
    return click.option(
        "--format",
        "format_",
        type=click.Choice(["table", *formats]),
        default="table",
        show_default=True,
        callback=lambda ctx, param, form: "text" if form == "table" else form,
        help=f"Output format{note}.",
    )


def check_files(overwrite: bool, out: str | None, picture: str | None = None) -> None:
    """Check before any work that these files can be written."""
    from gpq_faiss.files import check_output
    from gpq_faiss.report.plots import check_picture

    for path, check in ((out, check_output), (picture, check_picture)):
        if path is not None:
            check(path, overwrite=overwrite)


def check_apart(
    *, out: str | None, is_folder: bool, plot: str | None = None, **arguments: Any
) -> None:
    """Check before any work that no output replaces an input.

    Args:
        out, plot: the outputs.
        is_folder: whether ``out`` is a folder, which must contain no input either.
        arguments: the other arguments of the command.
    """
    from gpq_faiss.data.paths import replaces

    values = [value for name, value in arguments.items() if name not in ("data_args", "format_")]
    for value in (*values, *arguments.get("data_args", {}).values()):
        for text in value if isinstance(value, tuple) else [value]:
            for path in filter(None, (out, plot)):
                if isinstance(text, str) and replaces(path, text, whole=is_folder):
                    raise UsageError(
                        f"{path} would be replaced, and {text} is read: choose another output"
                    )


def emit(value: Any, out: str | None = None) -> None:
    """Print a result once the command's progress is gone, or write it to the file ``out``.

    A value that is not text is written as JSON.
    """
    text = value if isinstance(value, str) else json.dumps(value, indent=2, allow_nan=False)
    # Names of files may be bytes that are no text.
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if out is None:
        click.get_current_context().call_on_close(lambda: click.echo(text))
        return
    from gpq_faiss.files import write_text

    write_text(out, text + "\n")
