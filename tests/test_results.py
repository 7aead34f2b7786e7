"""Figures: those of the documents are the committed ones, and those of the presets stay where they are."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from gpq_faiss.config import merge, preset
from gpq_faiss.data.digits import open_digits
from gpq_faiss.stages.evaluate import evaluate
from gpq_faiss.stages.train import train

ROOT = Path(__file__).parent.parent
MAIN, FEW, ALL = "default-cifar10", "default-cifar10-few", "table2"

# Row of the README's table of results -> rows of the committed files.
README_ROWS = {
    "class-posterior codes, the default": (MAIN, "posterior"),
    "– all bits for the class": (MAIN, "posterior (all codebooks for the class)"),
    "DTQ, learning rate 2e-3": (MAIN, "dtq (learning rate 2e-3)"),
    "SDH": (MAIN, "sdh"),
    "GPQ, the paper's losses with the network and training of the others": (
        ALL,
        "gpq (preset paper, network and training of the others)",
    ),
    "GPQ with soft targets, preset `gpq`": (MAIN, "gpq"),
    "OPQ": (MAIN, "opq"),
    "*exact float features*": (MAIN, "float"),
    "*classifier; six of them: class probabilities, no code*": (MAIN, "classifier; classifier-6"),
    "*the likeliest class and its probability*": (MAIN, "class-confidence"),
}


@cache
def committed(name: str) -> dict[str, dict[str, float]]:
    """Row -> column -> mean, of the first table of a results file."""
    tables = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["tables"]
    return {
        re.sub(r" \([\d,]+ bits (an|per) item\)", "", row["method"]): {
            column: cell["mean"] for column, cell in row.items() if isinstance(cell, dict)
        }
        for row in tables["map"]["rows"]
    }


def table_under(text: str, first: str) -> list[list[str]]:
    """Cells of the rows of the Markdown table whose head begins with ``first``, without head and rule."""
    lines = text[text.index(f"\n{first}") + 1 :].splitlines()
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def check(where: str, text: str, file: str, rows: str, column: str) -> None:
    """Assert that a cell holds the committed figures of some rows, as far as it has figures."""
    for shown, row in zip(text.split("; "), rows.split("; "), strict=False):
        if shown:
            value = committed(file)[row][column]
            # Some figures were rounded from the four digits of the committed tables.
            assert float(shown) == pytest.approx(value, abs=0.00056), f"{where}: {file}, {row}, {column}"


def test_the_readme_has_the_committed_figures() -> None:
    table = table_under((ROOT / "README.md").read_text(), "| | 12 bits |")
    assert {line[0] for line in table} <= README_ROWS.keys()
    assert len(table) >= 5
    for label, *cells in table:
        file, rows = README_ROWS[label]
        for text, column in zip(cells, ("12", "24", "48", "NN10@100"), strict=False):
            check(label, text, file, rows, column)
        check(f"{label}, few labels", cells[4], FEW, rows, "48")


def test_the_page_of_results_has_the_committed_figures() -> None:
    table = table_under((ROOT / "docs" / "results.md").read_text(), "| data | 12 bits |")
    assert len(table) == 4
    for label, *cells in table:
        (file,) = re.findall(r"results/([\w-]+)\.md", label)
        for text, column in zip(cells, ("12", "24", "48", "NN10@100"), strict=False):
            check(label, text, file, "posterior", column)
        for text, row in zip(cells[4:], ("classifier", "classifier-6", "classifier-propagated"), strict=True):
            check(label, text, file, row, "48")


def test_the_parts_of_gpq_have_the_committed_figures() -> None:
    table = table_under((ROOT / "docs" / "results.md").read_text(), "| | Omniglot, 12 bits |")
    assert len(table) == 9
    columns = (("pairs-omniglot", "12"), ("pairs-omniglot", "48"), ("pairs-cifar10", "12"))
    for row, *cells in table:
        for text, (file, column) in zip(cells, columns, strict=True):
            check(row, text, file, row, column)


def test_the_page_of_the_default_has_the_committed_figures() -> None:
    table = table_under((ROOT / "docs" / "recommended.md").read_text(), "| | 12 bits |")
    assert {row for row, *_ in table} == committed("default-ablation").keys()
    columns = [
        (file, column)
        for file in ("default-ablation", "default-ablation-few", "default-ablation-omniglot")
        for column in ("12", "48", "NN10@100")
    ]
    for row, *cells in table:
        for text, (file, column) in zip(cells, columns, strict=True):
            check(row, text, file, row, column)


def test_the_steps_have_the_committed_figures() -> None:
    table = table_under((ROOT / "docs" / "recommended.md").read_text(), "| data | classes | seeds |")
    assert len(table) == 5
    for label, _, _, *cells in table:
        file = re.findall(r"results/([\w-]+)\.md", label)[0]
        rows = "; ".join(
            next(
                row for row in committed(file) if row.endswith(f"{steps} steps") and not row.startswith("no ")
            )
            for steps in ("800", "1,600")
        )
        for text, column in zip(cells, ("12", "48", "NN10@100"), strict=True):
            check(label, text, file, rows, column)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "recommended",
            {"posterior": {"committee": 2, "committee_hidden": 128}, "training": {"steps": 60}},
            0.916,
        ),
        ("paper", {"training": {"steps": 150}}, 0.481),
    ],
)
def test_short_trainings_of_the_presets_rank_as_before(
    tmp_path: Path, name: str, changes: dict[str, dict[str, int]], expected: float
) -> None:
    """On digits, 20 labels per class, 12 bits: cheaper than the presets, but by the same code."""
    config = merge(merge(preset(name), {"quantizer": {"codebooks": 3}}), changes)
    train(open_digits(), tmp_path / "model", config=config, labelled="20-per-class")
    assert evaluate(tmp_path / "model", open_digits()).ranking.map == pytest.approx(expected, abs=0.02)


def test_the_sizes_of_the_installations_are_the_committed_ones() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "install.json").read_text())["installations"]
    light, whole = (f"{found[extra]['megabytes']:,}" for extra in ("search", "train"))
    assert f"[{light} MB in place of {whole}]" in (ROOT / "README.md").read_text()
    rows = table_under((ROOT / "docs" / "install.md").read_text(), "| | for | size of site-packages |")
    assert [row[2] for row in rows] == [f"{whole} MB", f"{light} MB"]


def results(name: str) -> dict[str, Any]:
    """A committed results file."""
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return found


def test_the_page_of_clusters_has_the_committed_figures() -> None:
    cluster = results("cluster")
    costs = []
    for job in ("encoding", "building"):
        runs = cluster["stages"][{"encoding": "encode", "building": "build"}[job]]
        ratio = median(b / a for a, b in zip(runs["0"], runs["1"], strict=True))
        costs.append(f"{job} {100 * (ratio - 1):+.0f} % ({median(runs['0']):.1f} s)")
    recovered = [
        f"{min(took):.{n}f} to {max(took):.{n}f} s"
        for took, n in zip(cluster["search"]["recovery_s"].values(), (0, 2), strict=True)
    ]
    expected = [
        ", ".join(costs),
        f"{recovered[0]} where each shard has one holder",
        f"{recovered[1]} with two",
    ]
    text = " ".join((ROOT / "docs" / "scale.md").read_text().split())
    missing = [figure for figure in expected if figure not in text]
    assert not missing, "\n".join(["docs/scale.md lacks:", *missing])
