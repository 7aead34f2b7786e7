"""Collection of the tests without Python's garbage collector, which takes half of its time: modules stay until the end."""

from __future__ import annotations

import gc

gc.disable()


def pytest_collection_finish() -> None:
    """Nothing that was imported is looked at again."""
    gc.freeze()
    gc.enable()
