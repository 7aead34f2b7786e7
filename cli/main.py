"""``gpq``: the command group and its error handling."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import sys
from typing import Any

import click

from gpq_faiss.errors import DeviceError, GpqError, ProcessError, UsageError, needs, one_line
from gpq_faiss.progress import stage
from gpq_faiss.signals import Terminated, ended_by_signals
from gpq_faiss.training.launch import launched

from .options import check_apart
from .progress import shown

# In the order of use. The module of a command is imported when the command is called, so that
# --help does not wait for torch.
COMMANDS = (
    *(
        "train",
        "encode",
        "export-faiss",
        "export",
        "index",
        "search",
        "serve",
        "evaluate",
        "export-encoder",
    ),
    *("experiment", "info"),
)

# OpenMP and OpenBLAS read these when torch and Faiss load them: waiting threads sleep. By default
# they spin, and if another process is busy, each wait takes the rest of a time slice. Values set by
# the user have priority.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_THREAD_TIMEOUT": "4"}


def _note(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    """Store that a flag was given, before or after the name of a command."""
    ctx.meta[option.name or ""] = value or ctx.meta.get(option.name or "", False)


LOUDNESS = [
    click.Option([*names], is_flag=True, expose_value=False, callback=_note, help=text)
    for names, text in (
        (("-q", "--quiet"), "No progress and no log; errors only."),
        (("-v", "--verbose"), "Log more details, and warnings of libraries."),
    )
]


def loud(command: click.Command) -> click.Command:
    """Return the command with ``-q`` and ``-v``; while it runs, its log and progress are shown."""
    wrapped, inner = copy.copy(command), command.callback
    wrapped.params = [*command.params, *LOUDNESS]
    if isinstance(wrapped, click.Group):
        wrapped.commands = {name: loud(subcommand) for name, subcommand in wrapped.commands.items()}
        return wrapped

    def run(*args: Any, **kwargs: Any) -> None:
        assert inner is not None
        ctx = click.get_current_context()
        if launched().size > 1 and wrapped.name != "train":
            raise UsageError(
                f"'{ctx.command_path}' is made for one process: start it without torchrun"
            )
        # Every command shows progress, whether or not it has stages of its own; only a service has
        # no end to wait for.
        command_stage = (
            contextlib.nullcontext() if wrapped.name == "serve" else stage(ctx.command_path)
        )
        # Of several processes the first speaks for all.
        with (
            shown(quiet=ctx.meta["quiet"] or launched().rank > 0, verbose=ctx.meta["verbose"]),
            command_stage,
        ):
            if kwargs.get("overwrite"):
                check_apart(**kwargs, is_folder=wrapped.name == "train")
            inner(*args, **kwargs)

    wrapped.callback = run
    return wrapped


class Commands(click.Group):
    """Lazily loaded commands; errors of the package become one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which they are used, not alphabetically."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of the command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f".{cmd_name.partition('-')[0]}", __package__)
        return loud(getattr(module, cmd_name.replace("-", "_")))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command as click does, but end with one line on Ctrl-C.

        The exit code is then 130 (click: "Aborted!" and 1). SIGTERM and SIGHUP do the same with 143
        and 129: work is saved, and temporary files are removed.
        """
        try:
            with ended_by_signals():
                return super().invoke(ctx)
        except ModuleNotFoundError as error:
            remedy = needs(f"gpq {ctx.invoked_subcommand}", error)
            if remedy is None:
                raise
            raise UsageError(remedy) from None
        except KeyboardInterrupt as error:
            again = {"train": " with --resume to go on", "encode": " to go on"}.get(
                ctx.invoked_subcommand or "", ""
            )
            number = error.number if isinstance(error, Terminated) else 2
            by = f"ended by {error}" if isinstance(error, Terminated) else "interrupted"
            with contextlib.suppress(OSError):  # the terminal may be gone
                _say(f"{by}: run the same command again{again}")
            ctx.exit(128 + number)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``gpq`` as click does, with the errors of the package as one line on stderr.

        The exit code is 2 for usage and 1 for data.
        """
        for name, value in WAITING.items():
            os.environ.setdefault(name, value)
        kwargs["standalone_mode"] = False  # click's own errors are raised, not shown
        code = 1
        try:
            result = super().main(*args, **kwargs)
            code = result if isinstance(result, int) else 0
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.ClickException as error:
            ctx = error.ctx if isinstance(error, click.UsageError) else None
            path, code = "gpq" if ctx is None else ctx.command_path, error.exit_code
            _say(f"{error.format_message()} ({path} --help)", path)
        except click.Abort:
            code = 130
        except GpqError as error:
            code = error.exit_code
            if not _said_by_another(error):
                _say(error, of_all=True)
        except BrokenPipeError:
            # `gpq ... | head`: nothing is wrong; keep Python from complaining at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (ImportError, MemoryError, RuntimeError, OSError) as error:
            _say(_end(error), of_all=True)
        sys.exit(code)


def _say(line: object, path: str = "gpq", *, of_all: bool = False) -> None:
    """Write one line to stderr, whatever a foreign file or library put into the message.

    Of several processes only the first writes, unless ``of_all``.
    """
    if of_all or launched().rank == 0:
        click.echo(f"{path}: {' '.join(str(line).split())}", err=True)


def _said_by_another(error: GpqError) -> bool:
    """Whether another process reports the same error.

    That is the first of all processes, or for errors of devices the first on this machine.
    """
    launch = launched()
    of_device = isinstance(error, DeviceError) and launch.local_rank > 0
    return of_device or (launch.rank > 0 and isinstance(error, UsageError | ProcessError))


_NO_MEMORY = (
    *(
        "failed to map segment",
        "cannot allocate memory",
        "can't allocate memory",
        "can't start new thread",
    ),
    "out of memory",
)


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether an error or one of its causes says that memory is exhausted.

    Python, the system, torch and the loader of libraries each say so in their own words.
    """
    while error is not None:
        if isinstance(error, MemoryError) or any(
            phrase in str(error).lower() for phrase in _NO_MEMORY
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _end(error: Exception) -> str:
    """Return the message for an error of the machine or of the installation.

    Any other error is a bug, and is raised again.
    """
    if _lacks_memory(error):
        return (
            f"out of memory ({one_line(error)}): end other programs, or lower --memory, "
            "--batch-size, training.batch_labelled and batch_unlabelled, or use another --device "
            "or machine"
        )
    package = ((error.name if isinstance(error, ImportError) else None) or "").partition(".")[0]
    if package not in ("", "gpq_faiss", "gpq_cli"):
        return (
            f"the package {package} is missing or damaged ({one_line(error)}): "
            "install gpq-faiss again"
        )
    # An error that no stage handles, such as a disk that fills up while a result is printed.
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    raise error  # a bug


@click.group(
    cls=Commands,
    params=[*LOUDNESS],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="gpq-faiss")
def cli() -> None:
    """Images or embeddings, a few labels and a lot of unlabelled data to 12 to 48-bit codes that
    Faiss searches.

    \b
    The path:
      gpq train digits --labelled 10-per-class --out model
      gpq encode model digits --out codes.h5
      gpq index model codes.h5 --out index.faiss
      gpq search model index.faiss queries.npy -k 10
      gpq evaluate model digits --protocol 1
    """
