"""Collection of the tests without Python's garbage collector, which takes half of its time: modules stay until the end. And the order."""

from __future__ import annotations

import gc

import pytest

_FIRST = ("cluster", "test_several_processes", "test_notebooks", "experiment")
"""Folders and files whose tests share what takes long to start: a cluster of Ray, processes, a kernel, finished experiments."""

gc.disable()


def pytest_collection_finish() -> None:
    """Nothing that was imported is looked at again."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs ``_FIRST``, from its start: at the end none is left for another worker, which would start all that again."""

    def place(item: pytest.Item) -> int:
        names = {item.path.stem, item.path.parent.name}
        return next((i for i, name in enumerate(_FIRST) if name in names), len(_FIRST))

    items.sort(key=place)
