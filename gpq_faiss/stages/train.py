"""Training: the one visible loop, for every method that trains by gradient.

    data, labels of a few  ─►  model/  (model.safetensors, config.json, metrics.jsonl, split.json)

Every batch is a function of the seed and the step alone, and a checkpoint holds the rest of the state; so a run that was
killed and resumed takes the same steps as one that was not, and on the CPU reaches the same codes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import __version__
from ..config import Config, TrainingConfig, to_dict, validate
from ..data.base import Dataset, FeatureDataset, ImageDataset
from ..data.labels import Labels
from ..data.open import open_data
from ..data.protocols import Split, make_split
from ..data.reader import Reader
from ..errors import DataError, OutputExistsError, UsageError
from ..evaluation.ranking import rank_codes
from ..files import check_output, fingerprint, read_json, recover, unfinished, write_error, write_json
from ..methods.averaged import AveragedMethod
from ..methods.gpq import build_gpq
from ..methods.registry import METHODS
from ..methods.trainable import TrainableMethod, TrainingBatch
from ..nn.augment import random_flip_crop
from ..nn.device import full_float32, image_batch, resolve_device
from ..nn.model import input_description, save_model
from ..progress import Stage, stage
from ..signals import held_signals
from ..store import codebooks_fingerprint
from ..training.batches import LABELLED, SAMPLE, STEP, UNLABELLED, EpochSampler, hold_out, training_batches
from ..training.checkpoint import BEGUN, CHECKPOINT, RunState, other_run

log = logging.getLogger(__name__)

_LAST = 5.0  # seconds of training that are worth a checkpoint after the last step

Progress = Callable[[int, int, dict[str, float]], None]
"""Called after each step with the step, the number of steps and the latest figures."""

MethodBuilder = Callable[[Config, Dataset, int, int], TrainableMethod]
"""``(config, dataset, image_size, n_classes) -> TrainableMethod``, with weights from ``config.training.seed``."""


def learning_rate(config: TrainingConfig, step: int, steps: int) -> float:
    """The learning rate of step ``step`` (from 0) of ``steps``."""
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
    return config.learning_rate * float(config.decay ** (step // config.decay_every))


def count_steps(config: TrainingConfig, labelled: int, unlabelled: int) -> int:
    """Steps of a run: as set, or from ``epochs`` (passes over the set that needs more batches)."""
    if not config.epochs:
        return config.steps
    per_epoch = math.ceil(labelled / min(config.batch_labelled, labelled))
    if unlabelled and config.batch_unlabelled:
        per_epoch = max(per_epoch, math.ceil(unlabelled / min(config.batch_unlabelled, unlabelled)))
    return max(1, math.ceil(config.epochs * per_epoch))


def to_input(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """A batch as the network takes it: float32 on ``device``; uint8 images become [0, 1], channels last."""
    x = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    x = x.to(device, non_blocking=True)
    if x.dtype == torch.uint8:
        x = x.to(memory_format=torch.channels_last).float().div_(255)
    return x


@torch.no_grad()
def embed_rows(
    method: TrainableMethod,
    reader: Reader,
    rows: NDArray[np.int64],
    device: torch.device,
    batch: int = 1000,
    *,
    queries: bool = False,
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Vectors [n, D] of ``rows`` from the network as it would be exported, and which could be read; with ``queries`` those that an
    index is searched with, where the method makes such."""
    exported = method.exported()
    exported.eval()
    network = getattr(exported, "queries", exported) if queries else exported
    parts, there = [], []
    if reader.image_size:
        batch = image_batch(batch, reader.image_size)
    for values, ok in reader.stream(rows[i : i + batch] for i in range(0, len(rows), batch)):
        with full_float32():
            parts.append(network(to_input(values, device)).float().cpu().numpy())
        there.append(ok)
    return np.concatenate(parts), np.concatenate(there)


def validation_map(
    method: TrainableMethod, reader: Reader, rows: NDArray[np.int64], labels: Labels, device: torch.device
) -> float:
    """Tie-aware mAP of the held-out rows, each ranking the others by its code, as a search would."""
    vectors, ok = embed_rows(method, reader, rows, device)
    xq, _ = embed_rows(method, reader, rows, device, queries=True)
    coder = method.coder()
    held = labels.take(rows[ok])
    codes = coder.encode(vectors)
    return rank_codes(
        lambda q, distinct: coder.score(xq[q], distinct),
        codes,
        held,
        held,
        exclude=np.arange(len(vectors)),
    ).map


def resolve_image_size(config: Config, dataset: Dataset) -> int:
    """Side of the images that the network takes: as set, that of the data, or 224 where they differ; 0 for features."""
    if isinstance(dataset, FeatureDataset):
        return 0
    assert isinstance(dataset, ImageDataset)
    return config.network.image_size or dataset.native_size or 224


def run_identity(config: Config, dataset: Dataset, split: Split) -> str:
    """What must be equal for a checkpoint of GPQ to be continued."""
    # How often to save does not change what is computed.
    settled = dataclasses.replace(config.training, checkpoint_seconds=0.0)
    return fingerprint(
        dataclasses.replace(config, training=settled).fingerprint(),
        dataset.fingerprint,
        split.hash,
        torch.__version__,
        str(METHODS["gpq"].revision),
    )


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What :func:`fit` gives.

    Attributes:
        method: with the weights that ranked the held-out items best (the last ones, without such items).
        run: steps, seconds, the lines of the log, the best figure.
        labels: those that the training saw.
        seen, held: labelled items that it trained on, and that it held out for validation.
        image_size: side of the images that the network takes; 0 for features.
    """

    method: TrainableMethod
    run: RunState
    labels: Labels
    seen: int
    held: int
    image_size: int


def fit(
    build: MethodBuilder,
    dataset: Dataset,
    split: Split,
    config: Config,
    *,
    folder: Path,
    identity: str,
    device: torch.device,
    resume: bool = False,
    progress: Progress | None = None,
    earlier: Fitted | None = None,
) -> Fitted:
    """Train a method of any kind; :func:`train` is this with GPQ and the model folder around it.

    Args:
        build: makes the method.
        dataset, split: the data, and which labels of it may be seen.
        config: a checked one.
        folder: where checkpoints go.
        identity: names settings and data; a checkpoint of another one is not continued.
        device: where to train.
        resume: go on from the checkpoint, if there is one.
        progress: called after each step.
        earlier: a training that held nothing out, on the same data with the same settings but for the method's ``codes_only``: it
            is not run again, and codes alone are fitted.

    Raises:
        DataError: nothing to learn from, a class without a label, a loss that is not finite, unreadable data.
    """
    # From here on there are no labels but those that the training may see.
    labels = split.training_labels(dataset.require_labels())
    counts = labels.counts()
    if not counts.any():
        raise DataError(f"{dataset.name}: no item is labelled for the training; see --labelled")
    for c in np.flatnonzero(counts == 0):
        raise DataError(
            f"{dataset.name}: no labelled item for class '{labels.class_names[c]}': label one, or leave the class out"
        )
    training = config.training
    held = hold_out(labels, split.labelled, training.validation, training.seed)
    seen = np.setdiff1d(split.labelled, held)
    pool = split.unlabelled if len(split.unlabelled) else seen
    # Steps are counted alike for every method, so that supervised ones get as many.
    steps = count_steps(training, len(seen), len(pool))
    image_size = resolve_image_size(config, dataset)
    with Reader(dataset, image_size) as reader:
        if reader.preload():
            log.info("%s: %d items in memory", dataset.name, len(dataset))
        method = build(config, dataset, image_size, labels.n_classes)
        if earlier is not None:
            method.adopt(earlier.method)
            method.to(device)
            run = earlier.run
        else:
            with stage("looking at the inputs"):
                method.fit_inputs(reader, np.sort(np.concatenate([seen, pool])))
            with stage("looking at the labels"):
                method.fit_labels(reader, seen, labels.dense(seen))
            method.to(device)
            if device.type == "cuda" and image_size:
                # The convolutions' tensor-core kernels want channels last on both sides.
                method.to(memory_format=torch.channels_last)
            optimizer = method.optimizer(training)
            run = RunState(folder, method, optimizer)
            if resume and run.checkpoint.exists():
                run.load(identity)
                log.info("resumed at step %d of %d", run.step, steps)
            # A step is done, and can be gone on from exactly, before a signal takes effect.
            with held_signals() as interrupted, stage("training", steps, "step", done=run.step) as trained:
                _loop(
                    run,
                    config,
                    reader,
                    labels,
                    seen,
                    pool,
                    held,
                    steps,
                    identity,
                    device,
                    progress,
                    interrupted,
                    trained,
                )
            if held.size and run.best_step:
                method.load_state_dict(run.best_state)
        with stage("settling the codes"):
            method.settle(_sampler(reader, pool, training.seed, device), final=True)
    return Fitted(method, run, labels, len(seen), len(held), image_size)


def train(
    data: Dataset | str,
    out: str | Path,
    *,
    config: Config | None = None,
    labelled: str | None = "all",
    protocol: str = "1",
    queries: str | None = None,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Train a model on ``data`` and write its folder.

    Args:
        data: a data set, or its name as on the command line (``digits``, ``features:x.npy`` ...).
        out: the model folder; an unfinished run lies beside it as ``.NAME.partial``.
        config: what to train; default: the ``recommended`` preset.
        labelled: which labels the training may see: ``N-per-class``, a fraction, a file of ids, or ``all`` but the
            queries'. Labels of all other items are hidden before anything of the training is built.
        protocol: how queries are set apart (``1``, ``2``, ``transfer``, ``gpq-authors``; ``none`` sets none apart).
        queries: those that protocol 1 sets apart: ``N-per-class`` or a file of ids; default: as many as it has itself.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        resume: go on with an unfinished run of the same settings and data; a finished one is left as it is.
        overwrite: replace the folder, once the new one is complete, and begin anew where an unfinished run is. With ``resume``
            alone such a run goes on, and replaces the folder too.
        progress: called after each step.

    Ctrl-C, SIGTERM and SIGHUP take effect after the step under way, which is saved for ``resume``; a second ctrl-C at once.
    One process at a time trains into a folder.

    Returns:
        The model folder.

    Raises:
        UsageError: a setting that cannot be.
        DataError: data that cannot be read or trained on, or an output that cannot be written.
        OutputExistsError: the folder, or an unfinished run, is there.
        DataError: another process trains into this folder.
        DeviceError: there is no such device.
    """
    from ..config import preset

    config = validate(config or preset("recommended"))
    out = Path(out)
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite begins a new one: give one of them")
    if not out.name:
        raise UsageError(f"--out {out} names no folder of its own: give the model's folder a name")
    torch_device = resolve_device(device)
    recover(out)
    partial = out.with_name(f".{out.name}.partial")

    def run() -> Path:
        return _train(
            data,
            out,
            partial,
            config=config,
            labelled=labelled,
            protocol=protocol,
            queries=queries,
            device=torch_device,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        )

    if resume and _finished(out) and not partial.exists():
        return run()  # it has nothing to write
    check_output(out, overwrite=True, folder=True)
    with unfinished(partial, out, keep=(CHECKPOINT,)):
        return run()


def _finished(out: Path) -> bool:
    return (out / "config.json").exists()


def _train(
    data: Dataset | str,
    out: Path,
    partial: Path,
    *,
    config: Config,
    labelled: str | None,
    protocol: str,
    queries: str | None,
    device: torch.device,
    resume: bool,
    overwrite: bool,
    progress: Progress | None,
) -> Path:
    """As :func:`train`, with the folder ``partial`` held."""
    if (partial / CHECKPOINT).exists() and not (resume or overwrite):
        raise OutputExistsError(
            f"an unfinished run is at {partial}: go on with --resume, or begin anew with --overwrite"
        )
    finished = _finished(out)
    if not (resume and finished):
        check_output(out, overwrite=overwrite, folder=True)
        if overwrite and out.exists() and not finished and any(out.iterdir()):
            raise DataError(
                f"{out} holds something else than a model: it is not replaced; choose another --out"
            )
    dataset = open_data(data) if isinstance(data, str) else data
    split = make_split(dataset, protocol, seed=config.training.seed, labelled=labelled, queries=queries)
    identity = run_identity(config, dataset, split)
    if resume and finished and not _replaces(partial, out, identity):
        if read_json(out / "config.json", "a model's settings").get("run_identity") != identity:
            raise OutputExistsError(
                f"{out} is a finished model of other settings or data: choose another --out, or --overwrite it"
            )
        log.info("%s is finished: nothing to resume", out)
        return out
    if overwrite:
        _begin_anew(partial, out, identity)

    fitted = fit(
        build_gpq,
        dataset,
        split,
        config,
        folder=partial,
        identity=identity,
        device=device,
        resume=resume,
        progress=progress,
    )
    method, run, labels = fitted.method, fitted.run, fitted.labels
    assert isinstance(method, AveragedMethod)
    if isinstance(dataset, ImageDataset) and dataset.bad.count:
        log.warning("%s", dataset.bad.summary())
    codebooks = method.codebooks()
    z_print = codebooks_fingerprint(codebooks)
    network = method.exported()
    network.eval()
    description = {
        "format_version": 1,
        "method": method.name,
        "config": to_dict(config),
        "run_identity": identity,
        "codebooks_fingerprint": z_print,
        "data": {"name": dataset.name, "fingerprint": dataset.fingerprint, "notes": dataset.notes},
        "split": {"protocol": split.name, "seed": split.seed, "hash": split.hash},
        "class_names": list(labels.class_names),
        "multi_label": labels.multi_label,
        "asymmetric": network.asymmetric,
        "items_are_codewords": network.items_are_codewords,
        "input": input_description(dataset, fitted.image_size),
        "training": {
            "steps": run.step,
            "best_step": run.best_step or None,
            "validation_map": run.best if run.best_step else None,
            "validation_items": fitted.held,
            "labelled_items": fitted.seen,
            "unlabelled_items": len(split.unlabelled),
            "device": str(device),
        },
        "versions": {
            "gpq_faiss": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
    save_model(
        out,
        network,
        codebooks,
        description,
        extra={"metrics.jsonl": "".join(f"{line}\n" for line in run.lines)},
        split=split,
        overwrite=finished,
        done_with=partial,
    )
    return out


def _begin_anew(partial: Path, out: Path, identity: str) -> None:
    """Forget an unfinished run, and note that the one that begins is to replace the model ``out``, if there is one.

    The model stays until the new one is complete; with the note, ``resume`` may replace it too.
    """
    try:
        for name in (CHECKPOINT, BEGUN):
            (partial / name).unlink(missing_ok=True)
    except OSError as error:
        raise write_error(partial, error) from error
    if _finished(out):
        write_json(partial / BEGUN, {"identity": identity, "replaces": _mark(out)})


def _replaces(partial: Path, out: Path, identity: str) -> bool:
    """Whether the unfinished run was begun to replace the very model ``out``.

    Raises:
        DataError: it was, with other settings or data.
    """
    if not (partial / BEGUN).exists():
        return False
    begun = read_json(partial / BEGUN, "the beginning of a training")
    if not isinstance(begun, dict) or begun.get("replaces") != _mark(out):
        return False
    if begun.get("identity") != identity:
        raise other_run(partial)
    return True


def _mark(out: Path) -> str:
    """Names a model as it lies there."""
    return fingerprint(json.dumps(read_json(out / "config.json", "a model's settings"), sort_keys=True))


def _loop(
    run: RunState,
    config: Config,
    reader: Reader,
    labels: Labels,
    seen: NDArray[np.int64],
    pool: NDArray[np.int64],
    held: NDArray[np.int64],
    steps: int,
    identity: str,
    device: torch.device,
    progress: Progress | None,
    interrupted: Callable[[], bool],
    trained: Stage,
) -> None:
    """Steps ``run.step`` to ``steps``: batch, losses, Adam, validation, checkpoint."""
    training, method, optimizer = config.training, run.method, run.optimizer
    labelled = EpochSampler(seen, training.batch_labelled, training.seed, LABELLED)
    unlabelled = (
        EpochSampler(pool, training.batch_unlabelled, training.seed, UNLABELLED)
        if training.batch_unlabelled and method.uses_unlabelled
        else None
    )
    augment = _augmentation(training, reader.dataset)
    # What the network's normalisation turns into 0.
    colour = method.extractors()[0].input.mean if training.padding == "mean" else None

    sample = _sampler(reader, pool, training.seed, device)
    began, saved = time.monotonic() - run.seconds, time.monotonic()
    method.train()
    for values, rows, others in training_batches(reader, labelled, unlabelled, range(run.step, steps)):
        generator = torch.Generator().manual_seed(_step_seed(training.seed, run.step))
        x = to_input(values, device)
        if augment != "none":
            x = random_flip_crop(x, generator, flip=augment == "flip-crop", colour=colour)
        y = torch.from_numpy(labels.dense(rows)).to(device, non_blocking=True)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, run.step, steps) * group.get("times", 1.0)
        method.before_step(run.step, steps, sample)
        optimizer.zero_grad(set_to_none=True)
        with _dropout_seed(training.seed, run.step, device):
            batch = TrainingBatch(x, y, run.step, steps, generator, rows, others)
            losses = method.losses(batch, amp=training.amp)
        losses["total"].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        method.after_step(run.step)
        run.step += 1

        validate_now = run.step % training.validate_every == 0 or run.step == steps
        figures: dict[str, float] = {}
        if validate_now:
            run.seconds = time.monotonic() - began
            figures = {k: float(v.detach()) for k, v in losses.items()}
            _check_finite(figures["total"], run.step)
            line: dict[str, Any] = {
                "step": run.step,
                "seconds": round(run.seconds, 3),
                "lr": optimizer.param_groups[0]["lr"],
            }
            line |= {k: round(v, 6) for k, v in figures.items()}
            if held.size:
                method.settle(sample)
                figures["map"] = validation_map(method, reader, held, labels, device)
                line["validation_map"] = round(figures["map"], 6)
                if figures["map"] > run.best:
                    run.keep_best(figures["map"])
                method.train()
            run.lines.append(json.dumps(line))
            log.info(
                "step %d of %d  %s", run.step, steps, "  ".join(f"{k} {v:.4f}" for k, v in figures.items())
            )
        trained.done = run.step
        trained.figures = figures or trained.figures
        stop = interrupted()
        # What comes after the last step may be cut off as well.
        due = min(training.checkpoint_seconds, math.inf if run.step < steps else _LAST)
        if stop or time.monotonic() - saved >= due:
            _check_finite(float(losses["total"].detach()), run.step)
            run.seconds = time.monotonic() - began
            run.save(identity)
            saved = time.monotonic()
        if stop:
            raise KeyboardInterrupt
        if progress is not None:
            progress(run.step, steps, figures)
    run.seconds = time.monotonic() - began


def _sampler(
    reader: Reader, pool: NDArray[np.int64], seed: int, device: torch.device
) -> Callable[[int], Iterator[Tensor]]:
    """A function that gives blocks of up to n items of ``pool`` in all, always the same ones."""

    def sample(n: int) -> Iterator[Tensor]:
        rng = np.random.default_rng([seed, SAMPLE])
        chosen = np.sort(rng.permutation(pool)[:n])
        for start in range(0, len(chosen), 500):
            yield to_input(reader.fetch(chosen[start : start + 500])[0], device)

    return sample


def _check_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise DataError(f"the loss became {loss} at step {step}: lower training.learning_rate")


def _augmentation(config: TrainingConfig, dataset: Dataset) -> str:
    """``flip-crop``, ``crop`` or ``none`` for these data."""
    if not isinstance(dataset, ImageDataset):
        return "none"
    if config.augment == "auto":
        return "flip-crop" if dataset.mirrors else "crop"
    return config.augment


def _step_seed(seed: int, step: int) -> int:
    return int(np.random.default_rng([seed, STEP, step]).integers(2**62))


class _dropout_seed:
    """Dropout draws from torch's global generators: seed them for this step and put them back as they were."""

    def __init__(self, seed: int, step: int, device: torch.device) -> None:
        self._seed = _step_seed(seed, step) ^ 1
        devices = [device] if device.type == "cuda" else []
        self._fork = torch.random.fork_rng(devices=devices)

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(self._seed)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)
