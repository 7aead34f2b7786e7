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
    """A device was asked for that this machine does not have."""
