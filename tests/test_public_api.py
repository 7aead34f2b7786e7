"""The public names: what ``import gpq_faiss`` gives, that it gives them late, and that none of them
is a module.
"""

import inspect
import pkgutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import gpq_faiss as gpq
from gpq_faiss.errors import UsageError

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_a_documented_function_or_class():
    assert not hasattr(gpq, "no_such_name")
    assert set(gpq.__all__) <= set(dir(gpq))
    for name in gpq.__all__:
        value = getattr(gpq, name)
        assert not isinstance(value, types.ModuleType), name
        if name != "__version__":
            assert callable(value), name
            assert inspect.getdoc(value), name
    # The wheel has every package.
    files = (ROOT / "gpq_faiss").rglob("__init__.py")
    packages = {".".join(file.parent.relative_to(ROOT).parts) for file in files}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {*packages, "gpq_cli"} == set(settings["tool"]["setuptools"]["packages"])


def test_names_are_imported_late_and_are_no_modules():
    """A module of the same name would take a function's place when somebody imports it."""
    assert set(gpq.__all__).isdisjoint(module.name for module in pkgutil.iter_modules(gpq.__path__))
    code = """
import sys
import gpq_faiss as gpq
print({"torch", "faiss", "h5py", "numpy"} & set(sys.modules))
gpq.preset("recommended")
print("torch" in sys.modules)
"""
    call = [sys.executable, "-c", code]
    completed = subprocess.run(call, capture_output=True, text=True, check=True)
    assert completed.stdout == "set()\nFalse\n"


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.delitem(vars(gpq), "train", raising=False)
    monkeypatch.delitem(sys.modules, "gpq_faiss.stages.train", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    message = r"gpq_faiss.train needs torch: .*gpq-faiss\[train\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        _ = gpq.train
    message = r"the network of m needs torch: .*, or give the network in ONNX"
    with pytest.raises(UsageError, match=message):
        gpq.open_encoder("m")
