"""Data sets: items with ids, optional labels, names and other texts, read by rows."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import fingerprint
from ..inputs import reading
from ..store.hdf5 import as_texts
from .arrays import Matrix
from .images import MIN_SIDE, BrokenImageError, decode_image, open_image, shown
from .labels import Labels, Rows, errors_of, row_numbers, rows_that
from .paths import blocks
from .tables import Annotations


@dataclass(kw_only=True)
class Dataset(Annotations, ABC):
    """N items of a source.

    Attributes:
        name: as given by the user, for messages and reports.
        fingerprint: hash over content (of large files, over samples of it), labels and ids.
        kind: ``images`` or ``features``.
        max_bad: fraction of unreadable images that is no error.
        bad: row of an unreadable image -> its name, and why. Thread-safe.
        content: hash of the files alone, while nothing but them is in the fingerprint.
    """

    name: str
    ids: NDArray[np.int64] = field(default=None, repr=False)  # type: ignore[arg-type]  # never None
    fingerprint: str
    kind: Literal["images", "features"]
    max_bad: float = 0.01
    bad: dict[int, str] = field(default_factory=dict, repr=False)
    content: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.ids = np.arange(len(self), dtype=np.int64) if self.ids is None else self.ids
        for subject, column in (("ids", self.ids), ("labels", self.labels), *self.texts.items()):
            if column is not None and len(column) != len(self):
                raise DataError(
                    f"{len(column):,} {subject}, {self.name} has {len(self):,} items"
                    f": one each is needed"
                )

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, rows: Rows) -> Any:
        """Return the items at ``rows`` (a slice or an array of row numbers), in that order."""

    def having(self, subject: str, *content: str | bytes, **changes: Any) -> Self:
        """Return a copy with ``changes``; the fingerprint covers ``subject`` and ``content``."""
        mark = fingerprint(self.fingerprint, subject, *content)
        return replace(self, fingerprint=mark, content=None, **changes)

    @functools.cached_property
    def _order(self) -> NDArray[np.int64]:
        return np.argsort(self.ids, kind="stable")

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each id, -1 for unknown ones: int64 [n]; of repeated ids the first."""
        places = np.searchsorted(self.ids, ids, sorter=self._order)
        rows = self._order[np.minimum(places, len(self) - 1)]
        return np.where(self.ids[rows] == ids, rows, -1)

    def require_labels(self) -> Labels:
        """Return the labels. Raises DataError: no item has one."""
        if self.labels is None or not self.labels.has().any():
            raise DataError(f"{self.name}: no item has a label: give labels with --labels FILE")
        return self.labels

    def add_bad(self, i: int, name: str, reason: str) -> None:
        """Record a bad image, once. Raises DataError: there are more than :attr:`max_bad`
        allows.
        """
        self.bad.setdefault(i, f"{name}: {reason}")
        if above := self.above_limit(len(self.bad)):
            raise DataError(
                f"{name}: {reason}" if len(self) == 1 else f"{self.bad_summary()}; {above}"
            )

    def above_limit(self, count: int) -> str:
        """Return the message on so many bad images; empty within the limit."""
        limit = f"{100 * self.max_bad:g} %"
        message = f"that is above the limit of {limit}: repair them, or raise --read max_bad"
        return message if count > self.max_bad * len(self) else ""

    def bad_summary(self) -> str:
        """Return ``"3 of 1,000 images cannot be read (a.jpg: not found; ...)"``, or nothing."""
        first = [*list(self.bad.values())[:5], *["..."] * (len(self.bad) > 5)]
        return (
            f"{len(self.bad):,} of {len(self):,} images cannot be read ({'; '.join(first)})"
            if first
            else ""
        )


# Vectors ------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class FeatureDataset(Dataset):
    """Feature vectors of ``width`` numbers, streamed where it can be."""

    matrix: Matrix = field(repr=False)
    kind: Literal["images", "features"] = "features"

    def with_files(self, **changes: Any) -> Self:
        """Return a copy with labels or ids of files in the order of the rows.

        The fingerprint is that of files that hold them themselves.
        """
        dataset = replace(self, **changes)
        shape, marks = str(tuple(self.matrix.shape)), (dataset.mark(), dataset.ids.tobytes())
        dataset.fingerprint = fingerprint("features", str(self.content), shape, *marks)
        return dataset

    def __len__(self) -> int:
        return self.matrix.shape[0]

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.matrix.shape[1]

    def read(self, rows: Rows) -> NDArray[np.float32]:
        """Return float32 [n, width], C-contiguous. Raises DataError: NaN, infinity or a zero
        row.
        """
        numbers = row_numbers(rows, len(self))
        run = len(numbers) and (np.diff(numbers) == 1).all()
        with np.errstate(over="ignore"):  # float64 beyond the range of float32 becomes infinity
            block = (
                self.matrix[int(numbers[0]) : int(numbers[-1]) + 1] if run else self.matrix[numbers]
            )
            x = np.ascontiguousarray(block, dtype=np.float32)
        # 0 for a zero row, not finite for NaN and infinity; float64 avoids overflow and underflow.
        square = np.einsum("nd,nd->n", x, x, dtype=np.float64)
        for bad, verb, subject in (
            (numbers[~np.isfinite(square)], "hold", "NaN or infinity"),
            (numbers[square == 0.0], "are", "all zero (no direction)"),
        ):
            if len(bad):
                raise DataError(
                    f"{self.name}: {rows_that(bad, verb)} {subject}"
                    f": repair such rows or leave them out"
                )
        return x


def features(
    name: str, matrix: Matrix, annotations: Annotations, content: str | None = None
) -> FeatureDataset:
    """Make a data set of vectors; ``content`` is the hash of a file.

    Raises DataError: not a non-empty matrix of numbers.
    """
    shape, dtype = tuple(matrix.shape), matrix.dtype
    if len(shape) != 2 or 0 in shape or dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise DataError(
            f"{name} is {dtype} {list(shape)}: numbers [N, width] are needed, one row per item"
        )
    content_hash = digest(matrix[:]) if content is None else content
    dataset = FeatureDataset(
        **vars(annotations), name=name, fingerprint="", matrix=matrix, content=content_hash
    )
    dataset = dataset.with_files()
    dataset.content = content
    return dataset


def digest(array: Any) -> str:
    """Return a hash of the numbers of an array."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


# Images -------------------------------------------------------------------------------------------

Pixels = NDArray[np.uint8]


@dataclass(kw_only=True)
class ImageDataset(Dataset):
    """Images as uint8 RGB arrays: small ones in memory, or decoded at each read.

    Attributes:
        paths: N paths; with ``fetch``, their names in messages.
        fetch: row -> encoded bytes, a path, or pixels uint8 [H, W, 3], of images that are no files
            of their own. It raises BrokenImageError for those that cannot be had.
        pixels: in place of both, images in memory: uint8 [N, H, W, 3], or [N, H, W] for grey.
        mirrors: whether mirrored images keep their meaning (not for digits).
    """

    paths: Sequence[str] = field(default=(), repr=False)
    fetch: Callable[[int], bytes | str | Pixels] | None = field(default=None, repr=False)
    pixels: Pixels | None = field(default=None, repr=False)
    mirrors: bool = True
    kind: Literal["images", "features"] = "images"

    def __len__(self) -> int:
        return len(self.paths if self.pixels is None else self.pixels)

    @functools.cached_property
    def native_size(self) -> int | None:
        """Side in pixels if 64 evenly spaced images are squares of one size, else None."""
        sides: set[tuple[int, ...]] = set()
        for i in np.unique(np.linspace(0, len(self) - 1, num=min(64, len(self))).astype(np.int64)):
            # Whether an image is broken is for read() to find and count.
            with contextlib.suppress(Exception), open_image(self._source(int(i))) as image:
                sides.add(image.size)
        width, height = sides.pop() if len(sides) == 1 else (0, 1)
        return width if width == height and width >= MIN_SIDE else None

    def _source(self, i: int) -> bytes | str | Pixels:
        if self.pixels is not None:
            image = self.pixels[i]
            return image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2)
        return self.paths[i] if self.fetch is None else self.fetch(i)

    def read(self, rows: Rows) -> list[Pixels | None]:
        """Return images [H, W, 3]; None for broken or missing ones, which :attr:`bad` counts."""
        out: list[Pixels | None] = []
        for i in row_numbers(rows, len(self)).tolist():
            try:
                source = self._source(i)
                out.append(source if isinstance(source, np.ndarray) else decode_image(source))
            except BrokenImageError as error:
                self.add_bad(i, shown(self.paths[i]), error.why)
                out.append(None)
        return out

    def image_path(self, i: int) -> str | None:
        """Return the path of image ``i``, if it is a file."""
        return self.paths[i] if self.fetch is None and self.paths else None


Piece = tuple[str | io.BytesIO, int, int]
"""Where an image is: a file, or an archive in memory; its offset and size there; -1: missing."""


def sampled_content(pieces: Iterable[Piece]) -> str:
    """Return a hash over images: all of each up to 16 KiB, else four blocks of 4 KiB.

    Unreadable files are left out: reading reports them.
    """
    content = hashlib.sha256()
    readable = (piece for piece in pieces if piece[2] >= 0)
    for archive, group in itertools.groupby(readable, key=lambda piece: piece[0]):
        with contextlib.suppress(OSError), open_piece(archive) as file:
            for _, start, size in group:
                for block in blocks(file, start, size, 4, 4096, 16384):
                    content.update(block)
    return content.hexdigest()


def open_piece(archive: str | io.BytesIO) -> contextlib.AbstractContextManager[Any]:
    """Open the file of a :data:`Piece`."""
    return (
        open(archive, "rb", buffering=0)
        if isinstance(archive, str)
        else contextlib.nullcontext(archive)
    )


def read_piece(piece: Piece, name: str) -> bytes:
    """Return the bytes of a member of an archive. Raises DataError: missing, or the archive
    shrank.
    """
    archive, offset, size = piece
    if size < 0:
        raise BrokenImageError(name, "has no image")
    if isinstance(archive, io.BytesIO):
        return bytes(archive.getbuffer()[offset : offset + size])
    with reading(Path(archive), "the archive that was opened"), open(archive, "rb") as stream:
        stream.seek(offset)
        data = stream.read(size)
    if len(data) != size:
        raise DataError(f"{archive} is shorter than when it was opened: was it replaced?")
    return data


def images(
    name: str,
    kind: str,
    names: Sequence[str],
    paths: Sequence[str],
    annotations: Annotations,
    max_bad: float,
    pieces: Sequence[Piece] | None = None,
    fetch: Callable[[int], bytes | str | Pixels] | None = None,
) -> ImageDataset:
    """Make a data set of N images: files, ``pieces`` of archives, or what ``fetch`` returns.

    A column ``name`` of ``annotations`` replaces ``names``: with ``fetch`` only
    messages show these.
    The fingerprint covers ``kind`` (the source), names, sizes, labels, ids and contents
    (:func:`sampled_content`), not times: a copy elsewhere has the same.
    """
    archives: Sequence[Piece] = () if pieces is None else pieces
    annotations.texts = ({"name": as_texts(names)} if fetch is None else {}) | annotations.texts
    if pieces is not None:
        fetch = lambda i: read_piece(archives[i], paths[i])  # noqa: E731
    elif fetch is None:
        paths = [str(Path(path)) for path in paths]
        sizes_of = [os.path.getsize(path) if os.path.isfile(path) else -1 for path in paths]
        archives = [(path, 0, size) for path, size in zip(paths, sizes_of, strict=True)]
    groups = itertools.groupby(archives, key=lambda piece: None if pieces is None else piece[0])
    content = "".join(sampled_content(group) for _, group in groups)
    sizes = np.array([size for _, _, size in archives] or [0] * len(names), dtype="<i8")
    joined = b"\0".join(os.fsencode(text) for text in names)
    options: dict[str, Any] = {"paths": paths, "fetch": fetch, "max_bad": max_bad}
    dataset = ImageDataset(**vars(annotations), name=name, fingerprint="", **options)
    marks = dataset.mark(), dataset.ids.tobytes(), content
    dataset.fingerprint = fingerprint(kind, joined, sizes.tobytes(), *marks)
    with errors_of(name):
        for i in np.flatnonzero(sizes < 0).tolist():
            dataset.add_bad(i, shown(paths[i]), "not found" if fetch is None else "has no image")
    return dataset
