"""Training in several processes is that of one: batches, losses, gradients, batch norm, the command, whatever ends a process."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import together
import torch
from click.testing import CliRunner
from gpq_cli.main import cli
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.run import main as torchrun

from gpq_faiss.data.reader import Reader
from gpq_faiss.errors import DeviceError, UsageError
from gpq_faiss.nn.joint import join_batch_norm
from gpq_faiss.training.batches import EpochSampler, training_batches
from gpq_faiss.training.launch import Launch, launched
from gpq_faiss.training.parallel import Group, own_device

STEPS = 28


def arguments(out, *more):
    changes = {
        "quantizer.codebooks": 3,
        "network.backbone": "mlp",
        "network.hidden": [32],
        "network.noise": 0.1,
        "training.steps": STEPS,
        "training.batch_labelled": 51,
        "training.batch_unlabelled": 60,
        "training.validation": 0.1,
    }
    words = [word for name, value in changes.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    own = ["--preset", "paper", "--labelled", "30-per-class", "--device", "cpu", "--validate-every", "4"]
    return ["train", "digits", *own, *words, "--out", str(out), *more]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Done(NamedTuple):
    """What two processes did: what their functions found; a training in ``whole`` that nothing interrupted; and how process 0 ended, and
    what it said, when the other was killed by SIGKILL after step 8 of the next one, whose folder is ``killed``."""

    found: dict[str, Any]
    whole: Path
    killed: Path
    code: int
    said: str


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    whole, killed = folder / "whole", folder / "killed" / "model"
    killed.parent.mkdir()
    commands = arguments(whole), arguments(killed, "--checkpoint-seconds", "0")
    first, second = together.start(folder, "gradients,talk", "cpu", *commands)
    while first.process.is_alive() and first.said[1].read_text().count("\nstep 8 ") < 2:
        time.sleep(0.02)
    second.process.kill()
    (code, out, said), (other, *heard) = first.ended(), second.ended()
    assert (other, heard[0]) == (-signal.SIGKILL, "")
    assert "step 4 of" not in heard[1], "process 0 reports"
    found, about = out.splitlines()
    assert about.startswith(f"{whole}: 12 bits, 270 labelled and")
    return Done(json.loads(found), whole, killed, code, said)


def test_two_processes_compute_as_one(done):
    """In float64, with uneven shares: gradients and batch norm statistics of every loss, with dropout, noise and augmentation."""
    found = done.found
    assert found["gradients"].keys() == together.CONFIGS.keys()
    assert {name: apart for name, (apart, _) in found["gradients"].items() if not apart < 1e-9} == {}
    assert all(count >= 4 for _, count in found["gradients"].values())
    assert found["talk"] == "DataError: process 1 of 2: no such file"


def test_two_processes_train_as_one(done, tmp_path):
    """The figures of the log are those of one process, up to rounding that grows from step to step."""
    out, whole = tmp_path / "one", done.whole
    result = CliRunner().invoke(cli, arguments(out))
    assert result.exit_code == 0, result.output
    one, two = lines(out), lines(whole)
    assert [line["step"] for line in two] == [line["step"] for line in one]
    for mine, theirs in zip(two, one, strict=True):
        for name in ("total", "npair", "classification", "entropy"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-4 * mine["step"])
    assert one[0]["total"] == pytest.approx(two[0]["total"], abs=2e-6)
    description = [json.loads((folder / "config.json").read_text()) for folder in (out, whole)]
    assert description[1]["training"].pop("processes") == 2
    assert description[0]["run_identity"] == description[1]["run_identity"]
    assert sorted(os.listdir(whole)) == sorted(os.listdir(out))


def test_a_training_whose_process_is_killed_resumes(done, tmp_path, monkeypatch):
    """SIGKILL of one ends both; the same command with --resume, by torchrun, gives the bytes of a training that was not killed."""
    out, partial = done.killed, done.killed.with_name(".model.partial")
    assert done.code == 1
    assert done.said.endswith("so all end: run the same command with --resume to continue\n"), done.said
    assert not out.exists()

    # On one process: it goes on where the two were.
    shutil.copytree(partial, tmp_path / ".one.partial")
    result = CliRunner().invoke(cli, arguments(tmp_path / "one", "--resume"))
    assert result.exit_code == 0, result.output
    begun = int(result.stderr.split("resumed at step ")[1].split()[0])
    assert 7 <= begun < STEPS
    assert lines(tmp_path / "one")[-1]["total"] == pytest.approx(lines(done.whole)[-1]["total"], abs=0.01)

    # As the command torchrun, in this process.
    (environment,) = together.environments(1)
    for name in NAMES[:4]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    workers = ["--nproc-per-node", "2", "--master-port", environment["MASTER_PORT"]]
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    torchrun(
        [
            *workers,
            "--start-method",
            "forkserver",
            "--run-path",
            str(together.FILE),
            *arguments(out, "--resume"),
        ]
    )
    for number, handler in before.items():  # torchrun's would stay
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    for name in ("model.safetensors", "config.json", "split.json"):
        assert (out / name).read_bytes() == (done.whole / name).read_bytes()
    assert os.listdir(out.parent) == ["model"]
    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("info nothing", "'gpq info' is made for one process: start it without torchrun"),
        ("experiment run table2 digits --out m", "'gpq experiment run' is made for one process"),
        ("train digits --out m --set training.steps=0", "training.steps = 0: input should be"),
        ("train digits --out m --bitz 3", "No such option"),
        ("train digits --out m --device cuda", "torch sees no GPU"),
    ],
)
def test_the_first_process_says_what_is_wrong(words, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = []
    for environment in together.environments(2):
        for name in NAMES:
            monkeypatch.setenv(name, environment[name])
        result = CliRunner().invoke(cli, words.split(), prog_name="gpq")
        assert result.exit_code == (1 if "cuda" in words else 2), result.output
        said.append(result.stderr)
    assert message in said[0]
    assert said[1] == ""
    assert os.listdir(tmp_path) == []


class Shared:
    """A group whose other processes are worked out here."""

    def __init__(self, rank, size, readable):
        self.rank, self.size, self.main, self.readable = rank, size, rank == 0, readable
        self.rows = []

    def of(self, rank, rows):
        return Group(rank=rank, size=self.size).share(rows)

    def share(self, rows):
        self.rows.append(rows)
        return self.of(self.rank, rows)

    def gather(self, part):
        rows = self.rows.pop(0)
        parts = [torch.from_numpy(self.readable[self.of(rank, rows)]) for rank in range(self.size)]
        assert torch.equal(parts[self.rank], part)
        return parts


class HalfReadable:
    """Gives of every row its number, if it can be read."""

    def __init__(self, readable):
        self.readable = readable

    def stream(self, batches, *, empty=False):
        for rows in batches:
            yield rows[self.readable[rows]], self.readable[rows]

    def count_broken(self, rows):
        assert not self.readable[rows].any()


@given(seed=st.integers(0, 100), size=st.integers(2, 5), bad=st.floats(0, 0.7), unlabelled=st.booleans())
def test_shares_are_the_batches_of_one_process(seed, size, bad, unlabelled):
    """Every item that can be read is in one share, in the place that the share says, also where processes outnumber items."""
    readable = np.random.default_rng(seed).random(80) >= bad
    readable[[0, 8, 16]] = True
    reader = cast(Reader, HalfReadable(readable))
    own = EpochSampler(np.arange(0, 24, 8), 3, seed, 0)
    others = EpochSampler(np.arange(30, 80), 20, seed, 1) if unlabelled else None
    steps = range(3)
    groups = [cast(Group, Shared(rank, size, readable)) for rank in range(size)]
    processes = [list(training_batches(reader, own, others, steps, group)) for group in groups]
    for step, (values, *rows, none) in enumerate(training_batches(reader, own, others, steps)):
        assert none is None
        np.testing.assert_array_equal(values, np.concatenate(rows))
        assert (rows[0] < 30).all()
        assert (rows[1] >= 30).all()
        assert len(rows[1]) > 0 or not unlabelled
        at = 0
        for part, *of_all, share in (each[step] for each in processes):
            for found, expected in zip(of_all, rows, strict=True):
                np.testing.assert_array_equal(found, expected)
            assert (share.start, share.total) == (at, len(values))
            at = share.stop
            np.testing.assert_array_equal(part, values[share.start : at])
        assert at == len(values)


def test_batch_norm_of_another_kind_is_refused():
    class Own(nn.BatchNorm2d):
        pass

    with pytest.raises(UsageError, match="unsupported kind of batch norm \\(Own\\)"):
        join_batch_norm(nn.Sequential(Own(3)))


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")


def test_what_a_launcher_says(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    for name, value in zip(NAMES, ("5", "8", "1", "4", "none"), strict=True):
        monkeypatch.setenv(name, value)
    assert launched() == Launch(5, 8, 1, 4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched() is None


def test_every_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_device("cuda", Launch(3, 4, 1, 2)) == torch.device("cuda", 1)
    assert own_device("auto", Launch(2, 4, 0, 2)) == torch.device("cuda", 0)
    assert own_device("cpu", Launch(3, 4, 3, 4)) == torch.device("cpu")
    with pytest.raises(UsageError, match="cuda:1 is one GPU"):
        own_device("cuda:1", Launch(0, 2, 0, 2))
    with pytest.raises(DeviceError, match="4 processes on this machine need a GPU each, and there are 2"):
        own_device("cuda", Launch(0, 4, 0, 4))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_are_those_of_the_joint_batch_on_gpus(tmp_path):
    """By NCCL, with torch's SyncBatchNorm."""
    first, second = together.start(tmp_path, "gradients", "cuda")
    (code, out, said), _ = first.ended(), second.ended()
    assert code == 0, said
    found = json.loads(out)
    assert {name: apart for name, (apart, _) in found["gradients"].items() if not apart < 1e-9} == {}
