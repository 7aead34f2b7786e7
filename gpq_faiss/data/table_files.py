"""Tables in files: Parquet, or text as programs and spreadsheets write it: separated by commas, semicolons or tabs, in UTF-8 or UTF-16."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..inputs import read_text

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def _separator(line: str, path: Path) -> str:
    """What separates the columns of a header line: of commas, semicolons and tabs the one that gives the most columns."""
    if path.suffix.lower() in {".tsv", ".tab"}:
        return "\t"
    if line.startswith("sep=") and len(line) == 5:  # Excel's own mark
        return line[4]
    columns = {one: len(next(csv.reader([line], delimiter=one), [])) for one in _SEPARATORS}
    most = max(columns.values())
    best = [one for one in _SEPARATORS if columns[one] == most]
    if most > 1 and len(best) > 1:
        either = " or by ".join(_SEPARATORS[one] for one in best)
        raise DataError(f"{path} line 1 may be separated by {either}: rename its columns")
    return best[0]


class Table:
    """A Parquet file, or a text with a header line. ``header`` are the stripped names of the columns; ``separated`` is what to say of a
    text that is not separated by commas: ``"; separated by tabs"``."""

    def __init__(self, path: Path, what: str, *, parquet: bool) -> None:
        self.path, self.separated, self._parquet = path, "", None
        if parquet:
            from .columns import parquet_columns

            self._parquet = parquet_columns(path, what)
            self.header = self._parquet.names
            return
        text = read_text(path, what)
        first = text.partition("\n")[0].rstrip("\r")
        separator = _separator(first, path)
        self._skipped = int(first == f"sep={separator}")
        stream = io.StringIO(text[(len(first) + 1) * self._skipped :])
        self._reader = csv.reader(stream, delimiter=separator, strict=True)
        if separator != ",":
            self.separated = f"; separated by {_SEPARATORS.get(separator, separator)}"
        self.header = [name.strip() for name in self._next() or []]

    def _next(self) -> list[str] | None:
        try:
            return next(self._reader, None)
        except csv.Error as error:
            raise DataError(f"{self.path} {self._line()} is not CSV: {error}") from None

    def _line(self) -> str:
        return f"line {self._reader.line_num + self._skipped}"

    def check(self, column: str, option: str = "--read keep") -> None:
        """Raises DataError: no such column, or two; ``option`` names one."""
        if column not in self.header:
            there = ", ".join(repr(name[:40]) for name in self.header[:20])
            raise DataError(f"{self.path} has no column {column!r} (it has {there}): name it with {option}")
        if self.header.count(column) > 1:
            raise DataError(f"{self.path} has the column {column!r} twice: rename one of them")

    def columns(self, names: Sequence[str]) -> tuple[list[list[Any]], list[str]]:
        """Cells of columns, one after another, stripped if they are texts; and where each row is, for errors. To be called once.

        Blank lines of a text are skipped.
        """
        if self._parquet is not None:
            found = [[v.strip() if isinstance(v, str) else v for v in self._parquet.cells(n)] for n in names]
            if len({len(column) for column in found}) > 1:
                raise DataError(f"{self.path} is damaged: its columns have different numbers of rows")
            return found, [f"row {i}" for i in range(len(found[0]))]
        at, where = [self.header.index(name) for name in names], []
        cells: list[list[Any]] = [[] for _ in names]
        while (row := self._next()) is not None:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(self.header):
                found_, wanted = len(row), len(self.header)
                raise DataError(f"{self.path} {self._line()}: {found_} fields, the header has {wanted}")
            where.append(self._line())
            for column, i in zip(cells, at, strict=True):
                column.append(row[i].strip())
        return cells, where
