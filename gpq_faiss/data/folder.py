"""``folder:PATH``: a folder per class, on disk or in a tar archive, with or without ``train/`` and
``test/``."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..store import as_texts
from .archive import ArchiveImages, open_archive
from .base import BadItems
from .images import FileImages, check_max_bad, is_image_name, list_fingerprint, shown
from .labels import Labels

_TRAIN, _TEST = {"train", "training"}, {"test"}
_VALIDATION = {"val", "valid", "validation"}


@dataclass(frozen=True)
class Layout:
    """What the names of the images say.

    Attributes:
        order: int64 [N], positions into the names: train before test, then by class, then by name.
        classes: N class names in that order; None is unlabelled.
        official: uint8 [N] in that order, where there are both train and test.
        notes: for people.
    """

    order: NDArray[np.int64]
    classes: list[str | None]
    official: NDArray[np.uint8] | None
    notes: list[str]


def layout_of(names: Sequence[str]) -> Layout:
    """Find classes and split in relative names with ``/``.

    ``CLASS/.../x.jpg`` is labelled by its first folder, ``train/CLASS/x.jpg`` and ``test/CLASS/x.jpg`` by
    the second one (``val`` serves as the test part where there is no ``test``, and joins ``train`` where
    there is). An image in no folder is unlabelled. Folders around everything (``cifar10/train/...``, as
    archives have them) are passed over.
    """
    parts = [name.split("/") for name in names]
    notes: list[str] = []
    splits = _TRAIN | _TEST | _VALIDATION
    while (
        parts and all(len(p) > 2 and p[0] == parts[0][0] for p in parts) and parts[0][0].lower() not in splits
    ):
        parts = [p[1:] for p in parts]
    tops = {p[0].lower() for p in parts if len(p) > 1}
    # A set about vehicles may well have the class "train": only folders of folders make a split, and only
    # alone.
    is_split = bool(tops) and tops <= splits and any(len(p) > 2 for p in parts)
    classes: list[str | None] = []
    marks = np.zeros(len(parts), dtype=np.uint8)
    if is_split:
        has_test = bool(tops & _TEST)
        for i, p in enumerate(parts):
            top = p[0].lower() if len(p) > 1 else ""
            marks[i] = top in _TEST or (top in _VALIDATION and not has_test)
            classes.append(p[1] if len(p) > 2 else None)
        if tops & _VALIDATION:
            joined = "train, beside the test part" if has_test else "test"
            notes.append(f"the validation folder counts as {joined}")
    else:
        classes = [p[0] if len(p) > 1 else None for p in parts]
    keys = [(int(marks[i]), classes[i] is None, classes[i] or "", parts[i]) for i in range(len(parts))]
    order = np.array(sorted(range(len(parts)), key=keys.__getitem__), dtype=np.int64)
    official = marks[order] if is_split and marks.any() and not marks.all() else None
    return Layout(order, [classes[int(i)] for i in order], official, notes)


def _walk(root: Path) -> tuple[list[str], list[int], int]:
    """Relative names and sizes of the images below ``root``, and the number of other files.

    Links to folders are followed, each folder once (a link to a parent would go round for ever).
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
            # Sorted, so that which of two links to one folder counts does not depend on the file system.
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
                # A link to nowhere, or to itself: where it is named as an image it counts as a broken one.
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


def _labels(classes: Sequence[str | None], name: str) -> Labels | None:
    for cls in classes:
        if cls is not None and not cls.isprintable():
            raise DataError(f"{name}: the class folder {cls!a} is not a printable name: rename it")
    if all(cls is None for cls in classes):
        return None
    return Labels.from_names([() if cls is None else (cls,) for cls in classes])


def open_folder(path: str | os.PathLike[str], *, max_bad: float = 0.01) -> FileImages:
    """Images of a folder, or of a ``.tar`` / ``.tar.gz``, labelled by the folder they lie in.

    ids are the positions in the order of :func:`layout_of`, the same for a folder and for an archive of it.

    Args:
        path: the folder or archive.
        max_bad: fraction of images that may turn out broken when they are read.

    Raises:
        DataError: missing, unreadable, without any image, or a damaged archive.
        UsageError: ``max_bad`` out of range.
    """
    check_max_bad(max_bad)
    root = Path(path).expanduser()
    name = f"folder:{path}"
    archive = None
    if root.is_dir():
        names, size_list, others = _walk(root)
        sizes = np.array(size_list, dtype=np.int64)
    elif root.is_file():
        archive = open_archive(root)
        names, sizes, others = archive.names, archive.sizes, archive.others
    else:
        raise DataError(f"{root} not found: give a folder of images, or a .tar.gz of one")
    if not names:
        raise DataError(f"{root} has no image in it ({others:,} other files): a folder per class is expected")
    layout = layout_of(names)
    labels = _labels(layout.classes, name)
    notes = list(layout.notes)
    if others:
        notes.append(f"{others:,} files are no images by their name, left out")
    unlabelled = sum(cls is None for cls in layout.classes)
    if unlabelled:
        notes.append(f"{unlabelled:,} of {len(names):,} images lie in no class folder: unlabelled")
    ids = np.arange(len(names), dtype=np.int64)
    ordered = [names[int(i)] for i in layout.order]
    bad = BadItems(len(names), max_bad)
    print_ = list_fingerprint(
        "folder", ordered, sizes[layout.order], labels, ids, content=archive.digest if archive else ""
    )
    if archive is not None:
        return ArchiveImages(
            name=name,
            ids=ids,
            labels=labels,
            official=layout.official,
            fingerprint=print_,
            notes=notes,
            bad=bad,
            texts={"name": as_texts(ordered)},
            paths=[f"{root}!{member}" for member in ordered],
            archive=archive,
            members=layout.order,
        )
    return FileImages(
        name=name,
        ids=ids,
        labels=labels,
        official=layout.official,
        fingerprint=print_,
        notes=notes,
        bad=bad,
        texts={"name": as_texts(ordered)},
        paths=[os.path.join(root, *member.split("/")) for member in ordered],
    )
