"""The benchmarks: every script starts, and what they compute of their own is that of a plain loop."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpq_faiss.methods.trainable import TrainingBatch

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_how_to_call_it(load, name, monkeypatch, capsys):
    if name == "ray_kills":
        pytest.importorskip("ray")
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        load(name).main()
    assert f"python benchmarks/{name}.py" in capsys.readouterr().out


def test_probabilities_are_ranked_by_the_chance_of_one_class(load):
    rng = np.random.default_rng(0)
    x, xq = (rng.dirichlet(np.ones(7), n).astype(np.float32) for n in (50, 4))
    coder = load("images").ProbabilityCoder(7)
    codes = coder.encode(x)
    assert codes.shape == (50, coder.code_size)
    np.testing.assert_allclose(coder.score(xq, codes), xq @ x.T, rtol=1e-5)


def test_the_classifier_learns_the_shares_of_the_labels(load):
    images = load("images")
    torch.manual_seed(0)
    method = images.SupervisedClassifier(images.ClassNetwork(torch.nn.Linear(5, 3)), 3)
    x = torch.randn(6, 5)
    y = torch.tensor([[1.0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 1], [0, 1, 0], [1, 0, 1]])
    p = method.exported()(x).detach()
    torch.testing.assert_close(p.sum(dim=1), torch.ones(6))
    naive = -sum(float(y[i, c] / y[i].sum()) * float(p[i, c].log()) for i in range(6) for c in range(3)) / 6
    loss = method.losses(TrainingBatch(x, y, 0, 1, torch.Generator()), amp=False)["total"]
    assert float(loss.detach()) == pytest.approx(naive, rel=1e-5)
