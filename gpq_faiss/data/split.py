"""The result of a protocol: items per role, with a hash, stored as a file."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import fingerprint, read_json, write_json
from .labels import Labels, named_rows

_BITS = {"query": 1, "labelled": 2, "unlabelled": 4, "database": 8}
_FORMAT = 1

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of the items in each role, int64, sorted.

    Attributes:
        n: number of items of the data set.
        query: queries.
        labelled: training items with labels.
        unlabelled: training items without labels.
        database: items to search.
        name: protocol.
        seed: random seed.
        seen_classes: classes available in training (protocols 2 and transfer); None: all.
    """

    n: int
    query: Rows
    labelled: Rows
    unlabelled: Rows
    database: Rows
    name: str
    seed: int
    seen_classes: tuple[int, ...] | None = None
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for role in _BITS:
            rows = getattr(self, role)
            good = rows.dtype == np.int64 and rows.ndim == 1 and bool((np.diff(rows) > 0).all())
            if not good or (len(rows) and (rows[0] < 0 or rows[-1] >= self.n)):
                raise DataError(f"split {self.name}: {role} is not sorted int64 positions below {self.n:,}")
        roles = self._roles()
        for both in (3, 5, 6, 9, 10):  # only unlabelled and database may share items
            clash = np.flatnonzero((roles & both) == both)
            if clash.size:
                what = " and ".join(role for role, bit in _BITS.items() if bit & both)
                raise DataError(f"split {self.name}: {named_rows(clash)} in {what}")

    def _roles(self) -> NDArray[np.uint8]:
        roles = np.zeros(self.n, dtype=np.uint8)
        for role, bit in _BITS.items():
            roles[getattr(self, role)] |= bit
        return roles

    @property
    def hash(self) -> str:
        """Hash of the roles: 16 hex digits."""
        return fingerprint("split", str(self.n), self._roles().tobytes(), str(self.seen_classes))

    def training_labels(self, labels: Labels) -> Labels:
        """Labels for the training: of the labelled items, over the seen classes."""
        masked = labels.masked(self.labelled)
        return masked if self.seen_classes is None else masked.select_classes(np.array(self.seen_classes))

    def save(self, path: str | Path) -> None:
        """Write as JSON, with one compressed byte per item."""
        write_json(
            path,
            {
                "split_format": _FORMAT,
                "protocol": self.name,
                "seed": self.seed,
                "n": self.n,
                "sizes": {role: len(getattr(self, role)) for role in _BITS},
                "hash": self.hash,
                "seen_classes": None if self.seen_classes is None else list(self.seen_classes),
                "notes": list(self.notes),
                "roles": base64.b64encode(zlib.compress(self._roles().tobytes(), 9)).decode(),
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> Split:
        """Read a file written by :meth:`save`."""
        value = read_json(path, "a split")
        try:
            if value["split_format"] != _FORMAT:
                raise DataError(
                    f"{path} has split format {value['split_format']}, not {_FORMAT}: make it again"
                )
            n = int(value["n"])
            # Limits decompression to n bytes.
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(base64.b64decode(value["roles"], validate=True), max(1, n))
            roles = np.frombuffer(data, dtype=np.uint8)
            stated = value["hash"]
            if len(roles) != n:
                raise ValueError("length")
            seen = value["seen_classes"]
            split = cls(
                n,
                **{role: np.flatnonzero(roles & bit).astype(np.int64) for role, bit in _BITS.items()},
                name=str(value["protocol"]),
                seed=int(value["seed"]),
                seen_classes=None if seen is None else tuple(int(c) for c in seen),
                notes=tuple(str(note) for note in value["notes"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError, zlib.error) as error:
            raise DataError(f"{path} is not a split, or it is damaged: make it again") from error
        if split.hash != stated:
            raise DataError(f"{path} is damaged: its hash does not match its content; make it again")
        return split


def load_split(path: str | Path) -> Split:
    """See :meth:`Split.load`."""
    return Split.load(path)
