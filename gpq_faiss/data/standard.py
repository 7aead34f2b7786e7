"""Published data sets: ``digits`` of scikit-learn, ``cifar10`` and ``fashion-mnist`` of
torchvision, and ``nuswide`` in its official layout."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError, one_line
from ..files import fingerprint
from ..inputs import read_text
from .base import ImageDataset, digest, images
from .labels import Labels, labels_note
from .paths import cache_folder
from .sources import read_lines
from .tables import PLAIN, Annotations, Options

_TIMEOUT = 30.0  # of a download in seconds


def _array_images(
    name: str, pixels: NDArray[np.uint8], labels: Labels, mirrors: bool
) -> ImageDataset:
    notes = [labels_note(name, labels, "in its own order")]
    dataset = ImageDataset(
        name=name, mirrors=mirrors, pixels=pixels, labels=labels, fingerprint="", notes=notes
    )
    marks = dataset.mark(), dataset.ids.tobytes()
    dataset.fingerprint = fingerprint(name, str(pixels.shape), digest(pixels), *marks)
    return dataset


def open_digits(_: None = None, o: Options = PLAIN) -> ImageDataset:
    """Open 1,797 images of 8 x 8 grey pixels in ten classes (UCI Optical Recognition of Digits)."""
    package = importlib.util.find_spec("sklearn")  # importing scikit-learn takes seconds
    if package is None or package.origin is None:
        raise UsageError("digits are inside scikit-learn: pip install 'gpq-faiss[train]'")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",")
    pixels = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255.0 / 16.0)).astype(np.uint8)
    labels = Labels.from_ids(table[:, -1].astype(np.int64), tuple("0123456789"))
    return _array_images("digits", pixels, labels, mirrors=False)


def open_published(root: str | None, o: Options, *, name: str) -> ImageDataset:
    """Open ``cifar10`` or ``fashion-mnist`` by torchvision, in or for the folder ``root``.

    The training images come first, then the test images. CIFAR-10's batches are pickles;
    torchvision compares their MD5 with published values first, so foreign files are never executed.
    """
    from torchvision.datasets import CIFAR10, FashionMNIST

    kind: Any = CIFAR10 if name == "cifar10" else FashionMNIST
    packed = f"{CIFAR10.filename} (MD5 {CIFAR10.tgz_md5}) or the unpacked {CIFAR10.base_folder}/"
    files = packed if name == "cifar10" else "its four idx files in FashionMNIST/raw/"
    folder = cache_folder() if root is None else Path(root).expanduser()
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)  # which torchvision lacks
    try:
        parts = [kind(str(folder), train=train, download=o.download) for train in (True, False)]
    # RuntimeError is torchvision's, for a missing or altered file; it asserts the rest.
    except (OSError, RuntimeError, AssertionError, ValueError) as error:
        raise DataError(
            f"{name} is not available, or damaged ("
            f"{one_line(error)}): "
            f"put {files} in {folder}, or name its folder ({name}:FOLDER)"
            f"; images by class are read by folder:PATH"
        ) from None
    finally:
        socket.setdefaulttimeout(before)
    classes = np.concatenate([np.asarray(dataset_part.targets) for dataset_part in parts])
    pixels = np.concatenate([np.asarray(dataset_part.data) for dataset_part in parts])
    return _array_images(name, pixels, Labels.from_ids(classes, parts[0].classes), mirrors=True)


def open_nuswide(root: str, o: Options = PLAIN) -> ImageDataset:
    """Open NUS-WIDE (Chua et al., CIVR 2009) with its most frequent concepts (ties by name).

    Images without any of them are left out; ids are row numbers in the official image list.
    """
    folder, concepts = Path(root).expanduser(), 21 if o.concepts is None else o.concepts
    listed = read_lines(folder / "ImageList/Imagelist.txt", "image names, one per line,")
    path = folder / "ConceptsList/Concepts81.txt"
    concept_names = [line for _, line in read_lines(path, "concept names, one per line,")]
    if any(
        not name.isprintable() or "/" in name or concept_names.count(name) > 1
        for name in concept_names
    ):
        raise DataError(f"{path} has a concept twice, or one that is no name: damaged or foreign")
    names, columns = [line.replace("\\", "/") for _, line in listed], []
    for name in concept_names:
        path = folder / "Groundtruth/AllLabels" / f"Labels_{name}.txt"
        values = read_text(path, "0 or 1 for each image,").split()
        if len(values) != len(names) or not {"0", "1"}.issuperset(values):
            raise DataError(
                f"{path} has "
                f"{len(values):,} labels, not 0 or 1 for each of the {len(names):,} images"
                f": damaged or foreign"
            )
        columns.append(np.array(values) == "1")
    if not 1 <= concepts <= len(concept_names):
        raise UsageError(f"--read concepts={concepts}: 1 to {len(concept_names)} are possible")
    order = sorted(
        range(len(concept_names)), key=lambda c: (-int(columns[c].sum()), concept_names[c])
    )
    chosen = sorted(order[:concepts])
    matrix = np.stack([columns[c] for c in chosen], axis=1)
    included = np.flatnonzero(matrix.any(axis=1))
    if not len(included):
        raise DataError(f"nuswide: no image in {folder} has any of the {len(chosen)} concepts")
    labels = Labels.from_multihot(matrix[included], [concept_names[c] for c in chosen])
    notes = [labels_note(f"nuswide:{root}", labels, "in the order of the image list")]
    if bare := len(names) - len(included):
        without = f"{bare:,} of {len(names):,} images have none of the {len(chosen)} concepts"
        notes.append(f"{without}, left out")
    texts = [names[i] for i in included]
    paths = [os.path.join(folder, "Flickr", name) for name in texts]
    annotations = Annotations(labels, ids=included, notes=notes)
    return images(f"nuswide:{root}", "image files", texts, paths, annotations, o.max_bad)
