"""The stage ``train``: from data with some labels to a model folder.

    data, labels of a few  ─►  model/  (model.safetensors, config.json, metrics.jsonl, split.json)

The loop is in :mod:`gpq_faiss.training.loop`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..config import Config, preset, validate
from ..data.base import Dataset, FeatureDataset
from ..data.open import open_data
from ..data.protocols import Split, make_split
from ..errors import DataError, OutputExistsError, UsageError
from ..faissio.model import read_description
from ..files import check_output, fingerprint, unfinished, versions
from ..methods.gpq import build_gpq
from ..methods.model import save_model
from ..methods.registry import METHODS
from ..methods.trainable import CodeMethod
from ..nn.backbones import backbone_plugin, input_description
from ..scale import typical_scale
from ..training.checkpoint import CHECKPOINT
from ..training.loop import RunOptions, Training, fit
from ..training.parallel import joined

log = logging.getLogger(__name__)


def train(
    data: object,
    out: str | Path,
    *,
    config: Config | None = None,
    labelled: str | float | None = "all",
    protocol: str | int = "1",
    queries: str | None = None,
    overwrite: bool = False,
    options: RunOptions | None = None,
) -> Path:
    """Train a model on ``data`` and write its folder.

    Ctrl-C, SIGTERM and SIGHUP take effect after the current step, which is saved; a second Ctrl-C
    takes effect immediately. Under ``torchrun`` several processes train together
    (:mod:`gpq_faiss.training.parallel`), each on the CPU or on the GPU of its local rank.

    Args:
        data: anything that :func:`gpq_faiss.open_data` accepts.
        out: the model folder, locked during training; an unfinished run is beside it in
            ``.NAME.partial``.
        config: settings (default: the ``recommended`` preset).
        labelled: labels that the training sees: ``N-per-class``, a fraction, a file of ids, or
            ``all`` (except those of the queries).
        protocol: how queries are held out (``1``, ``2``, ``transfer``; ``none``: no queries).
        queries: queries of protocol 1: ``N-per-class`` or a file of ids (default: the protocol's
            number).
        overwrite: replace the folder once the new model is complete, and discard an unfinished run.
            Such a run can be resumed, and then also replaces the folder.
        options: device, precision and resumption, see :class:`gpq_faiss.training.loop.RunOptions`.

    Returns:
        The model folder.

    Raises:
        UsageError: an invalid setting.
        DataError: unusable data, an output that cannot be written, or a folder in use by another
            process.
        OutputExistsError: the folder or an unfinished run exists.
        DeviceError: no such device.
        ProcessError: another process of the training failed or ended.
    """
    config = validate(config or preset("recommended"))
    options = options or RunOptions()
    if options.resume and overwrite:
        raise UsageError(
            "--resume continues a run and --overwrite begins a new one: give one of them"
        )
    out = Path(out)
    partial = out.parent / f".{out.name}.partial"
    with joined(options.device) as (group, device), contextlib.ExitStack() as stack:
        options = replace(options, device=str(device))
        if group.main:
            stack.enter_context(_locked(out, partial, resume=options.resume, overwrite=overwrite))
        dataset = open_data(data)
        split = make_split(
            dataset, protocol, seed=config.training.seed, labelled=labelled, queries=queries
        )
        identity = _identity(config, dataset, split, options, group.size)
        finished = group.main and _is_finished(out, partial, identity, overwrite=overwrite)
        if len(set(group.gather(identity))) > 1:
            raise DataError(
                "the processes of this training have different data, settings or versions: "
                "make them equal"
            )
        if group.gather(finished)[0]:
            log.info("%s is finished: nothing to resume", out)
            return out
        trained = fit(
            build_gpq,
            dataset,
            split,
            config,
            folder=partial,
            identity=identity,
            options=options,
            group=group,
        )
        if group.main:
            if dataset.bad:
                log.warning("%s", dataset.bad_summary())
            network = trained.method
            assert isinstance(network, CodeMethod)
            save_model(
                out,
                network.eval(),
                {
                    "method": network.name,
                    **_describe(trained, dataset, split),
                    "run_identity": identity,
                },
                metrics="".join(f"{line}\n" for line in trained.run.lines),
                split=split,
            )
            (partial / CHECKPOINT).unlink(missing_ok=True)
        group.gather("")  # no process ends before the folder exists
    return out


@contextlib.contextmanager
def _locked(out: Path, partial: Path, *, resume: bool, overwrite: bool) -> Iterator[None]:
    """Lock the output of a training, and check that it may be written.

    Raises:
        OutputExistsError: a model, or an unfinished run, exists.
        DataError: another process uses it, it cannot be written, or it is not a model folder.
    """
    check_output(out, overwrite=True, folder=True)
    with unfinished(partial, out, keep=(CHECKPOINT,)):
        # With overwrite the checkpoint stays until that of the new run replaces it.
        if (partial / CHECKPOINT).exists() and not (resume or overwrite):
            raise OutputExistsError(
                f"an unfinished run is at {partial}: continue it with --resume, or start again "
                "with --overwrite"
            )
        check_output(out, overwrite=overwrite or resume, folder=True)
        if out.exists() and not (out / "config.json").exists() and any(out.iterdir()):
            raise DataError(
                f"{out} is not a model folder and is not replaced: choose another --out"
            )
        yield


def _is_finished(out: Path, partial: Path, identity: str, *, overwrite: bool) -> bool:
    """Whether there is a model of this training, which is not to be replaced.

    Raises:
        OutputExistsError: a model of another training exists.
    """
    # A model beside an unfinished run is kept until the run, begun by --overwrite, is complete.
    if overwrite or (partial / CHECKPOINT).exists() or not (out / "config.json").exists():
        return False
    if read_description(out)["run_identity"] != identity:
        raise OutputExistsError(
            f"{out} is a finished model of other settings or data: choose another --out, or "
            "--overwrite it"
        )
    return True


def _identity(
    config: Config, dataset: Dataset, split: Split, options: RunOptions, processes: int
) -> str:
    """Return a hash of everything that must be equal to continue a checkpoint."""
    precision = f"amp {options.amp}, validation every {options.validate_every} steps"
    method = METHODS["posterior" if config.method == "posterior" else "gpq"]
    code = torch.__version__, str(method.revision), str(processes)
    return fingerprint(config.fingerprint(), precision, dataset.fingerprint, split.hash, *code)


def _describe(trained: Training, dataset: Dataset, split: Split) -> dict[str, Any]:
    """Return the entries of ``config.json`` in addition to the network's description."""
    config = trained.config
    run = trained.run
    labels = trained.labels
    backbone = backbone_plugin(config.network.backbone)
    origin = {} if backbone is None else {"backbone_of": backbone.origin}
    processes = trained.group.size
    return origin | {
        "config": asdict(config),
        "data": {
            "name": dataset.name,
            "fingerprint": dataset.fingerprint,
            "notes": dataset.notes,
            "scale": typical_scale(dataset) if isinstance(dataset, FeatureDataset) else {},
        },
        "split": {"protocol": split.name, "seed": split.seed, "hash": split.hash},
        "class_names": list(labels.class_names),
        "multi_label": labels.multi_label,
        "input": input_description(dataset, trained.reader.image_size),
        "training": {
            "steps": run.step,
            "best_step": run.best_step or None,
            "validation_map": run.best if run.best_step else None,
            "validation_items": len(trained.held_out),
            "labelled_items": len(trained.labelled),
            "unlabelled_items": len(split.unlabelled),
            "device": trained.options.device,
            **({"processes": processes} if processes > 1 else {}),
        },
        "versions": versions("torch", "numpy", "python"),
    }
