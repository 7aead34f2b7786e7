"""``folder:PATH``: a folder per class, on disk or in a tar archive, with or without ``train/`` and
``test/``."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import fingerprint
from ..store import as_texts
from .archive import ArchiveImages, open_archive
from .base import BadItems
from .images import (
    BrokenImageError,
    FileImages,
    check_max_bad,
    is_image_name,
    list_fingerprint,
    sampled_content,
    shown,
)
from .labels import Labels, composed
from .paths import is_url, local_path, remote_error, remote_reason, remote_system, version_of, without_secrets

_TRAIN, _TEST = {"train", "training"}, {"test"}
_VALIDATION = {"val", "valid", "validation"}
_ARCHIVES = (".tar", ".tar.gz", ".tgz")


@dataclass(frozen=True)
class Layout:
    """Labels and split derived from image names.

    Attributes:
        order: int64 [N], indices of the names: train before test, then by class, then by name.
        classes: N class names in that order; None is unlabelled.
        official: uint8 [N] in that order, if there are both train and test.
        notes: for the user.
    """

    order: NDArray[np.int64]
    classes: list[str | None]
    official: NDArray[np.uint8] | None
    notes: list[str]


def is_test_split(name: str, parts: Container[str]) -> bool:
    """Whether the part ``name`` of a data set is its test part: ``test``, or ``val`` if there is no ``test`` among the ``parts``."""
    has_test = any(part in parts for part in _TEST)
    return name.lower() in _TEST or (name.lower() in _VALIDATION and not has_test)


def layout_of(names: Sequence[str]) -> Layout:
    """Find classes and split in relative names with ``/``.

    ``CLASS/.../x.jpg`` is labelled by its first folder, ``train/CLASS/x.jpg`` and ``test/CLASS/x.jpg`` by
    the second one (``val`` is the test part if there is no ``test``, else part of ``train``). An image outside of
    folders is unlabelled. Common parent folders (``cifar10/train/...``, as in archives) are skipped.
    """
    parts = [composed(name).split("/") for name in names]
    notes: list[str] = []
    splits = _TRAIN | _TEST | _VALIDATION
    while (
        parts and all(len(p) > 2 and p[0] == parts[0][0] for p in parts) and parts[0][0].lower() not in splits
    ):
        parts = [p[1:] for p in parts]
    tops = {p[0].lower() for p in parts if len(p) > 1}
    # A class may be called "train" (vehicles): only folders of folders, and only these alone, make a split.
    is_split = bool(tops) and tops <= splits and any(len(p) > 2 for p in parts)
    classes: list[str | None] = []
    marks = np.zeros(len(parts), dtype=np.uint8)
    if is_split:
        for i, p in enumerate(parts):
            marks[i] = is_test_split(p[0] if len(p) > 1 else "", tops)
            classes.append(p[1] if len(p) > 2 else None)
        if tops & _VALIDATION:
            joined = "train, beside the test part" if tops & _TEST else "test"
            notes.append(f"the validation folder counts as {joined}")
    else:
        classes = [p[0] if len(p) > 1 else None for p in parts]
    keys = [(int(marks[i]), classes[i] is None, classes[i] or "", parts[i]) for i in range(len(parts))]
    order = np.array(sorted(range(len(parts)), key=keys.__getitem__), dtype=np.int64)
    official = marks[order] if is_split and marks.any() and not marks.all() else None
    return Layout(order, [classes[int(i)] for i in order], official, notes)


def _walk(root: Path) -> tuple[list[str], list[int], int]:
    """Relative names and sizes of the images below ``root``, and the number of other files.

    Links to folders are followed, each folder once (to avoid cycles).
    """
    names: list[str] = []
    sizes: list[int] = []
    others = 0
    seen: set[tuple[int, int]] = set()
    todo = [""]
    while todo:
        inside = todo.pop()
        folder = os.path.join(root, inside) if inside else os.fspath(root)
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            # Sorted, so that the choice between two links to one folder is deterministic.
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"cannot read the folder {shown(folder)}: {error.strerror}") from None
        below = []
        for entry in entries:
            name = f"{inside}/{entry.name}" if inside else entry.name
            if entry.name.startswith("."):
                continue
            try:
                found = entry.stat()
                mode, size = found.st_mode, found.st_size
            except OSError:
                # A dangling or cyclic link with an image name counts as a broken image.
                mode, size = stat.S_IFREG, -1
            if stat.S_ISDIR(mode):
                below.append(name)
            elif is_image_name(entry.name) and stat.S_ISREG(mode):
                names.append(name)
                sizes.append(size)
            else:
                others += 1
        todo.extend(reversed(below))
    return names, sizes, others


@dataclass(kw_only=True)
class RemoteImages(FileImages):
    """Images below a URL, downloaded at each read without caching.

    Attributes:
        system: the file system of fsspec that ``paths`` are in.
    """

    system: Any = field(repr=False)

    def source(self, i: int) -> bytes | str:
        """Encoded bytes of image ``i``. Raises BrokenImageError: it cannot be fetched."""
        try:
            return bytes(self.system.cat_file(self.paths[i]))
        except Exception as error:  # each file system has its own
            raise BrokenImageError(self.item_name(i), remote_reason(error)) from None

    def item_name(self, i: int) -> str:
        """Name without secrets of the URL."""
        return shown(without_secrets(self.paths[i]))

    def image_path(self, i: int) -> str | None:
        """None: not a local file."""
        del i
        return None


def _walk_url(url: str) -> tuple[Any, str, list[str], list[int], int, str]:
    """The file system, the path of the folder there, the result of :func:`_walk`, and a hash of the versions of the images."""
    system, root = remote_system(url)
    root = root.rstrip("/")
    try:
        found = system.find(root + "/", detail=True)
    except Exception as error:
        raise remote_error(url, error) from None
    names, sizes, versions, others = [], [], [], 0
    for path in sorted(found):
        name = path.removeprefix(root).lstrip("/")
        if any(part.startswith(".") for part in name.split("/")):
            continue
        if is_image_name(name):
            names.append(name)
            sizes.append(int(found[path].get("size") or -1))
            versions.append(str(version_of(found[path])))
        else:
            others += 1
    return system, root, names, sizes, others, fingerprint(*versions)


def _labels(classes: Sequence[str | None], name: str) -> Labels | None:
    for cls in classes:
        if cls is not None and not cls.isprintable():
            raise DataError(f"{name}: the class folder {cls!a} is not a printable name: rename it")
    if all(cls is None for cls in classes):
        return None
    return Labels.from_names([() if cls is None else (cls,) for cls in classes])


def open_folder(path: str | os.PathLike[str], *, max_bad: float = 0.01) -> FileImages:
    """Images of a folder, or of a ``.tar`` / ``.tar.gz``, labelled by their folder.

    ids are row numbers in the order of :func:`layout_of`, the same for a folder and an archive of it.

    Args:
        path: the folder or archive, or the URL of one. An archive is copied (:func:`.paths.local_path`); images of a folder are downloaded
            at each read.
        max_bad: allowed fraction of broken images.

    Raises:
        DataError: missing, unreadable, without any image, or a damaged archive.
        UsageError: ``max_bad`` out of range.
    """
    check_max_bad(max_bad)
    name = f"folder:{without_secrets(os.fspath(path))}"
    remote = is_url(path) and not without_secrets(os.fspath(path)).lower().endswith(_ARCHIVES)
    root = Path(path) if remote else local_path(path)
    archive = system = None
    content = ""
    base = os.fspath(root)
    if remote:
        system, base, names, size_list, others, content = _walk_url(os.fspath(path))
        sizes = np.array(size_list, dtype=np.int64)
    elif root.is_dir():
        names, size_list, others = _walk(root)
        sizes = np.array(size_list, dtype=np.int64)
    elif root.is_file():
        archive = open_archive(root)
        names, sizes, others = archive.names, archive.sizes, archive.others
    else:
        raise DataError(f"{root} not found: give a folder of images, or a .tar.gz of one")
    if not names:
        raise DataError(
            f"{name.partition(':')[2]} contains no images ({others:,} other files): a folder per class is expected"
        )
    layout = layout_of(names)
    labels = _labels(layout.classes, name)
    notes = list(layout.notes)
    if others:
        notes.append(f"{others:,} files without an image extension, left out")
    unlabelled = sum(cls is None for cls in layout.classes)
    if unlabelled:
        notes.append(f"{unlabelled:,} of {len(names):,} images are in no class folder: unlabelled")
    ids = np.arange(len(names), dtype=np.int64)
    own = [names[int(i)] for i in layout.order]
    ordered = [composed(name) for name in own]
    paths = [os.path.join(base, *member.split("/")) for member in own]
    if archive is not None:
        content = archive.content(layout.order)
    elif system is None:
        content = sampled_content(zip(paths, itertools.repeat(0), sizes[layout.order].tolist(), strict=False))
    shared: dict[str, Any] = {
        "name": name,
        "ids": ids,
        "labels": labels,
        "official": layout.official,
        "fingerprint": list_fingerprint("folder", ordered, sizes[layout.order], labels, ids, content=content),
        "notes": notes,
        "bad": BadItems(len(names), max_bad),
        "texts": {"name": as_texts(ordered)},
    }
    if archive is not None:
        members = np.column_stack([np.zeros_like(layout.order), layout.order])
        return ArchiveImages(
            **shared, paths=[f"{root}!{member}" for member in ordered], archives=[archive], members=members
        )
    if system is not None:
        return RemoteImages(**shared, paths=[f"{base}/{member}" for member in own], system=system)
    return FileImages(**shared, paths=paths)
