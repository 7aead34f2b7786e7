"""The stage ``train``: from data with some labels to a model folder.

    data, labels of a few  ─►  model/  (model.safetensors, config.json, metrics.jsonl, split.json)

The loop is in :mod:`gpq_faiss.training.loop`.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..config import Config, preset, to_dict, validate
from ..data.base import Dataset
from ..data.open import open_data
from ..data.protocols import Split, make_split
from ..data.scale import typical_scale
from ..errors import DataError, UsageError
from ..files import fingerprint, versions
from ..methods.gpq import build_gpq
from ..methods.model import save_model
from ..methods.registry import METHODS
from ..methods.trainable import CodeMethod
from ..nn.backbones import backbone_plugin, input_description
from ..training.loop import Fitted, Progress, RunOptions, fit
from ..training.output import Output
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
    device: str = "cpu",
    amp: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    validate_every: int = 100,
    checkpoint_seconds: float = 60.0,
    progress: Progress | None = None,
) -> Path:
    """Train a model on ``data`` and write its folder.

    Ctrl-C, SIGTERM and SIGHUP take effect after the current step, which is saved for ``resume``; a second Ctrl-C takes effect
    immediately. Under ``torchrun`` several processes train together (:mod:`gpq_faiss.training.parallel`), each on the CPU or on the GPU
    with its local rank, and the first writes; their number may change on resumption.

    Args:
        data: anything that :func:`gpq_faiss.open_data` accepts.
        out: the model folder, locked during training; an unfinished run is beside it in ``.NAME.partial``.
        config: settings (default: the ``recommended`` preset).
        labelled: labels that the training sees: ``N-per-class``, a fraction, a file of ids, or ``all`` (except the queries').
        protocol: how queries are held out (``1``, ``2``, ``transfer``, ``gpq-authors``; ``none``: no queries).
        queries: queries of protocol 1: ``N-per-class`` or a file of ids (default: the protocol's number).
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        amp: run the backbone in bf16.
        resume: continue an unfinished run of the same settings and data; a finished one is kept.
        overwrite: replace the folder once the new one is complete, and discard an unfinished run. Such a run can be continued
            with ``resume`` alone, and then also replaces the folder.
        validate_every: steps between log lines, and between validations if items are held out.
        checkpoint_seconds: time between checkpoints.
        progress: called after each step.

    Returns:
        The model folder.

    Raises:
        UsageError: an invalid setting.
        DataError: unusable data, an output that cannot be written, or a folder in use by another process.
        OutputExistsError: the folder or an unfinished run exists.
        DeviceError: no such device.
        ProcessError: another process of the training failed or ended.
    """
    config = validate(config or preset("recommended"))
    if validate_every < 1 or not checkpoint_seconds >= 0:
        raise UsageError(
            f"validate_every = {validate_every}, checkpoint_seconds = {checkpoint_seconds}: at least 1 and 0 are needed"
        )
    output = Output(Path(out), resume, overwrite)
    with joined(device) as (group, own), output.held() if group.main else nullcontext():
        options = RunOptions(own, resume, amp, validate_every, checkpoint_seconds, progress, group)
        with group.agreed():
            dataset = open_data(data)
            split = make_split(
                dataset, protocol, seed=config.training.seed, labelled=labelled, queries=queries
            )
            seen, needed = len(split.labelled) + len(split.unlabelled), config.quantizer.codewords
            if seen < needed:
                few = f"{seen} items are too few for {needed} codewords"
                raise DataError(f"{few}: give at least {needed}, or set quantizer.codewords")
            # Everything that must be equal to continue a checkpoint.
            often = f"amp {options.amp}, validation every {options.validate_every} steps"
            method = METHODS["posterior" if config.method == "posterior" else "gpq"]
            computing = torch.__version__, str(method.revision)
            identity = fingerprint(config.fingerprint(), often, dataset.fingerprint, split.hash, *computing)
        if len(set(group.gather(identity))) > 1:
            raise DataError(
                "the processes of this training have different data, settings or versions: make them equal"
            )
        if not group.copy(group.main and output.begin(identity)):
            log.info("%s is finished: nothing to resume", out)
            return output.model
        fitted = fit(
            build_gpq, dataset, split, config, folder=output.partial, identity=identity, options=options
        )
        if group.main:
            if dataset.bad:
                log.warning("%s", dataset.bad_summary())
            network = fitted.method
            assert isinstance(network, CodeMethod)
            about = _describe(config, fitted, dataset, split, options)
            save_model(
                output.model,
                network.eval(),
                {"method": network.name, **about, "run_identity": identity},
                extra={"metrics.jsonl": "".join(f"{line}\n" for line in fitted.run.lines)},
                split=split,
                overwrite=output.finished,
                done_with=output.partial,
            )
        group.gather("")  # no process ends before the folder is there
    return output.model


def _describe(
    config: Config, fitted: Fitted, dataset: Dataset, split: Split, options: RunOptions
) -> dict[str, Any]:
    """Entries of ``config.json`` beside the network's description."""
    run, labels = fitted.run, fitted.labels
    backbone = backbone_plugin(config.network.backbone)
    own = {} if backbone is None else {"backbone_of": backbone.origin}
    return own | {
        "config": to_dict(config),
        "data": {
            "name": dataset.name,
            "fingerprint": dataset.fingerprint,
            "notes": dataset.notes,
            "scale": typical_scale(dataset),
        },
        "split": {"protocol": split.name, "seed": split.seed, "hash": split.hash},
        "class_names": list(labels.class_names),
        "multi_label": labels.multi_label,
        "input": input_description(dataset, fitted.image_size),
        "training": {
            "steps": run.step,
            "best_step": run.best_step or None,
            "validation_map": run.best if run.best_step else None,
            "validation_items": fitted.held,
            "labelled_items": fitted.seen,
            "unlabelled_items": len(split.unlabelled),
            "device": str(options.device),
            **({"processes": options.group.size} if options.group.size > 1 else {}),
        },
        "versions": versions("torch", "numpy", "python"),
    }
