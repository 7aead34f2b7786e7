"""Sources of an index, read in blocks: codes or features in HDF5, other indexes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..codes.bits import check_codes
from ..codes.checks import Codes, Floats, Ids
from ..codes.encode import check_items, encode
from ..errors import DataError, MismatchError
from ..faissio.header import INDEX_TYPES, read_header
from ..faissio.io import check_header, check_stated, read_sidecar
from ..faissio.source import IndexFile
from ..files import fingerprint
from ..store import RowReader, codebooks_fingerprint


class Shard:
    """A file of rows of one model.

    Attributes:
        kind: ``codes``, ``features`` or ``index``.
        rows: their number.
        row_bytes: of memory to read a row.
        data_fingerprint: of the data set, if known.
        fingerprint: of name, size and modification time, to detect that the file changed since an interruption.

    Raises:
        DataError: damaged or of another format, or an empty index.
        MismatchError: of another model or with other codebooks.
    """

    kind: str
    rows: int
    row_bytes: int
    data_fingerprint = ""

    def __init__(self, path: str | Path, codebooks: Floats) -> None:
        self.path, self._codebooks = Path(path), codebooks
        status = self.path.stat()
        self.fingerprint = fingerprint("shard", self.path.name, str(status.st_size), str(status.st_mtime_ns))

    def _check(self, books: str, of: str | None, model: str, model_name: str) -> None:
        """Raises MismatchError: codebooks or model with these fingerprints are not those of the model."""
        again = "encode the data again with this model"
        if books != codebooks_fingerprint(self._codebooks):
            raise MismatchError(f"{self.path} has other codebooks than those of {model_name}: {again}")
        if of not in (None, model):
            raise MismatchError(f"{self.path} is of model {of}, not of {model_name} ({model}): {again}")

    def blocks(self, size: int) -> Iterator[tuple[Codes, Ids]]:
        """Yield checked codes and ids of all rows in order, in blocks of at most ``size``.

        Raises:
            MismatchError: the SHA-256 of an index differs from its sidecar's.
            DataError: the file is damaged, or was modified meanwhile.
        """
        raise NotImplementedError


class RowShard(Shard):
    """``codes.h5``, or ``features.h5`` to encode; with ``codewords``, features must be the codewords of their codes."""

    def __init__(
        self, path: str | Path, codebooks: Floats, model: str, model_name: str, codewords: bool
    ) -> None:
        with RowReader(path) as reader:
            super().__init__(path, codebooks)
            header, self._codewords = reader.header, codewords
            self._check(header.codebooks_fingerprint, header.model_fingerprint, model, model_name)
            self.kind, self.rows, self.data_fingerprint = header.kind, reader.ntotal, header.data_fingerprint
            self.row_bytes = 16 + header.width * (12 if header.kind == "features" else 3)

    def blocks(self, size: int) -> Iterator[tuple[Codes, Ids]]:
        with RowReader(self.path) as reader:
            for start, values, ids, _ in reader.blocks(size):
                if self.kind == "codes":
                    codes = check_codes(values, *self._codebooks.shape[:2], what=str(self.path))
                else:
                    codes = encode(values, self._codebooks, what=str(self.path), first_row=start)
                    if self._codewords:
                        check_items(values, codes, self._codebooks, what=str(self.path), first_row=start)
                yield codes, ids


class IndexShard(Shard):
    """An index file of any form, to merge or convert. It is read in place; its SHA-256 is checked before the first block."""

    kind = "index"

    def __init__(self, path: str | Path, codebooks: Floats, model: str, model_name: str) -> None:
        with IndexFile(path) as source:
            super().__init__(path, codebooks)
            header, stated = read_header(source), read_sidecar(self.path)
            check_header(source, header, stated)
        self.rows, self.row_bytes = header.n, 8 * header.code_size + 64
        self._check(header.fingerprint, (stated or {}).get("model_fingerprint"), model, model_name)
        if not self.rows:
            raise DataError(f"{path} is empty: leave it out, or add codes first")

    def blocks(self, size: int) -> Iterator[tuple[Codes, Ids]]:
        with IndexFile(self.path) as source:
            header, stated = read_header(source), read_sidecar(self.path)
            if stated is not None:
                check_stated(self.path, stated, verify=True)
            for span in header.spans(size):
                codes, ids = header.codes(source, *span), header.ids(source, *span)
                source.check()
                yield check_codes(codes, *header.codebooks.shape[:2], what=str(self.path)), ids


def is_index(path: str | Path) -> bool:
    """Whether its first bytes are those of an index file."""
    try:
        if not Path(path).is_file():  # a pipe would block
            return False
        with Path(path).open("rb") as file:
            return file.read(4) in INDEX_TYPES
    except OSError:
        return False


def open_shard(
    path: str | Path, codebooks: Floats, model: str, model_name: str, *, codewords: bool = False
) -> Shard:
    """Open a source of the model with this fingerprint: an index by its first bytes, else HDF5. Raises as :class:`Shard`."""
    if is_index(path):
        return IndexShard(path, codebooks, model, model_name)
    return RowShard(path, codebooks, model, model_name, codewords)
