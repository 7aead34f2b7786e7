"""Commands as a user types them, in the working folder."""

from __future__ import annotations

import shlex

from click.testing import CliRunner
from gpq_cli.main import cli


def gpq(line: str, *, exit_code: int = 0) -> str:
    """What ``gpq LINE`` prints; a command that fails says why in one line on stderr, which is returned instead."""
    result = CliRunner().invoke(cli, ["-q", *shlex.split(line)], prog_name="gpq")
    assert result.exit_code == exit_code, f"gpq {line}\n{result.output}\n{result.exception!r}"
    if exit_code:
        assert len(result.stderr.splitlines()) == 1, result.stderr
        return result.stderr
    return result.stdout
