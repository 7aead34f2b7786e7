"""``info`` names everything that the stages write, and refuses what is damaged or foreign."""

import json
import shutil
import sys
import zipfile

import numpy as np
import pytest
import torch
from commands import done
from gpq_faiss.store.writer import RowWriter
from model_factory import random_input

import gpq_faiss as gpq
from gpq_faiss import Encoder, RowReader, export_faiss, info, load_model
from gpq_faiss.data.protocols import load_split
from gpq_faiss.encoder import read_encoder_metadata
from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.stages.index import index as build_index

M, K, D, N = 5, 16, 12, 23
CLASSES = ("cat", "dog", "owl")


@pytest.fixture(scope="module")
def files(tmp_path_factory, encoders):
    """One of everything, of one model."""
    root = tmp_path_factory.mktemp("files")
    model, onnx, torch = encoders
    x, labels = random_input("features", N), [0] * 7 + [-1] * (N - 7)
    np.savez(root / "data.npz", features=x, labels=labels, class_names=CLASSES, ids=np.arange(1000, 1000 + N))
    gpq.encode(model, f"features:{root}/data.npz", root / "codes.h5")
    vectors, _ = Encoder.load(model).embed(x)
    np.save(root / "x.npy", vectors)
    np.savez(root / "x.npz", x=vectors, y=np.arange(4, dtype=np.uint8))
    built = {
        "index": build_index(model, root / "codes.h5", root / "index.faiss", kind="ivf"),
        "empty index": export_faiss(model, root / "empty.faiss"),
        "torch": torch,
        "onnx": onnx,
    }
    plain = root / "plain.faiss"
    shutil.copy(built["index"], plain)
    names = ("features.h5", "codes.h5", "x.npy", "x.npz")
    return {"model": model, "plain index": plain, **built, **{n: root / n for n in names}}


# What is said of each, beside what all have.
CODES = {"codebooks": M, "codewords": K, "subdim": D, "bits": 20}
ROWS = {**CODES, "ntotal": N, "labelled": 7, "classes": 3, "class_names": list(CLASSES)}
INDEX = {**CODES, "kind": "index", "ntotal": N, "dimension": M * D, "code_size": 3}
INDEX |= {"index_kind": "ivf", "own_ids": True}
ENCODER = {
    **CODES,
    "kind": "encoder",
    "input_shape": ["batch", 20],
    "class_names": list(CLASSES),
    "classes": 3,
}
X = {"shape": [N, M * D], "dtype": "float32"}
SAID = {
    "model": {
        **CODES,
        **{"kind": "model", "backbone": "mlp", "classes": 3, "class_names": list(CLASSES)},
        "input": {"kind": "features", "width": 20},
        # 20 -> 24 -> 60 linear layers with biases, the raw codewords, three prototypes in each of five sub-spaces.
        "parameters": (20 * 24 + 24) + (24 * 60 + 60) + M * K * D + M * 3 * D,
    },
    "features.h5": {**ROWS, "kind": "features", "shape": [N, M * D]},
    "codes.h5": {**ROWS, "kind": "codes", "shape": [N, 3]},
    "index": INDEX,
    "empty index": {**INDEX, "ntotal": 0, "index_kind": "flat", "own_ids": False},
    "plain index": {**INDEX, "model_fingerprint": None, "sidecar": None},
    "torch": ENCODER,
    "onnx": ENCODER,
    "x.npy": {"kind": "array", **X},
    "x.npz": {"kind": "arrays", "arrays": {"x": X, "y": {"shape": [4], "dtype": "uint8"}}},
}


@pytest.mark.parametrize("name", SAID)
def test_everything_is_described_in_json_and_as_a_table(files, name):
    path, model = files[name], load_model(files["model"])
    found = info(path)
    expected = {"path": str(path), **SAID[name]}
    if name[0] != "x":
        expected["codebooks_fingerprint"] = model.description["codebooks_fingerprint"]
        expected = {"model_fingerprint": model.model_fingerprint, **expected}
        assert found["versions"] or name == "plain index"
    assert found | expected == found
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert path.is_dir() or found["bytes"] == path.stat().st_size
    table = {line.split()[0]: line.split(None, 1)[1] for line in done("info", path).splitlines()}
    assert table["kind"] == found["kind"]
    assert json.loads(done("info", path, "--format", "json")) == found


def test_a_split_and_the_files_of_a_model(files):
    found = info(files["model"])
    assert found["split"]["hash"] == load_split(files["model"] / "split.json").hash
    assert set(found["files"]) == {"config.json", "metrics.jsonl", "model.safetensors", "split.json"}
    assert found["bytes"] == sum(found["files"].values())
    split = info(files["model"] / "split.json")
    assert (split["kind"], split["items"], split["query"], split["database"]) == ("split", 4, 1, 2)
    assert info(files["index"])["sidecar"] == f"{files['index']}.json"


def test_encoders_are_known_by_their_content(files, tmp_path, monkeypatch):
    shutil.copy(files["torch"], tmp_path / "renamed.bin")
    assert info(tmp_path / "renamed.bin")["kind"] == "encoder"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r"pip install 'gpq-faiss\[search\]'"):
        info(files["onnx"])


def test_unfinished_work(files, tmp_path):
    out = tmp_path / "codes.h5"
    with RowReader(files["codes.h5"]) as reader:
        header = reader.header
    with RowWriter(out, header) as writer:
        writer.append(np.zeros((9, 3), np.uint8), np.arange(9), np.zeros((9, 1), np.uint8))
    assert not out.exists()
    found = info(out)  # the name that the user gave
    assert (found["kind"], found["rows"], found["out"]) == ("unfinished", 9, str(out))
    assert info(tmp_path / ".codes.h5.partial") == found
    (tmp_path / ".model.partial").mkdir()
    assert info(tmp_path / "model")["out"] == str(tmp_path / "model")


# Damaged and foreign -------------------------------------------------------------------------------------------------


def refused(path, error=DataError):
    """The one line with which ``info`` refuses a file."""
    with pytest.raises(error) as caught:
        info(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


FOREIGN = {
    "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(50),
    "valid, empty.onnx": b"\x08\x0a",
    "x.json": b'{"a": 1}',
    "open.json": b"{",
}


def test_foreign_files_are_refused(tmp_path):
    """Beside those of ``tests/cli/test_bad_files.py``."""
    for name, content in FOREIGN.items():
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.txt", "hello")
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pt2")
    for name in ("x.zip", "x.pt2"):
        assert "a zip archive without arrays" in refused(tmp_path / name)
    with pytest.raises(DataError, match="was not made by"):
        read_encoder_metadata(tmp_path / "x.pt2")
    np.save(tmp_path / "o.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    assert "Python objects, which are not loaded" in refused(tmp_path / "o.npy")


def test_an_encoder_with_a_wrong_description_is_refused(files, tmp_path):
    copy, names = tmp_path / "e.pt2", {"class_names": "3", "model_fingerprint": None, "format_version": "2"}
    for change in (
        {"kind": "other"},
        {"codewords": "many"},
        {"codewords": "0"},
        *({k: v} for k, v in names.items()),
    ):
        with zipfile.ZipFile(files["torch"]) as source, zipfile.ZipFile(copy, "w") as target:
            for member in source.infolist():
                data = source.read(member)
                if member.filename.endswith("gpq.json"):
                    value = json.loads(data) | change
                    data = json.dumps({k: v for k, v in value.items() if v is not None}).encode()
                target.writestr(member, data)
        assert "was not made by this version of gpq export-encoder" in refused(copy)


def test_damaged_and_foreign_folders_are_refused(files, tmp_path):
    """What ``tests/cli/test_bad_files.py`` does not ask of every command."""
    assert "not a model folder" in refused(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(files["model"], folder)
    other = load_split(folder / "split.json")
    object.__setattr__(other, "seen_classes", (0, 1))
    other.save(folder / "split.json")
    assert "split.json" in refused(folder, MismatchError)
    (folder / "split.json").unlink()
    assert info(folder)["split"] is None
    (folder / "model.safetensors").unlink()
    assert "copy the whole folder" in refused(folder)
