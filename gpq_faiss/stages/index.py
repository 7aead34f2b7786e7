"""Indexing: codes (or features, which are encoded) ─► index.faiss or index.lists.

Names and labels of the items are written to a file beside the index.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..codes.checks import Codes, Ids, check_unique
from ..errors import DataError, MismatchError, UsageError
from ..faissio.convert import check_kind, to_faiss
from ..faissio.files import write_index
from ..faissio.model import ModelHeader, encode_items, read_model
from ..files import atomic_path, check_output
from ..indexes.index import Index
from ..indexes.list_file import write_lists
from ..indexes.lists import InvertedLists
from ..indexes.opening import file_kind, open_index
from ..inputs import check_memory
from ..progress import stage
from ..store.changes import changes_path
from ..store.items import IndexDescription, RowItems, items_path, write_items
from ..store.rows import RowReader, row_blocks

log = logging.getLogger(__name__)

LISTS = ".lists"
"""The suffix of files that are mapped, and not read, when they are opened."""
_BLOCK = 1 << 18
_BYTES_PER_ITEM = 64  # of memory while an index is built, in addition to 4 per codebook


def index(
    model_dir: str | Path,
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    kind: str = "flat",
    ids: bool = True,
    names: bool = True,
    overwrite: bool = False,
) -> Path:
    """Build a searchable index from codes (or features, which are encoded), with the ids of the
    items.

    Args:
        model_dir: the model of the rows.
        source: ``codes.h5``, ``features.h5``, or an index, with the changes that a service has made
            beside it; several are merged.
        out: the index: a plain Faiss file, or ``NAME.lists``, which is mapped when it is opened and
            may be larger than the memory.
        kind: of the Faiss file (:data:`..faissio.convert.KINDS`); all but ``flat`` are exports for
            plain Faiss.
        ids: write the ids; if false, they must be 0 to n - 1, and are the positions in a bare
            index.
        names: write names, labels and kept columns of the items to ``out + ".items.sqlite"``.
        overwrite: replace existing files.

    Returns:
        ``out``

    Raises:
        DataError: a damaged model or source, features of queries, or a repeated id.
        MismatchError: rows of another model.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
        UsageError: options that do not fit together, or do not fit the codebooks.
    """
    paths = [Path(path) for path in ([source] if isinstance(source, str | Path) else source)]
    if not paths or Path(out).resolve() in [path.resolve() for path in paths]:
        raise UsageError(f"{out}: name at least one file to index, which is not the output itself")
    mapped = Path(out).suffix == LISTS
    if mapped and (kind != "flat" or not ids):
        raise UsageError(
            f"--out {out}: {LISTS} files have one form, with ids: leave out the options"
        )
    out = check_output(out, overwrite=overwrite)
    model = read_model(model_dir)
    checked_kind = check_kind(kind, *model.codebooks.shape[:2])
    with contextlib.ExitStack() as stack:
        sources = [_open(path, model, stack) for path in paths]
        if mapped:
            with atomic_path(out) as temporary:
                crc = write_lists(temporary, sources, model.codebooks)
                _write_names(out, sources, crc, names)
        else:
            codes, item_ids, crc = _collect(sources, model, out, ordered_by_id=not ids)
            _write_names(out, sources, crc, names)
            faiss_index = to_faiss(codes, item_ids if ids else None, model.codebooks, checked_kind)
            write_index(faiss_index, out)
    if kind == "fastscan":
        log.warning(
            "%s: plain Faiss finds only a part of the true results in a FastScan index, as its "
            "8-bit tables round codebooks of small weight away (docs/existing-pipelines.md); take "
            "kind flat, or gpq search, which is exact",
            out,
        )
    return out


class _RowFile:
    """A codes or features file of a model, which is read like an index.

    Attributes:
        ntotal, items, contained: as of :class:`..indexes.index.Index`.
    """

    contained = None

    def __init__(self, reader: RowReader, model: ModelHeader) -> None:
        self._reader = reader
        self._model = model
        self.ntotal = reader.ntotal
        self.items = RowItems(reader) if reader.header.class_names or reader.text_columns else None

    def blocks(self, size: int) -> Iterator[tuple[Codes, Ids]]:
        """Yield codes uint8 [n, code_size] and ids int64 [n] of up to ``size`` items at a time."""
        reader = self._reader
        model = self._model
        for rows in row_blocks(reader.ntotal, size):
            values = np.asarray(reader.values[rows])
            if reader.header.kind == "features":
                options = {"name": str(reader.path), "first_row": rows.start}
                values = encode_items(values, model.codebooks, model.description, **options)
            yield values, np.asarray(reader.ids[rows])


_Source = Index | _RowFile


def _open(path: Path, model: ModelHeader, stack: contextlib.ExitStack) -> _Source:
    """Open a file of rows, or an index with its changes, until the end of the stack.

    Codes that a service has changed are read as an index.

    Raises:
        DataError: the file is missing, damaged, empty, or of another kind.
        MismatchError: it is of another model, or has other codebooks.
    """
    if file_kind(path) == "rows" and not changes_path(path).exists():
        rows = RowReader(path, model_fingerprint=model.model_fingerprint)
        return _RowFile(stack.enter_context(rows), model)
    opened = stack.enter_context(open_index(path))
    if not np.array_equal(opened.codebooks, model.codebooks):
        raise MismatchError(
            f"{path} has other codebooks than those of {model.folder}: encode the data again with "
            "this model"
        )
    return opened


def _collect(
    sources: Sequence[_Source], model: ModelHeader, out: Path, *, ordered_by_id: bool
) -> tuple[Codes, Ids, int]:
    """Return codes and ids of all sources in the order of the lists or of the ids, and their CRC.

    Raises:
        DataError: an id repeats; the memory is too small; ids are needed and are not 0 to n - 1.
    """
    n = sum(source.ntotal for source in sources)
    needed = n * (4 * len(model.codebooks) + _BYTES_PER_ITEM)
    remedy = f"write a file that is mapped (--out {out.stem}{LISTS})"
    check_memory(needed, f"an index of {n:,} items", remedy=remedy)
    blocks = [block for source in sources for block in source.blocks(_BLOCK)]
    codes, ids = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
    check_unique(ids, f"the items of {out}")
    lists = InvertedLists.build(codes, ids, model.codebooks)
    if not ordered_by_id:
        return lists.codes(), lists.arrays.members.astype(np.int64), lists.crc()
    order = np.argsort(ids, kind="stable")
    if not np.array_equal(ids[order], np.arange(n)):
        raise DataError(
            f"{out}: without ids, an item's id is its position, and the ids are not "
            f"0 to {n - 1:,}: leave out --no-ids"
        )
    return codes[order], ids[order], lists.crc()


def _write_names(out: Path, sources: Sequence[_Source], crc: int, names: bool) -> None:
    """Write the items file of an index, if there are names or labels, or changes that it contains.

    ``names`` says whether names, labels and kept columns are wanted.
    """
    item_sources = [source.items for source in sources if names and source.items is not None]
    contained = {source.contained for source in sources if source.contained is not None}
    if not item_sources and not contained:
        items_path(out).unlink(missing_ok=True)  # of an index that was replaced
        return
    data_fingerprints = {source.data_fingerprint for source in item_sources}
    changes, number = contained.pop() if len(contained) == 1 else ("", 0)
    header = IndexDescription(
        sum(source.ntotal for source in sources),
        crc,
        data_fingerprints.pop() if len(data_fingerprints) == 1 else "",
        changes,
        number,
    )
    with stage("writing names"), atomic_path(items_path(out)) as temporary:
        write_items(temporary, (row for source in item_sources for row in source.rows()), header)
