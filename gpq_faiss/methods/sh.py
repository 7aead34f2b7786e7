"""Spectral hashing (Weiss, Torralba and Fergus, "Spectral Hashing", NIPS 2008): thresholded
eigenfunctions on principal axes.

The best code of a given graph of similarities is a partition of it; relaxed, its bits are the signs
of the eigenvectors of the graph's Laplacian. For data uniformly distributed in a box, the
eigenfunctions of the Laplacian are known (sect. 3): along the axis [a, b] they are

    Φ_k(x) = sin(π/2 + k π / (b - a) (x - a)),     k = 1, 2, ...

with the eigenvalue  λ_k = 1 - exp(-ε²/2 |k π / (b - a)|²).

So the method takes principal components as axes, their ranges as the box, and the ``bits``
single-axis eigenfunctions with the smallest eigenvalues (products are left out, as their signs
depend on the others); a long axis gives several bits, of rising frequency. A bit is the sign of its
function; codes are compared by Hamming distance. ε does not change the order of eigenvalues, so no
code. Unsupervised.

As in the authors' description, at most ``bits`` principal components are used. Deviation, in this
method's favour, as for other unsupervised methods: vectors are scaled to unit length first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA

from ..data.labels import Labels
from ..errors import DataError
from .coders import BinaryMethod, Floats


class SH(BinaryMethod):
    """Spectral hashing. Deterministic: the seed has no effect.

    ``pca``: the first P principal components; ``box``: float64 [P, 2], the range of the training
    vectors along each; ``modes``: int64 [bits, 2], axis and k of each bit, by rising eigenvalue.
    """

    name = "sh"
    unit = True

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        if (x == x[0]).all():
            raise DataError(
                f"{self.name}: all training vectors are equal: give at least 2 different ones"
            )
        self.pca = PCA(min(self.bits, *x.shape), svd_solver="covariance_eigh")
        y = self.pca.fit_transform(x.astype(np.float64))
        self.box = np.stack([y.min(axis=0), y.max(axis=0)], axis=1)
        self.modes = smallest_modes(np.ptp(y, axis=0), self.bits)

    def _project(self, x: Floats) -> Floats:
        axis, k = self.modes.T
        low, high = self.box[axis].T
        y = self.pca.transform(x.astype(np.float64))[:, axis]
        phase = np.pi / 2 + k * np.pi * (y - low) / (high - low)  # periodic outside of the box
        return np.asarray(np.sin(phase), dtype=np.float32)


def smallest_modes(lengths: NDArray[Any], count: int) -> NDArray[np.int64]:
    """The ``count`` pairs (axis, k >= 1) with the smallest eigenvalues in a box of these edge
    lengths [P]: int64 [count, 2].

    1 - exp(-ε²/2 (k π / length)²) rises with k / length; ties go to the first axis.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    # No axis can have more than its share of the longest axis' k.
    limits = np.ceil(count * lengths / lengths.max()).astype(np.int64)
    axis = np.repeat(np.arange(len(lengths)), limits)
    k = np.concatenate([np.arange(1, n + 1) for n in limits])
    order = np.argsort(k / lengths[axis], kind="stable")[:count]
    return np.stack([axis[order], k[order]], axis=1)
