"""The commands explain themselves: help, examples that parse, and a place in the README."""

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from gpq_cli.main import cli

from gpq_faiss import __version__

README = Path(__file__).parents[2] / "README.md"
COMMANDS = list(cli.commands)
NAMES = [*COMMANDS, *(f"experiment {name}" for name in ("methods", "run", "report"))]


def command(name):
    """Return a command or subcommand by its name."""
    result = cli
    for word in name.split():
        result = result.commands[word]
    return result


def check_examples(text):
    """Check that the calls of gpq in a text parse; nothing is run. Returns the commands."""
    names = []
    for match in re.finditer(r"^\s*gpq (?!COMMAND)(?=[a-z])([^#|\n]+)", text, re.MULTILINE):
        name, *words = shlex.split(match[1])
        if name == "experiment":
            name += f" {words.pop(0)}"
        command(name).make_context(name, words).close()
        names.append(name)
    return names


@pytest.mark.parametrize("name", NAMES)
def test_help_has_an_example_that_parses(name):
    result = CliRunner().invoke(cli, [*name.split(), "--help"], prog_name="gpq")
    assert result.exit_code == 0
    assert name in check_examples(result.stdout) or name == "experiment"


@pytest.mark.parametrize("name", NAMES)
def test_command_has_few_options_with_sentences(name):
    options = [option for option in command(name).params if isinstance(option, click.Option)]
    shown = [option for option in options if not option.hidden]
    assert len(shown) < 14, "with --help at most 14"
    assert all(option.help.rstrip().endswith((".", "]", ")")) for option in shown)


def test_commands_are_listed_in_the_order_of_the_path():
    result = CliRunner().invoke(cli, ["--help"], prog_name="gpq")
    listed = re.findall(r"^  ([a-z-]+)  +\S", result.stdout.split("Commands:")[1], re.MULTILINE)
    assert listed == COMMANDS
    assert check_examples(result.stdout)
    assert __version__ in CliRunner().invoke(cli, ["--version"], prog_name="gpq").stdout


def test_readme_shows_every_command():
    names = check_examples(README.read_text(encoding="utf-8"))
    assert {name.split()[0] for name in names} == set(COMMANDS)
