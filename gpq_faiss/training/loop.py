"""The training loop of all trained methods.

Batches depend on seed and step only, and a checkpoint holds the rest of the state; so a killed and resumed run takes the same steps as
an uninterrupted one, and on the CPU gives the same codes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import Config, TrainingConfig
from ..data.base import Dataset, ImageDataset
from ..data.labels import Labels
from ..data.protocols import Split
from ..data.reader import Reader
from ..errors import DataError
from ..evaluation.ranking import rank_codes
from ..inputs import check_memory
from ..methods.registry import Builder
from ..methods.trainable import TrainableMethod, TrainingBatch, embed_rows
from ..nn.augment import random_flip_crop
from ..nn.backbones import MLP
from ..nn.device import to_input, torch_threads
from ..nn.joint import join_batch_norm
from ..progress import stage
from ..signals import held_signals
from .batches import LABELLED, SAMPLE, STEP, UNLABELLED, EpochSampler, hold_out, training_batches
from .checkpoint import RunState
from .parallel import Group

log = logging.getLogger(__name__)

_SMALL_STEP = 2e8
"""Items times parameters of a training step that one thread computes about as fast as two (measured)."""
_LAST = 5.0
"""Seconds of training that justify a checkpoint after the last step."""

Progress = Callable[[int, int, dict[str, float]], None]
"""Called after each step with step, number of steps and latest figures."""


@dataclass(frozen=True)
class RunOptions:
    """How to run a training: continue from the checkpoint (``resume``); the backbone in bf16 (``amp``); steps between validations and log
    lines; seconds between checkpoints; ``progress`` is called after each step; the processes that train together."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    resume: bool = False
    amp: bool = False
    validate_every: int = 100
    checkpoint_seconds: float = 60.0
    progress: Progress | None = None
    group: Group = field(default_factory=Group)


@dataclass(frozen=True)
class Fitted:
    """Result of :func:`fit`: the method with the weights that ranked the held-out items best (the last ones, without such items); its
    run; the labels used in training; numbers of labelled items trained on and held out; side of input images in pixels, 0 for features."""

    method: TrainableMethod
    run: RunState
    labels: Labels
    seen: int
    held: int
    image_size: int


@dataclass(frozen=True)
class _Task:
    """Data and options of a training: the labels it may use; labelled rows to train on and to hold out for validation, int64; and the
    unlabelled rows ``pool`` (``seen``, if there are none)."""

    config: Config
    options: RunOptions
    reader: Reader
    labels: Labels
    seen: NDArray[np.int64]
    held: NDArray[np.int64]
    pool: NDArray[np.int64]

    @property
    def steps(self) -> int:
        """Optimizer steps; the same for supervised methods."""
        return count_steps(self.config.training, self.labels.n_classes)

    def sample(self, n: int) -> Iterator[Tensor]:
        """Blocks with up to n items of the pool in total, always the same."""
        rng = np.random.default_rng([self.config.training.seed, SAMPLE])
        chosen = np.sort(rng.permutation(self.pool)[:n])
        for start in range(0, len(chosen), 500):
            yield to_input(self.reader.fetch(chosen[start : start + 500])[0], self.options.device)

    def batches(self, run: RunState) -> Iterator[TrainingBatch]:
        """Batches of the remaining steps of ``run``, on the device."""
        training, method, device, steps = self.config.training, run.method, self.options.device, self.steps
        labelled = EpochSampler(self.seen, training.batch_labelled, training.seed, LABELLED)
        unlabelled = None
        if training.batch_unlabelled and method.uses_unlabelled:
            unlabelled = EpochSampler(self.pool, training.batch_unlabelled, training.seed, UNLABELLED)
        augment = _augmentation(self.config, self.reader.dataset, method)
        # The colour that normalisation maps to 0.
        colour = method.extractors()[0].input.mean if self.config.method == "gpq-authors" else None
        left = range(run.step, steps)
        drawn = training_batches(self.reader, labelled, unlabelled, left, self.options.group)
        for step, (values, rows, others, share) in zip(left, drawn, strict=True):
            generator = torch.Generator().manual_seed(_step_seed(training.seed, step))
            x = to_input(values, device)
            if augment != "none":
                x = random_flip_crop(x, generator, flip=augment == "flip-crop", colour=colour, share=share)
            y = torch.from_numpy(self.labels.dense(rows)).to(device, non_blocking=True)
            yield TrainingBatch(x, y, step, steps, generator, rows, others, share)


def fit(
    build: Builder,
    dataset: Dataset,
    split: Split,
    config: Config,
    *,
    folder: Path,
    identity: str,
    options: RunOptions | None = None,
) -> Fitted:
    """Train a method; :func:`gpq_faiss.stages.train.train` adds the model folder.

    Args:
        folder, identity: of the checkpoints; only those with the same identity, of settings and data, are continued.

    Raises:
        DataError: a loss that is not finite, or unreadable data.
    """
    options = options or RunOptions()
    group = options.group
    # From here on only training labels are available.
    labels = split.training_labels(dataset.require_labels())
    held = hold_out(labels, split.labelled, config.training.validation, config.training.seed)
    seen = np.setdiff1d(split.labelled, held)
    pool = split.unlabelled if len(split.unlabelled) else seen
    image_size = 0
    if isinstance(dataset, ImageDataset):  # as set, that of the data, or 224 if their sizes differ
        image_size = config.network.image_size or dataset.native_size or 224
    with Reader(dataset, image_size) as reader:
        # Several processes read their own images only, a step ahead.
        if (group.size == 1 or not image_size) and reader.preload():
            log.info("%s: %d items in memory", dataset.name, len(dataset))
        task = _Task(config, options, reader, labels, seen, held, pool)
        # Other processes get their weights from the first.
        blank = replace(config, network=replace(config.network, weights="none"))
        method = build(config if group.main else blank, dataset, image_size, labels.n_classes)
        _check_step_memory(method, task)
        _prepare(method, task)
        run = RunState(folder, method, method.optimizer(config))
        there = group.main and options.resume and run.checkpoint.exists()
        found = group.copy(run.read(identity) if there else {})
        if found:
            run.take(found)
            log.info("resumed at step %d of %d", run.step, task.steps)
        with torch_threads(1) if _is_small(method, task) else contextlib.nullcontext():
            _loop(task, run, identity)
        if held.size and run.best_step:
            method.load_state_dict(run.best_state)
        if group.main:
            with stage("fitting codebooks"):
                method.fit_codebooks(task.sample, final=True)
    return Fitted(method, run, labels, len(seen), len(held), image_size)


def _is_small(method: TrainableMethod, task: _Task) -> bool:
    """Whether one thread is enough for a step: several wait for each other after every operation, and long beside another busy process."""
    training, parameters = task.config.training, list(method.parameters())
    numbers = sum(p.numel() for p in parameters) * (training.batch_labelled + training.batch_unlabelled)
    return numbers < _SMALL_STEP and not any(p.ndim == 4 for p in parameters)  # of convolutions


def _loop(task: _Task, run: RunState, identity: str) -> None:
    options, method, steps = task.options, run.method, task.steps
    main = options.group.main
    # A signal takes effect after a complete step, from which the run can be resumed exactly.
    with held_signals() as interrupted, stage("training", steps, "step", done=run.step) as trained:
        run.start()
        method.train()
        for batch in task.batches(run):
            losses, stop = _step(task, run, batch, interrupted)
            figures: dict[str, float] = {}
            if main and (run.step % options.validate_every == 0 or run.step == steps):
                figures = _validate(task, run, losses)
            trained.done = run.step
            if options.group.size == 1 or run.step == steps:
                stop = interrupted()
            # The work after the last step may be interrupted as well.
            due = min(options.checkpoint_seconds, math.inf if run.step < steps else _LAST)
            if main and (stop or time.monotonic() - run.saved >= due):
                _finite(losses, run.step)
                run.save(identity)
            if stop:
                raise KeyboardInterrupt
            if main and options.progress is not None:
                options.progress(run.step, steps, figures)
        run.tick()


def _step(
    task: _Task, run: RunState, batch: TrainingBatch, interrupted: Callable[[], bool]
) -> tuple[dict[str, Tensor], bool]:
    """The losses of a step, and whether any process was interrupted before it."""
    training, method, optimizer = task.config.training, run.method, run.optimizer
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(task.config, batch.step, batch.steps) * group.get("times", 1.0)
    method.before_step(batch.step, batch.steps, task.sample)
    optimizer.zero_grad()
    device = task.options.device
    # Dropout uses torch's global generators: seed them for this step.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_step_seed(training.seed, batch.step) ^ 1)
        losses = method.losses(batch, amp=task.options.amp)
    task.options.group.backward(losses["total"])
    stop = task.options.group.average(method.parameters(), interrupted())
    optimizer.step()
    method.after_step(batch.step)
    run.step += 1
    return losses, stop


def _validate(task: _Task, run: RunState, losses: dict[str, Tensor]) -> dict[str, float]:
    """Log a line, and keep the weights if they are the best; returns the figures of this step."""
    run.tick()
    figures = _finite(losses, run.step)
    lr: float = run.optimizer.param_groups[0]["lr"]
    line = {"step": run.step, "seconds": round(run.seconds, 3), "lr": lr}
    line |= {k: round(v, 6) for k, v in figures.items()}
    if task.held.size:
        method = run.method
        method.fit_codebooks(task.sample)
        figures["map"] = _map(task, method)
        line["validation_map"] = round(figures["map"], 6)
        if figures["map"] > run.best:
            run.keep_best(figures["map"])
        method.train()
    run.lines.append(json.dumps(line))
    log.info("step %d of %d  %s", run.step, task.steps, "  ".join(f"{k} {v:.4f}" for k, v in figures.items()))
    return figures


def _map(task: _Task, method: TrainableMethod) -> float:
    """Tie-aware mAP of the held-out rows, each as a query against the codes of the others."""
    device, coder = task.options.device, method.coder()
    vectors, rows = embed_rows(method, task.reader, task.held, device)
    xq, _ = embed_rows(method, task.reader, task.held, device, queries=True)
    held, codes, own = task.labels.take(rows).packed, coder.encode(vectors), np.arange(len(vectors))
    return rank_codes(lambda q, distinct: coder.score(xq[q], distinct), codes, held, held, exclude=own).map


def _prepare(method: TrainableMethod, task: _Task) -> None:
    """Let the method prepare before the first step, then move it to the device."""
    group, found = task.options.group, dict[str, Any]()
    if group.main:
        with stage("statistics of the inputs"):
            method.fit_inputs(task.reader, np.sort(np.concatenate([task.seen, task.pool])))
        with stage("statistics of the labels"):
            y, others = task.labels.dense(task.seen), np.setdiff1d(task.pool, task.seen)
            found = method.fit_labels(task.reader, task.seen, y, others)
    if group.size > 1:
        method.load_state_dict(group.copy(method.state_dict()))
        join_batch_norm(method)
    method.take_labels(group.copy(found))
    method.to(task.options.device)
    if task.options.device.type == "cuda" and task.reader.image_size:
        # The convolutions' tensor-core kernels want channels last on both sides.
        method.to(memory_format=torch.channels_last)


def learning_rate(config: Config, step: int, steps: int) -> float:
    """The learning rate of step ``step`` (from 0) of ``steps``; schedule ``step`` is the paper's."""
    if config.schedule == "cosine":
        return config.training.learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
    return config.training.learning_rate * float(0.95 ** (step // 100))


def count_steps(config: TrainingConfig, classes: int) -> int:
    """Steps of a run: as set, or by the number of classes (``auto``)."""
    return config.steps if config.steps != "auto" else min(max(800, 8 * classes), 1600)


def _check_step_memory(method: TrainableMethod, task: _Task) -> None:
    """Check that activations of image batches fit into memory: on the CPU the system would kill the process. Raises DataError."""
    size, training, kept = task.reader.image_size, task.config.training, dict[int, int]()
    if not size or task.options.device.type != "cpu":
        return
    backbone = method.extractors()[0].eval()  # neither updates statistics nor draws random numbers

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backbone(torch.zeros(1, 3, size, size))
    backbone.train()
    for weight in (*backbone.parameters(), *backbone.buffers()):
        kept.pop(weight.untyped_storage().data_ptr(), None)
    batch = min(training.batch_labelled, len(task.seen))
    if method.uses_unlabelled:
        batch += min(training.batch_unlabelled, len(task.pool))
    check_memory(
        batch * sum(kept.values()),
        f"a training step on {batch:,} images of {size} pixels per side",
        remedy="lower network.image_size, or training.batch_labelled and training.batch_unlabelled (--set)",
    )


def _finite(losses: dict[str, Tensor], step: int) -> dict[str, float]:
    """The losses as numbers. Raises DataError: the total is not finite."""
    figures = {k: float(v.detach()) for k, v in losses.items()}
    if not math.isfinite(figures["total"]):
        raise DataError(f"the loss became {figures['total']} at step {step}: lower training.learning_rate")
    return figures


def _augmentation(config: Config, dataset: Dataset, method: TrainableMethod) -> str:
    """``flip-crop``, ``crop`` or ``none`` for these data and this method."""
    if not isinstance(dataset, ImageDataset):
        return "none"
    if config.training.augment != "auto":
        return config.training.augment
    # To a perceptron a shifted image is another one: it has noise instead (docs/recommended.md#images).
    if config.network.first_noise and any(isinstance(net, MLP) for net in method.extractors()):
        return "none"
    return "flip-crop" if dataset.mirrors else "crop"


def _step_seed(seed: int, step: int) -> int:
    return int(np.random.default_rng([seed, STEP, step]).integers(2**62))
