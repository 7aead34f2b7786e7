"""Layout of codes and ids in index files, for streaming writes and reading in place.

A file is a header followed by lists of ids and codes; without inverted lists it is one list, with its ids (if it has an id map) after
the codes. Headers are those that Faiss writes for an empty index, with the numbers of items inserted; tests compare results with
``faiss.write_index`` byte by byte.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import code_size
from ..codes.blocks import block_bytes, unpack_blocks
from ..codes.checks import Codes, Floats, Ids
from ..errors import DataError
from .io import FLAT, HEADER, LISTS, MOVED, WRAPPERS, read_empty, read_transform
from .layout import layout_of
from .source import IndexFile
from .storage import Form, WordLists, faiss_index, packed_rows

BLOCK_ROWS = 32
"""Codes in a block of FastScan as written here."""
_NTOTAL = 8  # byte where the number of items is, after the type and d
_MOST_LISTS = 1 << 24
_MAX_HEADER = 4 << 30
_MAX_CODEBOOKS = 64 << 20  # bytes


@dataclass(frozen=True, eq=False)
class Header:
    """The header of an index file.

    Attributes:
        form: of the codes (:mod:`.storage`).
        codebooks: float32 [M, K, d].
        n: number of items.
        sizes: int64 [lists], items per list; without lists a single entry.
        code_starts: int64 [lists], byte offset of the codes of each list.
        id_starts: int64 [lists], byte offset of its ids; None if ids are row numbers.
        words: the lists, if there are any.
        rows: codes per FastScan block.
    """

    form: str
    codebooks: Floats
    n: int
    sizes: Ids
    code_starts: Ids
    id_starts: Ids | None
    words: WordLists | None = None
    rows: int = BLOCK_ROWS

    @property
    def code_size(self) -> int:
        """Bytes of one code."""
        return code_size(int(self.codebooks.shape[0]), int(self.codebooks.shape[1]))

    @property
    def held(self) -> int:
        """Codebooks in the lists: all, or those behind the ones that name a list."""
        return len(self.codebooks) - (self.words.P if self.words is not None else 0)

    @property
    def block(self) -> int:
        """Bytes of a FastScan block."""
        return block_bytes(self.held, self.rows)

    def codes(self, source: IndexFile, number: int, start: int, stop: int) -> Codes:
        """Codes of rows ``start:stop`` of a list, uint8 [n, code_size]."""
        n = max(0, stop - start)
        if self.form in ("flat", "fused"):
            size = self.code_size
            return source.read(np.uint8, int(self.code_starts[number]) + start * size, n * size).reshape(
                -1, size
            )
        first = start // self.rows
        count = -(-stop // self.rows) - first
        packed = source.read(np.uint8, int(self.code_starts[number]) + first * self.block, count * self.block)
        stored = unpack_blocks(packed, stop - first * self.rows, self.held, self.rows)[
            start - first * self.rows :
        ]
        return stored if self.words is None else self.words.whole(stored, np.full(n, number))

    def ids(self, source: IndexFile, number: int, start: int, stop: int) -> Ids:
        """Ids of rows ``start:stop`` of a list, int64 [n]."""
        if self.id_starts is None:
            return np.arange(start, stop, dtype=np.int64)
        return source.read("<i8", int(self.id_starts[number]) + 8 * start, max(0, stop - start))


# Writing --------------------------------------------------------------------------------------------------------------


def row_header(form: Form, Z: Floats, n: int, *, mapped: bool) -> tuple[bytes, int, bytes]:
    """For a file of ``n`` items without lists: bytes before the codes, number of bytes of codes, and bytes before the ids.

    With ``mapped``, ids follow, 8 bytes each (an ``IndexIDMap``).

    Raises:
        DataError: this version of Faiss writes such files in another format.
    """
    M, K = int(Z.shape[0]), int(Z.shape[1])
    empty = faiss_index(np.empty((0, code_size(M, K)), np.uint8), None, Z, form)
    data = bytearray(faiss.serialize_index(empty).tobytes())
    fast = form == "fastscan"
    at = len(data) - 8 - _tail(fast)
    if any(data[at : at + 8]) or any(data[_NTOTAL : _NTOTAL + 8]):
        raise _other_faiss()
    blocks = -(-n // BLOCK_ROWS)
    count = blocks * block_bytes(M, BLOCK_ROWS) if fast else n * code_size(M, K)
    _set_sizes(data, at, n, count, blocks * BLOCK_ROWS if fast else None)
    head, tail = bytes(data[: at + 8]), bytes(data[at + 8 :])
    if not mapped:
        return head, count, tail
    outer = bytearray(faiss.serialize_index(faiss.IndexIDMap(empty)).tobytes()[:HEADER])
    struct.pack_into("<q", outer, _NTOTAL, n)
    return bytes(outer) + head, count, tail + struct.pack("<Q", n)


def _tail(fast: bool) -> int:
    """Bytes behind the codes of an index without lists: settings of the search."""
    return 0 if fast else 9


def _set_sizes(data: bytearray, at: int, n: int, count: int, padded: int | None) -> None:
    """Set the number of items, the bytes of codes, stated at ``at``, and the items in FastScan's blocks."""
    struct.pack_into("<q", data, _NTOTAL, n)
    struct.pack_into("<Q", data, at, count)
    if padded is not None:
        struct.pack_into("<q", data, at - 16, padded)


def pack_rows(form: Form, codes: Codes, M: int) -> NDArray[np.uint8]:
    """Codes as stored in the file; in FastScan's blocks a multiple of 32 rows, or the last ones."""
    return packed_rows(codes, M) if form in ("fastscan", "ivf") else codes.reshape(-1)


def list_header(lists: WordLists, n: int) -> bytes:
    """Bytes before the first list of a file with lists of ``n`` items. Each list is its :func:`list_parts`.

    Raises:
        DataError: this version of Faiss writes such files in another format.
    """
    data = bytearray(faiss.serialize_index(lists.index()).tobytes())
    inner = HEADER + 16 + 4 * lists.dimensions.size + 9
    before = len(data) - 16 * len(lists.words)  # each empty list is two arrays of no entries
    if data[inner : inner + 4] != b"IwPf" or any(data[before:]):
        raise _other_faiss()
    for at in (_NTOTAL, inner + _NTOTAL):
        struct.pack_into("<q", data, at, n)
    return bytes(data[:before])


def list_bytes(sizes: Ids, M: int) -> Ids:
    """Bytes of each list in the file, int64 [lists]; M codebooks are in the lists."""
    return 16 + -(-sizes // BLOCK_ROWS) * block_bytes(M, BLOCK_ROWS) + 8 * sizes


def _other_faiss() -> DataError:
    return DataError(
        f"Faiss {faiss.__version__} writes its index files in another format: use another version"
    )


# Reading --------------------------------------------------------------------------------------------------------------


def read_header(source: IndexFile) -> Header:
    """Locate the codes and ids of an index file without reading them.

    Raises:
        DataError: damaged, not searchable in place, or without a GPQ model's codebooks.
    """
    try:
        return _Reader(source).read()
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror}") from None


class _Reader:
    """Parser of the header; ``head`` is the header of the index inside an id map."""

    def __init__(self, source: IndexFile) -> None:
        self.path, self.size = source.path, source.size
        self.file: BinaryIO = source.from_start()
        self.head = bytearray()

    def read(self) -> Header:
        outer = self.file.read(HEADER)
        mapped, moved = outer[:4] in WRAPPERS, outer[:4] == MOVED
        if moved:
            outer += read_transform(self.file, self.path)
        self.head += self.file.read(HEADER) if mapped or moved else outer
        kind = bytes(self.head[:4])
        if kind in LISTS and not mapped and not moved:
            raise DataError(
                f"{self.path} has lists of an earlier version, which are not searched in place: convert it (gpq index --kind ivf)"
            )
        if len(self.head) < HEADER or kind not in ((b"IwPf",) if moved else (b"IxPq", b"IPfs")):
            raise DataError(
                f"{self.path} is not an index that can be searched in place: those of gpq index can"
            )
        n = self._last("<q", HEADER - _NTOTAL)
        if not 0 <= n < 1 << 62:
            raise self._impossible()
        if moved:
            return self._lists(n, outer)
        return self._rows(n, fast=kind == b"IPfs", outer=outer if mapped else None)

    def _rows(self, n: int, *, fast: bool, outer: bytes | None) -> Header:
        self._quantizer()
        rows, before = BLOCK_ROWS, 12 + 16
        if fast:
            self.head += self._take(before)
            rows, padded = self._last("<i", 24), self._last("<q", 16)
            if rows < 1 or padded != -(-n // rows) * rows:
                raise DataError(
                    f"{self.path} is damaged: its FastScan blocks contradict its items; build it again"
                )
        self.head += self._take(8)
        count, start, tail_bytes = self._last("<Q", 8), self.file.tell(), _tail(fast)
        if count > self.size - start - tail_bytes:
            raise self._truncated()
        self.file.seek(start + count)
        tail = self._take(tail_bytes)
        # The same header with no items is a small index that Faiss can read and layout_of can verify.
        small = bytearray(self.head)
        _set_sizes(small, len(small) - 8, 0, 0, 0 if fast else None)
        layout = layout_of(read_empty(bytes(small) + tail, self.path), what=str(self.path))
        M = int(layout.codebooks.shape[0])
        expected = -(-n // rows) * block_bytes(M, rows) if fast else n * layout.code_size
        id_starts, end = None, start + count + tail_bytes
        if outer is not None:
            stated = self.file.read(8)
            if len(stated) < 8 or not (
                struct.unpack("<Q", stated)[0] == n == struct.unpack_from("<q", outer, _NTOTAL)[0]
            ):
                raise DataError(f"{self.path}: its ids contradict {n:,} items: it is damaged; build it again")
            id_starts = np.array([end + 8])
            end += 8 + 8 * n
        if count != expected or end != self.size:
            raise self._contradicts(n)
        return Header(
            layout.form, layout.codebooks, n, np.array([n]), np.array([start]), id_starts, rows=rows
        )

    def _lists(self, n: int, outer: bytes) -> Header:
        self.head += self._take(16)
        lists = self._last("<Q", 16)
        if not 1 <= lists <= min(_MOST_LISTS, self.size):
            raise self._impossible()
        self.head += self._take(HEADER + 8)  # the coarse quantiser, up to the number of its values
        if self.head[HEADER + 16 : HEADER + 20] != FLAT:
            raise DataError(
                f"{self.path}: its coarse quantiser is not a flat one (IndexFlatIP), or it is damaged"
            )
        self.head += self._take(4 * self._last("<Q", 8))
        self.head += self._take(9)
        if self.head[-9]:
            raise DataError(
                f"{self.path}: it has a direct map, which is not supported: remove it (set_direct_map_type)"
            )
        self.head += self._take(1 + 8 + 4 + 8 + 4 + 8)
        rows = self._last("<i", 24)
        self._quantizer()
        kind = self._take(4)
        if kind != b"ilbl" or not 32 <= rows <= 128 or rows % 32:
            raise DataError(
                f"{self.path}: its lists are of a form that cannot be searched in place, or it is damaged"
            )
        self.head += kind + self._take(32)
        if self._last("<Q", 32) != lists:
            raise self._impossible()
        # The same header with empty lists is a small index that Faiss can read and layout_of can verify.
        small = bytearray(outer + self.head) + bytes(16 * lists)
        for at in (_NTOTAL, len(outer) + _NTOTAL):
            struct.pack_into("<q", small, at, 0)
        layout = layout_of(read_empty(bytes(small), self.path, lists=lists), what=str(self.path))
        words = layout.words
        assert words is not None
        sizes, starts, end = self._walk(lists, len(words.rest), rows)
        if int(sizes.sum()) != n or end != self.size or struct.unpack_from("<q", outer, _NTOTAL)[0] != n:
            raise self._contradicts(n)
        return Header(
            "ivf", layout.codebooks, n, sizes, starts + 16 + 8 * sizes, starts + 8, words=words, rows=rows
        )

    def _quantizer(self) -> None:
        """The product quantizer: d, M, bits and the centroids."""
        self.head += self._take(24 + 8)
        M, nbits, centroids = struct.unpack_from("<QQQ", self.head, len(self.head) - 24)
        if not (1 <= M <= 1 << 16 and 2 <= nbits <= 8 and 4 * centroids <= min(_MAX_CODEBOOKS, self.size)):
            raise self._impossible()
        self.head += self._take(4 * centroids)

    def _walk(self, lists: int, M: int, rows: int) -> tuple[Ids, Ids, int]:
        """Size and start of each list, and end of the last. Lists store their own sizes: two small reads per list."""
        sizes, starts = np.zeros(lists, np.int64), np.zeros(lists, np.int64)
        at, handle = self.file.tell(), self.file.fileno()
        each = block_bytes(M, rows)
        wrong = DataError(
            f"{self.path} is damaged or truncated: its lists do not fit the file; build it again"
        )
        for number in range(lists):
            stated = os.pread(handle, 8, at)
            n = struct.unpack("<Q", stated)[0] if len(stated) == 8 else self.size
            if at + 16 + 8 * n > self.size:
                raise wrong
            stated = os.pread(handle, 8, at + 8 + 8 * n)
            if len(stated) < 8 or struct.unpack("<Q", stated)[0] != -(-n // rows) * each:
                raise wrong
            starts[number], sizes[number] = at, n
            at += 16 + 8 * n + -(-n // rows) * each
        return sizes, starts, at

    def _take(self, count: int) -> bytes:
        if not 0 <= count <= min(_MAX_HEADER, self.size):
            raise self._impossible() if count < 0 or count > self.size + HEADER else self._truncated()
        data = self.file.read(count)
        if len(data) < count:
            raise self._truncated()
        return data

    def _last(self, kind: str, back: int) -> int:
        """A number ``back`` bytes before the end of the data read."""
        return int(struct.unpack_from(kind, self.head, len(self.head) - back)[0])

    def _impossible(self) -> DataError:
        return DataError(f"{self.path} is damaged: its header gives impossible sizes; build it again")

    def _truncated(self) -> DataError:
        return DataError(f"{self.path} is truncated: build it again")

    def _contradicts(self, n: int) -> DataError:
        return DataError(
            f"{self.path}: {self.size:,} bytes contradict {n:,} items: it is damaged; build it again"
        )
