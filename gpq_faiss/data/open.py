"""Open any data source: ``open_data("scheme:path")``, or an in-memory object."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, GpqError, UsageError
from ..files import fingerprint
from ..plugins import Plugin, find_plugin
from .base import Dataset
from .cifar10 import open_cifar10
from .digits import open_digits
from .embeddings import open_features
from .fashion_mnist import open_fashion_mnist
from .folder import open_folder
from .forms import SCHEMES, TABLES, form_of, is_form, parse_spec
from .frames import labels_of, open_frame
from .hf import open_hf
from .images import check_max_bad, shown
from .item_ids import IdFrom, with_ids, with_names
from .items import open_array, open_items
from .label_tables import is_label_table, with_label_table, with_labels
from .lists import open_list
from .nuswide import open_nuswide
from .paths import is_url, local_path, without_secrets
from .tables import DEFAULT_LABEL_COLUMN, open_table
from .webdataset import open_webdataset

log = logging.getLogger(__name__)

_FRAME, _HUB, _ARRAY, _ITEMS, _MADE = (
    "a table",
    "a Hugging Face data set",
    "an array",
    "a list of items",
    "a data set",
)
_HELD = {_FRAME, _HUB, _ARRAY, _ITEMS, _MADE}
"""In-memory sources."""


def _refuse(scheme: str, given: dict[str, tuple[bool, set[str]]]) -> None:
    """Raises UsageError: options that the source would ignore."""
    for option, (is_given, schemes) in given.items():
        if is_given and scheme not in schemes:
            raise UsageError(f"{option} does not apply to {scheme}: it is for {', '.join(sorted(schemes))}")


def _kind_of(source: object) -> str:
    """The kind of :data:`_HELD` of an object, without importing its library."""
    if isinstance(source, Dataset):
        return _MADE
    families = {kind.__module__.partition(".")[0] for kind in type(source).__mro__}
    if "datasets" in families:
        return _HUB
    if hasattr(source, "__arrow_c_stream__"):
        return _FRAME
    if isinstance(source, np.ndarray) or (hasattr(source, "detach") and hasattr(source, "shape")):
        return _ARRAY
    return _ITEMS


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options of certain sources; see :func:`open_data`."""

    labels: str | None
    ids: str | None
    names: str | None
    vectors: str | Sequence[str] | None
    keep: Sequence[str]
    root: str | None
    image_column: str
    label_column: str
    concepts: str | Sequence[str]
    max_bad: float
    download: bool
    memory: int | None
    look: bool


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
            source a table that names items (:func:`.label_tables.with_label_table`). For a table or a Hugging Face data set: a
            column name. Or the labels themselves (:func:`.frames.labels_of`).
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
        source = f"nuswide:{root}"
        root = None
    scheme, path = parse_spec(source) if isinstance(source, str) else (_kind_of(source), None)
    check_max_bad(max_bad)
    keep = [name.strip() for name in keep.split(",")] if isinstance(keep, str) else list(keep)
    if any(not name or "." in name or "/" in name for name in keep) or len(set(keep)) < len(keep):
        raise UsageError(f"--keep {','.join(keep)}: names of columns are needed, each once, without . and /")
    in_memory, by_column = scheme in _HELD, scheme in {_FRAME, _HUB}
    labels, ids = (os.fspath(x) if isinstance(x, os.PathLike) else x for x in (labels, ids))
    given = None if isinstance(labels, str) else labels
    table = file = None
    if isinstance(labels, str) and by_column:
        if label_column != DEFAULT_LABEL_COLUMN:
            raise UsageError(
                f"labels {labels} and label_column {label_column} both name the column of labels: give one"
            )
        label_column = labels
    elif labels is not None and given is None:
        table = labels if is_label_table(labels, label_column) else None
        file = labels if table is None else None
    _refuse(
        scheme,
        {
            "--labels": (file is not None, {"features", "list"}),
            "--keep": (bool(keep), TABLES | {"webdataset", "hf", "features", _FRAME, _HUB}),
            "--root": (root is not None, TABLES | {"list", "cifar10", "fashion-mnist", "nuswide"}),
            "--image-column": (image_column != "image", TABLES | {"webdataset", "hf", _HUB}),
            "--label-column": (
                label_column != DEFAULT_LABEL_COLUMN and table is None,
                TABLES | {"webdataset", "hf", _FRAME, _HUB},
            ),
            "--vector-column": (vectors is not None, {"hf", _FRAME, _HUB}),
            "--concepts": (concepts != "21", {"nuswide"}),
        },
    )
    options = _Options(
        labels=file,
        ids=ids if isinstance(ids, str) else None,
        names=names if isinstance(names, str) else None,
        vectors=vectors,
        keep=keep,
        root=root,
        image_column=image_column,
        label_column=label_column if table is None else DEFAULT_LABEL_COLUMN,
        concepts=concepts,
        max_bad=max_bad,
        download=download,
        memory=memory,
        look=labels is None,
    )
    dataset = _open_held(scheme, source, options) if in_memory else _open(scheme, path, str(source), options)
    if file is not None and dataset.labels is not None:
        labelled = int(dataset.labels.has().sum())
        dataset.notes.append(
            f"{Path(file).name}: {labelled:,} of {len(dataset):,} items are labelled, in their order; "
            f"{dataset.labels.n_classes:,} classes"
        )
    if keep:
        texts = (name + "\0" + "\0".join(dataset.texts[name].tolist()) for name in keep)
        dataset = replace(dataset, fingerprint=fingerprint(dataset.fingerprint, "keep", *texts))
    if names is not None and not (by_column and isinstance(names, str)):
        dataset = with_names(dataset, names)
    if ids is not None and id_from != "position":
        raise UsageError(f"--ids {ids} and --id-from {id_from} both say which ids: give one of them")
    read_already = isinstance(ids, str) and (scheme == "features" or by_column)
    dataset = with_ids(dataset, None if read_already else ids, id_from)
    if given is not None:
        dataset = with_labels(dataset, labels_of(given, len(dataset)))
    elif table is not None:
        dataset = with_label_table(
            dataset, table, None if label_column == DEFAULT_LABEL_COLUMN else label_column
        )
    if not isinstance(source, Dataset):
        for note in dataset.notes:
            log.info("%s: %s", dataset.name, note)
    return dataset


def _open_held(kind: str, source: Any, options: _Options) -> Dataset:
    """Open an in-memory object. Raises as :func:`open_data`."""
    vectors, label = options.vectors, options.label_column
    if isinstance(source, Dataset):
        return source
    if kind == _FRAME:
        return open_frame(
            source,
            labels=None if label == DEFAULT_LABEL_COLUMN else label,
            ids=options.ids,
            names=options.names,
            vectors=vectors,
            keep=options.keep,
        )
    if kind == _HUB:
        return _open_hf(source, options)
    return (
        open_array(source)
        if kind == _ARRAY
        else open_items(source, with_labels=options.look, max_bad=options.max_bad)
    )


def _open_hf(source: Any, options: _Options) -> Dataset:
    if options.vectors is not None and not isinstance(options.vectors, str):
        raise UsageError(f"vectors {options.vectors}: one column of vectors is needed")
    return open_hf(
        source,
        image_column=options.image_column,
        label_column=options.label_column,
        vectors=options.vectors,
        # For a folder, --ids and --names are files.
        ids=None if isinstance(source, str) else options.ids,
        names=None if isinstance(source, str) else options.names,
        keep=options.keep,
        max_bad=options.max_bad,
    )


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


def _open(scheme: str, path: str | None, spec: str, options: _Options) -> Dataset:  # noqa: PLR0911 - one per scheme
    """Open the source. Raises as :func:`open_data`."""
    root, max_bad = options.root, options.max_bad
    plugin = find_plugin("data", scheme, SCHEMES)
    if plugin is not None:
        return _of_plugin(plugin, path or "", max_bad)
    if scheme == "digits":
        return open_digits()
    if scheme in {"cifar10", "fashion-mnist", "nuswide"} and root is not None and path is not None:
        raise UsageError(f"{spec} names its folder already: leave out --root {root}")
    if scheme == "cifar10":
        return open_cifar10(path or root, download=options.download)
    if scheme == "fashion-mnist":
        return open_fashion_mnist(path or root, download=options.download)
    assert path is not None
    if scheme in TABLES | {"list"} and is_url(path):
        if root is None:
            raise UsageError(
                f"{without_secrets(path)}: where are its images? Give their folder with --root DIR"
            )
        path = str(local_path(path))
    if (
        scheme not in {"features", "webdataset"}
        and not is_url(path)
        and not os.path.exists(Path(path).expanduser())
    ):
        raise DataError(f"{shown(path)} not found: give the path of the data after {scheme}:")
    if scheme == "nuswide":
        return open_nuswide(path, concepts=options.concepts, max_bad=max_bad)
    if scheme == "folder":
        return open_folder(path, max_bad=max_bad)
    if scheme == "list":
        return open_list(path, root=root, labels=options.labels, max_bad=max_bad)
    if scheme == "features":
        return open_features(
            path, labels=options.labels, ids=options.ids, keep=options.keep, memory=options.memory
        )
    if scheme == "hf":
        return _open_hf(path, options)
    columns: dict[str, Any] = {
        "image_column": options.image_column,
        "label_column": options.label_column,
        "keep": options.keep,
        "max_bad": max_bad,
    }
    if scheme == "webdataset":
        return open_webdataset(path, **columns)
    return open_table(path, form=scheme, root=root, **columns)
