"""Rows in HDF5: written whole, resumed after any interruption, read by any program."""

import os
import resource
import tempfile
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from alone import alone
from hypothesis import given, settings
from hypothesis import strategies as st
from index_factory import SHAPES, books, random_codes
from kills import every_kill, run_killed

from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.store.hdf5 import Hdf5Array, as_texts
from gpq_faiss.store.rows import Header, RowReader, RowWriter

NAMES = tuple(f"class {number}" for number in range(11))  # 2 label bytes with 5 padding bits


def header(kind="codes", M=3, K=16, class_names=NAMES):
    return Header(kind, "model", books(M, K), "data", class_names, True, {"note": "x"})


def rows(rows_header, n):
    """Values, ids and labels of n rows, the same for equal arguments."""
    rng = np.random.default_rng(n)
    M, K, _ = rows_header.codebooks.shape
    values = random_codes(n, M, K)
    if rows_header.kind == "features":
        values = rng.standard_normal((n, rows_header.width)).astype(np.float32)
    labels = np.packbits(rng.random((n, 11)) < 0.3, axis=1) if rows_header.class_names else None
    return values, rng.integers(-(2**62), 2**62, n), labels


def append(writer, n, step, stop=None):
    """Append the missing ones of n rows, up to ``stop``, and commit after every block."""
    values, ids, labels = rows(writer.header, n)
    stop = n if stop is None else stop
    for start in range(writer.rows, stop, step):
        block = slice(start, min(stop, start + step))
        writer.append(values[block], ids[block], None if labels is None else labels[block])
        writer.commit()


def write(path, rows_header=None, n=100, step=33, **options):
    with RowWriter(path, rows_header or header(), **options) as writer:
        append(writer, n, step)
        return writer.finish()


@settings(max_examples=30)
@given(
    kind=st.sampled_from(["features", "codes"]),
    shape=SHAPES,
    n=st.integers(1, 60),
    stops=st.lists(st.integers(0, 60), max_size=3).map(sorted),
    labelled=st.booleans(),
    texts=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
)
def test_interrupted_rows_are_read_back(kind, shape, n, stops, labelled, texts):
    rows_header = header(kind, *shape, NAMES if labelled else ())
    values, ids, labels = rows(rows_header, n)
    column = as_texts(f"{texts}{number}" for number in range(n))
    columns = {"name": column, "price/kg": column} if texts else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.h5")
        for stop in stops:
            with RowWriter(path, rows_header) as writer:
                append(writer, n, 7, min(stop, n))
        with RowWriter(path, rows_header) as writer:
            assert writer.rows == min(max(stops, default=0), n)
            append(writer, n, 13)
            order = np.random.default_rng(0).permutation(n)
            writer.finish(ids[order], {name: text[order] for name, text in columns.items()})
        assert os.listdir(folder) == ["x.h5"]
        with RowReader(path, kind=kind, model_fingerprint="model") as reader:
            assert reader.header.fingerprint() == rows_header.fingerprint()
            np.testing.assert_array_equal(reader.values, values)
            np.testing.assert_array_equal(reader.ids, ids)
            np.testing.assert_array_equal(reader.labels, labels)
            read = {name: column.tolist() for name, column in reader.texts(1, n).items()}
            assert read == {name: column[1:].tolist() for name, column in columns.items()}


# Interruptions ------------------------------------------------------------------------------------


@alone
def test_kill_at_any_operation_is_resumed(tmp_path):
    path = tmp_path / "x.h5"
    content = write(tmp_path / "whole.h5").read_bytes()

    def work():
        write(path, step=40)

    resumed = set()
    for _ in every_kill(work, tmp_path):
        if path.exists():
            assert path.read_bytes() == content
            path.unlink()
        with RowWriter(path, header()) as writer:
            resumed.add(writer.rows)
        work()
        assert path.read_bytes() == content
        assert sorted(os.listdir(tmp_path)) == ["whole.h5", "x.h5"]
        path.unlink()
    assert resumed == {0, 40, 80, 100}


@pytest.mark.parametrize("damage", ["model", "rows"])
def test_unfinished_rows_that_do_not_fit_are_discarded(tmp_path, damage, caplog):
    with RowWriter(tmp_path / "x.h5", header()) as writer:
        append(writer, 10, 5)
    if damage != "model":
        os.truncate(writer.folder / damage, 5)
    rows_header = replace(header(), model_fingerprint="other") if damage == "model" else header()
    with RowWriter(tmp_path / "x.h5", rows_header) as writer:
        assert writer.rows == 0
    assert "x.h5.partial is discarded: it is of another model" in caplog.text


@alone
@pytest.mark.parametrize("limit", [3000, 24_000])
def test_full_disk_keeps_the_old_file(tmp_path, limit):
    """A limit of the size of files stands for a full disk: of the rows, then of the HDF5 file."""
    path = write(tmp_path / "x.h5", n=5)
    before = path.read_bytes()

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(DataError, match=r"cannot write .*x\.h5: "):
            write(path, n=2000, step=100, overwrite=True)

    assert not run_killed(work, tmp_path)
    assert path.read_bytes() == before
    with RowWriter(path, header(), overwrite=True) as writer:
        assert writer.rows > 0


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [r"expected numbers \[n, 12\]", "NaN or infinity in row 3"])
def test_bad_rows_are_refused(tmp_path, message):
    values, ids, labels = rows(header("features"), 10)
    values[3, 5] = np.nan
    with RowWriter(tmp_path / "x.h5", header("features")) as writer:
        with pytest.raises(DataError, match=message):
            writer.append(values if "NaN" in message else values[:, :5], ids, labels)
        with pytest.raises(DataError, match="there is no row to write"):
            writer.finish()


def test_other_kind_and_other_model_are_mismatches(tmp_path):
    path = write(tmp_path / "x.h5")
    with pytest.raises(MismatchError, match="holds codes, but features are needed"):
        RowReader(path, kind="features")
    with pytest.raises(MismatchError, match="of model model, not other"):
        RowReader(path, model_fingerprint="other")


@pytest.mark.parametrize(
    "change",
    [
        lambda h5: h5.attrs.pop("kind"),
        lambda h5: h5.attrs.update(format_version=99),
        lambda h5: h5.attrs.update(extra="{"),
        lambda h5: h5.pop("ids"),
        lambda h5: h5["codes"].write_direct(np.full((100, 2), 255, np.uint8)),
    ],
)
def test_changed_file_is_one_line(tmp_path, change):
    path = write(tmp_path / "x.h5")
    with h5py.File(path, "r+") as h5:
        change(h5)
    with pytest.raises(DataError, match=r"x\.h5"):
        RowReader(path)


@given(share=st.just(1.0) | st.floats(0, 0.99), position=st.floats(0, 1), value=st.integers(0, 255))
def test_damaged_file_is_one_line_or_read(share, position, value):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.h5")
        data = bytearray(write(path, n=20).read_bytes())
        data[int(position * (len(data) - 1))] = value
        path.write_bytes(data[: int(share * len(data))])
        try:
            with RowReader(path) as reader:
                assert reader.ids[:].sum() is not None
                assert reader.texts() == {}
        except DataError:
            pass
        else:
            assert share == 1


# Arrays of other programs -------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path):
    x = np.random.default_rng(0).standard_normal((5000, 7)).astype(np.float16)
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5.create_dataset("x", data=x, chunks=(64, 7), compression="lzf")
        h5["text"] = "hello"
        h5.create_group("group")
        h5["soft"] = h5py.SoftLink("/x")
        h5.create_dataset("outside", (4,), "u1", external=[("/etc/passwd", 0, 4)])
    return tmp_path / "x.h5", x


@given(positions=st.lists(st.integers(-5000, 4999), max_size=700))
@settings(max_examples=20)
def test_foreign_rows_at_positions(tmp_path_factory, positions):
    path = tmp_path_factory.mktemp("x") / "x.h5"
    x = np.random.default_rng(0).standard_normal((5000, 2))
    with h5py.File(path, "w") as h5:
        h5.create_dataset("x", data=x, chunks=(64, 2), compression="lzf")
    array = Hdf5Array(path, "x")
    rows_at = np.array(positions, np.int64)
    np.testing.assert_array_equal(array[rows_at], x[rows_at])
    np.testing.assert_array_equal(array[10:200], x[10:200])


@pytest.mark.parametrize("name", ["text", "group", "soft", "outside"])
def test_foreign_dataset_without_numbers_is_one_line(foreign, name):
    with pytest.raises(DataError, match=r"not an array of numbers|the file has no dataset"):
        Hdf5Array(foreign[0], name)
