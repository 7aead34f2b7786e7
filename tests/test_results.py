"""Figures: those of README and docs are in the committed files that they name, and short trainings
of the presets rank as before.
"""

import re
from functools import cache
from pathlib import Path

import pytest

from gpq_faiss import evaluate, train
from gpq_faiss.config import preset
from gpq_faiss.data.open import open_data

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

PAPER_LOSSES = "gpq (preset paper, network and training of the others)"

# Row of a table in README or docs -> row of the results file, where they differ.
ROWS = {
    "class-posterior codes, the default": "posterior",
    "– all bits for the class": "posterior (all codebooks for the class)",
    "DTQ, learning rate 2e-3": "dtq (learning rate 2e-3)",
    "SDH": "sdh",
    "GPQ, the paper's losses with the network and training of the others": PAPER_LOSSES,
    "GPQ, the paper's losses, network of the others": PAPER_LOSSES,
    "GPQ, preset `paper`": "gpq (preset paper)",
    "OPQ": "opq",
    "*exact float features*": "float",
    "*classifier; six of them: class probabilities, no code*": "classifier; classifier-6",
    "`posterior.unseen_classes` = true": "posterior",
    "the default, nothing propagated": "posterior (preset recommended, nothing propagated)",
}
MAIN, FEW, ALL = "default-cifar10", "default-cifar10-few", "table2"


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


def committed(name, row, column):
    """The figure of a row of a file's first table, without its deviation."""
    return next(cells for cells in tables(name)[0] if cells[""] == row)[column].split(" ± ")[0]


def table_under(page, first):
    """Cells of the rows of the table of a page whose head begins with ``first``, without head and
    rule.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = text[text.index(f"\n{first}") + 1 :].splitlines()
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def check(location, shown, file, rows, column):
    """Assert that a cell ("0.681", or several with semicolons) holds the committed figures, as far
    as it has figures.
    """
    for text, row in zip(shown.split("; "), rows.split("; "), strict=False):
        if text and text != "–":
            value = float(committed(file, row, column))
            # Some figures were rounded from the four digits of the files.
            assert float(text) == pytest.approx(value, abs=0.00056), (
                f"{location}: {file}, {row}, {column}"
            )


@pytest.mark.parametrize(
    ("page", "head", "files"),
    [
        ("docs/results.md", "| | 12 bits | 24 |", f"{MAIN} 12 24 48 NN10@100"),
        (
            "docs/results.md",
            "| | CIFAR-10, 12 bits |",
            "unseen-classes 12 48, default-transfer 12 48",
        ),
        (
            "docs/recommended.md",
            "| | 12 bits |",
            "default-ablation 12 48 NN10@100, default-ablation-few 48, "
            "default-ablation-omniglot 12 48",
        ),
    ],
)
def test_rows_have_the_committed_figures(page, head, files):
    """``files``: those of the columns of the page, each with its own columns."""
    columns = [
        (file, column) for file, *names in map(str.split, files.split(", ")) for column in names
    ]
    rows = table_under(page, head)
    assert len(rows) >= 4
    for label, *cells in rows:
        row = ROWS.get(label, label)
        for text, (of, column) in zip(cells, columns, strict=True):
            # Rows without NN10@100 are of another file.
            file = ALL if of == MAIN and not cells[3] else of
            check(f"{page}: {label}", text, file, row, column)


def test_readme_has_the_committed_figures():
    rows = {row[0]: row[1:] for row in table_under("README.md", "| mAP on CIFAR-10 (JPEG)")}
    tuned = [row["mAP"] for row in tables("finetune")[0] if row[""] == "default"]
    codecs = {(row[""], row["bits an item"]): row["mAP"] for row in tables("faiss-codecs")[0]}
    named = {
        "**embeddings** of the same network, not fine-tuned": [
            ("default", "12"),
            ("default", "48"),
        ],
        "OPQ of these embeddings": [("opq", "12"), ("opq", "48")],
        "residual quantiser of these embeddings (RQ2x6, RQ6x8)": [
            ("faiss:RQ2x6", "16"),
            ("faiss:RQ6x8", "48"),
        ],
        "*the float embeddings themselves, 8,192 bits*": [("float", "–"), ("float", "–")],
    }
    expected = {
        label: [codecs[key].split(" ± ")[0] for key in keys] for label, keys in named.items()
    }
    expected["**images**: a pretrained network, fine-tuned"] = tuned
    assert {label: [cell.strip("*") for cell in cells] for label, cells in rows.items()} == expected


def test_the_default_has_the_committed_figures():
    rows = table_under("docs/results.md", "| data | 12 bits |")
    assert len(rows) == 6
    names, columns = (
        ["posterior"] * 4 + ["classifier", "classifier-6"],
        ["12", "24", "48", "NN10@100", "48", "48"],
    )
    for label, *cells in rows:
        (file,) = re.findall(r"results/([\w-]+)\.md", label)
        labels = re.findall(r"\((\d+)\)", label)[
            -1
        ]  # scenes have one table for both numbers of labels
        figures = {
            row[""].removesuffix(" (no code)"): row
            for row in tables(file)[0]
            if row.get("labels seen", labels) == labels
        }
        for text, name, column in zip(cells, names, columns, strict=True):
            if text:
                assert float(text) == pytest.approx(
                    float(figures[name][column].split()[0]), abs=0.00056
                ), label


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


def test_searches_have_the_committed_figures():
    """Of single queries on one thread, k = 10."""
    text = (RESULTS / "search.md").read_text(encoding="utf-8")
    for label, items, *cells in table_under("docs/results.md", "| codes, bits | items |"):
        name, bits = label.split(", ")
        group = text.split(f"## {name} codes, {bits} bits, {items} items")[1].split("\n## ")[0]
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in group.splitlines()]
        lists, fast = (
            next(line[4:] for line in lines if line[:4] == ["10", "1", "1", way])
            for way in ("lists", "FastScan")
        )
        assert cells == [lists[0], fast[0], fast[2]], label
    sizes = {row[""]: row for row in tables("large")[0]}
    rows = table_under("docs/results.md", "| items | mapped |")
    assert [row[0] for row in rows] == list(sizes)
    for items, mapped, fast, recall, opening, build, size in rows:
        row = sizes[items]
        assert row["warm queries"].startswith(f"{mapped} /")
        assert row["FastScan"].split(" / ")[0] == fast
        assert row["recall"] == recall
        assert row["open"] == f"{opening} s"
        assert row["build"] == f"{build} s"
        assert row["bytes an item"] == size


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
