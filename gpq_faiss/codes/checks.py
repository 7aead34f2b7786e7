"""Checks of arrays before they are passed to Faiss, which itself checks little."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError, UsageError, one_line

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Ids = NDArray[np.int64]

CODEWORDS = (4, 8, 16, 32, 64, 128, 256)
"""Numbers of codewords that a codebook may have: 2 to 8 bits."""
NORM_TOLERANCE = 1e-4
"""Largest deviation of a codeword's norm from 1."""


def to_numpy(value: Any) -> Any:
    """Return a tensor, a sparse or a masked array (masked: None) as an array; other objects
    unchanged."""
    value = value.toarray() if hasattr(value, "toarray") else value  # sparse, of scipy
    value = np.array(value.tolist(), object) if np.ma.is_masked(value) else value
    if not hasattr(value, "detach"):
        return np.asarray(value) if isinstance(value, np.ndarray) else value
    value = value.detach().cpu().to_dense()
    # Numpy lacks bfloat16 and floats of 8 bits.
    return (value if hasattr(np, str(value.dtype)[len("torch.") :]) else value.float()).numpy()


def as_array(x: Any, name: str) -> NDArray[Any]:
    """Return ``x``, also a tensor, as an array.

    Raises:
        DataError: it is not an array, for example because its rows have different lengths.
    """
    try:
        return np.asarray(to_numpy(x))
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{name}: not an array of numbers ({one_line(error)})") from None


def check_count(value: Any, name: str, *, minimum: int = 1, maximum: int = (1 << 31) - 1) -> int:
    """Return ``value`` as an integer.

    Raises:
        UsageError: it is not an integer from ``minimum`` to ``maximum``.
    """
    is_integer = type(value) is int or isinstance(value, np.integer)
    if not is_integer or not minimum <= value <= maximum:
        raise UsageError(
            f"{name} = {value!r}: it must be a whole number from {minimum:,} to {maximum:,}"
        )
    return int(value)


def check_codebooks(Z: ArrayLike, *, name: str = "codebooks", unit: bool = True) -> Floats:
    """Check codebooks for use in Faiss, and return them as C-contiguous float32 [M, K, d].

    Faiss encodes by the L2-nearest codeword, which has the largest inner product (as in GPQ) only
    if all codewords have equal norm. So codewords must be unit-norm.

    Args:
        name: how errors name the codebooks.
        unit: require unit norms; if false, codewords need only be finite.

    Raises:
        DataError: the type or the shape is wrong, K is not a power of two from 4 to 256, a value is
            not finite, or a norm differs from 1 by more than 1e-4.
    """
    array = as_array(Z, name)
    is_float32 = array.dtype == np.float32 and array.ndim == 3
    if not is_float32 or 0 in array.shape or array.shape[1] not in CODEWORDS:
        raise DataError(
            f"{name}: {array.dtype} {array.shape}, expected float32 "
            "[codebooks, codewords, dimensions], codewords a power of two from 4 to 256"
        )
    norms = np.sqrt(np.square(array, dtype=np.float64).sum(axis=-1))
    worst = np.unravel_index(np.abs(norms - 1.0).argmax(), norms.shape)
    codeword = f"{name}: codeword {worst[1]} of codebook {worst[0]}"
    if not math.isfinite(norms[worst]):
        raise DataError(f"{codeword} contains NaN or infinity")
    if unit and abs(norms[worst] - 1.0) > NORM_TOLERANCE:
        raise DataError(
            f"{codeword} has norm {norms[worst]:.6g}, not 1: pass the normalised codewords (z') "
            "that training writes"
        )
    return np.ascontiguousarray(array)


def check_vectors(
    x: ArrayLike,
    D: int,
    *,
    name: str,
    allow_empty: bool = True,
    first_row: int = 0,
    finite: bool = True,
) -> Floats:
    """Check vectors, and return them as C-contiguous float32 [n, D].

    Args:
        name: how errors name the vectors.
        allow_empty: accept an array without rows.
        first_row: number of the first row in errors.
        finite: refuse NaN and infinity.

    Raises:
        DataError: ``x`` does not hold numbers, is not two-dimensional, has another width, has no
            rows, or contains NaN or infinity (the rows are named).
    """
    array = as_array(x, name)
    if array.dtype.kind not in "fiu" or array.ndim != 2 or array.shape[1] != D:
        raise DataError(
            f"{name}: {array.dtype} {array.shape}, expected numbers [n, {D}]: "
            "is it of another model?"
        )
    if len(array) == 0 and not allow_empty:
        raise DataError(f"{name}: empty, expected at least one row")
    if array.dtype != np.float32:
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    array = np.ascontiguousarray(array)
    # One fast pass without warnings; rows are examined only if its result is not finite.
    if finite and not math.isfinite(np.vdot(array, array)):
        rows = np.flatnonzero(~np.isfinite(array).all(axis=1))
        if len(rows):
            raise DataError(f"{name}: NaN or infinity in {named_rows(first_row + rows)}")
    return array


def named_rows(rows: NDArray[Any]) -> str:
    """Return rows as errors name them: ``row 3`` or ``rows 1, 2, 3, 4, 5 and 7 more``."""
    numbers = ", ".join(str(row) for row in rows[:5])
    omitted = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"{'row' if len(rows) == 1 else 'rows'} {numbers}{omitted}"


def check_unique(ids: Ids, name: str) -> None:
    """Check that no id is -1, and that no id repeats.

    Raises:
        DataError: an id is -1, or occurs more than once.
    """
    if bool((ids == -1).any()):
        raise DataError(
            f"{name}: an item has the id -1, which marks a missing result: give it another"
        )
    if len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()):  # ascending (the usual case)
        return
    ordered = np.sort(ids)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise DataError(f"{name}: id {repeated[0]} occurs more than once: every item needs its own")
