"""The Dockerfile and the compose file: their commands and files exist. No image is built."""

import json
import re
from pathlib import Path

import click
import pytest
from gpq_cli.main import cli

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def parse(name, *arguments):
    """Return the parameters of a command of gpq."""
    return cli.get_command(click.Context(cli), name).make_context(name, [*arguments]).params


def test_copied_files_exist_and_are_sent_to_the_build():
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    lines = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
    names = [name for line in lines for name in line.split()[:-1]]
    assert names
    assert all((ROOT / name).exists() and f"!{name}" in sent for name in names)


def test_the_containers_start_commands_of_gpq():
    yaml = pytest.importorskip("yaml")
    commands = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", DOCKERFILE, re.MULTILINE)
    (_, *entrypoint), default = map(json.loads, commands)
    assert parse(*entrypoint, *default)["host"] == "0.0.0.0"  # noqa: S104
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for device, service in zip(("auto", "cuda"), (services["cpu"], services["gpu"]), strict=True):
        assert parse(*entrypoint, *service["command"])["device"] == device
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
