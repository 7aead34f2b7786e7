"""Index files with lists: where in the file Faiss keeps each list, to write them as a stream and to read them in place.

A file of ``IndexIVFPQ`` or ``IndexIVFPQFastScan`` is a header with the coarse centroids and the codebooks, the sizes of
the lists, and list after list its codes and ids. The header is what Faiss itself writes of empty lists, with the numbers
of items put in; a test holds the result to ``faiss.write_index`` byte by byte. Plain Faiss maps the fused form in place
too: ``faiss.read_index(path, faiss.IO_FLAG_MMAP)``.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.blocks import PackedCodes, block_bytes
from ..codes.checks import Codes, Floats, Ids
from ..errors import DataError
from .forms import ivf_index
from .io import read_empty
from .layout import layout_of
from .rowfile import BLOCK_ROWS, IndexFile

ListForm = Literal["ivf-fused", "ivf-fastscan"]
_NTOTAL = 8  # after the type and d
_HEADER = 37
NPROBE_AT = _HEADER + 8
"""Byte where the default nprobe is, 8 bytes."""
_TYPES = (b"IwPQ", b"IwPf")
_MOST_LISTS = 1 << 24
_MAX_HEADER = 4 << 30


@dataclass(frozen=True, eq=False)
class ListFile:
    """Where things are.

    Attributes:
        form: of the codes.
        codebooks: float32 [M, K, d].
        centroids: float32 [lists, M*d].
        nprobe: lists that a query looks at unless told otherwise.
        n: items.
        sizes: int64 [lists].
        starts: int64 [lists], byte where a list begins.
        rows: codes in a block of FastScan.
    """

    form: ListForm
    codebooks: Floats
    centroids: Floats
    nprobe: int
    n: int
    sizes: Ids
    starts: Ids
    rows: int

    def codes(self, source: IndexFile, number: int, start: int, stop: int) -> Codes | PackedCodes:
        """Codes of rows ``start:stop`` of a list, as they lie in the file.

        ``start`` must be a multiple of :attr:`rows`.
        """
        M = int(self.codebooks.shape[0])
        size = (M + 1) // 2
        n = stop - start
        if self.form == "ivf-fused":
            at = int(self.starts[number]) + start * size
            return source.read(np.uint8, at, n * size).reshape(-1, size)
        each = block_bytes(M, self.rows)
        count = -(-n // self.rows) * each
        return PackedCodes(source.read(np.uint8, self.packed_at(number, start), count), n, M, self.rows)

    def packed_at(self, number: int, start: int) -> int:
        """Byte where row ``start`` of a list, the first of a block of the fastscan form, lies."""
        each = block_bytes(int(self.codebooks.shape[0]), self.rows)
        return int(self.starts[number]) + 16 + 8 * int(self.sizes[number]) + start // self.rows * each

    def ids(self, source: IndexFile, number: int, start: int, stop: int) -> Ids:
        """Ids of rows ``start:stop`` of a list, int64 [n]."""
        return source.read("<i8", self._ids_at(number, start), max(0, stop - start))

    def some_ids(self, source: IndexFile, number: int, start: int, stop: int, positions: Ids) -> Ids:
        """Of the ids of rows ``start:stop`` of a list those at ``positions``, int64 of their shape."""
        return source.read_some("<i8", self._ids_at(number, start), stop - start, positions)

    def _ids_at(self, number: int, start: int) -> int:
        """Byte where the id of row ``start`` of a list lies."""
        # fused lists have their ids after the codes, FastScan's before them and behind their number
        before = 8
        if self.form == "ivf-fused":
            before = int(self.sizes[number]) * ((int(self.codebooks.shape[0]) + 1) // 2)
        return int(self.starts[number]) + before + 8 * start


def lists_bytes(form: str, sizes: Ids, M: int, rows: int = BLOCK_ROWS) -> Ids:
    """Bytes that each list takes in the file, int64 [lists]."""
    if form == "ivf-fused":
        return sizes * ((M + 1) // 2 + 8)
    return 16 + -(-sizes // rows) * block_bytes(M, rows) + 8 * sizes


def frame_lists(form: ListForm, Z: Floats, centroids: Floats, nprobe: int, sizes: Ids) -> bytes:
    """What a file with lists of these sizes has before the first of them.

    Raises:
        DataError: this version of Faiss writes such files in another way.
    """
    lists = len(centroids)
    empty = ivf_index(
        np.empty((0, (len(Z) + 1) // 2), np.uint8),
        None,
        Z,
        centroids,
        form.removeprefix("ivf-"),
        np.empty(0, np.int32),
    )
    empty.nprobe = nprobe
    data = bytearray(faiss.serialize_index(empty).tobytes())
    struct.pack_into("<q", data, _NTOTAL, int(sizes.sum()))
    counts = np.ascontiguousarray(sizes, "<i8").tobytes()
    if form == "ivf-fused":
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
    raise DataError(f"Faiss {faiss.__version__} writes its index files in another way: use another version")


def has_lists(path: str | Path) -> bool:
    """Whether the first bytes are those of an index with lists."""
    try:
        with Path(path).open("rb") as file:
            return file.read(4) in _TYPES
    except OSError:
        return False


def read_lists(source: IndexFile) -> ListFile:
    """Find the lists of an index file without reading them.

    Raises:
        DataError: damaged, or not an index with lists whose codebooks are a GPQ model's.
    """
    try:
        return _read(source.path, source.from_start(), source.size)
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror}") from None


def _read(path: Path, file: Any, size: int) -> ListFile:
    damaged = DataError(f"{path} is damaged: its header gives impossible sizes; build it again")

    def take(count: int) -> bytes:
        if not 0 <= count <= min(_MAX_HEADER, size):
            raise damaged
        data: bytes = file.read(count)
        if len(data) < count:
            raise DataError(f"{path} is truncated: build it again")
        return data

    head = take(_HEADER + 16)
    fast = head[:4] == b"IwPf"
    if head[:4] not in _TYPES:
        raise DataError(f"{path} has no lists that can be searched in place: build it with kind 'ivf'")
    n, lists = struct.unpack_from("<q", head, _NTOTAL)[0], struct.unpack_from("<Q", head, _HEADER)[0]
    if not (0 <= n < 1 << 62 and 1 <= lists <= min(_MOST_LISTS, size)):
        raise damaged
    head += take(_HEADER + 8)  # the quantiser, up to the number of its values
    if head[_HEADER + 16 : _HEADER + 20] != b"IxFI":
        raise DataError(f"{path}: its coarse quantiser is not a flat one (IndexFlatIP), or it is damaged")
    head += take(4 * struct.unpack_from("<Q", head, len(head) - 8)[0])
    head += take(9)
    if head[-9]:
        raise DataError(
            f"{path}: it has a direct map, which is not supported: remove it (set_direct_map_type)"
        )
    head += take(1 + 8 + (4 + 8 + 4 + 8 if fast else 0))
    rows = struct.unpack_from("<i", head, len(head) - 24)[0] if fast else BLOCK_ROWS
    head += take(24 + 8)
    head += take(4 * struct.unpack_from("<Q", head, len(head) - 8)[0])
    kind = take(4)
    if kind != (b"ilbl" if fast else b"ilar") or not 32 <= rows <= 128 or rows % 32:
        raise DataError(f"{path}: its lists are of a form that cannot be searched in place, or it is damaged")
    head += kind + take(32 if fast else 16)
    # The same header with empty lists is a small index that Faiss can read and layout_of can verify.
    small = bytearray(head)
    struct.pack_into("<q", small, _NTOTAL, 0)
    small += bytes(16 * lists) if fast else b"sprs" + bytes(8)
    if struct.unpack_from("<Q", head, len(head) - (32 if fast else 16))[0] != lists:
        raise damaged
    index = read_empty(bytes(small), path, lists=lists)
    layout = layout_of(index, what=str(path))
    if layout.kind not in ("ivf-fused", "ivf-fastscan"):
        raise DataError(
            f"{path}: lists of form {layout.kind} cannot be searched in place: build it with kind 'ivf'"
        )
    form: ListForm = "ivf-fastscan" if fast else "ivf-fused"
    M = int(layout.codebooks.shape[0])
    if fast:
        sizes, starts, end = _walk(path, file, lists, M, rows, size)
    else:
        sizes = _sizes(path, take, lists, damaged)
        starts, end = _follow(file.tell(), sizes, M, damaged)
    if int(sizes.sum()) != n or end != size:
        raise DataError(f"{path}: {size:,} bytes contradict {n:,} items: it is damaged; build it again")
    centroids = layout.centroids
    assert centroids is not None
    return ListFile(form, layout.codebooks, centroids, int(index.nprobe), int(n), sizes, starts, rows)


def _sizes(path: Path, take: Any, lists: int, damaged: DataError) -> NDArray[np.int64]:
    """Sizes of the lists as ``ilar`` states them."""
    kind, count = take(4), struct.unpack("<Q", take(8))[0]
    if count > 2 * lists:
        raise damaged
    held = np.frombuffer(take(8 * count), "<i8").astype(np.int64)
    if kind == b"full" and count == lists:
        sizes = held
    elif kind == b"sprs" and count % 2 == 0:
        sizes = np.zeros(lists, np.int64)
        at = held[0::2]
        if len(at) and not (at.min() >= 0 and at.max() < lists and len(np.unique(at)) == len(at)):
            raise damaged
        sizes[at] = held[1::2]
    else:
        raise damaged
    if (sizes < 0).any() or (sizes >= 1 << 40).any():
        raise damaged
    return sizes


def _follow(begin: int, sizes: Ids, M: int, damaged: DataError) -> tuple[Ids, int]:
    """Start of each list and end of the last, of the fused form."""
    if float(sizes.sum(dtype=np.float64)) > 1 << 59:
        raise damaged
    ends = begin + np.cumsum(lists_bytes("ivf-fused", sizes, M))
    return np.concatenate([[begin], ends[:-1]]).astype(np.int64), int(ends[-1])


def _walk(path: Path, file: Any, lists: int, M: int, rows: int, size: int) -> tuple[Ids, Ids, int]:
    """Sizes and starts of FastScan's lists, which say their sizes where they lie: two small reads a list."""
    sizes, starts = np.zeros(lists, np.int64), np.zeros(lists, np.int64)
    at, handle = file.tell(), file.fileno()
    each = block_bytes(M, rows)
    wrong = DataError(f"{path} is damaged or truncated: its lists do not fit the file; build it again")
    for number in range(lists):
        stated = os.pread(handle, 8, at)
        n = struct.unpack("<Q", stated)[0] if len(stated) == 8 else size
        if at + 16 + 8 * n > size:
            raise wrong
        stated = os.pread(handle, 8, at + 8 + 8 * n)
        if len(stated) < 8 or struct.unpack("<Q", stated)[0] != -(-n // rows) * each:
            raise wrong
        starts[number], sizes[number] = at, n
        at += 16 + 8 * n + -(-n // rows) * each
    return sizes, starts, at
