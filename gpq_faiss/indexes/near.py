"""Which of 64 codes may reach a score, by score tables in registers.

FastScan (André et al., VLDB 2015) looks score tables up in registers, rounded once for a whole scan. Here a table says how far each
codeword is behind the best of its codebook, in 254ths of what the k-th score so far leaves, rounded down, and sums stop at 255. So a code
that may be a result has at most 254, whatever the sizes of the tables are, and the steps become finer as results get better.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

from ..codes.checks import Codes

cgutils: Any = _cgutils  # without annotations
BLOCK = 64
"""Codes in a block."""
_SHUFFLES: tuple[tuple[str, int, str | None], ...] = (
    ("+avx512bw", 64, "llvm.x86.avx512.pshuf.b.512"),
    ("+avx2", 32, "llvm.x86.avx2.pshuf.b"),
    ("+ssse3", 16, "llvm.x86.ssse3.pshuf.b.128"),
    ("aarch64", 16, "llvm.aarch64.neon.tbl1.v16i8"),
    ("arm64", 16, "llvm.aarch64.neon.tbl1.v16i8"),
    ("", 16, None),  # any other processor
)
"""A feature or kind of processors, bytes that they look up at once, and the instruction."""


def put(blocks: Codes, row: int, columns: Codes) -> None:
    """Put codes uint8 [n, T] into uint8 [blocks, T, 64] from a row on."""
    n, at = len(columns), row % BLOCK
    first = min(n, -at % BLOCK)  # these fill a block that has others
    if first:
        blocks[row // BLOCK, :, at : at + first] = columns[:first].T
    whole, left = divmod(n - first, BLOCK)
    block = (row + first) // BLOCK
    if whole:
        blocks[block : block + whole] = (
            columns[first : n - left].reshape(whole, BLOCK, -1).transpose(0, 2, 1)
        )
    if left:
        blocks[block + whole, :, :left] = columns[n - left :].T


def _near(
    typingctx: Any, blocks: Any, block: Any, steps: Any, base: Any, first: Any, early: Any
) -> Any:
    """A bit for each code of a block: whether it has at most 254 steps, with ``base`` in place of the columns before the first.

    Args:
        blocks: uint8 [blocks, T, 64], two codewords of 4 bits in a byte.
        steps: uint8 [2 * T, 16].
        base, first: uint8 and int64.
        early: a column, at most T, from which on none is read if no code is left.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        triple, _, features = context.codegen().magic_tuple()
        known = ("", triple.partition("-")[0], *features.split(","))
        lanes, shuffle = next((lanes, name) for what, lanes, name in _SHUFFLES if what in known)
        byte, long = ir.IntType(8), ir.IntType(64)
        table, vector = ir.VectorType(byte, 16), ir.VectorType(byte, lanes)
        everywhere = ir.Constant(
            ir.VectorType(ir.IntType(32), lanes), [lane % 16 for lane in range(lanes)]
        )

        def number(value: int) -> Any:
            return ir.Constant(long, value)

        def bytes_of(value: int) -> Any:
            return ir.Constant(vector, [value] * lanes)

        def call(name: str, a: Any, b: Any) -> Any:
            kind = ir.FunctionType(vector, [vector, vector])
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b])

        def add(a: Any, b: Any) -> Any:
            return call(f"llvm.uadd.sat.v{lanes}i8", a, b)

        def load(start: Any, place: Any, kind: Any) -> Any:
            return builder.load(
                builder.bitcast(builder.gep(start, [place]), kind.as_pointer()), align=1
            )

        def looked_up(entries: Any, words: Any) -> Any:
            entries = builder.shuffle_vector(entries, entries, everywhere)
            if shuffle:
                return call(shuffle, entries, words)
            found = bytes_of(0)
            for lane in range(lanes):
                place = ir.Constant(ir.IntType(32), lane)
                entry = builder.extract_element(entries, builder.extract_element(words, place))
                found = builder.insert_element(found, entry, place)
            return found

        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        entries = context.make_array(signature.args[2])(context, builder, arguments[2]).data
        T = cgutils.unpack_tuple(builder, array.shape)[1]
        codes = builder.gep(array.data, [builder.mul(arguments[1], builder.mul(T, number(BLOCK)))])
        start = builder.insert_element(bytes_of(0), arguments[3], ir.Constant(ir.IntType(32), 0))
        start = builder.shuffle_vector(
            start, start, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        )
        sums = [cgutils.alloca_once_value(builder, bytes_of(0)) for _ in range(2 * BLOCK // lanes)]
        for part in range(BLOCK // lanes):
            builder.store(start, sums[2 * part])

        def add_columns(first: Any, last: Any) -> Any:
            """Add the steps of some columns; the result so far."""
            with cgutils.for_range(builder, builder.sub(last, first)) as loop:
                t = builder.add(first, loop.index)
                tables = [
                    load(entries, builder.add(builder.mul(t, number(32)), number(16 * half)), table)
                    for half in range(2)
                ]
                for part in range(BLOCK // lanes):
                    place = builder.add(builder.mul(t, number(BLOCK)), number(lanes * part))
                    both = load(codes, place, vector)
                    words = builder.and_(both, bytes_of(15)), builder.lshr(both, bytes_of(4))
                    for half in range(2):  # two sums, as each addition waits for the last
                        total = sums[2 * part + half]
                        builder.store(
                            add(builder.load(total), looked_up(tables[half], words[half])), total
                        )
            bits = number(0)
            for part in range(BLOCK // lanes):
                total = add(builder.load(sums[2 * part]), builder.load(sums[2 * part + 1]))
                passed = builder.bitcast(
                    builder.icmp_unsigned("!=", total, bytes_of(255)), ir.IntType(lanes)
                )
                if lanes < BLOCK:
                    passed = builder.shl(builder.zext(passed, long), number(lanes * part))
                bits = builder.or_(bits, passed)
            return bits

        bits = cgutils.alloca_once_value(builder, add_columns(arguments[4], arguments[5]))
        with builder.if_then(builder.icmp_unsigned("!=", builder.load(bits), number(0))):
            builder.store(add_columns(arguments[5], T), bits)
        return builder.load(bits)

    return types.uint64(blocks, types.int64, steps, types.uint8, types.int64, types.int64), generate


near: Any = intrinsic(_near)
