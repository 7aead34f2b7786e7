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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.bits import code_size
from ..codes.checks import Ids, repeated_among
from ..errors import DataError, UsageError
from ..faissio.io import Beside, check_index_output, save_index
from ..faissio.storage import (
    BLOCK_ROWS,
    LEVELS,
    Form,
    WordLists,
    check_form,
    first_words,
    list_header,
    list_parts,
    row_parts,
)
from ..files import fingerprint, open_own, read_json, unfinished, write_at, write_json, writing
from ..progress import stage
from ..store.writer import RECORD, RawRows
from .shards import Shard

MEMORY = 512 << 20
LEAST_MEMORY = 16 << 20
_MAX_ROWS = 1 << 20
_LEAST_CHUNK, _MOST_CHUNK = 1024, 1 << 25
_SORTED = "sorted.json"
_ID = np.dtype("<i8")
_log = logging.getLogger(__name__)


def build_index(
    shards: Sequence[Shard],
    out: str | Path,
    form: Form,
    *,
    memory: int = MEMORY,
    overwrite: bool = False,
    by_id: bool = False,
    extra: dict[str, Any] | None = None,
    beside: Beside | None = None,
) -> Path:
    """Write the rows of ``shards`` (at least one) as one index file, a plain Faiss index, with its sidecar.

    Items keep the order of the shards, also within lists. Without lists and with ids 0, 1, 2, ... the file is a bare index; else it is
    in an ``IndexIDMap``; with ``by_id`` always in an ``IndexIDMap2``.

    Args:
        form: of the codes (:mod:`..faissio.storage`).
        memory: budget of the build's arrays in bytes (Python and its libraries need about 200 MB more).
        beside: other files to put into place with the index.

    Raises:
        UsageError: a budget below 16 MiB, or a form that these codebooks do not allow.
        DataError: a damaged shard, the id -1 or a repeated id, or a full disk; finished shards are kept.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if memory < LEAST_MEMORY:
        raise UsageError(f"memory of {memory:,} bytes: at least {LEAST_MEMORY >> 20} MiB are needed")
    model = shards[0].model
    form = check_form(form, *model.codebooks.shape[:2])
    out = check_index_output(out, overwrite=overwrite)
    identity = fingerprint("build", model.codebooks_fingerprint, model.model_fingerprint)
    folder = out.with_name(f".{out.name}.building")
    with writing(out), unfinished(folder, out, keep=(RECORD, _SORTED)), contextlib.ExitStack() as stack:
        work = _Work(folder, shards, memory, identity)
        counts = work.sorted_before() if form == "ivf" else None
        if counts is None:
            raw = stack.enter_context(work.collect())
            mapped = "IDMap" if _check_ids(raw, shards, memory, out) else None
            if form == "ivf":
                counts = work.sort(raw)

        def parts() -> Iterator[bytes | memoryview]:
            with stage("writing the index", work.rows, "row") as filling:
                if counts is not None:
                    yield from work.list_parts(counts)
                else:
                    step = work.step(_MAX_ROWS)
                    codes, ids = ((block for _, block in raw.blocks(name, step)) for name in ("codes", "ids"))
                    kind = "IDMap2" if by_id else mapped
                    yield from row_parts(form, work.Z, work.rows, kind, codes, ids)
                filling.done = work.rows

        options: dict[str, Any] = {"extra": extra, "beside": beside, "done_with": folder}
        save_index(parts(), out, model_fingerprint=model.model_fingerprint, overwrite=True, **options)
    return out


def _check_ids(raw: RawRows, shards: Sequence[Shard], memory: int, out: Path) -> bool:
    """Whether the ids of all shards differ from 0, 1, 2, ... Raises DataError: -1, or a repeated id; the rows are removed."""
    step = max(1, min(_MAX_ROWS, memory // 64))

    def blocks() -> Iterator[Ids]:
        return (ids for _, ids in raw.blocks("ids", step))

    ascending, wrong = True, None
    ends: list[int] = []
    for ids in blocks():
        if bool((ids == -1).any()):
            wrong = -1
            break
        ascending &= bool((ids[1:] > ids[:-1]).all()) and (not ends or int(ids[0]) > ends[-1])
        ends += [int(ids[0]), int(ids[-1])]
    if wrong is None and not ascending:
        wrong = repeated_among(blocks, raw.rows, memory)
    if wrong is None:
        return not ascending or (ends[0], ends[-1]) != (0, raw.rows - 1)
    at = np.concatenate([start + np.flatnonzero(ids == wrong) for start, ids in raw.blocks("ids", step)])
    held = np.unique(np.searchsorted(np.cumsum([shard.rows for shard in shards]), at, side="right"))
    where = " and in ".join(str(shards[number].path) for number in held[:2].tolist())
    raw.remove()  # no later build could go on from them
    why = "marks a missing result" if wrong == -1 else "occurs more than once"
    raise DataError(f"{out}: id {wrong} {why}, in {where}: every item needs an id of its own, and not -1")


class _Work:
    """The unfinished work in ``folder``: files of rows, and the records of what is done."""

    def __init__(self, folder: Path, shards: Sequence[Shard], memory: int, identity: str) -> None:
        self.folder, self.shards, self.memory, self.identity = folder, shards, memory, identity
        self.Z = Z = shards[0].model.codebooks
        self.rows = sum(shard.rows for shard in shards)
        self.code = np.dtype((np.uint8, (code_size(int(Z.shape[0]), int(Z.shape[1])),)))
        self.mark = fingerprint(identity, *(shard.fingerprint for shard in shards))
        self.sorted = (folder / "codes.sorted", self.code), (folder / "ids.sorted", _ID)

    def step(self, most: int) -> int:
        """Rows to write at once: whole blocks of FastScan."""
        return max(BLOCK_ROWS, min(most, self.memory // (8 * self.code.itemsize)) // BLOCK_ROWS * BLOCK_ROWS)

    def collect(self) -> RawRows:
        """The rows of all shards; those that an interrupted run read whole are not read again."""
        raw = RawRows(self.folder, {"codes": self.code, "ids": _ID}, self.identity)
        done = list(raw.state.get("shards", []))
        if done != [shard.fingerprint for shard in self.shards[: len(done)]]:
            _log.warning("%s: the unfinished build there is of other files: starting again", self.folder)
            (self.folder / _SORTED).unlink(missing_ok=True)
            raw.rows, raw.state, done = 0, {}, []
            raw.commit()
        with stage("reading codes", self.rows, "row", done=raw.rows) as reading:
            for shard in self.shards[len(done) :]:
                step = int(max(256, min(_MAX_ROWS, self.memory // (4 * shard.row_bytes))))
                for codes, ids in shard.blocks(step):
                    raw.extend({"codes": codes, "ids": ids})
                    reading.advance(len(ids))
                done.append(shard.fingerprint)
                raw.state = {"shards": done}
                raw.commit()
        return raw

    # Lists ------------------------------------------------------------------------------------------------------------

    def sorted_before(self) -> Ids | None:
        """Items by their first words, if an interrupted run has already sorted these rows."""
        with contextlib.suppress(DataError, OSError, KeyError, TypeError):
            record = read_json(self.folder / _SORTED, "the progress of a build")
            whole = all(path.stat().st_size == self.rows * of.itemsize for path, of in self.sorted)
            if whole and record["mark"] == self.mark:
                return np.array(record["counts"], np.int64)
        return None

    def _lists(self, counts: Ids) -> tuple[WordLists, Ids]:
        """The lists and their sizes."""
        lists = WordLists.of(counts, self.Z)
        return lists, counts.reshape(16**lists.P, -1).sum(axis=1)[lists.keys]

    def sort(self, raw: RawRows) -> Ids:
        """Count the rows by their first words, and move them to their lists: sort a chunk in memory, and write each list's run."""
        width = self.code.itemsize
        chunk = int(max(_LEAST_CHUNK, min(_MOST_CHUNK, self.memory // (6 * width + 64))))
        levels = min(LEVELS, len(self.Z) - 1)
        counts = np.zeros(16**levels, np.int64)
        with stage("making lists", self.rows, "row") as counting:
            for _, codes in raw.blocks("codes", chunk):
                counts += np.bincount(first_words(codes, levels), minlength=16**levels)
                counting.advance(len(codes))
        lists, sizes = self._lists(counts)
        cursor = np.cumsum(sizes) - sizes
        with contextlib.ExitStack() as stack, stage("sorting by lists", self.rows, "row") as sorting:
            codes_out, ids_out = (
                stack.enter_context(open_own(path, keep=self.rows * of.itemsize)) for path, of in self.sorted
            )
            both = raw.blocks("codes", chunk), raw.blocks("ids", chunk)
            for (_, codes), (_, ids) in zip(*both, strict=True):
                numbers = lists.list_of(codes)
                order = np.argsort(numbers.astype(np.uint16), kind="stable")  # a radix sort
                held = np.bincount(numbers, minlength=len(sizes))
                whole = codes.view(f"V{width}").reshape(-1)  # whole codes move three times as fast as bytes
                sorted_codes = whole.take(order).view(np.uint8)
                sorted_ids = ids.take(order)
                del order
                start = 0
                for number in np.flatnonzero(held).tolist():
                    stop, to = start + int(held[number]), int(cursor[number])
                    write_at(codes_out, to * width, sorted_codes[start * width : stop * width])
                    write_at(ids_out, to * 8, sorted_ids[start:stop])
                    cursor[number] += stop - start
                    start = stop
                sorting.advance(len(ids))
            for file in (codes_out, ids_out):
                os.fsync(file.fileno())
        write_json(self.folder / _SORTED, {"mark": self.mark, "counts": counts.tolist()})
        raw.remove()
        return counts

    def list_parts(self, counts: Ids) -> Iterator[bytes | memoryview]:
        """The bytes of the index."""
        (lists, sizes), step = self._lists(counts), self.step(1 << 22)
        yield list_header(lists, self.rows)
        with contextlib.ExitStack() as stack:
            files = [(stack.enter_context(path.open("rb")), of) for path, of in self.sorted]

            def blocks(number: int, size: int) -> Iterator[NDArray[Any]]:
                file, of = files[number]
                for start in range(0, size, step):
                    data = file.read(min(step, size - start) * of.itemsize)
                    yield np.frombuffer(data, of)

            for size in sizes.tolist():
                yield from list_parts(lists, size, blocks(1, size), blocks(0, size))
