"""From image files to arrays: safe decoding, square resizing, and the two kinds of image sets (in memory, on
disk)."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
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
"""Larger images (by their header) are refused before any of their pixels is decoded."""

MIN_SIDE = 2
"""A one-pixel side has no content that a network could look at; such files are placeholders of failed
downloads."""

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm")
)
"""What counts as an image by its name when a folder or an archive is searched."""

# Only formats that Pillow decodes by itself: EPS would start Ghostscript, PDF and WMF other outside code.
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

_PROBED = 64  # headers read to find out whether all images have one square size
_CHUNK = 8  # images that a thread decodes at a time: small enough to share a batch evenly


class BrokenImageError(DataError):
    """One image that cannot be used; :attr:`why` is the reason without the name."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.why = why


def shown(name: str) -> str:
    """``name`` for a one-line message: escaped where it holds line breaks or bytes that are not UTF-8."""
    return name if name.isprintable() else ascii(name)


def is_image_name(name: str) -> bool:
    """Whether ``name`` looks like an image file and not like a hidden one (``._a.jpg`` of macOS archives)."""
    base = name.rsplit("/", 1)[-1]
    return not base.startswith(".") and os.path.splitext(base)[1].lower() in IMAGE_SUFFIXES


def _to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    """uint8 [H, W, 3] of a loaded image in any mode.

    Raises:
        ValueError: 32-bit modes, whose range of values is anybody's guess.
    """
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format in {"PNG", "PPM"}):
        # convert("RGB") would clip 16-bit grey at 255, which makes nearly everything white: scale it,
        # rounding.
        wide = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        grey = ((wide + 128) // 257).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if mode in {"I", "F"}:
        raise ValueError("32-bit pixels have no fixed range: convert it to 8 or 16 bits")
    if "A" in mode or "a" in mode or "transparency" in image.info:
        # Over white, as a browser shows it; dropping alpha would uncover whatever colour lies under it.
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba)
    return np.array(image.convert("RGB"), dtype=np.uint8)


def pillow_to_rgb(image: Image.Image, name: str = "image") -> NDArray[np.uint8]:
    """Upright uint8 [H, W, 3] of an image that Pillow has opened.

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
    """EXIF orientation 1 .. 8; damaged EXIF data is no reason to lose the image."""
    try:
        value = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def decode_image(
    source: bytes | str | os.PathLike[str], *, name: str | None = None, max_pixels: int = MAX_PIXELS
) -> NDArray[np.uint8]:
    """Decode an image to upright RGB.

    EXIF orientation is applied; grey (8 and 16 bits), palette and CMYK become RGB; transparency is laid over
    white; of an animation the first frame is taken.

    Args:
        source: encoded bytes, or the path of a file.
        name: for the error; the path by default.
        max_pixels: H * W allowed, checked against the header before decoding.

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
            # Decoders meet hostile bytes with nearly every exception there is (SyntaxError, struct.error,
            # ...).
            why = " ".join(str(error).split()) or type(error).__name__
            raise BrokenImageError(name, f"cannot be decoded ({why[:200]})") from None


def resize_square(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Scale the shorter side to ``size`` (bilinear, anti-aliased) and cut out the centre.

    The centre square is resampled directly, so that a 2 x 30,000,000 strip costs no more than its input.

    Args:
        image: uint8 [H, W, 3].
        size: side in pixels.

    Returns:
        uint8 [size, size, 3]; ``image`` itself where it has that shape already.

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
        dataset: where they come from; it counts broken ones.
        rows: positions, integers [n].
        size: side in pixels.
        pool: threads that share the work (Pillow decodes without the interpreter lock); None does it here.

    Returns:
        (uint8 [n_ok, 3, size, size], ok bool [n]): broken images are not in the array.

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
    """Positions in 0 .. n-1 that ``rows`` (slice, integers or mask) names.

    Raises:
        IndexError: a position outside.
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
        images: uint8 [N, H, W, 3], or [N, H, W] for grey (made RGB when read, a third of the memory until
            then).
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
        """Images [H, W, 3]; none is ever broken."""
        out: list[NDArray[np.uint8] | None] = []
        for i in positions_of(rows, len(self)):
            image = self.images[i]
            out.append(np.repeat(image[:, :, None], 3, axis=2) if image.ndim == 2 else image)
        return out

    def planes(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The images at ``rows`` as the network takes them: uint8 [n, 3, H, W], C-contiguous."""
        block = self.images[rows]
        if block.ndim == 3:
            return np.repeat(block[:, None], 3, axis=1)
        return np.ascontiguousarray(block.transpose(0, 3, 1, 2))


@dataclass(kw_only=True)
class FileImages(ImageDataset):
    """Images that are decoded from their files at each read.

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
        """Images [H, W, 3], None where one is broken (counted in :attr:`bad`).

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
        """Side of all images if they look like squares of one size, by the headers of 64 spread evenly.

        It is only a proposal for the input size of a network: every image is resized to that anyway.
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
    """Hash over the pixels, the labels and the ids of a set in memory."""
    pixels = hashlib.sha256(np.ascontiguousarray(images)).hexdigest()  # type: ignore[arg-type]
    return fingerprint(kind, str(images.shape), pixels, labels.fingerprint(), ids.tobytes())


def list_fingerprint(
    kind: str,
    names: Sequence[str],
    sizes: NDArray[np.int64],
    labels: Labels | None,
    ids: NDArray[np.int64],
    *,
    content: str = "",
) -> str:
    """Hash over names relative to the data's root, file sizes, labels and ids.

    The bytes of the images are not read (for NUS-WIDE that would be 20 GB) and neither are times, so a copy
    of the data elsewhere has the same fingerprint.
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
    """Refuse a limit that is no fraction.

    Raises:
        UsageError: outside 0 .. 1.
    """
    if not 0 <= max_bad <= 1:
        raise UsageError(
            f"--max-unreadable {max_bad} is no fraction: give 0 (none may be bad) to 1 (all may)"
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
    """A data set of the files that some list names; those that do not exist are counted and left out.

    ``max_bad`` limits twice: the share of missing files here, and the share of broken ones among the rest
    when read.

    Args:
        name: of the data set, as the user gave it.
        names: N names as the list has them, for the messages and the fingerprint.
        paths: N paths to open.
        labels, ids, official: of all N; ids stay what they are when others are left out.
        notes: of the caller; missing files are added.
        texts: further columns of N texts; ``names`` are the column ``name``.
        max_bad: fraction allowed, 0 .. 1.

    Raises:
        DataError: no image at all, or more than ``max_bad`` missing (names the first three).
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
        raise DataError(f"{name} lists no image")
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
    return FileImages(
        name=name,
        ids=kept_ids,
        labels=kept_labels,
        official=None if official is None else official[kept],
        fingerprint=list_fingerprint(
            "image files", [names[int(i)] for i in kept], sizes[kept], kept_labels, kept_ids
        ),
        notes=said,
        texts={
            column: as_texts(values[int(i)] for i in kept)
            for column, values in {**(texts or {}), "name": names}.items()
        },
        paths=[os.fspath(Path(paths[int(i)])) for i in kept],
        bad=BadItems(len(kept), max_bad),
    )
