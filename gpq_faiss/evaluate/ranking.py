"""The ranking of a whole database for many queries, exactly, with ties, in bounded memory.

An average precision over U distinct codes needs a sort of U scores, not N. So the database is grouped by code
once; items are counted by (label set, code); queries are taken in the order of their label sets, so that the
counts of relevant items a code are made once for each label set; and a block of queries at a time is scored,
sorted and summed with whole-array operations.

One sort carries its own permutation: a float32 score, widened to float64, leaves 29 bits of the mantissa
    zero, and these hold the
code's number. Such a sort of plain float64 is several times faster than an ``argsort`` of float32, and exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError, UsageError
from .grouping import Bytes, LabelsLike, Relevance, distinct_rows, label_rows, same_width
from .metrics import RECALL_LEVELS, check_ks, check_levels, precision_of, recall_of
from .ties import (
    Denominator,
    Floats,
    Groups,
    Ints,
    Ties,
    average_precisions,
    check_cut,
    check_ties,
    convention,
    harmonic_numbers,
    interpolated_precision,
)

ScoreFunction = Callable[[Ints, Bytes], NDArray[Any]]
"""``(query rows int64 [q], distinct codes uint8 [U, W]) -> scores [q, U]``, larger is better."""
RowFunction = Callable[[Ints], NDArray[Any]]
"""``(query rows int64 [q]) -> scores [q, N]`` against every database row, larger is better."""

_PAYLOAD_BITS = 29  # what float64's mantissa (52 bits) has beyond float32's (23)
_PAYLOAD = np.int64((1 << _PAYLOAD_BITS) - 1)
_LOW = np.int64((1 << 32) - 1)
_TASK = 128  # queries a task; fixed, so that the result does not depend on the number of threads
_CACHE_ENTRIES = 1 << 17  # scores a block: what stays in a core's own cache
_BYTES_A_SCORE = 48  # all buffers of a block together


@dataclass(frozen=True)
class RankingResult:
    """Measures of a ranking; ``convention`` says how they were computed."""

    map: float
    """Mean of ``ap`` over all queries; those without relevant items count 0."""
    ap: Floats
    """[Q] average precision of each query, in the order given."""
    precision: dict[int, float]
    """Mean precision at each k."""
    recall: dict[int, float]
    """Mean recall at each k."""
    pr_recall: Floats
    """[L] recall levels of the mean precision-recall curve (empty if not asked for)."""
    pr_precision: Floats
    """[L] mean interpolated precision at those levels."""
    n_queries: int
    n_database: int
    n_distinct: int
    """Distinct codes in the database (the number of items where there are no codes)."""
    queries_without_relevant: int
    convention: str
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but the single queries."""
        return {
            "map": self.map,
            "precision": {str(k): v for k, v in self.precision.items()},
            "recall": {str(k): v for k, v in self.recall.items()},
            "pr_curve": {"recall": self.pr_recall.tolist(), "precision": self.pr_precision.tolist()},
            "n_queries": self.n_queries,
            "n_database": self.n_database,
            "n_distinct": self.n_distinct,
            "queries_without_relevant": self.queries_without_relevant,
            "convention": self.convention,
            "notes": list(self.notes),
        }


def rank_codes(
    scorer: NDArray[np.float32] | ScoreFunction,
    codes: Bytes,
    query_labels: LabelsLike,
    database_labels: LabelsLike,
    *,
    ties: Ties = "expected",
    k: int | None = None,
    denominator: Denominator = "relevant",
    ks: Sequence[int] = (),
    levels: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    rows: ArrayLike | None = None,
    exclude: ArrayLike | None = None,
    memory: int = 256 << 20,
    threads: int = 1,
) -> RankingResult:
    """Rank a database of codes for every query and measure the rankings. Two items are relevant if they share
    a label.

    Args:
        scorer: tables float32 [Q, M, K] (score = sum over m of tables[q, m, code_m]), or a
            :data:`ScoreFunction`, for other kinds of code. Either way each distinct code is scored once, so
            equal codes have equal scores. Tables are added in float32 in
            a fixed order: left to right within chunks of codebooks of at most 12 bits, then chunk by chunk.
        codes: uint8 [N, W]. With tables, W = M codeword numbers below K; with a function, whatever it takes.
        query_labels, database_labels: see :func:`gpq_faiss.evaluate.grouping.label_rows`; unlabelled items
            are never relevant.
        ties, k, denominator: as in :func:`gpq_faiss.evaluate.metrics.average_precision`.
        ks: the k of precision and recall.
        levels: recall levels of the mean PR curve; None for no curve (:data:`RECALL_LEVELS` is the usual
            choice).
        ids: int64 [N], the order within ties for ties="id" (the row number if not given).
        rows: int64, the database rows that count; all if not given. ``exclude`` still speaks of rows of the
            whole.
        exclude: int64 [Q], a database row that is left out for that query (itself, in leave-one-out), or -1.
        memory: bytes for all blocks in work together; one query a block and thread is the least.
        threads: blocks in work at a time. The result does not depend on it.

    Raises:
        UsageError: an unknown convention, a k below 1, codes of another width than the tables.
        DataError: shapes that do not belong together, codes out of range, scores that are not finite.
    """
    codes = np.asarray(codes)
    if codes.ndim != 2 or codes.dtype != np.uint8:
        raise DataError(f"codes must be uint8 [N, W], not {codes.dtype} {codes.shape}")
    database = _Database.prepare(len(codes), database_labels, rows, ids)
    distinct, code_of = distinct_rows(np.ascontiguousarray(codes[database.rows]))
    fill: _Fill
    if callable(scorer):
        fill, n_queries = _function_filler(lambda q: scorer(q, distinct), len(distinct)), None
    else:
        fill = _TableFiller(scorer, distinct)
        n_queries = len(scorer)
    plan = _Plan(ties, k, denominator, check_ks(ks), levels, memory, threads)
    return _rank(plan, fill, n_queries, len(distinct), code_of, query_labels, database, exclude)


def rank_scores(
    scores: NDArray[Any] | RowFunction,
    query_labels: LabelsLike,
    database_labels: LabelsLike,
    *,
    ties: Ties = "expected",
    k: int | None = None,
    denominator: Denominator = "relevant",
    ks: Sequence[int] = (),
    levels: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    rows: ArrayLike | None = None,
    exclude: ArrayLike | None = None,
    memory: int = 256 << 20,
    threads: int = 1,
) -> RankingResult:
    """:func:`rank_codes` where there are no codes: exact float features, class probabilities, distances of
    any kind.

    ``scores`` is [Q, N], or a :data:`RowFunction` that is asked for a block of queries at a time against
    *all* N database rows (``rows`` picks among them afterwards). They must fit float32 exactly (float32,
    float16, small integers), because a silent rounding would make ties. Distances: pass their negative.
    """
    n = _length(database_labels)
    database = _Database.prepare(n, database_labels, rows, ids)
    whole = len(database.rows) == n
    n_queries: int | None = None
    if callable(scores):
        function = scores
    else:
        table = np.asarray(scores)
        if table.ndim != 2 or table.shape[1] != n:
            raise DataError(f"scores {table.shape} must be [queries, {n:,} database items]")
        n_queries = len(table)
        function = table.__getitem__

    def picked(q: Ints) -> NDArray[Any]:
        block = np.asarray(function(q))
        if block.shape != (len(q), n):
            raise DataError(
                f"the score function gave {block.shape} for {len(q)} queries: expected ({len(q)}, {n})"
            )
        return block if whole else block[:, database.rows]

    fill = _function_filler(picked, len(database.rows))
    plan = _Plan(ties, k, denominator, check_ks(ks), levels, memory, threads)
    code_of = np.arange(len(database.rows), dtype=np.int64)
    return _rank(plan, fill, n_queries, len(code_of), code_of, query_labels, database, exclude)


def rank_features(
    queries: NDArray[np.float32],
    database: NDArray[np.float32],
    query_labels: LabelsLike,
    database_labels: LabelsLike,
    **options: Any,
) -> RankingResult:
    """:func:`rank_scores` by inner product of float32 features [Q, D] and [N, D]; normalise first for the
    cosine.

    Equal database rows may differ in the last bit of their scores, as the BLAS library orders its sums by
    position.
    """
    xq, xb = np.asarray(queries, dtype=np.float32), np.asarray(database, dtype=np.float32)
    if xq.ndim != 2 or xb.ndim != 2 or xq.shape[1] != xb.shape[1]:
        raise DataError(
            f"features of queries {xq.shape} and database {xb.shape} must be 2-D and of one width"
        )
    return rank_scores(lambda q: xq[q] @ xb.T, query_labels, database_labels, **options)


# ----------------------------------------------------------------------------------------------------
# preparation


@dataclass(frozen=True)
class _Plan:
    """What to measure and with which means."""

    ties: Ties
    k: int | None
    denominator: Denominator
    ks: list[int]
    levels: ArrayLike | None
    memory: int
    threads: int

    def __post_init__(self) -> None:
        check_ties(self.ties)
        check_cut(self.k, self.denominator)
        if self.threads < 1 or self.memory < 1:
            raise UsageError(f"threads={self.threads} and memory={self.memory} must be at least 1")


@dataclass(frozen=True)
class _Database:
    """The database rows that count, with their labels."""

    total: int
    rows: Ints
    labels: Bytes
    ids: Ints | None

    @classmethod
    def prepare(
        cls, total: int, labels: LabelsLike, rows: ArrayLike | None, ids: ArrayLike | None
    ) -> _Database:
        packed = label_rows(labels, "database labels", total)
        chosen = np.arange(total) if rows is None else np.asarray(rows)
        if chosen.dtype == bool:
            chosen = np.flatnonzero(chosen)
        if chosen.ndim != 1 or (
            len(chosen) and (chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= total)
        ):
            raise DataError(f"rows must be row numbers below {total:,}")
        if len(np.unique(chosen)) != len(chosen):
            raise DataError("rows names some database row twice: each counts once")
        if not len(chosen):
            raise DataError("the database is empty: nothing to rank")
        if len(chosen) > 1 << 31:
            raise DataError(f"{len(chosen):,} database rows are more than 2^31: rank it in parts")
        key = None
        if ids is not None:
            key = np.asarray(ids)
            if key.shape != (total,) or key.dtype.kind not in "iu":
                raise DataError(f"ids must be {total:,} integers, one a database row")
            key = key[chosen]
            if len(np.unique(key)) != len(key):
                raise DataError("ids must differ: ties cannot be ordered by equal ids")
        return cls(total, chosen.astype(np.int64), packed[chosen], key)


def _length(labels: LabelsLike) -> int:
    return len(labels.packed) if hasattr(labels, "packed") else len(labels)


class _Fill(Protocol):
    """Fills ``out`` float32 [q, U] with *negated* scores, none of them -0.0; ``spare`` is scratch of that
    shape."""

    def __call__(self, queries: Ints, out: NDArray[np.float32], spare: NDArray[np.float32]) -> None: ...


class _TableFiller:
    """Adds up tables [Q, M, K] for distinct codes [U, M]."""

    def __init__(self, tables: NDArray[np.float32], distinct: Bytes) -> None:
        tables = np.asarray(tables)
        if tables.ndim != 3 or tables.dtype != np.float32:
            raise DataError(f"tables must be float32 [Q, M, K], not {tables.dtype} {tables.shape}")
        _, m, size = tables.shape
        if distinct.shape[1] != m:
            raise UsageError(
                f"codes have {distinct.shape[1]} codewords each, the tables {m} codebooks: unpack the codes first"
            )
        if len(distinct) and int(distinct.max()) >= size:
            raise DataError(f"codeword {distinct.max()} is out of range: the codebooks have {size}")
        # A finite sum of magnitudes rules out infinity and NaN in any score.
        if not (
            np.abs(tables).max(axis=2, initial=0.0).sum(axis=1, dtype=np.float64) < np.finfo(np.float32).max
        ).all():
            raise DataError(
                "score tables hold NaN, infinity or values too large to add: check the query vectors"
            )
        # One look-up serves as many codebooks as 4,096 entries can hold: each gather costs, whatever it
        # gathers.
        step = 1
        while size ** (step + 1) <= 4096:
            step += 1
        self._tables = tables
        self._chunks: list[tuple[int, int, Ints]] = []
        for start in range(0, m, step):
            stop = min(m, start + step)
            index = np.zeros(len(distinct), dtype=np.int64)
            for column in range(start, stop):
                index = index * size + distinct[:, column]
            self._chunks.append((start, stop, index))

    def __call__(self, queries: Ints, out: NDArray[np.float32], spare: NDArray[np.float32]) -> None:
        tables = np.float32(0) - self._tables[queries]  # 0 - x, as -x would make -0.0
        for start, stop, index in self._chunks:
            chunk = tables[:, start]
            for column in range(start + 1, stop):
                chunk = (chunk[:, :, None] + tables[:, None, column]).reshape(len(queries), -1)
            if start == 0:
                np.take(chunk, index, axis=1, out=out, mode="clip")  # "clip" writes straight into out
            else:
                np.take(chunk, index, axis=1, out=spare, mode="clip")
                np.add(out, spare, out=out)


def _function_filler(function: Callable[[Ints], NDArray[Any]], width: int) -> _Fill:
    def fill(queries: Ints, out: NDArray[np.float32], spare: NDArray[np.float32]) -> None:
        given = np.asarray(function(queries))
        if given.shape != out.shape:
            raise DataError(
                f"the score function gave {given.shape} for {len(queries)} queries: expected {out.shape}"
            )
        if given.dtype != np.float32:
            spare[...] = given
            if not (spare == given).all():
                raise UsageError(
                    f"scores of type {given.dtype} do not fit float32 exactly: round them yourself, as it makes ties"
                )
            given = spare
        if not np.isfinite(given).all():
            raise DataError("scores hold NaN or infinity: a ranking needs finite scores")
        np.subtract(np.float32(0), given, out=out)

    if width >= 1 << _PAYLOAD_BITS:
        raise DataError(
            f"{width:,} distinct items are more than 2^{_PAYLOAD_BITS}: rank the database in parts"
        )
    return fill


# ------------------------------------------------------------------------------------------------------ the
# engine


class _Workspace:
    """The buffers of one thread for blocks of at most ``block`` queries over ``width`` entries."""

    def __init__(self, block: int, width: int, distinct: int, *, expand: bool) -> None:
        self.scores = np.empty((block, distinct), dtype=np.float32)
        self.spare = np.empty((block, distinct), dtype=np.float32)
        self.keys = np.empty((block, width), dtype=np.float64)
        self.index = np.empty((block, width), dtype=np.int64)
        self.packed = np.empty((block, width), dtype=np.int64)
        self.sums = np.empty((block, width), dtype=np.int64)
        self.same = np.zeros((block, width), dtype=bool)
        self.items = np.empty((block, width), dtype=np.float32) if expand else None


class _Engine:
    """Sorts blocks of queries and gives their tie groups."""

    def __init__(
        self,
        fill: _Fill,
        n_distinct: int,
        code_of: Ints,
        labels: Bytes,
        queries: Bytes,
        order: Ints | None,
        exclude: Ints | None,
    ) -> None:
        # order: None, or the items in the order that ties take; each item is then an entry of its own.
        self.fill, self.n_distinct, self.order, self.exclude = fill, n_distinct, order, exclude
        self.queries, self.labels, self.code_of = queries, labels, code_of
        if order is None:
            self.width, self.entry_of = n_distinct, code_of
            self.expand = None
        else:
            self.width = len(code_of)
            self.entry_of = np.empty(self.width, dtype=np.int64)
            self.entry_of[order] = np.arange(self.width)
            self.expand = code_of[order]
        if self.width >= 1 << _PAYLOAD_BITS:
            raise DataError(
                f"{self.width:,} entries are more than 2^{_PAYLOAD_BITS}: rank the database in parts"
            )
        self.sizes = np.bincount(self.entry_of, minlength=self.width).astype(np.int64)
        self.relevance = Relevance.count(labels, self.entry_of, self.width)
        self.payload = np.arange(self.width, dtype=np.int64)

    def block_size(self, memory: int) -> int:
        """Queries a block within ``memory`` bytes, and no more than the cache can use."""
        return int(np.clip(min(_CACHE_ENTRIES // self.width, memory // (_BYTES_A_SCORE * self.width)), 1, 64))

    def workspace(self, block: int) -> _Workspace:
        return _Workspace(block, self.width, self.n_distinct, expand=self.expand is not None)

    def counts_for(self, query: int) -> tuple[Ints, int]:
        """Items and relevant items of each entry as one number (relevant << 32 | items), so that one sum
        serves both."""
        hits = self.relevance.hits(self.queries[query])
        return (hits << 32) | self.sizes, int(hits.sum())

    def sort(self, block: Ints, work: _Workspace) -> None:
        """Fill ``work.index`` with the entries of each query in rank order and ``work.keys`` with their
        (integer) scores."""
        b = len(block)
        scores = work.scores[:b]
        self.fill(block, scores, work.spare[:b])
        keys, index = work.keys[:b], work.index[:b]
        if self.expand is not None and work.items is not None:
            scores = np.take(scores, self.expand, axis=1, out=work.items[:b], mode="clip")
        keys[...] = scores
        bits = keys.view(np.int64)
        if self.expand is None:
            bits |= self.payload
            keys.sort(axis=1)
            np.bitwise_and(bits, _PAYLOAD, out=index)
        else:
            # Below zero a larger mantissa sorts earlier: complement the payload there to keep the items'
            # order.
            np.bitwise_or(bits, self.payload ^ ((bits >> 63) & _PAYLOAD), out=bits)
            keys.sort(axis=1)
            np.bitwise_and(bits ^ (bits >> 63), _PAYLOAD, out=index)

    def groups(
        self, block: Ints, set_of: Ints, cache: dict[int, tuple[Ints, int]], work: _Workspace
    ) -> Groups:
        """Tie groups of the rankings of the queries ``block`` (which come ordered by label set)."""
        b = len(block)
        self.sort(block, work)
        index, packed, sums, same = work.index[:b], work.packed[:b], work.sums[:b], work.same[:b]
        relevant = np.zeros(b, dtype=np.int64)
        start = 0
        while start < b:
            label_set = int(set_of[block[start]])
            stop = start + 1
            while stop < b and set_of[block[stop]] == label_set:
                stop += 1
            if label_set not in cache:
                cache.clear()  # queries come in the order of their sets: the one before is done with
                cache[label_set] = self.counts_for(int(block[start]))
            counts, total = cache[label_set]
            relevant[start:stop] = total
            if self.exclude is None:
                np.take(counts, index[start:stop], out=packed[start:stop], mode="clip")
            else:
                for i in range(start, stop):
                    relevant[i] -= self._take_without(int(block[i]), counts, index[i], packed[i])
            start = stop
        np.cumsum(packed, axis=1, out=sums)
        flat, flat_sums = packed.reshape(-1), sums.reshape(-1)
        if self.expand is None:
            bits = work.keys[:b].view(np.int64)
            bits >>= _PAYLOAD_BITS
            np.equal(bits[:, 1:], bits[:, :-1], out=same[:, :-1])
            _merge_ties(np.flatnonzero(same), flat, flat_sums)
        places = np.flatnonzero(flat > _LOW)  # a relevant item or more
        here = flat.take(places)
        before = flat_sums.take(places) - here
        bounds = np.searchsorted(places, np.arange(b + 1) * self.width)
        row = np.repeat(np.arange(b), np.diff(bounds))
        return Groups(b, row, before & _LOW, here & _LOW, before >> 32, here >> 32, relevant)

    def _take_without(self, query: int, counts: Ints, index: Ints, out: Ints) -> int:
        """``counts[index]`` with the excluded item of ``query`` left out; 1 if that item was relevant, else
        0."""
        item = -1 if self.exclude is None else int(self.exclude[query])
        if item < 0:
            np.take(counts, index, out=out, mode="clip")
            return 0
        relevant = int((self.labels[item] & self.queries[query]).any())
        entry = int(self.entry_of[item])
        counts[entry] -= (relevant << 32) + 1
        np.take(counts, index, out=out, mode="clip")
        counts[entry] += (relevant << 32) + 1
        return relevant


def _merge_ties(tied: Ints, counts: Ints, sums: Ints) -> None:
    """Give the last of each run of equal scores the counts of the whole run, and the others none, in place.

    ``tied`` are the flat places whose score equals that of the next place. Different codes with equal scores
    are few at 48 bits, so only they are touched.
    """
    if not len(tied):
        return
    new = np.ones(len(tied), dtype=bool)
    new[1:] = tied[1:] != tied[:-1] + 1
    first = tied[new]
    last = tied[np.append(np.flatnonzero(new)[1:] - 1, len(tied) - 1)] + 1
    total = sums[last] - sums[first] + counts[first]
    counts[tied] = 0
    counts[last] = total


def _rank(
    plan: _Plan,
    fill: _Fill,
    n_queries: int | None,
    n_distinct: int,
    code_of: Ints,
    query_labels: LabelsLike,
    database: _Database,
    exclude: ArrayLike | None,
) -> RankingResult:
    """Run the engine over all queries and collect the measures."""
    n_queries = _length(query_labels) if n_queries is None else n_queries
    query_sets, labels = same_width(label_rows(query_labels, "query labels", n_queries), database.labels)
    n = len(database.rows)
    order = None
    if plan.ties == "id":
        order = np.argsort(database.rows if database.ids is None else database.ids)
    engine = _Engine(
        fill, n_distinct, code_of, labels, query_sets, order, _excluded(exclude, n_queries, database)
    )
    _, set_of = distinct_rows(query_sets)
    by_set = np.argsort(set_of, kind="stable")
    block = engine.block_size(plan.memory // plan.threads)
    harmonic = harmonic_numbers(n)
    levels = np.zeros(0) if plan.levels is None else check_levels(plan.levels)
    ap, without = np.zeros(n_queries), np.zeros(n_queries, dtype=bool)
    precision, recall = np.zeros((n_queries, len(plan.ks))), np.zeros((n_queries, len(plan.ks)))

    def task(start: int) -> Floats:
        work = engine.workspace(block)
        cache: dict[int, tuple[Ints, int]] = {}
        curve = np.zeros(len(levels))
        stop = min(n_queries, start + _TASK)
        for first in range(start, stop, block):
            rows = by_set[first : min(stop, first + block)]
            groups = engine.groups(rows, set_of, cache, work).arranged(plan.ties)
            ap[rows] = average_precisions(groups, harmonic, plan.k, plan.denominator)
            without[rows] = groups.relevant == 0
            if plan.ks:
                precision[rows], recall[rows] = precision_of(groups, plan.ks), recall_of(groups, plan.ks)
            if len(levels):
                for line in interpolated_precision(groups, levels):  # one by one: blocks must not matter
                    curve += line
        return curve

    starts = range(0, n_queries, _TASK)
    if plan.threads == 1:
        curves = [task(start) for start in starts]
    else:
        with ThreadPoolExecutor(plan.threads) as pool:
            curves = list(pool.map(task, starts))
    curve = np.sum(curves, axis=0) / n_queries if curves else np.zeros(len(levels))
    missing = int(without.sum())
    notes = (f"{missing:,} of {n_queries:,} queries have no relevant item and count 0",) if missing else ()
    return RankingResult(
        map=float(ap.mean()) if n_queries else 0.0,
        ap=ap,
        precision={k: float(v) for k, v in zip(plan.ks, _means(precision), strict=True)},
        recall={k: float(v) for k, v in zip(plan.ks, _means(recall), strict=True)},
        pr_recall=levels,
        pr_precision=curve,
        n_queries=n_queries,
        n_database=n,
        n_distinct=n_distinct,
        queries_without_relevant=missing,
        convention=convention("mAP", plan.ties, plan.k, plan.denominator),
        notes=notes,
    )


def _means(values: Floats) -> Floats:
    result: Floats = values.mean(axis=0) if len(values) else np.zeros(values.shape[1])
    return result


def _excluded(exclude: ArrayLike | None, n_queries: int, database: _Database) -> Ints | None:
    """Excluded rows as positions among the rows that count; -1 where none is (or where it does not count
    anyway)."""
    if exclude is None:
        return None
    given = np.asarray(exclude)
    if given.shape != (n_queries,) or given.dtype.kind not in "iu":
        raise DataError(f"exclude must be {n_queries:,} database rows (or -1), one a query")
    if n_queries and (given.min() < -1 or given.max() >= database.total):
        raise DataError(f"exclude names rows outside the database of {database.total:,}")
    position = np.full(database.total + 1, -1, dtype=np.int64)  # the last entry serves -1
    position[database.rows] = np.arange(len(database.rows))
    result: Ints = position[given]
    return result


__all__ = ["RECALL_LEVELS", "RankingResult", "rank_codes", "rank_features", "rank_scores"]
