"""``digits``: the 1,797 handwritten digits inside scikit-learn, real images without any download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .images import ArrayImages, array_fingerprint
from .labels import Labels


def open_digits() -> ArrayImages:
    """1,797 images of 8 x 8 grey pixels in ten classes (UCI Optical Recognition of Handwritten Digits, test
    part).

    The 17 levels 0 .. 16 are scaled to 0 .. 255. There is no official split. ids are row numbers.
    """
    table = _table()
    images = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255.0 / 16.0)).astype(np.uint8)
    labels = Labels.from_ids(table[:, -1].astype(np.int64), tuple("0123456789"))
    ids = np.arange(len(images), dtype=np.int64)
    return ArrayImages(
        name="digits",
        mirrors=False,
        images=images,
        ids=ids,
        labels=labels,
        fingerprint=array_fingerprint("digits", images, labels, ids),
    )


def _table() -> NDArray[np.float64]:
    """64 levels and the class of every image, [1797, 65], from scikit-learn's file, since importing scikit-learn takes seconds."""
    found = importlib.util.find_spec("sklearn")
    if found is not None and found.origin is not None:
        path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    source = load_digits()
    return np.column_stack([source.data, source.target])
