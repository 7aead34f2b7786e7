"""Options of ``gpq train``: what its help shows, and ``--set``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import gpq

SHORT = ("train", "digits", "--labelled", "5-per-class", "--preset", "paper")


def test_set_and_options_of_their_own_are_settings(tmp_path: Path) -> None:
    texts = ["network.backbone=mlp", "training.steps=1", "training.validation=0", "training.augment=none"]
    options = [word for text in texts for word in ("--set", text)]
    out = tmp_path / "model"
    done = gpq(*SHORT, *options, "--bits", "8", "--seed", "3", "--out", out)
    assert done.exit_code == 0, done.output
    config = json.loads((out / "config.json").read_text())["config"]
    assert (config["network"]["backbone"], config["training"]["seed"]) == ("mlp", 3)
    assert (config["quantizer"]["codebooks"], config["training"]["steps"]) == (2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "training.step=3"], "'training.step' is unknown: did you mean 'training.steps'?"),
        (["--set", "training.steps=many"], "training.steps = 'many': "),
        (["--set", "training.steps"], "write SECTION.KEY=VALUE"),
        (["--set", "training=3"], "training = 3"),
        (["--bits", "8", "--set", "quantizer.codebooks=2"], "both set the code length"),
        (["--validate-every", "0"], "validate_every = 0"),
    ],
)
def test_what_cannot_be_set_is_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    done = gpq(*SHORT, *options, "--out", tmp_path / "model")
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "model").exists()
