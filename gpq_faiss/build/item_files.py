"""The items file beside an index: names, labels and kept columns of its sources."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..data.labels import Labels
from ..errors import DataError
from ..faissio.io import read_sidecar
from ..files import fingerprint
from ..indexes.manifest import Manifest, is_manifest, read_manifest
from ..progress import stage
from ..store import Item, ItemBlock, Items, RowReader, Texts, as_texts, items_path, write_items
from .shards import is_index, is_parquet

log = logging.getLogger(__name__)

_ROWS = 1 << 15


@dataclass(frozen=True)
class ItemSources:
    """Names and labels of the items of an index to build.

    Attributes:
        paths: the sources.
        key: identifies the items; also in the index's sidecar, to detect the file of another index.
        class_names: of all sources.
        columns: of all sources; missing ones are empty.
    """

    paths: tuple[Path, ...]
    key: str
    class_names: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, paths: Sequence[str | Path]) -> ItemSources | None:
        """None if a source has no data on its items (Parquet, an index without an items file), or none has names or labels.

        Raises:
            DataError: a damaged source.
        """
        keys: list[str] = []
        classes: dict[str, None] = {}
        columns: set[str] = set()
        unknown: list[Path] = []
        for path in map(Path, paths):
            if is_parquet(path):
                unknown.append(path)
            elif is_index(path):
                items = open_items(path)
                if items is None:
                    unknown.append(path)
                    continue
                with items:
                    keys.append(items.key)
                    classes.update(dict.fromkeys(items.class_names))
                    columns.update(items.columns)
            else:
                with RowReader(path) as reader:
                    keys.append(f"{reader.header.data_fingerprint} {reader.ntotal}")
                    classes.update(dict.fromkeys(reader.header.class_names))
                    columns.update(reader.text_columns)
        if unknown and (classes or columns):
            log.warning("%s has no names or labels, so the index gets none of any source", unknown[0])
        if unknown or not (classes or columns):
            return None
        names = tuple(sorted(columns))
        return cls(
            tuple(map(Path, paths)), fingerprint("items", *keys, *classes, *names), tuple(classes), names
        )

    def missing(self, index: str | Path, build: str | None = None) -> bool:
        """Whether ``index`` is of these items (and of ``build``, if given), and its items file is missing, damaged or of other items."""
        if not Path(index).is_file():
            return False
        sidecar = read_sidecar(index)
        made = {} if sidecar is None else sidecar["extra"]
        if made.get("items") != self.key or build not in (None, made.get("build")):
            return False
        if not items_path(index).exists():
            return True
        try:
            with Items(items_path(index)) as items:
                return items.key != self.key
        except DataError:
            return True

    def write(self, path: Path) -> Path:
        """Write the items file ``path``."""
        with stage("writing names"):
            return write_items(
                path, self._blocks, class_names=self.class_names, columns=self.columns, key=self.key
            )

    def _blocks(self) -> Iterator[ItemBlock]:
        for path in self.paths:
            for block, classes in _blocks_of(path):
                texts = _with_columns(block, self.columns)
                yield ItemBlock(block.ids, _over(block, classes, self.class_names), texts)


def _over(block: ItemBlock, classes: tuple[str, ...], wanted: tuple[str, ...]) -> NDArray[np.uint8] | None:
    """The packed labels of a block over ``wanted``, a superset of its classes."""
    if not wanted or (block.labels is not None and classes == wanted):
        return block.labels
    if block.labels is None:
        return np.zeros((len(block.ids), (len(wanted) + 7) // 8), np.uint8)
    return Labels(block.labels, classes).over(wanted).packed


def _blocks_of(path: Path) -> Iterator[tuple[ItemBlock, tuple[str, ...]]]:
    if is_index(path):
        items = open_items(path)
        assert items is not None
        with items:
            for block in items.blocks(_ROWS):
                yield block, items.class_names
        return
    with RowReader(path) as reader:
        for start in range(0, reader.ntotal, _ROWS):
            stop = min(reader.ntotal, start + _ROWS)
            block = ItemBlock(reader.ids(start, stop), reader.labels(start, stop), reader.texts(start, stop))
            yield block, reader.header.class_names


def _with_columns(block: ItemBlock, columns: Iterable[str]) -> dict[str, Texts]:
    """The texts of a block in these columns; missing columns are empty."""
    return {
        name: block.texts[name] if name in block.texts else as_texts([""] * len(block.ids))
        for name in columns
    }


def update_items(
    index: Path,
    items: Items | None,
    gone: NDArray[np.int64],
    added: Mapping[int, Item],
    key: str,
    before: Callable[[tuple[Path, ...]], None] | None = None,
) -> Path:
    """Rewrite the items file of ``index``: ``items`` without the ids ``gone``, plus ``added`` ones.

    ``before``: see :func:`gpq_faiss.files.atomic_paths`.
    """
    old = () if items is None else items.class_names
    labels = [item.labels or () for item in added.values()]
    class_names = tuple(dict.fromkeys((*old, *(label for row in labels for label in row))))
    columns = tuple(sorted({"name", *(() if items is None else items.columns)}))
    texts = {name: as_texts([item.texts.get(name, "") for item in added.values()]) for name in columns}
    packed = Labels.from_names(labels, class_names).packed if class_names else None

    def blocks() -> Iterator[ItemBlock]:
        for block in () if items is None else items.blocks(_ROWS):
            kept = ~np.isin(block.ids, gone)
            named = {name: column[kept] for name, column in _with_columns(block, columns).items()}
            over = _over(block, old, class_names)
            yield ItemBlock(block.ids[kept], None if over is None else over[kept], named)
        yield ItemBlock(np.array(list(added), np.int64), packed, texts)

    return write_items(
        items_path(index), blocks, class_names=class_names, columns=columns, key=key, before=before
    )


def open_items(index: str | Path) -> Items | None:
    """The items of an index file; None if there is no items file, or (with a warning) it belongs to another index.

    Raises:
        DataError: a damaged items file.
    """
    path = items_path(index)
    sidecar = read_sidecar(index)
    wanted = None if sidecar is None else sidecar["extra"].get("items")
    if not path.exists():
        if wanted is not None:
            log.warning("%s is missing: results come without names; index the codes again", path)
        return None
    items = Items(path)
    if items.key == wanted:
        return items
    items.close()
    log.warning(
        "%s belongs to another index than %s: results come without names; index the codes again", path, index
    )
    return None


class ShardItems:
    """Items of the shards of a manifest by id. Only needed files are opened.

    Args:
        path: ``manifest.json``, reread when replaced.

    Raises:
        DataError: missing or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self._path, self._lock = Path(path), threading.Lock()
        self._opened: dict[str, Items | None] = {}
        self._read: tuple[object, Manifest] = None, read_manifest(path)

    def _manifest(self) -> Manifest:
        found = self._path.stat() if self._path.exists() else None
        state = found and (found.st_ino, found.st_mtime_ns, found.st_size)
        if state is not None and state != self._read[0]:
            self.close()
            self._read = state, read_manifest(self._path)
        return self._read[1]

    def lookup(self, ids: NDArray[np.int64]) -> list[Item | None]:
        """Item of each id [n]; None for -1 and unknown ids.

        Raises:
            DataError: a damaged file of a shard.
        """
        with self._lock:
            return self._lookup(ids)

    def _lookup(self, ids: NDArray[np.int64]) -> list[Item | None]:
        known: list[Item | None] = [None] * len(ids)
        manifest = self._manifest()
        for shard in manifest.shards:
            rows = np.flatnonzero((ids >= shard.first_id) & (ids <= shard.last_id) & (ids != -1))
            if not len(rows):
                continue
            if shard.file not in self._opened:
                path = manifest.file(shard)
                self._opened[shard.file] = open_items(path) if path.exists() else None
            items = self._opened[shard.file]
            if items is not None:
                for row, item in zip(rows.tolist(), items.lookup(ids[rows]), strict=True):
                    known[row] = item or known[row]
        return known

    def close(self) -> None:
        """Close the files."""
        for items in self._opened.values():
            if items is not None:
                items.close()
        self._opened.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def known_items(index: str | Path) -> Items | ShardItems | None:
    """As :func:`open_items`, also for a manifest."""
    if not is_manifest(index):
        return open_items(index)
    named = any(len(shard.beside) > 1 for shard in read_manifest(index).shards)
    return ShardItems(index) if named else None
