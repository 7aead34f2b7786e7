"""The training loop: sampling, hidden labels, validation, checkpoints, and that a killed run reaches the same codes."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from killing import run_killed

from gpq_faiss.config import Config, NetworkConfig, QuantizerConfig, TrainingConfig, merge, preset
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.protocols import load_split
from gpq_faiss.data.standard import open_digits
from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import DataError, OutputExistsError
from gpq_faiss.files import atomic_folder, recover, unfinished
from gpq_faiss.methods.gpq import GPQ
from gpq_faiss.nn.gpq import GPQNetwork
from gpq_faiss.nn.model import build_network, load_model
from gpq_faiss.signals import Terminated, ended_by_signals
from gpq_faiss.stages.train import train as train_any
from gpq_faiss.training import loop
from gpq_faiss.training.batches import EpochSampler, hold_out
from gpq_faiss.training.checkpoint import RunState
from gpq_faiss.training.loop import count_steps, learning_rate

train = functools.partial(train_any, validate_every=4)
often = functools.partial(train, checkpoint_seconds=0.0)


def small(**changes: object) -> Config:
    """A config that trains on the digits in a second."""
    training = {"steps": 12, "batch_labelled": 60, "batch_unlabelled": 60, "validation": 0.1, **changes}
    return replace(
        preset("paper"),
        quantizer=QuantizerConfig(codebooks=3),
        network=NetworkConfig(backbone="mlp", hidden=(32,)),
        training=TrainingConfig(**training),  # type: ignore[arg-type]
    )


@given(n=st.integers(1, 40), batch=st.integers(1, 60), seed=st.integers(0, 5), steps=st.integers(1, 30))
@settings(deadline=None, max_examples=60)
def test_sampler_passes_over_every_row_once_an_epoch(n: int, batch: int, seed: int, steps: int) -> None:
    rows = np.arange(100, 100 + n)
    sampler = EpochSampler(rows, batch, seed, 0)
    batches = [sampler.at(step) for step in range(steps)]
    assert all(len(b) == min(batch, n) for b in batches)
    together = np.concatenate(batches)
    for start in range(0, len(together) - n + 1, n):
        assert sorted(together[start : start + n]) == rows.tolist()
    # A batch depends on its step alone, not on what was asked before: the ground of resuming.
    again = EpochSampler(rows, batch, seed, 0)
    np.testing.assert_array_equal(again.at(steps - 1), batches[-1])


@given(share=st.floats(0.05, 0.5), classes=st.integers(2, 6), seed=st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_hold_out_is_a_share_of_every_class(share: float, classes: int, seed: int) -> None:
    ids = np.repeat(np.arange(classes), 40)
    labels = Labels.from_ids(ids)
    held = hold_out(labels, np.arange(len(ids)), share, seed)
    if round(share * len(ids)) < 2 * classes:
        assert held.size == 0
        return
    assert len(held) == round(share * len(ids))
    counts = np.bincount(ids[held], minlength=classes)
    assert counts.max() - counts.min() <= 1


def test_learning_rate_is_the_papers() -> None:
    config = TrainingConfig()
    assert learning_rate(config, 0, 1000) == 2e-4
    assert learning_rate(config, 99, 1000) == 2e-4
    assert learning_rate(config, 250, 1000) == pytest.approx(2e-4 * 0.95**2)
    cosine = replace(config, schedule="cosine")
    assert learning_rate(cosine, 0, 10) == 2e-4
    assert learning_rate(cosine, 5, 10) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("classes", "steps"), [(1, 800), (100, 800), (101, 808), (150, 1200), (200, 1600), (10**4, 1600)]
)
def test_many_classes_have_a_longer_training(classes: int, steps: int) -> None:
    assert count_steps(TrainingConfig(steps="auto"), classes) == steps


def codes_of(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    encoder = Encoder.load(folder)
    _, vectors = encoder.embed_rows(open_digits(), np.arange(200))
    return vectors, encoder.model.codebooks


def train_digits(
    out: Path,
    *,
    stop: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    seen: list[int] | None = None,
    **changes: object,
) -> Path:
    """A training that is ended after step ``stop``, as by a kill: what was saved before is there. ``seen`` gets its steps."""

    def progress(step: int, *_: object) -> None:
        if seen is not None:
            seen.append(step)
        if step == stop:
            raise InterruptedError

    options = {"resume": resume, "overwrite": overwrite, "progress": progress, "checkpoint_seconds": 0.0}
    return train(open_digits(), out, config=small(**changes), labelled="30-per-class", **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(
        open_digits(), tmp_path_factory.mktemp("train") / "model", config=small(), labelled="30-per-class"
    )


def test_the_folder_holds_what_it_should(trained: Path) -> None:
    assert {p.name for p in trained.iterdir()} == {
        "model.safetensors",
        "config.json",
        "metrics.jsonl",
        "split.json",
    }
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert all(
        {"total", "npair", "classification", "entropy", "validation_map"} <= set(line) for line in lines
    )
    description = json.loads((trained / "config.json").read_text())["training"]
    best = max(lines, key=lambda line: line["validation_map"])
    assert description["best_step"] == best["step"]
    assert not list(trained.parent.glob(".*"))
    split = load_split(trained / "split.json")
    assert len(split.labelled) == 300
    model = load_model(trained)
    np.testing.assert_allclose(np.linalg.norm(model.codebooks, axis=2), 1, atol=1e-5)
    np.testing.assert_array_equal(model.network.codebooks().detach().numpy(), model.codebooks)  # type: ignore[operator]


def test_the_same_seed_gives_the_same_codes(trained: Path, tmp_path: Path) -> None:
    again = train(open_digits(), tmp_path / "again", config=small(), labelled="30-per-class")
    other = train(open_digits(), tmp_path / "other", config=small(seed=1), labelled="30-per-class")
    for first, second in zip(codes_of(trained), codes_of(again), strict=True):
        np.testing.assert_array_equal(first, second)
    assert not np.array_equal(codes_of(trained)[0], codes_of(other)[0])


def test_hidden_labels_do_not_matter(trained: Path, tmp_path: Path) -> None:
    """Labels outside the labelled set are scrambled; the model is the same to the bit."""
    dataset = open_digits()
    split = load_split(trained / "split.json")
    assert dataset.labels is not None
    packed = dataset.labels.packed.copy()
    hidden = np.setdiff1d(np.arange(len(dataset)), np.concatenate([split.labelled, split.query]))
    packed[hidden] = np.random.default_rng(0).permutation(packed[hidden])
    rows = tmp_path / "rows.npy"
    np.save(rows, split.labelled)
    scrambled = replace(dataset, labels=Labels(packed, dataset.labels.class_names))
    one = train(dataset, tmp_path / "one", config=small(), labelled=str(rows), protocol="none")
    two = train(scrambled, tmp_path / "two", config=small(), labelled=str(rows), protocol="none")
    for first, second in zip(codes_of(one), codes_of(two), strict=True):
        np.testing.assert_array_equal(first, second)


def test_an_interrupted_run_resumes_to_the_same_codes(tmp_path: Path) -> None:
    """``tests/test_kills.py`` has the kills in the middle of writing."""
    out, whole = tmp_path / "cut", tmp_path / "whole"
    with pytest.raises(InterruptedError):
        train_digits(out, steps=30, stop=12)
    assert not out.exists()
    assert (tmp_path / ".cut.partial" / "checkpoint.safetensors").exists()
    with pytest.raises(OutputExistsError, match="--resume"):
        train_digits(out, steps=30)
    with pytest.raises(DataError, match="other settings"):
        train_digits(out, steps=31, resume=True)
    steps: list[int] = []
    train_digits(out, steps=30, resume=True, seen=steps)
    assert steps == list(range(13, 31))
    train_digits(whole, steps=30)
    for first, second in zip(codes_of(out), codes_of(whole), strict=True):
        np.testing.assert_array_equal(first, second)
    assert sorted(os.listdir(tmp_path)) == ["cut", "whole"]


def test_a_finished_run_is_left_alone_by_resume(trained: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in trained.iterdir()}
    assert train(open_digits(), trained, config=small(), labelled="30-per-class", resume=True) == trained
    assert {p.name: p.stat().st_mtime_ns for p in trained.iterdir()} == before
    with pytest.raises(OutputExistsError, match="--overwrite"):
        train(open_digits(), trained, config=small(steps=13), labelled="30-per-class", resume=True)
    with pytest.raises(OutputExistsError, match="--overwrite"):
        train(open_digits(), trained, config=small(), labelled="30-per-class")


def test_a_run_that_replaces_a_model_can_be_resumed(tmp_path: Path) -> None:
    """The old model stays until the new one is complete, and nothing of the new one is lost."""
    out, partial = tmp_path / "m", tmp_path / ".m.partial"
    train_digits(out)
    old = (out / "model.safetensors").read_bytes()
    with pytest.raises(InterruptedError):
        train_digits(out, seed=1, stop=7, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == old
    with pytest.raises(OutputExistsError, match="go on with --resume"):
        train_digits(out, seed=1)
    with pytest.raises(OutputExistsError, match="finished model of other settings"):
        train_digits(out, seed=2, resume=True)
    assert (partial / "checkpoint.safetensors").exists()
    steps: list[int] = []
    train_digits(out, seed=1, resume=True, seen=steps)
    assert steps[0] > 5
    whole = train_digits(tmp_path / "whole", seed=1)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes() != old
    assert sorted(os.listdir(tmp_path)) == ["m", "whole"]
    assert train_digits(out, seed=1, resume=True) == out


def test_resume_replaces_no_model_but_the_one_that_overwrite_was_given_for(tmp_path: Path) -> None:
    out = tmp_path / "m"
    train_digits(out)
    with pytest.raises(InterruptedError):
        train_digits(out, seed=1, stop=7, overwrite=True)
    shutil.rmtree(out)
    shutil.copytree(train_digits(tmp_path / "other", seed=2), out)
    with pytest.raises(OutputExistsError, match="finished model of other settings"):
        train_digits(out, seed=1, resume=True)
    with pytest.raises(InterruptedError):
        train_digits(out, seed=1, stop=3, overwrite=True)
    assert train_digits(out, seed=1, resume=True) == out


def test_one_training_at_a_time_into_a_folder(tmp_path: Path) -> None:
    """The second ends at once, before it has read any data."""
    out = tmp_path / "m"
    refused: list[str] = []

    def second(step: int, steps: int, figures: dict[str, float]) -> None:
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(DataError, match="being written by another process") as caught:
                train("features:/nowhere.npy", out, config=small(), **options)
            refused.append(str(caught.value))

    config = small(steps=2)
    often(open_digits(), out, config=config, labelled="30-per-class", progress=second)
    assert len(refused) == 6
    assert sorted(os.listdir(tmp_path)) == ["m"]


def test_what_a_training_killed_at_its_end_leaves_is_swept(tmp_path: Path) -> None:
    """Once the model is in place, its unfinished run is no more, and ``resume`` says that there is nothing to do."""
    out, partial = tmp_path / "m", tmp_path / ".m.partial"
    train_digits(out)
    new = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "model.safetensors").write_bytes(b"old")

    def publish() -> None:
        with unfinished(partial, out, keep=("checkpoint.safetensors",)):
            (partial / "checkpoint.safetensors").write_bytes(b"state")
            with atomic_folder(out, overwrite=True, done_with=partial) as folder:
                for name, data in new.items():
                    (folder / name).write_bytes(data)

    at = 0
    while True:
        assert run_killed(publish, tmp_path, at)
        weights = out / "model.safetensors"
        if weights.exists() and weights.read_bytes() != b"old":
            break
        at += 1
        recover(out)
        (out / "model.safetensors").write_bytes(b"old")
    assert partial.exists()
    assert train_digits(out, resume=True) == out
    assert os.listdir(tmp_path) == ["m"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == new


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_saves_the_step_under_way(
    tmp_path: Path, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    """And has the effect that it would have had: here its handler of before is called."""
    out = tmp_path / "m"
    config = small(steps=60)
    found = signal.getsignal(number)
    # A shell's background jobs are born with ctrl-C ignored, and what is ignored stays so.
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(number, found))

    def send(step: int, steps: int, figures: dict[str, float]) -> None:
        if step == 7:
            os.kill(os.getpid(), number)
            if number != signal.SIGINT:
                os.kill(os.getpid(), number)  # a second one changes nothing

    before = signal.getsignal(number)
    with ended_by_signals(), pytest.raises(KeyboardInterrupt) as caught:
        train(
            open_digits(),
            out,
            config=config,
            labelled="30-per-class",
            checkpoint_seconds=3600.0,
            progress=send,
        )
    assert signal.getsignal(number) == before
    assert isinstance(caught.value, Terminated) == (number != signal.SIGINT)
    steps: list[int] = []
    train_digits(out, steps=60, resume=True, seen=steps)
    assert steps[0] == 9


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    folder = train(
        open_digits(), tmp_path / "m", config=small(steps=200, learning_rate=2e-3), labelled="30-per-class"
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["npair"] < lines[0]["npair"]
    assert lines[-1]["validation_map"] > 0.4, "chance is 0.1"


@pytest.mark.parametrize(
    ("network", "same"),
    [
        (NetworkConfig(backbone="mlp", hidden=(8,)), "crop"),
        (NetworkConfig(backbone="mlp", hidden=(8,), noise=0.5), "none"),
    ],
)
def test_perceptrons_with_noise_see_images_as_they_are(
    tmp_path: Path, network: NetworkConfig, same: str
) -> None:
    bytes_of = {}
    for augment in ("auto", "crop", "none"):
        config = small(steps=2, batch_labelled=20, batch_unlabelled=20, validation=0.0, augment=augment)
        folder = train(
            open_digits(), tmp_path / augment, config=replace(config, network=network), labelled="2-per-class"
        )
        bytes_of[augment] = (folder / "model.safetensors").read_bytes()
    assert bytes_of["crop"] != bytes_of["none"]
    assert bytes_of["auto"] == bytes_of[same]


def test_images_through_the_vgg(tmp_path: Path) -> None:
    config = small(steps=2, batch_labelled=8, batch_unlabelled=8, validation=0.0)
    config = replace(config, network=NetworkConfig(backbone="vgg", image_size=16))
    folder = train(open_digits(), tmp_path / "m", config=config, labelled="2-per-class")
    model = load_model(folder)
    assert model.image_size == 16
    assert json.loads((folder / "config.json").read_text())["training"]["validation_map"] is None


def test_a_damaged_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    partial = tmp_path / ".m.partial"
    partial.mkdir()
    (partial / "checkpoint.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(DataError, match="damaged"):
        train(open_digits(), tmp_path / "m", config=small(), labelled="30-per-class", resume=True)


def test_a_checkpoint_of_another_network_is_one_clear_error(tmp_path: Path) -> None:
    """As of a version that had a tensor more or less under the same settings."""
    config = small()
    net = build_network(config, {"kind": "features", "width": 4}, 3)
    assert isinstance(net, GPQNetwork)
    method = GPQ(net, config)
    state = RunState(tmp_path, method, method.optimizer(config.training))
    state.save("identity")
    state.take(state.read("identity"))
    method.register_buffer("new", torch.ones(1))
    with pytest.raises(DataError, match="another version of gpq-faiss: start again with --overwrite"):
        state.take(state.read("identity"))


def test_diverging_is_an_error_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="learning_rate"):
        train(
            open_digits(), tmp_path / "m", config=small(learning_rate=1e30, steps=50), labelled="30-per-class"
        )
    assert not (tmp_path / "m").exists()


def test_small_steps_are_computed_by_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several would wait for each other; what the caller has set is there again afterwards."""
    config = merge(preset("paper"), {"network": {"backbone": "mlp"}, "training": {"steps": 3}})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for limit, threads in ((loop._SMALL_STEP, 1), (1.0, 2)):
            monkeypatch.setattr(loop, "_SMALL_STEP", limit)
            seen: list[int] = []

            def progress(*_: object, seen: list[int] = seen) -> None:
                seen.append(torch.get_num_threads())

            train_any(
                open_digits(),
                tmp_path / str(threads),
                config=config,
                labelled="5-per-class",
                progress=progress,
            )
            assert seen == [threads] * 3
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
