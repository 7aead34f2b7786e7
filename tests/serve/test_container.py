"""The Dockerfile and the compose file: their commands exist. No image is built."""

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


def test_the_containers_start_commands_of_gpq():
    yaml = pytest.importorskip("yaml")
    commands = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", DOCKERFILE, re.MULTILINE)
    (_, *entrypoint), default = map(json.loads, commands)
    assert parse(*entrypoint, *default)["host"] == "0.0.0.0"  # noqa: S104
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for device, service in zip(("auto", "cuda"), (services["cpu"], services["gpu"]), strict=True):
        assert parse(*entrypoint, *service["command"])["device"] == device
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
