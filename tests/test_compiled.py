"""Compiled code is cached, where a folder can be written."""

import importlib
import linecache
import sys

import numba
import pytest
from numba.core.caching import CacheImpl

import gpq_faiss
from gpq_faiss.compiled import compiled

LOOPS = """
from .called import called
from .compiled import compiled

@compiled
def loop(x):
    return called(x)
"""
CALLED = """
import numba

@numba.njit
def called(x):
    return x + 1
"""


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


def test_a_change_of_what_a_loop_calls_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "loops.py").write_text(LOOPS)
    monkeypatch.setattr(gpq_faiss, "__path__", [*gpq_faiss.__path__, str(tmp_path)])
    for added, cache_hits in ((1, 0), (1, 1), (20, 0), (20, 1)):
        (tmp_path / "called.py").write_text(CALLED.replace("1", str(added)))
        for name in ("gpq_faiss.loops", "gpq_faiss.called"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        linecache.checkcache()
        loop = importlib.import_module("gpq_faiss.loops").loop
        assert (loop(4), sum(loop.stats.cache_hits.values())) == (4 + added, cache_hits)
