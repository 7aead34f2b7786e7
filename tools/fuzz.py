"""Open mutated files of every kind: none may crash, hang, or raise more than a one-line error.

    python tools/fuzz.py --cases 10000

A case depends on its number alone, so ``--first N --cases 1`` repeats case N. The tests run a few
hundred cases.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
N, WIDTH = 90, 16
MEMORY = 3 << 30
"""Bytes that a worker may allocate in addition to its imports."""
SECONDS = 120


class Outcome(NamedTuple):
    """Counts of files read and refused, and number and description of each failed case."""

    read: int
    refused: int
    failed: list[tuple[int, str]]


class Seed(NamedTuple):
    """A sound file, with its companions in the same folder, and a function that opens it."""

    path: Path
    use: Callable[[Path], object]


def _search(path: Path) -> None:
    import gpq_faiss as gpq

    index = gpq.open_index(path)
    xq = np.ones((2, index.d), np.float32)
    _, ids = index.search(xq, min(3, index.ntotal))
    index.range_search(xq, 0.0)
    if index.items is not None:
        for number in ids.ravel().tolist():
            index.items.item(number)


def _items(path: Path) -> None:
    _search(Path(str(path).removesuffix(".items.sqlite").removesuffix(".changes.sqlite")))


def _vectors(path: Path) -> None:
    import gpq_faiss as gpq

    dataset = gpq.open_data(f"features:{path}")
    dataset.read(slice(0, min(5, len(dataset))))


def _model(path: Path) -> None:
    import gpq_faiss as gpq

    gpq.load_model(path.parent)


def _describe(path: Path) -> None:
    import gpq_faiss as gpq

    gpq.info(path)


def seeds(folder: Path) -> list[Seed]:
    """Make a sound file of every kind, with the same bytes every time."""
    import h5py
    import pyarrow as pa
    import pyarrow.parquet as pq

    import gpq_faiss as gpq
    from gpq_faiss.store.changes import ChangeWriter, changes_path
    from gpq_faiss.store.items import items_path

    rng = np.random.default_rng(0)
    features = rng.standard_normal((N, WIDTH)).astype(np.float32)
    classes = np.arange(N) % 3
    np.save(folder / "features.npy", features)
    np.savez(folder / "features.npz", features=features, labels=classes, ids=np.arange(N) + 7)
    with h5py.File(folder / "features.hdf5", "w") as h5:
        h5.create_dataset("features", data=features, compression="gzip")
    pq.write_table(pa.table({"features": list(features)}), folder / "features.parquet")
    data = gpq.open_data(f"features:{folder / 'features.npz'}")
    settings = gpq.preset("paper").with_settings({"training": {"steps": 1}})
    model = gpq.train(data, folder / "model", config=settings, protocol="none")
    codes = gpq.encode(model, data, folder / "codes.h5")
    index = gpq.index(model, codes, folder / "index.faiss")
    lists = gpq.index(model, codes, folder / "index.lists", names=False)
    opened = gpq.open_index(index)
    codes_of_items, _ = opened.items_by_id()
    with ChangeWriter(index, codes_of_items.shape[1], opened.fingerprint) as writer:
        added = bytes(codes_of_items[9]), "new", ("class 1",)
        writer.write({8: (None, None, None), 200: added})
    return [
        *(Seed(path, _search) for path in (index, lists, codes)),
        *(Seed(path, _items) for path in (items_path(index), changes_path(index))),
        *(Seed(path, _describe) for path in (index, lists, codes)),
        Seed(folder / "features.h5", _describe),
        *(
            Seed(folder / f"features.{suffix}", _vectors)
            for suffix in ("npy", "npz", "hdf5", "parquet")
        ),
        *(Seed(model / name, _model) for name in ("model.safetensors", "config.json")),
    ]


def mutate(data: bytes, case: int) -> bytes:
    """Cut the data, repeat a part, or change some bytes, mostly near the ends with the sizes."""
    rng = np.random.default_rng([case, 1])
    mutant = bytearray(data)
    way = case % 8
    position = int(rng.integers(len(data)))
    if way == 0:
        return data[:position]
    if way == 1:
        return data[:position] + data[position // 2 :]
    spans = (0, 160), (len(data) - 1200, len(data)), (0, len(data))
    for _ in range(int(rng.integers(1, 5))):
        low, high = spans[int(rng.integers(3))]
        position = int(rng.integers(max(0, low), min(high, len(data))))
        if way == 2:  # a number of 8 bytes, often absurd
            numbers = np.array([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1], np.uint64)
            mutant[position : position + 8] = int(rng.choice(numbers)).to_bytes(8, "little")
        elif way < 5:
            mutant[position] = int(rng.integers(256))
        else:
            mutant[position] ^= 1 << int(rng.integers(8))
    return bytes(mutant[: len(data)])


def work(folder: Path, first: int, last: int) -> None:
    """Run the cases ``first`` to ``last - 1`` in this process; print a line for each outcome."""
    from gpq_faiss.errors import GpqError

    warnings.simplefilter("ignore")
    sound = [(seed, seed.path.read_bytes()) for seed in seeds(folder)]
    for seed, _ in sound:
        seed.use(seed.path)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for case in range(first, last):
        seed, data = sound[case // 8 % len(sound)]
        seed.path.write_bytes(mutate(data, case))
        print(case, "begun", f"{seed.use.__name__}:{seed.path.name}", flush=True)
        signal.alarm(SECONDS)
        outcome = "read"
        try:
            seed.use(seed.path)
        except GpqError as error:
            outcome = "refused" if "\n" not in str(error) else f"two lines: {error!r}"
        except Exception as error:
            outcome = f"raised {error!r}"
        signal.alarm(0)
        seed.path.write_bytes(data)
        print(case, outcome.replace("\n", " "), flush=True)


def run(cases: int, first: int = 0) -> Outcome:
    """Run the cases, with a new process after each crash."""
    outcomes: dict[int, str] = {}
    names: dict[int, str] = {}
    case, last = first, first + cases
    while case < last:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--worker", folder, str(case), str(last)]
            environment: dict[str, Any] = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
            }
            ended = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment
            )
        for line in ended.stdout.splitlines():
            number, _, text = line.partition(" ")
            if text.startswith("begun "):
                names[int(number)] = text.removeprefix("begun ")
            else:
                outcomes[int(number)] = text
        case = max(names, default=case)
        if case not in outcomes:
            outcomes[case] = f"the process ended with {ended.returncode}: {ended.stderr[-300:]}"
        if not names:
            break  # the worker ended before its first case, and would do so again
        case += 1
    failed = [
        (number, f"{names.get(number)}: {text}")
        for number, text in sorted(outcomes.items())
        if text not in ("read", "refused")
    ]
    texts = list(outcomes.values())
    return Outcome(texts.count("read"), texts.count("refused"), failed)


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
        result = run(args.cases, args.first)
        for number, text in result.failed:
            print(f"case {number}: {text}")
        print(f"{result.read} read, {result.refused} refused, {len(result.failed)} failed")
        sys.exit(bool(result.failed))
