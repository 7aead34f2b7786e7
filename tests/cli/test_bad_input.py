"""Bad input, item by item: one clear line, the right exit code, nothing half-written and what was there untouched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from commands import WIDTH, Shop, clusters, gpq, refused, untouched
from safetensors.numpy import load_file, save_file
from stages import TRAIN, fill

from gpq_faiss.nn import quantizer
from gpq_faiss.nn.model import state_fingerprint

Break = Callable[[bytes], bytes]

BREAKS: dict[str, Break | None] = {
    "missing": None,
    "empty": lambda good: b"",
    "header alone": lambda good: good[:16],
    "truncated": lambda good: good[: len(good) * 2 // 3],
    "text": lambda good: b"no such thing, just words.\n" * 40,
    "random": lambda good: np.random.default_rng(0).bytes(len(good)),
}
"""How a file is broken; a folder in its place comes on top."""


def break_file(good: Path, bad: Path, how: str) -> None:
    if how == "folder":
        bad.mkdir()
    elif (change := BREAKS[how]) is not None:
        bad.write_bytes(change(good.read_bytes()))


def other_forms(shop: Shop, folder: Path) -> dict[str, Path]:
    """Good files of the other forms that data come in, for breaking."""
    folder.mkdir()
    features, labels = clusters()
    np.savez(folder / "x.npz", features=features, labels=labels)
    with h5py.File(folder / "x.h5", "w") as file:
        file["features"], file["labels"] = features, labels
    files = {"npz": folder / "x.npz", "hdf5": folder / "x.h5", "npy": shop.features, "labels": shop.labels}
    (folder / "x.csv").write_text("image,label\n" + "".join(f"a/{i}.png,a\n" for i in range(6)))
    (folder / "x.txt").write_text("".join(f"a/{i}.png 1 0\n" for i in range(6)))
    return files | {
        "csv": folder / "x.csv",
        "list": folder / "x.txt",
        "toml": shop.settings,
        "photo": shop.photo,
    }


# form -> the calls that read BAD (its name ends as the good one's), each without its --out
READERS: dict[str, list[tuple[str, ...]]] = {
    "codes": [("index", "MODEL", "BAD"), ("info", "BAD")],
    "vectors": [("index", "MODEL", "BAD"), ("info", "BAD")],
    "index": [("search", "MODEL", "BAD", "QUERIES"), ("info", "BAD")],
    "npy": [
        ("train", "features:BAD", "--labels", "LABELS", *TRAIN),
        ("encode", "MODEL", "features:BAD"),
        ("search", "MODEL", "INDEX", "BAD"),
        ("evaluate", "MODEL", "features:BAD", "--labels", "LABELS"),
        ("info", "BAD"),
    ],
    "npz": [("train", "features:BAD", *TRAIN), ("search", "MODEL", "INDEX", "BAD"), ("info", "BAD")],
    "hdf5": [("train", "features:BAD", *TRAIN), ("search", "MODEL", "INDEX", "BAD"), ("info", "BAD")],
    "labels": [
        ("train", "DATA", "--labels", "BAD", *TRAIN),
        ("evaluate", "MODEL", "DATA", "--labels", "BAD"),
    ],
    "csv": [("train", "csv:BAD", "--read", "root=IMAGES", *TRAIN)],
    "list": [("train", "list:BAD", "--read", "root=IMAGES", *TRAIN)],
    "toml": [("train", "DATA", "--labels", "LABELS", *TRAIN, "--config", "BAD")],
    "photo": [("search", "IMAGE_MODEL", "IMAGE_INDEX", "BAD")],
}
# No line at all is a table of settings that changes nothing.
FINE = {("toml", "empty")}


@pytest.mark.parametrize("how", [*BREAKS, "folder"])
@pytest.mark.parametrize("form", READERS)
def test_a_broken_file_is_one_line(shop: Shop, tmp_path: Path, form: str, how: str) -> None:
    if (form, how) in FINE:
        pytest.skip("that is no broken file")
    forms = other_forms(shop, tmp_path / "good") | {
        n: getattr(shop, n) for n in ("codes", "vectors", "index")
    }
    bad = tmp_path / f"bad{forms[form].suffix}"
    break_file(forms[form], bad, how)
    with untouched(tmp_path, shop.root):
        for call in READERS[form]:
            line = refused(*fill(call, shop, bad, tmp_path / "out"))
            assert bad.name in line, line


# The network, its codebooks alone, and all of it; other commands use the same readers.
MODEL_READERS: list[tuple[str, ...]] = [("encode", "BAD", "DATA"), ("index", "BAD", "CODES"), ("info", "BAD")]


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
        f"{name} {how}": (lambda folder, name=name, how=how: break_in_place(folder / name, how), ())  # type: ignore[misc]
        for name in ("config.json", "model.safetensors")
        for how in (*BREAKS, "folder")
    },
}


def break_in_place(path: Path, how: str) -> None:
    good = path.rename(path.with_name("good"))
    break_file(good, path, how)
    good.unlink()


@pytest.mark.parametrize("how", MODELS)
def test_a_model_that_is_none_is_one_line(shop: Shop, tmp_path: Path, how: str) -> None:
    folder, (change, but) = tmp_path / "bad-model", MODELS[how]
    shutil.copytree(shop.model, folder)
    change(folder)
    with untouched(tmp_path, shop.root):
        for call in MODEL_READERS:
            if call[0] not in but:
                line = refused(*fill(call, shop, folder, tmp_path / "out"))
                assert folder.name in line, line


@pytest.mark.parametrize("how", [*BREAKS, "folder"])
def test_a_broken_split_is_one_line(shop: Shop, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "bad-model"
    shutil.copytree(shop.model, folder)
    (folder / "split.json").unlink()
    break_file(shop.model / "split.json", folder / "split.json", how)
    with untouched(tmp_path):
        assert "split.json" in refused("evaluate", folder, shop.data, "--labels", shop.labels)


def test_features_of_another_width_are_one_line(shop: Shop, tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.ones((6, WIDTH + 1), np.float32))
    data = f"features:{tmp_path}/wide.npy"
    calls = [
        ("encode", shop.model, data, "--out", tmp_path / "codes.h5"),
        ("search", shop.model, shop.index, tmp_path / "wide.npy"),
    ]
    with untouched(tmp_path):
        for call in calls:
            line = refused(*call)
            assert f"{WIDTH}" in line
            assert f"{WIDTH + 1}" in line


@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (np.inf, "infinity"), (0.0, "zero")])
def test_bad_rows_are_named(shop: Shop, tmp_path: Path, value: float, word: str) -> None:
    features, path = clusters()[0], tmp_path / "bad.npy"
    features[[17, 100], slice(None) if value == 0 else 3] = value
    np.save(path, features)
    calls = [*READERS["npy"][:2], ("search", "MODEL", "INDEX", "BAD"), READERS["npy"][3]]
    with untouched(tmp_path):
        for call in calls:
            line = refused(*fill(call, shop, path, tmp_path / "out"))
            assert word in line
            assert "rows 17, 100" in line


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
        for more in ((), ("--no-features",)):
            line = refused("encode", shop.model, shop.data, "--out", tmp_path / "codes.h5", *more)
            assert "rows 4, 9, 230 have a zero or infinite sub-vector" in line


def test_a_class_without_a_labelled_item_is_named(shop: Shop, tmp_path: Path) -> None:
    """Once because the list of labelled items leaves it out, once because the data have no item of it."""
    (tmp_path / "rows.txt").write_text("\n".join(str(i) for i in range(240) if i % 3 != 1))
    labels = np.load(shop.labels)
    np.save(tmp_path / "gap.npy", np.where(labels == 1, 3, labels))
    train = ("train", shop.data, *TRAIN, "--protocol", "none", "--out", tmp_path / "model")
    with untouched(tmp_path):
        line = refused(*train, "--labels", shop.labels, "--labelled", tmp_path / "rows.txt")
        assert "class '1'" in line
        assert "label" in line
        assert "class '1'" in refused(*train, "--labels", tmp_path / "gap.npy")


# Images -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_bad_image_is_one_line_beyond_the_limit_and_a_note_within(
    shop: Shop, tmp_path: Path, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = tmp_path / "images", shop.image_model
    shutil.copytree(shop.images, folder)
    bad = folder / "b" / "3.png"
    os.truncate(bad, int(bad.stat().st_size * share))
    train = ("train", f"folder:{folder}", "--set", "network.backbone=mlp", "--out", tmp_path / "model")
    with untouched(tmp_path, shop.root):
        assert "3.png" in refused("encode", model, f"folder:{folder}", "--out", tmp_path / "codes.h5")
        assert "3.png" in refused("search", model, shop.image_index, bad)
        assert "3.png" in refused(*train, *TRAIN, "--protocol", "none")
    result = gpq("encode", model, f"folder:{folder}", "--read", "max_bad=0.1", "--out", tmp_path / "codes.h5")
    assert result.exit_code == 0
    assert "11 codes" in result.stdout
    caplog.clear()
    assert gpq(*train, *TRAIN, "--protocol", "none", "--read", "max_bad=0.1").exit_code == 0
    assert "1 of 12 images cannot be read (" in caplog.text


# Products of another model ----------------------------------------------------------------------------------------------


def test_products_of_another_model_are_refused_by_their_fingerprints(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "out.faiss"
    with untouched(tmp_path, shop.root):
        assert "model" in refused("index", shop.model, shop.other_codes, "--out", out)
        assert "model" in refused("index", shop.model, shop.other_vectors, "--out", out)
        assert "codebooks" in refused("search", shop.model, shop.other_index, shop.queries)
    shutil.copy(shop.other_vectors, tmp_path / "features.h5")
    with untouched(tmp_path, shop.root):
        assert "--overwrite" in refused("encode", shop.model, shop.data, "--out", tmp_path / "codes.h5")
        assert "the data of the queries" in refused("search", shop.model, shop.index, shop.vectors)
