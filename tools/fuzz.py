"""Mutated files of every form that is read, each opened and used: none may crash, hang, raise anything but a one-line error, or be taken
for sound where it has a checksum.

    python tools/fuzz.py --cases 10000

Every case is made from its number alone, so a failure is repeated by  --first N --cases 1.  The tests run a few hundred.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
M, d, N, WIDTH = 5, 12, 90, 16
MEMORY = 3 << 30
"""Bytes that a worker may take beyond what it has when its readers are loaded."""
SECONDS = 120


class Outcome(NamedTuple):
    """Cases of each end; ``failed`` are their numbers and what happened, ``forms`` the cases of each form."""

    read: int
    refused: int
    failed: list[tuple[int, str]]
    forms: dict[str, int]


class Seed(NamedTuple):
    """A sound file, and how it is used.

    Attributes:
        path: what is mutated; what belongs to it lies beside it.
        use: reads it, and returns a digest of what a checksum protects of it ("" where there is none). The whole number is that of the
            case, to choose among several ways.
        text: whether its words and numbers are exchanged, too.
    """

    path: Path
    use: Callable[[Path, int], str]
    text: bool = False


# What is read -----------------------------------------------------------------------------------------------------------


def _digest(*parts: Any) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())
    return found.hexdigest()


def _describe(path: Path, _: int) -> str:
    from gpq_faiss.stages.info import info

    info(path)
    return ""


def _search(path: Path, case: int) -> str:
    from gpq_faiss.indexes.file import open_file
    from gpq_faiss.indexes.opening import open_in_memory

    xq = np.ones((2, M * d), np.float32)
    if case % 2:
        held = open_file(path, "50MB")
        held.search(xq, 3)
        held.range_search(xq, 0.0)
    else:
        open_in_memory(path).search(xq, 3)
    return ""


def _hashed_index(path: Path, _: int) -> str:
    """With its sidecar, which has its hash."""
    from gpq_faiss.faissio.io import load_index

    held = load_index(path)[0]
    return _digest(held.header.codebooks, held.codes, held.ids)


def _rows(path: Path, _: int) -> str:
    from gpq_faiss.store.reader import RowReader

    with RowReader(path) as reader:
        parts = [part for block in reader.blocks(50) for part in block[1:] if part is not None]
        return _digest(reader.header.codebooks, reader.header.fingerprint().encode(), *parts)


def _read(data: str, most: int | None = None, **options: Any) -> Any:
    """The first items of a data set."""
    from gpq_faiss.data.open import open_data

    dataset = open_data(data, **options)
    return dataset.read(slice(0, most))


def _features(path: Path, _: int) -> str:
    return _digest(_read(f"features:{path}"))


def _unchecked(use: Callable[[Path, int], str]) -> Callable[[Path, int], str]:
    """As ``use``, of a form that has no checksum."""

    @functools.wraps(use)
    def used(path: Path, case: int) -> str:
        use(path, case)
        return ""

    return used


def _queries(path: Path, case: int) -> str:
    from gpq_faiss.stages.search import open_queries

    data = open_queries(str(path))
    data.read(np.arange(min(5, len(data))))
    return ""


def _table(path: Path, _: int) -> str:
    form = "csv" if path.suffix == ".csv" else "parquet"
    _read(f"{form}:{path}", 5, root=str(path.parent), max_bad=0.5)
    return ""


def _list(path: Path, _: int) -> str:
    _read(f"list:{path}", 0, max_bad=0.5)
    return ""


def _images(path: Path, _: int) -> str:
    return _digest(*(image for image in _read(f"folder:{path}", max_bad=1.0) if image is not None))


def _shards(path: Path, _: int) -> str:
    _read(f"webdataset:{path}", max_bad=1.0)
    return ""


def _hub(path: Path, _: int) -> str:
    _read(f"hf:{path.parent}", max_bad=1.0)
    return ""


def _image(path: Path, _: int) -> str:
    from gpq_faiss.data.images import decode_image

    decode_image(path)
    return ""


def _ids(path: Path, case: int) -> str:
    from gpq_faiss.data.arrays import read_ids
    from gpq_faiss.data.open import open_data
    from gpq_faiss.data.protocols import read_rows

    if case % 3 == 0:
        read_ids(path)
    elif case % 3 == 1:
        open_data(np.ones((N, 2), np.float32), labels=str(path))
    else:
        read_rows(path, np.arange(N))
    return ""


def _model(path: Path, case: int) -> str:
    """The fingerprint is that of the tensors: what the settings beside them say has none."""
    import torch

    from gpq_faiss.faissio.model import read_model
    from gpq_faiss.methods.model import load_model

    if case % 4 == 0:
        return _digest(read_model(path.parent).codebooks) if path.suffix == ".safetensors" else ""
    model = load_model(path.parent)
    if path.suffix == ".json":
        with torch.inference_mode():
            model.network(torch.ones(1, model.description["input"]["width"]))
        return ""
    return _digest(model.codebooks)


def _split(path: Path, _: int) -> str:
    from gpq_faiss.data.protocols import load_split

    return load_split(path).hash


def _sidecar(path: Path, _: int) -> str:
    from gpq_faiss.faissio.io import load_index

    load_index(path.with_suffix(""))
    return ""


def _arrays(path: Path, _: int) -> str:
    from gpq_faiss.store.hdf5 import read_arrays

    return _digest(read_arrays(path, "arrays")[0].get("large", np.zeros(0)))


def _names(path: Path, _: int) -> str:
    from gpq_faiss.store.items import Items

    with Items(path) as items:
        items.lookup(np.array([number for number, *_ in items.rows()], np.int64))
    return ""


def _changes(path: Path, _: int) -> str:
    """All of them, or an error; a file that is cut to nothing is a new one."""
    from gpq_faiss.serve.changes import read_changes

    found = read_changes(path.with_name("index.faiss"), 3, "c" * 16)
    return _digest(repr(sorted(found.items())).encode()) if path.stat().st_size else ""


def _weights(path: Path, _: int) -> str:
    from gpq_faiss.nn.weights import read_weights

    read_weights(path)
    return ""


def _unfinished(path: Path, _: int) -> str:
    return _describe(path.parent, 0)


def _settings(path: Path, case: int) -> str:
    from gpq_faiss.config import preset, read_toml, validate
    from gpq_faiss.experiment.grid import read_grid

    if case % 2:
        validate(read_toml(path, preset("paper")))
    else:
        read_grid(path)
    return ""


# Sound files ------------------------------------------------------------------------------------------------------------


def codebooks() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Unit-norm codewords float32 [M, 16, d]."""
    Z = np.random.default_rng(0).normal(size=(M, 16, d))
    return np.asarray(Z / np.linalg.norm(Z, axis=2, keepdims=True), np.float32)


def seeds(folder: Path) -> list[Seed]:
    """One sound file of every form."""
    return [
        *_index_seeds(folder / "indexes"),
        *_array_seeds(folder / "arrays"),
        *_parquet_seeds(folder / "parquet"),
        *_model_seeds(folder / "model"),
        *_image_seeds(folder / "images"),
        *_hub_seeds(folder),
        *_text_seeds(folder / "texts"),
        *_sqlite_seeds(folder / "sqlite"),
    ]


def _index_seeds(folder: Path) -> list[Seed]:
    import faiss

    from gpq_faiss.build.shards import open_shard
    from gpq_faiss.build.stream import build_index
    from gpq_faiss.codes.codebooks import inject
    from gpq_faiss.codes.encode import encode
    from gpq_faiss.faissio.io import save_index
    from gpq_faiss.faissio.model import ModelHeader
    from gpq_faiss.faissio.storage import FORMS, faiss_index
    from gpq_faiss.store.header import Header
    from gpq_faiss.store.writer import RowWriter

    folder.mkdir()
    rng, Z = np.random.default_rng(1), codebooks()
    codes = encode(rng.normal(size=(N, M * d)), Z)
    ids = rng.permutation(N) * 3 + 2**40
    paths = []
    for form in FORMS:
        for own, name in ((ids, f"{form}-ids"), (None, form)):
            faiss.write_index(faiss_index(codes, own, Z, form), str(folder / name))
            paths.append(folder / name)
    # as a build in a stream leaves them, most lists empty
    header = Header("codes", "m" * 16, Z, "d" * 16)
    with RowWriter(folder / "shard.h5", header, overwrite=True) as writer:
        writer.append(codes[:40], ids[:40], None)
        writer.finish()
    shard = open_shard(folder / "shard.h5", ModelHeader(folder, Z, "m" * 16))
    paths.append(build_index([shard], folder / "streamed-ivf", "ivf"))
    Path(f"{paths[-1]}.json").unlink()
    faiss.write_index(inject(Z), str(folder / "empty"))
    faiss.write_index(faiss.index_factory(M * d, "Flat"), str(folder / "foreign"))
    for name in ("hashed", "sidecar"):
        (folder / name).mkdir()
        save_index(
            faiss_index(codes, ids, Z, "flat"), folder / name / "index.faiss", model_fingerprint="m" * 16
        )
    header = Header("codes", "m" * 16, Z, "d" * 16, ("cat", "dog"))
    with RowWriter(folder / "codes.h5", header) as writer:
        writer.append(codes, ids, np.full((N, 1), 64, np.uint8))
        writer.finish()
    header = Header("features", "m" * 16, Z, "d" * 16, ("cat", "dog"))
    with RowWriter(folder / "features.h5", header) as writer:
        writer.append(rng.normal(size=(N, M * d)).astype(np.float32), ids, np.full((N, 1), 64, np.uint8))
        writer.finish()
    return [
        *(Seed(path, _search) for path in (*paths, folder / "empty", folder / "foreign")),
        Seed(folder / "hashed" / "index.faiss", _hashed_index),
        Seed(folder / "sidecar" / "index.faiss.json", _sidecar, text=True),
        *(Seed(folder / name, _rows) for name in ("codes.h5", "features.h5")),
        Seed(folder / "features.h5", _unchecked(_features)),
        *(Seed(path, _describe) for path in (paths[0], paths[-1], folder / "codes.h5")),
    ]


def _array_seeds(folder: Path) -> list[Seed]:
    import h5py

    from gpq_faiss.store.hdf5 import write_arrays

    folder.mkdir()
    rng = np.random.default_rng(2)
    x, labels = rng.normal(size=(N, WIDTH)).astype(np.float32), np.arange(N) % 3
    everything: dict[str, Any] = {"features": x, "labels": labels, "ids": np.arange(N) + 7}
    np.save(folder / "x.npy", x)
    np.save(folder / "ids.npy", np.arange(N))
    np.savez(folder / "stored.npz", **everything)
    np.savez_compressed(folder / "deflated.npz", **everything)
    with h5py.File(folder / "foreign.h5", "w") as h5:
        h5.create_dataset("features", data=x, chunks=(20, WIDTH), compression="gzip", shuffle=True)
        h5["labels"], h5["ids"] = labels, np.arange(N)
    large = {"large": rng.normal(size=(N, 30)), "small": np.arange(3)}
    write_arrays(folder / "results.h5", large, {"kind": "results"})
    return [
        Seed(folder / "x.npy", _unchecked(_features)),
        Seed(folder / "ids.npy", _ids),
        *(Seed(folder / name, _features) for name in ("stored.npz", "deflated.npz")),
        Seed(folder / "deflated.npz", _queries),
        Seed(folder / "foreign.h5", _unchecked(_features)),
        Seed(folder / "results.h5", _unchecked(_arrays)),
        *(Seed(folder / name, _describe) for name in ("x.npy", "stored.npz", "deflated.npz")),
    ]


def _parquet_seeds(folder: Path) -> list[Seed]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return []
    folder.mkdir()
    rng = np.random.default_rng(3)
    x = rng.normal(size=(N, WIDTH)).astype(np.float32)
    names = pa.array([("cat", "dog|owl", None)[i % 3] for i in range(N)])
    tables = {
        "fixed": {"features": pa.array(list(x), pa.list_(pa.float32(), WIDTH)), "label": names},
        "list": {
            "features": pa.array(list(x)),
            "labels": pa.array([["a"], ["b", "c"], []] * (N // 3)),
            "id": np.arange(N),
        },
        "table": {
            "image": pa.array([f"{i % 6}.png" for i in range(N)]),
            "label": names,
            "id": np.arange(N),
        },
    }
    for i, (name, table) in enumerate(tables.items()):
        pq.write_table(
            pa.table(table),
            folder / f"{name}.parquet",
            row_group_size=40,
            compression=("snappy", "zstd")[i % 2],
            write_page_checksum=True,
        )
    _pictures(folder)
    return [
        *(Seed(folder / f"{name}.parquet", _unchecked(_features)) for name in ("fixed", "list")),
        Seed(folder / "table.parquet", _table),
    ]


def _hub_seeds(folder: Path) -> list[Seed]:
    try:
        import datasets
    except ImportError:
        return []
    datasets.disable_progress_bars()
    rng = np.random.default_rng(5)
    images = [
        {"bytes": path.read_bytes(), "path": None} for path in sorted((folder / "images").glob("*.png"))
    ]
    n = len(images)
    kinds = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["cat", "dog"]),
        "name": datasets.Value("string"),
    }
    named = {"label": [i % 2 for i in range(n)], "name": [f"item {i}" for i in range(n)]}
    made = datasets.Dataset.from_dict({"image": images, **named}, features=datasets.Features(kinds))
    made.save_to_disk(str(folder / "hub-images"))
    vectors = datasets.Dataset.from_dict(
        {"emb": list(rng.normal(size=(N, WIDTH))), "label": ["a", "b", "c"] * (N // 3)}
    )
    vectors.save_to_disk(str(folder / "hub-vectors"))
    found = [path for name in ("hub-images", "hub-vectors") for path in sorted((folder / name).iterdir())]
    return [Seed(path, _hub, text=path.suffix == ".json") for path in found]


def _model_seeds(folder: Path) -> list[Seed]:
    import torch
    from safetensors.torch import load_file

    from gpq_faiss.config import from_dict, preset, to_dict
    from gpq_faiss.data.labels import Labels
    from gpq_faiss.data.protocols import make_split
    from gpq_faiss.methods.gpq import build_network
    from gpq_faiss.methods.model import save_model, save_tensors

    labels = Labels.from_ids(np.arange(N) % 3)
    split = make_split(labels, labelled="5-per-class")
    input_ = {"kind": "features", "width": WIDTH}
    for name in ("paper", "recommended"):
        values = to_dict(preset(name))
        values["quantizer"]["codebooks"] = M
        values["network"]["hidden"] = [8]
        network = build_network(from_dict(values), input_, 3).eval()
        description = {
            "method": "gpq",
            "config": values,
            "input": input_,
            "class_names": ["cat", "dog", "owl"],
            "split": {"hash": split.hash},
        }
        folder.mkdir(exist_ok=True)
        save_model(folder / name, network, description, extra={}, split=split, overwrite=False)
    tensors = load_file(folder / "paper" / "model.safetensors")
    (folder / ".m.partial").mkdir()
    state = {"identity": "i", "step": 3, "seconds": 1.5, "best": 0.5, "best_step": 2, "lines": ["{}"]}
    checkpoint = folder / ".m.partial" / "checkpoint.safetensors"
    save_tensors(tensors, checkpoint, metadata={"state": json.dumps(state)})
    save_tensors(tensors, folder / "weights.safetensors")
    torch.save({"state_dict": tensors}, folder / "weights.pth")
    return [
        *(Seed(folder / name / "config.json", _model, text=True) for name in ("paper", "recommended")),
        *(Seed(folder / name / "model.safetensors", _model) for name in ("paper", "recommended")),
        Seed(folder / "paper" / "split.json", _split, text=True),
        Seed(folder / "paper" / "config.json", _unfinished, text=True),
        Seed(checkpoint, _unfinished),
        *(Seed(folder / name, _weights) for name in ("weights.safetensors", "weights.pth")),
    ]


def _pictures(folder: Path) -> None:
    from PIL import Image

    for i in range(6):
        pixels = np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")


def _image_seeds(folder: Path) -> list[Seed]:
    folder.mkdir()
    _pictures(folder)
    for name, mode in (("plain.tar", "w"), ("packed.tar.gz", "w:gz")):
        with tarfile.open(folder / name, mode) as archive:  # type: ignore[call-overload]
            for i in range(6):
                archive.add(folder / f"{i}.png", arcname=f"{'ab'[i % 2]}/{i}.png")
    with tarfile.open(folder / "shard.tar", "w") as archive:
        for i in range(6):
            (folder / f"{i}.json").write_text(json.dumps({"label": ["cat", "dog"][i % 2], "url": f"u/{i}"}))
            for ending in ("png", "json"):
                archive.add(folder / f"{i}.{ending}", arcname=f"{i}.{ending}")
    return [
        Seed(folder / "plain.tar", _unchecked(_images)),
        Seed(folder / "shard.tar", _shards),
        Seed(folder / "packed.tar.gz", _images),
        Seed(folder / "0.png", _image),
    ]


def _text_seeds(folder: Path) -> list[Seed]:
    folder.mkdir()
    _pictures(folder)
    (folder / "run.toml").write_text(
        'preset = "recommended"\n\n[network]\nhidden = [64, 32]\nnoise = 0.5\n\n[training]\nsteps = 400\nseed = 3\n\n'
        '[loss]\nlambda1 = 1.0\n\n[loss.extra]\nmine = 0.1\n\n[posterior]\nclass_codebooks = "auto"\n'
    )
    (folder / "grid.toml").write_text(
        'title = "a grid"\nmethods = ["gpq", "pq"]\nbits = [12, 24]\nseeds = [0, 1]\n\n[settings.training]\nsteps = 3\n'
    )
    (folder / "ids.txt").write_text("".join(f"{i}  # item\n" for i in range(N)))
    (folder / "labels.csv").write_text(
        "label\n" + "".join(f"{'cat|dog' if i % 3 else ''}\n" for i in range(N))
    )
    (folder / "table.csv").write_text("image,label,id\n" + "".join(f"{i % 6}.png,a,{i}\n" for i in range(N)))
    (folder / "list.txt").write_text("".join(f"{i % 6}.png {i % 2} {1 - i % 2}\n" for i in range(N)))
    return [
        Seed(folder / "run.toml", _settings, text=True),
        Seed(folder / "grid.toml", _settings, text=True),
        Seed(folder / "ids.txt", _ids, text=True),
        Seed(folder / "labels.csv", _ids, text=True),
        Seed(folder / "table.csv", _table, text=True),
        Seed(folder / "list.txt", _list, text=True),
    ]


def _sqlite_seeds(folder: Path) -> list[Seed]:
    from gpq_faiss.serve.changes import Change, ChangeFile, changes_path
    from gpq_faiss.store.items import Item, item_row, items_path, write_items

    folder.mkdir()
    index = folder / "index.faiss"
    items = [Item({"name": f"{n}.png", "url": f"u/{n}"}, ("cat", "dog")[: n % 3]) for n in range(N)]
    write_items(items_path(index), (item_row(n, item) for n, item in enumerate(items)), "k" * 16)
    file = ChangeFile(index, 3, "c" * 16)
    file.write(
        {n: Change(bytes([n, 1, 2]) if n % 4 else None, items[n] if n % 2 else None) for n in range(N)}
    )
    file.close()
    return [Seed(items_path(index), _names), Seed(changes_path(index), _changes)]


# Mutations --------------------------------------------------------------------------------------------------------------

WORDS = (
    b"9" * 400, b"9" * 5000, b"-1", b"0", b"1e999", b"NaN", b"null", b"true", b"{}", b"[]", b'""', b'"\\u0000"', b"0.5",
    b"[" * 2000, b"{\"a\":" * 2000, b"18446744073709551616", b"4611686018427387904", b"1000000", b"\xff\xfe", b"\0", b"|", b"\n",
)  # fmt: skip


def mutate(data: bytes, case: int, *, text: bool = False) -> bytes:
    """A few bytes or bits changed, mostly in the header and at the end where the sizes are; or cut, or doubled. In a text every second
    case is one of other words or numbers."""
    rng = np.random.default_rng([case, 1])
    broken = bytearray(data)
    way = case % 8
    if text and way >= 4:
        return _other_words(data, rng)
    if way == 0:
        del broken[int(rng.integers(len(data))) :]
        return bytes(broken)
    if way == 1:
        at = int(rng.integers(len(data)))
        return bytes(broken[:at] + broken[at // 2 :])
    for _ in range(int(rng.integers(1, 5))):
        low, high = [(0, 160), (len(data) - 1200, len(data)), (0, len(data))][int(rng.integers(3))]
        at = int(rng.integers(max(0, low), min(high, len(data))))
        if way == 2:  # a whole 8-byte number, often absurd
            value = int(rng.choice(np.array([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1], np.uint64)))
            broken[at : at + 8] = value.to_bytes(8, "little")
        elif way < 5:
            broken[at] = int(rng.integers(256))
        else:
            broken[at] ^= 1 << int(rng.integers(8))
    return bytes(broken[: len(data)])


def _other_words(data: bytes, rng: np.random.Generator) -> bytes:
    """One to three words, numbers or brackets replaced, or left out."""
    import re

    for _ in range(int(rng.integers(1, 4))):
        tokens = list(re.finditer(rb'"[^"\n]*"|-?[0-9][0-9.e+-]*|[A-Za-z_]+|[\[\]{}]|\n', data))
        if not tokens:
            break
        token = tokens[int(rng.integers(len(tokens)))]
        word = b"" if rng.random() < 0.2 else WORDS[int(rng.integers(len(WORDS)))]
        data = data[: token.start()] + word + data[token.end() :]
    return data


# Cases ------------------------------------------------------------------------------------------------------------------


def _limit_memory() -> None:
    import gpq_faiss.experiment.grid
    import gpq_faiss.methods.model  # noqa: F401  (what is loaded does not count)

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def work(folder: Path, first: int, last: int) -> None:
    """The cases first..last - 1, in this process; each outcome is a line on stdout, written at once."""
    import warnings

    from gpq_faiss.errors import GpqError

    warnings.simplefilter("ignore")
    everything = seeds(folder)
    sound = [seed.path.read_bytes() for seed in everything]
    right: dict[tuple[int, int], str] = {}  # of the sound file, by form and way of its use
    for case in range(first, last):
        which = case // 8 % len(everything)
        seed = everything[which]
        name = f"{seed.use.__name__.strip('_')}:{seed.path.name}"
        way = case % 12
        if case == first:
            right[which, way] = _outcome(seed.use, seed.path, way)
            _limit_memory()
        mutant = mutate(sound[which], case, text=seed.text)
        seed.path.write_bytes(mutant)
        print(case, "begun", name, flush=True)
        signal.alarm(SECONDS)
        found, outcome = "", "read"
        try:
            found = seed.use(seed.path, way)
        except GpqError as error:
            outcome = "refused" if "\n" not in str(error) else f"two lines: {error!r}"
        except Exception as error:
            outcome = f"raised {error!r}"
        signal.alarm(0)
        seed.path.write_bytes(sound[which])
        if found and mutant != sound[which]:
            if (which, way) not in right:
                right[which, way] = _outcome(seed.use, seed.path, way)
            if found != right[which, way]:
                outcome = "accepted damage"
        print(case, outcome.replace("\n", " "), flush=True)


def _outcome(use: Callable[[Path, int], str], path: Path, way: int) -> str:
    """What a sound file gives; one that is refused even so (a grid that is read as settings) has nothing to compare."""
    from gpq_faiss.errors import GpqError

    try:
        return use(path, way)
    except GpqError:
        return ""


def run(cases: int, first: int = 0) -> Outcome:
    """All cases, in as many processes as crashes ask for."""
    read = refused = 0
    failed: list[tuple[int, str]] = []
    forms: Counter[str] = Counter()
    at, last = first, first + cases
    while at < last:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, __file__, "--worker", folder, str(at), str(last)],
                capture_output=True,
                text=True,
                check=False,
                env=os.environ
                | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        begun, name = at, "no case"
        for line in done.stdout.splitlines():
            number, _, outcome = line.partition(" ")
            if outcome.startswith("begun "):
                begun, name = int(number), outcome.removeprefix("begun ")
                forms[name] += 1
                continue
            at = int(number) + 1
            if outcome == "read":
                read += 1
            elif outcome == "refused":
                refused += 1
            else:
                failed.append((int(number), f"{name}: {outcome}"))
        if at < last:
            failed.append((begun, f"{name}: the process ended with {done.returncode}: {done.stderr[-300:]}"))
            if begun < at or name == "no case":
                break  # it ended outside a case: no use in going on
            at = begun + 1
    return Outcome(read, refused, failed, dict(forms))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--cases", type=int, default=10_000)
        parser.add_argument("--first", type=int, default=0)
        args = parser.parse_args()
        outcome = run(args.cases, args.first)
        for form, count in sorted(outcome.forms.items()):
            print(f"{count:6,} {form}")
        for number, what in outcome.failed:
            print(f"case {number}: {what}")
        print(f"{outcome.read} read, {outcome.refused} refused, {len(outcome.failed)} failed")
        sys.exit(bool(outcome.failed))
