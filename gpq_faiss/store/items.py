"""The items file beside an index: names, labels and kept columns by id, read in place."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import atomic_path
from ..inputs import check_memory, parse_json
from .foreign import dataset, open_hdf5
from .sink import Sink
from .texts import TextColumn, Texts, text_columns, write_texts

_WHAT = "the names and labels of an index (written by 'gpq index')"
FORMAT_VERSION = 1
_OPTIONS: dict[str, Any] = {
    "compression": "gzip",
    "compression_opts": 1,
    "shuffle": True,
    "fletcher32": True,
    "chunks": True,
}


def items_path(index: str | Path) -> Path:
    """Path of the items file of an index: ``index.faiss.items.h5``."""
    return Path(f"{index}.items.h5")


@dataclass
class ItemBlock:
    """Some items: ids int64 [n], packed labels uint8 [n, ceil(C/8)] or None, and text columns StringDType [n]."""

    ids: NDArray[np.int64]
    labels: NDArray[np.uint8] | None = None
    texts: Mapping[str, Texts] = field(default_factory=dict)


def write_items(
    path: str | Path,
    blocks: Callable[[], Iterator[ItemBlock]],
    *,
    class_names: tuple[str, ...],
    columns: tuple[str, ...],
    key: str,
    before: Callable[[tuple[Path, ...]], None] | None = None,
) -> Path:
    """Write the items of an index atomically, streaming column by column.

    Args:
        path: see :func:`items_path`.
        blocks: yields all items in a fixed order; ids are unique.
        class_names: C names; empty without labels.
        columns: text columns of every block.
        key: identifies these items; also in the index's sidecar, to detect the file of another index.
        before: see :func:`..files.atomic_paths`.
    """
    path = Path(path)
    ids: list[NDArray[np.int64]] = []
    labels: list[NDArray[np.uint8]] = []
    with atomic_path(path, before=before) as temporary:
        sink = Sink(temporary)
        try:
            with h5py.File(sink, "w", libver=("v110", "v110")) as h5:
                for block in blocks():
                    ids.append(block.ids)
                    if class_names and block.labels is not None:
                        labels.append(block.labels)
                every = np.concatenate(ids) if ids else np.empty(0, np.int64)
                if not np.array_equal(every, np.arange(len(every))):
                    order = np.argsort(every, kind="stable")
                    h5.create_dataset("ids", data=every[order], **_OPTIONS)
                    h5.create_dataset("rows", data=order, **_OPTIONS)
                if labels:
                    h5.create_dataset("labels", data=np.concatenate(labels), **_OPTIONS)
                for name in columns:
                    write_texts(h5, name, (block.texts[name] for block in blocks()))
                attributes = {
                    "kind": "items",
                    "class_names": json.dumps(class_names if labels else ()),
                    "key": key,
                }
                for name, value in attributes.items():
                    h5.attrs[name] = np.bytes_(value.encode())
                h5.attrs["format_version"] = FORMAT_VERSION
                h5.attrs["ntotal"] = len(every)
            sink.check()
        except Exception:
            sink.check()
            raise
        finally:
            sink.close()
    return path


@dataclass(frozen=True)
class Item:
    """Name, labels (a set: in alphabetical order, wherever they are stored) and texts of an item; an empty name is none."""

    texts: dict[str, str]
    labels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.labels is not None:
            object.__setattr__(self, "labels", tuple(sorted(self.labels)))

    @property
    def name(self) -> str | None:
        """Its path or key, if any."""
        return self.texts.get("name") or None


class Items:
    """Items of an index by id; a context manager.

    Args:
        path: see :func:`items_path`.

    Attributes:
        key: as written.
        ntotal: number of items.
        class_names: C names; empty without labels.
        columns: names of the text columns.

    Raises:
        DataError: missing, damaged or of another format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stack = contextlib.ExitStack()
        try:
            self._h5 = self._stack.enter_context(open_hdf5(self.path, _WHAT))
            with self._guard():
                self._open()
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError) as error:
            why = " ".join(str(error).split())[:120]
            raise DataError(f"{self.path} is truncated or damaged ({why}): index the codes again") from error

    def _attribute(self, name: str) -> str:
        value = self._h5.attrs.get(name)
        if not isinstance(value, bytes):
            raise DataError(f"{self.path} has no attribute {name!r}: {_WHAT} is needed")
        return value.decode()

    def _open(self) -> None:
        if self._attribute("kind") != "items" or int(self._h5.attrs["format_version"]) != FORMAT_VERSION:
            raise DataError(f"{self.path} is not {_WHAT}")
        self.key = self._attribute("key")
        self.ntotal = n = int(self._h5.attrs["ntotal"])
        self.class_names = tuple(str(c) for c in parse_json(self._attribute("class_names")))
        self._ids: NDArray[np.int64] | None = None
        self._rows: Any = None
        if "ids" in self._h5:
            stored, self._rows = (dataset(self._h5, name, self.path) for name in ("ids", "rows"))
            for column in (stored, self._rows):
                if column.dtype != np.int64 or column.shape != (n,):
                    raise DataError(f"{self.path}: {column.name} is not int64 [{n}]: damaged")
            check_memory(8 * n, f"{self.path}: the ids of {n:,} items")
            self._ids = np.asarray(stored[()])
        self._labels: Any = None
        if self.class_names:
            self._labels = dataset(self._h5, "labels", self.path)
            if self._labels.dtype != np.uint8 or self._labels.shape != (n, (len(self.class_names) + 7) // 8):
                raise DataError(f"{self.path}: labels are {list(self._labels.shape)}: damaged")
        self._texts = {name: TextColumn(self._h5, name, n, self.path) for name in text_columns(self._h5)}
        self.columns = tuple(self._texts)

    def lookup(self, ids: NDArray[np.int64]) -> list[Item | None]:
        """Item of each id [n]; None for -1 and unknown ids.

        Raises:
            DataError: the file is damaged.
        """
        if self._ids is None:
            rows = np.where((ids >= 0) & (ids < self.ntotal), ids, -1)
        elif self.ntotal == 0:
            rows = np.full(len(ids), -1)
        else:
            at = np.minimum(np.searchsorted(self._ids, ids), self.ntotal - 1)
            rows = np.where(self._ids[at] == ids, at, -1)
        known: dict[int, Item] = {}
        with self._guard():
            for row in np.unique(rows[rows >= 0]).tolist():
                known[row] = self._item(row if self._rows is None else int(self._rows[row]))
        return [known.get(row) for row in rows.tolist()]

    def blocks(self, size: int) -> Iterator[ItemBlock]:
        """Yield all items in file order, in blocks of ``size``.

        Raises:
            DataError: the file is damaged.
        """
        with self._guard():
            ids = np.arange(self.ntotal) if self._ids is None else np.empty(self.ntotal, np.int64)
            if self._ids is not None:
                ids[np.asarray(self._rows[()])] = self._ids
            for start in range(0, self.ntotal, size):
                part = slice(start, min(start + size, self.ntotal))
                texts = {name: column.span(part.start, part.stop) for name, column in self._texts.items()}
                yield ItemBlock(
                    ids[part], None if self._labels is None else np.asarray(self._labels[part]), texts
                )

    def _item(self, row: int) -> Item:
        if not 0 <= row < self.ntotal:
            raise DataError(f"{self.path}: a row {row:,} of {self.ntotal:,}: damaged")
        texts = {name: str(column.span(row, row + 1)[0]) for name, column in self._texts.items()}
        if texts.get("name") == "":  # as it had none before it was stored
            del texts["name"]
        labels = None
        if self._labels is not None:
            on = np.flatnonzero(np.unpackbits(self._labels[row], count=len(self.class_names)))
            labels = tuple(self.class_names[int(c)] for c in on)
        return Item(texts, labels)

    def close(self) -> None:
        """Close the file."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
