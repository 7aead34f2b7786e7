"""Figures from elsewhere, to stand beside those of an experiment: a CSV of methods and code lengths.

The package itself holds none: figures of a paper belong here only where they can be checked against the paper.

    method,12,24,32,48
    gpq,...,...,...,...
"""

from __future__ import annotations

import csv
from pathlib import Path

from ..errors import DataError
from ..methods.registry import METHODS


def read_published(path: str | Path) -> dict[tuple[str, int], float]:
    """(method, bits) -> mAP, a share between 0 and 1. Empty cells are left out; percentages are refused.

    Raises:
        DataError: missing, or not such a table; the message names the line.
    """
    path = Path(path)
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except FileNotFoundError:
        raise DataError(f"{path} not found: it should be a CSV of published figures") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not lines or not lines[0] or lines[0][0].strip().lower() != "method":
        raise DataError(f"{path}: the first line must be method and the code lengths, as method,12,24,32,48")
    try:
        bits = [int(text) for text in lines[0][1:]]
    except ValueError:
        raise DataError(f"{path}: the first line must be method and the code lengths in bits") from None
    for n in bits:
        if n < 1 or bits.count(n) > 1:
            raise DataError(f"{path}: the first line has {n} bits, which is no length or there twice")
    found: dict[tuple[str, int], float] = {}
    seen: set[str] = set()
    for number, line in enumerate(lines[1:], start=2):
        if not any(text.strip() for text in line):
            continue
        name = line[0].strip().lower()
        if name not in METHODS:
            raise DataError(f"{path}, line {number}: no method '{name}': see gpq experiment methods")
        if name in seen:
            raise DataError(f"{path}, line {number}: '{name}' is there twice")
        seen.add(name)
        if len(line) > len(bits) + 1:
            raise DataError(f"{path}, line {number}: {len(line) - 1} figures for {len(bits)} code lengths")
        for n, text in zip(bits, line[1:], strict=False):
            if not text.strip():
                continue
            try:
                value = float(text)
            except ValueError:
                value = float("nan")
            if not 0 <= value <= 1:
                raise DataError(f"{path}, line {number}: {text.strip()!r} is no mAP between 0 and 1")
            found[name, n] = value
    if not found:
        raise DataError(f"{path} has no figure: write a method and its mAPs on a line below the first")
    return found
