"""Published figures to compare an experiment with: a CSV in one of two forms.

The package contains none: published figures should be checked against the paper. A table of one data set
and protocol, or many of them, of which those of the experiment's data set and protocol are taken:

    method,12,24,32,48             data_set,protocol,method,bits,map
    gpq,...,...,...,...            cifar10,1,gpq,12,...
"""

from __future__ import annotations

import csv
from pathlib import Path

from ..errors import DataError
from ..inputs import read_text
from ..methods.registry import method_names

_LONG = ["data_set", "protocol", "method", "bits", "map"]


def read_published(
    path: str | Path, data_set: str | None = None, protocol: str | None = None
) -> dict[tuple[str, int], float]:
    """(method, bits) -> mAP, a share between 0 and 1. Empty fields are skipped; percentages are errors.

    Args:
        path: the CSV.
        data_set: name of the experiment's data; of the long form, rows count whose data set it begins with, whatever the case and
            the signs between letters ("CIFAR-10 features" begins with ``cifar10``).
        protocol: of the experiment; of the long form, rows of others do not count.

    Raises:
        DataError: missing, not such a table (the message names the line), or without a figure of this data set and protocol.
    """
    path = Path(path)
    try:
        lines = list(csv.reader(read_text(path, "a CSV of published figures").lower().splitlines()))
    except csv.Error as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    first, *others = [[text.strip() for text in line] for line in lines] or [[]]
    if first != _LONG and first[:1] != ["method"]:
        raise DataError(
            f"{path}: the first line must be method and the code lengths, as method,12,24,32,48, or {','.join(_LONG)}"
        )
    found: dict[tuple[str, int], float] = {}
    seen: set[tuple[str, ...]] = set()
    for number, line in enumerate(others, start=2):
        where = f"{path}, line {number}"
        if not any(line):
            continue
        if len(line) > len(first) or (first == _LONG and len(line) < len(first)):
            raise DataError(f"{where}: {len(line)} fields, not {len(first)}: {','.join(first)}")
        if first == _LONG:
            *table, name, bits, share = line
            figures = [(bits, share)]
        else:
            table, name, figures = [], line[0], list(zip(first[1:], line[1:], strict=False))
        if name not in method_names():
            raise DataError(f"{where}: no method '{name}': see gpq experiment methods")
        for bits, share in figures:
            if not bits.isdecimal() or not int(bits):
                raise DataError(f"{where}: '{bits}' is no code length in bits")
            key = (*table, name, bits)
            if key in seen:
                raise DataError(f"{where}: '{name}' of {bits} bits is there twice")
            seen.add(key)
            if share and (not table or _is_of(table, data_set, protocol)):
                found[name, int(bits)] = _share(where, share)
    if not found:
        tables = {f"{key[0]} protocol {key[1]}" for key in seen if len(key) > 2}
        raise DataError(
            f"{path} has no figure of {data_set or 'any data'}, protocol {protocol or 'any'}: it has "
            f"{', '.join(sorted(tables)) or 'none'}; the data's name in an experiment is set with gpq experiment run --name"
        )
    return found


def _is_of(table: list[str], data_set: str | None, protocol: str | None) -> bool:
    """Whether a data set and protocol of the long form are those of an experiment."""
    ours, theirs = ("".join(c for c in name.lower() if c.isalnum()) for name in (data_set or "", table[0]))
    return (data_set is None or ours.startswith(theirs)) and protocol in (None, table[1])


def _share(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1:
        raise DataError(f"{where}: {text!r} is no mAP between 0 and 1")
    return value
