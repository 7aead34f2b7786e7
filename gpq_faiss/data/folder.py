"""Images of folders and of tar archives, read in place.

``folder:PATH`` is a folder of images per class; ``webdataset:shard-{000..009}.tar`` holds an image
and its label under one key (that of ``a/0001.seg.png`` is ``a/0001``, its extension ``seg.png``).

The libraries were measured on the 60,000 files of CIFAR-10: ``datasets`` takes 38 s to list such a
folder, and copies the images of archives; this module takes 2 s and copies nothing.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError, one_line
from ..inputs import parse_json, reading
from .base import ImageDataset, Piece, images, read_piece
from .images import IMAGE_SUFFIXES, is_image_name, shown
from .labels import Labels, composed, labels_note, labels_of
from .paths import files_of, local_path, without_secrets
from .tables import LABELS, PLAIN, Annotations, Options, Table, file_form, usual

_TRAIN, _TEST, _VALIDATION = (
    {"train", "training"},
    {"test", "testing"},
    {"val", "valid", "validation"},
)
_SPLITS, _NO_LABELS = _TRAIN | _TEST | _VALIDATION, {"unlabeled", "unlabelled", "unsup", "extra"}
_SYSTEM = {
    "@eadir",
    "__macosx",
    "$recycle.bin",
    "system volume information",
    "lost+found",
    "__pycache__",
}
_SYSTEM |= {"#recycle", "@recycle", "#snapshot", "@tmp"}
_CONTAINERS = {"images", "image", "imgs", "img", "jpegimages"}
_ANNOTATIONS = {"annotations", "annotation", "masks", "mask", "labels", "trimaps", "segmentation"}
_ANNOTATIONS |= {"segmentationclass", "segmentationobject", "bboxes", "thumbnails", "thumbs"}


# Archives -----------------------------------------------------------------------------------------


def open_tar(path: Path) -> dict[str, Piece]:
    """Return where the regular members of a tar are, by name and in its order, hidden ones left
    out.

    A compressed archive is decompressed into memory: gzip has no random access. Raises DataError:
    not a tar, or damaged.
    """
    members: dict[str, Piece] = {}
    message = "a tar archive or a folder"
    form = file_form(path)
    if form not in ("tar", "gzip", "text"):
        raise DataError(f"{path} is a file of the form {form}: {message} is needed")
    with reading(path, message), path.open("rb") as file:
        packed = form == "gzip"
        stream = io.BytesIO(gzip.decompress(file.read())) if packed else file
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                # tarfile keeps all members, which for millions takes more memory than the images.
                archive.members = []  # type: ignore[attr-defined]
                name = "/".join(
                    folder_name
                    for folder_name in member.name.split("/")
                    if folder_name not in {"", "."}
                )
                if member.isreg() and not member.issparse() and name.rpartition("/")[2][:1] != ".":
                    holder = stream if isinstance(stream, io.BytesIO) else str(path)
                    members[name] = holder, member.offset_data, member.size
    return members


# Folders ------------------------------------------------------------------------------------------


def layout_of(names: Sequence[str]) -> tuple[list[int], list[str | None], list[str]]:
    """Return which images by their relative names belong to a data set, their classes, and notes.

    Images are ordered by part (train before test), class and name. The class is the first folder,
    below ``train`` and ``test`` the second, and so below folders of domains that hold the same
    classes; None outside of folders. Common parents (as in archives) and folders such as ``images``
    are skipped; folders of the system, and of masks beside images, are left out.
    """
    parts = [composed(name).split("/") for name in names]
    folders = [[folder.lower() for folder in folder_name[:-1]] for folder_name in parts]
    left_out = set(_SYSTEM)
    if any(_CONTAINERS.intersection(lower) for lower in folders):
        left_out |= _ANNOTATIONS
    included = [i for i, lower in enumerate(folders) if not left_out.intersection(lower)]
    gone = Counter(
        next(f for f in lower if f in left_out) for lower in folders if left_out & set(lower)
    )
    notes = [f"{count:,} images in folders {name!r} left out" for name, count in gone.items()]
    inner = {i: [f for f in parts[i][:-1] if f.lower() not in _CONTAINERS] for i in included}
    while inner and all(len(f) > 1 and f[0] == inner[included[0]][0] for f in inner.values()):
        if inner[included[0]][0].lower() in _SPLITS:
            break
        inner = {i: f[1:] for i, f in inner.items()}
    tops = {f[0].lower() for f in inner.values() if f}
    second = {
        top: {f[1] for f in inner.values() if f[:1] == [top] and f[1:]}
        for top in sorted({f[0] for f in inner.values() if f})
    }
    shared = Counter(name for names_ in second.values() for name in names_)
    splits = tops & _SPLITS
    is_split = bool(splits) and (tops <= _SPLITS | _NO_LABELS or (len(splits) > 1 and any(shared)))
    if splits and not is_split:
        notes.append(f"{', '.join(sorted(splits))} beside other folders: taken as classes")
    level = int(is_split)
    common = [
        name for name, count in shared.items() if count > 1 and not any(map(str.isdigit, name))
    ]
    if (
        not is_split
        and len(second) > 1
        and 2 * len(common) >= len(shared) > 0
        and all(second.values())
    ):
        level = 1
        notes.append(f"{', '.join(second)} hold the same folders: these are the classes")
    classes: dict[int, str | None] = {}
    for i, folder in inner.items():
        labelled = not (is_split and folder and folder[0].lower() not in _SPLITS)
        classes[i] = folder[level] if len(folder) > level and labelled else None
    last = _TEST if tops & _TEST else _VALIDATION
    late = {i: is_split and bool(f) and f[0].lower() in last for i, f in inner.items()}
    order = sorted(
        included, key=lambda i: (late[i], classes[i] is None, classes[i] or "", parts[i])
    )
    return order, [classes[i] for i in order], notes


def _walk(root: Path) -> tuple[list[str], list[str]]:
    """Return the relative names of the files below ``root`` that are not hidden, and notes.

    Links to folders are followed, unless to a folder of the tree, or one that was read already.
    """
    names: list[str] = []
    notes: list[str] = []
    targets = [os.path.realpath(root)]

    def stop(error: OSError) -> None:
        raise DataError(
            f"cannot read the folder {shown(str(error.filename))}: {error.strerror}"
        ) from None

    def follow(path: str) -> bool:
        target = os.path.join(os.path.realpath(path), "")
        if not os.path.islink(path):
            return True
        roots = [os.path.join(folder, "") for folder in targets]
        if any(target.startswith(folder) or folder.startswith(target) for folder in roots):
            name = os.path.relpath(path, root)
            notes.append(f"{shown(name)} is a link to a folder that is read anyway: left out")
            return False
        targets.append(os.path.realpath(path))
        return True

    for folder, below, files in os.walk(root, onerror=stop, followlinks=True):
        visible = sorted(name for name in below if name[0] != ".")
        below[:] = [name for name in visible if follow(os.path.join(folder, name))]
        prefix = os.path.join(folder, "")[len(os.path.join(root, "")) :]
        names += [prefix + name for name in sorted(files) if name[0] != "."]
    return names, notes


def open_folder(path: str, o: Options = PLAIN) -> ImageDataset:
    """Open images of a folder, or of a ``.tar`` / ``.tar.gz``, labelled by :func:`layout_of`."""
    root = local_path(path)
    name = f"folder:{without_secrets(path)}"
    members = None if root.is_dir() else open_tar(root)
    files, notes = _walk(root) if members is None else (sorted(members), [])
    names = [file for file in files if is_image_name(file)]
    if len(names) < len(files):
        endings = Counter(
            os.path.splitext(file)[1] or "none" for file in files if not is_image_name(file)
        )
        commonest = ", ".join(f"{ending} {count:,}" for ending, count in endings.most_common(4))
        notes.append(
            f"{len(files) - len(names):,} files without an image extension left out ({commonest})"
        )
    if not names:
        message = "; ".join(notes) or "it is empty"
        raise DataError(
            f"{name} contains no images ({message}): "
            f"images end in {', '.join(sorted(IMAGE_SUFFIXES))}, vectors are read by features:PATH"
        )
    order, classes, layout_notes = layout_of(names)
    names = [names[i] for i in order]
    if unlabelled := classes.count(None):
        layout_notes.append(
            f"{unlabelled:,} of {len(names):,} images are in no class folder: unlabelled"
        )
    class_names = sorted({folder for folder in classes if folder})
    labels = (
        Labels.from_names([() if c is None else (c,) for c in classes], class_names)
        if class_names
        else None
    )
    note = labels_note(os.path.basename(path), labels, "by their folders")
    annotations = Annotations(labels, notes=[note, *notes, *layout_notes])
    pieces = None if members is None else [members[file] for file in names]
    paths = [
        os.path.join(root, file) if members is None else f"{root}!{composed(file)}"
        for file in names
    ]
    texts = [composed(file) for file in names]
    return images(name, "folder", texts, paths, annotations, o.max_bad, pieces=pieces)


# WebDataset ---------------------------------------------------------------------------------------


@dataclass
class _Sample:
    """The members of one key in an archive: extension -> name and piece."""

    file: str
    key: str
    members: dict[str, tuple[str, Piece]]

    def image(self, requested: str | None) -> tuple[str, Piece]:
        """Return the image and its place in messages; size -1: there is none."""
        extensions = (
            [e for e in self.members if f".{e}" in IMAGE_SUFFIXES]
            if requested is None
            else [requested]
        )
        if len(extensions) > 1:
            raise DataError(
                f"{self.file}!{shown(self.key)} has several images ({', '.join(sorted(extensions))})"
                f": name one with --read image_column"
            )
        missing = composed(self.key), (self.file, 0, -1)
        member, piece = self.members.get(extensions[0] if extensions else "", missing)
        return f"{self.file}!{member}", piece

    def value(self, column: str | None) -> Any:
        """Return a member's text, or a field of its ``.json`` (None: all of it); None if
        missing.
        """
        extension = column if column in self.members else "json"
        if extension not in self.members:
            return None
        location = f"{self.file}!{shown(self.key)}.{extension}"
        try:
            text = read_piece(self.members[extension][1], location).decode("utf-8-sig").strip()
            fields: Any = text if column == extension else dict(parse_json(text))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{location} is no text, or no JSON object ({one_line(error)})"
            ) from None
        return fields if column in (extension, None) else fields.get(column)


def _samples(path: Path) -> list[_Sample]:
    samples: dict[str, _Sample] = {}
    for member, piece in open_tar(path).items():
        folder, slash, base = member.rpartition("/")
        stem, _, extension = base.partition(".")
        key = folder + slash + stem
        sample = samples.setdefault(key, _Sample(str(path), key, {}))
        sample.members[extension.lower()] = composed(member), piece
    return list(samples.values())


def has_samples(path: Path) -> bool:
    """Return whether an image and its label have one key in a tar."""
    keys = [sample.members.keys() for sample in _samples(path)]
    return any(
        k & {"cls", "json", "txt"} and any(f".{e}" in IMAGE_SUFFIXES for e in k) for k in keys
    )


def open_webdataset(path: str, o: Options = PLAIN) -> ImageDataset:
    """Open images of WebDataset shards, in the order of the shards and of the samples in each.

    Names are the keys. Labels are in ``.cls``, a field of ``.json``, or in ``.txt``, the first that
    exists; a ``.txt`` whose texts hardly repeat holds captions, which are no labels.
    """
    name = f"webdataset:{without_secrets(path)}"
    requested = {*(suffix[1:] for suffix in IMAGE_SUFFIXES), "cls", "json", "txt"}
    requested |= {column for column in (o.image_column, o.label_column, *o.keep) if column}
    all_samples = [sample for file in files_of(path) for sample in _samples(file)]
    samples = [sample for sample in all_samples if requested & sample.members.keys()]
    pieces = [sample.image(o.image_column) for sample in samples]
    if all(size < 0 for _, (_, _, size) in pieces):
        raise DataError(
            f"{name} has no images: tar files of KEY.jpg and KEY.cls (.json, .txt) are expected"
        )
    columns = dict.fromkeys((e for sample in samples for e in sample.members), "text")
    described = next((sample for sample in samples if "json" in sample.members), None)
    columns |= dict.fromkeys(described.value(None) if described else (), "text")
    label = o.label_column or ("cls" if "cls" in columns else None)
    label = label or usual(LABELS, columns) or ("txt" if "txt" in columns else None)
    annotations = Annotations()
    table = Table(name, len(samples), columns, lambda c: [sample.value(c) for sample in samples])
    for column in o.keep:
        annotations.texts[column] = table.texts(table.check(column, "--read keep"))
    if label is not None and o.with_labels:
        values = table.values(table.check(label, "--read label_column"))
        texts = {value for value in values if isinstance(value, str)}
        if label == "txt" and o.label_column is None and 2 * len(texts) > len(samples):
            message = (
                f"{len(texts):,} different texts in .txt look like captions, which are no labels"
            )
            annotations.notes.append(f"{message}; --read label_column=txt makes them labels")
        elif o.label_column or any(value not in (None, "") for value in values):
            annotations.labels = labels_of(values, f"{name}: {label!r}")
            note = labels_note(os.path.basename(path), annotations.labels, f"in {label!r}")
            annotations.notes[0] = note
    paths, places = zip(*pieces, strict=True)
    names = [sample.key for sample in samples]
    return images(name, "webdataset", names, paths, annotations, o.max_bad, pieces=places)
