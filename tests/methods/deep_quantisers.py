"""What every deep quantiser must do, on digits as features: learn, rank better for it, end in an index that agrees, and repeat itself."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from deep_training import (
    CPU,
    codes_of,
    digit_features,
    fitted,
    logged,
    quality,
    quick_config,
    split_of,
    vectors,
)

from gpq_faiss.config import Config
from gpq_faiss.data.base import Dataset
from gpq_faiss.methods.coders import fill
from gpq_faiss.methods.trainable import TrainableMethod
from gpq_faiss.train import Fitted, MethodBuilder, fit

_FOLDER = tempfile.TemporaryDirectory(prefix="digits-")


@cache
def features() -> Dataset:
    """The digits as features: pictures of their size would be cropped at random, which takes longer to learn."""
    return digit_features(Path(_FOLDER.name))


def assert_learns(build: MethodBuilder, folder: Path, part: str, config: Config | None = None) -> Fitted:
    """A short training lowers ``part`` of the loss, and its codes rank far better than an untrained network's."""
    config = config or quick_config(bits=16, steps=120)
    run = fitted(build, features(), config, folder / "run")
    values = logged(run, part)
    assert values[-1] < 0.95 * values[0], values
    before = quality(build(config, features(), 8, 10), features())
    after = quality(run.method, features())
    assert after > max(0.6, before + 0.15), (before, after)
    return run


def assert_index_agrees(method: TrainableMethod) -> None:
    """A Faiss index filled with the codes finds every item at the score of the coder."""
    split, coder = split_of(features()), method.coder()
    xq, xb = vectors(method, features(), split.query[:20]), vectors(method, features(), split.database)
    codes = coder.encode(xb)
    distances, ids = fill(coder.index(), codes).search(coder.search_input(xq), len(xb))
    scores = coder.score(xq, codes)
    sign = np.sign((np.take_along_axis(scores, ids, axis=1) * distances).sum())
    np.testing.assert_allclose(
        np.take_along_axis(scores, ids, axis=1), sign * distances, rtol=1e-5, atol=2e-5 * np.abs(scores).max()
    )
    assert np.array_equal(np.sort(ids, axis=1), np.tile(np.arange(len(xb)), (len(xq), 1)))


def assert_repeats(build: MethodBuilder, folder: Path) -> None:
    """The same seed gives the same codes, also where the run was cut and taken up again; another seed gives others."""
    config = quick_config(bits=12, steps=12)
    whole = codes_of(fitted(build, features(), config, folder / "whole").method, features())

    def cut(step: int, steps: int, figures: dict[str, float]) -> None:
        if step == 7:
            raise InterruptedError

    often = quick_config(bits=12, steps=12, checkpoint_seconds=0.0)
    for attempt in range(2):
        try:
            again = fit(
                build,
                features(),
                split_of(features()),
                often,
                folder=folder / "cut",
                identity="test",
                device=CPU,
                resume=bool(attempt),
                progress=None if attempt else cut,
            )
        except InterruptedError:
            continue
    assert again.run.step == 12
    np.testing.assert_array_equal(whole, codes_of(again.method, features()))
    other = codes_of(
        fitted(build, features(), quick_config(bits=12, steps=12, seed=1), folder / "s").method, features()
    )
    assert not np.array_equal(whole, other)


def labels_of(ids: list[int], classes: int) -> torch.Tensor:
    """Multi-hot labels; -1 is an unlabelled row."""
    y = torch.zeros(len(ids), classes)
    for row, c in enumerate(ids):
        if c >= 0:
            y[row, c] = 1
    return y
