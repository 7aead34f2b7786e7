"""The commands explain themselves: help, examples that parse, options that say what they do, and a
place in the README.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from gpq_cli.main import COMMANDS, cli

from gpq_faiss import __version__

README = Path(__file__).parents[2] / "README.md"
PARTS = tuple(f"experiment {part}" for part in ("methods", "run", "report"))
SELF_EVIDENT = ("MODEL_DIR", "CODES_OR_FEATURES", "INDEX")
HEAVY = (
    "torch",
    "torchvision",
    "faiss",
    "h5py",
    "numpy",
    "sklearn",
    "matplotlib",
    "PIL",
    "scipy",
    "onnx",
)


def command(*names):
    found = cli
    for name in names:
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), name)
    assert found is not None
    return found


def examples(text):
    """The arguments of every line of ``text`` that is a call of gpq."""
    for line in text.splitlines():
        if match := re.match(r"\s*gpq (?!COMMAND)(?=[a-z])(.+)", line):
            yield shlex.split(match[1].split("#")[0].split("|")[0])


def check_calls(calls):
    """There are some, and the commands exist and take these arguments; nothing is run."""
    assert calls
    for name, *rest in calls:
        names = [name, rest.pop(0)] if name == "experiment" else [name]
        command(*names).make_context(names[-1], rest).close()


@pytest.mark.parametrize("name", [*COMMANDS, *PARTS])
def test_a_command_says_what_it_does_with_an_example_that_it_takes(name):
    result = CliRunner().invoke(cli, [*name.split(), "--help"], prog_name="gpq")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: gpq {name} ")
    assert all(part in result.stdout for part in ("Example", "-q, --quiet", "-v, --verbose"))
    calls = list(examples(result.stdout))
    check_calls(calls)
    assert name in [" ".join(call[: len(name.split())]) for call in calls]
    found = command(*name.split())
    for parameter in found.params:
        if isinstance(parameter, click.Option):
            text = (parameter.help or "").rstrip()
            assert parameter.hidden or text.endswith((".", "]", ")")), (
                f"{parameter.opts}: a sentence"
            )
        else:
            # click has no help for arguments, so the text of the command must say what those with
            # many forms may be.
            shown = parameter.make_metavar(click.Context(found))
            assert shown in (*SELF_EVIDENT, "FOLDER", "GRID") or f"{shown} is" in (found.help or "")


def test_commands_are_listed_in_the_order_of_the_path_and_the_readme_shows_each():
    result = CliRunner().invoke(cli, ["--help"], prog_name="gpq")
    assert result.exit_code == 0
    listed = re.findall(r"^  ([a-z-]+)  +\S", result.stdout.split("Commands:")[1], re.MULTILINE)
    assert listed == list(COMMANDS)
    check_calls(list(examples(result.stdout)))
    assert __version__ in CliRunner().invoke(cli, ["--version"], prog_name="gpq").stdout
    calls = list(examples(README.read_text(encoding="utf-8")))
    assert {call[0] for call in calls} == set(COMMANDS)
    check_calls(calls)


def test_help_waits_for_no_heavy_library():
    script = """
import json, sys
from gpq_cli.main import COMMANDS, cli
for arguments in [[], *([name] for name in COMMANDS)]:
    try:
        cli([*arguments, "--help"], prog_name="gpq")
    except SystemExit as stop:
        assert stop.code == 0
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = json.loads(ran.stderr)
    assert "click" in loaded
    assert not {name.split(".")[0] for name in loaded} & set(HEAVY)
