"""Open any data source: ``open_data("scheme:path")``, a path without prefix, or an in-memory object."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..errors import DataError, GpqError, UsageError, one_line
from ..files import fingerprint
from ..plugins import Plugin, find_plugin, plugin_names
from .base import Dataset
from .features import SUFFIXES, open_features
from .folder import has_samples, open_folder, open_webdataset
from .frames import open_frame, open_hf
from .ids import IdFrom, with_ids, with_names
from .images import shown
from .in_memory import open_array, open_items
from .label_files import is_label_table, read_labels, told, with_label_table, with_labels
from .labels import labels_of
from .lists import open_list, open_table
from .nuswide import open_nuswide
from .parquet import is_text
from .paths import files_of, is_url, without_secrets
from .standard import open_cifar10, open_digits, open_fashion_mnist
from .tables import parquet_table

log = logging.getLogger(__name__)

FORMS = (
    "digits | cifar10[:ROOT] | fashion-mnist[:ROOT] | nuswide:ROOT | folder:PATH | list:FILE | csv:FILE | "
    "parquet:FILE | webdataset:FILES | hf:FOLDER | features:FILES"
)
"""Every form of a DATA argument."""
Opener = Callable[..., Dataset]
_SOURCES: dict[str, Opener] = {
    "digits": open_digits,
    "cifar10": open_cifar10,
    "fashion-mnist": open_fashion_mnist,
    "nuswide": open_nuswide,
    "folder": open_folder,
    "list": open_list,
    "csv": partial(open_table, form="csv"),
    "parquet": partial(open_table, form="parquet"),
    "webdataset": open_webdataset,
    "hf": open_hf,
    "features": open_features,
}
"""Prefix of a DATA argument -> its opener, whose keywords are the options that it takes."""
_WITHOUT_PATH = {"digits", "cifar10", "fashion-mnist"}
_TABLE, _HUB = "a table", "a Hugging Face data set"


def is_form(text: str) -> bool:
    """Whether a text starts like a DATA argument. Raises UsageError: see :func:`.plugins.find_plugin`."""
    scheme = text.partition(":")[0]
    return find_plugin("data", scheme, _SOURCES) is not None or scheme in _SOURCES


def _unknown(spec: str) -> UsageError:
    forms = " | ".join([FORMS, *(f"{name}:PATH" for name in plugin_names("data", _SOURCES))])
    return UsageError(f"unknown data {without_secrets(spec)!r}: no such path, and the forms are {forms}")


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
        return _form_of_parquet(path, image_column or "image")
    if ending in (".tar", ".tgz"):
        files = files_of(path)
        return "webdataset" if len(files) > 1 or has_samples(files[0]) else "folder"
    of_ending = dict.fromkeys(SUFFIXES, "features") | {".csv": "csv", ".tsv": "csv", ".txt": "list"}
    if ending in of_ending:
        return of_ending[ending]
    if os.path.exists(local):
        what = f"its ending tells no form ({', '.join([*of_ending, '.tar'])} do)"
        raise UsageError(
            f"{name}: {what}: rename it, write list:{name} if it lists images, or give their folder"
        )
    if local and "\0" not in local and (ending or "/" in bare):
        raise DataError(f"{name} not found: give a path that exists, or a form such as features:FILES")
    raise _unknown(path)


def _form_of_parquet(path: str, image_column: str) -> str:
    table = parquet_table(files_of(path)[0], "a Parquet file of vectors, or of paths of images,")
    # Several lists: one of them is the vectors, the others may be labels.
    vectors = any(table.holds_lists(name) for name in table.names if name != image_column)
    images = image_column in table.names and is_text(table.types[image_column])
    if vectors == images:
        what = f"a column of vectors (lists of numbers){' and' if vectors else ', nor'} a column {image_column!r} of image paths"
        has = f"has {'' if vectors else 'neither '}{what} (it has {', '.join(table.names[:20])})"
        name = shown(without_secrets(path))
        raise UsageError(f"{name} {has}: write features:{path} or parquet:{path}, or --read image_column=")
    return "features" if vectors else "parquet"


def _of_object(source: object) -> tuple[str, Opener]:
    """What an object is, without importing its library, and its opener."""
    if isinstance(source, Dataset):
        return "a data set", lambda dataset: dataset
    if any(kind.__module__.partition(".")[0] == "datasets" for kind in type(source).__mro__):
        return _HUB, open_hf
    if hasattr(source, "__arrow_c_stream__"):
        return _TABLE, open_frame
    if isinstance(source, np.ndarray) or (hasattr(source, "detach") and hasattr(source, "shape")):
        return "an array", open_array
    return "a list of items", open_items


def _of_spec(spec: str) -> tuple[str, Opener, object]:
    """Scheme, opener and path of a DATA argument with its prefix. Raises UsageError: it lacks its path, or has one too many."""
    scheme, colon, path = spec.partition(":")
    plugin = find_plugin("data", scheme, _SOURCES)
    if plugin is not None:
        return scheme, partial(_of_plugin, plugin), path
    if scheme == "digits" and path:
        raise UsageError(f"digits takes no path ({path!r}): it is inside scikit-learn")
    if not path and (colon or scheme not in _WITHOUT_PATH):
        raise UsageError(f"{spec!r} lacks its path: the forms are {FORMS}")
    if "\0" in path:
        raise UsageError(f"{spec!r} is not a path")
    one = scheme not in {*_WITHOUT_PATH, "features", "webdataset"} and not is_url(path)
    if one and not os.path.exists(os.path.expanduser(path)):
        raise DataError(f"{shown(path)} not found: give the path of the data after {scheme}:")
    return scheme, _SOURCES[scheme], path or None


def open_data(  # noqa: PLR0913
    source: object,
    *,
    labels: Any = None,
    ids: Any = None,
    names: str | Sequence[str] | None = None,
    vectors: str | Sequence[str] | None = None,
    id_from: IdFrom = "position",
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
        labels: file of labels, one per line in the order of the items, or a table that names items
            (:func:`.label_files.with_label_table`). For a table or a Hugging Face data set: a column name. Or the labels themselves
            (:func:`.labels.labels_of`).
        ids: file of ids, one per item (:func:`.ids.read_ids`); for a table or a Hugging Face data set: a column name. Or the
            ids themselves.
        names: file of names, one per item, replacing those of the source (:func:`.ids.with_names`); for a table or a Hugging Face
            data set: a column name (default: ``name``, ``path``, ``key`` ...). Or the names themselves.
        vectors: for these: column of vectors, or of a table columns of numbers, one per dimension.
        id_from: source of ids if none are given: ``position`` or ``path`` (:func:`.ids.with_ids`).
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
    scheme, opener, opened = _found(source, image_column)
    if not 0 <= max_bad <= 1:
        raise UsageError(f"--read max_bad={max_bad}: give a fraction from 0 (none may be bad) to 1 (all may)")
    keep = [name.strip() for name in keep.split(",")] if isinstance(keep, str) else list(keep)
    if any(not name or "." in name or "/" in name for name in keep) or len(set(keep)) < len(keep):
        what = "names of columns are needed, each once, without . and /"
        raise UsageError(f"--read keep={','.join(keep)}: {what}")
    if ids is not None and id_from != "position":
        raise UsageError(f"--ids {ids} and --read id_from={id_from} both say which ids: give one of them")
    labels, ids = (os.fspath(x) if isinstance(x, os.PathLike) else x for x in (labels, ids))
    by_column, file = scheme in {_TABLE, _HUB}, isinstance(labels, str)
    if by_column and file and label_column is not None:
        both = f"labels {labels} and label_column {label_column}"
        raise UsageError(f"{both} both name the column of labels: give one")
    from_table = file and not by_column and is_label_table(labels, label_column)
    # Texts that the opener itself takes: columns of tables, and files in place of what files of features hold.
    own: dict[str, Any] = {}
    if by_column:
        own = {"label_column": labels, "ids": ids, "names": names}
    elif scheme == "features":
        own = {"labels": None if from_table else labels, "ids": ids}
    own = {option: value for option, value in own.items() if isinstance(value, str)}
    options = {
        "vectors": vectors,
        "keep": keep or None,
        "root": root,
        "image_column": image_column,
        "label_column": None if from_table else label_column,
        "concepts": concepts,
    } | own
    common = {"max_bad": max_bad, "download": download, "memory": memory, "with_labels": labels is None}
    dataset = _opened(scheme, opener, opened, options, common)
    if keep:
        texts = (name + "\0" + "\0".join(dataset.texts[name].tolist()) for name in keep)
        dataset = replace(dataset, fingerprint=fingerprint(dataset.fingerprint, "keep", *texts))
    if names is not None and "names" not in own:
        dataset = with_names(dataset, names)
    dataset = with_ids(dataset, None if "ids" in own else ids, id_from)
    if from_table:
        dataset = with_label_table(dataset, labels, label_column)
    elif labels is not None and not own.keys() & {"labels", "label_column"}:
        found = read_labels(labels, len(dataset)) if file else labels_of(labels, len(dataset))
        dataset = with_labels(dataset, found)
    if file and not by_column and not from_table:
        dataset.notes.append(told(labels, dataset.require_labels()))
    if not isinstance(source, Dataset):
        for note in dataset.notes:
            log.info("%s: %s", dataset.name, note)
    return dataset


def _found(source: object, image_column: str | None) -> tuple[str, Opener, object]:
    """The form of a source, its opener, and what that opens."""
    if isinstance(source, os.PathLike) or (isinstance(source, str) and not is_form(source)):
        path = os.fspath(source)
        source = f"{form_of(path, image_column)}:{path}"
    return _of_spec(source) if isinstance(source, str) else (*_of_object(source), source)


def _opened(
    scheme: str, opener: Opener, source: object, options: dict[str, Any], common: dict[str, Any]
) -> Dataset:
    """Call the opener with its options. Raises UsageError: it does not take one of ``options``; of ``common`` it takes what it needs."""
    given = {option: value for option, value in options.items() if value is not None}
    takes = _takes(opener)
    if wrong := given.keys() - takes:
        option = min(wrong)
        others = ", ".join(name for name, one in _SOURCES.items() if option in _takes(one)) or "tables"
        raise UsageError(f"--read {option} does not apply to {scheme}: it is for {others}")
    given |= {option: value for option, value in common.items() if option in takes and value is not None}
    return opener(*([] if source is None else [source]), **given)


def _takes(opener: Opener) -> set[str]:
    """The options of an opener."""
    kinds = inspect.signature(opener).parameters.items()
    return {name for name, one in kinds if one.kind is one.KEYWORD_ONLY} - {"form"}


def _of_plugin(plugin: Plugin, path: str, *, max_bad: float = 0.01) -> Dataset:
    """Open a plugin's source. Raises as :func:`open_data`; UsageError: the plugin fails."""
    opener = plugin.load()
    try:
        found = opener(path)
    except GpqError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        raise plugin.error(f"cannot open {shown(path)!r} ({why})") from error
    if found is None or isinstance(found, str):
        raise plugin.error(f"returns {type(found).__name__}: a data set, a table or an array is needed")
    dataset = open_data(found, max_bad=max_bad)
    dataset.name = f"{plugin.name}:{path}"
    return dataset
