"""What a training run is: frozen dataclasses, read from and written to TOML and JSON, unknown keys refused.

A run is one :class:`Config`. It starts from a preset (``paper``, ``authors``, ``gpq``, ``recommended`` or ``unseen-classes``); a TOML
file and then the command line change single fields. The fingerprint names the whole of it, so that a cache or a checkpoint of another
configuration is never taken for this one's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from .errors import UsageError
from .files import fingerprint
from .inputs import read_toml as read_input

BITS = (12, 24, 32, 48)
MOST_SEED = 2**31 - 2
"""Faiss' own trainings take no more."""
MOST_SIDE = 8192
"""Pixels a side of an image that a network takes: 64 Mi in all, the limit of the decoders too."""
COMMITTEE_RATE = 2.0
"""How many times the learning rate class networks move with that are perceptrons."""


@dataclass(frozen=True)
class QuantizerConfig:
    """M codebooks of K codewords in ``subdim`` dimensions; the code has ``M·log2 K`` bits."""

    codebooks: int = 12
    codewords: int = 16
    subdim: int = 12
    alpha: float = 20.0
    """Scale of the soft assignment (eq. 1)."""
    reexpress: bool = False
    """Quantise x' = s(x; α, W), as the codewords are z' = s(z; α, W). Beyond the paper."""
    feature_weight: float = 0.0
    """Of a committee: weight of the likeness of features in a score, from 0 to 1; that of the class is the rest. Each is measured in the
    standard deviation of its own scores. Above 0, codebooks that the class does not need keep likeness. Beyond the paper."""
    class_codebooks: int = 0
    """Of a committee with ``feature_weight``: codebooks that hold the class; 0 = 1.2 for each bit of the class (4 for 10 classes)."""

    @property
    def bits(self) -> int:
        return self.codebooks * (self.codewords.bit_length() - 1)

    @property
    def width(self) -> int:
        """D, the length of the vector that is quantised."""
        return self.codebooks * self.subdim


@dataclass(frozen=True)
class NetworkConfig:
    """The feature extractor F. ``backbone = "auto"`` is ``vgg`` for images of 16 pixels or more, and for embeddings and smaller
    images ``mlp`` where ``hidden`` is set, else ``linear``."""

    backbone: str = "auto"
    weights: str = "none"
    """``none`` (random), ``imagenet``, or the path of a weights file."""
    image_size: int = 0
    """Side of the square input in pixels; 0 = the data's own size, or 224 where images differ in size."""
    hidden: tuple[int, ...] = ()
    """Hidden layers of the ``mlp`` backbone. None: one of 512 units, or with ``heads`` those of the heads alone."""
    norm: Literal["none", "batch", "layer"] = "none"
    dropout: float = 0.0
    """Of the hidden layers of ``mlp`` and of the heads."""
    heads: int = 0
    """Hidden units of a perceptron of its own for every sub-space; 0 = one linear layer for all. Beyond the paper."""
    noise: float = 0.0
    """Gaussian noise that each head adds to standardised embeddings in training, in deviations. Beyond the paper."""
    adapt_noise: bool = False
    """Of a committee on features: its noise is not ``noise`` but what the labels at hand call for, found by leaving one out."""
    committee: int = 0
    """Class networks whose mean posterior is coded, or with ``loss.lambda0`` makes the pairs' targets (heads and codebook_start then have
    no part); 0 = none. Beyond the paper."""
    committee_hidden: int = 1024
    """Hidden units of each class network; over convolutions they are linear layers."""
    tap: Literal["block", "pool"] = "block"
    """Of ``vgg``: whether the third block is averaged at its end, or after the max pool that follows (the authors' code)."""
    batch_statistics: Literal["joint", "apart"] = "joint"
    """Of batch norm in the training of GPQ without a committee: over labelled and unlabelled items together, or over each batch by itself
    (the authors' code). Averages for inference are moved by both batches then, the labelled one first."""


@dataclass(frozen=True)
class LossConfig:
    """Weights and scales of ``λ0 L_NPQ + λ1 L_cls - λ2 L_SEM + λ3 L_reg``; in the paper λ0 = 1 and λ3 = 0."""

    lambda0: float = 1.0
    lambda1: float = 0.1
    lambda2: float = 0.1
    lambda3: float = 0.0
    """Weight of the score regression. Beyond the paper."""
    propagation: float = 0.0
    """Of a committee without convolutions: how many labels a class that is worth which labels say of unlabelled items, handed on from
    neighbour to neighbour; 0 = nothing is. Beyond the paper."""
    beta: float = 4.0
    """Scale of the cosine classifier (eq. 3)."""
    classification: Literal["paper", "code"] = "code"
    """``paper``: cross entropy of β·cos, averaged over sub-spaces; ``code``: β²·cos averaged first (the authors' code)."""
    entropy: Literal["paper", "code"] = "paper"
    """``paper``: entropy of β·cos in each sub-space; ``code``: of β²·cos averaged over them first (the authors' code)."""
    metric: Literal["npair", "triplet"] = "npair"
    """What λ0 weighs: the N-pair loss (eq. 2), or in its place the triplet loss of the paper's variant GPQ-T."""
    margin: float = 0.1
    """Of the triplet loss."""


@dataclass(frozen=True)
class PairsConfig:
    """What GPQ with class networks (``network.committee`` and ``loss.lambda0`` above 0) does with their beliefs. Beyond the paper."""

    targets: Literal["beliefs", "labels"] = "beliefs"
    """Which pairs the N-pair loss sees: all, as similar as they are believed to be, or those of labelled items."""
    queries: Literal["beliefs", "items"] = "beliefs"
    """Whether queries are E[W | p], or the sub-vectors that an item has."""
    tables: Literal["auto", "trained", "fitted"] = "auto"
    """Score tables of queries: as trained, fitted anew to the codes, or of these two what the beliefs of held-out items call better."""


@dataclass(frozen=True)
class TrainingConfig:
    """Optimisation. One epoch is one pass over the larger of the two sets, in batches of its size."""

    steps: int = 1000
    epochs: float = 0.0
    """Where not 0, counts instead of ``steps``."""
    batch_labelled: int = 500
    batch_unlabelled: int = 500
    learning_rate: float = 2e-4
    beta1: float = 0.5
    weight_decay: float = 0.0
    schedule: Literal["step", "cosine"] = "step"
    decay: float = 0.95
    decay_every: int = 100
    """Steps between two decays of the learning rate (schedule ``step``)."""
    validation: float = 0.05
    """Share of the labelled items held out of training to choose the best checkpoint; 0 = keep the last."""
    validate_every: int = 100
    checkpoint_seconds: float = 60.0
    seed: int = 0
    ema: float = 0.0
    """Decay of the average of the weights that is exported; 0 = the last weights. Beyond the paper."""
    codebook_start: float = 0.0
    """Share of the steps that train the classifier alone; then the codewords are placed on the data by k-means and take part.
    0 = random codewords from the first step, as in the paper; so it is too without a classification loss (``loss.lambda1 = 0``)."""
    amp: bool = False
    """bf16 autocast for the backbone."""
    augment: Literal["auto", "flip-crop", "crop", "none"] = "auto"
    """Of images: mirror and shifted crop as in the authors' recipe; ``auto`` does not mirror what means something else in a mirror
    (digits)."""
    padding: Literal["black", "mean"] = "black"
    """Of shifted crops: black, or the mean colour by which the network normalises (the authors' code)."""


@dataclass(frozen=True)
class Config:
    """All of one training run."""

    preset: str = "paper"
    quantizer: QuantizerConfig = field(default_factory=QuantizerConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    pairs: PairsConfig = field(default_factory=PairsConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def fingerprint(self) -> str:
        """16 hex digits over every field."""
        return fingerprint(json.dumps(to_dict(self), sort_keys=True))


_RECOMMENDED = Config(
    preset="recommended",
    # Wide enough for 16 codewords of any dimensions: no score is rounded.
    quantizer=QuantizerConfig(subdim=18, feature_weight=0.02),
    network=NetworkConfig(dropout=0.5, noise=0.5, adapt_noise=True, committee=6),
    loss=LossConfig(
        lambda0=0.0, lambda1=1.0, lambda2=0.1, propagation=20.0, beta=20.0, classification="paper"
    ),
    training=TrainingConfig(
        steps=800,
        batch_labelled=125,
        batch_unlabelled=400,
        learning_rate=1e-3,
        beta1=0.9,
        schedule="cosine",
        # Every label is learnt from: with a falling rate and averaged weights there is little to choose among the last steps.
        validation=0.0,
        ema=0.99,
    ),
)

PRESETS: dict[str, Config] = {
    "paper": Config(),
    # The recipe of the authors' released code, as far as it is known here; docs/settings.md says what is not. ImageNet weights or an
    # error: from random weights it would be another recipe under the same name.
    "authors": Config(
        preset="authors",
        network=NetworkConfig(backbone="vgg", weights="imagenet", tap="pool", batch_statistics="apart"),
        loss=LossConfig(classification="code", entropy="code"),
        training=TrainingConfig(steps=3000, validation=0.0, padding="mean"),
    ),
    # The paper's frame with soft targets: product codes by the nearest codeword, of beliefs of class networks.
    "gpq": dataclasses.replace(
        _RECOMMENDED,
        preset="gpq",
        quantizer=QuantizerConfig(subdim=24, alpha=8.0),
        loss=dataclasses.replace(_RECOMMENDED.loss, lambda0=1.0),
    ),
    "recommended": _RECOMMENDED,
    # Half of what is to be found is of classes that no label names: what lies near counts more than what the committee believes.
    "unseen-classes": dataclasses.replace(
        _RECOMMENDED,
        preset="unseen-classes",
        quantizer=dataclasses.replace(_RECOMMENDED.quantizer, feature_weight=0.1, class_codebooks=1),
        loss=dataclasses.replace(_RECOMMENDED.loss, lambda2=0.4, propagation=0.0),
        training=dataclasses.replace(_RECOMMENDED.training, validation=0.05),
    ),
}


def preset(name: str) -> Config:
    """The named preset.

    Raises:
        UsageError: there is none of that name.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise UsageError(f"no preset '{name}': choose one of {', '.join(PRESETS)}") from None


def codebooks_for_bits(bits: int, codewords: int = 16) -> int:
    """M for a code of ``bits`` bits.

    Raises:
        UsageError: ``bits`` is not a multiple of ``log2 codewords``.
    """
    per_codebook = codewords.bit_length() - 1
    if bits <= 0 or per_codebook <= 0 or bits % per_codebook:
        raise UsageError(
            f"{bits} bits do not divide into codebooks of {codewords} codewords ({per_codebook} bits each)"
        )
    return bits // per_codebook


T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """Plain nested dict of a config, ready for JSON."""
    return dataclasses.asdict(config)


def _coerce(value: Any, kind: Any, where: str) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UsageError(f"{where} has a number of {value.bit_length():,} bits: 64 are possible")
    origin = typing.get_origin(kind)
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise UsageError(f"{where} = {value!r}: choose one of {', '.join(map(str, choices))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UsageError(f"{where} = {value!r}: a list is expected")
        return tuple(_coerce(v, typing.get_args(kind)[0], where) for v in value)
    if origin in (types.UnionType, typing.Union):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UsageError(f"{where} = {value!r}: {kind.__name__} is expected")
    return value


def merge(config: T, changes: dict[str, Any], where: str = "") -> T:
    """``config`` with ``changes`` (nested as in TOML) applied; types and names are checked.

    Raises:
        UsageError: an unknown key, or a value of the wrong kind; the message gives its dotted name.
    """
    kinds = typing.get_type_hints(type(config))
    new: dict[str, Any] = {}
    for key, value in changes.items():
        name = f"{where}{key}"
        if key not in kinds:
            raise UsageError(f"unknown setting '{name}': known here are {', '.join(kinds)}")
        old = getattr(config, key)
        if dataclasses.is_dataclass(old):
            if not isinstance(value, dict):
                raise UsageError(f"'{name}' is a section: write [{name}] and its settings below")
            new[key] = merge(old, value, f"{name}.")
        else:
            new[key] = _coerce(value, kinds[key], name)
    return dataclasses.replace(config, **new)  # type: ignore[type-var]


def from_dict(values: dict[str, Any]) -> Config:
    """The config that :func:`to_dict` wrote; missing keys take the preset's value."""
    name = values.get("preset", "paper")
    return validate(merge(preset(str(name)), values))


def read_toml(path: str | Path, base: Config | None = None) -> Config:
    """Read a run's TOML. Its ``preset`` is the base; without one, ``base`` (default: ``paper``) is.

    Raises:
        DataError: missing or not TOML.
        UsageError: unknown key or bad value.
    """
    path = Path(path)
    values = read_input(path, "the settings of a run (--config)")
    try:
        start = preset(str(values["preset"])) if "preset" in values else base or preset("paper")
        return merge(start, values)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def to_toml(config: Config) -> str:
    """TOML text that :func:`read_toml` reads back to an equal config."""

    def scalar(value: Any) -> str:
        if isinstance(value, tuple):
            return "[" + ", ".join(map(scalar, value)) + "]"
        return json.dumps(value)

    values = to_dict(config)
    lines = [f"{key} = {scalar(v)}" for key, v in values.items() if not isinstance(v, dict)]
    for key, section in values.items():
        if isinstance(section, dict):
            lines += ["", f"[{key}]", *(f"{name} = {scalar(v)}" for name, v in section.items())]
    return "\n".join(lines) + "\n"


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise UsageError(text)


def validate(config: Config) -> Config:
    """Return ``config`` if every number is in range.

    Raises:
        UsageError: naming the setting and its range.
    """
    q, n, c, t = config.quantizer, config.network, config.loss, config.training
    for section, settings in (("quantizer", q), ("network", n), ("loss", c), ("training", t)):
        for key, value in vars(settings).items():
            if isinstance(value, float):
                _require(math.isfinite(value), f"{section}.{key} = {value}: a finite number is needed")
    _require(1 <= q.codebooks <= 256, f"quantizer.codebooks = {q.codebooks}: 1 to 256 are possible")
    _require(
        4 <= q.codewords <= 256 and q.codewords & (q.codewords - 1) == 0,
        f"quantizer.codewords = {q.codewords}: a power of two from 4 to 256 is needed",
    )
    _require(1 <= q.subdim <= 4096, f"quantizer.subdim = {q.subdim}: 1 to 4096 are possible")
    _require(q.alpha > 0, f"quantizer.alpha = {q.alpha}: it must be above 0")
    _require(
        0 <= n.image_size <= MOST_SIDE,
        f"network.image_size = {n.image_size}: 0 (the data's own) to {MOST_SIDE:,} pixels are possible",
    )
    _require(all(h > 0 for h in n.hidden), f"network.hidden = {list(n.hidden)}: layer widths must be above 0")
    _require(0 <= n.dropout < 1, f"network.dropout = {n.dropout}: it must be in [0, 1)")
    _require(n.heads >= 0, f"network.heads = {n.heads}: it must not be negative")
    _require(n.noise >= 0, f"network.noise = {n.noise}: it must not be negative")
    _require(
        min(c.lambda0, c.lambda1, c.lambda2, c.lambda3) >= 0,
        "loss.lambda0 to loss.lambda3 must not be negative",
    )
    _require(n.committee >= 0, f"network.committee = {n.committee}: it must not be negative")
    _require(n.committee_hidden > 0, f"network.committee_hidden = {n.committee_hidden}: it must be above 0")
    _require(
        0 <= q.feature_weight <= 1,
        f"quantizer.feature_weight = {q.feature_weight}: it must be in [0, 1]",
    )
    _require(
        0 <= q.class_codebooks <= q.codebooks,
        f"quantizer.class_codebooks = {q.class_codebooks}: 0 to quantizer.codebooks = {q.codebooks} are possible",
    )
    _require(
        n.tap == "block" or n.backbone in ("vgg", "auto"),
        f"network.tap = {n.tap}: network.backbone = {n.backbone} has no such place: set it to block, or take vgg",
    )
    _require(
        n.batch_statistics == "joint" or t.batch_unlabelled != 1,
        "network.batch_statistics = apart: one item has no statistics: set training.batch_unlabelled to 0 or above 1",
    )
    if n.committee:
        _require(
            n.batch_statistics == "joint" and c.entropy == "paper",
            f"network.committee = {n.committee} has no part for network.batch_statistics and loss.entropy: set them to joint and paper",
        )
        _require(c.lambda1 > 0, f"network.committee = {n.committee} needs loss.lambda1 above 0")
        _require(
            c.lambda3 == 0 and not q.reexpress and n.heads == 0 and t.codebook_start == 0,
            f"network.committee = {n.committee} has no part for loss.lambda3, quantizer.reexpress, network.heads and "
            "training.codebook_start: set them to 0 and false",
        )
        _require(
            c.lambda0 == 0 or (q.feature_weight == 0 and c.metric == "npair"),
            f"network.committee = {n.committee} with loss.lambda0 = {c.lambda0} has no part for quantizer.feature_weight and "
            "loss.metric: set them to 0 and npair",
        )
        _require(
            config.pairs.tables != "fitted" or q.subdim > q.codewords,
            f"pairs.tables = fitted: quantizer.subdim = {q.subdim} must be above quantizer.codewords = {q.codewords}",
        )
        _require(
            q.subdim >= 3, f"quantizer.subdim = {q.subdim}: with network.committee at least 3 are needed"
        )
    else:
        _require(
            q.feature_weight == 0 and q.class_codebooks == 0,
            "quantizer.feature_weight and quantizer.class_codebooks need a committee: set network.committee, or both to 0",
        )
        _require(
            c.lambda0 + c.lambda3 > 0,
            "loss.lambda0 and loss.lambda3 are both 0: nothing would train the codewords",
        )
    _require(c.propagation >= 0, f"loss.propagation = {c.propagation}: it must not be negative")
    _require(c.beta > 0, f"loss.beta = {c.beta}: it must be above 0")
    _require(c.margin >= 0, f"loss.margin = {c.margin}: it must not be negative")
    _require(t.steps >= 1, f"training.steps = {t.steps}: at least 1 is needed")
    _require(t.epochs >= 0, f"training.epochs = {t.epochs}: it must not be negative")
    _require(t.batch_labelled >= 2, f"training.batch_labelled = {t.batch_labelled}: at least 2 are needed")
    _require(
        t.batch_unlabelled >= 0, f"training.batch_unlabelled = {t.batch_unlabelled}: it must not be negative"
    )
    _require(t.learning_rate > 0, f"training.learning_rate = {t.learning_rate}: it must be above 0")
    _require(t.weight_decay >= 0, f"training.weight_decay = {t.weight_decay}: it must not be negative")
    _require(0 <= t.beta1 < 1, f"training.beta1 = {t.beta1}: it must be in [0, 1)")
    _require(t.decay > 0 and t.decay_every >= 1, "training.decay and training.decay_every must be above 0")
    _require(0 <= t.validation < 1, f"training.validation = {t.validation}: it must be in [0, 1)")
    _require(t.validate_every >= 1, f"training.validate_every = {t.validate_every}: at least 1 is needed")
    _require(0 <= t.ema < 1, f"training.ema = {t.ema}: it must be in [0, 1)")
    _require(0 <= t.codebook_start < 1, f"training.codebook_start = {t.codebook_start}: it must be in [0, 1)")
    _require(0 <= t.seed <= MOST_SEED, f"training.seed = {t.seed}: 0 to {MOST_SEED} are possible")
    return config
