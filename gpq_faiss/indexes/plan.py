"""Search options of an index in memory: search method, packing of codes, and grouping of equal codes.

These are independent (:class:`Plan`). Useful combinations have names in :data:`KINDS`:

==============  =====================================================================================================
kind            search
==============  =====================================================================================================
``exact``       FastScan shortlists, float tables re-score and prove (:mod:`.proof`): equals brute force; if ties often
                prevent the proof, it switches to distinct codes (:data:`.engine.TIED`)
``grouped``     the same over distinct codes, each stored once with its items
``auto``        ``grouped`` if few enough codes are distinct (:data:`..codes.groups.GROUP_SHARE`), else ``exact``
``fused``       byte-fused float tables shortlist: exact, less memory, slower
``flat``        the plain 4-bit tables of ``IndexPQ`` shortlist: exact, slowest
``fastscan``    FastScan's own scores and order: fastest, approximate (it omits items with the lowest possible score, so
                there may be fewer results)
``ivf``         only the lists nearest to a query (:mod:`.probing`), exact within these, so approximate;
                with all lists equal to ``exact``
==============  =====================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError
from ..faissio.storage import Packing, Storage

Search = Literal["exact", "approximate", "ivf"]


@dataclass(frozen=True)
class Plan:
    """How codes are searched.

    Attributes:
        search: ``exact``, ``approximate`` (FastScan's own scores) or ``ivf`` (exact within the lists probed).
        packing: packing of codes for shortlists: FastScan with codebooks of 16 codewords, else float tables.
        group: search equal codes once, with the same results; None: if that is faster.
    """

    search: Search = "exact"
    packing: Packing = "fastscan"
    group: bool | None = None

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
        if self.search == "approximate":
            return "fastscan"
        if self.packing != "fastscan":
            return Storage(self.packing).name
        return "auto" if self.group is None else "grouped" if self.group else "exact"

    def check(self, K: int) -> None:
        """Raises UsageError: not available for codebooks of K codewords."""
        if self.search != "exact" and self.packing == "4-bit":
            raise UsageError(f"{self.kind} of 4-bit codes: they lie in bytes, or in FastScan's blocks")
        if K != 16 and (self.search != "exact" or self.packing == "bytes"):
            raise UsageError(
                f"kind {self.kind!r} needs 16 codewords per codebook, these have {K}: use 'exact' or 'flat'"
            )

    def storage(self, M: int) -> Storage:
        """Storage form of codes of M codebooks for this plan."""
        lists = self.search == "ivf"
        if self.packing == "bytes" and M > 1:
            return Storage("bytes", lists)
        return Storage("4-bit" if self.search == "exact" else "fastscan", lists)


KINDS: dict[str, Plan] = {
    "auto": Plan(),
    "exact": Plan(group=False),
    "grouped": Plan(group=True),
    "fused": Plan(packing="bytes", group=False),
    "flat": Plan(packing="4-bit", group=False),
    "fastscan": Plan("approximate", group=False),
    "ivf": Plan("ivf", group=False),
}
