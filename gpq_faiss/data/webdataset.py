"""``webdataset:shard-{000..009}.tar``: samples in tar files: an image and its label under one key.

Members are read without extraction. The key of ``a/0001.seg.png`` is ``a/0001``, its extension ``seg.png``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..inputs import parse_json
from ..store import as_texts
from .archive import Archive, ArchiveImages, open_archive
from .base import BadItems
from .images import IMAGE_SUFFIXES, check_max_bad, list_fingerprint, shown
from .label_files import label_cell, labels_from_cells
from .label_tables import LABEL_COLUMNS
from .labels import Labels
from .paths import files_of, without_secrets
from .tables import DEFAULT_LABEL_COLUMN

_LABELS = ("cls", "json", "txt")
_MOST_TEXT = 1 << 20
"""Maximum bytes of a label."""


@dataclass
class _Sample:
    """The members of one key: extension -> number in the archive."""

    shard: int
    key: str
    members: dict[str, int] = field(default_factory=dict)


class _BadSampleError(Exception):
    """An unusable sample, with the reason."""


def _key(name: str) -> tuple[str, str]:
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _samples(shard: int, archive: Archive) -> list[_Sample]:
    """In the order of the archive."""
    found: dict[str, _Sample] = {}
    for member in np.argsort(archive.offsets, kind="stable").tolist():
        key, extension = _key(archive.names[member])
        found.setdefault(key, _Sample(shard, key)).members[extension] = member
    return list(found.values())


class _Reader:
    """Contents of samples."""

    def __init__(self, archives: Sequence[Archive], image: str) -> None:
        self.archives, self.image = archives, image

    def image_of(self, sample: _Sample) -> int:
        """The image member. Raises _BadSampleError: none, or several."""
        found = (
            [e for e in sample.members if f".{e}" in IMAGE_SUFFIXES]
            if self.image == "image"
            else [self.image]
        )
        if len(found) > 1:
            raise _BadSampleError(
                f"has several images ({', '.join(sorted(found))}): name one with --image-column"
            )
        if not found or found[0] not in sample.members:
            raise _BadSampleError("has no image" if self.image == "image" else f"has no .{self.image}")
        return sample.members[found[0]]

    def text(self, sample: _Sample, extension: str) -> str:
        """Text of a member. Raises _BadSampleError: too long or not text."""
        archive, member = self.archives[sample.shard], sample.members[extension]
        if archive.sizes[member] > _MOST_TEXT:
            raise _BadSampleError(f".{extension} has {int(archive.sizes[member]):,} bytes")
        try:
            return archive.read(member).decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise _BadSampleError(f".{extension} is not UTF-8 text") from None

    def fields(self, sample: _Sample) -> dict[str, Any]:
        """Contents of ``.json``. Raises _BadSampleError: not an object."""
        try:
            found = parse_json(self.text(sample, "json"))
        except ValueError:
            raise _BadSampleError(".json is not JSON") from None
        if not isinstance(found, dict):
            raise _BadSampleError(".json is not an object")
        return found

    def value(self, sample: _Sample, column: str) -> Any:
        """A member's text, or a field of its ``.json``; None if missing."""
        if column in sample.members:
            return self.text(sample, column)
        return self.fields(sample).get(column) if "json" in sample.members else None


def _label_column(samples: Sequence[_Sample], reader: _Reader, wanted: str) -> str | None:
    """Source of labels: the first existing one of ``cls``, a field of ``json``, and ``txt``."""
    there = set().union(*(sample.members for sample in samples))
    if wanted != DEFAULT_LABEL_COLUMN:
        return wanted
    if "cls" in there:
        return "cls"
    for sample in samples:
        if "json" in sample.members:
            try:
                names = reader.fields(sample)
            except _BadSampleError:
                continue
            found = next((name for name in LABEL_COLUMNS if name in names), None)
            if found is not None:
                return found
            break
    return "txt" if "txt" in there else None


@dataclass
class _Rows:
    """The usable samples."""

    samples: list[_Sample] = field(default_factory=list)
    members: list[tuple[int, int]] = field(default_factory=list)
    cells: list[tuple[str, ...]] = field(default_factory=list)
    kept: list[list[str]] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def _read(samples: Sequence[_Sample], reader: _Reader, label: str | None, keep: Sequence[str]) -> _Rows:
    rows = _Rows()
    for sample in samples:
        try:
            member = reader.image_of(sample)
            value = None if label is None else reader.value(sample, label)
            cell = _cell(value)
            kept = ["" if (v := reader.value(sample, name)) is None else str(v) for name in keep]
        except _BadSampleError as error:
            rows.bad.append(f"{shown(sample.key)} {error}")
            continue
        rows.samples.append(sample)
        rows.members.append((sample.shard, member))
        rows.cells.append(cell)
        rows.kept.append(kept)
    return rows


def _cell(value: Any) -> tuple[str, ...]:
    try:
        return label_cell(value)
    except RecursionError:
        raise _BadSampleError("has a label nested too deeply") from None


def _wanted(image: str, label: str, keep: Sequence[str]) -> set[str]:
    return {suffix[1:] for suffix in IMAGE_SUFFIXES} | {*_LABELS, image, label, *keep}


def _open_all(files: Sequence[Path], extensions: set[str]) -> Iterator[Archive]:
    def wanted(name: str) -> bool:
        base = name.rpartition("/")[2]
        return not base.startswith(".") and _key(name)[1] in extensions

    for file in files:
        yield open_archive(file, wanted=wanted)


def open_webdataset(
    path: str,
    *,
    image_column: str = "image",
    label_column: str = DEFAULT_LABEL_COLUMN,
    keep: Sequence[str] = (),
    max_bad: float = 0.01,
) -> ArchiveImages:
    """Images of WebDataset shards, in the order of the shards and of the samples in each; names are the keys.

    Labels are in ``.cls``, in the field ``label`` (or ``class``, ...) of ``.json``, or in ``.txt``: the first that exists, as told in the
    notes. Empty: no label.

    Args:
        path: shards, see :func:`.paths.files_of`: ``x-{000..009}.tar``, ``x-*.tar``, or URLs of this form.
        image_column: extension of the images, if samples have several.
        label_column: extension, or field of ``.json``, of the labels.
        keep: further extensions or fields to store as text with the items.
        max_bad: allowed fraction of samples without an image or with a damaged label, and of broken images among the others.

    Raises:
        DataError: a shard is missing, damaged or not a tar; no samples; too many bad ones; or invalid labels.
        UsageError: ``max_bad`` out of range.
    """
    check_max_bad(max_bad)
    name = f"webdataset:{without_secrets(path)}"
    archives = list(_open_all(files_of(path), _wanted(image_column, label_column, keep)))
    samples = [sample for i, archive in enumerate(archives) for sample in _samples(i, archive)]
    if not samples:
        raise DataError(
            f"{name} has no samples: tar files of KEY.jpg and KEY.cls (or .json, .txt) are expected"
        )
    reader = _Reader(archives, image_column)
    label = _label_column(samples, reader, label_column)
    rows = _read(samples, reader, label, keep)
    notes = []
    if rows.bad:
        what = f"{len(rows.bad):,} of {len(samples):,} samples are unusable"
        first = "; ".join(rows.bad[:3]) + ("; ..." if len(rows.bad) > 3 else "")
        if len(rows.bad) > max_bad * len(samples) or not rows.samples:
            limit = f"above the limit of {100 * max_bad:g} %: repair them, or raise --max-unreadable"
            raise DataError(f"{name}: {what} ({first}), {limit}")
        notes.append(f"{what}, left out ({first})")
    labels: Labels | None = None
    if any(rows.cells):
        labels = labels_from_cells(rows.cells, f"{name}: {label!r}")
        notes.append(f"labels from {label!r}: {sum(map(bool, rows.cells)):,} of {len(rows.cells):,} items")
    elif label is not None and label_column != DEFAULT_LABEL_COLUMN:
        raise DataError(f"{name}: no sample has a label in {label!r}: name an extension or a field of .json")
    else:
        notes.append("no labels")
    names = [sample.key for sample in rows.samples]
    repeated = len(names) - len(set(names))
    if repeated:
        notes.append(f"{repeated:,} keys occur more than once")
    ids = np.arange(len(names), dtype=np.int64)
    members = np.array(rows.members, dtype=np.int64)
    sizes = np.array([archives[a].sizes[m] for a, m in rows.members], dtype=np.int64)
    texts = {"name": as_texts(names)}
    texts |= {column: as_texts(row[c] for row in rows.kept) for c, column in enumerate(keep)}
    contents = "".join(one.content(members[members[:, 0] == i, 1]) for i, one in enumerate(archives))
    return ArchiveImages(
        name=name,
        ids=ids,
        labels=labels,
        fingerprint=list_fingerprint("webdataset", names, sizes, labels, ids, content=contents),
        notes=notes,
        bad=BadItems(len(names), max_bad),
        texts=texts,
        paths=[f"{archives[a].path}!{archives[a].names[m]}" for a, m in rows.members],
        archives=archives,
        members=members,
    )
