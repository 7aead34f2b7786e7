"""Text columns in HDF5: concatenated UTF-8 bytes, and the end offset of each text."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .hdf5 import PACKED, dataset

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
