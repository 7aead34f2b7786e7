"""Index files in rows: where in the file Faiss keeps codes and ids, to write them as a stream and to read them in place.

A file of ``IndexPQ`` or ``IndexPQFastScan``, alone or in an id map, is a header, the codes, a few bytes, and the ids.
The header is what Faiss itself writes of an empty index, with the numbers of items put in; nothing else is known here
of the format, and a test holds the result to ``faiss.write_index`` byte by byte.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.blocks import PackedCodes, block_bytes
from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import inject, inject_fused
from ..errors import DataError
from .io import read_empty
from .layout import layout_of

RowForm = Literal["flat", "fused", "fastscan"]
BLOCK_ROWS = 32
"""Codes in a block of FastScan as written here."""
_NTOTAL = 8  # after the type and d
_HEADER = 37
_MAX_HEADER = 64 << 20
_SCATTERED = 4096  # bytes that are read in the time that one more call takes


class IndexFile:
    """An index file that is open, to be read in place, also from several threads.

    Everything is copied out of the file and nothing mapped into memory: where a file becomes shorter, reading its map ends
    the process (SIGBUS). What replaces the file under its name is another file, which changes nothing here.

    Attributes:
        path: its name when it was opened.
        size: its bytes then.

    Raises:
        DataError: missing or unreadable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file: BinaryIO = self.path.open("rb")
        except OSError as error:
            why = "not found" if isinstance(error, FileNotFoundError) else error.strerror
            raise DataError(
                f"{path}: {why}: an index file is needed (gpq index, or faiss.write_index)"
            ) from None
        self._mark = self._state()
        self.size = self._mark[0]

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """Raises DataError: the file was written to since it was opened, as far as its size and time of change tell."""
        if self._state() != self._mark:
            raise self._changed()

    def _changed(self) -> DataError:
        return DataError(f"{self.path} was changed while it was in use: open it again")

    def from_start(self) -> BinaryIO:
        """The file, to be read from its first byte on; by one thread."""
        self._file.seek(0)
        return self._file

    def fill(self, held: Any, at: int) -> None:
        """Read from byte ``at`` on until the array ``held`` is full.

        Raises:
            DataError: the file has become shorter, or the disk refuses.
        """
        data = memoryview(held).cast("B")
        try:
            while data:
                got = os.preadv(self._file.fileno(), [data], at)
                if not got:
                    raise self._changed()
                data, at = data[got:], at + got
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from None

    def read(self, dtype: Any, at: int, count: int) -> NDArray[Any]:
        """``count`` numbers from byte ``at`` on. Raises as :meth:`fill`."""
        held = np.empty(count, dtype)
        if count:
            self.fill(held, at)
        return held

    def read_some(self, dtype: Any, at: int, count: int, positions: Ids) -> NDArray[Any]:
        """Of the ``count`` numbers from byte ``at`` on, those at ``positions``. Raises as :meth:`fill`."""
        wanted, where = np.unique(positions, return_inverse=True)
        each = np.dtype(dtype).itemsize
        if len(wanted) * _SCATTERED >= count * each:
            return self.read(dtype, at, count)[positions]
        held = np.empty(len(wanted), dtype)
        for i, position in enumerate(wanted.tolist()):
            self.fill(held[i : i + 1], at + position * each)
        return held[where.reshape(positions.shape)]

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return self._file.closed

    def close(self) -> None:
        """Give it back; nothing can be read then. Also at the end of a ``with``."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class RowFile:
    """Where things are.

    Attributes:
        form: of the codes.
        codebooks: float32 [M, K, d].
        n: items.
        code_start: byte where the codes begin.
        code_bytes: their length (FastScan's last block is padded).
        id_start: byte where the ids begin; None where an id is a position.
        rows: codes in a block of FastScan.
    """

    form: RowForm
    codebooks: Floats
    n: int
    code_start: int
    code_bytes: int
    id_start: int | None
    rows: int = BLOCK_ROWS

    @property
    def code_size(self) -> int:
        """Bytes of one code."""
        M, K, _ = self.codebooks.shape
        return int((M * (int(K).bit_length() - 1) + 7) // 8)

    def codes(self, source: IndexFile, start: int, stop: int) -> Codes:
        """Codes of rows ``start:stop``, uint8 [n, code_size]."""
        if self.form == "fastscan":
            first = start // self.rows * self.rows
            M = int(self.codebooks.shape[0])
            count = -(-(stop - first) // self.rows) * block_bytes(M, self.rows)
            packed = source.read(np.uint8, self.packed_at(first), count)
            return PackedCodes(packed, stop - first, M, self.rows)[start - first :]
        size = self.code_size
        n = max(0, stop - start)
        return source.read(np.uint8, self.code_start + start * size, n * size).reshape(-1, size)

    def packed_at(self, start: int) -> int:
        """Byte where row ``start``, the first of a block of the fastscan form, lies."""
        return self.code_start + start // self.rows * block_bytes(int(self.codebooks.shape[0]), self.rows)

    def ids(self, source: IndexFile, start: int, stop: int) -> Ids:
        """Ids of rows ``start:stop``, int64 [n]."""
        if self.id_start is None:
            return np.arange(start, stop, dtype=np.int64)
        return source.read("<i8", self.id_start + 8 * start, stop - start)


def _empty(form: RowForm, Z: Floats) -> Any:
    if form == "flat":
        return inject(Z)
    return inject_fused(Z) if form == "fused" else faiss.IndexPQFastScan(inject(Z))


def _inner(form: RowForm, Z: Floats, n: int) -> tuple[bytes, int, bytes]:
    """Bytes before the codes, number of bytes of codes, and bytes after, of an index of ``n`` items without a map."""
    empty = _empty(form, Z)
    data = bytearray(faiss.serialize_index(empty).tobytes())
    centroids = int(empty.pq.centroids.size())
    at = _HEADER + 24 + 8 + 4 * centroids  # three sizes of the quantizer, then its centroids
    count = n * ((int(Z.shape[0]) * (int(Z.shape[1]).bit_length() - 1) + 7) // 8)
    if form == "fastscan":
        blocks = -(-n // BLOCK_ROWS)
        count = blocks * block_bytes(int(Z.shape[0]), BLOCK_ROWS)
        at += 12  # implem, bbs, qbs
        struct.pack_into("<q", data, at, blocks * BLOCK_ROWS)
        at += 16  # ntotal2, M2
    struct.pack_into("<q", data, _NTOTAL, n)
    if bytes(data[at : at + 8]) != bytes(8):
        raise DataError(
            f"Faiss {faiss.__version__} writes its index files in another way: use another version"
        )
    struct.pack_into("<Q", data, at, count)
    return bytes(data[: at + 8]), count, bytes(data[at + 8 :])


def frame(form: RowForm, Z: Floats, n: int, *, mapped: bool) -> tuple[bytes, int, bytes]:
    """What a file of ``n`` items has before the codes, how many bytes of codes, and what comes before the ids.

    With ``mapped`` the ids follow, 8 bytes each (the index is an ``IndexIDMap``).
    """
    head, count, tail = _inner(form, Z, n)
    if not mapped:
        return head, count, tail
    outer = bytearray(faiss.serialize_index(faiss.IndexIDMap(_empty(form, Z))).tobytes()[:_HEADER])
    struct.pack_into("<q", outer, _NTOTAL, n)
    return bytes(outer) + head, count, tail + struct.pack("<Q", n)


def pack_rows(form: RowForm, codes: Codes, Z: Floats) -> NDArray[np.uint8]:
    """Codes as the file holds them; for FastScan a multiple of 32 rows, or the last ones."""
    if form != "fastscan":
        return codes.reshape(-1)
    flat = inject(Z)
    flat.add_sa_codes(codes)
    fast: Any = faiss.IndexPQFastScan(flat, BLOCK_ROWS)  # a name: its codes go with it
    return np.asarray(faiss.vector_to_array(fast.codes), np.uint8)


def read_frame(source: IndexFile) -> RowFile:
    """Find the rows of an index file without reading them: a file of any size opens at once.

    Raises:
        DataError: damaged, or of a form that is not kept in rows (lists).
    """
    try:
        return _read(source.path, source.from_start(), source.size)
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror}") from None


def _read(path: Path, file: BinaryIO, size: int) -> RowFile:
    outer = file.read(_HEADER)
    mapped = outer[:4] in (b"IxMp", b"IxM2")
    base = _HEADER if mapped else 0
    file.seek(base)
    inner = file.read(_HEADER + 32)
    if len(inner) < _HEADER + 32 or inner[:4] not in (b"IxPq", b"IPfs"):
        raise DataError(
            f"{path} is not an index that can be searched in place: flat, fused and fastscan forms can"
        )
    fast = inner[:4] == b"IPfs"
    n = struct.unpack_from("<q", inner, _NTOTAL)[0]
    M, nbits = struct.unpack_from("<QQ", inner, _HEADER + 8)
    centroids = struct.unpack_from("<Q", inner, _HEADER + 24)[0]
    if not (
        0 <= n < 1 << 62 and 1 <= M <= 1 << 16 and 2 <= nbits <= 8 and centroids * 4 <= min(_MAX_HEADER, size)
    ):
        raise DataError(f"{path} is damaged: its header gives impossible sizes; build it again")
    extra = 12 + 16 if fast else 0
    file.seek(base)
    head = file.read(_HEADER + 32 + 4 * centroids + extra + 8)
    count = struct.unpack_from("<Q", head, len(head) - 8)[0] if len(head) >= 8 else -1
    start = base + len(head)
    tail_bytes = 9 if not fast else 0
    if len(head) < _HEADER + 40 + 4 * centroids + extra or count > size - start - tail_bytes:
        raise DataError(f"{path} is truncated: build it again")
    file.seek(start + count)
    tail = file.read(tail_bytes)
    # The same header with no items is a small index that Faiss can read and layout_of can verify.
    small = bytearray(head)
    struct.pack_into("<q", small, _NTOTAL, 0)
    struct.pack_into("<Q", small, len(small) - 8, 0)
    rows = BLOCK_ROWS
    if fast:
        rows = struct.unpack_from("<i", small, len(small) - 8 - 24)[0]
        padded = struct.unpack_from("<q", small, len(small) - 8 - 16)[0]
        if rows < 1 or padded != -(-n // rows) * rows:
            raise DataError(f"{path} is damaged: its FastScan blocks contradict its items; build it again")
        struct.pack_into("<q", small, len(small) - 8 - 16, 0)
    layout = layout_of(read_empty(bytes(small) + tail, path), what=str(path))
    expected = n * layout.code_size
    if fast:
        expected = -(-n // rows) * block_bytes(int(M), rows)
    id_start = None
    end = start + count + tail_bytes
    if mapped:
        file.seek(end)
        stated = file.read(8)
        if (
            len(stated) < 8
            or struct.unpack("<Q", stated)[0] != n
            or struct.unpack_from("<q", outer, _NTOTAL)[0] != n
        ):
            raise DataError(f"{path}: its ids contradict {n:,} items: it is damaged; build it again")
        id_start = end + 8
        end = id_start + 8 * n
    if count != expected or end != size:
        raise DataError(f"{path}: {size:,} bytes contradict {n:,} items: it is damaged; build it again")
    form: Any = layout.kind
    return RowFile(form, layout.codebooks, int(n), start, int(count), id_start, rows)
