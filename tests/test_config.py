"""Settings: to TOML and back, unknown names refused, the fingerprint of everything."""

import dataclasses
import itertools
import json

import pytest

from gpq_faiss.config import (
    FINE_TUNING,
    PRESETS,
    Config,
    codebooks_for_bits,
    from_dict,
    parse_settings,
    preset,
    read_toml,
    validate,
)
from gpq_faiss.errors import DataError, UsageError


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_survives_json(name):
    config = validate(preset(name))
    assert config.preset == name
    assert from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_settings_that_this_version_does_not_have_are_named():
    saved = dataclasses.asdict(preset("paper"))
    for section, value, message in (
        ("loss", {"lambda1": "x"}, "lambda1 = 'x'"),
        ("loss", 3, "loss = 3: "),
        ("posterior", {"committee": 3}, "setting 'posterior.committee' is unknown"),
        ("gone", {"x": 1}, "setting 'gone' is unknown"),
    ):
        with pytest.raises(UsageError, match=message):
            from_dict(saved | {section: value})


def test_a_file_changes_single_settings_of_its_preset(tmp_path):
    file = tmp_path / "run.toml"
    training = "[training]\nsteps = 7\nlearning_rate = 1\n"
    file.write_text(f'preset = "authors"\n{training}[network]\nhidden = [3, 4]\n')
    config = read_toml(file)
    changes = {"training": {"steps": 7, "learning_rate": 1.0}, "network": {"hidden": (3, 4)}}
    assert config == preset("authors").with_settings(changes)
    assert isinstance(config.training.learning_rate, float)


def test_pretrained_weights_change_settings_that_nobody_set():
    weights = {"network": {"weights": "imagenet"}}
    recommended = preset("recommended")
    tuned = recommended.with_settings(weights)
    assert FINE_TUNING.items() <= vars(tuned.training).items()
    assert from_dict(dataclasses.asdict(tuned)) == tuned
    for steps in (recommended.with_settings({"training": {"steps": 7}}), recommended):
        config = steps.with_settings(weights | {"training": {"batch_labelled": 125}})
        assert config.training.batch_labelled == 125
        assert config.training.steps == (7 if steps is not recommended else FINE_TUNING["steps"])
    assert preset("paper").with_settings(weights).training == preset("paper").training


NOT_TOML = "run.toml is not TOML"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainin]\nsteps = 1", "setting 'trainin' is unknown: did you mean 'training'?"),
        (
            "[training]\nstep = 1",
            "setting 'training.step' is unknown: did you mean 'training.steps'?",
        ),
        ("[gpq]\nx = 1", "setting 'gpq' is unknown: choose one of preset, method"),
        (
            '[training]\nsteps = "many"',
            "training.steps = 'many': input should be a valid integer, or ",
        ),
        ("[training]\nsteps = 1.5", "training.steps = 1.5: .*integer"),
        ("training = 3", "training = 3: "),
        (
            'method = "gpq-both"',
            "method = 'gpq-both': input should be 'gpq', 'gpq-printed', 'gpq-trip",
        ),
        ("[posterior]\ncommittee = 3", "setting 'posterior.committee' is unknown: "),
        ("[posterior]\npropagation = -1", r"posterior\.propagation = -1"),
        (
            "[network]\nhidden = [3, 0]",
            "network.hidden = 0: input should be greater than or equal to 1",
        ),
        ("[loss]\nlambda1 = nan", "loss.lambda1 = nan: input should be a finite number"),
        (
            "[quantizer]\ncodewords = 12",
            "quantizer.codewords = 12: input should be 4, 8, 16, 32, 64, 128 or 256",
        ),
        ('method = "pq"', "method = 'pq': input should be 'gpq', .*, 'gpq-authors' or 'posterior'"),
        ('preset = "best"', "no preset 'best'"),
        ("no such thing, just words.", NOT_TOML),
    ],
)
def test_what_cannot_be_is_refused_by_name(text, message, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(DataError if NOT_TOML in message else UsageError, match=message):
        read_toml(file)


def test_the_fingerprint_sees_every_setting():
    recorded, count = {Config().fingerprint()}, 0
    for section in dataclasses.fields(Config):
        value = getattr(Config(), section.name)
        if not dataclasses.is_dataclass(value):
            continue
        for setting in dataclasses.fields(value):
            # Another value, whether it could be or not: no field is left out.
            changed = dataclasses.replace(
                value, **{setting.name: f"not {getattr(value, setting.name)}"}
            )
            recorded.add(dataclasses.replace(Config(), **{section.name: changed}).fingerprint())
            count += 1
    assert len(recorded) == count + 1


def test_settings_on_the_command_line_are_typed_and_checked():
    texts = [
        "training.steps=4",
        "network.backbone=vgg",
        "network.hidden=[3, 4]",
        "network.noise=0.25",
    ]
    config = preset("recommended").with_settings(
        parse_settings([*texts, "loss.lambda2 = 1", "method=gpq"])
    )
    assert (config.training.steps, config.network.backbone, config.network.hidden) == (
        4,
        "vgg",
        (3, 4),
    )
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
        (
            "recommended",
            {"quantizer": {"subdim": 2}},
            "quantizer.subdim = 2: at least 3 are needed",
        ),
        ("recommended", {"loss": {"lambda1": 0.0}}, "loss.lambda1 = 0: it must be above 0"),
        ("authors", {"training": {"batch_unlabelled": 1}}, "one item has no batch statistics"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(name, changes, message):
    with pytest.raises(UsageError, match=message):
        validate(preset(name).with_settings(changes))
    assert validate(preset("paper").with_settings(changes)), (
        "sections of other methods have no effect"
    )


def test_bits_and_codebooks_agree_or_are_refused():
    for M, nbits in itertools.product(range(1, 65), range(2, 9)):
        assert codebooks_for_bits(M * nbits, 1 << nbits) == M
        config = Config().with_settings({"quantizer": {"codebooks": M, "codewords": 1 << nbits}})
        assert config.quantizer.bits == M * nbits
    for bits, K in ((13, 16), (0, 16), (-4, 16), (12, 32)):
        with pytest.raises(UsageError, match="do not divide"):
            codebooks_for_bits(bits, K)
