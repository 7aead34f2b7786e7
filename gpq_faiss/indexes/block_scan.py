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
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from ..codes.checks import Codes
from ..compiled import compiled

_log = logging.getLogger(__name__)
Number = Any
"""An int64, a uint64 or a float32."""
BLOCK = 64
"""Number of codes in a block."""
SHUFFLES: tuple[tuple[str, int, str | None], ...] = (
    ("+avx512bw", 64, "llvm.x86.avx512.pshuf.b.512"),
    ("+avx2", 32, "llvm.x86.avx2.pshuf.b"),
    ("+ssse3", 16, "llvm.x86.ssse3.pshuf.b.128"),
    ("aarch64", 16, "llvm.aarch64.neon.tbl1.v16i8"),
    ("arm64", 16, "llvm.aarch64.neon.tbl1.v16i8"),
    ("", 16, None),  # any other processor
)
"""Processor feature or architecture, number of bytes looked up at once, and instruction."""


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


def emit_scan(
    typingctx: Any, blocks: Any, block: Any, quantised: Any, base: Any, first: Any, early: Any
) -> Any:
    """Emit the instructions of :func:`scan_block`, as an intrinsic of Numba."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # Private: cgutils, make_array and magic_tuple, as in Numba 0.61 to 0.68.
        from numba.core import cgutils as _cgutils

        cgutils: Any = _cgutils  # without annotations
        triple, _, features = context.codegen().magic_tuple()
        names = ("", triple.partition("-")[0], *features.split(","))
        lanes, shuffle = next((lanes, call) for name, lanes, call in SHUFFLES if name in names)
        byte, index, long = ir.IntType(8), ir.IntType(32), ir.IntType(64)
        table, vector = ir.VectorType(byte, 16), ir.VectorType(byte, lanes)
        copies = ir.Constant(ir.VectorType(index, lanes), [lane % 16 for lane in range(lanes)])
        zeros = ir.Constant(ir.VectorType(index, lanes), [0] * lanes)

        def number(value: int) -> Any:
            return ir.Constant(long, value)

        def repeated(value: int) -> Any:
            return ir.Constant(vector, [value] * lanes)

        def call(name: str, a: Any, b: Any) -> Any:
            kind = ir.FunctionType(vector, [vector, vector])
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b])

        def load(start: Any, offset: Any, kind: Any) -> Any:
            address = builder.bitcast(builder.gep(start, [offset]), kind.as_pointer())
            return builder.load(address, align=1)

        def look_up(entries: Any, codewords: Any) -> Any:
            entries = builder.shuffle_vector(entries, entries, copies)
            if shuffle:
                return call(shuffle, entries, codewords)
            distances = repeated(0)
            for lane in range(lanes):
                number = ir.Constant(index, lane)
                codeword = builder.extract_element(codewords, number)
                distance = builder.extract_element(entries, codeword)
                distances = builder.insert_element(distances, distance, number)
            return distances

        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        lut = context.make_array(signature.args[2])(context, builder, arguments[2]).data
        T = cgutils.unpack_tuple(builder, array.shape)[1]
        offset = builder.mul(arguments[1], builder.mul(T, number(BLOCK)))
        codes = builder.gep(array.data, [offset])
        start = builder.insert_element(repeated(0), arguments[3], ir.Constant(index, 0))
        start = builder.shuffle_vector(start, start, zeros)
        # Two sums for each vector of codes, as each addition depends on the one before.
        sums = [cgutils.alloca_once_value(builder, repeated(0)) for _ in range(2 * BLOCK // lanes)]
        for total in sums[::2]:
            builder.store(start, total)

        def add_columns(first: Any, last: Any) -> Any:
            """Add the distances of columns ``first:last``, and return the bits so far."""
            with cgutils.for_range(builder, builder.sub(last, first)) as loop:
                t = builder.add(first, loop.index)
                tables = [
                    load(lut, builder.add(builder.mul(t, number(32)), number(16 * half)), table)
                    for half in range(2)
                ]
                for i, total in enumerate(sums):
                    row = builder.add(builder.mul(t, number(BLOCK)), number(i // 2 * lanes))
                    pairs = load(codes, row, vector)
                    low, high = builder.and_(pairs, repeated(15)), builder.lshr(pairs, repeated(4))
                    distances = look_up(tables[i % 2], high if i % 2 else low)
                    added = call(f"llvm.uadd.sat.v{lanes}i8", builder.load(total), distances)
                    builder.store(added, total)
            bits = number(0)
            for i in range(BLOCK // lanes):
                pair = builder.load(sums[2 * i]), builder.load(sums[2 * i + 1])
                total = call(f"llvm.uadd.sat.v{lanes}i8", *pair)
                passed = builder.icmp_unsigned("!=", total, repeated(255))
                passed = builder.bitcast(passed, ir.IntType(lanes))
                if lanes < BLOCK:
                    passed = builder.shl(builder.zext(passed, long), number(lanes * i))
                bits = builder.or_(bits, passed)
            return bits

        bits = cgutils.alloca_once_value(builder, add_columns(arguments[4], arguments[5]))
        with builder.if_then(builder.icmp_unsigned("!=", builder.load(bits), number(0))):
            builder.store(add_columns(arguments[5], T), bits)
        return builder.load(bits)

    kinds = blocks, types.int64, quantised, types.uint8, types.int64, types.int64
    return types.uint64(*kinds), generate


@functools.cache
def _instructions() -> Callable[..., Number] | None:
    """Return the intrinsic if this version of Numba compiles it, and its results are correct."""
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
    _log.warning("exact search uses a slower loop, as this version of Numba lacks the SIMD pass")
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
