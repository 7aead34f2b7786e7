"""Open any source of data: ``open_data("scheme:path")``, a path without prefix, or an object."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError, UsageError
from ..files import fingerprint
from ..inputs import parse_json, read_text, reading
from ..store.hdf5 import as_texts
from .arrays import read_ids
from .base import Dataset
from .images import IMAGE_SUFFIXES
from .labels import (
    ROW,
    WHOLE,
    Labels,
    class_notes,
    composed,
    labels_note,
    labels_of,
    plain_text,
)
from .sources import (
    open_array,
    open_files,
    open_frame,
    open_hf,
    open_image,
    open_items,
    open_list,
    open_webdataset,
    tables_in,
)
from .standard import open_digits, open_folder, open_nuswide, open_published
from .tables import FORMS as ENDINGS
from .tables import (
    ITEMS,
    LABELS,
    Options,
    Table,
    file_form,
    files_of,
    frame_table,
    open_tables,
    usual,
)

log = logging.getLogger(__name__)


class Source(NamedTuple):
    """A form of a DATA argument: what follows its name, its opener, and the options that it takes
    besides those of all."""

    usage: str
    open: Callable[[Any, Options], Dataset]
    takes: str = ""


_TABLE = "label_column keep image_column vectors root"
_SOURCES = {
    "digits": Source("", open_digits),
    "cifar10": Source("[:ROOT]", partial(open_published, name="cifar10")),
    "fashion-mnist": Source("[:ROOT]", partial(open_published, name="fashion-mnist")),
    "nuswide": Source(":ROOT", open_nuswide, "concepts"),
    "folder": Source(":PATH", open_folder),
    "list": Source(":FILE", open_list, "root"),
    "csv": Source(":FILE", partial(open_files, form="csv"), _TABLE),
    "parquet": Source(":FILE", partial(open_files, form="parquet"), _TABLE),
    "webdataset": Source(":FILES", open_webdataset, _TABLE),
    "hf": Source(":FOLDER", open_hf, _TABLE),
    "features": Source(":FILES", open_files, _TABLE),
    "image": Source(":FILE", open_image),
}
FORMS = " | ".join(name + source.usage for name, source in _SOURCES.items())
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
        if names & {"dataset_info.json", "dataset_dict.json"}:
            return "hf"
        has_classes = any(os.path.isdir(os.path.join(local, name)) for name in names - {"data"})
        is_table = "img_emb" in names or (tables_in(Path(local)) and not has_classes)
        return "nuswide" if "ImageList" in names else "features" if is_table else "folder"
    form = _ENDINGS.get(os.path.splitext(path)[1].lower())
    if form is None and not os.path.exists(local):
        raise UsageError(f"unknown data {path!r}: no such path, and the forms are {FORMS}")
    return form or "features"


def _opener(source: object) -> tuple[str, Source, object]:
    """Return the form of a source, its opener, and what that opens.

    An object's library is not imported. Raises UsageError: a DATA argument lacks its path, or has
    one too many.
    """
    if isinstance(source, str):
        source = source if source.partition(":")[0] in _SOURCES else f"{form_of(source)}:{source}"
        scheme, colon, path = source.partition(":")
        usage = _SOURCES[scheme].usage
        if (path and not usage) or (not path and (colon or usage.startswith(":"))):
            raise UsageError(f"{source!r} has a path too many or too few: the forms are {FORMS}")
        return scheme, _SOURCES[scheme], path or None
    if isinstance(source, Dataset):
        return "a data set", Source("", lambda dataset, _: dataset), source
    if "datasets" in {kind.__module__.partition(".")[0] for kind in type(source).__mro__}:
        return "a Hugging Face data set", _SOURCES["hf"], source
    if hasattr(source, "__arrow_c_stream__"):
        return "a table", Source("", open_frame, _TABLE), source
    first: Any = source[0] if isinstance(source, list) and source else None
    is_vector = isinstance(first, list) and not {*map(type, first)} - {int, float}
    if is_vector or getattr(first, "ndim", 0) == 1 or hasattr(source, "ndim"):
        return "an array", Source("", open_array), source
    return "a list of items", Source("", open_items), source


def open_data(
    source: object, *, labels: Any = None, ids: Any = None, names: Any = None, **read: Any
) -> Dataset:
    """Open a source of images or features, and log what was understood; nothing is decoded yet.

    Args:
        source: one of :data:`FORMS` or a plugin's form; a path (:func:`form_of`); a table of
            pandas, pyarrow and others in Arrow's form, a Hugging Face data set, an array or tensor
            (numbers [N, width] or images uint8 [N, H, W(, 3)]), a map-style data set of torch, or a
            :class:`.base.Dataset`.
        labels: files of labels in the order of the items, or of a table that names items by id or
            name; a column of the source; or the labels themselves, in the order of the items, or
            by id or name in a dict, a Series or a table (:func:`.labels.labels_of`).
        ids: a file of ids, one per item, a column of the source, or the ids themselves.
        names: a file of names, one per item, a column of the source, or the names themselves.
        read: ``label_column`` and ``id_column`` of a table of labels or of the source; ``vectors``,
            columns or a pattern of columns; ``keep``, columns of texts to show in results, a list
            or separated by commas; ``image_column``; ``root``, the base folder of paths in lists
            and tables (default: that of the file); ``concepts`` of ``nuswide``, the number of most
            frequent ones (21); ``max_bad``, the allowed fraction of missing and broken images
            (0.01); ``download``, whether ``cifar10`` and ``fashion-mnist`` may be downloaded.

    Raises:
        UsageError: an unknown form or option, or an option that does not apply to the form.
        DataError: missing, damaged, or of another kind.

    Examples:
        >>> digits = open_data("digits")
        >>> len(digits), digits.require_labels().n_classes, digits.read(digits.ids[:1])[0].shape
        (1797, 10, (8, 8, 3))
    """
    beside = {"label": labels, "id": ids, "name": names}
    beside = {name: value for name, value in beside.items() if value is not None}
    form, opener, opened = _opener(os.fspath(source) if isinstance(source, os.PathLike) else source)
    allowed = [
        "max_bad",
        *opener.takes.split(),
        *["id_column", "label_column"] * ("label" in beside),
    ]
    if wrong := [option for option in read if option not in allowed]:
        raise UsageError(f"--read {wrong[0]} does not apply to {form}: use {', '.join(allowed)}")
    if not 0 <= read.get("max_bad", 0) <= 1:
        raise UsageError(f"--read max_bad={read['max_bad']}: give a fraction from 0 to 1")
    keep = read.get("keep") or ()
    options = Options(**read | {"keep": keep.split(",") if isinstance(keep, str) else keep})
    # A column of labels or ids that is named belongs to the labels beside the data, if any.
    columns: dict[str, Any] = {"label_column": None, "id_column": None, "with_labels": False}
    columns = columns if "label" in beside else {}
    for name, value in list(beside.items()) if opener.takes == _TABLE else ():
        if isinstance(value, str) and not os.path.splitext(value)[1] and not os.path.exists(value):
            columns |= {f"{name}_column": beside.pop(name), "with_labels": "label" not in beside}
    dataset = opener.open(opened, replace(options, **columns))
    if "name" in beside:
        dataset = _with_names(dataset, beside["name"])
    if "id" in beside:
        dataset = replace(dataset, ids=read_ids(beside["id"]))
    if "label" in beside:
        dataset = _with_labels(dataset, beside["label"], options)
    return dataset if isinstance(source, Dataset) and not beside else _completed(dataset)


def _completed(dataset: Dataset) -> Dataset:
    """Complete the fingerprint and the notes of a data set that was opened, and log the notes."""
    labels = dataset.labels if dataset.labels is not None and dataset.labels.has().any() else None
    texts = [f"{name}\0" + "\0".join(dataset.texts[name]) for name in sorted(dataset.texts)]
    marks = dataset.ids.tobytes(), "" if labels is None else labels.fingerprint()
    notes = [*dataset.notes, *([] if labels is None else class_notes(labels))]
    # A sort is much faster than np.unique.
    if repeated := int((np.diff(np.sort(dataset.ids)) == 0).sum()):
        notes.append(f"{repeated:,} of the {len(dataset):,} ids are repeated")
    for note in notes:
        log.info("%s: %s", dataset.name, note)
    mark = fingerprint(dataset.fingerprint, *marks, *texts)
    return replace(dataset, fingerprint=mark, labels=labels, notes=notes)


# Labels and names beside the data -----------------------------------------------------------------


def _with_names(dataset: Dataset, names: Any) -> Dataset:
    """Return a data set with other names: the names, or a text with one per line."""
    is_file = isinstance(names, str | os.PathLike)
    names = read_text(Path(names).expanduser(), "names").splitlines() if is_file else names
    return replace(dataset, texts=dataset.texts | {"name": as_texts(map(plain_text, names))})


def _with_labels(dataset: Dataset, labels: Any, o: Options) -> Dataset:
    """Return a data set with other labels.

    Args:
        labels: files of a table or of labels in the order of the items; a table, a dict or a Series
            by id or name; or values in the order of the items (:func:`.labels.labels_of`).

    Raises:
        DataError: labels that match no item, are of another number, or cannot be read.
    """
    source, method = "labels", "in their order"
    if isinstance(labels, str | os.PathLike):
        files = files_of(labels)
        source, labels = files[0].name, _read_labels(files)
    elif hasattr(labels, "__arrow_c_stream__") and hasattr(labels, "columns"):
        labels = frame_table(labels)
    elif hasattr(labels, "index") and hasattr(labels, "items"):  # a Series of pandas
        is_ordered = labels.index.tolist() == [*range(len(dataset))]
        labels = labels.tolist() if is_ordered else dict(labels.items())
    if isinstance(labels, Mapping):
        arrays = {"id": np.fromiter(labels, object), "label": np.fromiter(labels.values(), object)}
        labels, o = Table("labels", arrays), Options()
    if isinstance(labels, Table):
        dataset, attached, method = _matched(dataset, labels, o, source)
    elif o.label_column or o.id_column:
        raise UsageError(f"--read label_column, id_column: {source} has no columns")
    else:
        attached = labels_of(labels, source)
    notes = [labels_note(source, attached, method), *dataset.notes[1:]]
    return replace(dataset, labels=attached, notes=notes)


def _read_labels(files: Sequence[Path]) -> Any:
    """Read labels as a table, a dict by id or name, or values in the order of the items.

    In a text of one per line, a first line with a usual name, or of text above numbers, is a
    header.
    """
    form = file_form(files[0])
    if files[0].suffix == ".json":
        with reading(files[0], "JSON of labels"):
            values = parse_json(read_text(files[0], "JSON of labels"))
        if isinstance(values, dict) or not any(isinstance(value, dict) for value in values):
            return values
    if form not in ("text", "csv"):
        return open_tables(files)
    text = read_text(files[0], "labels").removesuffix("\n")
    first, *following = lines = [line.strip() for line in text.split("\n")]
    if re.search("[,;\t]", first) and not all(map(ROW.fullmatch, lines)):
        return open_tables(files)
    is_name = usual(LABELS, [first]) is not None and first not in following
    is_number = [bool(ROW.fullmatch(x) or WHOLE.fullmatch(x) or x == "") for x in lines]
    has_header = following and (is_name or (all(is_number[1:]) and not is_number[0]))
    return following if has_header else lines


def _key(value: Any) -> str:
    """Return an id or a name as text; whole floats are whole numbers."""
    text = composed((value if isinstance(value, str) else plain_text(value)).strip())
    return text.partition(".")[0] if "." in text and WHOLE.fullmatch(text) else text


_WAYS: dict[str, Callable[[str], str]] = {
    "name": str,
    "id": str,
    "file name": os.path.basename,
    "name without ending": lambda key: os.path.splitext(os.path.basename(key))[0],
}
"""Ways in which the key of a label may name an item."""


def _matched(
    dataset: Dataset, table: Table, o: Options, source: str
) -> tuple[Dataset, Labels, str]:
    """Return the data set, the labels of its items by a table, and how they match.

    A table without ids or names has one row for each item, in order. Data without names take those
    of a table of as many rows.
    """
    columns = list(table.kinds)
    only = columns[0] if len(columns) == 1 else None
    labels = table.labels(replace(o, label_column=o.label_column or only))
    items = o.id_column or (None if only else usual(ITEMS, columns))
    if items is None and (only or len(labels) == len(dataset)):
        return dataset, labels, "in their order"
    column = table.column(items, "id_column")
    texts, ids = list(map(_key, table.values(column))), list(map(str, dataset.ids.tolist()))
    if repeated := [text for text, count in Counter(texts).items() if count > 1 and text]:
        raise DataError(
            f"{source}: {column!r} {repeated[0]!r} occurs more than once: give each item one line"
        )
    is_named = o.id_column is None and not all(map(WHOLE.fullmatch, texts))
    if is_named and "name" not in dataset.texts and len(texts) == len(dataset):
        return _with_names(dataset, texts), labels, "in their order"
    names = list(map(_key, dataset.texts.get("name", ())))
    for way, shorten in _WAYS.items():
        keys = ids if way == "id" else list(map(shorten, names))
        positions = {shorten(text): i for i, text in enumerate(texts) if text} if keys else {}
        is_unique = len(positions) == len(texts) - texts.count("")
        is_unique &= way == "id" or len(set(keys)) == len(keys)
        if is_unique and not positions.keys().isdisjoint(keys):
            break
    else:
        raise DataError(
            f"{source}: no key of a label in {column!r} is an id or name of the data "
            f"(it has {texts[:1]}, the data {(names or ids)[:1]})"
        )
    unmatched = sorted(positions.keys() - {*keys})
    if way == "id" and unmatched and ids == [*map(str, range(len(ids)))]:
        raise DataError(
            f"{source} has the id {unmatched[0]} in {column!r}, but the data has no ids"
            f"; its items are numbered from 0: give their ids with --read ids=FILE"
        )
    others = f" ({len(unmatched):,} rows are of other items)" if unmatched else ""
    rows = np.array([positions.get(key, -1) for key in keys])
    return dataset, labels.at(rows), f"matched by {way} in {column!r}{others}"
