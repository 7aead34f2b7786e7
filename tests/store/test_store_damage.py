"""store: nothing broken is written or believed."""

from dataclasses import replace

import h5py
import numpy as np
import pytest
from store_files import codebooks, header, rows, write

from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.store.reader import RowReader, describe
from gpq_faiss.store.writer import RowWriter


def test_bad_rows_are_refused(tmp_path):
    values, ids, labels = rows("features", 10)
    nan = values.copy()
    nan[3, 2] = np.nan
    padded = labels.copy()
    padded[:, 1] |= 1
    with RowWriter(tmp_path / "a.h5", header()) as writer:
        for bad, message in [
            ((values.astype(np.float64), ids, labels), "float64"),
            ((values[:, :5], ids, labels), r"float32 \[10, 5\]"),
            ((values, ids[:5], labels), r"ids are int64 \[5\]"),
            ((values, ids, None), "labels are missing"),
            ((values, ids, padded), "labels have bits set beyond"),
            ((nan, ids, labels), "NaN.*row 3"),
        ]:
            with pytest.raises(DataError, match=message):
                writer.append(*bad)
        assert writer.rows == 0
        with pytest.raises(DataError, match="no row"):
            writer.finish()
    codes, ids, labels = rows("codes", 10)
    with RowWriter(tmp_path / "c.h5", header("codes", class_names=())) as writer:
        with pytest.raises(DataError, match="no class names"):
            writer.append(codes, ids, labels)
        with pytest.raises(DataError, match="codes have bits set beyond"):
            writer.append(codes | 0x10, ids)


def test_headers_that_do_not_fit_together():
    for changes, message in (
        ({"codebooks": codebooks().astype(np.float64)}, "float64"),
        ({"codebooks": np.zeros((3, 15, 12), np.float32)}, "power of two"),
        ({"codebooks": np.full((3, 16, 12), np.nan, np.float32)}, "finite"),
        ({"class_names": ("a", "a")}, "repeat"),
    ):
        with pytest.raises(DataError, match=message):
            replace(header(), **changes)


def changed(h5, name, data, **options):
    del h5[name]
    if isinstance(data, h5py.ExternalLink):
        h5[name] = data
    else:
        h5.create_dataset(name, data=data, **options)


IN_HDF5 = {
    "other hdf5": lambda h5: [h5.attrs.__delitem__(name) for name in list(h5.attrs)],
    "incomplete": lambda h5: h5.attrs.__setitem__("complete", False),
    "version": lambda h5: h5.attrs.__setitem__("format_version", 99),
    "rows": lambda h5: h5.attrs.__setitem__("ntotal", 99),
    "no rows": lambda h5: h5.attrs.__setitem__("ntotal", 0),
    "codebooks": lambda h5: h5["codebooks"].__setitem__((0, 0, 0), 0.5),
    "wide codebooks": lambda h5: changed(h5, "codebooks", codebooks().astype(np.float64)),
    "metadata": lambda h5: h5.attrs.__setitem__("data_fingerprint", "x"),
    "json": lambda h5: h5.attrs.__setitem__("class_names", "{"),
    "json of another type": lambda h5: h5.attrs.__setitem__("extra", "[]"),
    "large codebooks": lambda h5: changed(
        h5, "codebooks", np.zeros((3, 16, 400_000), np.float32), compression="gzip"
    ),
    "no ids": lambda h5: h5.__delitem__("ids"),
    "a chunk of ids": lambda h5: changed(h5, "ids", None, shape=(100,), dtype="<i8", chunks=(10,)),
    "type": lambda h5: changed(h5, "ids", np.zeros(100, np.float32)),
    "link": lambda h5: changed(h5, "ids", h5py.ExternalLink("/etc/passwd", "ids")),
}


@pytest.mark.parametrize("how", IN_HDF5)
def test_broken_files_are_one_line(tmp_path, how):
    """What is no HDF5 at all: ``tests/cli/test_bad_files.py``."""
    path = tmp_path / "a.h5"
    write(path)
    with h5py.File(path, "r+") as h5:
        IN_HDF5[how](h5)
    with pytest.raises(DataError, match=r"a\.h5") as caught, RowReader(path) as reader:
        list(reader.blocks())
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError):
        describe(path)


def test_flipped_bits_never_pass(tmp_path):
    """One flipped bit anywhere: either an error, or (unused space) the very same content."""
    path = tmp_path / "a.h5"
    written = write(path, n=20)
    data, rng, caught = path.read_bytes(), np.random.default_rng(0), 0
    for at in rng.choice(len(data), 400, replace=False):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :])
        try:
            with RowReader(path) as reader:
                for found, expected in zip(
                    (reader.block(), reader.ids(), reader.labels()), written, strict=True
                ):
                    np.testing.assert_array_equal(found, expected)
                assert reader.header.fingerprint() == header().fingerprint()
        except DataError:
            caught += 1
    assert caught > 100


def test_the_wrong_file_is_a_mismatch(tmp_path):
    path = tmp_path / "a.h5"
    write(path)
    with pytest.raises(MismatchError, match="holds features"):
        RowReader(path, kind="codes")
    with pytest.raises(MismatchError, match="of model model, not other"):
        RowReader(path, model_fingerprint="other")
