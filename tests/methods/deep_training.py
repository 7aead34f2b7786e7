"""Short trainings on digits, as images and as features, for the tests of methods that learn by gradient."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpq_faiss.config import Config, preset
from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import Split, make_split
from gpq_faiss.data.reader import Reader
from gpq_faiss.evaluate.ranking import rank_codes
from gpq_faiss.methods.coders import fill
from gpq_faiss.methods.trainable import TrainableMethod, TrainingBatch
from gpq_faiss.train import Fitted, MethodBuilder, embed_rows, fit

CPU = torch.device("cpu")


@cache
def digits() -> Dataset:
    return open_data("digits")


def digit_features(folder: Path) -> Dataset:
    """The 64 pixels of each digit as a feature data set."""
    images = digits().read(np.arange(len(digits())))  # type: ignore[attr-defined]
    x = np.stack([image[:, :, 0].ravel() for image in images]).astype(np.float32) / 255
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", digits().require_labels().dense().argmax(1))
    return open_data(f"features:{folder / 'x.npy'}", labels=str(folder / "y.npy"))


def quick_config(bits: int = 16, steps: int = 60, seed: int = 0, **training: Any) -> Config:
    c = preset("recommended")
    return dataclasses.replace(
        c,
        quantizer=dataclasses.replace(c.quantizer, codebooks=bits // 4),
        network=dataclasses.replace(c.network, heads=0, hidden=(64,), noise=0.0),
        training=dataclasses.replace(
            c.training,
            **{
                "steps": steps,
                "seed": seed,
                "batch_labelled": 60,
                "batch_unlabelled": 60,
                "validation": 0.0,
                "validate_every": 10,
                "learning_rate": 3e-3,
                **training,
            },
        ),
    )


def split_of(dataset: Dataset) -> Split:
    return make_split(dataset, "1", seed=0, labelled="20-per-class")


def fitted(build: MethodBuilder, dataset: Dataset, config: Config, folder: Path) -> Fitted:
    return fit(build, dataset, split_of(dataset), config, folder=folder, identity="test", device=CPU)


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


def assert_index_ranks_as_score(method: TrainableMethod, dataset: Dataset) -> None:
    """A Faiss index filled with the codes gives the scores of the coder, for every query and item."""
    split, coder = split_of(dataset), method.coder()
    xq, xb = vectors(method, dataset, split.query), vectors(method, dataset, split.database)
    codes = coder.encode(xb)
    index = fill(coder.index(), codes)
    distances, ids = index.search(coder.search_input(xq), len(xb))
    np.testing.assert_array_equal(np.take_along_axis(coder.score(xq, codes), ids, axis=1), -distances)


def codes_of(method: TrainableMethod, dataset: Dataset) -> NDArray[np.uint8]:
    return method.coder().encode(vectors(method, dataset, split_of(dataset).database))


def logged(run: Fitted, key: str) -> list[float]:
    """The values of ``key`` over the training."""
    import json

    return [json.loads(line)[key] for line in run.run.lines]
