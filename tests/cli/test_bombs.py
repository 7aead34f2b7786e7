"""Files that claim more than they hold, never end, or are something else than their name says: one line, before any memory is taken."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from commands import WIDTH, Shop, clusters, gpq, refused, untouched
from model_factory import make_model
from stages import TRAIN, fill
from test_bad_input import swap

LISTS: dict[str, tuple[str, ...]] = {
    "--ids": ("encode", "MODEL", "DATA", "--ids", "BAD"),
    "--allow-ids": ("search", "MODEL", "INDEX", "QUERIES", "--allow-ids", "BAD"),
    "--deny-ids": ("search", "MODEL", "INDEX", "QUERIES", "--deny-ids", "BAD"),
    "--labelled": ("train", "DATA", "--labels", "LABELS", *TRAIN, "--labelled", "BAD"),
    "--queries": ("train", "DATA", "--labels", "LABELS", *TRAIN, "--queries", "BAD"),
    "--labels": ("train", "DATA", *TRAIN, "--labels", "BAD"),
}
"""Every option that takes numbers from a file."""
ARRAYS: dict[str, tuple[str, ...]] = {
    "--ids": LISTS["--ids"],
    "--labels": LISTS["--labels"],
    "features:": ("encode", "MODEL", "features:BAD"),
    "queries of a search": ("search", "MODEL", "INDEX", "BAD"),
    "info": ("info", "BAD"),
}


@contextlib.contextmanager
def limited(seconds: int = 300, memory: int = 2 << 30) -> Iterator[None]:
    """What hangs fails, and so does what takes ``memory`` more bytes than there are now."""

    def stop(*_: object) -> None:
        pytest.fail(f"no answer after {seconds} s")

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory, limit[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limit)
        signal.signal(signal.SIGALRM, old)


# One loader of .npy -----------------------------------------------------------------------------------------------------


def npy_files(folder: Path) -> dict[str, Path]:
    """Files named .npy that are none, by what is wrong with them."""
    good = np.arange(240 * WIDTH, dtype=np.int64).reshape(240, WIDTH)
    np.savez(folder / "zip.npz", good)
    (folder / "zip.npz").rename(folder / "a zip archive.npy")
    np.save(folder / "whole.npy", good)
    data = (folder / "whole.npy").read_bytes()
    (folder / "whole.npy").unlink()
    for name, content in {
        # The parser of the header meets the end of the text inside brackets: tokenize.TokenError.
        "an open bracket": data.replace(f"({240}, {WIDTH})".encode(), f"({240}, {WIDTH} ".encode()),
        "brackets": data[:10] + b"(" * (len(data[10:128])) + data[128:],
        "a claim": data.replace(b"(240, ", b"(2400000000000, "),
        "a negative size": data.replace(b"(240, ", b"(-40, "),
    }.items():
        # A claim is longer than what it replaces: the padding of the header gives way.
        broken = content
        if len(broken) > len(data):
            extra = len(broken) - len(data)
            broken = broken.replace(b" " * extra + b"\n", b"\n", 1)
        (folder / f"{name}.npy").write_bytes(broken)
    return {path.stem: path for path in folder.glob("*.npy")}


@pytest.mark.parametrize("option", ARRAYS)
def test_what_is_named_npy_and_is_none_is_one_line(shop: Shop, tmp_path: Path, option: str) -> None:
    for how, bad in npy_files(tmp_path).items():
        if option == "info" and how == "a zip archive":
            continue  # gpq info looks at the content, and describes the archive
        with untouched(tmp_path), limited():
            assert bad.name in refused(*fill(ARRAYS[option], shop, bad, tmp_path / "out"))


@pytest.mark.parametrize("option", [*LISTS, "config", "grid"])
def test_what_never_ends_is_one_line(shop: Shop, tmp_path: Path, option: str) -> None:
    """A device of zeros, and a pipe that nobody writes to."""
    calls = LISTS | {
        "config": ("train", "DATA", "--labels", "LABELS", *TRAIN, "--config", "BAD"),
        "grid": ("experiment", "run", "BAD", "DATA", "--labels", "LABELS"),
    }
    suffix = "toml" if option in ("config", "grid") else "txt"
    pipe, device = tmp_path / f"pipe.{suffix}", tmp_path / f"device.{suffix}"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for bad in (pipe, device):
        with limited():
            line = refused(*fill(calls[option], shop, bad, tmp_path / "out"))
        assert f"{bad.name} is a device or a pipe" in line


@pytest.mark.parametrize(
    "call",
    [
        *("encode MODEL features:BAD.npy", "search MODEL INDEX BAD.npz", "index MODEL BAD.h5", "info BAD.h5"),
        *("train parquet:BAD.parquet", "search MODEL BAD.faiss QUERIES", "info BAD.faiss"),
        *("encode BAD DATA", "index BAD CODES"),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_one_line(shop: Shop, tmp_path: Path, call: str) -> None:
    bad = tmp_path / "bad"
    for name in ("npy", "npz", "h5", "parquet", "faiss"):
        os.mkfifo(f"{bad}.{name}")
    shutil.copytree(shop.model, bad)
    (bad / "model.safetensors").unlink()
    os.mkfifo(bad / "model.safetensors")
    with limited():
        assert bad.name in refused(*fill(tuple(call.split()), shop, bad, tmp_path / "out"))


# What is compressed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["places before the file", "LZMA"])
def test_a_damaged_directory_of_an_npz_is_one_line(shop: Shop, tmp_path: Path, how: str) -> None:
    features, labels = clusters()
    bad = tmp_path / "bad.npz"
    if how == "LZMA":
        with (
            zipfile.ZipFile(bad, "w", zipfile.ZIP_LZMA) as archive,
            archive.open("features.npy", "w") as file,
        ):
            np.lib.format.write_array(file, features)
        data = bytearray(bad.read_bytes())
        data[60:64] = b"\xff" * 4
    else:
        np.savez_compressed(bad, features=features, labels=labels)
        data = bytearray(bad.read_bytes())
        end = data.rindex(b"PK\x05\x06") + 16  # where the directory begins
        data[end : end + 4] = (int.from_bytes(data[end : end + 4], "little") + 1000).to_bytes(4, "little")
    bad.write_bytes(data)
    with untouched(tmp_path):
        for call in (("train", "features:BAD", *TRAIN), ("search", "MODEL", "INDEX", "BAD"), ("info", "BAD")):
            assert bad.name in refused(*fill(call, shop, bad, tmp_path / "out"))


@pytest.fixture(scope="module")
def unpacking(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that unpack to hundreds of times their size: 32 MB."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    folder, x = tmp_path_factory.mktemp("bombs"), np.ones((500_000, WIDTH), np.float32)
    np.savez_compressed(folder / "npz.npz", features=x)
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), WIDTH)
    pq.write_table(pa.table({"features": column}), folder / "parquet.parquet", compression="zstd")
    with h5py.File(folder / "hdf5.h5", "w") as h5:
        h5.create_dataset("features", data=x, chunks=(10_000, WIDTH), compression="gzip")
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize("form", ["npz", "parquet", "hdf5"])
def test_queries_that_unpack_to_more_than_the_budget_are_one_line(
    shop: Shop, unpacking: dict[str, Path], form: str
) -> None:
    path = unpacking[form]
    assert path.stat().st_size < 3 << 20
    line = refused("search", shop.model, shop.index, path, "--memory", "40MB")
    assert "of memory are needed, 20.0 MB are allowed" in line


@pytest.mark.parametrize("form", ["npz", "parquet"])
def test_features_that_unpack_to_more_than_is_free_are_one_line(
    shop: Shop, tmp_path: Path, unpacking: dict[str, Path], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpq_faiss.inputs

    monkeypatch.setattr(gpq_faiss.inputs, "available_memory", lambda: 20 << 20)
    line = refused("encode", shop.model, f"features:{unpacking[form]}", "--out", tmp_path / "codes.h5")
    assert "of memory are needed, 21.0 MB are free" in line
    monkeypatch.setattr(gpq_faiss.inputs, "available_memory", lambda: 500 << 20)
    assert gpq("info", unpacking["npz"]).exit_code == 0


# Rows that are not there ------------------------------------------------------------------------------------------------


def claiming(good: Path, path: Path, rows: int, keep: bool) -> Path:
    """The HDF5 file ``good`` with datasets of so many rows, of which (with ``keep``) those of ``good`` are stored."""
    with h5py.File(good) as old, h5py.File(path, "w") as new:
        for key, value in old.attrs.items():
            new.attrs[key] = rows if key == "ntotal" else value
        for key, column in old.items():
            if key == "codebooks":
                old.copy(column, new)
                continue
            made = new.create_dataset(
                key, (rows, *column.shape[1:]), column.dtype, chunks=(1 << 16, *column.shape[1:]),
                compression="gzip", fletcher32=True,
            )  # fmt: skip
            if keep:
                made[: len(column)] = column[()]
    return path


@pytest.mark.parametrize("rows", [10**11, 200_000])
@pytest.mark.parametrize("keep", [True, False])
def test_rows_that_are_not_stored_are_one_line(shop: Shop, tmp_path: Path, rows: int, keep: bool) -> None:
    """HDF5 reads what was never written as zeros, without a word."""
    bad = claiming(shop.codes, tmp_path / "codes.h5", rows, keep)
    vectors = claiming(shop.vectors, tmp_path / "features.h5", rows, keep)
    assert bad.stat().st_size < 400_000
    with untouched(tmp_path), limited():
        for call in (
            ("index", shop.model, bad, "--out", tmp_path / "i.faiss"),
            ("index", shop.model, bad, "--memory", "100MB", "--out", tmp_path / "i.faiss"),
            ("info", bad),
        ):
            assert "damaged" in refused(*call)
        for call in (
            ("search", shop.model, shop.index, vectors),
            ("train", f"features:{vectors}", *TRAIN, "--out", tmp_path / "m"),
        ):
            assert "damaged" in refused(*call)


def test_foreign_rows_that_are_not_stored_are_one_line(shop: Shop, tmp_path: Path) -> None:
    for name, options in {"plain": {}, "chunked": {"chunks": (4096, WIDTH)}}.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as h5:
            h5.create_dataset("features", (10**11, WIDTH), np.float32, **options)
    with h5py.File(tmp_path / "twice.h5", "w") as h5:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((1 << 20, WIDTH))
        plist.set_deflate(9)
        plist.set_deflate(9)
        space = h5py.h5s.create_simple((1 << 20, WIDTH))
        made = h5py.h5d.create(h5.id, b"features", h5py.h5t.IEEE_F32LE, space, plist)
        h5py.Dataset(made)[()] = 1.0
    with untouched(tmp_path), limited():
        for path in tmp_path.glob("*.h5"):
            line = refused("encode", shop.model, f"features:{path}", "--out", tmp_path / "codes.h5")
            assert path.name in line


# Models -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("config", "network"), {"backbone": "mlp", "hidden": [1 << 21]}),
        (("config", "network"), {"backbone": "mlp", "hidden": [4] * 100_000}),
        (("config", "posterior", "networks"), 1 << 20),
        (("config", "quantizer", "subdim"), 4096),
        (("config", "quantizer", "codewords"), 256),
        (("input", "width"), 1 << 22),
        (("class_names",), [str(i) for i in range(1 << 17)]),
    ],
)
def test_widths_that_no_tensor_has_are_refused_before_they_are_made(
    shop: Shop, tmp_path: Path, keys: tuple[str, ...], value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(made: torch.Tensor) -> torch.Tensor:
        assert made.numel() < 1 << 20 or made.device.type == "meta", "made before its shape was compared"
        return made

    # The head's layer is what any width ends in.
    xavier, randn = torch.nn.init.xavier_uniform_, torch.randn
    monkeypatch.setattr(torch.nn.init, "xavier_uniform_", lambda t, *args: xavier(small(t), *args))
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: small(randn(*shape, **options)))
    folder = tmp_path / "bad-model"
    shutil.copytree(shop.model, folder)
    swap(*keys, value=value)(folder)
    with limited():
        assert "config.json" in refused("encode", folder, shop.data, "--out", tmp_path / "codes.h5")


def test_an_image_size_that_no_memory_holds_is_one_line(shop: Shop, tmp_path: Path) -> None:
    """A convolution takes images of any size, so that no tensor tells."""
    folder = tmp_path / "bad-model"
    make_model(folder, "images", image_size=16, backbone="vgg", class_names=("a", "b"))
    swap("input", "image_size", value=1 << 20)(folder)
    with limited():
        line = refused("encode", folder, f"folder:{shop.images}", "--out", tmp_path / "codes.h5")
    assert "image_size" in line


TOMLS = {
    "brackets": "a = " + "[" * 200_000,
    "tables": "a = " + "{a=" * 200_000,
    "digits": "[training]\nsteps = " + "9" * 5000,
    "hexadecimal digits": "[training]\nsteps = 0x" + "f" * 5000,
    "a rate": "[training]\nlearning_rate = " + "9" * 400,
    "a preset": "preset = 0x" + "f" * 5000,
}


@pytest.mark.parametrize("how", TOMLS)
def test_a_toml_without_end_is_one_line(shop: Shop, tmp_path: Path, how: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(TOMLS[how])
    with untouched(tmp_path):
        for call in (
            ("train", shop.data, "--labels", shop.labels, "--config", path, "--out", tmp_path / "m"),
            ("experiment", "run", path, shop.data, "--labels", shop.labels, "--out", tmp_path / "r"),
        ):
            assert "bad.toml" in refused(*call)


# Packages and memory that are not there ---------------------------------------------------------------------------------


def test_parquet_without_pyarrow_names_the_remedy(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (
        ("train", f"features:{tmp_path}/x.parquet", *TRAIN, "--out", tmp_path / "m"),
        ("train", f"parquet:{tmp_path}/x.parquet", *TRAIN, "--out", tmp_path / "m"),
        ("search", shop.model, shop.index, tmp_path / "x.parquet"),
    ):
        assert "pip install 'gpq-faiss[parquet]'" in refused(*call)


# Links ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["loop.png", "nowhere.png"])
def test_a_link_to_itself_or_nowhere_is_one_broken_image(shop: Shop, tmp_path: Path, target: str) -> None:
    folder = tmp_path / "images"
    shutil.copytree(shop.images, folder)
    (folder / "a" / "loop.png").symlink_to(target)
    (folder / "a" / "no image").symlink_to("no image")
    encode = ("encode", shop.image_model, f"folder:{folder}", "--no-features", "--out", tmp_path / "codes.h5")
    line = refused(*encode)
    assert "1 of 13 images cannot be read" in line
    assert "loop.png" in line
    result = gpq(*encode, "--read", "max_bad=0.1")
    assert result.exit_code == 0
    assert "12 codes" in result.stdout
