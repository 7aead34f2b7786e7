"""All methods by short name, in the order of the paper's tables, for ``--compare`` and experiments.

*Array* methods (:class:`~gpq_faiss.methods.coders.Coder`) learn from a matrix of features;
*trained* methods (:class:`~gpq_faiss.methods.trainable.TrainableMethod`) are networks of the
training loop (:mod:`gpq_faiss.training.loop`). A codec of Faiss is an array method too, by
``faiss:`` and its factory string. A method's module is imported when the method is requested, so a
list of names needs neither Faiss nor torch.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..plugins import find_plugin, plugin_names

if TYPE_CHECKING:
    from .coders import Coder

Builder = Callable[..., Any]
"""``(config, dataset, image_size, n_classes) -> TrainableMethod``, for
:func:`gpq_faiss.training.loop.fit`."""

FAISS = "faiss:"
"""Beginning of the names of methods that are codecs of Faiss."""


@dataclass(frozen=True)
class MethodEntry:
    """Description of a method.

    Attributes:
        summary, citation: one line each.
        learns: ``semi-supervised``, ``supervised`` or ``unsupervised``.
        code: stored form of an item: ``quantiser``, ``binary`` (Hamming distance, except SUBIC's
            blocks, which use tables), or ``none``.
        module: module name; relative to this package if it starts with a dot.
        attribute: its class, a :class:`.coders.Coder` (array methods), or the function that builds
            it, a :data:`Builder` (trained ones).
        deep: whether the training loop trains it.
        changes: settings of this variant, nested as in TOML (GPQ's variants).
        departs: deviation from its paper that affects its figures; its module lists the others.
        revision: to increase with every code change that alters codes for the same settings;
            earlier results are then computed anew.
    """

    summary: str
    citation: str
    learns: str
    code: str
    module: str
    attribute: str
    deep: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    departs: str = ""
    revision: int = 1

    @property
    def convolutional(self) -> bool:
        """Whether it is a variant with a convolutional network, which has no advantage over the
        method itself for items that are no images."""
        return "backbone" in self.changes.get("network", {})

    def load(self) -> Any:
        """Import the class or builder."""
        return getattr(importlib.import_module(self.module, __package__), self.attribute)


_GPQ = MethodEntry(
    "generalised product quantisation: N-pair loss, sub-space classifiers, entropy mini-max",
    "Jang and Cho, CVPR 2020",
    "semi-supervised",
    "quantiser",
    ".gpq",
    "build_gpq",
    deep=True,
    revision=7,
)

METHODS: dict[str, MethodEntry] = {
    "gpq": _GPQ,
    "gpq-f": replace(
        _GPQ,
        summary="gpq with CNN-F as the network",
        changes={"network": {"backbone": "cnnf"}},
    ),
    "gpq-h": replace(
        _GPQ,
        summary="gpq without classifiers and entropy (λ1 = λ2 = 0)",
        learns="supervised",
        changes={"loss": {"lambda1": 0.0, "lambda2": 0.0}},
    ),
    "gpq-t": replace(
        _GPQ,
        summary="gpq with the triplet loss in place of the N-pair loss",
        changes={"method": "gpq-triplet"},
    ),
    "posterior": replace(
        _GPQ,
        summary="class-posterior codes: codewords that add up to the class probabilities, and to "
        "what these leave of the features",
        citation="this package",
        departs="not GPQ: class networks come first, their codes after",
        revision=12,
    ),
    "ssgah": MethodEntry(
        "semi-supervised generative adversarial hashing",
        "Wang, Hu, Cheng and Hou, ECCV 2018",
        "semi-supervised",
        "binary",
        ".ssgah",
        "SSGAH",
        deep=True,
        departs="the synthetic triplets weigh 0.03",
    ),
    "bgdh": MethodEntry(
        "deep hashing with a bipartite graph of labelled and unlabelled items",
        "Yan, Zhang and Li, IJCAI 2017",
        "semi-supervised",
        "binary",
        ".bgdh",
        "BGDH",
        deep=True,
    ),
    "ssdh": MethodEntry(
        "semi-supervised deep hashing: triplet ranking and an online graph",
        "Zhang and Peng, TCSVT 2017",
        "semi-supervised",
        "binary",
        ".ssdh",
        "SSDH",
        deep=True,
        departs="its ranking term is halved, and near and far pairs count half each, however many",
    ),
    "pqn": MethodEntry(
        "product quantisation network: soft assignment, asymmetric triplet loss",
        "Yu, Yuan, Fang and Jin, ECCV 2018",
        "supervised",
        "quantiser",
        ".pqn",
        "PQN",
        deep=True,
    ),
    "dtq": MethodEntry(
        "deep triplet quantisation: triplets and a composite quantiser with orthogonal codebooks",
        "Liu, Cao, Long, Wang and Wang, ACM MM 2018",
        "supervised",
        "quantiser",
        ".dtq",
        "DTQ",
        deep=True,
        revision=2,
        departs="its codebooks start from residual k-means",
    ),
    "dqn": MethodEntry(
        "deep quantisation network: pairwise cosine loss and a product quantisation loss",
        "Cao, Long, Wang, Zhu and Wen, AAAI 2016",
        "supervised",
        "quantiser",
        ".dqn",
        "DQN",
        deep=True,
        revision=2,
    ),
    "subic": MethodEntry(
        "structured binary code: one-hot blocks with entropy losses",
        "Jain, Zepeda, Pérez and Gribonval, ICCV 2017",
        "supervised",
        "binary",
        ".subic",
        "SUBIC",
        deep=True,
        departs="its blocks have K = 16",
    ),
    "ninh": MethodEntry(
        "network in network hashing: triplet ranking, a small layer per bit",
        "Lai, Pan, Liu and Yan, CVPR 2015",
        "supervised",
        "binary",
        ".ninh",
        "NINH",
        deep=True,
    ),
    "cnnh": MethodEntry(
        "codes from a factorised similarity matrix, then a network that learns them",
        "Xia, Pan, Lai, Liu and Yan, AAAI 2014",
        "supervised",
        "binary",
        ".cnnh",
        "CNNH",
        deep=True,
    ),
    "lopq": MethodEntry(
        "locally optimised product quantisation: a rotation and codebooks per coarse cell",
        "Kalantidis and Avrithis, CVPR 2014",
        "unsupervised",
        "quantiser",
        ".lopq",
        "LOPQ",
    ),
    "opq": MethodEntry(
        "optimised product quantisation: a rotation, then PQ",
        "Ge, He, Ke and Sun, CVPR 2013",
        "unsupervised",
        "quantiser",
        ".faiss_codec",
        "OPQ",
    ),
    "pq": MethodEntry(
        "product quantisation: k-means in each part of the vector",
        "Jégou, Douze and Schmid, TPAMI 2011",
        "unsupervised",
        "quantiser",
        ".faiss_codec",
        "PQ",
    ),
    "sdh": MethodEntry(
        "supervised discrete hashing: bits that a linear classifier can use",
        "Shen, Shen, Liu and Shen, CVPR 2015",
        "supervised",
        "binary",
        ".sdh",
        "SDH",
    ),
    "itq": MethodEntry(
        "iterative quantisation: signs of rotated principal components",
        "Gong, Lazebnik, Gordo and Perronnin, TPAMI 2013",
        "unsupervised",
        "binary",
        ".faiss_codec",
        "ITQ",
        departs="vectors are scaled to length 1 first, as Faiss does it",
    ),
    "sh": MethodEntry(
        "spectral hashing: signs of sines along the principal components",
        "Weiss, Torralba and Fergus, NIPS 2008",
        "unsupervised",
        "binary",
        ".sh",
        "SH",
    ),
    "float": MethodEntry(
        "the features themselves, exact cosine, no compression",
        "none",
        "unsupervised",
        "none",
        ".uncompressed",
        "FloatFeatures",
    ),
    "classifier": MethodEntry(
        "class probabilities of a supervised two-layer net, inner product, no compression",
        "Sablayrolles, Douze, Usunier and Jégou, ICASSP 2017",
        "supervised",
        "none",
        ".uncompressed",
        "Classifier",
    ),
    "classifier-6": MethodEntry(
        "the mean of six such nets, inner product, no compression",
        "none",
        "supervised",
        "none",
        ".uncompressed",
        "SixClassifiers",
    ),
}
"""Short name -> entry: GPQ and its variants, methods of this package, others in the order of the
paper's tables, then baselines."""

ARRAY_METHODS = tuple(name for name, entry in METHODS.items() if not entry.deep)
"""Names that :func:`make_method` accepts, besides ``faiss:`` with a factory string."""


def method_names() -> list[str]:
    """Return all short names, those of plugins last."""
    return [*METHODS, *plugin_names("methods")]


def find_method(name: str) -> MethodEntry:
    """Return the entry of a short name, or of ``faiss:`` and a factory string.

    Raises:
        UsageError: an unknown name (the message lists all), or a plugin that cannot be loaded.
    """
    if name.startswith(FAISS):
        return MethodEntry(
            f"codec of Faiss, {name.removeprefix(FAISS)}",
            "Faiss",
            "unsupervised",
            "quantiser",
            ".faiss_codec",
            "FaissCodec",
            revision=2,
        )
    plugin = find_plugin("methods", name, METHODS)
    if plugin is None and name not in METHODS:
        raise UsageError(f"no method '{name}': choose one of {', '.join(method_names())}")
    entry: MethodEntry = METHODS[name] if plugin is None else plugin.load()
    return entry


def make_method(name: str, bits: int, seed: int = 0) -> Coder:
    """Make an array method, to be fitted; a ``faiss:`` codec has the bits of its factory string.

    Raises:
        UsageError: an unknown name, or an unsupported number of bits.
    """
    options = {"description": name.removeprefix(FAISS)} if name.startswith(FAISS) else {}
    coder: Coder = find_method(name).load()(bits, seed=seed, **options)
    return coder


def is_array_method(name: str) -> bool:
    """Return whether :func:`make_method` makes it."""
    return name.startswith(FAISS) or (name in method_names() and not find_method(name).deep)


def split_names(text: str) -> list[str]:
    """Split names at commas, but not within a factory string of Faiss, whose parts begin with a
    capital letter.

    Examples:
        >>> split_names("pq,faiss:OPQ12,PQ12x4,opq")
        ['pq', 'faiss:OPQ12,PQ12x4', 'opq']
    """
    pattern = r"faiss:[^,]*(?:,\s*[A-Z][^,]*)*|[^,\s][^,]*"
    return [name.strip() for name in re.findall(pattern, text)]
