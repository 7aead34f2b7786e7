"""``gpq train`` in two processes: the training of one, whatever ends a process, and errors of one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import together
import torch
from click.testing import CliRunner
from gpq_cli.main import cli
from numpy.typing import NDArray
from PIL import Image

from gpq_faiss.data.open import open_data
from gpq_faiss.data.reader import Reader, Readers
from gpq_faiss.errors import DataError

STEPS = 60
MODULE = "gpq_cli"


def arguments(out: Path, *more: str) -> list[str]:
    settings = {
        "quantizer.codebooks": 3,
        "network.backbone": "mlp",
        "network.hidden": [32],
        "network.noise": 0.1,
        "training.steps": STEPS,
        "training.batch_labelled": 51,
        "training.batch_unlabelled": 60,
        "training.validation": 0.1,
    }
    changes = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    own = ["--preset", "paper", "--labelled", "30-per-class", "--device", "cpu", "--validate-every", "4"]
    return ["train", "digits", *own, *changes, "--out", str(out), *more]


def processes(out: Path, *more: str) -> list[subprocess.Popen[str]]:
    """Two processes of one training, as torchrun starts them."""
    return [
        subprocess.Popen(
            [sys.executable, "-m", MODULE, *arguments(out, *more)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in together.environments(2)
    ]


def ends(children: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    said = [child.communicate(timeout=120) for child in children]
    return [(child.returncode, *text) for child, text in zip(children, said, strict=True)]


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two processes that nothing interrupts."""
    out = tmp_path_factory.mktemp("two") / "model"
    first, second = ends(processes(out))
    assert (first[0], second) == (0, (0, "", "")), first[2] + second[2]
    assert first[1].startswith(f"{out}: 12 bits, 270 labelled and")
    return out


def test_two_processes_train_as_one(whole: Path, tmp_path: Path) -> None:
    """The figures of the log are those of one process, up to rounding that grows from step to step."""
    done = CliRunner().invoke(cli, arguments(tmp_path / "one"))
    assert done.exit_code == 0, done.output
    one, two = lines(tmp_path / "one"), lines(whole)
    assert [line["step"] for line in two] == [line["step"] for line in one]
    for mine, theirs in zip(two, one, strict=True):
        for name in ("total", "npair", "classification", "entropy"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-4 * mine["step"])
    assert one[0]["total"] == pytest.approx(two[0]["total"], abs=2e-6)
    description = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "one", whole)]
    assert description[1]["training"].pop("processes") == 2
    assert description[0]["run_identity"] == description[1]["run_identity"]
    assert sorted(path.name for path in whole.iterdir()) == sorted(
        path.name for path in (tmp_path / "one").iterdir()
    )


def workers(parent: int) -> dict[str, int]:
    """Processes that torchrun has started, by their RANK."""
    found = {}
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        texts = Path(f"/proc/{child}/environ").read_text().split("\0")
        for text in texts:
            if text.startswith("RANK="):
                found[text[5:]] = int(child)
    return found


def step_of(partial: Path) -> int:
    """Steps that the checkpoint holds."""
    with (partial / "checkpoint.safetensors").open("rb") as file:
        head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return int(json.loads(head["__metadata__"]["state"])["step"])


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_a_training_whose_process_is_killed_resumes(whole: Path, tmp_path: Path) -> None:
    """SIGKILL of one process ends all; the same command with --resume gives the bytes of a training that was not killed."""
    out, partial = tmp_path / "model", tmp_path / ".model.partial"
    often = ("--checkpoint-seconds", "0")
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(together.free_port()),
    ]
    environment = {
        k: v for k, v in together.environments(1)[0].items() if "RANK" not in k and "WORLD" not in k
    }
    job = subprocess.Popen(
        [sys.executable, *launcher, "-m", MODULE, *arguments(out, *often)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stderr is not None
    said = ""
    for line in job.stderr:
        said += line
        if line.startswith("step 8 "):
            break
    there = workers(job.pid)
    assert sorted(there) == ["0", "1"], said
    os.kill(there["1"], signal.SIGKILL)
    said += job.communicate(timeout=120)[1]
    assert job.returncode not in (0, None)
    assert "gpq: another process of this training failed or ended" in said or "Signal 9" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in there.values())
    assert not out.exists()
    assert 7 <= step_of(partial) < STEPS

    # On one process: it goes on where the two were.
    shutil.copytree(partial, tmp_path / ".one.partial")
    begun = step_of(partial)
    done = CliRunner().invoke(cli, arguments(tmp_path / "one", "--resume"))
    assert done.exit_code == 0, done.output
    assert f"resumed at step {begun} of {STEPS}" in done.stderr
    one, two = lines(tmp_path / "one")[-1], lines(whole)[-1]
    assert one["total"] == pytest.approx(two["total"], abs=0.01)

    first, second = ends(processes(out, "--resume"))
    assert (first[0], second) == (0, (0, "", "")), first[2] + second[2]
    for name in ("model.safetensors", "config.json", "split.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["model", "one"]


def as_process(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in together.environments(2)[rank].items():
        if name.endswith(("RANK", "SIZE")) or name.startswith("MASTER"):
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("info", "nothing"), "'gpq info' is made for one process: start it without torchrun"),
        (
            ("experiment", "run", "table2", "digits", "--out", "m"),
            "'gpq experiment run' is made for one process",
        ),
        (
            ("train", "digits", "--out", "m", "--set", "training.steps=0"),
            "training.steps = 0: input should be",
        ),
        (("train", "digits", "--out", "m", "--bitz", "3"), "No such option"),
        (("train", "digits", "--out", "m", "--device", "cuda"), "torch sees no GPU"),
    ],
)
def test_the_first_process_says_what_is_wrong(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = []
    for rank in (0, 1):
        as_process(rank, monkeypatch)
        done = CliRunner().invoke(cli, list(words), prog_name="gpq")
        assert done.exit_code == (1 if "cuda" in words else 2), done.output
        said.append(done.stderr)
    assert message in said[0]
    assert said[1] == ""
    assert os.listdir(tmp_path) == []


def test_broken_images_of_all_processes_are_counted(tmp_path: Path) -> None:
    """Each of two processes reads half of the images; the first counts what either could not read."""
    rng = np.random.default_rng(0)
    for i in range(40):
        path = tmp_path / "images" / f"class{i % 2}" / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i in (3, 36, 37):
            path.write_bytes(b"no picture")
        else:
            Image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)).save(path)
    memory: dict[int, NDArray[np.uint8]] = {}

    class Two(Readers):
        def memory(self, size: int) -> NDArray[np.uint8]:
            return memory.setdefault(size, np.zeros(size, np.uint8))

    def read(max_bad: float) -> tuple[Reader, Reader]:
        memory.clear()
        readers = []
        for rank in (1, 0):
            dataset = open_data(tmp_path / "images", max_bad=max_bad)
            reader = Reader(dataset, 16, readers=Two(rank, 2))
            assert reader.preload()
            readers.append(reader)
        return readers[1], readers[0]

    first, second = read(0.1)
    rows = np.arange(40)
    values, ok = first.fetch(rows)
    alone = Reader(open_data(tmp_path / "images", max_bad=0.1), 16)
    np.testing.assert_array_equal(values, alone.fetch(rows)[0])
    assert int(ok.sum()) == 37
    assert first.dataset.bad.positions == alone.dataset.bad.positions
    assert 0 < second.dataset.bad.count < 3
    with pytest.raises(DataError, match="above the limit of 5 %"):
        read(0.05)
