"""Small model folders without a training: real networks with random weights, for tests of what
comes after it.
"""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from gpq_faiss import __version__
from gpq_faiss.config import Config, preset, validate
from gpq_faiss.data.base import ImageDataset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.protocols import Split
from gpq_faiss.methods.gpq import build_network
from gpq_faiss.methods.model import save_model


@cache
def digits() -> ImageDataset:
    """They are read once."""
    return open_data("digits")


def own_settings() -> Config:
    """The paper's method beyond the paper: a perceptron with noise."""
    changes = {
        "network": {"hidden": [32], "noise": 0.5},
        "loss": {"lambda1": 1.0, "lambda2": 0.5},
        "method": "gpq-printed",
        "training": {"learning_rate": 1e-3},
    }
    return validate(preset("paper").with_settings(changes))


def make_model(
    folder: str | Path,
    kind: Literal["features", "images"] = "features",
    *,
    M: int = 6,
    K: int = 16,
    d: int = 12,
    width: int = 20,
    image_size: int = 32,
    backbone: str = "auto",
    hidden: tuple[int, ...] = (24,),
    networks: int = 0,
    class_names: tuple[str, ...] = ("cat", "dog", "owl"),
    seed: int = 0,
) -> Path:
    """Write the folder that ``gpq train`` would write, in some milliseconds.

    The input statistics of a features model and all statistics of batch norm are set to random
    values, so that a stage which forgets them (or runs in training mode) gives other vectors.

    With class ``networks``, of one hidden layer, queries have vectors of their own.
    """
    settings = {
        "method": "posterior" if networks else "gpq",
        "quantizer": {"codebooks": M, "codewords": K, "subdim": d},
        "network": {"backbone": backbone, "hidden": [*hidden, 16] if networks else list(hidden)},
        "posterior": {"networks": max(1, networks), "propagation": 0.0, "feature_weight": 0.0},
        "training": {"steps": 1, "seed": seed},
    }
    if kind == "images":
        settings["network"]["image_size"] = image_size
    config = Config(preset="paper").with_settings(settings)
    images = {"kind": "images", "image_size": image_size}
    input_ = images if kind == "images" else {"kind": "features", "width": width}
    network = build_network(config, input_, len(class_names))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        statistics = ("backbone.input.mean", "backbone.input.std") if kind == "features" else ()
        for name, buffer in network.named_buffers():
            if name in statistics[:1] or name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
            elif name in statistics or name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    network.eval()
    # A query, a labelled item and two of the database, of a training that never was.
    split = Split(4, "1", 0, *map(np.array, ([0], [1], [2], [2, 3])))
    description = {
        "method": "gpq",
        "config": asdict(config),
        "run_identity": "0" * 16,
        "data": {"name": "random weights", "fingerprint": "0" * 16, "notes": []},
        "split": {"protocol": split.name, "seed": split.seed, "hash": split.hash},
        "class_names": list(class_names),
        "multi_label": False,
        "input": input_,
        "training": {
            **{
                "steps": 1,
                "seconds": 0.0,
                "best_step": None,
                "validation_map": None,
                "device": "cpu",
            },
            **{"validation_items": 0, "labelled_items": len(class_names), "unlabelled_items": 0},
        },
        "versions": {"gpq_faiss": __version__, "torch": torch.__version__, "numpy": np.__version__},
    }
    metrics = json.dumps({"step": 1, "total": 1.0}) + "\n"
    out = Path(folder)
    save_model(out, network, description, metrics=metrics, split=split)
    return out


def random_input(
    kind: Literal["features", "images"],
    n: int,
    *,
    width: int = 20,
    image_size: int = 32,
    seed: int = 0,
) -> np.ndarray[Any, np.dtype[Any]]:
    """What such a model takes: features float32 [n, width], or images uint8 [n, 3, image_size,
    image_size].
    """
    rng = np.random.default_rng([seed, n])
    if kind == "features":
        return rng.standard_normal((n, width)).astype(np.float32)
    return rng.integers(0, 256, (n, 3, image_size, image_size), dtype=np.uint8)
