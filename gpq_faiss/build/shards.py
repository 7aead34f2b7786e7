"""Sources of an index, read in blocks: codes or features in HDF5, codes in Parquet, other indexes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from ..codes.bits import check_codes, code_size
from ..codes.checks import Codes, Floats, Ids
from ..codes.encode import check_items, encode
from ..data.arrays import as_int64
from ..data.tables import kind_of, leaves, open_parquet
from ..errors import DataError, MismatchError
from ..faissio.header import INDEX_TYPES, read_header
from ..faissio.io import check_header, check_stated, read_sidecar
from ..faissio.source import IndexFile
from ..files import fingerprint
from ..store import RowReader, codebooks_fingerprint


def _mark(path: Path) -> str:
    """Size and modification time, to detect that a shard changed since an interruption."""
    status = path.stat()
    return fingerprint("shard", path.name, str(status.st_size), str(status.st_mtime_ns))


class Hdf5Shard:
    """``codes.h5``, or ``features.h5`` to encode, of one model.

    With ``codewords``, features must be the codewords of their codes (:func:`..codes.encode.items_are_codewords`).

    Raises:
        DataError: damaged or of another format.
        MismatchError: of another model or with other codebooks.
    """

    def __init__(
        self,
        path: str | Path,
        codebooks: Floats,
        model_fingerprint: str,
        model_name: str,
        *,
        codewords: bool = False,
    ) -> None:
        self.path = Path(path)
        self._codebooks = codebooks
        self._codewords = codewords
        with RowReader(self.path) as reader:
            header = reader.header
            if header.model_fingerprint != model_fingerprint:
                raise MismatchError(
                    f"{path} is of model {header.model_fingerprint}, not of {model_name} ({model_fingerprint}): "
                    "encode the data again with this model"
                )
            if codebooks_fingerprint(header.codebooks) != codebooks_fingerprint(codebooks):
                raise MismatchError(
                    f"{path} was made with other codebooks than those of {model_name}: encode it again"
                )
            self.rows = reader.ntotal
            self.kind: str = header.kind
            self.data_fingerprint = header.data_fingerprint
            self.row_bytes = 16 + (header.width * 12 if header.kind == "features" else header.width * 3)
        self.fingerprint = _mark(self.path)

    def blocks(self, size: int) -> Iterator[tuple[Codes, Ids]]:
        """Yield checked codes and ids of all rows in order, in blocks of ``size``."""
        M, K, _ = self._codebooks.shape
        with RowReader(self.path) as reader:
            for start in range(0, self.rows, size):
                stop = min(self.rows, start + size)
                values = reader.block(start, stop)
                if self.kind == "features":
                    codes = encode(values, self._codebooks, what=str(self.path), first_row=start)
                    if self._codewords:
                        check_items(values, codes, self._codebooks, what=str(self.path), first_row=start)
                else:
                    codes = check_codes(values, M, K, what=str(self.path))
                yield codes, reader.ids(start, stop)


class ParquetShard:
    """Parquet with a column ``codes`` (binary, or lists of uint8) and ``id`` or ``ids`` (64-bit integers).

    Parquet does not name the model; the codes are assumed to be of it.

    Raises:
        DataError: not Parquet, damaged, or without these columns; pyarrow is not installed.
    """

    def __init__(self, path: str | Path, codebooks: Floats) -> None:
        self.path = Path(path)
        self.M, self.K = int(codebooks.shape[0]), int(codebooks.shape[1])
        self._size = code_size(self.M, self.K)
        self.row_bytes = 16 + 4 * self._size
        self.kind, self.data_fingerprint = "codes", ""
        self._texts: tuple[str, ...] = ()
        with self._open() as file:
            names = file.schema_arrow.names
            self._id = next((name for name in ("id", "ids") if name in names), None)
            if "codes" not in names or self._id is None:
                raise DataError(f"{path} has no columns 'codes' and 'id': it has {', '.join(names[:10])}")
            self.rows = int(file.metadata.num_rows)
            # A code stored once could expand to any number of bytes: lists are counted, and texts read as dictionaries.
            for leaf in leaves(file, "codes"):
                column = file.schema.column(leaf)
                groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
                values = sum(group.column(leaf).num_values for group in groups)
                if column.physical_type == "BYTE_ARRAY" and values == self.rows:
                    self._texts = (column.path,)
                elif values not in (self.rows, self.rows * self._size) or column.length > self._size:
                    raise self._uneven()
        self.fingerprint = _mark(self.path)

    def _open(self) -> AbstractContextManager[Any]:
        return open_parquet(self.path, "a Parquet file of codes", self._texts)

    def _uneven(self) -> DataError:
        return DataError(
            f"{self.path}: the column 'codes' does not have {self._size} bytes in every row, as binary or lists of uint8"
        )

    def blocks(self, size: int) -> Iterator[tuple[Codes, Ids]]:
        """Yield checked codes and ids of all rows in order, in blocks of ``size``."""
        import pyarrow

        with self._open() as file:
            for batch in file.iter_batches(batch_size=size, columns=["codes", self._id]):
                codes = self._codes(batch.column("codes"))
                ids = batch.column(self._id)
                if ids.null_count or not pyarrow.types.is_integer(ids.type):
                    raise DataError(
                        f"{self.path}: the column {self._id!r} does not have integers in every row"
                    )
                yield (
                    check_codes(codes, self.M, self.K, what=str(self.path)),
                    as_int64(ids.to_numpy(), str(self.path)),
                )

    def _codes(self, column: Any) -> Codes:
        import pyarrow

        if pyarrow.types.is_dictionary(column.type):
            if any(word is None or len(word) != self._size for word in column.dictionary.to_pylist()):
                raise self._uneven()
            column = column.dictionary_decode()
        listed = kind_of(column.type) == "list"
        if column.null_count or (listed and not pyarrow.types.is_uint8(column.type.value_type)):
            raise self._uneven()
        try:
            if listed:
                flat = column.cast(pyarrow.list_(pyarrow.uint8(), self._size)).flatten().to_numpy()
            else:
                flat = np.frombuffer(b"".join(column.cast(pyarrow.binary(self._size)).to_pylist()), np.uint8)
        except (pyarrow.ArrowException, TypeError, ValueError):  # rows of other lengths, or of another kind
            raise self._uneven() from None
        return np.asarray(flat.reshape(len(column), self._size), np.uint8)


class IndexShard:
    """An index file of any form, with the codebooks of the model, to merge or convert.

    It is read in place. The SHA-256 of the sidecar is checked before the first block.

    Raises:
        DataError: damaged, of another format or empty.
        MismatchError: other codebooks, or a sidecar of another model or file.
    """

    def __init__(self, path: str | Path, codebooks: Floats, model_fingerprint: str, model_name: str) -> None:
        self.path = Path(path)
        self.kind, self.data_fingerprint = "index", ""
        with IndexFile(self.path) as source:
            header, stated = read_header(source), read_sidecar(self.path)
            check_header(source, header, stated)
        self.rows = header.n
        self.row_bytes = 8 * header.code_size + 64
        if header.fingerprint != codebooks_fingerprint(codebooks):
            raise MismatchError(
                f"{path} has other codebooks than those of {model_name}: encode its data with this model"
            )
        model = None if stated is None else stated["model_fingerprint"]
        if model not in (None, model_fingerprint):
            raise MismatchError(f"{path} is of model {model}, not of {model_name} ({model_fingerprint})")
        if not self.rows:
            raise DataError(f"{path} is empty: leave it out, or add codes first")
        self.fingerprint = _mark(self.path)

    def blocks(self, size: int) -> Iterator[tuple[Codes, Ids]]:
        """Yield checked codes and ids of all rows in order, in blocks of at most ``size``.

        Raises:
            MismatchError: the SHA-256 differs from the sidecar's.
            DataError: the file was modified meanwhile.
        """
        with IndexFile(self.path) as source:
            header, stated = read_header(source), read_sidecar(self.path)
            if stated is not None:
                check_stated(self.path, stated, verify=True)
            for span in header.spans(size):
                codes, ids = header.codes(source, *span), header.ids(source, *span)
                source.check()
                yield check_codes(codes, *header.codebooks.shape[:2], what=str(self.path)), ids


Shard = Hdf5Shard | ParquetShard | IndexShard
"""A file of rows."""


def is_index(path: str | Path) -> bool:
    """Whether its first bytes are those of an index file."""
    try:
        if not Path(path).is_file():  # a pipe would block
            return False
        with Path(path).open("rb") as file:
            return file.read(4) in INDEX_TYPES
    except OSError:
        return False


def is_parquet(path: str | Path) -> bool:
    """Whether the file name is that of Parquet."""
    return Path(path).suffix.lower() in (".parquet", ".pq")


def open_shard(
    path: str | Path, codebooks: Floats, model_fingerprint: str, model_name: str, *, codewords: bool = False
) -> Shard:
    """Open a source: an index by its first bytes, Parquet by its name, else HDF5. Raises as the classes here."""
    if is_index(path):
        return IndexShard(path, codebooks, model_fingerprint, model_name)
    if is_parquet(path):
        return ParquetShard(path, codebooks)
    return Hdf5Shard(path, codebooks, model_fingerprint, model_name, codewords=codewords)
