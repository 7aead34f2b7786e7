"""Open any source of data: ``open_data("scheme:path")``, a path without prefix, or an object."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import UsageError, unknown
from ..files import fingerprint
from ..plugins import Plugin, find_plugin, plugin_names
from .attach import with_ids, with_labels, with_names
from .base import Dataset, image_files
from .images import IMAGE_SUFFIXES, shown
from .labels import class_notes
from .paths import is_url, local_path, without_secrets
from .sources import (
    open_array,
    open_files,
    open_frame,
    open_hf,
    open_items,
    open_list,
    open_webdataset,
)
from .standard import open_digits, open_folder, open_nuswide, open_published
from .tables import FORMS as ENDINGS
from .tables import Options

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
        problem = f"unknown data {without_secrets(path)!r}"
        raise UsageError(f"{problem}: no such path, and the forms are {forms}")
    return form or "features"


def _opener(source: object) -> tuple[str, Source, object]:
    """Return the form of a source, its opener, and what that opens.

    An object's library is not imported. Raises UsageError: a DATA argument lacks its path, or has
    one too many.
    """
    libraries = {kind.__module__.partition(".")[0] for kind in type(source).__mro__}
    is_path = isinstance(source, os.PathLike) or (isinstance(source, str) and not is_form(source))
    if is_path and (form := form_of(os.fspath(source))) == "image":  # type: ignore[call-overload]
        return "an image", Source("", _open_image), os.fspath(source)  # type: ignore[call-overload]
    if is_path:
        source = f"{form}:{os.fspath(source)}"  # type: ignore[call-overload]
    if isinstance(source, str):
        scheme, _, path = source.partition(":")
        if plugin := find_plugin("data", scheme, _SOURCES):
            return scheme, Source(":PATH", partial(_of_plugin, plugin)), path
        usage = _SOURCES[scheme].usage
        if (path and not usage) or (not path and (":" in source or usage.startswith(":"))):
            problem = "takes no path" if path else "lacks its path"
            raise UsageError(f"{source!r}: {scheme} {problem}: the forms are {FORMS}")
        return scheme, _SOURCES[scheme], path or None
    if isinstance(source, Dataset):
        return "a data set", Source("", lambda dataset, _: dataset), source
    if "datasets" in libraries:
        return "a Hugging Face data set", _SOURCES["hf"], source
    if hasattr(source, "__arrow_c_stream__"):
        return "a table", Source("", open_frame, _TABLE), source
    first = source[0] if isinstance(source, list) and source else None
    is_vector = isinstance(first, list) and not {*map(type, first)} - {int, float}
    if (
        is_vector
        or np.ndim(0 if isinstance(first, list) else first) == 1
        or hasattr(source, "ndim")
    ):
        return "an array", Source("", open_array), source
    return "a list of items", Source("", open_items), source


def _open_image(path: str, o: Options) -> Dataset:
    """Open an image file as a data set of one item."""
    return image_files(without_secrets(path), [str(local_path(path))], [path], max_bad=0.0)


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
            by id or name in a dict, a Series or a table (:func:`.attach.with_labels`).
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
    keep = read.get("keep") or ()
    options = Options(**read | {"keep": keep.split(",") if isinstance(keep, str) else keep})
    form, opener, opened = _opener(source)
    beside, columns = {"names": names, "ids": ids, "labels": labels}, {}
    for name, column in (("names", "name"), ("ids", "id"), ("labels", "label")):
        if isinstance(beside[name], os.PathLike):
            beside[name] = os.fspath(beside[name])
        text = beside[name] if isinstance(beside[name], str) and opener.takes == _TABLE else "."
        if not os.path.splitext(text)[1] and not os.path.exists(text) and text != ".":
            columns[f"{column}_column"] = beside.pop(name)
    if beside.get("labels") is not None:
        columns = {"label_column": None, "id_column": None, "with_labels": False} | columns
    source_options = replace(options, **columns)
    for option in ("label_column", "vectors", "keep", "root", "image_column", "concepts"):
        if getattr(source_options, option) and option not in opener.takes.split():
            raise UsageError(f"--read {option} does not apply to {form}")
    dataset = opener.open(opened, source_options)
    if beside.get("names") is not None:
        dataset = with_names(dataset, beside["names"])
    if beside.get("ids") is not None:
        dataset = with_ids(dataset, beside["ids"])
    if beside.get("labels") is not None:
        dataset = with_labels(dataset, beside["labels"], options)
    is_complete = isinstance(source, Dataset) and (names, ids, labels) == (None, None, None)
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
    if opened is None or isinstance(opened, str):
        kind = type(opened).__name__
        raise plugin.error(f"returns {kind}: a data set, a table or an array is needed")
    return replace(open_data(opened, max_bad=o.max_bad), name=f"{plugin.name}:{path}")
