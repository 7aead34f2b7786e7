"""The report of an experiment as one HTML file: tables, notes and pictures inside."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.base import Dataset
from ..errors import UsageError
from ..evaluation.tables import Spread
from ..files import check_output
from ..report import html
from .pictures import draw_experiment
from .report import Table, notes_of, tables_of
from .results import read_experiment


def save_report_page(
    folder: str | Path,
    out: str | Path,
    *,
    published: Mapping[tuple[str, int], float] | None = None,
    images: Dataset | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the report of a folder of runs as a self-contained page.

    Args:
        folder: folder of the experiment.
        out: the page, .html.
        published: published figures to compare with.
        images: images of the data, for galleries.
        overwrite: replace an existing file.

    Raises:
        UsageError: another extension.
        DataError: not an experiment, no finished run, or a damaged one.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if Path(out).suffix.lower() != ".html":
        raise UsageError(f"--out {out}: a page ends in .html")
    check_output(out, overwrite=overwrite)
    experiment = read_experiment(folder)
    first, *others = tables_of(experiment, published or {})
    parts = [_table(first), *map(html.note, notes_of(experiment))]
    for table in others:
        parts += [html.heading(table.caption), _table(table)]
    with tempfile.TemporaryDirectory() as pictures:
        for caption, path in draw_experiment(
            folder, pictures, images=images, ending="svg", overwrite=True
        ).items():
            parts += [html.heading(caption), html.plot(path)]
    return html.save_page(experiment.about["title"], parts, out, overwrite=overwrite)


def _table(table: Table) -> str:
    def cell(value: Any) -> Any:
        if isinstance(value, Spread):
            spread = "" if value.deviation is None else f" ± {value.deviation:.{table.digits}f}"
            return f"{value.mean:.{table.digits}f}{spread}"
        return value

    return html.table(
        [{name: cell(value) for name, value in row.items()} for row in table.rows], table.digits
    )
