"""``gpq``: the command group and its error handling."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import warnings
from contextlib import suppress
from functools import partial
from typing import Any

import click
from tqdm.contrib import DummyTqdmFile

from gpq_faiss.errors import DeviceError, GpqError, ProcessError, UsageError, needs, one_line
from gpq_faiss.launch import launched
from gpq_faiss.progress import levels, stage
from gpq_faiss.signals import ended_by_signals

from . import commands
from .experiment import experiment

# OpenMP and OpenBLAS read these when torch and Faiss load them: waiting threads sleep. By default
# they spin, and if another process is busy, each wait takes the rest of a time slice. Values set by
# the user have priority.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_THREAD_TIMEOUT": "4"}

# Python, the system, torch and the loader of libraries each say so in their own words.
_NO_MEMORY = re.compile("out of memory|allocate memory|map segment|start new thread", re.IGNORECASE)


class Commands(click.Group):
    """Commands whose errors become one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which they are used, not alphabetically."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command as click does, but end with one line on Ctrl-C.

        The exit code is then 130 (click: "Aborted!" and 1). SIGTERM and SIGHUP do the same with 143
        and 129: saved work stays, and temporary files are removed.
        """
        try:
            with ended_by_signals():
                return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise UsageError(needs(f"gpq {ctx.invoked_subcommand}", error)) from None
        except KeyboardInterrupt as error:
            reason = f"ended by {error}" if str(error) else "interrupted"
            with suppress(OSError):  # the terminal may be gone
                _say(
                    f"{reason}: run the same command again to continue "
                    "(for gpq train, add --resume)"
                )
            ctx.exit(128 + signal.Signals.__members__.get(str(error), signal.SIGINT))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``gpq`` as click does, with the errors of the package as one line on stderr.

        The exit code is 2 for usage and 1 for data.
        """
        for name, value in WAITING.items():
            os.environ.setdefault(name, value)
        kwargs["standalone_mode"] = False  # click's own errors are raised, not shown
        code = 1
        try:
            code = super().main(*args, **kwargs) or 0
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = 2
        except click.ClickException as error:
            code = error.exit_code
            ctx = getattr(error, "ctx", None)
            _say(f"{error.format_message()} ({ctx.command_path if ctx else 'gpq'} --help)")
        except GpqError as error:
            code = error.exit_code
            _say(error, shared=isinstance(error, UsageError | ProcessError | DeviceError))
        except (ImportError, MemoryError, RuntimeError, OSError) as error:
            _say(_explained(error), shared=False)
        sys.exit(code)


def _say(line: object, *, shared: bool = True) -> None:
    """Write one line to stderr, whatever a foreign file or library put into the message.

    Of several processes on this machine, only the first writes errors that they share.
    """
    if launched().local_rank == 0 or not shared:
        click.echo(f"gpq: {' '.join(str(line).split())}", err=True)


def _explained(error: Exception) -> str:
    """Return the message for an error of the machine; raise any other again, which is a bug."""
    messages = f"{error} {error.__cause__} {error.__context__}"
    if isinstance(error, MemoryError) or _NO_MEMORY.search(messages):
        return (
            f"out of memory ({one_line(error)}): end other programs, or lower --batch-size, "
            "training.batch_labelled and batch_unlabelled, or use another --device or machine"
        )
    if isinstance(error, OSError):  # such as a disk that fills up while a result is printed
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    raise error


# In the order of use.
COMMANDS = (
    commands.train,
    commands.encode,
    commands.index,
    commands.search,
    commands.evaluate,
    commands.export_faiss,
    commands.export,
    commands.export_encoder,
    experiment,
    commands.serve,
    commands.info,
)


@click.group(
    cls=Commands,
    commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("-q", "--quiet", is_flag=True, help="No progress and no log; errors only.")
@click.option("-v", "--verbose", is_flag=True, help="More details, and warnings of libraries.")
@click.version_option(package_name="gpq-faiss")
@click.pass_context
def cli(ctx: click.Context, quiet: bool, verbose: bool) -> None:
    """Compress images or embeddings to 12- to 48-bit codes for Faiss, from a few labels and many
    unlabelled items.

    \b
    The path:
      gpq train digits --labelled 10-per-class --out model
      gpq encode model digits --out codes.h5
      gpq index model codes.h5 --out index.faiss
      gpq search model index.faiss digits --rows 0:8 -k 10
      gpq evaluate model digits --compare pq,opq

    -q and -v precede the command: gpq -q train ...
    """
    name = ctx.invoked_subcommand
    if launched().size > 1 and name != "train":
        raise UsageError(f"only gpq train supports torchrun: run 'gpq {name}' without it")
    details = logging.DEBUG if verbose else logging.INFO
    # Of several processes the first speaks for all.
    level = logging.ERROR if quiet or launched().rank > 0 else details
    # Writes above the bars of gpq_faiss.progress.
    handler = logging.StreamHandler(DummyTqdmFile(sys.stderr))
    handler.setLevel(level)
    root = logging.getLogger()
    root.addHandler(handler)
    ctx.call_on_close(partial(root.removeHandler, handler))
    ctx.with_resource(levels(details, "gpq_faiss"))
    ctx.with_resource(levels(level, "gpq_faiss.progress"))
    if not verbose:  # libraries warn programmers: Pillow of odd tags, torch of drivers
        ctx.with_resource(warnings.catch_warnings(action="ignore"))
    if name != "serve":  # it has no end to wait for
        ctx.with_resource(stage(f"gpq {name}"))
