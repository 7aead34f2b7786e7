"""The notebooks run from top to bottom, keep their promises, and the files in the repository are those of the scripts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

for name in ("jupytext", "nbclient", "nbformat", "ipykernel", "onnxruntime"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'gpq-faiss[dev]'")

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
BY_NAME = {script.stem: script for script in SCRIPTS}


def load_build() -> Any:
    spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


def table(book: Any, column: str) -> dict[str, dict[str, str]]:
    """The Markdown table with ``column`` in its head: first cell of a row -> column -> text."""
    for cell in book.cells:
        for output in cell.get("outputs", []):
            lines = output.get("data", {}).get("text/markdown", "").strip().splitlines()
            rows = [[text.strip() for text in line.strip("|").split("|")] for line in lines]
            if rows and column in rows[0]:
                return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    raise AssertionError(f"no table with {column}")


def printed(book: Any) -> str:
    return "".join(build.output_texts(book))


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """One for all notebooks: torch is loaded once."""
    with build.started_kernel() as started:
        yield started


def run(script: Path, folder: Path, kernel: Any) -> Any:
    """Execute a script's notebook; a failing cell raises with its traceback."""
    book = build.execute(build.read_script(script), folder, kernel)
    assert build.faults(book, build.read_script(script)) == []
    return book


def test_there_are_notebooks() -> None:
    assert {
        "01_from_images_to_faiss",
        "02_your_embeddings",
        "03_paper_tables",
        "04_large_scale_search",
        "05_likeness_and_class",
    } <= set(BY_NAME)
    assert build.scripts() == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_file_in_the_repository_is_the_script_executed(script: Path) -> None:
    assert build.check(script) == []
    assert any(cell.get("outputs") for cell in build.nbformat.read(script.with_suffix(".ipynb"), 4).cells)


@pytest.mark.slow
@pytest.mark.notebook
def test_images_to_faiss(tmp_path: Path, kernel: Any) -> None:
    book = run(SCRIPTS[0], tmp_path, kernel)
    made = tmp_path / "run-01"
    index: Any = faiss.read_index(str(made / "index.faiss"))
    assert index.ntotal == 1797
    assert faiss.downcast_index(index.index).sa_code_size() == 6
    assert faiss.read_index(str(made / "empty.faiss")).ntotal == 0
    assert (made / "gallery.png").read_bytes()[:4] == b"\x89PNG"
    assert (made / "encoder.onnx").stat().st_size > 1000
    assert any("image/png" in o.get("data", {}) for cell in book.cells for o in cell.get("outputs", []))
    assert "torch is loaded: False" in printed(book)
    # What the text says of the figures.
    found = {name: float(row["mAP"]) for name, row in table(book, "mAP").items()}
    assert set(found) == {"posterior", "pq", "opq", "itq", "float"}
    assert found["posterior"] > 0.85
    assert found["posterior"] > 0.1 + max(found["pq"], found["opq"], found["itq"], found["float"])


@pytest.mark.slow
@pytest.mark.notebook
def test_your_embeddings(tmp_path: Path, kernel: Any) -> None:
    book = run(SCRIPTS[1], tmp_path, kernel)
    made = tmp_path / "run-02"
    known = np.load(made / "labels.npy")
    assert np.bincount(known + 1).tolist() == [len(known) - 200, *[20] * 10]
    assert faiss.read_index(str(made / "after.faiss")).ntotal == len(known)
    rows = table(book, "P@100")
    before, after, exact = (
        rows[name] for name in ("before: PQ", "after: our codes", "exact search, embeddings")
    )
    assert before["bytes per item"] == after["bytes per item"] == "6"
    assert float(after["P@100"]) > 0.05 + max(float(before["P@100"]), float(exact["P@100"]))
    assert float(after["P@10"]) > 0.85
    assert (made / "gain-and-loss.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.notebook
def test_paper_tables(tmp_path: Path, kernel: Any) -> None:
    book = run(BY_NAME["03_paper_tables"], tmp_path, kernel)
    made = tmp_path / "run-03"
    assert len(list((made / "table2").glob("*.h5"))) == 13
    assert (made / "plots" / "voronoi.png").read_bytes()[:4] == b"\x89PNG"
    assert "13 runs made, 0 failed" in printed(book)
    assert "0 runs made, 13 already done" in printed(book)
    found = {name: float(row["24"]) for name, row in table(book, "24").items()}
    # What the text of the paper is about: labels of a few items are worth more than any code without them.
    for name in ("posterior", "gpq"):
        assert found[name] > 0.1 + max(found["opq"], found["pq"], found["itq"])
    ids = [
        line.split(":")[1].strip()
        for line in printed(book).splitlines()
        if line.startswith(("by Faiss", "in the file"))
    ]
    assert len(ids) == 2
    assert all(text.count(",") == 4 for text in ids)


@pytest.mark.slow
@pytest.mark.notebook
def test_large_scale_search(tmp_path: Path, kernel: Any) -> None:
    book = run(BY_NAME["04_large_scale_search"], tmp_path, kernel)
    made = tmp_path / "run-04"
    for name in ("lists", "merged"):
        assert faiss.read_index(str(made / f"{name}.faiss")).ntotal == 60_000
    text = printed(book)
    for promise in (
        "that in memory: True",
        "ids alone: True",
        "1,000 alone: True",
        "result: True",
        "answer: True",
    ):
        assert promise in text
    rows = list(table(book, "recall@10").values())
    assert len(rows) == 7
    assert float(rows[-1]["recall@10"]) == float(rows[-1]["proven"]) == 1  # all lists: exact
    assert all(float(row["proven"]) <= float(row["recall@10"]) for row in rows)
    assert (made / "lists.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.notebook
def test_likeness_and_class(tmp_path: Path, kernel: Any) -> None:
    book = run(BY_NAME["05_likeness_and_class"], tmp_path, kernel)
    rows = table(book, "NN10@100")
    first, *_, last = (rows[f"feature_weight {weight}"] for weight in ("0.0", "0.02", "0.1", "0.5"))
    # The two ends: one has the class and no likeness, the other the likeness of PQ at more mAP than the features themselves.
    assert float(first["mAP"]) > 0.1 + float(last["mAP"])
    assert float(last["NN10@100"]) > 0.1 + float(first["NN10@100"])
    assert float(last["mAP"]) > float(rows["exact search, no code"]["mAP"])
    for name in ("frontier", "gallery-0.0", "gallery-0.5"):
        assert (tmp_path / "run-05" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


SCRIPT = """\
# %% [markdown]
# # Title

# %%
print("a"); print("b")

# %%
print("a"); print("b")
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    script = tmp_path / "03_small.py"
    script.write_text(SCRIPT)
    return script


def test_a_build_is_reproducible_and_in_step(small: Path, kernel: Any) -> None:
    assert build.check(small) == ["it is missing"]
    assert build.build(small, kernel) == []
    first = small.with_suffix(".ipynb").read_bytes()
    assert build.check(small) == []
    assert build.build(small, kernel) == []
    assert small.with_suffix(".ipynb").read_bytes() == first
    book = build.nbformat.read(small.with_suffix(".ipynb"), 4)
    build.nbformat.validate(book)
    assert [output.text for output in book.cells[1].outputs] == ["a\nb\n"]
    small.write_text(SCRIPT.replace("Title", "Other title"))
    assert build.check(small) == ["its cells are not those of the script"]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("1 / 0", "a cell failed"),
        (
            "import os; print(os.sep + 'home/someone/x')",
            "an output holds a path of one machine: /home/someone",
        ),
        ("import sys; print('oh', file=sys.stderr)", "something was written to stderr"),
    ],
)
def test_what_should_not_be_published_is_not_written(small: Path, kernel: Any, code: str, fault: str) -> None:
    small.write_text(f"# %%\n{code}\n")
    (found,) = build.build(small, kernel)
    assert found.startswith(fault)
    assert not small.with_suffix(".ipynb").exists()
