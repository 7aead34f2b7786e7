"""Open any source of data: ``open_data("scheme:path")``, a path without prefix, or an object."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..codes.checks import to_numpy
from ..errors import DataError, UsageError, one_line, optional
from ..files import cache_folder, content_of, fingerprint
from ..ids import read_ids
from ..inputs import ENDINGS, files_of, natural_order, read_text
from .base import Dataset, FeatureDataset, ImageDataset, image_files, images_in_memory
from .images import ENCODED, IMAGE_SUFFIXES, as_array, is_image_name, to_pixels
from .labels import (
    Labels,
    label_notes,
    labels_of,
    named,
)
from .matching import aligned, with_labels, with_names
from .standard import open_digits, open_folder, open_nuswide, open_published
from .tables import Options, Table, frame_table, open_tables, usual

log = logging.getLogger(__name__)

# Tables -------------------------------------------------------------------------------------------


def open_table(name: str, table: Table, o: Options, mark: str = "", folder: str = "") -> Dataset:
    """Open the images that a column of paths lists, below ``root`` or ``folder``, or vectors.

    Vectors that are named, or in a column of lists with a usual name, go before images, and these
    before other columns of numbers.
    """
    has_vectors = o.vectors or (o.image_column is None and usual("vectors", table.of_kind("list")))
    image = None if has_vectors else table.image_column(o.image_column)
    attributes = table.attributes(o, image)
    if image is None:
        matrix, notes = table.vectors(o)
        attributes["notes"] += notes * (len(table.kinds) > 1)
        return FeatureDataset(
            name=name,
            fingerprint=mark or fingerprint("table", np.ascontiguousarray(matrix[:]).tobytes()),
            matrix=matrix,
            **attributes,
        )
    if image in table.arrays and table.kinds[image] == "image":
        return replace(open_array(table.arrays[image], o), name=name, **attributes)
    if table.kinds[image] not in ("image", "bytes"):
        listed = table.texts(image).tolist()
        paths = [
            os.path.join(
                folder if o.root is None else os.path.expanduser(o.root), text.replace("\\", "/")
            )
            for text in listed
        ]
        if not any(map(os.path.isfile, paths)):
            raise DataError(
                f"{table.source}: none of its {len(paths):,} images exists "
                f"({', '.join(paths[:1])}, for one): give the folder of relative paths with --read "
                "root=DIR, correct absolute ones, or name vectors with --read vectors=NAME or a "
                "pattern, 'f*' (of a text: features:FILE)"
            )
        return image_files(name, paths, listed, max_bad=o.max_bad, **attributes)

    def fetch(i: int) -> bytes | str:
        value = table.data[image][i].as_py() or {}
        return value if isinstance(value, bytes) else value.get("bytes") or value.get("path") or b""

    return ImageDataset(
        name=name,
        fingerprint=mark,
        paths=[
            f"{name}!{text}" for text in attributes["texts"].get("name", range(len(table.data)))
        ],
        fetch=fetch,
        max_bad=o.max_bad,
        **attributes,
    )


def open_files(path: str, o: Options, *, form: str = "features") -> Dataset:
    """Open files of one table, or a folder of them, as vectors or as images.

    A folder holds files of one form, or ``img_emb/`` and ``metadata/`` as clip-retrieval writes
    them.
    """
    files, name, metadata = files_of(path), f"{form}:{path}", []
    if files[0].is_dir():
        root = files[0].parent if files[0].name == "img_emb" else files[0]
        files, metadata = tables_in(root / "img_emb"), tables_in(root / "metadata")
        files = files or tables_in(root)
    if not files:
        raise DataError(f"{name} contains no files of vectors ({', '.join(ENDINGS)})")
    table, mark = open_tables(files), content_of(files)
    if "codebooks" in table.kinds:
        raise DataError(f"{name} was written by gpq encode: give the data that it encoded")
    if metadata:
        if len(files) == len(metadata) and any(
            re.findall(r"\d+", file.stem) != re.findall(r"\d+", texts.stem)
            for file, texts in zip(files, metadata, strict=True)
        ):
            raise DataError(f"{name}: the files of img_emb and metadata have different numbers")
        table = Table(str(metadata[0].parent.parent), table.arrays, open_tables(metadata).data)
    if {*table.of_kind("image", "bytes")} - {*table.arrays} and o.vectors is None:
        return _open_by_datasets("parquet", name, list(map(str, files)), mark, o)
    return open_table(name, table, o, mark, str(files[0].parent))


def tables_in(folder: Path) -> list[Path]:
    """Return the tables of a folder in numeric order, those of a test part last; not ``.json``,
    which more often describes the others.
    """
    return sorted(
        (
            file
            for file in (*folder.glob("*"), *folder.glob("data/*"))
            if file.suffix in {*ENDINGS} - {".json"} and file.name[0] != "."
        ),
        key=lambda file: (file.name.startswith("test"), natural_order(file.name)),
    )


def open_list(path: str, o: Options) -> Dataset:
    """Open a text with lines of a path and 0/1 labels, one class number (-1 is unlabelled), or
    nothing."""
    file = files_of(path)[0]
    lines = re.findall(
        r"^[ \t]*(?!#\s)(\S.*?)((?:[ \t]+-?\d+)*)[ \t]*$",
        read_text(file, "a list of images"),
        re.MULTILINE,
    )
    has_header = (
        bool(lines)
        and not (lines[0][1] or is_image_name(lines[0][0]))
        and bool(lines[-1][1] or is_image_name(lines[-1][0]))
        and not Path(o.root or file.parent, lines[0][0]).exists()
    )
    paths, labels = np.array(lines[has_header:], np.str_).reshape(-1, 2).T
    return open_table(
        f"list:{path}",
        Table(str(file), {"image": paths, "label": labels}),
        replace(o, image_column="image"),
        folder=str(file.parent),
    )


# Hugging Face -------------------------------------------------------------------------------------


def _by_datasets(name: str, load: Callable[[Any], Any], remedy: str = "") -> Any:
    """Return what ``load`` gets from the library ``datasets``.

    Raises DataError: it fails; ``remedy`` ends the message.
    """
    datasets = optional(
        "datasets",
        f"reading {name} needs the package datasets: pip install 'gpq-faiss[train]'",
        DataError,
    )
    datasets.disable_progress_bars()
    try:
        return load(datasets)
    except Exception as error:  # from pyarrow, json, or datasets
        raise DataError(
            f"{name} cannot be read by datasets ({one_line(error.__cause__ or error)}){remedy}"
        ) from None


def _open_by_datasets(form: str, name: str, files: list[str], mark: str, o: Options) -> Dataset:
    """Open files of images, which ``datasets`` copies to the cache folder as Arrow."""
    rows = _by_datasets(
        name,
        lambda datasets: datasets.load_dataset(
            form,
            data_files={"train": files},
            split="train",
            cache_dir=str(cache_folder() / "datasets"),
        ),
        ": give tars (patterns have *) whose first five samples have files of the same "
        "endings, and names of classes in .json, not .cls; labels of some images go into a table "
        "with their names, --labels" * (form == "webdataset"),
    )
    return open_hf(rows, o, name, mark)


def open_webdataset(path: str, o: Options) -> Dataset:
    """Open WebDataset shards: a path, a URL, a pattern, or a folder of them.

    Names are the keys. Labels are in ``.cls`` or a field of ``.json``; captions are no labels.
    """
    is_url = "://" in path
    path = os.path.join(path, "*.tar") if os.path.isdir(path) else path
    files = [path] if is_url else list(map(str, files_of(path)))
    # A URL may hold a password and a token; the fingerprint is that of the copy.
    public = re.sub(r"(?<=://)[^/?#]*@|[?#].*", "", path) if is_url else path
    return _open_by_datasets(
        "webdataset", f"webdataset:{public}", files, "" if is_url else content_of(files), o
    )


def open_hf(source: Any, o: Options, name: str = "", mark: str = "") -> Dataset:
    """Open images or vectors of a ``Dataset`` or ``DatasetDict`` of ``datasets``, or of a folder
    that ``save_to_disk`` wrote: all splits, test splits last."""
    name = name or f"hf:{source if isinstance(source, str) else type(source).__name__}"
    if isinstance(source, str):
        source = _by_datasets(
            name, lambda datasets: datasets.load_from_disk(os.path.expanduser(source))
        )
    splits = (
        [source[split] for split in sorted(source, key=lambda split: (split == "test", split))]
        if isinstance(source, dict)
        else [source]
    )
    if any(not hasattr(part, "data") or part.format["type"] == "custom" for part in splits):
        raise DataError(
            f"{name} is a stream, or has a transform: give a Dataset, apply transforms by its map"
        )
    source = _by_datasets(name, lambda datasets: datasets.concatenate_datasets(splits))
    data = source.data.table if source._indices is None else source.with_format("arrow")[:]
    if isinstance(source.features.get("json"), dict):  # of a WebDataset
        for field, values in zip(
            data.schema.field("json").type, data["json"].flatten(), strict=True
        ):
            data = data.append_column(field, values)
    table = Table(name, {}, data)
    for column, kind in source.features.items():
        if class_names := getattr(getattr(kind, "feature", kind), "names", None):
            table.arrays[column] = np.fromiter(
                (named(number, class_names) for number in table.values(column).tolist()), object
            )
    return open_table(
        name,
        table,
        o,
        mark
        or fingerprint(
            content_of(file["filename"] for file in source.cache_files), source._fingerprint
        ),
    )


# Arrays, tensors, lists and map-style data sets of torch ------------------------------------------


def open_array(values: Any, o: Options) -> Dataset:
    """Open vectors, numbers [N, width], or images, uint8 or floats from 0 to 1, [N, H, W],
    [N, H, W, 3] or [N, 3, H, W].

    Raises DataError: neither vectors nor images.
    """
    array = as_array(to_numpy(values)[:], "the array")
    if array.ndim < 3:
        return FeatureDataset(
            name="array",
            fingerprint=fingerprint(
                "array", str(array.shape), np.ascontiguousarray(array).tobytes()
            ),
            matrix=array,
        )
    for image in (array.min(axis=0), array.max(axis=0)) if len(array) else (array,):
        to_pixels(image, "the array's darkest or brightest pixels")
    return images_in_memory("array", array)


def _targets(source: Any) -> tuple[Any, Any]:
    """Return the class numbers of a map-style data set and their names, each None if unknown.

    Subsets have those of the whole. Raises DataError: numbers of joined data sets that mean
    different classes.
    """
    if hasattr(source, "dataset") and hasattr(source, "indices"):
        targets, classes = _targets(source.dataset)
        return None if targets is None else np.asarray(targets)[list(source.indices)], classes
    if parts := [_targets(part) for part in getattr(source, "datasets", ())]:
        if len({tuple(classes or ()) for _, classes in parts}) > 1:
            raise DataError(
                "joined data sets have different classes: put their images in one folder"
            )
        return (
            np.concatenate([targets for targets, _ in parts])
            if all(targets is not None for targets, _ in parts)
            else None,
            parts[0][1],
        )
    if getattr(source, "target_transform", None) is not None:
        return None, None
    # Of ImageNet's classes, two are called crane.
    names = getattr(source, "wnids", getattr(source, "classes", None))
    return (
        to_numpy(getattr(source, "targets", None)),
        list(names) if isinstance(names, Sequence) else None,
    )


def open_items(source: Any, o: Options) -> Dataset:
    """Open a list or a map-style data set of images, in any form that :func:`.images.to_pixels`
    takes, of vectors, or of these and a label, as a pair or a dict.

    They are read on demand, by one thread at a time, so the source must return the same image each
    time. Labels are its ``targets``, else in the items, which are then all read.
    """
    name, lock = type(source).__name__, threading.Lock()
    if (
        not {"__getitem__", "__len__"} <= {*dir(source)}
        or isinstance(source, Mapping | tuple)
        or not len(source)
    ):
        raise UsageError(
            f"{name} is empty, or not read as items: give an array, a table, a list, or a data set "
            "with len() and [i]; labels are given as labels=..."
        )

    def item(i: int) -> Any:
        with lock:
            value = source[i]
        if isinstance(value, Mapping):
            key = usual("images", value) or usual("vectors", value)
            return (value[key] if key else value), value.get(usual("labels", value))
        if isinstance(value, tuple) or (
            isinstance(value, list) and (len(value) == 2 or str in map(type, value))
        ):
            return (*value, None)[:2]
        return value, None

    paths, attributes = [f"item {i}" for i in range(len(source))], dict[str, Any]()
    if o.source_labels:
        targets, classes = _targets(source)
        targets = [item(i)[1] for i in range(len(paths))] if targets is None else targets
        attributes = {
            "labels": Labels.from_ids(targets, classes)
            if classes
            and all(isinstance(x, int | np.integer) or getattr(x, "ndim", 1) == 0 for x in targets)
            else labels_of(targets, "labels"),
            "label_source": (name, "in its items"),
        }
    first = item(0)[0]
    if not isinstance(first, ENCODED) and np.ndim(to_numpy(first)) == 1:
        return replace(
            open_array([item(i)[0] for i in range(len(paths))], o), name=name, **attributes
        )
    return ImageDataset(
        name=name,
        fingerprint="",
        paths=paths,
        fetch=lambda i: item(i)[0],
        max_bad=o.max_bad,
        **attributes,
    )


# Forms --------------------------------------------------------------------------------------------


_TABLE = "label_column id_column keep image_column vectors root"
_SOURCES: dict[str, tuple[str, Callable[[Any, Options], Dataset], str]] = {
    "digits": ("", open_digits, ""),
    "cifar10": ("[:ROOT]", partial(open_published, name="cifar10"), ""),
    "fashion-mnist": ("[:ROOT]", partial(open_published, name="fashion-mnist"), ""),
    "nuswide": (":ROOT", open_nuswide, ""),
    "folder": (":PATH", open_folder, ""),
    "list": (":FILE", open_list, "root"),
    "csv": (":FILE", partial(open_files, form="csv"), _TABLE),
    "parquet": (":FILE", partial(open_files, form="parquet"), _TABLE),
    "webdataset": (":FILES", open_webdataset, _TABLE),
    "hf": (":FOLDER", open_hf, _TABLE),
    "features": (":FILES", open_files, _TABLE),
    "image": (
        ":FILE",
        lambda path, _: image_files(path, [os.path.expanduser(path)], [path], max_bad=0.0),
        "",
    ),
}
"""Form of a DATA argument -> what follows its name, its opener, and the options that it takes."""
FORMS = " | ".join(name + usage for name, (usage, *_) in _SOURCES.items())
"""Every form of a DATA argument."""
_ENDINGS = {
    **dict.fromkeys(ENDINGS, "features"),
    **{".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "list", ".tar": "webdataset"},
    **dict.fromkeys(IMAGE_SUFFIXES, "image"),
}


def form_of(path: str) -> str:
    """Return the form of a path without prefix. Raises UsageError: there is no such path."""
    local = os.path.expanduser(path)
    if os.path.isdir(local):
        names = {name for name in os.listdir(local) if name[0] != "."}
        is_folder = any(
            is_image_name(name)
            or (
                os.path.isdir(os.path.join(local, name))
                # Clones of hubs have their tables in data/.
                and (name != "data" or form_of(os.path.join(local, name)) == "folder")
            )
            for name in names
        )
        forms = {
            "hf": names & {"dataset_info.json", "dataset_dict.json"},
            "nuswide": "ImageList" in names,
            "webdataset": any(name.endswith(".tar") for name in names),
            "features": "img_emb" in names or (not is_folder and tables_in(Path(local))),
        }
        return next((form for form, is_form in forms.items() if is_form), "folder")
    form = _ENDINGS.get(os.path.splitext(path)[1].lower())
    if form is None and not os.path.exists(local):
        raise UsageError(f"unknown data {path!r}: no such path, and the forms are {FORMS}")
    return form or "features"


def _opener(source: Any) -> tuple[str, Callable[[Any, Options], Dataset], str, object]:
    """Return the form of a source, its opener, the options that it takes, and what it opens.

    An object's library is not imported. Raises UsageError: a DATA argument lacks its path, or has
    one too many.
    """
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        form, colon, path = text.partition(":")
        if form not in _SOURCES:
            form, colon, path = form_of(text), ":", text
        usage, opener, takes = _SOURCES[form]
        if (path and not usage) or (not path and (colon or usage.startswith(":"))):
            raise UsageError(
                f"{source!r}: this form {'takes no' if path else 'needs a'} path; "
                f"the forms are {FORMS}"
            )
        return form, opener, takes, path or None
    if isinstance(source, Dataset):
        return "a data set", lambda dataset, _: replace(dataset, notes=[]), "", source
    if not isinstance(source, Sequence) and "datasets" in {  # its columns are sequences
        kind.__module__.partition(".")[0] for kind in type(source).__mro__
    }:
        return "a Hugging Face data set", open_hf, _TABLE, source
    # Records, as of an API: dicts with a vector, or with the path or bytes of an image.
    if isinstance(source, list) and {isinstance(row, Mapping) for row in source} == {True}:
        vector, image = (source[0].get(usual(role, source[0])) for role in ("vectors", "images"))
        if isinstance(image, str | bytes) or (
            (isinstance(vector, list | tuple | np.ndarray) or hasattr(vector, "detach"))
            and np.ndim(to_numpy(vector[:1])) == 1
        ):
            source = frame_table(
                [
                    {name: x.tolist() if hasattr(x, "detach") else x for name, x in row.items()}
                    for row in source
                ]
            ).data
    if hasattr(source, "__arrow_c_stream__") and not hasattr(source, "to_frame"):
        return "a table", partial(open_table, type(source).__name__), _TABLE, frame_table(source)
    # One column of pandas or polars, or an array of objects.
    is_column = hasattr(source, "to_frame") or (
        isinstance(source, np.ndarray) and source.ndim == 1 and source.dtype.kind in "OUST"
    )
    if hasattr(source, "ndim") and not is_column:
        return "an array", open_array, "", source
    items = list(source) if is_column else source
    if isinstance(items, list) and all(isinstance(x, str | os.PathLike) for x in items or [None]):
        return (
            "a list of paths",
            lambda paths, o: image_files("the paths", paths, paths, max_bad=o.max_bad),
            "",
            list(map(os.fspath, items)),
        )
    return "a list of items", open_items, "", items


def open_data(
    source: Any, *, labels: Any = None, ids: Any = None, names: Any = None, **read: Any
) -> Dataset:
    """Open a source of images or features, and log what was understood; nothing is decoded yet.

    Args:
        source: one of :data:`FORMS`; a path (:func:`form_of`); a table of pandas, pyarrow and
            others in Arrow's form, or one of its columns; a list of records or items; a Hugging
            Face data set; an array or tensor (numbers [N, width] or images [N, H, W(, C)]); a
            map-style data set of torch; or a :class:`.base.Dataset`.
        labels: files of labels in the order of the items, or of a table that names items by id or
            name; a column of the source; or the labels themselves, in the order of the items, or
            by id or name in a dict, a Series or a table (:func:`.labels.labels_of`).
        ids: a file of ids, one per item, a column of the source, or the ids themselves.
        names: a file of names, one per item, a column of the source, or the names themselves.
        read: ``label_column`` and ``id_column`` of a table of labels or of the source; ``vectors``,
            columns or a pattern of columns; ``keep``, columns of texts to show in results, a list
            or separated by commas; ``image_column``; ``root``, the base folder of paths in lists
            and tables (default: that of the file); ``max_bad``, the allowed fraction of missing and
            broken images (0.01).

    Raises:
        UsageError: an unknown form or option, or an option that does not apply to the form.
        DataError: missing, damaged, or of another kind.

    Examples:
        >>> digits = open_data("digits")
        >>> len(digits), digits.require_labels().n_classes, digits.read(digits.ids[:1])[0].shape
        (1797, 10, (8, 8, 3))
    """
    attached = {
        name: value
        for name, value in (("label", labels), ("ids", ids), ("name", names))
        if value is not None
    }
    form, opener, takes, opened = _opener(source)
    allowed = ["max_bad", *takes.split(), *["id_column", "label_column"] * ("label" in attached)]
    if wrong := [option for option in read if option not in allowed]:
        raise UsageError(f"--read {wrong[0]} does not apply to {form}: use {', '.join(allowed)}")
    options = Options(
        **read
        | {
            option: names.split(",") if isinstance(names, str) else list(map(str, names))
            for option in ("keep", "vectors")
            if (names := read.get(option)) is not None
        }
    )
    in_columns = [
        name
        for name, value in attached.items()
        if takes == _TABLE
        and isinstance(value, str)
        and (
            value in getattr(opened, "kinds", ())
            or not (os.path.splitext(value)[1] or os.path.exists(value))
        )
    ]
    columns: dict[str, Any] = {f"{name}_column": attached.pop(name) for name in in_columns}
    if "label" in attached:  # a column of labels that is named is of these labels
        columns = {"label_column": None, "source_labels": False} | columns
    dataset = opener(opened, replace(options, **columns))
    index = source.index if hasattr(source, "iloc") else None
    if "ids" in attached:
        dataset = replace(dataset, ids=read_ids(aligned(attached["ids"], index)))
    if "name" in attached:
        dataset = with_names(dataset, aligned(attached["name"], index))
    if "label" in attached:
        dataset = with_labels(dataset, attached["label"], options, index)
    return source if isinstance(source, Dataset) and not attached else _completed(dataset)


def _completed(dataset: Dataset) -> Dataset:
    """Complete the fingerprint and the notes of a data set that was opened, and log the notes."""
    labels = dataset.labels if dataset.labels is not None and dataset.labels.has().any() else None
    marks: list[bytes | str] = [labels.packed.tobytes(), *labels.class_names] if labels else []
    notes = [
        *(label_notes(labels, dataset.label_source) if labels else ["no labels"]),
        *dataset.notes,
    ]
    for note in notes:
        log.info("%s: %s", dataset.name, note)
    return replace(
        dataset,
        fingerprint=fingerprint(
            dataset.fingerprint,
            dataset.ids.tobytes(),
            *marks,
            *(f"{name}\0" + "\0".join(dataset.texts[name]) for name in sorted(dataset.texts)),
        ),
        labels=labels,
        notes=notes,
        table=None,
    )
