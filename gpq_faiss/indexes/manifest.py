"""A manifest: the shards of one index, each an index file with its sidecar.

``manifest.json`` has ``kind`` (``shards``), ``format_version``, ``codebooks_fingerprint``, ``model_fingerprint`` (or null) and
``shards``: for each its ``file``, relative to the manifest, ``beside`` (its other files), ``ntotal``, ``first_id``, ``last_id``,
``bytes`` and ``sha256``; then ``ntotal`` of all, and ``checksum``, the SHA-256 of the rest. It is replaced atomically.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ..codes.checks import Ids, repeated_among
from ..errors import DataError, MismatchError, UsageError
from ..faissio.io import check_stated, read_sidecar, sidecar_path
from ..files import read_json, unfinished, write_json
from ..store.items import items_path
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

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Shard:
        """From an entry of a manifest. Raises TypeError, KeyError or ValueError: invalid."""
        shard = cls(**{one.name: entry[one.name] for one in fields(cls)} | {"beside": tuple(entry["beside"])})
        names, whole = (shard.file, *shard.beside), (shard.ntotal, shard.bytes, shard.first_id, shard.last_id)
        if {type(one) for one in whole} != {int} or {type(one) for one in (*names, shard.sha256)} != {str}:
            raise TypeError
        # A manifest may name only files below its folder, and beside a shard only files of that folder.
        paths = [PurePosixPath(name) for name in names]
        if (
            any(not path.name or path.is_absolute() or ".." in path.parts for path in paths)
            or any(len(os.fsencode(part)) > _NAME for path in paths for part in path.parts)
            or any(path.name != name for path, name in zip(paths[1:], shard.beside, strict=True))
            or min(shard.ntotal, shard.bytes) < 1
            or shard.first_id > shard.last_id
        ):
            raise ValueError
        return replace(shard, file=paths[0].as_posix())


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

    def only(self, files: Collection[str]) -> Manifest:
        """A manifest with only the shards of these files."""
        return replace(self, shards=tuple(shard for shard in self.shards if shard.file in files))

    def check(self, shard: Shard) -> None:
        """Check that a shard's files are there, and are those that the manifest states, by its sidecar.

        Raises:
            DataError: a missing file.
            MismatchError: another file, or another model.
        """
        file = self.file(shard)
        where = f"{self.path}: shard {shard.file}"
        missing = next((p for p in (file, *map(file.with_name, shard.beside)) if not p.is_file()), None)
        sidecar = read_sidecar(file)
        if missing is not None or sidecar is None:
            raise DataError(
                f"{where} is missing, or a file beside it ({(missing or sidecar_path(file)).name}): restore it, or take "
                "the shard out (gpq index --remove-shard)"
            )
        model = sidecar["model_fingerprint"]
        if sidecar["codebooks_fingerprint"] != self.codebooks_fingerprint or (
            None not in (model, self.model_fingerprint) and model != self.model_fingerprint
        ):
            raise MismatchError(f"{where} is of another model: put a shard of this model in its place")
        if any(sidecar[key] != getattr(shard, key) for key in ("bytes", "sha256", "ntotal")):
            raise MismatchError(
                f"{where} is not the file that the manifest names: restore it, or add it again "
                "(gpq index --remove-shard, --add)"
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
        raise DataError(f"{path}: format {found.get('format_version')}, not {FORMAT_VERSION}: write it again")
    try:
        shards = tuple(Shard.of(entry) for entry in found["shards"])
        manifest = Manifest(path, str(found["codebooks_fingerprint"]), found["model_fingerprint"], shards)
        if not isinstance(manifest.model_fingerprint, str | None) or not shards:
            raise TypeError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(f"{path} is a damaged manifest of shards: write it again (gpq index)") from None
    for what in ("file", "sha256"):  # equal ones are links or copies
        seen: dict[str, str] = {}
        for shard in shards:
            other = seen.setdefault(getattr(shard, what), shard.file)
            if other is not shard.file:
                raise DataError(
                    f"{path}: shards {other} and {shard.file} hold the same items: take one out of the file"
                )
    # Manifests of earlier versions have neither.
    stated = found.get("checksum", _checksum(found)), found.get("ntotal", manifest.ntotal)
    if stated != (_checksum(found), manifest.ntotal):
        raise DataError(f"{path} was changed or is damaged, its checksum differs: write it again (gpq index)")
    return manifest


def _checksum(document: dict[str, Any]) -> str:
    """SHA-256 of a manifest's values but its ``checksum``."""
    rest = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


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
    check_stated(file, sidecar)
    with open_file(file) as index:
        low, high = zip(*((int(ids.min()), int(ids.max())) for ids in index.id_blocks()), strict=True)
    beside = tuple(p.name for p in (sidecar_path(file), items_path(file)) if p.exists())
    stated = {key: sidecar[key] for key in ("ntotal", "bytes", "sha256")}
    return Shard(name, beside, first_id=min(low), last_id=max(high), **stated), sidecar


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
        old = None if new else read_manifest(path)
        shards = {} if old is None else {shard.file: shard for shard in old.shards}
        for name in remove:
            if shards.pop(name, None) is None:
                raise UsageError(f"{path} has no shard {name!r}: gpq info {path} lists them")
        described = [_describe_shard(path.parent, Path(file)) for file in add]
        shards |= {shard.file: shard for shard, _ in described}
        if not shards:
            raise UsageError(f"{path}: no shard would be left: add one, or delete the manifest")
        if old is None:
            models = {sidecar["model_fingerprint"] for _, sidecar in described} - {None}
            common = described[0][1]["codebooks_fingerprint"], min(models, default=None)
        else:
            common = old.codebooks_fingerprint, old.model_fingerprint
        ordered = sorted(shards.values(), key=lambda shard: (shard.first_id, shard.file))
        made = Manifest(path, *common, tuple(ordered))
        for shard, _ in described:
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
    groups: list[list[Shard]] = []
    end = 0
    for shard in manifest.shards:
        if not groups or shard.first_id > end:
            groups.append([])
            end = shard.last_id
        groups[-1].append(shard)
        end = max(end, shard.last_id)
    for group in groups:
        if len(group) == 1:
            continue
        memory = max(_MEMORY, 32 * max(shard.ntotal for shard in group))
        blocks = partial(_id_blocks, manifest, group)
        repeated = repeated_among(blocks, sum(shard.ntotal for shard in group), memory)
        if repeated is not None:
            names = ", ".join(shard.file for shard in group)
            raise DataError(
                f"{manifest.path}: id {repeated} is in two of the shards {names}: every item needs its own"
            )


def _id_blocks(manifest: Manifest, shards: Sequence[Shard]) -> Iterator[Ids]:
    for shard in shards:
        with open_file(manifest.file(shard)) as index:
            yield from index.id_blocks()
