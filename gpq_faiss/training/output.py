"""Output folder of a training and the folder of its unfinished run: what may be replaced or resumed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError, OutputExistsError, UsageError
from ..files import check_output, fingerprint, read_json, unfinished, write_json, writing
from .checkpoint import CHECKPOINT

BEGUN = "begun.json"
"""In the folder of an unfinished run that will replace a finished model: a hash of the run's identity and of that model."""


@dataclass(frozen=True)
class Output:
    """The output folder of a training.

    Attributes:
        model: the folder; an unfinished run is beside it in ``.NAME.partial``.
        resume: continue an unfinished run; a finished model of the same identity is kept.
        overwrite: replace the folder and start a new run.

    Raises:
        UsageError: ``resume`` with ``overwrite``, or a folder without a name.
    """

    model: Path
    resume: bool
    overwrite: bool

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise UsageError("--resume continues a run and --overwrite begins a new one: give one of them")
        if not self.model.name:
            raise UsageError(f"--out {self.model} has no folder name: name the model's folder")

    @property
    def partial(self) -> Path:
        """The folder of the unfinished run."""
        return self.model.with_name(f".{self.model.name}.partial")

    @property
    def finished(self) -> bool:
        """Whether a model exists."""
        return (self.model / "config.json").exists()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder for this process, unless there is nothing to write.

        Raises:
            OutputExistsError: the folder or an unfinished run exists.
            DataError: another process uses it, it cannot be written, or it is not a model folder.
        """
        if self.resume and self.finished and not self.partial.exists():
            yield
            return
        check_output(self.model, overwrite=True, folder=True)
        with unfinished(self.partial, self.model, keep=(CHECKPOINT,)):
            if (self.partial / CHECKPOINT).exists() and not (self.resume or self.overwrite):
                raise OutputExistsError(
                    f"an unfinished run is at {self.partial}: go on with --resume, or begin anew with --overwrite"
                )
            if not (self.resume and self.finished):
                check_output(self.model, overwrite=self.overwrite, folder=True)
            if self.overwrite and self.model.exists() and not self.finished and any(self.model.iterdir()):
                raise DataError(
                    f"{self.model} is not a model folder and is not replaced: choose another --out"
                )
            yield

    def begin(self, identity: str) -> bool:
        """Prepare the run of ``identity``; returns whether there is anything to train.

        Raises:
            OutputExistsError: a finished model of another identity exists.
            DataError: the folder cannot be written.
        """
        begun = self.partial / BEGUN
        if self.overwrite:
            with writing(self.partial):
                for path in (self.partial / CHECKPOINT, begun):
                    path.unlink(missing_ok=True)
        if not self.finished or not (self.overwrite or self.resume):
            return True
        # The model is kept until the new one is complete; the record lets ``resume`` replace it, too.
        settings = read_json(self.model / "config.json", "a model's settings")
        mark = fingerprint(identity, json.dumps(settings, sort_keys=True))
        if self.overwrite:
            write_json(begun, mark)
        elif not begun.exists() or read_json(begun, "the beginning of a training") != mark:
            if isinstance(settings, dict) and settings.get("run_identity") == identity:
                return False
            raise OutputExistsError(
                f"{self.model} is a finished model of other settings or data: choose another --out, or --overwrite it"
            )
        return True
