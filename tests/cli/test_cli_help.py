"""The commands explain themselves: help, examples that parse, options that say what they do, and a place in the README."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from gpq_cli.main import COMMANDS, cli

README = Path(__file__).parents[2] / "README.md"
SELF_EVIDENT = ("MODEL_DIR", "CODES_OR_FEATURES", "INDEX")
HEAVY = ("torch", "torchvision", "faiss", "h5py", "numpy", "sklearn", "matplotlib", "PIL", "scipy", "onnx")


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def examples(text: str) -> Iterator[list[str]]:
    """The arguments of every line of ``text`` that is a call of gpq."""
    for line in text.splitlines():
        if match := re.match(r"\s*gpq (?!COMMAND)(?=[a-z])(.+)", line):
            yield shlex.split(match[1].split("#")[0].split("|")[0])


def check_call(arguments: list[str]) -> None:
    """The command exists and takes these arguments; nothing is run."""
    name, *rest = arguments
    found = command(name)
    if isinstance(found, click.Group):
        name, *rest = rest
        part = found.get_command(click.Context(found), name)
        assert part is not None
        found = part
    found.make_context(name, rest).close()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_the_command_takes(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"], prog_name="gpq")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: gpq {name} ")
    assert "Example" in result.stdout
    assert "-q, --quiet" in result.stdout
    assert "-v, --verbose" in result.stdout
    calls = list(examples(result.stdout))
    assert calls
    for call in calls:
        check_call(call)
    assert name in [call[0] for call in calls]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    options = [p for p in command(name).params if isinstance(p, click.Option)]
    # A group leaves its options to its parts, which have tests of their own.
    assert options or isinstance(command(name), click.Group)
    silent = [option.opts[0] for option in options if not (option.help or "").strip()]
    assert not silent
    short = [
        option.opts[0] for option in options if not (option.help or "").rstrip().endswith((".", "]", ")"))
    ]
    assert not short, "help texts are sentences"
    for argument in (p for p in command(name).params if isinstance(p, click.Argument)):
        # click has no help for arguments, so the text of the command must say what those with many forms may be.
        shown = argument.make_metavar(click.Context(command(name)))
        assert shown in SELF_EVIDENT or f"{shown} is" in (command(name).help or "")


def test_commands_are_listed_in_the_order_of_the_path() -> None:
    result = CliRunner().invoke(cli, ["--help"], prog_name="gpq")
    assert result.exit_code == 0
    listed = re.findall(r"^  ([a-z-]+)  +\S", result.stdout.split("Commands:")[1], re.MULTILINE)
    assert listed == list(COMMANDS)
    for call in examples(result.stdout):
        check_call(call)


def test_the_readme_shows_every_command_and_its_calls_are_right() -> None:
    text = README.read_text(encoding="utf-8")
    calls = list(examples(text))
    assert {call[0] for call in calls} == set(COMMANDS)
    for call in calls:
        check_call(call)


def test_help_waits_for_no_heavy_library() -> None:
    """Two processes: gpq --help alone, and then the help of every command, must not import what takes seconds."""
    script = """
import json, sys
from gpq_cli.main import COMMANDS, cli
for arguments in [[], *([[name] for name in COMMANDS] if "all" in sys.argv else [])]:
    try:
        cli([*arguments, "--help"], prog_name="gpq")
    except SystemExit as stop:
        assert stop.code == 0
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
    for extra in ([], ["all"]):
        ran = subprocess.run(
            [sys.executable, "-c", script, *extra], capture_output=True, text=True, check=True
        )
        loaded = json.loads(ran.stderr)
        assert "click" in loaded
        assert not {name.split(".")[0] for name in loaded} & set(HEAVY)


def test_version_is_the_packages() -> None:
    from gpq_faiss import __version__

    result = CliRunner().invoke(cli, ["--version"], prog_name="gpq")
    assert __version__ in result.stdout
