"""One batch over two processes: losses, gradients and batch norm are those of one process that has all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import together
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from gpq_faiss.data.reader import Reader
from gpq_faiss.errors import DeviceError, UsageError
from gpq_faiss.nn.joint import join_batch_norm
from gpq_faiss.training.batches import EpochSampler, training_batches
from gpq_faiss.training.launch import Launch, launched
from gpq_faiss.training.parallel import Group, own_device


@pytest.fixture(scope="module")
def done() -> dict[str, Any]:
    found: dict[str, Any] = together.run("everything")
    return found


def test_gradients_are_those_of_the_joint_batch(done: dict[str, Any]) -> None:
    """In float64, with uneven shares: of every loss, dropout, noise and augmentation included, batch norm statistics too."""
    found = done["gradients"]
    assert found.keys() == together.CONFIGS.keys()
    assert {name: apart for name, (apart, _) in found.items() if not apart < 1e-9} == {}
    assert all(count >= 4 for _, count in found.values())


def test_batch_norm_of_shares_is_that_of_the_joint_batch(done: dict[str, Any]) -> None:
    """A share may be empty, and the statistics may be plain means."""
    assert done["batch_norm"] < 1e-12


def test_processes_tell_each_other_values_texts_and_errors(done: dict[str, Any]) -> None:
    assert done["talk"]["said"] == "DataError: process 1 of 2: no such file"


def test_an_item_is_decoded_by_one_process_of_a_machine(done: dict[str, Any]) -> None:
    one, two = done["reading"]["read"]
    assert one + two == done["reading"]["items"]
    assert abs(one - two) <= 1


class Shared(Group):
    """A group whose other processes are worked out here."""

    def __init__(self, rank: int, size: int, readable: NDArray[np.bool_]) -> None:
        super().__init__(rank, size, rank, size)
        object.__setattr__(self, "readable", readable)

    def share(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        object.__setattr__(self, "rows", [*getattr(self, "rows", []), rows])
        return super().share(rows)

    def join(self, part: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
        rows = self.rows.pop(0)  # type: ignore[attr-defined]
        parts = [self.readable[Group(0, 1, rank, self.size).share(rows)] for rank in range(self.size)]  # type: ignore[attr-defined]
        np.testing.assert_array_equal(parts[self.rank], part)
        return parts


class HalfReadable:
    """Gives of every row its number, if it can be read."""

    def __init__(self, readable: NDArray[np.bool_]) -> None:
        self.readable = readable

    def stream(
        self, batches: Iterator[NDArray[np.int64]], *, empty: bool = False
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        for rows in batches:
            yield rows[self.readable[rows]], self.readable[rows]

    def count_broken(self, rows: NDArray[np.int64]) -> None:
        assert not self.readable[rows].any()


@given(seed=st.integers(0, 100), size=st.integers(2, 5), bad=st.floats(0, 0.7), unlabelled=st.booleans())
@settings(deadline=None, max_examples=30)
def test_shares_are_the_batches_of_one_process(seed: int, size: int, bad: float, unlabelled: bool) -> None:
    """Every item that can be read is in one share, in the place that the share says, also where processes outnumber items."""
    readable = np.random.default_rng(seed).random(80) >= bad
    readable[[0, 8, 16]] = True
    reader = cast(Reader, HalfReadable(readable))
    own = EpochSampler(np.arange(0, 24, 8), 3, seed, 0)
    others = EpochSampler(np.arange(30, 80), 20, seed, 1) if unlabelled else None
    steps = range(3)
    alone = list(training_batches(reader, own, others, steps))
    processes = [
        list(training_batches(reader, own, others, steps, Shared(rank, size, readable)))
        for rank in range(size)
    ]
    for step, whole in zip(steps, alone, strict=True):
        assert whole.share is None
        np.testing.assert_array_equal(whole.values, np.concatenate([whole.rows, whole.unlabelled_rows]))
        assert (whole.rows < 30).all()
        assert (whole.unlabelled_rows >= 30).all()
        assert len(whole.unlabelled_rows) > 0 or not unlabelled
        joint = np.full(len(whole.values), -1)
        for each in processes:
            drawn = each[step]
            np.testing.assert_array_equal(drawn.rows, whole.rows)
            np.testing.assert_array_equal(drawn.unlabelled_rows, whole.unlabelled_rows)
            assert drawn.share is not None
            assert drawn.share.total == len(whole.values)
            mine = joint[drawn.share.start : drawn.share.stop]
            assert (mine == -1).all()
            mine[:] = drawn.values
        np.testing.assert_array_equal(joint, whole.values)


def test_batch_norm_of_another_kind_is_refused() -> None:
    class Own(nn.BatchNorm2d):
        pass

    with pytest.raises(UsageError, match="unsupported kind of batch norm \\(Own\\)"):
        join_batch_norm(nn.Sequential(Own(3)))


def test_what_a_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    for name, value in zip(names, ("5", "8", "1", "4", "node0", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert launched() == Launch(5, 8, 1, 4)
    for wrong in ("8", "one"):
        monkeypatch.setenv("RANK", wrong)
        with pytest.raises(UsageError, match=f"RANK={wrong}, WORLD_SIZE=8"):
            launched()


def test_every_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_device("cuda", Launch(3, 4, 1, 2)) == torch.device("cuda", 1)
    assert own_device("auto", Launch(2, 4, 0, 2)) == torch.device("cuda", 0)
    assert own_device("cpu", Launch(3, 4, 3, 4)) == torch.device("cpu")
    with pytest.raises(UsageError, match="cuda:1 is one GPU"):
        own_device("cuda:1", Launch(0, 2, 0, 2))
    with pytest.raises(DeviceError, match="4 processes on this machine need a GPU each, and there are 2"):
        own_device("cuda", Launch(0, 4, 0, 4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="torch sees no GPU"):
        own_device("cuda", Launch(0, 2, 0, 2))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_are_those_of_the_joint_batch_on_gpus() -> None:
    """By NCCL, with torch's SyncBatchNorm."""
    found = together.run("gradients", device="cuda")
    assert {name: apart for name, (apart, _) in found.items() if not apart < 1e-9} == {}
