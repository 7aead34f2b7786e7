"""Indexes on devices for tests: the CPU by name, the kernel of :mod:`gpq_faiss.gpu.kernel` as C++
for the CPU, and, marked ``gpu``, a GPU. In C++ a block is one thread: what the kernel computes, but
no races of threads.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from unittest import mock

import faiss
import numpy as np
import pytest
import torch
from index_factory import books, random_codes
from index_factory import queries as random_queries

from gpq_faiss.gpu import kernel

COMPILER = shutil.which("g++")
KERNEL = pytest.param(
    "kernel", marks=pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
)
HAS_GPU = (
    torch.cuda.is_available()
    and hasattr(faiss, "StandardGpuResources")
    and faiss.get_num_gpus() > 0
)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]
on_devices = pytest.mark.parametrize(
    "device", ["cpu", KERNEL, pytest.param("cuda:0", marks=ON_GPU)]
)
NO_GPU = pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")

_HEAD = """
#include <cmath>
#include <cstring>
#define LANES 1
#define __device__
#define __global__
#define __shared__ static
#define __syncthreads()
#define __syncthreads_or(p) (p)
#define __any_sync(mask, p) (p)
#define __launch_bounds__(threads)
#define __ballot_sync(mask, p) ((p) ? 1u : 0u)
#define __shfl_sync(mask, value, lane) (value)
#define __popc __builtin_popcount
#define __fmul_rn(a, b) ((a) * (b))
#define __fadd_rn(a, b) ((a) + (b))
struct { unsigned x; } blockIdx, threadIdx;
template <class A, class B> static A __as(B b) { A a; std::memcpy(&a, &b, sizeof a); return a; }
#define __float_as_int __as<int, float>
#define __int_as_float __as<float, int>
template <class A> static A atomicAdd(A* p, A value) { A old = *p; *p += value; return old; }
template <class A> static A max(A a, A b) { return a > b ? a : b; }
template <class A> static A atomicMax(A* p, A value) {
    A old = *p; *p = max(old, value); return old;
}
extern "C" void block(unsigned number) { blockIdx.x = number; }
"""


@lru_cache
def _built(M, K, d):
    text = _HEAD + kernel.source_of(M, K, d, 1)
    with tempfile.NamedTemporaryFile(suffix=".so") as out:
        options = ["-O1", "-ffp-contract=off", "-shared", "-fPIC", "-xc++", "-o", out.name, "-"]
        subprocess.run([COMPILER, *options], input=text.encode(), check=True)
        return ctypes.CDLL(out.name)


def compiled(M, K, d, device):
    """In place of :func:`gpq_faiss.gpu.kernel.compiled`."""
    library = _built(M, K, d)

    def passed(value):
        if isinstance(value, torch.Tensor):
            return ctypes.c_void_p(value.data_ptr())
        return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int(value)

    def run(blocks, arguments):
        values = [passed(value) for value in arguments]
        for number in range(blocks):
            library.block(number)
            library.search(*values)

    return run


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
        mock.patch("gpq_faiss.gpu.index._is_gpu", return_value=True),
    ):
        yield "cpu"


def items(
    seed: int, M: int, K: int = 16, n: int = 1500, distinct: int | None = None, queries: int = 20
) -> Made:
    """Few distinct codes where asked, as training gives them."""
    codes, Z = random_codes(n, M, K, seed, distinct), books(M, K, 12)
    ids = np.random.default_rng(seed).permutation(2**40 + np.arange(n) * 7)
    return codes, Z, ids, random_queries(queries, M * 12, seed)
