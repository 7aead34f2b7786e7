"""Inverted lists in a file, ``index.lists``: the arrays of a search as one safetensors file.

The file is mapped when it is opened, so it opens at once in any size, and the page cache of the
operating system is its memory. It is written in two passes over the codes: they go to parts by
their first byte, and each part is sorted. Parts are in memory, or mapped files where they do not
fit.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..codes.checks import Codes, Floats, Ids, check_unique, repeated_among
from ..errors import DataError, one_line
from ..inputs import available_memory
from ..progress import Stage, stage
from . import list_kernels
from .block_scan import BLOCK
from .lists import (
    LEVELS,
    ListArrays,
    choose_prefix,
    codes_of,
    columns_of,
    count_words,
    first_words,
    names_of,
    sort_codes,
    swap_halves,
)

_KINDS = {"F32": np.float32, "I64": np.int64, "U32": np.uint32, "U8": np.uint8}
_ALIGNMENT = 64
_STEP = 1 << 20  # codes that are read or written at once
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which Python 3.11 lacks


class Source(Protocol):
    """Codes and ids that can be read several times."""

    @property
    def ntotal(self) -> int:
        """Number of items."""

    def blocks(self, size: int) -> Iterator[tuple[Codes, Ids]]:
        """Yield codes uint8 [b, code_size] and ids int64 [b], at most ``size`` at a time."""


class _Parts:
    """Codes and ids in 256 parts by the first byte of a code, each in the order of lists.

    Attributes:
        columns, ids: uint8 [n, T] and int64 [n], parts one after the other.
        ends: int64 [257], where each part begins, and n.
        rows: the number of distinct codes.
        counts: see :func:`.lists.count_words`.
    """

    def __init__(
        self, sources: Sequence[Source], shape: tuple[int, int], folder: Path, memory: int
    ) -> None:
        self.M, self.K = shape
        n, self.rows = sum(source.ntotal for source in sources), 0
        if not n:
            raise DataError("no codes: an index needs at least one item")
        T = self.M if self.K > 16 else (self.M + 1) // 2
        if n * (3 * T + 56) <= memory:  # columns, ids, sorted copies of both, and keys
            self.columns, self.ids = np.empty((n, T), np.uint8), np.empty(n, np.int64)
        else:
            self.columns = np.memmap(folder / "columns", np.uint8, "w+", shape=(n, T))
            self.ids = np.memmap(folder / "ids", np.int64, "w+", shape=(n,))
        self.counts = np.zeros(len(count_words(self.columns[:0], *shape)), np.int64)
        sizes = np.zeros(256, np.int64)
        with stage("counting codes", n) as progress:
            for columns, _ in self._blocks(sources, progress):
                self.counts += count_words(columns, *shape)
                sizes += np.bincount(swap_halves(columns[:, 0]), minlength=256)
        self.ends = np.append(0, np.cumsum(sizes))
        following = self.ends.copy()
        with stage("distributing codes", n) as progress:
            for columns, ids in self._blocks(sources, progress):
                keys = swap_halves(columns[:, 0])
                order = np.argsort(keys, kind="stable")
                keys = keys.take(order)
                cuts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
                for start, stop in itertools.pairwise([*cuts.tolist(), len(keys)]):
                    part, rows = keys[start], order[start:stop]
                    target = slice(following[part], following[part] + len(rows))
                    self.columns[target], self.ids[target] = columns[rows], ids[rows]
                    following[part] += len(rows)
        self._check_ids(memory)

    def _blocks(self, sources: Sequence[Source], progress: Stage) -> Iterator[tuple[Codes, Ids]]:
        for source in sources:
            for codes, ids in source.blocks(_STEP):
                yield columns_of(codes, self.M, self.K), ids
                progress.advance(len(ids))

    def _check_ids(self, memory: int) -> None:
        def blocks() -> Iterator[Ids]:
            for start in range(0, len(self.ids), _STEP):
                yield np.asarray(self.ids[start : start + _STEP])

        for ids in blocks():
            check_unique(ids, "ids")
        repeated = repeated_among(blocks, len(self.ids), memory)
        if repeated is not None:
            raise DataError(f"ids: id {repeated} occurs more than once: every item needs its own")

    def sort(self) -> None:
        """Sort each part in place, and count the distinct codes."""
        with stage("sorting codes", len(self.ids)) as progress:
            for columns, ids in self:
                columns[:], ids[:], starts = sort_codes(columns, ids)
                self.rows += len(starts) - 1
                progress.advance(len(ids))

    def __iter__(self) -> Iterator[tuple[Codes, Ids]]:
        """Yield columns and ids of the parts that are not empty."""
        for start, stop in itertools.pairwise(self.ends.tolist()):
            if start < stop:
                yield np.asarray(self.columns[start:stop]), np.asarray(self.ids[start:stop])


def write_lists(
    out: Path,
    sources: Sequence[Source],
    Z: Floats,
    *,
    metadata: dict[str, str],
    memory: int | None = None,
) -> None:
    """Write codes as inverted lists.

    ``metadata`` gets two more entries: ``prefix``, and ``crc``, which is
    :meth:`.lists.InvertedLists.crc` of the file.

    Args:
        out: the file, which is written in place.
        sources: where the codes are read from, twice.
        Z: codebooks, float32 [M, K, d].
        memory: bytes (default: half of what is available). If the codes do not fit, they go to
            temporary files in the folder of ``out``. The codes that begin with the same byte
            are sorted in memory in any case.

    Raises:
        DataError: no codes, the id -1, or a repeated id.
    """
    memory = memory or (available_memory() or 1 << 32) // 2
    M, K = int(Z.shape[0]), int(Z.shape[1])
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        parts = _Parts(sources, (M, K), Path(folder), memory)
        parts.sort()
        n, T = parts.columns.shape
        prefix = choose_prefix(parts.counts)
        levels = (len(parts.counts).bit_length() - 1) // 4
        # The sub-lists are the prefixes that occur; their distinct codes are counted below.
        words = np.flatnonzero(parts.counts.reshape(16**prefix, 16 ** (levels - prefix)).any(1))
        lowest, highest = int(parts.ids.min()), int(parts.ids.max())
        member = np.uint32 if lowest >= 0 and highest < 1 << 32 else np.int64
        start = np.uint32 if n < 1 << 32 else np.int64
        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
            "codebooks": (np.float32, Z.shape),
            "names": (np.uint8, (len(words), 2)),
            "ends": (np.int64, (len(words) + 1,)),
            "blocks": (np.uint8, (-(-parts.rows // BLOCK), T, BLOCK)),
            "starts": (start, (0 if parts.rows == n else parts.rows + 1,)),
            "members": (member, (n,)),
        }
        facts = metadata | {"prefix": str(prefix), "crc": f"{0:010}"}
        header = _header(shapes, facts)
        with out.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(_size(*kind) for kind in shapes.values()))
        mapped = np.memmap(out, np.uint8, "r+")
        arrays = _arrays(np.asarray(mapped), header)
        arrays["codebooks"][:], arrays["names"][:] = Z, names_of(words.astype(np.uint16), prefix)
        sizes, row, position, crc = np.zeros(16**prefix, np.int64), 0, 0, 0
        with stage("writing lists", n) as progress:
            for columns, ids in parts:
                _, _, starts = sort_codes(columns, ids)  # in order by now
                rows = len(starts) - 1
                list_kernels.fill_blocks(arrays["blocks"], row, columns, starts)
                if parts.rows < n:
                    arrays["starts"][row : row + rows + 1] = starts.astype(np.int64) + position
                arrays["members"][position : position + len(ids)] = ids
                distinct = columns.take(starts[:-1], axis=0)
                sizes += np.bincount(first_words(distinct, prefix), minlength=len(sizes))
                crc = zlib.crc32(np.ascontiguousarray(codes_of(columns, M, K)).data, crc)
                row, position = row + rows, position + len(ids)
                progress.advance(len(ids))
            for _, ids in parts:
                crc = zlib.crc32(np.ascontiguousarray(ids, "<i8").data, crc)
        arrays["ends"][:] = np.append(0, np.cumsum(sizes[words]))
        mapped[: len(header)] = np.frombuffer(
            _header(shapes, facts | {"crc": f"{crc:010}"}), np.uint8
        )
        mapped.flush()


def open_lists(path: str | Path) -> tuple[ListArrays, dict[str, str]]:
    """Map the arrays of a file that :func:`write_lists` wrote; nothing of the codes is read.

    Returns:
        Arrays that are mapped privately, and the metadata.

    Raises:
        DataError: a missing, damaged or foreign file.
    """
    try:
        with safe_open(path, "numpy") as checked:  # refuses a file that is cut, say
            metadata = dict(checked.metadata() or {})
        with Path(path).open("rb") as file:
            # Private and writable, as Numba compiles loops anew for arrays that are read-only.
            flags, access = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            content = np.frombuffer(mmap.mmap(file.fileno(), 0, flags, access), np.uint8)
        header = content[: 8 + int.from_bytes(content[:8].tobytes(), "little")].tobytes()
        mapped = ListArrays(**_arrays(content, header), prefix=int(metadata["prefix"]))
        _check(mapped)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not a sound file of inverted lists ({one_line(error)})") from None
    return mapped, metadata


def _check(arrays: ListArrays) -> None:
    """Raise ValueError if the shapes of arrays do not fit together."""
    M, K, _ = arrays.codebooks.shape
    rows, n, T = int(arrays.ends[-1]), len(arrays.members), M if K > 16 else (M + 1) // 2
    names = len(arrays.ends) - 1
    starts = len(arrays.starts) if len(arrays.starts) else n + 1
    kinds = [array.dtype for array in arrays[:4]]
    if not (
        kinds == [np.float32, np.uint8, np.int64, np.uint8]
        and arrays.starts.dtype in (np.uint32, np.int64)
        and arrays.members.dtype in (np.uint32, np.int64)
        and arrays.names.shape == (names, 2)
        and arrays.blocks.shape == (-(-rows // BLOCK), T, BLOCK)
        and starts == rows + 1
        and 0 < rows <= n
        and arrays.ends[0] == 0
        and bool((arrays.ends[1:] > arrays.ends[:-1]).all())
        and 0 <= arrays.prefix <= min(LEVELS, M - 1)
        and (K <= 16 or arrays.prefix == 0)
    ):
        raise ValueError("its arrays do not fit together")


def _size(kind: Any, shape: tuple[int, ...]) -> int:
    """Return the bytes of an array."""
    return int(math.prod(shape) * np.dtype(kind).itemsize)


def _arrays(content: NDArray[np.uint8], header: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays of a safetensors file, which lie behind its header."""
    arrays = {}
    for name, entry in json.loads(header[8:]).items():
        if name != "__metadata__":
            start, stop = (len(header) + offset for offset in entry["data_offsets"])
            arrays[name] = content[start:stop].view(_KINDS[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def _header(shapes: dict[str, tuple[Any, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """Return the header of a safetensors file, a multiple of 64 bytes.

    Arrays come in falling size of their numbers, so that all are aligned.
    """
    kinds = {np.dtype(kind): name for name, kind in _KINDS.items()}
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name in sorted(shapes, key=lambda name: -np.dtype(shapes[name][0]).itemsize):
        kind, shape = shapes[name]
        end = offset + _size(kind, shape)
        offsets = [offset, end]
        entries[name] = {"dtype": kinds[np.dtype(kind)], "shape": shape, "data_offsets": offsets}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
