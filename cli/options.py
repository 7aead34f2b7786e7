"""Options shared by several commands."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from gpq_faiss.data.base import Dataset

F = TypeVar("F", bound=Callable[..., Any])


class RenamedOption(click.Option):
    """A renamed option that also accepts its old name, ``before``, which is hidden."""

    def __init__(self, *args: Any, before: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.before = before

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Register both names."""
        shown = self.opts
        self.opts = [*shown, self.before]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


DATA_HELP = """\b
DATA is a path (.npy, .npz, .h5, .parquet, .csv, .txt, .tar or a folder), or one of
  digits                      scikit-learn's digits (embedded)
  cifar10[:ROOT]              CIFAR-10 by torchvision
  fashion-mnist[:ROOT]        Fashion-MNIST by torchvision, or a folder of its idx files
  nuswide:ROOT                NUS-WIDE in its official layout, 21 concepts
  folder:PATH                 images in one folder per class (or a .tar.gz of that)
  list:FILE                   lines of an image path and 0/1 labels
  csv:FILE, parquet:FILE      tables with an image path and a label column
  webdataset:FILES            WebDataset shards, as 'shard-{000..009}.tar'
  hf:FOLDER                   a Hugging Face data set that save_to_disk wrote
  features:FILES              embeddings: .npy, .npz, .h5, .parquet; or several: 'shard-*.npy'
FILE, FILES and PATH may be URLs (https://, s3://, with the extra remote)."""


def data_options(command: F) -> F:
    """Add the options for reading DATA; the command gets them as ``data_args``."""

    @click.option(
        "--labels",
        metavar="FILE",
        help="Labels: a table (.csv, .parquet) with a column of ids or names of items and one of labels; or, for features and "
        "lists, in the order of the items: .npy with class numbers (-1: none) or 0/1 per class, or text with one line per item. "
        "Separate several labels by |; an empty entry means none.",
    )
    @click.option(
        "--ids",
        metavar="FILE",
        help="Ids of the items, which searches return: .npy, or text with one per line.  [default: those in the file, "
        "else row numbers]",
    )
    @click.option(
        "--id-from",
        type=click.Choice(["position", "path", "content"]),
        default="position",
        show_default=True,
        help="Source of ids without --ids: row number, path or content of the item.",
    )
    @click.option(
        "--names",
        "item_names",
        metavar="FILE",
        help="Names of the items, shown in results: text with one per line, or .npy of strings.  [default: those in the data]",
    )
    @click.option(
        "--keep",
        metavar="COLUMNS",
        help="Text columns of a table to show in results, such as title,url.",
    )
    @click.option(
        "--root", metavar="DIR", help="Base folder of relative image paths, or folder of a data set."
    )
    @click.option(
        "--image-column",
        default="image",
        show_default=True,
        help="Column of images (in a table: their paths), or extension in shards.",
    )
    @click.option(
        "--label-column",
        default="label",
        show_default=True,
        help="Column of labels; in shards an extension, or a field of .json.",
    )
    @click.option("--vector-column", metavar="NAME", help="For hf: column of vectors instead of images.")
    @click.option(
        "--concepts", default="21", show_default=True, help="NUS-WIDE: 21, 81, or names separated by commas."
    )
    @click.option(
        "--max-unreadable",
        "max_bad",
        cls=RenamedOption,
        before="--max-bad",
        default=0.01,
        show_default=True,
        help="Allowed share of missing or broken images.",
    )
    @click.option("--no-download", is_flag=True, help="Never download a data set.")
    @functools.wraps(command)
    def wrapper(
        *args: Any,
        labels: str | None,
        ids: str | None,
        id_from: str,
        item_names: str | None,
        keep: str | None,
        root: str | None,
        image_column: str,
        label_column: str,
        vector_column: str | None,
        concepts: str,
        max_bad: float,
        no_download: bool,
        **kwargs: Any,
    ) -> Any:
        kwargs["data_args"] = {
            "labels": labels,
            "ids": ids,
            "id_from": id_from,
            "names": item_names,
            "keep": keep or (),
            "root": root,
            "image_column": image_column,
            "label_column": label_column,
            "vectors": vector_column,
            "concepts": concepts,
            "max_bad": max_bad,
            "download": not no_download,
        }
        return command(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def open_dataset(spec: str, data_args: dict[str, Any]) -> Dataset:
    """Open DATA."""
    from gpq_faiss.data.open import open_data

    return open_data(spec, **data_args)


RAY_HELP = (
    "Run on a Ray cluster: local (only this machine), auto (a cluster running here), or HOST:PORT. Its nodes must see the same files "
    "under the same paths."
)


def ray_options(command: F) -> F:
    """Add ``--ray`` and ``--workers``."""
    command = click.option(
        "--workers",
        type=int,
        help="With --ray: concurrent tasks, or workers that hold shards.  [default: one per core, or per node]",
    )(command)
    return click.option(
        "--ray",
        metavar="ADDRESS",
        help=RAY_HELP,
    )(command)


device_option = click.option(
    "--device",
    default="auto",
    show_default=True,
    help="auto (a GPU if available), cpu, cuda or cuda:N. A missing GPU is an error.",
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing output.")
out_option = click.option("--out", required=True, metavar="PATH", help="Output path.")


def emit(value: Any, out: str | None) -> None:
    """Print a result (JSON if it is not text), or write it to the file ``out``."""
    text = value if isinstance(value, str) else json.dumps(value, indent=2, allow_nan=False)
    if out is None:
        click.echo(text)
        return
    from gpq_faiss.files import write_text

    write_text(out, text + "\n")
