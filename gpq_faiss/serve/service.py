"""The service without HTTP: a model, a live index and a catalogue of its items."""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids, check_vectors
from ..codes.encode import decode
from ..data.base import Dataset
from ..data.images import decode_image, resize_square
from ..encoder import Encoder, OnnxEncoder
from ..errors import DataError
from ..faissio.model import encode_items
from .catalogue import Catalogue
from .live import LiveIndex, RequestError
from .schemas import Settings

_MAX_PIXELS = 25_000_000
_DECODERS = 4  # images decoded at the same time, each in up to 100 MB


class Service:
    """Searches and changes for concurrent requests. Thread-safe.

    Args:
        encoder: the model's encoder; with an ONNX encoder no items can be added.
        live: the index, with the codebooks of the model.
        dataset: pictures or features of the items.
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
        self._decoders = threading.Semaphore(_DECODERS)
        self._network, self._searching = threading.Lock(), threading.Lock()
        self._waiting: deque[tuple[Floats, int, Future[tuple[Floats, Ids]]]] = deque()

    # Vectors ------------------------------------------------------------------------------------

    def embed_image(self, content: bytes, *, queries: bool = True) -> Floats:
        """Return the vector float32 [d] of an image file.

        Args:
            queries: embed as a query instead of as an item.

        Raises:
            DataError: the content is not an image, the model takes features, or the vector has no
                direction.
        """
        if self.encoder.input_kind != "images":
            raise DataError("image: the model takes features, not images")
        with self._decoders:
            image = decode_image(content, max_pixels=_MAX_PIXELS)
        return self._embed(image, "image", queries)

    def embed_numbers(
        self,
        vector: Sequence[float] | None,
        features: Sequence[float] | None,
        *,
        queries: bool = True,
    ) -> Floats:
        """Return a vector float32 [d], given as such or as features to embed.

        Raises:
            DataError: the numbers do not fit the model.
        """
        if features is None:
            return check_vectors([vector or ()], self.live.index.d, name="vector").reshape(-1)
        if self.encoder.input_kind != "features":
            raise DataError("features: the model takes images, not features")
        return self._embed(np.array(features, np.float32), "features", queries)

    def embed_item(self, id_: int) -> Floats:
        """Return the query vector of an item: of its original if there is one, else of its code.

        Raises:
            RequestError: no item has the id (404).
        """
        code = self.code_of(id_)
        dataset, row = self.catalogue.dataset, self.catalogue.row(id_)
        if dataset is not None and row is not None and dataset.kind == self.encoder.input_kind:
            with self._decoders:
                original = dataset.read(np.array([row]))[0]
            if original is not None:
                return self._embed(original, "item", queries=True)
        return decode(code[None], self.live.index.codebooks).reshape(-1)

    def _embed(self, values: NDArray[Any], kind: str, queries: bool) -> Floats:
        """Return the vector of features, or of an image uint8 [H, W, 3].

        Raises:
            DataError: the vector has no direction.
        """
        if self.encoder.input_kind == "images":
            values = resize_square(values, self.encoder.image_size).transpose(2, 0, 1)
        # One by one: on a CPU a batch is not faster, and it changes the last bits of the vectors.
        with self._network:
            vectors, valid = self.encoder.embed(values[None], queries=queries)
        if not valid[0]:
            raise DataError(f"{kind}: it has no direction in some sub-space, and so no code")
        return vectors.reshape(-1)

    # Codes --------------------------------------------------------------------------------------

    def encode(self, vector: Floats, *, foreign: bool) -> bytes:
        """Return the code of a new item.

        Args:
            foreign: the vector comes from the request, so it may be one of a query.

        Raises:
            DataError: the vector is not one of an item.
        """
        assert isinstance(self.encoder, Encoder)  # only a model folder is writable
        description = self.encoder.model.description if foreign else {}
        return encode_items(
            vector[None], self.encoder.model.codebooks, description, name="item"
        ).tobytes()

    def code_of(self, id_: int) -> Codes:
        """Return the code of an item. Raises RequestError: no item has the id (404)."""
        code = self.live.index.code_of(id_)
        if code is None:
            raise RequestError(404, f"no item has the id {id_}")
        return code

    # Searches -----------------------------------------------------------------------------------

    def search(self, vector: Floats, k: int, **filters: Ids) -> tuple[Floats, Ids]:
        """Find the k best items for a vector float32 [d].

        Args:
            filters: ``allow`` or ``deny``, as in :meth:`..indexes.index.Index.search`.

        Returns:
            Scores float32 [n] in descending order, and ids int64 [n], those of equal score in
            ascending order.
        """
        if filters:
            D, ids = self._search_batch([vector], k, **filters)
            passed = ids[0] != -1
            return D[0, passed], ids[0, passed]
        future: Future[tuple[Floats, Ids]] = Future()
        self._waiting.append((vector, k, future))
        # The thread that gets the lock searches for all waiting threads in one batch.
        with self._searching:
            if not future.done():
                batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
                vectors, counts, futures = zip(*batch, strict=True)
                try:
                    D, ids = self._search_batch(vectors, max(counts))
                except Exception as error:
                    for waiting in futures:
                        waiting.set_exception(error)
                else:
                    for row, waiting in enumerate(futures):
                        waiting.set_result((D[row, : counts[row]], ids[row, : counts[row]]))
        return future.result()

    def _search_batch(
        self, vectors: Sequence[Floats], k: int, **filters: Ids
    ) -> tuple[Floats, Ids]:
        """Return scores float32 [n, k] and ids int64 [n, k], with k limited to ntotal."""
        index = self.live.index
        if not index.ntotal:
            return np.empty((len(vectors), 0), np.float32), np.empty((len(vectors), 0), np.int64)
        k = min(k, index.ntotal)
        return index.search(np.stack(vectors), k, threads=self.settings.threads, **filters)
