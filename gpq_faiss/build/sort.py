"""Sort rows by list within a memory budget: the second phase of a build of kind ``ivf``.

Rows are counted by their first codewords, which gives the lists; they are then moved in chunks to their lists in two raw files, from which
the lists are written in Faiss' format. The sorted files are a second checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..codes.bits import code_size
from ..codes.checks import Codes, Floats, Ids
from ..data.arrays import read_npy
from ..errors import DataError
from ..faissio.header import BLOCK_ROWS, list_bytes, list_header, pack_rows
from ..faissio.io import HashedFile
from ..faissio.storage import LEVELS, WordLists, first_words
from ..files import fingerprint, open_own, read_json, write_json
from ..progress import stage

_LEAST_CHUNK = 1024
_MOST_CHUNK = 1 << 25


class ListSort:
    """Sorts the rows of ``codes.raw`` and ``ids.raw`` in ``folder`` by list, and writes them.

    Args:
        Z: codebooks, float32 [M, 16, d].
        rows: number of rows.
        tell: called with the rows done in three passes, the first of which is over.
    """

    def __init__(self, folder: Path, Z: Floats, memory: int, rows: int, tell: Callable[[int], None]) -> None:
        self.folder, self.Z, self.memory, self.rows = folder, Z, memory, rows
        self.size = code_size(len(Z), 16)
        self.tell = tell
        self.counts: Ids = np.empty(0, np.int64)

    def sorted_before(self, mark: str) -> bool:
        """Whether an interrupted run has already sorted the rows identified by ``mark``."""
        record = self.folder / "sorted.json"
        try:
            if not record.exists() or read_json(record, "a build").get("mark") != fingerprint(mark, "lists"):
                return False
            self.counts = read_npy(self.folder / "counts.npy", "the sizes of lists")
        except (DataError, AttributeError):
            return False
        sizes = [
            (self.folder / name).stat().st_size if (self.folder / name).exists() else -1
            for name in ("codes.sorted", "ids.sorted")
        ]
        return sizes == [self.rows * self.size, self.rows * 8]

    def sort(self, mark: str) -> None:
        """Count and sort the rows by list."""
        (self.folder / "sorted.json").unlink(missing_ok=True)
        chunk = int(max(_LEAST_CHUNK, min(_MOST_CHUNK, self.memory // (6 * self.size + 64))))
        levels = min(LEVELS, len(self.Z) - 1)
        self.counts = np.zeros(16**levels, np.int64)
        with stage("making lists", self.rows, "row") as counting:
            for codes in self._codes(chunk):
                self.counts += np.bincount(first_words(codes, len(self.Z), levels), minlength=16**levels)
                counting.advance(len(codes))
        self._move(chunk)
        with open_own(self.folder / "counts.npy", "wb") as file:
            np.save(file, self.counts)
        write_json(self.folder / "sorted.json", {"mark": fingerprint(mark, "lists")})
        for name in ("codes.raw", "ids.raw", "progress.json"):
            (self.folder / name).unlink(missing_ok=True)

    def _lists(self) -> tuple[WordLists, Ids]:
        """The lists and their sizes."""
        lists = WordLists.of(self.counts, self.Z)
        return lists, self.counts.reshape(16**lists.P, -1).sum(axis=1)[lists.keys]

    def _codes(self, step: int) -> Iterator[Codes]:
        with (self.folder / "codes.raw").open("rb") as file:
            for start in range(0, self.rows, step):
                n = min(step, self.rows - start)
                yield np.frombuffer(file.read(n * self.size), np.uint8).reshape(n, self.size)

    def _move(self, chunk: int) -> None:
        """Move rows to their lists: sort a chunk in memory, and write each list's run."""
        lists, sizes = self._lists()
        cursor = np.cumsum(sizes) - sizes
        with (
            (self.folder / "ids.raw").open("rb") as ids_file,
            open_own(self.folder / "codes.sorted", "wb") as codes_out,
            open_own(self.folder / "ids.sorted", "wb") as ids_out,
            stage("sorting by lists", self.rows, "row") as sorting,
        ):
            os.truncate(codes_out.fileno(), self.rows * self.size)
            os.truncate(ids_out.fileno(), self.rows * 8)
            done = 0
            for codes in self._codes(chunk):
                n = len(codes)
                numbers = lists.list_of(codes)
                order = np.argsort(numbers, kind="stable")
                counts = np.bincount(numbers, minlength=len(sizes))
                rows = codes.view(f"V{self.size}").reshape(
                    -1
                )  # whole codes move three times as fast as bytes
                sorted_codes = memoryview(rows.take(order).view(np.uint8).data)
                sorted_ids = np.frombuffer(ids_file.read(n * 8), "<i8").take(order).data.cast("B")
                del order
                a = 0
                for number in np.flatnonzero(counts).tolist():
                    b, to = a + int(counts[number]), int(cursor[number])
                    _put(codes_out.fileno(), sorted_codes[a * self.size : b * self.size], to * self.size)
                    _put(ids_out.fileno(), sorted_ids[8 * a : 8 * b], to * 8)
                    cursor[number] = to + b - a
                    a = b
                done += n
                sorting.advance(n)
                self.tell(self.rows + done)
            for file in (codes_out, ids_out):
                os.fsync(file.fileno())

    def write(self, file: HashedFile) -> None:
        """Write header and lists to one file."""
        lists, sizes = self._lists()
        held = len(lists.rest)
        step = max(BLOCK_ROWS, min(1 << 22, self.memory // (8 * self.size)) // BLOCK_ROWS * BLOCK_ROWS)
        file.put(list_header(lists, self.rows))
        expected, done = file.size + int(list_bytes(sizes, held).sum()), 0
        with (
            (self.folder / "codes.sorted").open("rb") as codes,
            (self.folder / "ids.sorted").open("rb") as ids,
        ):
            for size, total in zip(sizes.tolist(), list_bytes(sizes, held).tolist(), strict=True):
                # A list has its ids first, and stores the sizes of ids and codes.
                file.put(size.to_bytes(8, "little"))
                for start in range(0, size, step):
                    file.put(ids.read(8 * min(step, size - start)))
                file.put((total - 16 - 8 * size).to_bytes(8, "little"))
                for start in range(0, size, step):
                    n = min(step, size - start)
                    block = np.frombuffer(codes.read(n * self.size), np.uint8).reshape(n, self.size)
                    file.put(np.ascontiguousarray(pack_rows("ivf", lists.stored(block), held)).data)
                done += size
                self.tell(2 * self.rows + done)
        if file.size != expected:
            raise DataError(f"{self.folder} was changed while it was read: build again")


def _put(handle: int, data: memoryview, at: int) -> None:
    """Write all of ``data`` at a file offset."""
    while len(data):
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written
