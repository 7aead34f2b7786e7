"""Calls of Faiss' GPU indexes with tensors, without host copies and within a memory budget."""

from __future__ import annotations

from typing import Any

import faiss
import torch
from torch import Tensor

from ..errors import DeviceError
from .memory import FaissBudget

_TINY = 2.0**-126
_EXPONENT = 0x7F80_0000  # of float32


def faiss_search(index: Any, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Search a Faiss index with a tensor, float32 [q, D]: results are on the same device, without host copies.

    Like ``faiss.contrib.torch_utils``, which is not imported as it replaces methods of all Faiss classes in the process, after which
    ``search(..., params=...)`` with arrays fails. On a GPU the work is queued on torch's current stream.

    Args:
        index: on the GPU of ``queries``, or on the CPU for queries there.

    Raises:
        DeviceError: Faiss failed on the GPU, usually out of memory.
    """
    width = int(index.d)
    # Scaling by a power of two is exact, and avoids underflow of tiny queries with tiny centroids.
    scale = queries.abs().amax(dim=1, keepdim=True).view(torch.int32).bitwise_and(_EXPONENT)
    factor = scale.view(torch.float32).clamp_min(_TINY)
    queries = queries / factor
    if queries.shape[1] < width:  # padded like the codes
        queries = torch.nn.functional.pad(queries, (0, width - queries.shape[1]))
    queries = queries.contiguous()
    D = torch.empty((len(queries), k), dtype=torch.float32, device=queries.device)
    found = torch.empty((len(queries), k), dtype=torch.int64, device=queries.device)

    def run() -> None:
        asked = (len(queries), faiss.cast_integer_to_float_ptr(queries.data_ptr()), k)
        results = (
            faiss.cast_integer_to_float_ptr(D.data_ptr()),
            faiss.cast_integer_to_idx_t_ptr(found.data_ptr()),
        )
        index.search_c(*asked, *results)

    if queries.device.type != "cuda":
        run()
        return D * factor, found
    with torch.cuda.device(queries.device):
        resources: Any = index.getResources()
        device = int(index.getDevice())
        before = resources.getDefaultStream(device)
        stream = torch.cuda.current_stream().cuda_stream
        resources.setDefaultStream(device, faiss.cast_integer_to_cudastream_t(stream))  # type: ignore[attr-defined]
        try:
            run()
        except RuntimeError as error:
            raise DeviceError(f"Faiss failed on GPU {device}: {last_line(error)}") from None
        finally:
            resources.setDefaultStream(device, before)
    return D * factor, found


def last_line(error: RuntimeError) -> str:
    """The message of a Faiss error, without files, lines and conditions."""
    return (str(error).strip().splitlines() or ["no reason given"])[-1]


def faiss_within(index: Any, queries: Tensor, k: int, budget: FaissBudget | None) -> tuple[Tensor, Tensor]:
    """:func:`faiss_search` in batches within the budget."""
    rows = len(queries) if budget is None else budget.rows(k)
    if len(queries) <= rows:
        return faiss_search(index, queries, k)
    parts = [faiss_search(index, queries[start : start + rows], k) for start in range(0, len(queries), rows)]
    return torch.cat([scores for scores, _ in parts]), torch.cat([found for _, found in parts])
