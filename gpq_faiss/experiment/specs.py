"""The runs of a grid in order of execution, with their names and identities.

A run is done if its file has the run's identity: a hash of the settings, data, split, revision of the method, and versions of the
libraries used. So a run is repeated when its results could differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..config import Config, codebooks_for_bits, merge, to_dict, validate
from ..data.base import Dataset
from ..data.protocols import Split, make_split
from ..errors import UsageError
from ..files import fingerprint
from ..methods.measure import needs_perceptron
from ..methods.registry import find_method, make_method, method_names
from .grid import Grid, Variation, method_config
from .machine import versions

RUN_FORMAT = 1
"""Version of the run files; part of every identity."""
_STREAMS = {"unlabelled": 100, "database": 101}  # of random numbers


@dataclass(frozen=True)
class RunSpec:
    """One run: a method at one code length, seed and variation of the settings, on one split.

    Attributes:
        method: short name.
        bits: requested code length; 0 for methods without codes.
        seed: of the split, weights and batches.
        variation: its name; empty for unchanged methods.
        settings: everything that determines the codes except the data: a config's dict, or an array method's settings.
        split_args: arguments of :func:`split_of` besides the data.
        vectors: number of database items whose vectors are stored.
        split_hash: of the split.
        identity: hash of everything that the results depend on.
        name: of its file without extension; unique in the grid.
        label: for messages.
    """

    method: str
    bits: int
    seed: int
    variation: str
    settings: Mapping[str, Any]
    split_args: Mapping[str, Any]
    vectors: int
    split_hash: str
    identity: str
    name: str
    label: str

    @property
    def labelled(self) -> str | None:
        """The labelled items, as the command line names them."""
        named: str | None = self.split_args["labelled"]
        return named

    def split(self, dataset: Dataset) -> Split:
        """The roles of the items; raises as :func:`split_of`."""
        return split_of(dataset, **self.split_args)


def _slug(text: str) -> str:
    """Part of a file name: readable, and unique for each text."""
    readable = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:40]
    return f"{readable}-{fingerprint(text)[:4]}"


def split_of(
    dataset: Dataset,
    protocol: str,
    seed: int,
    labelled: str | None,
    *,
    queries: str | None = None,
    unlabelled: int | None = None,
    database: int | None = None,
) -> Split:
    """The split of a protocol, with at most ``unlabelled`` and ``database`` items in these roles (None: all).

    For the same seed, smaller selections are subsets of larger ones.

    Raises:
        DataError: too few items.
        UsageError: an argument that the protocol does not support.
    """
    split = make_split(dataset, protocol, seed=seed, labelled=labelled, queries=queries)
    for role, count in (("unlabelled", unlabelled), ("database", database)):
        rows = getattr(split, role)
        if count is not None and count < len(rows):
            chosen = np.random.default_rng([seed, _STREAMS[role]]).permutation(rows)[:count]
            smaller: dict[str, Any] = {role: np.sort(chosen)}
            split = dataclasses.replace(split, **smaller)
    return split


class Plan(NamedTuple):
    """All runs of a grid, seeds outermost, so that an interrupted grid is a complete table of fewer seeds; and method -> reason why it
    has no run on these data."""

    specs: tuple[RunSpec, ...]
    left_out: Mapping[str, str]


def plan(grid: Grid, dataset: Dataset, base: Config) -> Plan:
    """The runs of ``grid`` on ``dataset``.

    Args:
        grid: the grid.
        dataset: the data.
        base: base settings of trained methods, to which the grid's are applied: the preset with the changes of ``--config``.

    Raises:
        UsageError: invalid settings; a code length that a method does not support; a method that is not installed.
        DataError: too few items for the protocol.
    """
    perceptron = needs_perceptron(dataset)
    used = [name for name in method_names() if any(name in grid.methods_of(v) for v in grid.variations)]
    entries = {name: find_method(name) for name in used}
    left_out = {name: e.images_only for name, e in entries.items() if perceptron and e.images_only}
    for name in entries.keys() - left_out.keys():
        entries[name].load()
    hashes: dict[str, str] = {}
    computing = json.dumps(versions(), sort_keys=True)
    specs: list[RunSpec] = []
    for seed, labelled, variation in itertools.product(grid.seeds, grid.labelled, grid.variations):
        split_args: dict[str, Any] = {
            "protocol": grid.protocol,
            "seed": seed,
            "labelled": labelled,
            "queries": grid.queries,
            "unlabelled": variation.unlabelled,
            "database": variation.database,
        }
        key = str(split_args)
        if key not in hashes:
            hashes[key] = split_of(dataset, **split_args).hash
        for method in grid.methods_of(variation):
            lengths = () if method in left_out else grid.bits if entries[method].any_length else (0,)
            for bits in lengths:
                settings = _settings(grid, variation, method, bits, seed, perceptron=perceptron, base=base)
                condition = fingerprint(
                    str(RUN_FORMAT),
                    f"{method} {entries[method].revision}",
                    str(bits),
                    dataset.fingerprint,
                    hashes[key],
                    computing,
                    str(grid.vectors),
                )
                identity = fingerprint(condition, json.dumps(settings, sort_keys=True))
                # What the runs of a grid differ in.
                more = [variation.name] if variation.name else []
                more += [labelled or "labelled by the protocol"] if len(grid.labelled) > 1 else []
                length = (f"{bits}bits", f" {bits} bits") if bits else ("any", "")
                name = "_".join([method, length[0], f"seed{seed}", *map(_slug, more)])
                label = f"{method}{length[1]} seed {seed}" + (f" ({', '.join(more)})" if more else "")
                of_run = (method, bits, seed, variation.name, settings, split_args)
                specs.append(RunSpec(*of_run, grid.vectors, hashes[key], identity, name, label))
    if not specs:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UsageError(f"grid {grid.name}: nothing to run ({why or 'no method'})")
    return Plan(tuple(specs), left_out)


def _settings(
    grid: Grid, variation: Variation, method: str, bits: int, seed: int, *, perceptron: bool, base: Config
) -> dict[str, Any]:
    if not find_method(method).deep:
        return make_method(method, bits or 32, seed).settings()
    config = method_config(grid, variation, method, perceptron=perceptron, base=base)
    M = codebooks_for_bits(bits, config.quantizer.codewords)
    return to_dict(validate(merge(config, {"quantizer": {"codebooks": M}, "training": {"seed": seed}})))
