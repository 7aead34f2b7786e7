"""Evaluation protocols: which items are queries, labelled training items, and database.

*Protocol 1*: some items of each class are queries, some labelled; the rest is unlabelled and is the
database. CIFAR-10: 1,000 / 5,000 / 54,000. NUS-WIDE-21: 2,100 / 10,500 / the rest. *None*: the same
without queries.

*Protocol 2* (retrieval of classes unseen in training; Sablayrolles et al. 2017, "How should we
evaluate supervised hashing?"): three quarters of the classes are seen, and items are halved.
Labelled is one half of the seen classes, queries are one half of the others, and the database,
whose items are the unlabelled ones, is the rest. An item with several labels is unseen if any of
its classes is.
*Transfer* is stricter: the training has only items of the seen classes, labelled or not; queries
and database are the halves of the others, with the classes and queries of protocol 2.

*gpq-authors*: the authors' scheme on CIFAR-10, sorted by class: every 60th item of a class a query,
the first 500 of the others labelled. Nothing is random. (It is not their exact split: theirs sorts
by ``np.argsort``, whose order of equal labels depends on the processor.)

Unlabelled items have unknown relevance, so they are neither queries nor in the database, but the
training may use them (not in protocol transfer, as they might be of an unseen class).
"""

from __future__ import annotations

import base64
import fnmatch
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import named_rows
from ..errors import DataError, UsageError
from ..files import fingerprint, read_json, write_json
from .arrays import read_ids
from .base import Dataset
from .labels import Labels, errors_of, rows_that

PROTOCOLS = ("1", "2", "transfer", "gpq-authors", "none")
_SEEN = 0.75  # share of seen classes in protocols 2 and transfer
_QUERY, _LABELLED, _CLASSES, _HALVES = range(4)  # streams of random numbers
_BITS = {"query": 1, "labelled": 2, "unlabelled": 4, "database": 8}
_FORMAT = 1

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Split:
    """The roles of N items: queries, training items with and without labels, and those to search.

    Attributes:
        roles: uint8 [N], a bit for each role: query 1, labelled 2, unlabelled 4, database 8; only
            the last two may be shared.
        seen_classes: the classes available in training (protocols 2 and transfer); None: all.
        query, labelled, unlabelled, database: the rows of each role, int64, sorted.
    """

    roles: NDArray[np.uint8]
    name: str
    seed: int
    seen_classes: tuple[int, ...] | None = None

    query: Rows = field(init=False, repr=False)
    labelled: Rows = field(init=False, repr=False)
    unlabelled: Rows = field(init=False, repr=False)
    database: Rows = field(init=False, repr=False)

    def __post_init__(self) -> None:
        wrong = np.flatnonzero(~np.isin(self.roles, (0, *_BITS.values(), 12)))
        if wrong.size:
            raise DataError(
                f"split {self.name}: {rows_that(wrong, 'have')} roles that exclude each other"
            )
        for role, bit in _BITS.items():
            object.__setattr__(self, role, np.flatnonzero(self.roles & bit))

    @classmethod
    def of(
        cls, n: int, name: str, seed: int, seen: tuple[int, ...] | None = None, **rows: Any
    ) -> Split:
        """The split of ``n`` items with ``rows`` (positions or a mask) in each role."""
        roles = np.zeros(n, dtype=np.uint8)
        for role, selection in rows.items():
            roles[selection] |= _BITS[role]
        return cls(roles, name, seed, seen)

    @property
    def n(self) -> int:
        """N."""
        return len(self.roles)

    @property
    def hash(self) -> str:
        """Hash of the roles: 16 hex digits."""
        return fingerprint("split", str(self.n), self.roles.tobytes(), str(self.seen_classes))

    def training_labels(self, labels: Labels) -> Labels:
        """Labels for the training: of the labelled items, over the seen classes."""
        masked = labels.masked(self.labelled)
        return masked if self.seen_classes is None else masked.over(masked.names(self.seen_classes))

    def save(self, path: str | Path) -> None:
        """Write as JSON, with one compressed byte per item."""
        value = {
            "split_format": _FORMAT,
            "protocol": self.name,
            "seed": self.seed,
            "n": self.n,
            "sizes": {role: len(getattr(self, role)) for role in _BITS},
            "hash": self.hash,
            "seen_classes": None if self.seen_classes is None else list(self.seen_classes),
            "roles": base64.b64encode(zlib.compress(self.roles.tobytes(), 9)).decode(),
        }
        write_json(path, value)


def load_split(path: str | Path) -> Split:
    """Read a file written by :meth:`Split.save`."""
    value = read_json(path, "a split")
    try:
        version, n, seen, stated = (
            value[key] for key in ("split_format", "n", "seen_classes", "hash")
        )
        if version != _FORMAT:
            raise DataError(f"{path} has split format {version}, not {_FORMAT}: make it again")
        # Decompresses n bytes at most.
        packed = base64.b64decode(value["roles"], validate=True)
        roles = np.frombuffer(
            zlib.decompressobj().decompress(packed, max(1, int(n))), dtype=np.uint8
        )
        seen = None if seen is None else tuple(int(c) for c in seen)
        split = Split(roles, str(value["protocol"]), int(value["seed"]), seen)
    except (KeyError, TypeError, ValueError, OverflowError, zlib.error) as error:
        raise DataError(f"{path} is not a split, or it is damaged: make it again") from error
    if (split.n, split.hash) != (n, stated):
        raise DataError(f"{path} is damaged: its hash does not match its content; make it again")
    return split


# Draws --------------------------------------------------------------------------------------------


def _permuted(rows: Rows, seed: int, stream: int, c: int = 0) -> Rows:
    """``rows`` in a random order that depends only on seed, purpose (``stream``) and class."""
    return np.random.default_rng([seed, stream, c]).permutation(rows)


def _draw(
    labels: Labels,
    free: NDArray[np.bool_],
    count_of: Callable[[int], int],
    seed: int,
    stream: int,
    lack: str = "",
) -> Rows:
    """Draw ``wanted(size)`` items of each class, none twice, of the ``free`` ones (bool [N],
    updated). If there are fewer, all of them, or DataError with the text ``lack``."""
    counts, before = labels.counts(), free.copy()
    # Rarest classes first, so that common ones do not use up shared items.
    for c in (int(c) for c in np.argsort(counts, kind="stable") if counts[c]):
        # The order is of the whole class, so that larger draws contain smaller ones.
        order = _permuted(np.flatnonzero(labels.column(c)), seed, stream, c)
        order, number = order[free[order]], count_of(int(counts[c]))
        if lack and len(order) < number:
            raise DataError(
                f"class '{labels.class_names[c]}' has {counts[c]:,} items, {len(order):,} of them free"
                f"{lack}"
            )
        free[order[:number]] = False
    return np.flatnonzero(before & ~free)


def read_rows(
    path: str | Path,
    ids: NDArray[np.int64],
    message: str = "--labelled",
    labels: Labels | None = None,
) -> Rows:
    """Rows of the items listed in a file: ``.npy`` integers, or text with one per line.

    The numbers are ids if all of them are ids of the data set, else row numbers (from 0). With
    ``labels`` all must have one.
    """
    values = np.unique(read_ids(path, message))
    if not len(values):
        raise DataError(
            f"{message} {path} holds no number: ids or row numbers, one per line, are needed"
        )
    order = np.argsort(ids, kind="stable")
    selection = np.searchsorted(ids[order], values)
    matched = ids[order][np.minimum(selection, len(ids) - 1)] == values
    if not matched.all() and not 0 <= values[0] <= values[-1] < len(ids):
        raise DataError(
            f"{message} {path}: "
            f"{int(values[~matched][0])} is neither an id of the data nor a row number below {len(ids):,}"
            f" ({int((~matched).sum()):,} in all)"
        )
    rows = np.sort(order[selection]).astype(np.int64) if matched.all() else values
    bare = rows[:0] if labels is None else rows[~labels.has(rows)]
    if bare.size:
        raise DataError(
            f"{message} {path}: {rows_that(bare, 'have')} no label in the data: leave such rows out"
        )
    return rows


def _number(spec: str | None, option: str = "--labelled") -> float | None:
    """N of ``N-per-class``, a fraction (0.05 or 5%; None: a twelfth), or None: it names a file.
    Raises UsageError: another number.
    """
    match = re.fullmatch(r"(\d+)-per-class", spec or "")
    try:
        number = (
            int(match[1]) if match else 1 / 12 if spec is None else float(spec.removesuffix("%"))
        )
        number /= 100 if spec and spec.endswith("%") else 1
    except ValueError:
        return None
    if not (number >= 1 if match else 0 < number <= 1 and option == "--labelled"):
        raise UsageError(
            f"{option} {spec}: write N-per-class, or name a file"
            "; --labelled also takes a fraction above 0 and at most 1, and all"
        )
    return number


def _labelled(
    spec: str | None, labels: Labels, free: NDArray[np.bool_], seed: int, ids: Rows, reserved: str
) -> Rows:
    """The items whose labels the training may use, among the ``free`` ones (bool [N]), by ``spec``
    as in :func:`make_split`. ``reserved`` is the use of the others, for messages."""
    if spec == "all":
        rows = np.flatnonzero(free)
    elif (number := _number(spec)) is None:
        rows = read_rows(str(spec), ids, labels=labels)
        clash = rows[~free[rows]]
        if clash.size:
            raise DataError(
                f"--labelled {spec}: "
                f"{named_rows(clash)} cannot be used ({reserved}): leave such rows out"
            )
    elif str(spec).endswith("-per-class"):
        lack = f" (the others: {reserved}); --labelled {spec} needs {number:,.0f}: lower --labelled"
        rows = _draw(labels, free, lambda _: int(number), seed, _LABELLED, lack)
    else:
        rows = _draw(labels, free, lambda size: max(1, round(number * size)), seed, _LABELLED)
    counts = labels.take(rows).counts()
    if not counts.all():
        bare = int(np.flatnonzero(counts == 0)[0])
        remedy = "label one, or leave the class out"
        if not labels.counts()[bare]:
            remedy = (
                "no item has it: number the classes 0, 1, 2, ... without gaps, or name them in text"
            )
        raise DataError(f"no labelled item for class '{labels.class_names[bare]}': {remedy}")
    return rows


# Protocols ----------------------------------------------------------------------------------------


def _rest_is_database(labels: Labels, query: Any, labelled: Any, name: str, seed: int) -> Split:
    remaining = np.ones(len(labels), dtype=bool)
    remaining[query] = remaining[labelled] = False
    roles = {
        "query": query,
        "labelled": labelled,
        "unlabelled": remaining,
        "database": remaining & labels.has(),
    }
    return Split.of(len(labels), name, seed, **roles)


def _protocol1(
    labels: Labels,
    name: str,
    seed: int,
    labelled: str | None,
    queries: int | str | Path | None,
    ids: Rows,
) -> Split:
    query, reserved, free = np.empty(0, np.int64), "queries", labels.has()
    if isinstance(queries, str | Path):
        query = read_rows(queries, ids, "queries", labels)
    elif name == "1":
        if queries is not None and queries < 1:
            raise UsageError(
                f"queries = {queries}: at least 1 of each class is needed (or protocol none)"
            )
        from_file = labelled != "all" and _number(labelled) is None
        if from_file:
            free[read_rows(str(labelled), ids)] = False
        reserved = "queries" if queries is None else f"{queries:,} queries"
        lack = (
            "" if queries is None and from_file else f"; {reserved} are requested: lower --queries"
        )
        query = _draw(
            labels, free, lambda n: queries or max(n // 60, min(10, n // 10)), seed, _QUERY, lack
        )
    if not len(query) and name == "1":
        raise DataError(
            f"{len(labels):,} items are too few to set queries apart: take protocol none"
        )
    free = labels.has()
    free[query] = False
    chosen = _labelled(labelled, labels, free, seed, ids, reserved)
    return _rest_is_database(labels, query, chosen, name, seed)


def _authors(labels: Labels, seed: int, labelled: str | None) -> Split:
    number = _number("500-per-class" if labelled in (None, "all") else labelled)
    if number is None or number < 1:
        raise UsageError(f"protocol gpq-authors takes --labelled N-per-class, not {labelled}")
    of_item = labels.class_ids()
    query, picked = np.zeros((2, len(labels)), dtype=bool)
    for c, name in enumerate(labels.class_names):
        rows = np.flatnonzero(of_item == c)
        candidates = np.delete(rows, slice(None, None, 60))
        if len(candidates) < number:
            raise DataError(
                f"class '{name}' has {len(rows):,} items; protocol gpq-authors "
                f"needs {int(number):,} besides {len(rows) - len(candidates)} queries: lower --labelled"
            )
        query[rows[::60]] = picked[candidates[: int(number)]] = True
    return _rest_is_database(labels, query, picked, "gpq-authors", seed)


def _seen(labels: Labels, protocol: str, seed: int) -> Rows:
    """Classes with items that are seen: three quarters, rounded down, at least one; or those that
    are not named (``*`` and ``?`` match).
    """
    present = labels.counts() > 0
    names = [name for chunk in protocol.partition(":")[2].split(",") if (name := chunk.strip())]
    if not names:
        drawn = _permuted(np.flatnonzero(present), seed, _CLASSES)
        if len(drawn) < 2:
            raise DataError(
                f"protocol {protocol} "
                f"needs two classes with items, there are {len(drawn)}: use protocol 1"
            )
        return np.sort(drawn[: max(1, int(_SEEN * len(drawn)))])
    unseen = np.zeros(labels.n_classes, dtype=bool)
    for name in names:
        matches = np.array([fnmatch.fnmatchcase(matched, name) for matched in labels.class_names])
        if not matches.any():
            matched = ", ".join(labels.class_names[:5]) + (" ..." if labels.n_classes > 5 else "")
            raise UsageError(
                f"protocol {protocol}: "
                f"no class is called '{name}': the {labels.n_classes:,} classes are {matched}"
            )
        unseen |= matches
    if not (present & unseen).any() or not (present & ~unseen).any():
        raise UsageError(
            f"protocol {protocol}: "
            "it is needed that some of the classes with items are named, and some are not"
        )
    return np.flatnonzero(present & ~unseen)


def _unseen_classes(
    labels: Labels, protocol: str, seed: int, labelled: str | None, ids: Rows
) -> Split:
    seen, labelled_mask = _seen(labels, protocol, seed), labels.has()
    names = labels.names(seen)
    hidden = labels.over(labels.names(np.delete(np.arange(labels.n_classes), seen))).has()
    # Halves of each class, or for several labels per item of each side.
    groups = [np.flatnonzero(labels.column(c)) for c in range(labels.n_classes)]
    if labels.multi_label:
        groups = [np.flatnonzero(labelled_mask & ~hidden), np.flatnonzero(hidden)]
    first = np.zeros(len(labels), dtype=bool)
    for stream, rows in enumerate(groups):
        # The odd item goes to the training half, so that classes of one item can be learnt.
        first[_permuted(rows, seed, _HALVES, stream)[: (len(rows) + 1) // 2]] = True
    query = hidden & ~first
    if not query.any():
        raise DataError(
            f"{len(labels):,} items are too few for protocol {protocol}: no query is left"
        )
    if protocol == "2":
        database, train = labelled_mask & (hidden == first), labelled_mask & ~hidden & first
        remaining, reserved = train | database | ~labelled_mask, "not in the seen training half"
    else:
        database, train = hidden & first, labelled_mask & ~hidden
        remaining, reserved = train.copy(), "not of the seen classes"
    visible = labels.masked(np.flatnonzero(train)).over(names)
    chosen = _labelled(labelled or "all", visible, train, seed, ids, reserved)
    remaining[chosen] = False
    roles = {"query": query, "labelled": chosen, "unlabelled": remaining, "database": database}
    return Split.of(len(labels), protocol, seed, tuple(seen.tolist()), **roles)


def check_protocol(protocol: str) -> str:
    """The name of a protocol without its argument: ``transfer`` for ``transfer:cat,dog``. Raises
    UsageError: there is no such protocol.
    """
    name, colon, argument = protocol.partition(":")
    if name not in PROTOCOLS:
        raise UsageError(f"no protocol '{protocol}': choose one of {', '.join(PROTOCOLS)}")
    if colon and (name != "transfer" or not argument.strip(", ")):
        raise UsageError(
            f"protocol {protocol}: only transfer has an argument after a colon, names of classes"
        )
    return name


def make_split(
    data: Dataset | Labels,
    protocol: str | int = "1",
    *,
    seed: int = 0,
    labelled: str | float | None = None,
    queries: int | str | Path | None = None,
) -> Split:
    """The split of a data set, or of labels alone, by the name of a protocol (:data:`PROTOCOLS`),
    the same for the same seed.

    Args:
        protocol: ``transfer:`` may be followed by the names of the unseen classes, separated by
            commas, with wildcards ``*`` and ``?``.
        labelled: ``N-per-class``; a fraction of the items of each class; ``all`` (default of
            protocols 2 and transfer); or a file of ids
            or row numbers. Default: a twelfth of each class. With ``all`` in protocol 1 no labelled
                item is left for the database.
        queries: for protocol 1: a number per class, ``N-per-class``, or a file; default max(n //
            60, min(10, n // 10)) of n items. Items of a ``labelled`` file are not drawn. NUS-WIDE
            defaults to the paper's 100 queries and 500 labelled items per concept.

    Raises:
        UsageError: no such protocol, or an invalid argument.
        DataError: the data has no labels or too few.
    """
    protocol, labelled = str(protocol), str(labelled) if isinstance(labelled, float) else labelled
    data_name = "" if isinstance(data, Labels) else data.name
    if protocol == "1" and data_name.partition(":")[0] == "nuswide":
        queries = 100 if queries is None else queries
        labelled = labelled or "500-per-class"
    name = check_protocol(protocol)
    if queries is not None and name != "1":
        raise UsageError(f"protocol {protocol} chooses queries itself: leave out --queries")
    if seed < 0:
        raise UsageError(f"seed {seed}: it must not be negative")
    if isinstance(queries, str) and (number := _number(queries, "--queries")) is not None:
        queries = int(number)
    labels = data if isinstance(data, Labels) else data.require_labels()
    with errors_of(data_name):
        ids = np.arange(len(labels)) if isinstance(data, Labels) else data.ids
        if name == "gpq-authors":
            return _authors(labels, seed, labelled)
        if name in ("1", "none"):
            return _protocol1(labels, name, seed, labelled, queries, ids)
        return _unseen_classes(labels, protocol, seed, labelled, ids)
