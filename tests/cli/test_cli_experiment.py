"""``gpq experiment`` on the command line: methods, run, report, and what it says when something
cannot be.
"""

import json

from commands import done, gpq, only_line, refused

from gpq_faiss.methods.registry import METHODS


def test_methods_are_listed_in_the_order_of_the_tables():
    lines = done("experiment methods").splitlines()[2:]
    listed = json.loads(done("experiment methods --format json"))
    assert [line.split()[0] for line in lines] == [row["method"] for row in listed] == list(METHODS) == [
        "gpq", "gpq-f", "gpq-h", "gpq-t", "posterior", "ssgah", "bgdh", "ssdh", "pqn", "dtq", "dqn", "subic", "ninh", "cnnh", "lopq", "opq",
        "pq", "sdh", "itq", "sh", "float", "classifier", "classifier-6",
    ]  # fmt: skip
    of = {row["method"]: row for row in listed}
    assert of["gpq"]["learns"] == of["ssdh"]["learns"] == "semi-supervised"
    assert of["pqn"]["learns"] == of["sdh"]["learns"] == "supervised"
    assert of["itq"]["code"] == of["ninh"]["code"] == "binary"
    assert (of["dtq"]["network"], of["lopq"]["network"]) == ("trained", "none")
    assert all(row["what it is"] and row["from"] for row in listed)


def test_a_run_and_its_reports(tmp_path):
    out, page = tmp_path / "runs", tmp_path / "page" / "report.md"
    run = f"experiment run table2 digits --labelled 20-per-class --methods itq,pq --bits 24 --seeds 0 --out {out}"
    assert done(run) == f"{out}: 2 runs made; 0 already done\n"
    assert done(run) == f"{out}: 0 runs made; 2 already done\n"
    assert len(list(out.glob("split_*.json"))) == 1, "both methods share it"
    report = f"experiment report {out}"
    done(f"{report} --format markdown --plots {tmp_path}/plots --out {page}")
    text = page.read_text()
    assert "digits, protocol 1" in text
    assert "(../plots/pr.png)" in text
    assert (tmp_path / "plots" / "pr.png").exists()
    assert text.index("| pq ") < text.index("| itq ")
    assert done(report).startswith("Table 2: mAP\n")
    assert json.loads(done(f"{report} --format json"))["runs"][0]["method"] == "pq"
    assert done(f"{report} --format csv").startswith("method,24,24_deviation,24_n,P@1")
    assert r"\toprule" in done(f"{report} --format latex --table map")
    assert "exists already" in refused(f"{report} --out {page}")
    assert "protocol 1, not 2: choose another --out" in refused(f"{run} --protocol 2")
    # 100 principal components of 64 pixels there are not: the others are made, and the exit code is
    # 1.
    result = gpq(run.replace("--bits 24", "--bits 24,400"))
    assert result.exit_code == 1
    line = only_line(result.stderr.splitlines()[-1])
    assert "runs failed: " in line
    assert "itq_400bits_seed0" in line
    assert "24bits" not in line
    said = done(f"{report} --format markdown")
    assert "runs are missing" in said
    assert "itq_400bits_seed0" in said
