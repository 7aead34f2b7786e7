"""The kinds of engines.

==============  =====================================================================================================
kind            what a search does
==============  =====================================================================================================
``exact``       FastScan shortlists, float tables re-score and prove (:mod:`.proof`): equals brute force; where ties keep
                defeating the proof, it goes over to distinct codes, once that would have been cheaper
                (:data:`.memory.TIED`)
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

from typing import Literal

from ..errors import UsageError

Kind = Literal["auto", "exact", "grouped", "fused", "flat", "fastscan", "ivf"]
KINDS: tuple[Kind, ...] = ("auto", "exact", "grouped", "fused", "flat", "fastscan", "ivf")
STAGES: dict[str, tuple[str, ...]] = {
    "exact": ("fastscan", "fused"),
    "grouped": ("fastscan", "fused"),
    "fused": ("fused",),
    "flat": ("flat",),
    "fastscan": ("fastscan",),
}
"""What shortlists (:class:`.proof.ProvenSearch`), of every kind that is not decided later and has no lists."""


def check_kind(kind: str, K: int) -> None:
    """Raises UsageError: an unknown kind, or one that codebooks of K codewords do not have."""
    if kind not in KINDS:
        raise UsageError(f"kind {kind!r}: choose from {', '.join(KINDS)}")
    if K != 16 and kind in ("fused", "fastscan", "ivf"):
        raise UsageError(
            f"kind {kind!r} needs 16 codewords a codebook, these have {K}: use 'exact' or 'flat'"
        )
