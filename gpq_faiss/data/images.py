"""From image files to arrays: safe decoding, square resizing, and image data sets in memory and on disk."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ..errors import DataError, UsageError
from ..files import fingerprint
from ..store import as_texts
from .base import BadItems, ImageDataset
from .labels import Labels, Rows

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

_EXIF_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_EIGHT_BITS = ((np.arange(1 << 16) + 128) // 257).astype(np.uint8)
"""16-bit grey to 8 bits, rounded."""

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


def _to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    """uint8 [H, W, 3] of a loaded image in any mode.

    Raises:
        ValueError: 32-bit modes, whose range of values is unknown.
    """
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format in {"PNG", "PPM"}):
        # convert("RGB") would clip 16-bit grey at 255: scale it with rounding.
        grey = _EIGHT_BITS[np.clip(np.asarray(image), 0, 65535)]
        return np.repeat(grey[:, :, None], 3, axis=2)
    if mode in {"I", "F"}:
        raise ValueError("32-bit pixels have no fixed range: convert it to 8 or 16 bits")
    if "A" in mode or "a" in mode or "transparency" in image.info:
        # On white, as in a browser; dropping alpha would reveal hidden colours.
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba)
    return np.array(image.convert("RGB"), dtype=np.uint8)


def pillow_to_rgb(image: Image.Image, name: str = "image") -> NDArray[np.uint8]:
    """An opened Pillow image as upright uint8 [H, W, 3].

    Raises:
        BrokenImageError: too large, with a side of one pixel, or it cannot be decoded.
    """
    if image.width * image.height > MAX_PIXELS or min(image.size) < MIN_SIDE:
        raise BrokenImageError(
            name,
            f"{image.width} x {image.height} pixels: {MIN_SIDE} x {MIN_SIDE} to {MAX_PIXELS:,} are needed",
        )
    turn = _UPRIGHT.get(_orientation(image))
    try:
        image.load()
        upright = image if turn is None else image.transpose(turn)
        upright.format = image.format
        return _to_rgb(upright)
    except Exception as error:  # as in decode_image
        raise BrokenImageError(name, f"cannot be decoded ({' '.join(str(error).split())[:200]})") from None


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1 .. 8; damaged EXIF data is ignored."""
    try:
        value = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


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
        stream = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")  # noqa: SIM115
    except OSError as error:
        raise BrokenImageError(
            name, "not found" if isinstance(error, FileNotFoundError) else str(error.strerror)
        ) from None
    with stream:
        try:
            with Image.open(stream, formats=_FORMATS) as image:
                width, height = image.size
                if width * height > max_pixels:
                    raise BrokenImageError(
                        name, f"{width} x {height} pixels are more than the {max_pixels:,} allowed"
                    )
                if min(width, height) < MIN_SIDE:
                    raise BrokenImageError(
                        name, f"{width} x {height} pixels: at least {MIN_SIDE} x {MIN_SIDE} are needed"
                    )
                turn = _UPRIGHT.get(_orientation(image))
                image.load()
                if (image.width, image.height) != (width, height):
                    raise BrokenImageError(name, "its header and its pixels differ in size")
                format_ = image.format
                upright = image if turn is None else image.transpose(turn)
                upright.format = format_
                return _to_rgb(upright)
        except BrokenImageError:
            raise
        except UnidentifiedImageError:
            raise BrokenImageError(name, "not an image, or of an unknown format") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise BrokenImageError(name, f"more pixels than the {max_pixels:,} allowed") from None
        except MemoryError:
            raise BrokenImageError(name, "too large for the memory of this machine") from None
        except Exception as error:
            # Decoders raise nearly any exception for malformed bytes (SyntaxError, struct.error, ...).
            why = " ".join(str(error).split()) or type(error).__name__
            raise BrokenImageError(name, f"cannot be decoded ({why[:200]})") from None


def resize_square(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Scale the shorter side to ``size`` (bilinear, anti-aliased) and crop the centre.

    Resamples only the centre square, so that a 2 x 30,000,000 strip needs no more memory than its input.

    Args:
        image: uint8 [H, W, 3].
        size: side in pixels.

    Returns:
        uint8 [size, size, 3]; ``image`` itself if it has that shape.

    Raises:
        UsageError: ``size`` below 1.
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
    dataset: ImageDataset,
    rows: NDArray[Any] | Sequence[int],
    size: int,
    pool: ThreadPoolExecutor | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Read, decode and resize the images at ``rows``; the result does not depend on the threads.

    Args:
        dataset: their data set, which counts broken ones.
        rows: row numbers, integers [n].
        size: side in pixels.
        pool: threads (Pillow releases the interpreter lock); None: the calling thread.

    Returns:
        (uint8 [n_ok, 3, size, size], ok bool [n]), without broken images.

    Raises:
        DataError: more images are broken than the data set's limit allows.
        UsageError: ``size`` below 1.
    """
    positions = np.asarray(rows, dtype=np.int64)
    if isinstance(dataset, ArrayImages) and dataset.images.shape[1:3] == (size, size):
        return dataset.planes(positions), np.ones(len(positions), dtype=bool)
    out = np.empty((len(positions), 3, max(size, 0), max(size, 0)), dtype=np.uint8)
    ok = np.zeros(len(positions), dtype=bool)

    def work(start: int) -> None:
        for j, image in enumerate(dataset.read(positions[start : start + _CHUNK]), start):
            if image is not None:
                out[j] = resize_square(image, size).transpose(2, 0, 1)
                ok[j] = True

    starts = range(0, len(positions), _CHUNK)
    if pool is None or len(starts) < 2:
        for start in starts:
            work(start)
    else:
        futures: list[Future[None]] = [pool.submit(work, start) for start in starts]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
    return (out if ok.all() else out[ok]), ok


def positions_of(rows: Rows, n: int) -> Iterator[int]:
    """``rows`` (slice, integers or mask) as row numbers in 0 .. n-1.

    Raises:
        IndexError: out of range.
    """
    if isinstance(rows, slice):
        yield from range(*rows.indices(n))
        return
    array = np.asarray(rows)
    if array.dtype == np.bool_:
        array = np.flatnonzero(array)
    for position in array:
        i = int(position)
        if not -n <= i < n:
            raise IndexError(f"row {i} of {n}")
        yield i % n


@dataclass(kw_only=True)
class ArrayImages(ImageDataset):
    """Small images of one size held in memory.

    Attributes:
        images: uint8 [N, H, W, 3], or [N, H, W] for grey (converted to RGB when read).
    """

    images: NDArray[np.uint8] = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = self.images.shape
        if self.images.dtype != np.uint8 or len(shape) not in {3, 4} or (len(shape) == 4 and shape[3] != 3):
            raise DataError(
                f"{self.name}: images are {self.images.dtype} {list(shape)}, uint8 [N, H, W(, 3)] is needed"
            )
        if shape[0] != len(self.ids):
            raise DataError(f"{self.name} has {shape[0]:,} images but {len(self.ids):,} ids")
        if shape[1] == shape[2]:
            self.native_size = shape[1]

    def read(self, rows: Rows) -> list[NDArray[np.uint8] | None]:
        """Images [H, W, 3]; never broken."""
        out: list[NDArray[np.uint8] | None] = []
        for i in positions_of(rows, len(self)):
            image = self.images[i]
            out.append(np.repeat(image[:, :, None], 3, axis=2) if image.ndim == 2 else image)
        return out

    def planes(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The images at ``rows`` as network input: uint8 [n, 3, H, W], C-contiguous."""
        block = self.images[rows]
        if block.ndim == 3:
            return np.repeat(block[:, None], 3, axis=1)
        return np.ascontiguousarray(block.transpose(0, 3, 1, 2))


@dataclass(kw_only=True)
class FileImages(ImageDataset):
    """Images decoded from files at each read.

    Attributes:
        paths: N paths.
    """

    paths: list[str] = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.native_size is None:
            self.native_size = self._common_size()

    def source(self, i: int) -> bytes | str:
        """What to decode for image ``i``: its path, or its encoded bytes."""
        return self.paths[i]

    def item_name(self, i: int) -> str:
        """Name of image ``i`` in messages."""
        return shown(self.paths[i])

    def read(self, rows: Rows) -> list[NDArray[np.uint8] | None]:
        """Images [H, W, 3]; None for broken ones (counted in :attr:`bad`).

        Raises:
            DataError: too many are broken.
        """
        out: list[NDArray[np.uint8] | None] = []
        for i in positions_of(rows, len(self)):
            name = self.item_name(i)
            try:
                out.append(decode_image(self.source(i), name=name))
            except BrokenImageError as error:
                self.bad.add(i, name, error.why)
                out.append(None)
        return out

    def image_path(self, i: int) -> str | None:
        """Path of image ``i``."""
        return self.paths[i]

    def _common_size(self) -> int | None:
        """Side of all images if 64 evenly spaced ones are squares of one size, else None.

        Only a default for the input size of a network; every image is resized to that.
        """
        sides: set[tuple[int, int]] = set()
        for i in np.unique(np.linspace(0, len(self) - 1, num=min(_PROBED, len(self))).astype(np.int64)):
            try:
                source = self.source(int(i))
                with Image.open(
                    io.BytesIO(source) if isinstance(source, bytes) else source, formats=_FORMATS
                ) as image:
                    sides.add(image.size)
            except Exception:  # noqa: S112  (whether it is broken is for read() to find and count)
                continue
            if len(sides) > 1:
                return None
        if len(sides) != 1:
            return None
        width, height = sides.pop()
        return width if width == height and width >= MIN_SIDE else None


def array_fingerprint(kind: str, images: NDArray[np.uint8], labels: Labels, ids: NDArray[np.int64]) -> str:
    """Hash over pixels, labels and ids of a data set in memory."""
    pixels = hashlib.sha256(np.ascontiguousarray(images)).hexdigest()  # type: ignore[arg-type]
    return fingerprint(kind, str(images.shape), pixels, labels.fingerprint(), ids.tobytes())


def sampled_content(pieces: Iterable[tuple[str, int, int]]) -> str:
    """Hash over N files, or members of archives, each a path, an offset and a size: all of it up to 16 KiB, else four blocks of 4 KiB,
    evenly spaced from its start to its end.

    All bytes would be 20 GB for NUS-WIDE. Unreadable files are left out: reading reports them.
    """
    digest = hashlib.sha256()
    for path, inside in itertools.groupby(pieces, key=lambda piece: piece[0]):
        try:
            with open(path, "rb", buffering=0) as file:
                for _, start, size in inside:
                    whole = size <= _SAMPLES * _SAMPLE
                    for i in range(1 if whole else _SAMPLES):
                        file.seek(start + i * (size - _SAMPLE) // (_SAMPLES - 1) if i else start)
                        digest.update(file.read(max(0, size) if whole else _SAMPLE))
        except (OSError, ValueError):  # ValueError: a NUL byte in the name
            continue
    return digest.hexdigest()


def list_fingerprint(
    kind: str,
    names: Sequence[str],
    sizes: NDArray[np.int64],
    labels: Labels | None,
    ids: NDArray[np.int64],
    *,
    content: str,
) -> str:
    """Hash over names relative to the data's root, file sizes, labels, ids and ``content``, a hash as of :func:`sampled_content`.

    Times are not included, so a copy elsewhere has the same fingerprint.
    """
    joined = b"\0".join(os.fsencode(name) for name in names)
    return fingerprint(
        kind,
        joined,
        sizes.astype("<i8").tobytes(),
        labels.fingerprint() if labels else "",
        ids.tobytes(),
        content,
    )


def check_max_bad(max_bad: float) -> None:
    """Raises UsageError: ``max_bad`` outside 0 .. 1."""
    if not 0 <= max_bad <= 1:
        raise UsageError(
            f"--max-unreadable {max_bad}: give a fraction from 0 (none may be bad) to 1 (all may)"
        )


def listed_images(  # noqa: PLR0913
    name: str,
    names: Sequence[str],
    paths: Sequence[str],
    *,
    labels: Labels | None,
    ids: NDArray[np.int64],
    official: NDArray[np.uint8] | None = None,
    notes: Sequence[str] = (),
    texts: Mapping[str, Sequence[str]] | None = None,
    max_bad: float = 0.01,
) -> FileImages:
    """A data set of listed files; missing ones are counted and left out.

    ``max_bad`` limits the fraction of missing files here, and of broken ones among the others when read.

    Args:
        name: of the data set, as the user gave it.
        names: N names as listed, for messages and the fingerprint.
        paths: N paths to open.
        labels, ids, official: of all N; ids are unaffected by missing files.
        notes: of the caller; one on missing files is added.
        texts: further columns of N texts; without a column ``name``, that is ``names``.
        max_bad: allowed fraction, 0 .. 1.

    Raises:
        DataError: no images, or more than ``max_bad`` missing (names the first three).
        UsageError: ``max_bad`` out of range.
    """
    check_max_bad(max_bad)
    sizes = np.full(len(paths), -1, dtype=np.int64)
    for i, path in enumerate(paths):
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: a NUL byte in the name
            continue
        # A pipe or a device would block or never end.
        if stat.S_ISREG(status.st_mode):
            sizes[i] = status.st_size
    missing = np.flatnonzero(sizes < 0)
    if not len(paths):
        raise DataError(f"{name} lists no images")
    said = list(notes)
    if len(missing):
        first = ", ".join(shown(paths[int(i)]) for i in missing[:3]) + (", ..." if len(missing) > 3 else "")
        what = f"{len(missing):,} of {len(paths):,} images missing"
        if len(missing) > max_bad * len(paths) or len(missing) == len(paths):
            raise DataError(
                f"{name}: {what} ({first}), above the limit of {100 * max_bad:g} %: "
                "check --root and the files, or raise --max-unreadable"
            )
        said.append(f"{what}, left out ({first})")
    kept = np.flatnonzero(sizes >= 0)
    kept_labels = labels.take(kept) if labels is not None else None
    kept_ids = np.ascontiguousarray(ids[kept])
    content = sampled_content((os.fspath(paths[i]), 0, int(sizes[i])) for i in kept.tolist())
    return FileImages(
        name=name,
        ids=kept_ids,
        labels=kept_labels,
        official=None if official is None else official[kept],
        fingerprint=list_fingerprint(
            "image files", [names[int(i)] for i in kept], sizes[kept], kept_labels, kept_ids, content=content
        ),
        notes=said,
        texts={
            column: as_texts(values[int(i)] for i in kept)
            for column, values in {"name": names, **(texts or {})}.items()
        },
        paths=[os.fspath(Path(paths[int(i)])) for i in kept],
        bad=BadItems(len(kept), max_bad),
    )
