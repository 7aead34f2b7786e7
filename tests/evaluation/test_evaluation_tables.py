"""Tables: what is written is what a reader of that format reads back."""

import csv
import io
import json

import numpy as np
import pytest

from gpq_faiss.evaluation.tables import Spread, render, summarise

ROWS = [
    {"method": "GPQ", "bits": 12, "map": Spread.of([0.5, 0.6]), "n": 54000},
    {"method": "PQ | plain", "bits": 48, "map": 0.25, "n": None},
]


def test_means_and_sample_deviations_by_columns():
    runs = [("GPQ", 12, 0.5), ("GPQ", 12, 0.7), ("PQ", 12, 0.2), ("GPQ", 48, None)]
    runs = [{"method": method, "bits": bits, "map": value} for method, bits, value in runs]
    lines = summarise(runs, ["method", "bits"], ["map"])
    assert [(x["method"], x["bits"]) for x in lines] == [("GPQ", 12), ("PQ", 12), ("GPQ", 48)]
    first, second, third = (line["map"] for line in lines)
    assert (first.mean, first.deviation) == pytest.approx((0.6, np.std([0.5, 0.7], ddof=1)))
    assert (first.n, second.deviation, third) == (2, None, None)
    assert f"{first:.2f} {second:.3f}" == "0.60 ± 0.14 0.200"


def test_text_aligns_numbers_and_groups_thousands():
    head, _, first, second = render(ROWS).splitlines()
    assert head.startswith("method")
    assert "0.550 ± 0.071" in first
    assert first.endswith("54,000")
    assert second.endswith("–")
    assert first.index("12") == second.index("48")


def test_markdown_escapes_bars():
    lines = render(ROWS, "markdown").splitlines()
    assert "PQ \\| plain" in lines[3]
    assert {line.replace("\\|", "").count("|") for line in lines} == {5}


def test_latex_and_html_escape_their_signs():
    text = render([{"a_b": "50 % & $x$ {y} \\z", "λ": Spread(0.5, 0.1, 3)}], "latex", digits=1)
    for fragment in (
        r"50 \% \& \$x\$ \{y\} \textbackslash{}z",
        r"0.5 $\pm$ 0.1",
        r"a\_b",
        r"$\lambda$",
    ):
        assert fragment in text
    page = render([{"a<b": "x & y", "n": 1234, "f": None}], "html")
    assert all(fragment in page for fragment in ("a&lt;b", "x &amp; y", "1,234", "–"))


def test_csv_has_a_column_for_each_part_of_a_spread():
    rows = list(csv.DictReader(io.StringIO(render(ROWS, "csv"))))
    assert list(rows[0]) == ["method", "bits", "map", "map_deviation", "map_n", "n"]
    assert float(rows[0]["map_deviation"]) == ROWS[0]["map"].deviation
    assert (rows[0]["map_n"], rows[1]["map"], rows[1]["map_deviation"]) == ("2", "0.25", "")


def test_json_has_all_digits_and_no_nan():
    row = {"method": "x", "map": float("nan"), "n": np.int64(3), "c": np.arange(2)}
    rows = json.loads(render([*ROWS, row], "json"), parse_constant=pytest.fail)
    assert rows[0]["map"] == {"mean": 0.55, "deviation": ROWS[0]["map"].deviation, "n": 2}
    assert (rows[2]["map"], rows[2]["n"], rows[2]["c"]) == (None, 3, [0, 1])
