"""WebDataset shards at URLs, from a server that the test starts, are read by ``datasets``."""

import functools
import http.server
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from image_files import png, refused, save, shard

import gpq_faiss as gpq
from gpq_faiss.data.images import decode_image


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder and its URL."""
    monkeypatch.setenv("GPQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    root = tmp_path / "site"
    root.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield SimpleNamespace(root=root, url=f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()


def test_a_shard_at_a_url(site):
    members = [{f"{k}.png": png(k), f"{k}.cls": str(k).encode()} for k in range(2)]
    shard(site.root / "s.tar", members[0] | members[1])
    data = gpq.open_data(f"webdataset:{site.url}/s.tar?token=secret")
    assert data.name == f"webdataset:{site.url}/s.tar"
    assert (data.texts["name"].tolist(), data.labels.class_names) == (["0", "1"], ("0", "1"))
    np.testing.assert_array_equal(data.read(slice(0, 1))[0], decode_image(png(0)))


def test_what_cannot_be_read_at_a_url_is_one_line_without_secrets(site):
    save(site.root / "text.tar", "no archive " * 200)
    for name in ("text.tar", "none.tar?token=secret"):
        message = refused(f"webdataset:{site.url}/{name}", "tar cannot be read by datasets")
        assert "secret" not in message
