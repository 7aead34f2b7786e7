"""Loops compiled by Numba, which caches them, and SIMD instructions.

Only this file uses private parts of Numba: ``FunctionCache``, ``DefaultOptions._nrt``, ``cgutils``,
``make_array`` and ``magic_tuple``, tried with 0.61 to 0.68. Without the last four, threads are
somewhat slower, and a plain loop scans the codes.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba import types
from numba.core import caching, options

from .files import fingerprint

BLOCK = 64
"""Number of codes in a block."""
SHUFFLES = (
    ("+avx512bw", 64, "llvm.x86.avx512.pshuf.b.512"),
    ("+avx2", 32, "llvm.x86.avx2.pshuf.b"),
    ("+ssse3", 16, "llvm.x86.ssse3.pshuf.b.128"),
    ("aarch64", 16, "llvm.aarch64.neon.tbl1.v16i8"),
    ("arm64", 16, "llvm.aarch64.neon.tbl1.v16i8"),
)
"""Processor feature or architecture, number of bytes looked up at once, and instruction.

The first one that a processor has is used.
"""

Function = TypeVar("Function", bound=Callable[..., Any])
_HAS_NRT_OPTION = hasattr(getattr(options, "DefaultOptions", None), "_nrt")
_SLOW_TO_COMPILE = ("search", "search_together")  # the loops of exact search: some seconds
_FunctionCache: Any = caching.FunctionCache
_log = logging.getLogger(__name__)


class _Cache(_FunctionCache):  # type: ignore[misc]
    """Numba's cache of a loop, which also notices changes of other files that the loop calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        names = {str(getattr(value, "__module__", "")) for value in function.__globals__.values()}
        ours = sorted(name for name in names if name.partition(".")[0] == __package__)
        sources = [inspect.getsource(sys.modules[name]) for name in ours]
        self._cache_file._source_stamp = self._cache_file._source_stamp, fingerprint(*sources)

    def load_overload(self, *arguments: Any) -> Any:
        overload = super().load_overload(*arguments)
        if overload is None and self._py_func.__name__ in _SLOW_TO_COMPILE:
            _log.info("compiling the loops of exact search: some seconds, once per installation")
        return overload


def compiled(function: Function, *, counted: bool = True) -> Function:
    """Compile a function on its first call.

    Numba caches the machine code beside the function's file, or in the user's cache folder; if
    neither can be written, every process compiles the function again.

    Args:
        counted: count references to the arrays of the function.
    """
    flags = {"nogil": True, "boundscheck": False}
    if _HAS_NRT_OPTION:
        flags["_nrt"] = counted
    dispatcher: Any = cast(Any, numba.njit)(**flags)(function)
    with contextlib.suppress(RuntimeError):  # no folder for the cache can be written
        dispatcher._cache = _Cache(function)
    return cast(Function, dispatcher)


def inner(function: Function) -> Function:
    """Compile a function that makes no arrays and is called often by a compiled one.

    References to its arrays are not counted, since its caller holds them: threads would wait for
    each other at the counters.
    """
    return compiled(function, counted=False)


# SIMD instructions --------------------------------------------------------------------------------


def emit_scan(
    typingctx: Any, blocks: Any, block: Any, quantised: Any, base: Any, first: Any, early: Any
) -> Any:
    """Emit the instructions of :func:`.indexes.block_scan.scan_block`, as an intrinsic of Numba."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
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
            return call(shuffle, builder.shuffle_vector(entries, entries, copies), codewords)

        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        lut = context.make_array(signature.args[2])(context, builder, arguments[2]).data
        T = cgutils.unpack_tuple(builder, array.shape)[1]
        offset = builder.mul(arguments[1], builder.mul(T, number(BLOCK)))
        codes = builder.gep(array.data, [offset])
        start = builder.insert_element(repeated(0), arguments[3], ir.Constant(index, 0))
        start = builder.shuffle_vector(start, start, zeros)
        sums = [cgutils.alloca_once_value(builder, start) for _ in range(BLOCK // lanes)]

        def add_columns(first: Any, last: Any) -> Any:
            """Add the distances of columns ``first:last``, and return the bits so far."""
            with cgutils.for_range(builder, builder.sub(last, first)) as loop:
                t = builder.add(first, loop.index)
                tables = [
                    load(lut, builder.add(builder.mul(t, number(32)), number(16 * half)), table)
                    for half in range(2)
                ]
                for i, total in enumerate(sums):
                    row = builder.add(builder.mul(t, number(BLOCK)), number(i * lanes))
                    pairs = load(codes, row, vector)
                    low, high = builder.and_(pairs, repeated(15)), builder.lshr(pairs, repeated(4))
                    for entries, codewords in zip(tables, (low, high), strict=True):
                        distances = look_up(entries, codewords)
                        added = call(f"llvm.uadd.sat.v{lanes}i8", builder.load(total), distances)
                        builder.store(added, total)
            bits = number(0)
            for i, total in enumerate(sums):
                passed = builder.icmp_unsigned("!=", builder.load(total), repeated(255))
                passed = builder.zext(builder.bitcast(passed, ir.IntType(lanes)), long)
                bits = builder.or_(bits, builder.shl(passed, number(lanes * i)))
            return bits

        bits = cgutils.alloca_once_value(builder, add_columns(arguments[4], arguments[5]))
        with builder.if_then(builder.icmp_unsigned("!=", builder.load(bits), number(0))):
            builder.store(add_columns(arguments[5], T), bits)
        return builder.load(bits)

    kinds = blocks, types.int64, quantised, types.uint8, types.int64, types.int64
    return types.uint64(*kinds), generate
