"""Features in several files: as one matrix, whatever the cuts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rows_of_several_files_are_rows_of_their_concatenation(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=12))
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((sum(sizes), 3)).astype(np.float32)
    labels = rng.integers(-1, 4, sum(sizes))
    ends = np.cumsum(sizes)
    for number, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        # No zeros before the numbers: shard-10 comes after shard-9.
        rows = slice(end - size, end)
        np.savez(folder / f"shard-{number}.npz", features=whole[rows], labels=labels[rows])
    dataset = open_data(f"features:{folder}/shard-*.npz")
    rows = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=20)), dtype=np.int64)
    np.testing.assert_array_equal(dataset.read(rows), whole[rows])
    np.testing.assert_array_equal(dataset.read(slice(0, len(whole))), whole)
    assert dataset.labels is not None
    names = np.array([*dataset.labels.class_names, "-1"])
    assert [
        int(names[c]) for c in np.where(dataset.labels.has(), dataset.labels.dense().argmax(1), -1)
    ] == labels.tolist()


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a-1.npy", np.ones((2, 3), np.float32))
    np.save(tmp_path / "a-2.npy", np.ones((2, 4), np.float32))
    with pytest.raises(DataError, match=r"a-1\.npy has rows of 3 numbers, .*a-2\.npy of 4"):
        open_data(f"features:{tmp_path}/a-*.npy")
    with pytest.raises(DataError, match="no file matches"):
        open_data(f"features:{tmp_path}/b-*.npy")
    np.savez(tmp_path / "c-1.npz", features=np.ones((2, 3)), labels=np.array([0, 1]))
    np.savez(tmp_path / "c-2.npz", features=np.ones((2, 3)))
    with pytest.raises(DataError, match=r"c-1\.npz has labels, .*c-2\.npz has none"):
        open_data(f"features:{tmp_path}/c-*.npz")
    with pytest.raises(DataError, match="not found"):
        open_data(f"features:{tmp_path}/none.npy")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x[1].npy", np.ones((2, 3), np.float32))
    assert len(open_data(f"features:{tmp_path}/x[1].npy")) == 2
