"""``gpq experiment`` on the command line: run and report."""

from commands import done


def test_runs_are_made_once_and_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = (
        "experiment run table2 digits --labelled 20-per-class --methods itq,pq --seeds 0 --out out"
    )
    assert done(f"{run} --bits 24") == "out: 2 runs made; 0 already done\n"
    assert done(f"{run} --bits 24") == "out: 0 runs made; 2 already done\n"
    done("experiment report out --format markdown --plots plots --out page/report.md")
    text = (tmp_path / "page/report.md").read_text()
    assert "digits, protocol 1" in text
    assert "(../plots/pr.png)" in text
    assert (tmp_path / "plots/pr.png").exists()
    assert done("experiment report out").startswith("Table 2: mAP\n")
