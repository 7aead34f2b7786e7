"""``digits``: the 1,797 handwritten digits inside scikit-learn, real images without any download."""

from __future__ import annotations

import numpy as np

from .images import ArrayImages, array_fingerprint
from .labels import Labels


def open_digits() -> ArrayImages:
    """1,797 images of 8 x 8 grey pixels in ten classes (UCI Optical Recognition of Handwritten Digits, test
    part).

    The 17 levels 0 .. 16 are spread over 0 .. 255. There is no official split. ids are the positions.
    """
    from sklearn.datasets import load_digits

    source = load_digits()
    images = np.rint(np.asarray(source.images) * (255.0 / 16.0)).astype(np.uint8)
    labels = Labels.from_ids(np.asarray(source.target), tuple("0123456789"))
    ids = np.arange(len(images), dtype=np.int64)
    return ArrayImages(
        name="digits",
        mirrors=False,
        images=images,
        ids=ids,
        labels=labels,
        fingerprint=array_fingerprint("digits", images, labels, ids),
    )
