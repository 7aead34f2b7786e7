"""Which items are queries, which show their labels to the training, and what is searched.

*Protocol 1*: a few items of each class are queries, a few labelled; the rest is unlabelled and is the database.
CIFAR-10: 1,000 / 5,000 / 54,000. NUS-WIDE-21: 2,100 / 10,500 / the rest.

*Protocol 2* (retrieval of classes that the training never saw; Sablayrolles et al. 2017, "How should we evaluate
supervised hashing?"): three quarters of the classes are seen, and items are halved: train75 and test75 of the seen
classes, train25 and test25 of the others. Labelled is train75, queries are test25, and the database, whose items are
the unlabelled ones, is train25 + test75. CIFAR-10: 9,000 queries, 21,000 labelled, 30,000 in the database.

An item with several labels belongs to protocol 2's seen or unseen side by a rule (:data:`RULES`). The database is half
of all items under every rule, so the share of queries is what a rule decides: the paper has 35,272 queries for 85,415
database items of NUS-WIDE-21, or 0.413. On the 195,834 real label rows, in the mean over all 54,264 ways to choose 6 unseen
concepts of 21, the rules give: ``any`` 0.473 (46,317 queries for 97,917), ``half`` 0.316, ``majority`` 0.185, ``all`` 0.151.
So ``any`` is the default. It is also the one rule under which no image that the training may use as labelled shows an
unseen concept. (``benchmarks/nuswide.py`` counts them again.)

Items without any label can be neither query nor labelled, and their relevance is unknown: they are never in the
database, but the training may use them as unlabelled ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .base import Dataset
from .id_files import read_ids
from .labels import Labels, named_rows, rows_that
from .split import Rows, Split, load_split

Rule = Literal["any", "half", "majority", "all"]
RULES: tuple[Rule, ...] = get_args(Rule)
"""An item is on the unseen side if any / at least half / more than half / all of its labels are unseen."""

PROTOCOLS = ("1", "2", "gpq-authors", "none")

_QUERY, _LABELLED, _CLASSES, _HALVES = range(4)  # streams of random numbers
__all__ = [
    "PROTOCOLS",
    "RULES",
    "Rule",
    "Split",
    "authors_split",
    "load_split",
    "make_split",
    "no_queries",
    "parse_labelled",
    "protocol1",
    "protocol2",
    "read_rows",
    "resolve_labelled",
    "unseen_items",
]


def _permuted(rows: Rows, seed: int, stream: int, c: int = 0) -> Rows:
    return np.random.default_rng([seed, stream, c]).permutation(rows)


def _rare_first(labels: Labels) -> list[int]:
    """Classes that have items, the rarest first, so that the common ones do not use up their items."""
    counts = labels.counts()
    return [int(c) for c in np.argsort(counts, kind="stable") if counts[c]]


def _draw(
    labels: Labels, free: NDArray[np.bool_], wanted: Callable[[int, int, int], int], seed: int, stream: int
) -> Rows:
    """Items for each class in turn, none twice; ``free`` [N] says which may be taken and loses those that are.

    Args:
        wanted: (class, its items in all, its free ones) -> how many to take of it.
    """
    counts = labels.counts()
    taken: list[Rows] = []
    for c in _rare_first(labels):
        # The order is that of all the class, so that a larger draw contains a smaller one.
        order = _permuted(np.flatnonzero(labels.column(c)), seed, stream, c)
        order = order[free[order]]
        chosen = order[: wanted(c, int(counts[c]), len(order))]
        free[chosen] = False
        taken.append(chosen)
    return np.sort(np.concatenate(taken)) if taken else np.empty(0, np.int64)


def read_rows(path: str | Path, ids: NDArray[np.int64], what: str = "--labelled") -> Rows:
    """Positions of the items that a file names: a ``.npy`` of whole numbers, or text with one a line.

    The numbers are ids if all of them are ids of the data set, else row numbers (from 0).

    Raises:
        DataError: unreadable, not whole numbers, or neither ids nor row numbers.
    """
    found = read_ids(path, what)
    if not len(found):
        raise DataError(f"{what} {path} holds no number: ids or row numbers, one a line, are needed")
    values = np.unique(found)
    order = np.argsort(ids, kind="stable")
    place = np.searchsorted(ids[order], values)
    known = place < len(ids)
    known[known] = ids[order][place[known]] == values[known]
    if known.all():
        return np.sort(order[place]).astype(np.int64)
    if values[0] >= 0 and values[-1] < len(ids):
        return values
    unknown = values[~known]
    raise DataError(
        f"{what} {path}: {int(unknown[0])} is neither an id of the data nor a row number below {len(ids):,}"
        f" ({len(unknown):,} such)"
    )


def parse_labelled(spec: str) -> tuple[Literal["all", "count", "fraction", "file"], float]:
    """What a ``--labelled`` means: the kind, and its number.

    Raises:
        UsageError: a number that is neither N-per-class nor a fraction.
    """
    if spec == "all":
        return "all", 1.0
    if match := re.fullmatch(r"(\d+)-per-class", spec):
        if int(match[1]) == 0:
            raise UsageError("--labelled 0-per-class: at least 1 item of each class must be labelled")
        return "count", int(match[1])
    try:
        fraction = float(spec)
    except ValueError:
        return "file", 0.0
    if not 0 < fraction <= 1:
        hint = f" (did you mean {spec}-per-class?)" if spec.isdigit() and int(spec) else ""
        raise UsageError(f"--labelled {spec}: a fraction is above 0 and at most 1{hint}")
    return "fraction", fraction


def parse_queries(spec: str) -> int | str:
    """What a ``--queries`` means: how many of each class, or a file of them.

    Raises:
        UsageError: a number that is not N-per-class.
    """
    if match := re.fullmatch(r"(\d+)-per-class", spec):
        return int(match[1])
    try:
        float(spec)
    except ValueError:
        return spec
    raise UsageError(f"--queries {spec}: write N-per-class, or name a file")


def resolve_labelled(
    spec: str | None,
    labels: Labels,
    free: NDArray[np.bool_],
    *,
    seed: int,
    ids: NDArray[np.int64],
    reserved: str = "",
) -> Rows:
    """The items whose labels the training may see.

    Args:
        spec: ``N-per-class``; a fraction of the items of each class; ``all``; a file (:func:`read_rows`); None for
            a twelfth of each class, which is the paper's 500 on CIFAR-10.
        labels: of all items.
        free: bool [N], the items that may be taken; loses those that are.
        seed: of the draw.
        ids: int64 [N].
        reserved: what the items that are not free are for, in messages ("10 queries").

    Raises:
        UsageError: ``spec`` cannot be right.
        DataError: a class has too few items; the file is wrong, or names queries or items without label.
    """
    kind, number = ("fraction", 1 / 12) if spec is None else parse_labelled(spec)
    labelled_items = labels.has()
    free &= labelled_items
    if kind == "file":
        rows = read_rows(str(spec), ids)
        bare = rows[~labelled_items[rows]]
        if bare.size:
            raise DataError(
                f"--labelled {spec}: {rows_that(bare, 'have')} no label in the data: leave such rows out"
            )
        clash = rows[~free[rows]]
        if clash.size:
            raise DataError(
                f"--labelled {spec}: {named_rows(clash)} cannot be used ({reserved or 'not available'}): leave such rows out"
            )
        free[rows] = False
    elif kind == "all":
        rows = np.flatnonzero(free)
        free[:] = False
    else:

        def wanted(c: int, total: int, left: int) -> int:
            if kind == "fraction":
                return min(left, max(1, round(number * total)))
            if left < number:
                besides = f" besides {reserved}" if reserved else ""
                raise DataError(
                    f"class '{labels.class_names[c]}' has {total:,} items, {left:,} of them free; "
                    f"--labelled {spec} asks for {int(number):,}{besides}: lower it"
                )
            return int(number)

        rows = _draw(labels, free, wanted, seed, _LABELLED)
    return rows


def _require_each_class(labels: Labels, labelled: Rows, classes: NDArray[Any] | None = None) -> None:
    """Raise if a class has no labelled item: the classifier could not learn it."""
    counts = labels.take(labelled).counts()
    for c in range(labels.n_classes) if classes is None else classes:
        if counts[c] == 0:
            raise DataError(
                f"no labelled item for class '{labels.class_names[c]}': label one, or leave the class out"
            )


def _ids(labels: Labels, ids: NDArray[np.int64] | None) -> NDArray[np.int64]:
    return np.arange(len(labels)) if ids is None else ids


def protocol1(
    labels: Labels,
    seed: int = 0,
    labelled: str | None = None,
    queries: int | str | Path | None = None,
    *,
    ids: NDArray[np.int64] | None = None,
) -> Split:
    """A few queries and labelled items of each class; the rest is unlabelled and is the database.

    Args:
        labels: of all items.
        seed: of the draw.
        labelled: see :func:`resolve_labelled`. With ``all`` nothing that has a label is left for the database.
        queries: how many of each class, or a file of them; default max(n // 60, min(10, n // 10)) of n items.
            Items of a ``labelled`` file are not drawn as queries.
        ids: int64 [N]; default the row numbers.

    Raises:
        UsageError: an argument that cannot be right.
        DataError: a class has too few items or no labelled one; a file is wrong, or the two files overlap.
    """
    ids = _ids(labels, ids)
    has = labels.has()
    free = has.copy()
    if isinstance(queries, int) and queries < 1:
        raise UsageError(f"queries = {queries}: at least 1 of each class is needed (or protocol none)")
    from_file = labelled is not None and parse_labelled(labelled)[0] == "file"
    if from_file:
        assert labelled is not None
        free[read_rows(labelled, ids)] = False
    if queries is None or isinstance(queries, int):

        def wanted(c: int, total: int, left: int) -> int:
            count = max(total // 60, min(10, total // 10)) if queries is None else queries
            if left < count and not (queries is None and from_file):
                raise DataError(
                    f"class '{labels.class_names[c]}' has {total:,} items, {left:,} of them free; "
                    f"{count:,} queries are asked for: lower it"
                )
            return min(left, count)

        query = _draw(labels, free, wanted, seed, _QUERY)
        reserved = "queries" if queries is None else f"{queries:,} queries"
    else:
        query = read_rows(queries, ids, "queries")
        if not has[query].all():
            raise DataError(
                f"queries {queries}: {rows_that(query[~has[query]], 'have')} no label: leave such rows out"
            )
        reserved = "queries"
    if not len(query):
        raise DataError(
            f"{len(labels):,} items are too few to set queries apart: take more, or protocol none"
        )
    free = has.copy()
    free[query] = False
    chosen = resolve_labelled(labelled, labels, free, seed=seed, ids=ids, reserved=reserved)
    _require_each_class(labels, chosen)
    return _rest_is_database(labels, query, chosen, "1", seed)


def _rest_is_database(labels: Labels, query: Rows, labelled: Rows, name: str, seed: int) -> Split:
    rest = np.ones(len(labels), dtype=bool)
    rest[query] = rest[labelled] = False
    database = np.flatnonzero(rest & labels.has())
    return Split(len(labels), query, labelled, np.flatnonzero(rest), database, name, seed)


def unseen_items(labels: Labels, unseen: NDArray[np.bool_], rule: Rule = "any") -> NDArray[np.bool_]:
    """Which items are on the unseen side of protocol 2: bool [N]; ``unseen`` is bool [C]. See :data:`RULES`."""
    if rule not in RULES:
        raise UsageError(f"no rule '{rule}' for items of several labels: choose one of {', '.join(RULES)}")
    hidden = labels.select_classes(np.flatnonzero(unseen)).per_item
    total = labels.per_item
    if rule == "any":
        side = hidden > 0
    elif rule == "half":
        side = 2 * hidden >= total
    elif rule == "majority":
        side = 2 * hidden > total
    else:
        side = hidden == total
    return np.asarray(side & (total > 0), dtype=np.bool_)


def protocol2(
    labels: Labels,
    seed: int = 0,
    labelled: str | None = None,
    *,
    rule: Rule = "any",
    seen_share: float = 0.75,
    ids: NDArray[np.int64] | None = None,
) -> Split:
    """Queries of classes that the training never saw (see the module's text).

    Args:
        labels: of all items.
        seed: of the choice of classes and of the halves.
        labelled: None or ``all`` for all of train75; else as in :func:`resolve_labelled`, within train75 (what is
            left over is then unlabelled, and in no database).
        rule: side of an item with several labels.
        seen_share: share of the classes that are seen, rounded down: 7 of 10, 15 of 21.
        ids: int64 [N]; default the row numbers.

    Raises:
        UsageError: an argument that cannot be right.
        DataError: fewer than two classes with items, or too few items.
    """
    present = np.flatnonzero(labels.counts())
    if len(present) < 2:
        raise DataError(f"protocol 2 needs two classes with items, there are {len(present)}: use protocol 1")
    n_seen = min(len(present) - 1, max(1, int(seen_share * len(present) + 1e-9)))
    seen = np.sort(_permuted(present, seed, _CLASSES)[:n_seen])
    unseen = np.zeros(labels.n_classes, dtype=bool)
    unseen[np.setdiff1d(present, seen)] = True
    has = labels.has()
    hidden_side = unseen_items(labels, unseen, rule)
    if labels.multi_label:
        groups = [(0, np.flatnonzero(has & ~hidden_side)), (1, np.flatnonzero(hidden_side))]
    else:
        groups = [(int(c), np.flatnonzero(labels.column(int(c)))) for c in present]
    train = np.zeros(len(labels), dtype=bool)
    for stream, rows in groups:
        # The odd item goes to the half for training, so that a class of one item can be learnt.
        train[_permuted(rows, seed, _HALVES, stream)[: (len(rows) + 1) // 2]] = True
    query = np.flatnonzero(hidden_side & ~train)
    database = np.flatnonzero(has & (hidden_side == train))
    free = has & ~hidden_side & train
    if not len(query):
        raise DataError(f"{len(labels):,} items are too few for protocol 2: no query is left")
    train75 = free.copy()
    visible = labels.masked(np.flatnonzero(train75)).select_classes(seen)
    chosen = resolve_labelled(
        labelled or "all",
        visible,
        free,
        seed=seed,
        ids=_ids(labels, ids),
        reserved="not in the seen training half",
    )
    _require_each_class(labels, chosen, seen)
    rest = ~has | (train75 & free)
    rest[database] = True
    rest[chosen] = False
    return Split(
        len(labels),
        query,
        chosen,
        np.flatnonzero(rest),
        database,
        "2",
        seed,
        tuple(int(c) for c in seen),
        (f"seen classes: {', '.join(labels.class_names[c] for c in seen)}",),
    )


def authors_split(labels: Labels, labelled: str | None = None, *, seed: int = 0) -> Split:
    """The authors' scheme on CIFAR-10: sorted by class, every 60th item of a class a query, the first 500 of the others labelled.

    It is their scheme, not their very split. Here the sort is stable; theirs is ``np.argsort`` as it comes, which puts equal labels
    in an order that depends on NumPy and the processor. Of the 1,000 queries that it gave here 72 are the same.

    Nothing is random; the seed only travels along.

    Args:
        labels: one a item.
        labelled: ``N-per-class`` for another N; None or ``all`` for their 500.
        seed: recorded.

    Raises:
        UsageError: another form of ``labelled``.
        DataError: several labels an item, or a class with too few.
    """
    count = 500
    if labelled not in (None, "all"):
        kind, number = parse_labelled(str(labelled))
        if kind != "count":
            raise UsageError(f"protocol gpq-authors takes --labelled N-per-class, not {labelled}")
        count = int(number)
    of_item = labels.class_ids()
    queries, chosen = [], []
    for c in range(labels.n_classes):
        rows = np.flatnonzero(of_item == c)
        mark = np.arange(len(rows)) % 60 == 0
        if len(rows) - int(mark.sum()) < count:
            raise DataError(
                f"class '{labels.class_names[c]}' has {len(rows):,} items; protocol gpq-authors asks for {count:,} "
                f"besides {int(mark.sum())} queries: lower --labelled"
            )
        queries.append(rows[mark])
        chosen.append(rows[~mark][:count])
    query, picked = np.sort(np.concatenate(queries)), np.sort(np.concatenate(chosen))
    return _rest_is_database(labels, query, picked, "gpq-authors", seed)


def no_queries(
    labels: Labels, seed: int = 0, labelled: str | None = None, *, ids: NDArray[np.int64] | None = None
) -> Split:
    """Nothing is set apart: for a model to be used, not measured. ``labelled`` as in :func:`protocol1`.

    Raises:
        DataError: as :func:`protocol1`.
    """
    chosen = resolve_labelled(labelled, labels, labels.has(), seed=seed, ids=_ids(labels, ids))
    _require_each_class(labels, chosen)
    return _rest_is_database(labels, np.empty(0, np.int64), chosen, "none", seed)


def make_split(
    dataset: Dataset,
    protocol: str = "1",
    *,
    seed: int = 0,
    labelled: str | None = None,
    queries: int | str | Path | None = None,
    rule: Rule = "any",
) -> Split:
    """The split of ``dataset`` by the name of a protocol (:data:`PROTOCOLS`).

    NUS-WIDE has the paper's numbers as its defaults in protocol 1: 100 queries and 500 labelled of each concept. ``queries`` is for
    protocol 1: how many of each class, ``N-per-class`` as on the command line, or a file.

    Raises:
        UsageError: no such protocol, or an argument that it does not take.
        DataError: the data has no labels or too few.
    """
    if protocol not in PROTOCOLS:
        raise UsageError(f"no protocol '{protocol}': choose one of {', '.join(PROTOCOLS)}")
    if queries is not None and protocol != "1":
        raise UsageError(
            f"queries are chosen by protocol {protocol} itself: leave them out, or use protocol 1"
        )
    if seed < 0:
        raise UsageError(f"seed {seed}: it must not be negative")
    labels, ids = dataset.require_labels(), dataset.ids
    if isinstance(queries, str):
        queries = parse_queries(queries)
    try:
        if protocol == "1":
            if dataset.name.partition(":")[0] == "nuswide":
                queries = 100 if queries is None else queries
                labelled = labelled or "500-per-class"
            return protocol1(labels, seed, labelled, queries, ids=ids)
        if protocol == "2":
            return protocol2(labels, seed, labelled, rule=rule, ids=ids)
        if protocol == "none":
            return no_queries(labels, seed, labelled, ids=ids)
        return authors_split(labels, labelled, seed=seed)
    except DataError as error:
        raise DataError(f"{dataset.name}: {error}") from error
