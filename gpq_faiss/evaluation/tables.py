"""Tables of results: a list of rows (dicts) as text, Markdown, LaTeX, HTML, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, get_args

import numpy as np
from pydantic_core import to_jsonable_python
from tabulate import DataRow, Line, TableFormat, tabulate

from ..errors import UsageError

Format = Literal["text", "markdown", "latex", "html", "csv", "json"]
Row = Mapping[str, Any]

_MAX_ROWS = 60
"""Maximum number of rows that a result prints."""
_STYLES: dict[str, Any] = {
    "text": TableFormat(
        lineabove=None,
        linebelowheader=Line("", "─", "  ", ""),
        linebetweenrows=None,
        linebelow=None,
        headerrow=DataRow("", "  ", ""),
        datarow=DataRow("", "  ", ""),
        padding=0,
        with_header_hide=None,
    ),
    "markdown": "pipe",
    "latex": "latex_booktabs",
    "html": "html",
}


class Shown:
    """A result that prints as its table, in a notebook as HTML."""

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each line of the table."""
        raise NotImplementedError

    def about(self) -> list[str]:
        """Return lines below the table."""
        return []

    def _show(self, form: Format) -> tuple[str, list[str]]:
        """Return the first rows as a table, and the lines below it."""
        rows = self.rows()
        table = render(rows[:_MAX_ROWS], form, digits=4) if rows else "nothing found"
        if len(rows) <= _MAX_ROWS:
            return table, self.about()
        return table, [f"... and more: the first {_MAX_ROWS} rows are shown", *self.about()]

    def __str__(self) -> str:
        table, lines = self._show("text")
        return "\n".join([table.rstrip(), *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table, lines = self._show("html")
        return table + "".join(f"<p>{escape(line)}</p>" for line in lines)


@dataclass(frozen=True)
class Spread:
    """Mean over ``n`` runs (seeds) with the sample standard deviation, None for a single run."""

    mean: float
    deviation: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise the values of one run or more."""
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), deviation, len(values))

    def __format__(self, spec: str) -> str:
        mean = format(self.mean, spec)
        return mean if self.deviation is None else f"{mean} ± {format(self.deviation, spec)}"


def summarise(
    rows: Sequence[Row], by: Sequence[str], values: Sequence[str]
) -> list[dict[str, Any]]:
    """Return one row for each combination of the columns ``by``, in order of appearance.

    Its ``values`` are :class:`Spread`; missing ones (absent or None) are ignored, and a combination
    without values has None.

    Examples:
        >>> runs = [{"method": "pq", "mAP": 0.5}, {"method": "pq", "mAP": 0.7}]
        >>> print(f"{summarise(runs, ['method'], ['mAP'])[0]['mAP']:.2f}")
        0.60 ± 0.14
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in by), []).append(row)
    summary = []
    for key, members in groups.items():
        columns = {
            name: [row[name] for row in members if row.get(name) is not None] for name in values
        }
        spreads = {name: Spread.of(column) if column else None for name, column in columns.items()}
        summary.append(dict(zip(by, key, strict=True)) | spreads)
    return summary


def render(rows: Sequence[Row], form: Format = "text", *, digits: int = 3) -> str:
    """Write a table; the text ends with a newline.

    Args:
        rows: dicts, whose keys are the columns; a value may be text, a number, a :class:`Spread`, a
            bool or None (shown as a dash).
        form: "text", "markdown", "latex" (booktabs), "html", "csv" or "json". CSV and JSON keep all
            digits, and a :class:`Spread` becomes three columns (``x``, ``x_deviation``, ``x_n``) or
            an object.
        digits: decimals of floats.

    Raises:
        UsageError: unknown form.

    Examples:
        >>> rows = [{"method": "pq", "mAP": 0.28}, {"method": "gpq", "mAP": 0.665}]
        >>> print(render(rows, "markdown"), end="")
        | method   |   mAP |
        |:---------|------:|
        | pq       | 0.280 |
        | gpq      | 0.665 |
    """
    if form not in get_args(Format):
        raise UsageError(
            f"table format {form!r} is unknown: use one of {', '.join(get_args(Format))}"
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    if form == "json":
        plain = to_jsonable_python(
            [{name: row.get(name) for name in names} for row in rows],
            inf_nan_mode="null",
            fallback=lambda value: (
                value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
            ),
        )
        return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"
    if form == "csv":
        flat = [dict(cell for name in names for cell in _flat(name, row.get(name))) for row in rows]
        columns = list(dict.fromkeys(name for row in flat for name in row))
        stream = io.StringIO()
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        return stream.getvalue()
    head, cells = names, [[_cell(row.get(name), digits) for name in names] for row in rows]
    if form == "markdown":
        head, *cells = ([text.replace("|", "\\|") for text in line] for line in (head, *cells))
    values = ([row[name] for row in rows if row.get(name) is not None] for name in names)
    sides = ["right" if all(map(_is_number, column)) else "left" for column in values]
    table = tabulate(cells, head, tablefmt=_STYLES[form], colalign=sides, disable_numparse=True)
    if form == "latex":
        for sign, command in (("±", r"$\pm$"), ("–", "--"), ("λ", r"$\lambda$")):
            table = table.replace(sign, command)
    return f"{table}\n"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real | Spread) and not isinstance(value, bool)


def _cell(value: Any, digits: int) -> str:
    """Return the text of a cell, which is one line."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if not _is_number(value):
        return " ".join(str(value).split())
    return format(value, "," if isinstance(value, numbers.Integral) else f".{digits}f")


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the columns of a value: mean, deviation and number of a :class:`Spread`."""
    if not isinstance(value, Spread):
        return [(name, value)]
    return [(name, value.mean), (f"{name}_deviation", value.deviation), (f"{name}_n", value.n)]
