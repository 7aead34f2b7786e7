"""Files that are broken, claim more than they hold, never end or do not belong: one clear line before any memory is taken, the right exit
code, nothing half-written and what was there untouched."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from commands import TRAIN, WIDTH, Shop, clusters, fill, gpq, refused, untouched
from model_factory import make_model
from safetensors.numpy import load_file, save_file

from gpq_faiss.nn import quantizer
from gpq_faiss.nn.model import state_fingerprint


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


# Broken files -----------------------------------------------------------------------------------------------------------

Change = Callable[[bytes], bytes]


def zipped(good: bytes) -> bytes:
    """A zip archive in the place of an array, whatever is asked of it."""
    return b"PK\x03\x04" + good[:40] + b"PK\x05\x06" + bytes(18)


def claims(rows: str) -> Change:
    """The header of an array of 240 rows says ``rows``; its padding gives way."""

    def change(good: bytes) -> bytes:
        text = good[10:128].replace(b"(240,", f"({rows},".encode())
        return good[:10] + text.rstrip().ljust(117) + b"\n" + good[128:]

    return change


def other_places(good: bytes) -> bytes:
    """The directory of an archive begins where none is."""
    end = good.rindex(b"PK\x05\x06") + 16
    return (
        good[:end]
        + (int.from_bytes(good[end : end + 4], "little") + 1000).to_bytes(4, "little")
        + good[end + 4 :]
    )


BREAKS: dict[str, Change | None] = {
    "missing": None,
    "folder": None,
    "pipe": None,
    "empty": lambda good: b"",
    "header alone": lambda good: good[:16],
    "truncated": lambda good: good[: len(good) * 2 // 3],
    "text": lambda good: b"no such thing, just words.\n" * 40,
    "random": lambda good: np.random.default_rng(0).bytes(len(good)),
}
OWN_BREAKS: dict[str, dict[str, Change]] = {
    "npy": {
        "a zip archive": zipped,
        # The parser of the header meets the end of the text inside brackets: tokenize.TokenError.
        "an open bracket": lambda good: good.replace(b")", b" ", 1),
        "brackets": lambda good: good[:10] + b"(" * 118 + good[128:],
        "a claim": claims("2400000000000"),
        "a negative size": claims("-40"),
    },
    "npz": {"places before the file": other_places},
    "lzma": {"damaged": lambda good: good[:60] + b"\xff" * 4 + good[64:]},
}

# Form -> the calls that read BAD, without their --out.
READERS = {
    "codes": "index MODEL BAD | info BAD",
    "vectors": "index MODEL BAD | info BAD",
    "index": "search MODEL BAD QUERIES | info BAD",
    "npy": f"train features:BAD --labels LABELS {TRAIN} | encode MODEL features:BAD | search MODEL INDEX BAD | info BAD"
    " | evaluate MODEL features:BAD --labels LABELS | encode MODEL DATA --ids BAD",
    "npz": f"train features:BAD {TRAIN} | search MODEL INDEX BAD | info BAD",
    "lzma": f"train features:BAD {TRAIN} | search MODEL INDEX BAD | info BAD",
    "hdf5": f"train features:BAD {TRAIN} | search MODEL INDEX BAD | info BAD",
    "labels": f"train DATA --labels BAD {TRAIN} | evaluate MODEL DATA --labels BAD",
    "parquet": f"train parquet:BAD {TRAIN}",
    "csv": f"train csv:BAD --read root=IMAGES {TRAIN}",
    "list": f"train list:BAD --read root=IMAGES {TRAIN}",
    "toml": f"train DATA --labels LABELS {TRAIN} --config BAD",
    "photo": "search IMAGE_MODEL IMAGE_INDEX BAD",
}


@pytest.fixture(scope="module")
def good(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A good file of every form."""
    folder = tmp_path_factory.mktemp("good")
    features, labels = clusters()
    np.savez(folder / "x.npz", features=features, labels=labels)
    with (
        zipfile.ZipFile(folder / "lzma.npz", "w", zipfile.ZIP_LZMA) as archive,
        archive.open("features.npy", "w") as member,
    ):
        np.lib.format.write_array(member, features)
    with h5py.File(folder / "x.h5", "w") as file:
        file["features"], file["labels"] = features, labels
    (folder / "x.csv").write_text("image,label\n" + "".join(f"a/{i}.png,a\n" for i in range(6)))
    (folder / "x.txt").write_text("".join(f"a/{i}.png 1 0\n" for i in range(6)))
    (folder / "x.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    own = {
        "npz": "x.npz",
        "lzma": "lzma.npz",
        "hdf5": "x.h5",
        "csv": "x.csv",
        "list": "x.txt",
        "parquet": "x.parquet",
    }
    of_shop = {name: getattr(shop, name) for name in ("codes", "vectors", "index", "labels", "photo")}
    return (
        of_shop
        | {"npy": shop.features, "toml": shop.settings}
        | {form: folder / name for form, name in own.items()}
    )


def put(good: Path, bad: Path, how: str, form: str = "") -> None:
    """Write ``good``, broken, to ``bad``."""
    change = (BREAKS | OWN_BREAKS.get(form, {}))[how]
    if change is not None:
        bad.write_bytes(change(good.read_bytes()))
    elif how == "folder":
        bad.mkdir()
    elif how == "pipe":
        os.mkfifo(bad)


CASES = [(form, how) for form in READERS for how in (*BREAKS, *OWN_BREAKS.get(form, {}))]
# No line at all is a table of settings that changes nothing.
CASES.remove(("toml", "empty"))


@pytest.mark.parametrize(("form", "how"), CASES)
def test_a_broken_file_is_one_line(
    shop: Shop, good: dict[str, Path], tmp_path: Path, form: str, how: str
) -> None:
    bad = tmp_path / f"bad{good[form].suffix}"
    put(good[form], bad, how, form)
    with untouched(tmp_path), limited():
        for call in READERS[form].split("|"):
            line = refused(*fill(call, shop, bad, tmp_path / "out"))
            assert bad.name in line, line


OPTIONS = {
    "ids.txt": "encode MODEL DATA --ids BAD",
    "allow.txt": "search MODEL INDEX QUERIES --allow-ids BAD",
    "deny.txt": "search MODEL INDEX QUERIES --deny-ids BAD",
    "labelled.txt": f"train DATA --labels LABELS {TRAIN} --labelled BAD",
    "queries.txt": f"train DATA --labels LABELS {TRAIN} --queries BAD",
    "labels.txt": f"train DATA {TRAIN} --labels BAD",
    "config.toml": f"train DATA --labels LABELS {TRAIN} --config BAD",
    "grid.toml": "experiment run BAD DATA --labels LABELS",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_never_ends_is_one_line(shop: Shop, tmp_path: Path, name: str) -> None:
    """A device of zeros, and a pipe that nobody writes to."""
    pipe, device = tmp_path / f"pipe-{name}", tmp_path / f"device-{name}"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for bad in (pipe, device):
        with limited():
            line = refused(*fill(OPTIONS[name], shop, bad, tmp_path / "out"))
        assert f"{bad.name} is a device or a pipe" in line


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
    bad = tmp_path / "bad.toml"
    bad.write_text(TOMLS[how])
    with untouched(tmp_path):
        for name in ("config.toml", "grid.toml"):
            assert "bad.toml" in refused(*fill(OPTIONS[name], shop, bad, tmp_path / "out"))


@pytest.mark.parametrize(
    ("value", "word"), [(np.nan, "NaN"), (np.inf, "infinity"), (0.0, "zero"), (None, "17")]
)
def test_bad_rows_and_widths_are_named(shop: Shop, tmp_path: Path, value: float | None, word: str) -> None:
    features, path = clusters()[0], tmp_path / "bad.npy"
    if value is None:
        features = np.ones((6, WIDTH + 1), np.float32)
    else:
        features[[17, 100], slice(None) if value == 0 else 3] = value
    np.save(path, features)
    calls = READERS["npy"].split("|")
    with untouched(tmp_path):
        for call in calls[:3] if value is not None else calls[1:3]:
            line = refused(*fill(call, shop, path, tmp_path / "out"))
            assert word in line
            assert ("16" if value is None else "rows 17, 100") in line


def test_a_zero_sub_vector_after_the_network_is_named_by_its_row(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = quantizer.zero_subvectors

    def zero(raw: torch.Tensor, M: int) -> torch.Tensor:
        found = real(raw, M)
        found[[4, 9, 230], 0] = True
        return found

    monkeypatch.setattr(quantizer, "zero_subvectors", zero)
    with untouched(tmp_path):
        for more in ("", "--no-features"):
            line = refused(f"encode {shop.model} {shop.data} --out {tmp_path}/codes.h5 {more}")
            assert "rows 4, 9, 230 have a zero or infinite sub-vector" in line


def test_a_class_without_a_labelled_item_is_named(shop: Shop, tmp_path: Path) -> None:
    """Once because the list of labelled items leaves it out, once because the data have no item of it."""
    (tmp_path / "rows.txt").write_text("\n".join(str(i) for i in range(240) if i % 3 != 1))
    labels = np.load(shop.labels)
    np.save(tmp_path / "gap.npy", np.where(labels == 1, 3, labels))
    train = f"train {shop.data} {TRAIN} --protocol none --out {tmp_path}/model --labels"
    with untouched(tmp_path):
        line = refused(f"{train} {shop.labels} --labelled {tmp_path}/rows.txt")
        assert "class '1'" in line
        assert "label" in line
        assert "class '1'" in refused(f"{train} {tmp_path}/gap.npy")


# Models -----------------------------------------------------------------------------------------------------------------


def swap(*keys: str, value: object) -> Callable[[Path], None]:
    """Change one entry of config.json."""

    def change(folder: Path) -> None:
        document = json.loads((folder / "config.json").read_text())
        place = document
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        (folder / "config.json").write_text(json.dumps(document))

    return change


def flip(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = next(n for n in weights if n.endswith("weight"))
    weights[name].flat[0] += 1
    save_file(weights, folder / "model.safetensors")


def no_codebooks(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["codebooks"]
    save_file(weights, folder / "model.safetensors")
    state = {k: torch.from_numpy(v) for k, v in weights.items()}
    swap("model_fingerprint", value=state_fingerprint(state))(folder)


def in_place(name: str, how: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        good = (folder / name).rename(folder / "good")
        put(good, folder / name, how)
        good.unlink()

    return change


# What needs the codebooks alone does not build the network, and asks nothing of its description.
LIGHT = ("index",)
MODELS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no folder": (shutil.rmtree, ()),
    "empty folder": (lambda folder: [path.unlink() for path in folder.iterdir()], ()),
    "flipped bit": (flip, LIGHT),
    "no codebooks": (no_codebooks, ()),
    **{
        f"config.json is {text}": (lambda folder, text=text: (folder / "config.json").write_text(text), ())  # type: ignore[misc]
        for text in ("[]", "{}", '"config"', '{"model_fingerprint": 5, "codebooks_fingerprint": []}')
    },
    "version": (swap("format_version", value=99), ()),
    "other fingerprint": (swap("model_fingerprint", value="0123456789abcdef"), ()),
    **{
        f"{key} {value}": (swap(key, value=value), LIGHT)
        for key, value in (
            ("config", {"quantizer": {"codebooks": "many"}}),
            ("config", []),
            ("config", {"network": {"backbone": "tree"}}),
            ("input", {"kind": "features", "width": 3}),
            ("input", {"kind": "sounds"}),
            ("input", None),
            ("class_names", 7),
            ("class_names", ["one"]),
        )
    },
    **{
        f"huge {'.'.join(keys)}": (swap(*keys, value=10**400), ())
        for keys in (("config", "training", "seed"), ("config", "quantizer", "codebooks"), ("input", "width"))
    },
    **{
        f"{name} {how}": (in_place(name, how), ())
        for name in ("config.json", "model.safetensors")
        for how in BREAKS
    },
}


@pytest.mark.parametrize("how", MODELS)
def test_a_model_that_is_none_is_one_line(shop: Shop, tmp_path: Path, how: str) -> None:
    folder, (change, but) = tmp_path / "bad-model", MODELS[how]
    shutil.copytree(shop.model, folder)
    change(folder)
    with untouched(tmp_path), limited():
        # The network, its codebooks alone, and all of it; other commands use the same readers.
        for call in ("encode BAD DATA", "index BAD CODES", "info BAD"):
            if call.split()[0] not in but:
                line = refused(*fill(call, shop, folder, tmp_path / "out"))
                assert folder.name in line, line


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_split_is_one_line(shop: Shop, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "bad-model"
    shutil.copytree(shop.model, folder)
    in_place("split.json", how)(folder)
    with untouched(tmp_path), limited():
        assert "split.json" in refused("evaluate", folder, shop.data, "--labels", shop.labels)


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
        assert "image_size" in refused(f"encode {folder} folder:{shop.images} --out {tmp_path}/codes.h5")


def test_products_of_another_model_are_refused_by_their_fingerprints(shop: Shop, tmp_path: Path) -> None:
    shutil.copy(shop.other_vectors, tmp_path / "features.h5")
    with untouched(tmp_path, shop.root):
        for call, word in (
            ("index MODEL OTHER_CODES", "model"),
            ("index MODEL OTHER_VECTORS", "model"),
            ("search MODEL OTHER_INDEX QUERIES", "codebooks"),
            ("encode MODEL DATA", "--overwrite"),
            ("search MODEL INDEX VECTORS", "the data of the queries"),
        ):
            assert word in refused(*fill(call, shop, out=tmp_path / "codes.h5"))


# Claims -----------------------------------------------------------------------------------------------------------------


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
def test_what_unpacks_to_more_than_the_budget_or_the_free_memory_is_one_line(
    shop: Shop, tmp_path: Path, unpacking: dict[str, Path], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unpacking[form]
    assert path.stat().st_size < 3 << 20
    line = refused(f"search {shop.model} {shop.index} {path} --memory 40MB")
    assert "of memory are needed, 20.0 MB are allowed" in line
    if form == "hdf5":  # read in place
        return
    monkeypatch.setattr("gpq_faiss.inputs.available_memory", lambda: 20 << 20)
    line = refused(f"encode {shop.model} features:{path} --out {tmp_path}/codes.h5")
    assert "of memory are needed, 21.0 MB are free" in line


def claiming(good: Path, path: Path, rows: int, keep: bool) -> Path:
    """The HDF5 file ``good`` with datasets of so many rows, of which (with ``keep``) those of ``good`` are stored."""
    with h5py.File(good) as old, h5py.File(path, "w") as new:
        for key, value in old.attrs.items():
            new.attrs[key] = rows if key == "ntotal" else value
        for key, column in old.items():
            if key == "codebooks":
                old.copy(column, new)
                continue
            chunks, shape = (1 << 16, *column.shape[1:]), (rows, *column.shape[1:])
            options: dict[str, Any] = {"compression": "gzip", "fletcher32": True}
            made = new.create_dataset(key, shape, column.dtype, chunks=chunks, **options)
            if keep:
                made[: len(column)] = column[()]
    return path


@pytest.mark.parametrize(("rows", "keep"), [(10**11, True), (200_000, False)])
def test_rows_that_are_not_stored_are_one_line(shop: Shop, tmp_path: Path, rows: int, keep: bool) -> None:
    """HDF5 reads what was never written as zeros, without a word."""
    calls = {
        claiming(
            shop.codes, tmp_path / "codes.h5", rows, keep
        ): "index MODEL BAD | index MODEL BAD --memory 100MB | info BAD",
        claiming(
            shop.vectors, tmp_path / "features.h5", rows, keep
        ): f"search MODEL INDEX BAD | train features:BAD {TRAIN}",
    }
    with untouched(tmp_path), limited():
        for bad, lines in calls.items():
            assert bad.stat().st_size < 400_000
            for call in lines.split("|"):
                assert "damaged" in refused(*fill(call, shop, bad, tmp_path / "out"))


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
            line = refused(f"encode {shop.model} features:{path} --out {tmp_path}/codes.h5")
            assert path.name in line


def test_parquet_without_pyarrow_names_the_remedy(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in ("train features:BAD", "train parquet:BAD", "search MODEL INDEX BAD"):
        line = refused(*fill(call, shop, tmp_path / "x.parquet", tmp_path / "out"))
        assert "pip install 'gpq-faiss[parquet]'" in line


# Images -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["empty", "half", "a link to itself", "a link to nowhere"])
def test_a_bad_image_is_one_line_beyond_the_limit_and_a_note_within(
    shop: Shop, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = tmp_path / "images", shop.image_model
    shutil.copytree(shop.images, folder)
    bad = folder / "b" / "3.png"
    if "link" in how:
        bad.unlink()
        bad.symlink_to("3.png" if "itself" in how else "nowhere.png")
        (folder / "a" / "no image").symlink_to("no image")
    else:
        os.truncate(bad, 0 if how == "empty" else bad.stat().st_size // 2)
    train = f"train folder:{folder} --set network.backbone=mlp {TRAIN} --protocol none --out {tmp_path}/model"
    encode = f"encode {model} folder:{folder} --out {tmp_path}/codes.h5"
    with untouched(tmp_path, shop.root):
        assert "1 of 12 images cannot be read" in refused(encode)
        assert "3.png" in refused(f"search {model} {shop.image_index} {bad}")
        assert "3.png" in refused(train)
    assert "11 codes" in gpq(f"{encode} --read max_bad=0.1").stdout
    caplog.clear()
    assert gpq(f"{train} --read max_bad=0.1").exit_code == 0
    assert "1 of 12 images cannot be read (" in caplog.text
