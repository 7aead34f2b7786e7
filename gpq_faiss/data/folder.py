"""Images of folders and of tar archives, read in place: ``folder:PATH``, a folder per class; ``webdataset:shard-{000..009}.tar``, an image
and its label under one key (that of ``a/0001.seg.png`` is ``a/0001``, its extension ``seg.png``); ``nuswide:ROOT``, its official layout.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import DataError, UsageError, one_line
from ..inputs import available_memory, parse_json, read_text, reading
from .base import ImageDataset, Piece, images, read_piece
from .images import IMAGE_SUFFIXES, is_image_name, shown
from .labels import Labels, composed
from .paths import files_of, local_path, without_secrets
from .tables import LABELS, PLAIN, About, Options, Table, first_of
from .tabular import read_lines

MAX_RATIO = 100
"""Maximum ratio of decompressed to compressed size beyond :data:`SMALL_UNPACKED` bytes. Images hardly compress, bombs a thousandfold."""
SMALL_UNPACKED = 64 << 20
MAX_MEMBERS = 5_000_000
_BLOCK = 1 << 20
_TRAIN, _TEST, _VALIDATION = {"train", "training"}, {"test"}, {"val", "valid", "validation"}
_LABEL_SUFFIXES = ("cls", "json", "txt")
_MOST_TEXT = 1 << 20
"""Maximum bytes of a label."""


# Archives ---------------------------------------------------------------------------------------------------------------

Members = dict[str, Piece]
"""The regular members of an archive, hidden ones left out, in its order. They are in the file, or in the decompressed archive (gzip has
no random access)."""


def _unpack(path: Path) -> io.BytesIO:
    most = max(SMALL_UNPACKED, MAX_RATIO * path.stat().st_size)
    free = available_memory()
    limit = most if free is None else min(most, free)
    out = io.BytesIO()
    with gzip.open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            if out.tell() + len(block) > limit:
                raise DataError(f"{path} unpacks to more than {limit:,} bytes: unpack it and give its folder")
            out.write(block)
    return out


def open_tar(path: Path) -> Members:
    """Index the members of a ``.tar``, which stays on disk, or ``.tar.gz`` (recognised by the content), which is decompressed into memory
    within the limits above and of free memory. Raises DataError: see :func:`.inputs.reading`; it is suspicious."""
    found: Members = {}
    with reading(path, "a tar archive or a folder"), path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        stream: IO[bytes] = _unpack(path) if packed else file
        length = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for count, member in enumerate(archive):
                if count >= MAX_MEMBERS:
                    raise DataError(
                        f"{path} has more than {MAX_MEMBERS:,} members: unpack it, give its folder"
                    )
                # tarfile keeps all members, which for millions takes more memory than the images.
                archive.members = []  # type: ignore[attr-defined]
                if not member.isreg() or member.issparse():
                    continue
                name = "/".join(part for part in member.name.split("/") if part not in {"", "."})
                wrong = None
                if member.name.startswith("/") or ".." in name.split("/") or "\\" in name:
                    # Harmless, since nothing is extracted, but suspicious.
                    wrong = f"has a member that points outside of it ({shown(name)}): unsafe archive"
                elif member.offset_data + member.size > length:
                    wrong = f"is truncated inside {shown(name)}: get it again"
                elif name in found:
                    wrong = f"has two members named {shown(name)}: damaged or foreign"
                if wrong:
                    raise DataError(f"{path} {wrong}")
                if not name.rpartition("/")[2].startswith("."):
                    place = stream if isinstance(stream, io.BytesIO) else str(path)
                    found[name] = place, member.offset_data, member.size
    return found


# Folders ----------------------------------------------------------------------------------------------------------------


def layout_of(names: Sequence[str]) -> tuple[list[int], list[str | None]]:
    """Order of images by their relative names with ``/`` (train before test, then by class, then by name), and in that order their classes:
    the first folder, below ``train`` and ``test`` the second; None outside of folders. Common parents (as in archives) are skipped."""
    parts = [composed(name).split("/") for name in names]
    splits = _TRAIN | _TEST | _VALIDATION
    while (
        parts and all(len(p) > 2 and p[0] == parts[0][0] for p in parts) and parts[0][0].lower() not in splits
    ):
        parts = [p[1:] for p in parts]
    tops = {p[0].lower() for p in parts if len(p) > 1}
    # A class may be called "train" (vehicles): only folders of folders, and only these alone, make a split.
    is_split = bool(tops) and tops <= splits and any(len(p) > 2 for p in parts)
    last = _TEST if tops & _TEST else _VALIDATION
    at = int(is_split)  # the place of the class in a name
    classes = [p[at] if len(p) > at + 1 else None for p in parts]
    tests = [is_split and len(p) > 1 and p[0].lower() in last for p in parts]
    keys = [(tests[i], classes[i] is None, classes[i] or "", parts[i]) for i in range(len(parts))]
    order = sorted(range(len(parts)), key=keys.__getitem__)
    return order, [classes[i] for i in order]


def _walk(root: Path) -> list[str]:
    """Relative names of the files below ``root`` that are not hidden. Links to folders are followed, each folder once."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()

    def stop(error: OSError) -> None:
        raise DataError(f"cannot read the folder {shown(str(error.filename))}: {error.strerror}") from None

    for folder, below, files in os.walk(root, onerror=stop, followlinks=True):
        status = os.stat(folder)
        known = (status.st_dev, status.st_ino) in seen
        seen.add((status.st_dev, status.st_ino))
        # Sorted, so that the choice between two links to one folder is deterministic.
        below[:], here = (sorted(n for n in some if n[0] != "." and not known) for some in (below, files))
        found += [os.path.join(folder, name)[len(os.path.join(root, "")) :] for name in here]
    return found


def open_folder(path: str, o: Options = PLAIN) -> ImageDataset:
    """Images of a folder, or of a ``.tar`` / ``.tar.gz``, labelled by their folder, in the order of :func:`layout_of`."""
    root = local_path(path)
    name = f"folder:{without_secrets(path)}"
    members = None if root.is_dir() else open_tar(root)
    every = _walk(root) if members is None else sorted(members)
    names = [one for one in every if is_image_name(one)]
    others = len(every) - len(names)
    if not names:
        raise DataError(f"{name} contains no images ({others:,} other files): a folder per class is expected")
    order, classes = layout_of(names)
    names = [names[i] for i in order]
    notes = [f"{others:,} files without an image extension, left out"] if others else []
    if unlabelled := classes.count(None):
        notes.append(f"{unlabelled:,} of {len(names):,} images are in no class folder: unlabelled")
    known = sorted({one for one in classes if one})
    if wrong := next((one for one in known if not one.isprintable()), None):
        raise DataError(f"{name}: the class folder {wrong!a} is not a printable name: rename it")
    labels = Labels.from_names([() if one is None else (one,) for one in classes], known) if known else None
    own, about = [composed(one) for one in names], About(labels, notes=notes)
    pieces = None if members is None else [members[one] for one in names]
    paths = [os.path.join(root, one) if members is None else f"{root}!{composed(one)}" for one in names]
    return images(name, "folder", own, paths, about, o.max_bad, pieces=pieces)


# WebDataset -------------------------------------------------------------------------------------------------------------


@dataclass
class _Sample:
    """The members of one key in an archive: extension -> name and piece."""

    file: str
    key: str
    members: dict[str, tuple[str, Piece]]

    def image(self, wanted: str | None) -> tuple[str, Piece]:
        """The image and its place in messages; size -1: there is none. Raises DataError: several."""
        found = [e for e in self.members if f".{e}" in IMAGE_SUFFIXES] if wanted is None else [wanted]
        if len(found) > 1:
            several = f"{self.file}!{shown(self.key)} has several images ({', '.join(sorted(found))})"
            raise DataError(f"{several}: name one with --read image_column")
        none = composed(self.key), (self.file, 0, -1)
        member, piece = self.members.get(found[0] if found else "", none)
        return f"{self.file}!{member}", piece

    def value(self, column: str | None) -> Any:
        """A member's text, or a field of its ``.json`` (None: all of it); None if missing. Raises DataError: damaged."""
        kind = column if column in self.members else "json"
        if kind not in self.members:
            return None
        where = f"{self.file}!{shown(self.key)}.{kind}"
        try:
            text = read_piece(self.members[kind][1], where, _MOST_TEXT).decode("utf-8-sig").strip()
            fields: Any = text if column == kind else dict(parse_json(text))
        except (ValueError, TypeError) as error:
            is_text = not isinstance(error, UnicodeDecodeError)
            why = f"a JSON object ({one_line(error)})" if is_text else "UTF-8 text"
            raise DataError(f"{where} is not {why}: repair the label") from None
        return fields if column in (kind, None) else fields.get(column)


def _samples(path: Path, *more: str | None) -> list[_Sample]:
    """In the order of the archive: of members that are images, labels, or have an extension of ``more``."""
    wanted = {suffix[1:] for suffix in IMAGE_SUFFIXES}.union(_LABEL_SUFFIXES, more)
    found: dict[str, _Sample] = {}
    for member, piece in open_tar(path).items():
        folder, slash, base = member.rpartition("/")
        stem, _, extension = base.partition(".")
        key, extension = folder + slash + stem, extension.lower()
        if extension in wanted:
            sample = found.setdefault(key, _Sample(str(path), key, {}))
            sample.members[extension] = composed(member), piece
    return list(found.values())


def has_samples(path: Path) -> bool:
    """Whether an image and its label have one key in a tar."""
    keys = [sample.members.keys() for sample in _samples(path)]
    return any(key & set(_LABEL_SUFFIXES) and any(f".{e}" in IMAGE_SUFFIXES for e in key) for key in keys)


def open_webdataset(path: str, o: Options = PLAIN) -> ImageDataset:
    """Images of WebDataset shards, in the order of the shards and of the samples in each; names are the keys. Labels are in ``.cls``, a
    field of ``.json``, or ``.txt``: the first that exists."""
    name, more = f"webdataset:{without_secrets(path)}", (o.image_column, o.label_column, *o.keep)
    samples = [sample for file in files_of(path) for sample in _samples(file, *more)]
    held = [sample.image(o.image_column) for sample in samples]
    if all(size < 0 for _, (_, _, size) in held):
        raise DataError(f"{name} has no images: tar files of KEY.jpg and KEY.cls (.json, .txt) are expected")
    there = set().union(*(sample.members for sample in samples))
    described = [] if "cls" in there else [sample for sample in samples if "json" in sample.members]
    fields = described[0].value(None) if described else ()
    usual = ("cls", *(one for one in LABELS if one in fields), "txt")
    label = o.label_column or first_of(usual, [*there, *fields])
    table = Table(name, list({label or "", *o.keep}), lambda column: [one.value(column) for one in samples])
    about = About(table.labels(label) if label else None, texts={one: table.texts(one) for one in o.keep})
    if about.labels is None and o.label_column:
        raise DataError(f"{name}: {label!r}: no item has a label")
    count = 0 if about.labels is None else int(about.labels.has().sum())
    about.notes = [f"labels from {label!r}: {count:,} of {len(samples):,} items" if count else "no labels"]
    own, (paths, pieces) = [sample.key for sample in samples], zip(*held, strict=True)
    return images(name, "webdataset", own, paths, about, o.max_bad, pieces=pieces)


# NUS-WIDE (Chua et al., CIVR 2009) --------------------------------------------------------------------------------------


def open_nuswide(root: str, o: Options = PLAIN) -> ImageDataset:
    """NUS-WIDE with its most frequent concepts (ties by name). Images without any of them are left out and counted; ids are row numbers in
    the official image list."""
    folder, concepts = Path(root).expanduser(), 21 if o.concepts is None else o.concepts
    listed = read_lines(folder / "ImageList/Imagelist.txt", "image names, one per line,")
    named = folder / "ConceptsList/Concepts81.txt"
    known = [line for _, line in read_lines(named, "concept names, one per line,")]
    names, columns = [line.replace("\\", "/") for _, line in listed], []
    for name in known:
        if "/" in name or "\\" in name or known.count(name) > 1:  # it is used as a file name
            raise DataError(f"{named}: {shown(name)} cannot be a concept, or it is there twice")
        path = folder / "Groundtruth/AllLabels" / f"Labels_{name}.txt"
        values = read_text(path, "0 or 1 for each image,").split()
        if len(values) != len(names) or not {"0", "1"}.issuperset(values):
            what = f"{len(values):,} labels, not 0 or 1 for each of the {len(names):,} images"
            raise DataError(f"{path} has {what}: damaged or foreign")
        columns.append(np.array(values) == "1")
    if not 1 <= concepts <= len(known):
        raise UsageError(f"--read concepts={concepts}: 1 to {len(known)} are there")
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
    paths = [os.path.join(folder, "Flickr", name) for name in own]
    about = About(labels, ids=kept, notes=[left_out] if bare else [])
    return images(f"nuswide:{root}", "image files", own, paths, about, o.max_bad)
