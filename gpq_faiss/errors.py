"""The errors a user can cause. Every message is one line: what is wrong, where, and what to do about it.

The command line prints the message alone and exits with :attr:`GpqError.exit_code`; from Python they are ordinary
exceptions with one common base.
"""


class GpqError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code = 1


class UsageError(GpqError):
    """An argument or option that cannot be right, whatever the data (exit code 2)."""

    exit_code = 2


class DataError(GpqError):
    """A file, array or folder that is missing, broken or not what the stage needs (exit code 1)."""


class BusyError(DataError):
    """Another process writes the output now."""


class MismatchError(DataError):
    """Two things that do not belong together: features, codes or an index of another model."""


class OutputExistsError(DataError):
    """The output is there already and ``overwrite`` was not given."""


class DeviceError(GpqError):
    """A device was requested that this machine does not have."""


class ProcessError(GpqError):
    """Another process that shares the work has failed or ended (exit code 1)."""


_EXTRAS = {"torch": "train", "torchvision": "train", "sklearn": "train", "scipy": "train", "faiss": "search"}


def needs(what: str, missing: ImportError) -> str | None:
    """One line on which extra brings a package that ``what`` needs; None where no extra does."""
    package = (missing.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    name = {"sklearn": "scikit-learn", "faiss": "Faiss"}.get(package, package)
    both = " or 'gpq-faiss[train]'" if package == "faiss" else ""
    return f"{what} needs {name}: pip install 'gpq-faiss[{_EXTRAS[package]}]'{both}"
