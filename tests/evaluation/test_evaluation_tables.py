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


def test_spread_is_the_sample_deviation():
    spread = Spread.of([1.0, 2.0, 4.0])
    assert spread.mean == pytest.approx(7 / 3)
    assert spread.deviation == pytest.approx(np.std([1, 2, 4], ddof=1))
    assert f"{spread:.2f}" == "2.33 ± 1.53"
    assert f"{Spread.of([0.5]):.3f}" == "0.500"
    with pytest.raises(UsageError, match="no runs"):
        Spread.of([])


def test_summarise():
    runs = [
        {"method": m, "bits": b, "seed": s, "map": v}
        for m, b, s, v in [("GPQ", 12, 0, 0.5), ("GPQ", 12, 1, 0.7), ("PQ", 12, 0, 0.2), ("GPQ", 48, 0, None)]
    ]
    lines = summarise(runs, ["method", "bits"], ["map"])
    assert [(x["method"], x["bits"]) for x in lines] == [("GPQ", 12), ("PQ", 12), ("GPQ", 48)]
    assert lines[0]["map"].mean == pytest.approx(0.6)
    assert lines[2]["map"] is None


def test_text_is_aligned():
    lines = render(ROWS, caption="CIFAR-10").splitlines()
    assert lines[0] == "CIFAR-10"
    assert lines[1].startswith("method")
    assert "0.550 ± 0.071" in lines[3]
    assert "54,000" in lines[3]
    assert lines[4].rstrip().endswith("–")
    assert lines[3].index("12") == lines[4].index("48")


def test_markdown_escapes_bars():
    lines = render(ROWS, "markdown", headers={"map": "mAP"}).splitlines()
    assert "mAP" in lines[0]
    assert "PQ \\| plain" in lines[3]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert len({len(line) for line in lines}) == 1


def test_latex_escapes_what_it_must():
    text = render([{"a_b": "50 % & $x$ {y} \\z", "λ": Spread(0.5, 0.1, 3)}], "latex", digits=1, caption="a_b")
    assert r"50 \% \& \$x\$ \{y\} \textbackslash{}z" in text
    assert r"0.5 $\pm$ 0.1" in text
    assert r"a\_b & $\lambda$ \\" in text
    assert text.count(r"\begin{") == text.count(r"\end{") == 2


def test_csv_reads_back():
    rows = list(csv.DictReader(io.StringIO(render(ROWS, "csv"))))
    assert float(rows[0]["map"]) == pytest.approx(0.55)
    assert float(rows[0]["map_deviation"]) == ROWS[0]["map"].deviation
    assert rows[0]["map_n"] == "2"
    assert (rows[1]["map"], rows[1]["map_deviation"], rows[1]["n"]) == ("0.25", "", "")


def test_json_reads_back_and_has_no_nan():
    text = render([*ROWS, {"method": "x", "map": float("nan"), "n": np.int64(3), "c": np.arange(2)}], "json")
    rows = json.loads(text, parse_constant=pytest.fail)
    assert rows[0]["map"]["n"] == 2
    assert rows[2]["map"] is None
    assert rows[2]["n"] == 3
    assert rows[2]["c"] == [0, 1]


def test_columns_choose_and_order():
    assert render(ROWS, "csv", columns=["bits", "method"]).splitlines()[0] == "bits,method"
    assert render([], "text", columns=["a"]).splitlines()[0] == "a"
    with pytest.raises(UsageError, match="yaml"):
        render(ROWS, "yaml")


def test_html_is_escaped_and_aligned():
    table = render([{"a<b": "x & y", "n": 1234, "f": None}], "html")
    assert table == (
        "<table><thead><tr><th>a&lt;b</th><th class=n>n</th><th>f</th></tr></thead><tbody>\n"
        "<tr><td>x &amp; y</td><td class=n>1,234</td><td>–</td></tr>\n</tbody></table>\n"
    )
