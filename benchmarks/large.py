"""A billion codes on one machine: building within a budget, opening, exact search, lists; smaller sizes in the same table.

    python benchmarks/large.py --items 1000000000 --data features:FEATURES.npy --labels LABELS.npy --folder SCRATCH

The codes are simulated from a 48-bit model trained here. The codes of a million items, simulated as in ``search.py``, are
the pool. A simulated code combines two pool codes: the first bytes of one (1 to 5, drawn uniformly), and the rest of
another, drawn among those with the same byte (two codewords) before the cut. So the distributions of both parts and
across the cut are those of the pool; the share of distinct codes and the scores of real queries are reported for both.

Each part of each size runs in a separate process, whose peak memory is reported, and is stored in the JSON; a second call
computes missing parts (``--parts`` selects some). The Markdown is generated from the JSON. A billion codes need 40 GB of disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import faiss
import numpy as np
import torch
from common import describe_machine, make_parser, numbers, read_results, run_main, save, timed
from numpy.typing import NDArray

from gpq_faiss.build.shards import IndexShard, open_shard
from gpq_faiss.build.stream import build_index
from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.config import codebooks_for_bits, preset
from gpq_faiss.data.base import FeatureDataset
from gpq_faiss.data.open import open_data
from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import UsageError
from gpq_faiss.faissio.header import row_header
from gpq_faiss.faissio.model import read_model
from gpq_faiss.faissio.storage import Storage
from gpq_faiss.files import atomic_path
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.lists import IvfSettings
from gpq_faiss.inputs import parse_bytes
from gpq_faiss.nn.posterior import PosteriorNetwork
from gpq_faiss.stages.train import train
from gpq_faiss.store import Header, RowWriter

BITS, K, POOL, QUERIES = 48, 100, 1_000_000, 1024
SHARD, BLOCK = 10_000_000, 1_000_000
HDF5_MOST = 200_000_000
BATCHES = (1, 32, 1024)
PROBES = (1, 4, 16, 64, 256)
PARTS = ("shards", "build", "lists", "disk", "memory", "ivf")
MODEL = "0" * 16  # the shards belong to no model folder
Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Cell = dict[str, Any]


class Trained:
    """Models of some code lengths, and items and queries like those they were trained on.

    Args:
        spec: data as ``gpq train`` takes it; ``labels`` as its ``--labels``.
        folder: for the models, which are kept.
        steps: of each training.
    """

    def __init__(self, spec: str, labels: str | None, folder: Path, steps: int) -> None:
        data = open_data(spec, labels=labels)
        if not isinstance(data, FeatureDataset):
            raise UsageError(f"{spec} holds images: this benchmark takes features")
        self.data = data
        self.folder = folder
        self.steps = steps
        dense = data.require_labels().dense(dtype=bool)
        self.classes = [np.flatnonzero(dense[:, c]) for c in range(dense.shape[1])]

    def model(self, bits: int) -> Path:
        """The model folder, trained if missing."""
        config = preset("recommended")
        config = dataclasses.replace(
            config,
            quantizer=dataclasses.replace(config.quantizer, codebooks=codebooks_for_bits(bits, 16)),
            training=dataclasses.replace(config.training, steps=self.steps, seed=0),
        )
        return train(
            self.data, self.folder / f"model-{bits}", config=config, labelled="500-per-class", resume=True
        )

    def __call__(self, bits: int, n: int, queries: int) -> tuple[Floats, Codes, Floats]:
        """Codebooks, codes of ``n`` simulated items, and vectors of real queries."""
        folder = self.model(bits)
        encoder = Encoder.load(folder)
        network = cast(PosteriorNetwork, encoder.model.network)
        Z = read_model(folder).codebooks
        rng = np.random.default_rng([bits, n])
        rows = rng.permutation(len(self.data))
        xq, _ = encoder.embed(self.data.read(np.sort(rows[:queries])), queries=True)
        step = 1 << 14
        with torch.inference_mode():
            blocks = (self.data.read(slice(start, start + step)) for start in range(0, len(self.data), step))
            seen = [network.features(torch.from_numpy(block)) for block in blocks]
            features = torch.cat([part for part, _ in seen])
            posterior = network.posterior(torch.cat([raw for _, raw in seen]))
            codes = np.empty((n, (len(Z) + 1) // 2), np.uint8)
            for start in range(0, n, step):
                size = min(step, n - start)
                class_of = rng.integers(0, len(self.classes), size)
                pair = np.empty((2, size), np.int64)
                for c, members in enumerate(self.classes):
                    here = np.flatnonzero(class_of == c)
                    pair[:, here] = rng.choice(members, (2, len(here)))
                share = torch.from_numpy(rng.random((size, 1), dtype=np.float32))
                mixed = [share * of[pair[0]] + (1 - share) * of[pair[1]] for of in (features, posterior)]
                codes[start : start + size] = pack_codes(network.assign(*mixed).numpy(), Z.shape[1])
        return Z, codes, xq


def clock(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    return float(timed(run)[1])


def peak_bytes() -> int:
    """Peak memory of this process since it was last reset (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


class Splice:
    """Combinations of two pool codes with the same byte before the cut, uint8 [n, bytes]."""

    def __init__(self, pool: Codes) -> None:
        self.pool = pool
        cuts = range(pool.shape[1] - 1)
        self.order = [np.argsort(pool[:, p], kind="stable").astype(np.int32) for p in cuts]
        self.count = [np.bincount(pool[:, p], minlength=256) for p in cuts]
        self.start = [np.cumsum(count) - count for count in self.count]

    def draw(self, rng: np.random.Generator, n: int) -> Codes:
        """``n`` codes."""
        out = self.pool[rng.integers(0, len(self.pool), n)]
        cut = rng.integers(0, self.pool.shape[1] - 1, n)
        for p, order in enumerate(self.order):
            rows = np.flatnonzero(cut == p)
            link = out[rows, p]
            place = (rng.random(len(rows), dtype=np.float32) * self.count[p][link]).astype(np.int64)
            other = order[self.start[p][link] + np.minimum(place, self.count[p][link] - 1)]
            out[rows, p + 1 :] = self.pool[other, p + 1 :]
        return out


def distinct(codes: Codes) -> int:
    """Number of distinct rows."""
    return len(np.unique(codes.astype(np.uint64) @ (256 ** np.arange(codes.shape[1], dtype=np.uint64))))


def make_pool(args: argparse.Namespace) -> Cell:
    """Train the model, write the pool, and compare it with simulated codes."""
    trained = Trained(args.data, args.labels, args.folder, args.steps)
    Z, pool, xq = trained(BITS, POOL, QUERIES)
    np.savez(args.folder / "pool.npz", Z=Z, pool=pool, xq=xq)
    spliced = Splice(pool).draw(np.random.default_rng([BITS, 1]), POOL)
    found: Cell = {"pool": POOL, "steps": args.steps}
    for name, codes in (("pool", pool), ("spliced", spliced)):
        scores = score_codes(xq[:200], codes, Z)
        found[f"{name}_distinct"] = distinct(codes)
        found[f"{name}_median_score"] = float(np.median(scores))
        found[f"{name}_hundredth_score"] = float(np.partition(scores, -K, axis=1)[:, -K].mean())
    return found


def read_pool(folder: Path) -> tuple[NDArray[np.float32], Codes, NDArray[np.float32]]:
    """Codebooks, pool and queries."""
    held = np.load(folder / "pool.npz", allow_pickle=False)
    return held["Z"], held["pool"], held["xq"]


def places(folder: Path, n: int) -> tuple[Path, Path, Path]:
    """Folder of the shards, index in rows, index with lists."""
    return folder / f"shards-{n}", folder / f"rows-{n}.faiss", folder / f"lists-{n}.faiss"


def part_shards(args: argparse.Namespace, n: int) -> Cell:
    """Draw the codes and write them as HDF5 of ten million rows each; finished ones stay.

    Above :data:`HDF5_MOST` they are flat index files with ids, a hundred million rows each, as compression would take
    longer than everything else.
    """
    Z, pool, _ = read_pool(args.folder)
    splice = Splice(pool)
    folder = places(args.folder, n)[0]
    folder.mkdir(parents=True, exist_ok=True)
    header = Header("codes", pool.shape[1], MODEL, Z, "1" * 16)
    begun = time.perf_counter()

    def draw(at: int) -> Codes:
        return splice.draw(np.random.default_rng([BITS, 2, at]), min(BLOCK, n - at))

    raw = n > HDF5_MOST
    each = 10 * SHARD if raw else SHARD
    for start in range(0, n, each):
        path = folder / f"{start // each:04}{'.faiss' if raw else '.h5'}"
        if path.exists():
            continue
        stop = min(n, start + each)
        if raw:
            head, _, tail = row_header("4-bit", Z, stop - start, mapped=True)
            with atomic_path(path) as temporary, temporary.open("wb") as file:
                file.write(head)
                for at in range(start, stop, BLOCK):
                    file.write(draw(at).tobytes())
                file.write(tail)
                for at in range(start, stop, BLOCK):
                    file.write(np.arange(at, min(stop, at + BLOCK), dtype="<i8").tobytes())
            continue
        with RowWriter(path, header, resume=False) as writer:
            for at in range(start, stop, BLOCK):
                codes = draw(at)
                writer.append(codes, np.arange(at, at + len(codes)), None)
            writer.finish()
    return {"seconds": time.perf_counter() - begun}


def measured(path: Path, n: int, run: Callable[[], Any]) -> Cell:
    """Time, speed and peak memory of a build."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_bytes()
    seconds = clock(run)
    return {
        "seconds": seconds,
        "rows_per_s": n / seconds,
        "peak_bytes": peak_bytes(),
        "peak_bytes_above_start": max(0, peak_bytes() - before),
        "file_bytes": path.stat().st_size,
    }


def part_build(args: argparse.Namespace, n: int) -> Cell:
    """From the shards to an index in rows, of the fastscan form."""
    Z, _, _ = read_pool(args.folder)
    folder, path, _ = places(args.folder, n)
    shards = [
        open_shard(p, Z, MODEL, "benchmark")
        for p in sorted(folder.iterdir())
        if p.suffix[1:] in ("h5", "faiss")
    ]
    if sum(shard.rows for shard in shards) != n:
        raise UsageError(f"{folder} does not hold {n:,} rows: run the part 'shards' first")
    done = measured(
        path,
        n,
        lambda: build_index(
            shards,
            path,
            Z,
            Storage("fastscan"),
            model_fingerprint=MODEL,
            memory=parse_bytes(args.memory),
            overwrite=True,
        ),
    )
    shutil.rmtree(folder)
    return done


def part_lists(args: argparse.Namespace, n: int) -> Cell:
    """From the index in rows to one with lists."""
    Z, _, _ = read_pool(args.folder)
    _, source, path = places(args.folder, n)
    lists = min(args.lists, int(n**0.5))
    settings = IvfSettings(lists=lists, assignment="tables")
    shards = [IndexShard(source, Z, MODEL, "benchmark")]
    # time a whole build, not the rest of an interrupted one
    shutil.rmtree(path.with_name(f".{path.name}.building"), ignore_errors=True)

    def build() -> None:
        build_index(
            shards,
            path,
            Z,
            Storage("fastscan", lists=True),
            settings,
            model_fingerprint=MODEL,
            memory=parse_bytes(args.memory),
            overwrite=True,
        )

    done = measured(path, n, build)
    engine = open_file(path, args.memory)
    sizes = engine.sizes
    return done | {"lists": engine.lists, "largest_list": int(sizes.max()), "distinct": _distinct_of(engine)}


def _distinct_of(engine: Any) -> int:
    """Distinct codes of an index, summed over the lists, as equal codes are in one list."""
    total = 0
    for number, size in enumerate(engine.sizes.tolist()):
        if size:
            total += distinct(engine.codes(number, 0, size))
    return total


def _exact(args: argparse.Namespace, n: int, memory: str) -> Cell:
    """Open and search the index in rows; the answers are kept for the recall of lists."""
    _, path, _ = places(args.folder, n)
    _, _, xq = read_pool(args.folder)
    Path("/proc/self/clear_refs").write_text("5")
    begun = time.perf_counter()
    engine = open_file(path, memory)
    cell: Cell = {"memory": memory, "open_seconds": time.perf_counter() - begun, "searches": []}
    cell["first_seconds"] = clock(lambda: engine.search(xq[-1:], K, threads=args.threads))
    each = float("inf")
    for batch in BATCHES:
        asked = min(batch, max(32, int(args.limit / each))) if batch > 32 else batch
        found: list[Any] = []
        rounds = 3 if batch == 1 else 1
        seconds = min(
            clock(lambda q=xq[:asked], found=found: found.append(engine.search(q, K, threads=args.threads)))  # type: ignore[misc]
            for _ in range(rounds)
        )
        each = seconds / asked
        cell["searches"].append(
            {"batch": batch, "queries_timed": asked, "seconds": seconds, "queries_per_s": 1 / each}
        )
    np.savez(args.folder / f"exact-{n}.npz", D=found[-1][0], I=found[-1][1])
    return cell | {"peak_bytes": peak_bytes(), "threads": args.threads}


def part_disk(args: argparse.Namespace, n: int) -> Cell:
    """Exact search in place within the budget of the build."""
    return _exact(args, n, args.memory)


def part_memory(args: argparse.Namespace, n: int) -> Cell:
    """Exact search with a budget that holds all codes; the first search reads them."""
    return _exact(args, n, args.large_memory)


def part_ivf(args: argparse.Namespace, n: int) -> Cell:
    """Search in lists at several nprobe, recall against the exact answers."""
    _, _, path = places(args.folder, n)
    _, _, xq = read_pool(args.folder)
    held = np.load(args.folder / f"exact-{n}.npz", allow_pickle=False)
    kth = held["D"][:, -1:]
    Path("/proc/self/clear_refs").write_text("5")
    begun = time.perf_counter()
    engine = open_file(path, args.memory)
    cell: Cell = {"memory": args.memory, "open_seconds": time.perf_counter() - begun, "lists": engine.lists}
    cell["searches"] = []
    engine.search(xq[-1:], K, nprobe=1, threads=args.threads)
    for nprobe in (p for p in PROBES if p <= engine.lists):
        for batch in BATCHES:
            few = 16 if batch == 1 else min(batch, len(kth))
            step = 1 if batch == 1 else few
            found: list[Any] = []

            def run(nprobe: int = nprobe, few: int = few, step: int = step, found: list[Any] = found) -> None:
                found.clear()
                found.extend(
                    engine.search(xq[s : s + step], K, nprobe=nprobe, threads=args.threads)[0]
                    for s in range(0, few, step)
                )

            run()  # loads the lists into the system's cache, as in use
            seconds = clock(run)
            D = np.concatenate(found)
            nearest = engine.nearest_lists(xq[:few], nprobe)
            cell["searches"].append(
                {
                    "nprobe": nprobe,
                    "batch": batch,
                    "queries_timed": few,
                    "seconds_a_batch": seconds / (few / step),
                    "queries_per_s": few / seconds,
                    "recall": float((kth[:few] <= D).mean()),
                    "share": float(engine.sizes[nearest].sum(axis=1).mean() / n),
                }
            )
    return cell | {"peak_bytes": peak_bytes(), "threads": args.threads}


RUN: dict[str, Callable[[argparse.Namespace, int], Cell]] = {
    "shards": part_shards,
    "build": part_build,
    "lists": part_lists,
    "disk": part_disk,
    "memory": part_memory,
    "ivf": part_ivf,
}


def markdown(result: dict[str, Any]) -> str:
    """The tables of a result."""
    machine, settings, pool = result["machine"], result["settings"], result["pool"]
    sizes = sorted(result["sizes"].items(), key=lambda item: int(item[0]))
    lines = [
        "# Large indexes",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Faiss {machine['versions']['faiss']}; "
        f"{BITS} bits, k = {K}, {settings['threads']} threads. The machine was shared with other work, at times "
        "much of it, while this ran: compare numbers within a size and part only. "
        "A search in place finds the file in the cache of the system as far as that had room.",
        "",
        f"**The codes are simulated** (see the head of `benchmarks/large.py`): spliced of a pool of {pool['pool']:,} codes "
        "of a trained model; the queries are real. Among as many codes, "
        f"{pool['pool_distinct']:,} of the pool and {pool['spliced_distinct']:,} of the spliced are distinct; a query's "
        f"{K}th score is {pool['pool_hundredth_score']:.3f} and {pool['spliced_hundredth_score']:.3f} on average, its "
        f"median score {pool['pool_median_score']:.3f} and {pool['spliced_median_score']:.3f}.",
        "",
        f"## Building within {settings['memory']}",
        "",
        f"Rows: shards (HDF5; above {HDF5_MOST:,} items index files) to one index of the fastscan form. Lists: that "
        "index to one with lists, assigned by tables. Peak: of the whole process, and above what it had before.",
        "",
        "| items | form | lists | seconds | rows/s | peak MB | above start | file MB | distinct codes |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for n, parts in sizes:
        for name, form in (("build", "rows"), ("lists", "lists")):
            if name in parts:
                c = parts[name]
                share = f"{c['distinct'] / int(n):.1%}" if "distinct" in c else ""
                lines.append(
                    f"| {int(n):,} | {form} | {c.get('lists', '')} | {c['seconds']:.1f} | {c['rows_per_s']:,.0f} | "
                    f"{c['peak_bytes'] / 1e6:,.0f} | {c['peak_bytes_above_start'] / 1e6:,.0f} | "
                    f"{c['file_bytes'] / 1e6:,.0f} | {share} |"
                )
    lines += [
        "",
        "## Exact search",
        "",
        "The smaller budget reads the codes from the file for each batch; the larger one keeps them from the first on. "
        "The first query pays for starting, and with the larger budget for reading all codes.",
        "",
        "| items | budget | open ms | first query s | batch | queries timed | seconds | queries/s | peak MB |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for n, parts in sizes:
        for name in ("disk", "memory"):
            for c in parts.get(name, {}).get("searches", []):
                p = parts[name]
                lines.append(
                    f"| {int(n):,} | {p['memory']} | {p['open_seconds'] * 1e3:.1f} | {p['first_seconds']:.2f} | {c['batch']} | "
                    f"{c['queries_timed']} | {c['seconds']:.3f} | {c['queries_per_s']:,.1f} | {p['peak_bytes'] / 1e6:,.0f} |"
                )
    lines += [
        "",
        f"## Lists, in place within {settings['memory']}",
        "",
        f"Recall: share of the top {K} that score at least the exact {K}th score.",
        "",
        "| items | lists | open ms | nprobe | share of codes | batch | ms a batch | queries/s | recall | peak MB |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for n, parts in sizes:
        for c in parts.get("ivf", {}).get("searches", []):
            p = parts["ivf"]
            lines.append(
                f"| {int(n):,} | {p['lists']} | {p['open_seconds'] * 1e3:.0f} | {c['nprobe']} | {c['share']:.3%} | {c['batch']} | "
                f"{c['seconds_a_batch'] * 1e3:,.1f} | {c['queries_per_s']:,.0f} | {c['recall']:.3f} | {p['peak_bytes'] / 1e6:,.0f} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    """Parse options, compute missing parts, write results."""
    parser = make_parser(__doc__, "large.json", whole=True)
    parser.add_argument("--items", type=numbers, default=(1_000_000,))
    parser.add_argument("--data", required=True, help="features to train on, as gpq train takes them")
    parser.add_argument("--labels")
    parser.add_argument("--folder", type=Path, required=True, help="scratch, on a disk with room")
    parser.add_argument("--steps", type=int, default=800, help="of the training")
    parser.add_argument("--memory", default="2GB", help="budget of builds and of searches in place")
    parser.add_argument("--large-memory", default="12GB", help="budget that holds all codes")
    parser.add_argument(
        "--lists", type=int, default=8192, help="lists at most; else the square root of the items"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a batch; longer ones are cut")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--one", choices=("pool", *PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    faiss.omp_set_num_threads(args.threads)
    if args.one is not None:
        done = make_pool(args) if args.one == "pool" else RUN[args.one](args, args.items[0])
        print(json.dumps(done))
        return
    result: dict[str, Any] = read_results(args.out, {"sizes": {}})
    result["machine"] = describe_machine()
    result["settings"] = {"k": K, "bits": BITS, "memory": args.memory, "threads": args.threads}

    def run(part: str, n: int) -> Cell:
        print(f"{n:,} {part}", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, *sys.argv[1:], "--one", part, "--items", str(n)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise UsageError(f"{part} of {n:,} items failed: {done.stderr.strip()[-600:]}")
        cell: Cell = json.loads(done.stdout.strip().splitlines()[-1])
        return cell

    def keep() -> None:
        save(result, args.out, markdown)

    if "pool" not in result or not (args.folder / "pool.npz").exists():
        result["pool"] = run("pool", POOL)
    for n in args.items:
        parts = result["sizes"].setdefault(str(n), {})
        for part in args.parts.split(","):
            if part not in RUN:
                raise UsageError(f"part {part!r}: choose from {', '.join(PARTS)}")
            if part not in parts:
                parts[part] = run(part, n)
                keep()
    keep()
    print(args.out.with_suffix(".md"))


if __name__ == "__main__":
    run_main(main)
