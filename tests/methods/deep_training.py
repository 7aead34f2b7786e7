"""Short trainings on digits, as images and as features, for the tests of methods that learn by gradient."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from gpq_faiss.config import Config, merge, preset, validate
from gpq_faiss.data.base import Dataset, ImageDataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import Split, make_split
from gpq_faiss.data.reader import Reader
from gpq_faiss.evaluation.ranking import rank_codes
from gpq_faiss.experiment.grid import baseline_config
from gpq_faiss.methods.coders import Coder
from gpq_faiss.methods.registry import make_builder
from gpq_faiss.methods.trainable import TrainableMethod, TrainingBatch
from gpq_faiss.training.loop import Fitted, MethodBuilder, Progress, RunOptions, fit
from gpq_faiss.training.vectors import embed_rows

CPU = torch.device("cpu")
_FOLDER = tempfile.TemporaryDirectory(prefix="digits-")


@cache
def digits() -> ImageDataset:
    dataset = open_data("digits")
    assert isinstance(dataset, ImageDataset)
    return dataset


@cache
def features() -> Dataset:
    """The 64 pixels of each digit as a feature data set: pictures of their size are cropped at random, which takes longer to learn."""
    folder = Path(_FOLDER.name)
    images = [image for image in digits().read(np.arange(len(digits()))) if image is not None]
    x = np.stack([image[:, :, 0].ravel() for image in images]).astype(np.float32) / 255
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", digits().require_labels().dense().argmax(1))
    return open_data(f"features:{folder / 'x.npy'}", labels=str(folder / "y.npy"))


def quick_config(bits: int = 16, steps: int = 60, seed: int = 0, **training: Any) -> Config:
    """What a comparison gives to a trained method beside GPQ, with a small network and few steps."""
    base = baseline_config(preset("recommended"), perceptron=True)
    quick: dict[str, Any] = {
        "steps": steps,
        "seed": seed,
        "batch_labelled": 60,
        "batch_unlabelled": 60,
        "validation": 0.0,
        "learning_rate": 3e-3,
    }
    return validate(
        merge(
            base,
            {
                "quantizer": {"codebooks": bits // 4},
                "network": {"hidden": [64], "noise": 0.0},
                "training": quick | training,
            },
        )
    )


def split_of(dataset: Dataset) -> Split:
    return make_split(dataset, "1", seed=0, labelled="20-per-class")


def fitted(
    build: MethodBuilder,
    dataset: Dataset,
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    validate_every: int = 10,
    checkpoint_seconds: float = 60.0,
) -> Fitted:
    return fit(
        build,
        dataset,
        split_of(dataset),
        config,
        folder=folder,
        identity="test",
        options=RunOptions(CPU, resume, False, validate_every, checkpoint_seconds, progress),
    )


@cache
def trained(name: str) -> Fitted:
    """A method of 16 bits after a short training on the features: one for all tests that look at its outcome."""
    steps = {"ssgah": 100}.get(name, 120)  # its two adversaries take long
    return fitted(make_builder(name), features(), quick_config(steps=steps), Path(_FOLDER.name) / name)


def vectors(method: TrainableMethod, dataset: Dataset, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    with Reader(dataset, 8) as reader:
        return embed_rows(method, reader, rows, CPU)[0]


def quality(method: TrainableMethod, dataset: Dataset) -> float:
    """mAP of the split's queries over its database, by the codes."""
    split, labels, coder = split_of(dataset), dataset.require_labels(), method.coder()
    xq = vectors(method, dataset, split.query)
    codes = coder.encode(vectors(method, dataset, split.database))
    return rank_codes(
        lambda q, distinct: coder.score(xq[q], distinct),
        codes,
        labels.take(split.query),
        labels.take(split.database),
    ).map


def first_batch(dataset: Dataset, labelled: int, unlabelled: int, seed: int = 0) -> TrainingBatch:
    """The first labelled and unlabelled items of the split."""
    split = split_of(dataset)
    rows = np.concatenate([split.labelled[:labelled], split.unlabelled[:unlabelled]])
    with Reader(dataset, 8) as reader:
        x = torch.from_numpy(reader.fetch(rows)[0])
    y = torch.from_numpy(dataset.require_labels().dense(split.labelled[:labelled]))
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    return TrainingBatch(x, y, 0, 10, torch.Generator().manual_seed(seed), split.labelled[:labelled])


def made(name: str, dataset: Dataset, bits: int = 16) -> Any:
    """A method for ``dataset``, untrained."""
    return make_builder(name)(quick_config(bits), dataset, 8, 10)


def codes_of(method: TrainableMethod, dataset: Dataset) -> NDArray[np.uint8]:
    return method.coder().encode(vectors(method, dataset, split_of(dataset).database))


def filled(coder: Coder, codes: NDArray[np.uint8]) -> Any:
    """The index of a coder with these codes."""
    index = coder.index()
    (index.add if isinstance(index, faiss.IndexBinary) else index.add_sa_codes)(codes)
    return index


def logged(run: Fitted, key: str) -> list[float]:
    """The values of ``key`` over the training."""
    return [json.loads(line)[key] for line in run.run.lines]


def labels_of(ids: list[int], classes: int) -> torch.Tensor:
    """Multi-hot labels; -1 is an unlabelled row."""
    y = torch.zeros(len(ids), classes)
    for row, c in enumerate(ids):
        if c >= 0:
            y[row, c] = 1
    return y
