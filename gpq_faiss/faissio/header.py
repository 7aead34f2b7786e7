"""The one reader of index files: where codes and ids are, for any form, from the bytes before them.

Files may be damaged or hostile, so no size is believed before it was compared with the file's, and all sizes must agree. Faiss' own reader
is not used: it checks little.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.bits import check_codes, code_size
from ..codes.blocks import block_bytes, unpack_blocks
from ..codes.checks import MAX_CODEBOOKS, Codes, Floats, Ids, check_codebooks, repeated_id
from ..codes.codebooks import unfuse
from ..errors import DataError
from ..inputs import check_memory
from ..store import codebooks_fingerprint
from .source import IndexFile, SerialisedIndex
from .storage import (
    BLOCK_ROWS,
    BLOCKS,
    DIRECT_MAP,
    FASTSCAN,
    INDEX,
    IVF,
    LEVELS,
    LISTS,
    QUANTIZER,
    RESIDUAL,
    ROWS,
    WordLists,
)

_ROW_TYPES = {b"IxPq": "IndexPQ", b"IPfs": "IndexPQFastScan"}
_OLD_TYPES = {b"IwPQ": "IndexIVFPQ", b"IwPf": "IndexIVFPQFastScan"}
_TYPES = {
    b"IxMp": "IndexIDMap",
    b"IxM2": "IndexIDMap2",
    b"IxPT": "IndexPreTransform",
    **_ROW_TYPES,
    **_OLD_TYPES,
}
INDEX_TYPES = tuple(_TYPES)
"""First four bytes of the files that are read."""
_FOREIGN = (b"Ix", b"Iw", b"IB", b"IH", b"Il")
_CONSTANTS = struct.pack("<qq", 1 << 20, 1 << 20)  # what Faiss writes after the number of items, for any type
_HEIGHTS = (32, 64, 96, 128)  # of FastScan's blocks
_MOST_LISTS = 1 << 20


def is_faiss(start: bytes) -> bool:
    """Whether the first 32 bytes of a file are those of a Faiss index, readable here or not."""
    return start[:4] in INDEX_TYPES or start[:2] in _FOREIGN or start[16:32] == _CONSTANTS


@dataclass(frozen=True, eq=False)
class Header:
    """The header of an index file.

    Attributes:
        form: of the codes (:mod:`.storage`), possibly one of :data:`.storage.OLD_LISTS`.
        codebooks: float32 [M, K, d], unit-norm; of byte-fused ones the 4-bit ones.
        n: number of items.
        sizes: int64 [lists], items per list; without lists a single entry.
        code_starts: int64 [lists], byte offset of the codes of each list.
        id_starts: int64 [lists], byte offset of its ids; None if ids are row numbers.
        width: of vectors in Faiss.
        faiss_class: name of the index' class.
        words: the lists of form ``ivf``.
        rows: codes per FastScan block.
    """

    form: str
    codebooks: Floats
    n: int
    sizes: Ids
    code_starts: Ids
    id_starts: Ids | None
    width: int
    faiss_class: str
    words: WordLists | None = None
    rows: int = BLOCK_ROWS

    @property
    def code_size(self) -> int:
        """Bytes of one code."""
        return code_size(int(self.codebooks.shape[0]), int(self.codebooks.shape[1]))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the codebooks, as in all files of this package."""
        return codebooks_fingerprint(self.codebooks)

    def _stored(self, source: IndexFile, number: int, start: int, stop: int) -> Codes:
        """Rows ``start:stop`` of a list without the codewords that name it."""
        n = max(0, stop - start)
        if "fastscan" not in self.form and self.words is None:
            size = self.code_size
            return source.read(np.uint8, int(self.code_starts[number]) + start * size, n * size).reshape(
                -1, size
            )
        M = len(self.codebooks) - (0 if self.words is None else self.words.P)
        block, first = block_bytes(M, self.rows), start // self.rows
        count = -(-stop // self.rows) - first
        packed = source.read(np.uint8, int(self.code_starts[number]) + first * block, count * block)
        begin = first * self.rows
        return unpack_blocks(packed, stop - begin, M, self.rows)[start - begin :]

    def codes(self, source: IndexFile, number: int, start: int, stop: int) -> Codes:
        """Codes of rows ``start:stop`` of a list, uint8 [n, code_size]."""
        stored = self._stored(source, number, start, stop)
        return stored if self.words is None else self.words.whole(stored, np.full(len(stored), number))

    def ids(self, source: IndexFile, number: int, start: int, stop: int) -> Ids:
        """Ids of rows ``start:stop`` of a list, int64 [n]."""
        if self.id_starts is None:
            return np.arange(start, stop, dtype=np.int64)
        return source.read("<i8", int(self.id_starts[number]) + 8 * start, max(0, stop - start))

    def spans(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield list number, first row and end of blocks of all rows; without lists there is one."""
        for number in np.flatnonzero(self.sizes).tolist():
            size = int(self.sizes[number])
            for start in range(0, size, rows):
                yield number, start, min(size, start + rows)


@dataclass(frozen=True, eq=False)
class Contents:
    """A whole index in memory.

    Attributes:
        header: what it is.
        codes: uint8 [n, code_size], in the order of the file.
        own_ids: int64 [n]; None where ids are row numbers.
    """

    header: Header
    codes: Codes
    own_ids: Ids | None

    @property
    def ids(self) -> Ids:
        """The items' ids, int64 [n]."""
        return np.arange(self.header.n, dtype=np.int64) if self.own_ids is None else self.own_ids


def read_contents(source: IndexFile) -> Contents:
    """Read and check all codes and ids.

    Raises:
        DataError: see :func:`read_header`; codes out of range, the id -1, or a repeated id; more than the memory holds.
    """
    header, what = read_header(source), str(source.path)
    check_memory(source.size, what)
    spans = list(header.spans(max(1, header.n)))
    parts = [header._stored(source, *span) for span in spans] or [header._stored(source, 0, 0, 0)]
    stored = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if header.words is not None:
        stored = header.words.whole(stored, np.repeat(np.arange(len(header.sizes)), header.sizes))
    codes, ids = check_codes(stored, *header.codebooks.shape[:2], what=what), None
    if header.id_starts is not None:
        ids = np.concatenate([np.empty(0, np.int64), *(header.ids(source, *span) for span in spans)])
        if bool((ids == -1).any()):
            raise DataError(f"{what}: an item has the id -1, which marks a missing result: give it another")
        repeated = repeated_id(ids)
        if repeated is not None:
            raise DataError(f"{what}: id {repeated} occurs more than once: every item needs its own")
    return Contents(header, codes, ids)


def contents_of(index: Any, what: str = "index") -> Contents:
    """The contents of a Faiss index in memory. Raises as :func:`read_contents`."""
    return read_contents(SerialisedIndex(index, what))


def read_header(source: IndexFile) -> Header:
    """Locate the codes and ids of an index without reading them.

    Raises:
        DataError: damaged, another kind of index or metric, not trained, or without a GPQ model's codebooks.
    """
    return _Reader(source).read()


class _Reader:
    """Reads a header from its first byte on; ``at`` is the next one."""

    def __init__(self, source: IndexFile) -> None:
        self.source, self.path, self.size, self.at = source, source.path, source.size, 0

    def read(self) -> Header:
        if not self.size:
            raise DataError(f"{self.path} is empty: build the index again")
        kind, d, n = self.start(*_TYPES)
        name = _TYPES[kind]
        if kind == b"IxPT":
            number, transform = self.take("i4s")
            self.agree(number == 1 and transform == b"RmDT")
            places = self.vector("<i4")
            moved = self.take("ii?")[:2]
            kind, inner, held = self.start(b"IwPf")
            self.agree(moved == (d, inner) and held == n)
            found = self.lists(kind, d, inner, n, name, places)
        elif kind in _OLD_TYPES:
            found = self.lists(kind, d, d, n, name, None)
        else:
            mapped = kind not in _ROW_TYPES
            if mapped:
                kind, *sizes = self.start(*_ROW_TYPES)
                self.agree(sizes == [d, n])
            found = self.rows(kind, d, n, name, mapped=mapped)
        self.agree(self.at == self.size)
        return found

    # Parts ------------------------------------------------------------------------------------------------------------

    def take(self, form: str) -> tuple[Any, ...]:
        """The next numbers."""
        size = struct.calcsize(f"<{form}")
        data = self.source.bytes(self.at, size)
        if len(data) < size:
            raise DataError(f"{self.path} is truncated: build it again")
        self.at += size
        return struct.unpack(f"<{form}", data)

    def start(self, *types: bytes) -> tuple[bytes, int, int]:
        """Type, d and number of items of an index of one of these types."""
        begin = self.source.bytes(self.at, 32)
        kind = begin[:4]
        if kind not in types:
            if self.at == 0 and not is_faiss(begin):
                raise DataError(
                    f"{self.path} is not a Faiss index: use the output of 'gpq index' or faiss.write_index"
                )
            named = repr(kind.decode("ascii", "replace")) if kind.isalnum() else "unknown"
            raise DataError(
                f"{self.path} holds an index of type {named}, not the product-quantised codes (IndexPQ) of a GPQ model, "
                "or it is damaged"
            )
        kind, d, n, _, _, trained, metric = self.take(INDEX)
        if metric != 0:
            raise DataError(
                f"{self.path}: its metric is not inner product, the only one GPQ codes have: export the model again"
            )
        if not trained:
            raise DataError(f"{self.path}: not trained, so it holds no codebooks: export the model again")
        self.agree(d > 0 and 0 <= n <= self.size)
        return kind, d, n

    def skip(self, count: int, each: int = 1) -> int:
        """The next array, of ``count`` values: where it starts."""
        (stated,) = self.take("Q")
        start = self.at
        self.at += count * each
        self.agree(stated == count and self.at <= self.size)
        return start

    def vector(self, dtype: str, count: int | None = None) -> NDArray[Any]:
        """The values of the next array."""
        size = np.dtype(dtype).itemsize
        if count is None:
            count = int(struct.unpack("<Q", self.source.bytes(self.at, 8).ljust(8, b"\0"))[0])
        start = self.skip(count, size)
        check_memory(count * size, str(self.path))
        return self.source.read(dtype, start, count)

    def agree(self, fine: bool) -> None:
        if not fine:
            raise DataError(
                f"{self.path} is damaged or truncated, or set up in a way that GPQ codes do not have: its sizes contradict each "
                "other; build it again"
            )

    def quantizer(self, d: int) -> Floats:
        """The centroids, float32 [M, K, d / M]."""
        stated, M, bits = self.take(QUANTIZER)
        self.agree(stated == d and 2 <= bits <= 8 and 1 <= M <= d and d % M == 0)
        return self.vector("<f4", d << bits).reshape(M, 1 << bits, d // M)

    def codebooks(self, centroids: Floats) -> tuple[str, Floats]:
        """Form and codebooks of an index without FastScan."""
        try:
            return "flat", check_codebooks(centroids, what=str(self.path))
        except DataError as plain:
            try:
                return "fused", unfuse(centroids)
            except DataError:
                raise plain from None

    # Forms ------------------------------------------------------------------------------------------------------------

    def rows(self, kind: bytes, d: int, n: int, name: str, *, mapped: bool) -> Header:
        centroids = self.quantizer(d)
        M, K, _ = centroids.shape
        rows = BLOCK_ROWS
        if kind == b"IPfs":
            form, Z = "fastscan", check_codebooks(centroids, what=str(self.path))
            _, rows, _, padded, even = self.take(FASTSCAN)
            self.fastscan(M, K, rows, even)
            self.agree(padded == -(-n // rows) * rows)
            start = self.skip(padded // rows * block_bytes(M, rows))
        else:
            form, Z = self.codebooks(centroids)
            start = self.skip(n * code_size(M, K))
            self.take(ROWS)
        id_starts = np.array([self.skip(n, 8)]) if mapped else None
        return Header(form, Z, n, np.array([n]), np.array([start]), id_starts, d, name, rows=rows)

    def fastscan(self, M: int, K: int, rows: int, even: int) -> None:
        self.agree(K == 16 and M <= MAX_CODEBOOKS and rows in _HEIGHTS and even == M + M % 2)

    def lists(self, kind: bytes, D: int, d: int, n: int, name: str, places: NDArray[Any] | None) -> Header:
        """Lists made of codewords behind ``places``, the map of a transform; or of an earlier version."""
        count, nprobe = self.take(IVF)
        self.agree(1 <= count <= _MOST_LISTS and nprobe > 0)
        self.agree(self.start(b"IxFI")[1:] == (d, count))
        vectors = self.vector("<f4", count * d).reshape(count, d)
        self.agree(self.take(DIRECT_MAP) == (0, 0))
        residual, size = self.take(RESIDUAL)
        self.agree(residual == (places is not None))
        fast, rows, even = kind == b"IwPf", BLOCK_ROWS, 0
        if fast:
            rows, even, _, _ = self.take(LISTS)
        centroids = self.quantizer(d)
        M, K, _ = (int(part) for part in centroids.shape)
        self.agree(size == code_size(M, K))
        if fast:
            self.fastscan(M, K, rows, even)
            sizes, id_starts, code_starts = self.blocks(count, M, rows)
        else:
            sizes, id_starts, code_starts = self.arrays(count, n, size)
        self.agree(sum(sizes.tolist()) == n)
        words = None
        if places is not None:
            words = self.words(places, vectors, centroids, D)
            form, Z = "ivf", words.Z
        elif fast:
            form, Z = "ivf-fastscan", check_codebooks(centroids, what=str(self.path))
        else:
            form, Z = self.codebooks(centroids)
            self.agree(form == "fused")
            form = "ivf-fused"
        return Header(form, Z, n, sizes, code_starts, id_starts, D, name, words, rows)

    def blocks(self, count: int, M: int, rows: int) -> tuple[Ids, Ids, Ids]:
        """Sizes of the lists, and where their ids and codes are; each states its own sizes, so that all are visited."""
        each = block_bytes(M, rows)
        kind, lists, _, height, stated = self.take(BLOCKS)
        self.agree((kind, lists, height, stated) == (b"ilbl", count, rows, each))
        sizes, ids, codes = (np.zeros(count, np.int64) for _ in range(3))
        for number in range(count):
            (n,) = self.take("Q")
            self.agree(n <= self.size)
            sizes[number], ids[number] = n, self.at
            self.at += 8 * n
            codes[number] = self.skip(-(-n // rows) * each)
        return sizes, ids, codes

    def arrays(self, count: int, n: int, size: int) -> tuple[Ids, Ids, Ids]:
        """As :meth:`blocks`, of plain arrays: all sizes first, then codes and ids of each list."""
        kind, lists, stated, form = self.take("4sQQ4s")
        self.agree((kind, lists, stated) == (b"ilar", count, size) and form in (b"full", b"sprs"))
        sizes = self.vector("<i8")
        if form == b"sprs":  # numbers and sizes of the lists that are not empty
            self.agree(len(sizes) % 2 == 0 and bool(((sizes[::2] >= 0) & (sizes[::2] < count)).all()))
            filled, sizes = sizes, np.zeros(count, np.int64)
            sizes[filled[::2]] = filled[1::2]
        self.agree(len(sizes) == count and bool(((sizes >= 0) & (sizes <= n)).all()))
        self.agree(sum(sizes.tolist()) == n)
        starts = self.at + (np.cumsum(sizes) - sizes) * (size + 8)
        self.at += n * (size + 8)
        return sizes, starts + sizes * size, starts

    def words(self, places: NDArray[Any], vectors: Floats, centroids: Floats, D: int) -> WordLists:
        """The lists of form ``ivf``: what they are made of follows from the file, and must give the same file."""
        rest, _, width = (int(part) for part in centroids.shape)
        # The first place is of the first dimension behind those of the P codebooks that name a list.
        self.agree(len(places) == rest * width and 0 <= int(places[0]) < D)
        first = int(places[0])
        d, left = divmod(D - first, rest)
        self.agree(left == 0 and 0 < d <= width and first % d == 0 and first <= LEVELS * d)
        P = first // d
        self.agree(16 <= len(vectors) <= 16**P + 16 if P else len(vectors) == 1)
        check_memory(8 * vectors.nbytes, str(self.path))
        named = (places >= 0) & (places < first)
        x = np.zeros((len(vectors), first), np.float32)
        x[:, places[named]] = vectors[:, named]
        names = x.reshape(len(x), P, d)
        Z = centroids[:, :, :d]
        if P:
            Z = np.concatenate([names[:16].transpose(1, 0, 2), Z])
        words = np.zeros((len(names), P), np.uint8)
        for m in range(P):
            words[:, m] = (
                (names[:, m, None] == Z[m]).all(axis=2).argmax(axis=1)
            )  # exactly: others may be near
        made = WordLists(check_codebooks(Z, what=str(self.path)), words)
        self.agree(
            np.array_equal(made.dimensions.reshape(-1), places) and np.array_equal(made.centroids, vectors)
        )
        self.agree(not centroids[:, :, d:].any() and len(np.unique(made.keys)) == len(words))
        return made
