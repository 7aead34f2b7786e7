"""``fashion-mnist``: 70,000 grey 28 x 28 images from idx files, local or downloaded by torchvision."""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .cifar10 import CACHE, network_timeout
from .images import MIN_SIDE, ArrayImages, array_fingerprint
from .labels import Labels

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist."""

_PARTS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_MAX_BYTES = 1 << 30  # of one file, unpacked; the real ones have 47 MB


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else path.open("rb")


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, plain or gzipped (recognised by its first bytes, not by its name).

    Args:
        path: the file.
        dimensions: required number (3 for images, 1 for labels).

    Returns:
        uint8 array of the shape in its header.

    Raises:
        DataError: missing, not idx, of another type or number of dimensions, empty, too large,
            truncated, with trailing bytes, or damaged gzip data.
    """
    header = 4 + 4 * dimensions
    try:
        with _open(path) as stream:
            head = stream.read(header)
            if len(head) < header or head[:4] != bytes((0, 0, 8, dimensions)):
                raise DataError(
                    f"{path} is not an idx file of bytes in {dimensions} dimension{'s' * (dimensions > 1)}: "
                    f"it starts with {head[:4].hex() or 'nothing'}"
                )
            shape = struct.unpack(f">{dimensions}I", head[4:])
            size = math.prod(shape)
            if not 0 < size <= _MAX_BYTES:
                raise DataError(
                    f"the header of {path} announces {' x '.join(map(str, shape))} bytes: damaged or foreign"
                )
            data = stream.read(size)
            rest = stream.read(1)
    except FileNotFoundError:
        raise DataError(f"{path} not found: this file of Fashion-MNIST is needed") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if len(data) != size:
        raise DataError(f"{path} is truncated: {len(data):,} of {size:,} bytes: get it again")
    if rest:
        raise DataError(f"{path} goes on after its {size:,} bytes: damaged or foreign")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _find(folder: Path, part: str) -> Path | None:
    for inside in (folder, folder / "raw", folder / "FashionMNIST" / "raw"):
        for name in (part, part + ".gz", part.replace("-idx", ".idx")):
            if (inside / name).is_file():
                return inside / name
    return None


def _find_all(folder: Path) -> dict[str, Path]:
    found = {part: _find(folder, part) for part in _PARTS}
    return {part: path for part, path in found.items() if path is not None}


def _download(folder: Path) -> None:
    from torchvision.datasets import FashionMNIST

    try:
        with network_timeout():
            FashionMNIST(str(folder), train=True, download=True)
    except (OSError, RuntimeError) as error:
        why = getattr(error, "reason", None) or error
        raise DataError(
            f"fashion-mnist is not available ({' '.join(str(why).split())}): "
            f"put {', '.join(_PARTS)} (or .gz) in {folder}, "
            "install Debian's dataset-fashion-mnist, or name their folder with --root"
        ) from None


def open_fashion_mnist(root: str | None = None, *, download: bool = True) -> ArrayImages:
    """Fashion-MNIST: the 60,000 training images first, then the 10,000 test images.

    Without ``root`` the files are taken from ``~/.cache/gpq-faiss``, else from Debian's package, else
    downloaded by torchvision. They are read here, not by torchvision, with every length checked.

    Args:
        root: folder with the four idx files (plain or .gz; also torchvision's ``FashionMNIST/raw`` below it).
        download: download them if missing.

    Returns:
        The data set, ``official`` marking train (0) and test (1); ids are row numbers.

    Raises:
        DataError: not found and not downloadable, damaged, or inconsistent images and labels.
    """
    folder = Path(root).expanduser() if root is not None else CACHE.expanduser()
    files = _find_all(folder)
    if root is None and len(files) < len(_PARTS) and len(_find_all(DEBIAN)) == len(_PARTS):
        folder, files = DEBIAN, _find_all(DEBIAN)
    if len(files) < len(_PARTS) and download:
        if files:
            # A folder with some of the files is the user's: report what is missing instead of mixing sources.
            download = False
        else:
            _download(folder)
            files = _find_all(folder)
    lacking = [part for part in _PARTS if part not in files]
    if lacking:
        raise DataError(f"fashion-mnist: {', '.join(lacking)} (or .gz) not found in {folder}: put them there")
    images, targets = [], []
    for x_part, y_part in (_PARTS[:2], _PARTS[2:]):
        x, y = read_idx(files[x_part], 3), read_idx(files[y_part], 1)
        if len(x) != len(y):
            raise DataError(f"{files[x_part]} has {len(x):,} images but {files[y_part]} {len(y):,} labels")
        if x.shape[1] != x.shape[2] or x.shape[1] < MIN_SIDE:
            raise DataError(
                f"{files[x_part]} holds images of {x.shape[1]} x {x.shape[2]} pixels: 28 x 28 are expected"
            )
        if int(y.max()) >= len(CLASSES):
            raise DataError(
                f"{files[y_part]} has the label {int(y.max())}: {len(CLASSES)} classes are expected"
            )
        images.append(x)
        targets.append(y)
    if images[0].shape[1:] != images[1].shape[1:]:
        raise DataError(f"{folder}: train and test images differ in size")
    pixels = np.concatenate(images)
    labels = Labels.from_ids(np.concatenate(targets), CLASSES)
    official = np.repeat(np.array([0, 1], dtype=np.uint8), [len(images[0]), len(images[1])])
    ids = np.arange(len(pixels), dtype=np.int64)
    return ArrayImages(
        name="fashion-mnist",
        images=pixels,
        ids=ids,
        labels=labels,
        official=official,
        fingerprint=array_fingerprint("fashion-mnist", pixels, labels, ids),
    )
