"""Output folder of a training and the folder of its unfinished run: what may be replaced or resumed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError, OutputExistsError, UsageError
from ..files import check_output, fingerprint, read_json, recover, unfinished, write_json, writing
from .checkpoint import BEGUN, CHECKPOINT, other_run


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
        recover(self.model)
        if self.resume and self.finished and not self.partial.exists():
            yield
            return
        check_output(self.model, overwrite=True, folder=True)
        with unfinished(self.partial, self.model, keep=(CHECKPOINT,)):
            self._check()
            yield

    def _check(self) -> None:
        if (self.partial / CHECKPOINT).exists() and not (self.resume or self.overwrite):
            raise OutputExistsError(
                f"an unfinished run is at {self.partial}: go on with --resume, or begin anew with --overwrite"
            )
        if self.resume and self.finished:
            return
        check_output(self.model, overwrite=self.overwrite, folder=True)
        if self.overwrite and self.model.exists() and not self.finished and any(self.model.iterdir()):
            raise DataError(f"{self.model} is not a model folder and is not replaced: choose another --out")

    def begin(self, identity: str) -> bool:
        """Prepare the run of ``identity``; returns whether there is anything to train.

        Raises:
            OutputExistsError: a finished model of another identity exists.
            DataError: an unfinished run of another identity exists, or the folder cannot be written.
        """
        begun, settings = self.partial / BEGUN, {}
        if self.finished:
            settings = read_json(self.model / "config.json", "a model's settings")
        # The model is kept until the new one is complete; the record lets ``resume`` replace it, too.
        mark = fingerprint(json.dumps(settings, sort_keys=True))
        if self.overwrite:
            with writing(self.partial):
                for path in (self.partial / CHECKPOINT, begun):
                    path.unlink(missing_ok=True)
            if self.finished:
                write_json(begun, {"identity": identity, "replaces": mark})
        elif self.resume and self.finished:
            record = read_json(begun, "the beginning of a training") if begun.exists() else {}
            if isinstance(record, dict) and record.get("replaces") == mark:
                if record.get("identity") != identity:
                    raise other_run(self.partial)
                return True
            if settings.get("run_identity") != identity:
                raise OutputExistsError(
                    f"{self.model} is a finished model of other settings or data: choose another --out, or --overwrite it"
                )
            return False
        return True
