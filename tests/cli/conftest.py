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
