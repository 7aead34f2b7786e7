"""Damage to index files: where it is noticed, and that nothing is built of it or answered from it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import faiss
import numpy as np
import pytest
from index_factory import IDS, codebooks, features, make_model, make_rows

from gpq_faiss.codes.codebooks import inject
from gpq_faiss.codes.encode import encode
from gpq_faiss.errors import DataError, MismatchError
from gpq_faiss.faissio.header import row_header
from gpq_faiss.faissio.io import load_index, sidecar_path
from gpq_faiss.stages.index import index
from gpq_faiss.stages.info import info

FORMS = ["flat", "fused", "fastscan", "ivf"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", codebooks())


@pytest.fixture
def codes(tmp_path: Path) -> Path:
    return make_rows(tmp_path / "codes.h5", "codes", encode(features(), codebooks()), IDS, codebooks())


def flip_codes(path: Path, places: int = 2) -> None:
    """Change bytes of codes: any value is a code, so nothing but the hash can tell."""
    data = bytearray(path.read_bytes())
    before = faiss.read_index(str(path))
    at = len(data) - (
        40 if path.name.startswith("ivf") else len(IDS) * 8 + 600
    )  # lists of FastScan end with codes
    for place in range(at, at + places):
        data[place] ^= 0x11
    path.write_bytes(data)
    assert faiss.read_index(str(path)).ntotal == before.ntotal


@pytest.mark.parametrize("memory", [None, "32MB"])
@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("source", FORMS)
def test_no_index_is_built_of_a_damaged_one(
    model: Path, codes: Path, tmp_path: Path, source: str, target: str, memory: str | None
) -> None:
    made = index(model, codes, tmp_path / f"{source}.faiss", kind=source)  # type: ignore[arg-type]
    flip_codes(made)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(MismatchError, match=rf"{source}\.faiss is not the file that"):
        index(model, made, tmp_path / "out.faiss", kind=target, memory=memory)  # type: ignore[arg-type]
    assert sorted(tmp_path.iterdir()) == before
    # ids are hashed too
    good = index(model, codes, tmp_path / f"{source}.faiss", kind=source, overwrite=True)  # type: ignore[arg-type]
    data = bytearray(good.read_bytes())
    data[-6] ^= 0x40
    good.write_bytes(data)
    with pytest.raises(DataError, match=rf"{source}\.faiss"):
        index(model, good, tmp_path / "out.faiss", kind=target, memory=memory)  # type: ignore[arg-type]
    assert sorted(tmp_path.iterdir()) == before


def test_a_damaged_shard_leaves_the_finished_ones_to_the_next_build(
    model: Path, codes: Path, tmp_path: Path
) -> None:
    x, Z = features(), codebooks()
    other = make_rows(tmp_path / "other.h5", "features", x[:200], IDS[:200] + 1, Z)
    first, second = (
        index(model, rows, tmp_path / f"flat-{i}.faiss") for i, rows in enumerate((other, codes))
    )
    sound = second.read_bytes()
    flip_codes(second)
    with pytest.raises(MismatchError, match=r"flat-1\.faiss"):
        index(model, [first, second], tmp_path / "out.faiss")
    assert (tmp_path / ".out.faiss.building" / "progress.json").exists()
    second.write_bytes(sound)
    index(model, [first, second], tmp_path / "out.faiss")
    assert not (tmp_path / ".out.faiss.building").exists()
    assert load_index(tmp_path / "out.faiss")[0].ntotal == 700


def test_an_index_of_any_size_is_compared_with_its_hash(tmp_path: Path) -> None:
    """A file of 257 MiB, nearly all of it a hole."""
    n = 257 << 20
    Z = np.ones((2, 16, 1), np.float32)
    head, count, tail = row_header("flat", Z, n, mapped=False)
    path = tmp_path / "big.faiss"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + count)
        file.seek(len(head) + count)
        file.write(tail)
    from gpq_faiss.faissio.io import sidecar_document
    from gpq_faiss.files import write_json

    wrong = sidecar_document("flat", n, Z, path.stat().st_size, "0" * 64, None, {})
    write_json(sidecar_path(path), wrong)
    with pytest.raises(MismatchError, match="damaged or was changed"):
        info(path)


def test_info_says_whether_there_was_a_hash_to_compare_with(model: Path, codes: Path, tmp_path: Path) -> None:
    path = index(model, codes, tmp_path / "i.faiss")
    assert info(path)["verified"] is True
    sidecar_path(path).unlink()
    assert info(path)["verified"] is False
    faiss.write_index(inject(codebooks()), str(tmp_path / "plain.faiss"))
    assert info(tmp_path / "plain.faiss")["verified"] is False


OVERWRITTEN = """
    import os, shutil, sys, threading, time
    import faiss
    import numpy as np
    from gpq_faiss.errors import DataError
    from gpq_faiss.codes.bits import pack_codes
    from gpq_faiss.indexes.file import open_file
    from gpq_faiss.faissio.storage import FORMS
    from gpq_faiss.indexes.memory import MemoryIndex

    faiss.omp_set_num_threads(1)
    rng = np.random.default_rng(0)
    n, M = 60_000, 6
    Z = rng.normal(size=(M, 16, 12))
    Z = (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)
    xq = rng.normal(size=(5, M * 12)).astype(np.float32)
    codes, ids = pack_codes(rng.integers(0, 16, (n, M)), 16), rng.permutation(n) * 3

    def searches(engine):
        while True:
            yield engine.search(xq, 20)[1]
            yield engine.range_search(xq, 2.0)[2]

    def overwrite(way, delay):
        time.sleep(delay)
        os.truncate("i.faiss", 30_000) if way == "truncate" else shutil.copyfile(way, "i.faiss")

    def interrupted(way):
        shutil.copyfile("sound", "i.faiss")
        time.sleep(0.02)  # beyond the grain of file times
        with open_file("i.faiss", "3MB") as engine:
            found = searches(engine)
            start = time.perf_counter()
            expected = [next(found), next(found)]
            delay = float(rng.random()) * (time.perf_counter() - start)
            thread = threading.Thread(target=overwrite, args=(way, delay))
            thread.start()
            try:
                for number in range(200):
                    assert np.array_equal(next(found), expected[number % 2]), "another answer"
                raise SystemExit("it went on searching a file that had changed")
            except DataError as error:
                assert "i.faiss was changed while it was in use" in str(error), error
            thread.join()

    for form in FORMS:
        for own in (True, False):
            for name, of in (("sound", codes), ("same", codes[::-1]), ("short", codes[: n // 2])):
                MemoryIndex.build(of, Z, ids[: len(of)] if own else None).save(name, form, overwrite=True)
            os.remove("sound.json")
            for way in sys.argv[1:] * 2:
                interrupted(way)
    print("all ended in one line")
"""


@pytest.mark.parametrize("ways", [["truncate"], ["same", "short"]])
def test_a_file_that_is_overwritten_while_it_is_searched_ends_in_one_line(
    tmp_path: Path, ways: list[str]
) -> None:
    """Truncated, or another file copied over it: never a signal, never the answers of something else."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OVERWRITTEN), *ways],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "all ended in one line\n"), done.stderr[-2000:]


CLAIMS = """
    import resource, struct
    from pathlib import Path
    import faiss
    import numpy as np
    from gpq_faiss.errors import DataError
    from gpq_faiss.codes.codebooks import inject
    from gpq_faiss.indexes.file import open_file
    from gpq_faiss.faissio.io import load_index
    from gpq_faiss.faissio.storage import FORMS, faiss_index

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    rng = np.random.default_rng(0)
    Z = rng.normal(size=(3, 16, 12))
    Z = (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)
    codes = np.zeros((60, 2), np.uint8)
    files = [faiss.serialize_index(faiss_index(codes, None, Z, form)).tobytes() for form in FORMS]
    path, refused = Path("i.faiss"), 0
    for reader in (load_index, open_file):
        reader_peak = 0
        for data in files:
            for sizes in (struct.pack("<QQQ", 36, 3, 4), struct.pack("<QQQ", 48, 2, 8), struct.pack("<QQQ", 36, 2, 4)):
                if sizes not in data:
                    continue
                at = data.index(sizes)
                for claimed in ((1, 1 << 24, 1), (1, 1, 1 << 24), (1 << 22, 1, 1), (1, 1, 5), (8, 8, 2)):
                    lie = [a * b for a, b in zip(struct.unpack("<QQQ", sizes), claimed)]
                    path.write_bytes(data[:at] + struct.pack("<QQQ", *lie) + data[at + 24 :])
                    before = peak()
                    try:
                        reader(path)
                    except DataError as error:
                        assert "\\n" not in str(error)
                        refused += 1
                    assert peak() - before < 100e6, (reader.__name__, lie, peak() - before)
    assert refused == 2 * 4 * 5, refused
"""


def test_what_a_header_claims_is_not_allocated(tmp_path: Path) -> None:
    """Dimensions, codebooks and bits far beyond the file: refused within 100 MB."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CLAIMS)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
