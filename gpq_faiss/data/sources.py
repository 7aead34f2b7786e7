"""Vectors and images of files (``features:``, ``csv:``, ``list:``, ``hf:``), and of tables, arrays
and lists in memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError, one_line, optional
from ..files import fingerprint
from ..inputs import read_text
from ..progress import stage
from ..store.hdf5 import Hdf5Array
from ..store.rows import RowReader
from .arrays import Matrix, is_hdf5
from .base import Dataset, FeatureDataset, ImageDataset, digest, features, images
from .images import BrokenImageError, as_array, to_pixels, without_gradient
from .labels import Labels, labels_note, labels_of
from .paths import (
    cache_folder,
    file_fingerprint,
    files_of,
    is_url,
    natural_order,
    without_secrets,
)
from .tables import (
    FORMS,
    PLAIN,
    Annotations,
    Options,
    file_form,
    frame_table,
    in_memory,
    open_tables,
    usual,
)

# Files of vectors ---------------------------------------------------------------------------------


def vector_files(path: str) -> tuple[list[Path], list[Path]]:
    """Return the files of vectors of a path, a pattern or a folder, and those of metadata.

    A folder holds files of one form, or ``img_emb/`` and ``metadata/`` as clip-retrieval writes
    them.
    """
    files = files_of(path)
    if not files[0].is_dir():
        return files, []
    root = files[0]
    vectors = root / "img_emb" if (root / "img_emb").is_dir() else root
    metadata = vectors.parent / "metadata" if vectors.name == "img_emb" else root / "metadata"
    parts = [_files_below(folder) for folder in (vectors, metadata)]
    if not parts[0]:
        raise DataError(f"{root} contains no files of vectors ({', '.join(FORMS)})")
    return parts[0], parts[1] if vectors.name == "img_emb" else []


def _files_below(folder: Path) -> list[Path]:
    """Return the tables of a folder in numeric order, those of a test part last."""
    nested = [*folder.glob("*"), *folder.glob("data/*")] if folder.is_dir() else []
    files = [file for file in nested if file.suffix.lower() in FORMS and file.is_file()]
    return sorted(files, key=lambda file: (file.name.startswith("test"), natural_order(file.name)))


def open_features(path: str, o: Options = PLAIN) -> Dataset:
    """Open files of vectors, one or several concatenated; rows are checked when they are read."""
    files, metadata = vector_files(path)
    name = f"features:{without_secrets(path)}"
    table = open_tables(files)
    if len(files) == 1 and "codebooks" in table.kinds:
        matrix, annotations = _our_features(files[0])
    else:
        if any(kind == "image" for kind in table.kinds.values()) and o.vectors is None:
            return open_hub_parquet(name, files, o)
        described = open_tables(metadata) if metadata else table
        annotations, used = described.annotations(o)
        matrix, columns = table.vectors(used if described is table else (), o.vectors)
        annotations.notes += columns
        if matrix.shape[1:] and matrix.dtype == np.uint8 and len(matrix.shape) > 2:
            return open_array(matrix[:], o)
    marks = [file_fingerprint(file) for file in files]
    content = marks[0] if len(marks) == 1 else fingerprint("several", *marks)
    return features(name, matrix, annotations, content)


def _our_features(path: Path) -> tuple[Matrix, Annotations]:
    """Return the rows of a ``features.h5``, whose labels are packed."""
    with RowReader(path, kind="features") as reader:
        packed, known = reader.labels, Annotations(None, np.asarray(reader.ids), reader.texts())
        if packed is not None:
            known.labels = Labels(np.asarray(packed), reader.header.class_names)
            known.notes[0] = labels_note(path.name, known.labels, "as encoded")
    return Hdf5Array(path, "features"), known


def open_frame(source: Any, o: Options = PLAIN) -> FeatureDataset:
    """Open vectors in a table in memory that has Arrow's interface."""
    table = frame_table(source)
    annotations, used = table.annotations(o)
    matrix, columns = table.vectors(used, o.vectors)
    annotations.notes += columns
    return features(type(source).__name__, matrix, annotations)


# Hugging Face -------------------------------------------------------------------------------------


def open_hub_parquet(name: str, files: Sequence[Path], o: Options) -> Dataset:
    """Open Parquet files with images, which ``datasets`` copies to the cache folder as Arrow."""
    datasets = import_datasets(name)
    try:
        paths = [str(file) for file in files]
        rows = datasets.Dataset.from_parquet(paths, cache_dir=str(cache_folder() / "datasets"))
        for column, kind in rows.features.items():
            of_bytes = isinstance(kind, dict) and "bytes" in kind
            if of_bytes or getattr(kind, "dtype", "") in ("binary", "large_binary"):
                rows = rows.cast_column(column, datasets.Image())
    except Exception as error:  # from pyarrow, or datasets
        raise DataError(f"{name} cannot be read by datasets ({one_line(error)})") from None
    return open_hf(rows, o, name)


def import_datasets(name: str) -> Any:
    """Import ``datasets``. Raises DataError: it is not installed."""
    remedy = f"reading {name} needs the package datasets: pip install 'gpq-faiss[train]'"
    datasets = optional("datasets", remedy, DataError)
    datasets.disable_progress_bars()
    return datasets


def open_hf(source: Any, o: Options = PLAIN, name: str = "") -> Dataset:
    """Open images or vectors of a ``Dataset`` or ``DatasetDict`` of ``datasets``, or of a folder
    that ``save_to_disk`` wrote: all parts, test parts last."""
    folder, notes = isinstance(source, str), []
    name = name or (f"hf:{source}" if folder else type(source).__name__)
    datasets = import_datasets(name)
    try:
        rows = datasets.load_from_disk(str(Path(source).expanduser())) if folder else source
        if isinstance(rows, datasets.DatasetDict) and rows:
            parts = sorted(rows, key=lambda chunk: (chunk.lower() == "test", chunk))
            notes.append(f"parts: {', '.join(parts)}")
            rows = datasets.concatenate_datasets([rows[chunk] for chunk in parts])
        if isinstance(rows, datasets.Dataset):
            data = rows.data.table if rows._indices is None else rows.with_format("arrow")[:]
            data.validate(full=True)  # Arrow checks neither offsets nor UTF-8 where it reads
    except Exception as error:  # from pyarrow, json, or datasets
        raise DataError(
            f"{name} is not a data set that save_to_disk wrote, "
            f"or it is damaged ({one_line(error)})"
        ) from None
    if not isinstance(rows, datasets.Dataset):
        raise DataError(f"{name}: {type(rows).__name__} cannot be read by position: give a Dataset")
    kinds = {column: getattr(kind, "feature", kind) for column, kind in rows.features.items()}
    named = {c: kind.names for c, kind in kinds.items() if getattr(kind, "names", None)}
    table = in_memory(name, data)
    table.class_names = named
    pictures = (
        [] if o.vectors else [n for n, kind in kinds.items() if type(kind).__name__ == "Image"]
    )
    image = (
        o.image_column
        or usual(("image",), pictures)
        or (pictures[0] if len(pictures) == 1 else None)
    )
    if image is not None and image not in pictures:
        known = ", ".join(pictures) or "none"
        raise DataError(f"--read image_column={image}: no column of images (there are: {known})")
    annotations, used = table.annotations(o)
    if image is None:
        matrix, columns = table.vectors(used, o.vectors)
        annotations.notes += [*notes, *columns]
        dataset: Dataset = features(name, matrix, annotations, "")
    else:
        annotations.notes += notes
        names = [f"row {i}" for i in range(len(rows))]
        names = annotations.texts["name"].tolist() if "name" in annotations.texts else names

        def fetch(i: int) -> bytes | str:
            value = data[image][i].as_py() or {}
            if value.get("bytes") is not None:
                return bytes(value["bytes"])
            if value.get("path") and not folder:  # a path in a folder from elsewhere is not opened
                return str(value["path"])
            raise BrokenImageError(f"row {i}", "there is no image in this row")

        paths = [f"{name}!{text}" for text in names]
        dataset = images(name, "hf", names, paths, annotations, o.max_bad, fetch=fetch)
    marks = [file_fingerprint(Path(file["filename"])) for file in rows.cache_files]
    marks += [rows._fingerprint, annotations.mark()]
    dataset.fingerprint = fingerprint("hf", *marks, dataset.ids.tobytes())
    return dataset


# Tables and lists of paths of images --------------------------------------------------------------


def open_listed(path: str, o: Options = PLAIN, *, form: str) -> Dataset:
    """Open images of a text list (``form`` ``list``), or of a table with a column of paths.

    Relative paths are below ``root`` or the folder of the list; back-slashes are converted.
    """
    if is_url(path) and o.root is None:
        raise UsageError(
            f"{without_secrets(path)}: where are its images? Give their folder: --read root=DIR"
        )
    files = files_of(path)
    base = files[0].parent if o.root is None else Path(o.root).expanduser()
    if form == "list" or (form != "csv" and file_form(files[0]) == "text"):
        listed, annotations = _list(files[0])
    else:
        table = open_tables(files)
        image = table.image_column(o.image_column) or table.check("image", "--read image_column")
        listed = [str(value or "") for value in table.values(image)]
        if "" in listed or not listed:
            message = (
                f"no path in row {listed.index('')} of column {image!r}" if listed else "no rows"
            )
            raise DataError(f"{files[0]} has {message}: paths of images are needed")
        annotations = table.annotations(o, image)[0]
    paths = [os.path.join(base, name.replace("\\", "/")) for name in listed]
    if not any(map(os.path.exists, paths)):
        raise DataError(
            f"{files[0]}: "
            f"none of its {len(paths):,} images exists ({paths[0]}, for one)"
            f": give their folder with --read root=DIR"
        )
    name = f"{form}:{without_secrets(path)}"
    return images(name, "image files", listed, paths, annotations, o.max_bad)


def read_lines(path: Path, message: str) -> list[tuple[int, str]]:
    """Return the non-blank lines of a text with their numbers from 1.

    ``message`` names its content in errors.

    Raises DataError: missing, empty or not text.
    """
    text = read_text(path, message)
    lines = [(i, line.strip()) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines or "\0" in text:
        raise DataError(f"{path} is empty or not a text: {message} was expected")
    return lines


def _labels_in(line: str) -> list[str]:
    """Return the labels at the end of a line: 0/1 values, or one class number."""
    tokens = line.split()[1:]
    ones = list(itertools.takewhile({"0", "1"}.__contains__, reversed(tokens)))
    return ones[::-1] or [token for token in tokens[-1:] if token.removeprefix("-").isdecimal()]


def _list(file: Path) -> tuple[list[str], Annotations]:
    """Read lines of a path and 0/1 labels, one class number (-1 is unlabelled), or nothing.

    Class names are those of ``classes.txt`` beside the list.
    """
    file_form(file)
    lines = read_lines(file, "a list of images")
    columns = len(_labels_in(lines[0][1]))
    if not columns:
        return [line for _, line in lines], Annotations()
    values: list[list[int]] = []
    for number, line in lines:
        labels = _labels_in(line) if columns > 1 else _labels_in(line)[-1:]
        if len(labels) != columns or len(labels[0]) > 18:
            message = f"{columns} labels of 0 or 1" if columns > 1 else "one class number"
            raise DataError(
                f"{file} line {number}: {message} "
                f"expected as in line {lines[0][0]}"
                f", not {line[-60:]!r}"
            )
        values.append([int(text) for text in labels])
    names_file = file.parent / "classes.txt"
    classes = (
        [name for _, name in read_lines(names_file, "class names")]
        if names_file.is_file()
        else None
    )
    parsed = labels_of(np.array(values), str(file), class_names=classes)
    known = Annotations(parsed, notes=[labels_note(file.name, parsed, "at the end of its lines")])
    listed = [line.rsplit(maxsplit=columns)[0] for _, line in lines]
    return listed, known if parsed.has().any() else Annotations()


# Arrays, tensors, lists and map-style data sets of torch ------------------------------------------

_SAMPLED = 64
"""Items whose content is hashed for a fingerprint."""


def open_array(values: Any, o: Options = PLAIN) -> Dataset:
    """Open vectors, numbers [N, width], or images, uint8 [N, H, W], [N, H, W, 3] or [N, 3, H, W].

    Raises DataError: neither vectors nor images.
    """
    array = as_array(values[:] if is_hdf5(values) else values, "the array")
    if array.ndim == 2:
        return features("array", array, Annotations())
    planes = array.ndim == 4 and array.shape[3] != 3 and array.shape[1] == 3
    pixels = array.transpose(0, 2, 3, 1) if planes else array
    if pixels.dtype != np.uint8 or pixels.ndim < 3 or pixels.shape[3:] not in ((), (3,)):
        raise DataError(
            f"array is {array.dtype} {list(array.shape)}: "
            "images are uint8 [N, H, W(, 3)], vectors are numbers [N, width]"
        )
    mark = fingerprint("array", digest(array), str(pixels.shape))
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
        known = not any(values is None for values in targets)
        if any(names != classes[0] for names in classes):
            raise DataError("the data sets that are joined have different classes: give labels")
        return np.concatenate(list(map(np.asarray, targets))) if known else None, classes[0]
    targets, classes = getattr(source, "targets", None), getattr(source, "classes", None)
    return without_gradient(targets), classes


def open_items(source: Any, o: Options = PLAIN) -> ImageDataset:
    """Open a list or a map-style data set of images, in any form that :func:`.images.to_images`
    takes, or of (image, label).

    They are read on demand, by one thread at a time, so the source must return the same image each
    time. Labels are its ``targets``, else in the items, which are then all read.
    """
    name = type(source).__name__
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise UsageError(f"{name} has no access by index: a data set with len() and [i] is needed")
    n, lock = len(source), threading.Lock()
    if not n:
        raise DataError(f"{name} has no items")

    def item(i: int) -> tuple[Any, Any]:
        try:
            with lock:
                value = source[i]
        except Exception as error:  # any error of the source
            raise BrokenImageError(f"item {i}", one_line(error)) from None
        pair = isinstance(value, tuple | list) and len(value) == 2
        return (value[0], value[1]) if pair else (value, None)

    def fetch(i: int) -> NDArray[np.uint8]:
        try:
            return to_pixels(item(i)[0], f"item {i}")
        except DataError as error:
            reason = getattr(error, "why", str(error).removeprefix(f"item {i}: "))
            raise BrokenImageError(f"item {i}", reason) from None

    annotations = Annotations()
    if o.with_labels:
        targets, classes = _targets(source)
        if targets is None:
            targets = [None] * n
            with stage("reading labels", n) as reading:
                for i in range(n):
                    with contextlib.suppress(
                        BrokenImageError
                    ):  # counted when it is read as an image
                        targets[i] = without_gradient(item(i)[1])
                    reading.advance()
        if any(target is not None for target in targets):
            annotations.labels = labels_of(targets, "labels", n, classes)
            annotations.notes[0] = labels_note(name, annotations.labels, "in its items")
    names = [f"item {i}" for i in range(n)]
    dataset = images(name, "items", names, names, annotations, o.max_bad, fetch=fetch)
    sampled = np.unique(np.linspace(0, n - 1, num=min(_SAMPLED, n)).astype(np.int64))
    pixels, again = dataset.read(sampled), dataset.read(sampled[:1])[0]
    if pixels[0] is not None and (again is None or not np.array_equal(pixels[0], again)):
        raise DataError(f"{name}: item 0 differs at each read: leave out random transforms")
    digests = [b"" if x is None else bytes.fromhex(digest(x)) for x in pixels]
    dataset.fingerprint = fingerprint("items", str(n), *digests, annotations.mark())
    return dataset
