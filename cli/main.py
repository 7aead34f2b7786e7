"""``gpq``: the group, its commands by name, and how errors reach the user."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from typing import Any

import click

# Command -> (module here, attribute): a command is imported when it is used, so that --help does not wait for torch.
COMMANDS = {
    "train": ("train", "train"),
    "encode": ("encode", "encode"),
    "export-faiss": ("export_faiss", "export_faiss"),
    "export": ("export", "export"),
    "index": ("index", "index"),
    "search": ("search", "search"),
    "evaluate": ("evaluate", "evaluate"),
    "export-encoder": ("export_encoder", "export_encoder"),
    "experiment": ("experiment", "experiment"),
    "info": ("info", "info"),
}


class Commands(click.Group):
    """Loads commands lazily; turns the package's errors into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the path, not of the alphabet."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of the command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f".{module}", __package__), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """As click's; ctrl-C is one line and exit code 130, for click itself would say "Aborted!" and 1."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            again = {"train": " with --resume to go on", "encode": " to go on"}.get(
                ctx.invoked_subcommand or "", ""
            )
            click.echo(f"gpq: interrupted: run the same command again{again}", err=True)
            ctx.exit(130)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """As click's, with our errors: one line on stderr, exit code 2 for usage and 1 for data."""
        from gpq_faiss.errors import GpqError

        try:
            return super().main(*args, **kwargs)
        except GpqError as error:
            # One line, whatever a foreign file or library put into the message.
            click.echo(f"gpq: {' '.join(str(error).splitlines())}", err=True)
            sys.exit(error.exit_code)
        except BrokenPipeError:
            # `gpq ... | head`: nothing is wrong; keep Python from complaining at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except MemoryError:
            click.echo(
                "gpq: out of memory: use a smaller --batch-size, or a machine with more memory", err=True
            )
            sys.exit(1)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
                raise
            click.echo(
                "gpq: out of memory on the GPU: use a smaller batch (--batch-size, or training.batch_labelled and "
                "batch_unlabelled), or --device cpu",
                err=True,
            )
            sys.exit(1)
        except OSError as error:
            # What no stage foresaw, a disk that fills up in the middle of a print, say.
            click.echo(f"gpq: {error.filename or 'input or output'}: {error.strerror or error}", err=True)
            sys.exit(1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("-v", "--verbose", is_flag=True, help="Log what the stages do.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no log; errors only.")
@click.version_option(package_name="gpq-faiss")
@click.pass_context
def cli(ctx: click.Context, verbose: bool, quiet: bool) -> None:
    """Images or embeddings, a few labels and a lot of unlabelled data to 12 to 48-bit codes that Faiss searches.

    \b
    The path:
      gpq train digits --labelled 10-per-class --out model
      gpq encode model digits --out codes.h5
      gpq index model codes.h5 --out index.faiss
      gpq search model index.faiss queries.npy -k 10
      gpq evaluate model digits --protocol 1
    """
    level = (
        logging.ERROR if quiet else logging.INFO if verbose or not sys.stderr.isatty() else logging.WARNING
    )
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    if not verbose:
        # Of libraries to programmers: Pillow's on odd tags, torch's on drivers. What matters to users is an error or a note.
        warnings.simplefilter("ignore")
    # torch and matplotlib log at INFO what is no business of a user of gpq.
    for name in ("torch", "matplotlib", "faiss", "onnxscript", "PIL"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ctx.obj = {"quiet": quiet}
