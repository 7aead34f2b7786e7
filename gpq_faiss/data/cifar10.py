"""``cifar10``: the 60,000 images through torchvision."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import DataError
from .images import ArrayImages, array_fingerprint
from .labels import Labels

CACHE = Path("~/.cache/gpq-faiss")
"""Default folder of downloads."""

_TIMEOUT = 30.0  # timeout of a download in seconds


@contextlib.contextmanager
def network_timeout() -> Iterator[None]:
    """Set a timeout of 30 s, which torchvision's download lacks."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def open_cifar10(root: str | None = None, *, download: bool = True) -> ArrayImages:
    """CIFAR-10: 32 x 32 RGB, ten classes; the 50,000 training images first, then the 10,000 of the test
    batch.

    The batches are pickles. torchvision compares the MD5 of batches and class names with published values
    before unpickling, so foreign files are rejected, never executed.

    Args:
        root: folder with (or for) ``cifar-10-batches-py/`` or ``cifar-10-python.tar.gz``; default
            ``~/.cache/gpq-faiss``.
        download: download it if missing.

    Returns:
        The data set, ``official`` marking train (0) and test (1); ids are row numbers.

    Raises:
        DataError: not found and not downloadable, or damaged; names the file and where to put it.
    """
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    folder = Path(root).expanduser() if root is not None else CACHE.expanduser()
    archive = folder / CIFAR10.filename
    remedy = (
        f"put {CIFAR10.filename} (python version, MD5 {CIFAR10.tgz_md5}) or the unpacked "
        f"{CIFAR10.base_folder}/ in {folder}, or name its folder with --root"
    )
    if folder.is_file():
        raise DataError(
            f"cifar10: {folder} is a file: name the folder that holds {CIFAR10.filename}; an archive of images by class is read by "
            f"folder:{folder}"
        )
    if root is not None and not folder.is_dir() and not download:
        raise DataError(f"cifar10: {folder} is not a folder: {remedy}")
    if folder.is_dir() and (folder / "train").is_dir():
        remedy += f"; images in train/CLASS/ and test/CLASS/ are read by folder:{folder}"
    # If the archive is there, torchvision's "download" unpacks it without network access.
    fetch = download or check_integrity(str(archive), CIFAR10.tgz_md5)
    try:
        with network_timeout():
            train = CIFAR10(str(folder), train=True, download=fetch)
            test = CIFAR10(str(folder), train=False, download=False)
    except RuntimeError:
        # torchvision's error for a missing or altered file.
        raise DataError(f"cifar10: not found, or damaged, in {folder}: {remedy}") from None
    except OSError as error:
        why = getattr(error, "reason", None) or error.strerror or error
        raise DataError(f"cifar10 is not available ({why}): {remedy}") from None
    images = np.concatenate([train.data, test.data])
    labels = Labels.from_ids(np.asarray(train.targets + test.targets), tuple(train.classes))
    official = np.zeros(len(images), dtype=np.uint8)
    official[len(train.data) :] = 1
    ids = np.arange(len(images), dtype=np.int64)
    return ArrayImages(
        name="cifar10",
        images=images,
        ids=ids,
        labels=labels,
        official=official,
        fingerprint=array_fingerprint("cifar10", images, labels, ids),
    )
