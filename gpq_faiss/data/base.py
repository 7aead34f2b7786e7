"""Data sets: items with ids and optional labels, names and other texts, read in blocks by row; images or vectors."""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import fingerprint
from ..store import Texts, as_texts
from .arrays import HeldArray, Matrix
from .images import MIN_SIDE, BrokenImageError, decode_image, image_size, resize_square, shown
from .labels import Labels, Rows, row_numbers, rows_that
from .tables import About

_SAMPLES, _SAMPLE = 4, 4096  # blocks of an image file in a fingerprint, and their bytes
_PROBED = 64  # headers read to determine a common square size
_CHUNK = 8  # images per thread and step: small enough to balance a batch


class BadItems:
    """Counts unreadable images among ``total``, each once, and raises if more than the fraction ``limit`` are bad. Thread-safe."""

    def __init__(self, total: int, limit: float = 0.01) -> None:
        self.total, self.limit = total, limit
        self._why: dict[int, str] = {}
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Number of bad images so far."""
        return len(self._why)

    @property
    def positions(self) -> list[int]:
        """Their rows, sorted."""
        return sorted(self._why)

    def add(self, position: int, name: str, why: str) -> None:
        """Record a bad image. Raises DataError: more than ``limit`` of the images are bad; names the first few."""
        with self._lock:
            if position in self._why:
                return
            self._why[position] = f"{name}: {why}"
            over = self.count > self.limit * self.total
        if over:
            what = f"that is above the limit of {100 * self.limit:g} %: repair them, or raise --read max_bad"
            raise DataError(f"{name}: {why}" if self.total == 1 else f"{self.summary()}; {what}")

    def summary(self) -> str:
        """``"3 of 1,000 images cannot be read (a.jpg: not found; ...)"``; empty when none is bad."""
        first = [*itertools.islice(self._why.values(), 5), *["..."] * (self.count > 5)]
        return f"{self.count:,} of {self.total:,} images cannot be read ({'; '.join(first)})" if first else ""


@dataclass(kw_only=True)
class Dataset(ABC):
    """N items of a source.

    Attributes:
        name: as given by the user, for messages and reports.
        ids: int64 [N], returned by searches.
        fingerprint: hash over content (of large files, over samples of it), labels and ids.
        labels: None if the source has none.
        notes: remarks on loading, for the user.
        kind: ``images`` or ``features``.
        texts: text columns, StringDType [N]; ``name`` is the path or key of an item.
    """

    name: str
    ids: NDArray[np.int64] = field(repr=False)
    fingerprint: str
    labels: Labels | None = field(default=None, repr=False)
    notes: list[str] = field(default_factory=list)
    kind: Literal["images", "features"]
    texts: dict[str, Texts] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.int64:
            raise DataError(f"{self.name}: ids are {self.ids.dtype} {list(self.ids.shape)}, not int64 [N]")
        for what, column in (("labels", self.labels), *self.texts.items()):
            if column is not None and len(column) != len(self.ids):
                raise DataError(f"{self.name} has {len(self.ids):,} items but {len(column):,} {what}")

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def read(self, rows: Rows) -> Any:
        """The items at ``rows`` (a slice or an array of row numbers), in that order."""

    def having(self, what: str, *content: str | bytes, **changes: Any) -> Self:
        """A copy with ``changes``; its fingerprint covers ``what`` they are and their ``content``."""
        return replace(self, fingerprint=fingerprint(self.fingerprint, what, *content), **changes)

    def texts_of_ids(self) -> dict[str, Callable[[NDArray[np.int64]], Texts]]:
        """Column name -> function from ids [n] to texts; of repeated ids the first item counts."""
        order = np.argsort(self.ids, kind="stable")
        known = self.ids[order]
        return {
            name: lambda ids, column=column: column[order[np.searchsorted(known, ids)]]  # type: ignore[misc]
            for name, column in self.texts.items()
        }

    def require_labels(self) -> Labels:
        """The labels."""
        if self.labels is None or not self.labels.has().any():
            raise DataError(f"{self.name}: no item has a label: give labels with --labels FILE")
        return self.labels


def repeated_ids(ids: NDArray[np.int64]) -> list[str]:
    """A note if some ids occur more than once."""
    repeated = len(ids) - len(np.unique(ids))
    return [f"{repeated:,} of the {len(ids):,} ids are repeated"] if repeated else []


# Vectors ----------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class FeatureDataset(Dataset):
    """Feature vectors of ``width`` numbers, streamed where it can be."""

    matrix: Matrix = field(repr=False)
    kind: Literal["images", "features"] = "features"

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.matrix.shape[1]

    def read(self, rows: Rows) -> NDArray[np.float32]:
        """float32 [n, width], C-contiguous, every row finite and not all zero."""
        at = row_numbers(rows, len(self))
        run = len(at) and (np.diff(at) == 1).all()
        # float64 beyond the range of float32 becomes infinity.
        with np.errstate(over="ignore"):
            block = self.matrix.read(slice(int(at[0]), int(at[-1]) + 1) if run else at)
            x = np.ascontiguousarray(block, dtype=np.float32)
        # 0 for a zero row, not finite for NaN and infinity; float64 avoids overflow and underflow.
        square = np.einsum("nd,nd->n", x, x, dtype=np.float64)
        infinite, zero = at[~np.isfinite(square)], at[square == 0.0]
        for bad, verb, what in (
            (infinite, "hold", "NaN or infinity"),
            (zero, "are", "all zero (no direction)"),
        ):
            if len(bad):
                where = f"{self.name}: {rows_that(bad, verb)}"
                raise DataError(f"{where} {what}: repair such rows or leave them out")
        return x


def features(name: str, matrix: Matrix, about: About, content: str = "") -> FeatureDataset:
    """A data set of vectors; ``content`` is their hash. Raises DataError: not a non-empty matrix of numbers."""
    shape, dtype = tuple(matrix.shape), matrix.dtype
    if len(shape) != 2 or 0 in shape or dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise DataError(f"{name} is {dtype} {list(shape)}: numbers [N, width] are needed, one row per item")
    ids = about.ids_of(shape[0], name)
    bare = 0 if about.labels is None else int((~about.labels.has()).sum())
    said = f"{bare:,} of {len(ids):,} items are unlabelled" if bare else ""
    said = "no labels" if about.labels is None else said
    notes = dict.fromkeys([*about.notes, *[said] * bool(said)])
    return FeatureDataset(
        name=name,
        ids=ids,
        fingerprint=fingerprint("features", content, str(shape), about.mark(), ids.tobytes()),
        labels=about.labels,
        texts=about.texts,
        notes=[*notes, *repeated_ids(ids)],
        matrix=matrix,
    )


def held_features(name: str, array: NDArray[Any], about: About) -> FeatureDataset:
    """:func:`features` of the rows of an array in memory."""
    return features(name, HeldArray(array), about, digest(array))


def digest(array: NDArray[Any]) -> str:
    """Hash of the numbers of an array."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


# Images -----------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class ImageDataset(Dataset):
    """Images as uint8 RGB arrays, decoded at each read.

    Attributes:
        paths: N paths; with ``fetch``, their names in messages.
        fetch: row -> encoded bytes, a path, or pixels uint8 [H, W, 3], of images that are no files of their own (members of archives,
            in columns). It raises BrokenImageError for those that cannot be had.
        mirrors: whether mirrored images keep their meaning (not for digits).
        native_size: side in pixels if all images are squares of one size (32 for CIFAR-10), else None.
        bad: counter of unreadable images, with its limit.
    """

    paths: Sequence[str] = field(default=(), repr=False)
    fetch: Callable[[int], bytes | str | NDArray[np.uint8]] | None = field(default=None, repr=False)
    native_size: int | None = None
    mirrors: bool = True
    bad: BadItems = field(default_factory=lambda: BadItems(0))
    kind: Literal["images", "features"] = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bad.total == 0:
            self.bad = BadItems(len(self), self.bad.limit)
        if self.native_size is None:
            self.native_size = self._common_size()

    def _source(self, i: int) -> bytes | str | NDArray[np.uint8]:
        return self.paths[i] if self.fetch is None else self.fetch(i)

    def read(self, rows: Rows) -> list[NDArray[np.uint8] | None]:
        """Images [H, W, 3]; None for broken or missing ones, which :attr:`bad` counts."""
        out: list[NDArray[np.uint8] | None] = []
        for i in row_numbers(rows, len(self)).tolist():
            try:
                source = self._source(i)
                out.append(source if isinstance(source, np.ndarray) else decode_image(source))
            except BrokenImageError as error:
                self.bad.add(i, shown(self.paths[i]), error.why)
                out.append(None)
        return out

    def image_path(self, i: int) -> str | None:
        """Path of image ``i``, if it is a file."""
        return self.paths[i] if self.fetch is None and self.paths else None

    def _common_size(self) -> int | None:
        """Side of all images if 64 evenly spaced ones are squares of one size, else None: only a default for the input size of a
        network."""
        sides: set[tuple[int, ...]] = set()
        for i in np.unique(np.linspace(0, len(self) - 1, num=min(_PROBED, len(self))).astype(np.int64)):
            try:
                source = self._source(int(i))
                sides.add(source.shape[1::-1] if isinstance(source, np.ndarray) else image_size(source))
            except Exception:  # noqa: S112  (whether it is broken is for read() to find and count)
                continue
        width, height = sides.pop() if len(sides) == 1 else (0, 0)
        return width if width == height and width >= MIN_SIDE else None


@dataclass(kw_only=True)
class ArrayImages(ImageDataset):
    """Small images of one size held in memory: uint8 [N, H, W, 3], or [N, H, W] for grey (converted to RGB when read)."""

    images: NDArray[np.uint8] = field(repr=False)

    def __post_init__(self) -> None:
        shape = self.images.shape
        if self.images.dtype != np.uint8 or len(shape) not in {3, 4} or (len(shape) == 4 and shape[3] != 3):
            what = "images are uint8 [N, H, W(, 3)], vectors are numbers [N, width]"
            raise DataError(f"{self.name} is {self.images.dtype} {list(shape)}: {what}")
        if shape[0] != len(self.ids):
            raise DataError(f"{self.name} has {shape[0]:,} images but {len(self.ids):,} ids")
        super().__post_init__()

    def _source(self, i: int) -> NDArray[np.uint8]:
        return np.moveaxis(self.planes(np.array([i]))[0], 0, 2)

    def planes(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The images at ``rows`` as network input: uint8 [n, 3, H, W], C-contiguous."""
        block = self.images[rows]
        if block.ndim == 3:
            return np.repeat(block[:, None], 3, axis=1)
        return np.ascontiguousarray(block.transpose(0, 3, 1, 2))


def load_batch(
    dataset: ImageDataset, rows: NDArray[Any], size: int, pool: ThreadPoolExecutor | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Read, decode and resize the images at ``rows``; the result does not depend on the threads (Pillow releases the interpreter lock).

    Returns:
        (uint8 [n_ok, 3, size, size], ok bool [n]), without broken images, which the data set counts.
    """
    if isinstance(dataset, ArrayImages) and dataset.images.shape[1:3] == (size, size):
        return dataset.planes(rows), np.ones(len(rows), dtype=bool)
    out = np.empty((len(rows), 3, max(size, 0), max(size, 0)), dtype=np.uint8)
    ok = np.zeros(len(rows), dtype=bool)

    def work(start: int) -> None:
        for j, image in enumerate(dataset.read(rows[start : start + _CHUNK]), start):
            if image is not None:
                out[j] = resize_square(image, size).transpose(2, 0, 1)
                ok[j] = True

    for _ in (map if pool is None else pool.map)(work, range(0, len(rows), _CHUNK)):
        pass
    return (out if ok.all() else out[ok]), ok


def sampled_content(pieces: Iterable[tuple[str, int, int]]) -> str:
    """Hash over N files, or members of archives (path, offset, size): all of it up to 16 KiB, else four evenly spaced blocks of 4 KiB.

    All bytes would be 20 GB for NUS-WIDE. Unreadable files (size -1) are left out: reading reports them."""
    digest = hashlib.sha256()
    readable = (piece for piece in pieces if piece[2] >= 0)
    for path, inside in itertools.groupby(readable, key=lambda piece: piece[0]):
        try:
            with open(path, "rb", buffering=0) as file:
                for _, start, size in inside:
                    whole = size <= _SAMPLES * _SAMPLE
                    for i in range(1 if whole else _SAMPLES):
                        file.seek(start + i * (size - _SAMPLE) // (_SAMPLES - 1) if i else start)
                        digest.update(file.read(size if whole else _SAMPLE))
        except OSError:
            continue
    return digest.hexdigest()


def images(  # noqa: PLR0913
    name: str,
    kind: str,
    names: Sequence[str],
    paths: Sequence[str],
    about: About,
    max_bad: float,
    *,
    sizes: Sequence[int] | None = None,
    content: str = "",
    fetch: Callable[[int], bytes | str | NDArray[np.uint8]] | None = None,
) -> ImageDataset:
    """A data set of N images, of files or with ``fetch``. A column ``name`` of ``about`` replaces ``names`` in results. Images of size -1
    are missing.

    Its fingerprint covers ``kind`` (the source), names, sizes, labels, ids and ``content`` (a hash as of :func:`sampled_content`; both
    default to those of the files), not times: a copy elsewhere has the same."""
    ids = about.ids_of(len(names), name)
    if fetch is None:
        paths = [str(Path(path)) for path in paths]
        sizes = [file_size(path) for path in paths]
        content = sampled_content((path, 0, size) for path, size in zip(paths, sizes, strict=True))
    lengths = np.array([0] * len(names) if sizes is None else sizes, dtype="<i8")
    joined = b"\0".join(os.fsencode(one) for one in names)
    made = ImageDataset(
        name=name,
        ids=ids,
        labels=about.labels,
        fingerprint=fingerprint(kind, joined, lengths.tobytes(), about.mark(), ids.tobytes(), content),
        notes=about.notes + repeated_ids(ids),
        texts={"name": as_texts(names)} | about.texts,
        paths=paths,
        bad=BadItems(len(names), max_bad),
        fetch=fetch,
    )
    try:
        for i in np.flatnonzero(lengths < 0).tolist():
            made.bad.add(i, shown(paths[i]), "not found" if fetch is None else "has no image")
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    return made


def file_size(path: str) -> int:
    """Bytes of a regular file, -1 for anything else: a pipe or a device would block or never end."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a NUL byte in the name
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1
