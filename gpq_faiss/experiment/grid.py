"""An experiment: methods x code lengths x seeds x variations of the settings, read from TOML.

``grids/`` has the built-in ones, and docs/experiments.md shows a grid file. Its keys are the fields
of :class:`Grid` and :class:`Variation`; ``[[variation]]`` runs the methods again with something
changed, and ``[product]`` makes a variation of each combination of settings.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from functools import cached_property, reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..config import MOST_SEED, Config, preset, to_dict
from ..data.protocols import check_protocol
from ..errors import UsageError, unknown
from ..inputs import read_toml
from ..methods.registry import METHODS, find_method, method_names

Changes = dict[str, Any]
"""Settings as in the TOML of a training: ``{"loss": {"lambda2": 0.0}}``."""

_MAX_COMBINATIONS = 10_000
# Settings for which a grid has a key -> the key.
_GRID_KEYS = {"preset": "preset", "training.seed": "seeds", "quantizer.codebooks": "bits"}


_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Variation(BaseModel, **_STRICT):
    """Changes to the settings of methods; None: the grid's value. Empty if it changes nothing."""

    name: str = ""
    config: Changes = {}
    methods: tuple[str, ...] | None = None
    preset: str | None = None


class Grid(BaseModel, **_STRICT):
    """An experiment.

    ``kind`` says which figures it has. ``labelled`` and ``queries`` are None for the protocol's
    numbers. ``vectors`` is the number of database items whose vectors are stored for figures.
    ``config`` changes all trained methods, and variations may change it again; ``settings``, those
    of the command line, apply last. ``product`` maps a dotted setting to values: each combination
    is a variation.

    Raises:
        UsageError: an invalid value; the message names its key.
    """

    name: str
    title: str
    kind: Literal["table", "ablation", "sensitivity", "tsne", "voronoi"] = "table"
    methods: Annotated[tuple[str, ...], MinLen(1)] = ("gpq",)
    bits: Annotated[tuple[Annotated[int, Ge(1), Le(4096)], ...], MinLen(1)] = (12, 24, 32, 48)
    seeds: Annotated[tuple[Annotated[int, Ge(0), Le(MOST_SEED)], ...], MinLen(1)] = (0,)
    protocol: str = "1"
    labelled: str | None = None
    queries: str | None = None
    preset: str = "recommended"
    vectors: Annotated[int, Ge(0)] = 0
    config: Changes = {}
    settings: Changes = {}
    variation: tuple[Variation, ...] = ()
    product: dict[str, Annotated[tuple[Any, ...], MinLen(1)]] = {}

    @cached_property
    def variations(self) -> tuple[Variation, ...]:
        """The variations of the file and of ``product``; without any, one that changes nothing."""
        variations = list(self.variation)
        for values in itertools.product(*self.product.values()) if self.product else ():
            config: Changes = {}
            names = []
            for dotted, value in zip(self.product, values, strict=True):
                section, _, setting = dotted.partition(".")
                config.setdefault(section, {})[setting] = value
                names.append(f"{setting} = {value}")
            variations.append(Variation(name=", ".join(names), config=config))
        return tuple(variations) or (Variation(),)

    @model_validator(mode="after")
    def _check(self) -> Grid:
        if check_protocol(self.protocol) == "none":
            raise UsageError(
                "protocol 'none': an experiment needs queries: take 1, 2, transfer or gpq-authors"
            )
        if math.prod(map(len, self.product.values())) > _MAX_COMBINATIONS:
            raise UsageError(f"product: more than {_MAX_COMBINATIONS:,} combinations")
        variations = [variation.name for variation in self.variations]
        for key, values in (
            ("methods", self.methods),
            ("bits", self.bits),
            ("seeds", self.seeds),
            ("variation", variations),
        ):
            if len(set(values)) < len(values):
                raise UsageError(f"grid {self.name}: {key} has an entry twice")
        for variation in self.variations:
            for name in (*self.methods, *(variation.methods or ())):
                if find_method(name).module == ".faiss_codec" and name not in METHODS:
                    raise UsageError(f"{name}: compare with codecs by gpq evaluate --compare")
            base = preset(variation.preset or self.preset)
            for changes in (self.config, variation.config, self.settings):
                base.with_settings(changes)
                for dotted, key in _GRID_KEYS.items():
                    section, dot, setting = dotted.partition(".")
                    if section in changes and (not dot or setting in changes[section]):
                        raise UsageError(
                            f"{dotted} is not changed as a setting: it follows from the grid's "
                            f"{key}"
                        )
        return self

    def methods_of(self, variation: Variation) -> list[str]:
        """Return the methods of a variation, in the order of the paper's tables."""
        selected = self.methods if variation.methods is None else variation.methods
        return [name for name in method_names() if name in self.methods and name in selected]

    def with_options(self, **changes: Any) -> Grid:
        """Return a copy with the given fields that are not None."""
        changed = {key: value for key, value in changes.items() if value is not None}
        return grid_from({**self.model_dump(), **changed})


def built_in_grids() -> dict[str, Path]:
    """Return name -> file of the built-in grids, in alphabetical order."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "grids").glob("*.toml"))}


def read_grid(spec: str | Path) -> Grid:
    """Return the built-in grid of that name, or the grid of a TOML file.

    Raises:
        UsageError: no such grid, an unknown key or an invalid value.
        DataError: the file cannot be read, or is not TOML.
    """
    grids = built_in_grids()
    path = grids.get(str(spec), Path(spec))
    if path.suffix != ".toml":
        raise UsageError(
            f"no grid '{spec}': choose one of {', '.join(grids)}, or name a .toml file"
        )
    values = read_toml(path, "a grid")
    try:
        return grid_from({"name": path.stem, **values})
    except UsageError as error:
        raise UsageError(f"{path.name}: {error}") from None


def grid_from(values: Mapping[str, Any]) -> Grid:
    """Return a grid from its TOML table and ``name``.

    Raises:
        UsageError: an unknown key, or an invalid value.
    """
    table = {"title": values["name"], **values}
    if table.get("methods") in (["all"], ("all",)):
        table["methods"] = list(METHODS)
    try:
        # Through JSON, where a list becomes a tuple and nothing else is converted.
        return Grid.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, message = ".".join(map(str, first["loc"])), first["msg"]
        if first["type"] == "extra_forbidden":
            fields = (Variation if "." in name else Grid).model_fields
            raise UsageError(unknown(f"key '{name}'", str(first["loc"][-1]), fields)) from None
        value = repr(first["input"])[:60]
        raise UsageError(f"{name} = {value}: {message[0].lower()}{message[1:]}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"settings that cannot be read: {error}") from None


# Settings -----------------------------------------------------------------------------------------

# What other trained methods than GPQ take of a preset: the budget, the optimiser and the backbone.
# The class networks and the losses of a preset are those of GPQ.
_SHARED_NETWORK = ("backbone", "weights", "image_size", "hidden")
# The perceptron that is best for the other methods where nothing can be convolved
# (docs/experiments.md).
BASELINE_PERCEPTRON: Changes = {"network": {"hidden": [512], "noise": 0.5}}


def baseline_config(config: Config, *, perceptron: bool) -> Config:
    """Return the settings of the trained methods that are compared with a GPQ of ``config``."""
    changes = {
        "network": {name: getattr(config.network, name) for name in _SHARED_NETWORK},
        "training": vars(config.training),
        "method": Config().method if config.class_networks else config.method,
        "quantizer": {"codewords": config.quantizer.codewords},
    }
    baseline = Config(preset=config.preset).with_settings(changes)
    return baseline.with_settings(BASELINE_PERCEPTRON) if perceptron else baseline


def method_config(grid: Grid, variation: Variation, method: str, *, perceptron: bool) -> Config:
    """Return the settings of a trained method in a variation, without code length and seed.

    From low to high precedence: the preset; what defines the method; the grid's ``config``; the
    variation; the grid's ``settings``.

    Args:
        perceptron: whether the items are features, or images too small for convolutions. With the
            backbone ``mlp`` every method has a perceptron.
    """
    entry = find_method(method)
    config = preset(variation.preset or grid.preset)
    layers = (entry.changes, grid.config, variation.config, grid.settings)
    backbone = reduce(Config.with_settings, layers, config).network.backbone
    perceptron = perceptron or backbone == "mlp"
    if entry.module != ".gpq":
        config = baseline_config(config, perceptron=perceptron)
    elif method == "posterior":
        config = config if config.class_networks else preset("recommended")
    elif config.class_networks:
        # The paper's losses, with the network and training of the compared methods.
        config = config.with_settings({"method": "gpq", "loss": to_dict(Config().loss)})
        config = config.with_settings(BASELINE_PERCEPTRON) if perceptron else config
    config = reduce(Config.with_settings, layers, config)
    if entry.convolutional and not config.network.image_size:
        config = config.with_settings({"network": {"image_size": 224}})
    return config
