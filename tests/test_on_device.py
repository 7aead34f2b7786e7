"""Searching in the form for devices: the answers of the CPU, and errors where they cannot be had.

Without a GPU its kernel runs as C++ on the CPU, which is put in the place of a device; with one the tests marked ``gpu`` go by the command
line.
"""

import json

import numpy as np
import pytest
import torch
from commands import done
from gpu_helpers import COMPILER, ON_GPU, placed
from model_factory import make_model

from gpq_faiss import Allow, Deny, MemoryIndex, search
from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.errors import DeviceError, UsageError
from gpq_faiss.faissio.model import read_model
from gpq_faiss.stages.index import index as build_index

N = 6000


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A model, index files of the same codes in every form, and queries."""
    root = tmp_path_factory.mktemp("device")
    model = read_model(make_model(root / "model", M=6))
    rng = np.random.default_rng(5)
    codes = pack_codes(rng.integers(0, 16, (N, 6)), 16)
    codes[: N // 4] = codes[N // 4 : N // 2]  # ties, to be in the order of ids
    ids = rng.permutation(N) * 3 + 2**33
    fingerprint = model.model_fingerprint
    held = MemoryIndex.build(codes, model.codebooks, ids, model_fingerprint=fingerprint)
    source = held.save(root / "source.faiss")
    for kind in ("flat", "fastscan", "ivf"):
        build_index(root / "model", source, root / f"{kind}.faiss", kind=kind)
    np.save(root / "queries.npy", rng.normal(size=(12, 20)).astype(np.float32))
    np.save(root / "where.npy", np.sort(ids)[::7])
    return root


def asked(shop, kind, **options):
    return search(shop / "model", shop / f"{kind}.faiss", str(shop / "queries.npy"), **options)


@pytest.fixture
def on_device(monkeypatch):
    """Searches are those of a device, which is torch's CPU with the GPU's kernel."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr("gpq_faiss.stages.search._device_of", lambda *_: "cpu")
    with placed("kernel"):
        yield


def equal(found, expected):
    assert np.array_equal(found.ids, expected.ids)
    assert found.scores == pytest.approx(expected.scores, abs=1e-6)
    assert np.array_equal(found.query_ids, expected.query_ids)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("flat", {"k": 50, "rows": "3:5", "memory": "64MB"}),
        ("fastscan", {"k": N, "rows": "0:2"}),
        ("ivf", {"k": 20, "where": "deny"}),
        ("flat", {"k": 5, "where": "few"}),
        ("ivf", {"min_score": 1.5, "where": "allow"}),
    ],
    ids=str,
)
def test_a_search_on_a_device_gives_the_answer_of_the_cpu(shop, kind, options, monkeypatch, on_device):
    ids = np.load(shop / "where.npy")
    filters = {"allow": Allow(ids), "deny": Deny(ids), "few": Allow(ids[:3])}
    where = filters.get(options.get("where", ""))
    options = {**options, "where": where}
    found = asked(shop, kind, **options)
    monkeypatch.undo()
    equal(found, asked(shop, kind, **{**options, "memory": None}))
    assert np.isneginf(found.scores[found.ids == -1]).all()
    if where is filters["few"]:
        assert (found.ids == -1).sum() == 12 * 2
    assert found.description.endswith("on cpu")


def test_what_a_device_cannot_do_is_refused(shop, on_device):
    working = "of working memory, 1,000 are allowed: raise memory"
    for options, match in (
        ({"nprobe": 3}, "on a device it is exact"),
        ({"memory": "1kB", "k": 5000}, working),
    ):
        with pytest.raises(UsageError, match=match):
            asked(shop, "flat", **options)


def test_a_gpu_that_torch_or_faiss_lacks_is_never_a_search_on_the_cpu(shop, monkeypatch):
    def searched(*_, **__):
        raise AssertionError("searched on the CPU")

    monkeypatch.setattr(MemoryIndex, "search", searched)
    monkeypatch.setattr("gpq_faiss.stages.search.open_index", searched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="there are 1 GPUs"):
        asked(shop, "flat", device="cuda:7")


@pytest.mark.parametrize("where", ["open_index", "query_vectors"])
def test_a_gpu_without_memory_is_one_line(shop, monkeypatch, on_device, where):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 24 GiB")

    monkeypatch.setattr(f"gpq_faiss.stages.search.{where}", full)
    error = DeviceError if where == "open_index" else torch.OutOfMemoryError
    with pytest.raises(error, match="out of memory") as caught:  # of the network: as gpq encode tells it
        asked(shop, "flat")
    assert ("--memory" in str(caught.value)) == (where == "open_index")


@ON_GPU[0]
@ON_GPU[1]
@pytest.mark.parametrize(
    "options",
    [("-k", 3000, "--memory", "256MB"), ("-k", 10, "--deny-ids", "WHERE"), ("--min-score", 2.5)],
    ids=str,
)
def test_gpq_search_on_a_gpu(shop, options):
    options = tuple(shop / "where.npy" if option == "WHERE" else option for option in options)
    call = "search", shop / "model", shop / "ivf.faiss", shop / "queries.npy", *options, "--format", "json"
    found, expected = (json.loads(done(*call, *device)) for device in (("--device", "cuda"), ()))
    assert found["description"].endswith("on cuda:0")
    for one, other in zip(found["queries"], expected["queries"], strict=True):
        assert (one["id"], one["ids"]) == (other["id"], other["ids"])
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-5)
