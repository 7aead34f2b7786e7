"""Digits, CIFAR-10, Fashion-MNIST and NUS-WIDE: what each reads, and what it refuses."""

import hashlib
import os
import pickle
from unittest.mock import Mock

import numpy as np
import pytest
from image_files import put, refused, save
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10, FashionMNIST

from gpq_faiss.data.open import open_data


def test_digits_are_scikit_learns():
    source, dataset = load_digits(), open_data("digits")
    assert np.array_equal(dataset.require_labels().dense().argmax(axis=1), source.target)
    grey = np.rint(source.images[7] * 255 / 16)[..., None].repeat(3, axis=2)
    np.testing.assert_array_equal(dataset.read(np.array([7]))[0], grey)


# CIFAR-10 -----------------------------------------------------------------------------------------


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """The real layout with 5 x 4 + 4 images, its checksums put into torchvision's class."""
    rng = np.random.default_rng(0)

    def write(name, value):
        content = pickle.dumps(value)
        save(tmp_path / CIFAR10.base_folder / name, content)
        return [name, hashlib.md5(content, usedforsecurity=False).hexdigest()]

    def batch(name):
        pixels = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
        return write(name, {"data": pixels, "labels": rng.integers(0, 10, 4).tolist()})

    name, md5 = write("batches.meta", {"label_names": [f"class{i}" for i in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", [batch(f"data_batch_{i}") for i in range(1, 6)])
    monkeypatch.setattr(CIFAR10, "test_list", [batch("test_batch")])
    monkeypatch.setattr(CIFAR10, "url", "")
    monkeypatch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": md5})
    return tmp_path / CIFAR10.base_folder


def test_cifar10_train_then_test(cifar, monkeypatch):
    monkeypatch.setenv("GPQ_CACHE", str(cifar.parent))
    dataset = open_data("cifar10")
    assert dataset.require_labels().class_names == tuple(f"class{i}" for i in range(10))
    stored = pickle.loads((cifar / "test_batch").read_bytes())  # noqa: S301
    image = dataset.read(np.array([21]))[0]
    assert np.array_equal(image.transpose(2, 0, 1).ravel(), stored["data"][1])
    assert dataset.require_labels().dense().argmax(axis=1)[20:].tolist() == stored["labels"]


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_cifar10_never_unpickles_a_foreign_file(name, cifar):
    class Trap:
        """Leaves a folder behind when it is unpickled."""

        def __reduce__(self):
            return (os.mkdir, (str(cifar / "sprung"),))

    (cifar / name).write_bytes(pickle.dumps(Trap()))
    refused(f"cifar10:{cifar.parent}", r"damaged.*cifar-10-python.tar.gz")
    assert not (cifar / "sprung").exists()


# Fashion-MNIST ------------------------------------------------------------------------------------


FASHION = np.random.default_rng(3).integers(0, 256, (9, 28, 28), dtype=np.uint8)


def idx(array):
    head = bytes((0, 0, 8, array.ndim))
    return head + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def test_fashion_mnist_from_idx_files(fashion):
    dataset = open_data(f"fashion-mnist:{fashion.parents[1]}")
    assert np.array_equal(np.stack(dataset.read(slice(None)))[..., 0], FASHION)
    assert dataset.labels.dense().argmax(axis=1).tolist() == list(range(9))
    assert dataset.labels.class_names[-1] == "Ankle boot"


@pytest.mark.parametrize(
    ("form", "kind", "archive"),
    [
        ("cifar10", CIFAR10, "cifar-10-python.tar.gz"),
        ("fashion-mnist", FashionMNIST, "idx files"),
    ],
)
def test_offline_names_the_remedy(tmp_path, monkeypatch, form, kind, archive):
    offline = Mock(side_effect=RuntimeError("Error downloading\nfrom anywhere"))
    monkeypatch.setattr(kind, "download", offline)
    refused(f"{form}:{tmp_path}/new", f"is not available.*{archive}.*{tmp_path}/new.*FOLDER")


# NUS-WIDE -----------------------------------------------------------------------------------------

LIST, LABELS, CONCEPTS = (
    "ImageList/Imagelist.txt",
    "Groundtruth/AllLabels",
    "ConceptsList/Concepts81.txt",
)
NAMES = ["sky", "water", *(f"c{i:02}" for i in range(24))]


def nuswide(root, end="\n"):
    """An official layout of 30 images over 26 concepts; every tenth image has none."""
    matrix = np.random.default_rng(5).random((30, 26)) < np.linspace(0.01, 0.3, 26)
    matrix[:, 0] |= ~matrix.any(axis=1)
    matrix[::10] = False
    images = [f"{'sky' if i % 2 else 'actor'}/{i:04d}_{i * 7}.png" for i in range(30)]
    put(root / "Flickr", *images)
    texts = {LIST: [image.replace("/", "\\") for image in images], CONCEPTS: NAMES}
    for name, column in zip(NAMES, matrix.T, strict=True):
        texts[f"{LABELS}/Labels_{name}.txt"] = list(map(str, column + 0))
    for name, lines in texts.items():
        save(root / name, "".join(line + end for line in lines))
    return matrix


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_nuswide_official_layout(end, tmp_path):
    matrix = nuswide(tmp_path, end)
    top = sorted(np.argsort(-matrix.sum(axis=0), kind="stable")[:21].tolist())
    labelled_rows = np.flatnonzero(matrix[:, top].any(axis=1))
    dataset = open_data(tmp_path)
    assert dataset.ids.tolist() == labelled_rows.tolist()
    labels = dataset.require_labels()
    assert np.array_equal(labels.dense(dtype=bool), matrix[labelled_rows][:, top])
    assert labels.class_names == tuple(NAMES[c] for c in top)
    assert all(image is not None for image in dataset.read(slice(None)))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (f"{LABELS}/Labels_sky.txt", "0\n1\n", "Labels_sky.* is not 0 or 1 for each of the 30"),
        (f"{LABELS}/Labels_sky.txt", "0\n2\n" * 15, "labels other than 0 and 1"),
        (CONCEPTS, "Sky\n", "Labels_Sky.txt not found"),
        (LIST, "", "is not 0 or 1 for each of the 0 images"),
        ("Flickr/sky/0003_21.png", "", "1 of 27 images cannot be read"),
    ],
)
def test_nuswide_damaged_parts(file, text, message, tmp_path):
    nuswide(tmp_path)
    save(tmp_path / file, text)
    refused(f"nuswide:{tmp_path}", message)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("images-idx3", idx(FASHION[:6])[:-1]),
        ("labels-idx1", idx(np.arange(5, dtype=np.uint8))),
        ("labels-idx1", idx(np.arange(10, 16, dtype=np.uint8))),
    ],
)
def test_damaged_idx_files_are_refused(fashion, name, content):
    save(fashion / f"train-{name}-ubyte", content)
    refused(f"fashion-mnist:{fashion.parents[1]}", "fashion-mnist|labels|label ")


@pytest.fixture
def fashion(tmp_path):
    """The idx files of six and three images; item i is of class i."""
    folder = tmp_path / "FashionMNIST" / "raw"
    for prefix, rows in (("train", slice(0, 6)), ("t10k", slice(6, 9))):
        save(folder / f"{prefix}-images-idx3-ubyte", idx(FASHION[rows]))
        save(folder / f"{prefix}-labels-idx1-ubyte", idx(np.arange(9, dtype=np.uint8)[rows]))
    return folder
