"""Options of ``gpq train``: what its help shows, ``--set``, and the names that options had before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import gpq

SHORT = ("train", "digits", "--labelled", "5-per-class", "--preset", "paper", "--bits", "8")


def test_the_help_shows_at_most_eighteen_options() -> None:
    shown = [
        line for line in gpq("train", "--help").output.splitlines() if line.startswith(("  -", "      --"))
    ]
    assert {"--out", "--set", "--bits", "--labelled", "--seed"} <= {
        word.rstrip(",") for line in shown for word in line.split()[:2]
    }
    assert len([line for line in shown if "--help" not in line]) <= 18


def test_former_options_are_settings(tmp_path: Path) -> None:
    """Each of them alone and all together give the settings that --set gives."""
    before = ["--backbone", "mlp", "--steps", "1", "--validation", "0", "--seed", "3", "--augment", "none"]
    now = ["network.backbone=mlp", "training.steps=1", "training.validation=0", "training.seed=3"]
    texts = [word for text in [*now, "training.augment=none"] for word in ("--set", text)]
    for name, options in (("before", before), ("now", texts)):
        done = gpq(*SHORT, *options, "--out", tmp_path / name)
        assert done.exit_code == 0, done.output
    one, two = (json.loads((tmp_path / n / "config.json").read_text()) for n in ("before", "now"))
    assert one == two
    assert one["config"]["network"]["backbone"] == "mlp"
    assert one["config"]["training"]["seed"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "training.step=3"], "unknown setting 'training.step'"),
        (["--set", "training.steps=many"], "training.steps = 'many': a whole number of at least 1"),
        (["--set", "training.steps"], "write SECTION.KEY=VALUE"),
        (["--set", "training=3"], "'training' is a section"),
        (["--bits", "8", "--codebooks", "2"], "--bits and --codebooks both set the code length"),
        (["--steps", "3", "--epochs", "1"], "--steps and --epochs both set the length"),
        (["--validate-every", "0"], "validate_every = 0"),
    ],
)
def test_what_cannot_be_set_is_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    done = gpq(*SHORT, *options, "--out", tmp_path / "model")
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "model").exists()
