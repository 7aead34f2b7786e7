"""A SIMD pass over a block of 64 codes that finds the codes that may reach the threshold.

FastScan (André et al., VLDB 2015) keeps quantised look-up tables in registers and rounds them once
for a whole scan. Here an entry of the quantised LUT is the distance of a codeword from the best one
of its codebook, in 254ths of what separates the best possible score from the threshold, rounded
down, and sums saturate at 255. So every code that reaches the threshold has a sum of at most 254,
however the sizes of the tables differ, and the tables become finer as the threshold rises.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import intrinsic, overload

from ..codes.checks import Codes
from ..compiled import BLOCK, compiled, emit_scan

_log = logging.getLogger(__name__)
Number = Any
"""An int64, a uint64 or a float32."""


def scan_block(
    blocks: Codes, block: Number, quantised: Codes, base: Number, first: Number, early: Number
) -> Number:
    """Return a bit for each code of a block, set if its quantised distances sum to at most 254.

    This plain loop is also the specification of the SIMD instructions.

    Args:
        blocks: uint8 [blocks, T, 64], two codewords of 4 bits in a byte.
        block: int64, number of the block.
        quantised: uint8 [2 * T, 16], the quantised LUT.
        base: uint8, added to each sum in place of the columns before ``first``.
        first: int64, the first column that is read.
        early: int64, at most T: columns from this one on are skipped if no code is left by then.
    """
    passed = np.uint64(0)
    for lane in range(blocks.shape[2]):
        total = np.int64(base)
        for t in range(first, blocks.shape[1]):
            pair = blocks[block, t, lane]
            total += np.int64(quantised[2 * t, pair & 15]) + np.int64(
                quantised[2 * t + 1, pair >> 4]
            )
        passed |= np.uint64(total < 255) << np.uint64(lane)
    return passed


@functools.cache
def _instructions() -> Callable[..., Number] | None:
    """Return the intrinsic if this version of Numba compiles it for this processor, and its results
    are correct."""
    try:
        emitted: Any = intrinsic(emit_scan)

        def trial(blocks: Codes, quantised: Codes) -> Number:
            return emitted(blocks, np.int64(1), quantised, np.uint8(9), np.int64(1), np.int64(2))

        blocks = np.arange(384, dtype=np.uint64).astype(np.uint8).reshape(2, 3, BLOCK)
        quantised = (np.arange(96, dtype=np.uint8).reshape(6, 16) * 7) % 100
        if compiled(trial)(blocks, quantised) == scan_block(blocks, 1, quantised, 9, 1, 2):
            scan: Callable[..., Number] = emitted
            return scan
    except Exception as error:  # private parts of Numba may fail in any way
        _log.debug("Numba does not compile the SIMD pass: %r", error)
    _log.warning(
        "exact search uses a slower loop: this version of Numba has no SIMD pass for this processor"
    )
    return None


@overload(scan_block, strict=False, inline="always")
def _scan(
    blocks: Any, block: Any, quantised: Any, base: Any, first: Any, early: Any
) -> Callable[..., Number]:
    """Choose the SIMD instructions or the plain loop when the search is compiled."""
    emitted = _instructions()
    if emitted is None:
        return scan_block

    def scan(
        blocks: Codes, block: Number, quantised: Codes, base: Number, first: Number, early: Number
    ) -> Number:
        return emitted(blocks, block, quantised, base, first, early)

    return scan
