"""Read features and codes files, with checks before the first row."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, MismatchError, UsageError
from ..inputs import check_memory, parse_json
from .foreign import dataset, open_hdf5
from .header import FORMAT_VERSION, Header, Kind
from .texts import TextColumn, Texts, text_columns

_MAX_CODEBOOK_BYTES = 64 << 20
_WHAT = "a features or codes file made by 'gpq encode'"


class RowReader:
    """Reader of a complete features or codes file, in blocks; a context manager.

    Args:
        path: the file.
        kind: required kind, ``features`` or ``codes``.
        model_fingerprint: required model.

    Attributes:
        header: metadata of the file.
        ntotal: N, the number of rows.
        versions: of the packages that wrote it.

    Raises:
        DataError: missing, empty, truncated, of another format or inconsistent.
        MismatchError: of another kind or another model.
    """

    def __init__(
        self, path: str | Path, *, kind: Kind | None = None, model_fingerprint: str | None = None
    ) -> None:
        self.path = Path(path)
        self._stack = contextlib.ExitStack()
        try:
            self._h5 = self._stack.enter_context(open_hdf5(self.path, _WHAT))
            with self._guard():
                self._check()
            if kind is not None and self.header.kind != kind:
                raise MismatchError(f"{self.path} holds {self.header.kind}, but {kind} are needed")
            if model_fingerprint is not None and self.header.model_fingerprint != model_fingerprint:
                raise MismatchError(
                    f"{self.path} is of model {self.header.model_fingerprint}, not {model_fingerprint}: "
                    "encode the data again with this model"
                )
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Context that turns h5py's errors for damaged bytes into one line."""
        try:
            yield
        except DataError as error:
            text = str(error)
            raise DataError(text if str(self.path) in text else f"{self.path}: {text}") from error
        except MemoryError:
            raise DataError(f"{self.path} does not fit in memory: use a machine with more") from None
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError) as error:
            why = " ".join(str(error).split())[:120]
            raise DataError(f"{self.path} is truncated or damaged ({why}): encode the data again") from error

    def _text(self, name: str) -> str:
        value = self._h5.attrs.get(name)
        if isinstance(value, bytes):
            value = value.decode()
        if not isinstance(value, str):
            raise DataError(f"{self.path} has no attribute {name!r}: {_WHAT} is needed")
        return value

    def _json(self, name: str, kind: type) -> Any:
        value = parse_json(self._text(name))
        if not isinstance(value, kind):
            raise DataError(f"{self.path}: attribute {name!r} is not a JSON {kind.__name__}")
        return value

    def _check(self) -> None:
        attrs = self._h5.attrs
        kind = self._text("kind")
        version = int(attrs["format_version"]) if "format_version" in attrs else -1
        if kind not in ("features", "codes") or not bool(attrs.get("complete", False)):
            raise DataError(f"{self.path} is not {_WHAT}, or it is incomplete")
        if version != FORMAT_VERSION:
            raise DataError(f"{self.path} has format {version}, not {FORMAT_VERSION}: encode the data again")
        stored = dataset(self._h5, "codebooks", self.path)
        if stored.dtype != np.float32 or stored.ndim != 3 or stored.size * 4 > _MAX_CODEBOOK_BYTES:
            raise DataError(f"codebooks are {stored.dtype} {list(stored.shape)}: damaged or foreign")
        names = self._json("class_names", list)
        main = dataset(self._h5, kind, self.path)
        self.header = Header(
            kind=kind,  # type: ignore[arg-type]  # one of the two, checked above
            width=int(main.shape[1]) if main.ndim == 2 else 0,
            model_fingerprint=self._text("model_fingerprint"),
            codebooks=np.asarray(stored[()], dtype=np.float32),
            data_fingerprint=self._text("data_fingerprint"),
            class_names=tuple(str(name) for name in names),
            multi_label=bool(attrs["multi_label"]),
            extra=self._json("extra", dict),
        )
        if self.header.codebooks_fingerprint != self._text("codebooks_fingerprint"):
            raise DataError("its codebooks have changed since it was written: it is damaged")
        if self.header.fingerprint() != self._text("header_fingerprint"):
            raise DataError("its metadata have changed since it was written: it is damaged")
        self.versions: dict[str, str] = self._json("versions", dict)
        self.ntotal = int(attrs["ntotal"])
        self._columns: dict[str, Any] = {}
        for name, (dtype, width) in self.header.columns().items():
            column = dataset(self._h5, name, self.path)
            shape = (self.ntotal, width) if width else (self.ntotal,)
            if column.dtype != dtype or tuple(column.shape) != shape or self.ntotal < 1:
                raise DataError(
                    f"{name!r} is {column.dtype} {list(column.shape)}, not {dtype} {list(shape)}: damaged"
                )
            # HDF5 reads missing chunks as zeros, undetected by checksums.
            chunks = math.prod(-(-n // size) for n, size in zip(shape, column.chunks or shape, strict=True))
            if column.chunks and column.id.get_num_chunks() != chunks:
                raise DataError(f"{name!r} lacks some of its {chunks:,} chunks: damaged")
            self._columns[name] = column
        self._texts = {
            name: TextColumn(self._h5, name, self.ntotal, self.path) for name in text_columns(self._h5)
        }

    def _span(self, start: int, stop: int | None) -> tuple[int, int]:
        stop = self.ntotal if stop is None else stop
        if not 0 <= start <= stop <= self.ntotal:
            raise UsageError(f"rows {start}:{stop} are outside the {self.ntotal:,} of {self.path}")
        return start, stop

    def block(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Rows ``start:stop`` of the main dataset: float32 [n, M*d] or uint8 [n, code_size].

        Raises:
            UsageError: outside the file.
            DataError: the bytes are damaged.
        """
        start, stop = self._span(start, stop)
        column = self._columns[self.header.kind]
        check_memory(
            (stop - start) * column.dtype.itemsize * column.shape[1], f"{self.path}: {stop - start:,} rows"
        )
        with self._guard():
            values = np.asarray(column[start:stop])
            self.header.check_rows(values, None, f"{self.path} (from row {start:,})")
        return values

    def ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Ids of rows ``start:stop``, int64 [n]. Raises as :meth:`block`."""
        start, stop = self._span(start, stop)
        check_memory(8 * (stop - start), f"{self.path}: {stop - start:,} ids")
        with self._guard():
            return np.asarray(self._columns["ids"][start:stop], dtype=np.int64)

    def labels(self, start: int = 0, stop: int | None = None) -> NDArray[np.uint8] | None:
        """Packed labels of rows ``start:stop``, uint8 [n, ceil(C/8)], or None. Raises as :meth:`block`."""
        start, stop = self._span(start, stop)
        if "labels" not in self._columns:
            return None
        column = self._columns["labels"]
        check_memory((stop - start) * column.shape[1], f"{self.path}: labels of {stop - start:,} rows")
        with self._guard():
            labels = np.asarray(column[start:stop], dtype=np.uint8)
            self.header.check_rows(np.empty((0, self.header.width), np.uint8), labels, str(self.path))
        return labels

    def texts(self, start: int = 0, stop: int | None = None) -> dict[str, Texts]:
        """Text columns of rows ``start:stop`` by name; ``name`` is the path or key of an item. Raises as :meth:`block`."""
        start, stop = self._span(start, stop)
        with self._guard():
            return {name: column.span(start, stop) for name, column in self._texts.items()}

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Names of the text columns."""
        return tuple(self._texts)

    def blocks(
        self, size: int = 65_536
    ) -> Iterator[tuple[int, NDArray[Any], NDArray[np.int64], NDArray[np.uint8] | None]]:
        """All rows in order, at most ``size`` at a time: (start, values, ids, labels).

        Raises:
            UsageError: ``size`` below 1.
        """
        if size < 1:
            raise UsageError(f"blocks of {size} rows: at least 1 is needed")
        for start in range(0, self.ntotal, size):
            stop = min(self.ntotal, start + size)
            yield start, self.block(start, stop), self.ids(start, stop), self.labels(start, stop)

    def close(self) -> None:
        """Close the file."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def describe(path: str | Path) -> dict[str, Any]:
    """Description of a features or codes file for ``gpq info``, as JSON values. Reads the whole file to detect damage.

    Raises:
        DataError: not such a file, or a damaged one.
    """
    with RowReader(path) as reader:
        header = reader.header
        M, K, d = (int(n) for n in header.codebooks.shape)
        labelled = 0
        row = header.width * (4 if header.kind == "features" else 1)
        for _, _, _, labels in reader.blocks(max(1, (16 << 20) // row)):
            labelled += 0 if labels is None else int(labels.any(axis=1).sum())
        return {
            "type": header.kind,
            "path": str(path),
            "bytes": Path(path).stat().st_size,
            "ntotal": reader.ntotal,
            "width": header.width,
            "codebooks": M,
            "codewords": K,
            "subdim": d,
            "bits": header.bits,
            "classes": list(header.class_names),
            "labelled": labelled,
            "texts": list(reader.text_columns),
            "multi_label": header.multi_label,
            "model_fingerprint": header.model_fingerprint,
            "codebooks_fingerprint": header.codebooks_fingerprint,
            "data_fingerprint": header.data_fingerprint,
            "format_version": FORMAT_VERSION,
            "versions": reader.versions,
            "extra": header.extra,
        }
