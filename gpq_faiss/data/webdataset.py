"""``webdataset:shard-{000..009}.tar``: samples in tar files: an image and its label under one key.

Members are read without extraction. The key of ``a/0001.seg.png`` is ``a/0001``, its extension ``seg.png``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import DataError
from ..inputs import parse_json
from .archive import Archive, Members, open_archive
from .base import DEFAULT_LABEL_COLUMN, About, Options
from .images import IMAGE_SUFFIXES, FileImages, file_images, left_out, shown
from .label_files import LABEL_COLUMNS, label_cell, labels_from_cells
from .labels import Labels
from .paths import files_of, without_secrets

_LABELS = ("cls", "json", "txt")
_MOST_TEXT = 1 << 20
"""Maximum bytes of a label."""


class _BadSampleError(Exception):
    """An unusable sample, with the reason."""


@dataclass
class _Sample:
    """The members of one key: extension -> number in the archive."""

    shard: int
    archive: Archive
    key: str
    members: dict[str, int] = field(default_factory=dict)

    def image(self, wanted: str) -> int:
        """The image member. Raises _BadSampleError: none, or several."""
        found = [e for e in self.members if f".{e}" in IMAGE_SUFFIXES] if wanted == "image" else [wanted]
        if len(found) > 1:
            several = ", ".join(sorted(found))
            raise _BadSampleError(f"has several images ({several}): name one with --read image_column")
        if not found or found[0] not in self.members:
            raise _BadSampleError("has no image" if wanted == "image" else f"has no .{wanted}")
        return self.members[found[0]]

    def text(self, extension: str) -> str:
        """Text of a member. Raises _BadSampleError: too long or not text."""
        member = self.members[extension]
        size = int(self.archive.sizes[member])
        if size > _MOST_TEXT:
            raise _BadSampleError(f".{extension} has {size:,} bytes")
        try:
            return self.archive.read(member).decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise _BadSampleError(f".{extension} is not UTF-8 text") from None

    def fields(self) -> dict[str, Any]:
        """Contents of ``.json``, if there. Raises _BadSampleError: not an object."""
        if "json" not in self.members:
            return {}
        try:
            found = parse_json(self.text("json"))
        except ValueError:
            raise _BadSampleError(".json is not JSON") from None
        if not isinstance(found, dict):
            raise _BadSampleError(".json is not an object")
        return found

    def value(self, column: str) -> Any:
        """A member's text, or a field of its ``.json``; None if missing."""
        return self.text(column) if column in self.members else self.fields().get(column)

    def label(self, column: str | None) -> tuple[str, ...]:
        """The labels of a column."""
        try:
            return () if column is None else label_cell(self.value(column))
        except RecursionError:
            raise _BadSampleError("has a label nested too deeply") from None


def _key(name: str) -> tuple[str, str]:
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _samples(shard: int, archive: Archive) -> list[_Sample]:
    """In the order of the archive."""
    found: dict[str, _Sample] = {}
    for member in np.argsort(archive.offsets, kind="stable").tolist():
        key, extension = _key(archive.names[member])
        found.setdefault(key, _Sample(shard, archive, key)).members[extension] = member
    return list(found.values())


def _label_column(samples: Sequence[_Sample], wanted: str) -> str | None:
    """Source of labels: the first existing one of ``cls``, a field of ``json``, and ``txt``."""
    there = set().union(*(sample.members for sample in samples))
    if wanted != DEFAULT_LABEL_COLUMN:
        return wanted
    if "cls" in there:
        return "cls"
    for sample in samples:
        try:
            names = sample.fields()
        except _BadSampleError:
            continue
        found = next((name for name in LABEL_COLUMNS if name in names), None)
        if found is not None:
            return found
        if "json" in sample.members:
            break
    return "txt" if "txt" in there else None


def open_webdataset(path: str, o: Options) -> FileImages:
    """Images of WebDataset shards, in the order of the shards and of the samples in each; names are the keys.

    Labels are in ``.cls``, in the field ``label`` (or ``class``, ...) of ``.json``, or in ``.txt``: the first that exists, as told in the
    notes. Empty: no label.
    """
    name = f"webdataset:{without_secrets(path)}"
    extensions = {suffix[1:] for suffix in IMAGE_SUFFIXES} | {
        *_LABELS,
        o.image_column,
        o.label_column,
        *o.keep,
    }

    def wanted(member: str) -> bool:
        return not member.rpartition("/")[2].startswith(".") and _key(member)[1] in extensions

    archives = [open_archive(file, wanted) for file in files_of(path)]
    samples = [sample for i, archive in enumerate(archives) for sample in _samples(i, archive)]
    if not samples:
        raise DataError(
            f"{name} has no samples: tar files of KEY.jpg and KEY.cls (or .json, .txt) are expected"
        )
    label = _label_column(samples, o.label_column)
    good: list[tuple[_Sample, int, tuple[str, ...], list[str]]] = []
    bad: list[str] = []
    for sample in samples:
        try:
            image, cell = sample.image(o.image_column), sample.label(label)
            kept = ["" if (v := sample.value(column)) is None else str(v) for column in o.keep]
            good.append((sample, image, cell, kept))
        except _BadSampleError as error:
            bad.append(f"{shown(sample.key)} {error}")
    shares = (len(bad), len(samples))
    notes = [left_out(name, "samples are unusable", bad[:3], shares, o.max_bad)] if bad else []
    cells = [cell for _, _, cell, _ in good]
    labels: Labels | None = None
    if any(cells):
        labels = labels_from_cells(cells, f"{name}: {label!r}")
        notes.append(f"labels from {label!r}: {sum(map(bool, cells)):,} of {len(cells):,} items")
    elif label is not None and o.label_column != DEFAULT_LABEL_COLUMN:
        raise DataError(f"{name}: no sample has a label in {label!r}: name an extension or a field of .json")
    else:
        notes.append("no labels")
    names = [sample.key for sample, *_ in good]
    if repeated := len(names) - len(set(names)):
        notes.append(f"{repeated:,} keys occur more than once")
    chosen = [(sample.shard, member) for sample, member, *_ in good]
    of_shard = [np.array([m for a, m in chosen if a == i], dtype=np.int64) for i in range(len(archives))]
    content = "".join(archive.content(rows) for archive, rows in zip(archives, of_shard, strict=True))
    sizes = np.array([archives[a].sizes[m] for a, m in chosen], dtype=np.int64)
    paths = [f"{archives[a].path}!{archives[a].names[m]}" for a, m in chosen]
    texts = {column: [row[c] for *_, row in good] for c, column in enumerate(o.keep)}
    about = About(labels, texts=texts, notes=notes)
    fetch = Members(archives, chosen)
    return file_images(name, "webdataset", names, sizes, content, about, paths, o.max_bad, fetch)
