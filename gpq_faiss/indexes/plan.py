"""How an index in memory is searched: what a search looks at, how codes are packed for it, and whether equal codes are grouped.

These are separate choices (:class:`Plan`). The names that commands have for the useful combinations are in :data:`KINDS`:

==============  =====================================================================================================
kind            what a search does
==============  =====================================================================================================
``exact``       FastScan shortlists, float tables re-score and prove (:mod:`.proof`): equals brute force; where ties keep
                defeating the proof, it switches to distinct codes, once that would have been cheaper
                (:data:`.engine.TIED`)
``grouped``     the same over distinct codes, each stored once with its items; the cost follows distinct codes
``auto``        ``grouped`` where few enough codes are distinct (:data:`..codes.groups.GROUP_SHARE`), else ``exact``
``fused``       byte-fused float tables shortlist: exact, less memory, slower
``flat``        the plain 4-bit tables of ``IndexPQ`` shortlist: exact, slowest
``fastscan``    FastScan's own scores and order, not re-scored: fastest, approximate (and it never gives an item of the
                very least score, so places may stay empty)
``ivf``         only the lists nearest to a query (:mod:`.probing`), exact within these: approximate by what other lists hold;
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
        packing: how codes lie for what shortlists. FastScan, where codebooks have 16 codewords, else float tables.
        group: whether equal codes are searched once, which changes no answer; None: where that is faster.
    """

    search: Search = "exact"
    packing: Packing = "fastscan"
    group: bool | None = None

    @classmethod
    def of(cls, kind: str | Plan) -> Plan:
        """The plan of a name in :data:`KINDS`; a plan stays as it is. Raises UsageError: no such kind."""
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
        """Raises UsageError: codebooks of K codewords cannot be searched so."""
        if self.search != "exact" and self.packing == "4-bit":
            raise UsageError(f"{self.kind} of 4-bit codes: they lie in bytes, or in FastScan's blocks")
        if K != 16 and (self.search != "exact" or self.packing == "bytes"):
            raise UsageError(
                f"kind {self.kind!r} needs 16 codewords per codebook, these have {K}: use 'exact' or 'flat'"
            )

    def storage(self, M: int) -> Storage:
        """How the codes of M codebooks lie in a file that is to be searched so."""
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
