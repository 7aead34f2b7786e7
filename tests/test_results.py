"""Figures: those of README and docs are in the committed files that they name, and short trainings
of the presets rank as before.
"""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gpq_faiss import evaluate, train
from gpq_faiss.config import preset
from gpq_faiss.data.open import open_data

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@cache
def tables(name):
    """The tables of a results file: rows of column -> cell; the first column is "" and has no sizes
    of codes.
    """
    parsed = []
    head = []
    for line in (RESULTS / f"{name}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = ["", *cells[1:]]
            parsed.append([])
        elif not set(line) <= set("|-: "):
            cells[0] = re.sub(r" \([\d,]+ bits (an|per) item\)", "", cells[0])
            parsed[-1].append(dict(zip(head, cells, strict=True)))
    return parsed


def table_under(page, first):
    """Cells of the rows of the table of a page whose head begins with ``first``, without head and
    rule.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = text[text.index(f"\n{first}") + 1 :].splitlines()
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_readme_has_the_committed_figures():
    rows = {row[0]: row[1:] for row in table_under("README.md", "| mAP on CIFAR-10 (JPEG)")}
    rows_of_default = [row for row in tables("finetune")[0] if row[""] == "default"]
    tuned = [
        [float(row["mAP"]) for row in rows_of_default if (row["pixels"], row["bits"]) == key]
        for key in (("128", "12"), ("128", "48"))
    ]
    codecs = {(row[""], row["bits an item"]): row["mAP"] for row in tables("faiss-codecs")[0]}
    named = {
        "**embeddings** of the same network, not fine-tuned": [
            ("default", "12"),
            ("default", "48"),
        ],
        "OPQ of these embeddings": [("opq", "12"), ("opq", "48")],
        "residual quantiser of these embeddings (RQ2x6, stored as 16 bits; RQ6x8)": [
            ("faiss:RQ2x6", "16"),
            ("faiss:RQ6x8", "48"),
        ],
        "*the float embeddings themselves, 8,192 bits*": [("float", "–"), ("float", "–")],
    }
    expected = {
        label: [codecs[key].split(" ± ")[0] for key in keys] for label, keys in named.items()
    }
    expected["**images**: a pretrained network, fine-tuned"] = [
        f"{np.mean(values):.3f}" for values in tuned
    ]
    assert {label: [cell.strip("*") for cell in cells] for label, cells in rows.items()} == expected


@pytest.mark.parametrize("page", ["docs/results.md", "docs/recommended.md"])
def test_every_figure_stands_in_a_file_that_its_section_names(page):
    """Figures with a decimal point, in tables and in sentences, rounded as they are shown there."""
    for section in re.split(r"^## ", (ROOT / page).read_text(encoding="utf-8"), flags=re.M):
        files = re.findall(r"results/([\w-]+)\.md", section)
        text = "".join((RESULTS / f"{file}.md").read_text(encoding="utf-8") for file in files)
        numbers = [
            float(number.replace(",", "")) for number in re.findall(r"[\d,]*\d(?:\.\d+)?", text)
        ]
        if not files:
            continue
        for shown in re.findall(
            r"(?<![\w.,-])[\d,]*\d\.\d+(?![\w.])", re.sub(r"`[^`]*`", "", section)
        ):
            digits = len(shown.split(".")[1])
            figure = float(shown.replace(",", ""))
            near = [value for value in numbers if abs(figure - value) < 0.56 * 10**-digits]
            assert near, f"{section[:40]}: {shown}"


def test_the_sizes_of_the_installations_are_the_committed_ones():
    sizes = {row[""]: row["site-packages"] for row in tables("install")[0]}
    search, train_size = sizes["`search`"], sizes["`train`"]
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/install.md"))
    assert f"[{search} in place of {train_size.removesuffix(' MB')}]" in readme
    assert f"`train` takes {train_size}" in page
    assert f"`search` {search}" in page


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "recommended",
            {"posterior": {"networks": 2}, "network": {"hidden": [128]}, "training": {"steps": 60}},
            0.873,
        ),
        ("paper", {"training": {"steps": 150}}, 0.481),
    ],
)
def test_short_trainings_of_the_presets_rank_as_before(tmp_path, name, changes, expected):
    """On digits, 20 labels per class, 12 bits: cheaper than the presets, but by the same code."""
    config = preset(name).with_settings({"quantizer": {"codebooks": 3}}).with_settings(changes)
    train(open_data("digits"), tmp_path / "model", config=config, labelled="20-per-class")
    assert evaluate(tmp_path / "model", open_data("digits")).ranking.map == pytest.approx(
        expected, abs=0.02
    )
