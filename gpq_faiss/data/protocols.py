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

from ..errors import DataError, UsageError
from ..files import fingerprint, read_json, write_json
from ..inputs import reading
from .base import Dataset
from .labels import Labels, errors_of
from .tables import read_ids

PROTOCOLS = ("1", "2", "transfer", "gpq-authors", "none")
_SEEN = 0.75  # share of seen classes in protocols 2 and transfer
_QUERY, _LABELLED, _CLASSES, _HALVES = range(4)  # streams of random numbers
_BITS = {"query": 1, "labelled": 2, "unlabelled": 4, "database": 8}

_COUNT = re.compile(r"(\d+)-per-class|(\d*\.?\d+(?:e-\d+)?)(%?)")

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]


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
        if not np.isin(self.roles, (0, *_BITS.values(), 12)).all():
            raise DataError(f"split {self.name}: an item has roles that exclude each other")
        for role, bit in _BITS.items():
            object.__setattr__(self, role, np.flatnonzero(self.roles & bit))

    @classmethod
    def of(
        cls, n: int, name: str, seed: int, seen: tuple[int, ...] | None = None, **rows: Any
    ) -> Split:
        """Return the split of ``n`` items with ``rows`` (positions or a mask) in each role."""
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
        """Return labels for the training: of the labelled items, over the seen classes."""
        masked = labels.masked(self.labelled)
        return masked if self.seen_classes is None else masked.over(masked.names(self.seen_classes))

    def save(self, path: str | Path) -> None:
        """Write as JSON, with one compressed byte per item."""
        value = {
            "protocol": self.name,
            "seed": self.seed,
            "sizes": {role: len(getattr(self, role)) for role in _BITS},
            "hash": self.hash,
            "seen_classes": self.seen_classes,
            "roles": base64.b64encode(zlib.compress(self.roles.tobytes(), 9)).decode(),
        }
        write_json(path, value)


def load_split(path: str | Path) -> Split:
    """Read a file written by :meth:`Split.save`. Raises DataError: it is damaged."""
    value = read_json(path, "a split")
    with reading(Path(path), "a split"):
        roles = np.frombuffer(zlib.decompress(base64.b64decode(value["roles"])), np.uint8)
        seen = value["seen_classes"] and tuple(value["seen_classes"])
        split = Split(roles, value["protocol"], int(value["seed"]), seen)
        if split.hash != value["hash"]:
            raise DataError("the hash does not match the content: make the split again")
    return split


# Draws --------------------------------------------------------------------------------------------


def _permuted(rows: Rows, seed: int, stream: int, c: int = 0) -> Rows:
    """Return ``rows`` in a random order that depends only on seed, purpose and class."""
    return np.random.default_rng([seed, stream, c]).permutation(rows)


def _draw(
    labels: Labels, free: Mask, spec: str, order_of: Callable[[Rows, int], Rows], option: str
) -> Rows:
    """Draw items of each class, none twice, of the ``free`` ones (bool [N], updated).

    Args:
        spec: ``N-per-class``, a fraction, or nothing: the default number of queries.
        order_of: rows and number of a class -> the rows in the order in which they are drawn.
        option: option of ``spec``, for errors.

    Raises:
        DataError: a class has fewer than N free items.
        UsageError: ``spec`` is no positive number.
    """
    match = _COUNT.fullmatch(spec)
    number = int(match[1] or 0) if match else 0
    share = float(match[2] or 0) / (100 if match[3] else 1) if match else 0
    if spec and not number and not (0 < share <= 1 and option == "--labelled"):
        raise UsageError(
            f"{option} {spec}: "
            "write N-per-class, or name a file; --labelled also takes all or a fraction"
            f" above 0 and at most 1"
        )
    counts, before = labels.counts(), free.copy()
    # Rarest classes first, so that common ones do not use up shared items.
    for c in np.argsort(counts, kind="stable").tolist():
        size = int(counts[c])
        count = (
            number or max(1, round(share * size)) if spec else max(size // 60, min(10, size // 10))
        )
        # The order is of the whole class, so that larger draws contain smaller ones.
        order = order_of(np.flatnonzero(labels.column(c)), c)
        order = order[free[order]][:count]
        if size and len(order) < number:
            problem = (
                f"class '{labels.class_names[c]}' has {size:,} items, {len(order):,} can be drawn"
            )
            raise DataError(f"{problem}: {option} {spec} needs more: lower it")
        free[order] = False
    return np.flatnonzero(before & ~free)


def read_rows(path: str, ids: NDArray[np.int64], option: str, allowed: Mask) -> Rows:
    """Return the rows of the items whose ids a file lists: ``.npy``, or text with one per line.

    Raises DataError: an id is not in the data, or its row is not ``allowed``.
    """
    values = np.unique(read_ids(path, option))
    order = np.argsort(ids, kind="stable")
    rows = order[np.minimum(np.searchsorted(ids, values, sorter=order), len(ids) - 1)]
    wrong = values[(ids[rows] != values) | ~allowed[rows]]
    if len(wrong) or not len(values):
        problem = (
            f"{option} {path}: the ids {wrong[:5].tolist()} ({len(wrong):,} of {len(values):,})"
        )
        raise DataError(f"{problem} are unknown, unlabelled or have another role: leave them out")
    return np.sort(rows)


def _labelled(spec: str | None, labels: Labels, free: Mask, seed: int, ids: Rows) -> Rows:
    """Return the items whose labels the training may use, among the ``free`` ones, by ``spec`` as
    in :func:`make_split`."""
    order_of = lambda rows, c: _permuted(rows, seed, _LABELLED, c)  # noqa: E731
    if spec == "all":
        rows = np.flatnonzero(free)
    elif spec and not _COUNT.fullmatch(spec):
        rows = read_rows(spec, ids, "--labelled", free)
    else:
        rows = _draw(labels, free, spec or str(1 / 12), order_of, "--labelled")
    empty = np.flatnonzero(labels.take(rows).counts() == 0)
    if empty.size:
        problem = f"no labelled item for class '{labels.class_names[empty[0]]}'"
        raise DataError(
            f"{problem} of {labels.counts()[empty[0]]:,} items: "
            "label one, or leave the class out; number classes 0, 1, 2, ... without gaps"
        )
    return rows


# Protocols ----------------------------------------------------------------------------------------


def _queries(spec: str, labels: Labels, seed: int, labelled: str | None, ids: Rows) -> Rows:
    """Return the queries of protocol 1."""
    free = labels.has()
    if spec and not _COUNT.fullmatch(spec):
        return read_rows(spec, ids, "--queries", free)
    if labelled not in (None, "all") and not _COUNT.fullmatch(str(labelled)):
        free[read_rows(str(labelled), ids, "--labelled", free)] = False
    order_of = lambda rows, c: _permuted(rows, seed, _QUERY, c)  # noqa: E731
    query = _draw(labels, free, spec, order_of, "--queries")
    if not len(query):
        raise DataError(
            f"{len(labels):,} items are too few to set queries apart: take protocol none"
        )
    return query


def _seen(labels: Labels, protocol: str, seed: int) -> Rows:
    """Return the classes with items that are seen: three quarters, rounded down, at least one; or
    those that are not named (``*`` and ``?`` match).
    """
    present, names = labels.counts() > 0, protocol.partition(":")[2].split(",")
    patterns = [name.strip() for name in names if name.strip()]
    matches = np.array([[fnmatch.fnmatchcase(n, p) for p in patterns] for n in labels.class_names])
    seen = np.flatnonzero(present & ~matches.any(axis=1))
    if not patterns:
        drawn = _permuted(seen, seed, _CLASSES)
        seen = np.sort(drawn[: max(1, int(_SEEN * len(drawn)))])
    if not matches.any(axis=0).all() or not 0 < len(seen) < present.sum():
        classes = ", ".join(labels.class_names[:5]) + (" ..." if labels.n_classes > 5 else "")
        raise UsageError(
            f"protocol {protocol}: "
            "two classes with items are needed, some named and some not"
            f"; the classes are {classes}"
        )
    return seen


def _unseen_classes(
    labels: Labels, protocol: str, seed: int, labelled: str | None, ids: Rows
) -> Split:
    seen, has = _seen(labels, protocol, seed), labels.has()
    hidden = labels.over(labels.names(np.delete(np.arange(labels.n_classes), seen))).has()
    # Halves of each class, or for several labels per item of each side.
    groups = [np.flatnonzero(labels.column(c)) for c in range(labels.n_classes)]
    if labels.multi_label:
        groups = [np.flatnonzero(has & ~hidden), np.flatnonzero(hidden)]
    first = np.zeros(len(labels), dtype=bool)
    for stream, rows in enumerate(groups):
        # The odd item goes to the training half, so that classes of one item can be learnt.
        first[_permuted(rows, seed, _HALVES, stream)[: (len(rows) + 1) // 2]] = True
    query, database, train = hidden & ~first, hidden & first, has & ~hidden
    remaining = train.copy()
    if protocol == "2":
        database, train = has & (hidden == first), train & first
        remaining = train | database | ~has
    if not query.any():
        raise DataError(
            f"{len(labels):,} items are too few for protocol {protocol}: no query is left"
        )
    visible = labels.masked(np.flatnonzero(train)).over(labels.names(seen))
    chosen = _labelled(labelled or "all", visible, train, seed, ids)
    remaining[chosen] = False
    roles = {"query": query, "labelled": chosen, "unlabelled": remaining, "database": database}
    return Split.of(len(labels), protocol, seed, tuple(seen.tolist()), **roles)


def check_protocol(protocol: str) -> str:
    """Return the name of a protocol without its argument: ``transfer`` for ``transfer:cat,dog``.
    Raises UsageError: there is no such protocol.
    """
    name, colon, argument = protocol.partition(":")
    if name not in PROTOCOLS or (colon and (name != "transfer" or not argument.strip(", "))):
        names = ", ".join(PROTOCOLS)
        raise UsageError(f"no protocol '{protocol}': choose one of {names}, or transfer:CLASSES")
    return name


def make_split(
    data: Dataset | Labels,
    protocol: str | int = "1",
    *,
    seed: int = 0,
    labelled: str | float | None = None,
    queries: int | str | Path | None = None,
) -> Split:
    """Return the split of a data set, or of labels alone, by the name of a protocol
    (:data:`PROTOCOLS`), the same for the same seed.

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
    queries = f"{queries}-per-class" if isinstance(queries, int) else str(queries or "")
    name = check_protocol(protocol)
    if name == "1" and data_name.startswith("nuswide:"):
        queries, labelled = queries or "100-per-class", labelled or "500-per-class"
    if (queries and name != "1") or seed < 0:
        raise UsageError(
            f"protocol {protocol}, --queries {queries or None}, seed {seed}"
            f": only protocol 1 takes queries, and a seed is not negative"
        )
    labels = data if isinstance(data, Labels) else data.require_labels()
    with errors_of(data_name):
        ids = np.arange(len(labels)) if isinstance(data, Labels) else data.ids
        if name in ("2", "transfer"):
            return _unseen_classes(labels, protocol, seed, labelled, ids)
        query = np.zeros(len(labels), dtype=bool)
        if name == "1":
            query[_queries(queries, labels, seed, labelled, ids)] = True
        for c in range(labels.n_classes) if name == "gpq-authors" else ():
            query[np.flatnonzero(labels.column(c))[::60]] = True
        free = labels.has() & ~query
        if name == "gpq-authors":
            spec = "500-per-class" if labelled in (None, "all") else str(labelled)
            chosen = _draw(labels, free, spec, lambda rows, c: rows, "--labelled")
        else:
            chosen = _labelled(labelled, labels, free, seed, ids)
        remaining = ~query
        remaining[chosen] = False
        roles = {"query": query, "labelled": chosen, "unlabelled": remaining}
        roles["database"] = remaining & labels.has()
        return Split.of(len(labels), name, seed, None, **roles)
