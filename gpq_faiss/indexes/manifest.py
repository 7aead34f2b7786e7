"""A manifest: the shards of one index, each an index file with its sidecar.

``manifest.json`` has ``kind`` (``shards``), ``format_version``, ``codebooks_fingerprint``, ``model_fingerprint`` (or null) and
``shards``: for each its ``file``, relative to the manifest, ``beside`` (its other files), ``ntotal``, ``first_id``, ``last_id``,
``bytes`` and ``sha256``; then ``ntotal`` of all, and ``checksum``, the SHA-256 of the rest. It is replaced atomically.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ..codes.checks import Ids, repeated_among
from ..errors import DataError, MismatchError, UsageError
from ..faissio.io import check_stated, load_index, read_sidecar, sidecar_path
from ..files import read_json, unfinished, write_json
from ..store import items_path
from .file import open_file

FORMAT_VERSION = 1
KIND = "shards"
_MEMORY = 1 << 27
"""Bytes of a comparison of ids."""
_NAME = 255
"""Maximum bytes of a file name."""


@dataclass(frozen=True)
class Shard:
    """One shard of an index.

    Attributes:
        file: its index file, relative to the manifest, with ``/`` between folders.
        beside: names of its other files: sidecar and items file.
        ntotal: number of items.
        first_id, last_id: smallest and largest id.
        bytes, sha256: of the index file.
    """

    file: str
    beside: tuple[str, ...]
    ntotal: int
    first_id: int
    last_id: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The shards of an index, ordered by smallest id.

    Attributes:
        path: of the manifest.
        codebooks_fingerprint, model_fingerprint: common to all shards.
        shards: at least one, each file once.
    """

    path: Path
    codebooks_fingerprint: str
    model_fingerprint: str | None
    shards: tuple[Shard, ...]

    @property
    def ntotal(self) -> int:
        """Items of all shards."""
        return sum(shard.ntotal for shard in self.shards)

    def file(self, shard: Shard) -> Path:
        """The index file of a shard."""
        return self.path.parent / shard.file

    def only(self, files: Iterable[str]) -> Manifest:
        """A manifest with only the shards of these files."""
        chosen = set(files)
        return replace(self, shards=tuple(shard for shard in self.shards if shard.file in chosen))

    def check(self, shard: Shard, *, verify: bool = False) -> None:
        """Check a shard's files against the manifest: sizes and fingerprints, and with ``verify`` the SHA-256 of its index file.

        Raises:
            DataError: a missing file.
            MismatchError: a damaged file, another file, or another model.
        """
        file = self.file(shard)
        for path in (file, *(file.with_name(name) for name in shard.beside)):
            if not path.is_file():
                raise DataError(
                    f"{self.path}: {path.name} of shard {shard.file} is missing: restore it, or take the shard out "
                    "(gpq index --remove-shard)"
                )
        sidecar = read_sidecar(file)
        if sidecar is not None and self._of_another(sidecar):
            raise MismatchError(
                f"{self.path}: shard {shard.file} is of another model ({sidecar['codebooks_fingerprint']}, not "
                f"{self.codebooks_fingerprint}): put a shard of this model in its place"
            )
        stated = {"bytes": shard.bytes, "sha256": shard.sha256, "ntotal": shard.ntotal}
        if sidecar is None or any(sidecar[key] != value for key, value in stated.items()):
            raise MismatchError(
                f"{self.path}: shard {shard.file} is not the file that the manifest names: restore it, or add it again "
                "(gpq index --remove-shard, --add)"
            )
        try:
            check_stated(file, stated, verify=verify)
        except MismatchError:
            raise MismatchError(
                f"{self.path}: shard {shard.file} is damaged or was changed: restore it, or build it again"
            ) from None

    def _of_another(self, sidecar: dict[str, Any]) -> bool:
        model = sidecar["model_fingerprint"]
        return sidecar["codebooks_fingerprint"] != self.codebooks_fingerprint or (
            None not in (model, self.model_fingerprint) and model != self.model_fingerprint
        )


def is_manifest(path: str | Path) -> bool:
    """Whether a file is a JSON manifest (and not, for example, a sidecar)."""
    path = Path(path)
    try:
        if path.suffix.lower() != ".json" or not path.is_file():
            return False
        found = read_json(path, "a manifest of shards")
    except (DataError, OSError):
        return False
    return isinstance(found, dict) and found.get("kind") == KIND


def read_manifest(path: str | Path) -> Manifest:
    """Read a manifest without opening its shards.

    Raises:
        DataError: missing, damaged or of another format.
    """
    path = Path(path)
    found = read_json(path, "a manifest of shards")
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise DataError(f"{path} is not a manifest of shards: 'gpq index --out NAME.json' writes one")
    if found.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{path}: format {found.get('format_version')}, this version reads {FORMAT_VERSION}: write it again"
        )
    try:
        shards = tuple(_shard(entry) for entry in found["shards"])
        manifest = Manifest(path, str(found["codebooks_fingerprint"]), found["model_fingerprint"], shards)
        if not isinstance(manifest.model_fingerprint, str | None):
            raise TypeError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(f"{path} is a damaged manifest of shards: write it again") from None
    if not shards:
        raise DataError(f"{path} names no shard: it is damaged; write it again")
    _check_apart(manifest)
    # Manifests of earlier versions have neither.
    if found.get("checksum", _checksum(found)) != _checksum(found) or found.get(
        "ntotal", manifest.ntotal
    ) != (manifest.ntotal):
        raise DataError(f"{path} was changed or is damaged, its checksum differs: write it again (gpq index)")
    return manifest


def _check_apart(manifest: Manifest) -> None:
    """Raises DataError: two shards are one file, or equal ones, as links and copies are: their items would be found twice."""
    for what in ("file", "sha256"):
        seen: dict[str, str] = {}
        for shard in manifest.shards:
            key = getattr(shard, what)
            if key in seen:
                raise DataError(
                    f"{manifest.path}: shards {seen[key]} and {shard.file} hold the same items: take one out of the file"
                )
            seen[key] = shard.file


def _checksum(document: dict[str, Any]) -> str:
    """SHA-256 of a manifest's values but its ``checksum``."""
    rest = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _shard(entry: dict[str, Any]) -> Shard:
    """Parse an entry. Raises TypeError, KeyError or ValueError: invalid."""
    whole = {
        name: int(entry[name])
        for name in ("ntotal", "first_id", "last_id", "bytes")
        if type(entry[name]) is int
    }
    names = [entry["file"], *entry["beside"]]
    if not all(isinstance(name, str) and name for name in (*names, entry["sha256"])):
        raise TypeError
    # A manifest may name only files below its folder, and beside a shard only files of that folder.
    paths = [PurePosixPath(name) for name in names]
    if not (
        all(path.name and not path.is_absolute() and ".." not in path.parts for path in paths)
        and all(len(os.fsencode(part)) <= _NAME for path in paths for part in path.parts)
        and all(path.name == name for path, name in zip(paths[1:], names[1:], strict=True))
        and min(whole["ntotal"], whole["bytes"]) >= 1
        and whole["first_id"] <= whole["last_id"]
    ):
        raise ValueError
    return Shard(file=paths[0].as_posix(), beside=tuple(names[1:]), sha256=entry["sha256"], **whole)


def _describe_shard(folder: Path, file: Path) -> tuple[Shard, dict[str, Any]]:
    """The entry of an index file below ``folder``, and its sidecar; checked against the sidecar's SHA-256.

    Raises:
        DataError: damaged, without sidecar, or elsewhere.
    """
    sidecar = read_sidecar(file)
    if sidecar is None:
        raise DataError(f"{file} has no {sidecar_path(file).name}: build the shard with gpq index")
    try:
        name = file.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        raise DataError(f"{file} is not below {folder}, the folder of the manifest: move it there") from None
    check_stated(file, sidecar, verify=True)
    with open_file(file) as index:
        low, high = zip(*((int(ids.min()), int(ids.max())) for ids in index.id_blocks()), strict=True)
    beside = [sidecar_path(file).name, *([items_path(file).name] if items_path(file).exists() else [])]
    shard = Shard(
        name, tuple(beside), sidecar["ntotal"], min(low), max(high), sidecar["bytes"], sidecar["sha256"]
    )
    return shard, sidecar


def update_manifest(
    path: str | Path, add: Sequence[str | Path] = (), remove: Sequence[str] = (), *, new: bool = False
) -> Manifest:
    """Write a manifest, or atomically add and remove shards (both at once to replace one).

    Args:
        path: the manifest.
        add: index files with sidecars, below its folder.
        remove: shards to remove, as named in the manifest. Their files are kept.
        new: write a new manifest, replacing an existing one.

    Raises:
        BusyError: another process is changing it.
        DataError: a damaged shard, or an id in two shards.
        MismatchError: a shard of another model.
        UsageError: an unknown shard to remove, or no shard left.
    """
    path = Path(path)
    with unfinished(path.with_name(f".{path.name}.lock"), path, keep=()):
        return _update(path, add, remove, new)


def _update(path: Path, add: Sequence[str | Path], remove: Sequence[str], new: bool) -> Manifest:
    old = None if new else read_manifest(path)
    kept = list(old.shards) if old is not None else []
    for name in remove:
        if name not in {shard.file for shard in kept}:
            raise UsageError(f"{path} has no shard {name!r}: gpq info {path} lists them")
        kept = [shard for shard in kept if shard.file != name]
    added = {
        shard.file: (shard, sidecar)
        for shard, sidecar in (_describe_shard(path.parent, Path(f)) for f in add)
    }
    kept = [shard for shard in kept if shard.file not in added] + [shard for shard, _ in added.values()]
    if not kept:
        raise UsageError(f"{path}: no shard would be left: add one, or delete the manifest")
    sidecars = [sidecar for _, sidecar in added.values()]
    models = {s["model_fingerprint"] for s in sidecars} - {None}
    made = Manifest(
        path,
        old.codebooks_fingerprint if old is not None else sidecars[0]["codebooks_fingerprint"],
        old.model_fingerprint if old is not None else min(models, default=None),
        tuple(sorted(kept, key=lambda shard: (shard.first_id, shard.file))),
    )
    for shard, _ in added.values():
        made.check(shard)
    _check_ids(made)
    document = {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "codebooks_fingerprint": made.codebooks_fingerprint,
        "model_fingerprint": made.model_fingerprint,
        "shards": [asdict(shard) for shard in made.shards],
        "ntotal": made.ntotal,
    }
    write_json(path, {**document, "checksum": _checksum(document)})
    return made


def _check_ids(manifest: Manifest) -> None:
    """Raises DataError: an id is in two shards. Only shards whose ranges of ids overlap are read."""
    together: list[Shard] = []
    end = None
    for shard in (*manifest.shards, None):
        if shard is not None and end is not None and shard.first_id <= end:
            together.append(shard)
            end = max(end, shard.last_id)
            continue
        if len(together) > 1:
            _check_overlapping(manifest, together)
        if shard is not None:
            together, end = [shard], shard.last_id


def _check_overlapping(manifest: Manifest, shards: Sequence[Shard]) -> None:
    def blocks() -> Iterator[Ids]:
        for shard in shards:
            with open_file(manifest.file(shard)) as index:
                yield from index.id_blocks()

    memory = max(_MEMORY, 32 * max(shard.ntotal for shard in shards))
    repeated = repeated_among(blocks, sum(shard.ntotal for shard in shards), memory)
    if repeated is not None:
        raise DataError(
            f"{manifest.path}: id {repeated} is in two of the shards {', '.join(s.file for s in shards)}: every item "
            "needs its own"
        )


def verify_manifest(manifest: Manifest) -> None:
    """Check the SHA-256 and the contents of every shard. Raises as :meth:`Manifest.check`, and DataError for invalid contents."""
    for shard in manifest.shards:
        manifest.check(shard, verify=True)
        ids = load_index(manifest.file(shard), verify=False)[0].ids
        if (int(ids.min()), int(ids.max())) != (shard.first_id, shard.last_id):
            raise wrong_ids(manifest, shard)


def wrong_ids(manifest: Manifest, shard: Shard) -> MismatchError:
    """The error for a shard whose ids are not those that the manifest states."""
    return MismatchError(
        f"{manifest.path}: shard {shard.file} has ids outside {shard.first_id} to {shard.last_id}, which the manifest states: "
        "write the manifest again (gpq index)"
    )
