"""The runs of a grid on a data set, in order of execution."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import codebooks_for_bits, to_dict, validate
from ..data.base import Dataset
from ..data.protocols import make_split
from ..errors import UsageError
from ..files import fingerprint, versions
from ..methods.measure import needs_perceptron
from ..methods.registry import find_method, make_method, method_names
from .grid import Grid, method_config

RUN_FORMAT = 2
"""Version of the run files; part of every identity."""
COMPUTING = ("python", "numpy", "torch", "faiss")
"""Packages on whose versions results depend."""


@dataclass(frozen=True)
class RunSpec:
    """One run: a method at one code length, seed and variation of the settings, on one split.

    Attributes:
        bits: requested code length; 0 for methods without codes.
        settings: all that determines the codes except the data: the dict of a config, or the
            settings of an array method.
        split_args: arguments of :func:`gpq_faiss.data.protocols.make_split`.
        vectors: number of database items whose vectors are stored.
        identity: hash of everything that the results depend on.
        name: name of the file without extension; unique in the grid.
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


def plan(grid: Grid, dataset: Dataset) -> tuple[list[RunSpec], dict[str, str]]:
    """Return the runs of a grid on a data set, and method -> reason why it has no run.

    Seeds are outermost, so that an interrupted grid is a complete table of fewer seeds. A run that
    differs from an earlier one only in the name of its variation, as those of methods without
    settings do, is left out.

    Raises:
        UsageError: invalid settings; a code length that a method does not support; a method that is
            not installed.
        DataError: too few items for the protocol.
    """
    perceptron = needs_perceptron(dataset)
    used = {name for variation in grid.variations for name in grid.methods_of(variation)}
    entries = {name: find_method(name) for name in method_names() if name in used}
    reason = "its network has no room for convolutions in these items (features, tiny images)"
    left_out = {
        name: reason for name, entry in entries.items() if perceptron and entry.convolutional
    }
    for name in entries.keys() - left_out.keys():
        entries[name].load()
    specs: dict[str, RunSpec] = {}
    for seed in grid.seeds:
        split_args: dict[str, Any] = grid.model_dump(include={"protocol", "labelled", "queries"})
        split_args["seed"] = seed
        split_hash = make_split(dataset, **split_args).hash
        for variation, (name, entry) in itertools.product(grid.variations, entries.items()):
            if name in left_out or name not in grid.methods_of(variation):
                continue
            for bits in grid.bits if entry.any_length else (0,):
                if entry.deep:
                    config = method_config(grid, variation, name, perceptron=perceptron)
                    M = codebooks_for_bits(bits, config.quantizer.codewords)
                    fixed = {"quantizer": {"codebooks": M}, "training": {"seed": seed}}
                    settings = to_dict(validate(config.with_settings(fixed)))
                else:
                    settings = dict(make_method(name, bits or 32, seed).settings())
                file = f"{name}_{f'{bits}bits' if bits else 'any'}_seed{seed}"
                if variation.name:
                    words = re.sub(r"[^a-z0-9.]+", "-", variation.name.lower()).strip("-.")
                    file += f"_{words[:40]}-{fingerprint(variation.name)[:4]}"
                identity = fingerprint(
                    str(RUN_FORMAT),
                    f"{name} {entry.revision}",
                    str(bits),
                    dataset.fingerprint,
                    split_hash,
                    json.dumps(versions(*COMPUTING), sort_keys=True),
                    str(grid.vectors),
                    json.dumps(settings, sort_keys=True),
                )
                spec = RunSpec(
                    name,
                    bits,
                    seed,
                    variation.name,
                    settings,
                    split_args,
                    grid.vectors,
                    split_hash,
                    identity,
                    file,
                )
                specs.setdefault(identity, spec)
    if not specs:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UsageError(f"grid {grid.name}: nothing to run ({reasons or 'no method'})")
    return list(specs.values()), left_out


def describe_plan(specs: Sequence[RunSpec]) -> str:
    """Return a line that says how the number of runs comes about.

    For example ``16 runs: 4 methods x 2 code lengths (12, 48 bits) x 2 seeds``.
    """
    products = []
    for runs in ([s for s in specs if s.bits], [s for s in specs if not s.bits]):
        rows = {(spec.method, spec.variation) for spec in runs}
        bits = sorted({spec.bits for spec in runs})
        seeds = len({spec.seed for spec in runs})
        lengths = "without codes"
        if any(bits):
            lengths = f"x {len(bits)} code lengths ({', '.join(map(str, bits))} bits)"
        if runs:
            products.append(f"{len(rows)} methods (with variations) {lengths} x {seeds} seeds")
    return f"{len(specs):,} runs: {', and '.join(products)}"
