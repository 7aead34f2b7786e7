"""``digits`` of scikit-learn, and ``cifar10`` and ``fashion-mnist`` of torchvision."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError, one_line
from ..files import fingerprint
from .base import ImageDataset, digest
from .labels import Labels
from .paths import cache_folder
from .tables import PLAIN, Options

_TIMEOUT = 30.0  # of a download in seconds


def _array_images(name: str, images: NDArray[np.uint8], labels: Labels, mirrors: bool) -> ImageDataset:
    made = ImageDataset(name=name, mirrors=mirrors, pixels=images, labels=labels, fingerprint="")
    made.fingerprint = fingerprint(name, str(images.shape), digest(images), made.mark(), made.ids.tobytes())
    return made


def open_digits(_: None = None, o: Options = PLAIN) -> ImageDataset:
    """1,797 images of 8 x 8 grey pixels in ten classes (UCI Optical Recognition of Handwritten Digits, test part)."""
    found = importlib.util.find_spec("sklearn")  # importing scikit-learn takes seconds
    if found is None or found.origin is None:
        raise UsageError("digits are inside scikit-learn: pip install 'gpq-faiss[train]'")
    table = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255.0 / 16.0)).astype(np.uint8)
    labels = Labels.from_ids(table[:, -1].astype(np.int64), tuple("0123456789"))
    return _array_images("digits", images, labels, mirrors=False)


def open_published(root: str | None, o: Options, *, name: str) -> ImageDataset:
    """``cifar10`` and ``fashion-mnist`` by torchvision, in or for the folder ``root``: the training images first, then the test images.

    CIFAR-10's batches are pickles. torchvision compares their MD5 with published values before unpickling: foreign files are never
    executed."""
    from torchvision.datasets import CIFAR10, FashionMNIST

    kind: Any = CIFAR10 if name == "cifar10" else FashionMNIST
    packed = f"{CIFAR10.filename} (MD5 {CIFAR10.tgz_md5}) or the unpacked {CIFAR10.base_folder}/"
    files = packed if name == "cifar10" else "its four idx files in FashionMNIST/raw/"
    folder = cache_folder() if root is None else Path(root).expanduser()
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)  # which torchvision lacks
    try:
        parts = [kind(str(folder), train=train, download=o.download) for train in (True, False)]
    # RuntimeError is torchvision's, for a missing or altered file and for mirrors that cannot be reached; it asserts the rest.
    except (OSError, RuntimeError, AssertionError, ValueError) as error:
        remedy = f"put {files} in {folder}, or name its folder ({name}:FOLDER); images by class are read by folder:PATH"
        raise DataError(f"{name} is not available, or damaged ({one_line(error)}): {remedy}") from None
    finally:
        socket.setdefaulttimeout(before)
    labels = Labels.from_ids(np.concatenate([np.asarray(part.targets) for part in parts]), parts[0].classes)
    pixels = np.concatenate([np.asarray(part.data) for part in parts])
    return _array_images(name, pixels, labels, mirrors=True)
