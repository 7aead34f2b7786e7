"""Running ``gpq`` in this process, and the folder of small products that tests share."""

import contextlib
import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from click.testing import CliRunner, Result
from gpq_cli.main import cli

WIDTH = 16
ITEMS = 240

SETTINGS = """
preset = "paper"
[quantizer]
codebooks = 4
[network]
backbone = "linear"
[training]
steps = 30
batch_labelled = 30
batch_unlabelled = 30
learning_rate = 0.01
validation = 0.2
"""


def gpq(*args: object) -> Result:
    """``gpq -q ARGS``, errors and exit code in the result; ARGS may be one line, as in a shell."""
    words = shlex.split(str(args[0])) if len(args) == 1 else list(map(str, args))
    return CliRunner().invoke(cli, ["-q", *words], prog_name="gpq")


def done(*args: object) -> str:
    """``gpq -q ARGS``, which must work without a word on stderr; its stdout."""
    result = gpq(*args)
    assert result.exit_code == 0, result.stderr or repr(result.exception)
    assert result.stderr == ""
    return result.stdout


def refused(*args: object, code: int = 1) -> str:
    """``gpq -q ARGS``, which must fail with ``code`` and one line on stderr; that line."""
    result = gpq(*args)
    # Anything but SystemExit would have been a traceback on a terminal.
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    return only_line(result.stderr)


def only_line(stderr: str) -> str:
    """The one line that there must be, without its prefix."""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("gpq: "), stderr
    assert 20 < len(lines[0]) < 1000
    assert lines[0].isprintable()
    return lines[0].removeprefix("gpq: ")


def content(folder: Path) -> dict[str, str]:
    """Every file and folder below, with a hash of what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


@contextlib.contextmanager
def untouched(*folders: Path) -> Iterator[None]:
    """What is in these folders must be the same afterwards: nothing changed, nothing gone, nothing
    new.
    """
    before = [content(folder) for folder in folders]
    yield
    assert [content(folder) for folder in folders] == before


def clusters(n: int = ITEMS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features float32 [n, 16] around three centres, and their classes int64 [n]."""
    centres = np.random.default_rng([seed, 0]).standard_normal((3, WIDTH))
    rng = np.random.default_rng([seed, n])
    labels = np.arange(n) % 3
    return (centres[labels] + 0.4 * rng.standard_normal((n, WIDTH))).astype(np.float32), labels


FILES = {
    "features": "features.npy",
    "labels": "labels.npy",
    "queries": "queries.npy",
    "settings": "run.toml",
    "model": "model",
    "vectors": "features.h5",
    "codes": "codes.h5",
    "index": "index.faiss",
    "other": "other",
    "other_vectors": "other-features.h5",
    "other_codes": "other-codes.h5",
    "other_index": "other.faiss",
    "images": "images",
    "image_model": "image-model",
    "image_index": "image.faiss",
    "photo": "images/a/0.png",
}
"""Small products of every stage. ``other`` is a model of the same shape with other weights; no
features model takes ``photo``.
"""


@dataclass(frozen=True)
class Shop:
    """The folder ``root`` of :data:`FILES`, each an attribute."""

    root: Path

    def __getattr__(self, name: str) -> Path:
        if name not in FILES:
            raise AttributeError(name)
        return self.root / FILES[name]

    @property
    def data(self) -> str:
        return f"features:{self.features}"
