"""``index.lists``: the arrays of inverted lists in one safetensors file, mapped when opened.

The file is built from any number of rows in passes over mapped files: rows are first distributed to
256 partitions by their first two codewords, and then each partition is sorted in memory. Building
and searching need no memory budget of their own: the operating system's page cache is the budget.
"""

from __future__ import annotations

import json
import mmap
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from ..codes.checks import Codes, Floats, Ids, check_unique
from ..errors import DataError
from ..inputs import check_memory, reading
from ..progress import stage
from . import list_kernels
from .block_scan import BLOCK
from .lists import (
    LEVELS,
    InvertedLists,
    ListArrays,
    choose_prefix,
    columns_of,
    first_words,
    names_of,
    sort_codes,
)

_ROWS = 1 << 20
_PARTITIONS = 256
_TYPES = {"I64": np.int64, "F32": np.float32, "U32": np.uint32, "U8": np.uint8}
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: a file may exceed memory


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
    M, K = int(Z.shape[0]), int(Z.shape[1])
    levels = min(LEVELS, M - 1) if K <= 16 else 0
    n = sum(source.ntotal for source in sources)
    counts, low, high = _survey(sources, M, K)
    prefix = choose_prefix(counts.reshape(16**levels, -1).sum(axis=1))
    id_type = np.uint32 if low >= 0 and high < 1 << 32 else np.int64
    sizes = counts.reshape(_PARTITIONS, -1).sum(axis=1)
    ends = np.append(0, np.cumsum(sizes))
    T = (M + 1) // 2 if K <= 16 else M
    with (
        tempfile.TemporaryFile(dir=out.parent) as codes,
        tempfile.TemporaryFile(dir=out.parent) as ids,
    ):
        columns = np.memmap(codes, np.uint8, "w+", shape=(n, T))
        members = np.memmap(ids, id_type, "w+", shape=(n,))
        cursors = ends[:-1].copy()
        with stage("placing rows", n, "row") as placing:
            for source in sources:
                for block, block_ids in source.blocks(_ROWS):
                    _place(columns_of(block, M, K), block_ids, columns, members, cursors)
                    placing.advance(len(block_ids))
        rows = 0
        words, first_rows, previous = [], [], -1
        with stage("sorting rows", n, "row") as sorting:
            for partition in np.flatnonzero(sizes).tolist():
                span = slice(ends[partition], ends[partition + 1])
                sorted_columns, sorted_ids, starts = sort_codes(
                    np.asarray(columns[span]), members[span].astype(np.int64)
                )
                columns[span], members[span] = sorted_columns, sorted_ids
                partition_words = first_words(sorted_columns.take(starts[:-1], axis=0), prefix)
                # A list of a short prefix may continue in the next partition.
                is_first = np.append(
                    partition_words[0] != previous, partition_words[1:] != partition_words[:-1]
                )
                words.append(partition_words[is_first])
                first_rows.append(rows + np.flatnonzero(is_first))
                rows, previous = rows + len(starts) - 1, int(partition_words[-1])
                sorting.advance(int(sizes[partition]))
        start_type = np.uint32 if n < 1 << 32 else np.int64
        shapes = {
            "ends": np.append(np.concatenate(first_rows), rows),
            "prefix": np.array([prefix]),
            "crc": np.zeros(1, np.int64),
            "codebooks": Z,
            "starts": np.broadcast_to(start_type(0), rows + 1 if rows < n else 0),
            "members": np.broadcast_to(id_type(0), n),
            "names": names_of(np.concatenate(words), prefix),
            "blocks": np.broadcast_to(np.uint8(0), (-(-rows // BLOCK), T, BLOCK)),
        }
        arrays = _create(out, shapes)
        row = 0
        with stage("writing lists", n, "row") as filling:
            for partition in np.flatnonzero(sizes).tolist():
                span = slice(ends[partition], ends[partition + 1])
                block = np.asarray(columns[span])
                starts = np.empty(len(block) + 1, start_type)
                count = int(list_kernels.find_rows(block, members[span].astype(np.int64), starts))
                list_kernels.fill_blocks(arrays["blocks"], row, block, starts[: count + 1])
                if rows < n:
                    arrays["starts"][row : row + count + 1] = starts[: count + 1] + start_type(
                        span.start
                    )
                arrays["members"][span] = members[span]
                row += count
                filling.advance(len(block))
    lists = InvertedLists(_list_arrays(arrays))
    arrays["crc"][0] = lists.crc()
    for array in arrays.values():
        if isinstance(array, np.memmap):
            array.flush()
    return int(arrays["crc"][0])


def _survey(sources: Sequence[RowSource], M: int, K: int) -> tuple[Ids, int, int]:
    """Return the counts of rows by their first two bytes, int64 [65536], and the range of the ids.

    Raises:
        DataError: there are no rows, or an id occurs twice or is -1.
    """
    counts, n = np.zeros(1 << 16, np.int64), sum(source.ntotal for source in sources)
    if not n:
        raise DataError("no codes: an index needs at least one item")
    low, high, is_ascending = np.iinfo(np.int64).max, np.iinfo(np.int64).min, True
    for source in sources:
        for block, ids in source.blocks(_ROWS):
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
    order = np.argsort(partitions, kind="stable")
    block, ids = block.take(order, axis=0), ids.take(order)
    start = 0
    for partition, count in enumerate(np.bincount(partitions, minlength=_PARTITIONS).tolist()):
        span, source = (
            slice(cursors[partition], cursors[partition] + count),
            slice(start, start + count),
        )
        columns[span], members[span] = block[source], ids[source]
        cursors[partition] += count
        start += count


# The file -----------------------------------------------------------------------------------------


def _create(path: Path, shapes: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Create a safetensors file, and return its arrays, mapped.

    Arrays that are broadcast from one number are placeholders: only their shape is written. Arrays
    must be in descending order of the size of their numbers, so that all are aligned.
    """
    header, offset = {}, 0
    for name, array in shapes.items():
        size = array.size * array.itemsize
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    arrays: dict[str, NDArray[Any]] = {}
    for name, array in shapes.items():
        start = 8 + len(text) + header[name]["data_offsets"][0]
        arrays[name] = array
        if array.size:
            arrays[name] = np.memmap(path, array.dtype, "r+", start, array.shape)
            if 0 not in array.strides:
                arrays[name][:] = array
    return arrays


def open_lists(path: Path) -> tuple[ListArrays, int]:
    """Map the arrays of a file, and return them and the CRC of their codes and ids.

    Raises:
        DataError: the file is missing, truncated or damaged, or is not a file of lists.
    """
    with reading(path, "a file of inverted lists (gpq index --out NAME.lists)") as size:
        with safe_open(path, "numpy"):
            pass  # checks the header
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            flags = mmap.MAP_PRIVATE | _NO_RESERVE
            # Writable because the loops are compiled for writable arrays; nothing is written.
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            mapped = mmap.mmap(file.fileno(), size, flags=flags, prot=protection)
        arrays = {}
        for name in (*ListArrays._fields, "crc"):
            entry = header[name]
            start, stop = entry["data_offsets"]
            kind = np.dtype(_TYPES[entry["dtype"]])
            count = (stop - start) // kind.itemsize
            array = np.frombuffer(mapped, kind, count, 8 + length + start)
            arrays[name] = array.reshape(entry["shape"])
        lists = _list_arrays(arrays)
        M, K, _ = lists.codebooks.shape
        rows, n, T = int(lists.ends[-1]), len(lists.members), M if K > 16 else (M + 1) // 2
        is_consistent = (
            [array.dtype for array in lists[:4]] == [np.float32, np.uint8, np.int64, np.uint8]
            and lists.names.shape == (len(lists.ends) - 1, 2)
            and lists.blocks.shape == (-(-rows // BLOCK), T, BLOCK)
            and (len(lists.starts) or n + 1) == rows + 1
            and 0 < rows <= n
            and lists.ends[0] == 0
            and bool((np.diff(lists.ends) > 0).all())
            and 0 <= lists.prefix <= (min(LEVELS, M - 1) if K <= 16 else 0)
        )
        if not is_consistent:
            raise DataError("its arrays do not fit together")
        return lists, int(arrays["crc"][0])


def _list_arrays(arrays: Mapping[str, NDArray[Any]]) -> ListArrays:
    fields: dict[str, Any] = {name: np.asarray(arrays[name]) for name in ListArrays._fields}
    fields["prefix"] = int(fields["prefix"][0])
    return ListArrays(**fields)
