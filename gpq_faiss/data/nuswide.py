"""``nuswide:ROOT``: NUS-WIDE in its official layout (Chua et al., CIVR 2009)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .images import FileImages, listed_images, shown
from .labels import Labels
from .lists import read_lines

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
        if not (here / part).exists():
            try:
                like = sorted(name for name in os.listdir(here) if name.lower() == part.lower())
            except OSError:
                return None
            if not like:
                return None
            part = like[0]  # noqa: PLW2901
        here = here / part
    return here


def _find(root: Path, names: Sequence[str], *, folder: bool) -> Path | None:
    for name in names:
        path = _inside(root, name)
        if path is not None and (path.is_dir() if folder else path.is_file()):
            return path
    return None


def read_binary_column(path: Path, n_items: int) -> NDArray[np.bool_]:
    """One ``Labels_CONCEPT.txt``: 0 or 1 per line.

    Returns:
        bool [n_items].

    Raises:
        DataError: missing, another character, or another number of lines.
    """
    try:
        data = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    except FileNotFoundError:
        raise DataError(f"{path} not found: a file with 0 or 1 for each image is needed") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    digit = (data == ord("0")) | (data == ord("1"))
    blank = (data == ord("\n")) | (data == ord("\r")) | (data == ord(" ")) | (data == ord("\t"))
    if not (digit | blank).all() or (digit[1:] & digit[:-1]).any():
        raise DataError(f"{path} is not a column of 0 and 1: damaged or foreign")
    values: NDArray[np.bool_] = data[digit] == ord("1")
    if len(values) != n_items:
        raise DataError(f"{path} has {len(values):,} labels, but the image list has {n_items:,} images")
    return values


def choose_concepts(
    concepts: str | Sequence[str], names: Sequence[str], counts: NDArray[np.int64] | None
) -> list[int]:
    """Indices in ``names`` of the requested concepts, in the order of ``names``.

    Args:
        concepts: ``"all"``, a number n as text for the n most frequent ("21"; ties by name), or names (a
            sequence, or one text with commas).
        names: all concepts.
        counts: int64 [C], images of each; only a number needs them.

    Raises:
        UsageError: a number out of range, an unknown name, or no names.
    """
    wanted = [part.strip() for part in concepts.split(",")] if isinstance(concepts, str) else list(concepts)
    if wanted == ["all"]:
        return list(range(len(names)))
    if len(wanted) == 1 and wanted[0].isascii() and wanted[0].isdigit():
        n = int(wanted[0])
        if not 1 <= n <= len(names):
            raise UsageError(f"{n} concepts are requested: 1 to {len(names)} are available")
        if n == len(names):
            return list(range(n))
        assert counts is not None
        ranked = sorted(range(len(names)), key=lambda c: (-int(counts[c]), names[c]))
        return sorted(ranked[:n])
    unknown = [name for name in wanted if name not in names]
    if unknown or not wanted:
        raise UsageError(
            f"concept {unknown[0] if unknown else ''!r} is not one of the {len(names)}: "
            f"give a number, all, or names such as {','.join(names[:3])}"
        )
    return sorted({names.index(name) for name in wanted})


def _needs_counts(concepts: str | Sequence[str], n: int) -> bool:
    text = concepts if isinstance(concepts, str) else ",".join(concepts)
    return text.strip().isdigit() and int(text) != n


def _official(image_list: Path, names: Sequence[str]) -> NDArray[np.uint8] | None:
    """Train/test marks from TrainImagelist.txt and TestImagelist.txt, if they cover every image."""
    files = [_inside(image_list.parent, name) for name in _SPLIT_LISTS]
    if files[0] is None or files[1] is None:
        return None
    parts = [
        {line.replace("\\", "/") for _, line in read_lines(file, "image names")} for file in files if file
    ]
    marks = np.array(
        [1 if name in parts[1] else 0 if name in parts[0] else 2 for name in names], dtype=np.uint8
    )
    return marks if (marks < 2).all() else None


def _paths(folders: Sequence[Path], names: Sequence[str]) -> list[str]:
    """Path of each image, in the first of ``folders`` that contains any: in its concept's folder as listed, or flat."""
    flat = [name.rsplit("/", 1)[-1] for name in names]
    for folder in folders:
        for form in (names, flat):
            paths = [os.path.join(folder, name) for name in form]
            if any(map(os.path.exists, paths)):
                return paths
    return [os.path.join(folders[0], name) for name in names]


def open_nuswide(
    root: str | os.PathLike[str], *, concepts: str | Sequence[str] = "21", max_bad: float = 0.01
) -> FileImages:
    """NUS-WIDE from ``ImageList/Imagelist.txt``, ``Groundtruth/AllLabels/Labels_*.txt``,
    ``ConceptsList/Concepts81.txt`` and the images in ``Flickr/``.

    The concepts are by default the 21 most frequent over the whole list (195,834 images have one of them);
    images without any of the concepts are left out and counted. Classes are in the order of the concept
    list. ids are row numbers in the official image list.

    Args:
        root: folder of the official parts; common other names are recognised.
        concepts: see :func:`choose_concepts`.
        max_bad: allowed fraction of missing labelled images, and of broken ones among the others.

    Raises:
        DataError: a part is missing or damaged, parts do not fit together, or too many images are missing.
        UsageError: unknown concepts, ``max_bad`` out of range.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: give the root folder of NUS-WIDE")
    image_list = _find(folder, _IMAGE_LISTS, folder=False)
    label_folder = _find(folder, _LABEL_FOLDERS, folder=True)
    image_folders = [path for name in _IMAGE_FOLDERS if (path := _inside(folder, name)) and path.is_dir()]
    for part, official_name in (
        (image_list, _IMAGE_LISTS[0]),
        (label_folder, _LABEL_FOLDERS[0]),
        (next(iter(image_folders), None), _IMAGE_FOLDERS[0]),
    ):
        if part is None:
            raise DataError(
                f"nuswide: {official_name} not found in {folder}: put that part of NUS-WIDE there"
            )
    assert image_list is not None
    assert label_folder is not None
    names = [line.replace("\\", "/") for _, line in read_lines(image_list, "the image list of NUS-WIDE")]
    concept_list = _find(folder, _CONCEPT_LISTS, folder=False)
    if concept_list is not None:
        concept_names = [line for _, line in read_lines(concept_list, "concept names, one per line")]
    else:
        files = sorted(path.stem for path in label_folder.glob("Labels_*.txt"))
        concept_names = [stem.removeprefix("Labels_") for stem in files]
    if not concept_names or len(set(concept_names)) != len(concept_names):
        raise DataError(f"nuswide: no concepts, or one twice, in {concept_list or label_folder}")
    columns: dict[int, NDArray[np.bool_]] = {}

    def column(c: int) -> NDArray[np.bool_]:
        if c not in columns:
            # A concept name from a file is used as a file name: it must not contain a path.
            if "/" in concept_names[c] or "\\" in concept_names[c]:
                raise DataError(f"{concept_list}: {shown(concept_names[c])} cannot be a concept")
            columns[c] = read_binary_column(label_folder / f"Labels_{concept_names[c]}.txt", len(names))
        return columns[c]

    counts = None
    if _needs_counts(concepts, len(concept_names)):
        counts = np.array([int(column(c).sum()) for c in range(len(concept_names))], dtype=np.int64)
    chosen = choose_concepts(concepts, concept_names, counts)
    matrix = np.stack([column(c) for c in chosen], axis=1)
    kept = np.flatnonzero(matrix.any(axis=1))
    if not len(kept):
        raise DataError(f"nuswide: no image in {label_folder} has any of the {len(chosen)} concepts")
    left_out = len(names) - len(kept)
    notes = []
    if left_out:
        notes.append(
            f"{left_out:,} of {len(names):,} images have none of the {len(chosen)} concepts, left out"
        )
    labels = Labels.from_multihot(matrix[kept], tuple(concept_names[c] for c in chosen))
    official = _official(image_list, names)
    kept_names = [names[int(i)] for i in kept]
    return listed_images(
        f"nuswide:{root}",
        kept_names,
        _paths(image_folders, kept_names),
        labels=labels,
        ids=kept.astype(np.int64),
        official=None if official is None else official[kept],
        notes=notes,
        max_bad=max_bad,
    )
