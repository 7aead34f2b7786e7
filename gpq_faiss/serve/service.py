"""The service without HTTP: a model, a live index, and data on the items."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Floats, Ids
from ..codes.encode import check_items, decode, items_are_codewords
from ..codes.encode import encode as encode_vectors
from ..data.images import decode_image, resize_square
from ..encoder import Encoder
from ..errors import DataError, GpqError, MismatchError
from ..exported import OnnxEncoder
from ..indexes.items import IdMap
from ..store import Item
from .batches import Batcher
from .browse import Beginning
from .catalogue import Catalogue
from .live import EVERYTHING, Asked, LiveIndex, Where
from .metrics import Metrics

log = logging.getLogger(__name__)

WAIT = 0.002
"""Seconds that a query waits for a batch."""
MOST = 64
"""Maximum queries per batch."""
WATCH = 1.0
"""Seconds between checks of the index file."""
_RETRY = 60.0  # seconds from a failed compaction to the next attempt
_DECODERS = 4  # images decoded concurrently, which bounds memory

_TRIED = 10  # items of the data tried for one to begin with, where some may not be in the index
_T = TypeVar("_T")
Form = Literal["vector", "features", "image"]


@dataclass(frozen=True, eq=False)
class Input:
    """Input of a search, or an item to add.

    Attributes:
        form: ``vector`` is an encoded vector, the others are model inputs.
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


class Found(NamedTuple):
    """Answer to a query.

    Attributes:
        scores: float32 [n], descending.
        ids: int64 [n], ties in ascending order.
        best: score of the code that is most alike the query, which no item need have.
    """

    scores: Floats
    ids: Ids
    best: float


_Wanted = tuple[int | None, Input | None, Item | None]
"""An id, the input to add (None: remove), and name and labels."""


class Service:
    """Batches searches and changes of many requests. Created and used within one event loop.

    Args:
        encoder: of the model; an ONNX encoder is read-only.
        live: the index, with the same codebooks.
        catalogue: names, labels and pictures of items.
        threads: threads of a search (default: all cores).
        watch: reopen the index file when it is replaced.

    Attributes:
        failed: why the changes could not be written to the index file at the end; they are in its log.
    """

    def __init__(
        self,
        encoder: Encoder | OnnxEncoder,
        live: LiveIndex,
        catalogue: Catalogue | None = None,
        *,
        threads: int | None = None,
        watch: bool = True,
    ) -> None:
        self.encoder, self.live, self.catalogue, self.threads = encoder, live, catalogue, threads
        self.metrics = Metrics(lambda: (live.snapshot.ntotal, len(live.snapshot.changes)))
        self._network = threading.Lock()
        self._decoders = ThreadPoolExecutor(_DECODERS, "gpq-decode")
        self._maintenance = ThreadPoolExecutor(1, "gpq-maintenance")
        self._searches: Batcher[Query, Found] = Batcher(
            self._search, most=MOST, wait=WAIT, seen=self.metrics.batch.observe
        )
        self._changes: Batcher[_Wanted, int] = Batcher(self._change)
        self._begun: tuple[object, Beginning | None] = (None, None)
        self._watch = watch
        self._watcher: asyncio.Task[None] | None = None
        self._compact_at = 0.0
        self.failed: GpqError | None = None
        if catalogue is not None and catalogue.dataset.kind == encoder.input_kind:
            encoder.check(catalogue.dataset)

    @property
    def width(self) -> int:
        """D of vectors."""
        return self.live.snapshot.index.width

    async def known(self, ids: Ids) -> list[dict[str, Any]]:
        """Id, name and labels of items, if known, for :class:`.requests.Item`."""
        return await self._in_pool(lambda: self._known(ids))

    def _known(self, ids: Ids) -> list[dict[str, Any]]:
        snapshot = self.live.snapshot
        known: list[dict[str, Any]] = []
        for number, item in zip(ids.tolist(), snapshot.about(ids), strict=True):
            row = None if self.catalogue is None else self.catalogue.row(number)
            entry: dict[str, Any] = {"id": number}
            if row is not None and self.catalogue is not None:
                entry |= {"name": self.catalogue.name(row), "labels": self.catalogue.labels(row) or None}
            if item is not None and (row is None or snapshot.changes.at(number) >= 0):
                entry |= {"name": item.name or None, "labels": list(item.labels or ()) or None}
            known.append(entry)
        return known

    async def start(self) -> None:
        """Warm up with one search, and start watching the index file."""
        model = self.encoder
        if model.input_kind == "images":
            first = Input("image", np.zeros((3, model.image_size, model.image_size), np.uint8))
        else:
            first = Input("features", np.ones(model.input_width, np.float32))
        await self.search(first, 10)
        await self._in_pool(self._beginning)
        if self._watch:
            self._watcher = asyncio.create_task(self._watching())

    async def close(self) -> None:
        """Stop; changes are written to the index file."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._searches.close()
        await self._changes.close()
        for pool in (self._decoders, self._maintenance):
            await asyncio.to_thread(pool.shutdown)
        try:
            await asyncio.to_thread(self.live.close)
        except GpqError as error:  # for the caller: the server would print its traceback
            self.failed = error

    # Browsing --------------------------------------------------------------------------------------------------------

    async def some_items(self, k: int, labels: Sequence[str] = ()) -> Ids:
        """At most ``k`` items to begin with: int64 [n], a few of every label first; always the same, and those of a smaller ``k`` first.

        Without data, these are the items that the code of all first codewords finds. Of shards, items of the data that are missing may
        leave fewer than ``k``.

        Args:
            labels: only items with one of these, if given.

        Raises:
            DataError: a label that no item has.
        """
        classes = () if self.catalogue is None else self.catalogue.classes
        unknown = next((label for label in labels if label not in classes), None)
        if unknown is not None:
            raise DataError(f"label: no item has the label {unknown[:100]!r}")
        if self.catalogue is None:
            first = np.ascontiguousarray(self.live.snapshot.index.codebooks[:, 0]).reshape(-1)
            return (await self.search(Input("vector", first), k)).ids
        return await self._in_pool(lambda: self._some_items(k, labels))

    def _some_items(self, k: int, labels: Sequence[str]) -> Ids:
        beginning, snapshot = self._beginning(), self.live.snapshot
        assert beginning is not None
        candidates = beginning.ids(labels)[: _TRIED * k + len(snapshot.changes)].tolist()
        there = (number for number in candidates if snapshot.has(number))
        return np.array(list(itertools.islice(there, k)), np.int64)

    async def label_counts(self) -> list[int] | None:
        """Items of the index with each label; None if unknown: without data, or of shards."""
        return await self._in_pool(self._label_counts)

    def _label_counts(self) -> list[int] | None:
        beginning, snapshot = self._beginning(), self.live.snapshot
        if beginning is None or _filed(snapshot) is None:
            return None
        added = snapshot.changes.ids[snapshot.changes.there]
        counts = beginning.counts - beginning.counts_of(snapshot.hidden) + beginning.counts_of(added)
        return [int(count) for count in counts]

    def _beginning(self) -> Beginning | None:
        """Of the data and the present index file."""
        index = self.live.snapshot.index
        if self.catalogue is not None and self._begun[0] is not index:
            self._begun = index, Beginning(self.catalogue, _filed(self.live.snapshot))
        return self._begun[1]

    async def _in_pool(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._decoders, call)

    # Inputs ----------------------------------------------------------------------------------------------------------

    async def image(self, data: bytes, max_pixels: int) -> Input:
        """An uploaded image. Raises DataError: not an image, too many pixels, or a model of features."""
        if self.encoder.input_kind != "images":
            raise DataError("image: the model takes features, not images")
        size = self.encoder.image_size

        def decode() -> NDArray[Any]:
            return resize_square(decode_image(data, max_pixels=max_pixels), size).transpose(2, 0, 1)

        return Input("image", await self._in_pool(decode))

    def features(self, values: Sequence[float]) -> Input:
        """Features of an item. Raises DataError: another width, or a model of images."""
        if self.encoder.input_kind != "features":
            raise DataError("features: the model takes images, not features")
        return Input("features", _row(values, self.encoder.input_width, "features"))

    def vector(self, values: Sequence[float]) -> Input:
        """An encoded vector. Raises DataError: another width."""
        return Input("vector", _row(values, self.width, "vector"))

    async def item(self, number: int) -> Input:
        """An item as a query: its original if the data are available, else its decoded vector.

        Raises:
            UnknownItemError: no such item.
        """
        code = self.live.snapshot.code(number)
        catalogue, model = self.catalogue, self.encoder
        if catalogue is not None and catalogue.dataset.kind == model.input_kind:
            row = catalogue.row(number)
            if row is not None:
                original = await self._in_pool(lambda: catalogue.original(row, model.image_size))
                if original is not None:
                    return Input("image" if model.input_kind == "images" else "features", original)
        return Input("vector", decode(code[None], self.live.snapshot.index.codebooks)[0])

    async def thumbnail(self, number: int) -> tuple[bytes, str] | None:
        """A thumbnail of an item and its media type; None if there is none."""
        row = None if self.catalogue is None else self.catalogue.row(number)
        if row is None or self.catalogue is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._decoders, self.catalogue.thumbnail, row)

    def _vectors(self, inputs: Sequence[Input], *, queries: bool) -> list[Floats | DataError]:
        """Encoded inputs, float32 [D] each: as a batch on a GPU; one by one on the CPU, where batches are not faster and would affect the
        last bits."""
        found: list[Floats | DataError] = [one.values for one in inputs]
        raw = [n for n, one in enumerate(inputs) if one.form != "vector"]
        on_gpu = isinstance(self.encoder, Encoder) and self.encoder.device.type != "cpu"
        parts = [raw] if on_gpu and raw else [[n] for n in raw]
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

    async def search(self, given: Input, k: int, where: Where = EVERYTHING) -> Found:
        """The ``k`` best items.

        Raises:
            DataError: the input has no direction, or scores overflow float32.
            BusyError: too many queries wait.
        """
        return await self._searches.submit(Query(given, k, where))

    def _search(self, batch: Sequence[Query]) -> Sequence[Found | Exception]:
        snapshot = self.live.snapshot
        vectors = self._vectors([query.given for query in batch], queries=True)
        answers: list[Found | Exception] = [
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
                # A single query may have failed the batch.
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
        k, Z = max(batch[n].k for n in rows), snapshot.index.codebooks
        D, found = snapshot.search(
            np.stack([vectors[n] for n in rows]), k, batch[rows[0]].where, threads=self.threads
        )
        for n, scores, ids in zip(rows, D, found, strict=True):
            there = int((ids[: batch[n].k] != -1).sum())
            products = Z @ vectors[n].reshape(len(Z), -1, 1)  # [M, K, 1]
            answers[n] = Found(scores[:there].copy(), ids[:there].copy(), float(products.max(axis=1).sum()))

    # Changing --------------------------------------------------------------------------------------------------------

    async def add(self, given: Input, number: int | None = None, about: Item | None = None) -> int:
        """Add an item with its name and labels, on disk on return; returns its id.

        Raises:
            TakenIdError: the id is already in use.
            DataError: an invalid input.
            NotStoredError: writing fails.
            BusyError: too many changes wait.
        """
        return await self._changed((number, given, about))

    async def remove(self, number: int) -> None:
        """Remove an item, on disk on return. Raises UnknownItemError, NotStoredError, BusyError: see :meth:`add`."""
        await self._changed((number, None, None))

    async def _changed(self, change: _Wanted) -> int:
        number = await self._changes.submit(change)
        if self.live.due and time.monotonic() > self._compact_at:
            self._compact_at = math.inf
            self._maintenance.submit(self._compact)
        return number

    def _change(self, batch: Sequence[_Wanted]) -> Sequence[int | Exception]:
        given = [one for _, one, _ in batch if one is not None]
        vectors = iter(self._vectors(given, queries=False))
        answers: list[int | Exception] = []
        changes: list[Asked] = []
        for number, one, about in batch:
            try:
                code = None if one is None else self._code(one, next(vectors))
            except DataError as error:
                answers.append(error)
            else:
                answers.append(len(changes))
                changes.append((number, code, about))
        made = self.live.commit(changes)
        return [made[answer] if isinstance(answer, int) else answer for answer in answers]

    def _code(self, given: Input, vector: Floats | DataError) -> NDArray[np.uint8]:
        if isinstance(vector, DataError):
            raise vector
        assert isinstance(self.encoder, Encoder)  # others are read-only
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
        """Open the index that is now at the path. Raises DataError, MismatchError: it cannot be opened; the old one stays in use."""
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


def _filed(snapshot: Any) -> IdMap | None:
    """Ids of the index file; None: those of shards are not in memory."""
    return getattr(snapshot, "filed", None)


def _row(values: Sequence[float], width: int, what: str) -> Floats:
    if len(values) != width:
        raise DataError(f"{what}: {len(values)} numbers, expected {width}")
    return np.array(values, np.float32)
