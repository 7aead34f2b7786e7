"""``gpq experiment`` on the command line: methods, run, report, and what it says when something cannot be."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result
from gpq_cli.main import cli

from gpq_faiss.methods.registry import METHODS


def gpq(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["experiment", *arguments], prog_name="gpq")


def test_methods_are_listed_in_the_order_of_the_tables() -> None:
    table = gpq("methods")
    assert table.exit_code == 0
    lines = table.stdout.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(METHODS)
    listed = json.loads(gpq("methods", "--format", "json").stdout)
    assert [row["method"] for row in listed] == list(METHODS) == [
        "gpq", "gpq-f", "gpq-h", "gpq-t", "posterior", "ssgah", "bgdh", "ssdh", "pqn", "dtq", "dqn", "subic", "ninh", "cnnh", "lopq", "opq",
        "pq", "sdh", "itq", "sh", "float", "classifier", "classifier-6",
    ]  # fmt: skip
    of = {row["method"]: row for row in listed}
    assert of["gpq"]["learns"] == of["ssdh"]["learns"] == "semi-supervised"
    assert of["pqn"]["learns"] == of["sdh"]["learns"] == "supervised"
    assert of["itq"]["code"] == of["ninh"]["code"] == "binary"
    assert of["dtq"]["network"] == "trained"
    assert of["lopq"]["network"] == "none"
    assert all(row["what it is"] and row["from"] for row in listed)


def test_a_run_and_its_reports(tmp_path: Path) -> None:
    out = str(tmp_path / "runs")
    run = ["run", "table2", "digits", "--labelled", "20-per-class", "--methods", "itq,pq", "--bits", "24"]
    run += ["--seeds", "0"]
    first = gpq(*run, "--name", "my digits", "--out", out)
    assert first.exit_code == 0, first.output
    assert first.stdout == f"{out}: 2 runs made; 0 already done\n"
    assert gpq(*run, "--out", out).stdout == f"{out}: 0 runs made; 2 already done\n"
    page = tmp_path / "page" / "report.md"
    plots = str(tmp_path / "plots")
    wrote = gpq("report", out, "--format", "markdown", "--plots", plots, "--out", str(page))
    assert wrote.exit_code == 0, wrote.output
    text = page.read_text()
    assert "my digits, protocol 1" in text
    assert "(../plots/pr.png)" in text
    assert (tmp_path / "plots" / "pr.png").exists()
    assert text.index("| pq ") < text.index("| itq ")
    assert gpq("report", out).stdout.startswith("Table 2: mAP\n")
    assert len(list((tmp_path / "runs").glob("split_*.json"))) == 1, "both methods share it"
    assert json.loads(gpq("report", out, "--format", "json").stdout)["runs"][0]["method"] == "pq"
    assert gpq("report", out, "--format", "csv").stdout.startswith("method,24,24_deviation,24_n,NN10@100")
    assert r"\toprule" in gpq("report", out, "--format", "latex", "--table", "map").stdout
    again = gpq("report", out, "--out", str(page))
    assert again.exit_code != 0
    assert "exists already" in again.stderr
    other = gpq(*run, "--protocol", "2", "--out", out)
    assert other.exit_code != 0
    assert "protocol 1, not 2: choose another --out" in other.stderr


def test_failed_runs_are_named_and_the_exit_code_is_1(tmp_path: Path) -> None:
    # 100 principal components of 64 pixels there are not.
    pixels = ["--labelled", "20-per-class", "--methods", "itq,pq", "--bits", "12,400", "--seeds", "0"]
    result = gpq("run", "table2", "digits", *pixels, "--out", str(tmp_path / "x"))
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("gpq: ")]
    assert len(lines) == 1
    assert "runs failed: " in lines[0]
    assert "itq_400bits_seed0" in lines[0]
    assert "12bits" not in lines[0]
    report = gpq("report", str(tmp_path / "x"), "--format", "markdown")
    assert "runs are missing" in report.stdout
    assert "itq_400bits_seed0" in report.stdout
