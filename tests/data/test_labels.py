"""Labels as packed rows against dense matrices, every wrong label named, and what all data sets check."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from gpq_faiss.data.base import BadItems, FeatureDataset, ImageDataset
from gpq_faiss.data.labels import Labels
from gpq_faiss.errors import DataError


@settings(max_examples=60, deadline=None)
@given(arrays(np.bool_, st.tuples(st.integers(0, 30), st.integers(1, 20))))
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
    masked = np.where(np.isin(np.arange(n), rows)[:, None], dense, False)
    np.testing.assert_array_equal(labels.masked(rows).dense(), masked)
    some = np.arange(c)[::-2]
    selected = labels.select_classes(some)
    np.testing.assert_array_equal(selected.dense(), dense[:, some])
    assert selected.class_names == tuple(str(k) for k in some)
    np.testing.assert_array_equal(labels.over(["x", *labels.class_names]).dense()[:, 1:], dense)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 40), max_size=50))
def test_ids_round_trip(ids: list[int]) -> None:
    labels = Labels.from_ids(ids)
    np.testing.assert_array_equal(labels.class_ids(), np.array(ids, dtype=np.int64))
    assert labels.n_classes == max([0, *ids]) + 1
    assert not labels.multi_label
    small = np.array([i for i in ids if i >= 0], np.uint8)
    np.testing.assert_array_equal(Labels.from_ids(small).class_ids(), small)


def test_names() -> None:
    labels = Labels.from_names([("sea", "sky"), (), ("sea",)])
    assert labels.class_names == ("sea", "sky")
    np.testing.assert_array_equal(labels.dense(), [[1, 1], [0, 0], [1, 0]])


def memory(x: NDArray[np.float32], **more: Any) -> FeatureDataset:
    return FeatureDataset(name="m", ids=np.arange(len(x)), fingerprint="f", matrix=x, **more)


BAD = np.ones((20, 3), np.float32)
BAD[[4, 9]], BAD[7, 1] = 0, np.nan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Labels.from_ids([0, -2, 1, -3]), "label -2 at rows 1, 3"),
        (
            lambda: Labels.from_ids([0, 3], ["a", "b"]),
            "label 3 at row 1 is out of range: .* at most 2 classes",
        ),
        (lambda: Labels.from_ids(np.array([2**63], np.uint64)), "at most 65,535"),
        (lambda: Labels.from_ids(np.array([0.5])), "float64"),
        (lambda: Labels.from_ids([0], ["a", "a"]), "'a' is given twice"),
        (lambda: Labels.from_multihot(np.array([[0, np.nan]])), "other than 0 and 1 at row 0"),
        (lambda: Labels.from_multihot(np.zeros((2, 3)), ["a", "b"]), "2 class names"),
        (lambda: Labels.from_multihot(np.zeros((2, 2)), ["a", "b", "c"]), "3 class names"),
        (lambda: Labels.from_multihot(np.zeros((1, 65_536), np.uint8)), "65,536 different labels"),
        (lambda: Labels(np.zeros((2, 2), np.uint8), ("a",)), r"uint8 \[N, 1\]"),
        (lambda: Labels(np.array([[1]], np.uint8), ("a",)), "bits set beyond"),
        (lambda: Labels(np.zeros((2, 0), np.uint8), ()), "0 classes"),
        (lambda: Labels.from_multihot(np.ones((3, 2))).class_ids(), "rows 0, 1, 2 have several"),
        (lambda: Labels.from_names([("sea",), ("fog",)], ["sea"]), "row 1 has the label 'fog'"),
        (lambda: Labels.from_names([(), ()]), "no item has a label"),
        (lambda: memory(BAD, labels=Labels.from_ids([0, 1])), "20 items but 2 labels"),
        (lambda: memory(BAD).require_labels(), "no item has a label"),
        (lambda: memory(BAD).read(slice(5, 9)), "m: row 7 holds NaN or infinity"),
        (lambda: memory(BAD).read(np.array([1, 9, 4])), "rows 9, 4 are all zero"),
    ],
)
def test_what_is_wrong_is_named(make: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()


def test_rows_of_any_length_have_a_direction() -> None:
    np.testing.assert_array_equal(memory(BAD).read(slice(10, 15)), BAD[10:15])
    for value in (1e-40, 3e38):  # in float32 its square vanishes, or overflows
        x = np.full((1, 3), value, np.float32)
        np.testing.assert_array_equal(memory(x).read(slice(0, 1)), x)


def test_bad_items_count_once_and_up_to_a_limit() -> None:
    data = ImageDataset(name="b", ids=np.arange(200), fingerprint="f", paths=[f"{i}.jpg" for i in range(200)])
    for _ in range(3):
        assert data.read(slice(0, 1)) == [None]
    assert data.bad.summary() == "1 of 200 images cannot be read (0.jpg: not found)"
    data.bad.add(1, "b.jpg", "gone")
    with pytest.raises(DataError, match=r"3 of 200 images .*limit of 1 %.*--read max_bad"):
        data.bad.add(2, "c.jpg", "gone")
    assert (data.bad.count, data.bad.positions) == (3, [0, 1, 2])
    assert BadItems(10).summary() == ""
