"""Index files: bit for bit there and back, read by plain Faiss, and every kind of damage refused in one line."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import faiss
import numpy as np
import pytest

from gpq_faiss.codes.codebooks import inject, inject_fused
from gpq_faiss.codes.encode import decode, encode
from gpq_faiss.errors import DataError, MismatchError, OutputExistsError
from gpq_faiss.faissio.io import load_index, read_sidecar, save_index, sidecar_path
from gpq_faiss.faissio.layout import layout_of
from gpq_faiss.indexes.opening import of_faiss

M, K, d, n = 3, 16, 12, 60
IDS = np.arange(n)[::-1] * 5 + 2**40


def codebooks(seed: int = 0, K: int = K) -> np.ndarray:
    Z = np.random.default_rng(seed).normal(size=(M, K, d))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def vectors(count: int = n) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, M * d)).astype(np.float32)


def filled(K: int = K) -> object:
    index = faiss.IndexIDMap2(inject(codebooks(K=K)))
    index.add_with_ids(vectors(), IDS)
    return index


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_index(filled(), tmp_path / "index.faiss", model_fingerprint="m" * 16, extra={"a": 1})


@pytest.mark.parametrize("K", [4, 8, 16, 32, 64, 128, 256])
def test_codes_codebooks_and_ids_survive_bit_for_bit(tmp_path: Path, K: int) -> None:
    Z = codebooks(K=K)
    codes = encode(vectors(), Z)
    layout, sidecar = load_index(save_index(filled(K), tmp_path / "i.faiss", model_fingerprint="abc"))
    assert np.array_equal(layout.codes(), codes)
    assert np.array_equal(layout.ids(), IDS)
    assert np.array_equal(layout.codebooks, Z)
    assert sidecar["codebooks_fingerprint"] == layout.fingerprint
    assert (sidecar["ntotal"], sidecar["codebooks"], sidecar["codewords"], sidecar["subdim"]) == (n, M, K, d)
    assert sidecar["model_fingerprint"] == "abc"


def test_the_file_is_what_plain_faiss_writes(saved: Path, tmp_path: Path) -> None:
    faiss.write_index(filled(), str(tmp_path / "plain"))
    assert saved.read_bytes() == (tmp_path / "plain").read_bytes()


def test_fused_and_empty_indexes_are_kept(tmp_path: Path) -> None:
    Z = codebooks()
    fused = inject_fused(Z)
    fused.add_sa_codes(encode(vectors(), Z))
    index, sidecar = load_index(save_index(fused, tmp_path / "fused.faiss"))
    assert sidecar["kind"] == "fused"
    assert np.array_equal(index.codebooks, Z)
    empty, sidecar = load_index(save_index(inject(Z), tmp_path / "empty.faiss"))
    assert (sidecar["kind"], sidecar["ntotal"], empty.ntotal) == ("flat", 0, 0)
    assert sidecar["codebooks_fingerprint"] == index.fingerprint


def test_a_file_of_plain_faiss_needs_no_sidecar(saved: Path) -> None:
    stated = read_sidecar(saved)
    sidecar_path(saved).unlink()
    assert read_sidecar(saved) is None
    index, sidecar = load_index(saved)
    assert index.ntotal == n
    assert sidecar.keys() == stated.keys()
    assert sidecar["codebooks_fingerprint"] == stated["codebooks_fingerprint"]
    assert sidecar["model_fingerprint"] is None


def test_a_process_without_this_package_uses_the_file(tmp_path: Path) -> None:
    """read_index, add, add_with_ids, search, reconstruct, write again: then it comes back unharmed."""
    Z = codebooks()
    path = save_index(inject(Z), tmp_path / "empty.faiss")
    np.save(tmp_path / "x.npy", vectors())
    script = """
        import sys
        sys.modules["gpq_faiss"] = None  # importing it would fail
        import faiss, numpy as np
        x = np.load("x.npy")
        index = faiss.read_index("empty.faiss")
        assert index.is_trained and index.ntotal == 0 and index.metric_type == faiss.METRIC_INNER_PRODUCT
        index.add(x)
        D, I = index.search(x[:5], 60)
        np.savez("flat.npz", D=D, I=I, codes=index.sa_encode(x))
        mapped = faiss.IndexIDMap2(faiss.read_index("empty.faiss"))
        mapped.add_with_ids(x, np.arange(60) * 10**10)
        assert sorted(mapped.search(x[:1], 60)[1][0]) == [i * 10**10 for i in range(60)]
        assert np.allclose(mapped.reconstruct(3 * 10**10), index.reconstruct(3))
        mapped.remove_ids(np.array([0]))
        faiss.write_index(mapped, "mapped.faiss")
        assert not any(name.startswith("gpq_faiss.") for name in sys.modules)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, check=True, env=_environment()
    )
    assert path.exists()
    result = np.load(tmp_path / "flat.npz")
    codes = encode(vectors(), Z)
    assert np.array_equal(result["codes"], codes)
    truth = vectors()[:5] @ decode(codes, Z).T
    assert np.abs(np.take_along_axis(truth, result["I"], axis=1) - result["D"]).max() < 1e-4
    assert (np.diff(result["D"], axis=1) <= 0).all()
    layout, _ = load_index(tmp_path / "mapped.faiss")
    assert np.array_equal(layout.codes(), codes[1:])
    assert np.array_equal(layout.ids(), np.arange(1, n) * 10**10)


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def test_an_existing_index_or_sidecar_is_not_replaced(saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(OutputExistsError):
        save_index(inject(codebooks(1)), saved)
    saved.rename(saved.with_name("elsewhere"))
    with pytest.raises(OutputExistsError):
        save_index(inject(codebooks(1)), saved)
    saved.with_name("elsewhere").rename(saved)
    assert saved.read_bytes() == before
    save_index(inject(codebooks(1)), saved, overwrite=True)
    assert load_index(saved)[1]["ntotal"] == 0
    assert sorted(p.name for p in saved.parent.iterdir()) == ["index.faiss", "index.faiss.json"]


def test_a_full_disk_leaves_the_old_files(saved: Path) -> None:
    """A limit on file size is the nearest thing to a full disk that a test can have."""
    before = saved.read_bytes(), sidecar_path(saved).read_bytes()
    big = inject(codebooks())
    big.add_sa_codes(np.zeros((200_000, 2), np.uint8))
    old_limit, old_handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old_limit[1]))
    try:
        with pytest.raises(DataError, match="cannot write") as caught:
            save_index(big, saved, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert str(saved) in str(caught.value)
    assert (saved.read_bytes(), sidecar_path(saved).read_bytes()) == before
    assert len(list(saved.parent.iterdir())) == 2


def test_limits_of_faiss_are_restored(saved: Path) -> None:
    def limits() -> tuple[int, int]:
        return faiss.get_deserialization_vector_byte_limit(), faiss.get_deserialization_loop_limit()

    before = limits()
    load_index(saved)
    assert limits() == before
    saved.write_bytes(saved.read_bytes()[:-1])
    sidecar_path(saved).unlink()
    with pytest.raises(DataError):
        load_index(saved)
    assert limits() == before


def test_a_sidecar_of_another_index_is_a_mismatch(saved: Path, tmp_path: Path) -> None:
    other = save_index(inject(codebooks(1)), tmp_path / "other.faiss")
    mine = json.loads(sidecar_path(saved).read_text())
    shutil.copy(sidecar_path(other), sidecar_path(saved))
    with pytest.raises(MismatchError, match="not the file that"):
        load_index(saved)
    # With the same bytes, what the index holds still tells.
    for key, value in (("codebooks_fingerprint", "0" * 16), ("ntotal", 59), ("kind", "fused")):
        sidecar_path(saved).write_text(json.dumps({**mine, key: value}))
        with pytest.raises(MismatchError, match="different indexes"):
            load_index(saved)


def test_verify_can_be_chosen(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[-n * 8 - 40] ^= 1  # a code, of which every value is possible
    saved.write_bytes(data)
    assert load_index(saved, verify=False)[0].ntotal == n
    with pytest.raises(MismatchError):
        load_index(saved)


@pytest.mark.parametrize("damage", ["no JSON", "no object", "no key", "wrong type", "other version"])
def test_a_damaged_sidecar_is_refused(saved: Path, damage: str) -> None:
    sidecar = sidecar_path(saved)
    document = json.loads(sidecar.read_text())
    text = {
        "no JSON": sidecar.read_text()[:50],
        "no object": "[1]",
        "no key": json.dumps({k: v for k, v in document.items() if k != "kind"}),
        "wrong type": json.dumps({**document, "ntotal": "60"}),
        "other version": json.dumps({**document, "format_version": 99}),
    }[damage]
    sidecar.write_text(text)
    with pytest.raises(DataError, match=r"index\.faiss\.json"):
        load_index(saved)


def test_files_that_are_no_index_are_refused(tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(DataError, match=message) as caught:
            load_index(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    path = tmp_path / "f.faiss"
    refused(path, "not found")
    refused(tmp_path, "folder")
    path.touch()
    refused(path, "empty")
    path.write_bytes(b"Ix")
    refused(path, "no product-quantised codes")
    path.write_text("hello, world\n" * 10)
    refused(path, "not a Faiss index")
    flat = faiss.IndexFlatIP(4)
    faiss.write_index(flat, str(path))
    refused(path, "type 'IxFI'")
    faiss.write_index(faiss.IndexIDMap2(flat), str(path))
    refused(path, "type 'IxFI'")


def test_indexes_that_contradict_gpq_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.faiss"

    def refused(index: object, message: str) -> None:
        faiss.write_index(index, str(path))
        with pytest.raises(DataError, match=message):
            load_index(path)
        with pytest.raises(DataError, match=message):
            save_index(index, tmp_path / "out.faiss")
        assert not (tmp_path / "out.faiss").exists()

    x = vectors(400)
    l2 = faiss.IndexPQ(M * d, M, 4)
    l2.train(x)
    refused(l2, "metric")
    refused(faiss.IndexPQ(M * d, M, 4, faiss.METRIC_INNER_PRODUCT), "not trained")
    plain = faiss.IndexPQ(M * d, M, 4, faiss.METRIC_INNER_PRODUCT)
    plain.train(x)
    refused(plain, "norm")
    polysemous = inject(codebooks())
    polysemous.search_type = faiss.IndexPQ.ST_polysemous
    refused(polysemous, "polysemous")


def test_contradictions_inside_a_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.faiss"
    repeated = faiss.IndexIDMap(inject(codebooks()))
    repeated.add_with_ids(vectors(), np.arange(n) // 2)
    faiss.write_index(repeated, str(path))
    with pytest.raises(DataError, match="id 0 occurs more than once"):
        load_index(path)
    spare = inject(codebooks())
    spare.add_sa_codes(np.full((4, 2), 255, np.uint8))
    faiss.write_index(spare, str(path))
    with pytest.raises(DataError, match="beyond the last codebook"):
        load_index(path)
    short = faiss.IndexIDMap(inject(codebooks()))
    short.add_with_ids(vectors(), np.arange(n))
    faiss.copy_array_to_vector(np.arange(n - 1), short.id_map)
    with pytest.raises(DataError, match="59 ids contradict 60"):
        layout_of(short)


def test_mutated_files_never_crash(tmp_path: Path) -> None:
    """Without a sidecar Faiss must read what comes: in a process of its own, 400 mutants of three index files."""
    faiss.write_index(filled(), str(tmp_path / "mapped"))
    faiss.write_index(inject(codebooks()), str(tmp_path / "empty"))
    faiss.write_index(of_faiss(filled()).to_faiss("ivf"), str(tmp_path / "lists"))
    faiss.write_index(faiss.index_factory(M * d, "Flat"), str(tmp_path / "foreign"))
    script = f"""
        import numpy as np, resource, signal
        from pathlib import Path
        from gpq_faiss.errors import GpqError
        from gpq_faiss.faissio.io import load_index
        from gpq_faiss.indexes.opening import of_faiss
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        rng, xq = np.random.default_rng(0), np.ones((2, {M * d}), np.float32)
        counts = dict(refused=0, read=0)
        for name in ("mapped", "lists", "empty", "foreign"):
            data = Path(name).read_bytes()
            for case in range(400 if name == "mapped" else 100):
                broken = bytearray(data)
                if case % 4 == 0:
                    del broken[rng.integers(len(data)):]
                else:
                    # mostly where the sizes are: the headers, and the lengths before codes and ids
                    spans = [(0, 112), (100 + {M * K * d * 4}, 140 + {M * K * d * 4}), (len(data) - {n * 8 + 40}, len(data))]
                    low, high = spans[rng.integers(3)]
                    for _ in range(rng.integers(1, 4)):
                        place = min(max(0, int(rng.integers(low, high))), len(data) - 1)
                        broken[place] = rng.integers(256) if case % 2 else broken[place] ^ (1 << rng.integers(8))
                Path("mutant").write_bytes(broken)
                signal.alarm(20)
                try:
                    index, _ = load_index("mutant")
                    if index.ntotal:
                        of_faiss(index.index).search(xq, 3)
                    counts["read"] += 1
                except GpqError as error:
                    assert "\\n" not in str(error), error
                    counts["refused"] += 1
        assert counts["read"] > 30 and counts["refused"] > 200, counts
    """
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=_environment() | {"PYTHONPATH": str(root)},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
