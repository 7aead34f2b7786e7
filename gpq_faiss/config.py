"""Settings of a training run: a preset, which a TOML file and then the command line may change.

docs/settings.md explains each setting. Types and ranges are declared with the fields; pydantic
checks them and refuses unknown names. The fingerprint covers every field, so that a checkpoint of
another configuration is never used by mistake.
"""

from __future__ import annotations

import json
import re
import reprlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from .errors import UsageError, unknown
from .files import fingerprint
from .inputs import read_toml as read_input

MAX_SEED = 2**31 - 2
"""The largest seed that Faiss accepts in its trainings."""


class _Section:
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


Positive = Annotated[int, Ge(1), Le(2**31)]
Weight = Annotated[float, Ge(0)]


@dataclass(frozen=True)
class QuantizerConfig(_Section):
    """M codebooks of K codewords in ``subdim`` dimensions; the code has ``M·log2 K`` bits."""

    codebooks: Annotated[int, Ge(1), Le(256)] = 12
    codewords: Literal[4, 8, 16, 32, 64, 128, 256] = 16
    subdim: Annotated[int, Ge(1), Le(4096)] = 12

    @property
    def bits(self) -> int:
        return self.codebooks * (self.codewords.bit_length() - 1)

    @property
    def width(self) -> int:
        """D, the dimension of the quantised vector."""
        return self.codebooks * self.subdim


@dataclass(frozen=True)
class NetworkConfig(_Section):
    """Settings of the feature extractor F."""

    backbone: str = "auto"
    weights: str = "none"
    image_size: Annotated[int, Ge(0), Le(8192)] = 0  # squared, the limit of image decoders
    hidden: tuple[Positive, ...] = ()
    noise: Weight | Literal["auto"] = 0.0

    @property
    def first_noise(self) -> float:
        """Standard deviation of the noise; 0.5 for ``auto``."""
        return 0.5 if self.noise == "auto" else self.noise


@dataclass(frozen=True)
class LossConfig(_Section):
    """Weights of ``L_NPQ + λ1 L_cls - λ2 L_SEM``; class-posterior codes have no L_NPQ."""

    lambda1: Weight = 0.1
    lambda2: Weight = 0.1


@dataclass(frozen=True)
class PosteriorConfig(_Section):
    """Class networks and codes of class-posterior codes (``method = "posterior"``). Not in the
    paper."""

    networks: Annotated[int, Ge(1), Le(1024)] = 6
    propagation: Weight = 20.0
    feature_weight: Annotated[float, Ge(0), Le(1)] = 0.02
    class_codebooks: Annotated[int, Ge(0), Le(256)] | Literal["auto"] = "auto"
    unseen_classes: bool | Literal["auto"] = "auto"


@dataclass(frozen=True)
class TrainingConfig(_Section):
    """Settings of the optimisation."""

    steps: Positive | Literal["auto"] = 1000
    batch_labelled: Annotated[int, Ge(2), Le(2**31)] = 500
    batch_unlabelled: Annotated[int, Ge(0), Le(2**31)] = 500
    learning_rate: Annotated[float, Gt(0)] = 2e-4
    validation: Annotated[float, Ge(0), Lt(1)] = 0.05
    seed: Annotated[int, Ge(0), Le(MAX_SEED)] = 0
    augment: Literal["auto", "flip-crop", "crop", "none"] = "auto"


@dataclass(frozen=True)
class Config(_Section):
    """All settings of one training run.

    Sections that belong to methods other than ``method`` have no effect.
    """

    preset: str = "paper"
    method: Literal["gpq", "gpq-printed", "gpq-triplet", "gpq-authors", "posterior"] = "gpq"
    quantizer: QuantizerConfig = field(default_factory=QuantizerConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    posterior: PosteriorConfig = field(default_factory=PosteriorConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    @property
    def class_networks(self) -> bool:
        """Whether the method has class networks: it is neither the paper's nor a variant of it."""
        return self.method == "posterior"

    @property
    def follows_default(self) -> bool:
        """Whether it is the default, or a method that is compared with it."""
        return self.class_networks or self.preset == "recommended"

    @property
    def smallest_image(self) -> int:
        """Side in pixels to which images are enlarged where ``network.image_size`` is 0.

        Fine-tuning needs at least 128 pixels: on CIFAR-10, of 32 pixels, mAP is then 0.830 instead
        of 0.385 (benchmarks/results/finetune.md).
        """
        return 128 if self.follows_default and self.network.weights != "none" else 0

    alpha: ClassVar[float] = 20.0
    """Scale of the soft assignment (eq. 1)."""

    @property
    def beta(self) -> float:
        """Scale of the cosine classifier (eq. 3): that of class networks, or the paper's."""
        return 20.0 if self.class_networks else 4.0

    @property
    def dropout(self) -> float:
        """Dropout rate of the hidden layers of perceptrons."""
        rate = 0.5 if self.class_networks else 0.2
        return rate if self.network.noise else 0.0

    @property
    def schedule(self) -> Literal["step", "cosine"]:
        """Schedule of the learning rate.

        It is the paper's steps for networks that learn without noise, as the paper's do.
        """
        return "cosine" if self.network.noise else "step"

    @property
    def beta1(self) -> float:
        """β1 of Adam."""
        return 0.9 if self.schedule == "cosine" else 0.5

    def fingerprint(self) -> str:
        """Return 16 hex digits that identify the values of all fields."""
        return fingerprint(json.dumps(asdict(self), sort_keys=True))

    def with_settings(self, changes: Mapping[str, Any]) -> Config:
        """Return a copy with ``changes`` (nested as in TOML) applied; names, types and ranges are
        checked.

        The default, and what is compared with it, are fine-tuned by :data:`FINE_TUNING` if they get
        weights and nothing else has been set.

        Raises:
            UsageError: an unknown key, or a value of the wrong kind or out of range; the message
                names the setting (``training.steps``).

        Examples:
            >>> preset("recommended").with_settings({"training": {"steps": 400}}).training.steps
            400
        """
        values = asdict(self)
        network = changes.get("network")
        weights = network.get("weights", "none") if isinstance(network, Mapping) else "none"
        if self.follows_default and self.network.weights == "none" and weights != "none":
            defaults = vars(preset(self.preset).training)
            values["training"] |= {
                name: value
                for name, value in FINE_TUNING.items()
                if values["training"][name] == defaults[name]
            }
        try:
            # From JSON, pydantic converts a list to a tuple and an object to a section, and nothing
            # else.
            return _ADAPTER.validate_json(json.dumps(updated(values, changes), default=str))
        except ValidationError as error:
            raise UsageError(_message(error)) from None


_ADAPTER = TypeAdapter(Config)
FINE_TUNING = {"steps": 1000, "batch_labelled": 32, "batch_unlabelled": 64}
"""Settings ``training`` of the default over a pretrained network."""

PRESETS: dict[str, Config] = {
    "paper": Config(),
    # The recipe of the authors' released code, as far as it is known here; docs/settings.md says
    # what is not. ImageNet weights or an error: from random weights it would be another recipe
    # under the same name.
    "authors": Config(
        preset="authors",
        method="gpq-authors",
        network=NetworkConfig(backbone="vgg", weights="imagenet"),
        training=TrainingConfig(steps=3000, validation=0.0),
    ),
    "recommended": Config(
        preset="recommended",
        method="posterior",
        # Wide enough for 16 codewords of any dimensions: no score is rounded.
        quantizer=QuantizerConfig(subdim=18),
        network=NetworkConfig(noise="auto"),
        loss=LossConfig(lambda1=1.0, lambda2=0.0),
        # All labels are used for training: with a falling learning rate the last steps hardly
        # differ, so a validation would have little to choose from.
        training=TrainingConfig("auto", 125, 400, learning_rate=1e-3, validation=0.0),
    ),
}


def preset(name: str) -> Config:
    """Return the preset of this name.

    Raises:
        UsageError: there is none of that name.

    Examples:
        >>> preset("recommended").method, preset("paper").quantizer.bits
        ('posterior', 48)
    """
    if name not in PRESETS:
        raise UsageError(f"no preset '{name}': choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def codebooks_for_bits(bits: int, codewords: int = 16) -> int:
    """Return the number M of codebooks of a code of ``bits`` bits.

    Raises:
        UsageError: ``bits`` is not a multiple of ``log2 codewords``.

    Examples:
        >>> codebooks_for_bits(48)
        12
    """
    per_codebook = codewords.bit_length() - 1
    if bits <= 0 or per_codebook <= 0 or bits % per_codebook:
        raise UsageError(
            f"{bits} bits do not divide into codebooks of {codewords} codewords "
            f"({per_codebook} bits each)"
        )
    return bits // per_codebook


def updated(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply nested ``changes`` to ``values`` in place, and return ``values``."""
    for key, value in changes.items():
        old = values.get(key)
        values[key] = (
            updated(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return values


def _message(error: ValidationError) -> str:
    """Return one line on the first invalid setting: its name, and the values that it may have."""
    errors = error.errors(include_url=False)
    first = errors[0]
    location = first["loc"][:2]
    name = ".".join(map(str, location))
    if first["type"] == "unexpected_keyword_argument":
        section: Any = Config() if len(location) == 1 else getattr(Config(), str(location[0]))
        names = [".".join([*map(str, location[:-1]), setting]) for setting in vars(section)]
        return unknown(f"setting '{name}'", name, names)
    # Of a setting of several types there is one error for each.
    messages = [detail["msg"].lower() for detail in errors if detail["loc"][:2] == location]
    return f"{name} = {reprlib.repr(first['input'])}: {', or '.join(messages)}"


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Parse ``section.key=value`` texts into nested changes for :meth:`Config.with_settings`.

    Values are read as TOML, or else as plain text. If a name is repeated, its last value counts.

    Raises:
        UsageError: a text of another form.

    Examples:
        >>> parse_settings(["training.steps=400", "network.backbone=mlp"])
        {'training': {'steps': 400}, 'network': {'backbone': 'mlp'}}
    """
    changes: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        # The preset is chosen by an option of its own.
        if not re.fullmatch(r"\s*(?!preset\s*=)\w+(\.[\w-]+)*\s*=.*", text):
            raise UsageError(
                f"--set {text}: write SECTION.KEY=VALUE, as in --set training.steps=400"
            )
        try:
            read = tomllib.loads(text)
        except ValueError:
            read = tomllib.loads(f"{name} = {json.dumps(value.strip())}")
        changes = updated(changes, read)
    return changes


def from_dict(values: Mapping[str, Any]) -> Config:
    """Return the config of a ``dataclasses.asdict``; missing keys take the preset's value.

    Raises:
        UsageError: a bad value, or a setting that this version does not have.
    """
    return validate(preset(str(values.get("preset", "paper"))).with_settings(values))


def read_toml(path: str | Path) -> Config:
    """Read the TOML file of a run, which changes its ``preset`` (default: ``recommended``).

    Raises:
        DataError: the file is not TOML.
        UsageError: a setting is unknown or invalid.
    """
    values = read_input(Path(path), "the settings of a run (--preset)")
    try:
        return preset(str(values.get("preset", "recommended"))).with_settings(values)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def validate(config: Config) -> Config:
    """Return ``config`` if all settings are in range and fit together.

    Raises:
        UsageError: they are not; the message names the setting and its range.
    """
    if not isinstance(config, Config):
        raise UsageError(
            f"{config!r} is not a Config: give gpq.preset('recommended'), with .with_settings(...)"
        )
    config = config.with_settings({})
    if config.method == "gpq-authors" and config.training.batch_unlabelled == 1:
        raise UsageError(
            "training.batch_unlabelled = 1: 0 or at least 2 are needed, as one item has no "
            "batch statistics"
        )
    if config.class_networks and config.quantizer.subdim < 3:
        raise UsageError(
            f"quantizer.subdim = {config.quantizer.subdim}: at least 3 are needed with "
            f"method = {config.method}"
        )
    if config.class_networks and not config.loss.lambda1:
        raise UsageError(f"loss.lambda1 = 0: it must be above 0 with method = {config.method}")
    return config
