"""The training loop: sampling, hidden labels, validation, checkpoints, and that a killed run reaches the same codes."""

import json
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_factory import digits

from gpq_faiss.config import NetworkConfig, QuantizerConfig, TrainingConfig, preset
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.protocols import load_split
from gpq_faiss.errors import DataError, OutputExistsError
from gpq_faiss.methods.gpq import build_network
from gpq_faiss.methods.model import load_model
from gpq_faiss.methods.registry import METHODS
from gpq_faiss.signals import Terminated, ended_by_signals
from gpq_faiss.stages.train import train
from gpq_faiss.training import loop
from gpq_faiss.training.batches import EpochSampler, hold_out
from gpq_faiss.training.checkpoint import RunState
from gpq_faiss.training.loop import count_steps, learning_rate


def small(network=None, **changes):
    """A config that trains on the digits in a second."""
    training = {"steps": 12, "batch_labelled": 60, "batch_unlabelled": 60, "validation": 0.1, **changes}
    return replace(
        preset("paper"),
        quantizer=QuantizerConfig(codebooks=3),
        network=network or NetworkConfig(backbone="mlp", hidden=(32,)),
        training=TrainingConfig(**training),
    )


@given(n=st.integers(1, 40), batch=st.integers(1, 60), seed=st.integers(0, 5), steps=st.integers(1, 30))
def test_sampler_passes_over_every_row_once_an_epoch(n, batch, seed, steps):
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
def test_hold_out_is_a_share_of_every_class(share, classes, seed):
    ids = np.repeat(np.arange(classes), 40)
    held = hold_out(Labels.from_ids(ids), np.arange(len(ids)), share, seed)
    count = round(share * len(ids))
    assert len(held) == (count if count >= 2 * classes else 0)
    counts = np.bincount(ids[held], minlength=classes)
    assert counts.max() - counts.min() <= 1


def test_steps_and_learning_rates():
    config = preset("paper")
    cosine = config.with_settings({"network": {"noise": 0.5}})
    assert [learning_rate(config, step, 1000) for step in (0, 99)] == [2e-4, 2e-4]
    assert learning_rate(config, 250, 1000) == pytest.approx(2e-4 * 0.95**2)
    assert [learning_rate(cosine, step, 10) for step in (0, 5)] == pytest.approx([2e-4, 1e-4])
    auto = TrainingConfig(steps="auto")
    for classes, steps in ((1, 800), (100, 800), (101, 808), (150, 1200), (200, 1600), (10**4, 1600)):
        assert count_steps(auto, classes) == steps


def train_digits(out, *, stop=0, seen=None, config=None, **options):
    """A training that is ended after step ``stop``, as by a kill: what was saved before is there. ``seen`` gets its steps. Options
    that ``train`` has not are of its config."""

    def progress(step, *_):
        if seen is not None:
            seen.append(step)
        if step == stop:
            raise InterruptedError

    how = {"progress": progress, "checkpoint_seconds": 0.0, "labelled": "30-per-class"}
    names = ("resume", "overwrite", "progress", "checkpoint_seconds", "labelled")
    how |= {name: options.pop(name) for name in names if name in options}
    return train(digits(), out, config=config or small(**options), validate_every=4, **how)


def same_bytes(a, b):
    return (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_digits(tmp_path_factory.mktemp("train") / "model")


def test_the_folder_holds_what_it_should(trained):
    assert not list(trained.parent.glob(".*"))
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12]
    figures = {"total", "npair", "classification", "entropy", "validation_map"}
    assert all(figures <= set(line) for line in lines)
    description = json.loads((trained / "config.json").read_text())["training"]
    best = max(lines, key=lambda line: line["validation_map"])
    assert description["best_step"] == best["step"]
    assert len(load_split(trained / "split.json").labelled) == 300
    model = load_model(trained)
    np.testing.assert_allclose(np.linalg.norm(model.codebooks, axis=2), 1, atol=1e-5)
    np.testing.assert_array_equal(model.network.codebooks().detach().numpy(), model.codebooks)


def test_hidden_labels_do_not_matter(trained, tmp_path):
    """Labels outside the labelled set are scrambled; the model is the same to the bit."""
    dataset, split = digits(), load_split(trained / "split.json")
    labels = dataset.require_labels()
    packed = labels.packed.copy()
    hidden = np.setdiff1d(np.arange(len(dataset)), np.concatenate([split.labelled, split.query]))
    packed[hidden] = np.random.default_rng(0).permutation(packed[hidden])
    rows = tmp_path / "rows.npy"
    np.save(rows, split.labelled)
    scrambled = replace(dataset, labels=Labels(packed, labels.class_names))
    one, two = (
        train(data, tmp_path / name, config=small(), labelled=str(rows), protocol="none")
        for name, data in (("one", dataset), ("two", scrambled))
    )
    assert same_bytes(one, two)


def test_an_interrupted_run_resumes_to_the_same_codes(trained, tmp_path):
    """``tests/test_benchmarks.py`` has the kills in the middle of writing."""
    out, partial, steps = tmp_path / "cut", tmp_path / ".cut.partial", []
    with pytest.raises(InterruptedError):
        train_digits(out, stop=6)
    assert not out.exists()
    assert (partial / "checkpoint.safetensors").exists()
    with pytest.raises(OutputExistsError, match="--resume"):
        train_digits(out)
    with pytest.raises(DataError, match="other settings"):
        train_digits(out, steps=31, resume=True)
    train_digits(out, resume=True, seen=steps)
    assert steps == list(range(7, 13))
    assert same_bytes(out, trained)
    assert os.listdir(tmp_path) == ["cut"]
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert train_digits(out, resume=True) == out
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == before
    for options in ({}, {"resume": True, "steps": 13}):
        with pytest.raises(OutputExistsError, match="--overwrite"):
            train_digits(out, **options)
    # A damaged checkpoint is one clear error.
    partial.mkdir()
    (partial / "checkpoint.safetensors").write_bytes(b"not safetensors")
    shutil.rmtree(out)
    with pytest.raises(DataError, match="damaged"):
        train_digits(out, resume=True)


@pytest.mark.parametrize("where", ["a weight", "what is noted"])
def test_a_flipped_bit_of_a_checkpoint_is_noticed(tmp_path, where):
    with pytest.raises(InterruptedError):
        train_digits(tmp_path / "cut", stop=6)
    path = tmp_path / ".cut.partial" / "checkpoint.safetensors"
    good = path.read_bytes()
    at = len(good) - 2 if where == "a weight" else good.index(b"seconds", good.index(b"best_step")) + 16
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(DataError, match=r"checkpoint.safetensors is damaged \(its checksum"):
        train_digits(tmp_path / "cut", resume=True)
    path.write_bytes(good)
    train_digits(tmp_path / "cut", resume=True)


def test_a_folder_that_was_made_meanwhile_is_not_replaced(tmp_path):
    def progress(*_):
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / "his").touch()

    with pytest.raises(DataError, match="was created meanwhile"):
        train_digits(tmp_path / "m", progress=progress)
    assert os.listdir(tmp_path / "m") == ["his"]


def test_a_run_that_replaces_a_model_can_be_resumed(trained, tmp_path):
    """The old model stays until the new one is complete, nothing of the new one is lost, and no other model is replaced."""
    out, partial, steps = tmp_path / "m", tmp_path / ".m.partial", []
    shutil.copytree(trained, out)
    with pytest.raises(InterruptedError):
        train_digits(out, seed=1, stop=7, overwrite=True)
    assert same_bytes(out, trained)
    with pytest.raises(OutputExistsError, match="go on with --resume"):
        train_digits(out, seed=1)
    with pytest.raises(OutputExistsError, match="finished model of other settings"):
        train_digits(out, seed=2, resume=True)
    assert (partial / "checkpoint.safetensors").exists()
    document = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**document, "note": "another model"}))
    with pytest.raises(OutputExistsError, match="finished model of other settings"):
        train_digits(out, seed=1, resume=True)
    (out / "config.json").write_text(json.dumps(document))
    train_digits(out, seed=1, resume=True, seen=steps)
    assert steps[0] == 8
    assert same_bytes(out, train_digits(tmp_path / "other", seed=1))
    assert not same_bytes(out, trained)
    assert sorted(os.listdir(tmp_path)) == ["m", "other"]
    assert train_digits(out, seed=1, resume=True) == out


@pytest.mark.parametrize(("base", "name"), [("paper", "gpq"), ("recommended", "posterior")])
def test_a_model_of_an_earlier_revision_of_its_method_is_not_finished(base, name, tmp_path, monkeypatch):
    changes = {"quantizer": {"codebooks": 2}, "training": {"steps": 2}, "posterior": {"networks": 1}}
    out, config = tmp_path / "m", preset(base).with_settings(changes)
    assert train_digits(out, config=config) == train_digits(out, config=config, resume=True)
    monkeypatch.setitem(METHODS, name, replace(METHODS[name], revision=METHODS[name].revision + 1))
    with pytest.raises(OutputExistsError, match="finished model of other settings"):
        train_digits(out, config=config, resume=True)


def test_one_training_at_a_time_into_a_folder(tmp_path):
    """The second ends at once, before it has read any data."""
    out, refused = tmp_path / "m", 0

    def second(*_):
        nonlocal refused
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(DataError, match="being written by another process"):
                train("features:/nowhere.npy", out, config=small(), **options)
            refused += 1

    train_digits(out, steps=2, progress=second)
    assert refused == 6
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_saves_the_step_under_way(trained, tmp_path, number, request):
    """And has the effect that it would have had: here its handler of before is called."""
    found = signal.getsignal(number)
    # A shell's background jobs are born with ctrl-C ignored, and what is ignored stays so.
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(number, found))

    def send(step, *_):
        if step == 7:
            for _i in range(1 if number == signal.SIGINT else 2):  # a second one changes nothing
                os.kill(os.getpid(), number)

    before, out, steps = signal.getsignal(number), tmp_path / "m", []
    with ended_by_signals(), pytest.raises(KeyboardInterrupt) as caught:
        train_digits(out, checkpoint_seconds=3600.0, progress=send)
    assert signal.getsignal(number) == before
    assert isinstance(caught.value, Terminated) == (number != signal.SIGINT)
    train_digits(out, resume=True, seen=steps)
    assert steps[0] == 9
    assert same_bytes(out, trained)


@pytest.mark.parametrize(("noise", "same"), [(0.0, "crop"), (0.5, "none")])
def test_perceptrons_with_noise_see_images_as_they_are(tmp_path, noise, same):
    network = NetworkConfig(backbone="mlp", hidden=(8,), noise=noise)
    made = {
        augment: train_digits(
            tmp_path / augment, config=small(network, steps=2, validation=0.0, augment=augment)
        )
        for augment in ("auto", "crop", "none")
    }
    assert not same_bytes(made["crop"], made["none"])
    assert same_bytes(made["auto"], made[same])
    assert json.loads((made["auto"] / "config.json").read_text())["training"]["validation_map"] is None


def test_a_checkpoint_of_another_network_is_one_clear_error(tmp_path):
    """As of a version that had a tensor more or less under the same settings."""
    config = small()
    method = build_network(config, {"kind": "features", "width": 4}, 3)
    state = RunState(tmp_path, method, method.optimizer(config))
    state.save("identity")
    state.take(state.read("identity"))
    method.register_buffer("new", torch.ones(1))
    with pytest.raises(DataError, match="another version of gpq-faiss: start again with --overwrite"):
        state.take(state.read("identity"))


def test_diverging_is_an_error_not_a_model(tmp_path):
    with pytest.raises(DataError, match="learning_rate"):
        train_digits(tmp_path / "m", learning_rate=1e30, steps=50)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(("limit", "threads"), [(loop._SMALL_STEP, 1), (1.0, 2)])
def test_small_steps_are_computed_by_one_thread(tmp_path, monkeypatch, limit, threads):
    """Several would wait for each other; what the caller has set is there again afterwards."""
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    monkeypatch.setattr(loop, "_SMALL_STEP", limit)
    try:
        train_digits(tmp_path / "m", steps=3, progress=lambda *_: seen.append(torch.get_num_threads()))
        assert seen == [threads] * 3
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
