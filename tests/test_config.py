"""Settings: to TOML and back, unknown names refused, the fingerprint of everything."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.config import (
    PRESETS,
    Config,
    codebooks_for_bits,
    from_dict,
    merge,
    preset,
    read_toml,
    to_dict,
    to_toml,
    validate,
)
from gpq_faiss.errors import DataError, UsageError


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_survives_toml_and_json(name: str, tmp_path: Path) -> None:
    config = validate(preset(name))
    assert config.preset == name
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert read_toml(tmp_path / "run.toml") == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_file_changes_single_settings_of_its_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'preset = "recommended"\n[training]\nsteps = 7\nlearning_rate = 1\n[network]\nhidden = [3, 4]\n'
    )
    config = read_toml(file)
    expected = merge(
        preset("recommended"),
        {"training": {"steps": 7, "learning_rate": 1.0}, "network": {"hidden": (3, 4)}},
    )
    assert config == expected
    assert isinstance(config.training.learning_rate, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainin]\nsteps = 1", "unknown setting 'trainin'"),
        ("[training]\nstep = 1", "unknown setting 'training.step'"),
        ('[training]\nsteps = "many"', "training.steps = 'many': int"),
        ("[training]\nsteps = true", "training.steps = True: int"),
        ("[training]\nsteps = 1.5", "training.steps"),
        ("training = 3", "is a section"),
        ('[loss]\nclassification = "both"', "choose one of paper, code"),
        ("[network]\nhidden = 3", "a list"),
        ('preset = "best"', "no preset 'best'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_toml(file)


def test_a_file_that_is_no_toml_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not found"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe = [")
    with pytest.raises(DataError, match="TOML"):
        read_toml(tmp_path / "a.toml")


def test_the_fingerprint_sees_every_setting() -> None:
    seen = {Config().fingerprint()}
    for section in dataclasses.fields(Config):
        value = getattr(Config(), section.name)
        if not dataclasses.is_dataclass(value):
            continue
        for setting in dataclasses.fields(value):
            old = getattr(value, setting.name)
            new: Any = not old if isinstance(old, bool) else f"{old}x" if isinstance(old, str) else None
            if new is None:
                new = (*old, 1) if isinstance(old, tuple) else old + 1
            changed = dataclasses.replace(value, **{setting.name: new})  # type: ignore[type-var]
            seen.add(dataclasses.replace(Config(), **{section.name: changed}).fingerprint())
    total = sum(
        len(dataclasses.fields(getattr(Config(), s.name)))
        for s in dataclasses.fields(Config)
        if dataclasses.is_dataclass(getattr(Config(), s.name))
    )
    assert len(seen) == total + 1


@given(M=st.integers(1, 64), nbits=st.integers(2, 8))
def test_bits_and_codebooks_agree(M: int, nbits: int) -> None:
    assert codebooks_for_bits(M * nbits, 1 << nbits) == M
    config = merge(Config(), {"quantizer": {"codebooks": M, "codewords": 1 << nbits}})
    assert config.quantizer.bits == M * nbits


def test_bits_that_do_not_divide_are_refused() -> None:
    for bits, K in ((13, 16), (0, 16), (-4, 16), (12, 32)):
        with pytest.raises(UsageError, match="do not divide"):
            codebooks_for_bits(bits, K)
