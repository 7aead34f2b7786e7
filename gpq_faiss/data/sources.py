"""Vectors and images of tables (files, Hugging Face data sets, data frames), and of arrays and
lists in memory."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, UsageError, one_line, optional
from ..files import cache_folder, content_of, fingerprint
from ..inputs import read_text
from .base import Dataset, FeatureDataset, ImageDataset, image_files
from .images import BrokenImageError, as_array, to_pixels, without_gradient
from .labels import Labels, labels_note, labels_of, named
from .tables import (
    FORMS,
    LABELS,
    PLAIN,
    Options,
    Table,
    expanded,
    files_of,
    frame_table,
    natural_order,
    open_tables,
    usual,
)

# Tables -------------------------------------------------------------------------------------------


def open_table(name: str, table: Table, o: Options, mark: str = "", folder: str = "") -> Dataset:
    """Open the images below ``folder`` that a column of paths lists, or vectors.

    A column of lists goes before paths of images, and these before columns of numbers.
    """
    lists = [column for column in table.of_kind("list") if usual(LABELS, [column]) is None]
    has_vectors = o.vectors is not None or (lists and o.image_column is None)
    image = None if has_vectors else table.image_column(o.image_column)
    if image is None:
        attributes, (matrix, note) = table.attributes(o), table.vectors(o)
        attributes["notes"] += [note] * (len(table.kinds) > 1)
        mark = mark or fingerprint("table", np.ascontiguousarray(matrix[:]).tobytes())
        return FeatureDataset(name=name, fingerprint=mark, matrix=matrix, **attributes)
    if table.kinds[image] != "image":
        listed = table.texts(image).tolist()
        paths = [os.path.join(folder, text.replace("\\", "/")) for text in listed]
        if not any(map(os.path.isfile, paths)):
            raise DataError(
                f"{table.source}: none of its {len(paths):,} images exists ({', '.join(paths[:1])}, for one)"
                f": give their folder with --read root=DIR"
            )
        return image_files(name, paths, listed, max_bad=o.max_bad, **table.attributes(o, image))
    attributes = table.attributes(o)

    def fetch(i: int) -> bytes | str:
        value = table.rows[image][i].as_py() or {}
        encoded = value if isinstance(value, bytes) else value.get("bytes") or value.get("path")
        if encoded is None:
            raise BrokenImageError(f"row {i}", "there is no image in this row")
        return encoded

    names = attributes["texts"].get("name", range(len(table.rows)))
    options = {"paths": [f"{name}!{text}" for text in names], "max_bad": o.max_bad, **attributes}
    return ImageDataset(name=name, fingerprint=mark, fetch=fetch, **options)


def open_files(path: str, o: Options = PLAIN, *, form: str = "features") -> Dataset:
    """Open files of one table, or a folder of them, as vectors or as images.

    A folder holds files of one form, or ``img_emb/`` and ``metadata/`` as clip-retrieval writes
    them.
    """
    files, name, metadata = files_of(path), f"{form}:{path}", []
    folder = str(files[0].parent) if o.root is None else os.path.expanduser(o.root)
    if files[0].is_dir():
        root = files[0].parent if files[0].name == "img_emb" else files[0]
        files, metadata = tables_in(root / "img_emb"), tables_in(root / "metadata")
        files = files or tables_in(root)
    if not files:
        raise DataError(f"{name} contains no files of vectors ({', '.join(FORMS)})")
    table, mark = open_tables(files), content_of(files)
    if "codebooks" in table.kinds:
        raise DataError(f"{name} was written by gpq encode: give the data that it encoded")
    if metadata:
        table = Table(table.source, table.arrays, open_tables(metadata).data)
    if table.of_kind("image") and o.vectors is None:
        return _open_by_datasets("parquet", name, list(map(str, files)), mark, o)
    if max(len(array.shape) for array in [*table.arrays.values(), np.zeros(0)]) > 2:
        return open_array(next(iter(table.arrays.values())), o)
    return open_table(name, table, o, mark, folder)


def tables_in(folder: Path) -> list[Path]:
    """Return the tables of a folder in numeric order, those of a test part last."""
    files = [file for file in (*folder.glob("*"), *folder.glob("data/*")) if file.suffix in FORMS]
    return sorted(files, key=lambda file: (file.name.startswith("test"), natural_order(file.name)))


def open_frame(source: Any, o: Options = PLAIN) -> Dataset:
    """Open vectors or paths of images in a table in memory that has Arrow's interface."""
    return open_table(type(source).__name__, frame_table(source), o, folder=o.root or "")


def open_list(path: str, o: Options = PLAIN) -> Dataset:
    """Open a text with lines of a path and 0/1 labels, one class number (-1 is unlabelled), or
    nothing."""
    file = files_of(path)[0]
    text = read_text(file, "a list of images")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    labels = [re.sub(r".*?((\s+-?\d+)*)$", r"\1", line, count=1) for line in lines]
    widths = sorted({len(label.split()) for label in labels})
    if len(widths) != 1 or (widths[0] > 1 and not {*" ".join(labels).split()} <= {"0", "1"}):
        raise DataError(
            f"{file} has lines with {', '.join(map(str, widths)) or 'no'} numbers"
            f": a path and 0 or 1 for each class, or a class number, are needed"
        )
    images = [line.removesuffix(label) for line, label in zip(lines, labels, strict=True)]
    columns = {"image": np.array(images), "label": np.array(labels)}
    table = Table(str(file), columns if widths[0] else {"image": columns["image"]})
    base = str(file.parent) if o.root is None else os.path.expanduser(o.root)
    return open_table(f"list:{path}", table, replace(o, image_column="image"), folder=base)


def open_image(path: str, o: Options = PLAIN) -> ImageDataset:
    """Open an image file as a data set of one item."""
    return image_files(path, [os.path.expanduser(path)], [path], max_bad=0.0)


# Hugging Face -------------------------------------------------------------------------------------


def _by_datasets(name: str, load: Callable[[Any], Any]) -> Any:
    """Return what ``load`` gets from the library ``datasets``. Raises DataError: it fails."""
    remedy = f"reading {name} needs the package datasets: pip install 'gpq-faiss[train]'"
    datasets = optional("datasets", remedy, DataError)
    datasets.disable_progress_bars()
    try:
        return load(datasets)
    except Exception as error:  # from pyarrow, json, or datasets
        reason = one_line(error.__cause__ or error)
        raise DataError(f"{name} cannot be read by datasets ({reason})") from None


def _open_by_datasets(form: str, name: str, files: list[str], mark: str, o: Options) -> Dataset:
    """Open files of images, which ``datasets`` copies to the cache folder as Arrow."""
    options: dict[str, Any] = {"split": "train", "cache_dir": str(cache_folder() / "datasets")}
    options["data_files"] = {"train": files}
    rows = _by_datasets(name, lambda library: library.load_dataset(form, **options))
    if len(rows.features) == 3 and len({*map(os.path.dirname, rows["__key__"])}) > 1:
        raise DataError(f"{name} holds folders of images alone: extract it, and give the folder")
    return open_hf(rows, o, name, mark)


def open_webdataset(path: str, o: Options = PLAIN) -> Dataset:
    """Open WebDataset shards: paths, a pattern, or URLs.

    Names are the keys. Labels are in ``.cls`` or a field of ``.json``; captions are no labels.
    """
    is_remote = "://" in path
    files = expanded(path) if is_remote else list(map(str, files_of(path)))
    mark = fingerprint(*files) if is_remote else content_of(files)
    # A URL may hold a password and a token.
    name = re.sub(r"(?<=://)[^/?#]*@|[?#].*", "", path) if is_remote else path
    return _open_by_datasets("webdataset", f"webdataset:{name}", files, mark, o)


def open_hf(source: Any, o: Options = PLAIN, name: str = "", mark: str = "") -> Dataset:
    """Open images or vectors of a ``Dataset`` or ``DatasetDict`` of ``datasets``, or of a folder
    that ``save_to_disk`` wrote: all splits, test splits last."""
    name = name or f"hf:{source if isinstance(source, str) else type(source).__name__}"
    if isinstance(source, str):
        folder = os.path.expanduser(source)
        source = _by_datasets(name, lambda library: library.load_from_disk(folder))
    if isinstance(source, dict):
        parts = [
            source[split] for split in sorted(source, key=lambda split: (split == "test", split))
        ]
        source = _by_datasets(name, lambda library: library.concatenate_datasets(parts))
    if not hasattr(source, "data"):
        raise DataError(f"{name} cannot be read by position: give a Dataset")
    data = source.data.table if source._indices is None else source.with_format("arrow")[:]
    if "json" in source.features:  # of a WebDataset
        for field, values in zip(
            data.schema.field("json").type, data["json"].flatten(), strict=True
        ):
            data = data.append_column(field, values)
    table = Table(name, {}, data)
    for column, kind in source.features.items():
        if class_names := getattr(getattr(kind, "feature", kind), "names", None):
            values = [named(value, class_names) for value in table.values(column).tolist()]
            table.arrays[column] = np.fromiter(values, object)
    files = [file["filename"] for file in source.cache_files]
    mark = mark or fingerprint(content_of(files), source._fingerprint)
    return open_table(name, table, o, mark, o.root or "")


# Arrays, tensors, lists and map-style data sets of torch ------------------------------------------


def open_array(values: Any, o: Options = PLAIN) -> Dataset:
    """Open vectors, numbers [N, width], or images, uint8 [N, H, W], [N, H, W, 3] or [N, 3, H, W].

    Raises DataError: neither vectors nor images.
    """
    array = as_array(values[:], "the array")
    mark = fingerprint("array", str(array.shape), np.ascontiguousarray(array).tobytes())
    if array.ndim < 3:
        return FeatureDataset(name="array", fingerprint=mark, matrix=array)
    planes = array.ndim == 4 and array.shape[3] != 3 and array.shape[1] == 3
    pixels = array.transpose(0, 2, 3, 1) if planes else array
    if pixels.dtype != np.uint8 or pixels.shape[3:] not in ((), (3,)):
        raise DataError(
            f"array is {array.dtype} {list(array.shape)}"
            f": images are uint8 [N, H, W(, 3)], vectors are numbers [N, width]"
        )
    return ImageDataset(name="array", fingerprint=mark, pixels=pixels)


def _targets(source: Any) -> tuple[Any, Any]:
    """Return the class numbers of a map-style data set and their names, each None if unknown.

    Subsets and concatenations of torch have those of what they are made of.
    """
    if hasattr(source, "dataset") and hasattr(source, "indices"):
        targets, classes = _targets(source.dataset)
        return None if targets is None else np.asarray(targets)[list(source.indices)], classes
    if hasattr(source, "datasets"):
        targets, classes = zip(*map(_targets, source.datasets), strict=True)
        if any(names != classes[0] for names in classes) or any(t is None for t in targets):
            raise DataError("the joined data sets have unlike classes, or no targets: give labels")
        return np.concatenate(list(map(np.asarray, targets))), classes[0]
    return without_gradient(getattr(source, "targets", None)), getattr(source, "classes", None)


def open_items(source: Any, o: Options = PLAIN) -> ImageDataset:
    """Open a list or a map-style data set of images, in any form that :func:`.images.to_images`
    takes, or of (image, label).

    They are read on demand, by one thread at a time, so the source must return the same image each
    time. Labels are its ``targets``, else in the items, which are then all read.
    """
    name, lock = type(source).__name__, threading.Lock()
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise UsageError(f"{name} has no access by index: a data set with len() and [i] is needed")

    def item(i: int) -> Any:
        try:
            with lock:
                value = source[i]
        except Exception as error:  # any error of the source
            raise BrokenImageError(f"item {i}", one_line(error)) from None
        return value if isinstance(value, tuple | list) and len(value) == 2 else (value, None)

    paths, attributes = [f"item {i}" for i in range(len(source))], dict[str, Any]()
    if o.with_labels:
        targets, classes = _targets(source)
        targets = [item(i)[1] for i in range(len(paths))] if targets is None else targets
        labels = Labels.from_ids(targets, classes) if classes else labels_of(targets, "labels")
        attributes = {"labels": labels, "notes": [labels_note(name, labels, "in its items")]}
    if not paths:
        raise DataError(f"{name} has no items")
    dataset = ImageDataset(
        name=name,
        fingerprint="",
        paths=paths,
        fetch=lambda i: to_pixels(item(i)[0], f"item {i}"),
        max_bad=o.max_bad,
        **attributes,
    )
    sample = np.unique(np.linspace(0, len(paths) - 1, num=64).astype(np.int64))
    contents = [b"" if image is None else image.tobytes() for image in dataset.read(sample)]
    return replace(dataset, fingerprint=fingerprint("items", str(len(paths)), *contents))
