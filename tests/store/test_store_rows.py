"""store: what is written is read back, at constant memory; nothing broken is written or believed."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_files import NAMES, K, M, codebooks, d, header, rows, write

from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.store.hdf5 import read_hdf5_array
from gpq_faiss.store.header import codebooks_fingerprint
from gpq_faiss.store.reader import RowReader, describe
from gpq_faiss.store.writer import RowWriter


@pytest.mark.parametrize("kind", ["features", "codes"])
def test_round_trip(tmp_path, kind):
    path = tmp_path / "deep" / "a.h5"
    values, ids, labels = write(path, kind)
    assert os.listdir(path.parent) == ["a.h5"]
    with RowReader(path, kind=kind, model_fingerprint="model") as reader:
        np.testing.assert_array_equal(reader.block(7, 50), values[7:50])
        assert reader.header.fingerprint() == header(kind).fingerprint()
        np.testing.assert_array_equal(reader.header.codebooks, codebooks())
        starts, *parts = zip(*reader.blocks(30), strict=True)
        assert starts == (0, 30, 60, 90)
        for part, whole in zip(parts, (values, ids, labels), strict=True):
            np.testing.assert_array_equal(np.concatenate(part), whole)
        with pytest.raises(UsageError, match="outside"):
            reader.block(0, 101)
        with pytest.raises(UsageError, match="blocks of 0 rows"):
            next(reader.blocks(0))
    about = describe(path)
    json.dumps(about)
    assert (about["kind"], about["ntotal"], about["bits"]) == (kind, 100, 12)
    assert about["labelled"] == labels.any(axis=1).sum()
    with h5py.File(path) as h5:
        assert set(h5) == {kind, "ids", "labels", "codebooks"}
        assert (h5[kind].compression, h5[kind].shuffle, bool(h5.attrs["complete"])) == ("gzip", True, True)
        assert json.loads(h5.attrs["class_names"]) == list(NAMES)
        assert h5.attrs["codebooks_fingerprint"].decode() == codebooks_fingerprint(codebooks())


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    m=st.integers(1, 5),
    nbits=st.sampled_from([2, 3, 4, 8]),
    labelled=st.booleans(),
)
def test_any_block_sizes_and_codebooks(tmp_path_factory, sizes, m, nbits, labelled):
    path = tmp_path_factory.mktemp("s") / "c.h5"
    rng = np.random.default_rng(0)
    about = header("codes", codebooks=codebooks(0, m, 1 << nbits), class_names=NAMES if labelled else ())
    n = sum(sizes)
    codes = np.packbits(rng.integers(0, 2, (n, m * nbits)).astype(np.uint8), axis=1, bitorder="little")
    labels = np.packbits(rng.random((n, 11)) < 0.3, axis=1) if labelled else None
    with RowWriter(path, about) as writer:
        at = 0
        for size in sizes:
            part = slice(at, at + size)
            writer.append(codes[part], np.arange(n)[part], None if labels is None else labels[part])
            writer.commit()
            at += size
        writer.finish()
    with RowReader(path) as reader:
        np.testing.assert_array_equal(reader.block(), codes)
        np.testing.assert_array_equal(reader.ids(), np.arange(n))
        np.testing.assert_array_equal(reader.labels(), labels)


def test_several_chunks_and_the_longest_header(tmp_path):
    """More than one HDF5 chunk a column (1 MiB: 131,072 ids). 65,535 class names do not fit an HDF5 object header; empty strings have no
    fixed length."""
    n = 300_001
    codes = np.random.default_rng(0).integers(0, 16, (n, 2)).astype(np.uint8)
    with RowWriter(tmp_path / "c.h5", header("codes", class_names=())) as writer:
        writer.append(codes, np.arange(n))
        writer.finish()
    with RowReader(tmp_path / "c.h5") as reader:
        np.testing.assert_array_equal(reader.block(131_000, 270_000), codes[131_000:270_000])
        np.testing.assert_array_equal(reader.ids(262_000), np.arange(262_000, n))
    names = tuple(f"Klasse {i} ä" for i in range(65_535))
    about = header("codes", class_names=names, model_fingerprint="", data_fingerprint="", extra={})
    with RowWriter(tmp_path / "a.h5", about) as writer:
        writer.append(*rows("codes", 3)[:2], np.zeros((3, 8192), np.uint8))
        writer.finish()
    with RowReader(tmp_path / "a.h5") as reader:
        assert reader.header.fingerprint() == about.fingerprint()
        assert reader.header.class_names == names


def test_codebooks_fingerprint_is_of_content_and_shape():
    Z = codebooks()
    assert codebooks_fingerprint(Z) == codebooks_fingerprint(np.asfortranarray(Z)) == "4095bec9e55f7310"
    assert codebooks_fingerprint(Z) != codebooks_fingerprint(Z.reshape(M, K // 2, d * 2))
    Z[1, 2, 3] = np.nextafter(Z[1, 2, 3], np.float32(2))
    assert codebooks_fingerprint(Z) != codebooks_fingerprint(codebooks())


MEMORY = """
    import sys
    import numpy as np
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from store_files import header
    from gpq_faiss.store.reader import RowReader
    from gpq_faiss.store.writer import RowWriter
    block = np.ones((5000, 36), np.float32)
    for n in (50_000, 400_000):  # 7 and 58 MB of features
        with RowWriter(Path({path!r}), header(class_names=()), overwrite=True) as writer:
            for s in range(0, n, 5000):
                writer.append(block, np.arange(s, s + 5000))
            writer.finish()
        with RowReader(Path({path!r})) as reader:
            assert sum(len(ids) for _, _, ids, _ in reader.blocks(5000)) == n
        # Not ru_maxrss: on Linux that begins with the size of the parent process.
        print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_rows(tmp_path):
    text = textwrap.dedent(MEMORY).format(tests=str(Path(__file__).parent), path=str(tmp_path / "a.h5"))
    out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    few, many = (int(peak) / 1024 for peak in out.stdout.split())
    assert many < few + 10


def test_foreign_arrays(tmp_path):
    path = tmp_path / "f.h5"
    x = np.random.default_rng(0).standard_normal((5000, 7)).astype(np.float16)
    with h5py.File(path, "w") as h5:
        h5.create_dataset("x", data=x, chunks=(64, 7), compression="lzf")
        h5["text"] = "hello"
        h5.create_group("group")
        h5["soft"] = h5py.SoftLink("/x")
        h5.create_dataset("outside", (4,), "u1", external=[("/etc/passwd", 0, 4)])
        h5.create_dataset("scaled", data=np.arange(9), chunks=(9,), scaleoffset=0)
        h5.create_dataset("large chunks", (1,), "u1", chunks=(65 << 20,), maxshape=(None,))
        h5.create_dataset("claims", (1 << 40,), "f4")
    array = read_hdf5_array(path, ["features", "x"])
    assert (array.name, array.shape, array.dtype) == ("x", (5000, 7), np.float16)
    for picked in (
        slice(10, 200),
        np.random.default_rng(1).integers(0, 5000, 700),
        np.array([4999, 0, 0, 2500, -1]),
        np.empty(0, np.int64),
    ):
        np.testing.assert_array_equal(array[picked], x[picked])
    assert read_hdf5_array(path, ["nope"]) is None
    for name, message in [
        ("text", "not an array of numbers"),
        ("group", "not a dataset of this file"),
        ("soft", "not a dataset of this file"),
        ("outside", "not a dataset of this file"),
        ("scaled", "unknown filter"),
        ("large chunks", "chunks of more than 64 MiB"),
        ("claims", "of which 0 are stored"),
    ]:
        with pytest.raises(DataError, match=message):
            read_hdf5_array(path, [name])
    with h5py.File(path, "w") as h5:
        h5["x"] = x[1:]
    with pytest.raises(DataError, match=r"f\.h5 changed while it was read"):
        array[:5]


# Damage ---------------------------------------------------------------------------------------------------------------


def test_bad_rows_are_refused(tmp_path):
    values, ids, labels = rows("features", 10)
    nan = values.copy()
    nan[3, 2] = np.nan
    padded = labels.copy()
    padded[:, 1] |= 1
    with RowWriter(tmp_path / "a.h5", header()) as writer:
        for bad, message in [
            ((values[:, :5], ids, labels), r"features: float32 \(10, 5\)"),
            ((values, ids[:5], labels), "10 features, 5 ids, 10 labels"),
            ((values, ids + 0.5, labels), r"ids: float64 \(10,\)"),
            ((values, ids, labels[:, :1]), r"labels: uint8 \(10, 1\), uint8 \(10, 2\) is needed"),
            ((values, ids, None), "labels: object"),
            ((values, ids, padded), "labels have bits set beyond the last class"),
            ((nan, ids, labels), "NaN.*row 3"),
        ]:
            with pytest.raises(DataError, match=message):
                writer.append(*bad)
        assert writer.rows == 0
        with pytest.raises(DataError, match="no row"):
            writer.finish()
    codes, ids, _ = rows("codes", 10)
    writer = RowWriter(tmp_path / "c.h5", header("codes", class_names=()))
    with writer, pytest.raises(DataError, match="codes: bits set beyond"):
        writer.append(codes | 0x10, ids)


def test_headers_that_do_not_fit_together():
    for changes, message in (
        ({"codebooks": codebooks().astype(np.float64)}, "float64"),
        ({"codebooks": np.zeros((3, 15, 12), np.float32)}, "power of two"),
        ({"codebooks": np.full((3, 16, 12), np.nan, np.float32)}, "norm nan, which is not finite"),
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
    with pytest.raises(DataError, match=r"a\.h5"), RowReader(path) as reader:
        list(reader.blocks())
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
