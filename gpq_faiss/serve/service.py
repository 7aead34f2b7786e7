"""The service without HTTP: a model, a live index and the catalogue of its items."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.encode import decode
from ..data.base import Dataset
from ..data.images import decode_image, resize_square
from ..encoder import Encoder, OnnxEncoder
from ..errors import DataError
from ..faissio.model import encode_items
from .catalogue import Catalogue
from .live import ChangeRequest, LiveIndex, RequestError
from .settings import Settings

_MAX_BATCH = 64
_MAX_PIXELS = 25_000_000
_DECODERS = 4  # images that are decoded at a time, each in up to 100 MB
Task = TypeVar("Task")
Answer = TypeVar("Answer")


class Query(NamedTuple):
    """A query for the ``k`` best items.

    Attributes:
        vector: float32 [d].
        filters: ``allow`` or ``deny`` of :meth:`..indexes.index.Index.search`, or nothing.
    """

    vector: Floats
    k: int
    filters: dict[str, Ids]


class Batcher(Generic[Task, Answer]):
    """A thread that processes all waiting tasks as a batch, while the next ones gather.

    Args:
        run: processes a batch; it returns an answer per task, or the error to raise for it.
    """

    def __init__(self, run: Callable[[Sequence[Task]], Sequence[Answer | Exception]]) -> None:
        self.run = run
        self._waiting: deque[tuple[Task, Future[Answer]]] = deque()
        self._thread = ThreadPoolExecutor(1, "gpq-batch")
        self.close = self._thread.shutdown

    def submit(self, task: Task) -> Future[Answer]:
        """Return the future answer to a task. It raises what ``run`` returned or raised."""
        future: Future[Answer] = Future()
        self._waiting.append((task, future))
        self._thread.submit(self._work)  # finds no task if the batch before has taken it along
        return future

    def _work(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(_MAX_BATCH, len(self._waiting)))]
        try:
            answers = self.run([task for task, _ in batch])
        except Exception as error:
            answers = [error] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


class Service:
    """Searches and changes for many requests at a time. Thread-safe.

    Args:
        encoder: of the model; an ONNX encoder is read-only.
        live: the index, with the codebooks of the model; closed with the service.
        dataset: pictures or features of the items.

    Attributes:
        search: submits a :class:`Query`. The future has scores float32 [n] and ids int64 [n] of the best items, in
            descending order of score, then ascending order of id.
        change: submits a :class:`.live.ChangeRequest`. When the future has the id of the item, the change is on disk.
    """

    def __init__(
        self,
        encoder: Encoder | OnnxEncoder,
        live: LiveIndex,
        dataset: Dataset | None = None,
        settings: Settings | None = None,
    ) -> None:
        if dataset is not None and dataset.kind == encoder.input_kind:
            encoder.check(dataset)
        self.encoder, self.live, self.settings = encoder, live, settings or Settings()
        self.catalogue = Catalogue(live, dataset)
        self._network = threading.Lock()
        self._decoders = threading.Semaphore(_DECODERS)
        self._searches: Batcher[Query, tuple[Floats, Ids]] = Batcher(self._search)
        self._changes: Batcher[ChangeRequest, int] = Batcher(live.commit)
        self.search, self.change = self._searches.submit, self._changes.submit

    def close(self) -> None:
        """Answer what waits, and close the index."""
        self._searches.close()
        self._changes.close()
        self.live.close()

    # Vectors ------------------------------------------------------------------------------------

    def embed_image(self, content: bytes, *, queries: bool = True) -> Floats:
        """Return the vector float32 [d] of an image file.

        Args:
            queries: return the vector of a query instead of that of an item.

        Raises:
            DataError: it is no image, the model takes features, or the vector has no direction.
        """
        if self.encoder.input_kind != "images":
            raise DataError("image: the model takes features, not images")
        with self._decoders:
            image = resize_square(
                decode_image(content, max_pixels=_MAX_PIXELS), self.encoder.image_size
            )
        return self._embed(image.transpose(2, 0, 1), "image", queries)

    def embed_numbers(
        self,
        vector: Sequence[float] | None,
        features: Sequence[float] | None,
        *,
        queries: bool = True,
    ) -> Floats:
        """Return a vector float32 [d], or that of features. Raises DataError: the numbers do not fit the model."""
        if (vector is None) == (features is None):
            raise DataError("give one of vector, features, or the image of a form")
        kind, width = (
            ("vector", self.live.index.d)
            if features is None
            else ("features", self.encoder.input_width)
        )
        if kind == "features" and self.encoder.input_kind != "features":
            raise DataError("features: the model takes images, not features")
        numbers = np.array(vector if features is None else features, np.float32)
        if len(numbers) != width:
            raise DataError(f"{kind}: {len(numbers)} numbers, expected {width}")
        return numbers if kind == "vector" else self._embed(numbers, kind, queries)

    def embed_item(self, id_: int) -> Floats:
        """Return the vector of an item as a query: of its original if the data set has it, else of its code.

        Raises:
            RequestError: no item has the id (404).
        """
        code = self.code_of(id_)
        dataset, row = self.catalogue.dataset, self.catalogue.row(id_)
        if dataset is not None and row is not None and dataset.kind == self.encoder.input_kind:
            with self._decoders:
                original = self.catalogue.read(row)
            if original is not None and dataset.kind == "images":
                original = resize_square(original, self.encoder.image_size).transpose(2, 0, 1)
            if original is not None:
                return self._embed(original, "item", queries=True)
        return decode(code[None], self.live.index.codebooks)[0]

    def _embed(self, values: NDArray[Any], kind: str, queries: bool) -> Floats:
        # One by one: on a CPU a batch is not faster, and the last bits of its vectors differ.
        with self._network:
            vectors, valid = self.encoder.embed(values[None], queries=queries)
        if not valid[0]:
            raise DataError(f"{kind}: it has no direction in some sub-space, and so no code")
        vector: Floats = vectors[0]
        return vector

    # Codes --------------------------------------------------------------------------------------

    def encode(self, vector: Floats, *, foreign: bool) -> bytes:
        """Return the code of a new item. Raises DataError: it has none.

        Args:
            foreign: whether the vector comes from the request, and may be one of a query.
        """
        assert isinstance(self.encoder, Encoder)  # only a model folder is writable
        description = self.encoder.model.description if foreign else {}
        return encode_items(
            vector[None], self.encoder.model.codebooks, description, what="item"
        ).tobytes()

    def code_of(self, id_: int) -> Codes:
        """Return the code of an item. Raises RequestError: no item has the id (404)."""
        code = self.live.index.code_of(id_)
        if code is None:
            raise RequestError(404, f"no item has the id {id_}")
        return code

    def _search(self, queries: Sequence[Query]) -> Sequence[tuple[Floats, Ids]]:
        """Search the queries together, but those with a filter alone."""
        index = self.live.index
        answers = [(np.empty(0, np.float32), np.empty(0, np.int64))] * len(queries)
        rows = range(len(queries))
        together = [row for row in rows if not queries[row].filters]
        for group in [together, *([row] for row in rows if queries[row].filters)]:
            k = min(max((queries[row].k for row in group), default=0), index.ntotal)
            if k == 0:
                continue
            xq = np.stack([queries[row].vector for row in group])
            options = queries[group[0]].filters
            D, I = index.search(xq, k, threads=self.settings.threads, **options)  # noqa: E741
            for row, scores, ids in zip(group, D, I, strict=True):
                n = int((ids[: queries[row].k] != -1).sum())
                answers[row] = scores[:n], ids[:n]
        return answers
