"""One tiny model, trained once, and what the other stages make of it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.append(str(Path(__file__).parent.parent))  # for model_factory

from commands import SETTINGS, Shop, clusters, done
from model_factory import make_model


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """Read-only for the tests: they copy what they change."""
    shop = Shop(tmp_path_factory.mktemp("shop"))
    features, labels = clusters()
    np.save(shop.features, features)
    np.save(shop.labels, labels)
    np.save(shop.queries, clusters(7)[0])
    shop.settings.write_text(SETTINGS)
    for model, seed, codes, index in (
        (shop.model, 0, shop.codes, shop.index),
        (shop.other, 1, shop.other_codes, shop.other_index),
    ):
        train = (
            "train",
            shop.data,
            "--labels",
            shop.labels,
            "--labelled",
            "20-per-class",
            "--config",
            shop.settings,
        )
        done(*train, "--preset", "paper", "--seed", seed, "--out", model)
        done("encode", model, shop.data, "--labels", shop.labels, "--out", codes)
        done("index", model, codes, "--out", index)
    for name, colours in (("a", (0, 120)), ("b", (130, 250))):
        (shop.images / name).mkdir(parents=True)
        for i in range(6):
            pixels = np.random.default_rng([i]).integers(*colours, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(shop.images / name / f"{i}.png")
    make_model(shop.image_model, "images", image_size=8, backbone="mlp", class_names=("a", "b"))
    done(
        "encode",
        shop.image_model,
        f"folder:{shop.images}",
        "--no-features",
        "--out",
        shop.root / "image-codes.h5",
    )
    done("index", shop.image_model, shop.root / "image-codes.h5", "--out", shop.image_index)
    return shop
