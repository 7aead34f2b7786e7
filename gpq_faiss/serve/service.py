"""What the service does, without HTTP: a model, a live index, and what is known of the items."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..build.item_files import ShardItems
from ..codes.checks import Floats, Ids
from ..codes.encode import check_items, decode, items_are_codewords
from ..codes.encode import encode as encode_vectors
from ..data.images import decode_image, resize_square
from ..encoder import Encoder
from ..errors import DataError, GpqError, MismatchError
from ..store import Items
from .batches import Batcher
from .catalogue import Catalogue
from .live import EVERYTHING, Change, LiveIndex, Where
from .metrics import Metrics

log = logging.getLogger(__name__)

WAIT = 0.002
"""Seconds that a query waits for others to be searched with."""
MOST = 64
"""Queries that are searched together."""
WATCH = 1.0
"""Seconds between two looks at the index file."""
_RETRY = 60.0  # seconds from a compaction that failed to the next
_DECODERS = 4  # images decoded at a time: what bounds their memory

Form = Literal["vector", "features", "image"]


@dataclass(frozen=True, eq=False)
class Input:
    """Something to be searched with, or to be added.

    Attributes:
        form: ``vector`` is as the index is searched with (or as items are coded), the others as the model takes them.
        values: float32 [D], float32 [width] or uint8 [3, size, size].
    """

    form: Form
    values: NDArray[Any]


@dataclass(frozen=True, eq=False)
class Query:
    """One query of a request."""

    given: Input
    k: int
    where: Where


class Service:
    """Searches and changes of many requests, a batch at a time. Made and used within one event loop.

    Args:
        encoder: of the model.
        live: the index, of the same codebooks.
        catalogue: the data of the items: names, labels and pictures.
        items: what the index was built with: names and labels of items that the catalogue does not have.
        threads: of a search; default all cores.
        watch: whether the index file is looked after and opened again when it was replaced.
    """

    def __init__(
        self,
        encoder: Encoder,
        live: LiveIndex,
        catalogue: Catalogue | None = None,
        *,
        items: Items | ShardItems | None = None,
        threads: int | None = None,
        watch: bool = True,
    ) -> None:
        self.encoder, self.live, self.catalogue, self.threads = encoder, live, catalogue, threads
        self._items = items
        self.metrics = Metrics(lambda: (live.snapshot.ntotal, len(live.snapshot.changes)))
        self._network = threading.Lock()
        self._decoders = ThreadPoolExecutor(_DECODERS, "gpq-decode")
        self._maintenance = ThreadPoolExecutor(1, "gpq-maintenance")
        self._searches: Batcher[Query, tuple[Floats, Ids]] = Batcher(
            self._search, most=MOST, wait=WAIT, seen=self.metrics.batch.observe
        )
        self._changes: Batcher[tuple[int | None, Input | None], int] = Batcher(self._change)
        self._watch = watch
        self._watcher: asyncio.Task[None] | None = None
        self._compact_at = 0.0
        if catalogue is not None and catalogue.dataset.kind == encoder.model.input_kind:
            encoder.check(catalogue.dataset)

    @property
    def width(self) -> int:
        """D of vectors."""
        return self.live.snapshot.index.width

    async def known(self, ids: Ids) -> list[dict[str, Any]]:
        """Id, name and labels of items, as far as they are known, for :class:`.requests.Item`."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, self._known, ids)

    def _known(self, ids: Ids) -> list[dict[str, Any]]:
        found = [None] * len(ids) if self._items is None else self._items.lookup(ids)
        known: list[dict[str, Any]] = []
        for number, item in zip(ids.tolist(), found, strict=True):
            row = None if self.catalogue is None else self.catalogue.row(number)
            entry: dict[str, Any] = {"id": number}
            if row is not None and self.catalogue is not None:
                entry |= {"name": self.catalogue.name(row), "labels": self.catalogue.labels(row) or None}
            elif item is not None and self.live.snapshot.changes.at(number) < 0:
                entry |= {"name": item.name, "labels": list(item.labels or ()) or None}
            known.append(entry)
        return known

    async def start(self) -> None:
        """Search once, so that the first client does not wait for what libraries put off, and look after the index file from now on."""
        model = self.encoder.model
        if model.input_kind == "images":
            first = Input("image", np.zeros((3, model.image_size, model.image_size), np.uint8))
        else:
            first = Input("features", np.ones(model.input_width, np.float32))
        await asyncio.to_thread(self._search, [Query(first, 10, EVERYTHING)])
        if self._watch:
            self._watcher = asyncio.create_task(self._watching())

    async def close(self) -> None:
        """End; changes are written to the index file."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._searches.close()
        await self._changes.close()
        for pool in (self._decoders, self._maintenance):
            await asyncio.to_thread(pool.shutdown)
        await asyncio.to_thread(self.live.close)

    # Inputs ----------------------------------------------------------------------------------------------------------

    async def image(self, data: bytes, max_pixels: int) -> Input:
        """An uploaded image. Raises DataError: no image, too many pixels, or the model takes none."""
        if self.encoder.model.input_kind != "images":
            raise DataError("image: the model takes features, not images")
        size = self.encoder.model.image_size

        def decode() -> NDArray[Any]:
            return resize_square(decode_image(data, max_pixels=max_pixels), size).transpose(2, 0, 1)

        return Input("image", await asyncio.get_running_loop().run_in_executor(self._decoders, decode))

    def features(self, values: Sequence[float]) -> Input:
        """Features of an item. Raises DataError: of another width, or the model takes images."""
        if self.encoder.model.input_kind != "features":
            raise DataError("features: the model takes images, not features")
        return Input("features", _row(values, self.encoder.model.input_width, "features"))

    def vector(self, values: Sequence[float]) -> Input:
        """A vector that was encoded before. Raises DataError: of another width."""
        return Input("vector", _row(values, self.width, "vector"))

    async def item(self, number: int) -> Input:
        """An item as a query: its original, where the data is at hand; else what its code stands for.

        Raises:
            UnknownItemError: there is none.
        """
        code = self.live.snapshot.code(number)
        catalogue, model = self.catalogue, self.encoder.model
        if catalogue is not None and catalogue.dataset.kind == model.input_kind:
            row = catalogue.row(number)
            if row is not None:
                original = await asyncio.get_running_loop().run_in_executor(
                    self._decoders, catalogue.original, row, model.image_size
                )
                if original is not None:
                    return Input("image" if model.input_kind == "images" else "features", original)
        return Input("vector", decode(code[None], model.codebooks)[0])

    async def thumbnail(self, number: int) -> tuple[bytes, str] | None:
        """A small picture of an item and its media type; None where the data has none."""
        row = None if self.catalogue is None else self.catalogue.row(number)
        if row is None or self.catalogue is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._decoders, self.catalogue.thumbnail, row)

    def _vectors(self, inputs: Sequence[Input], *, queries: bool) -> list[Floats | DataError]:
        """float32 [D] of each. On a GPU the network sees all together; on the CPU that saves nothing, and one by one the vector of an
        input does not depend, in its last bits, on what it came with."""
        found: list[Floats | DataError] = [one.values for one in inputs]
        raw = [n for n, one in enumerate(inputs) if one.form != "vector"]
        parts = [[n] for n in raw] if self.encoder.device.type == "cpu" else [raw] if raw else []
        for part in parts:
            with self._network:
                vectors, fine = self.encoder.embed(
                    np.stack([inputs[n].values for n in part]), queries=queries
                )
            for n, vector, good in zip(part, vectors, fine, strict=True):
                what = f"{inputs[n].form}: it has no direction in some sub-space, and so no code"
                found[n] = vector if good else DataError(what)
        return found

    # Searching -------------------------------------------------------------------------------------------------------

    async def search(self, given: Input, k: int, where: Where = EVERYTHING) -> tuple[Floats, Ids]:
        """The ``k`` best items: scores float32 [n], larger first, and ids int64 [n], equal scores by ascending id.

        Raises:
            DataError: the input has no direction, or scores that float32 does not hold.
            BusyError: too many queries wait.
        """
        return await self._searches.submit(Query(given, k, where))

    def _search(self, batch: Sequence[Query]) -> Sequence[tuple[Floats, Ids] | Exception]:
        snapshot = self.live.snapshot
        vectors = self._vectors([query.given for query in batch], queries=True)
        answers: list[tuple[Floats, Ids] | Exception] = [
            vector if isinstance(vector, DataError) else DataError("not searched") for vector in vectors
        ]
        together: dict[object, list[int]] = {}
        for n, query in enumerate(batch):
            if not isinstance(vectors[n], DataError):
                together.setdefault(query.where.key, []).append(n)
        for rows in together.values():
            try:
                self._search_some(snapshot, batch, vectors, rows, answers)
            except GpqError as error:
                # One of them may be at fault for all.
                if len(rows) == 1:
                    answers[rows[0]] = error
                    continue
                for row in rows:
                    try:
                        self._search_some(snapshot, batch, vectors, [row], answers)
                    except GpqError as own:
                        answers[row] = own
        return answers

    def _search_some(
        self,
        snapshot: Any,
        batch: Sequence[Query],
        vectors: Sequence[Any],
        rows: list[int],
        answers: list[Any],
    ) -> None:
        k = max(batch[n].k for n in rows)
        D, found = snapshot.search(
            np.stack([vectors[n] for n in rows]), k, batch[rows[0]].where, threads=self.threads
        )
        for n, scores, ids in zip(rows, D, found, strict=True):
            there = int((ids[: batch[n].k] != -1).sum())
            answers[n] = scores[:there].copy(), ids[:there].copy()

    # Changing --------------------------------------------------------------------------------------------------------

    async def add(self, given: Input, number: int | None = None) -> int:
        """Add an item; it is on disk when this returns. Returns its id.

        Raises:
            TakenIdError: an item has the id already.
            DataError: the input is no item of the model.
            NotStoredError: the disk refuses.
            BusyError: too many changes wait.
        """
        return await self._changed((number, given))

    async def remove(self, number: int) -> None:
        """Remove an item; this is on disk when it returns. Raises UnknownItemError, NotStoredError, BusyError: see :meth:`add`."""
        await self._changed((number, None))

    async def _changed(self, change: tuple[int | None, Input | None]) -> int:
        number = await self._changes.submit(change)
        if self.live.due and time.monotonic() > self._compact_at:
            self._compact_at = math.inf
            self._maintenance.submit(self._compact)
        return number

    def _change(self, batch: Sequence[tuple[int | None, Input | None]]) -> Sequence[int | Exception]:
        given = [one for _, one in batch if one is not None]
        vectors = iter(self._vectors(given, queries=False))
        answers: list[int | Exception] = []
        changes: list[Change] = []
        for number, one in batch:
            try:
                code = None if one is None else self._code(one, next(vectors))
            except DataError as error:
                answers.append(error)
            else:
                answers.append(len(changes))
                changes.append((number, code))
        made = self.live.commit(changes)
        return [made[answer] if isinstance(answer, int) else answer for answer in answers]

    def _code(self, given: Input, vector: Floats | DataError) -> NDArray[np.uint8]:
        if isinstance(vector, DataError):
            raise vector
        Z = self.encoder.model.codebooks
        codes = encode_vectors(vector[None], Z, what=given.form)
        if given.form == "vector" and items_are_codewords(self.encoder.model.description):
            check_items(vector[None], codes, Z, what="vector")
        return np.asarray(codes[0])

    def _compact(self) -> None:
        again = _RETRY
        try:
            if self.live.compact():
                self.metrics.compactions.inc()
                again = 0.0
        except Exception as error:
            log.error("the index was not written, its log keeps the changes: %s", error)
        finally:
            self._compact_at = time.monotonic() + again

    # Reloading -------------------------------------------------------------------------------------------------------

    async def reload(self, *, only_stale: bool = False) -> bool:
        """Search the index that is at the path now. Raises DataError, MismatchError: it cannot be; the old one is searched on."""
        try:
            opened = await asyncio.get_running_loop().run_in_executor(
                self._maintenance, lambda: self.live.reload(only_stale=only_stale)
            )
        except GpqError as error:
            self.metrics.reloads.labels("refused").inc()
            log.error("the index was not opened again: %s", error)
            raise
        if opened:
            self.metrics.reloads.labels("opened").inc()
        return opened

    async def _watching(self) -> None:
        while True:
            await asyncio.sleep(WATCH)
            if await asyncio.to_thread(lambda: self.live.stale):
                try:
                    await self.reload(only_stale=True)
                except (DataError, MismatchError):
                    continue


def _row(values: Sequence[float], width: int, what: str) -> Floats:
    if len(values) != width:
        raise DataError(f"{what}: {len(values)} numbers, expected {width}")
    return np.array(values, np.float32)
