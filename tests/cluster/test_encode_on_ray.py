"""Encoding on a Ray cluster of this machine gives the rows of the plain command, whatever is
killed.
"""

import contextlib
import os
import threading
import time
from functools import partial

import numpy as np
import psutil
import pytest
from commands import content
from model_factory import make_model

from gpq_faiss import Encoder, RayCluster, RowReader, encode, encode_on_ray, open_data
from gpq_faiss.cluster.encode_on_ray import _ShardEncoder, connected
from gpq_faiss.errors import UsageError

pytest.importorskip("ray", reason="ray is not installed: pip install 'gpq-faiss[ray]'")

N, SHARD, BATCH = 3000, 1000, 250


@pytest.fixture(scope="module")
def ray():
    with connected("local") as module:
        yield module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and labelled data with ids."""
    folder = tmp_path_factory.mktemp("cluster")
    rng = np.random.default_rng(0)
    make_model(folder / "model")
    np.save(folder / "x.npy", rng.standard_normal((N, 20)).astype("f4"))
    np.save(folder / "labels.npy", rng.integers(0, 3, N))
    np.save(folder / "ids.npy", rng.permutation(N) * 7)
    return folder


def opening(folder):
    files = {"labels": str(folder / "labels.npy"), "ids": str(folder / "ids.npy")}
    return partial(open_data, f"features:{folder / 'x.npy'}", **files)


def encoded(folder, out, *, workers=1, **options):
    cluster = RayCluster("local", workers, SHARD)
    return encode_on_ray(
        folder / "model", opening(folder), out, cluster, batch_size=BATCH, **options
    )


def columns(paths):
    """Codes, ids and labels of some files."""
    parts = []
    for path in paths:
        with RowReader(path, kind="codes") as reader:
            parts.append((reader.values, reader.ids, reader.labels))
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


@pytest.fixture(scope="module")
def shards(ray, folder):
    """Files of codes, although a worker was killed after the first."""
    out = folder / "codes"

    def kill_worker():
        while not list(out.glob("codes-*.h5")):
            time.sleep(0.01)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("ray::MapWorker"):
                    killed.append(process.kill())

    killed = []
    thread = threading.Thread(target=kill_worker)
    thread.start()
    paths = encoded(folder, out)
    thread.join()
    assert killed
    return paths


def test_shards_hold_the_rows_of_the_plain_command(folder, shards):
    data = opening(folder)()
    plain = encode(
        folder / "model", data, folder / "codes.h5", keep_features=False, batch_size=BATCH
    )
    assert [path.name for path in shards] == [
        f"codes-{start:012}.h5" for start in range(0, N, SHARD)
    ]
    for column, expected in zip(columns(shards), columns([plain]), strict=True):
        np.testing.assert_array_equal(column, expected)


def test_only_missing_shards_are_encoded_again(folder, shards):
    before = content(folder / "codes")
    times = [path.stat().st_mtime_ns for path in shards]
    shards[1].unlink()
    assert encoded(folder, folder / "codes", workers=2) == shards
    assert content(folder / "codes") == before
    again = [path.stat().st_mtime_ns for path in shards]
    assert [a == b for a, b in zip(times, again, strict=True)] == [True, False, True]


def test_a_node_with_other_data_is_refused(folder, tmp_path):
    encoder = Encoder.load(folder / "model")
    worker = _ShardEncoder(
        folder=os.getcwd(),
        model=(folder / "model", "cpu", False),
        opening=opening(folder),
        fingerprints=(encoder.fingerprint, "other"),
        batch_size=BATCH,
    )
    row = worker({"path": [tmp_path / "codes-0.h5"], "start": [0], "stop": [SHARD]})
    assert "is not the same on all nodes" in row["error"][0]


def test_a_local_cluster_listens_on_the_loopback_only(ray):
    ray.get(ray.remote(lambda: None).remote())
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    addresses = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            addresses |= {c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"}
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_a_gpu_that_no_node_has_is_refused(ray, folder, tmp_path):
    with pytest.raises(UsageError, match="the cluster at local has no GPU: use --device cpu"):
        encoded(folder, tmp_path, device="cuda")
