"""Short trainings on digits, as images and as features, for the tests of methods that learn by
gradient."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpq_faiss.config import Config, preset, validate
from gpq_faiss.data.base import Dataset, Reader
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import Split, make_split
from gpq_faiss.experiment.grid import baseline_config
from gpq_faiss.methods.registry import find_method
from gpq_faiss.methods.trainable import TrainableMethod, TrainingBatch, embed_rows
from gpq_faiss.training.loop import RunOptions, Training, fit

_FOLDER = tempfile.TemporaryDirectory(prefix="digits-")


@cache
def digits() -> Any:
    return open_data("digits")


@cache
def features() -> Dataset:
    """The 64 pixels of each digit as a feature data set: pictures of their size are cropped at
    random, which takes longer to learn."""
    x = np.stack([image[:, :, 0].ravel() for image in digits().read(np.arange(len(digits())))])
    return open_data(x.astype(np.float32) / 255, labels=digits().require_labels().dense().argmax(1))


def split_of(dataset: Dataset) -> Split:
    return make_split(dataset, "1", seed=0, labelled="20-per-class")


def quick_config(bits: int = 16, steps: int = 60, seed: int = 0, **training: Any) -> Config:
    """What a comparison gives to a trained method beside GPQ, with a small network and few
    steps.
    """
    quick = {
        "steps": steps,
        "seed": seed,
        "batch_labelled": 60,
        "batch_unlabelled": 60,
        "validation": 0.0,
    }
    changes = {
        "quantizer": {"codebooks": bits // 4},
        "network": {"hidden": [64], "noise": 0.0},
        "training": {**quick, "learning_rate": 3e-3, **training},
    }
    return validate(baseline_config(preset("recommended"), perceptron=True).with_settings(changes))


def fitted(name: str, dataset: Dataset, config: Config, folder: Path, **options: Any) -> Training:
    build, built = find_method(name).load(), RunOptions(**{"validate_every": 10, **options})
    return fit(
        build, dataset, split_of(dataset), config, folder=folder, identity="t", options=built
    )


@cache
def trained(name: str) -> Training:
    """A method of 16 bits after a short training on the features: one for all tests that look at
    its outcome."""
    return fitted(name, features(), quick_config(steps=100), Path(_FOLDER.name) / name)


def vectors(
    method: TrainableMethod, dataset: Dataset, rows: NDArray[np.int64]
) -> NDArray[np.float32]:
    with Reader(dataset, 8) as reader:
        return embed_rows(method, reader, rows, torch.device("cpu"))[0]


def first_batch(dataset: Dataset, labelled: int, unlabelled: int, step: int = 0) -> TrainingBatch:
    """The first labelled and unlabelled items of the split."""
    split = split_of(dataset)
    rows = np.concatenate([split.labelled[:labelled], split.unlabelled[:unlabelled]])
    with Reader(dataset, 8) as reader:
        x = torch.from_numpy(reader.fetch(rows)[0])
    y = torch.from_numpy(dataset.require_labels().dense(split.labelled[:labelled]))
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    return TrainingBatch(x, y, step, 10, torch.Generator().manual_seed(0), torch.arange(labelled))


def made(name: str, dataset: Dataset, bits: int = 16) -> Any:
    """A method for ``dataset``, untrained."""
    return find_method(name).load()(quick_config(bits), dataset, 8, 10)


def codes_of(method: TrainableMethod, dataset: Dataset) -> NDArray[np.uint8]:
    return method.coder().encode(vectors(method, dataset, split_of(dataset).database))


def parts_of(method: Any, batch: TrainingBatch) -> dict[str, float]:
    """The losses of a batch, always with the same random numbers."""
    batch.generator.manual_seed(0)
    return {k: float(v.detach()) for k, v in method.losses(batch, amp=False).items()}
