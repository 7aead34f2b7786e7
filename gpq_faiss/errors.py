"""User errors. Every message is one line: what is wrong, where, and what to do about it.

The command line prints only the message and exits with :attr:`GpqError.exit_code`.
"""

import contextlib
import difflib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any


class GpqError(Exception):
    """Base class of the package's errors."""

    exit_code = 1


class UsageError(GpqError):
    """An invalid argument or option (exit code 2)."""

    exit_code = 2


class DataError(GpqError):
    """A missing, damaged or unsuitable file, array or folder (exit code 1)."""


class MismatchError(DataError):
    """Inputs that do not fit together: features, codes or an index of another model."""


class OutputExistsError(DataError):
    """The output exists and ``overwrite`` was not given."""


class DeviceError(GpqError):
    """The requested device does not exist or has too little memory."""


class ProcessError(GpqError):
    """Another process of the same run has failed or ended (exit code 1)."""


@contextlib.contextmanager
def errors_of(source: str) -> Iterator[None]:
    """Put ``source``, if it is not empty, before the message of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{source}: {error}" if source else str(error)) from error


_EXTRAS = {
    **dict.fromkeys(("torch", "torchvision", "sklearn", "scipy"), "train"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn"), "serve"),
    "faiss": "search",
    "timm": "timm",
}


def needs(feature: str, missing: ImportError) -> str:
    """Return one line that names the extra whose packages ``feature`` needs.

    Raises:
        ImportError: ``missing`` itself, if the missing package belongs to no extra.
    """
    package = (missing.name or "").partition(".")[0]
    if package not in _EXTRAS:
        raise missing
    name = {"sklearn": "scikit-learn", "faiss": "Faiss"}.get(package, package)
    alternative = " or 'gpq-faiss[train]'" if package == "faiss" else ""
    return f"{feature} needs {name}: pip install 'gpq-faiss[{_EXTRAS[package]}]'{alternative}"


def optional(module: str, remedy: str, error: type[GpqError] = UsageError) -> Any:
    """Import and return a module of an extra.

    Raises:
        GpqError: it is not installed: an ``error`` with the text ``remedy``.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise error(remedy) from None


def unknown(subject: str, name: str, choices: Iterable[str]) -> str:
    """Return one line on an unknown name, with the most similar choice, or all choices.

    Examples:
        >>> unknown("setting 'step'", "step", ["steps", "seed"])
        "setting 'step' is unknown: did you mean 'steps'?"
        >>> unknown("setting 'x'", "x", ["steps", "seed"])
        "setting 'x' is unknown: choose one of steps, seed"
    """
    names = list(choices)
    similar = difflib.get_close_matches(name, names, 1)
    advice = f"did you mean '{similar[0]}'?" if similar else f"choose one of {', '.join(names)}"
    return f"{subject} is unknown: {advice}"


def shown(name: str) -> str:
    """Return a name for a one-line message: escaped if it contains line breaks or invalid UTF-8."""
    return name if name.isprintable() else ascii(name)


def one_line(error: BaseException, limit: int = 160) -> str:
    """Return the message of any exception as one short line."""
    return " ".join(str(error).split())[:limit].rstrip(".: ") or type(error).__name__
