"""A machine that does not go along: full disks, folders that cannot be written, missing GPUs, and
signals.
"""

import contextlib
import errno
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from commands import STAGES, clusters, content, done, gpq, only_line, refused, stage_call, untouched
from PIL import Image

from gpq_faiss.encoder import Encoder
from gpq_faiss.training import loop

# Full disks ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_space(sync):
    """Writes beyond 1,200 bytes of a file fail; or, as some file systems find out only then, all at
    the end (``sync``).
    """

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        if sync:
            patch.setattr(os, "fsync", full)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1200, old[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("stage", [*STAGES, "train sync", "encode sync", "index sync"])
def test_a_write_that_fails_is_one_line(shop, tmp_path, stage):
    sync = stage.endswith(" sync")
    call, _ = stage_call(stage.removesuffix(" sync"), shop, tmp_path)
    with no_space(sync):
        assert ("the disk is full" if sync else "cannot write") in refused(*call)
    # Only an unfinished run that the command goes on with.
    assert all(".partial" in left for left in content(tmp_path))
    assert gpq(*call).exit_code == 0, "with space again, the same command works"


# Folders that cannot be written -------------------------------------------------------------------


@pytest.fixture
def locked(tmp_path):
    """A folder that truly cannot be written: by its mode, for root by the immutable flag."""
    folder = tmp_path / "locked"
    folder.mkdir()
    close, reopen = (
        (("chattr", "+i"), ("chattr", "-i"))
        if os.geteuid() == 0
        else (("chmod", "555"), ("chmod", "755"))
    )
    if (
        shutil.which(close[0]) is None
        or subprocess.run([*close, folder], check=False, capture_output=True).returncode
    ):
        pytest.skip("root may write everywhere, and this file system has no immutable flag")
    try:
        yield folder
    finally:
        subprocess.run([*reopen, folder], check=True)


@pytest.mark.parametrize("stage", STAGES)
def test_a_locked_folder_or_a_file_in_its_place_is_one_line(shop, locked, stage):
    file = locked.parent / "file"
    file.write_bytes(b"precious")
    with untouched(locked.parent, shop.root):
        for folder, words in (
            (locked, ("no permission to write", "choose another folder")),
            (file, ("cannot write", "not a folder")),
        ):
            line = refused(*stage_call(stage, shop, folder)[0])
            assert all(word in line for word in words)


# GPUs ---------------------------------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_one_line(shop, tmp_path):
    device = f"cuda:{torch.cuda.device_count()}" if torch.cuda.is_available() else "cuda"
    with untouched(tmp_path, shop.root):
        for stage in ("train", "encode", "search json", "evaluate json"):
            line = refused(*stage_call(stage, shop, tmp_path)[0], "--device", device)
            assert f"device '{device}'" in line
            assert "GPU" in line


# Signals ------------------------------------------------------------------------------------------


def signalling(number, real, at=0):
    """``real``, whose call ``at`` sends this process a signal first."""
    calls = itertools.count()

    def called(*arguments, **options):
        if next(calls) == at:
            signal.raise_signal(number)
        return real(*arguments, **options)

    return called


def test_a_signal_in_a_training_is_one_line_and_its_steps_are_kept(shop, tmp_path, monkeypatch):
    """How the command goes on, ``test_benchmarks`` has."""
    settings = f"--labelled 20-per-class --config {shop.settings} --preset paper"
    train = f"train {shop.data} --labels {shop.labels} {settings} --out {tmp_path}/model"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate", signalling(signal.SIGTERM, loop.learning_rate, 20))
        ended = gpq(train)
    assert ended.exit_code == 143
    assert only_line(ended.stderr).startswith(
        "ended by SIGTERM: run the same command again with --resume"
    )
    assert ".model.partial/checkpoint.safetensors" in content(tmp_path)
    assert json.loads(done(f"info {tmp_path}/model --format json"))["kind"] == "unfinished"


def test_ctrl_c_in_an_encoding_is_one_line_and_its_rows_are_kept(shop, tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", clusters(1200)[0])
    encode = (
        f"encode {shop.model} features:{tmp_path}/x.npy --batch-size 20 --out {tmp_path}/codes.h5"
    )
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # in the background it is ignored
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "_vectors", signalling(signal.SIGINT, Encoder._vectors, 9))
        patch.setattr("gpq_faiss.store.rows.COMMIT_SECONDS", 0.0)
        ended = gpq(encode)
    signal.signal(signal.SIGINT, before)
    assert ended.exit_code == 130
    assert only_line(ended.stderr) == "interrupted: run the same command again to go on"
    assert {name.split("/")[0] for name in content(tmp_path)} == {"x.npy", ".features.h5.partial"}
    rows = json.loads(done(f"info {tmp_path}/features.h5 --format json"))["rows"]
    assert 0 < rows < 1200


@pytest.mark.parametrize("stage", [s for s in STAGES if s not in {"train", "encode", "index"}])
def test_a_signal_in_any_other_stage_leaves_nothing(shop, tmp_path, monkeypatch, stage):
    """Just before the output would get its name."""
    call, _ = stage_call(stage, shop, tmp_path)
    with monkeypatch.context() as patch, untouched(tmp_path, shop.root):
        patch.setattr(os, "replace", signalling(signal.SIGTERM, os.replace))
        result = gpq(*call)
    assert result.exit_code == 143
    assert "ended by SIGTERM" in only_line(result.stderr)


# Memory and threads -------------------------------------------------------------------------------

LITTLE = """
import resource, sys
import gpq_cli.main
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (300 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
gpq_cli.main.cli(sys.argv[1:], prog_name="gpq")
"""


def python(script, *arguments, **environment):
    """Exit code and stderr of a script in a process of its own."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return ended.returncode, ended.stderr


def test_images_that_memory_cannot_hold_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("gpq_faiss.inputs.available_memory", lambda: 4 << 30)
    for i in range(150):
        path = tmp_path / "images" / f"{i % 3}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48), (i, 0, 0)).save(path)
    line = refused(
        f"train folder:{tmp_path}/images --labelled all --preset paper --out {tmp_path}/model"
    )
    assert "images of 224 pixels per side" in line
    assert "lower network.image_size" in line


def test_too_little_memory_to_load_torch_is_one_line(shop, tmp_path):
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    call = ("-q", "encode", shop.model, shop.data, "--out", tmp_path / "c.h5")
    code, stderr = python(LITTLE, *call, **{**os.environ, **one})
    assert code == 1
    line = only_line(stderr)
    assert line.startswith("out of memory (")
    assert "install" not in line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ImportError("libfaiss.so: cannot allocate memory", name="faiss"),
            "out of memory (libfaiss.so",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory ("),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 24 GiB"),
            "out of memory (CUDA out",
        ),
        (RuntimeError("can't start new thread"), "out of memory ("),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 EiB"), "out of memory ("),
        (
            ImportError("libfaiss.so: undefined symbol: sgemm_", name="faiss"),
            "install gpq-faiss again",
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ""),
    ],
)
def test_lack_of_memory_damage_and_bugs_are_told_apart(shop, tmp_path, monkeypatch, error, line):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(Encoder, "_vectors", fails)
    for stage in ("search json", "encode"):
        call, _ = stage_call(stage, shop, tmp_path)
        if line:
            assert line in refused(*call)
        else:
            assert gpq(*call).exception is error


@pytest.mark.parametrize(
    ("own", "spins"), [({}, "0"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")]
)
def test_waiting_threads_sleep_unless_the_user_says_otherwise(own, spins):
    """What OpenMP itself says of the environment that it has read."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= own | {"OMP_DISPLAY_ENV": "VERBOSE", "OMP_NUM_THREADS": "2"}
    script = "import sys, gpq_cli.main as m; sys.argv[1:] = ['info', 'none']\ntry: m.cli()\nfinally: import faiss"
    _, stderr = python(script, **environment)
    assert {line.split("'")[1] for line in stderr.splitlines() if "GOMP_SPINCOUNT" in line} == {
        spins
    }
