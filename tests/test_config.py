"""Settings: to TOML and back, unknown names refused, the fingerprint of everything."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpq_faiss.config import (
    PRESETS,
    Config,
    codebooks_for_bits,
    from_dict,
    parse_settings,
    preset,
    read_toml,
    to_dict,
    validate,
)
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.protocols import make_split
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.methods.gpq import build_network
from gpq_faiss.methods.model import load_model, save_model


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_survives_json(name):
    config = validate(preset(name))
    assert config.preset == name
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_model_folder_of_earlier_settings_opens(tmp_path):
    saved = to_dict(preset("gpq"))
    saved["training"] |= {"epochs": 0.0, "seed": 5}
    saved["network"]["dropout"] = 0.5
    saved["loss"]["beta"] = 20.0
    saved["quantizer"] = {"codebooks": 2, "codewords": 4, "subdim": 6, "alpha": 8.0}
    saved["posterior"] = {"committee": 3, "committee_hidden": 7}
    saved["gpq"] = {"classification": "code", "variant": "printed"}
    saved["gone"] = {"x": 1}
    config = from_dict(saved)
    assert (config.training.seed, config.posterior.networks) == (5, 3)
    assert config.network.hidden == (7,)
    net = build_network(config, {"kind": "features", "width": 5}, 3).eval()
    state = {key.replace("classes.", "committee."): value for key, value in net.state_dict().items()}
    state["committee.prototypes"] = torch.zeros(1, 3, 3)
    earlier = SimpleNamespace(
        state_dict=lambda: state, coder=net.coder, asymmetric=True, items_are_codewords=False
    )
    split = make_split(Labels.from_ids(np.arange(60) % 3), labelled="5-per-class")
    about = {"config": saved, "input": {"kind": "features", "width": 5}, "class_names": ["a", "b", "c"]}
    save_model(tmp_path / "m", earlier, about, extra={}, split=split, overwrite=False)
    x = torch.randn(4, 5)
    assert torch.equal(load_model(tmp_path / "m").network.queries(x), net.queries(x))
    messages = (
        ({"beta": 9.0}, "loss.beta = 9.0"),
        ({"lambda1": "x"}, "lambda1 = 'x'"),
        (3, "loss = 3: "),
    )
    for wrong, message in messages:
        with pytest.raises(UsageError, match=message):
            from_dict(saved | {"loss": wrong})


def test_variants_and_schedules_of_earlier_settings(tmp_path):
    """What was ``[gpq] variant`` is a method, but with class networks, where it changed the network alone."""
    for gpq, method in (
        ({}, "gpq"),
        ({"variant": "triplet"}, "gpq-triplet"),
        ({"classification": "code", "details": "authors"}, "gpq-authors"),
    ):
        saved = to_dict(preset("paper")) | {"gpq": gpq}
        saved["training"]["schedule"] = "cosine"
        assert from_dict(saved) == preset("paper").with_settings({"method": method})
    saved = to_dict(preset("gpq")) | {"gpq": {"variant": "authors"}}
    with pytest.raises(UsageError, match=r"gpq\.variant = authors: .*: train again"):
        from_dict(saved)
    saved["network"]["backbone"] = "mlp"  # which it left alone
    assert from_dict(saved) == preset("gpq").with_settings({"network": {"backbone": "mlp"}})


def test_a_file_changes_single_settings_of_its_preset(tmp_path):
    file = tmp_path / "run.toml"
    training = "[training]\nsteps = 7\nlearning_rate = 1\n"
    file.write_text(f'preset = "recommended"\n{training}[network]\nhidden = [3, 4]\n')
    config = read_toml(file, preset("paper"))
    changes = {"training": {"steps": 7, "learning_rate": 1.0}, "network": {"hidden": (3, 4)}}
    assert config == preset("recommended").with_settings(changes)
    assert isinstance(config.training.learning_rate, float)


NOT_TOML = "run.toml is not TOML"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainin]\nsteps = 1", "setting 'trainin' is unknown: did you mean 'training'?"),
        ("[training]\nstep = 1", "setting 'training.step' is unknown: did you mean 'training.steps'?"),
        ("[gpq]\nx = 1", "setting 'gpq' is unknown: choose one of preset, method"),
        ('[training]\nsteps = "many"', "training.steps = 'many': input should be a valid integer, or "),
        ("[training]\nsteps = 1.5", "training.steps = 1.5: .*integer"),
        ("training = 3", "training = 3: "),
        ('method = "gpq-both"', "method = 'gpq-both': input should be 'gpq', 'gpq-printed', 'gpq-trip"),
        ("[posterior]\ncommittee = 3", "setting 'posterior.committee' is unknown: "),
        ("[posterior]\npropagation = -1", r"posterior\.propagation = -1"),
        ("[network]\nhidden = [3, 0]", "network.hidden = 0: input should be greater than or equal to 1"),
        ("[loss]\nlambda1 = nan", "loss.lambda1 = nan: input should be a finite number"),
        ("[loss.extra]\nmine = -1", "loss.extra = -1: input should be greater than or equal to 0"),
        (
            "[quantizer]\ncodewords = 12",
            "quantizer.codewords = 12: input should be 4, 8, 16, 32, 64, 128 or 256",
        ),
        ('method = "pq"', "method = 'pq': input should be 'gpq', .*, 'gpq-soft' or 'posterior'"),
        ('preset = "best"', "no preset 'best'"),
        ("[training]\nsteps = " + "9" * 5000, f"{NOT_TOML}: a whole number of more than 64 bits$"),
        ("[training]\nsteps = " + "9" * 25, f"{NOT_TOML}: a whole number of more than 64 bits$"),
        ("a = " + "[" * 200_000, f"{NOT_TOML}: brackets are nested too deeply$"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text, message, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(DataError if NOT_TOML in message else UsageError, match=message):
        read_toml(file, preset("paper"))


def test_the_fingerprint_sees_every_setting():
    seen, count = {Config().fingerprint()}, 0
    for section in dataclasses.fields(Config):
        value = getattr(Config(), section.name)
        if not dataclasses.is_dataclass(value):
            continue
        for setting in dataclasses.fields(value):
            # Another value, whether it could be or not: no field is left out.
            changed = dataclasses.replace(value, **{setting.name: f"not {getattr(value, setting.name)}"})
            seen.add(dataclasses.replace(Config(), **{section.name: changed}).fingerprint())
            count += 1
    assert len(seen) == count + 1


def test_settings_on_the_command_line_are_typed_and_checked():
    texts = ["training.steps=4", "network.backbone=vgg", "network.hidden=[3, 4]", "network.noise=0.25"]
    config = preset("recommended").with_settings(parse_settings([*texts, "loss.lambda2 = 1", "method=gpq"]))
    assert (config.training.steps, config.network.backbone, config.network.hidden) == (4, "vgg", (3, 4))
    assert (config.network.noise, config.loss.lambda2, config.method) == (0.25, 1.0, "gpq")
    assert parse_settings(["network.weights=a=b"]) == {"network": {"weights": "a=b"}}
    for wrong in ("training.steps", "=3", "training.=3", ".steps=3", "preset=paper", ""):
        with pytest.raises(UsageError, match=r"write SECTION\.KEY=VALUE"):
            parse_settings([wrong])
    texts = ["training.steps=3", "training=4", "training.steps=5"]
    assert parse_settings(texts) == {"training": {"steps": 5}}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpq", {"quantizer": {"subdim": 2}}, "quantizer.subdim = 2: at least 3 are needed"),
        ("recommended", {"loss": {"lambda1": 0.0}}, "loss.lambda1 = 0: it must be above 0"),
        ("authors", {"training": {"batch_unlabelled": 1}}, "one item has no batch statistics"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(name, changes, message):
    with pytest.raises(UsageError, match=message):
        validate(preset(name).with_settings(changes))
    assert validate(preset("paper").with_settings(changes)), "sections of other methods have no effect"


def test_bits_and_codebooks_agree_or_are_refused():
    for M, nbits in itertools.product(range(1, 65), range(2, 9)):
        assert codebooks_for_bits(M * nbits, 1 << nbits) == M
        config = Config().with_settings({"quantizer": {"codebooks": M, "codewords": 1 << nbits}})
        assert config.quantizer.bits == M * nbits
    for bits, K in ((13, 16), (0, 16), (-4, 16), (12, 32)):
        with pytest.raises(UsageError, match="do not divide"):
            codebooks_for_bits(bits, K)
