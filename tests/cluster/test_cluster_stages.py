"""Encoding, building and searching on two nodes: the products of the plain commands, whatever is killed meanwhile; shards held
by actors answer as one file."""

import json
import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from unittest import mock

import numpy as np
import psutil
import pytest
from commands import content, done, refused
from index_factory import same
from model_factory import make_model
from shard_factory import codebooks, make

from gpq_faiss import Allow, Encoder, MemoryIndex, RowReader, encode, encode_shards, open_data, open_index
from gpq_faiss.cluster.connect import connected
from gpq_faiss.cluster.search import ClusterIndex, live_nodes
from gpq_faiss.cluster.tasks import run_all
from gpq_faiss.errors import DataError, MismatchError, OutputExistsError, UsageError
from gpq_faiss.indexes.manifest import read_manifest, update_manifest
from gpq_faiss.stages import encode as stage
from gpq_faiss.stages.index import _build_shard, index, index_shards

pytest.importorskip("ray", reason="ray is not installed: pip install 'gpq-faiss[ray]'")
import ray
from ray_kills import kill

N, SHARD, BATCH = 6000, 1000, 250


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A model, labelled data and what the plain commands make of them."""
    folder = tmp_path_factory.mktemp("cluster")
    make_model(folder / "model")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, N)
    x = rng.standard_normal((3, 20))[labels] + rng.standard_normal((N, 20))
    np.save(folder / "x.npy", x.astype("f4"))
    np.save(folder / "labels.npy", labels)
    np.save(folder / "ids.npy", rng.permutation(N) * 7)
    np.save(folder / "queries.npy", rng.standard_normal((9, 20)).astype("f4"))
    return folder


def data(shop):
    return f"features:{shop / 'x.npy'}"


def arguments(shop):
    return {"labels": str(shop / "labels.npy"), "ids": str(shop / "ids.npy")}


def encoded(shop, out, ray):
    options = {"data_args": arguments(shop), "shard_items": SHARD, "batch_size": BATCH}
    return encode_shards(shop / "model", data(shop), out, ray=ray, **options)


@pytest.fixture(scope="module")
def codes(shop):
    """The shards, encoded here."""
    return encoded(shop, shop / "codes", None)


def test_the_shards_hold_the_rows_of_the_plain_command(shop, codes):
    dataset = open_data(data(shop), **arguments(shop))
    plain = encode(shop / "model", dataset, shop / "codes.h5", keep_features=False, batch_size=BATCH)
    with RowReader(plain) as reader:
        expected = reader.block(0, N), reader.ids(), reader.labels(0, N)
    parts = []
    for path in codes:
        with RowReader(path) as reader:
            parts.append((reader.block(0, SHARD), reader.ids(), reader.labels(0, SHARD)))
    for column, whole in zip(zip(*parts, strict=True), expected, strict=True):
        np.testing.assert_array_equal(np.concatenate(column), whole)
    assert encoded(shop, shop / "codes", None) == codes  # nothing is made again
    with pytest.raises(OutputExistsError, match="another run"):
        encode_shards(shop / "model", data(shop), shop / "codes", shard_items=SHARD, batch_size=BATCH)


@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_shards_that_are_built_apart_answer_as_one_index_of_all(shop, codes, kind):
    options = {"kind": kind, "memory": "20MB"}
    single = index(shop / "model", codes, shop / f"{kind}.faiss", **options)
    manifest = index_shards(shop / "model", codes[:4], shop / f"{kind}.json", **options)
    assert read_manifest(manifest).ntotal == 4 * SHARD
    index_shards(shop / "model", codes[4:], manifest, add=True, **options)
    rest = (shop / "queries.npy", "--format", "json", "--memory", "2MB")
    found = [json.loads(done("search", shop / "model", path, *rest)) for path in (single, manifest)]
    assert found[0]["queries"] == found[1]["queries"]
    assert found[0]["queries"][0]["ids"]
    assert json.loads(done("info", manifest, "--format", "json"))["ntotal"] == N
    removed = read_manifest(manifest).shards[0]
    index_shards(shop / "model", [], manifest, remove=[removed.file])
    assert read_manifest(manifest).ntotal == N - removed.ntotal


@contextmanager
def killing(strike, found):
    """Kill once a file is there."""
    killed, ended = threading.Event(), threading.Event()

    def watch():
        while not ended.is_set() and not any(found()):
            time.sleep(0.01)
        if not ended.is_set():
            strike()
            killed.set()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
        assert killed.is_set()
    finally:
        ended.set()
        watching.join()


def test_encoding_outlives_a_killed_worker(nodes, shop, codes, tmp_path):
    def strike():
        for worker in nodes.busy()[:1] or nodes.workers():
            kill(worker.pid)

    with killing(strike, lambda: tmp_path.glob("codes/codes-*.h5")):
        made = encoded(shop, tmp_path / "codes", nodes.address)
    assert [path.name for path in made] == [path.name for path in codes]
    assert content(tmp_path / "codes") == content(shop / "codes")


def test_a_call_that_is_run_twice_at_a_time_writes_once(nodes, shop, codes, tmp_path):
    call = (str(codes[0]), str(shop / "model"), str(tmp_path), ("flat", 20 << 20, True))
    once = dict(run_all(_build_shard, [call], None))
    expected = content(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    again = dict(run_all(_build_shard, [call] * 4, nodes.address))
    assert again == dict.fromkeys(range(4), once[0])
    assert content(tmp_path) == expected


def test_a_worker_loads_the_model_once(nodes, shop, tmp_path, monkeypatch):
    loads = tmp_path / "loads"

    def counted(*call):
        load = Encoder.load

        def noted(*args, **options):
            with loads.open("a") as file:
                file.write(f"{os.getpid()}\n")
            return load(*args, **options)

        with mock.patch.object(Encoder, "load", noted):
            return stage._encode_shard(*call)

    monkeypatch.setattr(stage, "_encode_shard", counted)
    options = {"shard_items": SHARD, "batch_size": BATCH, "workers": 1}
    encode_shards(shop / "model", data(shop), tmp_path / "codes", ray=nodes.address, **options)
    loaded = loads.read_text().split()
    assert len(set(loaded)) == len(loaded) < N // SHARD


def test_a_task_on_a_gpu_asks_for_one_and_its_worker_is_kept(nodes, shop, tmp_path, monkeypatch):
    asked = []

    def run(function, calls, address, **options):
        asked.append((options["gpus"], calls[0][0][1]))
        return enumerate(stop - start for *_, start, stop in calls)

    def pid():
        return os.getpid(), bool(os.environ.get("CUDA_VISIBLE_DEVICES"))

    with monkeypatch.context() as patched:
        patched.setattr(stage, "run_all", run)
        for n, device in enumerate(("cpu", "auto", "cuda", "cuda:1", "auto")):
            if n == 4:  # on a cluster without a GPU
                patched.setattr(ray, "cluster_resources", dict)
            encode_shards(shop / "model", data(shop), tmp_path / str(n), ray=nodes.address, device=device)
    assert asked == [(0, "cpu"), (1, "cuda"), (1, "cuda"), (1, "cuda"), (0, "cpu")]
    found = dict(run_all(pid, [()] * 4, nodes.address, gpus=1, workers=1))
    assert len(found) == 4
    assert len(set(found.values())) == 1
    assert found[0][1]


def test_a_model_or_data_that_are_replaced_are_read_again(shop, tmp_path):
    def made(name):
        paths = encode_shards(tmp_path / "model", f"features:{tmp_path / 'x.npy'}", tmp_path / name)
        with RowReader(paths[0]) as reader:
            return reader.header.model_fingerprint, reader.block(0, reader.ntotal).tolist()

    x = np.load(shop / "x.npy")[:500]
    np.save(tmp_path / "x.npy", x)
    shutil.copytree(shop / "model", tmp_path / "model")
    first = made("first")
    shutil.rmtree(tmp_path / "model")
    make_model(tmp_path / "model", seed=5)
    second = made("second")
    assert second[0] == Encoder.load(tmp_path / "model").fingerprint != first[0]
    np.save(tmp_path / "x.npy", x[::-1])
    assert made("third")[1] == second[1][::-1]


def test_results_come_in_order_and_an_error_is_the_one_of_the_call(nodes, monkeypatch):
    def square(n):
        if n == 3:
            raise DataError("three cannot be squared: take another")
        return n * n

    calls = [(n,) for n in (5, 1, 4, 2)]
    for address, workers in ((nodes.address, 2), (None, None)):
        assert dict(run_all(square, calls, address, workers=workers)) == dict(enumerate([25, 1, 16, 4]))
    with pytest.raises(DataError, match=r"^three cannot be squared: take another$"):
        dict(run_all(square, [(n,) for n in range(6)], nodes.address))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'gpq-faiss\[ray\]'"), connected("local"):
        pass


def test_the_commands_run_on_a_cluster(nodes, shop, tmp_path):
    model, address = shop / "model", nodes.address
    there = ("--device", "cpu", "--ray", f"{address},shard_items=3000")
    out = done("encode", model, data(shop), *there, "--out", tmp_path / "codes")
    assert "2 shards" in out  # of whole batches
    shards = sorted((tmp_path / "codes").glob("*.h5"))
    manifest = tmp_path / "m.json"
    done("index", model, *shards, "--ray", address, "--out", manifest)
    search = ("search", model, manifest, shop / "queries.npy", "--format", "json")
    there = json.loads(done(*search, "--ray", f"{address},workers=2"))
    here = json.loads(done(*search))
    assert there["queries"] == here["queries"]
    assert "workers of a cluster" in there["description"]
    lost = read_manifest(manifest).shards[0].file
    (tmp_path / lost).unlink()
    assert lost in refused(*search, "--ray", f"{address},workers=1")
    assert lost in refused("info", manifest)
    assert "--ray" in refused(*search, "--ray", ",workers=2", code=2)
    assert "manifest" in refused("search", model, shards[0], shop / "queries.npy", "--ray", address)


def test_building_outlives_a_killed_node(nodes, shop, codes, tmp_path):
    plain = index_shards(shop / "model", codes, tmp_path / "plain.json", kind="ivf")
    with killing(nodes.kill_second, lambda: tmp_path.glob("spread.shards/shard-*.faiss")):
        spread = index_shards(shop / "model", codes, tmp_path / "spread.json", ray=nodes.address, kind="ivf")
    assert content(tmp_path / "spread.shards") == content(tmp_path / "plain.shards")
    one, other = (json.loads(path.read_text().replace("spread.", "plain.")) for path in (spread, plain))
    assert one.pop("checksum") != other.pop("checksum")  # as the files have other names
    assert one == other


def test_the_service_answers_from_the_shards_and_takes_new_ones(cluster, shop, codes, tmp_path, monkeypatch):
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from gpq_faiss.serve import live as holding
    from gpq_faiss.serve import service as module
    from gpq_faiss.serve.app import create_app
    from gpq_faiss.serve.guard import Settings
    from gpq_faiss.serve.live import LiveIndex

    if cluster.second:
        cluster.kill_second()
    while len(live_nodes(ray)) > 1:
        time.sleep(0.1)
    manifest = index_shards(shop / "model", codes[:4], tmp_path / "m.json")
    encoder = Encoder.load(shop / "model")
    live = LiveIndex(manifest, 2, encoder.codebooks_fingerprint, ray=cluster.address)
    monkeypatch.setattr(module, "WATCH", 3600.0)
    queries = np.load(shop / "queries.npy")

    def answers():
        """Whether the service answers what one process finds in the shards that are there now."""
        answer = client.post("/search", json={"features": queries[0].tolist(), "k": 7})
        assert answer.status_code == 200, answer.text
        results = answer.json()["results"]
        assert all(row["labels"][0] in ("0", "1", "2") for row in results)
        with open_index(manifest) as one:
            D, found = one.search(encoder.embed(queries[:1], queries=True)[0], 7)
        return [(row["id"], row["score"]) for row in results] == list(
            zip(found[0].tolist(), D[0].tolist(), strict=True)
        )

    app = create_app(module.Service(encoder, live), Settings(rate=0))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert answers()
        item = client.post("/search", json={"id": int(np.load(shop / "ids.npy")[0]), "k": 1})
        assert item.status_code == 200, item.text
        assert not live.stale
        index_shards(shop / "model", codes[4:], manifest, add=True)
        assert live.stale
        assert client.post("/search", json={"id": item.json()["results"][0]["id"]}).status_code == 200
        live.maintain()
        assert not live.stale
        assert answers()
        cluster.two()
        assert live.stale
        live.maintain()
        assert answers()
        assert not live.stale
        with monkeypatch.context() as patched:  # as many nodes, but others
            patched.setattr(holding, "live_nodes", lambda ray: [f"{node}x" for node in live_nodes(ray)])
            assert live.stale


# Searching ------------------------------------------------------------------------------------------------------------


def pids(index):
    asked = [actor.__ray_call__.remote(lambda _: __import__("os").getpid()) for actor, _ in index._parts]
    return index._ray.get(asked)


def test_two_nodes_answer_as_one_file_whatever_is_killed(nodes, tmp_path):
    made = make(tmp_path, 3, 400, 5, form="ivf")
    with open_index(made.manifest) as one, ClusterIndex(made.manifest, nodes.address) as spread:
        assert (spread.ntotal, spread.width) == (400, one.width)
        assert len(set(pids(spread))) == 2
        for where in (None, Allow(made.ids[::3]), lambda ids: ids % 2 == 0):
            expected = one.search(made.queries, 50, where=where)
            assert same(spread.search(made.queries, 50, where=where), expected)
            expected = one.range_search(made.queries, 0.5, where=where)
            assert same(spread.range_search(made.queries, 0.5, where=where), expected)
        assert same(spread.search(made.queries, 50, nprobe=1), one.search(made.queries, 50, nprobe=1))
        assert np.array_equal(spread.bound(made.queries, 50, 1), one.bound(made.queries, 50, 1))
        item = int(made.ids[7])
        np.testing.assert_array_equal(spread.code_of(item), one.code_of(item))

        expected = one.search(made.queries, 20)
        second = {process.pid for process in nodes.family(nodes.second)}
        (killed,) = second.intersection(pids(spread))
        kill(killed)
        assert same(spread.search(made.queries, 20), expected)
        nodes.kill_second()  # where the same actor is again
        assert same(spread.search(made.queries, 20), expected)
        nodes.two()
        with ClusterIndex(made.manifest, nodes.address) as again:  # the node that joined has its part
            assert same(again.search(made.queries, 20), expected)
            assert len(live_nodes(again._ray)) == 2
            assert len(again._parts) == 2


def test_a_shard_that_is_missing_or_of_another_model_is_named(nodes, tmp_path):
    made = make(tmp_path, 7, 100, 3)
    other = MemoryIndex.build(np.zeros((3, 2), np.uint8), codebooks(5), np.arange(3))
    other.save(tmp_path / "shards" / "1.faiss", overwrite=True)
    with pytest.raises(MismatchError, match=r"shards/1\.faiss is of another model"):
        ClusterIndex(made.manifest, nodes.address, workers=1)
    (tmp_path / "shards" / "1.faiss").unlink()
    with pytest.raises(DataError, match=r"shards/1\.faiss is missing"):
        ClusterIndex(made.manifest, nodes.address, workers=1)


def test_a_shard_is_replaced_while_searches_go_on_and_what_is_no_longer_searched_ends(nodes, tmp_path):
    made = make(tmp_path, 8, 300, 4)
    old, wrong, end = [ClusterIndex(made.manifest, nodes.address, workers=1)], [], threading.Event()
    before = old[0].search(made.queries, 30)

    def ask():
        try:
            while not end.is_set():
                assert same(old[0].search(made.queries, 30), before)
        except Exception as error:
            wrong.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    new = MemoryIndex.build(np.full((5, 2), 7, np.uint8), codebooks(), np.arange(10**8, 10**8 + 5))
    update_manifest(made.manifest, [new.save(tmp_path / "shards" / "new.faiss")], ["shards/0.faiss"])
    now = ClusterIndex(made.manifest, nodes.address, workers=1, timeout=0.5)
    ((actor, _),) = now._parts
    busy = actor.__ray_call__.remote(lambda _: __import__("time").sleep(2))
    with pytest.raises(DataError, match=r"no node answers for the shards shards/.* in 0\.5 s: start nodes"):
        now.search(made.queries, 5)
    now._ray.get(busy)
    now._timeout = old[0]._timeout
    with open_index(made.manifest) as one:
        assert same(now.search(made.queries, 30), one.search(made.queries, 30))
    end.set()
    asking.join()
    assert not wrong
    actors = [psutil.Process(*pids(index)) for index in (*old, now)]
    old.clear()  # as a service leaves it to its last searches
    del actor
    now.close()
    assert not psutil.wait_procs(actors, timeout=30)[1]
