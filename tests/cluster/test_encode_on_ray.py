"""Encoding on a Ray cluster of this machine gives the file of the plain command, whatever is
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
from model_factory import make_model
from PIL import Image

from gpq_faiss import RowReader, encode, encode_on_ray, open_data
from gpq_faiss.cluster.encode_on_ray import _Worker, connected
from gpq_faiss.errors import DataError, OutputExistsError, UsageError
from gpq_faiss.store.rows import RowWriter

pytest.importorskip("ray", reason="ray is not installed: pip install 'gpq-faiss[ray]'")

N, BATCH = 3000, 25


@pytest.fixture(scope="module")
def ray():
    with connected("local") as module:
        yield module
    module.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, labelled data with ids, and the codes of the plain command."""
    folder = tmp_path_factory.mktemp("cluster")
    rng = np.random.default_rng(0)
    make_model(folder / "model")
    np.save(folder / "x.npy", rng.standard_normal((N, 20)).astype("f4"))
    np.save(folder / "labels.npy", rng.integers(0, 3, N))
    np.save(folder / "ids.npy", rng.permutation(N) * 7)
    plain(folder, folder / "plain.h5")
    return folder


def labelled(folder):
    """Data and how they are read, as arguments."""
    files = {"labels": str(folder / "labels.npy"), "ids": str(folder / "ids.npy")}
    return f"features:{folder / 'x.npy'}", files


def plain(folder, out):
    data, files = labelled(folder)
    opened = open_data(data, **files)
    return encode(folder / "model", opened, out, keep_features=False, batch_size=BATCH)


def on_ray(folder, out, **options):
    data, files = labelled(folder)
    return encode_on_ray(folder / "model", data, out, batch_size=BATCH, **files, **options)


def kill_busy_worker():
    """Kill the first worker that is seen at work."""
    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                title = process.cmdline()[0]
                if title.startswith("ray::MapWorker") and "submit" in title:
                    process.kill()
                    return
        time.sleep(0.01)


def test_the_file_is_that_of_the_plain_command_although_a_worker_is_killed(ray, folder, tmp_path):
    killer = threading.Thread(target=kill_busy_worker, daemon=True)
    killer.start()
    path = on_ray(folder, tmp_path / "codes.h5")
    killer.join(timeout=0)
    assert not killer.is_alive()
    assert path.read_bytes() == (folder / "plain.h5").read_bytes()
    with pytest.raises(OutputExistsError, match="exists already"):
        on_ray(folder, path)


def interrupt(monkeypatch, method, after):
    """Let a call of a method of the writer end like Ctrl-C, after so many calls."""
    original, calls = getattr(RowWriter, method), []

    def interrupted(self, *args, **kwargs):
        calls.append(None)
        if len(calls) > after:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(RowWriter, method, interrupted)


@pytest.mark.parametrize(
    ("method", "after", "rows"),
    [
        ("append", 40, "1,000"),
        ("finish", 0, "3,000"),
    ],
)
def test_an_interrupted_run_is_continued_on_a_cluster(
    ray, folder, tmp_path, monkeypatch, caplog, method, after, rows
):
    out = tmp_path / "codes.h5"
    with monkeypatch.context() as patch:
        interrupt(patch, method, after)
        with pytest.raises(KeyboardInterrupt):
            plain(folder, out)
    assert not out.exists()
    with caplog.at_level("INFO"):
        on_ray(folder, out)
    assert f"resuming after row {rows}" in caplog.text
    assert out.read_bytes() == (folder / "plain.h5").read_bytes()


def test_broken_images_are_named_and_more_than_the_limit_are_an_error(ray, tmp_path, caplog):
    make_model(tmp_path / "model", "images")
    rng = np.random.default_rng(0)
    for i in range(8):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(tmp_path / f"{i}.png")
    (tmp_path / "5.png").write_bytes(b"no image")
    encode_tmp = partial(encode_on_ray, tmp_path / "model", f"folder:{tmp_path}", batch_size=2)
    with RowReader(encode_tmp(tmp_path / "codes.h5", max_bad=0.5)) as reader:
        assert reader.texts()["name"].tolist() == [f"{i}.png" for i in range(8) if i != 5]
    assert "1 of 8 images cannot be read" in caplog.text
    assert "5.png: not an image" in caplog.text
    with pytest.raises(
        DataError, match=r"5\.png: not an image.* above the limit of 10 %"
    ) as raised:
        encode_tmp(tmp_path / "more.h5", max_bad=0.1)
    assert "\n" not in str(raised.value)


def test_a_node_with_other_data_is_refused(folder):
    worker = _Worker(
        {
            "folder": os.getcwd(),
            "model": (folder / "model", "cpu"),
            "amp": False,
            "opening": partial(open_data, labelled(folder)[0]),
            "fingerprint": "other",
        }
    )
    [batch] = worker({"first": [0], "last": [N - 1]}, BATCH)
    assert "is not the same on all nodes" in batch["error"][0]


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
        on_ray(folder, tmp_path / "codes.h5", device="cuda")
