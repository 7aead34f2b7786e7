"""The whole path from every form in which people have their data: train, encode, index, search, evaluate."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import datasets
import numpy as np
import pytest
from click.testing import CliRunner
from commands import done, refused
from gpq_cli.main import cli
from PIL import Image
from sklearn.datasets import load_digits

N = 120
SHORT = (
    "--preset",
    "paper",
    "--bits",
    "12",
    "--set",
    "training.steps=4",
    "--set",
    "training.batch_labelled=30",
    "--set",
    "network.backbone=linear",
)
DIGITS = load_digits()
PIXELS = np.rint(DIGITS.images[:N] * (255 / 16)).astype(np.uint8)
VECTORS = (DIGITS.images[:N].reshape(N, -1) / 16).astype(np.float32)
KINDS = [f"digit {c}" for c in range(10)]


def encoded(i: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(PIXELS[i]).save(out, "PNG")
    return out.getvalue()


def shards(folder: Path) -> str:
    for k in range(3):
        with tarfile.open(folder / f"s-{k:03d}.tar", "w") as tar:
            for i in range(40 * k, 40 * k + 40):
                for name, content in (
                    (f"{i:05d}.png", encoded(i)),
                    (f"{i:05d}.cls", b"%d" % DIGITS.target[i]),
                ):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return f"webdataset:{folder}/s-{{000..002}}.tar"


def hub(folder: Path, *, images: bool) -> str:
    label = datasets.ClassLabel(names=KINDS)
    kinds = {"image": datasets.Image()} if images else {"emb": datasets.List(datasets.Value("float32"))}
    values = [{"bytes": encoded(i), "path": None} for i in range(N)] if images else list(VECTORS)
    columns = {
        next(iter(kinds)): values,
        "label": DIGITS.target[:N].tolist(),
        "key": [f"k{i}" for i in range(N)],
    }
    features = datasets.Features({**kinds, "label": label, "key": datasets.Value("string")})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(folder / "hub"))
    return f"hf:{folder}/hub"


@pytest.mark.parametrize("form", ["shards", "images", "vectors"])
def test_the_whole_path(form: str, tmp_path: Path) -> None:
    spec = shards(tmp_path) if form == "shards" else hub(tmp_path, images=form == "images")
    model, index = tmp_path / "model", tmp_path / "index.faiss"
    done("train", spec, "--labelled", "3-per-class", "--queries", "1-per-class", *SHORT, "--out", model)
    done("encode", model, spec, "--out", tmp_path / "codes.h5")
    done("index", model, tmp_path / "codes.h5", "--out", index)
    found = json.loads(done("search", model, index, spec, "--rows", "0:3", "-k", 2, "--format", "json"))
    first = found["queries"][0]
    number = first["ids"][0]
    assert (
        first["names"][0]
        == {"shards": f"{number:05d}", "images": f"k{number}", "vectors": f"k{number}"}[form]
    )
    kind = int(DIGITS.target[number])
    assert first["labels"][0] == [str(kind) if form == "shards" else KINDS[kind]]
    table = json.loads(done("evaluate", model, spec, "--compare", "pq", "--format", "json"))
    assert "pq" in json.dumps(table)


def test_features_and_labels_at_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPQ_CACHE", str(tmp_path / "cache"))
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://set/x.npy", "wb") as file:
        np.save(file, VECTORS)
    with fsspec.open("memory://set/y.csv", "w") as file:
        file.write("id,label\n" + "".join(f"{i},{c}\n" for i, c in enumerate(DIGITS.target[:N])))
    data = ("features:memory://set/x.npy", "--labels", "memory://set/y.csv")
    done("train", *data, "--labelled", "3-per-class", *SHORT, "--out", tmp_path / "model")
    done("encode", tmp_path / "model", *data, "--out", tmp_path / "codes.h5")
    assert "memory://set/none.npy not found" in refused(
        "encode", tmp_path / "model", "features:memory://set/none.npy", "--out", "x.h5"
    )
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    ("args", "code", "why"),
    [
        (("webdataset:",), 2, "lacks its path"),
        (("webdataset:none.tar",), 1, "none.tar not found"),
        (("hf:none",), 1, "none not found"),
        (("hf:{folder}",), 1, "is not a data set that save_to_disk wrote"),
        (("digits", "--read", "vectors=x"), 2, "--read vectors does not apply to digits"),
        (("webdataset:none.tar", "--read", "root=x"), 2, "--read root does not apply to webdataset"),
        (("hf:{folder}", "--read", "max_bad=2"), 2, "give a fraction"),
        (("features:s3://bucket/x.npy",), 1, "needs another package"),
        (("features:ftps://host/x.npy",), 2, "there is no file system for ftps://"),
        (("http://127.0.0.1:1/x.npy",), 1, "cannot be read"),
        (("https://host/x",), 2, "unknown data"),
    ],
)
def test_bad_arguments_are_one_line(args: tuple[str, ...], code: int, why: str, tmp_path: Path) -> None:
    line = refused(
        "train", *(arg.format(folder=tmp_path) for arg in args), "--out", tmp_path / "model", code=code
    )
    assert why in line
    assert not (tmp_path / "model").exists()


def test_what_was_read_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli, ["train", shards(tmp_path), *SHORT, "--protocol", "none", "--out", str(tmp_path / "model")]
    )
    assert result.exit_code == 0
    assert f"webdataset:{tmp_path}/s-{{000..002}}.tar: labels from 'cls': 120 of 120 items" in result.stderr
