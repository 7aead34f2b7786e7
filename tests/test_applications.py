"""The page of applications: its lines run, and return the results of this package."""

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gpq_cli.main import cli
from model_factory import make_model

import gpq_faiss as gpq

PAGE = (Path(__file__).parent.parent / "docs" / "applications.md").read_text()
TITLE, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)


def run(section, names):
    """Run the examples of a section in order, and add its variables to ``names``."""
    examples = re.findall(r"^```(console|python)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert examples
    for language, text in examples:
        if language == "python":
            exec(compile(text, "docs/applications.md", "exec"), names)  # noqa: S102
            continue
        for line in text.splitlines():
            result = CliRunner().invoke(cli, ["-q", *line.partition("#")[0].split()[1:]])
            assert result.exit_code == 0, result.output


@pytest.fixture
def names(tmp_path, monkeypatch):
    """The variables that all sections share, in a folder with the indexes."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.save("items.npy", rng.standard_normal((120, 16)).astype(np.float32))
    np.save("queries.npy", rng.standard_normal((4, 16)).astype(np.float32))
    make_model("model", width=16, networks=1)
    names = {}
    run(TITLE, names)
    return names


def play(title, names):
    (section,) = (section for section in SECTIONS if section.startswith(f"{title}\n"))
    run(section, names)


def best(names, row=0, k=5):
    """Return scores and ids of the best results of a query."""
    D, ids = gpq.open_index("index.faiss").search(names["xq"][row : row + 1], k)
    return D[0].tolist(), ids[0].tolist()


def same_scores(scores, expected):
    assert scores == pytest.approx(expected, rel=1e-5)


def test_langchain(names):
    pytest.importorskip("langchain_community", reason="needs langchain-community")
    play("LangChain", names)
    scores, ids = best(names)
    same_scores([score for _, score in names["best"]], scores)
    texts = {d.page_content for d, score in names["best"] if score == names["best"][0][1]}
    assert f"text of document {ids[0]}" in texts
    same_scores(
        [score for _, score in names["good"]], [score for score in scores if score >= scores[2]]
    )
    store = names["store"]
    assert store.index.ntotal == 120
    texts = [d.page_content for d, _ in store.similarity_search_with_score("a new text", k=120)]
    assert "text of document 3" not in texts
    assert "a new text" in texts


def test_llama_index(names):
    pytest.importorskip("llama_index.vector_stores.faiss", reason="needs llama-index")
    play("LlamaIndex", names)
    same_scores(names["result"].similarities, best(names)[0])
    assert names["store"].client.ntotal == 121
    assert Path("vectors.faiss").exists()
    same_scores(names["removable"].query(names["query"]).similarities[:1], best(names)[0][:1])
    assert names["removable"].client.ntotal == 119


def test_datasets(names):
    pytest.importorskip("datasets", reason="needs datasets")
    play("Hugging Face datasets", names)
    same_scores(names["scores"], best(names)[0])
    added, _ = names["table"].get_nearest_examples("vector", names["xq"][0], k=5)
    same_scores(added, best(names)[0])


def test_txtai(names):
    pytest.importorskip("txtai", reason="needs txtai")
    play("txtai", names)
    scores, _ = best(names)
    factors = np.array(scores) / [score for _, score in names["best"]]
    np.testing.assert_allclose(factors, factors[0], rtol=1e-5)
    assert names["search"].ann.count() == 120


def test_autofaiss(names):
    pytest.importorskip("autofaiss", reason="needs autofaiss")
    play("autofaiss", names)
    assert 0 < names["metrics"]["20-recall@20"] <= 1


def test_pytorch_metric_learning(names):
    pytest.importorskip("pytorch_metric_learning", reason="needs pytorch-metric-learning")
    play("pytorch-metric-learning", names)
    for row in range(4):
        same_scores(names["scores"][row].tolist(), best(names, row)[0])


def test_onnxruntime(names):
    pytest.importorskip("onnxscript", reason="needs onnxscript")
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    play("onnxruntime", names)
    for row in range(4):
        assert names["scores"][row].tolist() == pytest.approx(best(names, row)[0], abs=1e-4)
