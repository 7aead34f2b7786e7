"""A student: methods compared on the same splits, as a table for the thesis and a page with pictures."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np
import pytest
from commands import done, refused

GRID = """
title = "What the entropy is worth"
kind = "ablation"
methods = ["gpq", "pqn", "pq", "itq"]
bits = [24]
seeds = [0, 1]
labelled = "20-per-class"
queries = "20-per-class"
preset = "paper"

[config.training]
steps = 20
batch_labelled = 64
batch_unlabelled = 64

[[variation]]

[[variation]]
name = "no entropy"
methods = ["gpq"]
[variation.config.loss]
lambda2 = 0.0
"""


@pytest.fixture
def thesis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder with embeddings of 3,000 items of eight classes, and a grid."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    y = rng.integers(0, 8, 3000)
    x = 0.5 * rng.normal(size=(8, 64))[y] + rng.normal(size=(3000, 64))
    np.save("clip.npy", x.astype(np.float32))
    np.save("labels.npy", y)
    Path("mine.toml").write_text(GRID)
    return tmp_path


def test_methods_are_compared_on_the_same_splits(thesis: Path) -> None:
    assert "pqn" in done("experiment methods")
    Path("first.toml").write_text(GRID.replace("[24]", "24"))
    data = "features:clip.npy --labels labels.npy"
    assert "bits = 24: input should be a valid array" in refused(
        f"experiment run first.toml {data} --out runs", code=2
    )
    done(f"experiment run mine.toml {data} --out runs")
    assert len(list(Path("runs").glob("split_*.json"))) == 2, "a split for each seed, which all methods share"

    text = done("experiment report runs --format csv --table map")
    rows = list(csv.reader(io.StringIO(text)))
    figures = {
        tuple(row): [float(cell.split("±")[0]) for cell in row if cell[:2] == "0."] for row in rows[1:]
    }
    best = {row[0]: max(values) for row, values in figures.items() if values}
    assert len(best) >= 4
    table = done("experiment report runs --format latex --table map")
    assert "\\\\begin{tabular}" in table.replace("\\", "\\\\")
    done("experiment report runs --format markdown --plots plots --out report.md")
    page = Path("report.md").read_text()
    assert "no entropy" in page
    assert all(Path(picture).exists() for picture in re.findall(r"!\[.*\]\((.*)\)", page))

    # Made again, nothing is trained: the runs are there. A mistake in the grid is told before anything runs.
    assert ": 0 runs made; 10 already done" in done(f"experiment run mine.toml {data} --out runs")
    Path("wrong.toml").write_text(GRID.replace("lambda2", "lamda2"))
    assert "lamda2" in refused("experiment run wrong.toml {data} --out other", code=2)
    assert not (thesis / "other").exists()
