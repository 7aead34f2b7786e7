"""``info`` names everything that the stages write, and refuses what is damaged or foreign."""

import json
import shutil
import sys
import zipfile

import numpy as np
import pytest
import torch
from commands import done
from model_factory import random_input

import gpq_faiss as gpq
from gpq_faiss import Encoder, RowReader, info, load_model
from gpq_faiss.data.protocols import load_split
from gpq_faiss.encoder import read_encoder_metadata
from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.store.items import items_path
from gpq_faiss.store.rows import RowWriter

M, K, D, N = 5, 16, 12, 23
CLASSES = ("cat", "dog", "owl")


@pytest.fixture(scope="module")
def files(tmp_path_factory, encoders):
    """One of everything, of one model."""
    root = tmp_path_factory.mktemp("files")
    model, onnx, pt2 = encoders
    x, labels = random_input("features", N), [0] * 7 + [-1] * (N - 7)
    ids = np.arange(1000, 1000 + N)
    np.savez(root / "data.npz", features=x, labels=labels, class_names=CLASSES, ids=ids)
    gpq.encode(model, f"features:{root}/data.npz", root / "codes.h5")
    vectors, _ = Encoder.load(model).embed(x)
    np.save(root / "x.npy", vectors)
    np.savez(root / "x.npz", x=vectors, y=np.arange(4, dtype=np.uint8))
    for name in ("index.faiss", "index.lists"):
        gpq.index(model, root / "codes.h5", root / name)
    gpq.export_faiss(model, root / "empty.faiss")
    names = "features.h5", "codes.h5", "empty.faiss", "index.faiss", "index.lists", "x.npy", "x.npz"
    return {"model": model, "onnx": onnx, "pt2": pt2, **{name: root / name for name in names}}


# What is said of each, in addition to what is said of all.
CODES = {"codebooks": M, "codewords": K, "subdim": D, "bits": 20}
ROWS = {**CODES, "ntotal": N, "labelled": 7, "classes": 3, "class_names": list(CLASSES)}
INDEX = {**CODES, "kind": "index", "ntotal": N, "dimension": M * D, "code_size": 3}
INDEX |= {"metric": "inner product", "changes": None, "changed_items": 0}
ENCODER = {**CODES, "kind": "encoder", "input_shape": ["batch", 20], "classes": 3}
X = {"shape": [N, M * D], "dtype": "float32"}
EXPECTED = {
    "model": {
        **CODES,
        **{"kind": "model", "backbone": "mlp", "classes": 3, "class_names": list(CLASSES)},
        "input": {"kind": "features", "width": 20},
        # 20 -> 24 -> 60 with biases, the raw codewords, three prototypes in each sub-space.
        "parameters": (20 * 24 + 24) + (24 * 60 + 60) + M * K * D + M * 3 * D,
    },
    "features.h5": {**ROWS, "kind": "features", "shape": [N, M * D]},
    "codes.h5": {**ROWS, "kind": "codes", "shape": [N, 3]},
    "empty.faiss": {**CODES, "kind": "index", "ntotal": 0, "metric": "inner product"},
    "index.faiss": {**INDEX, "form": "flat"},
    "index.lists": {**INDEX, "form": "lists"},
    "pt2": ENCODER,
    "onnx": ENCODER,
    "x.npy": {"kind": "array", **X},
    "x.npz": {"kind": "arrays", "arrays": {"x": X, "y": {"shape": [4], "dtype": "uint8"}}},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_everything_is_described(files, name):
    path, model = files[name], load_model(files["model"])
    about = info(path)
    expected = {"path": str(path), **EXPECTED[name]}
    if name[0] != "x":
        expected["codebooks_fingerprint"] = model.description["codebooks_fingerprint"]
    if name.startswith("index"):
        expected["names"] = str(items_path(path))
    assert about | expected == about
    assert json.loads(json.dumps(about, allow_nan=False)) == about
    assert path.is_dir() or about["bytes"] == path.stat().st_size


@pytest.mark.parametrize("name", ["model", "index.faiss"])
def test_command_prints_a_table_or_json(files, name):
    path = files[name]
    table = dict(line.split(None, 1) for line in done("info", path).splitlines())
    assert (table["kind"], table["path"]) == (info(path)["kind"], str(path))
    assert json.loads(done("info", path, "--format", "json")) == info(path)


def test_split_and_files_of_a_model(files):
    about = info(files["model"])
    assert about["split"]["hash"] == load_split(files["model"] / "split.json").hash
    assert about["bytes"] == sum(about["files"].values())
    split = info(files["model"] / "split.json")
    assert (split["kind"], split["items"], split["query"], split["database"]) == ("split", 4, 1, 2)


def test_encoder_is_known_by_its_content(files, tmp_path):
    shutil.copy(files["pt2"], tmp_path / "renamed.bin")
    assert info(tmp_path / "renamed.bin")["kind"] == "encoder"


def test_missing_package_is_named(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r"pip install 'gpq-faiss\[search\]'"):
        info(files["onnx"])


def test_unfinished_rows_are_described(files, tmp_path):
    out = tmp_path / "codes.h5"
    with RowReader(files["codes.h5"]) as reader:
        header = reader.header
    with RowWriter(out, header) as writer:
        writer.append(np.zeros((9, 3), np.uint8), np.arange(9), np.zeros((9, 1), np.uint8))
    about = info(out)  # the name that the user gave
    assert (about["kind"], about["rows"], about["out"]) == ("unfinished", 9, str(out))
    assert info(tmp_path / ".codes.h5.partial") == about


def test_unfinished_training_is_described(tmp_path):
    (tmp_path / ".model.partial").mkdir()
    assert info(tmp_path / "model")["out"] == str(tmp_path / "model")


# Damaged and foreign ------------------------------------------------------------------------------


def refused(path, error=DataError):
    """Return the line with which ``info`` refuses a file."""
    with pytest.raises(error) as refusal:
        info(path)
    assert str(path) in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("picture.png", b"\x89PNG\r\n\x1a\n" + bytes(50)),
        ("empty.onnx", b"\x08\x0a"),
        ("x.json", b'{"a": 1}'),
        ("open.json", b"{"),
        ("empty", b""),
        ("index.faiss.items.sqlite", b"SQLite format 3\0"),
    ],
)
def test_foreign_file_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name)


def test_archive_without_arrays_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.txt", "hello")
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pt2")
    for name in ("x.zip", "x.pt2"):
        assert "a zip archive without arrays" in refused(tmp_path / name)
    with pytest.raises(DataError, match="was not made by"):
        read_encoder_metadata(tmp_path / "x.pt2")


def test_python_objects_are_not_loaded(tmp_path):
    np.save(tmp_path / "o.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    assert "Python objects, which are not loaded" in refused(tmp_path / "o.npy")


@pytest.mark.parametrize(
    "change",
    [{"kind": "other"}, {"codewords": "many"}, {"class_names": "3"}, {"model_fingerprint": None}],
)
def test_encoder_with_a_wrong_description_is_refused(files, tmp_path, change):
    copy = tmp_path / "e.pt2"
    with zipfile.ZipFile(files["pt2"]) as source, zipfile.ZipFile(copy, "w") as target:
        for member in source.infolist():
            data = source.read(member)
            if member.filename.endswith("gpq.json"):
                document = json.loads(data) | change
                document = {key: text for key, text in document.items() if text is not None}
                data = json.dumps(document).encode()
            target.writestr(member, data)
    assert "was not made by this version of gpq export-encoder" in refused(copy)


def test_folder_that_is_no_model_is_refused(tmp_path):
    assert "not a model folder" in refused(tmp_path)


def test_split_of_another_model_is_refused(files, tmp_path):
    folder = shutil.copytree(files["model"], tmp_path / "model")
    split = load_split(folder / "split.json")
    object.__setattr__(split, "seen_classes", (0, 1))
    split.save(folder / "split.json")
    assert "split.json" in refused(folder, MismatchError)
    (folder / "split.json").unlink()
    assert info(folder)["split"] is None


def test_model_without_weights_is_refused(files, tmp_path):
    folder = shutil.copytree(files["model"], tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert "copy the whole folder" in refused(folder)
