"""Evaluation protocols: which items are queries, labelled training items, and database.

*Protocol 1*: some items of each class are queries, some labelled; the rest is unlabelled and is the database.
CIFAR-10: 1,000 / 5,000 / 54,000. NUS-WIDE-21: 2,100 / 10,500 / the rest.

*Protocol 2* (retrieval of classes unseen in training; Sablayrolles et al. 2017, "How should we evaluate
supervised hashing?"): three quarters of the classes are seen, and items are halved: train75 and test75 of the seen
classes, train25 and test25 of the others. Labelled is train75, queries are test25, and the database, whose items are
the unlabelled ones, is train25 + test75. CIFAR-10: 9,000 queries, 21,000 labelled, 30,000 in the database.

An item with several labels belongs to protocol 2's seen or unseen side by a rule (:data:`RULES`). The database is half
of all items under every rule, so the share of queries is what a rule decides: the paper has 35,272 queries for 85,415
database items of NUS-WIDE-21, or 0.413. On the 195,834 real label rows, in the mean over all 54,264 ways to choose 6 unseen
concepts of 21, the rules give: ``any`` 0.473 (46,317 queries for 97,917), ``half`` 0.316, ``majority`` 0.185, ``all`` 0.151.
So ``any`` is the default. It is also the one rule under which no image that the training may use as labelled shows an
unseen concept. (``benchmarks/nuswide.py`` counts them again.)

*Protocol transfer* is stricter: the training has only items of the seen classes, labelled or not; queries and database are items of
the others. That is the first of the two protocols that Sablayrolles et al. propose,
retrieval on a disjoint set of classes, where class mAP does not reward codes that keep only the training's classes. (In protocol 2,
GPQ's variant, the unlabelled training items are the database, including unseen classes.) Deviations: they keep a data set's train/test
split (learn from train75, index train25, query test25); here all items of seen classes are for training, and half of the items of unseen
classes are queries. The choice of classes and the halves are those of protocol 2 with the same
seed, so the queries are the same. Their second protocol, transfer learning, trains a classifier of the unseen classes on codes,
without ranking; it is not implemented.

Unlabelled items have unknown relevance, so they are neither queries nor in the database, but the training may use them (not in protocol
transfer, as they might be of an unseen class).
"""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .base import Dataset
from .drawing import (
    QUERY,
    draw,
    ids_or_rows,
    parse_labelled,
    parse_queries,
    permuted,
    read_rows,
    require_each_class,
    resolve_labelled,
)
from .labels import Labels, rows_that
from .split import Rows, Split, load_split

Rule = Literal["any", "half", "majority", "all"]
RULES: tuple[Rule, ...] = get_args(Rule)
"""An item is on the unseen side if any / at least half / more than half / all of its labels are unseen."""

PROTOCOLS = ("1", "2", "transfer", "gpq-authors", "none")
UNSEEN_SHARE = 0.25
"""Default share of unseen classes in protocol transfer."""

_CLASSES, _HALVES = 2, 3  # random streams, besides those of drawn items
__all__ = [
    "PROTOCOLS",
    "RULES",
    "UNSEEN_SHARE",
    "Rule",
    "Split",
    "authors_split",
    "check_protocol",
    "load_split",
    "make_split",
    "no_queries",
    "parse_labelled",
    "protocol1",
    "protocol2",
    "read_rows",
    "resolve_labelled",
    "transfer",
    "unseen_items",
]


def protocol1(
    labels: Labels,
    seed: int = 0,
    labelled: str | None = None,
    queries: int | str | Path | None = None,
    *,
    ids: NDArray[np.int64] | None = None,
) -> Split:
    """Some queries and labelled items of each class; the rest is unlabelled and is the database.

    Args:
        labels: of all items.
        seed: of the draw.
        labelled: see :func:`resolve_labelled`. With ``all`` no labelled item is left for the database.
        queries: number per class, or a file; default max(n // 60, min(10, n // 10)) of n items.
            Items of a ``labelled`` file are not drawn as queries.
        ids: int64 [N]; default the row numbers.

    Raises:
        UsageError: an invalid argument.
        DataError: a class has too few items or no labelled one; a file is wrong, or the two files overlap.
    """
    ids = ids_or_rows(labels, ids)
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
                    f"{count:,} queries are requested: lower --queries"
                )
            return min(left, count)

        query = draw(labels, free, wanted, seed, QUERY)
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
    require_each_class(labels, chosen)
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


def _seen_by_share(labels: Labels, seed: int, share: float, name: str) -> NDArray[np.int64]:
    """Seen classes, ascending: this share of the classes with items, rounded down; at least one seen and one unseen."""
    present = np.flatnonzero(labels.counts())
    if len(present) < 2:
        raise DataError(
            f"protocol {name} needs two classes with items, there are {len(present)}: use protocol 1"
        )
    n_seen = min(len(present) - 1, max(1, int(share * len(present) + 1e-9)))
    return np.sort(permuted(present, seed, _CLASSES)[:n_seen])


def _first_halves(labels: Labels, hidden_side: NDArray[np.bool_], seed: int) -> NDArray[np.bool_]:
    """Half of each class, or for several labels per item of each side: bool [N]."""
    if labels.multi_label:
        groups = [(0, np.flatnonzero(labels.has() & ~hidden_side)), (1, np.flatnonzero(hidden_side))]
    else:
        present = np.flatnonzero(labels.counts())
        groups = [(int(c), np.flatnonzero(labels.column(int(c)))) for c in present]
    first = np.zeros(len(labels), dtype=bool)
    for stream, rows in groups:
        # The odd item goes to the training half, so that classes of one item can be learnt.
        first[permuted(rows, seed, _HALVES, stream)[: (len(rows) + 1) // 2]] = True
    return first


def protocol2(
    labels: Labels,
    seed: int = 0,
    labelled: str | None = None,
    *,
    rule: Rule = "any",
    seen_share: float = 0.75,
    ids: NDArray[np.int64] | None = None,
) -> Split:
    """Queries of classes unseen in training (see the module docstring).

    Args:
        labels: of all items.
        seed: of the choice of classes and of the halves.
        labelled: None or ``all`` for all of train75; else as in :func:`resolve_labelled`, within train75 (the
            others are then unlabelled, and not in the database).
        rule: side of items with several labels.
        seen_share: share of seen classes, rounded down: 7 of 10, 15 of 21.
        ids: int64 [N]; default the row numbers.

    Raises:
        UsageError: an invalid argument.
        DataError: fewer than two classes with items, or too few items.
    """
    seen = _seen_by_share(labels, seed, seen_share, "2")
    has = labels.has()
    hidden_side = unseen_items(labels, _others(labels, seen), rule)
    train = _first_halves(labels, hidden_side, seed)
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
        ids=ids_or_rows(labels, ids),
        reserved="not in the seen training half",
    )
    require_each_class(labels, chosen, seen)
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


def _others(labels: Labels, seen: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Unseen classes with items: bool [C]."""
    unseen = labels.counts() > 0
    unseen[seen] = False
    return unseen


def _seen_by_name(labels: Labels, names: str) -> NDArray[np.int64]:
    """Classes with items that match none of ``names`` (with wildcards ``*`` and ``?``)."""
    unseen = np.zeros(labels.n_classes, dtype=bool)
    for name in filter(None, (part.strip() for part in names.split(","))):
        found = [fnmatch.fnmatchcase(known, name) for known in labels.class_names]
        if not any(found):
            known = ", ".join(labels.class_names[:5])
            raise UsageError(
                f"protocol transfer:{names}: no class is called '{name}': the {labels.n_classes:,} classes are {known}"
                + (" ..." if labels.n_classes > 5 else "")
            )
        unseen |= np.array(found)
    present = labels.counts() > 0
    if not (present & unseen).any() or not (present & ~unseen).any():
        left = "none" if not (present & unseen).any() else "all"
        raise UsageError(
            f"protocol transfer:{names}: {left} of the classes with items are named: name some of them"
        )
    return np.flatnonzero(present & ~unseen)


def transfer(
    labels: Labels,
    seed: int = 0,
    labelled: str | None = None,
    unseen: str = "",
    *,
    ids: NDArray[np.int64] | None = None,
) -> Split:
    """Training on some classes, queries and database of the others (see the module docstring).

    Items with any unseen class are on the unseen side, so that no training item shows such a class. Unlabelled items are not used.

    Args:
        labels: of all items.
        seed: of the choice of classes and of the halves.
        labelled: None or ``all`` for all items of seen classes; else as in :func:`resolve_labelled`, within them (the others are then
            unlabelled).
        unseen: share of unseen classes, rounded up (default :data:`UNSEEN_SHARE`: 3 of 10, as in
            protocol 2), or their names, separated by commas, with wildcards ``*`` and ``?`` (``Balinese-*,Latin-*``).
        ids: int64 [N]; default the row numbers.

    Raises:
        UsageError: an invalid argument; a name that no class has.
        DataError: fewer than two classes with items, or too few items.
    """
    share = _share(unseen)
    name = f"transfer:{unseen}" if unseen else "transfer"
    seen = _seen_by_name(labels, unseen) if share is None else _seen_by_share(labels, seed, 1 - share, name)
    hidden_side = unseen_items(labels, _others(labels, seen), "any")
    searched = _first_halves(labels, hidden_side, seed) & hidden_side
    query = np.flatnonzero(hidden_side & ~searched)
    if not len(query):
        raise DataError(f"{len(labels):,} items are too few for protocol {name}: no query is left")
    free = labels.has() & ~hidden_side
    train = np.flatnonzero(free)
    chosen = resolve_labelled(
        labelled or "all",
        labels.masked(train).select_classes(seen),
        free,
        seed=seed,
        ids=ids_or_rows(labels, ids),
        reserved="not of the seen classes",
    )
    require_each_class(labels, chosen, seen)
    return Split(
        len(labels),
        query,
        chosen,
        np.setdiff1d(train, chosen),
        np.flatnonzero(searched),
        name,
        seed,
        tuple(int(c) for c in seen),
        (f"seen classes: {', '.join(labels.class_names[c] for c in seen)}",),
    )


def _share(unseen: str) -> float | None:
    """``unseen`` of :func:`transfer` as a share, or None for names."""
    try:
        share = float(unseen or UNSEEN_SHARE)
    except ValueError:
        return None
    if not 0 < share < 1:
        raise UsageError(
            f"protocol transfer:{unseen}: a share of classes is above 0 and below 1; a class of that name is "
            f"named by a pattern (transfer:[{unseen[0]}]{unseen[1:]})"
        )
    return share


def check_protocol(protocol: str) -> str:
    """The name of a protocol without its argument: ``transfer`` for ``transfer:0.5``.

    Raises:
        UsageError: no such protocol, or it has no argument.
    """
    name, colon, given = protocol.partition(":")
    if name not in PROTOCOLS:
        raise UsageError(f"no protocol '{protocol}': choose one of {', '.join(PROTOCOLS)}")
    if colon and (name != "transfer" or not given.strip(", ")):
        raise UsageError(
            f"protocol {protocol}: only transfer has an argument after a colon: a share of classes, or their names"
        )
    if colon:
        _share(given)
    return name


def authors_split(labels: Labels, labelled: str | None = None, *, seed: int = 0) -> Split:
    """The authors' scheme on CIFAR-10: sorted by class, every 60th item of a class a query, the first 500 of the others labelled.

    It is their scheme, not their exact split: here the sort is stable, while theirs is the default ``np.argsort``, whose order of equal
    labels depends on NumPy and the processor. In a comparison 72 of the 1,000 queries were the same.

    Nothing is random; the seed is only recorded.

    Args:
        labels: one per item.
        labelled: ``N-per-class`` for another N; None or ``all`` for their 500.
        seed: recorded.

    Raises:
        UsageError: another form of ``labelled``.
        DataError: several labels per item, or a class with too few.
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
                f"class '{labels.class_names[c]}' has {len(rows):,} items; protocol gpq-authors needs {count:,} "
                f"besides {int(mark.sum())} queries: lower --labelled"
            )
        queries.append(rows[mark])
        chosen.append(rows[~mark][:count])
    query, picked = np.sort(np.concatenate(queries)), np.sort(np.concatenate(chosen))
    return _rest_is_database(labels, query, picked, "gpq-authors", seed)


def no_queries(
    labels: Labels, seed: int = 0, labelled: str | None = None, *, ids: NDArray[np.int64] | None = None
) -> Split:
    """No queries: for models that are not evaluated. ``labelled`` as in :func:`protocol1`.

    Raises:
        DataError: as :func:`protocol1`.
    """
    chosen = resolve_labelled(labelled, labels, labels.has(), seed=seed, ids=ids_or_rows(labels, ids))
    require_each_class(labels, chosen)
    return _rest_is_database(labels, np.empty(0, np.int64), chosen, "none", seed)


def make_split(
    dataset: Dataset,
    protocol: str | int = "1",
    *,
    seed: int = 0,
    labelled: str | float | None = None,
    queries: int | str | Path | None = None,
    rule: Rule = "any",
) -> Split:
    """The split of ``dataset`` by the name of a protocol (:data:`PROTOCOLS`; ``transfer:SHARE`` and ``transfer:NAMES`` define the
    unseen classes).

    In protocol 1, NUS-WIDE defaults to the paper's 100 queries and 500 labelled items per concept. ``queries`` is for protocol 1: a number
    per class, ``N-per-class``, or a file.

    Raises:
        UsageError: no such protocol, or an invalid argument.
        DataError: the data has no labels or too few.
    """
    protocol = str(protocol)
    labelled = str(labelled) if isinstance(labelled, float) else labelled
    name = check_protocol(protocol)
    if queries is not None and protocol != "1":
        raise UsageError(
            f"protocol {protocol} chooses queries itself: leave out --queries, or use protocol 1"
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
        if name == "transfer":
            return transfer(labels, seed, labelled, protocol.partition(":")[2], ids=ids)
        if protocol == "none":
            return no_queries(labels, seed, labelled, ids=ids)
        return authors_split(labels, labelled, seed=seed)
    except DataError as error:
        raise DataError(f"{dataset.name}: {error}") from error
