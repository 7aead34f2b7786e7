"""Training by two processes: gradients, the command, and what ends it."""

import json
import os
import time

import numpy as np
import pytest
import torch
import two_processes
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.launch import Launch, launched
from gpq_faiss.training.batches import EpochSampler

STEPS = 60


def arguments(out, *extra):
    settings = {
        "quantizer.codebooks": 3,
        "network.backbone": "mlp",
        "network.hidden": [16],
        "network.noise": 0.1,
        "training.steps": STEPS,
        "training.learning_rate": 0.01,
        "training.batch_labelled": 30,
        "training.batch_unlabelled": 30,
        "training.validation": 0.1,
    }
    options = "digits --preset paper --labelled 30-per-class --device cpu --validate-every 15"
    changes = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    return ["train", *options.split(), *changes, "--out", out, *extra]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Trained by two processes that nothing interrupts; only the first speaks."""
    folder = tmp_path_factory.mktemp("two")
    out = folder / "model"
    first, second = two_processes.start(folder, *arguments(out))
    code, stdout, _ = first.ended()
    assert code == 0
    assert stdout.startswith(f"{out}: 12 bits, 270 labelled and")
    assert second.ended() == (0, "", "")
    return out


def test_gradients_are_averages_over_the_processes():
    torch.multiprocessing.start_processes(
        two_processes.check_group,
        (two_processes.environments(),),
        nprocs=2,
        start_method="forkserver",
    )


def test_two_processes_learn(model):
    totals = [
        json.loads(line)["total"] for line in (model / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(totals) == STEPS / 15
    assert totals[-1] < totals[0]
    assert json.loads((model / "config.json").read_text())["training"]["processes"] == 2


def test_a_killed_process_ends_all_and_resuming_gives_equal_weights(model, tmp_path):
    out = tmp_path / "out" / "model"
    first, second = two_processes.start(tmp_path, *arguments(out, "--checkpoint-seconds", 0))
    while not (tmp_path / "out" / ".model.partial" / "checkpoint.safetensors").exists():
        assert first.is_alive()
        time.sleep(0.01)
    second.kill()
    code, stdout, stderr = first.ended()
    assert (code, stdout) == (1, "")
    assert stderr.endswith("so all end: run the same command with --resume to continue\n")
    assert not out.exists()
    resumed = two_processes.start(tmp_path, *arguments(out, "--resume"))
    assert [command.ended()[0] for command in resumed] == [0, 0]
    assert "resumed at step" in resumed[0].ended()[2]
    assert (out / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert os.listdir(out.parent) == ["model"]


@given(
    n=st.integers(1, 50),
    batch=st.integers(1, 30),
    size=st.integers(1, 5),
    steps=st.integers(1, 8),
    seed=st.integers(0, 9),
)
def test_processes_share_the_passes_of_one(n, batch, size, steps, seed):
    rows = np.arange(100, 100 + n)
    single = EpochSampler(rows, min(batch * size, n), (seed,))
    for step in range(steps):
        parts = [
            EpochSampler(rows, batch, (seed,), rank, size).rows_of_step(step)
            for rank in range(size)
        ]
        assert len({len(share) for share in parts}) == 1
        interleaved = np.stack(parts, axis=1).ravel()
        assert len(interleaved) < len(single.rows_of_step(step)) + size
        np.testing.assert_array_equal(
            interleaved[: len(single.rows_of_step(step))], single.rows_of_step(step)
        )


def test_torchrun_is_detected(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launched() == Launch(0, 1, 0)
    for name, value in two_processes.environments()[1].items():
        monkeypatch.setenv(name, value)
    assert launched() == Launch(1, 2, 1)
