"""A machine that does not go along: full disks, folders that cannot be written, missing GPUs, and
signals.
"""

import errno
import itertools
import os
import resource
import signal
import sys
from unittest import mock

import pytest
import torch
from commands import content, gpq, only_line, refused, untouched

from gpq_faiss.encoder import Encoder
from gpq_faiss.training import loop

STAGES = {
    "train": "train features:features.npy --labels labels.npy --preset paper "
    "--set training.steps=2 --out new/out",
    "encode": "encode model features:features.npy --labels labels.npy --out new/out",
    "export-faiss": "export-faiss model --out new/out",
    "export": "export model --to numpy --out new/out",
    "index": "index model codes.h5 --out new/out",
    "search": "search model index.faiss queries.npy -k 20 --out new/out.json",
    "picture": "search image-model image.faiss images/a/0.png --images folder:images "
    "--out new/out.png",
    "evaluate": "evaluate model features:features.npy --labels labels.npy --out new/out.json",
    "export-encoder": "export-encoder model --out new/out.pt2",
}


@pytest.mark.parametrize("stage", STAGES)
def test_failing_write_is_one_line(folder, stage, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be cut off
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1200, old[1]))
    try:
        assert "cannot write" in refused(STAGES[stage])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    # Only an unfinished run that the command goes on with.
    assert all(".partial" in name for name in content(folder / "new"))
    assert gpq(STAGES[stage]).exit_code == 0, "with space again, the same command works"


def test_full_disk_is_named(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "")))
    assert "the disk is full" in refused(STAGES["encode"])


@pytest.mark.parametrize("stage", ["train", "encode", "search", "evaluate"])
def test_missing_gpu_is_one_line(folder, stage):
    (folder / "new").mkdir()
    device = f"cuda:{torch.cuda.device_count()}" if torch.cuda.is_available() else "cuda"
    with untouched(folder):
        assert f"device '{device}'" in refused(f"{STAGES[stage]} --device {device}")


# Signals ------------------------------------------------------------------------------------------


def signalling(number, real, calls=0):
    """Return ``real``, which sends this process a signal after so many ``calls``."""
    counter = itertools.count()

    def called(*arguments, **options):
        if next(counter) == calls:
            signal.raise_signal(number)
        return real(*arguments, **options)

    return called


def test_terminated_training_keeps_its_steps(folder, monkeypatch):
    train = "train features:features.npy --labels labels.npy --labelled 20-per-class"
    monkeypatch.setattr(loop, "learning_rate", signalling(signal.SIGTERM, loop.learning_rate, 20))
    ended = gpq(f"{train} --preset run.toml --out out")
    assert ended.exit_code == 143
    assert only_line(ended.stderr).startswith("ended by SIGTERM: run the same command again")
    assert (folder / ".out.partial/checkpoint.safetensors").exists()


@pytest.mark.parametrize("stage", ["export", "search", "picture", "evaluate", "export-encoder"])
def test_terminated_stage_leaves_nothing(folder, monkeypatch, stage):
    """The signal comes just before the output gets its name."""
    (folder / "new").mkdir()
    with untouched(folder):
        monkeypatch.setattr(os, "replace", signalling(signal.SIGTERM, os.replace))
        result = gpq(STAGES[stage])
    assert result.exit_code == 143
    assert "ended by SIGTERM" in only_line(result.stderr)


# Memory and threads -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "out of memory ("),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried 24 GiB"), 1, "out of memory (CUDA"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 EiB"), 1, "out of memory ("),
        (KeyboardInterrupt(), 130, "interrupted: run the same command again"),
    ],
)
def test_failure_in_the_middle_is_one_line(folder, monkeypatch, error, code, message):
    monkeypatch.setattr(Encoder, "_vectors", mock.Mock(side_effect=error))
    assert message in refused(STAGES["encode"], code=code)
