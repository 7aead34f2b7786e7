"""``index.lists``: the arrays of inverted lists in one safetensors file, mapped when opened.

The file is built from any number of rows in passes over mapped files: rows are first distributed to
256 partitions by the first byte of their codes, and then each partition is sorted in memory.
Building and searching need no memory budget of their own: the operating system's page cache is the
budget.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids, check_unique
from ..compiled import BLOCK
from ..errors import DataError
from ..inputs import check_memory, reading
from ..progress import stage
from .lists import (
    LEVELS,
    InvertedLists,
    blocks_of,
    choose_prefix,
    codes_of,
    columns_of,
    first_words,
    levels_of,
    number_type,
    sort_codes,
    sublists,
    width_of,
)

_ROWS = 1 << 20
_PARTITIONS = 256
_TYPES = {"I64": np.int64, "F32": np.float32, "U32": np.uint32, "U8": np.uint8}
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}


class RowSource(Protocol):
    """Codes and ids that can be read in blocks, any number of times."""

    ntotal: int

    def blocks(self, size: int) -> Iterator[tuple[Codes, Ids]]:
        """Yield codes uint8 [n, code_size] and ids int64 [n], at most ``size`` at a time."""


def write_lists(out: Path, sources: Sequence[RowSource], Z: Floats) -> int:
    """Write the lists of all rows to a new file, with temporary files in the same folder.

    Args:
        out: a temporary path, which the caller moves into place.
        sources: sources of checked codes, with at least one row in all.
        Z: codebooks, float32 [M, K, d].

    Returns:
        The CRC of the codes and ids (:meth:`.lists.InvertedLists.crc`).

    Raises:
        DataError: there are no rows, or an id occurs twice or is -1.
    """
    M, K, _ = Z.shape
    counts, low, high = _survey(sources, M, K)
    sizes = counts.reshape(_PARTITIONS, -1).sum(axis=1)
    ends = np.append(0, np.cumsum(sizes))
    n = int(ends[-1])
    prefix = choose_prefix(counts.reshape(16 ** levels_of(M, K), -1).sum(axis=1))
    row_counts = np.zeros(16**prefix, np.int64)
    rows = 0
    codes_crc = 0
    ids_crc = 0

    def mapped(kind: Any, *shape: int) -> NDArray[Any]:
        with tempfile.TemporaryFile(dir=out.parent) as file:
            size = math.prod(shape) * np.dtype(kind).itemsize
            if sys.platform != "darwin":  # a full disk is an error now, and not a signal later
                os.posix_fallocate(file.fileno(), 0, size)
            file.truncate(size)
            return np.memmap(file, kind, "r+", shape=shape)

    columns = mapped(np.uint8, n, width_of(M, K))
    members = mapped(number_type(high, low), n)
    starts = mapped(number_type(n), n + 1)
    with stage("placing rows", n, "row") as placing:
        cursors = ends[:-1].copy()
        for source in sources:
            for codes, ids in source.blocks(_ROWS):
                _place(columns_of(codes, M, K), ids, columns, members, cursors)
                placing.update(len(ids))
    with stage("sorting rows", n, "row") as sorting:
        for partition in np.flatnonzero(sizes).tolist():
            span = slice(ends[partition], ends[partition + 1])
            block, ids, first = sort_codes(
                np.asarray(columns[span]), members[span].astype(np.int64)
            )
            codes_crc = zlib.crc32(codes_of(block, M, K).data, codes_crc)
            ids_crc = zlib.crc32(ids.data, ids_crc)
            # Each distinct code is kept once, so later partitions are not overwritten.
            distinct = block[first[:-1]]
            columns[rows : rows + len(distinct)] = distinct
            starts[rows : rows + len(distinct)] = first[:-1] + span.start
            members[span] = ids
            row_counts += np.bincount(first_words(distinct, prefix), minlength=16**prefix)
            rows += len(distinct)
            sorting.update(len(ids))
    starts[rows] = n
    names, sublist_ends = sublists(row_counts, prefix)
    arrays = {
        "ends": sublist_ends,
        "prefix": np.array([prefix]),
        "crc": np.array([codes_crc ^ ids_crc]),
        "codebooks": Z,
        "starts": starts[: rows + 1] if rows < n else starts[:0],
        "members": members,
        "names": names,
    }
    with out.open("wb") as file, stage("writing lists", rows, "row") as writing:
        _write(file, arrays, (-(-rows // BLOCK), columns.shape[1], BLOCK))
        for start in range(0, rows, _ROWS):
            stop = min(rows, start + _ROWS)
            file.write(blocks_of(columns[start:stop]).data)
            writing.update(stop - start)
    return codes_crc ^ ids_crc


def _survey(sources: Sequence[RowSource], M: int, K: int) -> tuple[Ids, int, int]:
    """Count rows by the first two bytes of their codes, and find the range of the ids.

    Returns:
        Numbers of rows, int64 [65536] (:func:`.lists.first_words`); the smallest id; the largest.

    Raises:
        DataError: there are no rows, or an id occurs twice or is -1.
    """
    n = sum(source.ntotal for source in sources)
    if not n:
        raise DataError("no codes: an index needs at least one item")
    counts = np.zeros(1 << 16, np.int64)
    low, high = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    is_ascending = True
    for source in sources:
        for block, ids in source.blocks(_ROWS):
            if len(ids):  # not all items of the block were removed
                words = first_words(columns_of(block, M, K), LEVELS)
                counts += np.bincount(words, minlength=len(counts))
                is_ascending &= bool(ids[0] > high and (ids[1:] > ids[:-1]).all())
                low, high = min(low, int(ids.min())), max(high, int(ids.max()))
    if not is_ascending or low < 0:
        check_memory(24 * n, f"comparing the ids of {n:,} items")
        all_ids = [ids for source in sources for _, ids in source.blocks(_ROWS)]
        check_unique(np.concatenate(all_ids), "ids")
    return counts, low, high


def _place(block: Codes, ids: Ids, columns: Codes, members: NDArray[Any], cursors: Ids) -> None:
    """Append rows to their partitions; ``cursors`` holds the next free row of each partition."""
    partitions = first_words(block, LEVELS) >> 8
    for partition in np.unique(partitions).tolist():
        rows = np.flatnonzero(partitions == partition)
        span = slice(cursors[partition], cursors[partition] + len(rows))
        columns[span], members[span] = block[rows], ids[rows]
        cursors[partition] += len(rows)


# The file -----------------------------------------------------------------------------------------


def _write(file: BinaryIO, arrays: Mapping[str, NDArray[Any]], blocks: tuple[int, ...]) -> None:
    """Write the header and all arrays of a safetensors file except the blocks, which are the last.

    Arrays of larger numbers come first, so that all are aligned: Numba would compile the search
    anew for arrays that are not.

    Args:
        blocks: shape of the blocks.
    """
    header, offset = {}, 0
    placeholder = np.broadcast_to(np.uint8(0), blocks)
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
    for name, array in {**arrays, "blocks": placeholder}.items():
        offsets = [offset, offset + array.size * array.itemsize]
        kind = _NAMES[array.dtype]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    file.write(len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        file.write(array.data)


def open_lists(path: Path) -> tuple[InvertedLists, int]:
    """Map the arrays of a file, and return the lists and the CRC of their codes and ids.

    Raises:
        DataError: the file is missing, truncated or damaged, or is not a file of lists.
    """
    with reading(path, "a file of inverted lists (gpq index --out NAME.lists)"):
        data = np.asarray(np.memmap(path, np.uint8, "r"))
        length = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + length].tobytes())
        arrays: dict[str, NDArray[Any]] = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            array = data[8 + length + start : 8 + length + stop].view(_TYPES[entry["dtype"]])
            arrays[name] = array.reshape(entry["shape"])
        prefix = int(arrays.pop("prefix")[0])
        crc = int(arrays.pop("crc")[0])
        lists = InvertedLists(prefix=prefix, **arrays)
        M, K, _ = lists.codebooks.shape
        names, ends, blocks, starts, members = lists.arrays[4:9]
        rows = int(ends[-1])
        is_consistent = (
            [array.dtype for array in (lists.codebooks, names, ends, blocks)]
            == [np.float32, np.uint8, np.int64, np.uint8]
            and names.shape == (len(ends) - 1, 2)
            and blocks.shape == (-(-rows // BLOCK), width_of(M, K), BLOCK)
            and (len(starts) or len(members) + 1) == rows + 1
            and 0 < rows <= len(members)
            and ends[0] == 0
            and bool((np.diff(ends) > 0).all())
            and 0 <= prefix <= levels_of(M, K)
        )
        if not is_consistent:  # the compiled loops would read beyond the arrays
            raise DataError("its arrays do not fit together")
        return lists, crc
