"""``folder:PATH``: a folder per class, on disk or in a tar archive, with or without ``train/`` and
``test/``."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Container, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import fingerprint
from .archive import Members, open_archive
from .base import About
from .images import BrokenImageError, FileImages, file_images, is_image_name, sampled_content, shown
from .labels import Labels, composed
from .paths import is_url, local_path, remote_error, remote_reason, remote_system, version_of, without_secrets

_TRAIN, _TEST = {"train", "training"}, {"test"}
_VALIDATION = {"val", "valid", "validation"}
_ARCHIVES = (".tar", ".tar.gz", ".tgz")


class Layout(NamedTuple):
    """Labels and split by image names: the ``order`` of the names (train before test, then by class, then by name), and in that order
    their ``classes`` (None: unlabelled) and ``official`` marks (0 train, 1 test; None: not both there)."""

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
    at = int(is_split)  # the place of the class in a name
    classes = [p[at] if len(p) > at + 1 else None for p in parts]
    marks = np.array([is_split and len(p) > 1 and is_test_split(p[0], tops) for p in parts], dtype=np.uint8)
    if is_split and tops & _VALIDATION:
        joined = "train, beside the test part" if tops & _TEST else "test"
        notes.append(f"the validation folder counts as {joined}")
    keys = [(int(marks[i]), classes[i] is None, classes[i] or "", parts[i]) for i in range(len(parts))]
    order = np.array(sorted(range(len(parts)), key=keys.__getitem__), dtype=np.int64)
    official = marks[order] if marks.any() and not marks.all() else None
    return Layout(order, [classes[i] for i in order], official, notes)


def _walk(root: Path) -> tuple[list[str], list[int], int]:
    """Relative names and sizes of the images below ``root``, and the number of other files.

    Links to folders are followed, each folder once (to avoid cycles).
    """
    names: list[str] = []
    sizes: list[int] = []
    others = 0
    seen: set[tuple[int, int]] = set()
    prefix = os.path.join(root, "")

    def stop(error: OSError) -> None:
        raise DataError(f"cannot read the folder {shown(str(error.filename))}: {error.strerror}") from None

    for folder, below, files in os.walk(root, onerror=stop, followlinks=True):
        status = os.stat(folder)
        known = (status.st_dev, status.st_ino) in seen
        seen.add((status.st_dev, status.st_ino))
        # Sorted, so that the choice between two links to one folder is deterministic.
        below[:] = [] if known else sorted(name for name in below if not name.startswith("."))
        for file in () if known else sorted(name for name in files if not name.startswith(".")):
            path = os.path.join(folder, file)
            try:
                found = os.stat(path)
                regular, size = stat.S_ISREG(found.st_mode), found.st_size
            except OSError:
                # A dangling or cyclic link with an image name counts as a broken image.
                regular, size = True, -1
            if is_image_name(file) and regular:
                names.append(path[len(prefix) :])
                sizes.append(size)
            else:
                others += 1
    return names, sizes, others


def _walk_url(url: str) -> tuple[Any, str, list[str], list[int], int, str]:
    """The file system, the path of the folder there, the result of :func:`_walk`, and a hash of the versions of the images."""
    system, root = remote_system(url)
    root = root.rstrip("/")
    try:
        found = system.find(root + "/", detail=True)
    except Exception as error:
        raise remote_error(url, error) from None
    of_name = {path.removeprefix(root).lstrip("/"): found[path] for path in sorted(found)}
    plain = [name for name in of_name if not any(part.startswith(".") for part in name.split("/"))]
    names = [name for name in plain if is_image_name(name)]
    sizes = [int(of_name[name].get("size") or -1) for name in names]
    versions = fingerprint(*(str(version_of(of_name[name])) for name in names))
    return system, root, names, sizes, len(plain) - len(names), versions


def _fetch(system: Any, paths: Sequence[str], i: int) -> bytes:
    """Encoded bytes of an image at a URL, downloaded at each read."""
    try:
        return bytes(system.cat_file(paths[i]))
    except Exception as error:  # each file system has its own
        raise BrokenImageError(paths[i], remote_reason(error)) from None


def _labels(classes: Sequence[str | None], name: str) -> Labels | None:
    for cls in classes:
        if cls is not None and not cls.isprintable():
            raise DataError(f"{name}: the class folder {cls!a} is not a printable name: rename it")
    if all(cls is None for cls in classes):
        return None
    return Labels.from_names([() if cls is None else (cls,) for cls in classes])


def open_folder(path: str | os.PathLike[str], *, max_bad: float = 0.01) -> FileImages:
    """Images of a folder, or of a ``.tar`` / ``.tar.gz``, labelled by their folder; also at a URL.

    ids are row numbers in the order of :func:`layout_of`, the same for a folder and an archive of it."""
    path = os.fspath(path)
    bare = without_secrets(path)
    archive = system = None
    if is_url(path) and not bare.lower().endswith(_ARCHIVES):
        system, base, names, lengths, others, content = _walk_url(path)
        sizes = np.array(lengths, dtype=np.int64)
    elif (root := local_path(path)).is_dir():
        base = str(root)
        names, lengths, others = _walk(root)
        sizes = np.array(lengths, dtype=np.int64)
    else:
        archive = open_archive(root)
        names, sizes, others = archive.names, archive.sizes, archive.others
    if not names:
        raise DataError(f"{bare} contains no images ({others:,} other files): a folder per class is expected")
    layout = layout_of(names)
    notes = list(layout.notes)
    if others:
        notes.append(f"{others:,} files without an image extension, left out")
    unlabelled = sum(cls is None for cls in layout.classes)
    if unlabelled:
        notes.append(f"{unlabelled:,} of {len(names):,} images are in no class folder: unlabelled")
    own, sizes = [names[i] for i in layout.order], sizes[layout.order]
    fetch: Any = None
    if archive is not None:
        paths = [f"{root}!{composed(member)}" for member in own]
        fetch, content = Members([archive], [(0, i) for i in layout.order]), archive.content(layout.order)
    elif system is not None:
        paths = [f"{base}/{member}" for member in own]
        fetch = partial(_fetch, system, paths)
    else:
        paths = [os.path.join(base, member) for member in own]
        content = sampled_content(zip(paths, itertools.repeat(0), sizes.tolist(), strict=False))
    name, names = f"folder:{bare}", [composed(member) for member in own]
    about = About(_labels(layout.classes, name), official=layout.official, notes=notes)
    paths = [without_secrets(one) for one in paths]
    return file_images(name, "folder", names, sizes, content, about, paths, max_bad, fetch)
