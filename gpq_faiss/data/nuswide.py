"""``nuswide:ROOT``: NUS-WIDE in its official layout (Chua et al., CIVR 2009)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .base import About
from .images import FileImages, listed_images, shown
from .labels import Labels
from .tables import read_lines

# Official names first, then names in common copies of the data set. Case is ignored.
_IMAGE_LISTS = ("ImageList/Imagelist.txt", "ImageLists/Imagelist.txt", "Imagelist.txt")
_SPLIT_LISTS = ("TrainImagelist.txt", "TestImagelist.txt")
_LABEL_FOLDERS = ("Groundtruth/AllLabels", "AllLabels", "Groundtruth/Groundtruth/AllLabels", "Labels")
_CONCEPT_LISTS = ("ConceptsList/Concepts81.txt", "Concepts81.txt", "Groundtruth/Concepts81.txt")
_IMAGE_FOLDERS = ("Flickr", "images", "image", "Flickr/Flickr", "NUS-WIDE-images", "img")


def _inside(folder: Path, relative: str) -> Path | None:
    """``folder/relative``, ignoring case; an exact match wins."""
    here = folder
    for part in relative.split("/"):
        try:
            names = os.listdir(here)
        except OSError:
            return None
        like = [part] if part in names else sorted(name for name in names if name.lower() == part.lower())
        if not like:
            return None
        here = here / like[0]
    return here


def _find(root: Path, names: Sequence[str], *, folder: bool) -> list[Path]:
    found = [path for name in names if (path := _inside(root, name)) is not None]
    return [path for path in found if (path.is_dir() if folder else path.is_file())]


def _binary_column(path: Path, n_items: int) -> NDArray[np.bool_]:
    """One ``Labels_CONCEPT.txt``, 0 or 1 per line: bool [n_items]. Raises DataError: missing, or something else."""
    try:
        data = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    except FileNotFoundError:
        raise DataError(f"{path} not found: a file with 0 or 1 for each image is needed") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    digit = (data == ord("0")) | (data == ord("1"))
    if not (digit | np.isin(data, list(b"\n\r \t"))).all() or (digit[1:] & digit[:-1]).any():
        raise DataError(f"{path} is not a column of 0 and 1: damaged or foreign")
    values: NDArray[np.bool_] = data[digit] == ord("1")
    if len(values) != n_items:
        raise DataError(f"{path} has {len(values):,} labels, but the image list has {n_items:,} images")
    return values


def choose_concepts(
    concepts: str | Sequence[str], names: Sequence[str], counts: NDArray[np.int64]
) -> list[int]:
    """Indices in ``names`` of the requested concepts, in their order: ``"all"``, a number n as text for the n most frequent by ``counts``
    ("21"; ties by name), or names (a sequence, or one text with commas). Raises UsageError: unknown concepts."""
    wanted = [part.strip() for part in concepts.split(",")] if isinstance(concepts, str) else list(concepts)
    if wanted == ["all"]:
        return list(range(len(names)))
    if len(wanted) == 1 and wanted[0].isascii() and wanted[0].isdigit():
        n = int(wanted[0])
        if not 1 <= n <= len(names):
            raise UsageError(f"{n} concepts are requested: 1 to {len(names)} are available")
        return sorted(sorted(range(len(names)), key=lambda c: (-int(counts[c]), names[c]))[:n])
    unknown = [name for name in wanted if name not in names]
    if unknown or not wanted:
        what = f"concept {unknown[0] if unknown else ''!r} is not one of the {len(names)}"
        raise UsageError(f"{what}: give a number, all, or names such as {','.join(names[:3])}")
    return sorted({names.index(name) for name in wanted})


def _paths(folders: Sequence[Path], names: Sequence[str]) -> list[str]:
    """Path of each image, in the first of ``folders`` that contains any: in its concept's folder as listed, or flat."""
    flat = [name.rsplit("/", 1)[-1] for name in names]
    for folder in folders:
        for form in (names, flat):
            paths = [os.path.join(folder, name) for name in form]
            if any(map(os.path.exists, paths)):
                return paths
    return [os.path.join(folders[0], name) for name in names]


def _official(image_list: Path, names: Sequence[str]) -> NDArray[np.uint8] | None:
    """Train/test marks from TrainImagelist.txt and TestImagelist.txt, if they cover every image."""
    files = [path for name in _SPLIT_LISTS if (path := _inside(image_list.parent, name)) is not None]
    if len(files) < 2:
        return None
    train, test = (set(_names(file)) for file in files)
    marks = np.array([1 if name in test else 0 if name in train else 2 for name in names], dtype=np.uint8)
    return marks if (marks < 2).all() else None


def _names(file: Path) -> list[str]:
    return [line.replace("\\", "/") for _, line in read_lines(file, "image names, one per line")]


def open_nuswide(root: str, *, concepts: str | Sequence[str], max_bad: float) -> FileImages:
    """NUS-WIDE from ``ImageList/Imagelist.txt``, ``Groundtruth/AllLabels/Labels_*.txt``, ``ConceptsList/Concepts81.txt`` and ``Flickr/``.

    Images without any of the concepts are left out and counted. Classes are in the order of the concept list. ids are row numbers in the
    official image list.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"nuswide: {folder} is not a folder: give the root of NUS-WIDE, with ImageList/ in it"
        )
    parts = []
    for names_, is_folder in ((_IMAGE_LISTS, False), (_LABEL_FOLDERS, True), (_IMAGE_FOLDERS, True)):
        parts.append(_find(folder, names_, folder=is_folder))
        if not parts[-1]:
            raise DataError(f"nuswide: {names_[0]} not found in {folder}: put that part of NUS-WIDE there")
    image_list, label_folder, image_folders = parts[0][0], parts[1][0], parts[2]
    names = _names(image_list)
    concept_lists = _find(folder, _CONCEPT_LISTS, folder=False)
    if concept_lists:
        known = [line for _, line in read_lines(concept_lists[0], "concept names, one per line")]
    else:
        known = [p.stem.removeprefix("Labels_") for p in sorted(label_folder.glob("Labels_*.txt"))]
    where = concept_lists[0] if concept_lists else label_folder
    if not known or len(set(known)) != len(known):
        raise DataError(f"nuswide: no concepts, or one twice, in {where}")
    for name in known:  # a concept name from a file is used as a file name: it must not contain a path
        if "/" in name or "\\" in name:
            raise DataError(f"{where}: {shown(name)} cannot be a concept")
    column = cache(lambda name: _binary_column(label_folder / f"Labels_{name}.txt", len(names)))
    counted = str(concepts).strip().isdigit()  # a number of concepts needs the files of all
    counts = np.array([int(column(name).sum()) if counted else 0 for name in known])
    chosen = choose_concepts(concepts, known, counts)
    matrix = np.stack([column(known[c]) for c in chosen], axis=1)
    kept = np.flatnonzero(matrix.any(axis=1))
    if not len(kept):
        raise DataError(f"nuswide: no image in {label_folder} has any of the {len(chosen)} concepts")
    notes = []
    if left_out := len(names) - len(kept):
        notes.append(
            f"{left_out:,} of {len(names):,} images have none of the {len(chosen)} concepts, left out"
        )
    official = _official(image_list, names)
    kept_names = [names[i] for i in kept]
    about = About(
        Labels.from_multihot(matrix[kept], [known[c] for c in chosen]),
        ids=kept,
        official=None if official is None else official[kept],
        notes=notes,
    )
    return listed_images(f"nuswide:{root}", kept_names, _paths(image_folders, kept_names), about, max_bad)
