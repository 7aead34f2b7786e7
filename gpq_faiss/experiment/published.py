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
        lines = list(csv.reader(read_text(path, "a CSV of published figures").splitlines()))
    except csv.Error as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    first = [text.strip().lower() for text in lines[0]] if lines else []
    if first == _LONG:
        return _read_long(path, lines[1:], data_set, protocol)
    if first[:1] != ["method"]:
        raise DataError(
            f"{path}: the first line must be method and the code lengths, as method,12,24,32,48, or {','.join(_LONG)}"
        )
    try:
        bits = [int(text) for text in lines[0][1:]]
    except ValueError:
        raise DataError(f"{path}: the first line must be method and the code lengths in bits") from None
    for n in bits:
        if n < 1 or bits.count(n) > 1:
            raise DataError(f"{path}: the first line has {n} bits, not a code length, or repeated")
    found: dict[tuple[str, int], float] = {}
    seen: set[str] = set()
    for number, line in enumerate(lines[1:], start=2):
        if not any(text.strip() for text in line):
            continue
        name = line[0].strip().lower()
        _check_method(path, number, name)
        if name in seen:
            raise DataError(f"{path}, line {number}: '{name}' is there twice")
        seen.add(name)
        if len(line) > len(bits) + 1:
            raise DataError(f"{path}, line {number}: {len(line) - 1} figures for {len(bits)} code lengths")
        for n, text in zip(bits, line[1:], strict=False):
            if text.strip():
                found[name, n] = _share(path, number, text)
    if not found:
        raise DataError(f"{path} has no figure: write a method and its mAPs on a line below the first")
    return found


def _read_long(
    path: Path, lines: list[list[str]], data_set: str | None, protocol: str | None
) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], float] = {}
    there: set[str] = set()
    for number, line in enumerate(lines, start=2):
        if not any(text.strip() for text in line):
            continue
        if len(line) != len(_LONG):
            raise DataError(f"{path}, line {number}: {len(line)} fields, not {len(_LONG)}: {','.join(_LONG)}")
        of_data, of_protocol, name, bits, share = (text.strip().lower() for text in line)
        _check_method(path, number, name)
        if not bits.isdecimal() or not int(bits):
            raise DataError(f"{path}, line {number}: '{bits}' is no code length in bits")
        value = _share(path, number, share)
        there.add(f"{of_data} protocol {of_protocol}")
        ours = data_set is None or _letters(data_set).startswith(_letters(of_data))
        if not ours or protocol not in (None, of_protocol):
            continue
        if (name, int(bits)) in found:
            raise DataError(f"{path}, line {number}: '{name}' of {bits} bits is there twice")
        found[name, int(bits)] = value
    if not found:
        raise DataError(
            f"{path} has no figure of {data_set or 'any data'}, protocol {protocol or 'any'}: it has {', '.join(sorted(there)) or 'none'}; "
            "the data's name in an experiment is set with gpq experiment run --name"
        )
    return found


def _letters(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _check_method(path: Path, number: int, name: str) -> None:
    if name not in method_names():
        raise DataError(f"{path}, line {number}: no method '{name}': see gpq experiment methods")


def _share(path: Path, number: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1:
        raise DataError(f"{path}, line {number}: {text.strip()!r} is no mAP between 0 and 1")
    return value
