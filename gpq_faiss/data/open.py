"""Open any data source: ``open_data("scheme:path")``, or an in-memory object."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, GpqError, UsageError
from ..files import fingerprint
from ..plugins import Plugin, find_plugin
from .base import DEFAULT_LABEL_COLUMN, Dataset, Options
from .digits import open_digits
from .embeddings import open_features
from .folder import open_folder
from .forms import SCHEMES, TABLES, form_of, is_form, parse_spec
from .frames import open_frame, open_hf
from .images import check_max_bad, shown
from .in_memory import open_array, open_items
from .item_ids import IdFrom, with_ids, with_names
from .label_files import is_label_table, labels_of, with_label_table, with_labels
from .nuswide import open_nuswide
from .paths import is_url, local_path, without_secrets
from .standard import open_cifar10, open_fashion_mnist
from .tables import open_list, open_table
from .webdataset import open_webdataset

log = logging.getLogger(__name__)

_FRAME, _HUB, _ARRAY, _ITEMS, _MADE = (
    "a table",
    "a Hugging Face data set",
    "an array",
    "a list of items",
    "a data set",
)
"""In-memory sources."""
_COLUMNS = TABLES | {"webdataset", "hf", _HUB}
_SPECIAL: dict[str, tuple[Any, set[str]]] = {
    "labels": (None, {"features", "list"}),
    "keep": ([], _COLUMNS | {"features", _FRAME}),
    "root": (None, TABLES | {"list", "cifar10", "fashion-mnist", "nuswide"}),
    "image_column": ("image", _COLUMNS),
    "label_column": (DEFAULT_LABEL_COLUMN, _COLUMNS | {_FRAME}),
    "vectors": (None, {"hf", _FRAME, _HUB}),
    "concepts": ("21", {"nuswide"}),
}
"""Options that only some sources have, with their defaults."""


def _kind_of(source: object) -> str:
    """The kind of an object, without importing its library."""
    if isinstance(source, Dataset):
        return _MADE
    if any(kind.__module__.partition(".")[0] == "datasets" for kind in type(source).__mro__):
        return _HUB
    if hasattr(source, "__arrow_c_stream__"):
        return _FRAME
    if isinstance(source, np.ndarray) or (hasattr(source, "detach") and hasattr(source, "shape")):
        return _ARRAY
    return _ITEMS


def open_data(  # noqa: PLR0912, PLR0913
    source: object,
    *,
    labels: Any = None,
    ids: Any = None,
    names: str | Sequence[str] | None = None,
    vectors: str | Sequence[str] | None = None,
    id_from: IdFrom = "position",
    keep: str | Sequence[str] = (),
    root: str | None = None,
    image_column: str = "image",
    label_column: str = DEFAULT_LABEL_COLUMN,
    concepts: str | Sequence[str] = "21",
    max_bad: float = 0.01,
    download: bool = True,
    memory: int | None = None,
) -> Dataset:
    """Open a source of images or features. Nothing is decoded yet, but listed files are checked to exist. What was understood is logged.

    Args:
        source: one of :data:`.forms.FORMS` or a plugin's form; a path (:func:`.forms.form_of`); a pandas, polars or pyarrow table, a
            Hugging Face data set, an array or tensor (numbers [N, width] or images uint8 [N, H, W(, 3)]), a map-style data set of
            torch, or a :class:`.base.Dataset`.
        labels: file of labels, one per line in the order of the items, for ``features:`` and for a ``list:`` of bare paths; or for any
            source a table that names items (:func:`.label_files.with_label_table`). For a table or a Hugging Face data set: a
            column name. Or the labels themselves (:func:`.label_files.labels_of`).
        ids: file of ids, one per item (:func:`.id_files.read_ids`); for a table or a Hugging Face data set: a column name. Or the
            ids themselves.
        names: file of names, one per item, replacing those of the source (:func:`.item_ids.with_names`); for a table or a Hugging Face
            data set: a column name (default: ``name``, ``path``, ``key`` ...). Or the names themselves.
        vectors: for these: column of vectors, or of a table columns of numbers, one per dimension.
        id_from: source of ids if none are given: ``position``, ``path`` or ``content`` (:func:`.item_ids.with_ids`).
        keep: text columns of tables to show in results; a list, or separated by commas.
        root: base folder of the paths of ``list:``, ``csv:`` and ``parquet:`` (default: that of the file); folder of
            ``cifar10``, ``fashion-mnist`` and ``nuswide``, as an alternative to ``:ROOT``.
        image_column, label_column: for tables and Hugging Face data sets; for ``webdataset:`` extensions, or a field of ``.json``.
        concepts: for ``nuswide``: the number of most frequent ones, ``all``, or names.
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
    if isinstance(source, os.PathLike) or (isinstance(source, str) and not is_form(source)):
        path = os.fspath(source)
        source = f"{form_of(path, image_column)}:{path}"
    if isinstance(source, str) and source == "nuswide" and root is not None:
        source, root = f"nuswide:{root}", None
    scheme, where = parse_spec(source) if isinstance(source, str) else (_kind_of(source), None)
    check_max_bad(max_bad)
    keep = [name.strip() for name in keep.split(",")] if isinstance(keep, str) else list(keep)
    if any(not name or "." in name or "/" in name for name in keep) or len(set(keep)) < len(keep):
        raise UsageError(
            f"--read keep={','.join(keep)}: names of columns are needed, each once, without . and /"
        )
    if ids is not None and id_from != "position":
        raise UsageError(f"--ids {ids} and --read id_from={id_from} both say which ids: give one of them")
    labels, ids = (os.fspath(x) if isinstance(x, os.PathLike) else x for x in (labels, ids))
    by_column = scheme in {_FRAME, _HUB}
    file = table = None
    column = label_column
    if isinstance(labels, str) and by_column:
        if label_column != DEFAULT_LABEL_COLUMN:
            both = f"labels {labels} and label_column {label_column}"
            raise UsageError(f"{both} both name the column of labels: give one")
        column = labels
    elif isinstance(labels, str) and is_label_table(labels, label_column):
        table, column = labels, DEFAULT_LABEL_COLUMN
    elif isinstance(labels, str):
        file = labels
    chosen = Options(
        labels=file,
        ids=ids if isinstance(ids, str) else None,
        names=names if isinstance(names, str) and by_column else None,
        vectors=vectors,
        keep=keep,
        root=root,
        image_column=image_column,
        label_column=column,
        concepts=concepts,
        max_bad=max_bad,
        memory=memory,
    )
    for option, (default, sources) in _SPECIAL.items():
        if getattr(chosen, option) != default and scheme not in sources:
            name = f"--{option}" if option == "labels" else f"--read {option}"
            raise UsageError(f"{name} does not apply to {scheme}: it is for {', '.join(sorted(sources))}")
    opened = where if isinstance(source, str) else source
    dataset = _open(scheme, opened, chosen, download=download, look=labels is None)
    if file is not None and dataset.labels is not None:
        share = f"{int(dataset.labels.has().sum()):,} of {len(dataset):,} items are labelled"
        classes = f"{dataset.labels.n_classes:,} classes"
        dataset.notes.append(f"{Path(file).name}: {share}, in their order; {classes}")
    if keep:
        texts = (name + "\0" + "\0".join(dataset.texts[name].tolist()) for name in keep)
        dataset = replace(dataset, fingerprint=fingerprint(dataset.fingerprint, "keep", *texts))
    if names is not None and chosen.names is None:
        dataset = with_names(dataset, names)
    dataset = with_ids(dataset, None if chosen.ids and (by_column or scheme == "features") else ids, id_from)
    if table is not None:
        given = None if label_column == DEFAULT_LABEL_COLUMN else label_column
        dataset = with_label_table(dataset, table, given)
    elif labels is not None and not isinstance(labels, str):
        dataset = with_labels(dataset, labels_of(labels, len(dataset)))
    if not isinstance(source, Dataset):
        for note in dataset.notes:
            log.info("%s: %s", dataset.name, note)
    return dataset


def _open(scheme: str, source: Any, o: Options, *, download: bool, look: bool) -> Dataset:  # noqa: PLR0911, PLR0912 - one per source
    """Open an object, or the path of a scheme. Raises as :func:`open_data`."""
    if scheme == _MADE:
        assert isinstance(source, Dataset)
        return source
    if scheme == _FRAME:
        return open_frame(source, o)
    if scheme == _ARRAY:
        return open_array(source)
    if scheme == _ITEMS:
        return open_items(source, with_labels=look, max_bad=o.max_bad)
    plugin = find_plugin("data", scheme, SCHEMES)
    if plugin is not None:
        return _of_plugin(plugin, source or "", o.max_bad)
    if scheme == "digits":
        return open_digits()
    if scheme in {"cifar10", "fashion-mnist", "nuswide"} and source and o.root is not None:
        raise UsageError(f"{scheme}:{source} names its folder already: leave out --read root={o.root}")
    if scheme in {"cifar10", "fashion-mnist"}:
        opener = open_cifar10 if scheme == "cifar10" else open_fashion_mnist
        return opener(source or o.root, download=download)
    one_path = isinstance(source, str) and scheme not in {"features", "webdataset"} and not is_url(source)
    if one_path and not os.path.exists(Path(source).expanduser()):
        raise DataError(f"{shown(source)} not found: give the path of the data after {scheme}:")
    if scheme in {"hf", _HUB}:
        return open_hf(source, o)
    if scheme == "features":
        return open_features(source, o)
    if scheme == "webdataset":
        return open_webdataset(source, o)
    if scheme == "folder":
        return open_folder(source, max_bad=o.max_bad)
    if scheme == "nuswide":
        return open_nuswide(source, concepts=o.concepts, max_bad=o.max_bad)
    if is_url(source):
        if o.root is None:
            bare = without_secrets(source)
            raise UsageError(f"{bare}: where are its images? Give their folder with --read root=DIR")
        source = str(local_path(source))
    if scheme == "list":
        return open_list(source, o)
    return open_table(source, scheme, o)


def _of_plugin(plugin: Plugin, path: str, max_bad: float) -> Dataset:
    """Open a plugin's source. Raises as :func:`open_data`; UsageError: the plugin fails."""
    opener = plugin.load()
    try:
        found = opener(path)
    except GpqError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:160]
        raise plugin.error(f"cannot open {shown(path)!r} ({type(error).__name__}: {why})") from error
    if found is None or isinstance(found, str):
        raise plugin.error(f"returns {type(found).__name__}: a data set, a table or an array is needed")
    dataset = open_data(found, max_bad=max_bad)
    dataset.name = f"{plugin.name}:{path}"
    return dataset
