"""The service without HTTP: a model, a live index, and data on the items."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Floats, Ids
from ..codes.encode import decode
from ..codes.scores import score_tables
from ..data.base import Dataset
from ..data.images import decode_image, resize_square
from ..encoder import Encoder, OnnxEncoder
from ..errors import DataError, GpqError
from ..faissio.model import encode_items
from ..indexes.sharded import MergedIndex
from .catalogue import Catalogue
from .live import Asked, LiveIndex, Where
from .requests import Body, Item

WATCH = 1.0
"""Seconds between checks of the index file."""
_TRIED = 10  # items of the data tried for one to begin with, where ids are not in memory
MOST = 64
"""Maximum tasks per batch."""
_T = TypeVar("_T")
Task = TypeVar("Task")
Answer = TypeVar("Answer")


class Input(NamedTuple):
    """An encoded vector float32 [D], or an input of the model: float32 [width], or an image uint8 [3, size, size]."""

    form: Literal["vector", "features", "image"]
    values: NDArray[Any]


class Query(NamedTuple):
    """One query of a request."""

    given: Input
    k: int
    where: Where


class Found(NamedTuple):
    """Scores float32 [n], descending; ids int64 [n], ties in ascending order; and the best score that any code could have."""

    scores: Floats
    ids: Ids
    best: float


class Batcher(Generic[Task, Answer]):
    """One thread that runs all waiting tasks as a batch, while the next ones gather.

    Args:
        run: processes a batch; returns an answer per task, or the error to raise for it.
    """

    def __init__(self, run: Callable[[Sequence[Task]], Sequence[Answer | Exception]]) -> None:
        self.run = run
        self._waiting: deque[tuple[Task, Future[Answer]]] = deque()
        self._thread = ThreadPoolExecutor(1, "gpq-batch")

    async def submit(self, task: Task) -> Answer:
        """The answer to ``task``. Raises what ``run`` returned for it, or raised."""
        future: Future[Answer] = Future()
        self._waiting.append((task, future))
        self._thread.submit(self._work)  # often finds that a batch before has taken the task along
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        taken = [self._waiting.popleft() for _ in range(min(MOST, len(self._waiting)))]
        # Cancelled callers need no answer.
        batch = [one for one in taken if one[1].set_running_or_notify_cancel()]
        answers: Sequence[Answer | Exception] = []
        try:
            answers = self.run([task for task, _ in batch]) if batch else []
        except Exception as error:
            answers = [error] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def close(self) -> None:
        """Do what still waits, and stop."""
        self._thread.shutdown()


class Service:
    """Batches searches and changes of many requests. Created and used within one event loop.

    Args:
        encoder: of the model; an ONNX encoder is read-only.
        live: the index, with the same codebooks.
        data: data set of the items, for names, labels and pictures.
        threads: threads of a search (default: all cores).

    Attributes:
        search: from a :class:`Query` to what is :class:`Found`. Raises DataError: the input has no direction.
        change: makes a :data:`.live.Asked` change, on disk on return; returns the id. Raises ChangeError.
        failed: why the changes could not be written to the index file at the end; they are beside it.
    """

    def __init__(
        self,
        encoder: Encoder | OnnxEncoder,
        live: LiveIndex,
        data: Dataset | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        self.encoder, self.live, self.threads = encoder, live, threads
        self.catalogue = Catalogue(data)
        self.failed: GpqError | None = None
        self._network = threading.Lock()
        self._decoders = ThreadPoolExecutor(4, "gpq-decode")
        self._searches: Batcher[Query, Found] = Batcher(self._search)
        self._changes: Batcher[Asked, int] = Batcher(live.commit)
        self.search, self.change = self._searches.submit, self._changes.submit
        self._maintenance: asyncio.Task[None] | None = None
        if data is not None and data.kind == encoder.input_kind:
            encoder.check(data)

    async def start(self) -> None:
        """Warm up with one search, and start watching the index file."""
        model = self.encoder
        if model.input_kind == "images":
            first = Input("image", np.zeros((3, model.image_size, model.image_size), np.uint8))
        else:
            first = Input("features", np.ones(model.input_width, np.float32))
        await self.search(Query(first, 10, None))
        self._maintenance = asyncio.create_task(self._maintain())

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(WATCH)
            await asyncio.to_thread(self.live.maintain)

    async def close(self) -> None:
        """Stop; changes are written to the index file."""
        if self._maintenance is not None:
            self._maintenance.cancel()
            await asyncio.gather(self._maintenance, return_exceptions=True)
        for pool in (self._searches.close, self._changes.close, self._decoders.shutdown):
            await asyncio.to_thread(pool)
        try:
            await asyncio.to_thread(self.live.close)  # after the maintenance that may be under way
        except GpqError as error:  # for the caller: the server would print its traceback
            self.failed = error

    async def in_pool(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """A call in a thread; at most four at a time, which bounds memory."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, call, *arguments)

    # Items -----------------------------------------------------------------------------------------------------------

    def known(self, ids: Ids) -> list[Item]:
        """Id, name and labels of items, if known."""
        snapshot, catalogue = self.live.snapshot, self.catalogue
        known = []
        for number, item in zip(ids.tolist(), snapshot.about(ids), strict=True):
            name, labels = (None, ()) if item is None else (item.name, item.labels or ())
            row = catalogue.row(number)
            # What came with an added item says more than the data.
            if row is not None and (item is None or number not in snapshot.changes):
                known_name, labels = catalogue.about(row)
                name = known_name or name
            known.append(Item(id=number, name=name, labels=list(labels) or None))
        return known

    async def some_items(self, k: int, labels: Sequence[str] = ()) -> Ids:
        """At most ``k`` items to begin with: int64 [n], a few of every label first, or only of ``labels``; always the same.

        Without data, these are the items that the code of all first codewords finds. Of shards, items of the data that are missing may
        leave fewer than ``k``. Raises DataError: a label that no item has.
        """
        labelled = self.catalogue.labelled(labels, "label")
        if self.catalogue.dataset is None:
            first = np.ascontiguousarray(self.live.snapshot.index.codebooks[:, 0]).reshape(-1)
            return (await self.search(Query(Input("vector", first), k, None))).ids

        def some() -> Ids:
            ids, snapshot = self.catalogue.by_turns, self.live.snapshot
            if labels:
                ids = ids[np.isin(ids, labelled)]
            if isinstance(snapshot.index, MergedIndex):  # where every look is a request to a cluster
                ids = ids[: _TRIED * k]
            there = (number for number in map(int, ids) if snapshot.code_of(number) is not None)
            return np.fromiter(itertools.islice(there, k), np.int64)

        return await self.in_pool(some)

    # Inputs ----------------------------------------------------------------------------------------------------------

    async def input(self, asked: Body, image: bytes | None, max_pixels: int) -> Input:
        """The input of a request; of an item its original if the data have it, else its decoded vector. Raises DataError: it is wrong."""
        model, snapshot = self.encoder, self.live.snapshot
        if image is not None:
            if model.input_kind != "images":
                raise DataError("image: the model takes features, not images")

            def decoded() -> NDArray[Any]:
                pixels = decode_image(image, max_pixels=max_pixels)
                return resize_square(pixels, model.image_size).transpose(2, 0, 1)

            return Input("image", await self.in_pool(decoded))
        if asked.vector is not None:
            return Input("vector", _row(asked.vector, snapshot.index.width, "vector"))
        if asked.features is not None:
            if model.input_kind != "features":
                raise DataError("features: the model takes images, not features")
            return Input("features", _row(asked.features, model.input_width, "features"))
        assert asked.id is not None
        code, row = snapshot.code(asked.id), self.catalogue.row(asked.id)
        dataset = self.catalogue.dataset
        if row is not None and dataset is not None and dataset.kind == model.input_kind:
            original = await self.in_pool(self.catalogue.original, row, model.image_size)
            if original is not None:
                return Input("image" if model.input_kind == "images" else "features", original)
        return Input("vector", decode(code[None], snapshot.index.codebooks)[0])

    def code(self, given: Input) -> bytes:
        """The code of an item. Raises DataError: it has none."""
        (vector,) = self._vectors([given], queries=False)
        if isinstance(vector, DataError):
            raise vector
        assert isinstance(self.encoder, Encoder)  # others are read-only
        model = self.encoder.model
        description = model.description if given.form == "vector" else {}
        return encode_items(vector[None], model.codebooks, description, what=given.form).tobytes()

    def _vectors(self, inputs: Sequence[Input], *, queries: bool) -> list[Any]:
        """Encoded inputs, float32 [D] each, or a DataError."""
        found: list[Any] = [one.values for one in inputs]
        raw = [n for n, one in enumerate(inputs) if one.form != "vector"]
        # On the CPU one by one: batches are not faster there, and would affect the last bits.
        on_gpu = isinstance(self.encoder, Encoder) and self.encoder.device.type != "cpu"
        for part in [raw] if on_gpu and raw else [[n] for n in raw]:
            values = np.stack([inputs[n].values for n in part])
            with self._network:
                vectors, fine = self.encoder.embed(values, queries=queries)
            for n, vector, good in zip(part, vectors, fine, strict=True):
                what = f"{inputs[n].form}: it has no direction in some sub-space, and so no code"
                found[n] = vector if good else DataError(what)
        return found

    def _search(self, batch: Sequence[Query]) -> Sequence[Found | Exception]:
        snapshot = self.live.snapshot
        answers = self._vectors([query.given for query in batch], queries=True)
        together: dict[object, list[int]] = {}
        for n, (_, _, where) in enumerate(batch):
            if not isinstance(answers[n], DataError):
                key = None if where is None else (type(where), np.asarray(where.ids).tobytes())
                together.setdefault(key, []).append(n)
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


def _row(values: Sequence[float], width: int, what: str) -> Floats:
    if len(values) != width:
        raise DataError(f"{what}: {len(values)} numbers, expected {width}")
    return np.array(values, np.float32)
