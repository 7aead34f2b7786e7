"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(f for f in (ROOT / "gpq_faiss").rglob("*.py") if ">>> " in f.read_text(encoding="utf-8"))


def module_of(file: Path) -> ModuleType:
    return importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_the_examples_of_a_module_run(file):
    found = doctest.testmod(module_of(file))
    assert found.attempted > 0
    assert found.failed == 0


def test_the_main_functions_have_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = {test.name.rpartition(".")[2] for file in FILES for test in finder.find(module_of(file))}
    assert {"Allow", "Deny", "open_index", "build", "preset", "with_settings", "render", "open_data"} <= names
    assert {"rank_codes", "rank_scores", "pack_codes", "inject", "encode"} <= names
