"""Compiled code is cached, where a folder can be written."""

import pytest
from numba.core.caching import CacheImpl

from gpq_faiss.compiled import compiled


def twice(x):
    return x + x


@pytest.mark.parametrize("cached", [True, False])
def test_loops_are_compiled_with_and_without_a_cache(cached, monkeypatch):
    if not cached:
        monkeypatch.setattr(CacheImpl, "_locator_classes", [])  # no folder can be written
    hits = []
    for _ in range(2):
        function = compiled(twice)
        assert function(4) == 8
        hits.append(sum(function.stats.cache_hits.values()))
    assert hits[1] == cached
