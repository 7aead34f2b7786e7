"""Small image files for the tests of the sources."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpq_faiss.data.open import open_data


def png(seed: int, size: int = 4) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def put(root: Path, *names: str) -> None:
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i))


def data_folder() -> Path:
    if "GPQ_DATA" not in os.environ:
        pytest.skip("GPQ_DATA is not set: the folder of real test data")
    return Path(os.environ["GPQ_DATA"])


def open_folder(path: str | Path, **options: Any) -> Any:
    return open_data(f"folder:{path}", **options)


def open_list(path: str | Path, **options: Any) -> Any:
    return open_data(f"list:{path}", **options)


def open_table(path: str | Path, form: str = "csv", **options: Any) -> Any:
    return open_data(f"{form}:{path}", **options)


def open_features(path: str | Path, **options: Any) -> Any:
    return open_data(f"features:{path}", **options)


def open_nuswide(path: str | Path, **options: Any) -> Any:
    return open_data(f"nuswide:{path}", **options)
