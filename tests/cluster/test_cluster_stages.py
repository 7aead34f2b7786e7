"""Encoding, building, searching and evaluating on two nodes: the products of the plain commands, whatever is killed meanwhile."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import done, refused
from model_factory import make_model

from gpq_faiss.cluster.tasks import run_all
from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import DataError, OutputExistsError, UsageError
from gpq_faiss.indexes.manifest import read_manifest
from gpq_faiss.stages import encode as stage
from gpq_faiss.stages.encode import encode, encode_shards
from gpq_faiss.stages.evaluate import evaluate
from gpq_faiss.stages.index import _build_shard, index, index_shards
from gpq_faiss.store import RowReader

pytest.importorskip("ray", reason="ray is not installed: pip install 'gpq-faiss[ray]'")
from ray_kills import Nodes, kill

N, SHARD, BATCH = 6000, 1000, 250


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, labelled data and what the plain commands make of them."""
    folder = tmp_path_factory.mktemp("cluster")
    make_model(folder / "model")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, N)
    np.save(
        folder / "x.npy", (rng.standard_normal((3, 20))[labels] + rng.standard_normal((N, 20))).astype("f4")
    )
    np.save(folder / "labels.npy", labels)
    np.save(folder / "ids.npy", rng.permutation(N) * 7)
    np.save(folder / "queries.npy", rng.standard_normal((9, 20)).astype("f4"))
    return folder


def data(shop: Path) -> str:
    return f"features:{shop / 'x.npy'}"


def arguments(shop: Path) -> dict[str, str]:
    return {"labels": str(shop / "labels.npy"), "ids": str(shop / "ids.npy")}


def hashes(folder: Path) -> dict[str, str]:
    """Of all files, hidden ones too: nothing unfinished is left."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def encoded(shop: Path, out: Path, ray: str | None) -> list[Path]:
    return encode_shards(
        shop / "model",
        data(shop),
        out,
        ray=ray,
        data_args=arguments(shop),
        shard_items=SHARD,
        batch_size=BATCH,
    )


@pytest.fixture(scope="module")
def codes(shop: Path) -> list[Path]:
    """The shards, encoded here."""
    return encoded(shop, shop / "codes", None)


def test_the_shards_hold_the_rows_of_the_plain_command(shop: Path, codes: list[Path]) -> None:
    from gpq_faiss.data.open import open_data

    plain = encode(
        shop / "model",
        open_data(data(shop), **arguments(shop)),
        shop / "codes.h5",
        keep_features=False,
        batch_size=BATCH,
    )
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
def test_shards_that_are_built_apart_answer_as_one_index_of_all(
    shop: Path, codes: list[Path], kind: str
) -> None:
    options: dict[str, Any] = {"kind": kind, "memory": "20MB"}
    single = index(shop / "model", codes, shop / f"{kind}.faiss", **options)
    manifest = index_shards(shop / "model", codes[:4], shop / f"{kind}.json", **options)
    assert read_manifest(manifest).ntotal == 4 * SHARD
    index_shards(shop / "model", codes[4:], manifest, add=True, **options)
    found = [
        json.loads(
            done("search", shop / "model", path, shop / "queries.npy", "--format", "json", "--memory", "2MB")
        )
        for path in (single, manifest)
    ]
    assert found[0]["queries"] == found[1]["queries"]
    assert found[0]["queries"][0]["ids"]
    assert json.loads(done("info", manifest, "--format", "json"))["ntotal"] == N
    removed = read_manifest(manifest).shards[0]
    index_shards(shop / "model", [], manifest, remove=[removed.file])
    assert read_manifest(manifest).ntotal == N - removed.ntotal


@contextmanager
def killing(how: str, nodes: Nodes, ready: Callable[[], bool]) -> Iterator[list[int]]:
    """Kill all workers, or a node, once something is ready; yields how many were killed."""
    killed: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            if ready():
                if how == "node":
                    nodes.kill_second()
                    killed.append(1)
                else:
                    for worker in nodes.workers():
                        kill(worker.pid)
                        killed.append(worker.pid)
                if killed:
                    return
            time.sleep(0.01)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield killed
    finally:
        ended.set()
        watching.join()


def test_encoding_outlives_killed_workers(
    nodes: Nodes, shop: Path, codes: list[Path], tmp_path: Path
) -> None:
    with killing("workers", nodes, lambda: any(tmp_path.glob("codes/codes-*.h5"))) as killed:
        made = encoded(shop, tmp_path / "codes", nodes.address)
    assert killed
    assert [path.name for path in made] == [path.name for path in codes]
    assert hashes(tmp_path / "codes") == hashes(shop / "codes")


def test_building_outlives_a_killed_node(nodes: Nodes, shop: Path, codes: list[Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": "ivf"}
    plain = index_shards(shop / "model", codes, tmp_path / "plain.json", **options)
    with killing("node", nodes, lambda: any(tmp_path.glob("spread.shards/shard-*.faiss"))) as killed:
        spread = index_shards(shop / "model", codes, tmp_path / "spread.json", ray=nodes.address, **options)
    assert killed
    assert hashes(tmp_path / "spread.shards") == hashes(tmp_path / "plain.shards")
    one, other = (json.loads(path.read_text().replace("spread.", "plain.")) for path in (spread, plain))
    assert one.pop("checksum") != other.pop("checksum")  # as the files have other names
    assert one == other


def test_a_call_that_is_run_twice_at_a_time_writes_once(
    nodes: Nodes, shop: Path, codes: list[Path], tmp_path: Path
) -> None:
    call = (str(codes[0]), str(shop / "model"), str(tmp_path), ("flat", 20 << 20, True))
    once = run_all(_build_shard, [call], None)
    expected = hashes(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    assert run_all(_build_shard, [call] * 4, nodes.address) == once * 4
    assert hashes(tmp_path) == expected


def test_figures_are_those_of_one_process(nodes: Nodes, shop: Path) -> None:
    from gpq_faiss.data.open import open_data

    dataset = open_data(data(shop), **arguments(shop))
    options: dict[str, Any] = {"compare": ["pq"], "ks": (1, 10, 100)}
    plain = evaluate(shop / "model", dataset, **options)
    spread = evaluate(shop / "model", dataset, ray=nodes.address, **options)
    assert spread.to_dict() == plain.to_dict()
    np.testing.assert_array_equal(spread.ranking.ap, plain.ranking.ap)
    np.testing.assert_array_equal(spread.ranking.pr_precision, plain.ranking.pr_precision)


def test_a_worker_loads_the_model_once(
    nodes: Nodes, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, tasks = tmp_path / "loads", tmp_path / "tasks"

    def counted(*call: Any) -> int:
        import os

        from gpq_faiss.encoder import Encoder
        from gpq_faiss.stages.encode import _encode_shard

        load = Encoder.load

        def noted(*args: Any, **options: Any) -> Encoder:
            with loads.open("a") as file:
                file.write(f"{os.getpid()}\n")
            return load(*args, **options)

        Encoder.load = noted  # type: ignore[method-assign]
        try:
            with tasks.open("a") as file:
                file.write(f"{os.getpid()}\n")
            return _encode_shard(*call)
        finally:
            Encoder.load = load  # type: ignore[method-assign]

    monkeypatch.setattr(stage, "_encode_shard", counted)
    encode_shards(
        shop / "model",
        data(shop),
        tmp_path / "codes",
        ray=nodes.address,
        shard_items=500,
        batch_size=BATCH,
        workers=1,
    )
    worked = tasks.read_text().split()
    assert len(worked) == 2 * N // SHARD
    assert len(set(worked)) < len(worked)
    assert sorted(loads.read_text().split()) == sorted(set(worked))


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("auto", 0), ("cuda", 1), ("cuda:1", 1)])
def test_a_task_on_a_gpu_asks_for_one(
    nodes: Nodes, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, gpus: int
) -> None:
    asked = []

    def run(function: Any, calls: list[Any], address: str, **options: Any) -> list[int]:
        asked.append((options["gpus"], calls[0][0][1]))
        return [stop - start for *_, start, stop in calls]

    monkeypatch.setattr(stage, "run_all", run)
    encode_shards(shop / "model", data(shop), tmp_path / "codes", ray=nodes.address, device=device)
    assert asked == [(gpus, "cuda" if gpus else "cpu")]


def test_a_worker_with_a_gpu_is_kept_for_the_next_task(nodes: Nodes) -> None:
    def pid() -> tuple[int, bool]:
        import os

        return os.getpid(), bool(os.environ.get("CUDA_VISIBLE_DEVICES"))

    node = nodes.cluster.add_node(
        num_cpus=1, num_gpus=1, object_store_memory=80 << 20
    )  # Ray takes our word for it
    try:
        found = run_all(pid, [()] * 4, nodes.address, gpus=1, workers=1)
    finally:
        nodes.cluster.remove_node(node)
    assert len(set(found)) == 1
    assert found[0][1]


def test_a_model_or_data_that_are_replaced_are_read_again(shop: Path, tmp_path: Path) -> None:
    def shards(name: str) -> list[Path]:
        return encode_shards(tmp_path / "model", f"features:{tmp_path / 'x.npy'}", tmp_path / name)

    def codes(paths: list[Path]) -> Any:
        with RowReader(paths[0]) as reader:
            return reader.header.model_fingerprint, reader.block(0, reader.ntotal).tolist()

    x = np.load(shop / "x.npy")[:500]
    np.save(tmp_path / "x.npy", x)
    shutil.copytree(shop / "model", tmp_path / "model")
    first = codes(shards("first"))
    shutil.rmtree(tmp_path / "model")
    make_model(tmp_path / "model", seed=5)
    second = codes(shards("second"))
    assert second[0] != first[0]
    assert second[0] == Encoder.load(tmp_path / "model").fingerprint
    np.save(tmp_path / "x.npy", x[::-1])
    assert codes(shards("third"))[1] == second[1][::-1]


def test_the_commands_run_on_a_cluster(nodes: Nodes, shop: Path, tmp_path: Path) -> None:
    model, address = shop / "model", nodes.address
    out = done(
        "encode", model, data(shop), "--ray", f"{address},shard_items=3000", "--out", tmp_path / "codes"
    )
    assert "2 shards" in out  # of whole batches
    shards = sorted((tmp_path / "codes").glob("*.h5"))
    manifest = tmp_path / "m.json"
    done("index", model, *shards, "--ray", address, "--out", manifest)
    search = ("search", model, manifest, shop / "queries.npy", "--format", "json")
    there = json.loads(done(*search, "--ray", f"{address},workers=2"))
    here = json.loads(done(*search))
    assert there["queries"] == here["queries"]
    assert "workers of a cluster" in there["description"]
    figures = ("evaluate", model, data(shop), "--labels", shop / "labels.npy", "--format", "json")
    assert json.loads(done(*figures, "--ray", address)) == json.loads(done(*figures))
    lost = read_manifest(manifest).shards[0].file
    (tmp_path / lost).unlink()
    assert lost in refused(*search, "--ray", address)
    assert lost in refused("info", manifest)
    assert "--ray" in refused(*search, "--ray", ",workers=2", code=2)
    assert "manifest" in refused("search", model, shards[0], shop / "queries.npy", "--ray", address)


def test_results_come_in_order_and_an_error_is_the_one_of_the_call(nodes: Nodes) -> None:
    def square(n: int) -> int:
        if n == 3:
            raise DataError("three cannot be squared: take another")
        return n * n

    calls = [(n,) for n in (5, 1, 4, 2)]
    assert run_all(square, calls, nodes.address, workers=2) == run_all(square, calls, None) == [25, 1, 16, 4]
    with pytest.raises(DataError, match=r"^three cannot be squared: take another$"):
        run_all(square, [(n,) for n in range(6)], nodes.address)


def test_a_missing_package_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from gpq_faiss.cluster import connect

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'gpq-faiss\[ray\]'"):
        connect.require_ray()


def test_the_service_answers_from_the_shards_and_takes_new_ones(
    nodes: Nodes, shop: Path, codes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from gpq_faiss.indexes.opening import open_index
    from gpq_faiss.serve import service as module
    from gpq_faiss.serve.app import create_app
    from gpq_faiss.serve.guard import Settings
    from gpq_faiss.serve.live import LiveIndex
    from gpq_faiss.serve.service import Service

    manifest = index_shards(shop / "model", codes[:4], tmp_path / "m.json")
    encoder = Encoder.load(shop / "model")
    live = LiveIndex(manifest, encoder.model.codebooks, ray=nodes.address)
    monkeypatch.setattr(module, "WATCH", 3600.0)
    service = Service(encoder, live)
    queries = np.load(shop / "queries.npy")
    settings = Settings(token="a-token-of-this-test", rate=0)  # noqa: S106

    def ask(client: Any) -> tuple[list[int], list[float]]:
        answer = client.post("/search", json={"features": queries[0].tolist(), "k": 7})
        assert answer.status_code == 200, answer.text
        results = answer.json()["results"]
        assert all(row["labels"][0] in ("0", "1", "2") for row in results)
        return [int(row["id"]) for row in results], [row["score"] for row in results]

    def expected() -> tuple[list[int], list[float]]:
        with open_index(manifest) as index:
            D, found = index.search(encoder.embed(queries[:1], queries=True)[0], 7)
        return found[0].tolist(), D[0].tolist()

    with TestClient(create_app(service, settings), base_url="http://127.0.0.1") as client:
        assert ask(client) == expected()
        item = client.post("/search", json={"id": ask(client)[0][0], "k": 1})
        assert item.status_code == 200, item.text
        assert not live.stale
        index_shards(shop / "model", codes[4:], manifest, add=True)
        assert live.stale
        assert ask(client)[0]  # the old ones, meanwhile
        live.maintain()
        assert not live.stale
        assert ask(client) == expected()
        nodes.kill_second()
        assert ask(client) == expected()
        nodes.two()
        assert live.stale  # a node left, another joined
        live.maintain()
        assert ask(client) == expected()
