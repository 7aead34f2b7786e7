"""An experiment: methods x code lengths x seeds x variations of the settings, read from TOML.

``grids/`` has the built-in ones, and docs/experiments.md shows a grid file. Its keys are the fields
of :class:`Grid` and :class:`Variation`; ``[[variation]]`` runs the methods again with something
changed, and ``[product]`` makes a variation of each combination of settings.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..config import MAX_SEED, Config, codebooks_for_bits, preset, updated, validate
from ..data.base import Dataset
from ..data.protocols import PROTOCOLS, make_split
from ..errors import UsageError, unknown
from ..files import fingerprint, versions
from ..inputs import read_toml
from ..methods.measure import needs_perceptron
from ..methods.registry import METHODS, find_method, make_method, method_names

log = logging.getLogger(__name__)

RUN_FORMAT = 3
"""Version of the run files; part of every identity."""
COMPUTING = ("python", "numpy", "torch", "faiss")
"""Packages on whose versions results depend."""
Changes = dict[str, Any]
"""Settings as in the TOML of a training: ``{"loss": {"lambda2": 0.0}}``."""

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Variation(BaseModel, **_STRICT):
    """Changes to the settings of some methods; None stands for the grid's value."""

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
    seeds: Annotated[tuple[Annotated[int, Ge(0), Le(MAX_SEED)], ...], MinLen(1)] = (0,)
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
        if self.product:
            for values in itertools.product(*self.product.values()):
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
        if self.protocol not in PROTOCOLS or self.protocol == "none":
            raise UsageError(
                f"protocol '{self.protocol}': an experiment needs queries: take 1, 2 or transfer"
            )
        if len({variation.name for variation in self.variations}) < len(self.variations):
            raise UsageError(f"grid {self.name}: two variations have the same name")
        for variation in self.variations:
            for name in (*self.methods, *(variation.methods or ())):
                if name not in method_names():
                    raise UsageError(unknown(f"method '{name}'", name, method_names()))
            for changes in (self.config, variation.config, self.settings):
                preset(variation.preset or self.preset).with_settings(changes)
                if (
                    "preset" in changes
                    or "seed" in changes.get("training", ())
                    or "codebooks" in changes.get("quantizer", ())
                ):
                    raise UsageError(
                        "preset, training.seed and quantizer.codebooks are not changed as "
                        "settings: they follow from the grid's preset, seeds and bits"
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
    try:
        return grid_from({"name": path.stem, **read_toml(path, "a grid")})
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
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        fields = (Variation if "." in name else Grid).model_fields
        raise UsageError(unknown(f"key '{name}'", str(first["loc"][-1]), fields))
    raise UsageError(f"{name} = {repr(first['input'])[:60]}: {first['msg'].lower()}")


# Settings -----------------------------------------------------------------------------------------

# The perceptron that is best for the other methods where nothing can be convolved
# (docs/experiments.md).
BASELINE_PERCEPTRON: Changes = {"network": {"hidden": [512], "noise": 0.5}}


def baseline_config(config: Config, *, perceptron: bool) -> Config:
    """Return the settings of the trained methods that are compared with a GPQ of ``config``: its
    budget, optimiser and backbone, but not its class networks and losses."""
    changes = {
        "network": vars(config.network),
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
    base = preset(variation.preset or grid.preset)
    layers = (entry.changes, grid.config, variation.config, grid.settings)
    settings = reduce(updated, copy.deepcopy(layers), dict[str, Any]())
    # With the budget of a fine-tuning, if there are pretrained weights.
    config = base.with_settings(settings)
    perceptron = perceptron or config.network.backbone == "mlp"
    if entry.module != ".gpq":
        config = baseline_config(config, perceptron=perceptron)
    elif method == "posterior":
        config = base if base.class_networks else preset("recommended")
    elif base.class_networks:
        # The paper's losses, with the network and training of the compared methods.
        config = config.with_settings({"method": "gpq", "loss": asdict(Config().loss)})
        config = config.with_settings(BASELINE_PERCEPTRON) if perceptron else config
    config = config.with_settings(settings)
    if entry.convolutional and not config.network.image_size:
        config = config.with_settings({"network": {"image_size": 224}})
    return config


# Runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSpec:
    """One run: a method at one code length, seed and variation of the settings, on one split.

    Attributes:
        bits: requested code length; 0 for methods without codes.
        settings: all that determines the codes except the data: the dict of a config, or the
            settings of an array method.
        split_args: arguments of :func:`gpq_faiss.data.protocols.make_split`.
        vectors: number of database items whose vectors are stored.
        data: fingerprint of the data set.
    """

    method: str
    bits: int
    seed: int
    variation: str
    settings: Mapping[str, Any]
    split_args: Mapping[str, Any]
    split_hash: str
    vectors: int
    data: str

    @property
    def name(self) -> str:
        """Name of the file without extension; unique in the grid."""
        slug = re.sub(r"[^a-z0-9.]+", "-", self.variation.lower()).strip("-.")[:40]
        end = f"_{slug}-{fingerprint(self.variation)[:4]}" if self.variation else ""
        length = f"{self.bits}bits" if self.bits else "any"
        return f"{self.method}_{length}_seed{self.seed}{end}"

    @cached_property
    def identity(self) -> str:
        """Hash of everything that the results depend on."""
        values = asdict(self) | {"format": RUN_FORMAT, "versions": versions(*COMPUTING)}
        values |= {"variation": "", "split_args": {}, "revision": find_method(self.method).revision}
        return fingerprint(json.dumps(values, sort_keys=True))


def plan(grid: Grid, dataset: Dataset) -> list[RunSpec]:
    """Return the runs of a grid on a data set.

    Seeds are outermost, so that an interrupted grid is a complete table of fewer seeds. A run that
    differs from an earlier one only in the name of its variation, as those of methods without
    settings do, is left out. So are methods of convolutional networks, with a warning, if nothing
    can be convolved.

    Raises:
        UsageError: invalid settings; a code length that a method does not support; a method that is
            not installed.
        DataError: too few items for the protocol.
    """
    specs: dict[str, RunSpec] = {}
    perceptron = needs_perceptron(dataset)
    left_out = [name for name in grid.methods if perceptron and find_method(name).convolutional]
    if left_out:
        log.warning("%s: left out, as convolutions need larger images", ", ".join(left_out))
    for seed in grid.seeds:
        split_args = grid.model_dump(include={"protocol", "labelled", "queries"}) | {"seed": seed}
        split = make_split(dataset, **split_args)
        for name, variation in itertools.product(method_names(), grid.variations):
            if name in left_out or name not in grid.methods_of(variation):
                continue
            entry = find_method(name)
            entry.load()
            lengths = (0,) if entry.code == "none" else grid.bits
            for bits in lengths:
                if entry.deep:
                    config = method_config(grid, variation, name, perceptron=perceptron)
                    M = codebooks_for_bits(bits, config.quantizer.codewords)
                    fixed = {"quantizer": {"codebooks": M}, "training": {"seed": seed}}
                    settings = asdict(validate(config.with_settings(fixed)))
                else:
                    coder = make_method(name, bits or 32, seed)
                    settings = {"method": coder.name, "bits": coder.bits, "seed": coder.seed}
                spec = RunSpec(
                    method=name,
                    bits=bits,
                    seed=seed,
                    variation=variation.name,
                    settings=settings,
                    split_args=split_args,
                    split_hash=split.hash,
                    vectors=grid.vectors,
                    data=dataset.fingerprint,
                )
                specs.setdefault(spec.identity, spec)
    if not specs:
        raise UsageError(f"grid {grid.name}: no method can run on {dataset.name}: choose others")
    return list(specs.values())
