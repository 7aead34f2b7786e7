"""Open any source of data: ``open_data("scheme:path")``, a path without prefix, or an object."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from ..errors import DataError, UsageError, unknown
from ..plugins import Plugin, find_plugin, plugin_names
from .arrays import is_hdf5
from .attach import with_ids, with_labels, with_names
from .base import Dataset
from .folder import has_samples, open_folder, open_webdataset
from .images import shown
from .labels import class_notes
from .paths import files_of, is_url, without_secrets
from .sources import open_array, open_features, open_frame, open_hf, open_items, open_listed
from .standard import open_digits, open_nuswide, open_published
from .tables import FORMS as ENDINGS
from .tables import Options, file_form, open_tables

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A form of a DATA argument: what follows its name, its opener, and the options that it takes
    besides those of all; ``columns``: whether labels, ids and names may be columns of it."""

    usage: str
    open: Callable[[Any, Options], Dataset]
    takes: str = ""

    @property
    def columns(self) -> bool:
        return "label_column" in self.takes


_COLUMNS = "label_column keep"
_SOURCES = {
    "digits": Source("", open_digits),
    "cifar10": Source("[:ROOT]", partial(open_published, name="cifar10"), "download"),
    "fashion-mnist": Source("[:ROOT]", partial(open_published, name="fashion-mnist"), "download"),
    "nuswide": Source(":ROOT", open_nuswide, "concepts"),
    "folder": Source(":PATH", open_folder),
    "list": Source(":FILE", partial(open_listed, form="list"), "root"),
    "csv": Source(":FILE", partial(open_listed, form="csv"), f"root image_column {_COLUMNS}"),
    "parquet": Source(
        ":FILE", partial(open_listed, form="parquet"), f"root image_column {_COLUMNS}"
    ),
    "webdataset": Source(":FILES", open_webdataset, f"image_column {_COLUMNS}"),
    "hf": Source(":FOLDER", open_hf, f"image_column vectors {_COLUMNS}"),
    "features": Source(":FILES", open_features, f"vectors image_column {_COLUMNS}"),
}
FORMS = " | ".join(name + source.usage for name, source in _SOURCES.items())
"""Every form of a DATA argument."""


def is_form(text: str) -> bool:
    """Return whether a text starts like a DATA argument."""
    scheme = text.partition(":")[0]
    return find_plugin("data", scheme, _SOURCES) is not None or scheme in _SOURCES


def form_of(path: str, image_column: str | None = None) -> str:
    """Return the scheme of a path without prefix, by what is in it.

    Raises UsageError: no such path, or a file that is neither a table, vectors, a list nor an
    archive.
    """
    bare = without_secrets(path)
    name = shown(bare)
    local = "" if is_url(path) else os.path.expanduser(path)
    if os.path.isdir(local):
        return _form_of_folder(local)
    ending = os.path.splitext(bare.lower().removesuffix(".gz"))[1]
    if ending in (".tar", ".tgz"):
        files = files_of(path)
        return "webdataset" if len(files) > 1 or has_samples(files[0]) else "folder"
    if ending in (*ENDINGS, ".txt", ".lst"):
        files = files_of(path)
        form = file_form(files[0])
        if form not in ("text", "csv", "jsonl", "json", "parquet", "arrow", "orc"):
            return "features"
        if form == "text":
            return "list"
        table = open_tables(files[:1])
        is_list = table.image_column(image_column) and "list" not in table.kinds.values()
        return ("csv" if form == "csv" else "parquet") if is_list else "features"
    if os.path.exists(local):
        file_form(files_of(local)[0])
        raise UsageError(
            f"{name}: "
            f"its ending tells no form ({', '.join([*ENDINGS, '.txt', '.tar'])} do)"
            f": rename it, or give list:{name}, or give their folder"
        )
    if local and "\0" not in local and (ending or "/" in bare):
        raise DataError(
            f"{name} not found: give a path that exists, or a form such as features:FILES"
        )
    plugins = [f"{plugin}:PATH" for plugin in plugin_names("data", _SOURCES)]
    forms = " | ".join([FORMS, *plugins])
    raise UsageError(f"unknown data {bare!r}: no such path, and the forms are {forms}")


def _form_of_folder(folder: str) -> str:
    names = set(os.listdir(folder))
    if names & {"dataset_info.json", "dataset_dict.json"}:
        return "hf"
    if "ImageList" in names:
        return "nuswide"
    folders = {
        name for name in names if name[0] != "." and os.path.isdir(os.path.join(folder, name))
    }
    data = os.listdir(os.path.join(folder, "data")) if folders == {"data"} else names - folders
    tables = any(os.path.splitext(name)[1].lower() in ENDINGS for name in data)
    return "features" if "img_emb" in names or (tables and folders <= {"data"}) else "folder"


def _find(source: object, image_column: str | None) -> tuple[str, Source, object]:
    """Return the form of a source, its opener, and what that opens.

    An object's library is not imported. Raises UsageError: a DATA argument lacks its path, or has
    one too many.
    """
    if isinstance(source, os.PathLike) or (isinstance(source, str) and not is_form(source)):
        path = os.fspath(source)
        source = f"{form_of(path, image_column)}:{path}"
    if isinstance(source, Dataset):
        return "a data set", Source("", lambda dataset, _: dataset), source
    if any(kind.__module__.partition(".")[0] == "datasets" for kind in type(source).__mro__):
        return "a Hugging Face data set", _SOURCES["hf"], source
    if hasattr(source, "__arrow_c_stream__"):
        return "a table", Source("", open_frame, f"vectors {_COLUMNS}"), source
    if isinstance(source, np.ndarray) or is_hdf5(source) or hasattr(source, "detach"):
        return "an array", Source("", open_array), source
    if isinstance(source, list) and source and np.ndim(_plain(source[0])) == 1:
        return "an array", Source("", open_array), source
    if not isinstance(source, str):
        return "a list of items", Source("", open_items), source
    scheme, colon, path = source.partition(":")
    plugin = find_plugin("data", scheme, _SOURCES)
    if plugin is not None:
        return scheme, Source(":PATH", partial(_of_plugin, plugin)), path
    usage = _SOURCES[scheme].usage
    if "\0" in path or (path and not usage):
        raise UsageError(
            f"{source!r}: {scheme} takes no path" if not usage else f"{source!r} is not a path"
        )
    if not path and (colon or usage.startswith(":")):
        raise UsageError(f"{source!r} lacks its path: the forms are {FORMS}")
    return scheme, _SOURCES[scheme], path or None


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
    option_names = [field.name for field in fields(Options)]
    for option in read:
        if option not in option_names or option in ("with_labels", "name_column"):
            raise UsageError(unknown(f"option {option!r}", option, option_names))
    max_bad, keep = read.get("max_bad", 0.01), read.get("keep") or ()
    if not 0 <= max_bad <= 1:
        raise UsageError(
            f"--read max_bad={max_bad}: give a fraction from 0 (none may be bad) to 1 (all may)"
        )
    keep = [name.strip() for name in keep.split(",")] if isinstance(keep, str) else list(keep)
    if any(not name or "." in name or "/" in name for name in keep) or len(set(keep)) < len(keep):
        raise UsageError(
            f"--read keep={','.join(keep)}: names of columns are needed, each once, without . and /"
        )
    form, opener, opened = _find(source, read.get("image_column"))
    values = {
        name: os.fspath(v) if isinstance(v, os.PathLike) else v
        for name, v in (("labels", labels), ("ids", ids), ("names", names))
    }
    in_memory = not isinstance(opened, str)
    column_options = {
        name for name, v in values.items() if opener.columns and _is_column(v, in_memory)
    }
    if "labels" in column_options and read.get("label_column"):
        raise UsageError(
            f"labels {labels} and label_column {read['label_column']} both name a column: give one"
        )
    separate = {
        name: v for name, v in values.items() if v is not None and name not in column_options
    }
    options = Options(**read | {"keep": keep, "with_labels": "labels" not in separate})
    of_table = {} if "labels" not in separate else {"label_column": None, "id_column": None}
    columns = {"label_column": "labels", "id_column": "ids", "name_column": "names"}
    chosen = {option: values[name] for option, name in columns.items() if name in column_options}
    source_options = replace(options, **of_table | chosen)
    _check_options(form, opener, source_options)
    dataset = opener.open(opened, source_options)
    if keep:
        dataset = dataset.having(
            "keep", *("\0".join([k, *dataset.texts[k].tolist()]) for k in keep)
        )
    if "names" in separate:
        dataset = with_names(dataset, separate["names"])
    if "ids" in separate:
        dataset = with_ids(dataset, separate["ids"])
    if "labels" in separate:
        dataset = with_labels(dataset, separate["labels"], options)
    return dataset if isinstance(source, Dataset) and not separate else _logged(dataset)


def _plain(item: Any) -> Any:
    """Return a list as an array of numbers, other objects unchanged."""
    return (
        np.asarray(item)
        if isinstance(item, list) and all(isinstance(x, int | float) for x in item)
        else item
    )


def _is_column(value: Any, in_memory: bool) -> bool:
    """Return whether a text names a column of the source and no file."""
    if not isinstance(value, str):
        return False
    file = is_url(value) or "/" in value or os.path.splitext(value)[1] or os.path.exists(value)
    return in_memory or not file


def _check_options(form: str, source: Source, options: Options) -> None:
    """Raise UsageError: an option that a source does not take."""
    for option in ["label_column", "vectors", "keep", "root", "image_column", "concepts"]:
        if getattr(options, option) not in (None, [], ()) and option not in source.takes.split():
            takers = ", ".join(
                name for name, taker in _SOURCES.items() if option in taker.takes.split()
            )
            raise UsageError(f"--read {option} does not apply to {form}: it is for {takers}")


def _logged(dataset: Dataset) -> Dataset:
    """Log what was understood of a data set, and return it."""
    repeated = len(dataset) - len(np.unique(dataset.ids))
    extra_notes = [f"{repeated:,} of the {len(dataset):,} ids are repeated"] if repeated else []
    extra_notes += class_notes(dataset.labels) if dataset.labels is not None else []
    dataset.notes[:] = dict.fromkeys([*dataset.notes, *extra_notes])
    for note in dataset.notes:
        log.info("%s: %s", dataset.name, note)
    return dataset


def _of_plugin(plugin: Plugin, path: str, o: Options) -> Dataset:
    """Open a plugin's source. Raises UsageError: the plugin fails."""
    opener = plugin.load()
    with plugin.running(f"open {shown(path)!r}"):
        opened = opener(path)
    if opened is None or isinstance(opened, str):
        kind = type(opened).__name__
        raise plugin.error(f"returns {kind}: a data set, a table or an array is needed")
    dataset = open_data(opened, max_bad=o.max_bad)
    dataset.name = f"{plugin.name}:{path}"
    return dataset
