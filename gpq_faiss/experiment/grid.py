"""Definition of an experiment: methods x code lengths x seeds x variations of the settings, read from TOML.

A grid file has these keys; others are errors::

    title = "..."                     # heads the report
    kind = "table"                    # what the report shows: table, ablation, sensitivity, scale, tsne, voronoi
    methods = ["gpq", "pq"]           # short names; "all" is every method
    bits = [12, 24, 32, 48]
    seeds = [0, 1, 2]                 # of split, weights and batches
    protocol = "1"
    labelled = ["500-per-class"]      # each in turn; left out: the protocol's own number
    queries = "100-per-class"         # of protocol 1; left out: its own number
    preset = "recommended"            # of the trained methods
    vectors = 0                       # items of the database whose vectors are kept, for pictures

    [config.training]                 # settings of all trained methods, as in a run's TOML
    steps = 500

    [settings.pqn.training]           # settings of one method
    learning_rate = 0.002

    [[variation]]                     # the same methods again with something changed; the first has no name
    name = "no entropy"
    methods = ["gpq"]                 # left out: all of the grid
    preset = "paper"                  # left out: the grid's
    labelled = "100-per-class"        # left out: each of the grid's
    unlabelled = 10000                # training sees so many unlabelled items; left out: all
    database = 10000                  # so many items are searched; left out: all
    [variation.config.loss]
    lambda2 = 0.0

    [product]                         # a variation for each combination
    "loss.lambda1" = [0.0, 0.1]
    "loss.lambda2" = [0.0, 0.1]

Without ``[[variation]]`` and ``[product]`` there is a single variation without changes. A method that is not a network has none of
these settings: of variations that differ in nothing else, it is in the first.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ..config import MOST_SEED, Config, merge, preset, to_dict
from ..data.protocols import check_protocol
from ..errors import UsageError
from ..inputs import read_toml
from ..methods.registry import METHODS, find_method, method_names

Kind = Literal["table", "ablation", "sensitivity", "scale", "tsne", "voronoi"]
Changes = Mapping[str, Any]
"""Settings as in a run's TOML: ``{"loss": {"lambda2": 0.0}}``."""

BUILT_IN = Path(__file__).parent / "grids"
_MOST_CELLS = 100_000
# Settings for which a grid has its own key -> the key.
_OF_THE_GRID = {"preset": "preset", "training.seed": "seeds", "quantizer.codebooks": "bits"}
# Kind of report -> the weights that it shows; variations may differ in nothing else.
_SHOWN: dict[str, tuple[str, ...]] = {"sensitivity": ("lambda1", "lambda2"), "scale": ()}


@dataclass(frozen=True)
class Variation:
    """Changes to the settings or the data of methods.

    Attributes:
        name: name in tables; empty without changes.
        config: changed settings.
        methods: short names, or None for all of the grid.
        preset: replaces the grid's, or None.
        labelled: replaces the grid's, or None.
        unlabelled, database: number of items, or None for all.
    """

    name: str = ""
    config: Changes = field(default_factory=dict)
    methods: tuple[str, ...] | None = None
    preset: str | None = None
    labelled: str | None = None
    unlabelled: int | None = None
    database: int | None = None


@dataclass(frozen=True)
class Grid:
    """An experiment; see the module docstring for the fields.

    Raises:
        UsageError: an invalid value; the message names its key.
    """

    name: str
    title: str
    kind: Kind = "table"
    methods: tuple[str, ...] = ("gpq",)
    bits: tuple[int, ...] = (12, 24, 32, 48)
    seeds: tuple[int, ...] = (0,)
    protocol: str = "1"
    labelled: tuple[str | None, ...] = (None,)
    queries: str | None = None
    preset: str = "recommended"
    vectors: int = 0
    config: Changes = field(default_factory=dict)
    settings: Mapping[str, Changes] = field(default_factory=dict)
    variations: tuple[Variation, ...] = (Variation(),)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(
                f"grid {self.name}: kind = {self.kind!r}: choose one of {', '.join(get_args(Kind))}"
            )
        if check_protocol(self.protocol) == "none":
            raise UsageError(
                "protocol 'none': an experiment needs queries: take 1, 2, transfer or gpq-authors"
            )
        for what, values in (
            ("methods", self.methods),
            ("bits", self.bits),
            ("seeds", self.seeds),
            ("labelled", self.labelled),
        ):
            if not values:
                raise UsageError(f"grid {self.name}: no {what}: give at least one")
            if len(set(values)) != len(values):
                raise UsageError(f"grid {self.name}: {what} has an entry twice")
        for name in self.methods:
            find_method(name)
        for name in self.settings:
            if not find_method(name).deep:
                raise UsageError(
                    f"settings.{name}: only networks have settings, and {name} is not one: leave it out"
                )
        for n in self.bits:
            if not 1 <= n <= 4096:
                raise UsageError(f"bits = {n}: 1 to 4096 are possible")
        for seed in self.seeds:
            if not 0 <= seed <= MOST_SEED:
                raise UsageError(f"seed {seed}: 0 to {MOST_SEED} are possible")
        if self.vectors < 0:
            raise UsageError(f"vectors = {self.vectors}: it must not be negative")
        names = [variation.name for variation in self.variations]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"grid {self.name}: two variations are named '{name}': rename one")
        self._try_settings()

    def _try_settings(self) -> None:
        """Check keys and values before running."""
        for variation in self.variations:
            base = preset(variation.preset or self.preset)
            for name in variation.methods or ():
                find_method(name)
            for changes in (self.config, variation.config, *self.settings.values()):
                merge(base, dict(changes))
                refuse_the_grids_own(changes)
            for what, count in (("unlabelled", variation.unlabelled), ("database", variation.database)):
                if count is not None and count < 1:
                    raise UsageError(f"variation '{variation.name}': {what} = {count}: at least 1 is needed")

        if self.kind in _SHOWN and len({self._without(_SHOWN[self.kind], v) for v in self.variations}) > 1:
            shown = " and ".join(f"loss.{name}" for name in _SHOWN[self.kind]) or "the numbers of items"
            raise UsageError(
                f"grid {self.name}: a report of kind {self.kind} shows {shown} and nothing else that variations change: "
                'take kind = "ablation"'
            )

    def _without(self, shown: tuple[str, ...], variation: Variation) -> str:
        """All changes of a variation, except the weights ``shown``, or, without any, the numbers of items."""
        loss = {k: v for k, v in variation.config.get("loss", {}).items() if k not in shown}
        config = {k: v for k, v in {**variation.config, "loss": loss}.items() if v}
        items = (variation.unlabelled, variation.database, variation.labelled) if shown else ()
        return repr((sorted(config.items()), variation.preset or self.preset, items))

    def methods_of(self, variation: Variation) -> tuple[str, ...]:
        """Methods of a variation, in the order of the paper's tables."""

        def runs(name: str, other: Variation) -> bool:
            return name in (self.methods if other.methods is None else other.methods)

        def same_items(other: Variation) -> bool:
            return all(
                getattr(other, what) == getattr(variation, what)
                for what in ("labelled", "unlabelled", "database")
            )

        wanted = [name for name in method_names() if name in self.methods and runs(name, variation)]
        if all(find_method(name).deep for name in wanted):
            return tuple(wanted)
        before = [v for v in self.variations[: self.variations.index(variation)] if same_items(v)]
        return tuple(
            name
            for name in wanted
            if find_method(name).deep or not any(runs(name, other) for other in before)
        )

    def labelled_of(self, variation: Variation) -> tuple[str | None, ...]:
        """Values of a variation."""
        return self.labelled if variation.labelled is None else (variation.labelled,)

    def with_options(self, **changes: Any) -> Grid:
        """A copy with the given fields that are not None; a protocol in the title is replaced, too."""
        given = {k: v for k, v in changes.items() if v is not None}
        title = self.title.replace(
            f"protocol {self.protocol}", f"protocol {given.get('protocol', self.protocol)}"
        )
        return dataclasses.replace(self, **({"title": title} | given))


def refuse_the_grids_own(changes: Changes) -> None:
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


# Key of a grid file -> type of its values.
_KEYS: dict[str, type] = {
    "title": str,
    "kind": str,
    "methods": list,
    "bits": list,
    "seeds": list,
    "protocol": str,
    "labelled": list,
    "queries": str,
    "preset": str,
    "vectors": int,
    "config": dict,
    "settings": dict,
    "variation": list,
    "product": dict,
}
_VARIATION_KEYS: dict[str, type] = {
    "name": str,
    "config": dict,
    "methods": list,
    "preset": str,
    "labelled": str,
    "unlabelled": int,
    "database": int,
}


def grid_from(values: Mapping[str, Any], name: str) -> Grid:
    """A grid from its TOML table.

    Raises:
        UsageError: an unknown key, or an invalid value.
    """
    given = _checked(values, _KEYS, "")
    variations = [_variation(v, i) for i, v in enumerate(given.pop("variation", []))]
    product = given.pop("product", {})
    if product:
        variations += _products(product)
    for key, kind in (("methods", str), ("bits", int), ("seeds", int), ("labelled", str)):
        if key in given:
            given[key] = _list(given[key], kind, key)
    if given.get("methods") == ("all",):
        given["methods"] = tuple(METHODS)
    if variations:
        given["variations"] = tuple(variations)
    return Grid(name=name, **({"title": name} | given))


def _checked(values: Mapping[str, Any], kinds: Mapping[str, type], where: str) -> dict[str, Any]:
    for key, value in values.items():
        if key not in kinds:
            raise UsageError(f"unknown key '{where}{key}': known here are {', '.join(kinds)}")
        kind = kinds[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            single = kind is list and isinstance(value, str | int)
            remedy = f": write {key} = [{json.dumps(value)}]" if single else ""
            raise UsageError(f"{where}{key} = {value!r}: {kind.__name__} is expected{remedy}")
    for name, changes in values.get("settings", {}).items():
        if not isinstance(changes, dict):
            raise UsageError(
                f"{where}settings.{name} = {changes!r}: write [settings.{name}.SECTION] and its settings below"
            )
    return dict(values)


def _list(values: Sequence[Any], kind: type, key: str) -> tuple[Any, ...]:
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"{key} = {list(values)!r}: a list of {kind.__name__} is expected")
    return tuple(values)


def _variation(values: Any, i: int) -> Variation:
    if not isinstance(values, dict):
        raise UsageError("variation: write [[variation]] and its keys below")
    given = _checked(values, _VARIATION_KEYS, f"variation {i + 1}: ")
    if "methods" in given:
        given["methods"] = _list(given["methods"], str, "variation.methods")
    return Variation(**given)


def _products(product: Mapping[str, Any]) -> list[Variation]:
    """One variation per combination of the values of dotted settings."""
    lists: list[Sequence[Any]] = []
    for key, values in product.items():
        section, dot, setting = key.partition(".")
        if not (dot and section and setting):
            raise UsageError(f'product: "{key}": write section and setting, as in "loss.lambda1"')
        if not isinstance(values, list) or not values:
            raise UsageError(f"product: {key} = {values!r}: a list of values is expected")
        lists.append(values)
    if _count(lists) > _MOST_CELLS:
        raise UsageError(f"product: more than {_MOST_CELLS:,} combinations")
    made = []
    for combination in itertools.product(*lists):
        config: dict[str, dict[str, Any]] = {}
        for key, value in zip(product, combination, strict=True):
            section, _, setting = key.partition(".")
            config.setdefault(section, {})[setting] = value
        name = ", ".join(
            f"{key.partition('.')[2]} = {value}" for key, value in zip(product, combination, strict=True)
        )
        made.append(Variation(name, config))
    return made


def _count(lists: Sequence[Sequence[Any]]) -> int:
    total = 1
    for values in lists:
        total *= len(values)
    return total


# What the trained methods that are not GPQ take of a preset: the budget, the optimiser and the backbone. The rest is GPQ's own (its
# class networks, its losses, its average of the weights), and changes in it are none of theirs.
_SHARED_NETWORK = ("backbone", "weights", "image_size", "hidden")
_NOT_SHARED_TRAINING = ("ema",)
# Where there is nothing to convolve they have the perceptron that does best there (docs/experiments.md).
BASELINE_PERCEPTRON: Changes = {"network": {"hidden": [512], "dropout": 0.2, "noise": 0.5}}


def baseline_config(config: Config, *, perceptron: bool) -> Config:
    """Settings of the trained methods that are not GPQ, beside a GPQ of the settings ``config``."""
    network = {name: getattr(config.network, name) for name in _SHARED_NETWORK}
    training = {k: v for k, v in vars(config.training).items() if k not in _NOT_SHARED_TRAINING}
    changes = {"network": network, "training": training, "gpq": {"details": config.gpq.details}}
    own = merge(Config(preset=config.preset), changes)
    own = merge(own, {"quantizer": {"codewords": config.quantizer.codewords}})
    return merge(own, dict(BASELINE_PERCEPTRON)) if perceptron else own


def variant_base(config: Config, *, perceptron: bool) -> Config:
    """Settings that GPQ's variants of the paper start from: the method and the losses as printed, where the preset has class networks with
    the network of the other methods."""
    if config.method == "gpq":
        return config
    own = merge(config, {"method": "gpq", "loss": to_dict(Config().loss)})
    return merge(own, dict(BASELINE_PERCEPTRON)) if perceptron else own


def codes_posteriors(config: Config) -> bool:
    """Whether these are settings of class-posterior codes, not of GPQ."""
    return config.method == "posterior"


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
        config.network.backbone,
        *(c["network"]["backbone"] for c in own if "backbone" in c.get("network", {})),
    ]
    perceptron = perceptron or backbones[-1] == "mlp"
    if entry.module != ".gpq":
        config = baseline_config(config, perceptron=perceptron)
    elif entry.changes.keys() & {"loss", "gpq"}:
        config = variant_base(config, perceptron=perceptron)
    elif codes_posteriors(config) != (method == "posterior"):
        # Two methods, each with its own preset if the grid has the other's.
        config = preset("recommended" if method == "posterior" else "gpq")
    for changes in own:
        config = merge(config, dict(changes))
    if entry.image_size and not config.network.image_size:
        config = merge(config, {"network": {"image_size": entry.image_size}})
    return config
