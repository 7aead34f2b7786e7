"""The service without HTTP: a model, a live index and a catalogue of its items."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import HTTPException
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids, check_vectors
from ..codes.encode import decode
from ..data.base import Dataset
from ..data.images import decode_image
from ..encoder import Encoder, OnnxEncoder
from ..errors import DataError
from ..faissio.model import encode_items
from .catalogue import Catalogue
from .live import LiveIndex
from .schemas import Filters, Settings

_MAX_PIXELS = 25_000_000


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
        self.encoder = encoder
        self.live = live
        self.settings = settings or Settings()
        self.catalogue = Catalogue(live, dataset)
        self._network = threading.Lock()

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
        return self._embed(decode_image(content, max_pixels=_MAX_PIXELS), queries)

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
        return self._embed(np.array(features, np.float32), queries)

    def embed_item(self, id_: int) -> Floats:
        """Return the query vector of an item: of its original if there is one, else of its code.

        Raises:
            HTTPException: no item has the id (404).
        """
        code = self.code_of(id_)
        original = self.catalogue.original(id_)
        kind = "images" if original is not None and original.ndim == 3 else "features"
        if original is not None and kind == self.encoder.input_kind:
            return self._embed(original, queries=True)
        return decode(code[None], self.live.index.codebooks).reshape(-1)

    def _embed(self, values: NDArray[Any], queries: bool) -> Floats:
        """Return the vector of features [width], or of an image uint8 [H, W, 3]."""
        # One by one: on a CPU a batch is not faster, and it changes the last bits of the vectors.
        with self._network:
            vectors, valid = self.encoder.embed(values[None], queries=queries)
        if not valid[0]:
            raise DataError(
                f"{self.encoder.input_kind}: no direction in some sub-space, and so no code"
            )
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
        """Return the code of an item. Raises HTTPException: no item has the id (404)."""
        code = self.live.index.code_of(id_)
        if code is None:
            raise HTTPException(404, f"no item has the id {id_}")
        return code

    # Searches -----------------------------------------------------------------------------------

    def search(self, vector: Floats, request: Filters) -> tuple[Floats, Ids]:
        """Find the k best items for a vector float32 [d] among those that pass the filters.

        Returns:
            Scores float32 [n] in descending order, and ids int64 [n], those of equal score in
            ascending order.

        Raises:
            DataError: a label is unknown.
        """
        index = self.live.index
        with_labels = self.catalogue.with_labels
        if not index.ntotal:
            return np.empty(0, np.float32), np.empty(0, np.int64)
        deny = np.union1d(
            np.array(request.deny_ids or (), np.int64), with_labels(request.deny_labels or ())
        )
        allow: Ids | None = None
        if request.allow_ids is not None:
            allow = np.setdiff1d(np.array(request.allow_ids, np.int64), deny)
        if request.allow_labels is not None:
            labelled = np.setdiff1d(with_labels(request.allow_labels), deny)
            allow = labelled if allow is None else np.intersect1d(labelled, allow)
        D, ids = index.search(
            vector[None],
            min(request.k, index.ntotal),
            allow=allow,
            deny=deny if allow is None and len(deny) else None,  # of the two, it takes only one
        )
        passed = ids[0] != -1
        return D[0, passed], ids[0, passed]
