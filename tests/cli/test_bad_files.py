"""Files that are broken or do not belong: one line, the right exit code, nothing is changed."""

import functools
import json
import os
import shutil
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from commands import TRAIN, WIDTH, clusters, fill, gpq, refused, untouched
from safetensors.numpy import load_file, save_file

from gpq_faiss.methods.model import state_fingerprint
from gpq_faiss.nn import quantizer


def check_refused(shop, bad, calls, *words):
    """Each of the calls (with ``|`` between) that read BAD is one line with its name, or with
    ``words``.
    """
    with untouched(bad.parent, shop.root):
        for call in calls.split("|"):
            line = refused(*fill(call, shop, bad, bad.parent / "out"))
            assert all(word in line for word in words or (bad.name,)), line


# Broken files -------------------------------------------------------------------------------------

BREAKS = {
    "missing": None,
    "folder": None,
    "empty": lambda data: b"",
    "header": lambda data: data[:16],
    "truncated": lambda data: data[: len(data) * 2 // 3],
    "text": lambda data: b"no such thing, just words.\n" * 40,
    "random": lambda data: np.random.default_rng(0).bytes(len(data)),
}


def put(good, bad, how):
    """Write a good file, broken, to ``bad``."""
    if how == "folder":
        bad.mkdir()
    elif how != "missing":
        bad.write_bytes(BREAKS[how](good.read_bytes()))


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
} | dict.fromkeys(
    ("npz", "hdf5"), f"train features:BAD {TRAIN} | search MODEL INDEX BAD | info BAD"
)
READERS["lists"] = READERS["index"]


@pytest.fixture(scope="module")
def good(shop, tmp_path_factory):
    """A good file of every form."""
    folder = tmp_path_factory.mktemp("good")
    features, labels = clusters()
    np.savez(folder / "npz.npz", features=features, labels=labels)
    with h5py.File(folder / "hdf5.h5", "w") as file:
        file["features"], file["labels"] = features, labels
    (folder / "ids.txt").write_text("".join(f"{i}\n" for i in range(99)))
    (folder / "csv.csv").write_text("image,label\n" + "".join(f"a/{i}.png,a\n" for i in range(6)))
    (folder / "list.txt").write_text("".join(f"a/{i}.png 1 0\n" for i in range(6)))
    (folder / "parquet.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    gpq(f"index {shop.model} {shop.codes} --out {folder}/lists.lists")
    of_shop = {
        name: getattr(shop, name) for name in ("codes", "vectors", "index", "labels", "photo")
    }
    of_shop |= {"npy": shop.features, "toml": shop.settings}
    return of_shop | {path.stem: path for path in folder.iterdir()}


CASES = [(form, how) for form in READERS for how in BREAKS]
# No line at all is a table of settings that changes nothing, and fewer ids are ids.
for case in (("toml", "empty"), *(("ids", how) for how in ("empty", "truncated", "header"))):
    CASES.remove(case)


@pytest.mark.parametrize(("form", "how"), CASES)
def test_a_broken_file_is_one_line(shop, good, tmp_path, form, how):
    bad = tmp_path / f"bad{good[form].suffix}"
    put(good[form], bad, how)
    check_refused(shop, bad, READERS[form])


def test_bad_rows_and_widths_are_named(shop, tmp_path):
    encode, search, _, train, *_ = READERS["npy"].split("|")
    for word, value, columns in (
        ("NaN", np.nan, 3),
        ("infinity", np.inf, 3),
        ("zero", 0, slice(None)),
    ):
        features, path = clusters()[0], tmp_path / f"{word}.npy"
        features[[17, 100], columns] = value
        np.save(path, features)
        check_refused(shop, path, f"{encode}|{search}|{train}", word, "rows 17, 100")
    np.save(path, np.ones((6, WIDTH + 1), np.float32))
    check_refused(shop, path, f"{encode}|{search}", "16", "17")


def test_a_zero_sub_vector_after_the_network_is_named_by_its_row(shop, tmp_path, monkeypatch):
    real = quantizer.zero_subvectors

    def zero(raw, M):
        found = real(raw, M)
        found[[4, 9, 230], 0] = True
        return found

    monkeypatch.setattr(quantizer, "zero_subvectors", zero)
    wanted = "rows 4, 9, 230 have a zero or infinite sub-vector"
    check_refused(
        shop, tmp_path / "none", "encode MODEL DATA | encode MODEL DATA --no-features", wanted
    )


# Models -------------------------------------------------------------------------------------------


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
        *(
            (key, 10**400)
            for key in ("config.training.seed", "config.quantizer.codebooks", "input.width")
        ),
    ],
    NETWORK: [
        *(
            ("config", value)
            for value in (
                {"quantizer": {"codebooks": "many"}},
                [],
                {"network": {"backbone": "tree"}},
            )
        ),
        *(
            ("input", value)
            for value in ({"kind": "features", "width": 3}, {"kind": "sounds"}, None)
        ),
        *(("class_names", value) for value in (7, ["one"])),
    ],
}
TEXTS = ("[]", "{}", '"config"', '{"model_fingerprint": 5, "codebooks_fingerprint": []}')
FILES = {
    "config.json": EVERY,
    "model.safetensors": EVERY,
    "split.json": "evaluate BAD DATA --labels LABELS",
}
MODELS = {
    "no folder": (EVERY, shutil.rmtree),
    "empty folder": (EVERY, lambda folder: [path.unlink() for path in folder.iterdir()]),
    "flipped bit": (NETWORK, flip),
    "no codebooks": (EVERY, no_codebooks),
    **{
        text: (EVERY, lambda at, text=text: (at / "config.json").write_text(text)) for text in TEXTS
    },
    **{
        f"{key} {str(value)[:50]}": (calls, swap(key, value))
        for calls, swaps in SWAPS.items()
        for key, value in swaps
    },
    **{
        f"{name} {how}": (calls, in_place(name, how))
        for name, calls in FILES.items()
        for how in BREAKS
    },
}


@pytest.mark.parametrize("how", MODELS)
def test_a_model_that_is_none_is_one_line(shop, tmp_path, how):
    calls, change = MODELS[how]
    change(Path(shutil.copytree(shop.model, tmp_path / "bad-model")))
    word = "split.json" if how.startswith("split.json") else "bad-model"
    check_refused(shop, tmp_path / "bad-model", calls, word)


def test_parquet_without_pyarrow_names_the_remedy(shop, tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow", "pyarrow.parquet", "pyarrow.dataset"):
        monkeypatch.setitem(sys.modules, name, None)
    calls = "train features:BAD | train parquet:BAD | search MODEL INDEX BAD"
    check_refused(shop, tmp_path / "x.parquet", calls, "pip install 'gpq-faiss[train]'")


# Images -------------------------------------------------------------------------------------------


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
    train += " --set quantizer.codewords=4"
    encode = f"encode IMAGE_MODEL folder:{folder}"
    check_refused(shop, folder, encode, "1 of 12 images cannot be read")
    check_refused(shop, bad, f"{train} | search IMAGE_MODEL IMAGE_INDEX BAD", "3.png")
    assert (
        "11 codes"
        in gpq(*fill(f"{encode} --read max_bad=0.1", shop, out=tmp_path / "codes.h5")).stdout
    )
    caplog.clear()
    assert gpq(*fill(f"{train} --read max_bad=0.1", shop, out=tmp_path / "model")).exit_code == 0
    assert "1 of 12 images cannot be read (" in caplog.text
