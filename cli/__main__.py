"""Run ``gpq`` as ``python -m gpq_cli``, for machines where the command is not on the path."""

from .main import cli

cli(prog_name="gpq")
