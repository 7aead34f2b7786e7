"""The real NUS-WIDE-21 label matrix, with simulated features: for benchmarks at true size without the images."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from common import open_features, require_data
from numpy.typing import NDArray

from gpq_faiss.data.base import FeatureDataset
from gpq_faiss.data.labels import Labels
from gpq_faiss.errors import DataError

CONCEPTS = 21
WIDTH = 96
NOISE = 1.5
SIMULATED = (
    f"simulated features: a fixed random direction of {WIDTH} dimensions for each concept, the mean of an image's concepts "
    f"scaled to unit variance, plus Gaussian noise of {NOISE} deviations"
)


def read_labels(root: Path | None) -> Labels:
    """Labels of the 195,834 images with one of the 21 most frequent concepts, in the order of the official image list.

    Concepts are in alphabetical order, which is that of the official list, so that a split of a seed is the one that
    the official files would give.

    Args:
        root: folder of ``mul_label_ids.txt.gz`` (``image TAB concept`` a line) and ``label_ids.txt`` (``id TAB name``).

    Raises:
        UsageError: no folder. DataError: the files are missing or damaged.
    """
    require_data(root, "FOLDER", "the NUS-WIDE labels")
    assert root is not None
    try:
        names = [line.split("\t")[1].strip() for line in (root / "label_ids.txt").read_text().splitlines()]
        with gzip.open(root / "mul_label_ids.txt.gz", "rt") as file:
            pairs = [(int(words[0]), int(c)) for words in map(str.split, file) for c in words[1:]]
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DataError(f"{root} does not hold the NUS-WIDE label lists ({error})") from None
    image, concept = np.array(pairs, dtype=np.int64).T
    dense = np.zeros((int(image.max()) + 1, len(names)), dtype=bool)
    dense[image, concept] = True
    frequent = np.argsort(-dense.sum(axis=0), kind="stable")[:CONCEPTS]
    columns = sorted(frequent.tolist(), key=lambda c: names[c])
    matrix = dense[:, columns]
    return Labels.from_multihot(matrix[matrix.any(axis=1)], [names[c] for c in columns])


def simulate(labels: Labels, *, noise: float = NOISE, seed: int = 0) -> NDArray[np.float32]:
    """Features float32 [N, WIDTH] (:data:`SIMULATED`). They say nothing about images: only sizes and times are real."""
    rng = np.random.default_rng([seed, CONCEPTS])
    directions = rng.standard_normal((labels.n_classes, WIDTH), dtype=np.float32)
    dense = labels.dense()
    mean: NDArray[np.float32] = dense @ directions
    mean /= np.sqrt(np.maximum(dense.sum(axis=1, keepdims=True), 1))
    mean += noise * rng.standard_normal(mean.shape, dtype=np.float32)
    return mean


def as_dataset(labels: Labels, x: NDArray[np.float32], folder: Path) -> FeatureDataset:
    """Write features and labels to ``folder`` and open them as any user's embeddings.

    The name begins with ``nuswide:``, so that protocol 1 has the paper's numbers.
    """
    np.save(folder / "features.npy", x)
    np.save(folder / "labels.npy", labels.dense(dtype=np.uint8))
    data = open_features(folder / "features.npy", folder / "labels.npy")
    data.name = "nuswide:simulated-features"
    return data
