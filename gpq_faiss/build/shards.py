"""Sources of an index, read in blocks: codes or features in HDF5, other indexes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..codes.bits import check_codes
from ..codes.checks import Codes, Ids
from ..errors import DataError, MismatchError
from ..faissio.header import is_faiss
from ..faissio.io import open_header
from ..faissio.model import ModelHeader, encode_items
from ..files import fingerprint
from ..store.reader import RowReader


@dataclass(frozen=True)
class Shard:
    """A file of rows of one model.

    Attributes:
        model: whose rows they are.
        kind: ``codes``, ``features`` (to encode) or ``index`` (of any form, to merge or convert).
        rows: their number.
        row_bytes: of memory to read a row.
        fingerprint: of name, size and modification time, to detect that the file changed since an interruption.
        data_fingerprint: of the data set, if known.
    """

    path: Path
    model: ModelHeader
    kind: str
    rows: int
    row_bytes: int
    fingerprint: str
    data_fingerprint: str = ""

    def blocks(self, size: int) -> Iterator[tuple[Codes, Ids]]:
        """Yield checked codes and ids of all rows in order, in blocks of at most ``size``.

        Raises:
            MismatchError: the SHA-256 of an index, checked before the first block, differs from its sidecar's.
            DataError: the file is damaged, or was modified meanwhile.
        """
        what, model = str(self.path), self.model
        if self.kind == "index":
            header, _ = open_header(self.path, verify=True)
            with contextlib.closing(header.source):
                for span in header.spans(size):
                    codes, ids = header.codes(*span), header.ids(*span)
                    header.source.check()
                    yield check_codes(codes, *model.codebooks.shape[:2], what=what), ids
            return
        with RowReader(self.path) as reader:
            for start, values, ids, _ in reader.blocks(size):
                if self.kind == "codes":
                    yield values, ids  # checked by the reader
                else:
                    where = {"what": what, "first_row": start}
                    yield encode_items(values, model.codebooks, model.description, **where), ids


def is_index(path: str | Path) -> bool:
    """Whether its first bytes are those of a Faiss index."""
    try:
        if not Path(path).is_file():  # a pipe would block
            return False
        with Path(path).open("rb") as file:
            return is_faiss(file.read(32))
    except OSError:
        return False


def open_shard(path: str | Path, model: ModelHeader) -> Shard:
    """Open a source of a model: an index by its first bytes, else HDF5.

    Raises:
        DataError: damaged or of another format, or an empty index.
        MismatchError: of another model or with other codebooks.
    """
    path, data = Path(path), ""
    if is_index(path):
        held, stated = open_header(path, verify=False)
        held.source.close()
        kind, rows, row_bytes, books = "index", held.n, 8 * held.code_size + 64, held.fingerprint
        of = stated.get("model_fingerprint")
    else:
        with RowReader(path) as reader:
            header, rows = reader.header, reader.ntotal
        kind, data, books = header.kind, header.data_fingerprint, header.codebooks_fingerprint
        row_bytes, of = 16 + header.width * (12 if kind == "features" else 3), header.model_fingerprint
    again = "encode the data again with this model"
    if books != model.codebooks_fingerprint:
        raise MismatchError(f"{path} has other codebooks than those of {model.folder}: {again}")
    if of not in (None, model.model_fingerprint):
        name = f"{model.folder} ({model.model_fingerprint})"
        raise MismatchError(f"{path} is of model {of}, not of {name}: {again}")
    if kind == "index" and not rows:
        raise DataError(f"{path} is empty: leave it out, or add codes first")
    status = path.stat()
    mark = fingerprint("shard", path.name, str(status.st_size), str(status.st_mtime_ns))
    return Shard(path, model, kind, rows, row_bytes, mark, data)
