"""The one door to every source: ``open_data("scheme:path")``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import DataError, UsageError
from ..files import fingerprint
from .base import Dataset
from .cifar10 import open_cifar10
from .digits import open_digits
from .embeddings import open_features
from .fashion_mnist import open_fashion_mnist
from .folder import open_folder
from .images import check_max_bad, shown
from .item_ids import IdFrom, with_ids
from .label_tables import is_label_table, with_label_table
from .lists import open_list
from .nuswide import open_nuswide
from .tables import DEFAULT_LABEL_COLUMN, open_table

FORMS = (
    "digits | cifar10[:ROOT] | fashion-mnist[:ROOT] | nuswide:ROOT | folder:PATH | list:FILE | csv:FILE | "
    "parquet:FILE | features:FILE"
)
"""Every form of a DATA argument."""

_PATH_NEEDED = {"nuswide", "folder", "list", "csv", "parquet", "features"}
_PATH_ALLOWED = _PATH_NEEDED | {"cifar10", "fashion-mnist"}
SCHEMES = _PATH_ALLOWED | {"digits"}
"""What a DATA argument begins with."""

_HINTS = {
    ".npy": "features",
    ".npz": "features",
    ".h5": "features",
    ".hdf5": "features",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "list",
    ".tar": "folder",
    ".gz": "folder",
    ".tgz": "folder",
}


def _unknown(spec: str) -> UsageError:
    path = Path(spec).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):
        is_folder = is_file = False
    if spec and (is_folder or is_file):
        scheme = "folder" if is_folder else _HINTS.get(path.suffix.lower())
        hint = f"did you mean {scheme}:{shown(spec)}?" if scheme else "put one of the forms before it."
        return UsageError(f"{shown(spec)} is a path without its form: {hint} The forms: {FORMS}")
    return UsageError(f"unknown data {spec!r}: the forms are {FORMS}")


def parse_spec(spec: str) -> tuple[str, str | None]:
    """``"list:a.txt"`` -> ``("list", "a.txt")``; ``"digits"`` -> ``("digits", None)``.

    Raises:
        UsageError: an unknown scheme, a path missing or not wanted; lists the forms.
    """
    scheme, colon, rest = spec.partition(":")
    if scheme not in SCHEMES:
        raise _unknown(spec)
    path = rest if colon and rest else None
    if path is None and (scheme in _PATH_NEEDED or colon):
        raise UsageError(f"{spec!r} lacks its path: the forms are {FORMS}")
    if path is not None and scheme not in _PATH_ALLOWED:
        raise UsageError(f"{scheme} takes no path ({path!r}): it is inside scikit-learn")
    if path is not None and "\0" in path:
        raise UsageError(f"{spec!r} is no path")
    return scheme, path


def _refuse(scheme: str, given: dict[str, tuple[bool, set[str]]]) -> None:
    """Options that a source would ignore are mistakes, and are said to be."""
    for option, (is_given, schemes) in given.items():
        if is_given and scheme not in schemes:
            raise UsageError(
                f"{option} does nothing for {scheme}: it belongs to {', '.join(sorted(schemes))}"
            )


def open_data(  # noqa: PLR0913
    spec: str,
    *,
    labels: str | None = None,
    ids: str | None = None,
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
    """Open a source of images or features; nothing is decoded yet, but what a list names is known to exist.

    Args:
        spec: one of :data:`FORMS`.
        labels: file of labels: one per line in the order of the items, for ``features:`` and for a ``list:`` of bare paths; or for any
            source a table that names its items (:func:`.label_tables.with_label_table`).
        ids: file of ids, one per item (:func:`.id_files.read_ids`).
        id_from: where ids come from otherwise: ``position``, ``path`` or ``content`` (:func:`.item_ids.with_ids`).
        keep: columns of ``csv``, ``parquet`` and ``features`` whose texts travel with the items to results; a list, or with commas.
        root: folder that the paths of ``list:``, ``csv:`` and ``parquet:`` start from (default: that of the
            file); where ``cifar10``, ``fashion-mnist`` and ``nuswide`` lie, as an alternative to ``:ROOT``.
        image_column, label_column: of ``csv:`` and ``parquet:``.
        concepts: of ``nuswide``: how many of the most frequent, ``all``, or their names.
        max_bad: fraction of missing and of broken images that is tolerated; 0 makes the first one fatal.
        download: let ``cifar10`` and ``fashion-mnist`` be fetched.
        memory: of ``features``: budget in bytes for what a compressed file is unpacked to; default what is free.

    Raises:
        UsageError: an unknown form (lists them), or an option that does not belong to it.
        DataError: what is named is missing, damaged, or something else.

    Examples:
        >>> digits = open_data("digits")
        >>> len(digits), digits.require_labels().n_classes, digits.read(digits.ids[:1])[0].shape
        (1797, 10, (8, 8, 3))
    """
    if spec == "nuswide" and root is not None:
        spec = f"nuswide:{root}"
        root = None
    scheme, path = parse_spec(spec)
    check_max_bad(max_bad)
    keep = [name.strip() for name in keep.split(",")] if isinstance(keep, str) else list(keep)
    if any(not name or "." in name or "/" in name for name in keep) or len(set(keep)) < len(keep):
        raise UsageError(f"--keep {','.join(keep)}: names of columns are needed, each once, without . and /")
    tables = {"csv", "parquet"}
    table = labels if labels is not None and is_label_table(labels) else None
    _refuse(
        scheme,
        {
            "--labels": (labels is not None and table is None, {"features", "list"}),
            "--keep": (bool(keep), tables | {"features"}),
            "--root": (root is not None, tables | {"list", "cifar10", "fashion-mnist", "nuswide"}),
            "--image-column": (image_column != "image", tables),
            "--label-column": (label_column != DEFAULT_LABEL_COLUMN and table is None, tables),
            "--concepts": (concepts != "21", {"nuswide"}),
        },
    )
    dataset = _open(
        scheme,
        path,
        spec,
        root=root,
        labels=labels if table is None else None,
        image_column=image_column,
        label_column=label_column if table is None else DEFAULT_LABEL_COLUMN,
        concepts=concepts,
        keep=keep,
        ids=ids,
        max_bad=max_bad,
        download=download,
        memory=memory,
    )
    if keep:
        texts = (name + "\0" + "\0".join(dataset.texts[name].tolist()) for name in keep)
        dataset = replace(dataset, fingerprint=fingerprint(dataset.fingerprint, "keep", *texts))
    if ids is not None and id_from != "position":
        raise UsageError(f"--ids {ids} and --id-from {id_from} both say which ids: give one of them")
    dataset = with_ids(dataset, None if scheme == "features" else ids, id_from)
    if table is None:
        return dataset
    return with_label_table(dataset, table, None if label_column == DEFAULT_LABEL_COLUMN else label_column)


def _open(  # noqa: PLR0913
    scheme: str,
    path: str | None,
    spec: str,
    *,
    root: str | None,
    labels: str | None,
    image_column: str,
    label_column: str,
    concepts: str | Sequence[str],
    keep: Sequence[str],
    ids: str | None,
    max_bad: float,
    download: bool,
    memory: int | None,
) -> Dataset:
    """The source itself. Raises as :func:`open_data`."""
    if scheme == "digits":
        return open_digits()
    if scheme in {"cifar10", "fashion-mnist", "nuswide"} and root is not None and path is not None:
        raise UsageError(f"{spec} names its folder already: leave out --root {root}")
    if scheme == "cifar10":
        return open_cifar10(path or root, download=download)
    if scheme == "fashion-mnist":
        return open_fashion_mnist(path or root, download=download)
    assert path is not None
    if scheme != "features" and not os.path.exists(Path(path).expanduser()):
        raise DataError(f"{shown(path)} not found: give the path of the data after {scheme}:")
    if scheme == "nuswide":
        return open_nuswide(path, concepts=concepts, max_bad=max_bad)
    if scheme == "folder":
        return open_folder(path, max_bad=max_bad)
    if scheme == "list":
        return open_list(path, root=root, labels=labels, max_bad=max_bad)
    if scheme == "features":
        return open_features(path, labels=labels, ids=ids, keep=keep, memory=memory)
    return open_table(
        path,
        form=scheme,
        root=root,
        image_column=image_column,
        label_column=label_column,
        keep=keep,
        max_bad=max_bad,
    )
