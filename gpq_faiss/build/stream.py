"""Streaming build of an index of any size within a memory budget, resumable by shard.

Rows are written to two raw files in ``.<name>.building/`` beside the output; each finished shard is recorded. For kind ``ivf`` they are
counted by their first codewords, which gives the lists, and moved in chunks to their lists in two sorted files, a second checkpoint. At the
end they stream into the index file, so the build temporarily needs the size of the output (twice that for lists).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..codes.bits import code_size
from ..codes.checks import Floats, Ids, repeated_among
from ..errors import DataError, UsageError
from ..faissio.io import Beside, HashedFile, check_index_output, publish
from ..faissio.storage import (
    BLOCK_ROWS,
    LEVELS,
    Form,
    WordLists,
    check_form,
    first_words,
    list_header,
    list_parts,
    pack_rows,
    row_header,
)
from ..files import fingerprint, open_own, read_json, unfinished, write_error, write_json
from ..progress import Progress, stage
from ..store import codebooks_fingerprint
from .shards import Shard

MEMORY = 512 << 20
LEAST_MEMORY = 16 << 20
_MAX_ROWS = 1 << 20
_LEAST_CHUNK, _MOST_CHUNK = 1024, 1 << 25
_RECORDS = ("progress.json", "sorted.json")
_ID = np.dtype("<i8")
_log = logging.getLogger(__name__)


def build_index(  # noqa: PLR0913
    shards: Sequence[Shard],
    out: str | Path,
    codebooks: Floats,
    form: Form,
    *,
    model_fingerprint: str | None = None,
    memory: int = MEMORY,
    overwrite: bool = False,
    extra: dict[str, Any] | None = None,
    beside: Beside | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the rows of ``shards`` as one index file, a plain Faiss index, with its sidecar.

    Items keep the order of the shards, also within lists. Without lists and with ids 0, 1, 2, ... the file is a bare index; else it is
    in an ``IndexIDMap``.

    Args:
        codebooks: float32 [M, K, d], checked.
        form: of the codes (:mod:`..faissio.storage`).
        memory: budget of the build's arrays in bytes (Python and its libraries need about 200 MB more).
        beside: other files to put into place with the index.
        progress: called with rows done and total rows; with lists each row counts three times.

    Raises:
        UsageError: a budget below 16 MiB, no shards, or a form that these codebooks do not allow.
        DataError: a damaged shard, the id -1 or a repeated id, or a full disk; finished shards are kept.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if memory < LEAST_MEMORY:
        raise UsageError(f"memory of {memory:,} bytes: at least {LEAST_MEMORY >> 20} MiB are needed")
    if not shards:
        raise UsageError("nothing to index: name at least one file of codes")
    M, K, _ = (int(n) for n in codebooks.shape)
    form, lists = check_form(form, M, K), form == "ivf"
    out = check_index_output(out, overwrite=overwrite)
    identity = fingerprint("build", codebooks_fingerprint(codebooks), str(model_fingerprint))
    mark = fingerprint(identity, form if lists else "rows", *(shard.fingerprint for shard in shards))
    with building(out) as folder:
        work = _Work(folder, shards, codebooks, memory, progress, 3 if lists else 1)
        mapped, counts = True, work.sorted_before(mark)
        if counts is None:
            work.collect(identity)
            mapped = check_stored_ids(folder / "ids.raw", shards, memory, out)
        if lists and counts is None:
            counts = work.sort()
            write_json(folder / "sorted.json", {"mark": mark, "counts": counts.tolist()})
            for name in ("codes.raw", "ids.raw", "progress.json"):
                (folder / name).unlink(missing_ok=True)

        def write(file: HashedFile) -> None:
            with stage("writing the index", work.rows, "row") as writing:
                if counts is None:
                    work.write_rows(file, form, mapped=mapped)
                else:
                    work.write_lists(file, counts)
                writing.done = work.rows

        publish(
            out,
            write,
            model_fingerprint=model_fingerprint,
            extra={**(extra or {}), "shards": len(shards)},
            beside=beside,
            done_with=folder,
        )
    return out


class UnfitSourcesError(DataError):
    """These sources cannot form one index, so the unfinished build is useless."""


@contextlib.contextmanager
def building(out: Path) -> Iterator[Path]:
    """Context of the locked folder of a build, which is removed on success, and kept on failure if it can be resumed."""
    partial = out.with_name(f".{out.name}.building")
    try:
        with unfinished(partial, out, keep=_RECORDS):
            try:
                yield partial
            except UnfitSourcesError:
                for name in _RECORDS:
                    (partial / name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise write_error(out, error) from error


def _blocks(path: Path, dtype: np.dtype[Any], rows: int, step: int) -> Iterator[NDArray[Any]]:
    with path.open("rb") as file:
        for start in range(0, rows, step):
            yield _next(file, dtype, min(step, rows - start))


def _next(file: IO[bytes], dtype: np.dtype[Any], rows: int) -> NDArray[Any]:
    return np.frombuffer(file.read(rows * dtype.itemsize), dtype)


def check_stored_ids(path: Path, shards: Sequence[Shard], memory: int, out: Path) -> bool:
    """Whether the ids of all shards, in ``path``, differ from 0, 1, 2, ... Raises UnfitSourcesError: -1, or a repeated id."""
    rows = sum(shard.rows for shard in shards)
    step = max(1, min(_MAX_ROWS, memory // 64))

    def blocks() -> Iterator[Ids]:
        return _blocks(path, _ID, rows, step)

    def holders(wanted: int) -> str:
        """The sources that contain an id."""
        at = np.concatenate(
            [
                start + np.flatnonzero(ids == wanted)
                for start, ids in zip(range(0, rows, step), blocks(), strict=True)
            ]
        )
        held = np.unique(np.searchsorted(np.cumsum([shard.rows for shard in shards]), at, side="right"))
        return " and in ".join(str(shards[number].path) for number in held[:2].tolist())

    ascending, counting, done, last = True, True, 0, None
    for ids in blocks():
        if bool((ids == -1).any()):
            raise UnfitSourcesError(
                f"{out}: an item of {holders(-1)} has the id -1, which marks a missing result: give it another"
            )
        ascending &= bool((ids[1:] > ids[:-1]).all()) and (last is None or int(ids[0]) > last)
        counting &= bool((ids == np.arange(done, done + len(ids))).all())
        done, last = done + len(ids), int(ids[-1])
    repeated = None if ascending else repeated_among(blocks, rows, memory)
    if repeated is not None:
        raise UnfitSourcesError(
            f"{out}: id {repeated} occurs more than once, in {holders(repeated)}: every item needs its own"
        )
    return not counting


class _Work:
    """The unfinished work in ``folder``: files of rows, and the records of what is done."""

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Shard],
        Z: Floats,
        memory: int,
        progress: Progress | None,
        passes: int,
    ) -> None:
        self.folder, self.shards, self.Z, self.memory = folder, shards, Z, memory
        self.rows = sum(shard.rows for shard in shards)
        self.code = np.dtype((np.uint8, (code_size(int(Z.shape[0]), int(Z.shape[1])),)))
        self._progress, self._passes = progress, passes

    def _tell(self, done: int) -> None:
        if self._progress is not None:
            self._progress(done, self._passes * self.rows)

    def _recorded(self, record: str, of: str, name: str) -> dict[str, Any]:
        """A record, if it is the one ``of`` this name; else an empty one."""
        path = self.folder / record
        with contextlib.suppress(DataError):
            if path.exists():
                state = read_json(path, "the progress of a build")
                if isinstance(state, dict) and state.get(of) == name:
                    return state
        return {}

    def _have(self, suffix: str, rows: int) -> bool:
        """Whether both files have at least so many rows."""
        files = (self.folder / f"codes.{suffix}", self.code), (self.folder / f"ids.{suffix}", _ID)
        return all(path.exists() and path.stat().st_size >= rows * of.itemsize for path, of in files)

    def collect(self, identity: str) -> None:
        """Append the rows of all shards to the raw files."""
        state = self._recorded("progress.json", "identity", identity)
        done, rows = list(state.get("shards", [])), int(state.get("rows", 0))
        others = done != [shard.fingerprint for shard in self.shards[: len(done)]]
        if others or (rows and not self._have("raw", rows)):
            _log.warning("%s: the unfinished build there is of other files: starting again", self.folder)
            done, rows = [], 0
        with (
            _raw(self.folder / "codes.raw", rows * self.code.itemsize) as codes_file,
            _raw(self.folder / "ids.raw", rows * 8) as ids_file,
            stage("reading codes", self.rows, "row", done=rows) as reading,
        ):
            for shard in self.shards[len(done) :]:
                step = int(max(256, min(_MAX_ROWS, self.memory // (4 * shard.row_bytes))))
                for codes, ids in shard.blocks(step):
                    codes_file.write(np.ascontiguousarray(codes).tobytes())
                    ids_file.write(np.ascontiguousarray(ids, dtype=_ID).tobytes())
                    rows += len(ids)
                    reading.done = rows
                    self._tell(rows)
                for file in (codes_file, ids_file):
                    file.flush()
                    os.fsync(file.fileno())
                done.append(shard.fingerprint)
                write_json(
                    self.folder / "progress.json", {"identity": identity, "shards": done, "rows": rows}
                )

    def write_rows(self, file: HashedFile, form: Form, *, mapped: bool) -> None:
        """Write header, codes and (if ``mapped``) ids of an index without lists."""
        head, _, tail = row_header(form, self.Z, self.rows, mapped=mapped)
        file.put(head)
        step = self._step(_MAX_ROWS)
        for codes in _blocks(self.folder / "codes.raw", self.code, self.rows, step):
            file.put(np.ascontiguousarray(pack_rows(form, codes, len(self.Z))).data)
        file.put(tail)
        for ids in _blocks(self.folder / "ids.raw", _ID, self.rows, step) if mapped else ():
            file.put(ids.data)

    def _step(self, most: int) -> int:
        """Rows to write at once: whole blocks of FastScan."""
        return max(BLOCK_ROWS, min(most, self.memory // (8 * self.code.itemsize)) // BLOCK_ROWS * BLOCK_ROWS)

    # Lists ------------------------------------------------------------------------------------------------------------

    def sorted_before(self, mark: str) -> Ids | None:
        """Items by their first words, if an interrupted run has already sorted the rows identified by ``mark``."""
        counts = self._recorded("sorted.json", "mark", mark).get("counts")
        return np.array(counts, np.int64) if counts and self._have("sorted", self.rows) else None

    def _lists(self, counts: Ids) -> tuple[WordLists, Ids]:
        """The lists and their sizes."""
        lists = WordLists.of(counts, self.Z)
        return lists, counts.reshape(16**lists.P, -1).sum(axis=1)[lists.keys]

    def sort(self) -> Ids:
        """Count the rows by their first words, and move them to their lists: sort a chunk in memory, and write each list's run."""
        width, folder = self.code.itemsize, self.folder
        chunk = int(max(_LEAST_CHUNK, min(_MOST_CHUNK, self.memory // (6 * width + 64))))
        levels = min(LEVELS, len(self.Z) - 1)
        counts = np.zeros(16**levels, np.int64)
        with stage("making lists", self.rows, "row") as counting:
            for codes in _blocks(folder / "codes.raw", self.code, self.rows, chunk):
                counts += np.bincount(first_words(codes, len(self.Z), levels), minlength=16**levels)
                counting.advance(len(codes))
        lists, sizes = self._lists(counts)
        cursor = np.cumsum(sizes) - sizes
        with (
            open_own(folder / "codes.sorted", "wb") as codes_out,
            open_own(folder / "ids.sorted", "wb") as ids_out,
            stage("sorting by lists", self.rows, "row") as sorting,
        ):
            os.truncate(codes_out.fileno(), self.rows * width)
            os.truncate(ids_out.fileno(), self.rows * 8)
            both = (
                _blocks(folder / f"{name}.raw", of, self.rows, chunk)
                for name, of in (("codes", self.code), ("ids", _ID))
            )
            for codes, ids in zip(*both, strict=True):
                numbers = lists.list_of(codes)
                order = np.argsort(numbers, kind="stable")
                held = np.bincount(numbers, minlength=len(sizes))
                whole = codes.view(f"V{width}").reshape(-1)  # whole codes move three times as fast as bytes
                sorted_codes = memoryview(whole.take(order).view(np.uint8).data)
                sorted_ids = ids.take(order).data.cast("B")
                del order
                start = 0
                for number in np.flatnonzero(held).tolist():
                    stop, to = start + int(held[number]), int(cursor[number])
                    _put(codes_out.fileno(), sorted_codes[start * width : stop * width], to * width)
                    _put(ids_out.fileno(), sorted_ids[8 * start : 8 * stop], to * 8)
                    cursor[number] += stop - start
                    start = stop
                sorting.advance(len(ids))
                self._tell(self.rows + sorting.done)
            for file in (codes_out, ids_out):
                os.fsync(file.fileno())
        return counts

    def write_lists(self, file: HashedFile, counts: Ids) -> None:
        """Write header and lists."""
        (lists, sizes), step, done = self._lists(counts), self._step(1 << 22), 0
        file.put(list_header(lists, self.rows))
        with (
            (self.folder / "codes.sorted").open("rb") as codes,
            (self.folder / "ids.sorted").open("rb") as ids,
        ):
            for size in sizes.tolist():
                parts = [min(step, size - start) for start in range(0, size, step)]
                each = (_next(ids, _ID, n) for n in parts), (_next(codes, self.code, n) for n in parts)
                for data in list_parts(lists, size, *each):
                    file.put(data)
                done += size
                self._tell(2 * self.rows + done)


def _raw(path: Path, keep: int) -> IO[bytes]:
    """Open for appending after the first ``keep`` bytes."""
    file = open_own(path, "r+b" if path.exists() else "w+b")
    file.truncate(keep)
    file.seek(keep)
    return file


def _put(handle: int, data: memoryview, at: int) -> None:
    """Write all of ``data`` at a file offset."""
    while len(data):
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written
