"""The notebooks run from top to bottom, keep their promises, and the files in the repository are
those of the scripts.
"""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import pytest

for name in ("jupytext", "nbclient", "nbformat", "ipykernel", "onnxruntime"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'gpq-faiss[dev]'")

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))


spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


@pytest.fixture(scope="module")
def kernel():
    """One for all notebooks: torch is loaded once."""
    with build.started_kernel() as started:
        yield started


class Run(NamedTuple):
    """An executed notebook, the folder that it made, and what it printed."""

    book: Any
    folder: Path
    printed: str

    def table(self, column):
        """The Markdown table with ``column`` in its head: first cell of a row -> column -> text."""
        for cell in self.book.cells:
            for output in cell.get("outputs", []):
                lines = output.get("data", {}).get("text/markdown", "").splitlines()
                table = [line.strip("|") for line in lines if line.startswith("|")]
                rows = [[text.strip() for text in line.split("|")] for line in table]
                if rows and column in rows[0]:
                    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
        raise AssertionError(f"no table with {column}")

    def column(self, name):
        return {row: float(cells[name]) for row, cells in self.table(name).items()}


@pytest.fixture
def notebook(request, tmp_path, kernel):
    """The notebook of the number in the test's name; a failing cell raises with its traceback."""
    number = request.node.name[5:7]
    (script,) = FOLDER.glob(f"{number}_*.py")
    book = build.execute(build.read_script(script), tmp_path, kernel)
    assert build.faults(book, build.read_script(script)) == []
    return Run(book, tmp_path / f"run-{number}", "".join(build.output_texts(book)))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_file_in_the_repository_is_the_script_executed(script):
    assert build.scripts() == SCRIPTS
    assert build.check(script) == []
    assert any(
        cell.get("outputs") for cell in build.nbformat.read(script.with_suffix(".ipynb"), 4).cells
    )


def executed(test):
    return pytest.mark.slow(pytest.mark.notebook(test))


@executed
def test_01_from_images_to_faiss(notebook):
    index = faiss.read_index(str(notebook.folder / "index.faiss"))
    assert index.ntotal == 1797
    assert faiss.downcast_index(index.index).sa_code_size() == 6
    assert "torch is loaded: False" in notebook.printed
    # What the text says of the figures.
    scores = notebook.column("mAP")
    assert scores["posterior"] > max(
        0.85, 0.1 + max(scores[name] for name in scores if name != "posterior")
    )


@executed
def test_02_your_embeddings(notebook):
    labels = np.load(notebook.folder / "labels.npy")
    assert np.bincount(labels + 1).tolist() == [len(labels) - 200, *[20] * 10]
    before, after, exact = "before: PQ", "after: our codes", "exact search, embeddings"
    at_10, at_100 = notebook.column("P@10"), notebook.column("P@100")
    assert at_100[after] > 0.05 + max(at_100[before], at_100[exact])
    assert at_10[after] > 0.85


@executed
def test_03_paper_tables(notebook):
    assert len(list((notebook.folder / "table2").glob("*.h5"))) == 13
    assert "13 runs made, 0 failed" in notebook.printed
    assert "0 runs made, 13 already done" in notebook.printed
    # What the text of the paper is about: labels of a few items are worth more than any code
    # without them.
    scores = notebook.column("24")
    for name in ("posterior", "gpq"):
        assert scores[name] > 0.1 + max(scores["opq"], scores["pq"], scores["itq"])


@executed
def test_04_large_scale_search(notebook):
    assert faiss.read_index(str(notebook.folder / "index.faiss")).ntotal == 60_000
    for promise in (
        "equal those in memory",
        "only even ids",
        "without any query's first result",
        "the same results",
    ):
        assert f"{promise}: True" in notebook.printed
    recalls = list(notebook.column("recall@10").values())
    assert recalls == [1, 1], "both scan or bound every item"


@executed
def test_05_likeness_and_class(notebook):
    ranked, alike = notebook.column("mAP"), notebook.column("NN10@100")
    first, last = "feature_weight 0.0", "feature_weight 0.5"
    # The two ends: one has the class and no likeness, the other the likeness of PQ at more mAP than
    # the features themselves.
    assert ranked[first] > 0.1 + ranked[last]
    assert alike[last] > 0.1 + alike[first]
    assert ranked[last] > ranked["exact search, no code"]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("1 / 0", "a cell failed"),
        ("import os; print(os.sep + 'home/a/x')", "an output holds a path of one machine: /home/a"),
        ("import sys; print('oh', file=sys.stderr)", "something was written to stderr"),
    ],
)
def test_what_should_not_be_published_is_not_written(tmp_path, kernel, code, fault):
    small = tmp_path / "03_small.py"
    small.write_text(f"# %%\n{code}\n")
    assert build.build(small, kernel)[0].startswith(fault)
    assert not small.with_suffix(".ipynb").exists()
