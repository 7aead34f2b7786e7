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

Unlabelled items have unknown relevance, so they are neither queries nor in the database, but the
training may use them (not in protocol transfer, as they might be of an unseen class).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError, errors_of
from ..files import fingerprint, read_json, write_json
from ..ids import read_rows
from ..inputs import reading
from .base import Dataset
from .labels import Labels

PROTOCOLS = ("1", "2", "transfer", "none")
_QUERY, _LABELLED, _CLASSES, _HALVES = range(4)  # streams of random numbers
_ROLES = ("query", "labelled", "unlabelled", "database")
_SPEC = re.compile(r"(\d+)-per-class|(\d*\.?\d+(?:e-\d+)?)(%?)|")

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Split:
    """The roles of N items: queries, training items with and without labels, and those to search.

    Attributes:
        query, labelled, unlabelled, database: the rows of each role, int64, ascending; only the
            last two may be shared.
        seen_classes: the classes available in training (protocols 2 and transfer); None: all.
    """

    n: int
    name: str
    seed: int
    query: Rows
    labelled: Rows
    unlabelled: Rows
    database: Rows
    seen_classes: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    def hash(self) -> str:
        """Hash of the roles: 16 hex digits."""
        return fingerprint(
            "split",
            str(self.n),
            *(getattr(self, role).tobytes() for role in _ROLES),
            str(self.seen_classes),
        )

    def training_labels(self, labels: Labels) -> Labels:
        """Return labels for the training: of the labelled items, over the seen classes."""
        return labels.masked(self.labelled).over(
            labels.class_names[c] for c in self.seen_classes or range(labels.n_classes)
        )

    def save(self, path: str | Path) -> None:
        """Write as JSON, with the rows of each role in one text."""
        write_json(
            path,
            {
                "protocol": self.name,
                "seed": self.seed,
                "items": self.n,
                "hash": self.hash,
                "seen_classes": self.seen_classes,
                **{role: " ".join(map(str, getattr(self, role).tolist())) for role in _ROLES},
            },
        )


def load_split(path: str | Path) -> Split:
    """Read a file written by :meth:`Split.save`. Raises DataError: it is damaged."""
    value = read_json(path, "a split")
    with reading(Path(path), "a split"):
        return Split(
            value["items"],
            value["protocol"],
            value["seed"],
            **{role: np.array(value[role].split(), np.int64) for role in _ROLES},
            seen_classes=value["seen_classes"] and tuple(value["seen_classes"]),
        )


# Choice of items ----------------------------------------------------------------------------------


def _permuted(rows: Rows, seed: int, stream: int, c: int = 0) -> Rows:
    """Return ``rows`` in a random order that depends only on seed, purpose and class."""
    return np.random.default_rng([seed, stream, c]).permutation(rows)


def _choose(
    labels: Labels, free: NDArray[np.bool_], spec: str, seed: int, stream: int, ids: Rows
) -> Rows:
    """Return the rows of the items of a file, or draw some of each class, none twice.

    Args:
        free: bool [N], the items that may be chosen.
        spec: a file of ids; ``N-per-class``; a fraction; or empty: the default number of queries.

    Raises:
        DataError: a class has fewer than N free items.
        UsageError: ``spec`` is no positive number.
    """
    option, match = ("--queries", "--labelled")[stream], _SPEC.fullmatch(spec)
    if match is None:
        return read_rows(spec, ids, option, free)
    number, share = int(match[1] or 0), float(match[2] or 0) / (100 if match[3] else 1)
    if spec and not number and not (0 < share <= 1 and stream == _LABELLED):
        raise UsageError(
            f"{option} {spec}: write N-per-class, or name a file; --labelled also takes all or a "
            "fraction above 0 and at most 1"
        )
    counts, drawn = labels.counts(), np.zeros(len(labels), dtype=bool)
    # Rarest classes first, so that common ones do not use up shared items.
    for c in np.argsort(counts, kind="stable").tolist():
        size = int(counts[c])
        default = max(1, round(share * size)) if spec else max(size // 60, min(10, size // 10))
        # The order is of the whole class, so that larger draws contain smaller ones.
        order = _permuted(labels.rows_with(c), seed, stream, c)
        order = order[free[order] & ~drawn[order]][: number or default]
        if size and len(order) < number:
            raise DataError(
                f"class '{labels.class_names[c]}' has {size:,} items, {len(order):,} can be drawn: "
                f"{option} {spec} needs more: lower it"
            )
        drawn[order] = True
    return np.flatnonzero(drawn)


def _first_halves(labels: Labels, hidden: NDArray[np.bool_], seed: int) -> NDArray[np.bool_]:
    """Return a random half of the items of each class, bool [N]; with several labels an item, of
    the items with ``hidden`` classes and of the others.
    """
    groups = (
        [np.flatnonzero(labels.has() & ~hidden), np.flatnonzero(hidden)]
        if labels.multi_label
        else [labels.rows_with(c) for c in range(labels.n_classes)]
    )
    first = np.zeros(len(labels), dtype=bool)
    for stream, rows in enumerate(groups):
        # The odd item goes to the training half, so that classes of one item can be learnt.
        first[_permuted(rows, seed, _HALVES, stream)[: (len(rows) + 1) // 2]] = True
    return first


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
        labelled: ``N-per-class``; a fraction of the items of each class; ``all`` (default of
            protocols 2 and transfer); or a file of ids or row numbers. Default: a twelfth of each
            class. With ``all`` in protocol 1 no labelled item is left for the database.
        queries: for protocol 1: a number per class, ``N-per-class``, or a file; default max(n //
            60, min(10, n // 10)) of n items. Items of a ``labelled`` file are not drawn. NUS-WIDE
            defaults to the paper's 100 queries and 500 labelled items per concept.

    Raises:
        UsageError: no such protocol, or an invalid argument.
        DataError: the data has no labels or too few.
    """
    protocol = str(protocol)
    source, labels, ids = (
        ("", data, np.arange(len(data)))
        if isinstance(data, Labels)
        else (data.name, data.require_labels(), data.ids)
    )
    queries = f"{queries}-per-class" if isinstance(queries, int) else str(queries or "")
    if protocol == "1" and source.startswith("nuswide:"):
        queries, labelled = queries or "100-per-class", labelled or "500-per-class"
    if protocol not in PROTOCOLS or (queries and protocol != "1") or seed < 0:
        raise UsageError(
            f"protocol {protocol}, --queries {queries or None}, seed {seed}: the protocols are "
            f"{', '.join(PROTOCOLS)}, only protocol 1 takes queries, and a seed is not negative"
        )
    has_unseen = protocol in ("2", "transfer")
    share = "1" if has_unseen or labelled == "all" else str(1 / 12)
    spec = share if labelled in (None, "", "all") else str(labelled)
    has_label = usable = labels.has()
    query = np.zeros(len(labels), bool)
    visible, seen_classes = labels, None
    with errors_of(source):
        if has_unseen:
            seen = _permuted(np.flatnonzero(labels.counts()), seed, _CLASSES)
            seen_classes = tuple(sorted(seen[: max(1, int(0.75 * len(seen)))].tolist()))
            names = [labels.class_names[c] for c in seen_classes]
            hidden = labels.over(set(labels.class_names) - set(names)).has()
            first = _first_halves(labels, hidden, seed)
            query = hidden & ~first
            usable = has_label & ~hidden & (first if protocol == "2" else True)
            visible = labels.masked(usable).over(names)
        elif protocol == "1":
            free = has_label.copy()
            if not _SPEC.fullmatch(spec):
                free[read_rows(spec, ids, "--labelled", has_label)] = False
            query[_choose(labels, free, queries, seed, _QUERY, ids)] = True
        training = usable & ~query
        if protocol != "none" and not query.any():
            raise DataError(
                f"{has_label.sum():,} labelled items of {labels.n_classes:,} classes are too few "
                f"for queries of protocol {protocol}: use protocol none, which trains on all, or "
                "name a number of queries"
            )
        chosen = _choose(visible, training, spec, seed, _LABELLED, ids)
        empty = np.flatnonzero(visible.take(chosen).counts() == 0)
        if empty.size:
            raise DataError(
                f"no labelled item for class '{visible.class_names[empty[0]]}' of "
                f"{visible.counts()[empty[0]]:,} items: label one, or leave the class out; number "
                "classes 0, 1, 2, ... without gaps"
            )
    return Split(
        len(labels),
        protocol,
        seed,
        query=np.flatnonzero(query),
        labelled=chosen,
        unlabelled=np.setdiff1d(
            np.flatnonzero(training if protocol == "transfer" else ~query), chosen
        ),
        # Protocols 2 and transfer search no item that the training may use.
        database=np.setdiff1d(
            np.flatnonzero(has_label & ~query), np.flatnonzero(training) if has_unseen else chosen
        ),
        seen_classes=seen_classes,
    )
