"""Safe reading of untrusted HDF5 files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, one_line
from ..inputs import check_file
from .header import CACHE_BYTES

MAX_CHUNK_BYTES = 64 << 20  # larger chunks could request any amount of memory
_FILTERS = {
    h5py.h5z.FILTER_DEFLATE,
    h5py.h5z.FILTER_SHUFFLE,
    h5py.h5z.FILTER_FLETCHER32,
    h5py.h5z.FILTER_LZF,
}  # built-in filters; others would make HDF5 load a plug-in library
MAX_RATIO = 1100
"""Maximum expansion of stored bytes: that of gzip is 1,032."""
_GAP = 64  # unrequested rows read between requested ones to avoid another read
_RUN_BYTES = 16 << 20  # per read
_LEAST_STORED = 1 << 20  # arrays up to this size may be unwritten


@contextlib.contextmanager
def open_hdf5(path: Path, what: str) -> Iterator[Any]:
    """Context of a file opened for reading; ``what`` is the expected content, for errors.

    Raises:
        DataError: missing, empty, of another format, truncated or damaged, on opening or in the body.
    """
    with damaged(path):
        if check_file(path, what) == 0:
            raise DataError(f"{path} is empty (0 bytes): {what} is needed")
        if not h5py.is_hdf5(path):
            raise DataError(f"{path} is not an HDF5 file: {what} is needed")
        with h5py.File(path, "r", rdcc_nbytes=CACHE_BYTES, locking=False) as h5:
            yield h5


@contextlib.contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Context that turns the errors of h5py and numpy for damaged bytes of ``path`` into one line that names it."""
    try:
        yield
    except DataError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except PermissionError:
        raise DataError(f"{path} cannot be read: no permission") from None
    except MemoryError:
        raise DataError(f"{path} does not fit in memory: use a machine with more") from None
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError) as error:
        why = one_line(error)
        raise DataError(f"{path} is truncated or damaged ({why}): make or copy it again") from error


def dataset(h5: Any, name: str, path: Path) -> Any:
    """The dataset ``name`` of an open file, checked to be inside the file and bounded in memory.

    Raises:
        DataError: missing, not a dataset, in another file, or with unsupported chunks or filters.
    """
    link = h5.get(name, getlink=True)
    if link is None:
        raise DataError(f"{path} has no dataset {name!r}")
    if not isinstance(link, h5py.HardLink):
        raise DataError(f"{path}: {name!r} is a link, which is not followed")
    found = h5[name]
    if not isinstance(found, h5py.Dataset):
        raise DataError(f"{path}: {name!r} is not a dataset")
    if found.external or found.is_virtual:
        raise DataError(f"{path}: {name!r} keeps its data in other files, which are not read")
    plist = found.id.get_create_plist()
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    if any(code not in _FILTERS for code in filters):
        raise DataError(f"{path}: {name!r} is compressed by an unknown filter: use gzip or lzf")
    if len(set(filters)) < len(filters):
        raise DataError(f"{path}: {name!r} is compressed more than once: rewrite it")
    if found.chunks and math.prod(found.chunks) * found.dtype.itemsize > MAX_CHUNK_BYTES:
        raise DataError(f"{path}: {name!r} has chunks of more than {MAX_CHUNK_BYTES >> 20} MiB: rewrite it")
    # HDF5 reads unstored data as zeros: a few bytes could claim any number of rows.
    stored, claimed = found.id.get_storage_size(), found.size * found.dtype.itemsize
    ratio = MAX_RATIO if filters else 1
    if stored > path.stat().st_size or claimed > max(ratio * stored, _LEAST_STORED):
        raise DataError(
            f"{path}: {name!r} claims {list(found.shape)}, {claimed:,} bytes, of which {stored:,} are stored: damaged or foreign"
        )
    return found


class Hdf5Array:
    """An array of an HDF5 file, read by rows with at most a few chunks in memory.

    The file is opened for each read, so the object can be sent to other processes.

    Attributes:
        path: the file.
        name: the dataset in it.
        shape: its shape.
        dtype: its type, a number.
    """

    def __init__(self, path: str | Path, name: str) -> None:
        self.path = Path(path)
        self.name = name
        with open_hdf5(self.path, "an HDF5 file with arrays") as h5:
            found = dataset(h5, name, self.path)
            if found.dtype.kind not in "iufb" or found.ndim == 0:
                raise DataError(
                    f"{path}: {name!r} is {found.dtype} {list(found.shape)}, not an array of numbers"
                )
            self.shape: tuple[int, ...] = tuple(int(n) for n in found.shape)
            self.dtype: np.dtype[Any] = np.dtype(found.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, rows: slice | NDArray[Any]) -> NDArray[Any]:
        """The rows of a slice with step 1, or at an array of positions (any order, repeats allowed).

        Raises:
            DataError: the file is damaged.
        """
        with open_hdf5(self.path, "an HDF5 file with arrays") as h5:
            found = dataset(h5, self.name, self.path)
            if tuple(found.shape) != self.shape:
                raise DataError(f"{self.path} changed while it was read: start again")
            if isinstance(rows, slice):
                return np.asarray(found[rows])
            wanted, inverse = np.unique(np.arange(len(self))[rows], return_inverse=True)
            out = np.empty((len(wanted), *self.shape[1:]), self.dtype)
            # HDF5 is slow for scattered rows; runs over small gaps, of bounded length, are faster.
            longest = max(1, _RUN_BYTES // max(1, self.dtype.itemsize * math.prod(self.shape[1:])))
            gaps = np.diff(wanted, prepend=wanted[:1]) > _GAP
            run = np.cumsum(gaps) * (len(self) + 1) + wanted // longest
            bounds = [*np.flatnonzero(np.diff(run, prepend=-1)).tolist(), len(wanted)]
            for first, last in pairwise(bounds):
                start = int(wanted[first])
                out[first:last] = found[start : int(wanted[last - 1]) + 1][wanted[first:last] - start]
            return out[inverse]


def read_hdf5_array(path: str | Path, names: Sequence[str], *, required: bool = True) -> Hdf5Array | None:
    """The first of ``names`` in ``path``, as a lazy array.

    Raises:
        DataError: not a readable HDF5 file, or (``required``) it has none of the names.
    """
    path = Path(path)
    with open_hdf5(path, "an HDF5 file with arrays") as h5:
        name = next((name for name in names if h5.get(name, getlink=True) is not None), None)
        there = ", ".join(sorted(h5)[:10])
    if name is not None:
        return Hdf5Array(path, name)
    if required:
        wanted = ", ".join(names)
        raise DataError(f"{path} has none of the datasets {wanted} (it has: {there or 'nothing'})")
    return None
