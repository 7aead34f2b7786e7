"""The search for a query by one or several blocks of a GPU's threads, in CUDA C.

torch compiles it (by NVRTC: no compiler is needed). A block visits the tree of lists
(:mod:`.index`) in the order of their bounds, and scores the items of the lists whose bound exceeds
its threshold. It either keeps the k best keys, the last of which is its threshold, or writes out
all keys above a given threshold. Several blocks for one query visit the same tree, read different
lists of items, and share the threshold.

The float32 operations and their order are those of :mod:`..indexes.list_kernels`: separate products
and sums, no fused multiply-adds. So scores are the CPU's, bit for bit. A bound is added in the same
order, and rounding keeps order, so no item of a list exceeds it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ..errors import DeviceError

MOST = 1024
"""Maximum number of keys that a block keeps, the largest k."""
LEVELS = 6
"""Maximum number of columns by which lists are named."""
# Bytes of look-up tables that fit in a block's shared memory; larger ones are in global memory.
_SHARED = 1 << 14
_THREADS = 256  # each of them may add four keys to `best` beyond MOST, for which there is room

SOURCE = r"""
typedef long long Key;
typedef unsigned char Byte;
#ifndef LANES
#define LANES 32
#endif
#define INFINITE __int_as_float(0x7f800000)
#define LOWEST (-0x7fffffffffffffffLL - 1)
#define INNER (1LL << 40)

// The key of an item in row 0. The key of one in another row is smaller by the row number.
__device__ static Key key_of(float score)
{
    const int bits = __float_as_int(score + 0.0f);  // + 0.0 turns -0.0 into 0.0
    return (Key)(bits ^ ((bits >> 31) & 0x7fffffff)) * (1LL << 32) + 0xffffffffLL;
}

// Sort n keys in descending order. There must be room for the next power of two.
__device__ static void sort(Key* a, int n)
{
    int P = 1;
    while (P < n) P *= 2;
    for (int i = n + threadIdx.x; i < P; i += THREADS) a[i] = LOWEST;
    for (int size = 2; size <= P; size *= 2)
        for (int stride = size / 2; stride; stride /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < P / 2; i += THREADS) {
                const int low = 2 * i - (i & (stride - 1)), high = low + stride;
                const Key x = a[low], y = a[high];
                if ((x < y) == !(low & size)) { a[low] = y; a[high] = x; }
            }
        }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) search(
    const float* xq, const float* Z, const Byte* columns, double items, const int* members,
    float* scratch,
    const Key* starts, const Key* sizes, const Byte* words, const Byte* inner, int roots,
    int parts, int k, Key* thresholds, const Key* lims, Key* out, Key* counts, int* overflows)
{
    __shared__ float base[PAIRED ? COLUMNS * 32 : 1];
#if KEPT
    __shared__ float table[COLUMNS * ENTRIES];
#else
    float* table = scratch + (Key)blockIdx.x * COLUMNS * ENTRIES;
#endif
    __shared__ float highest[COLUMNS], most[COLUMNS * (PAIRED + 1)], largest[M];
    __shared__ Key child[LEVELS][256], first[LEVELS], best[2 * MOST], threshold;
    __shared__ int number[LEVELS], next_child[LEVELS];
    __shared__ Byte path[LEVELS];
    __shared__ unsigned long long count;
    const Key q = blockIdx.x / parts, part = blockIdx.x % parts, n = (Key)items;
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;

    // Look-up tables
    float* const scores = PAIRED ? base : table;
    const int width = PAIRED ? 16 : K;
    for (int e = threadIdx.x; e < (PAIRED ? COLUMNS * 32 : M * K); e += THREADS) {
        const int m = e / width, word = e % width;
        float score = m < M ? -INFINITE : 0;
        if (m < M && word < K) {
            score = 0;
            for (int j = 0; j < D; j++)
                score = __fadd_rn(
                    score, __fmul_rn(xq[(q * M + m) * D + j], Z[((Key)m * K + word) * D + j]));
        }
        scores[e] = score;
    }
    __syncthreads();
    for (int m = threadIdx.x; m < COLUMNS * (PAIRED + 1); m += THREADS) {
        float high = scores[m * width], size = 0;
        for (int word = 0; word < (m < M ? K : 1); word++) {
            const float score = scores[m * width + word], far = fabsf(score);
            high = fmaxf(high, score);
            if (!(far <= size)) size = far < INFINITE ? far : INFINITE;  // also of NaN
        }
        most[m] = high;
        if (m < M) largest[m] = size;
    }
#if PAIRED
    for (int e = threadIdx.x; e < COLUMNS * 256; e += THREADS)
        table[e] = base[(e / 256 * 2 + 1) * 16 + e % 256 / 16] + base[e / 256 * 32 + e % 16];
#endif
    __syncthreads();
    for (int t = threadIdx.x; t < COLUMNS; t += THREADS)
        highest[t] = PAIRED ? most[2 * t + 1] + most[2 * t] : most[t];
    if (threadIdx.x == 0) {
        float total = 0;
        for (int m = 0; m < M; m++) total += largest[m];
        overflows[blockIdx.x] = !(total < INFINITE);
        count = 0;
        threshold = k ? LOWEST : thresholds[q];
        number[0] = -1;
    }
    __syncthreads();
    if (overflows[blockIdx.x]) return;

    int level = 0;
    Key begin = 0, size = roots;  // of the lists that are opened next
    bool opens = true;
    while (level >= 0) {
        // Open the lists whose bounds exceed the threshold: first those that hold lists, then those
        // that hold items, each in descending order of their bounds.
        if (opens) {
            if (threadIdx.x == 0) {
                number[level] = next_child[level] = 0;
                first[level] = begin;
                const Key other = *(volatile Key*)&thresholds[q];
                if (k && other > threshold) threshold = other;
            }
            __syncthreads();
            for (int c = threadIdx.x; c < size; c += THREADS) {
                float score = 0;
#pragma unroll
                for (int t = 0; t < COLUMNS; t += TOGETHER) {
                    float pair = t < level ? table[t * ENTRIES + path[t]]
                        : t == level ? table[t * ENTRIES + words[begin + c]] : highest[t];
                    if (TOGETHER == 2 && t + 1 < COLUMNS)
                        pair += t + 1 < level ? table[(t + 1) * ENTRIES + path[t + 1]]
                            : t + 1 == level ? table[(t + 1) * ENTRIES + words[begin + c]]
                            : highest[t + 1];
                    score = t ? score + pair : pair;
                }
                const Key key = key_of(score);
                if (key > threshold && (inner[begin + c] || (begin + c) % parts == part))
                    child[level][atomicAdd(&number[level], 1)] =
                        (inner[begin + c] ? INNER : 0) + ((key >> 32) + (1LL << 31)) * 256 + c;
            }
            __syncthreads();
            sort(child[level], number[level]);
            opens = false;
        }
        const int next = next_child[level];
        if (next < number[level] && child[level][next] >= INNER) {
            const Key packed = child[level][next] - INNER, list = first[level] + packed % 256;
            const bool reaches =
                (packed / 256 - (1LL << 31)) * (1LL << 32) + 0xffffffffLL > threshold;
            __syncthreads();
            if (threadIdx.x == 0) { next_child[level] = next + 1; path[level] = words[list]; }
            if (reaches) {
                begin = starts[list], size = sizes[list], opens = true, level++;
            }
            __syncthreads();
            continue;
        }
        // Score the items of the other lists, a list for each warp, until there are so many keys
        // that a sort can raise the threshold.
        int entry = next + warp;
        Key from = 0;
        for (;;) {
            const unsigned long long limit = !k ? ~0ull
                : threshold == LOWEST ? k - 1 : k + 256 < MOST ? k + 256 : MOST;
            while (entry < number[level]
                   && __shfl_sync(~0u, *(volatile unsigned long long*)&count, 0) <= limit) {
                const Key packed = child[level][entry], list = first[level] + packed % 256;
                const Key start = starts[list];
                Key stop = start + sizes[list];
                // The codes of a list of the last level are equal, in the order of their rows.
                if (k && level == COLUMNS - 1 && stop > start + k) stop = start + k;
                if ((packed / 256 - (1LL << 31)) * (1LL << 32) + 0xffffffffLL <= threshold) {
                    entry = number[level];  // the bounds of the lists after this one are no higher
                    break;
                }
                const Key i = (start & ~3LL) + from + 4 * lane;  // four items
                float score[4] = {0, 0, 0, 0};
                bool any = false, reaches[4];
                Key key[4];
                if (i < stop) {
#pragma unroll
                    for (int t = 0; t < COLUMNS; t += TOGETHER) {
                        const unsigned four = *(const unsigned*)(columns + t * n + i);
                        const unsigned more = TOGETHER == 2 && t + 1 < COLUMNS
                            ? *(const unsigned*)(columns + (t + 1) * n + i) : 0;
#pragma unroll
                        for (int u = 0; u < 4; u++) {
                            float pair = table[t * ENTRIES + (four >> 8 * u & 255)];
                            if (TOGETHER == 2 && t + 1 < COLUMNS)
                                pair += table[(t + 1) * ENTRIES + (more >> 8 * u & 255)];
                            score[u] = t ? score[u] + pair : pair;
                        }
                    }
                }
#pragma unroll
                for (int u = 0; u < 4; u++) {
                    key[u] = key_of(score[u]);
                    reaches[u] = i + u >= start && i + u < stop && key[u] > threshold;
                    if (reaches[u]) {
                        key[u] -= members[i + u];
                        reaches[u] = key[u] > threshold;
                    }
                    any |= reaches[u];
                }
                if (__any_sync(~0u, any)) {
#pragma unroll
                    for (int u = 0; u < 4; u++) {
                        const unsigned mask = __ballot_sync(~0u, reaches[u]);
                        unsigned long long place = 0;
                        if (lane == 0 && mask)
                            place = atomicAdd(&count, (unsigned long long)__popc(mask));
                        place = __shfl_sync(~0u, place, 0) + __popc(mask & ((1u << lane) - 1));
                        if (!reaches[u]) continue;
                        if (k) best[place] = key[u];
                        else if (out) out[lims[blockIdx.x] + place] = key[u];
                    }
                }
                from += 4 * LANES;
                if ((start & ~3LL) + from >= stop) { entry += THREADS / LANES; from = 0; }
            }
            const bool goes_on = __syncthreads_or(entry < number[level]);
            const unsigned long long reached = count;
            __syncthreads();
            if (reached > limit) {
                sort(best, (int)reached);
                if (threadIdx.x == 0) {
                    const Key other = atomicMax(&thresholds[q], best[k - 1]);
                    count = k;
                    threshold = max(threshold, max(other, best[k - 1]));
                }
                __syncthreads();
            }
            if (!goes_on) break;
        }
        level--;
    }
    if (k) {
        sort(best, (int)count);
        for (int i = threadIdx.x; i < k; i += THREADS)
            out[(Key)blockIdx.x * k + i] = i < count ? best[i] : LOWEST;
    } else if (threadIdx.x == 0) {
        counts[blockIdx.x] = count;
    }
}
"""


def source_of(M: int, K: int, d: int, threads: int = _THREADS) -> str:
    """Return the source for codebooks [M, K, d] and blocks of ``threads``."""
    assert 4 * threads <= MOST  # what the warps add beyond a limit has room in `best`
    paired = K <= 16
    columns, entries = _tables(M, K)
    values = {
        "M": M,
        "K": K,
        "D": d,
        "PAIRED": int(paired),
        "COLUMNS": columns,
        "ENTRIES": entries,
        "TOGETHER": 1 if paired else 2,
        "KEPT": int(scratch_of(M, K) == 0),
        "LEVELS": LEVELS,
        "MOST": MOST,
        "THREADS": threads,
    }
    return "".join(f"#define {name} {value}\n" for name, value in values.items()) + SOURCE


@lru_cache(maxsize=64)
def compiled(M: int, K: int, d: int, device: torch.device) -> Callable[[int, list[Any]], None]:
    """Compile the kernel for a GPU.

    Returns:
        A function of the number of blocks and the arguments that runs the kernel.

    Raises:
        DeviceError: torch cannot compile it.
    """
    try:
        with torch.cuda.device(device):
            # A private function of torch, tried with 2.15; without it the CPU searches.
            kernel: Any = torch.cuda._compile_kernel(source_of(M, K, d), "search")
    except (AttributeError, RuntimeError, OSError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[-1]
        raise DeviceError(
            f"torch cannot compile the search for {device} ({reason}): use --device cpu"
        ) from None

    def run(blocks: int, arguments: list[Any]) -> None:
        with torch.cuda.device(device):
            kernel((blocks, 1, 1), (_THREADS, 1, 1), arguments)

    return run


def scratch_of(M: int, K: int) -> int:
    """Return the floats of scratch memory that a block needs for tables too large for its own."""
    columns, entries = _tables(M, K)
    return columns * entries if columns * entries * 4 > _SHARED else 0


def _tables(M: int, K: int) -> tuple[int, int]:
    return ((M + 1) // 2, 256) if K <= 16 else (M, K)
