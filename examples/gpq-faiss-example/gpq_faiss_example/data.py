"""``libsvm:FILE``: vectors and class numbers in the text format of LIBSVM."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_svmlight_file

import gpq_faiss as gpq
from gpq_faiss.data.base import Dataset


def open_libsvm(path: str) -> Dataset:
    """Vectors with labels; what fails here is told as one line with the name of the package."""
    x, y = load_svmlight_file(path)
    return gpq.open_data(x.toarray(), labels=y.astype(np.int64))
