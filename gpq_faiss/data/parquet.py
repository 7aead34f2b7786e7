"""Safe access to Parquet files, and Arrow's columns as arrays.

Run lengths and dictionaries can expand a few bytes to any size. So the decoded size of a column is computed from the file's counts before
it is read, and repeated texts are kept once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, one_line
from ..inputs import check_file, check_memory
from .labels import named_rows

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12, "BYTE_ARRAY": 8}
_LEVELS = 4  # bytes per value for nesting while decoding


@contextlib.contextmanager
def open_parquet(path: Path, what: str, texts: Sequence[str] = ()) -> Iterator[Any]:
    """Context of a ``pyarrow.parquet.ParquetFile``; checksums are verified if present.

    Args:
        what: expected content, for errors.
        texts: columns (as named by :func:`leaves`) to read as dictionaries.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow: pip install 'gpq-faiss[parquet]'") from None
    check_file(path, what)
    try:
        with pyarrow.parquet.ParquetFile(
            path, read_dictionary=list(texts), page_checksum_verification=True
        ) as file:
            yield file
    except MemoryError:  # pyarrow's is also an ArrowException
        raise DataError(f"{path} does not fit in memory: write it with smaller row groups") from None
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, IndexError) as error:
        why = one_line(error, 120)
        raise DataError(
            f"{path} is not a Parquet file, or it is empty, truncated or damaged ({why})"
        ) from None


def leaves(file: Any, column: str) -> list[int]:
    """Indices of the stored columns of the schema's ``column``."""
    schema = file.schema
    names = [schema.column(i).path for i in range(len(schema))]
    return [i for i, name in enumerate(names) if name == column or name.startswith(f"{column}.")]


def _decoded_bytes(file: Any, column: str) -> int:
    """Decoded size of ``column`` in bytes, by the file's counts."""
    meta, schema, total = file.metadata, file.schema, 0
    for leaf in leaves(file, column):
        kind = schema.column(leaf)
        width = kind.length if kind.physical_type == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS[kind.physical_type]
        for i in range(meta.num_row_groups):
            chunk = meta.row_group(i).column(leaf)
            total += chunk.num_values * (width + _LEVELS)
            if kind.physical_type == "BYTE_ARRAY":
                total += chunk.total_uncompressed_size
    return int(total)


def read_column(path: Path, column: str, what: str, memory: int | None = None) -> Any:
    """A column as ``pyarrow.ChunkedArray``, texts as dictionaries; ``memory`` is the budget in bytes (default: free memory)."""
    with open_parquet(path, what) as file:
        stored = [file.schema.column(i) for i in leaves(file, column)]
        remedy = "make it smaller; vectors in .npy are streamed"
        check_memory(_decoded_bytes(file, column), f"{path}: {column!r}", memory, remedy)
    names = [leaf.path for leaf in stored if leaf.physical_type == "BYTE_ARRAY"]
    with open_parquet(path, what, names) as file:
        return file.read(columns=[column])[column]


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is a list."""
    import pyarrow

    types = pyarrow.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_text(kind: Any) -> bool:
    """Whether an Arrow type is text."""
    import pyarrow

    types = pyarrow.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_number(kind: Any) -> bool:
    """Whether an Arrow type is a number."""
    import pyarrow

    return bool(pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind))


def cells_of(array: Any) -> list[Any]:
    """Python values of an Arrow array; dictionary values are shared."""
    import pyarrow

    if pyarrow.types.is_dictionary(array.type):
        words = array.dictionary.to_pylist()
        return [None if i is None else words[i] for i in array.indices.to_pylist()]
    if is_list(array.type) and pyarrow.types.is_dictionary(array.type.value_type):
        values, offsets = cells_of(array.values), array.offsets.to_pylist()
        there = array.is_valid().to_pylist()
        return [values[offsets[i] : offsets[i + 1]] if there[i] else None for i in range(len(array))]
    cells: list[Any] = array.to_pylist()
    return cells


def matrix_of(column: Any, where: str, *, start: int = 0, width: int = 0) -> NDArray[Any]:
    """An Arrow ``ChunkedArray`` of lists of numbers as one array [n, width], from row ``start``; width 0: that of the first row.

    Raises:
        DataError: rows of different lengths, missing rows or missing numbers.
    """
    import pyarrow

    column = column.combine_chunks()
    nulls = np.flatnonzero(np.asarray(column.is_null()))
    if nulls.size:
        raise DataError(f"{where} has no vector at {named_rows(nulls + start)}: leave these rows out")
    flat = column.flatten()
    if not is_number(flat.type) or flat.null_count:
        found = "missing numbers" if flat.null_count else f"lists of {flat.type}"
        raise DataError(f"{where} holds {found} (from row {start:,}): vectors of numbers are needed")
    if pyarrow.types.is_fixed_size_list(column.type):
        lengths = np.full(len(column), column.type.list_size)
    else:
        lengths = np.diff(np.asarray(column.offsets))
    width = width or (int(lengths[0]) if len(lengths) else 0)
    wrong = np.flatnonzero(lengths != width)
    if wrong.size:
        rows = named_rows(wrong + start)
        raise DataError(
            f"{where} has {int(lengths[wrong[0]])} numbers at {rows}, {width} elsewhere: one width is needed"
        )
    return np.asarray(flat.to_numpy(zero_copy_only=False).reshape(len(column), width))
