"""Select items for a role: a number per class, a fraction, or those listed in a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .id_files import read_ids
from .labels import Labels, named_rows, rows_that
from .split import Rows

QUERY, LABELLED = range(2)  # streams of random numbers


def permuted(rows: Rows, seed: int, stream: int, c: int = 0) -> Rows:
    """``rows`` in a random order that depends only on seed, purpose (``stream``) and class."""
    return np.random.default_rng([seed, stream, c]).permutation(rows)


def _rare_first(labels: Labels) -> list[int]:
    """Classes with items, rarest first, so that common ones do not use up shared items."""
    counts = labels.counts()
    return [int(c) for c in np.argsort(counts, kind="stable") if counts[c]]


def draw(
    labels: Labels, free: NDArray[np.bool_], wanted: Callable[[int, int, int], int], seed: int, stream: int
) -> Rows:
    """Draw items per class, none twice; ``free`` [N] marks available items and is updated.

    Args:
        wanted: (class, its number of items, of free items) -> number to draw.
    """
    counts = labels.counts()
    taken: list[Rows] = []
    for c in _rare_first(labels):
        # The order is of the whole class, so that larger draws contain smaller ones.
        order = permuted(np.flatnonzero(labels.column(c)), seed, stream, c)
        order = order[free[order]]
        chosen = order[: wanted(c, int(counts[c]), len(order))]
        free[chosen] = False
        taken.append(chosen)
    return np.sort(np.concatenate(taken)) if taken else np.empty(0, np.int64)


def read_rows(path: str | Path, ids: NDArray[np.int64], what: str = "--labelled") -> Rows:
    """Rows of the items listed in a file: ``.npy`` integers, or text with one per line.

    The numbers are ids if all of them are ids of the data set, else row numbers (from 0).

    Raises:
        DataError: unreadable, not whole numbers, or neither ids nor row numbers.
    """
    found = read_ids(path, what)
    if not len(found):
        raise DataError(f"{what} {path} holds no number: ids or row numbers, one per line, are needed")
    values = np.unique(found)
    order = np.argsort(ids, kind="stable")
    found = np.searchsorted(ids[order], values)
    known = found < len(ids)
    known[known] = ids[order][found[known]] == values[known]
    if known.all():
        return np.sort(order[found]).astype(np.int64)
    if values[0] >= 0 and values[-1] < len(ids):
        return values
    unknown = values[~known]
    raise DataError(
        f"{what} {path}: {int(unknown[0])} is neither an id of the data nor a row number below {len(ids):,}"
        f" ({len(unknown):,} in all)"
    )


def parse_labelled(spec: str) -> tuple[Literal["all", "count", "fraction", "file"], float]:
    """Parse ``--labelled``: its kind and number.

    Raises:
        UsageError: a number that is neither N-per-class nor a fraction (0.05 or 5%).
    """
    if spec == "all":
        return "all", 1.0
    if match := re.fullmatch(r"(\d+)-per-class", spec):
        if int(match[1]) == 0:
            raise UsageError("--labelled 0-per-class: at least 1 item of each class must be labelled")
        return "count", int(match[1])
    try:
        fraction = float(spec[:-1]) / 100 if spec.endswith("%") else float(spec)
    except ValueError:
        return "file", 0.0
    if not 0 < fraction <= 1:
        hint = f" (did you mean {spec}-per-class?)" if spec.isdigit() and int(spec) else ""
        raise UsageError(f"--labelled {spec}: a fraction is above 0 and at most 1{hint}")
    return "fraction", fraction


def parse_queries(spec: str) -> int | str:
    """Parse ``--queries``: a number per class, or a file.

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
    """Choose the items whose labels the training may use.

    Args:
        spec: ``N-per-class``; a fraction of the items of each class; ``all``; a file (:func:`read_rows`); None:
            a twelfth of each class, the paper's 500 on CIFAR-10.
        labels: of all items.
        free: bool [N], available items; updated.
        seed: random seed.
        ids: int64 [N].
        reserved: use of the unavailable items, for messages ("10 queries").

    Raises:
        UsageError: invalid ``spec``.
        DataError: a class with too few items; an invalid file, or one that names queries or unlabelled items.
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
                others = f" (the others: {reserved})" if reserved else ""
                raise DataError(
                    f"class '{labels.class_names[c]}' has {total:,} items, {left:,} of them free{others}; "
                    f"--labelled {spec} needs {int(number):,}: lower --labelled"
                )
            return int(number)

        rows = draw(labels, free, wanted, seed, LABELLED)
    return rows


def require_each_class(labels: Labels, labelled: Rows, classes: NDArray[Any] | None = None) -> None:
    """Raises DataError: a class has no labelled item, so it cannot be learnt."""
    counts = labels.take(labelled).counts()
    for c in range(labels.n_classes) if classes is None else classes:
        if counts[c] == 0:
            raise DataError(
                f"no labelled item for class '{labels.class_names[c]}': label one, or leave the class out"
            )


def ids_or_rows(labels: Labels, ids: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """``ids``, or row numbers if None: int64 [N]."""
    return np.arange(len(labels)) if ids is None else ids
