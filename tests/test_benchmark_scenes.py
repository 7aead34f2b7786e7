"""The table of benchmarks/scenes.py says what its figures are of."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def scenes() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("scenes")


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads((RESULTS / "scenes.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_the_committed_table_is_that_of_the_committed_figures(scenes: Any, results: dict[str, Any]) -> None:
    assert scenes.markdown(results) == (RESULTS / "scenes.md").read_text(encoding="utf-8")


def test_the_seeds_are_those_that_are_there_not_those_asked_for(scenes: Any, results: dict[str, Any]) -> None:
    one = [cell | {"seed": 2} for cell in results["cells"] if cell["seed"] == results["cells"][0]["seed"]]
    asked = results | {"seeds": [0, 1, 2, 3], "cells": one}
    assert "\nSeed 2 alone (it draws database" in scenes.markdown(asked)
    two = scenes.markdown(asked | {"cells": one + [cell | {"seed": 0} for cell in one]})
    assert "\nMean ± deviation over seeds 0, 2 (each draws database" in two
    assert " ± 0.0000" in two
