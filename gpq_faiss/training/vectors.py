"""Output vectors in training, and the validation by them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.labels import Labels
from ..data.reader import Reader
from ..evaluation.ranking import rank_codes
from ..methods.trainable import TrainableMethod
from ..nn.device import full_float32, image_batch, to_input


@torch.no_grad()
def embed_rows(
    method: TrainableMethod,
    reader: Reader,
    rows: NDArray[np.int64],
    device: torch.device,
    batch: int = 1000,
    *,
    queries: bool = False,
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Vectors of the items ``rows``, int64 [n], from the exported network; with ``queries`` its query vectors, if it has such.

    Returns:
        float32 [m, D] of the m readable items, and bool [n], which items these are.
    """
    exported = method.exported()
    exported.eval()
    network = getattr(exported, "queries", exported) if queries else exported
    parts, there = [], []
    if reader.image_size:
        batch = image_batch(batch, reader.image_size)
    for values, ok in reader.stream(rows[i : i + batch] for i in range(0, len(rows), batch)):
        with full_float32():
            parts.append(network(to_input(values, device)).float().cpu().numpy())
        there.append(ok)
    return np.concatenate(parts), np.concatenate(there)


def validation_map(
    method: TrainableMethod, reader: Reader, rows: NDArray[np.int64], labels: Labels, device: torch.device
) -> float:
    """Tie-aware mAP of the held-out rows, each as a query against the codes of the others."""
    vectors, ok = embed_rows(method, reader, rows, device)
    xq, _ = embed_rows(method, reader, rows, device, queries=True)
    coder = method.coder()
    held = labels.take(rows[ok])
    codes = coder.encode(vectors)
    own = np.arange(len(vectors))
    return rank_codes(lambda q, distinct: coder.score(xq[q], distinct), codes, held, held, exclude=own).map
