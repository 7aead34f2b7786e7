"""The kernel of :mod:`gpq_faiss.gpu.kernel` as C++ for the CPU, a block being one thread: what it computes, but no races of threads."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import lru_cache

import torch

from gpq_faiss.gpu import kernel

COMPILER = shutil.which("g++")
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
template <class A> static A atomicMax(A* p, A value) { A old = *p; *p = max(old, value); return old; }
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
