"""Rows in HDF5: ``features.h5`` and ``codes.h5``.

=================  ========================  ====================================================
dataset            type                      meaning
=================  ========================  ====================================================
``features``       float32 [N, M*d]          intra-normalised vectors (kind ``features``)
``codes``          uint8 [N, code_size]      codes as Faiss packs them (kind ``codes``)
``ids``            int64 [N]                 item ids, each once
``labels``         uint8 [N, ceil(C/8)]      multi-hot, ``np.packbits`` order; zero: unlabelled
``class_names``    text [C]                  names of the classes
``texts/NAME``     text [N]                  a column of texts (in its name ``%2F`` is a slash, and
                                             ``%25`` is ``%``); ``name`` is an item's path or key,
                                             ``file_hash`` a hash of its image file
``codebooks``      float32 [M, K, d]         codebooks of the model
=================  ========================  ====================================================

Labels, class names and texts are optional. Fingerprints are attributes. The datasets are
contiguous, so that readers map them. A file is written once, as a whole; until then its rows are
records in ``.NAME.partial/rows``, complete up to the last row that ``progress.json`` records,
however the process ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import h5py
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import check_codes, code_size
from ..codes.checks import Floats, Ids, check_vectors
from ..errors import DataError, MismatchError
from ..files import (
    Closing,
    atomic_path,
    check_output,
    fingerprint,
    read_json,
    unfinished,
    versions,
    write_json,
    writing,
)
from ..inputs import reading
from ..progress import stage
from .hdf5 import Texts, as_texts, dataset, open_hdf5

FORMAT_VERSION = 2
PROGRESS = "progress.json"
"""A folder of unfinished rows is kept if it has this file."""
COMMIT_SECONDS = 5.0
"""Seconds between commits: waiting for the disk after each batch would keep a GPU idle."""
_BLOCK_BYTES = 16 << 20
_EXPECTED = "a features or codes file made by 'gpq encode'"
_log = logging.getLogger(__name__)

Kind = Literal["features", "codes"]


def codebooks_fingerprint(codebooks: Floats) -> str:
    """Return a hash of codebooks float32 [M, K, d]: 16 hex digits."""
    array = np.ascontiguousarray(codebooks, dtype="<f4")
    return fingerprint("codebooks", json.dumps(array.shape), array.tobytes())


@dataclass(frozen=True, eq=False)
class Header:
    """The description of a file of rows.

    Attributes:
        model_fingerprint: of the model that made the rows.
        codebooks: float32 [M, K, d].
        data_fingerprint: of the data set that the rows come from.
        class_names: C names; empty if the rows have no labels.
        multi_label: whether an item of the data set may have several labels.
        extra: further JSON values.
    """

    kind: Kind
    model_fingerprint: str
    codebooks: Floats
    data_fingerprint: str
    class_names: tuple[str, ...] = ()
    multi_label: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Numbers in a row of the main dataset: M*d of features, code_size of codes."""
        M, K, d = self.codebooks.shape
        return M * d if self.kind == "features" else code_size(M, K)

    @property
    def row(self) -> np.dtype[Any]:
        """A row as a record, with a field for each dataset."""
        base = "<f4" if self.kind == "features" else "u1"
        fields: list[Any] = [(self.kind, base, (self.width,)), ("ids", "<i8")]
        if self.class_names:
            fields.append(("labels", "u1", ((len(self.class_names) + 7) // 8,)))
        return np.dtype(fields)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of a file."""
        return {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "model_fingerprint": self.model_fingerprint,
            "codebooks_fingerprint": codebooks_fingerprint(self.codebooks),
            "data_fingerprint": self.data_fingerprint,
            "multi_label": self.multi_label,
            "extra": json.dumps(self.extra, sort_keys=True),
        }

    def fingerprint(self) -> str:
        """Return a hash of the whole header."""
        attributes = json.dumps(self.attributes(), sort_keys=True)
        return fingerprint("rows", attributes, *self.class_names)


class RowReader(Closing):
    """A complete file of features or codes, mapped into memory.

    Args:
        kind: the required kind (default: any).
        model_fingerprint: fingerprint of the required model (default: any).

    Attributes:
        header: the header of the file.
        ntotal: number of rows N.
        values: float32 [N, M*d] or uint8 [N, code_size].
        ids: int64 [N].
        labels: uint8 [N, ceil(C/8)], packed, or None.
        text_columns: names of the columns of texts.
        versions: versions of the packages that wrote the file.

    Raises:
        DataError: the file is missing, truncated, damaged or of another format.
        MismatchError: it is of another kind or another model.
    """

    def __init__(
        self, path: str | Path, *, kind: Kind | None = None, model_fingerprint: str | None = None
    ) -> None:
        self.path = Path(path)
        with contextlib.ExitStack() as stack:
            self._h5 = stack.enter_context(open_hdf5(self.path, _EXPECTED))
            self.header = header = _read_header(self._h5)
            if kind not in (None, header.kind):
                raise MismatchError(f"{path} holds {header.kind}, but {kind} are needed")
            if model_fingerprint not in (None, header.model_fingerprint):
                raise MismatchError(
                    f"{path} is of model {header.model_fingerprint}, not {model_fingerprint}: "
                    "encode the data again with this model"
                )
            self.ntotal = len(dataset(self._h5, "ids"))
            self.values = self._map(header.kind)
            self.ids = self._map("ids")
            self.labels = self._map("labels") if header.class_names else None
            if header.kind == "codes":
                check_codes(self.values, *header.codebooks.shape[:2], name=str(path))
            self._texts = {
                unquote(name): dataset(self._h5, f"texts/{name}")
                for name in self._h5.get("texts", ())
            }
            self.text_columns = tuple(self._texts)
            self.versions = json.loads(self._h5.attrs["versions"])
            self._stack = stack.pop_all()

    def _map(self, name: str) -> NDArray[Any]:
        array = dataset(self._h5, name)
        row = self.header.row[name]
        offset = array.id.get_offset()
        shape = (self.ntotal, *row.shape)
        if (array.dtype, array.shape) != (row.base, shape) or offset is None:
            form = f"{array.dtype} {list(array.shape)}"
            raise DataError(f"{name!r} is {form}, not {row.base} {list(shape)}: it is damaged")
        return np.memmap(self.path, row.base, "r", offset, shape)

    def texts(self, start: int = 0, stop: int | None = None) -> dict[str, Texts]:
        """Return the columns of texts of rows ``start:stop``, StringDType [n] by name."""
        with reading(self.path, _EXPECTED):
            return {
                name: as_texts(column.asstr()[start:stop]) for name, column in self._texts.items()
            }

    def close(self) -> None:
        """Close the file; the mapped arrays stay valid."""
        self._stack.close()


def _read_header(h5: Any) -> Header:
    """Read the header of an open file.

    Raises:
        DataError: the file does not hold features or codes, or has another format.
    """
    attributes = dict(h5.attrs)
    if attributes.get("kind") not in ("features", "codes"):
        raise DataError(f"it is not {_EXPECTED}")
    if attributes["format_version"] != FORMAT_VERSION:
        raise DataError(
            f"it has format {attributes['format_version']}, not {FORMAT_VERSION}: "
            "encode the data again"
        )
    names = dataset(h5, "class_names").asstr()[:] if "class_names" in h5 else []
    return Header(
        kind=attributes["kind"],
        model_fingerprint=attributes["model_fingerprint"],
        codebooks=np.asarray(dataset(h5, "codebooks")[()]),
        data_fingerprint=attributes["data_fingerprint"],
        class_names=tuple(names),
        multi_label=bool(attributes["multi_label"]),
        extra=json.loads(attributes["extra"]),
    )


class RowWriter(Closing):
    """Writer of a file of rows, block by block; an interrupted run is continued.

    Rows survive a crash once they are committed, which happens every :data:`COMMIT_SECONDS`, when
    the context is left (also by an error or Ctrl-C), and in :meth:`finish`. Unfinished rows with
    the same header are continued, others are discarded. Memory does not grow with N.

    Args:
        overwrite: replace an existing ``path``, in :meth:`finish` and not before.

    Attributes:
        rows: number of rows so far; after construction, those of an interrupted run.
        state: the caller's JSON, which was committed with exactly these rows.

    Raises:
        OutputExistsError: ``path`` exists and ``overwrite`` is false.
        DataError: the folder cannot be written, the disk is full, or another process writes the
            file.
    """

    def __init__(self, path: str | Path, header: Header, *, overwrite: bool = False) -> None:
        self.path = check_output(path, overwrite=overwrite)
        self.header = header
        self.folder = self.path.with_name(f".{self.path.name}.partial")
        with writing(self.path), contextlib.ExitStack() as stack:
            stack.enter_context(unfinished(self.folder, self.path, keep=(PROGRESS,)))
            self._file = stack.enter_context((self.folder / "rows").open("a+b"))
            self.rows, self.state = self._read_progress()
            self._file.truncate(self.rows * header.row.itemsize)
            self._stack = stack.pop_all()
        self._committed = self.rows
        self._last_commit = time.monotonic()

    def _read_progress(self) -> tuple[int, dict[str, Any]]:
        """Return the number of rows that an interrupted run has committed, and its state."""
        path = self.folder / PROGRESS
        if not path.exists():
            return 0, {}
        progress = read_json(path, "the progress of an unfinished file")
        stored = self._file.seek(0, os.SEEK_END) // self.header.row.itemsize
        # Missing rows, of a folder that was not copied as a whole, would be read as zeros.
        if progress["header"] != self.header.fingerprint() or progress["rows"] > stored:
            _log.warning("%s is discarded: it is of another model or data set", self.folder)
            path.unlink()
            return 0, {}
        _log.info("%s: resuming after row %s", self.folder, f"{progress['rows']:,}")
        return progress["rows"], progress["state"]

    def append(
        self,
        values: NDArray[Any],
        ids: Ids,
        labels: NDArray[np.uint8] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Append n rows.

        Args:
            values: float32 or uint8 [n, width], depending on the kind.
            ids: int64 [n].
            labels: uint8 [n, ceil(C/8)], packed; needed if the header has class names.
            state: a small JSON object (such as a position in the source) to commit with these rows.

        Raises:
            DataError: values of another width, not finite, or not codes; or the disk is full.
        """
        name = f"{self.path} (from row {self.rows:,}): {self.header.kind}"
        records = np.empty(len(values), self.header.row)
        if self.header.kind == "codes":
            records["codes"] = check_codes(values, *self.header.codebooks.shape[:2], name=name)
        else:
            records["features"] = check_vectors(values, self.header.width, name=name)
        records["ids"] = ids
        if self.header.class_names:
            records["labels"] = labels
        with writing(self.path):
            self._file.write(records.data)
        self.rows += len(values)
        self.state = dict(state or self.state)
        if time.monotonic() - self._last_commit >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Commit the rows so far, so that they survive a crash.

        Raises:
            DataError: the disk is full.
        """
        self._last_commit = time.monotonic()
        if self.rows == self._committed:
            return
        progress = {"header": self.header.fingerprint(), "rows": self.rows, "state": self.state}
        with writing(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            write_json(self.folder / PROGRESS, progress)
        self._committed = self.rows

    def finish(self, item_ids: Ids | None = None, texts: Mapping[str, Texts] | None = None) -> Path:
        """Write the file atomically, and remove the unfinished rows.

        Args:
            item_ids: int64 [I], the ids to which ``texts`` belong; they include those of all rows.
            texts: columns of texts of these items, StringDType [I] by name.

        Raises:
            DataError: there are no rows, or the disk is full (the unfinished rows are kept).
        """
        if self.rows == 0:
            raise DataError(f"{self.path}: there is no row to write")
        self.commit()
        with atomic_path(self.path) as temporary, h5py.File(temporary, "w", locking=False) as h5:
            self._copy_rows(h5)
            if texts:
                assert item_ids is not None
                order = np.argsort(item_ids, kind="stable")
                positions = order[np.searchsorted(item_ids[order], h5["ids"][()])]
                for name, column in texts.items():
                    h5.create_dataset(
                        f"texts/{name.replace('%', '%25').replace('/', '%2F')}",
                        data=column[positions].tolist(),
                        dtype=h5py.string_dtype(),
                    )
            if self.header.class_names:
                h5.create_dataset(
                    "class_names", data=list(self.header.class_names), dtype=h5py.string_dtype()
                )
            h5.create_dataset("codebooks", data=self.header.codebooks.astype("<f4"))
            h5.attrs.update(self.header.attributes())
            h5.attrs["versions"] = json.dumps(versions("numpy", "h5py"))
        (self.folder / PROGRESS).unlink()
        return self.path

    def _copy_rows(self, h5: h5py.File) -> None:
        """Copy the unfinished rows into the datasets of a file."""
        row = self.header.row
        for name in row.names or ():
            h5.create_dataset(name, (self.rows, *row[name].shape), row[name].base)
        self._file.seek(0)
        with stage("writing rows", self.rows, "row") as writing_rows:
            for block in row_blocks(self.rows, max(1, _BLOCK_BYTES // row.itemsize)):
                records = np.fromfile(self._file, row, block.stop - block.start)
                for name in row.names or ():
                    h5[name][block] = records[name]
                writing_rows.update(len(records))

    def close(self) -> None:
        """Commit the rows, and close the file; unfinished rows are kept for a later run.

        If the disk is full, only rows that were committed before are kept.
        """
        with contextlib.suppress(DataError):
            self.commit()
        with contextlib.suppress(OSError):  # bytes in the buffer cannot be written
            self._stack.close()


def discard_unfinished(path: Path) -> None:
    """Remove the unfinished rows of a complete file, which a killed process may have left."""
    shutil.rmtree(path.with_name(f".{path.name}.partial"), ignore_errors=True)


def row_blocks(n: int, size: int, start: int = 0) -> Iterator[slice]:
    """Yield slices of at most ``size`` rows that cover the rows ``start`` to ``n``."""
    for first in range(start, n, size):
        yield slice(first, min(n, first + size))
