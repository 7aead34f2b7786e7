"""The single runs of a grid, in the order in which they are made, and what names each of them.

A cell is done when its file is there with the cell's settings and its condition: a hash over the data, the split, the revision of the
method, and the versions of what computes it. So a run is made again when its outcome could be another. A setting that a later
version has and the file has not must have its neutral value, that of the preset ``paper``; one that a later version has no more must
be 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import Config, codebooks_for_bits, merge, to_dict, validate
from ..data.base import Dataset
from ..data.protocols import Split, make_split
from ..errors import UsageError
from ..files import fingerprint
from ..methods.registry import METHODS, find_method, make_method
from ..stages.evaluate import needs_perceptron
from .grid import Grid, Variation, method_config
from .machine import versions

RUN_FORMAT = 1
"""Of the run files; part of every identity."""
_FEWER_UNLABELLED, _FEWER_DATABASE = range(100, 102)  # streams of random numbers


@dataclass(frozen=True)
class Cell:
    """One run: a method at one code length, seed and variation of the settings, on one split.

    Attributes:
        method: short name.
        bits: code length asked for; 0 for a method that keeps no code.
        seed: of the split, the weights and the batches.
        variation: its name; empty for the methods as they are.
        settings: all that decides about the codes but the data: a config's dict, or an array method's settings.
        protocol, labelled, queries, unlabelled, database: what the split is made of.
        several_labelled: whether the grid has several ``labelled``, so that names must tell them apart.
        vectors: items of the database whose vectors are kept.
        split_hash: of the split.
        condition: hash over all that decides about the outcome but the settings.
        identity: hash over the condition and the settings.
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
    condition: str
    identity: str

    @property
    def name(self) -> str:
        """Of its file, without the ending; one for each place in the grid."""
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
        told = ", ".join(part for part in more if part)
        return f"{self.method}{length} seed {self.seed}" + (f" ({told})" if told else "")

    def same_settings(self, stored: Mapping[str, Any]) -> bool:
        """Whether ``stored`` are this cell's settings, as an earlier version may have written them."""
        # Through JSON, as the stored ones went: tuples are lists there.
        now: dict[str, Any] = json.loads(json.dumps(self.settings))
        if not METHODS[self.method].deep:
            return now == stored
        neutral: dict[str, Any] = json.loads(json.dumps(to_dict(Config())))
        return _agree(now, stored, neutral)

    def split(self, dataset: Dataset) -> Split:
        """Who is in which role.

        Raises:
            DataError: too few items for it.
            UsageError: an argument that the protocol does not take.
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


def _agree(now: Mapping[str, Any], stored: Mapping[str, Any], neutral: Mapping[str, Any]) -> bool:
    # A setting that is no more was a weight or a switch: 0 is as good as none.
    if any(stored[key] for key in stored.keys() - now.keys()):
        return False
    for key, value in now.items():
        if isinstance(value, dict):
            if not _agree(value, stored.get(key, {}), neutral[key]):
                return False
        elif value != stored.get(key, neutral[key]):
            return False
    return True


def _slug(text: str) -> str:
    """Part of a file name: readable, and never the same for two texts."""
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
    """The split of a protocol with fewer unlabelled items and a smaller database, where that is asked for.

    A smaller choice is part of a larger one of the same seed.
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
    """All cells of a grid, and what is left out of it.

    Attributes:
        cells: seeds outermost, so that an interrupted grid is a whole table of fewer seeds.
        left_out: method -> why it has no cell on these data.
    """

    cells: tuple[Cell, ...]
    left_out: Mapping[str, str]


def plan(grid: Grid, dataset: Dataset, base: Config) -> Plan:
    """The cells of ``grid`` on ``dataset``.

    Args:
        base: settings of the trained methods before the grid's own: the preset with the changes of ``--config``.

    Raises:
        UsageError: settings that cannot be; a code length that a method does not have; a method that is not installed.
        DataError: the data have too few items for the protocol.
    """
    perceptron = needs_perceptron(dataset)
    used = [name for name in METHODS if any(name in grid.methods_of(v) for v in grid.variations)]
    left_out = {name: METHODS[name].images_only for name in used if perceptron and METHODS[name].images_only}
    for name in used:
        if name not in left_out:
            find_method(name).load()
    splits: dict[tuple[int, str | None, int | None, int | None], str] = {}
    computing = json.dumps(versions(), sort_keys=True)
    cells: list[Cell] = []
    for seed, labelled_number in itertools.product(grid.seeds, range(len(grid.labelled))):
        for variation in grid.variations:
            # A variation with labels of its own runs once.
            choices = grid.labelled_of(variation)
            if labelled_number >= len(choices):
                continue
            labelled = choices[labelled_number]
            role = (seed, labelled, variation.unlabelled, variation.database)
            if role not in splits:
                splits[role] = split_of(
                    dataset,
                    grid.protocol,
                    seed,
                    labelled,
                    queries=grid.queries,
                    unlabelled=variation.unlabelled,
                    database=variation.database,
                ).hash
            for method in grid.methods_of(variation):
                if method in left_out:
                    continue
                for bits in grid.bits if METHODS[method].any_length else (0,):
                    settings = _settings(
                        grid, variation, method, bits, seed, perceptron=perceptron, base=base
                    )
                    condition = fingerprint(
                        str(RUN_FORMAT),
                        f"{method} {METHODS[method].revision}",
                        str(bits),
                        dataset.fingerprint,
                        splits[role],
                        computing,
                        str(grid.vectors),
                    )
                    cells.append(
                        Cell(
                            method,
                            bits,
                            seed,
                            variation.name,
                            settings,
                            grid.protocol,
                            labelled,
                            grid.queries,
                            variation.unlabelled,
                            variation.database,
                            len(grid.labelled) > 1,
                            grid.vectors,
                            splits[role],
                            condition,
                            fingerprint(condition, json.dumps(settings, sort_keys=True)),
                        )
                    )
    if not cells:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UsageError(f"grid {grid.name}: nothing to run ({why or 'no method'})")
    return Plan(tuple(cells), left_out)


def _settings(
    grid: Grid, variation: Variation, method: str, bits: int, seed: int, *, perceptron: bool, base: Config
) -> dict[str, Any]:
    if not METHODS[method].deep:
        return make_method(method, bits or 32, seed).settings()
    config = method_config(grid, variation, method, perceptron=perceptron, base=base)
    K = config.quantizer.codewords
    config = merge(
        config, {"quantizer": {"codebooks": codebooks_for_bits(bits, K)}, "training": {"seed": seed}}
    )
    return to_dict(validate(config))
