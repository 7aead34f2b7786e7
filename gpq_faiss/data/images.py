"""From image files to arrays: safe decoding, square resizing, and image data sets in memory and on disk."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import DataError, UsageError, one_line
from ..files import fingerprint
from ..store import as_texts
from .base import About, BadItems, ImageDataset
from .ids import repeated_ids
from .labels import Labels, Rows, row_numbers

MAX_PIXELS = 64 * 1024 * 1024
"""Maximum pixels of an image, checked by its header before decoding."""
MIN_SIDE = 2
"""Minimum side in pixels; images of one pixel are placeholders of failed downloads."""
IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm")
)
"""File name extensions of images in folders and archives."""

# Only formats that Pillow decodes itself: EPS would start Ghostscript, PDF and WMF other external code.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_ORIENTATION = 0x0112
_SAMPLES, _SAMPLE = 4, 4096  # blocks of a file in a fingerprint, and their bytes
_PROBED = 64  # headers read to determine a common square size
_CHUNK = 8  # images per thread and step: small enough to balance a batch


class BrokenImageError(DataError):
    """An unusable image; :attr:`why` is the reason without the name."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.why = why


def shown(name: str) -> str:
    """``name`` for a one-line message: escaped if it contains line breaks or invalid UTF-8."""
    return name if name.isprintable() else ascii(name)


def is_image_name(name: str) -> bool:
    """Whether ``name`` is that of an image file, and not hidden (``._a.jpg`` in macOS archives)."""
    base = name.rsplit("/", 1)[-1]
    return not base.startswith(".") and os.path.splitext(base)[1].lower() in IMAGE_SUFFIXES


def _to_rgb(image: Image.Image, form: str | None) -> NDArray[np.uint8]:
    """uint8 [H, W, 3] of a loaded image in any mode. Raises ValueError: 32-bit modes, whose range of values is unknown."""
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and form in {"PNG", "PPM"}):
        # convert("RGB") would clip 16-bit grey at 255: scale it with rounding.
        grey = ((np.clip(np.asarray(image), 0, 65535).astype(np.uint32) + 128) // 257).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if mode in {"I", "F"}:
        raise ValueError("32-bit pixels have no fixed range: convert it to 8 or 16 bits")
    if "A" in mode or "a" in mode or "transparency" in image.info:
        # On white, as in a browser; dropping alpha would reveal hidden colours.
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba)
    return np.array(image.convert("RGB"), dtype=np.uint8)


def _upright(image: Image.Image) -> Image.Image:
    """A loaded image turned by its EXIF orientation; damaged EXIF data is ignored."""
    try:
        return ImageOps.exif_transpose(image) if image.getexif().get(_ORIENTATION, 1) != 1 else image
    except Exception:
        return image


def pillow_to_rgb(image: Image.Image, name: str = "image", max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """An opened Pillow image as upright uint8 [H, W, 3]. Raises BrokenImageError."""
    width, height = image.size
    try:
        if width * height > max_pixels:
            raise ValueError(f"{width} x {height} pixels are more than the {max_pixels:,} allowed")
        if min(width, height) < MIN_SIDE:
            raise ValueError(f"{width} x {height} pixels: at least {MIN_SIDE} x {MIN_SIDE} are needed")
        image.load()
        if image.size != (width, height):
            raise ValueError("its header and its pixels differ in size")
        return _to_rgb(_upright(image), image.format)
    except Exception as error:  # malformed bytes raise nearly all of them (SyntaxError, struct.error ...)
        raise BrokenImageError(name, f"cannot be decoded ({one_line(error)})") from None


def decode_image(
    source: bytes | str | os.PathLike[str], *, name: str | None = None, max_pixels: int = MAX_PIXELS
) -> NDArray[np.uint8]:
    """Decode an image to upright RGB.

    Applies EXIF orientation; converts grey (8 and 16 bits), palette and CMYK to RGB; puts transparency on white;
    takes the first frame of animations.

    Args:
        source: encoded bytes, or the path of a file.
        name: for errors (default: the path).
        max_pixels: maximum H * W, checked by the header before decoding.

    Returns:
        uint8 [H, W, 3], H and W at least 2.

    Raises:
        BrokenImageError: (a DataError) missing, not an image of a known format, truncated, too large (a
            decompression bomb), or with a side of one pixel.
    """
    if name is None:
        name = "image" if isinstance(source, bytes) else shown(os.fspath(source))
    try:
        with _opened(source) as image:
            return pillow_to_rgb(image, name, max_pixels)
    except BrokenImageError:
        raise
    except FileNotFoundError:
        raise BrokenImageError(name, "not found") from None
    except UnidentifiedImageError:
        raise BrokenImageError(name, "not an image, or of an unknown format") from None
    except Exception as error:
        raise BrokenImageError(name, f"cannot be decoded ({one_line(error)})") from None


def _opened(source: bytes | str | os.PathLike[str]) -> Image.Image:
    """An image whose header is read. A pipe or a device is refused: it may never end."""
    if isinstance(source, bytes):
        return Image.open(io.BytesIO(source), formats=_FORMATS)
    if not stat.S_ISREG(os.stat(source).st_mode):
        raise ValueError("not a regular file")
    return Image.open(source, formats=_FORMATS)


def resize_square(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Scale the shorter side of an image uint8 [H, W, 3] to ``size`` (bilinear, anti-aliased) and crop the centre.

    Resamples only the centre square, so that a 2 x 30,000,000 strip needs no more memory than its input. An image of that size is
    returned itself.
    """
    if size < 1:
        raise UsageError(f"image size {size} is not possible: at least 1 pixel")
    height, width = image.shape[:2]
    if height == size and width == size:
        return image
    side = min(height, width)
    left, top = (width - side) / 2, (height - side) / 2
    out = Image.fromarray(image).resize(
        (size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side)
    )
    return np.asarray(out, dtype=np.uint8)


def load_batch(
    dataset: ImageDataset, rows: NDArray[Any], size: int, pool: ThreadPoolExecutor | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Read, decode and resize the images at ``rows``; the result does not depend on the threads (Pillow releases the interpreter lock).

    Returns:
        (uint8 [n_ok, 3, size, size], ok bool [n]), without broken images, which the data set counts.
    """
    if isinstance(dataset, ArrayImages) and dataset.images.shape[1:3] == (size, size):
        return dataset.planes(rows), np.ones(len(rows), dtype=bool)
    out = np.empty((len(rows), 3, max(size, 0), max(size, 0)), dtype=np.uint8)
    ok = np.zeros(len(rows), dtype=bool)

    def work(start: int) -> None:
        for j, image in enumerate(dataset.read(rows[start : start + _CHUNK]), start):
            if image is not None:
                out[j] = resize_square(image, size).transpose(2, 0, 1)
                ok[j] = True

    for _ in (map if pool is None else pool.map)(work, range(0, len(rows), _CHUNK)):
        pass
    return (out if ok.all() else out[ok]), ok


@dataclass(kw_only=True)
class ArrayImages(ImageDataset):
    """Small images of one size held in memory: uint8 [N, H, W, 3], or [N, H, W] for grey (converted to RGB when read)."""

    images: NDArray[np.uint8] = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = self.images.shape
        if self.images.dtype != np.uint8 or len(shape) not in {3, 4} or (len(shape) == 4 and shape[3] != 3):
            what = f"is {self.images.dtype} {list(shape)}"
            raise DataError(
                f"{self.name} {what}: images are uint8 [N, H, W(, 3)], vectors are numbers [N, width]"
            )
        if shape[0] != len(self.ids):
            raise DataError(f"{self.name} has {shape[0]:,} images but {len(self.ids):,} ids")
        if shape[1] == shape[2]:
            self.native_size = shape[1]

    def read(self, rows: Rows) -> list[NDArray[np.uint8] | None]:
        """Images [H, W, 3]; never broken."""
        block = self.images[row_numbers(rows, len(self))]
        return list(np.repeat(block[..., None], 3, axis=3) if block.ndim == 3 else block)

    def planes(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The images at ``rows`` as network input: uint8 [n, 3, H, W], C-contiguous."""
        block = self.images[rows]
        if block.ndim == 3:
            return np.repeat(block[:, None], 3, axis=1)
        return np.ascontiguousarray(block.transpose(0, 3, 1, 2))


@dataclass(kw_only=True)
class FileImages(ImageDataset):
    """Images decoded at each read.

    Attributes:
        paths: N paths; with ``fetch``, their names in messages.
        fetch: row -> encoded bytes, a path, or pixels uint8 [H, W, 3], of images that are no files of their own (members of archives,
            in columns). It raises BrokenImageError for those that cannot be had.
    """

    paths: list[str] = field(repr=False)
    fetch: Callable[[int], bytes | str | NDArray[np.uint8]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.native_size is None:
            self.native_size = self._common_size()

    def _source(self, i: int) -> bytes | str | NDArray[np.uint8]:
        return self.paths[i] if self.fetch is None else self.fetch(i)

    def read(self, rows: Rows) -> list[NDArray[np.uint8] | None]:
        """Images [H, W, 3]; None for broken ones (counted in :attr:`bad`)."""
        out: list[NDArray[np.uint8] | None] = []
        for i in row_numbers(rows, len(self)).tolist():
            try:
                source = self._source(i)
                out.append(source if isinstance(source, np.ndarray) else decode_image(source))
            except BrokenImageError as error:
                self.bad.add(i, shown(self.paths[i]), error.why)
                out.append(None)
        return out

    def image_path(self, i: int) -> str | None:
        """Path of image ``i``, if it is a file."""
        return self.paths[i] if self.fetch is None else None

    def _common_size(self) -> int | None:
        """Side of all images if 64 evenly spaced ones are squares of one size, else None.

        Only a default for the input size of a network; every image is resized to that.
        """
        sides: set[tuple[int, ...]] = set()
        for i in np.unique(np.linspace(0, len(self) - 1, num=min(_PROBED, len(self))).astype(np.int64)):
            try:
                source = self._source(int(i))
                if isinstance(source, np.ndarray):
                    sides.add(source.shape[1::-1])
                else:
                    with _opened(source) as image:
                        sides.add(image.size)
            except Exception:  # noqa: S112  (whether it is broken is for read() to find and count)
                continue
        width, height = sides.pop() if len(sides) == 1 else (0, 0)
        return width if width == height and width >= MIN_SIDE else None


def array_fingerprint(kind: str, images: NDArray[np.uint8], labels: Labels, ids: NDArray[np.int64]) -> str:
    """Hash over pixels, labels and ids of a data set in memory."""
    pixels = hashlib.sha256(np.ascontiguousarray(images)).hexdigest()  # type: ignore[arg-type]
    return fingerprint(kind, str(images.shape), pixels, labels.fingerprint(), ids.tobytes())


def sampled_content(pieces: Iterable[tuple[str, int, int]]) -> str:
    """Hash over N files, or members of archives (path, offset, size): all of it up to 16 KiB, else four evenly spaced blocks of 4 KiB.

    All bytes would be 20 GB for NUS-WIDE. Unreadable files (size -1) are left out: reading reports them."""
    digest = hashlib.sha256()
    readable = (piece for piece in pieces if piece[2] >= 0)
    for path, inside in itertools.groupby(readable, key=lambda piece: piece[0]):
        try:
            with open(path, "rb", buffering=0) as file:
                for _, start, size in inside:
                    whole = size <= _SAMPLES * _SAMPLE
                    for i in range(1 if whole else _SAMPLES):
                        file.seek(start + i * (size - _SAMPLE) // (_SAMPLES - 1) if i else start)
                        digest.update(file.read(size if whole else _SAMPLE))
        except OSError:
            continue
    return digest.hexdigest()


def file_images(  # noqa: PLR0913
    name: str,
    kind: str,
    names: Sequence[str],
    sizes: Sequence[int],
    content: str,
    about: About,
    paths: Sequence[str],
    max_bad: float,
    fetch: Callable[[int], bytes | str | NDArray[np.uint8]] | None = None,
) -> FileImages:
    """A data set of N images. Its fingerprint covers ``kind`` (the source), names, sizes, labels, ids and ``content`` (a hash as of
    :func:`sampled_content`), not times: a copy elsewhere has the same. A column ``name`` of ``about`` replaces ``names`` in results."""
    ids = np.arange(len(names), dtype=np.int64) if about.ids is None else about.ids
    joined = b"\0".join(os.fsencode(one) for one in names)
    mark = "" if about.labels is None else about.labels.fingerprint()
    lengths = np.array(sizes, dtype="<i8").tobytes()
    return FileImages(
        name=name,
        ids=ids,
        labels=about.labels,
        fingerprint=fingerprint(kind, joined, lengths, mark, ids.tobytes(), content),
        notes=about.notes + repeated_ids(ids),
        texts={"name": as_texts(names)} | about.texts,
        paths=list(paths),
        bad=BadItems(len(names), max_bad),
        fetch=fetch,
    )


def listed_images(
    name: str,
    names: Sequence[str],
    paths: Sequence[str],
    about: About,
    max_bad: float = 0.01,
    kind: str = "image files",
) -> FileImages:
    """A data set of files, as :func:`file_images`. Missing ones are bad images."""
    paths = [str(Path(path)) for path in paths]
    sizes = [file_size(path) for path in paths]
    content = sampled_content((path, 0, size) for path, size in zip(paths, sizes, strict=True))
    made = file_images(name, kind, names, sizes, content, about, paths, max_bad)
    try:
        for i in (i for i, size in enumerate(sizes) if size < 0):
            made.bad.add(i, shown(paths[i]), "not found")
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    return made


def file_size(path: str) -> int:
    """Bytes of a regular file, -1 for anything else: a pipe or a device would block or never end."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a NUL byte in the name
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1
