"""Building lists of any size within a memory budget, resumable by shard.

Rows are first collected as by :mod:`.stream`. Then each item's list is found and counted; the rows are moved, a chunk at
a time, to where their list lies in two raw files; and list after list is written as Faiss has it. The sorted files are a
second point to go on from. They need as much disk again as the index for a while.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..codes.bits import code_size
from ..codes.checks import Codes, Floats, Ids
from ..data.arrays import read_npy
from ..errors import DataError, UsageError
from ..faissio.header import BLOCK_ROWS, NPROBE_AT, list_bytes, list_header, pack_rows
from ..faissio.io import check_index_output, read_sidecar, sidecar_path, stored_points
from ..faissio.layout import Packing
from ..files import fingerprint, open_own, read_json, write_error, write_json
from ..indexes.lists import TRAIN_ROWS, IvfSettings, tell_fewer, train_centroids
from ..progress import stage
from ..store import codebooks_fingerprint
from .coarse import Coarse, Nearest, Tables, choose
from .shards import Shard
from .stream import MEMORY, building, check_build, check_stored_ids, collect, publish

_LEAST_CHUNK = 1024
_MOST_CHUNK = 1 << 25
_log = logging.getLogger(__name__)


def build_lists(
    shards: Sequence[Shard],
    out: str | Path,
    codebooks: Floats,
    ivf: IvfSettings | None = None,
    *,
    model_fingerprint: str | None = None,
    memory: int = MEMORY,
    overwrite: bool = False,
    extra: dict[str, Any] | None = None,
    finish: Callable[[Path], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the rows of ``shards`` as one index file with lists, and its sidecar.

    A plain Faiss index: ``IndexIVFPQFastScan`` (settings' form ``fastscan``) or ``IndexIVFPQ`` (``fused``), by_residual
    False. In a list, items keep the order of the shards.

    Args:
        codebooks: float32 [M, 16, d], checked.
        ivf: lists, centroids, form, nprobe, seed and way of assignment (:mod:`.coarse`).
        memory: bytes that the arrays of the build may take (Python and its libraries take some 200 MB besides).
        finish: what is still to be done to the file and its sidecar, before they are in place (:func:`store_nprobe`).
        progress: called with rows done and rows in all; each row counts three times (collected, moved, written).

    Returns:
        ``out``

    Raises:
        UsageError: a budget below 16 MiB or too small for the lists, no shards, settings out of range.
        DataError: a damaged shard, an id of -1 or one that occurs twice, a full disk; finished shards are kept.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    check_build(shards, memory)
    ivf = ivf or IvfSettings()
    ivf.check()
    total = sum(shard.rows for shard in shards)
    lists, _ = choose(ivf, total)
    D = int(codebooks.shape[0] * codebooks.shape[2])
    if lists * D * 12 > memory:
        raise UsageError(
            f"the centroids of {lists:,} lists alone take more than {memory:,} bytes: raise --memory"
        )
    out = check_index_output(out, overwrite=overwrite)
    packing: Packing = "fused" if ivf.form == "fused" and len(codebooks) > 1 else "fastscan"
    with building(out) as partial:
        build = _Build(partial, codebooks, ivf, memory, total, progress)
        known = fingerprint("build", codebooks_fingerprint(codebooks), str(model_fingerprint), "rows")
        mark = fingerprint(known, *(shard.fingerprint for shard in shards), _mark_of(ivf))
        if not build.sorted_before(mark):
            size = code_size(int(codebooks.shape[0]), 16)
            collect(partial, known, shards, size, memory, build.told)
            check_stored_ids(partial / "ids.raw", shards, memory, out)
            build.sort(mark)
        own: dict[str, Any] = {**(extra or {}), "shards": len(shards), "engine": "ivf", "group": False}

        def write(path: Path) -> tuple[int, str]:
            found = build.write(path, packing)
            own["ascending"] = build.ascending  # known once all is written
            return found

        publish(
            out,
            write,
            f"ivf-{packing}",
            total,
            codebooks,
            model_fingerprint,
            own,
            partial=partial,
            finish=finish,
        )
    return out


def _mark_of(ivf: IvfSettings) -> str:
    """What of the settings decides which item goes where."""
    centroids = b"" if ivf.centroids is None else np.ascontiguousarray(ivf.centroids, np.float32).tobytes()
    return fingerprint(str(ivf.lists), centroids, str(ivf.seed), str(ivf.assignment))


class _Build:
    """The phases after collecting. Everything lies in ``folder``."""

    def __init__(
        self,
        folder: Path,
        Z: Floats,
        ivf: IvfSettings,
        memory: int,
        rows: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.folder, self.Z, self.ivf, self.memory, self.rows = folder, Z, ivf, memory, rows
        self.size = code_size(int(Z.shape[0]), 16)
        self.progress = progress
        self.sizes: Ids = np.empty(0, np.int64)
        self.centroids: Floats = np.empty((0, 0), np.float32)
        self.ascending = True

    def told(self, done: int, _total: int) -> None:
        """Progress of the first of three rounds."""
        if self.progress is not None:
            self.progress(done, 3 * self.rows)

    def sorted_before(self, mark: str) -> bool:
        """Whether an earlier run, cut off later, has put these very rows in order."""
        record = self.folder / "sorted.json"
        try:
            if not record.exists() or read_json(record, "a build").get("mark") != mark:
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
        """Train, assign, and put the rows in the order of their lists."""
        (self.folder / "sorted.json").unlink(missing_ok=True)
        with stage("placing the lists"):
            coarse = self.coarse()
        lists = len(coarse.centroids)
        way = "nearest centroid" if isinstance(coarse, Nearest) else "tables"
        _log.info("%s: %d lists by %s", self.folder.name[1:].removesuffix(".building"), lists, way)
        kind = np.uint16 if lists <= 1 << 16 else np.int32
        chunk = int(max(_LEAST_CHUNK, min(_MOST_CHUNK, (self.memory - lists * 64) // (6 * self.size + 48))))
        step = (
            max(256, self.memory // (coarse.centroids.shape[1] * 8))
            if isinstance(coarse, Nearest)
            else 1 << 20
        )
        sizes = np.zeros(lists, np.int64)
        with (
            open_own(self.folder / "lists.raw", "wb") as file,
            stage("finding each row's list", self.rows, "row") as finding,
        ):
            for codes in self._codes(min(step, chunk)):
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
        write_json(self.folder / "sorted.json", {"mark": mark})
        for name in ("codes.raw", "ids.raw", "progress.json"):
            (self.folder / name).unlink(missing_ok=True)

    def coarse(self) -> Coarse:
        """The way to the lists, trained on a sample that fits the budget."""
        lists, way = choose(self.ivf, self.rows)
        D = int(self.Z.shape[0] * self.Z.shape[2])
        most = max(lists, self.memory // (D * 16))
        if self.ivf.centroids is not None:
            trained = self.ivf.trained(self._sample(1), self.Z)
            assert trained.centroids is not None
            return Nearest(trained.centroids, self.Z)
        sample = self._sample(min(self.rows, lists * TRAIN_ROWS, most))
        coarse: Coarse
        if way == "tables":
            coarse = Tables(sample, self.Z, lists, self.ivf.seed)
        else:
            coarse = Nearest(train_centroids(sample, self.Z, lists, self.ivf.seed), self.Z)
        if self.ivf.lists is not None:
            tell_fewer(lists, len(coarse.centroids))
        return coarse

    def _sample(self, n: int) -> Codes:
        """Codes of random rows, uint8 [n, code_size]."""
        rng = np.random.default_rng([self.ivf.seed, 2])
        if n >= self.rows:
            rows = np.arange(self.rows)
        elif self.rows < 1 << 22:
            rows = np.sort(rng.choice(self.rows, n, replace=False))
        else:  # one of each of n stretches
            edges = np.linspace(0, self.rows, n + 1).astype(np.int64)
            rows = edges[:-1] + (rng.random(n) * np.diff(edges)).astype(np.int64)
        out = np.empty((len(rows), self.size), np.uint8)
        at = 0
        for start, codes in self._numbered(1 << 20):
            last = int(np.searchsorted(rows, start + len(codes)))
            out[at:last] = codes[rows[at:last] - start]
            at = last
        return out

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
        """Rows to the places of their lists: a chunk is sorted in memory, and each list's run written where it goes."""
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
                if self.progress is not None:
                    self.progress(self.rows + start + n, 3 * self.rows)
            for file in (codes_out, ids_out):
                os.fsync(file.fileno())

    def write(self, temporary: Path, packing: Packing) -> tuple[int, str]:
        """Header and lists into one file; returns its size and SHA-256."""
        digest = hashlib.sha256()
        nprobe = min(self.ivf.nprobe, len(self.sizes))
        step = max(BLOCK_ROWS, min(1 << 22, self.memory // (8 * self.size)) // BLOCK_ROWS * BLOCK_ROWS)
        with (
            temporary.open("wb", buffering=1 << 20) as out,
            (self.folder / "codes.sorted").open("rb") as codes,
            (self.folder / "ids.sorted").open("rb") as ids,
            stage("writing the index", self.rows, "row") as writing,
        ):

            def put(data: Any) -> None:
                out.write(data)
                digest.update(data)

            def put_ids(n: int) -> None:
                last: int | None = None
                for start in range(0, n, step):
                    block = np.frombuffer(ids.read(8 * min(step, n - start)), "<i8")
                    rising = bool((block[1:] > block[:-1]).all())
                    self.ascending &= rising and (last is None or last < int(block[0]))
                    last = int(block[-1])
                    put(block.data)

            put(list_header(packing, self.Z, self.centroids, nprobe, self.sizes))
            expected = out.tell() + int(list_bytes(packing, self.sizes, len(self.Z)).sum())
            done = 0
            for size in self.sizes.tolist():
                if packing == "fastscan":
                    put(int(size).to_bytes(8, "little"))
                    put_ids(size)
                    packed_bytes = int(list_bytes(packing, np.array([size]), len(self.Z))[0]) - 16 - 8 * size
                    put(packed_bytes.to_bytes(8, "little"))
                for start in range(0, size, step):
                    n = min(step, size - start)
                    block = np.frombuffer(codes.read(n * self.size), np.uint8).reshape(n, self.size)
                    put(np.ascontiguousarray(pack_rows(packing, block, self.Z)).data)
                if packing == "fused":
                    put_ids(size)
                done += size
                writing.done = done
                if self.progress is not None:
                    self.progress(2 * self.rows + done, 3 * self.rows)
            if out.tell() != expected:
                raise DataError(f"{self.folder} was changed while it was read: build again")
            return out.tell(), digest.hexdigest()


def _put(handle: int, data: memoryview, at: int) -> None:
    """All of ``data`` at a place in a file."""
    while len(data):
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written


def store_nprobe(path: Path, nprobe: int, points: Sequence[dict[str, float]]) -> None:
    """Make ``nprobe`` the default of an index file with lists, and note the operating points in its sidecar.

    Both change where they lie: the caller does this before they are in place.

    Raises:
        DataError: the disk refuses.
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
