"""Evaluation protocols: which items are queries, labelled training items, and database.

*Protocol 1*: some items of each class are queries, some labelled; the rest is unlabelled and is the database.
CIFAR-10: 1,000 / 5,000 / 54,000. NUS-WIDE-21: 2,100 / 10,500 / the rest.

*Protocol 2* (retrieval of classes unseen in training; Sablayrolles et al. 2017, "How should we evaluate
supervised hashing?"): three quarters of the classes are seen, and items are halved: train75 and test75 of the seen
classes, train25 and test25 of the others. Labelled is train75, queries are test25, and the database, whose items are
the unlabelled ones, is train25 + test75. CIFAR-10: 9,000 queries, 21,000 labelled, 30,000 in the database.

An item with several labels is on the unseen side if any of its classes is unseen: nearest to the paper's share of queries on
NUS-WIDE-21 (0.413; ``benchmarks/nuswide.py``), and the one rule under which no labelled image shows an unseen concept.

*Protocol transfer* is stricter: the training has only items of the seen classes, labelled or not; queries and database are the halves of
the others, with the classes and queries of protocol 2. It is the first protocol of Sablayrolles et al., but for their data set's
train/test split, which is not used. (In protocol 2, GPQ's variant, the unlabelled training items are the database.)

Unlabelled items have unknown relevance, so they are neither queries nor in the database, but the training may use them (not in protocol
transfer, as they might be of an unseen class).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .base import Dataset
from .ids import read_ids
from .labels import Labels, named_rows, rows_that
from .split import Rows, Split, load_split

__all__ = ["PROTOCOLS", "Split", "check_protocol", "load_split", "make_split"]

PROTOCOLS = ("1", "2", "transfer", "gpq-authors", "none")
SEEN_SHARE = 0.75
"""Share of seen classes in protocols 2 and transfer."""
_QUERY, _LABELLED, _CLASSES, _HALVES = range(4)  # streams of random numbers
_Wanted = Callable[[int, int, int], int]
"""(class, number of its items, of those that are free) -> number to draw."""


# Draws ------------------------------------------------------------------------------------------------------------------


def _permuted(rows: Rows, seed: int, stream: int, c: int = 0) -> Rows:
    """``rows`` in a random order that depends only on seed, purpose (``stream``) and class."""
    return np.random.default_rng([seed, stream, c]).permutation(rows)


def _draw(labels: Labels, free: NDArray[np.bool_], wanted: _Wanted, seed: int, stream: int) -> Rows:
    """Draw items per class, none twice; ``free`` [N] marks available items and is updated."""
    counts = labels.counts()
    taken = [np.empty(0, np.int64)]
    # Rarest classes first, so that common ones do not use up shared items.
    for c in (int(c) for c in np.argsort(counts, kind="stable") if counts[c]):
        # The order is of the whole class, so that larger draws contain smaller ones.
        order = _permuted(np.flatnonzero(labels.column(c)), seed, stream, c)
        order = order[free[order]]
        taken.append(order[: wanted(c, int(counts[c]), len(order))])
        free[taken[-1]] = False
    return np.sort(np.concatenate(taken))


def read_rows(path: str | Path, ids: NDArray[np.int64], what: str = "--labelled") -> Rows:
    """Rows of the items listed in a file: ``.npy`` integers, or text with one per line.

    The numbers are ids if all of them are ids of the data set, else row numbers (from 0).
    """
    values = np.unique(read_ids(path, what))
    if not len(values):
        raise DataError(f"{what} {path} holds no number: ids or row numbers, one per line, are needed")
    order = np.argsort(ids, kind="stable")
    at = np.searchsorted(ids[order], values)
    known = ids[order][np.minimum(at, len(ids) - 1)] == values
    if known.all():
        return np.sort(order[at]).astype(np.int64)
    if values[0] >= 0 and values[-1] < len(ids):
        return values
    why = f"{int(values[~known][0])} is neither an id of the data nor a row number below {len(ids):,}"
    raise DataError(f"{what} {path}: {why} ({int((~known).sum()):,} in all)")


def _labelled_rows(path: str | Path, labels: Labels, ids: NDArray[np.int64], what: str) -> Rows:
    """:func:`read_rows`. Raises DataError: one has no label."""
    rows = read_rows(path, ids, what)
    bare = rows[~labels.has(rows)]
    if bare.size:
        raise DataError(f"{what} {path}: {rows_that(bare, 'have')} no label in the data: leave such rows out")
    return rows


def _number(spec: str, option: str = "--labelled") -> float | None:
    """N of ``N-per-class``, a fraction (0.05 or 5%), or None: ``spec`` is the name of a file. Raises UsageError: another number."""
    match = re.fullmatch(r"(\d+)-per-class", spec)
    try:
        number = int(match[1]) if match else float(spec.removesuffix("%")) / (100 if "%" in spec else 1)
    except ValueError:
        return None
    if not (number >= 1 if match else 0 < number <= 1 and option == "--labelled"):
        more = "; --labelled also takes a fraction above 0 and at most 1, and all"
        raise UsageError(f"{option} {spec}: write N-per-class, or name a file{more}")
    return number


def resolve_labelled(
    spec: str | None,
    labels: Labels,
    free: NDArray[np.bool_],
    *,
    seed: int,
    ids: NDArray[np.int64],
    reserved: str = "",
) -> Rows:
    """Choose the items whose labels the training may use, among the ``free`` ones (bool [N], updated).

    ``spec`` is ``N-per-class``; a fraction of the items of each class; ``all``; a file (:func:`read_rows`); None: a twelfth of
    each class, the paper's 500 on CIFAR-10. ``reserved`` is the use of the others, for messages.

    Raises:
        DataError: a class without or with too few items; an invalid file, or one that names queries or unlabelled items.
    """
    number = 1 / 12 if spec is None else _number(spec)
    per_class = spec is not None and spec.endswith("-per-class")
    free &= labels.has()

    def wanted(c: int, total: int, left: int) -> int:
        assert number is not None
        if not per_class:
            return min(left, max(1, round(number * total)))
        if left < number:
            others = f" (the others: {reserved})" if reserved else ""
            there = f"class '{labels.class_names[c]}' has {total:,} items, {left:,} of them free{others}"
            raise DataError(f"{there}; --labelled {spec} needs {int(number):,}: lower --labelled")
        return int(number)

    if spec == "all":
        rows = np.flatnonzero(free)
    elif number is None:
        rows = _labelled_rows(str(spec), labels, ids, "--labelled")
        clash = rows[~free[rows]]
        if clash.size:
            why = f"cannot be used ({reserved or 'not available'}): leave such rows out"
            raise DataError(f"--labelled {spec}: {named_rows(clash)} {why}")
    else:
        rows = _draw(labels, free, wanted, seed, _LABELLED)
    free[rows] = False
    counts = labels.take(rows).counts()
    if not counts.all():
        bare = labels.class_names[int(np.flatnonzero(counts == 0)[0])]
        raise DataError(f"no labelled item for class '{bare}': label one, or leave the class out")
    return rows


# Protocols --------------------------------------------------------------------------------------------------------------


def protocol1(
    labels: Labels,
    seed: int = 0,
    labelled: str | None = None,
    queries: int | str | Path | None = None,
    *,
    ids: NDArray[np.int64] | None = None,
    name: str = "1",
) -> Split:
    """Some queries and labelled items of each class; the rest is unlabelled and is the database.

    Args:
        labelled: see :func:`resolve_labelled`. With ``all`` no labelled item is left for the database.
        queries: number per class, or a file; default max(n // 60, min(10, n // 10)) of n items.
            Items of a ``labelled`` file are not drawn as queries.
        ids: int64 [N]; default the row numbers.
        name: ``none`` for no queries: a model that is not evaluated.
    """
    ids = np.arange(len(labels)) if ids is None else ids
    free = labels.has()
    if isinstance(queries, int) and queries < 1:
        raise UsageError(f"queries = {queries}: at least 1 of each class is needed (or protocol none)")
    from_file = labelled not in (None, "all") and _number(str(labelled)) is None
    if from_file:
        free[read_rows(str(labelled), ids)] = False

    def wanted(c: int, total: int, left: int) -> int:
        count = queries if isinstance(queries, int) else max(total // 60, min(10, total // 10))
        if left < count and not (queries is None and from_file):
            there = f"class '{labels.class_names[c]}' has {total:,} items, {left:,} of them free"
            raise DataError(f"{there}; {count:,} queries are requested: lower --queries")
        return min(left, count)

    if name == "none":
        query = np.empty(0, np.int64)
    elif queries is None or isinstance(queries, int):
        query = _draw(labels, free, wanted, seed, _QUERY)
    else:
        query = _labelled_rows(queries, labels, ids, "queries")
    if not len(query) and name != "none":
        raise DataError(
            f"{len(labels):,} items are too few to set queries apart: take more, or protocol none"
        )
    free = labels.has()
    free[query] = False
    reserved = f"{queries:,} queries" if isinstance(queries, int) else "queries"
    chosen = resolve_labelled(labelled, labels, free, seed=seed, ids=ids, reserved=reserved)
    return _rest_is_database(labels, query, chosen, name, seed)


def _rest_is_database(labels: Labels, query: Rows, labelled: Rows, name: str, seed: int) -> Split:
    rest = np.ones(len(labels), dtype=bool)
    rest[query] = rest[labelled] = False
    database = np.flatnonzero(rest & labels.has())
    return Split(len(labels), query, labelled, np.flatnonzero(rest), database, name, seed)


def _seen_by_seed(labels: Labels, seed: int, protocol: str) -> NDArray[np.int64]:
    """Seen classes, ascending: three quarters of the classes with items, rounded down; at least one seen and one unseen."""
    present = np.flatnonzero(labels.counts())
    if len(present) < 2:
        what = f"needs two classes with items, there are {len(present)}: use protocol 1"
        raise DataError(f"protocol {protocol} {what}")
    return np.sort(_permuted(present, seed, _CLASSES)[: max(1, int(SEEN_SHARE * len(present)))])


def _first_halves(labels: Labels, hidden_side: NDArray[np.bool_], seed: int) -> NDArray[np.bool_]:
    """Half of each class, or for several labels per item of each side: bool [N]."""
    if labels.multi_label:
        groups = [(0, np.flatnonzero(labels.has() & ~hidden_side)), (1, np.flatnonzero(hidden_side))]
    else:
        groups = [(c, np.flatnonzero(labels.column(c))) for c in range(labels.n_classes)]
    first = np.zeros(len(labels), dtype=bool)
    for stream, rows in groups:
        # The odd item goes to the training half, so that classes of one item can be learnt.
        first[_permuted(rows, seed, _HALVES, stream)[: (len(rows) + 1) // 2]] = True
    return first


def unseen_classes(
    labels: Labels,
    protocol: str,
    seed: int = 0,
    labelled: str | None = None,
    *,
    ids: NDArray[np.int64] | None = None,
) -> Split:
    """Protocols 2 and transfer (see the module docstring): half of the items with an unseen class are queries.

    Args:
        protocol: ``2``, ``transfer``, or ``transfer:`` and the names of the unseen classes, separated by commas, with wildcards ``*`` and
            ``?`` (``transfer:Balinese-*,Latin-*``).
        labelled: as in :func:`resolve_labelled`, within the training items of the seen classes; default all of them.
    """
    names = protocol.partition(":")[2]
    seen = _seen_by_name(labels, names) if names else _seen_by_seed(labels, seed, protocol)
    has = labels.has()
    unseen = labels.counts() > 0
    unseen[seen] = False
    hidden = labels.select_classes(np.flatnonzero(unseen)).has()
    first = _first_halves(labels, hidden, seed)
    query = np.flatnonzero(hidden & ~first)
    if not len(query):
        raise DataError(f"{len(labels):,} items are too few for protocol {protocol}: no query is left")
    if protocol == "2":
        database, train = has & (hidden == first), has & ~hidden & first
        others = database | ~has
    else:
        database, train = hidden & first, has & ~hidden
        others = np.zeros(len(labels), dtype=bool)
    chosen = resolve_labelled(
        labelled or "all",
        labels.masked(np.flatnonzero(train)).select_classes(seen),
        train.copy(),
        seed=seed,
        ids=np.arange(len(labels)) if ids is None else ids,
        reserved="not in the seen training half" if protocol == "2" else "not of the seen classes",
    )
    rest = train | others
    rest[chosen] = False
    rows = query, chosen, np.flatnonzero(rest), np.flatnonzero(database)
    classes = tuple(int(c) for c in seen)
    note = f"seen classes: {', '.join(labels.class_names[c] for c in seen)}"
    return Split(len(labels), *rows, protocol, seed, classes, (note,))


def _seen_by_name(labels: Labels, names: str) -> NDArray[np.int64]:
    """Classes with items that match none of ``names`` (with wildcards ``*`` and ``?``)."""
    unseen = np.zeros(labels.n_classes, dtype=bool)
    for name in filter(None, (part.strip() for part in names.split(","))):
        found = np.array([fnmatch.fnmatchcase(known, name) for known in labels.class_names])
        if not found.any():
            known = ", ".join(labels.class_names[:5]) + (" ..." if labels.n_classes > 5 else "")
            what = f"no class is called '{name}': the {labels.n_classes:,} classes are {known}"
            raise UsageError(f"protocol transfer:{names}: {what}")
        unseen |= found
    present = labels.counts() > 0
    if not (present & unseen).any() or not (present & ~unseen).any():
        what = "some of the classes with items are named, and some are not"
        raise UsageError(f"protocol transfer:{names}: it is needed that {what}")
    return np.flatnonzero(present & ~unseen)


def check_protocol(protocol: str) -> str:
    """The name of a protocol without its argument: ``transfer`` for ``transfer:cat,dog``. Raises UsageError: there is no such protocol."""
    name, colon, given = protocol.partition(":")
    if name not in PROTOCOLS:
        raise UsageError(f"no protocol '{protocol}': choose one of {', '.join(PROTOCOLS)}")
    if colon and (name != "transfer" or not given.strip(", ")):
        what = "only transfer has an argument after a colon, names of classes"
        raise UsageError(f"protocol {protocol}: {what}")
    return name


def authors_split(labels: Labels, labelled: str | None = None, *, seed: int = 0) -> Split:
    """The authors' scheme on CIFAR-10: sorted by class, every 60th item of a class a query, the first 500 of the others labelled.

    It is their scheme, not their exact split: here the sort is stable, while theirs is the default ``np.argsort``, whose order of equal
    labels depends on NumPy and the processor. Nothing is random; the seed is only recorded. ``labelled``: ``N-per-class`` for another N.
    """
    number = _number("500-per-class" if labelled in (None, "all") else str(labelled))
    if number is None or number < 1:
        raise UsageError(f"protocol gpq-authors takes --labelled N-per-class, not {labelled}")
    of_item = labels.class_ids()
    queries, chosen = [], []
    for c in range(labels.n_classes):
        rows = np.flatnonzero(of_item == c)
        mark = np.arange(len(rows)) % 60 == 0
        if len(rows) - int(mark.sum()) < number:
            needed = f"needs {int(number):,} besides {int(mark.sum())} queries: lower --labelled"
            there = f"class '{labels.class_names[c]}' has {len(rows):,} items"
            raise DataError(f"{there}; protocol gpq-authors {needed}")
        queries.append(rows[mark])
        chosen.append(rows[~mark][: int(number)])
    query, picked = np.sort(np.concatenate(queries)), np.sort(np.concatenate(chosen))
    return _rest_is_database(labels, query, picked, "gpq-authors", seed)


def make_split(
    dataset: Dataset,
    protocol: str | int = "1",
    *,
    seed: int = 0,
    labelled: str | float | None = None,
    queries: int | str | Path | None = None,
) -> Split:
    """The split of ``dataset`` by the name of a protocol (:data:`PROTOCOLS`; ``transfer:NAMES`` names the unseen classes).

    In protocol 1, NUS-WIDE defaults to the paper's 100 queries and 500 labelled items per concept. ``queries`` is for protocol 1: a number
    per class, ``N-per-class``, or a file.

    Raises:
        UsageError: no such protocol, or an invalid argument.
        DataError: the data has no labels or too few.
    """
    protocol = str(protocol)
    labelled = str(labelled) if isinstance(labelled, float) else labelled
    name = check_protocol(protocol)
    if queries is not None and name != "1":
        raise UsageError(
            f"protocol {protocol} chooses queries itself: leave out --queries, or use protocol 1"
        )
    if seed < 0:
        raise UsageError(f"seed {seed}: it must not be negative")
    labels, ids = dataset.require_labels(), dataset.ids
    if isinstance(queries, str) and (number := _number(queries, "--queries")) is not None:
        queries = int(number)
    if name == "1" and dataset.name.partition(":")[0] == "nuswide":
        queries = 100 if queries is None else queries
        labelled = labelled or "500-per-class"
    try:
        if name in ("1", "none"):
            return protocol1(labels, seed, labelled, queries, ids=ids, name=name)
        if name == "gpq-authors":
            return authors_split(labels, labelled, seed=seed)
        return unseen_classes(labels, protocol, seed, labelled, ids=ids)
    except DataError as error:
        raise DataError(f"{dataset.name}: {error}") from error
