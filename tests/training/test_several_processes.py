"""Training by two processes: gradients, the command, and what ends it."""

import json
import os
import signal
import time

import numpy as np
import pytest
import torch
import two_processes
from click.testing import CliRunner
from gpq_cli.main import cli
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpq_faiss.errors import DeviceError, UsageError
from gpq_faiss.training.batches import EpochSampler
from gpq_faiss.training.launch import Launch, launched
from gpq_faiss.training.parallel import Group, joined

STEPS = 16


def arguments(out, *more):
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
    words = [
        word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")
    ]
    options = (
        "--preset",
        "paper",
        "--labelled",
        "30-per-class",
        "--device",
        "cpu",
        "--validate-every",
        4,
    )
    return ["train", "digits", *options, *words, "--out", out, *more]


def ended(processes):
    outputs = [process.communicate(timeout=120) for process in processes]
    return [
        (process.returncode, *output) for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Trained by two processes that nothing interrupts; only the first speaks."""
    out = tmp_path_factory.mktemp("two") / "model"
    (code, stdout, _), second = ended(two_processes.start(*arguments(out)))
    assert code == 0
    assert stdout.startswith(f"{out}: 12 bits, 270 labelled and")
    assert second == (0, "", "")
    return out


def test_gradients_are_averages_and_errors_end_all_processes():
    torch.multiprocessing.spawn(
        two_processes.check_group, (two_processes.environments(),), nprocs=2
    )


def test_two_processes_learn(model):
    totals = [
        json.loads(line)["total"] for line in (model / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(totals) == STEPS / 4
    assert totals[-1] < totals[0]
    assert json.loads((model / "config.json").read_text())["training"]["processes"] == 2


def test_a_killed_process_ends_all_and_resuming_gives_the_same_codes(model, tmp_path):
    out = tmp_path / "model"
    first, second = two_processes.start(*arguments(out, "--checkpoint-seconds", 0))
    while not (tmp_path / ".model.partial" / "checkpoint.safetensors").exists():
        assert first.poll() is None
        time.sleep(0.01)
    second.send_signal(signal.SIGKILL)
    (code, stdout, stderr), _ = ended([first, second])
    assert (code, stdout) == (1, "")
    assert stderr.endswith("so all end: run the same command with --resume to continue\n")
    assert not out.exists()
    resumed = ended(two_processes.start(*arguments(out, "--resume")))
    assert [code for code, *_ in resumed] == [0, 0]
    assert "resumed at step" in resumed[0][2]
    assert (out / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("info nothing", "'gpq info' is made for one process: start it without torchrun"),
        ("train digits --out m --set training.steps=0", "training.steps = 0: input should be"),
        ("train digits --out m --bitz 3", "No such option"),
        ("train digits --out m --device cuda", "torch sees no GPU"),
    ],
)
def test_only_the_first_process_reports_a_mistake(words, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    messages = []
    for variables in two_processes.environments():
        result = CliRunner(env=variables).invoke(cli, words.split(), prog_name="gpq")
        assert result.exit_code == (1 if "cuda" in words else 2), result.output
        messages.append(result.stderr)
    assert message in messages[0]
    assert messages[1] == ""


@given(
    n=st.integers(1, 50),
    batch=st.integers(1, 30),
    size=st.integers(1, 5),
    steps=st.integers(1, 8),
    seed=st.integers(0, 9),
)
def test_processes_share_the_passes_of_one(n, batch, size, steps, seed):
    rows = np.arange(100, 100 + n)
    one = EpochSampler(rows, min(batch * size, n), (seed,))
    for step in range(steps):
        parts = [EpochSampler(rows, batch, (seed,), rank, size).at(step) for rank in range(size)]
        assert len({len(part) for part in parts}) == 1
        whole = np.stack(parts, axis=1).ravel()
        assert len(whole) < len(one.at(step)) + size
        np.testing.assert_array_equal(whole[: len(one.at(step))], one.at(step))


def test_torchrun_is_detected(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launched() == Launch(0, 1, 0)
    for name, value in two_processes.environments()[1].items():
        monkeypatch.setenv(name, value)
    assert launched() == Launch(1, 2, 1)


def test_every_process_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in two_processes.environments()[1].items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(DeviceError, match="'cuda:1' was requested, but torch sees 1 GPU"),
        joined("cuda"),
    ):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batch_norm_of_another_kind_is_refused():
    class Other(nn.BatchNorm2d):
        pass

    with pytest.raises(
        UsageError, match="cannot share the batch norm of this backbone \\(Other\\)"
    ):
        Group(size=2).distribute(nn.Sequential(Other(3)).cuda())
