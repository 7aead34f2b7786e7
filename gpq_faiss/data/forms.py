"""Forms of a DATA argument: prefixes, and what a path without one is."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zlib
from pathlib import Path

from ..errors import DataError, UsageError
from ..plugins import find_plugin, plugin_names
from .embeddings import SUFFIXES
from .images import IMAGE_SUFFIXES, is_image_name, shown
from .parquet import is_list, is_text, open_parquet
from .paths import files_of, is_url, without_secrets

FORMS = (
    "digits | cifar10[:ROOT] | fashion-mnist[:ROOT] | nuswide:ROOT | folder:PATH | list:FILE | csv:FILE | "
    "parquet:FILE | webdataset:FILES | hf:FOLDER | features:FILES"
)
"""Every form of a DATA argument."""

TABLES = {"csv", "parquet"}
_PATH_NEEDED = TABLES | {"nuswide", "folder", "list", "webdataset", "hf", "features"}
_PATH_ALLOWED = _PATH_NEEDED | {"cifar10", "fashion-mnist"}
SCHEMES = _PATH_ALLOWED | {"digits"}
"""Prefixes of DATA arguments."""


def forms() -> str:
    """:data:`FORMS`, and those of plugins. Raises UsageError: see :func:`.plugins.plugin_names`."""
    return " | ".join([FORMS, *(f"{name}:PATH" for name in plugin_names("data", SCHEMES))])


def is_form(text: str) -> bool:
    """Whether a text starts like a DATA argument. Raises UsageError: see :func:`.plugins.find_plugin`."""
    scheme = text.partition(":")[0]
    return find_plugin("data", scheme, SCHEMES) is not None or scheme in SCHEMES


def _unknown(spec: str) -> UsageError:
    return UsageError(f"unknown data {without_secrets(spec)!r}: no such path, and the forms are {forms()}")


def parse_spec(spec: str) -> tuple[str, str | None]:
    """``"list:a.txt"`` -> ``("list", "a.txt")``; ``"digits"`` -> ``("digits", None)``."""
    scheme, colon, rest = spec.partition(":")
    if not is_form(spec):
        raise _unknown(spec)
    path = rest if colon and rest else None
    if scheme not in SCHEMES:
        return scheme, rest
    if path is None and (scheme in _PATH_NEEDED or colon):
        raise UsageError(f"{spec!r} lacks its path: the forms are {FORMS}")
    if path is not None and scheme not in _PATH_ALLOWED:
        raise UsageError(f"{scheme} takes no path ({path!r}): it is inside scikit-learn")
    if path is not None and "\0" in path:
        raise UsageError(f"{spec!r} is not a path")
    return scheme, path


_PEEKED = 16 << 20
"""Bytes of an archive that are looked at."""


def form_of(path: str, image_column: str = "image") -> str:
    """The scheme of a path without prefix, by its ending, and for folders, archives and Parquet by what is in them."""
    bare = without_secrets(path)
    ending = os.path.splitext(bare.lower().removesuffix(".gz"))[1]
    local = None if is_url(path) else Path(path).expanduser()
    try:
        if local is not None and path != "" and local.is_dir():
            return _form_of_folder(local)
        there = local is not None and path != "" and local.exists()
    except (OSError, ValueError):  # a NUL byte, or a name that is too long
        there = False
    if ending in (".parquet", ".pq"):
        return _form_of_parquet(path, image_column)
    if ending in SUFFIXES:
        return "features"
    if ending in (".tar", ".tgz"):
        return _form_of_archive(path)
    if ending in (".csv", ".tsv", ".txt"):
        return "list" if ending == ".txt" else "csv"
    if ending in IMAGE_SUFFIXES:
        raise UsageError(
            f"{shown(bare)} is one image: give the folder of several, which are queries or items"
        )
    if there:
        endings = ", ".join(dict.fromkeys([*SUFFIXES, ".csv", ".tsv", ".txt", ".tar"]))
        raise UsageError(
            f"{shown(bare)}: its ending tells no form ({endings} do): rename it, or write list:{shown(bare)} if it lists images"
        )
    if local is not None and (ending or "/" in bare):
        raise DataError(f"{shown(bare)} not found: give a path that exists, or a form such as features:FILES")
    raise _unknown(path)


def _form_of_folder(folder: Path) -> str:
    if any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return "hf"
    return "nuswide" if (folder / "ImageList").is_dir() else "folder"


def _form_of_parquet(path: str, image_column: str) -> str:
    with open_parquet(files_of(path)[0], "a Parquet file of vectors, or of paths of images,") as file:
        schema = file.schema_arrow
        vectors = [field.name for field in schema if is_list(field.type) and field.name != image_column]
        has_images = any(field.name == image_column and is_text(field.type) for field in schema)
    # Several lists: one of them is the vectors, the others may be labels.
    if vectors and has_images:
        raise UsageError(
            f"{shown(without_secrets(path))} has vectors ({vectors[0]!r}) and paths of images ({image_column!r}): write features:{path} "
            f"or parquet:{path}"
        )
    if not vectors and not has_images:
        there = ", ".join(schema.names[:20])
        raise DataError(
            f"{shown(without_secrets(path))} has no column of vectors (lists of numbers), and no column {image_column!r} of image paths "
            f"(it has {there}): name it with --read image_column"
        )
    return "features" if vectors else "parquet"


def _form_of_archive(path: str) -> str:
    """``webdataset`` if an image and its label have one key, or for several files; else ``folder``."""
    files = files_of(path)
    kinds: dict[str, set[str]] = {}
    try:
        with files[0].open("rb") as file:
            gzipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(files[0]) if gzipped else files[0].open("rb") as stream:
            head = io.BytesIO(stream.read(_PEEKED))
        with tarfile.open(fileobj=head, mode="r:") as archive:
            for member in archive:
                key, ending = os.path.splitext(member.name)
                if is_image_name(member.name) or ending in (".cls", ".json", ".txt"):
                    kinds.setdefault(key, set()).add("image" if is_image_name(member.name) else "label")
    except (tarfile.TarError, OSError, EOFError, ValueError, RecursionError, zlib.error):
        pass  # the end of what was looked at, or damage, which the reader reports
    return "webdataset" if len(files) > 1 or any(len(kind) == 2 for kind in kinds.values()) else "folder"
