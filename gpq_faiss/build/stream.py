"""Streaming build of an index of any size within a memory budget, resumable by shard.

Rows are written to two raw files in ``.<name>.building/`` beside the output; each finished shard is recorded. For lists, rows are then
sorted by list (:mod:`.sort`). At the end they stream into the index file, so the build temporarily needs the size of the output (twice
that for lists). An interrupted build continues with the first unfinished shard.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..codes.bits import code_size
from ..codes.checks import Floats, Ids, repeated_id
from ..errors import DataError, UsageError
from ..faissio.header import pack_rows, row_header
from ..faissio.io import Beside, HashedFile, check_index_output, publish
from ..faissio.storage import Form, check_form
from ..files import fingerprint, open_own, read_json, unfinished, write_error, write_json
from ..progress import Progress, stage
from ..store import codebooks_fingerprint
from .shards import Shard
from .sort import ListSort

MEMORY = 512 << 20
LEAST_MEMORY = 16 << 20
_MAX_ROWS = 1 << 20
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

    Returns:
        ``out``

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
    rows, size = sum(shard.rows for shard in shards), code_size(M, K)
    out = check_index_output(out, overwrite=overwrite)
    note: dict[str, Any] = {**(extra or {}), "shards": len(shards)}

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, 3 * rows if lists else rows)

    with building(out) as partial:
        identity = fingerprint("build", codebooks_fingerprint(codebooks), str(model_fingerprint), "rows")
        sort = ListSort(partial, codebooks, memory, rows, tell) if lists else None
        mark = fingerprint(identity, *(shard.fingerprint for shard in shards))
        mapped = True
        if sort is None or not sort.sorted_before(mark):
            _collect(partial, identity, shards, size, memory, tell)
            mapped = check_stored_ids(partial / "ids.raw", shards, memory, out)
            if sort is not None:
                sort.sort(mark)

        def write(file: HashedFile) -> None:
            with stage("writing the index", rows, "row") as writing:
                if sort is None:
                    _write_rows(file, partial, codebooks, form, rows, mapped=mapped, memory=memory)
                else:
                    sort.write(file)
                writing.done = rows

        publish(
            out,
            write,
            (form, rows, codebooks),
            model_fingerprint=model_fingerprint,
            extra=note,
            beside=beside,
            done_with=partial,
        )
    return out


class UnfitSourcesError(DataError):
    """These sources cannot form one index, so the unfinished build is useless."""


@contextlib.contextmanager
def building(out: Path) -> Iterator[Path]:
    """Context of the locked folder of a build, which is removed on success, and kept on failure if it can be resumed.

    Raises:
        DataError: in use by another process, or not writable.
    """
    partial = out.with_name(f".{out.name}.building")
    try:
        with unfinished(partial, out, keep=("progress.json", "sorted.json")):
            try:
                yield partial
            except UnfitSourcesError:
                for name in ("progress.json", "sorted.json"):
                    (partial / name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise write_error(out, error) from error


def _collect(
    partial: Path,
    identity: str,
    shards: Sequence[Shard],
    size: int,
    memory: int,
    tell: Callable[[int], None],
) -> None:
    """Append the rows of all shards to the raw files."""
    record = partial / "progress.json"
    done: list[str] = []
    rows = 0
    if record.exists():
        with contextlib.suppress(DataError):
            state = read_json(record, "the progress of a build")
            if isinstance(state, dict) and state.get("identity") == identity:
                done, rows = list(state["shards"]), int(state["rows"])
    wanted = [shard.fingerprint for shard in shards]
    there = [p.stat().st_size if p.exists() else 0 for p in (partial / "codes.raw", partial / "ids.raw")]
    if done != wanted[: len(done)] or there[0] < rows * size or there[1] < rows * 8:
        _log.warning("%s: the unfinished build there is of other files: starting again", partial)
        done, rows = [], 0
    total = sum(shard.rows for shard in shards)
    with (
        _raw(partial / "codes.raw", rows * size) as codes_file,
        _raw(partial / "ids.raw", rows * 8) as ids_file,
        stage("reading codes", total, "row", done=rows) as reading,
    ):
        for shard in shards[len(done) :]:
            step = int(max(256, min(_MAX_ROWS, memory // (4 * shard.row_bytes))))
            for codes, ids in shard.blocks(step):
                codes_file.write(np.ascontiguousarray(codes).tobytes())
                ids_file.write(np.ascontiguousarray(ids, dtype="<i8").tobytes())
                rows += len(ids)
                reading.done = rows
                tell(rows)
            for file in (codes_file, ids_file):
                file.flush()
                os.fsync(file.fileno())
            done.append(shard.fingerprint)
            write_json(record, {"identity": identity, "shards": done, "rows": rows})


def _raw(path: Path, keep: int) -> IO[bytes]:
    """Open for appending after the first ``keep`` bytes."""
    file = open_own(path, "r+b" if path.exists() else "w+b")
    file.truncate(keep)
    file.seek(keep)
    return file


def _id_blocks(path: Path, rows: int, step: int) -> Iterator[tuple[int, Ids]]:
    with path.open("rb") as file:
        for start in range(0, rows, step):
            yield start, np.frombuffer(file.read(8 * min(step, rows - start)), "<i8")


def check_stored_ids(path: Path, shards: Sequence[Shard], memory: int, out: Path) -> bool:
    """Whether the ids of all shards, concatenated in ``path``, differ from 0, 1, 2, ...

    Raises:
        UnfitSourcesError: -1, or a repeated id.
    """
    rows = sum(shard.rows for shard in shards)
    step = max(1, min(_MAX_ROWS, memory // 64))
    ascending, counting, last = True, True, None
    for start, ids in _id_blocks(path, rows, step):
        if bool((ids == -1).any()):
            (of,) = _holders(path, shards, -1, step)[:1]
            raise UnfitSourcesError(
                f"{out}: an item of {of} has the id -1, which marks a missing result: give it another"
            )
        ascending &= bool((ids[1:] > ids[:-1]).all()) and (last is None or int(ids[0]) > last)
        counting &= bool((ids == np.arange(start, start + len(ids))).all())
        last = int(ids[-1])
    if not ascending:
        # Equal ids are in the same part, and each part fits in the budget: one pass per part.
        parts = max(1, -(-rows * 32 // memory))
        for part in range(parts):
            among = [ids[_spread(ids) % np.uint64(parts) == part] for _, ids in _id_blocks(path, rows, step)]
            repeated = repeated_id(np.concatenate(among))
            if repeated is not None:
                of = " and in ".join(_holders(path, shards, repeated, step)[:2])
                raise UnfitSourcesError(
                    f"{out}: id {repeated} occurs more than once, in {of}: every item needs its own"
                )
    return not counting


def _holders(path: Path, shards: Sequence[Shard], wanted: int, step: int) -> list[str]:
    """The sources that contain an id."""
    rows = sum(shard.rows for shard in shards)
    ends = np.cumsum([shard.rows for shard in shards])
    at = [start + np.flatnonzero(ids == wanted) for start, ids in _id_blocks(path, rows, step)]
    held = np.unique(np.searchsorted(ends, np.concatenate(at), side="right"))
    return [str(shards[number].path) for number in held.tolist()]


def _spread(ids: Ids) -> Any:
    """Fibonacci hashing, for parts of equal size."""
    return (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)


def _write_rows(
    file: HashedFile, partial: Path, Z: Floats, form: Form, rows: int, *, mapped: bool, memory: int
) -> None:
    """Write header, codes and (if ``mapped``) ids of an index without lists."""
    head, _, tail = row_header(form, Z, rows, mapped=mapped)
    size = code_size(int(Z.shape[0]), int(Z.shape[1]))
    step = max(32, min(_MAX_ROWS, memory // (8 * size)) // 32 * 32)
    file.put(head)
    with (partial / "codes.raw").open("rb") as codes:
        for start in range(0, rows, step):
            n = min(step, rows - start)
            block = np.frombuffer(codes.read(n * size), np.uint8).reshape(n, size)
            file.put(np.ascontiguousarray(pack_rows(form, block, len(Z))).data)
    file.put(tail)
    if mapped:
        for _, ids in _id_blocks(partial / "ids.raw", rows, step):
            file.put(np.ascontiguousarray(ids).data)
