"""``info`` names everything that the stages write, and refuses what is damaged or foreign."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import faiss
import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_factory import make_model, random_input
from safetensors.torch import save_file

from gpq_faiss.codes.encode import encode
from gpq_faiss.data.split import load_split
from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.exported import read_encoder_metadata
from gpq_faiss.faissio.storage import FORMS
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.nn.model import load_model
from gpq_faiss.stages.export_encoder import export_encoder
from gpq_faiss.stages.export_faiss import export_faiss
from gpq_faiss.stages.index import index as build_index
from gpq_faiss.stages.info import info
from gpq_faiss.store import Header, RowWriter, write_arrays

M, K, D, N = 5, 16, 12, 23
CLASSES = ("cat", "dog", "owl")


def header(folder: Path, kind: Any) -> Header:
    model = load_model(folder)
    return Header(
        kind=kind,
        width=M * D if kind == "features" else 3,
        model_fingerprint=model.fingerprint,
        codebooks=model.codebooks,
        data_fingerprint="d" * 16,
        class_names=CLASSES,
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of everything, of one model."""
    root = tmp_path_factory.mktemp("files")
    model = make_model(root / "model", M=M, K=K, d=D, class_names=CLASSES)
    vectors, _ = Encoder.load(model).embed(random_input("features", N))
    ids = np.arange(N, dtype=np.int64) + 1000
    labels = np.zeros((N, 1), np.uint8)
    labels[:7] = 1 << 7  # the first class, of seven items
    for kind, values in (("features", vectors), ("codes", encode(vectors, load_model(model).codebooks))):
        with RowWriter(root / f"{kind}.h5", header(model, kind)) as writer:
            writer.append(values, ids, labels)
            writer.finish()
    write_arrays(
        root / "results.h5",
        {"ids": ids[:6].reshape(2, 3), "scores": np.ones((2, 3), np.float32), "query_ids": ids[:2]},
        {"kind": "results"},
    )
    np.save(root / "x.npy", vectors)
    np.savez(root / "x.npz", x=vectors, y=np.arange(4, dtype=np.uint8))
    np.savez_compressed(root / "small.npz", x=vectors)
    built = {
        "index": build_index(model, root / "codes.h5", root / "index.faiss"),
        "empty index": export_faiss(model, root / "empty.faiss"),
        "torch": export_encoder(model, root / "encoder.pt2", with_codes=True),
        "onnx": export_encoder(model, root / "encoder.onnx"),
    }
    plain = root / "plain.faiss"
    shutil.copy(built["index"], plain)
    names = ("features.h5", "codes.h5", "results.h5", "x.npy", "x.npz", "small.npz")
    return {"model": model, "plain index": plain, **built, **{n: root / n for n in names}}


def test_every_answer_is_json_and_names_the_thing(files: dict[str, Path]) -> None:
    for path in files.values():
        found = info(path)
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert found["path"] == str(path)
        if path.is_file():
            assert found["bytes"] == path.stat().st_size


def test_model_folder(files: dict[str, Path]) -> None:
    found = info(files["model"])
    model = load_model(files["model"])
    assert found["kind"] == "model"
    assert found["backbone"] == "mlp"
    assert found["input"] == {"kind": "features", "width": 20}
    assert (found["codebooks"], found["codewords"], found["subdim"], found["bits"]) == (M, K, D, 20)
    # 20 -> 24 -> 60 linear layers with biases, the raw codewords, three prototypes in each of five sub-spaces.
    assert found["parameters"] == (20 * 24 + 24) + (24 * 60 + 60) + M * K * D + M * 3 * D
    assert (found["classes"], found["class_names"]) == (3, list(CLASSES))
    assert found["model_fingerprint"] == model.fingerprint
    assert found["codebooks_fingerprint"] == model.description["codebooks_fingerprint"]
    assert found["split"]["hash"] == load_split(files["model"] / "split.json").hash
    assert found["split"]["database"] == 2
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["files"]) == {"config.json", "metrics.jsonl", "model.safetensors", "split.json"}
    assert found["bytes"] == sum(found["files"].values())
    for name in ("config.json", "model.safetensors", "metrics.jsonl"):
        assert info(files["model"] / name) == found, "a file of a model stands for its folder"
    split = info(files["model"] / "split.json")
    assert (split["kind"], split["items"], split["query"], split["database"]) == ("split", 4, 1, 2)


@pytest.mark.parametrize(("kind", "width", "dtype"), [("features", M * D, "float32"), ("codes", 3, "uint8")])
def test_rows(files: dict[str, Path], kind: str, width: int, dtype: str) -> None:
    found = info(files[f"{kind}.h5"])
    model = load_model(files["model"])
    assert (found["kind"], found["shape"], found["dtype"]) == (kind, [N, width], dtype)
    assert (found["ntotal"], found["bits"], found["labelled"], found["classes"]) == (N, 20, 7, 3)
    assert found["class_names"] == list(CLASSES)
    assert found["model_fingerprint"] == model.fingerprint
    assert found["codebooks_fingerprint"] == model.description["codebooks_fingerprint"]
    assert "numpy" in found["versions"]


def test_indexes_with_and_without_sidecar(files: dict[str, Path]) -> None:
    model = load_model(files["model"])
    found = {name: info(files[name]) for name in ("index", "empty index", "plain index")}
    assert {name: value["ntotal"] for name, value in found.items()} == {
        "index": N,
        "empty index": 0,
        "plain index": N,
    }
    for value in found.values():
        assert value["kind"] == "index"
        assert (value["dimension"], value["bits"], value["code_size"]) == (M * D, 20, 3)
        assert value["codebooks_fingerprint"] == model.description["codebooks_fingerprint"]
    assert found["index"]["model_fingerprint"] == model.fingerprint
    assert found["index"]["sidecar"] == f"{files['index']}.json"
    assert found["index"]["versions"]["faiss"] == faiss.__version__
    assert (found["plain index"]["model_fingerprint"], found["plain index"]["sidecar"]) == (None, None)
    assert info(f"{files['index']}.json") == found["index"]


def test_arrays_are_read_from_their_headers(files: dict[str, Path]) -> None:
    assert info(files["x.npy"])["shape"] == [N, M * D]
    arrays = info(files["x.npz"])["arrays"]
    assert {name: (a["shape"], a["dtype"]) for name, a in arrays.items()} == {
        "x": ([N, M * D], "float32"),
        "y": ([4], "uint8"),
    }
    assert info(files["small.npz"])["arrays"]["x"]["dtype"] == "float32"
    found = info(files["results.h5"])
    assert found["kind"] == "results"
    assert found["arrays"]["scores"] == {"shape": [2, 3], "dtype": "float32"}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["<f4", ">f8", "<i8", "u1", "?", "<f2"]),
    st.lists(st.integers(0, 5), max_size=3),
    st.booleans(),
)
def test_any_array(tmp_path: Path, dtype: str, shape: list[int], fortran: bool) -> None:
    array = np.zeros(shape, dtype, order="F" if fortran else "C")
    np.save(tmp_path / "a.npy", array)
    found = info(tmp_path / "a.npy")
    assert found["shape"] == shape
    assert np.dtype(found["dtype"]) == array.dtype
    with (tmp_path / "a.npy").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="1 bytes after its array"):
        info(tmp_path / "a.npy")


def test_encoders(files: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(files["model"])
    for path, form, outputs in (
        (files["torch"], "torch", {"vectors": ["batch", M * D], "codes": ["batch", M]}),
        (files["onnx"], "onnx", {"vectors": ["batch", M * D]}),
    ):
        found = info(path)
        assert (found["kind"], found["format"]) == ("encoder", form)
        assert found["input_shape"] == ["batch", 20]
        assert found["output_shapes"] == outputs
        assert (found["bits"], found["classes"], found["class_names"]) == (20, 3, list(CLASSES))
        assert found["model_fingerprint"] == model.fingerprint
        assert found["versions"]["gpq_faiss"]
    shutil.copy(files["torch"], tmp_path / "renamed.bin")
    assert info(tmp_path / "renamed.bin")["format"] == "torch"


def test_onnx_without_the_package_names_the_remedy(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = info(files["onnx"])
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert info(files["onnx"]) == whole
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r"pip install 'gpq-faiss\[search\]'"):
        info(files["onnx"])


def test_only_a_model_folder_needs_torch(files: dict[str, Path]) -> None:
    script = (
        "import sys; from gpq_faiss.stages.info import info; [info(p) for p in sys.argv[1:]]; "
        "sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"
    )
    paths = [str(path) for name, path in files.items() if name != "model"]
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Unfinished runs ---------------------------------------------------------------------------------------------------


def test_unfinished_rows(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "codes.h5"
    with RowWriter(out, header(files["model"], "codes"), commit_seconds=0) as writer:
        writer.append(np.zeros((9, 3), np.uint8), np.arange(9), np.zeros((9, 1), np.uint8))
    assert not out.exists()
    found = info(out)  # the name that the user gave
    assert (found["kind"], found["rows"], found["out"]) == ("unfinished codes", 9, str(out))
    assert info(tmp_path / ".codes.h5.partial") == found
    (tmp_path / ".codes.h5.partial" / "ids.raw").write_bytes(bytes(9 * 8 - 1))
    with pytest.raises(DataError, match="shorter than its 9 rows"):
        info(out)


def test_unfinished_training(tmp_path: Path) -> None:
    partial = tmp_path / ".model.partial"
    partial.mkdir()
    assert info(tmp_path / "model")["step"] == 0
    state = {"identity": "i" * 16, "step": 40, "seconds": 1.25, "best": 0.5, "best_step": 20, "lines": []}
    checkpoint = partial / "checkpoint.safetensors"
    save_file({"x": torch.zeros(3)}, checkpoint, metadata={"state": json.dumps(state)})
    found = info(tmp_path / "model")
    assert [found[key] for key in ("kind", "step", "best_step", "validation_map")] == [
        "unfinished training",
        40,
        20,
        0.5,
    ]
    save_file({"x": torch.zeros(3)}, checkpoint, metadata={"state": json.dumps({"step": 1})})
    with pytest.raises(DataError, match="damaged"):
        info(partial)
    checkpoint.write_bytes(checkpoint.read_bytes()[:20])
    with pytest.raises(DataError, match="damaged"):
        info(partial)


# Damaged and foreign -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["features.h5", "codes.h5", "x.npy", "x.npz", "small.npz", "index", "plain index", "torch", "onnx"],
)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(files: dict[str, Path], tmp_path: Path, name: str, share: float) -> None:
    whole = files[name].read_bytes()
    copy = tmp_path / files[name].name
    copy.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DataError) as caught:
        info(copy)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["x.npz", "torch", "codes.h5", "features.h5", "index"])
def test_one_changed_bit_is_noticed(files: dict[str, Path], tmp_path: Path, name: str) -> None:
    raw, copy = bytearray(files[name].read_bytes()), tmp_path / files[name].name
    if name == "index":
        at = len(raw) - 100
        shutil.copy(f"{files[name]}.json", f"{copy}.json")
    elif name.endswith(".h5"):
        with h5py.File(files[name]) as file:
            at = file[name.removesuffix(".h5")].id.get_chunk_info(0).byte_offset + 5
    else:
        with zipfile.ZipFile(files[name]) as archive:
            largest = max(archive.infolist(), key=lambda m: m.file_size)
        at = largest.header_offset + 30 + len(largest.filename) + largest.compress_size // 2 + 200
    raw[at] ^= 1
    copy.write_bytes(raw)
    with pytest.raises(MismatchError if name == "index" else DataError, match=r"damaged|index\.faiss"):
        info(copy)
    copy.unlink()
    if name == "index":
        with pytest.raises(DataError, match="not beside it"):
            info(f"{copy}.json")


@pytest.mark.parametrize("name", ["x.npz", "torch"])
def test_an_archive_that_is_too_large_to_be_read_through_is_said_to_be_unverified(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert info(files[name])["verified"] is True
    monkeypatch.setattr("gpq_faiss.exported._CHECKED", 10)
    assert info(files[name])["verified"] is False


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_an_index_of_any_form_is_described(
    files: dict[str, Path], tmp_path: Path, form: str, *, ids: bool
) -> None:
    engine = open_in_memory(files["index"])
    made = MemoryIndex.build(engine.codes, engine.codebooks, engine.ids if ids else None)
    found = info(made.save(tmp_path / "i.faiss", form))
    assert (found["kind"], found["layout"], found["ntotal"]) == ("index", form, N)
    assert found["own_ids"] == (ids or form.startswith("ivf"))


@pytest.mark.parametrize("factory", ["Flat", "HNSW4", "SQ8", "IVF1,Flat", "IVF1,RQ2x4", "PCA2,Flat"])
def test_an_index_of_another_kind_is_said_to_be_one(tmp_path: Path, factory: str) -> None:
    index = faiss.index_factory(8, factory)
    faiss.write_index(index, str(tmp_path / "i.faiss"))
    with pytest.raises(DataError, match=r"not the product-quantised codes|its metric is not"):
        info(tmp_path / "i.faiss")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("picture.png", b"\x89PNG\r\n\x1a\n" + bytes(50)),
        ("text.txt", b"hello"),
        ("x.npy", b"hello"),
        ("x.npz", b"PK\x03\x04" + bytes(40)),
        ("x.onnx", b"hello, this is no protobuf"),
        ("x.onnx", b"\x08\x0a"),  # a valid, empty ONNX model
        ("x.pt2", b"hello"),
        ("x.h5", b"\x89HDF\r\n\x1a\n" + bytes(100)),
        ("x.faiss", b"IxFI" + bytes(100)),
        ("x.json", b'{"a": 1}'),
        ("x.json", b"{"),
        ("empty", b""),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        info(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_archives_of_others_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.txt", "hello")
    with pytest.raises(DataError, match="neither"):
        info(tmp_path / "x.zip")
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pt")
    with pytest.raises(DataError, match="neither"):
        info(tmp_path / "x.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pt2")
    with pytest.raises(DataError, match="does not name its model"):
        read_encoder_metadata(tmp_path / "x.pt2")
    np.save(tmp_path / "o.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="Python objects, which are not loaded"):
        info(tmp_path / "o.npy")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "other"}, "name its model"),
        ({"codewords": "many"}, "damaged"),
        ({"codewords": "0"}, "damaged"),
        ({"class_names": "3"}, "damaged"),
        ({"outputs": '["other"]'}, "damaged"),
        ({"model_fingerprint": None}, "damaged"),
        ({"format_version": "2"}, "update"),
    ],
)
def test_an_encoder_with_a_wrong_description_is_refused(
    files: dict[str, Path], tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    copy = tmp_path / "e.pt2"
    with zipfile.ZipFile(files["torch"]) as source, zipfile.ZipFile(copy, "w") as target:
        for member in source.infolist():
            data = source.read(member)
            if member.filename.endswith("gpq.json"):
                value = json.loads(data) | change
                data = json.dumps({k: v for k, v in value.items() if v is not None}).encode()
            target.writestr(member, data)
    with pytest.raises(DataError, match=text):
        info(copy)


def test_damaged_and_foreign_folders_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a model folder"):
        info(tmp_path)
    with pytest.raises(DataError, match="not found"):
        info(tmp_path / "nothing")
    folder = tmp_path / "model"
    shutil.copytree(files["model"], folder)
    other = load_split(folder / "split.json")
    object.__setattr__(other, "seen_classes", (0, 1))
    other.save(folder / "split.json")
    with pytest.raises(MismatchError, match=r"split\.json"):
        info(folder)
    (folder / "split.json").unlink()
    assert info(folder)["split"] is None
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-5] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(MismatchError, match=r"config\.json"):
        info(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="incomplete"):
        info(folder)


# The command -----------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_or_json(files: dict[str, Path]) -> None:
    from cli.info import info as command

    done = CliRunner().invoke(command, [str(files["codes.h5"]), "--format", "json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == info(files["codes.h5"])
    lines = CliRunner().invoke(command, [str(files["codes.h5"])]).stdout.splitlines()
    table = {line.split()[0]: line.split(None, 1)[1] for line in lines}
    assert table["kind"] == "codes"
    assert table["shape"] == f"{N} x 3"
    assert table["class_names"] == "cat, dog, owl"
    assert "versions.numpy" in table
    assert f"batch x {M * D}" in CliRunner().invoke(command, [str(files["torch"])]).stdout
    assert "gpq info model" in CliRunner().invoke(command, ["--help"]).stdout
    for path in files.values():
        assert CliRunner().invoke(command, [str(path)]).exit_code == 0
