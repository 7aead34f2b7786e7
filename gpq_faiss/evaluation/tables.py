"""Tables of results: a list of rows (dicts) as text, Markdown, LaTeX, HTML, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np
from pydantic_core import to_jsonable_python

from ..errors import UsageError

Format = Literal["text", "markdown", "latex", "html", "csv", "json"]
Row = Mapping[str, Any]

_MAX_ROWS = 60
"""Maximum number of rows that a result prints."""


class Shown:
    """A result that prints as its table, in a notebook as HTML."""

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each line of the table."""
        raise NotImplementedError

    def about(self) -> list[str]:
        """Return lines below the table."""
        return []

    def _rows(self) -> Iterable[Row]:
        """Return the rows to show, lazily where they may be many."""
        return self.rows()

    def _first(self, form: Format) -> tuple[str, list[str]]:
        """Return the first rows as a table, and the lines below it."""
        rows = list(islice(self._rows(), _MAX_ROWS + 1))
        lines = self.about()
        if len(rows) > _MAX_ROWS:
            lines = [f"... and more: the first {_MAX_ROWS} rows are shown", *lines]
        return render(rows[:_MAX_ROWS], form, digits=4) if rows else "nothing found", lines

    def __str__(self) -> str:
        table, lines = self._first("text")
        return "\n".join([table.rstrip(), *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table, lines = self._first("html")
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
        line: dict[str, Any] = dict(zip(by, key, strict=True))
        for name in values:
            present = [row[name] for row in members if row.get(name) is not None]
            line[name] = Spread.of(present) if present else None
        summary.append(line)
    return summary


def render(
    rows: Sequence[Row],
    form: Format = "text",
    *,
    headers: Mapping[str, str] | None = None,
    digits: int = 3,
    caption: str | None = None,
) -> str:
    """Write a table; the text ends with a newline.

    Args:
        rows: dicts, whose keys are the columns; a value may be text, a number, a :class:`Spread`, a
            bool or None (shown as a dash).
        form: "text", "markdown", "latex" (booktabs), "html", "csv" or "json". CSV and JSON keep all
            digits, and a :class:`Spread` becomes three columns (``x``, ``x_deviation``, ``x_n``) or
            an object.
        headers: display names of columns (not in CSV and JSON).
        digits: decimals of floats.
        caption: a line above the table (text, Markdown), or the caption in LaTeX.

    Raises:
        UsageError: unknown form.

    Examples:
        >>> rows = [{"method": "pq", "mAP": 0.28}, {"method": "gpq", "mAP": 0.665}]
        >>> print(render(rows, "markdown"), end="")
        | method |   mAP |
        | ------ | ----: |
        | pq     | 0.280 |
        | gpq    | 0.665 |
    """
    if form not in get_args(Format):
        raise UsageError(
            f"table format {form!r} is unknown: use one of {', '.join(get_args(Format))}"
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    if form in ("json", "csv"):
        plain = [{name: _plain(row.get(name)) for name in names} for row in rows]
        if form == "csv":
            return _csv(names, plain)
        return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"
    lines = [[(headers or {}).get(name, name) for name in names]]
    lines += [[_cell(row.get(name), digits) for name in names] for row in rows]
    right = [_is_numeric([row.get(name) for row in rows]) for name in names]
    if form == "latex":
        return _latex(lines, right, caption)
    if form == "html":
        return _html(lines, right)
    markdown = form == "markdown"
    if markdown:
        lines = [
            [text.replace("\\", "\\\\").replace("|", "\\|") for text in line] for line in lines
        ]
    widths = [max(3 * markdown, *map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        [
            text.rjust(w) if r else text.ljust(w)
            for text, w, r in zip(line, widths, right, strict=True)
        ]
        for line in lines
    ]
    columns = zip(widths, right, strict=True)
    texts.insert(1, ["-" * (w - 1) + "-:"[r] if markdown else "─" * w for w, r in columns])
    above = [] if caption is None else [caption, ""] if markdown else [caption]
    shown = [f"| {' | '.join(line)} |" if markdown else "  ".join(line).rstrip() for line in texts]
    return "\n".join([*above, *shown]) + "\n"


def _cell(value: Any, digits: int) -> str:
    """Return the text of a cell, which is one line."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    if isinstance(value, numbers.Real | Spread):
        return format(value, f".{digits}f")
    return " ".join(str(value).split())


def _is_numeric(values: Sequence[Any]) -> bool:
    """Whether a column has numbers, and nothing but numbers."""
    present = [v for v in values if v is not None]
    return bool(present) and all(
        isinstance(v, numbers.Real | Spread) and not isinstance(v, bool) for v in present
    )


def _html(lines: list[list[str]], right: Sequence[bool]) -> str:
    def cells(line: list[str], tag: str) -> str:
        marks = [f"{tag} class=n" if r else tag for r in right]
        cells = zip(marks, line, strict=True)
        return "".join(f"<{mark}>{escape(text)}</{tag}>" for mark, text in cells)

    rows = "".join(f"<tr>{cells(line, 'td')}</tr>\n" for line in lines[1:])
    head = f"<table><thead><tr>{cells(lines[0], 'th')}</tr></thead><tbody>"
    return f"{head}\n{rows}</tbody></table>\n"


_LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "λ": r"$\lambda$",
}


def _latex(lines: list[list[str]], right: Sequence[bool], caption: str | None) -> str:
    safe = str.maketrans(_LATEX)
    head, *body = [" & ".join(text.translate(safe) for text in line) + r" \\" for line in lines]
    columns = "".join("r" if r else "l" for r in right)
    start, end = (
        [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"],
        [r"\bottomrule", r"\end{tabular}"],
    )
    if caption is not None:
        above = [r"\begin{table}", r"\centering", rf"\caption{{{caption.translate(safe)}}}"]
        start, end = [*above, *start], [*end, r"\end{table}"]
    return "\n".join([*start, head, r"\midrule", *body, *end]) + "\n"


def _csv(names: list[str], rows: list[dict[str, Any]]) -> str:
    """Return CSV in which a :class:`Spread` has a column each for mean, deviation and number."""
    columns: list[list[Any]] = []
    for name in names:
        cells = [row[name] for row in rows]
        if any(isinstance(cell, dict) for cell in cells):
            parts = [cell if isinstance(cell, dict) else {"mean": cell} for cell in cells]
            for key, suffix in (("mean", ""), ("deviation", "_deviation"), ("n", "_n")):
                columns.append([f"{name}{suffix}", *(cell.get(key) for cell in parts)])
        else:
            columns.append([name, *cells])
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(zip(*columns, strict=True))
    return stream.getvalue()


def _plain(value: Any) -> Any:
    """Return a value for JSON: NaN and infinity become null, numpy numbers plain numbers."""
    return to_jsonable_python(
        value,
        inf_nan_mode="null",
        fallback=lambda x: x.tolist() if isinstance(x, np.ndarray | np.generic) else str(x),
    )
