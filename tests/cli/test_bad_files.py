"""Files that are broken, claim more than they hold, never end or do not belong: one clear line before any memory is taken, the right exit
code, nothing half-written and what was there untouched."""

import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from commands import TRAIN, WIDTH, clusters, done, fill, gpq, refused, untouched
from model_factory import make_model
from safetensors.numpy import load_file, save_file

from gpq_faiss.methods.model import state_fingerprint
from gpq_faiss.nn import quantizer


@contextlib.contextmanager
def limited(seconds=300, memory=2 << 30):
    """What hangs fails, and so does what takes ``memory`` more bytes than there are now."""

    def stop(*_):
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


def all_refused(shop, bad, calls, *words):
    """Each of the calls (with ``|`` between) that read BAD is one line with its name, or with ``words``."""
    with untouched(bad.parent, shop.root), limited():
        for call in calls.split("|"):
            line = refused(*fill(call, shop, bad, bad.parent / "out"))
            assert all(word in line for word in words or (bad.name,)), line


# Broken files -----------------------------------------------------------------------------------------------------------

Change = Callable[[bytes], bytes]


def claims(rows):
    """The header of an array of 240 rows says ``rows``; its padding gives way."""

    def change(good):
        text = good[10:128].replace(b"(240,", f"({rows},".encode())
        return good[:10] + text.rstrip().ljust(117) + b"\n" + good[128:]

    return change


def other_places(good):
    """The directory of an archive begins where none is."""
    end = good.rindex(b"PK\x05\x06") + 16
    at = int.from_bytes(good[end : end + 4], "little") + 1000
    return good[:end] + at.to_bytes(4, "little") + good[end + 4 :]


PLACES = {
    "missing": lambda path: None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,  # that nobody writes to
    "device": lambda path: path.symlink_to("/dev/zero"),
}
BREAKS = {
    "empty": lambda good: b"",
    "header alone": lambda good: good[:16],
    "truncated": lambda good: good[: len(good) * 2 // 3],
    "text": lambda good: b"no such thing, just words.\n" * 40,
    "random": lambda good: np.random.default_rng(0).bytes(len(good)),
}
OWN_BREAKS = {
    "npy": {
        "a zip archive": lambda good: b"PK\x03\x04" + good[:40] + b"PK\x05\x06" + bytes(18),
        # The parser of the header meets the end of the text inside brackets: tokenize.TokenError.
        "an open bracket": lambda good: good.replace(b")", b" ", 1),
        "brackets": lambda good: good[:10] + b"(" * 118 + good[128:],
        "more than its array": lambda good: good + b"x",
        "a claim": claims("2400000000000"),
        "a negative size": claims("-40"),
    },
    "npz": {"places before the file": other_places},
    "lzma": {"damaged": lambda good: good[:60] + b"\xff" * 4 + good[64:]},
    "toml": {
        "brackets": lambda _: b"a = " + b"[" * 200_000,
        "tables": lambda _: b"a = " + b"{a=" * 200_000,
        "digits": lambda _: b"[training]\nsteps = " + b"9" * 5000,
        "hexadecimal digits": lambda _: b"[training]\nsteps = 0x" + b"f" * 5000,
        "a rate": lambda _: b"[training]\nlearning_rate = " + b"9" * 400,
        "a preset": lambda _: b"preset = 0x" + b"f" * 5000,
    },
}

# Form -> the calls that read BAD, without their --out.
READERS = {
    "codes": "index MODEL BAD | info BAD",
    "vectors": "index MODEL BAD | info BAD",
    "index": "search MODEL BAD QUERIES | info BAD",
    "npy": "encode MODEL features:BAD | search MODEL INDEX BAD | evaluate MODEL features:BAD --labels LABELS"
    f" | train features:BAD --labels LABELS {TRAIN} | info BAD | encode MODEL DATA --read ids=BAD",
    "labels": f"train DATA --labels BAD {TRAIN} | evaluate MODEL DATA --labels BAD",
    "parquet": f"train parquet:BAD {TRAIN}",
    "csv": f"train csv:BAD --read root=IMAGES {TRAIN}",
    "list": f"train list:BAD --read root=IMAGES {TRAIN}",
    "toml": f"train DATA --labels LABELS {TRAIN} --config BAD | experiment run BAD DATA --labels LABELS",
    "ids": "search MODEL INDEX QUERIES --allow-ids BAD | search MODEL INDEX QUERIES --deny-ids BAD"
    f" | train DATA --labels LABELS {TRAIN} --labelled BAD | train DATA --labels LABELS {TRAIN} --queries BAD",
    "photo": "search IMAGE_MODEL IMAGE_INDEX BAD",
    "torch": "info BAD",
} | dict.fromkeys(("npz", "lzma", "hdf5"), f"train features:BAD {TRAIN} | search MODEL INDEX BAD | info BAD")


@pytest.fixture(scope="module")
def good(shop, tmp_path_factory):
    """A good file of every form."""
    folder = tmp_path_factory.mktemp("good")
    features, labels = clusters()
    np.savez(folder / "npz.npz", features=features, labels=labels)
    with (
        zipfile.ZipFile(folder / "lzma.npz", "w", zipfile.ZIP_LZMA) as archive,
        archive.open("features.npy", "w") as member,
    ):
        np.lib.format.write_array(member, features)
    with h5py.File(folder / "hdf5.h5", "w") as file:
        file["features"], file["labels"] = features, labels
    (folder / "ids.txt").write_text("".join(f"{i}\n" for i in range(99)))
    (folder / "csv.csv").write_text("image,label\n" + "".join(f"a/{i}.png,a\n" for i in range(6)))
    (folder / "list.txt").write_text("".join(f"a/{i}.png 1 0\n" for i in range(6)))
    (folder / "parquet.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    done(f"export-encoder {shop.model} --out {folder}/torch.pt2")
    of_shop = {name: getattr(shop, name) for name in ("codes", "vectors", "index", "labels", "photo")}
    of_shop |= {"npy": shop.features, "toml": shop.settings}
    return of_shop | {path.stem: path for path in folder.iterdir()}


def put(good, bad, how, form=""):
    """Write ``good``, broken, to ``bad``."""
    if how in PLACES:
        PLACES[how](bad)
    else:
        bad.write_bytes((BREAKS | OWN_BREAKS.get(form, {}))[how](good.read_bytes()))


CASES = [(form, how) for form in READERS for how in (*PLACES, *BREAKS, *OWN_BREAKS.get(form, {}))]
# No line at all is a table of settings that changes nothing, and fewer ids are ids.
for case in (("toml", "empty"), *(("ids", how) for how in ("empty", "truncated", "header alone"))):
    CASES.remove(case)


@pytest.mark.parametrize(("form", "how"), CASES)
def test_a_broken_file_is_one_line(shop, good, tmp_path, form, how):
    bad = tmp_path / f"bad{good[form].suffix}"
    put(good[form], bad, how, form)
    all_refused(shop, bad, READERS[form])


def test_bad_rows_and_widths_are_named(shop, tmp_path):
    encode, search, _, train, *_ = READERS["npy"].split("|")
    for word, value, columns in (("NaN", np.nan, 3), ("infinity", np.inf, 3), ("zero", 0, slice(None))):
        features, path = clusters()[0], tmp_path / f"{word}.npy"
        features[[17, 100], columns] = value
        np.save(path, features)
        all_refused(shop, path, f"{encode}|{search}|{train}", word, "rows 17, 100")
    np.save(path, np.ones((6, WIDTH + 1), np.float32))
    all_refused(shop, path, f"{encode}|{search}", "16", "17")


def test_a_zero_sub_vector_after_the_network_is_named_by_its_row(shop, tmp_path, monkeypatch):
    real = quantizer.zero_subvectors

    def zero(raw, M):
        found = real(raw, M)
        found[[4, 9, 230], 0] = True
        return found

    monkeypatch.setattr(quantizer, "zero_subvectors", zero)
    wanted = "rows 4, 9, 230 have a zero or infinite sub-vector"
    all_refused(shop, tmp_path / "none", "encode MODEL DATA | encode MODEL DATA --no-features", wanted)


# Models -----------------------------------------------------------------------------------------------------------------


def swap(key, value):
    """Change one entry of config.json; dots lead to one within."""

    def change(folder):
        document = json.loads((folder / "config.json").read_text())
        *outer, last = key.split(".")
        functools.reduce(dict.__getitem__, outer, document)[last] = value
        (folder / "config.json").write_text(json.dumps(document))

    return change


def flip(folder):
    weights = load_file(folder / "model.safetensors")
    weights[next(n for n in weights if n.endswith("weight"))].flat[0] += 1
    save_file(weights, folder / "model.safetensors")


def no_codebooks(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["codebooks"]
    save_file(weights, folder / "model.safetensors")
    state = {k: torch.from_numpy(v) for k, v in weights.items()}
    swap("model_fingerprint", state_fingerprint(state))(folder)


def in_place(name, how):
    def change(folder):
        good = (folder / name).rename(folder / "good")
        put(good, folder / name, how)
        good.unlink()

    return change


# The network, its codebooks alone, and all of it; other commands use the same readers.
EVERY = "encode BAD DATA | index BAD CODES | info BAD"
# What needs the codebooks alone does not build the network, and asks nothing of its description.
NETWORK = "encode BAD DATA | info BAD"
SWAPS = {
    EVERY: [
        ("format_version", 99),
        ("model_fingerprint", "0123456789abcdef"),
        *((key, 10**400) for key in ("config.training.seed", "config.quantizer.codebooks", "input.width")),
    ],
    NETWORK: [
        *(
            ("config", value)
            for value in ({"quantizer": {"codebooks": "many"}}, [], {"network": {"backbone": "tree"}})
        ),
        *(("input", value) for value in ({"kind": "features", "width": 3}, {"kind": "sounds"}, None)),
        *(("class_names", value) for value in (7, ["one"])),
    ],
}
TEXTS = ("[]", "{}", '"config"', '{"model_fingerprint": 5, "codebooks_fingerprint": []}')
FILES = {"config.json": EVERY, "model.safetensors": EVERY, "split.json": "evaluate BAD DATA --labels LABELS"}
MODELS = {
    "no folder": (EVERY, shutil.rmtree),
    "empty folder": (EVERY, lambda folder: [path.unlink() for path in folder.iterdir()]),
    "flipped bit": (NETWORK, flip),
    "no codebooks": (EVERY, no_codebooks),
    **{text: (EVERY, lambda at, text=text: (at / "config.json").write_text(text)) for text in TEXTS},
    **{
        f"{key} {str(value)[:50]}": (calls, swap(key, value))
        for calls, swaps in SWAPS.items()
        for key, value in swaps
    },
    **{
        f"{name} {how}": (calls, in_place(name, how))
        for name, calls in FILES.items()
        for how in (*PLACES, *BREAKS)
    },
}


@pytest.mark.parametrize("how", MODELS)
def test_a_model_that_is_none_is_one_line(shop, tmp_path, how):
    calls, change = MODELS[how]
    change(Path(shutil.copytree(shop.model, tmp_path / "bad-model")))
    word = "split.json" if how.startswith("split.json") else "bad-model"
    all_refused(shop, tmp_path / "bad-model", calls, word)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("config.network", {"backbone": "mlp", "hidden": [1 << 21]}),
        ("config.network", {"backbone": "mlp", "hidden": [4] * 100_000}),
        ("config.posterior.networks", 1 << 20),
        ("config.quantizer.subdim", 4096),
        ("config.quantizer.codewords", 256),
        ("input.width", 1 << 22),
        ("class_names", [str(i) for i in range(1 << 17)]),
        ("input.image_size", 1 << 20),  # a convolution takes images of any size, so that no tensor tells
    ],
)
def test_sizes_that_no_tensor_has_are_refused_before_they_are_made(shop, tmp_path, key, value, monkeypatch):
    folder, images = tmp_path / "bad-model", key == "input.image_size"
    if images:
        make_model(folder, "images", image_size=16, backbone="vgg", class_names=("a", "b"))
    else:
        shutil.copytree(shop.model, folder)
    swap(key, value)(folder)

    def small(made):
        assert images or made.numel() < 1 << 20 or made.device.type == "meta", "made before it was compared"
        return made

    # The head's layer is what any width ends in.
    xavier, randn = torch.nn.init.xavier_uniform_, torch.randn
    monkeypatch.setattr(torch.nn.init, "xavier_uniform_", lambda t, *args: xavier(small(t), *args))
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: small(randn(*shape, **options)))
    call, word = ("folder:IMAGES", "image_size") if images else ("DATA", "config.json")
    all_refused(shop, folder, f"encode BAD {call}", word)


# Claims -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["npz", "parquet", "h5"])
def test_what_unpacks_to_more_than_the_budget_or_the_free_memory_is_one_line(
    shop, tmp_path, form, monkeypatch
):
    """Files that unpack to hundreds of times their size: 32 MB."""
    path, x = tmp_path / f"bomb.{form}", np.ones((500_000, WIDTH), np.float32)
    if form == "npz":
        np.savez_compressed(path, features=x)
    elif form == "h5":
        with h5py.File(path, "w") as h5:
            h5.create_dataset("features", data=x, chunks=(10_000, WIDTH), compression="gzip")
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        column = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), WIDTH)
        pq.write_table(pa.table({"features": column}), path, compression="zstd")
    assert path.stat().st_size < 3 << 20
    wanted = "of memory are needed, 20.0 MB are allowed"
    all_refused(shop, path, "search MODEL INDEX BAD --memory 40MB", wanted)
    if form != "h5":  # which is read in place
        monkeypatch.setattr("gpq_faiss.inputs.available_memory", lambda: 20 << 20)
        all_refused(shop, path, "encode MODEL features:BAD", "of memory are needed, 21.0 MB are free")


@pytest.mark.parametrize(("rows", "keep"), [(10**11, True), (200_000, False)])
def test_rows_that_are_not_stored_are_one_line(shop, tmp_path, rows, keep):
    """HDF5 reads what was never written as zeros, without a word: of so many rows those of a good file are there, or none."""
    for good, calls in (
        (shop.codes, "index MODEL BAD | index MODEL BAD --memory 100MB | info BAD"),
        (shop.vectors, f"search MODEL INDEX BAD | train features:BAD {TRAIN}"),
    ):
        bad = Path(shutil.copy(good, tmp_path))
        with h5py.File(bad, "r+") as h5:
            h5.attrs["ntotal"] = rows
            for key in set(h5) - {"codebooks"}:
                stored = h5.pop(key)[()]
                options = {"compression": "gzip", "fletcher32": True}
                width = stored.shape[1:]
                made = h5.create_dataset(
                    key, (rows, *width), stored.dtype, chunks=(1 << 16, *width), **options
                )
                if keep:
                    made[: len(stored)] = stored
        assert bad.stat().st_size < 400_000
        all_refused(shop, bad, calls, "damaged")


def test_foreign_rows_that_are_not_stored_are_one_line(shop, tmp_path):
    twice, size = h5py.h5p.create(h5py.h5p.DATASET_CREATE), (1 << 20, WIDTH)
    twice.set_deflate(9)
    for name, options in {
        "plain": {"shape": (10**11, WIDTH)},
        "chunked": {"shape": (10**11, WIDTH), "chunks": (4096, WIDTH)},
        "twice": {"data": np.ones(size, np.float32), "chunks": size, "compression": 9, "dcpl": twice},
    }.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as h5:
            h5.create_dataset("features", dtype=np.float32, **options)
        all_refused(shop, tmp_path / f"{name}.h5", "encode MODEL features:BAD")


def test_parquet_without_pyarrow_names_the_remedy(shop, tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    calls = "train features:BAD | train parquet:BAD | search MODEL INDEX BAD"
    all_refused(shop, tmp_path / "x.parquet", calls, "pip install 'gpq-faiss[train]'")


# Images -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["empty", "half", "a link to itself", "a link to nowhere"])
def test_a_bad_image_is_one_line_beyond_the_limit_and_a_note_within(shop, tmp_path, how, caplog):
    folder = Path(shutil.copytree(shop.images, tmp_path / "images"))
    bad = folder / "b" / "3.png"
    if "link" in how:
        bad.unlink()
        bad.symlink_to("3.png" if "itself" in how else "nowhere.png")
        (folder / "a" / "no image").symlink_to("no image")
    else:
        os.truncate(bad, 0 if how == "empty" else bad.stat().st_size // 2)
    train = f"train folder:{folder} --set network.backbone=mlp {TRAIN} --protocol none"
    encode = f"encode IMAGE_MODEL folder:{folder}"
    all_refused(shop, folder, encode, "1 of 12 images cannot be read")
    all_refused(shop, bad, f"{train} | search IMAGE_MODEL IMAGE_INDEX BAD", "3.png")
    assert "11 codes" in gpq(*fill(f"{encode} --read max_bad=0.1", shop, out=tmp_path / "codes.h5")).stdout
    caplog.clear()
    assert gpq(*fill(f"{train} --read max_bad=0.1", shop, out=tmp_path / "model")).exit_code == 0
    assert "1 of 12 images cannot be read (" in caplog.text
