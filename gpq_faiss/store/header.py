"""Metadata of features and codes files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..codes.bits import check_codes, code_size
from ..codes.checks import check_codebooks, check_vectors
from ..errors import DataError
from ..files import fingerprint

FORMAT_VERSION = 1

Kind = Literal["features", "codes"]


def codebooks_fingerprint(codebooks: NDArray[np.float32]) -> str:
    """Hash of codebooks float32 [M, K, d]: 16 hex digits."""
    array = np.ascontiguousarray(codebooks, dtype="<f4")
    return fingerprint("codebooks", json.dumps(array.shape), array.tobytes())


@dataclass(frozen=True, eq=False)
class Header:
    """Metadata of a file. Raises DataError: inconsistent parts.

    Attributes:
        model_fingerprint: of the model that made the rows.
        codebooks: z', float32 [M, K, d].
        data_fingerprint: of the data set that the rows come from.
        class_names: C names; empty if the rows carry no labels.
        multi_label: whether an item of the data set may have several labels.
        extra: further JSON values.
    """

    kind: Kind
    model_fingerprint: str
    codebooks: NDArray[np.float32]
    data_fingerprint: str
    class_names: tuple[str, ...] = ()
    multi_label: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_codebooks(self.codebooks, unit=False)
        if len(set(self.class_names)) != len(self.class_names):
            raise DataError("class names repeat: every class needs its own")

    @property
    def width(self) -> int:
        """Columns of the main dataset: M*d for features, ceil(M*log2(K)/8) for codes."""
        M, K, d = self.codebooks.shape
        return M * d if self.kind == "features" else code_size(M, K)

    @property
    def codebooks_fingerprint(self) -> str:
        return codebooks_fingerprint(self.codebooks)

    def fingerprints(self) -> dict[str, str]:
        """Of the model, the codebooks and the data, as files state them."""
        names = "model_fingerprint", "codebooks_fingerprint", "data_fingerprint"
        return {name: getattr(self, name) for name in names}

    def fingerprint(self) -> str:
        """Hash over all metadata."""
        rest = (self.kind, self.width, self.model_fingerprint, self.data_fingerprint, self.class_names)
        text = json.dumps([*rest, self.multi_label, self.extra], sort_keys=True)
        return fingerprint(str(FORMAT_VERSION), text, self.codebooks_fingerprint)

    def columns(self) -> dict[str, np.dtype[Any]]:
        """Dataset name -> type of a row: a number, or an array of ``width`` numbers."""
        kind = "<f4" if self.kind == "features" else "u1"
        columns = {str(self.kind): np.dtype((kind, (self.width,))), "ids": np.dtype("<i8")}
        if self.class_names:
            columns["labels"] = np.dtype(("u1", ((len(self.class_names) + 7) // 8,)))
        return columns

    def check_rows(self, columns: Mapping[str, NDArray[Any]], where: str) -> None:
        """Raises DataError, naming ``where``: columns of different lengths, values that are not of this model, or set padding bits."""
        if len({len(values) for values in columns.values()}) > 1:
            lengths = ", ".join(f"{len(values):,} {name}" for name, values in columns.items())
            raise DataError(f"{where}: {lengths}: every row needs one of each")
        for name, values in columns.items():
            if name == "features":
                check_vectors(values, self.width, what=f"{where}: features")
            elif name == "codes":
                check_codes(values, *self.codebooks.shape[:2], what=f"{where}: codes")
            elif name == "labels":
                unused = (1 << -len(self.class_names) % 8) - 1  # the lowest bits of the last byte
                if (values[:, -1] & unused).any():
                    raise DataError(
                        f"{where}: labels have bits set beyond the last class: damaged or foreign"
                    )
