"""Layout of codes and ids in index files, for streaming writes and reading in place.

A file is a header followed by lists of codes and ids; without inverted lists it is one list, with its ids (if it has an id map) after
the codes. Headers are those that Faiss writes for an empty index, with the numbers of items inserted; tests compare results with
``faiss.write_index`` byte by byte. Plain Faiss can also memory-map byte-fused lists: ``faiss.read_index(path, faiss.IO_FLAG_MMAP)``.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import code_size
from ..codes.blocks import PackedCodes, block_bytes
from ..codes.checks import Codes, Floats, Ids
from ..errors import DataError
from .io import LISTS, WRAPPERS, read_empty
from .layout import layout_of
from .source import IndexFile
from .storage import Packing, ivf_index, row_index

BLOCK_ROWS = 32
"""Codes in a block of FastScan as written here."""
_NTOTAL = 8  # byte where the number of items is, after the type and d
_HEADER = 37
NPROBE_AT = _HEADER + 8
"""Byte where the default nprobe of a file with lists is, 8 bytes."""
_MOST_LISTS = 1 << 24
_MAX_HEADER = 4 << 30
_MAX_CODEBOOKS = 64 << 20  # bytes


@dataclass(frozen=True, eq=False)
class Header:
    """The header of an index file.

    Attributes:
        packing: packing of the codes.
        codebooks: float32 [M, K, d].
        n: number of items.
        sizes: int64 [lists], items per list; without lists a single entry.
        code_starts: int64 [lists], byte offset of the codes of each list.
        id_starts: int64 [lists], byte offset of its ids; None if ids are row numbers.
        centroids: float32 [lists, M*d]; None without lists.
        nprobe: default number of lists to probe.
        rows: codes per FastScan block.
    """

    packing: Packing
    codebooks: Floats
    n: int
    sizes: Ids
    code_starts: Ids
    id_starts: Ids | None
    centroids: Floats | None = None
    nprobe: int = 1
    rows: int = BLOCK_ROWS

    @property
    def code_size(self) -> int:
        """Bytes of one code."""
        return code_size(int(self.codebooks.shape[0]), int(self.codebooks.shape[1]))

    def codes(self, source: IndexFile, number: int, start: int, stop: int) -> Codes:
        """Codes of rows ``start:stop`` of a list, uint8 [n, code_size]."""
        if self.packing == "fastscan":
            first = start // self.rows * self.rows
            M = int(self.codebooks.shape[0])
            count = -(-(stop - first) // self.rows) * block_bytes(M, self.rows)
            packed = source.read(np.uint8, self.packed_at(number, first), count)
            return PackedCodes(packed, stop - first, M, self.rows)[start - first :]
        size = self.code_size
        n = max(0, stop - start)
        return source.read(np.uint8, int(self.code_starts[number]) + start * size, n * size).reshape(-1, size)

    def packed_at(self, number: int, start: int) -> int:
        """Byte offset of row ``start`` of a list, the first of a FastScan block."""
        each = block_bytes(int(self.codebooks.shape[0]), self.rows)
        return int(self.code_starts[number]) + start // self.rows * each

    def ids(self, source: IndexFile, number: int, start: int, stop: int) -> Ids:
        """Ids of rows ``start:stop`` of a list, int64 [n]."""
        if self.id_starts is None:
            return np.arange(start, stop, dtype=np.int64)
        return source.read("<i8", int(self.id_starts[number]) + 8 * start, max(0, stop - start))

    def some_ids(self, source: IndexFile, number: int, start: int, stop: int, positions: Ids) -> Ids:
        """Ids at ``positions`` within rows ``start:stop`` of a list, int64 of their shape."""
        if self.id_starts is None:
            return positions + start
        return source.read_some("<i8", int(self.id_starts[number]) + 8 * start, stop - start, positions)


# Writing --------------------------------------------------------------------------------------------------------------


def row_header(packing: Packing, Z: Floats, n: int, *, mapped: bool) -> tuple[bytes, int, bytes]:
    """For a file of ``n`` items without lists: bytes before the codes, number of bytes of codes, and bytes before the ids.

    With ``mapped``, ids follow, 8 bytes each (an ``IndexIDMap``).

    Raises:
        DataError: this version of Faiss writes such files in another format.
    """
    data = bytearray(faiss.serialize_index(_empty(packing, Z)).tobytes())
    at = _HEADER + 24 + 8 + _centroid_bytes(packing, Z)  # three sizes of the quantizer, then its centroids
    M, K = int(Z.shape[0]), int(Z.shape[1])
    count = n * code_size(M, K)
    if packing == "fastscan":
        blocks = -(-n // BLOCK_ROWS)
        count = blocks * block_bytes(M, BLOCK_ROWS)
        at += 12  # implem, bbs, qbs
        struct.pack_into("<q", data, at, blocks * BLOCK_ROWS)
        at += 16  # ntotal2, M2
    struct.pack_into("<q", data, _NTOTAL, n)
    if bytes(data[at : at + 8]) != bytes(8):
        raise _other_faiss()
    struct.pack_into("<Q", data, at, count)
    head, tail = bytes(data[: at + 8]), bytes(data[at + 8 :])
    if not mapped:
        return head, count, tail
    outer = bytearray(faiss.serialize_index(faiss.IndexIDMap(_empty(packing, Z))).tobytes()[:_HEADER])
    struct.pack_into("<q", outer, _NTOTAL, n)
    return bytes(outer) + head, count, tail + struct.pack("<Q", n)


def _empty(packing: Packing, Z: Floats) -> Any:
    return row_index(np.empty((0, code_size(*Z.shape[:2])), np.uint8), None, Z, packing)


def _centroid_bytes(packing: Packing, Z: Floats) -> int:
    M, K, d = (int(n) for n in Z.shape)
    return 4 * (-(-M // 2) * 256 * 2 * d if packing == "bytes" else M * K * d)


def pack_rows(packing: Packing, codes: Codes, Z: Floats) -> NDArray[np.uint8]:
    """Codes as stored in the file; for FastScan a multiple of 32 rows, or the last ones."""
    if packing != "fastscan":
        return codes.reshape(-1)
    fast = row_index(codes, None, Z, packing)  # a name: its codes go with it
    return np.asarray(faiss.vector_to_array(fast.codes), np.uint8)


def list_header(packing: Packing, Z: Floats, centroids: Floats, nprobe: int, sizes: Ids) -> bytes:
    """Bytes before the first list of a file with lists of these sizes.

    Raises:
        DataError: this version of Faiss writes such files in another format.
    """
    lists = len(centroids)
    nothing = np.empty((0, (len(Z) + 1) // 2), np.uint8)
    empty = ivf_index(nothing, None, Z, centroids, packing, np.empty(0, np.int32), nprobe=nprobe)
    data = bytearray(faiss.serialize_index(empty).tobytes())
    struct.pack_into("<q", data, _NTOTAL, int(sizes.sum()))
    counts = np.ascontiguousarray(sizes, "<i8").tobytes()
    if packing == "bytes":
        tail = b"sprs" + struct.pack("<Q", 0)
        if bytes(data[-12:]) == tail:
            # as Faiss does: sizes of all lists, or of the filled ones where these are few
            filled = np.flatnonzero(sizes)
            if len(filled) > lists // 2:
                return bytes(data[:-12]) + b"full" + struct.pack("<Q", lists) + counts
            pairs = np.stack([filled, sizes[filled]], axis=1).astype("<i8")
            return bytes(data[:-12]) + b"sprs" + struct.pack("<Q", pairs.size) + pairs.tobytes()
    else:
        # each empty list is two arrays of no entries
        before = len(data) - 16 * lists
        if not any(data[before:]):
            return bytes(data[:before])
    raise _other_faiss()


def list_bytes(packing: Packing, sizes: Ids, M: int) -> Ids:
    """Bytes of each list in the file, int64 [lists]."""
    if packing == "bytes":
        return sizes * ((M + 1) // 2 + 8)
    return 16 + -(-sizes // BLOCK_ROWS) * block_bytes(M, BLOCK_ROWS) + 8 * sizes


def _other_faiss() -> DataError:
    return DataError(
        f"Faiss {faiss.__version__} writes its index files in another format: use another version"
    )


# Reading --------------------------------------------------------------------------------------------------------------


def has_lists(path: str | Path) -> bool:
    """Whether the first bytes are those of an index with lists."""
    try:
        with Path(path).open("rb") as file:
            return file.read(4) in LISTS
    except OSError:
        return False


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
        outer = self.file.read(_HEADER)
        mapped = outer[:4] in WRAPPERS
        self.head += self.file.read(_HEADER) if mapped else outer
        kind = bytes(self.head[:4])
        if len(self.head) < _HEADER or kind not in (b"IxPq", b"IPfs", *(() if mapped else LISTS)):
            raise DataError(
                f"{self.path} is not an index that can be searched in place: flat, fused and fastscan forms can"
            )
        n = self._last("<q", _HEADER - _NTOTAL)
        if not 0 <= n < 1 << 62:
            raise self._impossible()
        if kind in LISTS:
            return self._lists(n, fast=kind == b"IwPf")
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
        count, start, tail_bytes = self._last("<Q", 8), self.file.tell(), 0 if fast else 9
        if count > self.size - start - tail_bytes:
            raise self._truncated()
        self.file.seek(start + count)
        tail = self._take(tail_bytes)
        # The same header with no items is a small index that Faiss can read and layout_of can verify.
        small = bytearray(self.head)
        struct.pack_into("<q", small, _NTOTAL, 0)
        struct.pack_into("<Q", small, len(small) - 8, 0)
        if fast:
            struct.pack_into("<q", small, len(small) - 8 - 16, 0)
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
            layout.storage.packing,
            layout.codebooks,
            n,
            np.array([n]),
            np.array([start]),
            id_starts,
            rows=rows,
        )

    def _lists(self, n: int, *, fast: bool) -> Header:
        self.head += self._take(16)
        lists = self._last("<Q", 16)
        if not 1 <= lists <= min(_MOST_LISTS, self.size):
            raise self._impossible()
        self.head += self._take(_HEADER + 8)  # the coarse quantiser, up to the number of its values
        if self.head[_HEADER + 16 : _HEADER + 20] != b"IxFI":
            raise DataError(
                f"{self.path}: its coarse quantiser is not a flat one (IndexFlatIP), or it is damaged"
            )
        self.head += self._take(4 * self._last("<Q", 8))
        self.head += self._take(9)
        if self.head[-9]:
            raise DataError(
                f"{self.path}: it has a direct map, which is not supported: remove it (set_direct_map_type)"
            )
        self.head += self._take(1 + 8 + (4 + 8 + 4 + 8 if fast else 0))
        rows = self._last("<i", 24) if fast else BLOCK_ROWS
        self._quantizer()
        kind = self._take(4)
        if kind != (b"ilbl" if fast else b"ilar") or not 32 <= rows <= 128 or rows % 32:
            raise DataError(
                f"{self.path}: its lists are of a form that cannot be searched in place, or it is damaged"
            )
        self.head += kind + self._take(32 if fast else 16)
        if self._last("<Q", 32 if fast else 16) != lists:
            raise self._impossible()
        # The same header with empty lists is a small index that Faiss can read and layout_of can verify.
        small = bytearray(self.head)
        struct.pack_into("<q", small, _NTOTAL, 0)
        small += bytes(16 * lists) if fast else b"sprs" + bytes(8)
        index = read_empty(bytes(small), self.path, lists=lists)
        layout = layout_of(index, what=str(self.path))
        if layout.storage.packing == "4-bit":
            raise DataError(
                f"{self.path}: lists of form {layout.storage.name} cannot be searched in place: build it with kind 'ivf'"
            )
        M = int(layout.codebooks.shape[0])
        sizes, starts, end = self._walk(lists, M, rows) if fast else self._follow(self._sizes(lists), M)
        if int(sizes.sum()) != n or end != self.size:
            raise self._contradicts(n)
        # byte-fused lists have their ids after the codes, FastScan's before them and behind their number
        codes = starts + 16 + 8 * sizes if fast else starts
        ids = starts + 8 if fast else starts + sizes * ((M + 1) // 2)
        nprobe = int(index.nprobe)
        return Header(
            layout.storage.packing, layout.codebooks, n, sizes, codes, ids, layout.centroids, nprobe, rows
        )

    def _quantizer(self) -> None:
        """The product quantizer: d, M, bits and the centroids."""
        self.head += self._take(24 + 8)
        M, nbits, centroids = struct.unpack_from("<QQQ", self.head, len(self.head) - 24)
        if not (1 <= M <= 1 << 16 and 2 <= nbits <= 8 and 4 * centroids <= min(_MAX_CODEBOOKS, self.size)):
            raise self._impossible()
        self.head += self._take(4 * centroids)

    def _sizes(self, lists: int) -> Ids:
        """Sizes of the lists as ``ilar`` states them."""
        kind, count = self._take(4), struct.unpack("<Q", self._take(8))[0]
        if count > 2 * lists:
            raise self._impossible()
        held = np.frombuffer(self._take(8 * count), "<i8").astype(np.int64)
        if kind == b"full" and count == lists:
            sizes = held
        elif kind == b"sprs" and count % 2 == 0:
            sizes = np.zeros(lists, np.int64)
            at = held[0::2]
            if len(at) and not (at.min() >= 0 and at.max() < lists and len(np.unique(at)) == len(at)):
                raise self._impossible()
            sizes[at] = held[1::2]
        else:
            raise self._impossible()
        if (sizes < 0).any() or (sizes >= 1 << 40).any():
            raise self._impossible()
        return sizes

    def _follow(self, sizes: Ids, M: int) -> tuple[Ids, Ids, int]:
        """Sizes, start of each list and end of the last, of the byte-fused form."""
        if float(sizes.sum(dtype=np.float64)) > 1 << 59:
            raise self._impossible()
        begin = self.file.tell()
        ends = begin + np.cumsum(list_bytes("bytes", sizes, M))
        return sizes, np.concatenate([[begin], ends[:-1]]).astype(np.int64), int(ends[-1])

    def _walk(self, lists: int, M: int, rows: int) -> tuple[Ids, Ids, int]:
        """The same for FastScan's lists, which store their own sizes: two small reads per list."""
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
            raise self._impossible() if count < 0 or count > self.size + _HEADER else self._truncated()
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
