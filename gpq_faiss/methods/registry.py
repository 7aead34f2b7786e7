"""All methods by their short names: what ``--compare`` and the tables take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UsageError
from .base import Method

Factory = Callable[[int], Method]
"""``(bits) -> Method``, not fitted."""


@dataclass(frozen=True)
class MethodEntry:
    """A method as it is listed.

    Attributes:
        summary: one line on what it is.
        citation: where it is from.
        supervised: whether it learns from labels.
        any_length: whether its codes have the number of bits that is asked for (``float`` and ``classifier`` have not).
        factory: makes one for a number of bits.
    """

    summary: str
    citation: str
    supervised: bool
    any_length: bool
    factory: Factory

    def __call__(self, bits: int) -> Method:
        return self.factory(bits)


# Each imports its module when it is asked for: a list of names needs neither Faiss nor torch.


def _pq(bits: int) -> Method:
    from .pq import PQ

    return PQ(bits)


def _opq(bits: int) -> Method:
    from .opq import OPQ

    return OPQ(bits)


def _itq(bits: int) -> Method:
    from .itq import ITQ

    return ITQ(bits)


def _float(bits: int) -> Method:
    from .float_features import FloatFeatures

    return FloatFeatures(bits)


def _classifier(bits: int) -> Method:
    from .classifier import Classifier

    return Classifier(bits)


METHODS: dict[str, MethodEntry] = {
    "opq": MethodEntry(
        "optimised product quantisation: a rotation, then PQ",
        "Ge, He, Ke and Sun, CVPR 2013",
        supervised=False,
        any_length=True,
        factory=_opq,
    ),
    "pq": MethodEntry(
        "product quantisation: k-means in each part of the vector",
        "Jégou, Douze and Schmid, TPAMI 2011",
        supervised=False,
        any_length=True,
        factory=_pq,
    ),
    "itq": MethodEntry(
        "iterative quantisation: signs of rotated principal components",
        "Gong, Lazebnik, Gordo and Perronnin, TPAMI 2013",
        supervised=False,
        any_length=True,
        factory=_itq,
    ),
    "float": MethodEntry(
        "the features themselves, exact cosine, no compression",
        "none",
        supervised=False,
        any_length=False,
        factory=_float,
    ),
    "classifier": MethodEntry(
        "class probabilities of a supervised two-layer net, inner product, no compression",
        "Sablayrolles, Douze, Usunier and Jégou, ICASSP 2017",
        supervised=True,
        any_length=False,
        factory=_classifier,
    ),
}
"""Short name -> entry, in the order of the paper's tables. An entry is called with the number of bits."""


def make_method(name: str, bits: int, seed: int = 0) -> Method:
    """A method that is not fitted yet.

    Raises:
        UsageError: no such name (lists them), or the method has no code of that many bits.
    """
    if name not in METHODS:
        raise UsageError(f"no method '{name}': choose one of {', '.join(METHODS)}")
    if seed < 0:
        raise UsageError(f"{name}: seed {seed}: it must not be negative")
    method = METHODS[name](bits)
    method.seed = seed
    return method
