"""Tables: what is written is what a reader of that format reads back."""

import csv
import io
import json

import numpy as np
import pytest

from gpq_faiss.errors import UsageError
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


def test_text_is_aligned_and_markdown_escapes_bars():
    lines = render(ROWS, caption="CIFAR-10").splitlines()
    assert lines[0] == "CIFAR-10"
    assert lines[1].startswith("method")
    assert "0.550 ± 0.071" in lines[3]
    assert "54,000" in lines[3]
    assert lines[4].rstrip().endswith("–")
    assert lines[3].index("12") == lines[4].index("48")
    lines = render(ROWS, "markdown", headers={"map": "mAP"}, caption="CIFAR-10").splitlines()
    assert lines[:2] == ["CIFAR-10", ""]
    assert "mAP" in lines[2]
    assert "PQ \\| plain" in lines[5]
    bars = {line.replace("\\|", "").count("|") for line in lines[2:]}
    assert len(bars) == len({len(line) for line in lines[2:]}) == 1


def test_latex_and_html_escape_what_they_must():
    text = render(
        [{"a_b": "50 % & $x$ {y} \\z", "λ": Spread(0.5, 0.1, 3)}], "latex", digits=1, caption="a_b"
    )
    assert r"50 \% \& \$x\$ \{y\} \textbackslash{}z" in text
    assert r"0.5 $\pm$ 0.1" in text
    assert r"a\_b & $\lambda$ \\" in text
    assert text.count(r"\begin{") == text.count(r"\end{") == 2
    assert render([{"a<b": "x & y", "n": 1234, "f": None}], "html") == (
        "<table><thead><tr><th>a&lt;b</th><th class=n>n</th><th>f</th></tr></thead><tbody>\n"
        "<tr><td>x &amp; y</td><td class=n>1,234</td><td>–</td></tr>\n</tbody></table>\n"
    )


def test_csv_and_json_read_back_with_all_digits():
    rows = list(csv.DictReader(io.StringIO(render(ROWS, "csv"))))
    assert list(rows[0]) == ["method", "bits", "map", "map_deviation", "map_n", "n"]
    assert float(rows[0]["map"]) == pytest.approx(0.55)
    assert float(rows[0]["map_deviation"]) == ROWS[0]["map"].deviation
    assert rows[0]["map_n"] == "2"
    assert (rows[1]["map"], rows[1]["map_deviation"], rows[1]["n"]) == ("0.25", "", "")
    text = render(
        [*ROWS, {"method": "x", "map": float("nan"), "n": np.int64(3), "c": np.arange(2)}], "json"
    )
    rows = json.loads(text, parse_constant=pytest.fail)
    assert rows[0]["map"]["n"] == 2
    assert (rows[2]["map"], rows[2]["n"], rows[2]["c"]) == (None, 3, [0, 1])
    with pytest.raises(UsageError, match="yaml"):
        render(ROWS, "yaml")
