"""Forms of codes in Faiss indexes, and their bytes.

============  ============================================================================================================
form          Faiss index
============  ============================================================================================================
``flat``      ``IndexPQ`` with the model's codebooks (of log2 K bits, where K is not 16)
``fused``     ``IndexPQ``, 8-bit, byte-fused codebooks, the same bytes
``fastscan``  ``IndexPQFastScan``
``ivf``       ``IndexIVFPQFastScan`` by residual behind a ``RemapDimensionsTransform``, in an ``IndexPreTransform``: the lists
              are made of the first P codewords (:class:`WordLists`), and hold the other M - P codebooks
============  ============================================================================================================

All but ``ivf`` are in an ``IndexIDMap2`` if items have explicit ids; lists store ids anyway. The scores are the same in all forms, so
codes can be converted without encoding. Earlier versions wrote lists by k-means without residuals, ``ivf-fastscan`` and ``ivf-fused``,
which are still read.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import bits_per_code, code_size, pack_codes, unpack_codes
from ..codes.blocks import block_bytes, pack_blocks
from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import fuse
from ..errors import UsageError

Form = Literal["flat", "fused", "fastscan", "ivf"]
FORMS: tuple[Form, ...] = ("flat", "fused", "fastscan", "ivf")
OLD_LISTS = ("ivf-fastscan", "ivf-fused")
"""Forms of earlier versions."""
LEVELS = 4
"""Maximum codebooks of a list's name."""
_TYPICAL = 2048
"""Items that the list of a random item should have at least, for the choice of P."""


def check_form(form: str, M: int, K: int) -> Form:
    """``form``, if codes of M codebooks of K codewords can be stored so. Raises UsageError: not, or an unknown form."""
    if form not in FORMS:
        raise UsageError(f"kind {form!r}: choose from {', '.join(FORMS)}")
    if K != 16 and form != "flat":
        raise UsageError(f"kind {form!r} needs 16 codewords per codebook, these have {K}: use 'flat'")
    if M == 1 and form == "fused":
        raise UsageError("kind 'fused' needs two codebooks or more, there is one: use 'flat' or 'fastscan'")
    return form


# Lists made of codewords ----------------------------------------------------------------------------------------------


def first_words(codes: Codes, P: int) -> NDArray[np.int64]:
    """The first P codewords of 4-bit codes as one number, the first in the highest bits: int64 [n]. P is at most :data:`LEVELS`."""
    head = np.zeros((len(codes), 2), np.uint8)
    head[:, : codes.shape[1]] = codes[:, :2] << 4 | codes[:, :2] >> 4
    return head.view(">u2")[:, 0].astype(np.int64) >> 4 * (LEVELS - P)


def choose_P(counts: Ids, M: int, Z: Floats) -> int:
    """How many codebooks name the lists: as many as leave lists that are worth a visit.

    Args:
        counts: int64 [16^levels], items by their first ``levels`` codewords (:func:`first_words`), ``levels`` at most :data:`LEVELS`.
        Z: codebooks, float32 [M, 16, d].
    """
    n = int(counts.sum())
    most = min(LEVELS, M - 1, (len(counts).bit_length() - 1) // 4)
    distinct = [
        len(np.unique(book, axis=0)) == 16 for book in Z[:most]
    ]  # equal codewords could not be told apart
    P = 0
    while most > P and distinct[P]:
        sizes = counts.reshape(16 ** (P + 1), -1).sum(axis=1)
        if P and (
            np.count_nonzero(sizes) > 8 * n**0.5 or np.square(sizes.astype(np.float64)).sum() < _TYPICAL * n
        ):
            break
        P += 1
    return P


@dataclass(frozen=True, eq=False)
class WordLists:
    """Inverted lists whose names are the first P codewords of their items.

    The first 16 lists, filled or not, have one codeword number throughout, so that all codewords of these codebooks are in the file; the
    others are in ascending order. Without P there is one list.

    Attributes:
        Z: codebooks, float32 [M, 16, d].
        words: uint8 [lists, P].
    """

    Z: Floats
    words: NDArray[np.uint8]

    @classmethod
    def of(cls, counts: Ids, Z: Floats) -> Self:
        """The lists for items with these first words (:func:`choose_P`)."""
        P = choose_P(counts, len(Z), Z)
        if not P:
            return cls(Z, np.zeros((1, 0), np.uint8))
        sizes = counts.reshape(16**P, -1).sum(axis=1)
        same = np.arange(16) * ((16**P - 1) // 15)
        keys = np.concatenate([same, np.setdiff1d(np.flatnonzero(sizes), same)])
        return cls(Z, np.stack([(keys >> 4 * (P - 1 - m)) & 15 for m in range(P)], axis=1).astype(np.uint8))

    @property
    def P(self) -> int:
        """Codebooks that name a list."""
        return int(self.words.shape[1])

    @cached_property
    def keys(self) -> Ids:
        """:func:`first_words` of each list, int64 [lists]."""
        return self.words.astype(np.int64) @ 16 ** np.arange(self.P)[::-1]

    def list_of(self, codes: Codes) -> NDArray[np.int32]:
        """The list of each code, int32 [n]; -1 if there is none."""
        number = np.full(16**self.P, -1, np.int32)
        number[self.keys] = np.arange(len(self.keys))
        return number[first_words(codes, self.P)]

    def stored(self, codes: Codes) -> Codes:
        """The codewords behind the first P of each code, packed: uint8 [n, ceil((M - P) / 2)]."""
        if self.P % 2 == 0:
            return np.ascontiguousarray(codes[:, self.P // 2 :])
        return pack_codes(unpack_codes(codes, len(self.Z), 16)[:, self.P :], 16)

    def whole(self, stored: Codes, lists: Ids) -> Codes:
        """Codes from :meth:`stored` ones [n, any] and the list of each, int64 [n]."""
        M, half = len(self.Z), self.P // 2
        codes = np.zeros((len(stored), (M + 1) // 2), np.uint8)
        codes[:, : (self.P + 1) // 2] = pack_codes(self.words, 16).take(lists, axis=0)
        if self.P % 2 == 0:
            codes[:, half:] = stored
        else:  # between the bytes of the codes
            codes[:, half : half + stored.shape[1]] |= stored << 4
            codes[:, half + 1 :] |= stored[:, : codes.shape[1] - half - 1] >> 4
        return codes

    # Faiss wants sub-vectors of equal width: those of the first P codebooks are spread over the others, whose codewords are 0 there.

    @cached_property
    def dimensions(self) -> NDArray[np.int32]:
        """The dimension of a query at each place of a vector in the index, int32 [M - P, width]; -1 for zeros."""
        M, _, d = (int(n) for n in self.Z.shape)
        P, rest = self.P, M - self.P
        spare = -(-P * d // rest)
        places = np.full((rest, d + spare), -1, np.int32)
        places[:, :d] = (P + np.arange(rest))[:, None] * d + np.arange(d)
        first = np.full(rest * spare, -1, np.int32)
        first[: P * d] = np.arange(P * d)
        places[:, d:] = first.reshape(rest, spare)
        return places

    @cached_property
    def centroids(self) -> Floats:
        """Centroids of the lists in the index, float32 [lists, (M - P) * width]."""
        M, _, d = self.Z.shape
        x = np.zeros((len(self.words), M * d), np.float32)
        for m in range(self.P):
            x[:, m * d : (m + 1) * d] = self.Z[m][self.words[:, m]]
        at = self.dimensions.reshape(-1)
        return np.where(at >= 0, x[:, np.maximum(at, 0)], np.float32(0))


# The bytes of an index, which are Faiss' ------------------------------------------------------------------------------

BLOCK_ROWS = 32  # codes in a block of FastScan as written here
INDEX = "4siqqq?i"  # type, d, number of items, two unused numbers, is_trained, metric (0: inner product)
QUANTIZER = "QQQ"  # d, M, bits; then the centroids
ROWS = "i?i"  # behind the codes of an IndexPQ: search_type, encode_signs, polysemous_ht
FASTSCAN = "iiiqQ"  # before the codes of an IndexPQFastScan: implem, bbs, qbs, ntotal2, M2
IVF = "QQ"  # number of lists, nprobe; then the coarse quantiser
DIRECT_MAP = "BQ"  # type and length; none
RESIDUAL = "?Q"  # by_residual, code_size
LISTS = "iQiQ"  # of FastScan: bbs, M2, implem, qbs2
# Type, number of lists, code_size (-1), rows and bytes of a block; then each list: number of ids, ids, bytes of codes, codes.
BLOCKS = "4sQqQQ"


def pack(form: str, *values: Any) -> bytes:
    """Numbers as Faiss writes them."""
    return struct.pack(f"<{form}", *values)


def _start(kind: bytes, d: int, n: int) -> bytes:
    return pack(INDEX, kind, d, n, 1 << 20, 1 << 20, True, 0)


def _vector(values: NDArray[Any]) -> bytes:
    return pack("Q", values.size) + values.tobytes()


def _quantizer(books: Floats) -> bytes:
    M, K, d = (int(n) for n in books.shape)
    return pack(QUANTIZER, M * d, M, bits_per_code(K)) + _vector(books)


def row_header(form: Form, Z: Floats, n: int, *, mapped: str | None = None) -> tuple[bytes, int, bytes]:
    """For a file of ``n`` items without lists: bytes before the codes, number of bytes of codes, and bytes before the ids.

    With ``mapped``, ``IDMap`` or ``IDMap2``, the ids follow, 8 bytes each.
    """
    books = fuse(Z) if form == "fused" else Z
    M, K, d = (int(size) for size in books.shape)
    fast = form == "fastscan"
    blocks = -(-n // BLOCK_ROWS)
    count = blocks * block_bytes(M, BLOCK_ROWS) if fast else n * code_size(M, K)
    head = _start({"IDMap": b"IxMp", "IDMap2": b"IxM2"}[mapped], M * d, n) if mapped else b""
    head += _start(b"IPfs" if fast else b"IxPq", M * d, n) + _quantizer(books)
    if fast:
        head += pack(FASTSCAN, 0, BLOCK_ROWS, 0, blocks * BLOCK_ROWS, M + M % 2)
    tail = b"" if fast else pack(ROWS, 0, False, M * bits_per_code(K) + 1)
    return head + pack("Q", count), count, tail + (pack("Q", n) if mapped else b"")


def row_parts(
    form: Form, Z: Floats, n: int, mapped: str | None, codes: Iterable[Codes], ids: Iterable[Ids]
) -> Iterator[bytes | memoryview]:
    """The bytes of a file without lists, as :func:`row_header`; blocks of codes are multiples of 32 rows, or the last."""
    head, _, tail = row_header(form, Z, n, mapped=mapped)
    yield head
    for block in codes:
        if len(block):
            yield pack_blocks(block, len(Z)).data if form == "fastscan" else np.ascontiguousarray(block).data
    yield tail
    for some in ids if mapped else ():
        yield np.ascontiguousarray(some, "<i8").data


def list_header(lists: WordLists, n: int) -> bytes:
    """Bytes before the first list of a file with lists of ``n`` items."""
    (M, width), d, size = lists.dimensions.shape, lists.Z.shape[2], len(lists.words)
    nprobe = min(size, max(16, size // 64))  # the default for plain Faiss
    books = np.zeros((M, 16, width), np.float32)
    books[:, :, :d] = lists.Z[lists.P :]
    D, inner = len(lists.Z) * d, M * width
    head = (
        _start(b"IxPT", D, n)
        + pack("i4s", 1, b"RmDT")
        + _vector(lists.dimensions)
        + pack("ii?", D, inner, True)
    )
    head += _start(b"IwPf", inner, n) + pack(IVF, size, nprobe) + _start(b"IxFI", inner, size)
    head += _vector(lists.centroids) + pack(DIRECT_MAP, 0, 0) + pack(RESIDUAL, True, (M + 1) // 2)
    head += pack(LISTS, BLOCK_ROWS, M + M % 2, 0, 0) + _quantizer(books)
    return head + pack(BLOCKS, b"ilbl", size, -1, BLOCK_ROWS, block_bytes(M, BLOCK_ROWS))


def list_parts(
    lists: WordLists, n: int, ids: Iterable[Ids], codes: Iterable[Codes]
) -> Iterator[bytes | memoryview]:
    """The bytes of a list of ``n`` items, from blocks of ids and codes; blocks of codes are multiples of 32 rows, or the last."""
    M = len(lists.Z) - lists.P
    yield pack("Q", n)
    for some in ids:
        yield np.ascontiguousarray(some, "<i8").data
    yield pack("Q", -(-n // BLOCK_ROWS) * block_bytes(M, BLOCK_ROWS))
    for block in codes:
        if len(block):
            yield pack_blocks(lists.stored(block), M).data


def faiss_index(codes: Codes, ids: Ids | None, Z: Floats, form: Form) -> Any:
    """The Faiss index of checked codes.

    Args:
        ids: int64 [n], or None where an id is a position.
    """
    n, M = len(codes), len(Z)
    parts: list[bytes | memoryview]
    if form == "ivf":
        levels = min(LEVELS, M - 1)
        lists = WordLists.of(np.bincount(first_words(codes, levels), minlength=16**levels), Z)
        list_of = lists.list_of(codes)
        order = np.argsort(list_of.astype(np.uint16), kind="stable")
        bounds = np.searchsorted(list_of[order], np.arange(len(lists.words) + 1))
        parts = [list_header(lists, n)]
        for start, stop in itertools.pairwise(bounds.tolist()):
            rows = order[start:stop]
            parts += list_parts(lists, len(rows), [rows if ids is None else ids[rows]], [codes[rows]])
    else:
        mapped, own = (None, []) if ids is None else ("IDMap2", [ids])
        parts = list(row_parts(form, Z, n, mapped, [codes], own))
    return faiss.deserialize_index(np.frombuffer(b"".join(parts), np.uint8))
