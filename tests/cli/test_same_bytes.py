"""The same input and seed give the same bytes, whenever a command runs: no product holds a time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from commands import Shop, content, done, fill

from gpq_faiss.store import read_arrays

GRID = 'methods = ["gpq", "pq"]\nbits = [12]\nseeds = [0]\nlabelled = "20-per-class"\npreset = "paper"\n'


def make(shop: Shop, root: Path) -> None:
    """One output of every command and form, below ``root``."""
    root.mkdir()
    indexes = {
        "flat": "codes.h5",
        "fastscan": "codes.h5 --kind fastscan",
        "streamed": "codes.h5 --memory 64MB",
        "lists": "codes.h5 --kind ivf",
        "streamed-lists": "codes.h5 --kind ivf --memory 64MB",
        "fastscan-of-index": "flat.faiss --kind fastscan",
        "lists-of-index": "flat.faiss --kind ivf",
    }
    for call in (
        "train DATA --labels LABELS --preset paper --set training.steps=6 --config SETTINGS --out ./model",
        "encode ./model DATA --labels LABELS --out ./codes.h5",
        "export-faiss ./model --out ./empty.faiss",
        "export ./model --to numpy --out ./codebooks.npz",
        "export ./model --to factory --out ./factory.faiss",
        "export-encoder ./model --out ./encoder.onnx",
        "export-encoder ./model --out ./encoder.pt2",
        *(f"index ./model ./{source} --out ./{name}.faiss" for name, source in indexes.items()),
        "search ./model ./flat.faiss QUERIES -k 3 --format json --out ./found.json",
        "search IMAGE_MODEL IMAGE_INDEX PHOTO -k 2 --images folder:IMAGES --format png --out ./found.png",
        *(
            f"evaluate ./model DATA --labels LABELS --format json --out ./{end}.json --plot ./curve.{end}"
            for end in ("png", "svg", "pdf")
        ),
    ):
        done(
            *[
                word.replace("./", f"{root}/", 1) if word.startswith("./") else word
                for word in fill(call, shop)
            ]
        )


@pytest.fixture(scope="module")
def twice(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same, in two folders at different times (HDF5, zip and PDF count in seconds)."""
    folder = tmp_path_factory.mktemp("twice")
    make(shop, folder / "one")
    time.sleep(1.1)
    make(shop, folder / "two")
    return folder / "one", folder / "two"


def test_every_product_has_the_same_bytes(twice: tuple[Path, Path]) -> None:
    one, two = (content(folder) for folder in twice)
    # How long each step took is in the metrics, and nowhere else.
    for of_one in (one, two):
        assert of_one.pop("model/metrics.jsonl")
    assert [name for name in one if one[name] != two.get(name)] == []
    assert one.keys() == two.keys()
    assert len(one) > 30


def test_a_run_of_an_experiment_is_the_same_but_for_its_times(shop: Shop, tmp_path: Path) -> None:
    """Times are what an experiment measures: they are in one attribute, and nowhere else."""
    (tmp_path / "grid.toml").write_text(GRID)
    for name in ("one", "two"):
        run = ("experiment", "run", tmp_path / "grid.toml", shop.data, "--labels", shop.labels)
        done(*run, "--set", "training.steps=8", "--out", tmp_path / name)
        time.sleep(1.1)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in files:
        one, two = tmp_path / "one" / name, tmp_path / "two" / name
        if not name.endswith(".h5"):
            assert one.read_bytes() == two.read_bytes(), name
            continue
        (arrays, about), (others, about_other) = read_arrays(one, "a run"), read_arrays(two, "a run")
        times = (json.loads(made.pop("seconds")) for made in (about, about_other))
        assert [sorted(of) for of in times] == [["encode", "fit", "rank"]] * 2
        assert about == about_other
        assert arrays.keys() == others.keys()
        for key in arrays:
            np.testing.assert_array_equal(arrays[key], others[key], err_msg=f"{name} {key}")
