"""Images in folders, and published data sets: ``digits`` of scikit-learn, ``cifar10`` and
``fashion-mnist`` of torchvision, and ``nuswide`` in its official layout.

``datasets`` was measured on the 60,000 files of CIFAR-10: it takes 38 s to list such a folder, and
this module 2 s.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ..errors import DataError, one_line, optional, shown
from ..files import cache_folder
from ..inputs import read_text, reading
from .base import ImageDataset, image_files, images_in_memory
from .images import IMAGE_SUFFIXES, is_image_name
from .labels import Labels, composed
from .tables import Options

# Folders ------------------------------------------------------------------------------------------

_FOLDERS = {
    "training": {"train", "training", "labeled", "labelled"},
    "test": {
        *("test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation", "holdout"),
        *("query", "queries", "gallery"),
    },
    "unlabelled": {"unlabeled", "unlabelled", "unsup", "unlabeled_images", "unlabelled_images"},
    "containers": {"images", "imgs", "img", "jpegimages"},
    "annotations": {
        *("annotations", "annotation", "labels", "masks", "mask", "trimaps", "bboxes"),
        *("ground_truth", "groundtruth", "gt"),
        *("segmentation", "segmentations", "segmentationclass", "segmentationobject"),
    },
    "system": {
        *("@eadir", "@__thumb", "@recycle", "@recently-snapshot", "@synoresource", "@tmp"),
        *("#recycle", "#snapshot", "~snapshot", "$recycle.bin", "recycler", "found.000"),
        *("__macosx", "__pycache__", "lost+found"),
        *("system volume information", "temporary items", "network trash folder"),
        *("thumbnails", "thumbs", "_thumbs"),
    },
}
"""Names of folders in lower case, by their meaning."""


def part_of(folder: str) -> str:
    """Return ``training`` or ``test`` if a word of a folder's name says so, as in ``seg_train`` and
    ``val2017``, else nothing."""
    return next(
        (
            part
            for part in ("training", "test")
            if not _FOLDERS[part].isdisjoint(re.findall("[a-z]+", folder.lower()))
        ),
        "",
    )


def classes_of(names: Sequence[str]) -> list[str]:
    """Return the class of each image by its relative name.

    The class is the first folder, below ``train`` and ``test`` the second, and so below folders of
    domains that hold the same classes; empty outside of folders and below ``unlabeled``. Common
    parents, folders such as ``images``, and copies of the folders beside them are skipped.
    """
    paths = [
        [name for name in folders if name.lower() not in _FOLDERS["containers"]]
        if _FOLDERS["unlabelled"].isdisjoint(map(str.lower, folders))
        else []
        for folders in (composed(name).split("/")[:-1] for name in names)
    ]
    paths = _below_domains(_below_splits(_without_copies(_below_parents(paths))))
    return [path[0] if path else "" for path in paths]


def _first(paths: Iterable[Sequence[str]]) -> set[str]:
    """Return the first folders of paths."""
    return {path[0] for path in paths if path}


def _below_parents(paths: list[list[str]]) -> list[list[str]]:
    """Return paths without the folders that are common to all."""
    while len(_first(paths)) == 1 and any(len(path) > 1 for path in paths):
        paths = [path[1:] for path in paths]
    return paths


def _without_copies(paths: list[list[str]]) -> list[list[str]]:
    """Return paths without first folders that hold but one of the same name, or folders that are
    also beside them: archives may hold a/a, or a/cat and a/dog beside cat and dog.

    A folder whose name ends with a number stays, as numbers may count: 1/1, 1/2 and 2/1.
    """
    siblings = _first(paths)
    originals = _first(
        path
        for path in paths
        if path[1:2] != path[:1] and (siblings.isdisjoint(path[1:2]) or re.search(r"\d$", path[0]))
    )
    return [path if path[:1] and path[0] in originals else path[1:] for path in paths]


def _below_splits(paths: list[list[str]]) -> list[list[str]]:
    """Return paths below folders such as ``train`` and ``test``, empty for others beside these, if
    the first folders are such folders and not classes: there is no other one, or they alone hold
    folders, or several of them do."""
    tops, nested = _first(paths), _first([path for path in paths if len(path) > 1])
    splits = {top for top in tops if part_of(top)}
    if splits and (
        tops == splits or len(splits & nested) > 1 or (nested and nested.isdisjoint(tops - splits))
    ):
        paths = [path[1:] if path and path[0] in splits else [] for path in paths]
        # As in train/labeled/cat.
        paths = [
            path[1:]
            if path[1:] and path[0].lower() in _FOLDERS["training"] | _FOLDERS["test"]
            else path
            for path in paths
        ]
        return _below_parents(paths)
    return paths


def _below_domains(paths: list[list[str]]) -> list[list[str]]:
    """Return paths below their first folders if these are domains: most of their folders have equal
    names, which do not end with a number, and are no splits."""
    pairs = {(path[0], path[1]) for path in paths if len(path) > 1}
    counts = Counter(name for _, name in pairs)
    repeated = [name for name, count in counts.items() if count > 1 and not re.search(r"\d$", name)]
    if (
        len(_first(paths)) > 1
        and _first(pairs) == _first(paths)
        and len(counts) > 1
        and 2 * sum(not part_of(name) for name in repeated) >= len(counts)
    ):
        return [path[1:] for path in paths]
    return paths


def open_folder(path: str, o: Options) -> ImageDataset:
    """Open images of a folder, labelled by :func:`classes_of`; those of test folders come last.

    Folders of the system, of masks beside ``images`` or ``train``, and links to folders within the
    tree are left out.
    """
    name, root = f"folder:{path}", Path(path).expanduser()
    if not root.is_dir():
        raise DataError(f"{name} is not found, or not a folder: extract it, and give the folder")
    notes, images, unread = list[str](), list[str](), Counter[str]()
    visited = {whole := root.resolve()}

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read {shown(str(error.filename))}: {error.strerror}")

    for folder, below, files in os.walk(root, onerror=fail, followlinks=True):
        left_out = _FOLDERS["system"] | (
            _FOLDERS["annotations"]
            if (_FOLDERS["containers"] | _FOLDERS["training"]) & {*map(str.lower, below)}
            else set()
        )
        for subfolder in [Path(folder, subfolder) for subfolder in sorted(below)]:
            target = subfolder.resolve()
            is_inside = (
                subfolder.is_symlink()
                and target.is_relative_to(whole)
                and not any(part[0] == "." for part in target.relative_to(whole).parts)
            )
            is_repeated = is_inside or target in visited
            visited.add(whole if is_inside else target)
            if subfolder.name[0] == "." or subfolder.name.lower() in left_out or is_repeated:
                below.remove(subfolder.name)
                notes.append(
                    f"{shown(str(subfolder.relative_to(root)))} "
                    f"{'is a link to a folder that is read anyway: ' * is_repeated}left out"
                )
        below.sort()
        images += [
            os.path.relpath(os.path.join(folder, file), root)
            for file in filter(is_image_name, files)
        ]
        unread.update(
            Path(file).suffix.lower()
            for file in files
            if file[0] != "." and not is_image_name(file)
        )
    notes += [f"{n:,} files {ending or 'without ending'} left out" for ending, n in unread.items()]
    if not images:
        raise DataError(
            f"{name} contains no images ({'; '.join(notes) or 'it is empty'})"
            f": images end in {', '.join(sorted(IMAGE_SUFFIXES))}, vectors need features:PATH"
        )
    order = sorted(  # test folders last, in each part the unlabelled ones
        zip(classes_of(images), images, strict=True),
        key=lambda item: ("test" in map(part_of, item[1].split("/")[:-1]), not item[0], item),
    )
    return image_files(
        name,
        [str(root / file) for _, file in order],
        [composed(file) for _, file in order],
        labels=Labels.from_names([(label,) if label else () for label, _ in order]),
        label_source=(root.name, f"by their folders, as {order[0][0]!r} of {shown(order[0][1])}"),
        notes=notes,
        max_bad=o.max_bad,
    )


# Published data sets ------------------------------------------------------------------------------


def open_digits(_: None, o: Options) -> ImageDataset:
    """Open 1,797 images of 8 x 8 grey pixels in ten classes (UCI Optical Recognition of Digits)."""
    x, classes = optional(
        "sklearn.datasets", "digits are inside scikit-learn: pip install 'gpq-faiss[train]'"
    ).load_digits(return_X_y=True)
    return images_in_memory(
        "digits",
        np.rint(x.reshape(-1, 8, 8) * (255.0 / 16.0)).astype(np.uint8),
        labels=Labels.from_ids(classes, tuple("0123456789")),
        mirrors=False,
    )


def open_published(root: str | None, o: Options, *, name: str) -> ImageDataset:
    """Open ``cifar10`` or ``fashion-mnist`` by torchvision, in or for the folder ``root``.

    The training images come first, then the test images. CIFAR-10's batches are pickles;
    torchvision compares their MD5 with published values first, so foreign files are never executed.
    """
    from torchvision.datasets import CIFAR10, FashionMNIST

    folder = cache_folder() if root is None else Path(root).expanduser()
    kind, files = {
        "cifar10": (CIFAR10, f"{CIFAR10.filename} or {CIFAR10.base_folder}/"),
        "fashion-mnist": (FashionMNIST, "its four idx files in FashionMNIST/raw/"),
    }[name]
    try:
        parts = [kind(str(folder), train=train, download=True) for train in (True, False)]
    except Exception as error:  # torchvision asserts, and raises RuntimeError and others
        raise DataError(
            f"{name} is not available, or damaged ({one_line(error)})"
            f": put {files} in {folder}, or name its folder ({name}:FOLDER)"
        ) from None
    return images_in_memory(
        name,
        np.concatenate([subset.data for subset in parts]),
        labels=Labels.from_ids(
            np.concatenate([subset.targets for subset in parts]), parts[0].classes
        ),
    )


def open_nuswide(root: str, o: Options) -> ImageDataset:
    """Open NUS-WIDE (Chua et al., CIVR 2009) with its 21 most frequent concepts (ties by name).

    Images without any of them are left out; ids are row numbers in the official image list.
    """
    folder = Path(root).expanduser()
    names = [
        line.strip().replace("\\", "/")
        for line in read_text(folder / "ImageList/Imagelist.txt", "a list of images").splitlines()
        if line.strip()
    ]
    concepts = read_text(folder / "ConceptsList/Concepts81.txt", "concept names").split()
    matrix = np.zeros((len(names), len(concepts)), np.int8)
    for c, concept in enumerate(concepts):
        path = folder / "Groundtruth/AllLabels" / f"Labels_{concept}.txt"
        with reading(path, f"0 or 1 for each of the {len(names):,} images"):
            matrix[:, c] = np.array(path.read_text().split(), np.int8).reshape(len(names))
    chosen = np.sort(np.lexsort((concepts, -matrix.sum(axis=0)))[:21])  # sums go before names
    ids = np.flatnonzero(matrix[:, chosen].any(axis=1))
    texts = [names[i] for i in ids]
    return image_files(
        f"nuswide:{root}",
        [os.path.join(folder, "Flickr", text) for text in texts],
        texts,
        labels=Labels.from_multihot(matrix[ids][:, chosen], [concepts[c] for c in chosen]),
        ids=ids,
        notes=[f"{len(names) - len(ids):,} of {len(names):,} images have none of the concepts"],
        max_bad=o.max_bad,
    )
