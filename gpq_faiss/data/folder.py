"""``folder:PATH``, a folder per class, on disk or in a tar archive; and ``webdataset:shard-{000..009}.tar``, an image and its label under
one key: that of ``a/0001.seg.png`` is ``a/0001``, its extension ``seg.png``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError, one_line
from ..inputs import parse_json
from ..store import as_texts
from .base import About
from .images import (
    IMAGE_SUFFIXES,
    BrokenImageError,
    FileImages,
    file_images,
    is_image_name,
    listed_images,
    shown,
)
from .labels import Labels, composed, label_cell, labels_from_cells
from .paths import files_of, local_path, without_secrets
from .tables import LABELS
from .tar import Tar, open_tar

_TRAIN, _TEST = {"train", "training"}, {"test"}
_VALIDATION = {"val", "valid", "validation"}
_LABEL_SUFFIXES = ("cls", "json", "txt")
_MOST_TEXT = 1 << 20
"""Maximum bytes of a label."""


# Folders ----------------------------------------------------------------------------------------------------------------


def layout_of(names: Sequence[str]) -> tuple[list[int], list[str | None]]:
    """Order of images by their relative names with ``/`` (train before test, then by class, then by name), and in that order their classes.

    ``CLASS/.../x.jpg`` is labelled by its first folder, ``train/CLASS/x.jpg`` and ``test/CLASS/x.jpg`` by
    the second one. An image outside of folders is unlabelled. Common parent folders (``cifar10/train/...``, as in archives) are skipped.
    """
    parts = [composed(name).split("/") for name in names]
    splits = _TRAIN | _TEST | _VALIDATION
    while (
        parts and all(len(p) > 2 and p[0] == parts[0][0] for p in parts) and parts[0][0].lower() not in splits
    ):
        parts = [p[1:] for p in parts]
    tops = {p[0].lower() for p in parts if len(p) > 1}
    # A class may be called "train" (vehicles): only folders of folders, and only these alone, make a split.
    is_split = bool(tops) and tops <= splits and any(len(p) > 2 for p in parts)
    last = _TEST if tops & _TEST else _VALIDATION
    at = int(is_split)  # the place of the class in a name
    classes = [p[at] if len(p) > at + 1 else None for p in parts]
    tests = [is_split and len(p) > 1 and p[0].lower() in last for p in parts]
    keys = [(tests[i], classes[i] is None, classes[i] or "", parts[i]) for i in range(len(parts))]
    order = sorted(range(len(parts)), key=keys.__getitem__)
    return order, [classes[i] for i in order]


def _walk(root: Path) -> tuple[list[str], int]:
    """Relative names of the images below ``root``, and the number of other files.

    Links to folders are followed, each folder once (to avoid cycles).
    """
    names: list[str] = []
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
            if is_image_name(file):
                names.append(os.path.join(folder, file)[len(prefix) :])
            else:
                others += 1
    return names, others


def _class_labels(classes: Sequence[str | None], name: str) -> Labels | None:
    for cls in classes:
        if cls is not None and not cls.isprintable():
            raise DataError(f"{name}: the class folder {cls!a} is not a printable name: rename it")
    if all(cls is None for cls in classes):
        return None
    return Labels.from_names(
        [() if cls is None else (cls,) for cls in classes], sorted({c for c in classes if c})
    )


def open_folder(path: str, *, max_bad: float = 0.01) -> FileImages:
    """Images of a folder, or of a ``.tar`` / ``.tar.gz``, labelled by their folder.

    ids are row numbers in the order of :func:`layout_of`, the same for a folder and an archive of it."""
    root = local_path(path)
    name = f"folder:{without_secrets(path)}"
    archive = None if root.is_dir() else open_tar(root)
    if archive is None:
        names, others = _walk(root)
    else:
        names = [member for member in sorted(archive.members) if is_image_name(member)]
        others = len(archive.members) - len(names)
    if not names:
        raise DataError(f"{name} contains no images ({others:,} other files): a folder per class is expected")
    order, classes = layout_of(names)
    notes = [f"{others:,} files without an image extension, left out"] if others else []
    if unlabelled := classes.count(None):
        notes.append(f"{unlabelled:,} of {len(names):,} images are in no class folder: unlabelled")
    names = [names[i] for i in order]
    own = [composed(one) for one in names]
    about = About(_class_labels(classes, name), notes=notes)
    if archive is None:
        return listed_images(name, own, [os.path.join(root, one) for one in names], about, max_bad, "folder")
    sizes = [archive.members[one][1] for one in names]
    paths = [f"{archive.path}!{one}" for one in own]
    fetch = Members([archive], [(0, one) for one in names])
    return file_images(name, "folder", own, sizes, archive.content(names), about, paths, max_bad, fetch)


@dataclass(frozen=True)
class Members:
    """Contents by row of chosen members of archives, for :class:`.images.FileImages`. None: the row has no image."""

    archives: Sequence[Tar]
    chosen: Sequence[tuple[int, str | None]]

    def __call__(self, row: int) -> bytes:
        archive, member = self.chosen[row]
        if member is None:
            raise BrokenImageError("", "has no image")
        return self.archives[archive].read(member)


# WebDataset -------------------------------------------------------------------------------------------------------------


@dataclass
class _Sample:
    """The members of one key: extension -> name in the archive."""

    shard: int
    archive: Tar
    key: str
    members: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.archive.path}!{shown(self.key)}"

    def image(self, wanted: str | None) -> str | None:
        """The image member. Raises DataError: several."""
        found = [e for e in self.members if f".{e}" in IMAGE_SUFFIXES] if wanted is None else [wanted]
        if len(found) > 1:
            several = ", ".join(sorted(found))
            raise DataError(f"{self.place} has several images ({several}): name one with --read image_column")
        return self.members.get(found[0]) if found else None

    def text(self, extension: str) -> str:
        """Text of a member. Raises DataError: too long or not text."""
        try:
            return self.archive.read(self.members[extension], _MOST_TEXT).decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise DataError(f"{self.place}.{extension} is not UTF-8 text: repair the label") from None

    def fields(self) -> dict[str, Any]:
        """Contents of ``.json``, if there. Raises DataError: not an object."""
        try:
            found = parse_json(self.text("json")) if "json" in self.members else {}
            if isinstance(found, dict):
                return found
            raise ValueError("no object")
        except ValueError as error:
            raise DataError(f"{self.place}.json is not JSON ({one_line(error)}): repair the label") from None

    def value(self, column: str) -> Any:
        """A member's text, or a field of its ``.json``; None if missing."""
        return self.text(column) if column in self.members else self.fields().get(column)


def _samples(shard: int, archive: Tar, *more: str | None) -> list[_Sample]:
    """In the order of the archive: of members that are images, labels, or have an extension of ``more``."""
    wanted = {suffix[1:] for suffix in IMAGE_SUFFIXES}.union(_LABEL_SUFFIXES, more)
    found: dict[str, _Sample] = {}
    for member in archive.members:
        folder, slash, base = member.rpartition("/")
        stem, _, extension = base.partition(".")
        key = folder + slash + stem
        if extension.lower() in wanted:
            found.setdefault(key, _Sample(shard, archive, key, {})).members[extension.lower()] = member
    return list(found.values())


def has_samples(path: Path) -> bool:
    """Whether an image and its label have one key in a tar."""
    keys = [sample.members.keys() for sample in _samples(0, open_tar(path))]
    return any(
        key & set(_LABEL_SUFFIXES) and any(f".{extension}" in IMAGE_SUFFIXES for extension in key)
        for key in keys
    )


def _label_column(samples: Sequence[_Sample]) -> str | None:
    """Source of labels: the first existing one of ``cls``, a field of the first ``json``, and ``txt``."""
    there = set().union(*(sample.members for sample in samples))
    if "cls" in there:
        return "cls"
    first = next((sample.fields() for sample in samples if "json" in sample.members), {})
    return next((name for name in LABELS if name in first), "txt" if "txt" in there else None)


def open_webdataset(
    path: str,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    keep: Sequence[str] = (),
    max_bad: float = 0.01,
) -> FileImages:
    """Images of WebDataset shards, in the order of the shards and of the samples in each; names are the keys.

    Labels are in ``.cls``, in the field ``label`` (or ``class``, ...) of ``.json``, or in ``.txt``: the first that exists, as told in the
    notes. Empty: no label.
    """
    name = f"webdataset:{without_secrets(path)}"
    archives = [open_tar(file) for file in files_of(path)]
    columns = (image_column, label_column, *keep)
    samples = [sample for i, archive in enumerate(archives) for sample in _samples(i, archive, *columns)]
    images = [sample.image(image_column) for sample in samples]
    if not any(images):
        raise DataError(
            f"{name} has no images: tar files of KEY.jpg and KEY.cls (or .json, .txt) are expected"
        )
    label = label_column or _label_column(samples)
    try:
        cells = [() if label is None else label_cell(sample.value(label)) for sample in samples]
    except RecursionError:
        raise DataError(f"{name}: a label is nested too deeply") from None
    labels = labels_from_cells(cells, f"{name}: {label!r}") if any(cells) or label_column else None
    said = f"labels from {label!r}: {sum(map(bool, cells)):,} of {len(cells):,} items"
    names = [sample.key for sample in samples]
    texts = {
        column: as_texts("" if (v := sample.value(column)) is None else str(v) for sample in samples)
        for column in keep
    }
    about = About(labels, texts=texts, notes=["no labels" if labels is None else said])
    chosen = [(sample.shard, image) for sample, image in zip(samples, images, strict=True)]
    of_shard: list[list[str]] = [[] for _ in archives]
    for shard, member in chosen:
        of_shard[shard] += [member] if member else []
    content = "".join(archive.content(members) for archive, members in zip(archives, of_shard, strict=True))
    sizes = [-1 if member is None else archives[i].members[member][1] for i, member in chosen]
    paths = [f"{archives[i].path}!{member or name}" for (i, member), name in zip(chosen, names, strict=True)]
    fetch = Members(archives, chosen)
    made = file_images(name, "webdataset", names, sizes, content, about, paths, max_bad, fetch)
    for i in (i for i, image in enumerate(images) if image is None):
        made.bad.add(i, paths[i], "has no image")
    return made
