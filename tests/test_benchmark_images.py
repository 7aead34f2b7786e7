"""What benchmarks/images.py has of its own: the classifier beside the grid's methods, and the clock."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from gpq_faiss.config import preset
from gpq_faiss.experiment.grid import method_config, read_grid
from gpq_faiss.methods.coders import fill
from gpq_faiss.methods.trainable import TrainingBatch

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def images() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("images")


def test_the_committed_table_is_that_of_the_committed_figures(images: Any) -> None:
    results = ROOT / "benchmarks" / "results" / "cifar10-images.json"
    found = json.loads(results.read_text(encoding="utf-8"))
    assert images.markdown(found) == results.with_suffix(".md").read_text(encoding="utf-8")


def probabilities(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(7), n).astype(np.float32)


def test_probabilities_are_kept_whole_and_ranked_by_the_chance_of_one_class(images: Any) -> None:
    coder = images.ProbabilityCoder(7)
    x, xq = probabilities(50, 0), probabilities(4, 1)
    codes = coder.encode(x)
    assert codes.shape == (50, coder.code_size)
    assert codes.dtype == np.uint8
    expected = np.array([[sum(float(q[c]) * float(p[c]) for c in range(7)) for p in x] for q in xq])
    np.testing.assert_allclose(coder.score(xq, codes), expected, rtol=1e-5)
    index = coder.index()
    assert isinstance(index, faiss.IndexFlatIP)
    found = fill(index, codes).search(coder.search_input(xq), 50)[0]
    np.testing.assert_allclose(found, -np.sort(-expected, axis=1), rtol=1e-5)


def test_the_classifier_learns_the_shares_of_the_labels(images: Any) -> None:
    torch.manual_seed(0)
    method = images.SupervisedClassifier(images.ClassNetwork(torch.nn.Linear(5, 3)), 3)
    x, y = (
        torch.randn(6, 5),
        torch.tensor([[1.0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 1], [0, 1, 0], [1, 0, 1]]),
    )
    p = method.exported()(x).detach()
    torch.testing.assert_close(p.sum(dim=1), torch.ones(6))
    naive = -sum(float(y[i, c] / y[i].sum()) * float(p[i, c].log()) for i in range(6) for c in range(3)) / 6
    generator = torch.Generator().manual_seed(0)
    loss = method.losses(TrainingBatch(x, y, 0, 1, generator), amp=False)["total"]
    assert float(loss.detach()) == pytest.approx(naive, rel=1e-5)


def test_time_before_a_kill_counts_once(images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 107.0, 115.0, 3.0, 4.0, 9.0])
    monkeypatch.setattr(images.time, "process_time", lambda: next(now))
    first = images.Clock(tmp_path / "clock.jsonl")
    first.tick(10, 100, {})
    first.tick(20, 100, {})
    # The checkpoint is of step 15: ticks 16 to 20 are made again, and their time counts from step 10's.
    again = images.Clock(tmp_path / "clock.jsonl")
    again.tick(16, 100, {})
    again.tick(20, 100, {})
    assert [(line["step"], line["cpu_seconds"]) for line in again.read()] == [(10, 7.0), (20, 12.0)]


def test_all_methods_of_the_grid_have_one_budget(images: Any) -> None:
    grid = read_grid(images.GRID)
    found = set()
    for variation in grid.variations:
        for method in grid.methods_of(variation):
            config = method_config(grid, variation, method, perceptron=False, base=preset(grid.preset))
            t = config.training
            found.add((t.steps, t.batch_labelled, t.batch_unlabelled, t.validation, config.network.backbone))
            assert variation.database == grid.variations[0].database
    assert len(found) == 1
    assert {v.preset or grid.preset for v in grid.variations} == {"recommended", "paper"}
