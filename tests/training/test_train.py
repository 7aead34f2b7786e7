"""The training loop: sampling, hidden labels, validation, checkpoints, and that a killed run
reaches the same codes.
"""

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
from safetensors.torch import save_file

import gpq_faiss as gpq
from gpq_faiss.config import TrainingConfig, preset
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import load_split
from gpq_faiss.errors import DataError, OutputExistsError, UsageError
from gpq_faiss.methods.model import load_model
from gpq_faiss.nn.backbones import BackboneSpec, build_backbone
from gpq_faiss.signals import ended_by_signals
from gpq_faiss.stages.train import train
from gpq_faiss.training.batches import EpochSampler, hold_out
from gpq_faiss.training.loop import RunOptions, count_steps


def small(**training):
    """Settings of a training that takes a second."""
    settings = {"steps": 12, "batch_labelled": 60, "batch_unlabelled": 60, "validation": 0.1}
    network = {"backbone": "mlp", "hidden": [32]}
    changes = {"quantizer": {"codebooks": 3}, "network": network, "training": settings | training}
    return preset("paper").with_settings(changes)


def train_digits(out, *, data=None, config=None, stop=None, steps=None, **options):
    """Train on the digits or other data; ended after step ``stop``, as by a kill.

    ``steps`` gets the numbers of the steps.
    """

    def progress(step, *_):
        if steps is not None:
            steps.append(step)
        if step == stop:
            raise InterruptedError

    run = {"checkpoint_seconds": 0.0, "progress": progress, "validate_every": 4} | options
    return train(
        data or digits(),
        out,
        config=config or small(),
        labelled="30-per-class",
        overwrite=run.pop("overwrite", False),
        options=RunOptions(**run),
    )


def weights(model):
    return (model / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_digits(tmp_path_factory.mktemp("train") / "model")


@pytest.fixture
def cut(tmp_path):
    """A training that was killed after its sixth step."""
    with pytest.raises(InterruptedError):
        train_digits(tmp_path / "model", stop=6)
    return tmp_path / "model"


@given(
    n=st.integers(1, 40), batch=st.integers(1, 60), seed=st.integers(0, 5), steps=st.integers(1, 30)
)
def test_an_epoch_passes_over_every_row_once(n, batch, seed, steps):
    rows = np.arange(100, 100 + n)
    sampler = EpochSampler(rows, batch, (seed,))
    batches = [sampler.rows_of_step(step) for step in range(steps)]
    assert all(len(sampled) == min(batch, n) for sampled in batches)
    drawn = np.concatenate(batches)
    for start in range(0, len(drawn) - n + 1, n):
        assert sorted(drawn[start : start + n]) == rows.tolist()
    # A batch depends on its step alone, so a resumed run draws the same.
    np.testing.assert_array_equal(
        EpochSampler(rows, batch, (seed,)).rows_of_step(steps - 1), batches[-1]
    )


@given(share=st.floats(0.05, 0.5), classes=st.integers(2, 6), seed=st.integers(0, 3))
def test_held_out_items_are_balanced_over_classes(share, classes, seed):
    ids = np.repeat(np.arange(classes), 40)
    held_out = hold_out(Labels.from_ids(ids), np.arange(len(ids)), share, seed)
    count = round(share * len(ids))
    assert len(held_out) == (count if count >= 2 * classes else 0)
    counts = np.bincount(ids[held_out], minlength=classes)
    assert counts.max() - counts.min() <= 1
    # The only item of a class is not held out.
    assert len(ids) not in hold_out(
        Labels.from_ids([*ids, classes]), np.arange(len(ids) + 1), share, seed
    )


@pytest.mark.parametrize(("classes", "steps"), [(1, 800), (101, 808), (200, 1600), (10**4, 1600)])
def test_automatic_number_of_steps(classes, steps):
    assert count_steps(TrainingConfig(steps="auto"), classes) == steps


def test_the_model_folder_is_complete(trained):
    assert os.listdir(trained.parent) == ["model"]
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12]
    figures = {"total", "npair", "classification", "entropy", "validation_map"}
    assert all(figures <= set(line) for line in lines)
    description = json.loads((trained / "config.json").read_text())["training"]
    assert description["best_step"] == max(lines, key=lambda line: line["validation_map"])["step"]
    assert len(load_split(trained / "split.json").labelled) == 300
    model = load_model(trained)
    np.testing.assert_allclose(np.linalg.norm(model.codebooks, axis=2), 1, atol=1e-5)
    np.testing.assert_array_equal(model.network.codebooks().detach().numpy(), model.codebooks)


def test_hidden_labels_do_not_matter(trained, tmp_path):
    dataset, split = digits(), load_split(trained / "split.json")
    labels = dataset.require_labels()
    packed = labels.packed.copy()
    hidden = np.setdiff1d(np.arange(len(dataset)), np.concatenate([split.labelled, split.query]))
    packed[hidden] = np.random.default_rng(0).permutation(packed[hidden])
    np.save(tmp_path / "rows.npy", split.labelled)
    scrambled = replace(dataset, labels=Labels(packed, labels.class_names))
    options = {"config": small(), "labelled": str(tmp_path / "rows.npy"), "protocol": "none"}
    models = [
        train(data, tmp_path / str(i), **options) for i, data in enumerate((dataset, scrambled))
    ]
    assert weights(models[0]) == weights(models[1])


def test_an_interrupted_run_resumes_to_the_same_codes(trained, cut):
    steps = []
    assert not cut.exists()
    train_digits(cut, resume=True, steps=steps)
    assert steps == list(range(7, 13))
    assert weights(cut) == weights(trained)
    assert os.listdir(cut.parent) == ["model"]


def test_an_interrupted_training_of_convolutions_resumes_to_the_same_codes(tmp_path):
    network = {"backbone": "vgg", "image_size": 16}
    changes = {"network": network, "training": {"steps": 2, "batch_labelled": 12}}
    images = np.stack(digits().read(slice(0, 500)))
    options = {
        "config": preset("recommended").with_settings(changes),
        "data": open_data(images, labels=digits().labels.dense().argmax(axis=1)[:500]),
    }
    full = train_digits(tmp_path / "whole", **options)
    with pytest.raises(InterruptedError):
        train_digits(tmp_path / "cut", stop=1, **options)
    assert weights(train_digits(tmp_path / "cut", resume=True, **options)) == weights(full)


def test_small_images_are_enlarged_for_a_pretrained_network(tmp_path):
    spec = BackboneSpec("vgg", "images", 1, image_size=32)
    network = build_backbone(spec, "none", generator=torch.Generator())
    save_file(network.state_dict(), tmp_path / "vgg.safetensors")
    changes = {
        "network": {"backbone": "vgg", "weights": str(tmp_path / "vgg.safetensors")},
        "quantizer": {"codebooks": 2, "codewords": 4},
        "posterior": {"feature_weight": 0},
        "training": {"steps": 1, "batch_labelled": 2, "batch_unlabelled": 2},
    }
    config = preset("recommended").with_settings(changes)
    data = open_data(np.stack(digits().read(slice(0, 8))), labels=np.arange(8) % 2)
    model = train(data, tmp_path / "model", config=config, protocol="none", labelled="all")
    assert json.loads((model / "config.json").read_text())["input"]["image_size"] == 128


def test_a_finished_model_is_not_trained_again(trained):
    before = {path.name: path.stat().st_mtime_ns for path in trained.iterdir()}
    assert train_digits(trained, resume=True) == trained
    assert {path.name: path.stat().st_mtime_ns for path in trained.iterdir()} == before


@pytest.mark.parametrize("options", [{}, {"resume": True, "config": small(steps=13)}])
def test_a_finished_model_is_not_replaced(trained, options):
    with pytest.raises(OutputExistsError, match="--overwrite"):
        train_digits(trained, **options)


def test_an_unfinished_run_is_not_replaced(cut):
    with pytest.raises(OutputExistsError, match="--resume"):
        train_digits(cut)
    with pytest.raises(DataError, match="other settings"):
        train_digits(cut, config=small(steps=31), resume=True)
    with pytest.raises(UsageError, match="give one of them"):
        train_digits(cut, resume=True, overwrite=True)


def test_a_damaged_checkpoint_is_refused(cut):
    (cut.parent / ".model.partial" / "checkpoint.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(DataError, match="damaged"):
        train_digits(cut, resume=True)


def test_a_folder_that_is_no_model_is_not_replaced(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    for options in ({"overwrite": True}, {"resume": True}):
        with pytest.raises(DataError, match="not a model folder and is not replaced"):
            train_digits(tmp_path / "photos", **options)


def test_a_replaced_model_stays_until_the_new_one_is_complete(trained, tmp_path):
    out, changed = tmp_path / "model", small(seed=1)
    shutil.copytree(trained, out)
    with pytest.raises(InterruptedError):
        train_digits(out, config=changed, stop=7, overwrite=True)
    assert weights(out) == weights(trained)
    with pytest.raises(DataError, match="other settings"):
        train_digits(out, resume=True)
    train_digits(out, config=changed, resume=True)
    assert weights(out) == weights(train_digits(tmp_path / "fresh", config=changed))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_saves_the_current_step(trained, tmp_path, number, request):
    before = signal.getsignal(number)
    request.addfinalizer(lambda: signal.signal(number, before))
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def send(step, *_):
        if step == 7:
            os.kill(os.getpid(), number)

    with ended_by_signals(), pytest.raises(KeyboardInterrupt) as caught:
        train_digits(tmp_path / "model", checkpoint_seconds=3600.0, progress=send)
    assert str(caught.value) == ("" if number == signal.SIGINT else number.name)
    steps = []
    train_digits(tmp_path / "model", resume=True, steps=steps)
    assert steps[0] == 9
    assert weights(tmp_path / "model") == weights(trained)


def test_a_diverging_training_is_an_error(tmp_path):
    with pytest.raises(DataError, match="learning_rate"):
        train_digits(tmp_path / "model", config=small(learning_rate=1e30, steps=50))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("unlabelled", [1, 15])
def test_a_few_unlabelled_items_are_enough(tmp_path, unlabelled):
    x, y = np.random.default_rng(0).normal(size=(120, 8)), np.arange(120) % 4
    x[np.arange(120), y] += 4
    data = open_data(x, labels=np.where(np.arange(120) < unlabelled, -1, y))
    config = preset("recommended").with_settings({"training": {"steps": 3}})
    model = train(data, tmp_path / "model", config=config, protocol="none")
    codes = gpq.encode(model, x, tmp_path / "codes.h5")
    with gpq.RowReader(codes) as reader:
        assert len(np.unique(reader.values, axis=0)) > 20


def test_labels_of_other_items_are_a_warning(tmp_path, caplog):
    x, y = np.random.default_rng(0).normal(size=(200, 8)), np.arange(200) % 4
    x[np.arange(200), y] += 4
    config = preset("recommended").with_settings({"training": {"steps": 1}})
    for name, labels in (("right", y), ("shuffled", np.random.default_rng(1).permutation(y))):
        train(open_data(x, labels=labels), tmp_path / name, config=config, labelled="20-per-class")
        is_warned = "the labels hardly depend on the vectors" in caplog.text
        assert is_warned == (name == "shuffled")
    caplog.clear()
    train(open_data(x, labels=y), tmp_path / "few", config=config, labelled="1-per-class")
    train(open_data(x, labels=np.arange(200) < 3), tmp_path / "rare", config=config)
    assert "the labels hardly depend" not in caplog.text


def test_fewer_items_than_codewords_are_refused_before_the_first_step(tmp_path):
    x = np.random.default_rng(0).standard_normal((10, 8)).astype(np.float32)
    steps = []
    options = RunOptions(progress=lambda step, total: steps.append(step))
    with pytest.raises(DataError, match="10 items are too few for 16 codewords"):
        train(
            open_data(x, labels=np.arange(10) % 2),
            tmp_path / "model",
            config=preset("paper"),
            protocol="none",
            options=options,
        )
    assert steps == []
