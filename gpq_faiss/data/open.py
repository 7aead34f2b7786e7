"""Open any data source: ``open_data("scheme:path")``, a path without prefix, or an in-memory object; with ids, names and labels that are
given beside it, as values or as files."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..errors import DataError, UsageError
from ..inputs import read_text
from ..plugins import Plugin, find_plugin, plugin_names
from ..store.hdf5 import as_texts
from .arrays import read_ids, whole_numbers
from .base import Dataset
from .folder import has_samples, open_folder, open_nuswide, open_webdataset
from .images import shown, without_gradient
from .labels import Labels, composed, label_cell, labels_of
from .paths import files_of, is_url, local_path, without_secrets
from .standard import open_digits, open_published
from .tables import ITEMS, LABELS, Options, Table, open_table, read_labels, told
from .tabular import SUFFIXES, open_array, open_features, open_frame, open_hf, open_items, open_listed

log = logging.getLogger(__name__)

Opener = Callable[[Any, Options], Dataset]
_SOURCES: dict[str, tuple[str, Opener, str]] = {
    "digits": ("", open_digits, ""),
    "cifar10": ("[:ROOT]", partial(open_published, name="cifar10"), ""),
    "fashion-mnist": ("[:ROOT]", partial(open_published, name="fashion-mnist"), ""),
    "nuswide": (":ROOT", open_nuswide, "concepts"),
    "folder": (":PATH", open_folder, ""),
    "list": (":FILE", partial(open_listed, form="list"), "root"),
    "csv": (":FILE", partial(open_listed, form="csv"), "root image_column label_column keep"),
    "parquet": (":FILE", partial(open_listed, form="parquet"), "root image_column label_column keep"),
    "webdataset": (":FILES", open_webdataset, "image_column label_column keep"),
    "hf": (":FOLDER", open_hf, "image_column label_column vectors keep"),
    "features": (":FILES", open_features, "vectors keep"),
}
"""Prefix of a DATA argument -> what follows it, its opener, and the options that it takes (besides those of all)."""
FORMS = " | ".join(name + place for name, (place, _, _) in _SOURCES.items())
"""Every form of a DATA argument."""
_TABLE, _HUB = "a table", "a Hugging Face data set"


def is_form(text: str) -> bool:
    """Whether a text starts like a DATA argument. Raises UsageError: see :func:`.plugins.find_plugin`."""
    scheme = text.partition(":")[0]
    return find_plugin("data", scheme, _SOURCES) is not None or scheme in _SOURCES


def form_of(path: str, image_column: str | None = None) -> str:
    """The scheme of a path without prefix, by its ending, and for folders, archives and Parquet by what is in them."""
    bare = without_secrets(path)
    name = shown(bare)
    ending = os.path.splitext(bare.lower().removesuffix(".gz"))[1]
    local = "" if is_url(path) else os.path.expanduser(path)
    if os.path.isdir(local):
        there = set(os.listdir(local))
        is_hub = there & {"dataset_info.json", "dataset_dict.json"}
        return "hf" if is_hub else "nuswide" if "ImageList" in there else "folder"
    if ending in (".parquet", ".pq"):
        return _form_of_parquet(path, name, image_column or "image")
    if ending in (".tar", ".tgz"):
        files = files_of(path)
        return "webdataset" if len(files) > 1 or has_samples(files[0]) else "folder"
    of_ending = dict.fromkeys(SUFFIXES, "features") | {".csv": "csv", ".tsv": "csv", ".txt": "list"}
    if ending in of_ending:
        return of_ending[ending]
    if os.path.exists(local):
        what = f"its ending tells no form ({', '.join([*of_ending, '.tar'])} do)"
        raise UsageError(f"{name}: {what}: rename it, or give list:{name}, or give their folder")
    if local and "\0" not in local and (ending or "/" in bare):
        raise DataError(f"{name} not found: give a path that exists, or a form such as features:FILES")
    forms = " | ".join([FORMS, *(f"{name}:PATH" for name in plugin_names("data", _SOURCES))])
    raise UsageError(f"unknown data {bare!r}: no such path, and the forms are {forms}")


def _form_of_parquet(path: str, name: str, image_column: str) -> str:
    table = open_table(files_of(path)[0], "a Parquet file of vectors, or of paths of images,")
    # Several lists: one of them is the vectors, the others may be labels.
    vectors = any(table.kind(name) == "list" for name in table.names if name != image_column)
    images = image_column in table.names and table.kind(image_column) == "text"
    if vectors == images:
        what = "both vectors (lists of numbers) and" if vectors else "neither vectors (lists of numbers) nor"
        has = f"has {what} a column {image_column!r} of image paths (it has {', '.join(table.names[:20])})"
        raise UsageError(f"{name} {has}: write features:{path} or parquet:{path}, or --read image_column=")
    return "features" if vectors else "parquet"


def _found(source: object, image_column: str | None) -> tuple[str, Opener, str, object]:
    """The form of a source, its opener with the options that it takes, and what it opens. An object's library is not imported. Raises
    UsageError: a DATA argument lacks its path, or has one too many."""
    if isinstance(source, os.PathLike) or (isinstance(source, str) and not is_form(source)):
        path = os.fspath(source)
        source = f"{form_of(path, image_column)}:{path}"
    if isinstance(source, Dataset):
        return "a data set", lambda dataset, _: dataset, "", source
    if any(kind.__module__.partition(".")[0] == "datasets" for kind in type(source).__mro__):
        return _HUB, open_hf, "image_column label_column vectors keep", source
    if hasattr(source, "__arrow_c_stream__"):
        return _TABLE, open_frame, "label_column vectors keep", source
    if isinstance(source, np.ndarray) or (hasattr(source, "detach") and hasattr(source, "shape")):
        return "an array", open_array, "", source
    if not isinstance(source, str):
        return "a list of items", open_items, "", source
    scheme, colon, path = source.partition(":")
    plugin = find_plugin("data", scheme, _SOURCES)
    if plugin is not None:
        return scheme, partial(_of_plugin, plugin), "", path
    place, opener, takes = _SOURCES[scheme]
    if "\0" in path or (path and not place):
        raise UsageError(f"{source!r}: {scheme} takes no path" if not place else f"{source!r} is not a path")
    if not path and (colon or place.startswith(":")):
        raise UsageError(f"{source!r} lacks its path: the forms are {FORMS}")
    return scheme, opener, takes, path or None


def open_data(  # noqa: PLR0913
    source: object,
    *,
    labels: Any = None,
    ids: Any = None,
    names: str | Sequence[str] | None = None,
    vectors: str | Sequence[str] | None = None,
    keep: str | Sequence[str] = (),
    root: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    concepts: int | None = None,
    max_bad: float = 0.01,
    download: bool = True,
    memory: int | None = None,
) -> Dataset:
    """Open a source of images or features. Nothing is decoded yet, but listed files are checked to exist. What was understood is logged.

    Args:
        source: one of :data:`FORMS` or a plugin's form; a path (:func:`form_of`); a table of pandas, pyarrow and others in Arrow's form, a
            Hugging Face data set, an array or tensor (numbers [N, width] or images uint8 [N, H, W(, 3)]), a map-style data set of
            torch, or a :class:`.base.Dataset`.
        labels: file of labels, one per line in the order of the items, or a table that names items by id or name; a
            column of a table or a Hugging Face data set in memory; or the labels themselves (:func:`.labels.labels_of`).
        ids: file of ids, one per item (:func:`.arrays.read_ids`), a column of such a table, or the ids themselves.
        names: file of names, one per item, replacing those of the source, a column of such a table (default: ``name``, ``path``, ``key``
            ...), or the names themselves.
        vectors: column of vectors; of a table in memory also columns of numbers, one per dimension.
        keep: text columns of tables to show in results; a list, or separated by commas.
        root: base folder of the paths of ``list:``, ``csv:`` and ``parquet:`` (default: that of the file).
        image_column, label_column: for tables and Hugging Face data sets (default: ``image``, and the first of ``label``, ``class`` ...);
            for ``webdataset:`` extensions, or a field of ``.json``.
        concepts: for ``nuswide``: the number of most frequent ones (default: 21).
        max_bad: allowed fraction of missing and of broken images; 0: the first one is an error.
        download: allow download of ``cifar10`` and ``fashion-mnist``.
        memory: for ``features``: budget in bytes for the decompressed size of a compressed file (default: free memory).

    Raises:
        UsageError: an unknown form (the message lists them), or an option that does not apply to it.
        DataError: missing, damaged, or of another kind.

    Examples:
        >>> digits = open_data("digits")
        >>> len(digits), digits.require_labels().n_classes, digits.read(digits.ids[:1])[0].shape
        (1797, 10, (8, 8, 3))
    """
    scheme, opener, takes, opened = _found(source, image_column)
    if not 0 <= max_bad <= 1:
        raise UsageError(f"--read max_bad={max_bad}: give a fraction from 0 (none may be bad) to 1 (all may)")
    keep = [name.strip() for name in keep.split(",")] if isinstance(keep, str) else list(keep)
    if any(not name or "." in name or "/" in name for name in keep) or len(set(keep)) < len(keep):
        what = "names of columns are needed, each once, without . and /"
        raise UsageError(f"--read keep={','.join(keep)}: {what}")
    labels, ids = (os.fspath(x) if isinstance(x, os.PathLike) else x for x in (labels, ids))
    by_column, file = scheme in {_TABLE, _HUB}, isinstance(labels, str)
    if by_column and file and label_column is not None:
        raise UsageError(f"labels {labels} and label_column {label_column} both name a column: give one")
    table = _label_table(labels, label_column) if file and not by_column else None
    # Texts that the opener itself takes: columns of tables, and files in place of what files of features hold.
    columns = {"label_column": labels, "ids": ids, "names": names}
    files = {"label_file": labels if table is None else None, "id_file": ids}
    taken = columns if by_column else files if scheme == "features" else {}
    own = {option: value for option, value in taken.items() if isinstance(value, str)}
    given: dict[str, Any] = {"vectors": vectors, "keep": keep or None, "root": root, "concepts": concepts}
    given |= {"image_column": image_column, "label_column": label_column if table is None else None}
    options = {option: value for option, value in given.items() if value is not None}
    if wrong := options.keys() - set(takes.split()):
        option = min(wrong)
        others = ", ".join(name for name, (_, _, some) in _SOURCES.items() if option in some.split())
        raise UsageError(f"--read {option} does not apply to {scheme}: it is for {others}")
    if not isinstance(vectors, str | None) and scheme != _TABLE:
        raise UsageError(f"vectors={vectors}: only of a table in memory, several columns may be the vectors")
    inside = labels is None if opener is open_items else "label_file" not in own
    options |= own | {"max_bad": max_bad, "download": download, "memory": memory, "want_labels": inside}
    dataset = opener(opened, Options(**options))
    if keep:
        dataset = dataset.having("keep", *("\0".join([k, *dataset.texts[k].tolist()]) for k in keep))
    if names is not None and "names" not in own:
        dataset = _with_names(dataset, names)
    if ids is not None and not own.keys() & {"ids", "id_file"}:
        dataset = _with_ids(dataset, ids)
    if labels is not None and not own.keys() & {"label_file", "label_column"}:
        dataset = _with_labels(dataset, labels, table, label_column)
    repeated = len(dataset) - len(np.unique(dataset.ids))
    note = f"{repeated:,} of the {len(dataset):,} ids are repeated"
    if repeated and note not in dataset.notes:
        dataset = replace(dataset, notes=[*dataset.notes, note])
    if not isinstance(source, Dataset):
        for note in dataset.notes:
            log.info("%s: %s", dataset.name, note)
    return dataset


def _of_plugin(plugin: Plugin, path: str, o: Options) -> Dataset:
    """Open a plugin's source. Raises as :func:`open_data`; UsageError: the plugin fails."""
    opener = plugin.load()
    with plugin.running(f"open {shown(path)!r}"):
        found = opener(path)
    if found is None or isinstance(found, str):
        raise plugin.error(f"returns {type(found).__name__}: a data set, a table or an array is needed")
    dataset = open_data(found, max_bad=o.max_bad)
    dataset.name = f"{plugin.name}:{path}"
    return dataset


# Ids, names and labels beside the data ----------------------------------------------------------------------------------


def _with_ids(dataset: Dataset, ids: Any) -> Dataset:
    """``dataset`` with other ids: a file of them (:func:`.arrays.read_ids`) or the ids themselves, one per item."""
    numbers = None if isinstance(ids, str) else np.asarray(without_gradient(ids))
    new = read_ids(ids) if numbers is None else whole_numbers(numbers, "ids")
    return dataset.having("ids", new.tobytes(), ids=new)


def _with_names(dataset: Dataset, names: str | Sequence[str]) -> Dataset:
    """``dataset`` with names from a list or a text file, one per item."""
    path = local_path(names) if isinstance(names, str) else None
    lines = names if path is None else read_text(path, "text with a name per line").splitlines()
    column = as_texts(map(str, lines))
    return dataset.having("names", "\0".join(column.tolist()), texts=dataset.texts | {"name": column})


def _with_labels(dataset: Dataset, labels: Any, table: Table | None, label_column: str | None) -> Dataset:
    """``dataset`` with other labels: of a ``table`` that names items, of a file (:func:`.tables.read_labels`), or the labels themselves."""
    notes = [note for note in dataset.notes if note != "no labels"]
    if table is not None:
        found, note = _from_table(dataset, table, label_column)
        notes.append(note)
    elif isinstance(labels, str):
        found = read_labels(labels, len(dataset))
        notes.append(told(labels, found))
    else:
        found = labels_of(labels, "labels", len(dataset))
    return dataset.having("labels", found.fingerprint(), labels=found, notes=notes)


def _usual(names: Sequence[str], table: Table) -> str | None:
    lower = {name.lower(): name for name in reversed(table.names)}
    return next((lower[name] for name in names if name in lower), None)


def _label_table(path: str, label_column: str | None) -> Table | None:
    """A file of labels that names its items: Parquet, or CSV with a header that contains one of :data:`.tables.ITEMS`, and
    ``label_column`` or one of :data:`.tables.LABELS`. Other files have one label per line, in the order of the items: None."""
    file, what = local_path(path), "a table of labels"
    if file.suffix.lower() in (".parquet", ".pq", ".npy"):
        return None if file.suffix.lower() == ".npy" else open_table(file, what)
    with contextlib.suppress(DataError):  # the reader of plain lists reports it
        table = open_table(file, what, form="csv")
        if _usual(ITEMS, table) and (label_column in table.names or _usual(LABELS, table)):
            return table
    return None


def _from_table(dataset: Dataset, table: Table, label_column: str | None) -> tuple[Labels, str]:
    """Labels of a table, whose rows name items by id or by name as in the data set, and a note. Items that it lacks are unlabelled."""
    item_column = _usual(ITEMS, table) or " or ".join(ITEMS)
    label_column = label_column or _usual(LABELS, table) or " or ".join(LABELS)
    keys = ["" if item is None else composed(str(item).strip()) for item in table.cells(item_column)]
    cells = map(label_cell, table.cells(label_column, ": name it with --read label_column"))
    given = dict(zip(keys, cells, strict=True))
    if len(given) < len(keys):
        twice = Counter(keys).most_common(1)[0][0]
        raise DataError(
            f"{table.where}: {item_column} {twice!r} occurs more than once: give each item one line"
        )
    names = [composed(name) for name in dataset.texts["name"].tolist()] if "name" in dataset.texts else []
    by_name = not given.keys().isdisjoint(names)
    own = names if by_name else [str(i) for i in dataset.ids.tolist()]
    matched = [given.get(key, ()) for key in own]
    if not any(matched):
        what = f"no value of the column {item_column!r} with a label is an id or name of the data"
        raise DataError(f"{table.where}: {what} (the table has {keys[:1]}, the data {own[:1]})")
    labels, key = labels_of(matched, table.where), "name" if by_name else "id"
    how = f"matched by {key} in {item_column!r} ({len(given.keys() - set(own)):,} rows are of other items)"
    return labels, told(table.where, labels, how)
