"""Where tests write, what they compile, their order, and collection without Python's garbage collector, which takes half of its time."""

import gc
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from commands import SETTINGS, Shop, clusters, done
from hypothesis import settings
from PIL import Image

from gpq_faiss.errors import GpqError

_FIRST = ("cluster", "test_several_processes", "serve", "test_notebooks", "experiment", "test_benchmarks")
"""Folders and files whose tests wait for others, or share what takes long to start: a cluster, processes, a kernel, services. Of three
workers one has those of several processes and of experiments, which are forks of the same."""
_LAST = ("losses", "codes", "evaluation", "store", "data")
"""Folders whose tests start from little: what one worker makes for all tests of a file, another need not make again."""

MEMORY = "/dev/shm"  # noqa: S108  (a file system in memory: on a disk, every output waits for it)
if "TMPDIR" not in os.environ and os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > 2 << 30:
    os.environ["TMPDIR"] = tempfile.tempdir = MEMORY

_COMPILE = """
from tempfile import TemporaryDirectory
import numpy as np
from gpq_faiss import MemoryIndex, open_index
xq = np.ones((1, 32), np.float32)
with TemporaryDirectory() as folder:
    held = MemoryIndex.build(np.zeros((4, 1), np.uint8), np.eye(16, dtype=np.float32)[None].repeat(2, axis=0))
    with open_index(held.save(f"{folder}/i.faiss"), in_place=True) as placed:
        for index in (held, placed):
            index.search(xq, 1)
            index.search(xq, 1, nprobe=1)
"""


def _one_line(error: GpqError, *said: object) -> None:
    """Of every error of the package, in whatever test."""
    Exception.__init__(error, *said)
    assert "\n" not in str(error), said


setattr(GpqError, "__init__", _one_line)  # noqa: B010
gc.disable()
settings.register_profile("tests", max_examples=60, deadline=None)  # what a test does not say otherwise
settings.load_profile("tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """The loops of search are compiled once, while workers collect tests, and not by each of them."""
    compiling = subprocess.Popen([sys.executable, "-c", _COMPILE])
    config.add_cleanup(compiling.wait)


def pytest_collection_finish() -> None:
    """Nothing that was imported is looked at again, and what tests make seldom."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 50)
    gc.enable()


@pytest.hookimpl(trylast=True)  # what is not selected is not in the list
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker begins with some of ``_FIRST``, whole, and ends with some of ``_LAST``, of which idle workers take over what is left."""
    groups: dict[str, list[pytest.Item]] = {name: [] for name in (*_FIRST, *_LAST, "")}
    for item in items:
        names = {item.path.stem, item.path.parent.name}
        groups[next((name for name in groups if name in names), "")].append(item)
    last, rest = [item for name in _LAST for item in groups.pop(name)], groups.pop("")
    first, workers = list(groups.values()), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    total, end = len(items), 0
    items.clear()
    for worker in range(workers):  # which xdist gives equal parts of the list
        end += (total - end) // (workers - worker)
        items += itertools.chain.from_iterable(first[worker::workers])
        share = len(last) // (workers - worker)
        room = max(0, end - share - len(items))
        items += rest[:room] + last[:share]
        rest, last = rest[room:], last[share:]
    items += rest


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model of features, and its network in ONNX and for torch."""
    from model_factory import make_model

    from gpq_faiss import export_encoder

    model, folder = make_model(tmp_path_factory.mktemp("model") / "m", M=5), tmp_path_factory.mktemp("files")
    return model, *(export_encoder(model, folder / f"encoder.{suffix}") for suffix in ("onnx", "pt2"))


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """One tiny model, trained once, and what the other stages make of it. Tests copy what they change."""
    from model_factory import make_model  # torch is slow to load

    shop = Shop(tmp_path_factory.mktemp("shop"))
    features, labels = clusters()
    np.save(shop.features, features)
    np.save(shop.labels, labels)
    np.save(shop.queries, clusters(7)[0])
    shop.settings.write_text(SETTINGS)
    data = f"{shop.data} --labels {shop.labels}"
    settings = f"--labelled 20-per-class --config {shop.settings} --preset paper"
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
