"""Digits, CIFAR-10, Fashion-MNIST and NUS-WIDE: what each reads, and what it refuses."""

from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from image_files import open_nuswide, put
from numpy.typing import NDArray

from gpq_faiss.data.digits import open_digits
from gpq_faiss.data.images import load_batch
from gpq_faiss.data.nuswide import choose_concepts
from gpq_faiss.data.standard import FASHION_CLASSES, open_cifar10, open_fashion_mnist, read_idx
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
    assert dataset.official is None


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
    dataset = open_cifar10(str(tmp_path), download=False)
    assert dataset.official is not None
    assert dataset.official.tolist() == [0] * 20 + [1] * 4
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
        open_cifar10(str(tmp_path), download=False)
    assert not sprung.exists()
    assert "cifar-10-python.tar.gz" in str(caught.value)
    assert "--read root" in str(caught.value)


def test_cifar10_offline_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.error

    from torchvision.datasets import CIFAR10

    def offline(self: object) -> None:
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr(CIFAR10, "download", offline)
    with pytest.raises(DataError, match="no network here") as caught:
        open_cifar10(str(tmp_path / "new"))
    message = str(caught.value)
    assert str(tmp_path / "new") in message
    assert "cifar-10-python.tar.gz" in message
    assert "\n" not in message


# fashion-mnist


def idx(array: NDArray[np.uint8]) -> bytes:
    head = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.tobytes()


def fashion(root: Path, *, packed: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 256, (9, 28, 28), dtype=np.uint8), np.arange(9, dtype=np.uint8)
    for prefix, rows in (("train", slice(0, 6)), ("t10k", slice(6, 9))):
        for kind, part in (("images-idx3", x[rows]), ("labels-idx1", y[rows])):
            data = idx(part)
            name = f"{prefix}-{kind}-ubyte" + (".gz" if packed else "")
            (root / name).write_bytes(gzip.compress(data) if packed else data)
    return x, y


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inside", ["", "FashionMNIST/raw"])
def test_fashion_mnist_from_idx_files(packed: bool, inside: str, tmp_path: Path) -> None:
    x, y = fashion(tmp_path / inside, packed=packed)
    dataset = open_fashion_mnist(str(tmp_path), download=False)
    assert np.array_equal(dataset.images, x)
    assert dataset.labels is not None
    assert dataset.labels.class_ids().tolist() == y.tolist()
    assert dataset.labels.class_names == FASHION_CLASSES
    assert dataset.official is not None
    assert dataset.official.tolist() == [0] * 6 + [1] * 3
    images, _ = load_batch(dataset, np.array([8]), 28)
    assert np.array_equal(images[0], np.stack([x[8]] * 3))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + b"x", "goes on after"),
        (lambda data: b"\0\0\x0d" + data[3:], "not an idx file"),
        (lambda data: b"\0\0\x08\x01" + data[4:], "not an idx file"),
        (lambda data: b"", "not an idx file"),
        (lambda data: data[:4] + b"\xff" * 12 + data[16:], "damaged or foreign"),
        (lambda data: data[:4] + b"\0" * 12 + data[16:], "damaged or foreign"),
        (lambda data: gzip.compress(data)[:-20], "cannot read"),
        (lambda data: gzip.compress(data)[:-8] + b"\0" * 8, "cannot read"),
        (lambda data: gzip.compress(data)[:30] + b"\xff" * 200, "cannot read"),
    ],
    ids=["short", "long", "type", "dims", "empty", "huge", "zero", "gz-cut", "gz-crc", "gz-noise"],
)
def test_idx_files_are_checked(change: object, why: str, tmp_path: Path) -> None:
    file = tmp_path / "x-idx3-ubyte"
    file.write_bytes(change(idx(np.zeros((2, 3, 3), dtype=np.uint8))))  # type: ignore[operator]
    with pytest.raises(DataError, match=why) as caught:
        read_idx(file, 3)
    assert "\n" not in str(caught.value)


def test_fashion_mnist_parts_must_fit(tmp_path: Path) -> None:
    fashion(tmp_path, packed=False)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(np.zeros(5, dtype=np.uint8)))
    with pytest.raises(DataError, match=r"6 images but .* 5 labels"):
        open_fashion_mnist(str(tmp_path), download=False)
    labels.write_bytes(idx(np.full(6, 10, dtype=np.uint8)))
    with pytest.raises(DataError, match="label 10"):
        open_fashion_mnist(str(tmp_path), download=False)
    labels.unlink()
    with pytest.raises(DataError, match="train-labels-idx1-ubyte"):
        open_fashion_mnist(str(tmp_path), download=True)


def test_fashion_mnist_offline_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import FashionMNIST

    def offline(self: object) -> None:
        raise RuntimeError("Error downloading train-images\nfrom anywhere")

    monkeypatch.setattr(FashionMNIST, "download", offline)
    with pytest.raises(DataError, match="is not available") as caught:
        open_fashion_mnist(str(tmp_path))
    assert "train-images-idx3-ubyte" in str(caught.value)
    assert "\n" not in str(caught.value)


# nuswide


def nuswide(root: Path, n: int = 30, *, crlf: bool = False, names: tuple[str, ...] = ()) -> NDArray[np.bool_]:
    """An official layout of ``n`` images over five concepts; every tenth image has none."""
    parts = names or (
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
    dataset = open_nuswide(tmp_path, concepts="all")
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
    dataset = open_nuswide(tmp_path, concepts="2")
    kept = np.flatnonzero(matrix[:, top].any(axis=1))
    assert dataset.ids.tolist() == kept.tolist()
    assert dataset.labels is not None
    assert np.array_equal(dataset.labels.dense(dtype=bool), matrix[kept][:, top])
    by_name = open_nuswide(tmp_path, concepts=["water", "beach"])
    assert by_name.labels is not None
    assert by_name.labels.class_names == ("beach", "water"), "the order of the concept list"


def test_choose_concepts_ties_and_errors() -> None:
    names, counts = ["b", "a", "c"], np.array([5, 5, 9])
    assert choose_concepts("2", names, counts) == [1, 2]
    assert choose_concepts("3", names, counts) == [0, 1, 2]
    assert choose_concepts("c, b", names, counts) == [0, 2]
    for wrong in ("0", "4", "d", "a,d", "", "-1"):
        with pytest.raises(UsageError, match="concept"):
            choose_concepts(wrong, names, counts)
    with pytest.raises(UsageError, match="concept"):
        choose_concepts([], names, counts)


@pytest.mark.parametrize(
    "names",
    [
        ("imagelist/ImageList.txt", "groundtruth/alllabels", "Concepts81.txt", "images"),
        ("Imagelist.txt", "AllLabels", "conceptslist/concepts81.txt", "image"),
    ],
)
def test_nuswide_as_found_in_the_wild(names: tuple[str, ...], tmp_path: Path) -> None:
    nuswide(tmp_path, names=names)
    assert len(open_nuswide(tmp_path, concepts="all")) == 27


def test_nuswide_flat_images_and_no_concept_list(tmp_path: Path) -> None:
    nuswide(tmp_path)
    for file in list((tmp_path / "Flickr").glob("*/*.png")):
        file.rename(tmp_path / "Flickr" / file.name)
    (tmp_path / "ConceptsList" / "Concepts81.txt").unlink()
    dataset = open_nuswide(tmp_path, concepts="all")
    assert len(dataset) == 27
    assert dataset.labels is not None
    assert dataset.labels.class_names == ("airport", "animal", "beach", "sky", "water")


def test_nuswide_official_split(tmp_path: Path) -> None:
    nuswide(tmp_path)
    lines = (tmp_path / "ImageList" / "Imagelist.txt").read_text().splitlines()
    (tmp_path / "ImageList" / "TrainImagelist.txt").write_text("\n".join(lines[::2]))
    (tmp_path / "ImageList" / "TestImagelist.txt").write_text("\n".join(lines[1::2]))
    dataset = open_nuswide(tmp_path, concepts="all")
    assert dataset.official is not None
    assert dataset.official.tolist() == (dataset.ids % 2).tolist()
    (tmp_path / "ImageList" / "TestImagelist.txt").write_text(lines[1])
    assert open_nuswide(tmp_path, concepts="all").official is None


def test_nuswide_missing_images(tmp_path: Path) -> None:
    nuswide(tmp_path)
    (tmp_path / "Flickr" / "sky" / "0003_21.png").unlink()
    (tmp_path / "Flickr" / "actor" / "0010_70.png").unlink()  # has no label, so it is not missed
    with pytest.raises(DataError, match="1 of 27 images missing"):
        open_nuswide(tmp_path, concepts="all")
    dataset = open_nuswide(tmp_path, concepts="all", max_bad=0.04)
    assert len(dataset) == 26
    assert 3 not in dataset.ids
    assert len(dataset.notes) == 2


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("Groundtruth/AllLabels/Labels_sky.txt", "0\n1\n", "has 2 labels, but the image list has 30"),
        ("Groundtruth/AllLabels/Labels_sky.txt", "0\n2\n" * 15, "column of 0 and 1"),
        ("Groundtruth/AllLabels/Labels_sky.txt", "01\n" * 15, "column of 0 and 1"),
        ("Groundtruth/AllLabels/Labels_sky.txt", "", "has 0 labels"),
        ("Groundtruth/AllLabels/Labels_sky.txt", None, "Labels_sky.txt not found"),
        ("ConceptsList/Concepts81.txt", "sky\nsky\n", "one twice"),
        ("ConceptsList/Concepts81.txt", "sky\n../../etc\n", "cannot be a concept"),
        ("ImageList/Imagelist.txt", None, "ImageList/Imagelist.txt not found"),
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
        open_nuswide(tmp_path, concepts="all")


def test_nuswide_without_its_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a folder"):
        open_nuswide(__file__)
    nuswide(tmp_path)
    (tmp_path / "Flickr").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="Flickr not found"):
        open_nuswide(tmp_path)
