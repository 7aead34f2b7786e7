"""The service without HTTP: a model, a live index, and data on the items."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.encode import check_items, decode, items_are_codewords
from ..codes.encode import encode as encode_vectors
from ..codes.scores import score_tables
from ..data.images import decode_image, resize_square
from ..encoder import Encoder
from ..errors import DataError, GpqError
from ..exported import OnnxEncoder
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


class Input(NamedTuple):
    """Input of a search, or an item to add.

    Attributes:
        form: ``vector`` is an encoded vector, the others are model inputs.
        values: float32 [D], float32 [width] or uint8 [3, size, size].
    """

    form: Literal["vector", "features", "image"]
    values: NDArray[Any]


class Query(NamedTuple):
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

    Attributes:
        failed: why the changes could not be written to the index file at the end; they are beside it.
    """

    def __init__(
        self,
        encoder: Encoder | OnnxEncoder,
        live: LiveIndex,
        catalogue: Catalogue | None = None,
        *,
        threads: int | None = None,
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
        self._watcher: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._compact_at = 0.0
        self.failed: GpqError | None = None
        if catalogue is not None and catalogue.dataset.kind == encoder.input_kind:
            encoder.check(catalogue.dataset)

    async def start(self) -> None:
        """Warm up with one search, and start watching the index file."""
        model = self.encoder
        if model.input_kind == "images":
            first = Input("image", np.zeros((3, model.image_size, model.image_size), np.uint8))
        else:
            first = Input("features", np.ones(model.input_width, np.float32))
        await self.search(first, 10)
        await self._in_pool(self._beginning)
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

    async def _in_pool(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._decoders, call)

    # Items -----------------------------------------------------------------------------------------------------------

    async def known(self, ids: Ids) -> list[dict[str, Any]]:
        """Id, name and labels of items, if known, for :class:`.requests.Item`."""
        return await self._in_pool(lambda: self._known(ids))

    def _known(self, ids: Ids) -> list[dict[str, Any]]:
        snapshot = self.live.snapshot
        known: list[dict[str, Any]] = []
        for number, item in zip(ids.tolist(), snapshot.about(ids), strict=True):
            row = None if self.catalogue is None else self.catalogue.row(number)
            name, labels = (None, None) if item is None else (item.name, item.labels)
            if (
                row is not None
                and self.catalogue is not None
                and (item is None or snapshot.changes.at(number) < 0)
            ):
                name, labels = self.catalogue.name(row), self.catalogue.labels(row)
            known.append({"id": number, "name": name, "labels": labels or None})
        return known

    async def thumbnail(self, number: int) -> tuple[bytes, str] | None:
        """A thumbnail of an item and its media type; None if there is none."""
        catalogue = self.catalogue
        row = None if catalogue is None else catalogue.row(number)
        if row is None or catalogue is None:
            return None
        return await self._in_pool(lambda: catalogue.thumbnail(row))

    def check_labels(self, labels: Sequence[str], what: str) -> None:
        """Raises DataError: no item has one of these labels, which ``what`` gives."""
        classes = () if self.catalogue is None else self.catalogue.classes
        unknown = next((label for label in labels if label not in classes), None)
        if unknown is not None:
            raise DataError(f"{what}: no item has the label {unknown[:100]!r}")

    def have_label(self, ids: Ids, labels: Sequence[str]) -> NDArray[np.bool_]:
        """bool [n]: which items have one of these labels."""
        if self.catalogue is None or not labels:
            return np.zeros(len(ids), np.bool_)
        return self.catalogue.have_label(ids, labels)

    async def some_items(self, k: int, labels: Sequence[str] = ()) -> Ids:
        """At most ``k`` items to begin with: int64 [n], a few of every label first; always the same, and those of a smaller ``k`` first.

        Without data, these are the items that the code of all first codewords finds. Of shards, items of the data that are missing may
        leave fewer than ``k``.

        Args:
            labels: only items with one of these, if given.

        Raises:
            DataError: a label that no item has.
        """
        self.check_labels(labels, "label")
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
        if beginning is None or snapshot.filed is None:
            return None
        added = snapshot.changes.ids[snapshot.changes.there]
        counts = beginning.counts - beginning.counts_of(snapshot.hidden) + beginning.counts_of(added)
        return [int(count) for count in counts]

    def _beginning(self) -> Beginning | None:
        """Of the data and the present index file."""
        snapshot = self.live.snapshot
        if self.catalogue is not None and self._begun[0] is not snapshot.index:
            self._begun = snapshot.index, Beginning(self.catalogue, snapshot.filed)
        return self._begun[1]

    # Inputs ----------------------------------------------------------------------------------------------------------

    async def image(self, data: bytes, max_pixels: int) -> Input:
        """An uploaded image. Raises DataError: not an image, too many pixels, or a model of features."""
        if self.encoder.input_kind != "images":
            raise DataError("image: the model takes features, not images")
        size = self.encoder.image_size

        def decoded() -> NDArray[Any]:
            return resize_square(decode_image(data, max_pixels=max_pixels), size).transpose(2, 0, 1)

        return Input("image", await self._in_pool(decoded))

    def features(self, values: Sequence[float]) -> Input:
        """Features of an item. Raises DataError: another width, or a model of images."""
        if self.encoder.input_kind != "features":
            raise DataError("features: the model takes images, not features")
        return Input("features", _row(values, self.encoder.input_width, "features"))

    def vector(self, values: Sequence[float]) -> Input:
        """An encoded vector. Raises DataError: another width."""
        return Input("vector", _row(values, self.live.snapshot.index.width, "vector"))

    async def item(self, number: int) -> Input:
        """An item as a query: its original if the data are available, else its decoded vector.

        Raises:
            UnknownItemError: no such item.
        """
        code = self.live.snapshot.code(number)
        catalogue, model = self.catalogue, self.encoder
        if catalogue is not None and catalogue.dataset.kind == model.input_kind:
            row = catalogue.row(number)
            original = (
                None
                if row is None
                else await self._in_pool(lambda: catalogue.original(row, model.image_size))
            )
            if original is not None:
                return Input("image" if model.input_kind == "images" else "features", original)
        return Input("vector", decode(code[None], self.live.snapshot.index.codebooks)[0])

    def _vectors(self, inputs: Sequence[Input], *, queries: bool) -> list[Any]:
        """Encoded inputs, float32 [D] each, or a DataError: as a batch on a GPU; one by one on the CPU, where batches are not faster and
        would affect the last bits."""
        found: list[Any] = [one.values for one in inputs]
        raw = [n for n, one in enumerate(inputs) if one.form != "vector"]
        on_gpu = isinstance(self.encoder, Encoder) and self.encoder.device.type != "cpu"
        for part in [raw] if on_gpu and raw else [[n] for n in raw]:
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
            DataError: the input has no direction.
            BusyError: too many queries wait.
        """
        return await self._searches.submit(Query(given, k, where))

    def _search(self, batch: Sequence[Query]) -> Sequence[Found | Exception]:
        snapshot = self.live.snapshot
        answers = self._vectors([query.given for query in batch], queries=True)
        together: dict[object, list[int]] = {}
        for n, query in enumerate(batch):
            if not isinstance(answers[n], DataError):
                together.setdefault(query.where.key, []).append(n)
        for rows in together.values():
            xq, k = np.stack([answers[n] for n in rows]), max(batch[n].k for n in rows)
            try:
                D, found = snapshot.search(xq, k, batch[rows[0]].where, threads=self.threads)
                best = score_tables(xq, snapshot.index.codebooks).max(axis=2).sum(axis=1)
            except GpqError as error:
                for n in rows:
                    answers[n] = error
                continue
            for n, scores, ids, most in zip(rows, D, found, best.tolist(), strict=True):
                there = int((ids[: batch[n].k] != -1).sum())
                answers[n] = Found(scores[:there].copy(), ids[:there].copy(), most)
        return answers

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
        vectors = iter(self._vectors([one for _, one, _ in batch if one is not None], queries=False))
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

    def _code(self, given: Input, vector: Floats | DataError) -> Codes:
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
            log.error("the index was not written, its changes stay beside it: %s", error)
        finally:
            self._compact_at = time.monotonic() + again

    # Reloading -------------------------------------------------------------------------------------------------------

    async def reload(self, *, only_stale: bool = False) -> None:
        """Open the index that is now at the path. Raises DataError, MismatchError: it cannot be opened; the old one stays in use."""
        loop = asyncio.get_running_loop()
        try:
            if await loop.run_in_executor(self._maintenance, lambda: self.live.reload(only_stale=only_stale)):
                self.metrics.reloads.labels("opened").inc()
        except GpqError as error:
            self.metrics.reloads.labels("refused").inc()
            log.error("the index was not opened again: %s", error)
            raise

    def reload_soon(self) -> None:
        """Begin :meth:`reload`; its errors are in the log."""
        self._hurry.set()

    async def _watching(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), WATCH)
            asked = self._hurry.is_set()
            self._hurry.clear()
            if asked or await asyncio.to_thread(lambda: self.live.stale):
                with contextlib.suppress(GpqError):
                    await self.reload(only_stale=not asked)


def _row(values: Sequence[float], width: int, what: str) -> Floats:
    if len(values) != width:
        raise DataError(f"{what}: {len(values)} numbers, expected {width}")
    return np.array(values, np.float32)
