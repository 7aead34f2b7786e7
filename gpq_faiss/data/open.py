"""Open any source of data: ``open_data("scheme:path")``, a path without prefix, or an object."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError, UsageError, unknown
from ..files import fingerprint
from ..inputs import parse_json, read_text, reading
from ..plugins import Plugin, find_plugin, plugin_names
from ..store.hdf5 import as_texts
from .arrays import read_ids, whole_numbers
from .base import Dataset
from .images import IMAGE_SUFFIXES, shown, without_gradient
from .labels import ROW, WHOLE, class_notes, composed, labels_note, labels_of, plain_text
from .paths import files_of, is_url, local_path, without_secrets
from .sources import (
    open_array,
    open_files,
    open_frame,
    open_hf,
    open_image,
    open_items,
    open_list,
    open_webdataset,
)
from .standard import open_digits, open_folder, open_nuswide, open_published
from .tables import FORMS as ENDINGS
from .tables import ITEMS, LABELS, Options, Table, file_form, frame_table, open_tables, usual

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


def is_form(text: str) -> bool:
    """Return whether a text starts like a DATA argument."""
    scheme = text.partition(":")[0]
    return find_plugin("data", scheme, _SOURCES) is not None or scheme in _SOURCES


def form_of(path: str) -> str:
    """Return the form of a path without prefix. Raises UsageError: there is no such path."""
    local = "" if is_url(path) else os.path.expanduser(path)
    if os.path.isdir(local):
        names = set(os.listdir(local))
        folders = {n for n in names if n[0] != "." and os.path.isdir(os.path.join(local, n))}
        data = os.listdir(os.path.join(local, "data")) if folders == {"data"} else names - folders
        tables = any(os.path.splitext(name)[1].lower() in ENDINGS for name in data)
        if names & {"dataset_info.json", "dataset_dict.json"}:
            return "hf"
        if "ImageList" in names:
            return "nuswide"
        return "features" if "img_emb" in names or (tables and folders <= {"data"}) else "folder"
    form = _ENDINGS.get(os.path.splitext(without_secrets(path))[1].lower())
    if form is None and not os.path.exists(local):
        plugins = [f"{plugin}:PATH" for plugin in plugin_names("data", _SOURCES)]
        forms = " | ".join([FORMS, *plugins])
        raise UsageError(
            f"unknown data {without_secrets(path)!r}: no such path, and the forms are {forms}"
        )
    return form or "features"


def _opener(source: object) -> tuple[str, Source, object]:
    """Return the form of a source, its opener, and what that opens.

    An object's library is not imported. Raises UsageError: a DATA argument lacks its path, or has
    one too many.
    """
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if isinstance(source, str):
        source = source if is_form(source) else f"{form_of(source)}:{source}"
        scheme, colon, path = source.partition(":")
        if plugin := find_plugin("data", scheme, _SOURCES):
            return scheme, Source(":PATH", partial(_of_plugin, plugin)), path
        usage = _SOURCES[scheme].usage
        if (path and not usage) or (not path and (colon or usage.startswith(":"))):
            raise UsageError(f"{source!r} has a path too many or too few: the forms are {FORMS}")
        return scheme, _SOURCES[scheme], path or None
    libraries = {kind.__module__.partition(".")[0] for kind in type(source).__mro__}
    if isinstance(source, Dataset):
        return "a data set", Source("", lambda dataset, _: dataset), source
    if "datasets" in libraries:
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
    names_of_options = [field.name for field in fields(Options)]
    for option in read:
        if option not in names_of_options:
            raise UsageError(unknown(f"option {option!r}", option, names_of_options))
    if not 0 <= read.get("max_bad", 0) <= 1:
        raise UsageError(f"--read max_bad={read['max_bad']}: give a fraction from 0 to 1")
    keep = read.get("keep") or ()
    options = Options(**read | {"keep": keep.split(",") if isinstance(keep, str) else keep})
    form, opener, opened = _opener(source)
    beside = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in (("name", names), ("id", ids), ("label", labels))
        if value is not None
    }
    columns: dict[str, Any] = {"label_column": None, "id_column": None, "with_labels": False}
    columns = columns if "label" in beside else {}
    for name in [name for name in beside if opener.takes == _TABLE]:
        text = beside[name] if isinstance(beside[name], str) else "."
        if not os.path.splitext(text)[1] and not os.path.exists(text):
            columns |= {f"{name}_column": beside.pop(name), "with_labels": "label" not in beside}
    source_options = replace(options, **columns)
    for option in ("label_column", "vectors", "keep", "root", "image_column", "concepts"):
        if getattr(source_options, option) and option not in opener.takes.split():
            raise UsageError(f"--read {option} does not apply to {form}")
    dataset = opener.open(opened, source_options)
    for name, attach in (("name", _with_names), ("id", _with_ids)):
        dataset = attach(dataset, beside[name]) if name in beside else dataset
    if "label" in beside:
        dataset = _with_labels(dataset, beside["label"], options)
    is_complete = isinstance(source, Dataset) and not beside
    return dataset if is_complete else _completed(dataset)


def _completed(dataset: Dataset) -> Dataset:
    """Complete the fingerprint and the notes of a data set that was opened, and log the notes."""
    labels = dataset.labels if dataset.labels is not None and dataset.labels.has().any() else None
    texts = [
        f"{name}\0" + "\0".join(dataset.texts[name].tolist()) for name in sorted(dataset.texts)
    ]
    marks = dataset.ids.tobytes(), "" if labels is None else labels.fingerprint()
    mark = fingerprint(dataset.fingerprint, *marks, *texts)
    notes = list(dataset.notes)
    repeated = len(dataset) - len(np.unique(dataset.ids))
    if repeated:
        notes.append(f"{repeated:,} of the {len(dataset):,} ids are repeated")
    if labels is not None:
        notes += class_notes(labels)
    for note in notes:
        log.info("%s: %s", dataset.name, note)
    return replace(dataset, fingerprint=mark, labels=labels, notes=notes)


def _of_plugin(plugin: Plugin, path: str, o: Options) -> Dataset:
    """Open a plugin's source. Raises UsageError: the plugin fails."""
    opener = plugin.load()
    with plugin.running(f"open {shown(path)!r}"):
        opened = opener(path)
    return replace(open_data(opened, max_bad=o.max_bad), name=f"{plugin.name}:{path}")


# Labels, ids and names beside the data ------------------------------------------------------------


def _with_labels(dataset: Dataset, labels: Any, o: Options) -> Dataset:
    """Return a data set with other labels.

    Args:
        labels: files of a table or of labels in the order of the items; a table, a dict or a Series
            by id or name; or values in the order of the items (:func:`.labels.labels_of`).

    Raises:
        DataError: labels that match no item, are of another number, or cannot be read.
    """
    source, column, keys, method = "labels", "its keys", None, "in their order"
    if isinstance(labels, str):
        files = files_of(labels)
        source, labels = files[0].name, _read_labels(files)
    elif hasattr(labels, "__arrow_c_stream__") and hasattr(labels, "columns"):
        labels = frame_table(labels)
    elif hasattr(labels, "index") and hasattr(labels, "items"):  # a Series of pandas
        is_ordered = labels.index.tolist() == [*range(len(dataset))]
        labels = labels.tolist() if is_ordered else dict(labels.items())
    if isinstance(labels, Mapping):
        keys, labels = list(labels), list(labels.values())
    elif isinstance(labels, Table):
        table, columns = labels, list(labels.columns)
        items = o.id_column or (usual(ITEMS, columns) if len(columns) > 1 else None)
        candidates = [name for name in columns if name != items]
        only = columns[0] if len(columns) == 1 else usual(LABELS, candidates)
        is_open = usual([name for name in LABELS if name != "y"], candidates) is None
        is_open &= o.label_column is None and len(candidates) > 1
        texts = {name: table.texts(name).tolist() for name in candidates if is_open}
        if texts and {*chain(*texts.values())} <= {"0", "1"}:  # a column for each class
            hot = zip(*texts.values(), strict=True)
            labels = [[name for name, x in zip(texts, row, strict=True) if x == "1"] for row in hot]
        else:
            labels = table.values(table.column(o.label_column or only, "label_column"))
        if items is None and len(columns) > 1 and len(labels) != len(dataset):
            table.column("id", "id_column")
        if items is not None:
            keys, column = table.values(table.column(items, "id_column")).tolist(), repr(items)
        is_named = keys and o.id_column is None and not WHOLE.fullmatch(_key(keys[0]))
        if is_named and "name" not in dataset.texts and len(labels) == len(dataset):
            dataset, keys = _with_names(dataset, keys or ()), None
    elif o.label_column or o.id_column:
        raise UsageError(f"--read label_column, id_column: {source} has no columns")
    if keys is not None:
        rows, method = _matched(dataset, keys, source, column)
        labels = [labels[row] if row >= 0 else None for row in rows]
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
    lines = read_text(files[0], "labels").split("\n") if form in ("text", "csv") else [","]
    first, *following = [line.strip() for line in (lines if lines[-1] else lines[:-1])] or [""]
    if re.search("[,;\t]", first) and not all(map(ROW.fullmatch, (first, *following))):
        return open_tables(files)
    numbers = [bool(ROW.fullmatch(x) or WHOLE.fullmatch(x) or x == "") for x in (first, *following)]
    is_name = usual(LABELS, [first]) is not None and first not in following
    has_header = following and (is_name or (all(numbers[1:]) and not numbers[0]))
    return following if has_header else [first, *following]


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
    dataset: Dataset, keys: Sequence[Any], source: str, column: str
) -> tuple[list[int], str]:
    """Return the position of the key of each item, -1 if it has none, and how they match."""
    texts = [_key(key) for key in keys]
    if repeated := [text for text, count in Counter(texts).items() if count > 1 and text]:
        raise DataError(
            f"{source}: {column} {repeated[0]!r} occurs more than once: give each item one line"
        )
    names = list(map(_key, dataset.texts["name"].tolist())) if "name" in dataset.texts else []
    ids = dataset.ids.tolist()
    for way, shorten in _WAYS.items():
        items = list(map(str, ids)) if way == "id" else list(map(shorten, names))
        positions = {shorten(text): i for i, text in enumerate(texts) if text} if items else {}
        is_unique = len(positions) == len(texts) - texts.count("")
        is_unique &= way == "id" or len(set(items)) == len(items)
        if is_unique and not positions.keys().isdisjoint(items):
            break
    else:
        example = f"it has {texts[:1]}, the data {(names or ids)[:1]}"
        raise DataError(
            f"{source}: no key of a label in {column} is an id or name of the data ({example})"
        )
    unmatched = sorted(positions.keys() - {*items})
    if way == "id" and unmatched and ids == [*range(len(ids))]:
        problem = f"{source} has the id {unmatched[0]} in {column}, but the data has no ids"
        raise DataError(
            f"{problem}; its items are numbered from 0: give their ids with --read ids=FILE"
        )
    count = f" ({len(unmatched):,} rows are of other items)" if unmatched else ""
    return [positions.get(item, -1) for item in items], f"matched by {way} in {column}{count}"


def _with_ids(dataset: Dataset, ids: Any) -> Dataset:
    ids = read_ids(ids) if isinstance(ids, str) else without_gradient(ids)
    return replace(dataset, ids=whole_numbers(ids, "ids"))


def _with_names(dataset: Dataset, names: str | Sequence[str]) -> Dataset:
    """Return a data set with other names: the names, or a text with one per line."""
    names = read_text(local_path(names), "names").splitlines() if isinstance(names, str) else names
    return replace(dataset, texts=dataset.texts | {"name": as_texts(map(plain_text, names))})
