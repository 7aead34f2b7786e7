"""Files that are broken or do not belong: one line, the right exit code, nothing is changed."""

import json
import os

import numpy as np
import pytest
from commands import clusters, done, gpq, refused, untouched

from gpq_faiss.nn import quantizer

TRAIN = "--preset paper --set training.steps=2 --out out"


def check_refused(folder, call, *words):
    """Check that a call is refused with these words, and changes nothing."""
    with untouched(folder):
        line = refused(call)
    assert all(word in line for word in words), line


# Broken files -------------------------------------------------------------------------------------

BREAKS = {
    "missing": None,
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) * 2 // 3],
    "text": lambda data: b"no such thing, just words.\n" * 40,
    "random": lambda data: np.random.default_rng(0).bytes(len(data)),
}


def damage(path, fault):
    """Break a good file in place."""
    data = path.read_bytes()
    path.unlink()
    if fault != "missing":
        path.write_bytes(BREAKS[fault](data))


CALLS = [
    ("codes.h5", "index model codes.h5 --out out"),
    ("codes.h5", "info codes.h5"),
    ("features.h5", "index model features.h5 --out out"),
    ("index.faiss", "search model index.faiss queries.npy"),
    ("index.faiss", "info index.faiss"),
    ("features.npy", "encode model features:features.npy --out out"),
    ("features.npy", f"train features:features.npy --labels labels.npy {TRAIN}"),
    ("features.npy", "evaluate model features:features.npy --labels labels.npy"),
    ("queries.npy", "search model index.faiss queries.npy"),
    ("labels.npy", f"train features:features.npy --labels labels.npy {TRAIN}"),
    ("labels.npy", "evaluate model features:features.npy --labels labels.npy"),
    ("images/a/0.png", "search image-model image.faiss images/a/0.png"),
    ("index.lists", "search model index.lists queries.npy"),
    ("model/config.json", "encode model features:features.npy --out out"),
    ("model/config.json", "info model"),
    ("model/model.safetensors", "encode model features:features.npy --out out"),
    ("model/model.safetensors", "info model"),
    ("model/split.json", "evaluate model features:features.npy --labels labels.npy"),
]


@pytest.mark.parametrize("fault", BREAKS)
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_broken_file_is_one_line(folder, name, call, fault):
    if name == "index.lists":
        done(f"index model codes.h5 --out {name}")
    damage(folder / name, fault)
    check_refused(folder, call, name.removeprefix("model/"))


@pytest.mark.parametrize(
    ("word", "value", "columns"),
    [("NaN", np.nan, 3), ("infinity", np.inf, 3), ("zero", 0, slice(None))],
)
def test_bad_rows_are_named(folder, word, value, columns):
    features = clusters()[0]
    features[[17, 100], columns] = value
    np.save("features.npy", features)
    for call in (
        "encode model features:features.npy --out out",
        "search model index.faiss features.npy",
        f"train features:features.npy --labels labels.npy {TRAIN}",
    ):
        check_refused(folder, call, word, "rows 17, 100")


def test_zero_sub_vectors_are_named_by_row(folder, monkeypatch):
    real = quantizer.zero_subvectors

    def zero(raw, M):
        mask = real(raw, M)
        mask[[4, 9, 230], 0] = True
        return mask

    monkeypatch.setattr(quantizer, "zero_subvectors", zero)
    call = "encode model features:features.npy --no-features --out out"
    check_refused(folder, call, "a zero or infinite sub-vector", "for rows 4, 9, 230")


# Models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format_version", 99),
        ("model_fingerprint", "0123456789abcdef"),
        ("config", {"quantizer": {"codebooks": "many"}}),
        ("config", {"network": {"backbone": "tree"}}),
        ("config", []),
        ("input", {"kind": "features", "width": 3}),
        ("input", {"kind": "sounds"}),
        ("input", None),
        ("class_names", 7),
        ("class_names", ["one"]),
    ],
)
def test_wrong_description_of_a_model_is_one_line(folder, key, value):
    document = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(document | {key: value}))
    check_refused(folder, "encode model features:features.npy --out out", "model")


# Images -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 40])
def test_bad_images_count_up_to_a_limit(folder, size, caplog):
    os.truncate("images/b/3.png", size)
    encode = "encode image-model folder:images --out out.h5"
    check_refused(folder, encode, "1 of 12 images cannot be read")
    check_refused(folder, "search image-model image.faiss images/b/3.png", "3.png")
    assert "11 codes" in gpq(f"{encode} --read max_bad=0.1").stdout
    assert "1 of 12 images cannot be read (" in caplog.text
