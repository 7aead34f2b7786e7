"""Settings of all tests, and the products that tests of several rooms share."""

import contextlib
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import SETTINGS, Shop, clusters, done
from filelock import FileLock
from hypothesis import settings
from PIL import Image

from gpq_faiss import compiled
from gpq_faiss.errors import GpqError

MEMORY = "/dev/shm"  # noqa: S108  (a file system in memory: on a disk, every output waits for it)
if (
    "TMPDIR" not in os.environ
    and os.path.isdir(MEMORY)
    and shutil.disk_usage(MEMORY).free > 2 << 30
):
    os.environ["TMPDIR"] = tempfile.tempdir = MEMORY

settings.register_profile("tests", max_examples=60, deadline=None)
settings.load_profile("tests")


def _one_line(error: GpqError, *messages: object) -> None:
    """Check every error of the package, in whatever test."""
    Exception.__init__(error, *messages)
    assert "\n" not in str(error), messages


setattr(GpqError, "__init__", _one_line)  # noqa: B010


@functools.cache
def _lock(name: str) -> FileLock:
    """The lock of a loop or a product, for all workers of pytest-xdist."""
    return FileLock(Path(__file__).with_name("__pycache__") / f"{name}.lock", timeout=120)


class _SharedCache(compiled._Cache):
    """A cache for processes that wait for the first one, which compiles a loop for all."""

    def load_overload(self, *arguments: Any) -> Any:
        overload = super().load_overload(*arguments)
        if overload is None:
            _lock(self._py_func.__qualname__).acquire()
            overload = super().load_overload(*arguments)
            if overload is not None:
                _lock(self._py_func.__qualname__).release()
        return overload

    def save_overload(self, *arguments: Any) -> None:
        with contextlib.suppress(OSError):  # of tests that limit the size of files
            super().save_overload(*arguments)
        _lock(self._py_func.__qualname__).release()


compiled._Cache = _SharedCache


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Make a model of features, and its network in ONNX and for torch, once for all workers."""
    from model_factory import make_model

    from gpq_faiss import export_encoder

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    names = ("model", "encoder.onnx", "encoder.pt2")
    model, *files = (folder / "encoders" / name for name in names)
    with _lock("encoders"):
        if not files[-1].exists():
            make_model(model, M=5)
            for file in files:
                export_encoder(model, file)
    return model, *files


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """Train one tiny model, and run the other stages on it. Tests copy what they change."""
    from model_factory import make_model  # torch is slow to load

    shop = Shop(tmp_path_factory.mktemp("shop"))
    features, labels = clusters()
    np.save(shop.features, features)
    np.save(shop.labels, labels)
    np.save(shop.queries, clusters(7)[0])
    shop.settings.write_text(SETTINGS)
    data = f"{shop.data} --labels {shop.labels}"
    settings = f"--labelled 20-per-class --preset {shop.settings}"
    done(f"train {data} {settings} --out {shop.model}")
    make_model(shop.other, M=4, width=features.shape[1], hidden=(), seed=1)
    for model, codes, index in (
        (shop.model, shop.codes, shop.index),
        (shop.other, shop.other_codes, shop.other_index),
    ):
        done(f"encode {model} {data} --out {codes}")
        done(f"index {model} {codes} --out {index}")
    for name, colours in (("a", (0, 120)), ("b", (130, 250))):
        (shop.images / name).mkdir(parents=True)
        for i in range(6):
            pixels = np.random.default_rng([i]).integers(*colours, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(shop.images / name / f"{i}.png")
    make_model(shop.image_model, "images", image_size=8, backbone="mlp", class_names=("a", "b"))
    codes = shop.root / "image-codes.h5"
    done(f"encode {shop.image_model} folder:{shop.images} --no-features --out {codes}")
    done(f"index {shop.image_model} {codes} --out {shop.image_index}")
    return shop
