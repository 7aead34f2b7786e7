"""Search options of an index: exact or by nearest lists, and how its codes are stored.

==============  =====================================================================================================
kind            search
==============  =====================================================================================================
``exact``       all items, by lists made of codewords (:mod:`.codeword_lists`): equals brute force
``auto``        the same, unless the file has lists to probe
``ivf``         only the lists nearest to a query (:mod:`.probing`), exact within these, so approximate;
                with all lists equal to ``exact``
==============  =====================================================================================================

``flat``, ``fused`` and ``fastscan`` are ``exact`` too, and name the form of the file that :meth:`.memory.MemoryIndex.save` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError
from ..faissio.storage import Packing, Storage

Search = Literal["exact", "ivf"]


@dataclass(frozen=True)
class Plan:
    """How codes are searched and stored.

    Attributes:
        search: ``exact`` or ``ivf`` (exact within the lists probed).
        packing: packing of codes in files, and in the lists of ``ivf``.
    """

    search: Search = "exact"
    packing: Packing = "4-bit"

    @classmethod
    def of(cls, kind: str | Plan) -> Plan:
        """The plan of a name in :data:`KINDS`, or a plan unchanged. Raises UsageError: unknown kind."""
        if isinstance(kind, Plan):
            return kind
        if kind not in KINDS:
            raise UsageError(f"kind {kind!r}: choose from {', '.join(KINDS)}")
        return KINDS[kind]

    @property
    def kind(self) -> str:
        """Its name in :data:`KINDS`."""
        if self.search == "ivf":
            return "ivf"
        return "exact" if self.packing == "4-bit" else Storage(self.packing).name

    def check(self, K: int) -> None:
        """Raises UsageError: not available for codebooks of K codewords."""
        if self.search == "ivf" and self.packing == "4-bit":
            raise UsageError("ivf of 4-bit codes: they lie in bytes, or in FastScan's blocks")
        if K != 16 and (self.search == "ivf" or self.packing != "4-bit"):
            raise UsageError(
                f"kind {self.kind!r} needs 16 codewords per codebook, these have {K}: use 'exact' or 'flat'"
            )

    def storage(self, M: int) -> Storage:
        """Storage form of codes of M codebooks for this plan."""
        lists = self.search == "ivf"
        if self.packing == "bytes" and M == 1:
            return Storage("fastscan" if lists else "4-bit", lists)
        return Storage(self.packing, lists)


KINDS: dict[str, Plan] = {
    "auto": Plan(),
    "exact": Plan(),
    "flat": Plan(),
    "fused": Plan(packing="bytes"),
    "fastscan": Plan(packing="fastscan"),
    "ivf": Plan("ivf", "fastscan"),
}
