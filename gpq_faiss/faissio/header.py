"""The one reader of index files: where codes and ids are, for any form, from the bytes before them.

Files may be damaged or hostile, so no size is believed before it was compared with the file's, and all sizes must agree. Faiss' own reader
is not used: it checks little.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import check_codes, code_size
from ..codes.blocks import block_bytes, unpack_blocks
from ..codes.checks import MAX_CODEBOOKS, Codes, Floats, Ids, check_codebooks, check_unique
from ..codes.codebooks import unfuse
from ..errors import DataError, UsageError
from ..inputs import check_file, check_memory
from ..store.header import codebooks_fingerprint
from . import storage
from .storage import BLOCK_ROWS, WordLists

_ROW_TYPES = {b"IxPq": "IndexPQ", b"IPfs": "IndexPQFastScan"}
_OLD_TYPES = {b"IwPQ": "IndexIVFPQ", b"IwPf": "IndexIVFPQFastScan"}
_MAPS = {b"IxMp": "IndexIDMap", b"IxM2": "IndexIDMap2"}
_TYPES = _MAPS | {b"IxPT": "IndexPreTransform"} | _ROW_TYPES | _OLD_TYPES
_FOREIGN = (b"Ix", b"Iw", b"IB", b"IH", b"Il")
_CONSTANTS = struct.pack("<qq", 1 << 20, 1 << 20)  # what Faiss writes after the number of items, for any type
_HEIGHTS = (32, 64, 96, 128)  # of FastScan's blocks
_MOST_LISTS = 1 << 20

INDEX_FILE = "an index file (gpq index, or faiss.write_index)"


def is_faiss(start: bytes) -> bool:
    """Whether the first 32 bytes of a file are those of a Faiss index, readable here or not."""
    return start[:4] in _TYPES or start[:2] in _FOREIGN or start[16:32] == _CONSTANTS


# Bytes ----------------------------------------------------------------------------------------------------------------


class IndexFile:
    """An open index file for reading in place. Thread-safe.

    The file is read, not memory-mapped: truncation of a mapped file would kill the process (SIGBUS). Replacing the file under its name has
    no effect here.

    Attributes:
        path: its name at opening, for errors.
        size: its size at opening in bytes.

    Raises:
        DataError: missing or unreadable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path: Path | str = Path(path)
        check_file(Path(path), INDEX_FILE)
        try:
            self._file = Path(path).open("rb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        self._mark = self._state()
        self.size = self._mark[0]

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """Raises DataError: the file was modified since it was opened, by size and modification time. UsageError: it is closed."""
        if self._file.closed:
            raise UsageError(f"{self.path} was closed: open it again")
        if self._state() != self._mark:
            raise DataError(f"{self.path} was changed while it was in use: open it again")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def fill(self, held: Any, at: int) -> None:
        """Fill the array ``held`` from byte ``at`` on. Raises DataError: the file was truncated, or reading fails."""
        data = memoryview(held).cast("B")
        try:
            while data:
                got = os.preadv(self._file.fileno(), [data], at)
                if not got:
                    raise DataError(f"{self.path} was changed while it was in use: open it again")
                data, at = data[got:], at + got
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from None

    def read(self, dtype: Any, at: int, count: int) -> NDArray[Any]:
        """``count`` numbers from byte ``at`` on. Raises as :meth:`fill`."""
        held = np.empty(count, dtype)
        if count:
            self.fill(held, at)
        return held


class _Serialised(IndexFile):
    """A Faiss index in memory as the bytes of its file."""

    def __init__(self, index: Any) -> None:
        self.path, self._data = "index", to_bytes(index)
        self.size = len(self._data)

    def fill(self, held: Any, at: int) -> None:
        held.view(np.uint8)[:] = self._data[at : at + held.nbytes]


def to_bytes(index: Any) -> NDArray[np.uint8]:
    """The bytes of the file of a Faiss index (also a binary one). Raises DataError: Faiss cannot write an index of this kind."""
    write = faiss.serialize_index_binary if isinstance(index, faiss.IndexBinary) else faiss.serialize_index
    try:
        return np.asarray(write(index), np.uint8)
    except (RuntimeError, TypeError) as error:
        raise DataError(f"Faiss cannot write an index of the kind {type(index).__name__}") from error


# Headers and contents -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Header:
    """What an index file holds, and where.

    Attributes:
        source: the file.
        n: number of items.
        width: of vectors in Faiss.
        faiss_class: name of the index' class.
        form: of the codes (:mod:`.storage`), possibly one of :data:`.storage.OLD_LISTS`.
        codebooks: float32 [M, K, d], unit-norm; of byte-fused ones the 4-bit ones.
        sizes: int64 [lists], items per list; without lists a single entry.
        code_starts: int64 [lists], byte offset of the codes of each list.
        id_starts: int64 [lists], byte offset of its ids; None if ids are row numbers.
        words: the lists of form ``ivf``.
        rows: codes per FastScan block.
    """

    source: IndexFile
    n: int
    width: int
    faiss_class: str
    form: str
    codebooks: Floats
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
    def fingerprint(self) -> str:
        """Fingerprint of the codebooks, as in all files of this package."""
        return codebooks_fingerprint(self.codebooks)

    def _stored(self, number: int, start: int, stop: int) -> Codes:
        """Rows ``start:stop`` of a list without the codewords that name it."""
        n, at = max(0, stop - start), int(self.code_starts[number])
        if "fastscan" not in self.form and self.words is None:
            size = self.code_size
            return self.source.read(np.uint8, at + start * size, n * size).reshape(-1, size)
        M = len(self.codebooks) - (0 if self.words is None else self.words.P)
        block, first = block_bytes(M, self.rows), start // self.rows
        packed = self.source.read(np.uint8, at + first * block, (-(-stop // self.rows) - first) * block)
        before = start - first * self.rows
        return unpack_blocks(packed, before + n, M, self.rows)[before:]

    def codes(self, number: int, start: int, stop: int) -> Codes:
        """Codes of rows ``start:stop`` of a list, uint8 [n, code_size]."""
        stored = self._stored(number, start, stop)
        return stored if self.words is None else self.words.whole(stored, np.full(len(stored), number))

    def ids(self, number: int, start: int, stop: int) -> Ids:
        """Ids of rows ``start:stop`` of a list, int64 [n]."""
        if self.id_starts is None:
            return np.arange(start, stop, dtype=np.int64)
        return self.source.read("<i8", int(self.id_starts[number]) + 8 * start, max(0, stop - start))

    def spans(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield list number, first row and end of blocks of all rows; without lists there is one."""
        for number in np.flatnonzero(self.sizes).tolist():
            size = int(self.sizes[number])
            for start in range(0, size, rows):
                yield number, start, min(size, start + rows)


@dataclass(frozen=True, eq=False)
class Contents:
    """A whole index in memory: codes uint8 [n, code_size] in the order of the file, and its ids int64 [n], None if they are row numbers."""

    header: Header
    codes: Codes
    own_ids: Ids | None

    @property
    def ids(self) -> Ids:
        """The items' ids, int64 [n]."""
        return np.arange(self.header.n, dtype=np.int64) if self.own_ids is None else self.own_ids


def read_contents(header: Header) -> Contents:
    """Read and check all codes and ids.

    Raises:
        DataError: codes out of range, the id -1, or a repeated id; more than the memory holds.
    """
    what = str(header.source.path)
    check_memory(header.source.size, what)
    spans = list(header.spans(max(1, header.n)))
    parts = [header._stored(*span) for span in spans] or [header._stored(0, 0, 0)]
    stored = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if header.words is not None:
        stored = header.words.whole(stored, np.repeat(np.arange(len(header.sizes)), header.sizes))
    codes, ids = check_codes(stored, *header.codebooks.shape[:2], what=what), None
    if header.id_starts is not None:
        ids = np.concatenate([np.empty(0, np.int64), *(header.ids(*span) for span in spans)])
        check_unique(ids, what)
    return Contents(header, codes, ids)


def contents_of(index: Any) -> Contents:
    """The contents of a Faiss index in memory. Raises as :func:`read_header`, :func:`read_contents`."""
    return read_contents(read_header(_Serialised(index)))


def read_header(source: IndexFile) -> Header:
    """Locate the codes and ids of an index without reading them.

    Raises:
        DataError: damaged, another kind of index or metric, not trained, or without a GPQ model's codebooks.
    """
    reader = _Reader(source)
    kind, d, n = reader.start(*_TYPES)
    about: dict[str, Any] = {"source": source, "n": n, "width": d, "faiss_class": _TYPES[kind]}
    if kind in _OLD_TYPES:
        about |= reader.lists(kind, d, n)
    elif kind in _MAPS or kind in _ROW_TYPES:
        about |= reader.rows(kind, d, n)
    else:
        about |= reader.word_lists(d, n)
    reader.agree(reader.at == source.size)
    return Header(**about)


class _Reader:
    """Reads a header from its first byte on; ``at`` is the next one."""

    def __init__(self, source: IndexFile) -> None:
        self.source, self.path, self.size, self.at = source, source.path, source.size, 0

    # Parts ------------------------------------------------------------------------------------------------------------

    def peek(self, count: int) -> bytes:
        """The next bytes, fewer at the end of the file."""
        return self.source.read(np.uint8, self.at, max(0, min(count, self.size - self.at))).tobytes()

    def take(self, form: str) -> tuple[Any, ...]:
        """The next numbers."""
        size = struct.calcsize(f"<{form}")
        data = self.peek(size)
        if len(data) < size:
            raise DataError(f"{self.path} is truncated: build it again")
        self.at += size
        return struct.unpack(f"<{form}", data)

    def start(self, *types: bytes) -> tuple[bytes, int, int]:
        """Type, d and number of items of an index of one of these types."""
        begin = self.peek(32)
        kind = begin[:4]
        if kind not in types:
            if self.at == 0 and not is_faiss(begin):
                what = "is not a Faiss index" if begin else "is empty"
                raise DataError(f"{self.path} {what}: use the output of 'gpq index' or faiss.write_index")
            named = repr(kind.decode("ascii", "replace")) if kind.isalnum() else "unknown"
            raise DataError(
                f"{self.path} holds an index of type {named}, not the product-quantised codes (IndexPQ) of a GPQ model, "
                "or it is damaged"
            )
        kind, d, n, _, _, trained, metric = self.take(storage.INDEX)
        if metric != 0 or not trained:
            raise DataError(
                f"{self.path}: not trained, or its metric is not inner product, the only one GPQ codes have: export the model again"
            )
        self.agree(d > 0 and 0 <= n <= self.size)
        return kind, d, n

    def skip(self, count: int | None, each: int) -> tuple[int, int]:
        """The next array, of ``count`` values if that is known: where it starts, and how many it has."""
        (stated,) = self.take("Q")
        start = self.at
        self.at += stated * each
        self.agree(count in (None, stated) and self.at <= self.size)
        return start, stated

    def vector(self, dtype: str, count: int | None = None) -> NDArray[Any]:
        """The values of the next array."""
        size = np.dtype(dtype).itemsize
        start, count = self.skip(count, size)
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
        stated, M, bits = self.take(storage.QUANTIZER)
        self.agree(stated == d and 2 <= bits <= 8 and 1 <= M <= d and d % M == 0)
        return self.vector("<f4", d << bits).reshape(M, 1 << bits, d // M)

    def codebooks(self, centroids: Floats, *, fast: bool) -> tuple[str, Floats]:
        """Form and codebooks of an index without lists."""
        try:
            return "fastscan" if fast else "flat", check_codebooks(centroids, what=str(self.path))
        except DataError as plain:
            try:
                return "fused", unfuse(centroids)
            except DataError:
                raise plain from None

    def fastscan(self, centroids: Floats, rows: int, even: int) -> int:
        """Bytes of a block of these rows."""
        M, K, _ = centroids.shape
        self.agree(K == 16 and M <= MAX_CODEBOOKS and rows in _HEIGHTS and even == M + M % 2)
        return block_bytes(M, rows)

    # Forms: values of a Header ----------------------------------------------------------------------------------------

    def rows(self, kind: bytes, d: int, n: int) -> dict[str, Any]:
        """An index without lists, or the map of ids around one."""
        mapped = kind in _MAPS
        if mapped:
            kind, *sizes = self.start(*_ROW_TYPES)
            self.agree(sizes == [d, n])
        centroids, rows = self.quantizer(d), BLOCK_ROWS
        form, Z = self.codebooks(centroids, fast=kind == b"IPfs")
        if kind == b"IPfs":
            _, rows, _, padded, even = self.take(storage.FASTSCAN)
            each = self.fastscan(centroids, rows, even)
            self.agree(form == "fastscan" and padded == -(-n // rows) * rows)
            start, _ = self.skip(padded // rows * each, 1)
        else:
            start, _ = self.skip(n * code_size(*centroids.shape[:2]), 1)
            self.take(storage.ROWS)
        ids = np.array([self.skip(n, 8)[0]]) if mapped else None
        places = {"sizes": np.array([n]), "code_starts": np.array([start]), "id_starts": ids}
        return {"form": form, "codebooks": Z, "rows": rows, **places}

    def word_lists(self, d: int, n: int) -> dict[str, Any]:
        """Lists made of codewords behind a transform."""
        number, transform = self.take("i4s")
        places = self.vector("<i4")
        moved = self.take("ii?")[:2]
        kind, inner, held = self.start(b"IwPf")
        self.agree((number, transform, moved, held) == (1, b"RmDT", (d, inner), n))
        return self.lists(kind, inner, n, places, d)

    def lists(
        self, kind: bytes, d: int, n: int, places: NDArray[Any] | None = None, D: int = 0
    ) -> dict[str, Any]:
        """Lists made of codewords behind ``places``, the map of a transform of D dimensions; or of an earlier version."""
        count, nprobe = self.take(storage.IVF)
        self.agree(1 <= count <= _MOST_LISTS and nprobe > 0)
        self.agree(self.start(b"IxFI")[1:] == (d, count))
        vectors = self.vector("<f4", count * d).reshape(count, d)
        self.agree(self.take(storage.DIRECT_MAP) == (0, 0))
        residual, size = self.take(storage.RESIDUAL)
        self.agree(residual == (places is not None))
        fast, rows, even = kind == b"IwPf", BLOCK_ROWS, 0
        if fast:
            rows, even, _, _ = self.take(storage.LISTS)
        centroids = self.quantizer(d)
        self.agree(size == code_size(*centroids.shape[:2]))
        each = self.fastscan(centroids, rows, even) if fast else size
        located = self.blocks(count, rows, each) if fast else self.arrays(count, n, each)
        self.agree(sum(located["sizes"].tolist()) == n)
        if places is not None:
            words = self.words(places, vectors, centroids, D)
            return {"form": "ivf", "codebooks": words.Z, "words": words, "rows": rows, **located}
        form, Z = self.codebooks(centroids, fast=fast)
        self.agree(form == ("fastscan" if fast else "fused"))
        return {"form": f"ivf-{form}", "codebooks": Z, "rows": rows, **located}

    def blocks(self, count: int, rows: int, each: int) -> dict[str, Ids]:
        """Sizes of the lists, and where their ids and codes are; each states its own sizes, so that all are visited."""
        kind, lists, _, height, stated = self.take(storage.BLOCKS)
        self.agree((kind, lists, height, stated) == (b"ilbl", count, rows, each))
        sizes, ids, codes = (np.zeros(count, np.int64) for _ in range(3))
        for number in range(count):
            ids[number], sizes[number] = self.skip(None, 8)
            codes[number], _ = self.skip(-(-int(sizes[number]) // rows) * each, 1)
        return {"sizes": sizes, "id_starts": ids, "code_starts": codes}

    def arrays(self, count: int, n: int, size: int) -> dict[str, Ids]:
        """As :meth:`blocks`, of plain arrays: all sizes first, then codes and ids of each list."""
        kind, lists, stated, form = self.take("4sQQ4s")
        self.agree((kind, lists, stated) == (b"ilar", count, size) and form in (b"full", b"sprs"))
        sizes = self.vector("<i8")
        if form == b"sprs":  # numbers and sizes of the lists that are not empty
            self.agree(len(sizes) % 2 == 0 and bool(((sizes[::2] >= 0) & (sizes[::2] < count)).all()))
            filled, sizes = sizes, np.zeros(count, np.int64)
            sizes[filled[::2]] = filled[1::2]
        self.agree(len(sizes) == count and bool(((sizes >= 0) & (sizes <= n)).all()))
        starts = self.at + (np.cumsum(sizes) - sizes) * (size + 8)
        self.at += n * (size + 8)
        return {"sizes": sizes, "id_starts": starts + sizes * size, "code_starts": starts}

    def words(self, places: NDArray[Any], vectors: Floats, centroids: Floats, D: int) -> WordLists:
        """The lists of form ``ivf``: what they are made of follows from the file, and must give the same file."""
        rest, _, width = (int(part) for part in centroids.shape)
        # The first place is of the first dimension behind those of the P codebooks that name a list.
        self.agree(len(places) == rest * width and 0 <= int(places[0]) < D)
        first = int(places[0])
        d, left = divmod(D - first, rest)
        self.agree(left == 0 and 0 < d <= width and first % d == 0 and first <= storage.LEVELS * d)
        P = first // d
        self.agree(16 <= len(vectors) <= 16**P + 16 if P else len(vectors) == 1)
        check_memory(8 * vectors.nbytes, str(self.path))
        named = (places >= 0) & (places < first)
        x = np.zeros((len(vectors), first), np.float32)
        x[:, places[named]] = vectors[:, named]
        names, Z = x.reshape(len(x), P, d), centroids[:, :, :d]
        if P:
            Z = np.concatenate([names[:16].transpose(1, 0, 2), Z])
        words = np.zeros((len(names), P), np.uint8)
        for m in range(P):  # exactly: others may be near
            words[:, m] = (names[:, m, None] == Z[m]).all(axis=2).argmax(axis=1)
        made = WordLists(check_codebooks(Z, what=str(self.path)), words)
        self.agree(
            np.array_equal(made.dimensions.reshape(-1), places)
            and np.array_equal(made.centroids, vectors)
            and not centroids[:, :, d:].any()
            and len(np.unique(made.keys)) == len(words)
        )
        return made
