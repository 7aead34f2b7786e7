"""Digits, CIFAR-10, Fashion-MNIST and NUS-WIDE: what each reads, and what it refuses."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from image_files import put
from numpy.typing import NDArray

from gpq_faiss.data.base import load_batch
from gpq_faiss.data.open import open_data
from gpq_faiss.data.standard import open_digits
from gpq_faiss.errors import DataError, UsageError

# digits


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    source, dataset = load_digits(), open_digits()
    assert len(dataset) == 1797
    assert dataset.native_size == 8
    assert dataset.labels is not None
    assert np.array_equal(dataset.labels.class_ids(), source.target)
    image = dataset.read(np.array([7]))[0]
    assert image is not None
    assert image.shape == (8, 8, 3)
    assert np.array_equal(image[:, :, 1], np.rint(source.images[7] * 255 / 16).astype(np.uint8))
    assert open_digits().fingerprint == dataset.fingerprint


# cifar10


def fake_cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real layout with 5 x 4 + 4 images, its checksums put into torchvision's class."""
    import hashlib

    from torchvision.datasets import CIFAR10

    folder = root / CIFAR10.base_folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)

    def write(name: str, value: object) -> str:
        data = pickle.dumps(value)
        (folder / name).write_bytes(data)
        return hashlib.md5(data, usedforsecurity=False).hexdigest()

    def batch(name: str) -> list[str]:
        value = {
            "data": rng.integers(0, 256, (4, 3072), dtype=np.uint8),
            "labels": rng.integers(0, 10, 4).tolist(),
        }
        return [name, write(name, value)]

    monkeypatch.setattr(CIFAR10, "train_list", [batch(f"data_batch_{i}") for i in range(1, 6)])
    monkeypatch.setattr(CIFAR10, "test_list", [batch("test_batch")])
    names = {"label_names": [f"class{i}" for i in range(10)]}
    meta = {"filename": "batches.meta", "key": "label_names", "md5": write("batches.meta", names)}
    monkeypatch.setattr(CIFAR10, "meta", meta)


def test_cifar10_train_then_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cifar(tmp_path, monkeypatch)
    dataset = open_data(f"cifar10:{tmp_path}", download=False)
    assert dataset.native_size == 32
    assert dataset.labels is not None
    assert dataset.labels.class_names == tuple(f"class{i}" for i in range(10))
    stored = pickle.loads((tmp_path / "cifar-10-batches-py" / "test_batch").read_bytes())  # noqa: S301
    image = dataset.read(np.array([21]))[0]
    assert image is not None
    assert np.array_equal(image.transpose(2, 0, 1).ravel(), stored["data"][1])
    assert dataset.labels.class_ids()[20:].tolist() == stored["labels"]


class _Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_cifar10_never_unpickles_a_foreign_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cifar(tmp_path, monkeypatch)
    sprung = tmp_path / "sprung"
    (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(_Trap(sprung)))
    with pytest.raises(DataError, match="damaged") as caught:
        open_data(f"cifar10:{tmp_path}", download=False)
    assert not sprung.exists()
    assert "cifar-10-python.tar.gz" in str(caught.value)


# fashion-mnist


def idx(array: NDArray[np.uint8]) -> bytes:
    head = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.tobytes()


def fashion(root: Path) -> tuple[Path, NDArray[np.uint8], NDArray[np.uint8]]:
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    x, y = (
        np.random.default_rng(3).integers(0, 256, (9, 28, 28), dtype=np.uint8),
        np.arange(9, dtype=np.uint8),
    )
    for prefix, rows in (("train", slice(0, 6)), ("t10k", slice(6, 9))):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(x[rows]))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(y[rows]))
    return folder, x, y


def test_fashion_mnist_from_idx_files(tmp_path: Path) -> None:
    folder, x, y = fashion(tmp_path)
    dataset = open_data(f"fashion-mnist:{tmp_path}", download=False)
    assert np.array_equal(dataset.images, x)
    assert dataset.labels is not None
    assert dataset.labels.class_ids().tolist() == y.tolist()
    assert dataset.labels.class_names[-1] == "Ankle boot"
    images, _ = load_batch(dataset, np.array([8]), 28)
    assert np.array_equal(images[0], np.stack([x[8]] * 3))
    for name, damage in (
        ("train-images-idx3-ubyte", lambda data: data[:-1]),
        ("train-images-idx3-ubyte", lambda data: data[:4] + b"\xff" * 12 + data[16:]),
        ("train-images-idx3-ubyte", lambda data: b""),
        ("train-labels-idx1-ubyte", lambda data: idx(y[:5])),
        ("train-labels-idx1-ubyte", lambda data: idx(y[:6] + 10)),
    ):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(damage(good))
        with pytest.raises(DataError, match=r"fashion-mnist|labels|label ") as caught:
            open_data(f"fashion-mnist:{tmp_path}", download=False)
        assert "\n" not in str(caught.value)
        (folder / name).write_bytes(good)


@pytest.mark.parametrize(
    "error", [RuntimeError("Error downloading\nfrom anywhere"), OSError("no network here")]
)
def test_offline_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from torchvision.datasets import CIFAR10, FashionMNIST

    def offline(self: object) -> None:
        raise error

    for kind, form, part in (
        (CIFAR10, "cifar10", "cifar-10-python.tar.gz"),
        (FashionMNIST, "fashion-mnist", "idx files"),
    ):
        monkeypatch.setattr(kind, "download", offline)
        with pytest.raises(DataError, match=f"is not available.*{part}.*{tmp_path}/new.*FOLDER") as caught:
            open_data(f"{form}:{tmp_path}/new")
        assert "\n" not in str(caught.value)


# nuswide


def nuswide(root: Path, n: int = 30, *, crlf: bool = False) -> NDArray[np.bool_]:
    """An official layout of ``n`` images over five concepts; every tenth image has none."""
    parts = (
        "ImageList/Imagelist.txt",
        "Groundtruth/AllLabels",
        "ConceptsList/Concepts81.txt",
        "Flickr",
    )
    end = "\r\n" if crlf else "\n"
    concepts = ["airport", "animal", "beach", "sky", "water"]
    matrix = np.random.default_rng(5).random((n, 5)) < [0.05, 0.3, 0.2, 0.6, 0.4]
    matrix[:, 0] |= ~matrix.any(axis=1)
    matrix[::10] = False
    images = [f"{'sky' if i % 2 else 'actor'}/{i:04d}_{i * 7}.png" for i in range(n)]
    put(root / parts[3], *images)
    for name, text in (
        (parts[0], end.join(image.replace("/", "\\") for image in images) + end),
        (parts[2], end.join(concepts) + end),
        *(
            (f"{parts[1]}/Labels_{concept}.txt", end.join("01"[int(v)] for v in matrix[:, c]) + end)
            for c, concept in enumerate(concepts)
        ),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, newline="")
    return matrix


@pytest.mark.parametrize("crlf", [False, True])
def test_nuswide_official_layout(crlf: bool, tmp_path: Path) -> None:
    matrix = nuswide(tmp_path, crlf=crlf)
    dataset = open_data(f"nuswide:{tmp_path}", concepts=5)
    kept = np.flatnonzero(matrix.any(axis=1))
    assert dataset.ids.tolist() == kept.tolist()
    assert dataset.labels is not None
    assert np.array_equal(dataset.labels.dense(dtype=bool), matrix[kept])
    assert dataset.notes == ["3 of 30 images have none of the 5 concepts, left out"]
    assert all(image is not None for image in dataset.read(slice(None)))
    assert dataset.paths[0].endswith("sky/0001_7.png")


def test_nuswide_takes_the_most_frequent_concepts(tmp_path: Path) -> None:
    matrix = nuswide(tmp_path)
    top = sorted(np.argsort(-matrix.sum(axis=0), kind="stable")[:2].tolist())
    dataset = open_data(f"nuswide:{tmp_path}", concepts=2)
    kept = np.flatnonzero(matrix[:, top].any(axis=1))
    assert dataset.ids.tolist() == kept.tolist()
    assert dataset.labels is not None
    assert np.array_equal(dataset.labels.dense(dtype=bool), matrix[kept][:, top])
    for wrong in (0, 6):
        with pytest.raises(UsageError, match="1 to 5 are there"):
            open_data(f"nuswide:{tmp_path}", concepts=wrong)


def test_nuswide_missing_images(tmp_path: Path) -> None:
    nuswide(tmp_path)
    (tmp_path / "Flickr" / "sky" / "0003_21.png").unlink()
    (tmp_path / "Flickr" / "actor" / "0010_70.png").unlink()  # has no label, so it is not missed
    with pytest.raises(DataError, match="1 of 27 images cannot be read"):
        open_data(f"nuswide:{tmp_path}", concepts=5)
    dataset = open_data(f"nuswide:{tmp_path}", concepts=5, max_bad=0.04)
    assert len(dataset) == 27
    assert dataset.ids[dataset.bad.positions].tolist() == [3]


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("Groundtruth/AllLabels/Labels_sky.txt", "0\n1\n", "has 2 labels, but the image list has 30"),
        ("Groundtruth/AllLabels/Labels_sky.txt", "0\n2\n" * 15, "column of 0 and 1|labels"),
        ("Groundtruth/AllLabels/Labels_sky.txt", "01\n" * 15, "column of 0 and 1|labels"),
        ("Groundtruth/AllLabels/Labels_sky.txt", "", "has 0 labels"),
        ("Groundtruth/AllLabels/Labels_sky.txt", None, "Labels_sky.txt not found"),
        ("ConceptsList/Concepts81.txt", "sky\nsky\n", "it is there twice"),
        ("ConceptsList/Concepts81.txt", "sky\n../../etc\n", "cannot be a concept"),
        ("ImageList/Imagelist.txt", None, "ImageList/Imagelist.txt.* not found"),
        ("ImageList/Imagelist.txt", "", "is empty"),
    ],
)
def test_nuswide_damaged_parts(file: str, text: str | None, why: str, tmp_path: Path) -> None:
    nuswide(tmp_path)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match=why):
        open_data(f"nuswide:{tmp_path}", concepts=5)


def test_nuswide_without_its_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not found"):
        open_data(f"nuswide:{__file__}")
    nuswide(tmp_path)
    (tmp_path / "Flickr").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="Flickr not found"):
        open_data(f"nuswide:{tmp_path}")
