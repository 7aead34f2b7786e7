"""Tables of results: a list of rows (dicts) in, aligned text, Markdown, LaTeX, HTML, CSV or JSON out."""

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

from ..errors import UsageError

Format = Literal["text", "markdown", "latex", "html", "csv", "json"]
Row = Mapping[str, Any]

_MISSING = "–"


_SHOWN = 60
"""Rows that a result prints."""


class Shown:
    """A result that prints as its table, in a notebook as HTML."""

    def rows(self) -> list[dict[str, Any]]:
        """A row per line of the table."""
        raise NotImplementedError

    def about(self) -> list[str]:
        """Lines below the table."""
        return []

    def _rows(self) -> Iterable[Row]:
        """The rows to show, lazily where they may be many."""
        return self.rows()

    def _pictures(self) -> str:
        """HTML above the table."""
        return ""

    def _first(self) -> tuple[list[Row], list[str]]:
        rows = list(islice(self._rows(), _SHOWN + 1))
        more = [f"... and more: the first {_SHOWN} rows are shown"] if len(rows) > _SHOWN else []
        return rows[:_SHOWN], more + self.about()

    def __str__(self) -> str:
        rows, lines = self._first()
        return "\n".join([render(rows, digits=4).rstrip() if rows else "nothing found", *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows, lines = self._first()
        table = render(rows, "html", digits=4) if rows else "<p>nothing found</p>"
        return self._pictures() + table + "".join(f"<p>{escape(line)}</p>" for line in lines)


@dataclass(frozen=True)
class Spread:
    """Mean over runs (seeds) with the sample standard deviation (None for a single run)."""

    mean: float
    deviation: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise the values of several runs.

        Raises:
            UsageError: no values.
        """
        array = np.asarray(list(values), dtype=np.float64)
        if not len(array):
            raise UsageError("no runs to average: give at least one value")
        deviation = float(array.std(ddof=1)) if len(array) > 1 else None
        return cls(float(array.mean()), deviation, len(array))

    def __format__(self, spec: str) -> str:
        mean = format(self.mean, spec)
        return mean if self.deviation is None else f"{mean} ± {format(self.deviation, spec)}"


def summarise(rows: Sequence[Row], by: Sequence[str], values: Sequence[str]) -> list[dict[str, Any]]:
    """One row per combination of the columns ``by``, in order of appearance, with mean ± deviation of ``values``.

    Missing values (absent or None) are ignored; a combination without values gives None.

    Examples:
        >>> runs = [{"method": "pq", "mAP": 0.5}, {"method": "pq", "mAP": 0.7}]
        >>> print(f"{summarise(runs, ['method'], ['mAP'])[0]['mAP']:.2f}")
        0.60 ± 0.14
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in by), []).append(row)
    result = []
    for key, members in groups.items():
        line: dict[str, Any] = dict(zip(by, key, strict=True))
        for name in values:
            given = [row[name] for row in members if row.get(name) is not None]
            line[name] = Spread.of(given) if given else None
        result.append(line)
    return result


def pivot(rows: Sequence[Row], index: str, across: str, value: str) -> list[dict[str, Any]]:
    """Pivot rows: one row per ``index``, one column per ``across`` (for example mAP by method and bits).

    Raises:
        UsageError: two rows for one cell (summarise them first).
    """
    names = list(dict.fromkeys(str(row[across]) for row in rows))
    table: dict[Any, dict[str, Any]] = {}
    for row in rows:
        line = table.setdefault(row[index], {index: row[index], **dict.fromkeys(names)})
        if line[str(row[across])] is not None:
            raise UsageError(
                f"two values for {index}={row[index]}, {across}={row[across]}: summarise the runs first"
            )
        line[str(row[across])] = row[value]
    return list(table.values())


def render(
    rows: Sequence[Row],
    form: Format = "text",
    *,
    columns: Sequence[str] | None = None,
    headers: Mapping[str, str] | None = None,
    digits: int = 3,
    caption: str | None = None,
) -> str:
    """Write a table; the text ends with a newline.

    Args:
        rows: dicts; a value may be text, a number, a :class:`Spread`, a bool or None (shown as a dash).
        form: "text", "markdown", "latex" (booktabs), "html", "csv" or "json". CSV and JSON keep all
            digits, and a :class:`Spread` becomes three columns (``x``, ``x_deviation``, ``x_n``) or an object.
        columns: columns and their order (default: all, in order of first appearance).
        headers: display names of columns (not in CSV and JSON).
        digits: decimals of floats.
        caption: a line above the table (text, Markdown), or the caption in LaTeX and HTML.

    Raises:
        UsageError: unknown form.

    Examples:
        >>> print(render([{"method": "pq", "mAP": 0.28}, {"method": "gpq", "mAP": 0.665}], "markdown"), end="")
        | method |   mAP |
        | ------ | ----: |
        | pq     | 0.280 |
        | gpq    | 0.665 |
    """
    if form not in get_args(Format):
        raise UsageError(f"table format {form!r} is unknown: use one of {', '.join(get_args(Format))}")
    names = (
        list(columns) if columns is not None else list(dict.fromkeys(name for row in rows for name in row))
    )
    if form == "json":
        return (
            json.dumps([{n: _plain(row.get(n)) for n in names} for row in rows], indent=2, ensure_ascii=False)
            + "\n"
        )
    if form == "csv":
        return _csv(rows, names)
    titles = [(headers or {}).get(name, name) for name in names]
    cells = [[_cell(row.get(name), digits) for name in names] for row in rows]
    right = [_numeric([row.get(name) for row in rows]) for name in names]
    if form == "latex":
        return _latex(titles, cells, right, caption)
    if form == "html":
        return _html(titles, cells, right, caption)
    if form == "markdown":
        return _markdown(titles, cells, right, caption)
    widths = [max(len(line[i]) for line in [titles, *cells]) for i in range(len(names))]
    lines = [_aligned(titles, widths, right), "  ".join("─" * w for w in widths)]
    lines += [_aligned(line, widths, right) for line in cells]
    return "\n".join(([caption] if caption is not None else []) + lines) + "\n"


def _cell(value: Any, digits: int) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return _MISSING
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, Spread):
        return format(value, f".{digits}f")
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    if isinstance(value, numbers.Real):
        return f"{float(value):.{digits}f}"
    return " ".join(str(value).split())  # a cell is one line


def _numeric(values: Sequence[Any]) -> bool:
    present = [v for v in values if v is not None]
    return bool(present) and all(
        isinstance(v, numbers.Real | Spread) and not isinstance(v, bool) for v in present
    )


def _aligned(line: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    pairs = zip(line, widths, right, strict=True)
    return "  ".join(text.rjust(w) if r else text.ljust(w) for text, w, r in pairs).rstrip()


def _markdown(
    titles: Sequence[str], cells: list[list[str]], right: Sequence[bool], caption: str | None
) -> str:
    safe = [
        [text.replace("\\", "\\\\").replace("|", "\\|") for text in line] for line in [list(titles), *cells]
    ]
    widths = [max(3, *(len(line[i]) for line in safe)) for i in range(len(titles))]
    rule = ["-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right, strict=True)]
    lines = []
    for line in [safe[0], rule, *safe[1:]]:
        pairs = zip(line, widths, right, strict=True)
        lines.append("| " + " | ".join(t.rjust(w) if r else t.ljust(w) for t, w, r in pairs) + " |")
    return "\n".join(([caption, ""] if caption is not None else []) + lines) + "\n"


def _html(titles: Sequence[str], cells: list[list[str]], right: Sequence[bool], caption: str | None) -> str:
    def line(tag: str, texts: Sequence[str]) -> str:
        pairs = zip(texts, right, strict=True)
        return "".join(f"<{tag}{' class=n' if r else ''}>{escape(text)}</{tag}>" for text, r in pairs)

    above = "" if caption is None else f"<caption>{escape(caption)}</caption>"
    body = "".join(f"<tr>{line('td', texts)}</tr>\n" for texts in cells)
    head = f"<thead><tr>{line('th', titles)}</tr></thead>"
    return f"<table>{above}{head}<tbody>\n{body}</tbody></table>\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "λ": r"$\lambda$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
}


def _latex(titles: Sequence[str], cells: list[list[str]], right: Sequence[bool], caption: str | None) -> str:
    def safe(text: str) -> str:
        return "".join(_LATEX.get(letter, letter) for letter in text)

    lines = [r"\begin{tabular}{" + "".join("r" if r else "l" for r in right) + "}", r"\toprule"]
    lines += [" & ".join(map(safe, titles)) + r" \\", r"\midrule"]
    lines += [" & ".join(map(safe, line)) + r" \\" for line in cells]
    lines += [r"\bottomrule", r"\end{tabular}"]
    if caption is not None:
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{safe(caption)}}}", *lines, r"\end{table}"]
    return "\n".join(lines) + "\n"


def _csv(rows: Sequence[Row], names: Sequence[str]) -> str:
    spread = {name for name in names if any(isinstance(row.get(name), Spread) for row in rows)}
    head = [
        h for name in names for h in ([name, f"{name}_deviation", f"{name}_n"] if name in spread else [name])
    ]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        line: list[Any] = []
        for name in names:
            value = row.get(name)
            if isinstance(value, Spread):
                line += [repr(value.mean), "" if value.deviation is None else repr(value.deviation), value.n]
            else:
                plain = _plain(value)
                line += ["" if plain is None else plain] + ["", ""] * (name in spread)
        writer.writerow(line)
    return stream.getvalue()


def _plain(value: Any) -> Any:
    """A value for JSON: NaN and infinity become null, numpy numbers plain numbers."""
    if isinstance(value, Spread):
        return {"mean": _plain(value.mean), "deviation": _plain(value.deviation), "n": value.n}
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
