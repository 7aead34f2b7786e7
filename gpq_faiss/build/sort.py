"""Sort rows by list within a memory budget: the second phase of a build with lists.

Items are assigned to lists and counted; rows are moved in chunks to their lists in two raw files, from which the lists are written in
Faiss' format. The sorted files are a second checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..codes.bits import code_size
from ..codes.checks import Codes, Floats, Ids
from ..data.arrays import read_npy
from ..errors import DataError, UsageError
from ..faissio.header import BLOCK_ROWS, NPROBE_AT, list_bytes, list_header, pack_rows
from ..faissio.io import read_sidecar, sidecar_path, stored_points
from ..faissio.storage import Packing
from ..files import fingerprint, open_own, read_json, write_error, write_json
from ..indexes.lists import IvfSettings
from ..progress import stage
from .coarse import choose, train
from .hashed import HashedFile
from .shards import Shard

_LEAST_CHUNK = 1024
_MOST_CHUNK = 1 << 25
_log = logging.getLogger(__name__)


def check_lists(ivf: IvfSettings, rows: int, Z: Floats, memory: int) -> None:
    """Raises UsageError: settings out of range, or lists whose centroids do not fit the budget."""
    ivf.check()
    lists, _ = choose(ivf, rows)
    if lists * int(Z.shape[0] * Z.shape[2]) * 12 > memory:
        raise UsageError(
            f"the centroids of {lists:,} lists alone take more than {memory:,} bytes: raise --memory"
        )


class ListSort:
    """Sorts the rows of ``codes.raw`` and ``ids.raw`` in ``folder`` by list, and writes them.

    Args:
        Z: codebooks, float32 [M, 16, d].
        rows: number of rows.
        tell: called with the rows done in three passes, the first of which is over.
    """

    def __init__(
        self,
        folder: Path,
        Z: Floats,
        ivf: IvfSettings,
        memory: int,
        rows: int,
        tell: Callable[[int], None],
    ) -> None:
        self.folder, self.Z, self.ivf, self.memory, self.rows = folder, Z, ivf, memory, rows
        self.size = code_size(int(Z.shape[0]), 16)
        self.tell = tell
        self.sizes: Ids = np.empty(0, np.int64)
        self.centroids: Floats = np.empty((0, 0), np.float32)

    def sorted_before(self, mark: str) -> bool:
        """Whether an interrupted run has already sorted the rows identified by ``mark``."""
        record = self.folder / "sorted.json"
        try:
            if not record.exists() or read_json(record, "a build").get("mark") != self._mark(mark):
                return False
            self.sizes = read_npy(self.folder / "sizes.npy", "the sizes of lists")
            self.centroids = read_npy(self.folder / "centroids.npy", "the centroids of lists")
        except (DataError, AttributeError):
            return False
        sizes = [
            (self.folder / name).stat().st_size if (self.folder / name).exists() else -1
            for name in ("codes.sorted", "ids.sorted")
        ]
        return sizes == [self.rows * self.size, self.rows * 8]

    def sort(self, mark: str) -> None:
        """Train, assign and sort the rows by list."""
        (self.folder / "sorted.json").unlink(missing_ok=True)
        with stage("making lists"):
            coarse = train(self.ivf, self.rows, self._sample, self.Z, self.memory)
        lists = len(coarse.centroids)
        _log.info(
            "%s: %d lists by %s", self.folder.name[1:].removesuffix(".building"), lists, coarse.description
        )
        kind = np.uint16 if lists <= 1 << 16 else np.int32
        chunk = int(max(_LEAST_CHUNK, min(_MOST_CHUNK, (self.memory - lists * 64) // (6 * self.size + 48))))
        sizes = np.zeros(lists, np.int64)
        with (
            open_own(self.folder / "lists.raw", "wb") as file,
            stage("finding each row's list", self.rows, "row") as finding,
        ):
            for codes in self._codes(min(coarse.rows(self.memory), chunk)):
                numbers = coarse.assign(codes).astype(kind)
                sizes += np.bincount(numbers, minlength=lists)
                file.write(numbers.tobytes())
                finding.advance(len(codes))
        self._move(kind, sizes, chunk)
        (self.folder / "lists.raw").unlink()
        self.sizes, self.centroids = sizes, coarse.centroids
        for name, array in (("sizes.npy", sizes), ("centroids.npy", coarse.centroids)):
            with open_own(self.folder / name, "wb") as file:
                np.save(file, array)
        write_json(self.folder / "sorted.json", {"mark": self._mark(mark)})
        for name in ("codes.raw", "ids.raw", "progress.json"):
            (self.folder / name).unlink(missing_ok=True)

    def _mark(self, mark: str) -> str:
        """``mark`` and the settings that affect assignment."""
        ivf = self.ivf
        centroids = (
            b"" if ivf.centroids is None else np.ascontiguousarray(ivf.centroids, np.float32).tobytes()
        )
        return fingerprint(mark, str(ivf.lists), centroids, str(ivf.seed), str(ivf.assignment))

    def _sample(self, n: int) -> Codes:
        """Codes of random rows, uint8 [n, code_size]."""
        return sample_codes(self._codes(1 << 20), self.rows, n, self.size, self.ivf.seed)

    def _codes(self, step: int) -> Iterator[Codes]:
        with (self.folder / "codes.raw").open("rb") as file:
            for start in range(0, self.rows, step):
                n = min(step, self.rows - start)
                yield np.frombuffer(file.read(n * self.size), np.uint8).reshape(n, self.size)

    def _numbered(self, step: int) -> Iterator[tuple[int, Codes]]:
        start = 0
        for codes in self._codes(step):
            yield start, codes
            start += len(codes)

    def _move(self, kind: type[np.generic], sizes: Ids, chunk: int) -> None:
        """Move rows to their lists: sort a chunk in memory, and write each list's run."""
        cursor = np.cumsum(sizes) - sizes
        each = np.dtype(kind).itemsize
        with (
            (self.folder / "lists.raw").open("rb") as lists_file,
            (self.folder / "ids.raw").open("rb") as ids_file,
            open_own(self.folder / "codes.sorted", "wb") as codes_out,
            open_own(self.folder / "ids.sorted", "wb") as ids_out,
            stage("sorting by lists", self.rows, "row") as sorting,
        ):
            os.truncate(codes_out.fileno(), self.rows * self.size)
            os.truncate(ids_out.fileno(), self.rows * 8)
            for start, codes in self._numbered(chunk):
                n = len(codes)
                numbers = np.frombuffer(lists_file.read(n * each), kind)
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
                sorting.advance(n)
                self.tell(self.rows + start + n)
            for file in (codes_out, ids_out):
                os.fsync(file.fileno())

    def write(self, file: HashedFile, packing: Packing) -> bool:
        """Write header and lists to one file; returns whether ids ascend in every list."""
        nprobe = min(self.ivf.nprobe, len(self.sizes))
        step = max(BLOCK_ROWS, min(1 << 22, self.memory // (8 * self.size)) // BLOCK_ROWS * BLOCK_ROWS)
        ascending = True
        file.put(list_header(packing, self.Z, self.centroids, nprobe, self.sizes))
        bytes_of = list_bytes(packing, self.sizes, len(self.Z))
        expected, done = file.size + int(bytes_of.sum()), 0
        with (
            (self.folder / "codes.sorted").open("rb") as codes,
            (self.folder / "ids.sorted").open("rb") as ids,
        ):

            def put_ids(n: int) -> bool:
                rising, last = True, None
                for start in range(0, n, step):
                    block = np.frombuffer(ids.read(8 * min(step, n - start)), "<i8")
                    rising &= bool((block[1:] > block[:-1]).all()) and (last is None or last < int(block[0]))
                    last = int(block[-1])
                    file.put(block.data)
                return rising

            for size, held in zip(self.sizes.tolist(), bytes_of.tolist(), strict=True):
                if packing == "fastscan":  # lists start with ids, and store the sizes of ids and codes
                    file.put(size.to_bytes(8, "little"))
                    ascending &= put_ids(size)
                    file.put((held - 16 - 8 * size).to_bytes(8, "little"))
                for start in range(0, size, step):
                    n = min(step, size - start)
                    block = np.frombuffer(codes.read(n * self.size), np.uint8).reshape(n, self.size)
                    file.put(np.ascontiguousarray(pack_rows(packing, block, self.Z)).data)
                if packing == "bytes":
                    ascending &= put_ids(size)
                done += size
                self.tell(2 * self.rows + done)
        if file.size != expected:
            raise DataError(f"{self.folder} was changed while it was read: build again")
        return ascending


def sample_codes(blocks: Iterable[Codes], rows: int, n: int, size: int, seed: int) -> Codes:
    """Codes of ``n`` random rows out of ``rows`` in ``blocks``: uint8 [n, size]."""
    rng = np.random.default_rng([seed, 2])
    if n >= rows:
        chosen = np.arange(rows)
    elif rows < 1 << 22:
        chosen = np.sort(rng.choice(rows, n, replace=False))
    else:  # one from each of n intervals
        edges = np.linspace(0, rows, n + 1).astype(np.int64)
        chosen = edges[:-1] + (rng.random(n) * np.diff(edges)).astype(np.int64)
    out = np.empty((len(chosen), size), np.uint8)
    at = start = 0
    for codes in blocks:
        last = int(np.searchsorted(chosen, start + len(codes)))
        out[at:last] = codes[chosen[at:last] - start]
        at, start = last, start + len(codes)
    return out


def shared_lists(ivf: IvfSettings, shards: Sequence[Shard], Z: Floats, memory: int) -> IvfSettings:
    """Settings with the centroids of one index of all shards, trained within ``memory``.

    Raises:
        UsageError: settings out of range, or ``tables``, which shards do not support.
        DataError: a damaged shard.
    """
    rows = sum(shard.rows for shard in shards)
    if ivf.assignment == "tables":
        raise UsageError("shards share centroids, which tables do not support: leave out --assign tables")
    ivf = replace(ivf, assignment="nearest" if ivf.centroids is None else None)
    check_lists(ivf, rows, Z, memory)
    size = code_size(int(Z.shape[0]), 16)

    def sample(n: int) -> Codes:
        blocks = (codes for shard in shards for codes, _ in shard.blocks(1 << 18))
        return sample_codes(blocks, rows, n, size, ivf.seed)

    with stage("making lists"):
        centroids = train(ivf, rows, sample, Z, memory).centroids
    return replace(ivf, centroids=centroids, lists=None, assignment=None)


def _put(handle: int, data: memoryview, at: int) -> None:
    """Write all of ``data`` at a file offset."""
    while len(data):
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written


def store_nprobe(path: Path, nprobe: int, points: Sequence[dict[str, float]]) -> None:
    """Set the default ``nprobe`` of an index file with lists, and store operating points in its sidecar.

    Modifies both files; to be called before they are moved into place.

    Raises:
        DataError: writing fails.
    """
    document = read_sidecar(path)
    assert document is not None
    sidecar = sidecar_path(path)
    try:
        sidecar.unlink()
        with path.open("r+b") as file:
            _put(file.fileno(), memoryview(int(nprobe).to_bytes(8, "little")), NPROBE_AT)
            os.fsync(file.fileno())
            file.seek(0)
            document["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise write_error(path, error) from error
    document["extra"]["operating_points"] = stored_points(points)
    write_json(sidecar, document)
