"""``nuswide:ROOT``: NUS-WIDE in its official layout (Chua et al., CIVR 2009)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from ..inputs import read_text
from .base import About
from .images import FileImages, listed_images, shown
from .labels import Labels
from .lists import read_lines

_IMAGES, _LABELS, _CONCEPTS, _LIST = (
    "Flickr", "Groundtruth/AllLabels", "ConceptsList/Concepts81.txt", "ImageList/Imagelist.txt",
)  # fmt: skip


def _binary_column(path: Path, n_items: int) -> NDArray[np.bool_]:
    """One ``Labels_CONCEPT.txt``, 0 or 1 per line: bool [n_items]. Raises DataError: missing, or something else."""
    values = np.array(read_text(path, "0 or 1 for each image").split(), dtype="S2")
    if not np.isin(values, [b"0", b"1"]).all():
        raise DataError(f"{path} is not a column of 0 and 1: damaged or foreign")
    if len(values) != n_items:
        raise DataError(f"{path} has {len(values):,} labels, but the image list has {n_items:,} images")
    return np.asarray(values == b"1")


def open_nuswide(root: str, *, concepts: int = 21, max_bad: float = 0.01) -> FileImages:
    """NUS-WIDE from ``ImageList/Imagelist.txt``, ``Groundtruth/AllLabels/Labels_*.txt``, ``ConceptsList/Concepts81.txt`` and ``Flickr/``.

    ``concepts`` is the number of most frequent ones (ties by name). Images without any of them are left out and counted. ids are row
    numbers in the official image list.
    """
    folder = Path(root).expanduser()
    lacking = [part for part in (_LIST, _LABELS, _CONCEPTS, _IMAGES) if not (folder / part).exists()]
    if lacking:
        raise DataError(
            f"nuswide: {', '.join(lacking)} not found in {folder}: put that part of NUS-WIDE there"
        )
    names = [line.replace("\\", "/") for _, line in read_lines(folder / _LIST, "image names, one per line")]
    known = [line for _, line in read_lines(folder / _CONCEPTS, "concept names, one per line")]
    for name in known:  # a concept name from a file is used as a file name: it must not contain a path
        if "/" in name or "\\" in name or known.count(name) > 1:
            raise DataError(f"{folder / _CONCEPTS}: {shown(name)} cannot be a concept, or it is there twice")
    if not 1 <= concepts <= len(known):
        raise UsageError(f"--read concepts={concepts}: 1 to {len(known)} are there")
    columns = [_binary_column(folder / _LABELS / f"Labels_{name}.txt", len(names)) for name in known]
    order = sorted(range(len(known)), key=lambda c: (-int(columns[c].sum()), known[c]))
    chosen = sorted(order[:concepts])
    matrix = np.stack([columns[c] for c in chosen], axis=1)
    kept = np.flatnonzero(matrix.any(axis=1))
    if not len(kept):
        raise DataError(f"nuswide: no image in {folder} has any of the {len(chosen)} concepts")
    bare = len(names) - len(kept)
    left_out = f"{bare:,} of {len(names):,} images have none of the {len(chosen)} concepts, left out"
    labels = Labels.from_multihot(matrix[kept], [known[c] for c in chosen])
    own = [names[i] for i in kept]
    paths = [os.path.join(folder, _IMAGES, name) for name in own]
    about = About(labels, ids=kept, notes=[left_out] if bare else [])
    return listed_images(f"nuswide:{root}", own, paths, about, max_bad)
