"""Read features and codes files, with checks before the first row."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.bits import bits_per_code
from ..errors import DataError, MismatchError, UsageError
from ..files import Closing
from ..inputs import check_memory, parse_json, reading
from .hdf5 import TextColumn, Texts, dataset, open_hdf5
from .header import FORMAT_VERSION, Header, Kind

_MAX_CODEBOOKS = 64 << 20  # bytes
_WHAT = "a features or codes file made by 'gpq encode'"


class RowReader(Closing):
    """Reader of a complete features or codes file, in blocks; a context manager.

    Args:
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
        with contextlib.ExitStack() as stack:
            h5 = stack.enter_context(open_hdf5(self.path, _WHAT))
            self._check(h5)
            if kind is not None and self.header.kind != kind:
                raise MismatchError(f"{self.path} holds {self.header.kind}, but {kind} are needed")
            if model_fingerprint is not None and self.header.model_fingerprint != model_fingerprint:
                raise MismatchError(
                    f"{self.path} is of model {self.header.model_fingerprint}, not {model_fingerprint}: "
                    "encode the data again with this model"
                )
            self._stack = stack.pop_all()

    def _check(self, h5: Any) -> None:
        attrs = {n: v.decode() if isinstance(v, bytes) else v for n, v in h5.attrs.items()}
        kind = attrs.get("kind")
        if kind not in ("features", "codes") or not bool(attrs.get("complete", False)):
            raise DataError(f"{self.path} is not {_WHAT}, or it is incomplete")
        if (version := int(attrs["format_version"])) != FORMAT_VERSION:
            raise DataError(f"{self.path} has format {version}, not {FORMAT_VERSION}: encode the data again")
        stored = dataset(h5, "codebooks", np.float32)
        if stored.size * 4 > _MAX_CODEBOOKS:
            raise DataError(f"codebooks are {list(stored.shape)}: damaged or foreign")
        names, extra, versions = (parse_json(attrs[name]) for name in ("class_names", "extra", "versions"))
        if not (isinstance(names, list) and isinstance(extra, dict) and isinstance(versions, dict)):
            raise DataError("its attributes are not the JSON that they should be: damaged or foreign")
        self.header = header = Header(
            kind=kind,  # type: ignore[arg-type]  # one of the two, checked above
            model_fingerprint=str(attrs["model_fingerprint"]),
            codebooks=np.asarray(stored[()], dtype=np.float32),
            data_fingerprint=str(attrs["data_fingerprint"]),
            class_names=tuple(str(name) for name in names),
            multi_label=bool(attrs["multi_label"]),
            extra=extra,
        )
        stated = attrs["codebooks_fingerprint"], attrs["header_fingerprint"]
        if stated != (header.codebooks_fingerprint, header.fingerprint()):
            raise DataError("its codebooks or metadata have changed since it was written: it is damaged")
        self.versions, self.ntotal = versions, int(attrs["ntotal"])
        if self.ntotal < 1:
            raise DataError(f"{self.path} has no rows: damaged or foreign")
        self._columns: dict[str, Any] = {}
        for name, row in header.columns().items():
            shape = (self.ntotal, *row.shape)
            column = dataset(h5, name, row.base, shape)
            # HDF5 reads missing chunks as zeros, undetected by checksums.
            chunks = math.prod(-(-n // size) for n, size in zip(shape, column.chunks or shape, strict=True))
            if column.chunks and column.id.get_num_chunks() != chunks:
                raise DataError(f"{name!r} lacks some of its {chunks:,} chunks: damaged")
            self._columns[name] = column
        self._texts = TextColumn.all_of(h5, self.ntotal)

    def _span(self, start: int, stop: int | None) -> tuple[int, int]:
        stop = self.ntotal if stop is None else stop
        if not 0 <= start <= stop <= self.ntotal:
            raise UsageError(f"rows {start} to {stop} are outside {self.path}, which has {self.ntotal:,}")
        return start, stop

    def _rows(self, name: str, start: int, stop: int | None) -> NDArray[Any]:
        start, stop = self._span(start, stop)
        size = (stop - start) * self.header.columns()[name].itemsize
        check_memory(size, f"{self.path}: {stop - start:,} rows of {name}")
        with reading(self.path, _WHAT):
            rows = np.asarray(self._columns[name][start:stop])
            self.header.check_rows({name: rows}, f"{self.path} (from row {start:,})")
        return rows

    def block(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Rows ``start:stop``: float32 [n, M*d] or uint8 [n, code_size]. Raises UsageError: outside the file; DataError: damaged."""
        return self._rows(self.header.kind, start, stop)

    def ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Ids of rows ``start:stop``, int64 [n]. Raises as :meth:`block`."""
        return self._rows("ids", start, stop)

    def labels(self, start: int = 0, stop: int | None = None) -> NDArray[np.uint8] | None:
        """Packed labels of rows ``start:stop``, uint8 [n, ceil(C/8)], or None. Raises as :meth:`block`."""
        return self._rows("labels", start, stop) if "labels" in self._columns else None

    def texts(self, start: int = 0, stop: int | None = None) -> dict[str, Texts]:
        """Text columns of rows ``start:stop`` by name; ``name`` is the path or key of an item. Raises as :meth:`block`."""
        start, stop = self._span(start, stop)
        with reading(self.path, _WHAT):
            return {name: column.span(start, stop) for name, column in self._texts.items()}

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Names of the text columns."""
        return tuple(self._texts)

    def blocks(
        self, size: int = 65_536, start: int = 0
    ) -> Iterator[tuple[int, NDArray[Any], NDArray[np.int64], NDArray[np.uint8] | None]]:
        """All rows from ``start`` in order, at most ``size`` at a time: (start, values, ids, labels). UsageError: ``size`` below 1."""
        if size < 1:
            raise UsageError(f"blocks of {size} rows: at least 1 is needed")
        for at in range(start, self.ntotal, size):
            span = at, min(self.ntotal, at + size)
            yield at, self.block(*span), self.ids(*span), self.labels(*span)

    def close(self) -> None:
        """Close the file."""
        self._stack.close()


def describe(path: str | Path) -> dict[str, Any]:
    """Description of a file for ``gpq info``, as JSON values. Reads the whole file, and raises DataError where it is damaged."""
    with RowReader(path) as reader:
        header, Z = reader.header, reader.header.codebooks
        blocks = reader.blocks(max(1, (16 << 20) // header.columns()[header.kind].itemsize))
        labelled = sum(0 if labels is None else int(labels.any(axis=1).sum()) for *_, labels in blocks)
        return {
            "kind": header.kind,
            "shape": [reader.ntotal, header.width],
            "ntotal": reader.ntotal,
            **dict(zip(("codebooks", "codewords", "subdim"), Z.shape, strict=True)),
            "bits": len(Z) * bits_per_code(Z.shape[1]),
            "labelled": labelled,
            "texts": list(reader.text_columns),
            "multi_label": header.multi_label,
            **header.fingerprints(),
            "format_version": FORMAT_VERSION,
            "versions": reader.versions,
            "extra": header.extra,
            "classes": len(header.class_names),
            "class_names": list(header.class_names),
        }
