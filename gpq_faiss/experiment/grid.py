"""An experiment: methods x code lengths x seeds x variations of the settings, read from TOML (``grids/`` has the built-in ones).

docs/experiments.md shows a grid file. Its keys are the fields of :class:`Grid` and :class:`Variation`; ``[[variation]]`` runs the methods
again with something changed, and ``[product]`` makes a variation of each combination of settings.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Mapping
from functools import cached_property, reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..config import MOST_SEED, Config, preset, to_dict, updated
from ..data.protocols import check_protocol
from ..errors import UsageError, unknown
from ..inputs import read_toml
from ..methods.registry import METHODS, find_method, method_names

Changes = dict[str, Any]
"""Settings as in a run's TOML: ``{"loss": {"lambda2": 0.0}}``."""

_MOST_COMBINATIONS = 10_000
# Settings for which a grid has its own key -> the key.
_OF_THE_GRID = {"preset": "preset", "training.seed": "seeds", "quantizer.codebooks": "bits"}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Variation(_Strict):
    """Changes to the settings of methods; None: the grid's value. The name is empty where nothing is changed."""

    name: str = ""
    config: Changes = {}
    methods: tuple[str, ...] | None = None
    preset: str | None = None


class Grid(_Strict):
    """An experiment. ``kind`` says which pictures it has; ``labelled`` and ``queries`` are None for the protocol's own numbers;
    ``vectors`` is the number of database items whose vectors are kept, for pictures; ``config`` changes all trained methods.

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
    variation: tuple[Variation, ...] = ()
    product: dict[str, Annotated[tuple[Any, ...], MinLen(1)]] = {}
    """Dotted setting -> values: a variation of each combination."""

    @cached_property
    def variations(self) -> tuple[Variation, ...]:
        """Those of the file, then those of ``product``; without any, one that changes nothing."""
        made = list(self.variation)
        for values in itertools.product(*self.product.values()) if self.product else ():
            config: Changes = {}
            names = []
            for name, value in zip(self.product, values, strict=True):
                section, _, setting = name.partition(".")
                config.setdefault(section, {})[setting] = value
                names.append(f"{setting} = {value}")
            made.append(Variation(name=", ".join(names), config=config))
        return tuple(made) or (Variation(),)

    @model_validator(mode="after")
    def _check(self) -> Grid:
        if check_protocol(self.protocol) == "none":
            raise UsageError(
                "protocol 'none': an experiment needs queries: take 1, 2, transfer or gpq-authors"
            )
        if math.prod(map(len, self.product.values())) > _MOST_COMBINATIONS:
            raise UsageError(f"product: more than {_MOST_COMBINATIONS:,} combinations")
        lists = {what: getattr(self, what) for what in ("methods", "bits", "seeds")}
        for what, values in (lists | {"variation": [each.name for each in self.variations]}).items():
            if len(set(values)) < len(values):
                raise UsageError(f"grid {self.name}: {what} has an entry twice")
        for variation in self.variations:
            base = preset(variation.preset or self.preset)
            for name in (*self.methods, *(variation.methods or ())):
                if find_method(name).module == ".faiss_codec" and name not in METHODS:
                    raise UsageError(f"{name}: compare with codecs by gpq evaluate --compare")
            for changes in (self.config, variation.config):
                base.with_settings(changes)
                for name, key in _OF_THE_GRID.items():
                    section, dot, setting = name.partition(".")
                    if section in changes and (not dot or setting in changes[section]):
                        raise UsageError(
                            f"{name} is not changed as a setting: it follows from the grid's {key}"
                        )
        return self

    def methods_of(self, variation: Variation) -> list[str]:
        """Methods of a variation, in the order of the paper's tables."""
        wanted = self.methods if variation.methods is None else variation.methods
        return [name for name in method_names() if name in self.methods and name in wanted]

    def with_options(self, settings: Changes | None = None, **changes: Any) -> Grid:
        """A copy with the given fields that are not None, and these settings of its trained methods."""
        config = updated(copy.deepcopy(self.config), settings or {})
        changed = {key: value for key, value in changes.items() if value is not None}
        return grid_from({**self.model_dump(), "config": config, **changed})


def built_in_grids() -> dict[str, Path]:
    """Name -> file of the built-in grids, in alphabetical order."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "grids").glob("*.toml"))}


def read_grid(spec: str | Path) -> Grid:
    """The built-in grid of that name, or the grid of a TOML file. Raises UsageError: neither, or a key or value that cannot be; DataError:
    the file cannot be read, or is not TOML."""
    known = built_in_grids()
    path = known.get(str(spec), Path(spec))
    if path.suffix != ".toml":
        raise UsageError(f"no grid '{spec}': choose one of {', '.join(known)}, or name a .toml file")
    values = read_toml(path, "a grid")
    try:
        return grid_from({"name": path.stem, **values})
    except UsageError as error:
        raise UsageError(f"{path.name}: {error}") from None


def grid_from(values: Mapping[str, Any]) -> Grid:
    """A grid from its TOML table and ``name``. Raises UsageError: an unknown key, or an invalid value."""
    given = {"title": values["name"], **values}
    if given.get("methods") in (["all"], ("all",)):
        given["methods"] = list(METHODS)
    try:
        # Through JSON, where a list becomes a tuple and nothing else is converted.
        return Grid.model_validate_json(json.dumps(given, default=str))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, message = ".".join(map(str, first["loc"])), first["msg"]
        if first["type"] == "extra_forbidden":
            known = (Variation if "." in name else Grid).model_fields
            raise UsageError(unknown(f"key '{name}'", str(first["loc"][-1]), known)) from None
        raise UsageError(f"{name} = {repr(first['input'])[:60]}: {message[0].lower()}{message[1:]}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"settings that cannot be read: {error}") from None


# Settings ---------------------------------------------------------------------------------------------------------------

# What the trained methods that are not GPQ take of a preset: the budget, the optimiser and the backbone. The rest is GPQ's own (its
# class networks, its losses), and changes in it are none of theirs.
_SHARED_NETWORK = ("backbone", "weights", "image_size", "hidden")
# Where there is nothing to convolve they have the perceptron that does best there (docs/experiments.md).
BASELINE_PERCEPTRON: Changes = {"network": {"hidden": [512], "noise": 0.5}}


def baseline_config(config: Config, *, perceptron: bool) -> Config:
    """Settings of the trained methods that are not GPQ, beside a GPQ of the settings ``config``."""
    changes = {
        "network": {name: getattr(config.network, name) for name in _SHARED_NETWORK},
        "training": vars(config.training),
        "method": Config().method if config.class_networks else config.method,
        "quantizer": {"codewords": config.quantizer.codewords},
    }
    own = Config(preset=config.preset).with_settings(changes)
    return own.with_settings(BASELINE_PERCEPTRON) if perceptron else own


def method_config(grid: Grid, variation: Variation, method: str, *, perceptron: bool) -> Config:
    """Settings of a trained method in a variation, without code length and seed.

    From low to high: the preset; what makes the method itself; the grid's ``[config]``; the variation.

    Args:
        perceptron: whether the items are features, or images too small for convolutions; so is every method with the backbone ``mlp``.
    """
    entry = find_method(method)
    config = preset(variation.preset or grid.preset)
    own = (entry.changes, grid.config, variation.config)
    perceptron = perceptron or reduce(Config.with_settings, own, config).network.backbone == "mlp"
    if entry.module != ".gpq":
        config = baseline_config(config, perceptron=perceptron)
    elif method == "posterior":
        config = config if config.class_networks else preset("recommended")
    elif config.class_networks:
        # The paper's losses, with the network and training of the methods that they are compared with.
        config = config.with_settings({"method": "gpq", "loss": to_dict(Config().loss)})
        config = config.with_settings(BASELINE_PERCEPTRON) if perceptron else config
    config = reduce(Config.with_settings, own, config)
    if entry.convolutional and not config.network.image_size:
        config = config.with_settings({"network": {"image_size": 224}})
    return config
