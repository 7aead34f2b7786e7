"""Network inputs and output vectors in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.labels import Labels
from ..data.reader import Reader
from ..evaluation.ranking import rank_codes
from ..methods.trainable import TrainableMethod
from ..nn.device import full_float32, image_batch


def to_input(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """A batch as network input: float32 on ``device``; uint8 images become [0, 1], channels last."""
    x = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    x = x.to(device, non_blocking=True)
    if x.dtype == torch.uint8:
        x = x.to(memory_format=torch.channels_last).float().div_(255)
    return x


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
    """Vectors of items from the exported network.

    Args:
        method, device: the method and its device.
        reader, rows: the items, int64 [n].
        batch: items per batch; fewer for large images.
        queries: whether to compute query vectors, if the method distinguishes them.

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
    return rank_codes(
        lambda q, distinct: coder.score(xq[q], distinct),
        codes,
        held,
        held,
        exclude=np.arange(len(vectors)),
    ).map
