"""The Dockerfile and the compose file: linted, and what they start is a command that there is.

(No image is built here.)
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from gpq_cli.main import cli

ROOT = Path(__file__).parents[2]


def starts(arguments):
    """Parameters of a command."""
    name, *rest = arguments
    command = cli.get_command(click.Context(cli), name)
    return command.make_context(name, rest).params


def test_the_dockerfile_is_linted():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if hadolint is None:
        pytest.skip("needs hadolint")
    done = subprocess.run(
        [hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_what_it_copies_is_there_and_sent_to_the_build():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(
        r"^COPY (?!--from)(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE
    ):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists()
            assert f"!{name}" in ignored


def test_the_commands_are_those_of_gpq():
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "Dockerfile").read_text()
    found = [
        json.loads(m) for m in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", text, re.MULTILINE)
    ]
    (gpq, *first), default = found
    assert gpq == "gpq"
    assert starts([*first, *default])["host"] == "0.0.0.0"  # noqa: S104
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    devices = {name: starts([*first, *one["command"]])["device"] for name, one in services.items()}
    assert devices == {"cpu": "auto", "gpu": "cuda"}
    for one in services.values():
        assert all(port.startswith("127.0.0.1:") for port in one["ports"])
        assert "GPQ_SERVE_TOKEN" in one["environment"]
