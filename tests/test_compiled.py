"""Compiled code in files: damaged or unwritable ones never stop a search."""

import importlib
import linecache
import sys

import numba
import pytest

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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def twice(x):
    return x + x


def hits():
    """Number of functions that were read from the cache."""
    function = compiled(twice)
    assert function(4) == 8
    return sum(function.stats.cache_hits.values())


@pytest.mark.parametrize("content", [b"", b"garbage"])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_damaged_code_is_compiled_again(folder, kind, content):
    assert [hits(), hits()] == [0, 1]
    for file in folder.rglob(f"*.{kind}"):
        file.write_bytes(content)
    assert [hits(), hits()] == [0, 1]


def test_code_that_cannot_be_written_is_compiled(folder):
    assert hits() == 0
    function = compiled(twice)
    (path,) = (folder / "cache").iterdir()
    path.rename(folder / "other")
    path.touch()  # no file can be written below it
    assert function(4) == 8


def test_a_change_of_what_a_loop_calls_is_noticed(folder, monkeypatch):
    (folder / "loops.py").write_text(LOOPS)
    monkeypatch.setattr(gpq_faiss, "__path__", [*gpq_faiss.__path__, str(folder)])
    for added, cache_hits in ((1, 0), (1, 1), (20, 0), (20, 1)):
        (folder / "called.py").write_text(CALLED.replace("1", str(added)))
        for name in ("gpq_faiss.loops", "gpq_faiss.called"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        linecache.checkcache()
        loop = importlib.import_module("gpq_faiss.loops").loop
        assert (loop(4), sum(loop.stats.cache_hits.values())) == (4 + added, cache_hits)
