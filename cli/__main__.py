"""``python -m gpq_cli``, where the command is not on the path."""

from .main import cli

cli(prog_name="gpq")
