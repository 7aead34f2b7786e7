"""Indexes on devices for tests: the CPU by name, the GPU's kernel as C++, and, marked ``gpu``, a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import faiss
import numpy as np
import pytest
import torch
from gpu_kernel import COMPILER, compiled
from index_factory import books, random_codes
from index_factory import queries as random_queries

KERNEL = pytest.param("kernel", marks=pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"))
HAS_GPU = torch.cuda.is_available() and hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]
on_devices = pytest.mark.parametrize("device", ["cpu", KERNEL, pytest.param("cuda:0", marks=ON_GPU)])
NO_GPU = pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")

Made = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Codes, codebooks, ids in no order, queries."""


@contextmanager
def placed(device: str) -> Iterator[str]:
    """Give the device to ask for; ``kernel`` is the GPU's kernel on the CPU."""
    if device != "kernel":
        yield device
        return
    with (
        mock.patch("gpq_faiss.gpu.kernel.compiled", compiled),
        mock.patch("gpq_faiss.gpu.index._searches_itself", return_value=True),
    ):
        yield "cpu"


def items(
    seed: int, M: int, K: int = 16, n: int = 1500, distinct: int | None = None, queries: int = 20
) -> Made:
    """Few distinct codes where asked, as training gives them."""
    codes, Z = random_codes(n, M, K, seed, distinct), books(M, K, 12)
    ids = np.random.default_rng(seed).permutation(2**40 + np.arange(n) * 7)
    return codes, Z, ids, random_queries(queries, M * 12, seed)
