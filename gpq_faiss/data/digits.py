"""``digits``: the 1,797 handwritten digits inside scikit-learn, real images without any download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from .images import ArrayImages, array_fingerprint
from .labels import Labels


def open_digits() -> ArrayImages:
    """1,797 images of 8 x 8 grey pixels in ten classes (UCI Optical Recognition of Handwritten Digits, test part), without
    official split."""
    found = importlib.util.find_spec("sklearn")
    path = Path("" if found is None else found.origin or "").parent / "datasets" / "data" / "digits.csv.gz"
    if path.exists():  # importing scikit-learn takes seconds
        table = np.loadtxt(path, delimiter=",")
    else:
        from sklearn.datasets import load_digits

        source = load_digits()
        table = np.column_stack([source.data, source.target])
    images = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255.0 / 16.0)).astype(np.uint8)
    labels = Labels.from_ids(table[:, -1].astype(np.int64), tuple("0123456789"))
    ids = np.arange(len(images), dtype=np.int64)
    mark = array_fingerprint("digits", images, labels, ids)
    return ArrayImages(name="digits", mirrors=False, images=images, ids=ids, labels=labels, fingerprint=mark)
