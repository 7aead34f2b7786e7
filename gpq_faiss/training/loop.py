"""The training loop of all trained methods.

Batches depend on seed and step only, and a checkpoint holds the rest of the state; so a killed and
resumed run takes the same steps as an uninterrupted one, and on the CPU gives the same codes.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from ..config import Config, TrainingConfig
from ..data.base import Dataset, ImageDataset, Reader
from ..data.protocols import Split
from ..errors import DataError
from ..evaluation.ranking import rank_codes
from ..faissio.kmeans import check_rows
from ..methods.registry import Builder
from ..methods.trainable import TrainableMethod, TrainingBatch, embed_rows
from ..nn.augment import random_flip_crop
from ..nn.backbones import MLP
from ..nn.device import to_input
from ..progress import stage
from ..signals import deferred_signals
from .batches import LABELLED, SAMPLE, STEP, UNLABELLED, EpochSampler, hold_out
from .checkpoint import CHECKPOINT, RunState, load_checkpoint
from .parallel import Group

log = logging.getLogger(__name__)

_SMALL_STEP = 2e8
"""Items times parameters of a training step that one thread computes about as fast as two
(measured)."""

_WARM_UP = 0.05
"""Share of the steps of a fine-tuning in which the learning rate rises."""


@dataclass(frozen=True)
class RunOptions:
    """How to run a training.

    Attributes:
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        resume: whether to continue from the checkpoint.
        amp: whether the backbone runs in bf16.
        validate_every: steps between validations and log lines.
        checkpoint_seconds: time between checkpoints.
        progress: called after each step with the step and the number of steps.
    """

    device: str = "cpu"
    resume: bool = False
    amp: bool = False
    validate_every: int = 100
    checkpoint_seconds: float = 60.0
    progress: Callable[[int, int], None] | None = None


class _Losses(nn.Module):
    """The losses of a method as a forward pass, which ``DistributedDataParallel`` needs."""

    def __init__(self, method: TrainableMethod) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: TrainingBatch, amp: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the total, and all losses without gradients."""
        losses = self.method.losses(batch, amp=amp)
        return losses["total"], {name: value.detach() for name, value in losses.items()}


class Training:
    """A training: its data, method and state. Rows are int64.

    Raises DataError: there are fewer items than codewords.

    Attributes:
        config, options, group: settings, how to run it, and the processes.
        device, steps: the device of this process, and the number of steps.
        reader: of the items.
        labels: those that the training may use.
        labelled, held_out: rows of labelled items to train on, and to validate on.
        pool: rows of the unlabelled items; if they are fewer than codewords, of the labelled ones,
            too.
        method: the network; after :func:`fit`, with the weights that ranked the held-out items
            best, or with the last ones, if there are no such items.
        run: steps, log lines and best validation.
    """

    def __init__(
        self,
        build: Builder,
        reader: Reader,
        split: Split,
        config: Config,
        options: RunOptions,
        group: Group,
    ) -> None:
        self.config, self.options, self.group, self.reader = config, options, group, reader
        self.device = torch.device(options.device)
        # From here on only training labels are available.
        self.labels = split.training_labels(reader.dataset.require_labels())
        self.held_out = hold_out(
            self.labels, split.labelled, config.training.validation, config.training.seed
        )
        self.labelled = np.setdiff1d(split.labelled, self.held_out)
        is_few = len(split.unlabelled) < config.quantizer.codewords
        self.pool = np.union1d(split.unlabelled, self.labelled) if is_few else split.unlabelled
        check_rows(self.pool, config.quantizer.codewords)
        classes = self.labels.n_classes
        self.steps = count_steps(config.training, classes)
        self.method: TrainableMethod = build(config, reader.dataset, reader.image_size, classes)
        self.run = RunState()

    def seed(self, step: int) -> int:
        """Return the seed of the random numbers of a step, which differs between processes."""
        rng = np.random.default_rng([self.config.training.seed, STEP, step])
        return int(rng.integers(2**62)) + 2 * self.group.rank

    def sample(self, n: int) -> Iterator[Tensor]:
        """Yield blocks with up to n items of the pool in total, always the same."""
        rng = np.random.default_rng([self.config.training.seed, SAMPLE])
        chosen = np.sort(rng.permutation(self.pool)[:n])
        for start in range(0, len(chosen), 500):
            yield to_input(self.reader.fetch(chosen[start : start + 500])[0], self.device)

    def batches(self) -> Iterator[TrainingBatch]:
        """Yield the remaining batches, on the device.

        Raises:
            DataError: no labelled item of a step is readable, or too many items are not.
        """
        training = self.config.training
        sharing = self.group.rank, self.group.size
        samplers = [
            EpochSampler(
                self.labelled, training.batch_labelled, (training.seed, LABELLED), *sharing
            )
        ]
        if training.batch_unlabelled and self.method.uses_unlabelled:
            samplers.append(
                EpochSampler(
                    self.pool, training.batch_unlabelled, (training.seed, UNLABELLED), *sharing
                )
            )
        augment = _augmentation(self.config, self.reader.dataset, self.method)
        # The colour that normalisation maps to 0.
        colour = self.method.backbone.input.mean if self.config.method == "gpq-authors" else None
        steps = range(self.run.step, self.steps)
        # The reader reads ahead of the loop, so it consumes the rows first.
        ahead, drawn = itertools.tee(
            np.concatenate([sampler.rows_of_step(step) for sampler in samplers]) for step in steps
        )
        for step, rows_of_step, (values, readable) in zip(
            steps, drawn, self.reader.stream(ahead), strict=True
        ):
            n = int(readable[: samplers[0].batch].sum())  # labelled items
            if not n:
                raise DataError(
                    f"{self.reader.dataset.name}: no labelled image of step {step} can be read: "
                    "repair the images, or raise training.batch_labelled"
                )
            rows = rows_of_step[readable]
            generator = torch.Generator().manual_seed(self.seed(step))
            x = to_input(values, self.device)
            if augment != "none":
                x = random_flip_crop(x, generator, flip=augment == "flip-crop", colour=colour)
            y = torch.from_numpy(self.labels.dense(rows[:n])).to(self.device)
            positions = torch.from_numpy(np.searchsorted(self.labelled, rows[:n]))
            yield TrainingBatch(x, y, step, self.steps, generator, positions, rows[n:])

    def take_steps(self, optimizer: torch.optim.Optimizer, save: Callable[[], None]) -> None:
        """Take the remaining steps; ``save`` writes the checkpoint.

        A signal takes effect after a complete step, from which the run can be resumed exactly.
        """
        options, run, group = self.options, self.run, self.group
        compute = group.distribute(_Losses(self.method))
        saved = time.monotonic()
        began = saved - run.seconds  # as if the run had not been interrupted
        with (
            deferred_signals() as interrupted,
            stage("training", self.steps, "step", done=run.step) as training,
        ):
            for batch in self.batches():
                losses = self._step(batch, compute, optimizer)
                run.step += 1
                run.seconds = time.monotonic() - began
                if group.main and (
                    run.step % options.validate_every == 0 or run.step == self.steps
                ):
                    self._validate(losses, optimizer.param_groups[0]["lr"])
                training.update()
                stop = any(group.gather(interrupted()))
                if group.main and (stop or time.monotonic() - saved >= options.checkpoint_seconds):
                    save()
                    saved = time.monotonic()
                if stop:
                    raise KeyboardInterrupt
                if group.main and options.progress is not None:
                    options.progress(run.step, self.steps)

    def _step(
        self, batch: TrainingBatch, compute: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        """Take a step of the optimizer, and return the losses of the batch."""
        rate = learning_rate(self.config, batch.step, batch.steps)
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate * parameters.get("rate_factor", 1.0)
        self.method.train()
        self.method.before_step(batch.step, batch.steps, self.sample)
        optimizer.zero_grad()
        # Dropout uses torch's global generators: seed them for this step.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.seed(batch.step) ^ 1)
            total, losses = compute(batch, self.options.amp)
        total.backward()
        optimizer.step()
        self.method.after_step(batch.step, batch.steps)
        return dict(losses)

    def _validate(self, losses: dict[str, Tensor], rate: float) -> None:
        """Log a line, and keep the weights if they are the best so far.

        Raises:
            DataError: the loss is not finite.
        """
        run, method = self.run, self.method
        figures = {name: float(value) for name, value in losses.items()}
        if not math.isfinite(figures["total"]):
            raise DataError(
                f"the loss became {figures['total']} at step {run.step}: "
                "lower training.learning_rate"
            )
        if self.held_out.size:
            method.fit_codebooks(self.sample, final=run.step == self.steps)
            figures["validation_map"] = self._mean_average_precision()
            if figures["validation_map"] > run.best:
                run.best, run.best_step = figures["validation_map"], run.step
                run.best_state = {
                    name: value.detach().cpu().clone()
                    for name, value in method.state_dict().items()
                }
        rounded = {name: round(value, 6) for name, value in figures.items()}
        run.lines.append(
            json.dumps({"step": run.step, "seconds": round(run.seconds, 3), "lr": rate} | rounded)
        )
        log.info("step %d of %d  %s", run.step, self.steps, rounded)

    def _mean_average_precision(self) -> float:
        """Return the tie-aware mAP of the held-out rows.

        Each is a query against the codes of the others.
        """
        coder = self.method.coder()
        data = self.method, self.reader, self.held_out, self.device
        vectors, rows = embed_rows(*data)
        xq, _ = embed_rows(*data, queries=True)
        labels = self.labels.take(rows).packed
        return rank_codes(
            lambda queries, codes: coder.score(xq[queries], codes),
            coder.encode(vectors),
            labels,
            labels,
            exclude=np.arange(len(rows)),
        ).map


def fit(
    build: Builder,
    dataset: Dataset,
    split: Split,
    config: Config,
    *,
    folder: Path,
    identity: str,
    options: RunOptions,
    group: Group | None = None,
) -> Training:
    """Train a method; :func:`gpq_faiss.stages.train.train` adds the model folder.

    Args:
        build: makes the method.
        dataset, split: the items, and which of them are labelled.
        config: the settings.
        folder: of the checkpoint.
        identity: of settings and data; only a checkpoint with the same one is continued.
        options: how to run the training.
        group: the processes that train together (default: one).

    Raises:
        DataError: a loss that is not finite, or unreadable data.
    """
    group = group or Group()
    image_size = 0
    if isinstance(dataset, ImageDataset):  # as set, that of the data, or 224 if their sizes differ
        image_size = config.network.image_size or max(
            dataset.native_size or 224, config.smallest_image
        )
    with Reader(dataset, image_size) as reader:
        # Each of several processes reads its own images only, a step ahead.
        if group.size == 1 or not image_size:
            reader.preload()
        task = Training(build, reader, split, config, options, group)
        method, labelled = task.method, task.labelled
        started = time.monotonic()
        with stage("statistics of inputs and labels"):
            method.fit_inputs(reader, np.union1d(labelled, task.pool))
            method.fit_labels(reader, labelled, task.labels.dense(labelled), split.unlabelled)
        # Convolutions are up to twice as fast with channels last on both sides.
        method.to(task.device).to(memory_format=torch.channels_last)
        optimizer = method.optimizer(config)
        checkpoint = folder / CHECKPOINT
        if options.resume and checkpoint.exists():
            task.run = load_checkpoint(checkpoint, identity, method, optimizer)
            log.info("resumed at step %d of %d", task.run.step, task.steps)
        else:
            task.run.seconds = time.monotonic() - started
        if len(set(group.gather(task.run.step))) > 1:
            raise DataError(
                f"{checkpoint} is not the same on all machines: copy that of the first process to "
                "all of them"
            )
        # Threads wait for each other after every operation, and for long if another process is
        # busy: small networks use one.
        items = config.training.batch_labelled + config.training.batch_unlabelled
        work = items * sum(weight.numel() for weight in method.parameters())
        with threadpool_limits(1 if work < _SMALL_STEP else None, user_api="openmp"):
            task.take_steps(
                optimizer, lambda: task.run.save(checkpoint, identity, method, optimizer)
            )
        if task.run.best_state:
            method.load_state_dict(task.run.best_state)
        # The last validation has fitted them, if its weights are the best.
        if group.main and task.run.best_step < task.steps:
            started = time.monotonic()
            with stage("fitting codebooks"):
                method.fit_codebooks(task.sample, final=True)
            task.run.seconds += time.monotonic() - started
    method.after_training()
    reader.array = None  # which may be large
    return task


def learning_rate(config: Config, step: int, steps: int) -> float:
    """Return the learning rate of step ``step`` (from 0) of ``steps``.

    The schedule ``step`` is the paper's.
    """
    if config.schedule == "step":
        return config.training.learning_rate * float(0.95 ** (step // 100))
    # Large first steps would destroy what pretrained weights have learnt.
    warm_up = _WARM_UP * steps if config.network.weights != "none" else 1
    rise = min(1.0, (step + 1) / max(1, warm_up))
    return config.training.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * step / steps))


def count_steps(config: TrainingConfig, classes: int) -> int:
    """Return the steps of a run: as set, or by the number of classes (``auto``)."""
    return config.steps if config.steps != "auto" else min(max(800, 8 * classes), 1600)


def _augmentation(config: Config, dataset: Dataset, method: TrainableMethod) -> str:
    """Return ``flip-crop``, ``crop`` or ``none`` for these data and this method."""
    augment = config.training.augment
    # A perceptron does not recognise a shifted image: it is trained with noise instead
    # (docs/recommended.md#images).
    noisy = config.network.first_noise and isinstance(method.backbone, MLP)
    if not isinstance(dataset, ImageDataset) or (augment == "auto" and noisy):
        return "none"
    return ("flip-crop" if dataset.mirrors else "crop") if augment == "auto" else augment
