"""labels and base: packed rows against dense matrices, and every wrong label named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from gpq_faiss.data.base import BadItems, FeatureDataset, ImageDataset
from gpq_faiss.data.labels import Labels
from gpq_faiss.errors import DataError

DENSE = arrays(np.bool_, st.tuples(st.integers(0, 30), st.integers(1, 20)))


@given(DENSE)
def test_packed_equals_dense(dense: NDArray[np.bool_]) -> None:
    labels = Labels.from_multihot(dense)
    n, c = dense.shape
    assert (len(labels), labels.n_classes) == (n, c)
    np.testing.assert_array_equal(labels.packed, np.packbits(dense, axis=1))
    np.testing.assert_array_equal(labels.dense(dtype=bool), dense)
    assert labels.dense().dtype == np.float32
    np.testing.assert_array_equal(labels.counts(), dense.sum(axis=0))
    np.testing.assert_array_equal(labels.has(), dense.any(axis=1))
    assert labels.multi_label == bool((dense.sum(axis=1) > 1).any())
    for k in range(c):
        np.testing.assert_array_equal(labels.column(k), dense[:, k])
    rows = np.flatnonzero(np.arange(n) % 3 == 0)[::-1]
    np.testing.assert_array_equal(labels.take(rows).dense(), dense[rows])
    np.testing.assert_array_equal(labels.dense(slice(1, 4)), dense[1:4])
    masked = labels.masked(rows).dense(dtype=bool)
    np.testing.assert_array_equal(masked[rows], dense[rows])
    assert not masked[np.setdiff1d(np.arange(n), rows)].any()
    some = np.arange(c)[::-2]
    selected = labels.select_classes(some)
    np.testing.assert_array_equal(selected.dense(), dense[:, some])
    assert selected.class_names == tuple(str(k) for k in some)


@given(st.lists(st.integers(-1, 40), max_size=50))
def test_ids_round_trip(ids: list[int]) -> None:
    labels = Labels.from_ids(ids)
    np.testing.assert_array_equal(labels.class_ids(), np.array(ids, dtype=np.int64))
    assert labels.n_classes == max([0, *ids]) + 1
    assert not labels.multi_label
    small = np.array([i for i in ids if i >= 0], np.uint8)
    np.testing.assert_array_equal(Labels.from_ids(small).class_ids(), small)


def test_block_edges() -> None:
    """More rows than one block of unpacking."""
    ids = np.random.default_rng(0).integers(-1, 11, 150_000)
    labels = Labels.from_ids(ids.astype(np.int8), [f"c{i}" for i in range(11)])
    np.testing.assert_array_equal(labels.class_ids(), ids)
    np.testing.assert_array_equal(labels.counts(), np.bincount(ids[ids >= 0], minlength=11))


def test_names() -> None:
    labels = Labels.from_names([("sea", "sky"), (), ("sea",)])
    assert labels.class_names == ("sea", "sky")
    np.testing.assert_array_equal(labels.dense(), [[1, 1], [0, 0], [1, 0]])
    with pytest.raises(DataError, match="row 1 has the label 'fog'"):
        Labels.from_names([("sea",), ("fog",)], ["sea"])
    with pytest.raises(DataError, match="no item has a label"):
        Labels.from_names([(), ()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Labels.from_ids([0, -2, 1, -3]), "label -2 at rows 1, 3"),
        (
            lambda: Labels.from_ids([0, 3], ["a", "b"]),
            "label 3 at row 1 is out of range: .* at most 2 classes",
        ),
        (lambda: Labels.from_ids([65_535]), "65,535 classes"),
        (lambda: Labels.from_ids(np.array([2**63], np.uint64)), "at most 65,535"),
        (lambda: Labels.from_ids(np.array([0.5])), "float64"),
        (lambda: Labels.from_ids(np.zeros((2, 2), int)), r"\[2, 2\]"),
        (lambda: Labels.from_ids([0], ["a", "a"]), "'a' is given twice"),
        (lambda: Labels.from_multihot(np.array([[0, 1], [2, 0]])), "other than 0 and 1 at row 1"),
        (lambda: Labels.from_multihot(np.array([[0, np.nan]])), "other than 0 and 1 at row 0"),
        (lambda: Labels.from_multihot(np.zeros((2, 3)), ["a", "b"]), "2 class names"),
        (lambda: Labels.from_multihot(np.zeros((2, 2)), ["a", "b", "c"]), "3 class names"),
        (lambda: Labels.from_multihot(np.zeros((1, 65_536), np.uint8)), "65,536 different labels"),
        (lambda: Labels(np.zeros((2, 2), np.uint8), ("a",)), r"uint8 \[N, 1\]"),
        (lambda: Labels(np.array([[1]], np.uint8), ("a",)), "bits set beyond"),
        (lambda: Labels(np.zeros((2, 0), np.uint8), ()), "0 classes"),
        (lambda: Labels.from_multihot(np.ones((3, 2))).class_ids(), "rows 0, 1, 2 have several"),
    ],
)
def test_wrong_labels(make: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()  # type: ignore[operator]


def memory(x: NDArray[np.float32], **more: Any) -> FeatureDataset:
    return FeatureDataset(name="m", ids=np.arange(len(x)), fingerprint="f", matrix=x, **more)


def test_feature_rows_without_a_direction_are_named() -> None:
    x = np.ones((20, 3), np.float32)
    x[[4, 9]] = 0
    x[7, 1] = np.nan
    data = memory(x)
    np.testing.assert_array_equal(data.read(slice(10, 15)), x[10:15])
    with pytest.raises(DataError, match="m: row 7 holds NaN or infinity"):
        data.read(slice(5, 10))
    with pytest.raises(DataError, match="rows 9, 4 are all zero"):
        data.read(np.array([1, 9, 4]))
    tiny = np.full((1, 3), 1e-40, np.float32)  # its square vanishes in float32
    np.testing.assert_array_equal(memory(tiny).read(slice(0, 1)), tiny)
    huge = np.full((1, 3), 3e38, np.float32)  # its square overflows in float32
    np.testing.assert_array_equal(memory(huge).read(slice(0, 1)), huge)


def test_columns_must_fit() -> None:
    with pytest.raises(DataError, match="3 items but 2 labels"):
        memory(np.ones((3, 1), np.float32), labels=Labels.from_ids([0, 1]))
    with pytest.raises(DataError, match="no item has a label"):
        memory(np.ones((2, 2), np.float32)).require_labels()


def test_bad_items_count_once_and_up_to_a_limit() -> None:
    data = ImageDataset(name="b", ids=np.arange(200), fingerprint="f", paths=[f"{i}.jpg" for i in range(200)])
    for _ in range(3):
        assert data.read(slice(0, 1)) == [None]
    assert data.bad.count == 1
    assert data.bad.summary() == "1 of 200 images cannot be read (0.jpg: not found)"
    data.bad.add(1, "b.jpg", "gone")
    with pytest.raises(DataError, match=r"3 of 200 images .*limit of 1 %.*--read max_bad"):
        data.bad.add(2, "c.jpg", "gone")
    assert data.bad.positions == [0, 1, 2]
    assert BadItems(10).summary() == ""
