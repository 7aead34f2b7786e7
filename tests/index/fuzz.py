"""Mutated index and HDF5 files, opened and searched in processes of their own: none may crash, hang or say two lines.

    python tests/index/fuzz.py --cases 10000

Every case is made from its number alone, so a failure is repeated by  --first N --cases 1. The suite runs a few hundred.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]
M, d, N = 5, 12, 90
MEMORY = 6 << 30
SECONDS = 30


class Outcome(NamedTuple):
    """Cases of each end; ``failed`` are their numbers and what happened."""

    read: int
    refused: int
    failed: list[tuple[int, str]]


def seeds(folder: Path) -> list[Path]:
    """One sound file of every kind."""
    import faiss

    from gpq_faiss.index.codebooks import encode, inject
    from gpq_faiss.index.forms import FORMS, faiss_form
    from gpq_faiss.index.ivf import IvfSettings
    from gpq_faiss.index.liststream import build_lists
    from gpq_faiss.index.shards import Hdf5Shard
    from gpq_faiss.store import Header, RowWriter

    rng = np.random.default_rng(0)
    Z = rng.normal(size=(M, 16, d))
    Z = (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)
    codes = encode(rng.normal(size=(N, M * d)), Z)
    ids = rng.permutation(N) * 3 + 2**40
    paths = []
    for form in FORMS:
        ivf = IvfSettings(lists=4, form="fused" if form.endswith("fused") else "fastscan").trained(codes, Z)
        for own, name in ((ids, f"{form}-ids"), (None, form)):
            faiss.write_index(faiss_form(form, codes, own, Z, ivf=ivf), str(folder / name))
            paths.append(folder / name)
    for form in ("fused", "fastscan"):  # as a build in a stream leaves them, most lists empty
        many = IvfSettings(centroids=rng.normal(size=(70, M * d)), form=form, nprobe=70)
        header = Header("codes", codes.shape[1], "m" * 16, Z, "d" * 16)
        with RowWriter(folder / "shard.h5", header, overwrite=True) as writer:
            writer.append(codes[:40], ids[:40], None)
            writer.finish()
        shard = Hdf5Shard(folder / "shard.h5", Z, "m" * 16, "the model")
        paths.append(build_lists([shard], folder / f"streamed-{form}", Z, many, model_fingerprint="m" * 16))
    faiss.write_index(inject(Z), str(folder / "empty"))
    faiss.write_index(faiss.index_factory(M * d, "Flat"), str(folder / "foreign"))
    header = Header("codes", codes.shape[1], "m" * 16, Z, "d" * 16, ("cat", "dog"))
    with RowWriter(folder / "codes.h5", header) as writer:
        writer.append(codes, ids, np.full((N, 1), 64, np.uint8))
        writer.finish()
    return [*paths, folder / "empty", folder / "foreign", folder / "codes.h5"]


def mutate(data: bytes, case: int) -> bytes:
    """A few bytes or bits changed, mostly in the header and at the end where the sizes are; or cut, or doubled."""
    rng = np.random.default_rng([case, 1])
    broken = bytearray(data)
    way = case % 8
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


def work(folder: Path, first: int, last: int) -> None:
    """The cases first..last - 1, in this process; each outcome is a line on stdout, written at once."""
    from gpq_faiss.errors import GpqError
    from gpq_faiss.index.disk import open_disk
    from gpq_faiss.index.opening import open_engine
    from gpq_faiss.store import RowReader

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    files = seeds(folder)
    sound = [path.read_bytes() for path in files]
    xq = np.ones((2, M * d), np.float32)
    mutant = folder / "mutant"
    for case in range(first, last):
        which = case // 8 % len(files)
        mutant.write_bytes(mutate(sound[which], case))
        print(case, "begun", flush=True)
        signal.alarm(SECONDS)
        outcome = "read"
        try:
            if files[which].suffix == ".h5":
                with RowReader(mutant) as reader:
                    for _ in reader.blocks(50):
                        pass
            elif case % 2:
                engine = open_disk(mutant, "50MB")
                engine.search(xq, 3)
                engine.range_search(xq, 0.0)
            else:
                open_engine(mutant).search(xq, 3)
        except GpqError as error:
            outcome = "refused" if "\n" not in str(error) else f"two lines: {error!r}"
        except Exception as error:
            outcome = f"raised {error!r}"
        signal.alarm(0)
        print(case, outcome.replace("\n", " "), flush=True)


def run(cases: int, first: int = 0) -> Outcome:
    """All cases, in as many processes as crashes ask for."""
    read = refused = 0
    failed: list[tuple[int, str]] = []
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
        begun = at
        for line in done.stdout.splitlines():
            number, _, outcome = line.partition(" ")
            if outcome == "begun":
                begun = int(number)
                continue
            at = int(number) + 1
            if outcome == "read":
                read += 1
            elif outcome == "refused":
                refused += 1
            else:
                failed.append((int(number), outcome))
        if at < last:
            failed.append((begun, f"the process ended with {done.returncode}: {done.stderr[-300:]}"))
            if begun < at:
                break  # it ended outside a case: no use in going on
            at = begun + 1
    return Outcome(read, refused, failed)


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
        for number, what in outcome.failed:
            print(f"case {number}: {what}")
        print(f"{outcome.read} read, {outcome.refused} refused, {len(outcome.failed)} failed")
        sys.exit(bool(outcome.failed))
