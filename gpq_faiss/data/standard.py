"""``cifar10`` and ``fashion-mnist``: local files, or downloaded by torchvision."""

from __future__ import annotations

import contextlib
import gzip
import math
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .images import MIN_SIDE, ArrayImages, array_fingerprint
from .labels import Labels

CACHE = Path("~/.cache/gpq-faiss")
"""Default folder of downloads."""
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist."""
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_PARTS = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip
_MAX_BYTES = 1 << 30  # of one idx file, unpacked; the real ones have 47 MB
_TIMEOUT = 30.0  # of a download in seconds


@contextlib.contextmanager
def _download(name: str, remedy: str) -> Iterator[None]:
    """Context of a download by torchvision, with the timeout that it lacks."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)
    try:
        yield
    except OSError as error:
        why = " ".join(str(getattr(error, "reason", None) or error.strerror or error).split())
        raise DataError(f"{name} is not available ({why}): {remedy}") from None
    finally:
        socket.setdefaulttimeout(before)


def _in_parts(name: str, images: list[NDArray[np.uint8]], labels: Labels) -> ArrayImages:
    """Training images, then test images."""
    pixels = np.concatenate(images)
    ids = np.arange(len(pixels), dtype=np.int64)
    return ArrayImages(
        name=name,
        images=pixels,
        ids=ids,
        labels=labels,
        official=np.repeat(np.array([0, 1], dtype=np.uint8), [len(part) for part in images]),
        fingerprint=array_fingerprint(name, pixels, labels, ids),
    )


def open_cifar10(root: str | None = None, *, download: bool = True) -> ArrayImages:
    """CIFAR-10: 32 x 32 RGB, ten classes; the 50,000 training images first, then the 10,000 of the test batch.

    ``root`` is the folder with (or for) ``cifar-10-batches-py/`` or ``cifar-10-python.tar.gz``. The batches are pickles.
    torchvision compares
    the MD5 of batches and class names with published values before unpickling, so foreign files are rejected, never executed.
    """
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    folder = (CACHE if root is None else Path(root)).expanduser()
    packed = CIFAR10.filename
    remedy = (
        f"put {packed} (python version, MD5 {CIFAR10.tgz_md5}) or the unpacked {CIFAR10.base_folder}/ in {folder}, "
        "or name its folder with --read root"
    )
    if folder.is_file():
        what = (
            f"name the folder that holds {packed}; an archive of images by class is read by folder:{folder}"
        )
        raise DataError(f"cifar10: {folder} is a file: {what}")
    if root is not None and not folder.is_dir() and not download:
        raise DataError(f"cifar10: {folder} is not a folder: {remedy}")
    if (folder / "train").is_dir():
        remedy += f"; images in train/CLASS/ and test/CLASS/ are read by folder:{folder}"
    # If the archive is there, torchvision's "download" unpacks it without network access.
    fetch = download or check_integrity(str(folder / packed), CIFAR10.tgz_md5)
    try:
        with _download("cifar10", remedy):
            train = CIFAR10(str(folder), train=True, download=fetch)
            test = CIFAR10(str(folder), train=False, download=False)
    except RuntimeError:
        # torchvision's error for a missing or altered file.
        raise DataError(f"cifar10: not found, or damaged, in {folder}: {remedy}") from None
    labels = Labels.from_ids(np.asarray(train.targets + test.targets), tuple(train.classes))
    return _in_parts("cifar10", [train.data, test.data], labels)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes in so many dimensions (3 for images, 1 for labels), plain or gzipped."""
    header = 4 + 4 * dimensions
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as stream:
            head = stream.read(header)
            if len(head) < header or head[:4] != bytes((0, 0, 8, dimensions)):
                start = head[:4].hex() or "nothing"
                raise DataError(
                    f"{path} is not an idx file of bytes in {dimensions} dimensions: it starts with {start}"
                )
            shape = struct.unpack(f">{dimensions}I", head[4:])
            size = math.prod(shape)
            if not 0 < size <= _MAX_BYTES:
                what = " x ".join(map(str, shape))
                raise DataError(f"the header of {path} announces {what} bytes: damaged or foreign")
            data, rest = stream.read(size), stream.read(1)
    except FileNotFoundError:
        raise DataError(f"{path} not found: this file of Fashion-MNIST is needed") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if len(data) != size:
        raise DataError(f"{path} is truncated: {len(data):,} of {size:,} bytes: get it again")
    if rest:
        raise DataError(f"{path} goes on after its {size:,} bytes: damaged or foreign")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _find(folder: Path) -> dict[str, Path]:
    """The idx files of a folder, or of torchvision's folders in it."""
    found: dict[str, Path] = {}
    for inside in (folder, folder / "raw", folder / "FashionMNIST" / "raw"):
        for part in _PARTS:
            for name in (part, part + ".gz", part.replace("-idx", ".idx")):
                if (inside / name).is_file():
                    found.setdefault(part, inside / name)
    return found


def open_fashion_mnist(root: str | None = None, *, download: bool = True) -> ArrayImages:
    """Fashion-MNIST: the 60,000 training images first, then the 10,000 test images.

    ``root`` is a folder with the four idx files (plain or .gz; also torchvision's ``FashionMNIST/raw`` below it); default
    :data:`CACHE`, else
    Debian's package, else torchvision downloads them. They are read here, not by torchvision, with every length checked.
    """
    folder = (CACHE if root is None else Path(root)).expanduser()
    files = _find(folder)
    if root is None and len(files) < len(_PARTS) and len(_find(DEBIAN)) == len(_PARTS):
        folder, files = DEBIAN, _find(DEBIAN)
    # A folder with some of the files is the user's: report what is missing instead of mixing sources.
    if not files and download:
        from torchvision.datasets import FashionMNIST

        where = f"put {', '.join(_PARTS)} (or .gz) in {folder}, install Debian's dataset-fashion-mnist"
        with _download("fashion-mnist", f"{where}, or name their folder with --read root"):
            try:
                FashionMNIST(str(folder), train=True, download=True)
            except RuntimeError as error:  # torchvision's, of all its mirrors
                raise OSError(str(error)) from None
        files = _find(folder)
    lacking = [part for part in _PARTS if part not in files]
    if lacking:
        raise DataError(f"fashion-mnist: {', '.join(lacking)} (or .gz) not found in {folder}: put them there")
    images = [read_idx(files[part], 3) for part in _PARTS[::2]]
    targets = [read_idx(files[part], 1) for part in _PARTS[1::2]]
    for x, y, part, beside in zip(images, targets, _PARTS[::2], _PARTS[1::2], strict=True):
        if len(x) != len(y):
            raise DataError(f"{files[part]} has {len(x):,} images but {files[beside]} {len(y):,} labels")
        if x.shape[1] != x.shape[2] or x.shape[1] < MIN_SIDE or x.shape[1:] != images[0].shape[1:]:
            pixels = f"{x.shape[1]} x {x.shape[2]} pixels"
            raise DataError(f"{files[part]} holds images of {pixels}: 28 x 28 are expected")
        if int(y.max()) >= len(FASHION_CLASSES):
            raise DataError(f"{files[beside]} has the label {int(y.max())}: ten classes are expected")
    return _in_parts("fashion-mnist", images, Labels.from_ids(np.concatenate(targets), FASHION_CLASSES))
