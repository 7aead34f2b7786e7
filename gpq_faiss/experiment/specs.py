"""The runs of a grid in order of execution, with their names and identities.

A run is done if its file has the run's identity: a hash of the settings, data, split, revision of the method, and versions of the
libraries used. So a run is repeated when its results could differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
_FEWER_UNLABELLED, _FEWER_DATABASE = range(100, 102)  # streams of random numbers


@dataclass(frozen=True)
class RunSpec:
    """One run: a method at one code length, seed and variation of the settings, on one split.

    Attributes:
        method: short name.
        bits: requested code length; 0 for methods without codes.
        seed: of the split, weights and batches.
        variation: its name; empty for unchanged methods.
        settings: everything that determines the codes except the data: a config's dict, or an array method's settings.
        protocol, labelled, queries, unlabelled, database: parameters of the split.
        several_labelled: whether the grid has several values of ``labelled``, which names must then include.
        vectors: number of database items whose vectors are stored.
        split_hash: of the split.
        identity: hash of everything that the results depend on.
    """

    method: str
    bits: int
    seed: int
    variation: str
    settings: Mapping[str, Any]
    protocol: str
    labelled: str | None
    queries: str | None
    unlabelled: int | None
    database: int | None
    several_labelled: bool
    vectors: int
    split_hash: str
    identity: str

    @property
    def name(self) -> str:
        """Name of its file without extension; unique in the grid."""
        parts = [self.method, f"{self.bits}bits" if self.bits else "any", f"seed{self.seed}"]
        if self.variation:
            parts.append(_slug(self.variation))
        if self.several_labelled:
            parts.append(_slug(self.labelled or "labelled by the protocol"))
        return "_".join(parts)

    @property
    def label(self) -> str:
        """For messages."""
        length = f" {self.bits} bits" if self.bits else ""
        more = [self.variation, str(self.labelled) if self.several_labelled else ""]
        details = ", ".join(part for part in more if part)
        return f"{self.method}{length} seed {self.seed}" + (f" ({details})" if details else "")

    def split(self, dataset: Dataset) -> Split:
        """The roles of the items.

        Raises:
            DataError: too few items.
            UsageError: an argument that the protocol does not support.
        """
        return split_of(
            dataset,
            self.protocol,
            self.seed,
            self.labelled,
            queries=self.queries,
            unlabelled=self.unlabelled,
            database=self.database,
        )


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
    """
    split = make_split(dataset, protocol, seed=seed, labelled=labelled, queries=queries)
    for role, count, stream in (
        ("unlabelled", unlabelled, _FEWER_UNLABELLED),
        ("database", database, _FEWER_DATABASE),
    ):
        rows = getattr(split, role)
        if count is not None and count < len(rows):
            chosen = np.random.default_rng([seed, stream]).permutation(rows)[:count]
            smaller: dict[str, Any] = {role: np.sort(chosen)}
            split = dataclasses.replace(split, **smaller)
    return split


@dataclass(frozen=True)
class Plan:
    """All runs of a grid, and the methods without runs.

    Attributes:
        specs: seeds outermost, so that an interrupted grid is a complete table of fewer seeds.
        left_out: method -> reason why it cannot run on these data.
    """

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
    left_out = {
        name: find_method(name).images_only for name in used if perceptron and find_method(name).images_only
    }
    for name in used:
        if name not in left_out:
            find_method(name).load()
    splits: dict[tuple[Any, ...], str] = {}
    computing = json.dumps(versions(), sort_keys=True)
    specs: list[RunSpec] = []
    for seed, labelled, variation in _splits_of(grid):
        role = (seed, labelled, variation.unlabelled, variation.database)
        sizes = {"unlabelled": variation.unlabelled, "database": variation.database}
        if role not in splits:
            split = split_of(dataset, grid.protocol, seed, labelled, queries=grid.queries, **sizes)
            splits[role] = split.hash
        methods = [name for name in grid.methods_of(variation) if name not in left_out]
        for method, bits in (
            (m, b) for m in methods for b in (grid.bits if find_method(m).any_length else (0,))
        ):
            settings = _settings(grid, variation, method, bits, seed, perceptron=perceptron, base=base)
            condition = fingerprint(
                str(RUN_FORMAT),
                f"{method} {find_method(method).revision}",
                str(bits),
                dataset.fingerprint,
                splits[role],
                computing,
                str(grid.vectors),
            )
            specs.append(
                RunSpec(
                    method=method,
                    bits=bits,
                    seed=seed,
                    variation=variation.name,
                    settings=settings,
                    protocol=grid.protocol,
                    labelled=labelled,
                    queries=grid.queries,
                    **sizes,
                    several_labelled=len(grid.labelled) > 1,
                    vectors=grid.vectors,
                    split_hash=splits[role],
                    identity=fingerprint(condition, json.dumps(settings, sort_keys=True)),
                )
            )
    if not specs:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UsageError(f"grid {grid.name}: nothing to run ({why or 'no method'})")
    return Plan(tuple(specs), left_out)


def _splits_of(grid: Grid) -> Iterator[tuple[int, str | None, Variation]]:
    """Seed, labelled and variation, in the order of the runs."""
    for seed, number in itertools.product(grid.seeds, range(len(grid.labelled))):
        for variation in grid.variations:
            choices = grid.labelled_of(variation)
            if number < len(choices):  # a variation with its own ``labelled`` runs once
                yield seed, choices[number], variation


def _settings(
    grid: Grid, variation: Variation, method: str, bits: int, seed: int, *, perceptron: bool, base: Config
) -> dict[str, Any]:
    if not find_method(method).deep:
        return make_method(method, bits or 32, seed).settings()
    config = method_config(grid, variation, method, perceptron=perceptron, base=base)
    K = config.quantizer.codewords
    config = merge(
        config, {"quantizer": {"codebooks": codebooks_for_bits(bits, K)}, "training": {"seed": seed}}
    )
    return to_dict(validate(config))
