"""Definition of an experiment: methods x code lengths x seeds x variations of the settings, read from TOML.

``docs/experiments.md`` shows a grid file. Its keys are the fields of :class:`Grid` and :class:`Variation`; ``[[variation]]`` runs the
methods again with something changed, ``[product]`` makes a variation of each combination of settings, and others are errors.

Without ``[[variation]]`` and ``[product]`` there is a single variation without changes. A method that is not a network has none of
these settings: of variations that differ in nothing else, it is in the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import ConfigDict, StrictInt, StrictStr, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..config import MOST_SEED, Config, merge, preset, to_dict
from ..data.protocols import check_protocol
from ..errors import UsageError, unknown
from ..inputs import read_toml
from ..methods.registry import METHODS, find_method, method_names

Kind = Literal["table", "ablation", "sensitivity", "scale", "tsne", "voronoi"]
Changes = dict[StrictStr, Any]
"""Settings as in a run's TOML: ``{"loss": {"lambda2": 0.0}}``."""
Names = tuple[StrictStr, ...]
Size = Annotated[StrictInt, Ge(1)]

BUILT_IN = Path(__file__).parent / "grids"
_MOST_COMBINATIONS = 100_000
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
# Settings for which a grid has its own key -> the key.
_OF_THE_GRID = {"preset": "preset", "training.seed": "seeds", "quantizer.codebooks": "bits"}


@dataclass(frozen=True, config=_STRICT)
class Variation:
    """Changes to the settings of methods, or to the number of ``unlabelled`` items and of those in the ``database``; None: the grid's
    value, or all items. The name is empty where nothing is changed."""

    name: StrictStr = ""
    config: Changes = field(default_factory=dict)
    methods: Names | None = None
    preset: StrictStr | None = None
    unlabelled: Size | None = None
    database: Size | None = None


@dataclass(frozen=True, config=_STRICT)
class Grid:
    """An experiment.

    Attributes:
        title: heads the report.
        kind: what the report shows.
        methods: short names.
        seeds: of split, weights and batches.
        labelled: each in turn; None: the protocol's own number; ``queries``, of protocol 1, likewise.
        preset: of the trained methods.
        vectors: items of the database whose vectors are kept, for pictures.
        config, settings: settings of all trained methods, and of single ones, as in a run's TOML.

    Raises:
        UsageError: an invalid value; the message names its key.
    """

    name: StrictStr
    title: StrictStr
    kind: Kind = "table"
    methods: Names = ("gpq",)
    bits: tuple[Annotated[StrictInt, Ge(1), Le(4096)], ...] = (12, 24, 32, 48)
    seeds: tuple[Annotated[StrictInt, Ge(0), Le(MOST_SEED)], ...] = (0,)
    protocol: StrictStr = "1"
    labelled: tuple[StrictStr | None, ...] = (None,)
    queries: StrictStr | None = None
    preset: StrictStr = "recommended"
    vectors: Annotated[StrictInt, Ge(0)] = 0
    config: Changes = field(default_factory=dict)
    settings: dict[StrictStr, Changes] = field(default_factory=dict)
    variations: tuple[Variation, ...] = (Variation(),)

    def __post_init__(self) -> None:
        if check_protocol(self.protocol) == "none":
            raise UsageError(
                "protocol 'none': an experiment needs queries: take 1, 2, transfer or gpq-authors"
            )
        names = [variation.name for variation in self.variations]
        for what in ("methods", "bits", "seeds", "labelled"):
            values = getattr(self, what)
            if not values or len(set(values)) < len(values):
                wrong = "has an entry twice" if values else "is empty: give at least one"
                raise UsageError(f"grid {self.name}: {what} {wrong}")
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"grid {self.name}: two variations are named '{name}': rename one")
        for name in self.settings:
            if not find_method(name).deep:
                raise UsageError(
                    f"settings.{name}: only networks have settings, and {name} is not one: leave it out"
                )
        for variation in self.variations:
            base = preset(variation.preset or self.preset)
            for name in (*self.methods, *(variation.methods or ())):
                find_method(name)
            for changes in (self.config, variation.config, *self.settings.values()):
                merge(base, changes)
                refuse_the_grids_own(changes)
        shown = {"sensitivity": "loss.lambda1 and loss.lambda2", "scale": "the numbers of items"}
        if self.kind in shown and len({self._not_shown(variation) for variation in self.variations}) > 1:
            raise UsageError(
                f"grid {self.name}: a report of kind {self.kind} shows {shown[self.kind]} and nothing else that variations "
                'change: take kind = "ablation"'
            )

    def _not_shown(self, variation: Variation) -> str:
        """The changes of a variation that a report of this kind does not show."""
        items = (variation.unlabelled, variation.database)
        config = variation.config
        if self.kind == "sensitivity":
            loss = {k: v for k, v in config.get("loss", {}).items() if k not in ("lambda1", "lambda2")}
            config = config | {"loss": loss}
        else:
            items = (None, None)
        return json.dumps([config, variation.preset or self.preset, items], sort_keys=True, default=str)

    def methods_of(self, variation: Variation) -> tuple[str, ...]:
        """Methods of a variation, in the order of the paper's tables."""

        def has(name: str, other: Variation) -> bool:
            return name in (self.methods if other.methods is None else other.methods)

        def items(other: Variation) -> tuple[Any, ...]:
            return other.unlabelled, other.database

        before = self.variations[: self.variations.index(variation)]
        before = tuple(other for other in before if items(other) == items(variation))
        return tuple(
            name
            for name in method_names()
            if name in self.methods
            and has(name, variation)
            and (find_method(name).deep or not any(has(name, other) for other in before))
        )

    def with_options(self, **changes: Any) -> Grid:
        """A copy with the given fields that are not None; a protocol in the title is replaced, too."""
        given = {k: v for k, v in changes.items() if v is not None}
        title = self.title.replace(
            f"protocol {self.protocol}", f"protocol {given.get('protocol', self.protocol)}"
        )
        with _in_one_line():
            return dataclasses.replace(self, **({"title": title} | given))


def refuse_the_grids_own(changes: Mapping[str, Any]) -> None:
    """Raises UsageError: ``changes`` contain settings that the grid determines; the message names the grid's key."""
    for name, key in _OF_THE_GRID.items():
        section, dot, setting = name.partition(".")
        if section in changes and (not dot or setting in changes[section]):
            raise UsageError(f"{name} is not changed as a setting: it follows from the grid's {key}")


def built_in_grids() -> dict[str, Path]:
    """Name -> file of the built-in grids, in alphabetical order."""
    return {path.stem: path for path in sorted(BUILT_IN.glob("*.toml"))}


def read_grid(spec: str | Path) -> Grid:
    """The built-in grid of that name, or the grid of a TOML file.

    Raises:
        UsageError: neither; an unknown key, or an invalid value.
        DataError: the file cannot be read, or is not TOML.
    """
    known = built_in_grids()
    path = known.get(str(spec), Path(spec))
    if str(spec) not in known and path.suffix != ".toml":
        raise UsageError(f"no grid '{spec}': choose one of {', '.join(known)}, or name a .toml file")
    values = read_toml(path, "a grid")
    try:
        return grid_from(values, path.stem)
    except UsageError as error:
        raise UsageError(f"{path.name}: {error}") from None


def grid_from(values: Mapping[str, Any], name: str) -> Grid:
    """A grid from its TOML table.

    Raises:
        UsageError: an unknown key, or an invalid value.
    """
    given = {"name": name, "title": name, **values}
    if {"name", "variations"} & values.keys():
        raise UsageError("name is the file's, and variations are written as [[variation]]")
    variations = given.pop("variation", [])
    if not isinstance(variations, list) or not all(isinstance(each, dict) for each in variations):
        raise UsageError("variation: write [[variation]] and its keys below")
    variations = [*variations, *_products(given.pop("product", {}))]
    if given.get("methods") == ["all"]:
        given["methods"] = tuple(METHODS)
    if variations:
        given["variations"] = variations
    with _in_one_line():
        return TypeAdapter(Grid).validate_python(given)


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Context in which the first wrong value is a UsageError."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        *section, key = map(str, first["loc"])
        name = ".".join([*section, key]).replace("variations.", "variation ")
        value, what = first["input"], first["msg"][0].lower() + first["msg"][1:]
        if "extra" in first["type"] or "unexpected" in first["type"]:
            known = [field.name for field in dataclasses.fields(Variation if section else Grid)]
            raise UsageError(unknown(f"key '{name}'", key, known)) from None
        if first["type"] == "tuple_type" and isinstance(value, str | int):
            what += f": write {key} = [{json.dumps(value)}]"
        raise UsageError(f"{name} = {repr(value)[:60]}: {what}") from None


def _products(product: Any) -> list[dict[str, Any]]:
    """One variation per combination of the values of dotted settings."""
    if not isinstance(product, dict):
        raise UsageError("product: write [product] and its settings below")
    for key, values in product.items():
        if not all(key.partition(".")):
            raise UsageError(f'product: "{key}": write section and setting, as in "loss.lambda1"')
        if not isinstance(values, list) or not values:
            raise UsageError(f"product: {key} = {values!r}: a list of values is expected")
    if math.prod(map(len, product.values())) > _MOST_COMBINATIONS:
        raise UsageError(f"product: more than {_MOST_COMBINATIONS:,} combinations")
    made = []
    for combination in itertools.product(*product.values()) if product else ():
        config: Changes = {}
        named = [(*key.split(".", 1), value) for key, value in zip(product, combination, strict=True)]
        for section, setting, value in named:
            config.setdefault(section, {})[setting] = value
        made.append({"name": ", ".join(f"{s} = {value}" for _, s, value in named), "config": config})
    return made


# Settings ---------------------------------------------------------------------------------------------------------------

# What the trained methods that are not GPQ take of a preset: the budget, the optimiser and the backbone. The rest is GPQ's own (its
# class networks, its losses, its average of the weights), and changes in it are none of theirs.
_SHARED_NETWORK = ("backbone", "weights", "image_size", "hidden")
_NOT_SHARED_TRAINING = ("ema",)
# Where there is nothing to convolve they have the perceptron that does best there (docs/experiments.md).
BASELINE_PERCEPTRON: Changes = {"network": {"hidden": [512], "dropout": 0.2, "noise": 0.5}}


def baseline_config(config: Config, *, perceptron: bool) -> Config:
    """Settings of the trained methods that are not GPQ, beside a GPQ of the settings ``config``."""
    changes = {
        "network": {name: getattr(config.network, name) for name in _SHARED_NETWORK},
        "training": {k: v for k, v in vars(config.training).items() if k not in _NOT_SHARED_TRAINING},
        "gpq": {"details": config.gpq.details},
        "quantizer": {"codewords": config.quantizer.codewords},
    }
    own = merge(Config(preset=config.preset), changes)
    return merge(own, BASELINE_PERCEPTRON) if perceptron else own


def _variant_base(config: Config, *, perceptron: bool) -> Config:
    """Settings that GPQ's variants of the paper start from: the method and the losses as printed, where the preset has class networks with
    the network of the other methods."""
    if config.method == "gpq":
        return config
    own = merge(config, {"method": "gpq", "loss": to_dict(Config().loss)})
    return merge(own, BASELINE_PERCEPTRON) if perceptron else own


def method_config(grid: Grid, variation: Variation, method: str, *, perceptron: bool, base: Config) -> Config:
    """Settings of a trained method in a variation, without code length and seed.

    From low to high: the preset and the run's own file (``base``); what makes the method itself; the grid's ``[config]``; its
    ``[settings.METHOD]``; the variation.

    Args:
        perceptron: whether the items are features, or images too small for convolutions; so is every method with the backbone ``mlp``.
        base: the preset with the changes of ``--config``.
    """
    entry = find_method(method)
    config = base if variation.preset is None else preset(variation.preset)
    own = (entry.changes, grid.config, grid.settings.get(method, {}), variation.config)
    backbones = [
        changes["network"]["backbone"] for changes in own if "backbone" in changes.get("network", {})
    ]
    perceptron = perceptron or [config.network.backbone, *backbones][-1] == "mlp"
    if entry.module != ".gpq":
        config = baseline_config(config, perceptron=perceptron)
    elif entry.changes.keys() & {"loss", "gpq"}:
        config = _variant_base(config, perceptron=perceptron)
    elif (config.method == "posterior") != (method == "posterior"):
        # Two methods, each with its own preset if the grid has the other's.
        config = preset("recommended" if method == "posterior" else "gpq")
    for changes in own:
        config = merge(config, dict(changes))
    if entry.image_size and not config.network.image_size:
        config = merge(config, {"network": {"image_size": entry.image_size}})
    return config
