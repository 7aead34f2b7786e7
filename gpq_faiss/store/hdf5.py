"""HDF5: untrusted files are read with limits, new ones are written atomically, also where the disk is full. A column of texts is their
concatenated UTF-8 bytes, and the end offset of each.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import atomic_path, write_at
from ..inputs import check_memory, reading

PACKED = {"compression": "gzip", "compression_opts": 1, "shuffle": True, "fletcher32": True}
"""Options of compressed datasets."""
MAX_RATIO = 1100
"""Maximum expansion of stored bytes: that of gzip is 1,032."""
_CACHE = 8 << 20  # HDF5's chunk cache, so that chunks are not decompressed twice
_MAX_CHUNK = 64 << 20  # larger chunks could request any amount of memory
_FILTERS = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_LZF}
"""Built-in filters; others would make HDF5 load a plug-in library."""
_ROWS = 256  # that are read at once, if some of them are wanted
_LEAST_STORED = 1 << 20  # arrays up to this size may be unwritten


@contextlib.contextmanager
def open_hdf5(path: Path, what: str = "an HDF5 file with arrays") -> Iterator[Any]:
    """Context of a file opened for reading; ``what`` is the expected content, for errors. Raises DataError, also for its body."""
    with reading(path, what), h5py.File(path, "r", rdcc_nbytes=_CACHE, locking=False) as h5:
        yield h5


def dataset(h5: Any, name: str, kind: Any = None, shape: tuple[int, ...] | None = None) -> Any:
    """The dataset ``name`` of an open file, of this type and shape if given.

    Raises:
        DataError: missing, in another file, of unknown filters, larger than what is stored, or of another type or shape.
    """
    link = h5.get(name, getlink=True)
    if link is None:
        raise DataError(f"there is no dataset {name!r}")
    found = h5[name] if isinstance(link, h5py.HardLink) else None
    if not isinstance(found, h5py.Dataset) or found.external or found.is_virtual:
        raise DataError(f"{name!r} is not a dataset of this file (links are not followed)")
    plist = found.id.get_create_plist()
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    if not _FILTERS.issuperset(filters) or len(set(filters)) < len(filters):
        raise DataError(f"{name!r} is compressed by an unknown filter, or more than once: use gzip or lzf")
    if found.chunks and math.prod(found.chunks) * found.dtype.itemsize > _MAX_CHUNK:
        raise DataError(f"{name!r} has chunks of more than {_MAX_CHUNK >> 20} MiB: rewrite it")
    # HDF5 reads unstored data as zeros: a few bytes could claim any number of rows.
    stored, claimed = found.id.get_storage_size(), found.size * found.dtype.itemsize
    ratio = MAX_RATIO if filters else 1
    if stored > h5.id.get_filesize() or claimed > max(ratio * stored, _LEAST_STORED):
        raise DataError(
            f"{name!r} claims {list(found.shape)}, {claimed:,} bytes, of which {stored:,} are stored: damaged or foreign"
        )
    if (kind is not None and found.dtype != kind) or shape not in (None, found.shape):
        wanted = f"{np.dtype(kind)} {list(shape or [])}"
        raise DataError(f"{name!r} is {found.dtype} {list(found.shape)}, not {wanted}: damaged or foreign")
    return found


class Hdf5Array:
    """The dataset ``name`` of numbers in an HDF5 file, read by rows with at most a few chunks in memory.

    The file is opened for each read, so the object can be sent to other processes.
    """

    def __init__(self, path: str | Path, name: str) -> None:
        self.path, self.name = Path(path), name
        with open_hdf5(self.path) as h5:
            found = dataset(h5, name)
            if found.dtype.kind not in "iufb" or found.ndim == 0:
                raise DataError(f"{name!r} is {found.dtype} {list(found.shape)}, not an array of numbers")
            self.shape: tuple[int, ...] = tuple(int(n) for n in found.shape)
            self.dtype: np.dtype[Any] = np.dtype(found.dtype)

    def __getitem__(self, rows: slice | NDArray[Any]) -> NDArray[Any]:
        """The rows of a slice with step 1, or at an array of positions (any order, repeats allowed)."""
        with open_hdf5(self.path) as h5:
            found = dataset(h5, self.name)
            if tuple(found.shape) != self.shape:
                raise DataError(f"{self.path} changed while it was read: start again")
            if isinstance(rows, slice):
                return np.asarray(found[rows])
            wanted, inverse = np.unique(np.arange(self.shape[0])[rows], return_inverse=True)
            # HDF5 is slow for scattered rows, and decompresses whole chunks for any of their rows.
            step = max(_ROWS, found.chunks[0] if found.chunks else 0)
            parts = np.split(wanted, np.flatnonzero(np.diff(wanted // step)) + 1)
            read = [found[part[0] : part[-1] + 1][part - part[0]] for part in parts if len(part)]
            return np.concatenate([np.empty((0, *self.shape[1:]), self.dtype), *read])[inverse]


def read_hdf5_array(path: str | Path, names: Sequence[str]) -> Hdf5Array | None:
    """The first of ``names`` that is in ``path``, if any. Raises DataError: not a readable HDF5 file, or not numbers."""
    with open_hdf5(Path(path)) as h5:
        name = next((name for name in names if h5.get(name, getlink=True) is not None), None)
    return None if name is None else Hdf5Array(path, name)


def read_arrays(
    path: str | Path, what: str, names: Collection[str] | None = None
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read a file of :func:`write_arrays`: arrays (of these ``names``, or all), and attributes as stored (JSON as text).

    Raises:
        DataError: missing, empty, not ``what``, truncated or damaged.
    """
    with open_hdf5(Path(path), what) as h5:
        arrays = {}
        for name in h5 if names is None else h5.keys() & set(names):
            found = dataset(h5, name)
            check_memory(found.size * found.dtype.itemsize, f"{path}: {name!r}")
            arrays[str(name)] = np.asarray(found[()])
        return arrays, {n: v.item() if isinstance(v, np.generic) else v for n, v in h5.attrs.items()}


def write_arrays(path: str | Path, arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> Path:
    """Write ``arrays`` as datasets and ``attributes`` (as JSON if not text or numbers) atomically. Raises DataError: it cannot."""
    with new_hdf5(path := Path(path)) as (h5, _):
        for name, array in arrays.items():
            packed = {"chunks": True, **PACKED} if array.ndim and array.nbytes > 64 else {}
            h5.create_dataset(name, data=array, **packed)
        for name, value in attributes.items():
            h5.attrs[name] = value if isinstance(value, (str, int, float)) else json.dumps(value)
    return path


@contextlib.contextmanager
def new_hdf5(path: Path, done_with: Path | None = None) -> Iterator[tuple[Any, Sink]]:
    """Context with a new HDF5 file, which becomes ``path`` at its end, and its :class:`Sink`; see :func:`..files.atomic_paths`."""
    with atomic_path(path, done_with=done_with) as temporary:
        sink = Sink(temporary)
        try:
            with h5py.File(sink, "w", libver=("v110", "v110"), rdcc_nbytes=_CACHE) as h5:
                yield h5, sink
            sink.check()
        except Exception:
            sink.check()  # HDF5's own error follows from the first one
            raise
        finally:
            sink.close()


class Sink:
    """A file for h5py's file-object driver that never fails *inside* HDF5.

    After a failed write HDF5 crashes when it closes the file (measured: segmentation fault with HDF5 2.0 on a full disk). So the first
    error, Ctrl-C too, is kept, later writes are dropped, HDF5 closes normally, and the caller raises the error by :meth:`check`.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self.seek, self.tell, self.close = self._file.seek, self._file.tell, self._file.close
        self.read = self._file.read  # by which h5py knows a file
        self.error: BaseException | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def _unless_failed(self, call: Callable[..., object], *arguments: Any) -> None:
        if self.error is None:
            try:
                call(*arguments)
            except BaseException as error:
                self.error = error

    def write(self, data: Any) -> int:
        self._unless_failed(write_at, self._file, self.tell(), data)
        return memoryview(data).nbytes

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = bytes(len(view))  # what was dropped
        self._unless_failed(self._file.readinto, view)
        return len(view)

    def truncate(self, size: int) -> int:
        self._unless_failed(self._file.truncate, size)
        return size

    def flush(self) -> None:
        """No-op: nothing is buffered; :func:`~gpq_faiss.files.atomic_path` syncs the file."""


# Texts ------------------------------------------------------------------------------------------------------------------

MOST_BYTES = 1 << 16
"""Maximum UTF-8 bytes of a text."""
_CHUNK = 1 << 16  # bytes decompressed to read one text
_PREFIX = "text."

Texts = NDArray[Any]
"""StringDType [N]."""


def as_texts(values: Iterable[str]) -> Texts:
    """A column of texts, StringDType [N]. Invalid UTF-8 (in file names) is escaped by backslashes."""
    plain = [v.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for v in values]
    return np.array(plain, dtype=np.dtypes.StringDType())


def write_texts(h5: Any, name: str, blocks: Iterable[Texts]) -> None:
    """Append ``blocks`` as the column ``name`` of an open, new file. Raises DataError: a text of more than :data:`MOST_BYTES` bytes."""
    growing = {"maxshape": (None,), **PACKED}
    options = growing | {"shuffle": False, "chunks": (_CHUNK,)}
    data = h5.create_dataset(f"{_PREFIX}{name}", (0,), "u1", **options)
    ends = h5.create_dataset(f"{_PREFIX}{name}.ends", (0,), "<i8", chunks=(_CHUNK // 8,), **growing)
    size = count = 0
    for block in blocks:
        encoded = [text.encode() for text in block.tolist()]
        longest = max(encoded, key=len, default=b"")
        if len(longest) > MOST_BYTES:
            raise DataError(
                f"{name} {longest[:40]!r}... has {len(longest):,} bytes: shorten it to {MOST_BYTES:,}"
            )
        joined = np.frombuffer(b"".join(encoded), np.uint8)
        data.resize((size + len(joined),))
        ends.resize((count + len(encoded),))
        data[size:] = joined
        ends[count:] = size + np.cumsum(list(map(len, encoded)))
        size, count = size + len(joined), count + len(encoded)


class TextColumn:
    """A column of :func:`write_texts`, read by rows. Raises DataError: not ``n`` texts, or damaged."""

    def __init__(self, h5: Any, name: str, n: int) -> None:
        self._name, self._data = name, dataset(h5, f"{_PREFIX}{name}", np.uint8)
        self._ends = dataset(h5, f"{_PREFIX}{name}.ends", np.int64, (n,))

    @classmethod
    def all_of(cls, h5: Any, n: int) -> dict[str, TextColumn]:
        """The text columns of an open file with ``n`` rows by name, in alphabetical order."""
        found = sorted(key.removeprefix(_PREFIX) for key in h5 if key.startswith(_PREFIX))
        return {name: cls(h5, name, n) for name in found if not name.endswith(".ends")}

    def span(self, start: int, stop: int) -> Texts:
        """Texts of rows ``start:stop``."""
        if start == stop:
            return as_texts([])
        ends = np.asarray(self._ends[max(0, start - 1) : stop])
        ends = ends if start else np.concatenate([[0], ends])
        lengths = np.diff(ends)
        if ends[0] < 0 or ends[-1] > self._data.shape[0] or lengths.min() < 0 or lengths.max() > MOST_BYTES:
            raise DataError(f"{self._name!r} has texts of impossible lengths: damaged")
        joined = np.asarray(self._data[int(ends[0]) : int(ends[-1])]).tobytes()
        try:
            return as_texts(joined[a:b].decode() for a, b in pairwise((ends - ends[0]).tolist()))
        except UnicodeDecodeError:
            raise DataError(f"{self._name!r} is not valid UTF-8: damaged") from None
