"""Compiled code in files: damaged or unwritable ones never stop a search."""

import importlib
import linecache
import sys

import numba

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
from numba.extending import intrinsic

@intrinsic
def called(typingctx, x):
    def generate(context, builder, signature, arguments):
        return builder.add(arguments[0], context.get_constant(numba.int64, 1))
    return numba.int64(numba.int64), generate
"""


def test_damaged_or_unwritable_compiled_code_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def twice(x):
        return x + x

    def hits():
        made = compiled(twice)
        assert made(4) == 8
        return sum(made.stats.cache_hits.values())

    assert hits() == 0
    assert hits() == 1
    for kind in ("nbi", "nbc"):
        for content in (b"", b"garbage"):
            for file in tmp_path.rglob(f"*.{kind}"):
                file.write_bytes(content)
            assert hits() == 0
            assert hits() == 1
    made = compiled(twice)
    (folder,) = tmp_path.iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.write_bytes(b"")  # no file can be written below it
    assert made(4) == 8


def test_a_change_of_what_a_loop_calls_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    for name, content in (("gpq_faiss.loops", LOOPS), ("gpq_faiss.called", CALLED)):
        (tmp_path / f"{name[10:]}.py").write_text(content)

    def result():
        """As another process has it."""
        for name in ("gpq_faiss.loops", "gpq_faiss.called"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        linecache.checkcache()
        made = importlib.import_module("gpq_faiss.loops").loop
        return made(4), sum(made.stats.cache_hits.values())

    monkeypatch.setattr(gpq_faiss, "__path__", [*gpq_faiss.__path__, str(tmp_path)])
    assert result() == (5, 0)
    assert result() == (5, 1)
    (tmp_path / "called.py").write_text(CALLED.replace("1))", "20))"))
    assert result() == (24, 0)
    assert result() == (24, 1)
